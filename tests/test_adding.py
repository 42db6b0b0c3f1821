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
    rf"(?:{WORDS}(?P<how>before|after|instead of) `(?P<anchor>[^`]+)`|(?P<new>a new file)|at the end):\n\n"
    r"(?P<code>(?: {4}.*\n|\n)+)",
    re.M,
)


def additions(title):
    """Return (file, name, how, anchor, code) of each block below a heading of the page."""
    text = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    assert len(PLACE.findall(text)) == len(re.findall(r":\n\n {4}", text.partition("\n`")[2]))  # none is overlooked
    for found in PLACE.finditer(text):
        code = re.sub(r"^ {4}", "", found["code"].strip("\n"), flags=re.M)
        yield found["file"], found["name"], found["how"] or found["new"], found["anchor"], code


def put(text, name, how, anchor, code):
    """Return the text with the code in place: at the end of a file, or by the first anchor behind name."""
    if how in (None, "a new file"):
        if text:
            return f"{text.rstrip()}\n\n\n{code}\n"
        return f"{code}\n"
    at = 0
    if name:
        at = re.search(rf"^(?: *def |\w[^\n]*\b){name}\)?\(", text, re.M).start()  # where it is defined
    start = text.index(anchor, at)
    if how == "instead of":
        return text[:start] + code.strip() + text[start + len(anchor) :]
    if how == "before":
        line = text.rindex("\n", 0, start) + 1
    else:
        line = text.index("\n", start) + 1
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
            assert path.exists() == (how != "a new file"), file
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
cost = mapuot.ThinProduct(A, B)
for options in ({{}}, {{"precision": "float64", "tol": 1e-10}}, {{"backend": "reference"}}, {{"method": "map-uot"}}):
    result = mapuot.solve(cost, case.a, case.b, reg=0.05, reg_m=1.0, **options)
    assert result.converged, result
    verify(result, case, options.get("precision", "mixed"))
    held = mapuot.solve(A @ B.T, case.a, case.b, reg=0.05, reg_m=1.0, **options)
    assert np.allclose(result.plan, held.plan, rtol=1e-12, atol=0)
"""


def test_a_cost(copy):
    folder, files = copy("A cost")
    assert files == {"mapuot/problem/thin_product.py", "mapuot/__init__.py"}
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
import json, pathlib, subprocess, sys, warnings
import mapuot, numpy as np
from problems import Case, verify
from scipy.spatial.distance import cdist
assert "{folder}" in mapuot.__file__
warnings.simplefilter("ignore", mapuot.ScalingWarning)
rng = np.random.default_rng(0)
MATRICES = {{
    "minkowski": lambda x, y, w: cdist(x, y, "minkowski", p=3, w=w),
    "pseudohuber": lambda x, y, w: np.sqrt(1 + cdist(x, y, "euclidean", w=w) ** 2) - 1,
    "outer": lambda x, y, w: (x * w) @ y.T,
}}
for metric, matrix in MATRICES.items():
    for d in (1, 3, 40):
        x, y, w = rng.normal(size=(60, d)), rng.normal(size=(70, d)), rng.random(d) + .2
        a, b = rng.random(60), rng.random(70)
        case = Case(2 * matrix(x, y, w), a / a.sum(), 1.3 * b / b.sum(), 0.1, 1.0)
        known = dict(reg=0.1, reg_m=1.0)
        cloud = mapuot.PointCloud(x, y, metric, 2.0, w)
        np.testing.assert_allclose(np.asarray(cloud), case.M, rtol=1e-13, atol=1e-13)
        held = mapuot.solve(case.M, case.a, case.b, tol=1e-10, **known)
        for options in ({{}}, {{"tol": 1e-10}}, {{"threads": 2}}, {{"backend": "reference"}}):
            for form in ("auto", None):
                one = mapuot.PointCloud(x, y, metric, 2.0, w, form=form)
                result = mapuot.solve(one, case.a, case.b, **known, **options)
                assert result.converged, (metric, d, options, result)
                verify(result, case, "mixed")
        try:
            mapuot.solve(mapuot.PointCloud(x, y, metric, truncate=40.0), **known)
        except NotImplementedError as error:
            assert metric in str(error), error
        else:
            raise AssertionError("pairs are skipped without a bound")
        sample = mapuot.solve_sample(x, y, case.a, case.b, metric=metric, scale=2.0, weights=w, tol=1e-10, **known)
        many = mapuot.PointCloud([x, x[:30]], [y, y[:50]], metric, 2.0, w) if metric != "outer" else None
        if many is not None:
            batch = mapuot.solve_batch(many, [case.a, case.a[:30]], [case.b, case.b[:50]], tol=1e-10, **known)
            assert batch.converged.all() and np.isclose(batch[0].objective, held.objective, rtol=1e-9)
        *_, path = mapuot.path(cloud, case.a, case.b, regs=[0.2, 0.1], reg_ms=1.0, tol=1e-10)
        for found in (sample, path):
            assert found.converged and np.isclose(found.objective, held.objective, rtol=1e-9)
            assert abs(found.plan - held.plan).sum() < 1e-8 * held.mass
        labels = rng.integers(0, 2, 60), rng.integers(0, 2, 70)
        if metric != "outer":
            apart = mapuot.PointCloud(x, y, metric, 2.0, w, labels=labels, across=np.inf)
            forbidden = np.where(labels[0][:, None] != labels[1], np.inf, case.M)
            want = mapuot.solve(forbidden, case.a, case.b, tol=1e-10, **known)
            found = mapuot.solve(apart, case.a, case.b, tol=1e-10, **known)
            assert abs(found.plan - want.plan).sum() < 1e-8 * want.mass
            near = mapuot.knn_cost(x, y, 5, metric=metric, scale=2.0, weights=w, symmetric=False)
            assert np.allclose(np.sort(near.toarray(), 1)[:, -5:], np.sort(case.M, 1)[:, :5], rtol=1e-12)
        gradient, h = sample.gradient(), 1e-5
        for name, points in (("x", x), ("y", y)):
            step = rng.normal(size=points.shape)
            values = []
            for sign in (1, -1):
                moved = {{"x": x, "y": y, name: points + sign * h * step}}
                costs = 2 * matrix(moved["x"], moved["y"], w)
                values.append(mapuot.solve(costs, case.a, case.b, tol=1e-11, **known).objective)
            slope = (getattr(gradient, name) * step).sum()
            assert np.isclose(slope, (values[0] - values[1]) / (2 * h), rtol=1e-5, atol=1e-6), name
    refused = {{"pseudohuber": ["interpolate", "hvp"], "outer": ["interpolate", "hvp"], "minkowski": ["hvp"]}}
    for name in refused[metric]:
        try:
            sample.interpolate(0.5) if name == "interpolate" else sample.hvp(np.zeros_like(x))
        except (NotImplementedError, TypeError, ValueError) as error:
            assert metric in str(error), error
        else:
            raise AssertionError((metric, name))
x, y = rng.normal(size=(40, 2)), rng.normal(size=(30, 2)) + 1
np.save("x.npy", x), np.save("y.npy", y)
subprocess.run([sys.executable, "-m", "mapuot", "solve", "--points", "x.npy", "y.npy", "--metric", "minkowski",
                "--reg", ".1", "--reg-m", "1", "-o", "out.npz"], capture_output=True, check=True)
want = mapuot.solve(cdist(x, y, "minkowski", p=3), reg=0.1, reg_m=1.0)
assert np.isclose(mapuot.load("out.npz").objective, want.objective, rtol=1e-5)
from mapuot import da
moved = da.UnbalancedSinkhornTransport(reg_e=0.1, reg_m=1.0, metric="minkowski").fit(Xs=x, Xt=y)
assert abs(moved.coupling_ - want.plan).sum() < 1e-5
pair = mapuot.pairwise([x, y], reg=0.1, reg_m=1.0, metric="minkowski")
pairs = (x, y), (x, x), (y, y)
values = [mapuot.solve(cdist(*both, "minkowski", p=3), reg=0.1, reg_m=1.0).objective for both in pairs]
assert np.isclose(pair[0, 1], values[0] - 0.5 * values[1] - 0.5 * values[2], atol=1e-5)
try:
    import torch
except ImportError:
    torch = None
if torch:
    from mapuot.torch import sample_loss
    point = torch.tensor(x, requires_grad=True)
    loss = sample_loss(point, torch.tensor(y), reg=0.1, reg_m=1.0, metric="minkowski")
    loss.backward()
    assert np.isclose(loss.item(), want.objective, rtol=1e-5)
    found = mapuot.solve_sample(x, y, reg=0.1, reg_m=1.0, metric="minkowski").gradient().x
    assert np.allclose(point.grad.numpy(), found, atol=1e-6)
"""


UNKNOWN = """
import mapuot, numpy as np
rng = np.random.default_rng(0)
x, y = rng.normal(size=(30, 2)), rng.normal(size=(40, 2))
for options in ({}, {"form": None}, {"weights": [1.0, 2.0]}):
    try:
        result = mapuot.solve(mapuot.PointCloud(x, y, "minkowski", **options), reg=0.1, reg_m=1.0)
    except ValueError as error:
        assert "finite" in str(error) or "NaN" in str(error), error
    else:
        raise AssertionError((options, result))
"""


@pytest.mark.nightly
def test_metrics_of_each_kind(copy):
    """For a norm, a function of a norm and a product every door gives the matrix's answer, or names the metric."""
    folder, files = copy("A metric")
    assert len(files) == 4
    build(folder)
    run(folder, METRIC.format(folder=folder))


def test_a_metric_that_the_core_lacks_is_refused(copy):
    """A row of METRICS and an enum alone: costs are NaN, and no solve answers."""
    folder, _ = copy("A metric")
    run(folder, UNKNOWN)
