"""mapuot.pot against POT: accuracy, log keys, the cases where POT fails, and the patched POT."""

import inspect
import warnings

import numpy as np
import ot
import pytest
from judge import divergence
from numpy.testing import assert_allclose
from problems import arrays

import mapuot
from mapuot import pot

METHODS = ("sinkhorn", "sinkhorn_stabilized", "sinkhorn_translation_invariant")
FUNCTIONS = ("sinkhorn_unbalanced", "sinkhorn_unbalanced2", "sinkhorn_knopp_unbalanced",
             "sinkhorn_stabilized_unbalanced", "sinkhorn_unbalanced_translation_invariant", "barycenter_unbalanced",
             "barycenter_unbalanced_sinkhorn", "barycenter_unbalanced_stabilized")  # fmt: skip
REG = 0.1
pytestmark = [
    pytest.mark.usefixtures("pot_backend"),
    pytest.mark.filterwarnings("ignore:reg_type='entropy'|If reg_type|Stabilized Unbalanced|Reg_type not"),
]


# named methods


@pytest.mark.parametrize("count", [2, 1000])
@pytest.mark.parametrize("reg_m", [1.0, (1.0, 3.0), (2, np.inf), np.inf, [0.7]], ids=str)
@pytest.mark.parametrize("reference", ["kl", "entropy", "matrix"])
def test_named_methods_are_nearer_than_pots(reg_m, reference, count):
    a, b, M, c = arrays()
    if reg_m == np.inf:
        a = a / a.sum()
        b = b / b.sum()
    if reference == "matrix":
        rest = {"reg_type": "kl", "c": c}
    else:
        rest = {"reg_type": reference}
    call = dict(a=a, b=b, M=M, reg=REG, reg_m=reg_m, numItermax=count, log=True, **rest)
    given = {"kl": "product", "entropy": "uniform", "matrix": c}[reference]
    exact = mapuot.solve(M, a, b, reg=REG, reg_m=reg_m, reference=given, tol=1e-11)
    for method in METHODS:
        plan, log = pot.sinkhorn_unbalanced(method=method, **call)
        theirs, their_log = ot.sinkhorn_unbalanced(method="sinkhorn", **call)
        assert list(log) == list(their_log)
        # a plan may be right long before its scalings stand still
        if np.isinf(reg_m).any():
            little = 1e-7
        else:
            little = 1e-10
        errors = [np.abs(found - exact.plan).sum() for found in (plan, theirs)]
        assert errors[0] <= max(errors[1], little * exact.mass)
        assert log["err"][-1] <= 1e-6
        assert_allclose(log["cost"], (plan * M).sum(), rtol=1e-9)
        assert_allclose(log["total_cost"], exact.objective, rtol=1e-6)


@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_warm_start_is_used(method):
    """A warm start is used; `stopThr=0` asks for the smallest error."""
    a, b, M, _ = arrays()
    _, log = pot.sinkhorn_unbalanced(a, b, M, REG, 2.0, method, log=True)
    again = pot.sinkhorn_unbalanced(a, b, M, REG, 2.0, method, warmstart=(log["logu"], log["logv"]), log=True)[1]
    assert len(again["err"]) < len(log["err"])
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


def test_costs_below_float32_are_float64():
    """Masses of 1e-30 have costs that float32 would make 0."""
    a, b, M, _ = arrays(dtype=np.float32)
    tiny = [1e-30 * np.asarray(x, np.float64) for x in (a, b)]
    for targets in (tiny[1], np.stack([tiny[1], tiny[1]], 1)):
        given = tiny[0], targets, M, 0.05, 1.0
        _, log = mapuot.pot.sinkhorn_unbalanced(*given, log=True)
        right = mapuot.pot.sinkhorn_unbalanced(*given[:2], M.astype(np.float64), *given[3:], log=True)[1]
        for name in ("cost", "total_cost"):
            assert (right[name] > 0).all()
            np.testing.assert_allclose(log[name], right[name], rtol=1e-4)


def test_float32_stays_float32():
    a, b, M, _ = arrays(dtype=np.float32)
    plan, log = pot.sinkhorn_unbalanced(a, b, M, REG, 1.0, "sinkhorn", log=True)
    theirs, _ = ot.sinkhorn_unbalanced(a, b, M, REG, 1.0, "sinkhorn", log=True)
    assert plan.dtype == log["logu"].dtype == log["logv"].dtype == np.float32 == log["cost"].dtype
    assert_allclose(plan, theirs, rtol=1e-3)


# the ways to write the arguments


def test_lists_tables_and_empty_marginals():
    pandas = pytest.importorskip("pandas")
    (a, b, M, _) = arrays()
    rows = list("abcdefghijklm")
    B = np.stack([b, b[::-1]], 1)
    A = np.stack([a, a[::-1]], 1)
    square = M @ M.T
    table = pandas.DataFrame(M, index=rows)
    half = np.full(17, 1 / 17)
    for method in (None, "sinkhorn"):
        for given, right in (
            ((a.tolist(), b.tolist(), M.tolist()), (a, b, M)), ((a, [], M), (a, half, M)),
            ((a, np.array([]), M), (a, half, M)), ((a, pandas.DataFrame(B), table), (a, B, M)),
            ((pandas.Series(a, index=rows), pandas.Series(b), table), (a, b, M)),
        ):  # fmt: skip
            expected = pot.sinkhorn_unbalanced(*right, REG, 1.0, method)
            assert_allclose(pot.sinkhorn_unbalanced(*given, REG, 1.0, method), expected, rtol=1e-14)
    q = pot.barycenter_unbalanced(pandas.DataFrame(A), pandas.DataFrame(square), REG, 1.0)
    assert_allclose(q, pot.barycenter_unbalanced(A, square, REG, 1.0), rtol=1e-14)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_other_libraries_come_back(library):
    module = pytest.importorskip(library)
    if library == "torch":
        make, kind = module.tensor, module.Tensor
    else:
        make, kind = module.numpy.asarray, module.Array
    plain = arrays(dtype=np.float32)[:3]
    given = [make(x) for x in plain]
    plan, log = pot.sinkhorn_unbalanced(*given, REG, 1.0, "sinkhorn", log=True)
    moved, told = pot.mm_unbalanced(*given, 1.0, log=True)
    for x in (plan, log["logu"], log["total_cost"], moved, told["f"], pot.sinkhorn_unbalanced2(*given, REG, 1.0)):
        assert isinstance(x, kind)
    assert_allclose(plan, pot.sinkhorn_unbalanced(*plain, REG, 1.0, "sinkhorn"), rtol=1e-6)
    assert_allclose(moved, pot.mm_unbalanced(*plain, 1.0), rtol=1e-6)
    if library == "torch":
        with pytest.raises(NotImplementedError, match=r"M requires grad.*detach"):
            pot.sinkhorn_unbalanced(*given[:2], given[2].requires_grad_(), REG, 1.0, reg_type="entropy")
    else:
        with pytest.raises(Exception, match=r"[Tt]racer"):
            module.grad(lambda x: pot.sinkhorn_unbalanced2(*given[:2], x, REG, 1.0))(given[2])


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
    if kind == "c":
        rest = {"c": c}
    else:
        rest = {"reg_type": kind}
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


def test_total_cost_of_tensors_has_its_gradient():
    torch = pytest.importorskip("torch")
    a, b, M, _ = (torch.tensor(x, requires_grad=True) for x in arrays(4, 5))
    call = {"reg": REG, "reg_m": 1.0, "returnCost": "total", "stopThr": 1e-10}
    assert torch.autograd.gradcheck(lambda *x: pot.sinkhorn_unbalanced2(*x, **call), (a, b, M), atol=1e-5, rtol=1e-4)
    empty = torch.zeros(0, dtype=torch.float64)
    assert pot.sinkhorn_unbalanced2(empty, b, M, **call).requires_grad
    with torch.no_grad():
        assert not pot.sinkhorn_unbalanced(a, b, M, REG, 1.0).requires_grad


# ---- mm_unbalanced


@pytest.mark.parametrize("reg_m", [0.1, 1.0, (5.0, 0.5)], ids=str)
@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_gap_is_that_of_the_dual_problem(reg_m, hole, dtype):
    """The gap is of the problem without entropy; with entropy the answer is POT's."""
    a, b, M, _ = arrays(20, 25)
    M = M.astype(dtype)
    small = a[:6], b[:7], M[:6, :7], reg_m
    assert_allclose(pot.mm_unbalanced(*small, reg=0.5), ot.unbalanced.mm_unbalanced(*small, reg=0.5), atol=1e-6)
    with pytest.warns(mapuot.ConvergenceWarning, match="mm_unbalanced not converged: gap"):
        pot.mm_unbalanced(a, b, M, reg_m, numItermax=2)
    if hole:
        M[3], M[5, 7], a[4], b[2] = np.inf, np.inf, 0.0, 0.0
    plan, log = pot.mm_unbalanced(a, b, M, reg_m, log=True)
    assert plan.dtype == dtype
    P = plan.astype(float)
    C = M.astype(float)
    rhos = np.broadcast_to(reg_m, 2)
    r = P.sum(1)
    s = P.sum(0)
    f = log["f"]
    g = log["g"]
    paid = divergence("kl", r, a, rhos[0]).sum() + divergence("kl", s, b, rhos[1]).sum()
    primal = (P * np.where(P > 0, C, 0)).sum() + paid
    assert (f[:, None] + g <= C + 1e-12).all()
    assert not P[np.isinf(C)].any()
    assert not P[a == 0].any()
    assert not P[:, b == 0].any()
    dual = sum(rho * (w * -np.expm1(-x / rho))[w > 0].sum() for rho, w, x in zip(rhos, (a, b), (f, g), strict=True))
    assert log["total_cost"] == pytest.approx(primal, rel=1e-9 if dtype is np.float64 else 1e-6)
    assert log["gap"] == pytest.approx(log["total_cost"] - dual, abs=1e-12)
    assert 0 <= log["gap"] <= 1e-6 * primal


# ---- the surface


@pytest.mark.parametrize("name", [*FUNCTIONS[:2], FUNCTIONS[5]])
def test_signature_is_pots(name):
    ours = inspect.signature(getattr(pot, name)).parameters
    theirs = inspect.signature(getattr(ot.unbalanced, name)).parameters
    theirs = {k: p for k, p in theirs.items() if p.kind is not p.VAR_KEYWORD}
    positional = [k for k, p in ours.items() if p.kind is not p.KEYWORD_ONLY]
    assert positional == list(theirs)
    for key in positional:
        if (name, key) not in {("sinkhorn_unbalanced", "method"), ("sinkhorn_unbalanced2", "method")}:
            assert ours[key].default == theirs[key].default


# ---- POT on mapuot


@pytest.fixture
def patched():
    with pot.patched():
        yield


def holders():
    import ot.solvers._linear as linear

    return [
        (ot, FUNCTIONS[0]), (ot, FUNCTIONS[1]), (ot, FUNCTIONS[5]), (ot.da, FUNCTIONS[0]),
        (linear, "sinkhorn_knopp_unbalanced"),
        *((module, name) for module in (ot.unbalanced, ot.unbalanced._sinkhorn) for name in FUNCTIONS),
    ]  # fmt: skip


def test_patch_reaches_every_holder_and_goes_back():
    before = [getattr(module, name) for module, name in holders()]
    with pytest.raises(KeyError), pot.patched():
        raise KeyError
    with pot.patched():
        assert all(getattr(module, name).__module__.startswith("mapuot.") for module, name in holders())
        with pot.patched():
            pass
        assert ot.da.sinkhorn_unbalanced.__module__ == "mapuot.pot.patching"
    assert [getattr(module, name) for module, name in holders()] == before
    pot.patch()
    pot.patch()
    with pot.patched():
        pass
    assert ot.sinkhorn_unbalanced.__module__ == "mapuot.pot.patching"
    pot.unpatch()
    pot.unpatch()
    assert [getattr(module, name) for module, name in holders()] == before


def test_ot_solve_runs_on_mapuot(patched):
    a, b, M, _ = arrays()
    a[0] = 0  # POT divides by zero here
    for method, stop in ((None, 1e-9), ("sinkhorn", 1e-12)):
        sol = ot.solve(M, a, b, reg=0.05, unbalanced=[1.0, 2.0], method=method, tol=stop, max_iter=5000)
        exact = mapuot.solve(M, a, b, reg=0.05, reg_m=(1.0, 2.0), tol=1e-10, backend="reference")
        assert_allclose(sol.plan, exact.plan, atol=1e-9)
        assert_allclose(sol.value, exact.objective, rtol=1e-8)
        assert_allclose(sol.value_linear, exact.cost, rtol=1e-8)
    again = ot.solve(M, a, b, reg=0.05, unbalanced=[1.0, 2.0], potentials_init=sol.potentials)
    assert_allclose(again.plan, exact.plan, atol=1e-9)
    A = np.stack([a, a[::-1]], axis=1)
    square = M @ M.T
    found = ot.barycenter_unbalanced(A, square, REG, 1.0)
    assert_allclose(found, pot.barycenter_unbalanced(A, square, REG, 1.0), rtol=1e-12)


def test_patched_several_targets_keep_pots_reference(patched):
    """POT solves several targets with ones for c; a named reg_type is honoured."""
    a, b, M, _ = arrays()
    B = np.stack([b, b[::-1]], axis=1)
    ours = ot.sinkhorn_unbalanced2(a, B, M, REG, 1.0)
    kl = ot.sinkhorn_unbalanced2(a, B, M, REG, 1.0, reg_type="kl")
    assert_allclose(kl, pot.sinkhorn_unbalanced2(a, B, M, REG, 1.0, "sinkhorn"), rtol=1e-12)
    pot.unpatch()
    assert_allclose(ours, ot.sinkhorn_unbalanced2(a, B, M, REG, 1.0), rtol=1e-4)


def test_unknown_keywords_give_one_warning_a_name(patched):
    a, b, M, _ = arrays()
    expected = ot.sinkhorn_unbalanced(a, b, M, REG, 1.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            assert_allclose(ot.sinkhorn_unbalanced(a, b, M, REG, 1.0, tau=10.0, numItermaxx=3), expected, rtol=1e-12)
            ot.unbalanced.sinkhorn_knopp_unbalanced(a, b, M, REG, 1.0, numItermaxx=3, method="foo")
    told = [str(x.message) for x in seen if "has no argument" in str(x.message)]
    assert len(told) == 1
    assert "'numItermaxx'" in told[0]
    assert {x.filename for x in seen} == {__file__}


def calls_that_do_not_converge():
    a, b, M, _ = arrays()
    xs = np.random.default_rng(0).random((9, 2))
    hard = (a, b, M, 1e-4, 100.0)
    return {
        "certified": (lambda: pot.sinkhorn_unbalanced(*hard, numItermax=3), "numItermax, reg or stopThr"),
        "targets": (lambda: pot.sinkhorn_unbalanced2(a, np.stack([b, b], axis=1), M, 1e-4,
                                                     100.0, numItermax=3), "numItermax, reg or stopThr"),
        "da": (lambda: mapuot.da.UnbalancedSinkhornTransport(reg_e=1e-3, reg_m=50.0, max_iter=2).fit(
            xs, Xt=xs[:5] + 0.2), "max_iter, reg or tol"),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(calls_that_do_not_converge()))
def test_warnings_are_the_callers(name, patched):
    """Warnings point at the caller's line, and name the caller's arguments."""
    call, words = calls_that_do_not_converge()[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    found = [x for x in seen if x.category is mapuot.ConvergenceWarning]
    assert len(found) == 1
    assert found[0].filename == __file__
    assert words in str(found[0].message)
    assert "max_passes" not in str(found[0].message)


def test_balanced_sides_of_unequal_masses_end_where_pots_iteration_does():
    """POT's scalings drift for ever while its plan meets b; ot.unbalanced is used so with reg_m=inf."""
    a, b, M, _ = arrays()
    B = np.stack([b, 2 * b[::-1], b * a.sum() / b.sum()], axis=1)
    for reg_m in (np.inf, (np.inf, np.inf), [np.inf], np.array([np.inf])):
        for target in (b, B):
            want, their_log = ot.unbalanced.sinkhorn_unbalanced(a, target, M, 1.0, reg_m, reg_type="kl", log=True)
            with pot.patched(), pytest.warns(mapuot.ConvergenceWarning, match="no plan meets both") as seen:
                found, log = ot.unbalanced.sinkhorn_unbalanced(a, target, M, 1.0, reg_m, reg_type="kl", log=True)
            assert len(seen) == 1
            assert seen[0].filename == __file__
            if target is b:
                assert_allclose(found, want, rtol=1e-6)
                terms = 1.0 * (a.sum() * b.sum() - want.sum())  # which POT's total lacks
                assert_allclose(log["total_cost"], their_log["total_cost"] + terms, rtol=1e-6)
                made = np.exp(log["logu"][:, None] + log["logv"] - M / 1.0) * a[:, None] * b
                assert_allclose(made, found, rtol=1e-9)
                with pot.patched(), pytest.warns(mapuot.ConvergenceWarning):
                    assert_allclose(ot.unbalanced.sinkhorn_unbalanced(a, b, M, 1.0, reg_m), want, rtol=1e-6)
            else:  # POT's costs are of the reference 1
                ones = ot.unbalanced.sinkhorn_unbalanced(a, target[:, 1], M, 1.0, reg_m, reg_type="kl")
                assert_allclose(found[1], (ones * M).sum(), rtol=1e-6)
                assert log["logu"].shape == (len(a), 3)


def difference(function, x, i, step=1e-5):
    """Return the slope of a function of a vector by finite differences, one-sided at 0."""
    moved = np.zeros(x.size)
    moved[i] = step
    moved = moved.reshape(x.shape)
    if x.flat[i] == 0:
        return (4 * function(x + moved) - function(x + 2 * moved) - 3 * function(x)) / (2 * step)
    return (function(x + moved) - function(x - moved)) / (2 * step)


@pytest.mark.parametrize("reg_m", [1.0, (0.3, np.inf), (np.inf, 2.0)], ids=str)
def test_patched_plans_and_costs_have_the_gradient_of_the_solution(reg_m, patched):
    """Patched plans and costs have the solution's gradient, also at masses of 0, where POT's iterations divide by 0."""
    torch = pytest.importorskip("torch")
    a, b, M, _ = arrays(4, 5)
    a[1], b[2] = 0.0, 0.0
    weights = np.random.default_rng(1).random(M.shape)

    def plan(a, b, M):
        return mapuot.solve(M, a, b, reg=REG, reg_m=reg_m, tol=1e-12, precision="float64")

    values = {
        "plan": lambda *x: (weights * plan(*x).plan).sum(),
        "cost": lambda *x: plan(*x).cost,
        "total_cost": lambda *x: plan(*x).objective,
    }
    for name, value in values.items():
        given = [torch.tensor(x, requires_grad=True) for x in (a, b, M)]
        sol = ot.solve(given[2], *given[:2], reg=REG, unbalanced=reg_m, tol=1e-12)
        found = {"plan": (torch.tensor(weights) * sol.plan).sum(), "cost": sol.value_linear, "total_cost": sol.value}
        assert_allclose(found[name].item(), value(a, b, M), rtol=1e-8)
        found[name].backward()
        for k, (x, tensor) in enumerate(zip((a, b, M), given, strict=True)):
            one = [a, b, M]
            slopes = [difference(lambda z: value(*one[:k], z, *one[k + 1 :]), x, i) for i in range(x.size)]  # noqa: B023
            assert_allclose(tensor.grad.flatten(), slopes, rtol=2e-4, atol=2e-6)


def test_gradients_of_several_targets(patched):
    torch = pytest.importorskip("torch")
    a, b, M, _ = (torch.tensor(x, requires_grad=True) for x in arrays(4, 5))
    B = torch.stack([b, 2 * b.flip(0)], 1)
    for kind in ("linear", "total"):
        both = ot.unbalanced.sinkhorn_unbalanced2(a, B, M, REG, 1.0, reg_type="kl", returnCost=kind)
        each = [ot.unbalanced.sinkhorn_unbalanced2(a, x, M, REG, 1.0, returnCost=kind) for x in B.T]
        assert_allclose(both.detach(), [x.item() for x in each], rtol=1e-7)
        for found, want in zip(*(torch.autograd.grad(sum(x), (a, b, M), retain_graph=True) for x in (both, each)),
                               strict=True):  # fmt: skip
            assert_allclose(found, want, rtol=1e-5, atol=1e-9)


def test_balanced_sides_of_unequal_masses_have_gradients():
    torch = pytest.importorskip("torch")
    a, b, M, _ = arrays(4, 5)
    given = [torch.tensor(x, requires_grad=True) for x in (a, b, M)]
    with pytest.warns(mapuot.ConvergenceWarning, match="no plan meets both"):
        plan, log = pot.sinkhorn_unbalanced(*given, REG, np.inf, "sinkhorn", log=True, stopThr=1e-12)
    log["total_cost"].backward()
    assert_allclose(given[2].grad, plan.detach(), rtol=1e-6)

    def value(a):
        want = mapuot.solve(M, a * (b.sum() / a.sum()), b, reg=REG, reg_m=np.inf, tol=1e-11, reference=a[:, None] * b)
        return want.objective

    slopes = np.array([difference(value, a, i) for i in range(4)])
    assert_allclose(given[0].grad, slopes, rtol=1e-4, atol=1e-6)


def test_other_gradients_go_through_pot_with_a_warning(patched):
    """Calls that need a gradient through the iterations stay with POT: mapuot has no such gradient."""
    torch = pytest.importorskip("torch")
    theirs = {name: pair[0] for name, pair in pot.patching.installed.items()}
    A = np.stack([arrays()[0], arrays()[0][::-1]], axis=1)
    square = arrays()[2] @ arrays()[2].T
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for name in FUNCTIONS:
            slopes = []
            if "bary" in name:
                more = {}
            else:
                more = {"reg_type": "entropy"}
            for function in (getattr(ot.unbalanced, name), theirs[name]):
                args = [torch.tensor(x, requires_grad=True) for x in ((A, square) if "bary" in name else arrays()[:3])]
                (function(*args, REG, 1.0, **more) ** 2).sum().backward()
                slopes.append([x.grad for x in args])
            for one, other in zip(*slopes, strict=True):
                assert_allclose(one, other, rtol=1e-10)
                assert np.abs(other).sum() > 0
    told = [x for x in seen if "POT's own function answers" in str(x.message)]
    assert len(told) == 1
    assert told[0].filename == __file__
