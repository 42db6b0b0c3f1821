"""`mapuot.fugw.FUGW` has fugw's objective and formulas, for arrays and tensors."""

import math

import numpy as np
import pytest
from judge import divergence
from scipy.spatial.distance import cdist

import mapuot
from mapuot.fugw import FUGW


def data(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(14, 3)) * [3.0, 2.0, 1.0]
    y = rng.normal(size=(11, 3)) * [3.0, 2.0, 1.0]
    f = rng.random((4, 14))
    g = rng.random((4, 11))
    a = rng.dirichlet(np.ones(14))
    b = rng.dirichlet(np.ones(11))
    return f, g, cdist(x, x), cdist(y, y), a, b


def test_the_loss_is_fugws_and_features_move_by_its_formulas():
    f, g, D, E, a, b = data()
    model = FUGW(alpha=0.4, rho=2.0, eps=0.05).fit(f, g, D, E, a, b)
    P = model.pi
    r = P.sum(1)
    s = P.sum(0)
    mass = P.sum()

    def kl(p, q):
        return 2 * mass * divergence("kl", p, q, 1.0).sum() + (p.sum() - q.sum()) ** 2

    structure = np.einsum("ijkl,ij,kl", (D[:, None, :, None] - E[None, :, None, :]) ** 2, P, P)
    features = (cdist(f.T, g.T, "sqeuclidean") * P).sum()
    right = 0.4 * structure + 0.6 * features + 2 * (kl(r, a) + kl(s, b)) + 0.05 * kl(P, np.outer(a, b))
    assert model.loss == pytest.approx(float(right), rel=1e-9)
    assert model.result_.settled
    np.testing.assert_allclose(model.transform(f), f @ P / s, rtol=1e-9)
    np.testing.assert_allclose(model.inverse_transform(g[0]), (P @ g[0]) / r, rtol=1e-9)


@pytest.mark.parametrize("metric", ["precomputed", "euclidean", "sqeuclidean"])
def test_tensors_come_back_as_tensors(metric):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(12, 2)) * [3.0, 1.0]
    f = rng.random((2, 12))
    if metric == "precomputed":
        geometry = cdist(x, x)
    else:
        geometry = x
    options = {"rho": math.inf, "eps": 0.05, "metric": metric, "options": {"init": "independent"}}
    right = FUGW(**options).fit(f, f, geometry, geometry[:, :])
    found = FUGW(**options).fit(*map(torch.as_tensor, (f, f, geometry, geometry)))
    assert isinstance(found.pi, torch.Tensor)
    np.testing.assert_allclose(found.pi.numpy(), right.pi, atol=1e-9)
    moved = found.transform(torch.as_tensor(f[0]))
    assert isinstance(moved, torch.Tensor)
    np.testing.assert_allclose(moved.numpy(), right.transform(f[0]), rtol=1e-9)
    assert isinstance(found.transform(f), np.ndarray)


def test_geometry_alone_a_start_and_wrong_arguments():
    f, g, D, E, a, b = data()
    whole = FUGW(eps=0.05, rho=5.0).fit(None, None, D, E, a, b)
    again = FUGW(eps=0.05, rho=5.0).fit(source_geometry=D, target_geometry=E, source_weights=a, target_weights=b,
                                        init_plan=whole.pi)  # fmt: skip
    assert again.loss == pytest.approx(whole.loss, rel=1e-5)
    alone = mapuot.gromov(D, E, a, b, reg=0.05, reg_m=5.0, metric="precomputed")
    assert whole.loss == pytest.approx(alone.value)
    with pytest.raises(ValueError, match="both be given, or neither"):
        FUGW().fit(f, None, D, E)
    with pytest.raises(ValueError, match="geometry must be given"):
        FUGW().fit(f, g)
    with pytest.raises(ValueError, match="reg_mode must be one of"):
        FUGW(reg_mode="mixed").fit(None, None, D, E)
    with pytest.raises(ValueError, match="divergence must be one of"):
        FUGW(divergence="l2").fit(None, None, D, E)
    with pytest.raises(ValueError, match=r"source_features must have shape \(k, 14\) or"):
        whole.transform(g)
    with pytest.raises(AttributeError, match="not fitted"):
        FUGW().transform(f)


@pytest.mark.parametrize(("model", "given", "match"), [
    ({"rho": -1.0}, {}, r"^rho"),
    ({"eps": -1.0}, {}, r"^eps must be"),
    ({}, {"source_weights": -np.ones(14)}, r"^source_weights must"),
    ({}, {"target_weights": np.ones(3)}, r"^target_weights must"),
    ({}, {"target_geometry": np.ones((5, 4))}, r"^target_geometry must"),
    ({}, {"source_features": np.full((3, 14), np.nan)}, r"^source_features must"),
], ids=range(6))  # fmt: skip
def test_messages_have_the_names_of_the_estimator(model, given, match):
    f, g, D, E, *_ = data()
    usual = {"source_features": f, "target_features": g, "source_geometry": D, "target_geometry": E}
    with pytest.raises(ValueError, match=match):
        FUGW(**model).fit(**usual | given)


@pytest.mark.parametrize("fused", [False, True])
def test_an_independent_entropy_is_that_of_co_optimal_transport(fused):
    ot = pytest.importorskip("ot")
    f, g, D, E, a, b = data()
    if fused:
        F = cdist(f.T, g.T, "sqeuclidean")
    else:
        F = None
    alpha = 0.5 if fused else 1.0
    model = FUGW(alpha=alpha, rho=(3.0, 2.0), eps=0.05, reg_mode="independent", options={
        "init": "independent", "tol": 1e-5, "inner_tol": 1e-10, "max_iter": 500,
    })  # fmt: skip
    if fused:
        features = {"source_features": f, "target_features": g}
    else:
        features = {}
    model.fit(source_geometry=D, target_geometry=E, source_weights=a, target_weights=b, **features)
    half = None if F is None else F / 2
    plan, _ = ot.gromov.fused_unbalanced_across_spaces_divergence(
        D, E, a, a, b, b, reg_marginals=(3.0 / alpha, 2.0 / alpha), epsilon=0.05 / alpha, reg_type="independent",
        divergence="kl", unbalanced_solver="sinkhorn_log", alpha=(1 - alpha) / alpha, M_samp=half, M_feat=half,
        max_iter=500, tol=1e-11, max_iter_ot=5000, tol_ot=1e-12, rescale_plan=True,
    )  # fmt: skip
    assert model.result_.settled
    np.testing.assert_allclose(model.pi, plan, atol=1e-5)
    P = model.pi
    r, s = P.sum(1), P.sum(0)

    def kl(p, q):
        return 2 * P.sum() * divergence("kl", p, q, 1.0).sum() + (p.sum() - q.sum()) ** 2

    value = alpha * (r @ D**2 @ r + s @ E**2 @ s - 2 * ((D @ P @ E) * P).sum()) + 3 * kl(r, a) + 2 * kl(s, b)
    value += 2 * 0.05 * divergence("kl", P, np.outer(a, b), 1.0).sum()
    if fused:
        value += (1 - alpha) * (P * F).sum()
    assert model.loss == pytest.approx(value, rel=1e-9)
    with pytest.raises(NotImplementedError, match="gradient is for"):
        model.result_.gradient()


@pytest.mark.filterwarnings("error::RuntimeWarning:mapuot")
def test_numbers_beyond_float64():
    """A start of 1e300 each is one of 1; a plan is refused by name if its mass has no square in float64."""
    f, g, D, E, a, b = data()
    start = np.outer(a > 0, b > 0)
    losses = [FUGW(rho=2.0, eps=0.05).fit(f, g, D, E, a, b, start * size).loss for size in (1.0, 1e300, 1e-300)]
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-9)
    with pytest.raises(ValueError, match=r"^eps and rho must leave a plan with mass"):
        FUGW(rho=2.0, eps=0.01).fit(f, g, D, E, a * 1e-75, b * 1e-75)
