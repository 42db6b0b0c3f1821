"""POT's Gromov-Wasserstein names beside POT's own functions, called by their names and patched."""

import warnings

import numpy as np
import pytest
from scipy.spatial.distance import cdist

import mapuot
from mapuot import pot

ot = pytest.importorskip("ot")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(14, 3)) * [3, 2, 1]
Y = RNG.normal(size=(11, 2)) * [2, 1]
C = cdist(X, X)
D = cdist(Y, Y)
M = RNG.random((14, 11))
P = RNG.random(14) + 0.2
Q = RNG.random(11) + 0.2
P = P / P.sum()
Q = Q / Q.sum()
LONG = {"max_iter": 500, "tol": 1e-9, "max_iter_ot": 5000, "tol_ot": 1e-12, "unbalanced_solver": "sinkhorn_log"}


@pytest.mark.parametrize("alpha", [0, 1.5])
@pytest.mark.parametrize("rho", [20.0, (20.0, 10.0)])
def test_unbalanced(alpha, rho):
    G0 = np.outer(P, Q)
    given = {"wx": P, "wy": Q, "reg_marginals": rho, "epsilon": 0.6, "alpha": alpha, "M": M, "init_pi": G0} | LONG
    theirs, _, log = ot.gromov.fused_unbalanced_gromov_wasserstein(C, D, log=True, **given)
    plan, same, told = pot.fused_unbalanced_gromov_wasserstein(C, D, log=True, **given)
    assert plan is same
    np.testing.assert_allclose(plan, theirs, atol=1e-4 * theirs.max())
    assert told["fugw_cost"] == pytest.approx(log["fugw_cost"], rel=1e-6)
    assert told["linear_cost"] == pytest.approx(float(log["linear_cost"]), rel=1e-4, abs=1e-12)
    value, more = pot.fused_unbalanced_gromov_wasserstein2(C, D, log=True, **given)
    assert value == more["fugw_cost"] == told["fugw_cost"]
    best = pot.fused_unbalanced_gromov_wasserstein2(C, D, **given | {"init_pi": None})
    assert best <= log["fugw_cost"] * (1 + 1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_balanced(fused):
    if fused:
        name = "entropic_fused_gromov_wasserstein"
    else:
        name = "entropic_gromov_wasserstein"
    if fused:
        args = (M, C, D, P, Q)
    else:
        args = (C, D, P, Q)
    given = {"epsilon": 0.8, "G0": np.outer(P, Q)} | ({"alpha": 0.3} if fused else {})
    theirs, log = getattr(ot.gromov, name)(*args, log=True, max_iter=3000, tol=1e-12, **given)
    plan, told = getattr(pot, name)(*args, log=True, **given)
    np.testing.assert_allclose(plan, theirs, atol=1e-4 * theirs.max())
    key = "fgw_dist" if fused else "gw_dist"
    assert told[key] == pytest.approx(log[key], rel=1e-4)
    value, more = getattr(pot, name + "2")(*args, log=True, **given)
    assert value == told[key]
    np.testing.assert_array_equal(more["T"], plan)
    single = getattr(pot, name)(*(x.astype(np.float32) for x in args), **given)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, plan, atol=1e-3 * plan.max())


def test_patched_functions_answer_what_they_can_and_leave_the_rest():
    calls = {
        "entropic_gromov_wasserstein": ((C, D, P, Q), {"epsilon": 0.8}),
        "entropic_gromov_wasserstein2": ((C, D), {"epsilon": 0.8}),
        "entropic_fused_gromov_wasserstein": ((M, C, D), {"epsilon": 0.8}),
        "entropic_fused_gromov_wasserstein2": ((M, C, D, P, Q), {"epsilon": 0.8}),
        "fused_unbalanced_gromov_wasserstein": ((C, D), {"epsilon": 0.6}),
        "fused_unbalanced_gromov_wasserstein2": ((C, D, P, Q), {"epsilon": 0.6}),
    }
    left = {
        "entropic_gromov_wasserstein": [
            ((C, D), {"loss_fun": "kl_loss"}), ((np.triu(C), D), {"epsilon": 5.0}), ((C, D), {"solver": "PPA"}),
            ((C, D), {"symmetric": False, "epsilon": 5.0, "numItermax": 50}),
        ],
        "fused_unbalanced_gromov_wasserstein": [((C, D), {"max_iter": 2})],
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # POT's inner solver warns
        theirs = {}
        for name, some in left.items():
            theirs[name] = [getattr(ot.gromov, name)(*args, **given) for args, given in some]
        with pot.patched():
            for name, (args, given) in calls.items():
                for module in (ot.gromov, ot):
                    if hasattr(module, name):
                        found = getattr(module, name)(*args, **given)
                    else:
                        found = None
                    if found is not None:
                        np.testing.assert_array_equal(found, getattr(pot, name)(*args, **given))
            for name, some in left.items():
                for (args, given), right in zip(some, theirs[name], strict=True):
                    np.testing.assert_array_equal(getattr(ot.gromov, name)(*args, **given), right)
    assert "mapuot" not in ot.gromov.entropic_gromov_wasserstein.__module__


def test_what_has_no_counterpart_is_refused_by_name():
    for name, value in (("loss_fun", "kl_loss"), ("solver", "PPA"), ("symmetric", False)):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            pot.entropic_gromov_wasserstein(C, D, **{name: value})
    with pytest.raises(ValueError, match=r"^divergence must be"):
        pot.fused_unbalanced_gromov_wasserstein(C, D, epsilon=1.0, divergence="l2")
    with pytest.warns(mapuot.ConvergenceWarning, match="entropic_gromov_wasserstein not converged: .*raise max_iter"):
        pot.entropic_gromov_wasserstein(C, D, epsilon=0.5, max_iter=1)


def test_tensors_come_back_as_tensors():
    torch = pytest.importorskip("torch")
    plan = pot.entropic_gromov_wasserstein(torch.as_tensor(C), torch.as_tensor(D), epsilon=0.8)
    np.testing.assert_allclose(plan.numpy(), pot.entropic_gromov_wasserstein(C, D, epsilon=0.8))
    given = torch.as_tensor(C).requires_grad_()
    with pytest.raises(NotImplementedError, match="C1 requires grad"):
        pot.entropic_gromov_wasserstein(given, torch.as_tensor(D), epsilon=0.8)
