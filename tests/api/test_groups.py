"""mapuot.groups: tables of distances between groups of cells equal divergences between their points."""

import numpy as np
import pytest

import mapuot
from mapuot import PointCloud

pd = pytest.importorskip("pandas")
from mapuot import groups  # noqa: E402 - needs pandas

TERMS = {"reg": 0.3, "reg_m": np.inf}


def cells():
    """Return points of four groups in no order, some without a label, and their labels."""
    rng = np.random.default_rng(0)
    labels = np.array(rng.choice(["b", "a", "control", "c"], 90), object)
    points = rng.normal(size=(90, 3)) + 1.5 * (labels == "b")[:, None]
    labels[::11] = None
    return points, labels


def data_of(kind):
    points, labels = cells()
    if kind == "array":
        return points, labels
    anndata = pytest.importorskip("anndata")
    obs = pd.DataFrame({"state": pd.Categorical(labels)}, index=[f"cell {i}" for i in range(len(points))])
    return anndata.AnnData(np.zeros((90, 2)), obs=obs, obsm={"X_pca": points}), "state"


def divergence(x, y, **options):
    return mapuot.sinkhorn_divergence(PointCloud(x, y), **TERMS, standard_error=True, **options)


@pytest.mark.parametrize("kind", ["array", "AnnData"])
@pytest.mark.parametrize("how", [{}, {"scale_cost": "mean"}, {"scale_cost": "std", "scale_each": True}], ids=str)
def test_all_pairs(kind, how):
    points, labels = cells()
    D, E = groups.pairwise(*data_of(kind), **TERMS, **how, standard_error=True)
    assert list(D.index) == list(D.columns) == ["a", "b", "c", "control"]
    clouds = [points[labels == name] for name in D.index]
    want = mapuot.pairwise(clouds, **TERMS, **how, standard_error=True)
    np.testing.assert_allclose(D, want[0], rtol=1e-6)
    np.testing.assert_allclose(E, want[1], rtol=1e-4)
    some = groups.pairwise(*data_of(kind), **TERMS, groups=["control", "a"])
    assert list(some.columns) == ["control", "a"]
    assert some.iloc[0, 1] == pytest.approx(groups.pairwise(*data_of(kind), **TERMS).loc["a", "control"], rel=1e-6)


def test_contrasts_and_one_group_against_others():
    points, labels = cells()
    found = groups.contrasts(*data_of("AnnData"), [("b", "control"), ("control", "a")], **TERMS)
    assert found[["group", "reference"]].to_numpy().tolist() == [["b", "control"], ["control", "a"]]
    for _, row in found.iterrows():
        x, y = (points[labels == row[name]] for name in ("group", "reference"))
        assert (row["cells"], row["cells_of_reference"]) == (len(x), len(y))
        assert (row["divergence"], row["standard_error"]) == pytest.approx(divergence(x, y), rel=1e-4)
    others = groups.against(points, labels, "control", **TERMS)
    assert others.group.tolist() == ["a", "b", "c"]
    assert others.divergence[1] == pytest.approx(found.divergence[0], rel=1e-6)
    rest = groups.against_rest(points, labels, **TERMS, groups=["b", "a"])
    assert rest.reference.tolist() == ["rest", "rest"]
    known = np.array([x is not None for x in labels])
    for _, row in rest.iterrows():
        here = labels == row["group"]
        want = divergence(points[here], points[known & ~here])
        assert (row["divergence"], row["standard_error"]) == pytest.approx(want, rel=1e-4)
        assert row["cells_of_reference"] == (known & ~here).sum()


@pytest.mark.parametrize(("call", "match"), [
    (lambda x, y: groups.pairwise(x, "state", **TERMS), "groupby must be .* of an AnnData, got 'state'"),
    (lambda x, y: groups.pairwise(x, y[:5], **TERMS), r"groupby must have shape \(90,\), got \(5,\)"),
    (lambda x, y: groups.pairwise(x, y, **TERMS, groups=["a", "z"]), "groups must be labels of cells, got 'z'"),
    (lambda x, y: groups.pairwise(x, y, **TERMS, groups=["a", "a"]), "groups must be labels, each once"),
    (lambda x, y: groups.pairwise(x, y, **TERMS, groups=[]), "groups must be labels, each once"),
    (lambda x, y: groups.pairwise(x, [None] * 90, **TERMS), "groupby must hold labels, got none"),
    (lambda x, y: groups.against(x, ["a"] * 90, "a", **TERMS), "groupby must hold labels beside the reference"),
    (lambda x, y: groups.against_rest(x, ["a"] * 90, **TERMS), "groupby must hold two labels"),
    (lambda x, y: groups.pairwise(x[0], y, **TERMS), r"data must hold points \(cells, d\)"),
    (lambda x, y: groups.pairwise(x, y, **TERMS, scale_each=True), "scale_each needs scale_cost"),
    (lambda x, y: groups.contrasts(x, y, ["ab c"], **TERMS), "contrasts must be pairs"),
    (lambda x, y: groups.against(x, y, "z", **TERMS), "reference must be labels of cells, got 'z'"),
    (lambda x, y: groups.pairwise(*data_of("AnnData"), **TERMS, representation="X_umap"), "representation must be"),
], ids=range(13))  # fmt: skip
def test_errors_name_the_argument(call, match):
    with pytest.raises(ValueError, match=match):
        call(*cells())


@pytest.mark.parametrize("given", [(1.0, 2.0), "x", None, -1.0])
@pytest.mark.parametrize("name", ["reg", "reg_m"])
def test_numbers_are_refused_by_name(name, given):
    """A pair was multiplied by a float: Python's own TypeError named no argument."""
    points, labels = cells()
    for unit in (None, "mean"):
        with pytest.raises((TypeError, ValueError), match=f"^{name} must be "):
            groups.pairwise(points, labels, **TERMS | {name: given}, scale_cost=unit)


def test_warnings_name_the_groups():
    points, labels = cells()
    with pytest.warns(mapuot.ConvergenceWarning) as heard:
        groups.pairwise(points, labels, reg=1e-3, reg_m=np.inf, max_passes=2, groups=["a", "c"])
    told = [str(one.message).split(", the farthest")[0].partition("; ")[2] for one in heard]
    assert told[-1] == "the pair 'a', 'c'"
    assert {*told[:-1]} <= {"the pair 'a', 'a'", "the pair 'c', 'c'"}
    with pytest.raises(ValueError, match="the mean of the costs of the pair 'a', 'b' must be a positive finite"):
        groups.pairwise(np.ones((4, 2)), [*"aabb"], **TERMS, scale_cost="mean", scale_each=True)


def test_labels_of_several_kinds_are_refused():
    with pytest.raises(TypeError, match="groupby must be labels of one kind"):
        groups.pairwise(np.ones((2, 2)), np.array([1, "a"], object), **TERMS)


@pytest.mark.parametrize("as_given", [str, pd.Timestamp, np.datetime64])
def test_dates_are_labels(as_given):
    """A date is the label of its group in each of its types."""
    X = np.random.default_rng(0).normal(size=(30, 2))
    dates = pd.to_datetime(np.repeat(["2020-01-01", "2020-01-02", "2020-01-05"], 10))
    numbers = np.repeat([1, 2, 5], 10)
    options = {"reg": 0.5, "reg_m": 1.0}
    found = groups.against(X, dates, as_given("2020-01-02"), **options)
    assert [x.day for x in found.group] == [1, 5]
    assert found.divergence.tolist() == groups.against(X, numbers, 2, **options).divergence.tolist()
    table = groups.pairwise(X, dates, groups=[as_given("2020-01-05"), as_given("2020-01-01")], **options)
    assert [x.day for x in table.index] == [5, 1]
