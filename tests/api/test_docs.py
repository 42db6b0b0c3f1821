"""The examples of all docstrings and every Python block of the README run and print the documented output."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import mapuot

ROOT = Path(__file__).parents[2]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NEEDS = {
    "torch": "torch", "jax": "jax", "cli": "click", "__main__": "click", "plot": "matplotlib", "report": "matplotlib",
    "patching": "ot", "groups": "pandas",
}  # fmt: skip


def modules():
    for path in Path(mapuot.__file__).parent.rglob("*.py"):
        if ">>> " in path.read_text(encoding="utf-8"):
            yield "mapuot." + ".".join(path.relative_to(Path(mapuot.__file__).parent).with_suffix("").parts)


@pytest.mark.parametrize("name", sorted(modules()))
def test_examples_of_docstrings(name, tmp_path, monkeypatch):
    needed = NEEDS.get(name.rpartition(".")[2])
    if needed:
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
        runner.run(test)
    assert runner.failures == 0


def documented():
    """Return (module, name) of everything that the pages of the API list."""
    module = ""
    for line in (ROOT / "docs/api/index.rst").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\.\. currentmodule:: (\S+)$|   (\w+)$", line):
            module = found[1] or module
            if found[2]:
                yield module, found[2]


def test_everything_public_is_documented():
    public = {("mapuot", x) for x in mapuot.__all__ if x not in ("__version__", *mapuot.DOORS)}
    public -= {("mapuot", x) for x in ("pot", "da", "flow", "wot", "plot")}
    assert not public - set(documented())


@pytest.mark.parametrize(("module", "name"), sorted(documented()))
def test_everything_public_has_an_example_and_a_see_also(module, name):
    if needed := NEEDS.get(module.rpartition(".")[2]):
        pytest.importorskip(needed)
    doc = getattr(importlib.import_module(module), name).__doc__
    assert "Examples\n" in doc
    assert ">>> " in doc
    assert "See Also\n" in doc


PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
OUTPUT = re.compile(r"\s*^```text\n(.*?)^```$", re.M | re.S)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MOST_COLUMNS = 88  # of code on the site, in a window of 1280 pixels
VARIES = re.compile(r"after \d+ passes, error_bound [^,]*")  # by instruction set


def blocks():
    """Return (code, expected output) of every Python block; a text block right after it is the output."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for k, block in enumerate(PYTHON.finditer(text), 1):
            output = OUTPUT.match(text, block.end())
            yield pytest.param(block[1], output[1] if output else "", id=f"{page.relative_to(ROOT)}:{k}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("code", "printed"), list(blocks()))
def test_blocks_of_pages(code, printed, tmp_path, monkeypatch, capsys):
    """Each block runs alone, in its own folder, and prints the output below it."""
    for name in set(re.findall(r"^(?:import|from) (\w+)", code, re.M)) - {"mapuot"}:
        pytest.importorskip(name)
    if "mapuot.plot" in code or "--report" in code:
        pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})
    shown = capsys.readouterr().out
    wanted, got = (VARIES.sub("after N passes, error_bound E", text) for text in (printed, shown))
    assert doctest.OutputChecker().check_output(wanted, got, FLAGS) or wanted == got, shown


def test_the_picture_of_speed_has_the_recorded_solves_only(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    picture = pytest.importorskip("bench.picture", reason="no benchmark beside an installed package")
    lines = picture.lines_of(ROOT / "bench/results/solve.json")
    assert len(lines) == 4
    assert lines["mapuot"][0] == [100, 500, 2000, 5000]
    assert lines["OTT-JAX"][0] == [100, 500]  # not measured beyond
    assert all(seconds > 0 for _, line in lines.values() for seconds in line)


def test_code_of_the_site_fits_into_its_column():
    pages = [*(ROOT / "docs").glob("**/*.md")]
    wide = [line for page in pages for block in PYTHON.findall(page.read_text(encoding="utf-8"))
            for line in block.splitlines() if len(line) > MOST_COLUMNS]  # fmt: skip
    wide += [line for page in (ROOT / "docs/gallery").glob("**/*.py")
             for line in page.read_text(encoding="utf-8").splitlines() if len(line) > MOST_COLUMNS]  # fmt: skip
    assert not wide


def test_constructors_of_all_answers_are_hidden():
    """Users never make an answer: docs/conf.py names all classes below the heading "Answers", and a Coupling."""
    index = (ROOT / "docs/api/index.rst").read_text(encoding="utf-8")
    listed = re.findall(r"^   (\w+)$", index.partition("\nAnswers\n")[2].partition("\nProducts\n")[0], re.M)
    conf = (ROOT / "docs/conf.py").read_text(encoding="utf-8").partition("ANSWERS = ")[2].partition("}\n\n")[0]
    assert len(listed) > 5
    assert {*listed, "wot.Coupling"} == set(re.findall(r'"([\w.]+)"', conf))


def test_pages_of_plot_have_the_pictures_of_the_gallery():
    """Each function of mapuot.plot is drawn by the gallery page, in the order that docs/conf.py counts."""
    conf = (ROOT / "docs/conf.py").read_text(encoding="utf-8")
    numbers = {name: int(number) for name, number in re.findall(r'"(\w+)": \((\d+), "', conf)}
    page = (ROOT / "docs/gallery/5_choosing/plot_4_pictures.py").read_text(encoding="utf-8")
    drawn = re.findall(r"^mapuot\.plot\.(\w+)", page, re.M)
    assert numbers == {name: place for place, name in enumerate(drawn, 1)}
    assert set(numbers) == set(mapuot.plot.__all__)


def test_tables_of_the_docs_are_those_of_the_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    readme = pytest.importorskip("bench.readme", reason="no benchmark beside an installed package")
    for marker, (pages, *_) in readme.TABLES.items():
        found = readme.found(marker, readme.RESULTS)
        for page in pages:
            assert f"<!-- {marker} -->\n{found}\n<!-- /{marker} -->" in (ROOT / page).read_text()
