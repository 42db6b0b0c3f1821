"""docs/adding.md is true: its additions, made to a copy of the tree in the files that it names, solve right."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "adding.md"
if not PAGE.exists() or not (ROOT / "src_c").exists():
    pytest.skip("no sources beside an installed package", allow_module_level=True)

# a line of the page that says where the block of code below it belongs
WORDS = r"(?:(?!\n\n)[^`])*?"
PLACE = re.compile(
    rf"^`(?P<file>[^`]+)`{WORDS}(?:,\sin `(?P<name>[^`]+)`)?{WORDS},\s"
    rf"(?:{WORDS}(?P<how>before|after|instead of) `(?P<anchor>[^`]+)`|a new file|at the end):\n\n"
    r"(?P<code>(?: {4}.*\n|\n)+)",
    re.M,
)


def additions(title):
    """Return (file, name, how, anchor, code) of each block below a heading of the page."""
    text = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    assert len(PLACE.findall(text)) == len(re.findall(r":\n\n {4}", text.partition("\n`")[2]))  # none is overlooked
    for found in PLACE.finditer(text):
        code = re.sub(r"^ {4}", "", found["code"].strip("\n"), flags=re.M)
        yield found["file"], found["name"], found["how"], found["anchor"], code


def put(text, name, how, anchor, code):
    """Return the text with the code in place: at the end if ``how`` is None, else by the first anchor behind name."""
    if how is None:
        return f"{text.rstrip()}\n\n\n{code}\n" if text else f"{code}\n"
    at = 0
    if name:
        at = re.search(rf"^(?: *def |\w[^\n]*\b){name}\)?\(", text, re.M).start()  # where it is defined
    start = text.index(anchor, at)
    if how == "instead of":
        return text[:start] + code.strip() + text[start + len(anchor) :]
    line = text.rindex("\n", 0, start) + 1 if how == "before" else text.index("\n", start) + 1
    return f"{text[:line]}{code}\n{text[line:]}"


@pytest.fixture
def copy(tmp_path):
    """A copy of the tree; it makes the additions of a heading and returns the names of the files that they touched."""
    left_out = shutil.ignore_patterns("__pycache__", "results", "*.png", "*.gif", "corpus")
    for folder in ("mapuot", "src_c", "src_cuda", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=left_out, symlinks=True)
    for file in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)

    def add(title):
        files = set()
        for file, name, how, anchor, code in additions(title):
            path = tmp_path / file
            text = put(path.read_text() if path.exists() else "", name, how, anchor, code)
            path.write_text(text)
            files.add(file)
        return tmp_path, files

    return add


def run(folder, program):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "tests")])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def build(folder):
    for old in (folder / "mapuot").glob("_core*.so"):
        old.unlink()
    env = {**os.environ, "MAPUOT_ISAS": "scalar", "CFLAGS": "-O0", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


COST = """
import mapuot, numpy as np
from problems import Case, verify
assert "{folder}" in mapuot.__file__
rng = np.random.default_rng(0)
A, B, a, b = rng.random((90, 3)), rng.random((70, 3)), rng.random(90), rng.random(70)
case = Case(A @ B.T, a / a.sum(), 1.3 * b / b.sum(), 0.05, 1.0)
cost = mapuot.LowRank(A, B)
for options in ({{}}, {{"precision": "float64", "tol": 1e-10}}, {{"backend": "reference"}}, {{"method": "map-uot"}}):
    result = mapuot.solve(cost, case.a, case.b, reg=0.05, reg_m=1.0, **options)
    assert result.converged, result
    verify(result, case, options.get("precision", "mixed"))
    held = mapuot.solve(A @ B.T, case.a, case.b, reg=0.05, reg_m=1.0, **options)
    assert np.allclose(result.plan, held.plan, rtol=1e-12, atol=0)
"""


def test_a_cost(copy):
    folder, files = copy("A cost")
    assert files == {"mapuot/problem/low_rank.py", "mapuot/__init__.py"}
    run(folder, COST.format(folder=folder))


PENALTY = """
import mapuot, numpy as np
from problems import clouds, optimum, verify, with_forbidden, with_zeros
assert "{folder}" in mapuot.__file__
for case in (
    clouds(19, 23, reg=0.05, reg_m=0.3, ratio=1.5, penalty="huber"),
    clouds(23, 17, reg=0.01, reg_m=(0.2, 0.1), ratio=3.0, penalty="huber"),
    clouds(20, 20, reg=0.1, reg_m=(0.4, 1.0), ratio=0.4, penalty=("huber", "kl")),
    with_zeros(clouds(20, 20, reg=0.1, reg_m=(1.0, 0.3), ratio=0.4, penalty=("kl", "huber"))),
    with_forbidden(clouds(20, 25, reg=0.05, reg_m=0.5, ratio=1.2, penalty="huber")),
):
    best = optimum(case)
    assert best.gap < 1e-14 * best.scale
    for options in {options}:
        for tol in (1e-6, 1e-10):
            result = case.solve(tol=tol, precision="float64", **options)
            assert result.converged, (case.reg_m, options, result)
            verify(result, case)
assert "Huber" in result._repr_html_()
"""


@pytest.mark.parametrize("built", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["numpy", "C"])
def test_a_penalty(copy, built):
    folder, _ = copy("A penalty")
    if built:
        build(folder)
    backends = [{"backend": "reference"}, *([{}, {"threads": 2}] if built else [])]
    run(folder, PENALTY.format(folder=folder, options=backends))


METRIC = """
import mapuot, numpy as np
from problems import Case, verify
from scipy.spatial.distance import cdist
assert "{folder}" in mapuot.__file__
rng = np.random.default_rng(0)
for d in (1, 2, 5, 40):
    x, y, a, b = rng.normal(size=(70, d)), rng.normal(size=(90, d)), rng.random(70), rng.random(90)
    case = Case(2 * cdist(x, y, "chebyshev"), a / a.sum(), 1.3 * b / b.sum(), 0.1, 1.0)
    cloud = mapuot.PointCloud(x, y, "chebyshev", scale=2.0)
    assert np.array_equal(np.asarray(cloud), case.M)
    for options in ({{}}, {{"tol": 1e-10}}, {{"threads": 2}}, {{"backend": "reference"}}):
        result = mapuot.solve(cloud, case.a, case.b, reg=0.1, reg_m=1.0, **options)
        assert result.converged, (d, options, result)
        verify(result, case, "mixed")
"""


@pytest.mark.nightly
def test_a_metric(copy):
    folder, files = copy("A metric")
    assert len(files) == 4
    build(folder)
    run(folder, METRIC.format(folder=folder))
