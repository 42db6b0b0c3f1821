"""mapuot.pot against POT: how near the answers are, log keys, the cases in which POT fails."""

import numpy as np
import ot
import pytest
from numpy.testing import assert_allclose
from problems import arrays

import mapuot
from mapuot import pot

METHODS = ("sinkhorn", "sinkhorn_stabilized", "sinkhorn_translation_invariant")
REG = 0.1
pytestmark = [pytest.mark.usefixtures("pot_backend"),
              pytest.mark.filterwarnings("ignore:reg_type='entropy'|If reg_type|Stabilized Unbalanced")]  # fmt: skip


# named methods


@pytest.mark.parametrize("count", [2, 1000])
@pytest.mark.parametrize("reg_m", [1.0, (1.0, 3.0), (2, np.inf), np.inf, [0.7]], ids=str)
@pytest.mark.parametrize("reference", ["kl", "entropy", "matrix"])
def test_named_methods_are_nearer_than_pots(reg_m, reference, count):
    a, b, M, c = arrays()
    if reg_m == np.inf:
        a, b = a / a.sum(), b / b.sum()
    rest = {"reg_type": "kl", "c": c} if reference == "matrix" else {"reg_type": reference}
    call = dict(a=a, b=b, M=M, reg=REG, reg_m=reg_m, numItermax=count, log=True, **rest)
    given = {"kl": "product", "entropy": "uniform", "matrix": c}[reference]
    exact = mapuot.solve(M, a, b, reg=REG, reg_m=reg_m, reference=given, tol=1e-11)
    for method in METHODS:
        plan, log = pot.sinkhorn_unbalanced(method=method, **call)
        theirs, their_log = ot.sinkhorn_unbalanced(method="sinkhorn", **call)
        assert list(log) == list(their_log)
        little = 1e-7 if np.isinf(reg_m).any() else 1e-10  # a plan may be right long before its scalings stand still
        errors = [np.abs(found - exact.plan).sum() for found in (plan, theirs)]
        assert errors[0] <= max(errors[1], little * exact.mass)
        assert log["err"][-1] <= 1e-6
        assert_allclose(log["cost"], (plan * M).sum(), rtol=1e-9)
        assert_allclose(log["total_cost"], exact.objective, rtol=1e-6)


@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_warm_start_is_used(method):
    a, b, M, _ = arrays()
    _, log = pot.sinkhorn_unbalanced(a, b, M, REG, 2.0, method, log=True)
    again = pot.sinkhorn_unbalanced(a, b, M, REG, 2.0, method, warmstart=(log["logu"], log["logv"]), log=True)[1]
    assert len(again["err"]) < len(log["err"])


def test_no_stop_means_the_least_error():
    a, b, M, _ = arrays()
    for method in (None, "sinkhorn"):
        assert pot.sinkhorn_unbalanced(a, b, M, REG, 1.0, method, stopThr=0, log=True)[1]["err"][-1] <= 1e-10


def test_named_functions_are_the_named_methods():
    a, b, M, _ = arrays()
    for method, function, more in (
        ("sinkhorn", "sinkhorn_knopp_unbalanced", {}),
        ("sinkhorn_stabilized", "sinkhorn_stabilized_unbalanced", {"tau": 10.0}),
        ("sinkhorn_translation_invariant", "sinkhorn_unbalanced_translation_invariant", {}),
    ):
        expected = pot.sinkhorn_unbalanced(a, b, M, REG, 1.0, method.upper(), **more)
        with pot.patched():
            found = getattr(ot.unbalanced, function)(a, b, M, REG, 1.0, **more)
        assert_allclose(found, expected, rtol=1e-14)
        given = ["kl", None, None, *more.values(), 1000, 1e-6]  # in POT's order
        assert_allclose(getattr(pot, function)(a, b, M, REG, 1.0, *given), expected, rtol=1e-14)


def test_float32_stays_float32():
    a, b, M, _ = arrays(dtype=np.float32)
    plan, log = pot.sinkhorn_unbalanced(a, b, M, REG, 1.0, "sinkhorn", log=True)
    theirs, _ = ot.sinkhorn_unbalanced(a, b, M, REG, 1.0, "sinkhorn", log=True)
    assert plan.dtype == log["logu"].dtype == log["logv"].dtype == np.float32 == log["cost"].dtype
    assert_allclose(plan, theirs, rtol=1e-3)


# the ways to write the arguments


def test_lists_and_empty_marginals():
    M = [[0.0, 1.0], [1.0, 0.0]]
    half = [0.5, 0.5]
    expected = ot.sinkhorn_unbalanced(half, half, M, 1, 1)
    for a, b in ((half, half), ([], []), (np.array([]), half)):
        assert_allclose(pot.sinkhorn_unbalanced(a, b, M, 1, 1, "sinkhorn"), expected, rtol=1e-5)
        assert_allclose(pot.sinkhorn_unbalanced(a, b, M, 1, 1), expected, rtol=1e-5)


@pytest.mark.parametrize(("odd", "meant", "text"),
                         [({"method": "Sinkhorn_Reg_Scaling"}, {"method": "sinkhorn"}, "Method not implemented yet"),
                          ({"reg_type": "entropy"}, {"c": np.ones((13, 17))}, "ones are taken")])  # fmt: skip
def test_what_pot_warns_of(odd, meant, text):
    call = dict(zip("abM", arrays()[:3], strict=True), reg=REG, reg_m=1.0)
    with pytest.warns(UserWarning, match=text):
        plan = pot.sinkhorn_unbalanced(**call, **odd)
    assert_allclose(plan, pot.sinkhorn_unbalanced(**call, **meant), rtol=1e-5)


# several targets


@pytest.mark.parametrize("method", [None, "sinkhorn"])
@pytest.mark.parametrize("kind", ["kl", "entropy", "c"])
def test_several_targets_are_solved_each(method, kind):
    a, b, M, c = arrays()
    B = np.stack([b, 2 * b[::-1], np.where(b > 0.6, b, 0)], axis=1)
    rest = {"c": c} if kind == "c" else {"reg_type": kind}
    for cost in ("linear", "total"):
        many, log = pot.sinkhorn_unbalanced2(a, B, M, REG, 1.0, method, returnCost=cost, log=True, **rest)
        each = [pot.sinkhorn_unbalanced2(a, x, M, REG, 1.0, method, returnCost=cost, **rest) for x in B.T]
        assert many.shape == (3,)
        assert_allclose(many, each, rtol=1e-5)
        assert log["logu"].shape == (13, 3)
        assert log["logv"].shape == (17, 3)
    call = dict(method=method, log=True, **rest)
    assert_allclose(pot.sinkhorn_unbalanced(a, B, M, REG, 1.0, **call)[0], log["cost"], rtol=1e-12)
    again = pot.sinkhorn_unbalanced(a, B, M, REG, 1.0, warmstart=(log["logu"], log["logv"]), **call)[1]
    assert_allclose(again["total_cost"], log["total_cost"], rtol=1e-6)
    theirs = [ot.sinkhorn_unbalanced(a, x, M, REG, 1.0, stopThr=1e-10, **rest) for x in B.T[:2]]
    assert_allclose(log["cost"][:2], [(plan * M).sum() for plan in theirs], rtol=1e-5)
    assert pot.sinkhorn_unbalanced(a, B.tolist(), M, REG, 1.0, method, **rest).shape == (3,)


# tensors


def test_total_cost_of_tensors_has_its_gradient():
    torch = pytest.importorskip("torch")
    a, b, M, _ = (torch.tensor(x, requires_grad=True) for x in arrays(4, 5))
    call = {"reg": REG, "reg_m": 1.0, "returnCost": "total", "stopThr": 1e-10}
    assert torch.autograd.gradcheck(lambda *x: pot.sinkhorn_unbalanced2(*x, **call), (a, b, M), atol=1e-5, rtol=1e-4)
    empty = torch.zeros(0, dtype=torch.float64)
    assert pot.sinkhorn_unbalanced2(empty, b, M, **call).requires_grad
    with torch.no_grad():
        assert not pot.sinkhorn_unbalanced(a, b, M, REG, 1.0).requires_grad
