"""The surface of mapuot.pot: POT's signatures, POT patched, arrays of other libraries."""

import inspect
import warnings

import numpy as np
import ot
import pytest
from numpy.testing import assert_allclose
from problems import arrays

import mapuot
from mapuot import pot

FUNCTIONS = ("sinkhorn_unbalanced", "sinkhorn_unbalanced2", "sinkhorn_knopp_unbalanced",
             "sinkhorn_stabilized_unbalanced", "sinkhorn_unbalanced_translation_invariant", "barycenter_unbalanced",
             "barycenter_unbalanced_sinkhorn", "barycenter_unbalanced_stabilized")  # fmt: skip
REG = 0.1
pytestmark = [pytest.mark.usefixtures("pot_backend"),
              pytest.mark.filterwarnings("ignore:If reg_type|Stabilized Unbalanced|Reg_type not")]  # fmt: skip


# the surface


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


# POT on mapuot


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


def test_patch_goes_back_after_an_error():
    with pytest.raises(KeyError), pot.patched():
        raise KeyError
    assert ot.sinkhorn_unbalanced.__module__ == "ot.unbalanced._sinkhorn"


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
    A, square = np.stack([a, a[::-1]], axis=1), M @ M.T
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


# what the caller hears


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
    """They point at his line, and name his arguments."""
    call, words = calls_that_do_not_converge()[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    found = [x for x in seen if x.category is mapuot.ConvergenceWarning]
    assert len(found) == 1
    assert found[0].filename == __file__
    assert words in str(found[0].message)
    assert "max_passes" not in str(found[0].message)


# other array libraries


def test_tables_of_pandas():
    pandas = pytest.importorskip("pandas")
    a, b, M, _ = arrays()
    rows = list("abcdefghijklm")
    table, target = pandas.DataFrame(M, index=rows), pandas.DataFrame(np.stack([b, b[::-1]], axis=1))
    plan = pot.sinkhorn_unbalanced(pandas.Series(a, index=rows), pandas.Series(b), table, REG, 1.0)
    assert_allclose(plan, pot.sinkhorn_unbalanced(a, b, M, REG, 1.0), rtol=1e-14)
    cost = pot.sinkhorn_unbalanced(a, target, table, REG, 1.0)
    assert_allclose(cost, pot.sinkhorn_unbalanced(a, target.to_numpy(), M, REG, 1.0), rtol=1e-14)
    A, square = pandas.DataFrame(np.stack([a, a[::-1]], axis=1)), pandas.DataFrame(M @ M.T)
    q = pot.barycenter_unbalanced(A, square, REG, 1.0)
    assert_allclose(q, pot.barycenter_unbalanced(A.to_numpy(), square.to_numpy(), REG, 1.0), rtol=1e-14)


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    a, b, M, _ = (torch.tensor(x) for x in arrays())
    plan, log = pot.sinkhorn_unbalanced(a, b, M, REG, 1.0, "sinkhorn", log=True)
    assert isinstance(plan, torch.Tensor)
    assert plan.dtype == torch.float64 == log["logu"].dtype
    assert_allclose(plan.numpy(), pot.sinkhorn_unbalanced(*arrays()[:3], REG, 1.0, "sinkhorn"), rtol=1e-14)
    assert isinstance(pot.sinkhorn_unbalanced2(a, b, M, REG, 1.0), torch.Tensor)
    with pytest.raises(NotImplementedError, match=r"M requires grad.*detach"):
        pot.sinkhorn_unbalanced(a, b, M.requires_grad_(), REG, 1.0)


def test_gradients_go_through_pot(patched):
    """Where a tensor requires grad, the patched call is POT's own, which differentiates its iterations."""
    torch = pytest.importorskip("torch")
    theirs = {name: pair[0] for name, pair in pot.patching.installed.items()}
    A = np.stack([arrays()[0], arrays()[0][::-1]], axis=1)
    square = arrays()[2] @ arrays()[2].T
    for name in FUNCTIONS:
        slopes = []
        for function in (getattr(ot.unbalanced, name), theirs[name]):
            args = [torch.tensor(x, requires_grad=True) for x in ((A, square) if "bary" in name else arrays()[:3])]
            (function(*args, REG, 1.0) ** 2).sum().backward()
            slopes.append([x.grad for x in args])
        for one, other in zip(*slopes, strict=True):
            assert_allclose(one, other, rtol=1e-10)
            assert np.abs(other).sum() > 0


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    a, b, M, _ = (jax.numpy.asarray(x) for x in arrays(dtype=np.float32))
    plan, log = pot.sinkhorn_unbalanced(a, b, M, REG, 1.0, log=True)
    assert isinstance(plan, jax.Array)
    assert isinstance(log["total_cost"], jax.Array)
    with pytest.raises(Exception, match=r"[Tt]racer"):
        jax.grad(lambda x: pot.sinkhorn_unbalanced2(a, b, x, REG, 1.0))(M)
