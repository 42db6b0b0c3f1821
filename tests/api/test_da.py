"""mapuot.da against ot.da and scikit-learn's conventions."""

import inspect
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import ot
import pytest
from numpy.testing import assert_allclose

import mapuot
from mapuot.da import TransportOnto, UnbalancedSinkhornTransport
from mapuot.problem.settings import POINTS

pytestmark = pytest.mark.usefixtures("pot_backend")


def domains(m=14, n=11, seed=0):
    rng = np.random.default_rng(seed)
    xs = rng.normal(size=(m, 2))
    xt = rng.normal(size=(n, 2)) + 2
    return xs, np.arange(m) % 3, xt, np.arange(n) % 3


def fitted_pair(labels=False, **parameters):
    xs, ys, xt, yt = domains()
    same = {"reg_e": 1.0, "reg_m": 2.0, "method": "sinkhorn", "max_iter": 300, "tol": 1e-12} | parameters
    if labels:
        known = {"ys": ys, "yt": yt}
    else:
        known = {}
    ours = UnbalancedSinkhornTransport(**same).fit(xs, Xt=xt, **known)
    return ours, ot.da.UnbalancedSinkhornTransport(**same).fit(Xs=xs, Xt=xt, **known)


@pytest.mark.parametrize("parameters",
                         [{}, {"norm": "max"}, {"norm": "median"}, {"norm": "log"}, {"norm": "loglog"},
                          {"metric": "euclidean"}], ids=str)  # fmt: skip
def test_agrees_with_pot(parameters):
    ours, theirs = fitted_pair(**parameters)
    xs, ys, xt, yt = domains()
    assert_allclose(ours.cost_, theirs.cost_, atol=1e-12)
    assert_allclose(ours.coupling_, theirs.coupling_, rtol=1e-9)
    for X in (xs, xs[:5] + 0.1, xs[::-1]):
        assert_allclose(ours.transform(X), theirs.transform(X), atol=1e-9)
    for X in (xt, xt[:5] + 0.1):
        assert_allclose(ours.inverse_transform(Xt=X), theirs.inverse_transform(Xt=X), atol=1e-9)
    assert_allclose(ours.transform_labels(ys), theirs.transform_labels(ys), atol=1e-9)
    assert_allclose(ours.inverse_transform_labels(yt), theirs.inverse_transform_labels(yt), atol=1e-9)


def test_labels_keep_classes_apart():
    ours, theirs = fitted_pair(labels=True, limit_max=2)
    assert_allclose(ours.coupling_, theirs.coupling_, rtol=1e-9)
    xs, ys, xt, yt = domains()
    ys[0], yt[:2] = -1, -1
    hard = UnbalancedSinkhornTransport(limit_max=np.inf).fit(xs, ys, xt, yt)
    apart = (ys[:, None] != yt) & (ys != -1)[:, None] & (yt != -1)
    assert (hard.coupling_[apart] == 0).all()
    assert (hard.coupling_[~apart] > 0).all()
    assert hard.limit_max == np.inf


@pytest.mark.parametrize("limit_max", [10, np.inf])
def test_missing_labels_are_unknown(limit_max):
    """NaN, None and pandas' NA count as -1, on both sides; labels for a transfer must be there."""
    pandas = pytest.importorskip("pandas")
    xs, ys, xt, yt = domains()
    ys[1], yt[:2] = -1, -1
    transport = UnbalancedSinkhornTransport(limit_max=limit_max)
    right = transport.fit(xs, ys, xt, yt).coupling_
    words = np.array(["stem", "blood", "skin", None], object)  # ... at -1
    numbers = np.where(ys < 0, np.nan, ys), np.where(yt < 0, np.nan, yt)
    nullable = (pandas.Series(y).astype("Int64").mask(y < 0) for y in (ys, yt))
    texts = (pandas.Series(words[y], dtype="string") for y in (ys, yt))  # NA is neither equal nor unequal to a label
    objects = (pandas.Series(words[y], dtype="string").to_numpy(object) for y in (ys, yt))
    categories = pandas.Categorical(words[ys]), words[yt].tolist()
    for s, t in (numbers, (words[ys], words[yt]), categories, nullable, texts, objects):
        assert_allclose(transport.fit(xs, s, xt, t).coupling_, right, rtol=1e-12)
    with pytest.raises(ValueError, match=r"ys must not lack labels, got 1 None or NaN, first at 1: .*unknown"):
        transport.transform_labels(words[ys])


def test_labels_that_leave_no_partner_are_named():
    xs, _, xt, _ = domains()
    hard = UnbalancedSinkhornTransport(limit_max=np.inf)
    with pytest.raises(mapuot.InfeasibleError, match="ys and yt must share a class"):
        hard.fit(xs, [0] * 14, xt, [1] * 11)
    balanced = UnbalancedSinkhornTransport(limit_max=np.inf, reg_m=np.inf)
    with pytest.raises(mapuot.InfeasibleError, match=r"^ys and yt forbid too many pairs by limit_max=inf: "):
        balanced.fit(xs, [0] * 7 + [2] * 7, xt, [0] * 11)
    with pytest.warns(UserWarning, match="ys and yt hold 1 and -1 only, and -1 means unknown"):
        hard.fit(xs, [-1, 1] * 7, xt, [1, -1] * 5 + [1])


def test_a_sample_without_mass_stays():
    xs, _, xt, _ = domains()
    weights = np.ones(14)
    weights[4] = 0
    estimator = UnbalancedSinkhornTransport(distribution_estimation=lambda X: weights[: len(X)]).fit(xs, Xt=xt)
    assert_allclose(estimator.transform(xs)[4], xs[4])
    assert_allclose(estimator.mu_s, weights)
    assert_allclose(estimator.transform(xs[4:5] + 1e-6), xs[4:5] + 1e-6)


def test_tables_come_out_as_tables():
    pd = pytest.importorskip("pandas")
    (xs, _, xt, _) = domains()
    table = pd.DataFrame(xs, columns=["length", "width"], index=[f"s{i}" for i in range(14)])
    estimator = TransportOnto(xt).set_output(transform="pandas").fit(table)
    moved = estimator.transform(table)
    assert list(moved.columns) == ["length", "width"]
    assert list(moved.index) == list(table.index)
    right = UnbalancedSinkhornTransport().fit(xs, Xt=xt)
    assert_allclose(moved, right.transform(xs))
    assert_allclose(estimator.inverse_transform(xt), right.inverse_transform(Xt=xt))
    assert list(estimator.get_feature_names_out()) == ["length", "width"]
    with pytest.raises(ValueError, match="feature names should match"):
        estimator.transform(table[["width", "length"]])


class OntoItself(UnbalancedSinkhornTransport):
    """An adapter with the target bound to the source, called as scikit-learn's checks call it."""

    def fit(self, X, y=None):
        return super().fit(X, None, X)

    def fit_transform(self, X, y=None):
        return self.fit(X).transform(X)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("estimator", [OntoItself(), TransportOnto()], ids=["bound", "onto"])
def test_check_estimator(backend, estimator):
    from sklearn.utils.estimator_checks import check_estimator

    if backend == "reference":
        pytest.skip("once is enough")
    check_estimator(estimator, on_skip=None)


def test_a_large_cost_is_never_formed(backend, monkeypatch, using):
    if backend == "cuda":
        pytest.skip("points are for the CPU")
    using(POINTS, most_formed=100)
    xs, ys, xt, _ = domains()
    estimator = UnbalancedSinkhornTransport(reg_e=0.5).fit(xs, Xt=xt)
    assert isinstance(estimator.costs_, mapuot.PointCloud)
    using(POINTS, most_formed=1000)
    formed = UnbalancedSinkhornTransport(reg_e=0.5).fit(xs, Xt=xt)
    assert isinstance(formed.costs_, np.ndarray)
    assert_allclose(estimator.cost_, formed.cost_, rtol=1e-12)
    for X in (xs, xs[:3] + 0.1):
        assert_allclose(estimator.transform(X), formed.transform(X), atol=1e-4)
    assert_allclose(estimator.transform_labels(ys), formed.transform_labels(ys), atol=1e-4)
    monkeypatch.setattr(mapuot.da, "cdist", Mock(side_effect=MemoryError("Unable to allocate 8 EiB")))
    with pytest.raises(MemoryError, match=r"the costs of 14 x 11 samples take .* GiB and do not fit: without labels"):
        UnbalancedSinkhornTransport().fit(xs, Xt=xt)


def test_without_scikit_learn():
    code = """
import sys
sys.modules["sklearn"] = sys.modules["sklearn.base"] = sys.modules["sklearn.exceptions"] = None
import mapuot
T = mapuot.da.UnbalancedSinkhornTransport
assert not hasattr(T(reg_e=2.0), "coupling_")
assert mapuot.da.TransportOnto([[0.0], [1.0]]).fit_transform([[0.5], [2.0]]).shape == (2, 1)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parameters_are_pots():
    ours = list(inspect.signature(UnbalancedSinkhornTransport).parameters)
    assert ours == list(inspect.signature(ot.da.UnbalancedSinkhornTransport).parameters)
    assert list(UnbalancedSinkhornTransport().get_params()) == sorted(ours)


@pytest.mark.parametrize("norm", [None, "median"])
def test_the_entropic_map_of_new_samples_is_that_of_the_result(norm, backend):
    if backend == "reference":
        pytest.skip("forms the costs, and knows no points")
    rng = np.random.default_rng(4)
    x = rng.random((40, 2))
    y = rng.random((50, 2)) + 1
    new = rng.random((7, 2))
    estimator = UnbalancedSinkhornTransport(reg_e=0.1, reg_m=9.0, norm=norm, out_of_sample_map="entropic").fit(x, Xt=y)
    plain = UnbalancedSinkhornTransport(reg_e=0.1, reg_m=9.0, norm=norm).fit(x, Xt=y)
    np.testing.assert_allclose(estimator.transform(x), plain.transform(x), atol=1e-5)
    np.testing.assert_allclose(estimator.inverse_transform(Xt=y), plain.inverse_transform(Xt=y), atol=1e-5)
    M = ((new[:, None] - y) ** 2).sum(-1) * estimator.result_.problem.cost.cloud.scale
    weight = np.exp((estimator.result_.g - M) / 0.1)
    np.testing.assert_allclose(estimator.transform(new), weight @ y / weight.sum(1)[:, None], atol=1e-9)
