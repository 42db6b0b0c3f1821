"""Sphinx: the site of ``make docs``.

Pages are MyST, the API is read from numpydoc docstrings, the gallery is run.
"""

import os
import warnings

import mapuot

project = "mapuot"
copyright = "mapuot developers"
version = release = mapuot.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "sphinx_gallery.gen_gallery",
]
html_theme = "furo"
html_title = f"mapuot {version}"
html_favicon = "_static/favicon.svg"
html_theme_options = {
    "source_repository": "https://github.com/mapuot/mapuot/",
    "source_branch": "main",
    "source_directory": "docs/",
    "footer_icons": [
        {
            "name": "Source",
            "url": "https://github.com/mapuot/mapuot",
            "html": "source on GitHub",
            "class": "",
        }
    ],
}
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = [
    "gallery/**",
    "auto/**/*.ipynb",
    "auto/**/*.py",
    "auto/**/*.json",
    "auto/**/*.md5",
    "auto/**/*.zip",
    "auto/backreferences/*",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = [
    "config.cache",  # of the functions below
    "ref.python",  # a name that several answers have
]
default_role = "py:obj"  # `solve` in a docstring is a link
templates_path = ["_templates"]
autosummary_generate = True
autodoc_typehints = "none"  # the docstrings tell, with shapes and units
autodoc_mock_imports = ["moscot", "ott"]
if os.environ.get("MAPUOT_DOCS_MOCK", "1") == "1":
    autodoc_mock_imports += ["torch", "jax"]
numpydoc_show_class_members = False
numpydoc_xref_param_type = False


def readable(gallery: dict[str, object], page: str) -> None:
    """Draw with letters that can be read where a picture is as wide as a phone."""
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 13, "axes.titlesize": 14, "lines.markersize": 7})


sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "min_reported_time": 1,
    "remove_config_comments": True,
    "show_memory": False,
    "capture_repr": (),
    "thumbnail_size": (480, 340),
    "reset_modules": ("matplotlib", "seaborn", readable),
    "write_computation_times": False,
    "backreferences_dir": "auto/backreferences",  # examples on each function's page
    "doc_module": ("mapuot",),
    "prefer_full_module": {r"mapuot"},
}
warnings.filterwarnings("ignore", message=".*FigureCanvasAgg is non-interactive.*")

# The page of each function of mapuot.plot has its picture from the gallery.
PICTURES = "/auto/5_choosing/images/sphx_glr_plot_4_pictures_{:03d}.png"
DRAWN = {
    "arrows": (1, "Two clouds of points, with arrows from the first to the second"),
    "links": (2, "Two clouds of points, with lines between pairs that share mass"),
    "masses": (3, "Points coloured by the share of their mass that moves"),
    "plan": (4, "A plan as an image, with its marginals and a colour bar"),
    "transitions": (5, "A table of shares from each type to each type"),
    "convergence": (6, "Two falling lines: the bound on the error, and the gap"),
    "path": (7, "Mass, cost and passes against reg, in three panels"),
    "image": (8, "Given and received mass, mass left behind, displacement"),
}
# Answers are returned and never made by users: their constructors are not shown.
ANSWERS = {
    f"mapuot.{name}"
    for name in (
        "Result",
        "Certificate",
        "BatchResult",
        "MultiResult",
        "BarycenterResult",
        "GromovResult",
        "GromovPairs",
        "Stats",
        "Tuned",
        "wot.Coupling",
    )
}


def add_picture(app, what, name, obj, options, lines):
    """Put the picture of a function of mapuot.plot above its parameters."""
    function = name.removeprefix("mapuot.plot.")
    if function in DRAWN and function != name:
        number, text = DRAWN[function]
        place = next(k for k, line in enumerate(lines) if line.startswith(":Param"))
        picture = [f".. image:: {PICTURES.format(number)}", f"   :alt: {text}", ""]
        lines[place:place] = picture


def hide_constructor(app, what, name, obj, options, signature, returned):
    return ("", returned) if name in ANSWERS else None


def setup(app):
    app.connect(
        "autodoc-process-docstring", add_picture, priority=900
    )  # after numpydoc
    app.connect("autodoc-process-signature", hide_constructor)
