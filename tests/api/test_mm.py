"""`mapuot.pot.mm_unbalanced` against the dual problem without entropy, and beside POT with it."""

import numpy as np
import pytest

import mapuot


def problem(m=20, n=25, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(m, 2)), rng.normal(size=(n, 2)) + 0.4
    return rng.random(m) / m, 1.3 * rng.random(n) / n, ((x[:, None] - y) ** 2).sum(-1).astype(dtype)


def kl(p, q):
    used = p > 0
    return (p[used] * np.log(p[used] / q[used])).sum() - p.sum() + q.sum()


@pytest.mark.parametrize("reg_m", [0.1, 1.0, (5.0, 0.5)], ids=str)
@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_gap_is_that_of_the_dual_problem(reg_m, hole, dtype):
    a, b, M = problem(dtype=dtype)
    if hole:
        M[3], M[5, 7], a[4], b[2] = np.inf, np.inf, 0.0, 0.0
    plan, log = mapuot.pot.mm_unbalanced(a, b, M, reg_m, log=True)
    assert plan.dtype == dtype
    P, C = plan.astype(float), M.astype(float)
    rhos, (r, s), (f, g) = np.broadcast_to(reg_m, 2), (P.sum(1), P.sum(0)), (log["f"], log["g"])
    primal = (P * np.where(P > 0, C, 0)).sum() + rhos[0] * kl(r, a) + rhos[1] * kl(s, b)
    assert (f[:, None] + g <= C + 1e-12).all()
    assert not P[np.isinf(C)].any()
    assert not P[a == 0].any()
    assert not P[:, b == 0].any()
    dual = sum(rho * (w * -np.expm1(-x / rho))[w > 0].sum() for rho, w, x in zip(rhos, (a, b), (f, g), strict=True))
    assert log["total_cost"] == pytest.approx(primal, rel=1e-9 if dtype is np.float64 else 1e-6)
    assert log["gap"] == pytest.approx(log["total_cost"] - dual, abs=1e-12)
    assert 0 <= log["gap"] <= 1e-6 * primal


def test_with_entropy_it_is_pots():
    ot = pytest.importorskip("ot")
    ours, theirs = (
        call(*problem(6, 7), 1.0, reg=0.05) for call in (mapuot.pot.mm_unbalanced, ot.unbalanced.mm_unbalanced)
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_what_mm_unbalanced_tells():
    a, b, M = problem()
    with pytest.warns(mapuot.ConvergenceWarning, match="mm_unbalanced not converged: gap"):
        mapuot.pot.mm_unbalanced(a, b, M, 1.0, numItermax=2)


def test_tensors_come_back():
    torch = pytest.importorskip("torch")
    a, b, M = map(torch.tensor, problem())
    plan, log = mapuot.pot.mm_unbalanced(a, b, M, 1.0, log=True)
    assert isinstance(plan, torch.Tensor)
    assert isinstance(log["f"], torch.Tensor)
    np.testing.assert_array_equal(plan.numpy(), mapuot.pot.mm_unbalanced(*problem(), 1.0))
