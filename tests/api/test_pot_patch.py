"""The surface of mapuot.pot: POT's signatures, POT patched, arrays of other libraries."""

import inspect

import numpy as np
import ot
import pytest
from numpy.testing import assert_allclose
from problems import arrays

import mapuot
from mapuot import pot
from mapuot.pot import stand_in

FUNCTIONS = (
    "sinkhorn_unbalanced",
    "sinkhorn_unbalanced2",
    "sinkhorn_knopp_unbalanced",
    "sinkhorn_stabilized_unbalanced",
    "sinkhorn_unbalanced_translation_invariant",
    "barycenter_unbalanced",
    "barycenter_unbalanced_sinkhorn",
    "barycenter_unbalanced_stabilized",
    "mm_unbalanced",
    "mm_unbalanced2",
)
REG = 0.1
pytestmark = [
    pytest.mark.usefixtures("pot_backend"),
    pytest.mark.filterwarnings(
        "ignore::mapuot.ConvergenceWarning", "ignore:If reg_type|Stabilized Unbalanced|Reg_type not"
    ),
]


# the surface


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_is_pots(name):
    ours = inspect.signature(getattr(pot, name)).parameters
    theirs = inspect.signature(getattr(ot.unbalanced, name)).parameters
    theirs = {k: p for k, p in theirs.items() if p.kind is not p.VAR_KEYWORD}
    positional = [k for k, p in ours.items() if p.kind is not p.KEYWORD_ONLY]
    assert positional == list(theirs)
    for key in positional:
        if (name, key) not in {("sinkhorn_unbalanced", "method"), ("sinkhorn_unbalanced2", "method")}:
            assert ours[key].default == theirs[key].default


def test_top_level_names():
    assert mapuot.sinkhorn_unbalanced is pot.sinkhorn_unbalanced
    assert mapuot.sinkhorn_unbalanced2 is pot.sinkhorn_unbalanced2


# POT on mapuot


@pytest.fixture
def patched():
    with pot.patched():
        yield


def holders():
    import ot.solvers._linear as linear

    return [
        (ot, FUNCTIONS[0]), (ot, FUNCTIONS[1]), (ot, FUNCTIONS[5]), (ot.da, FUNCTIONS[0]),
        (linear, "sinkhorn_knopp_unbalanced"), (linear, "mm_unbalanced"),
        *((module, name) for module in (ot.unbalanced, ot.unbalanced._sinkhorn) for name in FUNCTIONS[:8]),
        *((module, name) for module in (ot.unbalanced, ot.unbalanced._mm) for name in FUNCTIONS[8:]),
    ]  # fmt: skip


def test_patch_reaches_every_holder_and_goes_back():
    before = [getattr(module, name) for module, name in holders()]
    with pot.patched():
        assert all(getattr(module, name).__module__.startswith("mapuot.") for module, name in holders())
        with pot.patched():
            pass
        assert ot.da.sinkhorn_unbalanced.__module__ == "mapuot.pot.sinkhorn"
    assert [getattr(module, name) for module, name in holders()] == before
    pot.patch()
    pot.patch()
    with pot.patched():
        pass
    assert ot.sinkhorn_unbalanced.__module__ == "mapuot.pot.sinkhorn"
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
        exact = mapuot.solve(M, a, b, 0.05, (1.0, 2.0), tol=1e-10, backend="reference")
        assert_allclose(sol.plan, exact.plan, atol=1e-9)
        assert_allclose(sol.value, exact.objective, rtol=1e-8)
        assert_allclose(sol.value_linear, exact.cost, rtol=1e-8)
    again = ot.solve(M, a, b, reg=0.05, unbalanced=[1.0, 2.0], potentials_init=sol.potentials)
    assert_allclose(again.plan, exact.plan, atol=1e-9)


def test_ot_solve_without_reg_runs_on_mapuot(patched):
    a, b, M, _ = arrays()
    sol = ot.solve(M, a, b, unbalanced=1.0, unbalanced_type="l2", max_iter=50)
    pot.unpatch()
    assert_allclose(sol.plan, ot.solve(M, a, b, unbalanced=1.0, unbalanced_type="l2", max_iter=50).plan, atol=1e-12)


def test_ot_da_runs_on_mapuot(monkeypatch):
    rng = np.random.default_rng(0)
    xs, xt = rng.random((9, 2)), rng.random((11, 2))
    theirs = ot.da.UnbalancedSinkhornTransport(max_iter=20, log=True).fit(Xs=xs, Xt=xt)
    with pot.patched():
        ours = ot.da.UnbalancedSinkhornTransport(max_iter=20, log=True).fit(Xs=xs, Xt=xt)
    assert_allclose(ours.coupling_, theirs.coupling_, rtol=1e-12)
    assert_allclose(ours.log_["err"], theirs.log_["err"], atol=1e-14)


def test_patched_several_targets_keep_pots_reference(patched):
    """POT solves several targets with ones for c; a named reg_type is honoured."""
    a, b, M, _ = arrays()
    B = np.stack([b, b[::-1]], axis=1)
    ours = ot.sinkhorn_unbalanced2(a, B, M, REG, 1.0)
    kl = ot.sinkhorn_unbalanced2(a, B, M, REG, 1.0, reg_type="kl")
    tol, _ = stand_in.demand(REG, (1.0, 1.0), 1e-6, "sinkhorn")
    assert_allclose(kl, pot.sinkhorn_unbalanced2(a, B, M, REG, 1.0, stopThr=tol), rtol=1e-12)
    pot.unpatch()
    assert_allclose(ours, ot.sinkhorn_unbalanced2(a, B, M, REG, 1.0), rtol=1e-4)


# other array libraries


@pytest.mark.parametrize("method", [None, "sinkhorn"])
def test_tables_of_pandas(method):
    pandas = pytest.importorskip("pandas")
    a, b, M, _ = arrays()
    rows = list("abcdefghijklm")
    table, target = pandas.DataFrame(M, index=rows), pandas.DataFrame(np.stack([b, b[::-1]], axis=1))
    plan = pot.sinkhorn_unbalanced(pandas.Series(a, index=rows), pandas.Series(b), table, REG, 1.0, method)
    assert_allclose(plan, pot.sinkhorn_unbalanced(a, b, M, REG, 1.0, method), rtol=1e-14)
    cost = pot.sinkhorn_unbalanced(a, target, table, REG, 1.0, method)
    assert_allclose(cost, pot.sinkhorn_unbalanced(a, target.to_numpy(), M, REG, 1.0, method), rtol=1e-14)
    A, square = pandas.DataFrame(np.stack([a, a[::-1]], axis=1)), pandas.DataFrame(M @ M.T)
    q = pot.barycenter_unbalanced(A, square, REG, 1.0)
    assert_allclose(q, pot.barycenter_unbalanced(A.to_numpy(), square.to_numpy(), REG, 1.0), rtol=1e-14)
    assert_allclose(pot.mm_unbalanced(a, b, table, 1.0), pot.mm_unbalanced(a, b, M, 1.0), rtol=1e-14)


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


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    a, b, M, _ = (jax.numpy.asarray(x) for x in arrays(dtype=np.float32))
    plan, log = pot.sinkhorn_unbalanced(a, b, M, REG, 1.0, log=True)
    assert isinstance(plan, jax.Array)
    assert isinstance(log["total_cost"], jax.Array)
    with pytest.raises(Exception, match=r"[Tt]racer"):
        jax.grad(lambda x: pot.sinkhorn_unbalanced2(a, b, x, REG, 1.0))(M)
