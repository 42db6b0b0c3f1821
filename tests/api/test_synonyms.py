"""Words of other libraries: every word of the tables leads to ours, in calls, attributes, the package and the docs."""

import copy
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import mapuot
from mapuot import cli, synonyms

M = np.random.default_rng(0).random((5, 6))
POINTS = np.random.default_rng(1).random((6, 2))
RESULT = mapuot.solve(M, reg=0.1, reg_m=1.0)
RESULT_OF_POINTS = mapuot.solve_sample(POINTS, POINTS, reg=0.1, reg_m=1.0)
BATCH = mapuot.solve_batch(M, np.ones((2, 5)), reg=0.1, reg_m=1.0)
OWN = set(inspect.signature(mapuot.solve).parameters)
WORDS = [(word, group) for group in synonyms.ARGUMENTS for word in group.theirs]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming_from" / "index.md"


def mapuot_table():
    """The table of the page, as the tables of the module make it."""
    rows = ["| there | here |", "| --- | --- |"]
    for title, groups in (
        ("argument", synonyms.ARGUMENTS), ("option", synonyms.OPTIONS), ("attribute", synonyms.ATTRIBUTES),
        ("value", synonyms.VALUES),
    ):  # fmt: skip
        for group in groups:
            theirs, ours = (", ".join(f"`{word}`" for word in words) for words in (group.theirs, group.ours))
            rows.append(f"| {theirs} | {title} {ours} |")
    rows += [f"| `{name}` | {place} |" for name, place in synonyms.PLACES.items()]
    return "\n".join(rows)


@pytest.mark.parametrize(("word", "group"), WORDS, ids=[word for word, _ in WORDS])
def test_an_unknown_argument_names_ours(word, group):
    assert word not in OWN  # or a call that hands options on would refuse it
    meant = [name for name in group.ours if name in OWN]
    with pytest.raises(TypeError) as caught:
        mapuot.solve(M, reg_m=1.0, **{word: 0.1})
    assert str(caught.value).startswith(f"solve() has no {word}: ")
    for name in meant[:1]:
        assert f"did you mean {name}" in str(caught.value)


def test_every_door_tells_of_arguments():
    tensors = {"M": M, "reg_m": 1.0, "eps": 0.1}
    calls = [
        lambda: mapuot.solve_batch(**tensors), lambda: mapuot.solve_sample(POINTS, POINTS, eps=0.1, reg_m=1.0),
        lambda: mapuot.path(M, eps=[0.1], reg_ms=1.0), lambda: mapuot.tune(M, eps=0.1),
        lambda: mapuot.pairwise([POINTS, POINTS], eps=0.1, reg_m=1.0),
        lambda: mapuot.sinkhorn_divergence(M[:5, :5], eps=0.1, reg_m=1.0),
        lambda: mapuot.barycenter(M[:5, :5], M[:5, :5], eps=0.1, reg_m=1.0),
        lambda: mapuot.multimarginal({(0, 1): M}, [None, np.ones(6)], eps=0.1, reg_m=1.0),
        lambda: mapuot.gromov(POINTS, POINTS, eps=0.1, reg_m=1.0),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=r"\(\) has no eps: did you mean reg"):
            call()
    with pytest.raises(TypeError, match=r"PointCloud\(\) has no distance: did you mean metric\?"):
        mapuot.PointCloud(POINTS, distance="l1")
    with pytest.raises(TypeError, match=r"Grid\(\) has no spacng: did you mean spacing\?"):
        mapuot.Grid((3, 3), spacng=1.0)


def test_errors_from_within_and_of_python_stay():
    with pytest.raises(TypeError, match=r"solve\(\) missing required argument: 'reg'"):
        mapuot.solve(M, reg_m=1.0)
    with pytest.raises(TypeError, match="reg must be a positive finite number"):
        mapuot.solve(M, reg="0.1", reg_m=1.0)


def test_methods_of_answers_tell_of_arguments():
    with pytest.raises(TypeError, match=r"Result\.sample\(\) has no random_state: did you mean seed\?"):
        RESULT.sample(3, random_state=1)
    with pytest.raises(TypeError, match=r"Result\.top_k\(\) has no n_neighbors: did you mean k\?"):
        RESULT.top_k(n_neighbors=2)


@pytest.mark.parametrize("answer", [RESULT, BATCH], ids=["Result", "BatchResult"])
def test_an_unknown_attribute_names_ours(answer):
    for group in synonyms.ATTRIBUTES:
        name = group.ours[0]
        for word in group.theirs if hasattr(answer, name) else ():
            assert not hasattr(answer, word)
            with pytest.raises(AttributeError, match=f"has no {word}: did you mean {name}\\?"):
                getattr(answer, word)
    with pytest.raises(TypeError, match=r"its numbers are in attributes, such as result\.plan"):
        np.asarray(answer)
    with pytest.raises(TypeError, match=r"its values are result\.objective and result\.cost"):
        float(answer)
    with pytest.raises(AttributeError, match=r"Result has no plot: mapuot\.plot\.plan\(result\)"):
        answer.plot  # noqa: B018
    for other in (copy.copy(answer), pickle.loads(pickle.dumps(answer))):
        assert np.array_equal(other.log_u, answer.log_u)


def test_a_result_is_no_sequence():
    for call in (lambda: RESULT["plan"], lambda: tuple(RESULT)):
        with pytest.raises(TypeError, match=r"^Result has no items: its parts are attributes, such as result\.plan$"):
            call()


def test_an_error_within_a_property_is_not_hidden(monkeypatch):
    monkeypatch.setattr(mapuot.Result, "broken", property(lambda self: self.problem.no_such_thing), raising=False)
    with pytest.raises(AttributeError, match="no_such_thing"):
        RESULT.broken  # noqa: B018


@pytest.mark.parametrize("name", synonyms.PLACES)
def test_the_package_says_where_things_are(name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}': "):
        getattr(mapuot, name)
    for part in synonyms.PLACES[name].replace("(", " ").replace(",", " ").split():
        if part.startswith(("mapuot.torch", "mapuot.jax", "mapuot.moscot")):
            continue  # extras
        if part.startswith("mapuot."):
            found = mapuot
            for step in part.split(".")[1:]:
                found = getattr(found, step)


@pytest.mark.parametrize(
    ("metric", "told"),
    [("l1", "cityblock?"), ("manhattan", "cityblock?"), ("minkowski", "cityblock or euclidean?"),
     ("l2", "euclidean?"), ("haversine", "cosine? (of unit vectors"), (abs, "as the matrix M"),
     ("precomputed", "give the costs as M to mapuot.solve"), ("jaccard", "cdist(x, y, 'jaccard')")],
)  # fmt: skip
def test_metrics_of_others(metric, told):
    with pytest.raises(ValueError, match="metric must be one of") as caught:
        mapuot.PointCloud(POINTS, metric=metric)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"M": np.ones((2, 5, 6))}, "mapuot.solve_batch takes costs (p, m, n)"),
        ({"M": M, "a": np.ones((2, 5))}, "mapuot.solve_batch takes masses of 2 problems"),
        ({"M": np.ones((64, 64)), "a": np.ones((8, 8))}, "mapuot.Grid((8, 8))"),
        ({"M": np.ones((8, 8)), "a": np.ones((8, 8))}, "between pixels of images by mapuot.Grid(shape)"),
        ({"M": POINTS, "a": POINTS}, "mapuot.PointCloud(x, y)"),
        ({"M": M, "reg_m": "inf"}, "got the text 'inf'"), ({"M": M, "reg_m": None}, "inf (balanced)"),
        ({"M": M, "reg": 0.0}, "unregularised_bounds()"), ({"M": M, "reg": [0.1, 0.2]}, "mapuot.path solves"),
        ({"M": M, "reference": None}, "reference must be 'product', 'uniform' or a matrix, got None"),
        ({"M": np.array([[0.0, "far"], [1.0, 2.0]], object)}, "'far' at index 0, 1 is no number"),
        ({"M": M, "mask": M > 0.5}, "set M to inf there"),
        ({"M": M, "a": np.ones(5), "b": np.ones(6), "reg_m": np.inf}, "divide both by their sums"),
        ({"M": (POINTS, POINTS[:4])}, "mapuot.PointCloud(x, y) has the costs between two clouds"),
        ({"M": M, "penalty": "l1"}, "did you mean tv?"), ({"M": M, "mass": 0.8}, "has no mass: mapuot.tune(M, mass="),
        ({"M": M, "log_domain": True}, "has no log_domain: every solve is safe at a small reg"),
        ({"M": M, "metric": "l1"}, "has no metric: PointCloud and solve_sample take it"),
    ],
)  # fmt: skip
def test_first_guesses_are_answered(arguments, told):
    with pytest.raises((ValueError, TypeError)) as caught:
        mapuot.solve(**{"reg": 0.1, "reg_m": 1.0} | arguments)
    assert told in str(caught.value)


@pytest.mark.parametrize("missing", [-99.0, -999.0, -9999.0])
def test_numbers_for_missing_entries_are_named(missing, backend):
    with pytest.warns(mapuot.ScalingWarning, match=f"M holds costs of {missing:g}, by which files mark missing"):
        mapuot.solve(np.where(M > 0.9, missing, M), reg=5.0, reg_m=10.0, backend=backend)
    with pytest.warns(mapuot.ScalingWarning, match=f"M holds costs of {missing:g}"):
        mapuot.solve_batch(np.where(M > 0.9, missing, M), np.ones((2, 5)) / 5, reg=50.0, reg_m=100.0)


def test_negative_costs_are_not_named_for_their_sign(recwarn):
    assert mapuot.solve(M - 0.5, reg=0.1, reg_m=1.0).converged
    assert mapuot.solve(np.full((3, 3), -99.0), reg=50.0, reg_m=100.0).converged
    assert not recwarn.list


def test_masses_in_another_order_of_labels():
    """Masses are matched by place: labels in another order are refused, and unlike labels are not compared."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(M, index=list("abcde"))
    masses = pandas.Series(np.arange(1.0, 6.0), index=list("abcde"))
    for function in (mapuot.solve, mapuot.tune):
        with pytest.raises(ValueError, match=r"a has the labels of M\.index in another order: pass a\.reindex"):
            function(table, masses[::-1], reg=0.1, reg_m=1.0)
    points = pandas.DataFrame(POINTS, index=list("abcdef"))
    with pytest.raises(ValueError, match=r"b has the labels of y\.index in another order: pass b\.reindex\(y\.index\)"):
        mapuot.solve_sample(points, points, None, pandas.Series(np.ones(6), list("fabcde")), reg=0.1, reg_m=1.0)
    right = mapuot.solve(table, masses, reg=0.1, reg_m=1.0)
    assert right.mass == mapuot.solve(table, masses.reset_index(drop=True), reg=0.1, reg_m=1.0).mass


def test_objects_beside_answers_name_what_is_meant():
    with pytest.raises(AttributeError, match=r"^Tuned has no plan: did you mean result\.plan\?$"):
        mapuot.tune(M, mass=0.9, sharpness=0.5, tol=1e-2).plan  # noqa: B018
    for cost in (mapuot.PointCloud(POINTS, POINTS), mapuot.Grid((2, 3))):
        with pytest.raises(AttributeError, match=r"no attribute 'matrix': numpy\.asarray\(cost\) is its matrix$"):
            cost.matrix  # noqa: B018
        with pytest.raises(AttributeError, match=r"no attribute 'colour'$"):
            cost.colour  # noqa: B018
        assert np.array_equal(np.asarray(copy.copy(cost)), np.asarray(pickle.loads(pickle.dumps(cost))))


def test_first_guesses_with_images():
    image = np.ones((4, 5, 3))
    for call, told in (
        (lambda: mapuot.Grid(48, 64), "a grid of 48 x 64 nodes is Grid((48, 64))"),
        (lambda: mapuot.Grid(image), "such as image.shape[:2], got an array of shape (4, 5, 3)"),
        (lambda: RESULT_OF_POINTS.map(image), "the pixels of an image, as points, are points.reshape(-1, 3)"),
        (lambda: mapuot.pairwise(np.ones((4, 5)), reg=1, reg_m=1), "go to mapuot.sinkhorn_divergence(M, A, B)"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            call()
    mean = mapuot.barycenter(M[:5, :5], np.ones((2, 5)), reg=1.0)
    with pytest.raises(AttributeError, match=r"BarycenterResult has no barycenter: did you mean q\?"):
        mean.barycenter  # noqa: B018
    assert mapuot.Grid(48, spacing=64.0).spacing == (64.0,)


def test_points_on_a_line():
    with pytest.raises(ValueError, match=r"points on a line are x\[:, None\]"):
        mapuot.solve_sample(np.ones(4), np.ones(4), reg=0.1, reg_m=1.0)


def test_the_command_line_knows_the_words(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mapuot", "solve", "M.npy", "--numItermax", "5"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "--max-passes" in capsys.readouterr().err
    for words, told in (
        (["solve", "M.npy", "--out", "x.npz"], "did you mean --output?"),
        (["solve", "--cost", "M.npy"], "did you mean the file IN?"),
        (["tune", "M.npy", "--n-jobs", "2"], "did you mean --threads?"),
        (["M.npy", "--reg", "1"], "no command 'M.npy': did you mean mapuot solve M.npy --reg 1?"),
        (["solve", "M.npy", "--reg", "1", "--reg-m", "none"], "must be a number or inf (balanced)"),
    ):
        monkeypatch.setattr(sys, "argv", ["mapuot", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
    assert isinstance(CliRunner().invoke(cli.cli, ["solve", "--eps", "1"]).exception, SystemExit | click.ClickException)


def test_the_page_has_the_tables():
    text = PAGE.read_text(encoding="utf-8")
    held = text.partition("<!-- synonyms -->\n")[2].partition("\n<!-- /synonyms -->")[0]
    assert held == mapuot_table(), mapuot_table()


@pytest.mark.parametrize(
    ("missing", "code", "told"),
    [
        ("ot", "mapuot.pot.patch()", "mapuot.pot.patch needs POT: pip install 'mapuot[pot]'"),
        ("moscot", "mapuot.moscot", "mapuot.moscot needs moscot: pip install moscot"),
        ("torch", "mapuot.torch", "mapuot.torch needs PyTorch: pip install 'mapuot[torch]'"),
        ("jax", "mapuot.jax", "mapuot.jax needs JAX: pip install jax"),
        (
            "matplotlib",
            "mapuot.plot.convergence(mapuot.solve([[1.0]], reg=1, reg_m=1))",
            "mapuot.plot needs matplotlib: pip install 'mapuot[plot]'",
        ),
        ("h5py", "mapuot.solve([[1.0]], reg=1, reg_m=1).save('a.h5')", "h5py: pip install 'mapuot[files]'"),
        ("cupy", "mapuot.solve([[1.0]], reg=1, reg_m=1, backend='cuda')", "pip install 'mapuot[gpu]'"),
        ("cupy", "mapuot.arrays.import_cupy()", "arrays on a GPU need CuPy: pip install 'mapuot[gpu]'"),
        ("zarr", "mapuot.solve([[1.0]], reg=1, reg_m=1).save('a.zarr')", "zarr: pip install 'mapuot[files]'"),
        ("anndata", "mapuot.wot.Coupling.to_anndata(None)", "to_anndata needs anndata: pip install anndata"),
    ],
)
def test_a_missing_extra_is_named(missing, code, told):
    program = f"import sys, mapuot; sys.modules[{missing!r}] = None; {code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: " in done.stderr
    assert told in done.stderr
