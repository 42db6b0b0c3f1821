"""Sphinx: the site of ``make docs``. Pages are MyST, the API is read from numpydoc docstrings, the gallery is run."""

import os
import warnings

import mapuot

project = "mapuot"
copyright = "mapuot developers"
version = release = mapuot.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc", "sphinx_gallery.gen_gallery"]
html_theme = "furo"
html_title = "mapuot"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["gallery/*", "auto/*.ipynb", "auto/*.py", "auto/*.json", "auto/*.md5", "auto/*.zip"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]  # of the function below
default_role = "py:obj"  # `solve` in a docstring is a link
templates_path = ["_templates"]
autosummary_generate = True
autodoc_typehints = "none"  # the docstrings tell, with shapes and units
autodoc_mock_imports = [name for name in ("torch", "jax") if os.environ.get("MAPUOT_DOCS_MOCK", "1") == "1"]
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
}
warnings.filterwarnings("ignore", message=".*FigureCanvasAgg is non-interactive.*")
