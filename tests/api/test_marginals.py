"""`multimarginal`: every shape agrees with Newton's method on the dual of the whole array; its certificate is true."""

import gc
import pickle
import tracemalloc
import weakref

import numpy as np
import pytest
import scipy.sparse
from conftest import CUDA, ON_CPU
from marginals import (
    SHAPES,
    STORED,
    as_stored,
    axes_but,
    check,
    drifting,
    edge_by_edge,
    edges_of,
    one_random,
    plan_of,
    problem,
    whole,
)  # fmt: skip

import mapuot
from mapuot.backends.kernel import StaleError
from mapuot.marginals import certificate, coarse
from mapuot.marginals.settings import TREES
from mapuot.marginals.tree import Tree
from mapuot.penalties import kl_divergence


@pytest.mark.parametrize(("shape", "count"), [(x, n) for x in SHAPES for n in (3, 4, 5) if n == 3 or x != "triangle"])
@pytest.mark.parametrize(
    ("reg", "rho", "free"),
    [(0.1, 1.0, None), (0.02, 1.0, None), (0.02, 30.0, None), (0.05, 0.01, None), (0.05, [0.3, 3.0, 30.0], None),
     (0.05, [np.inf, 1.0, 0.1], None), (0.05, [1.0, 2.0, np.inf], None), (0.05, [np.inf] * 3, None),
     (0.05, [1.0, 2.0, 3.0], 0), (0.05, [1.0, 2.0, 3.0], 1), (0.05, [1.0, 2.0, 3.0], 2)],
)  # fmt: skip
def test_plans_are_those_of_newton(shape, count, reg, rho, free):
    """Solve with one reg_m for all marginals, or one for each of three; a marginal may be hard or free."""
    if isinstance(rho, list) and count > 3:
        pytest.skip("three reg_m")
    costs, masses = problem(shape, count, 6 if count == 3 else 9 - count, ratio=1.0 if rho == [np.inf] * 3 else 1.2)
    sizes = [len(x) for x in masses]
    if free is not None:
        masses[free] = None
    result = mapuot.multimarginal(costs, masses, reg=reg, reg_m=rho, tol=1e-9)
    assert result.converged
    assert check(result, costs, masses, reg, rho if isinstance(rho, list) else [rho] * count, sizes) < 1e-8
    assert free is None or (result.log_u[free] == 0).all()
    for k in np.flatnonzero(np.isinf(rho)):
        np.testing.assert_allclose(result.marginal(int(k)), masses[k], atol=1e-8)


@pytest.mark.parametrize("shape", SHAPES)
def test_points_without_mass_and_forbidden_pairs(shape):
    costs, masses = problem(shape, 3, 8)
    masses[0][2] = masses[1][0] = 0.0
    for M in costs.values() if isinstance(costs, dict) else [costs]:
        M[1, 3] = M[2, 1] = np.inf
        M[4] = np.inf  # nothing reaches that point
    result = mapuot.multimarginal(costs, masses, reg=0.05, reg_m=1.0, tol=1e-9)
    assert result.converged
    assert check(result, costs, masses, 0.05, [1.0] * 3) < 1e-8
    assert result.log_u[0][2] == -np.inf
    again = pickle.loads(pickle.dumps(result))  # without its kernels, which are made again for products
    assert (again.trace, again.cost, again.objective) == (result.trace, result.cost, result.objective)
    np.testing.assert_array_equal(again.pair(0, 2), result.pair(0, 2))
    np.testing.assert_array_equal(again.potentials[1], result.potentials[1])
    with pytest.raises(mapuot.InfeasibleError, match=r"masses\[\d\]\[4\]"):
        mapuot.multimarginal(costs, masses, reg=0.05, reg_m=[np.inf, 1.0, 1.0])


@pytest.mark.parametrize(
    ("shape", "n", "reg", "drawn"),
    [("chain", 7, 5e-4, False), ("star", 7, 5e-4, False), ("array", 7, 5e-4, False), ("triangle", 6, 1e-3, False),
     ("triangle", 6, 1e-3, True)],
)  # fmt: skip
def test_small_reg_takes_kernels_anew(shape, n, reg, drawn):
    """A triangle multiplies on logarithms where exp(-C / reg) leaves float64 by far."""
    costs, masses = problem(shape, 3, n)
    if drawn:
        rng = np.random.default_rng(0)
        costs = {pair: rng.random(M.shape) for pair, M in costs.items()}
    result = mapuot.multimarginal(costs, masses, reg=reg, reg_m=1.0)
    assert result.converged
    assert check(result, costs, masses, reg, [1.0] * 3) < 1e-6


def solved_in(costs, masses, *axes, **options):
    """Return (the result, bytes at the peak of the solve and of the coupling of these axes)."""
    mapuot.multimarginal({(0, 1): np.eye(2)}, [np.ones(2)] * 2, reg=1.0, reg_m=1.0).pair(0, 1)  # imports
    tracemalloc.start()
    result = mapuot.multimarginal(costs, masses, **options)
    if axes:
        result.pair(*axes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.converged
    return result, peak


@pytest.mark.parametrize(
    ("shape", "count", "n", "reg", "most"),
    [
        ("chain", 6, 50, 0.05, 40 * 8 * 51**2 + 500_000),  # which has 50^6 entries
        ("triangle", 3, 200, 0.05, 25 * 8 * 201**2 + 500_000), ("stored pairs", 3, 3000, 0.01, 3000**2),
        ("chain", 3, 500, 1e-3, 1.6 * 8 * 2 * 500**2), ("array", 3, 90, 1e-3, 1.6 * 8 * 90**3),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_pairs(shape, count, n, reg, most):
    """At range(C) / reg = 1000 the solver anneals from two larger regs and keeps their kernels in the same memory."""
    rng = np.random.default_rng(0)
    if shape == "stored pairs":
        clouds = rng.random((3, n, 2))
        masses = [np.full(n, 1.1**k / n) for k in range(3)]
        costs = {(k, k + 1): mapuot.knn_cost(clouds[k], clouds[k + 1], 8) for k in range(2)}
    else:
        costs, masses = problem(shape, count, n)
    if reg > 1e-3:
        axes = (0, count - 1)
        options = {}
    else:
        axes = ()
        options = {"tol": 1e-2}
    if shape == "stored pairs":
        axes = (0, 1)
    result, peak = solved_in(costs, masses, *axes, reg=reg, reg_m=1.0, threads=1, **options)
    assert peak < most
    assert "larger reg" in result.how or reg > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("far", [1e5, -1e5])
def test_a_plan_out_of_float64_certifies_nothing(shape, far):
    costs, masses = problem(shape, 3)
    if isinstance(costs, dict):
        costs = {pair: M + far for pair, M in costs.items()}
    else:
        costs = costs + far
    with pytest.warns(mapuot.ConvergenceWarning, match="underflow|not finite"):
        result = mapuot.multimarginal(costs, masses, reg=0.05, reg_m=1.0)
    assert result.status == ("underflow" if far > 0 else "not finite")
    assert (result.error_bound, result.gap, result.dual, result.objective) == (np.inf, np.inf, -np.inf, np.inf)
    assert np.isnan([result.mass, result.cost]).all()
    assert "nothing certified yet" in repr(result)
    with pytest.warns(mapuot.ConvergenceWarning, match="underflow"):  # reg times the mass, which gaps are in, is 0
        tiny = mapuot.multimarginal({(0, 1): np.eye(2) * 1e-150}, [np.full(2, 1e-120)] * 2, reg=1e-150, reg_m=1e-150)
    assert (tiny.status, tiny.error_bound, tiny.dual) == ("underflow", np.inf, -np.inf)


def test_couplings_agree_with_each_other():
    """Couplings agree with each other also for one stored edge and a point without mass; along it they are sparse."""
    costs, masses = problem("tree", 5, 9, seed=3)
    i, j = next(iter(costs))
    costs[i, j][costs[i, j] > 0.3] = costs[i, j][4] = np.inf
    masses[i][2] = 0.0
    stored = {**costs, (i, j): as_stored(costs)[i, j]}
    result, near = (mapuot.multimarginal(x, masses, reg=0.05, reg_m=1.0) for x in (costs, stored))
    for one, other in ((i, j), (j, i)):
        P = near.pair(one, other)
        Q = result.pair(one, other)
        assert isinstance(P, scipy.sparse.csr_array)
        assert P.nnz <= stored[i, j].nnz
        np.testing.assert_allclose(P.toarray(), Q, rtol=1e-10, atol=1e-300)
        np.testing.assert_allclose(near.conditional(one, other).sum(1)[Q.sum(1) > 0], 1.0, rtol=1e-12)
    np.testing.assert_allclose(near.cost, result.cost, rtol=1e-12)
    X = np.random.default_rng(0).random((len(masses[4]), 3))
    for i in range(4):
        P = result.pair(i, 4)
        np.testing.assert_allclose(result.apply(i, 4, X), P @ X, rtol=1e-12)
        np.testing.assert_allclose(result.apply(i, 4, X[:, 0]), P @ X[:, 0], rtol=1e-12)
        np.testing.assert_allclose(result.pair(4, i), P.T, rtol=1e-10)
        np.testing.assert_allclose(P.sum(1), result.marginal(i), rtol=1e-12)
        np.testing.assert_allclose(result.conditional(i, 4).sum(1)[P.sum(1) > 0], 1.0, rtol=1e-12)
    paid = sum((result.pair(i, j) * np.where(np.isinf(M), 0, M)).sum() for (i, j), M in costs.items())
    np.testing.assert_allclose(result.cost, paid, rtol=1e-12)
    np.testing.assert_allclose(result.potentials[2], 0.05 * result.log_u[2])


def in_parts(parts, n, rng):
    """Return a chain of three marginals; its pairs connect ``parts`` groups of n points each."""
    costs = {(k, k + 1): np.full((parts * n, parts * n), np.inf) for k in range(2)}
    masses = [rng.dirichlet(np.full(parts * n, 3.0)) for _ in range(3)]
    for part in range(parts):
        own = slice(part * n, (part + 1) * n)
        for M in costs.values():
            M[own, own] = rng.random((n, n))
    return costs, masses


@pytest.mark.parametrize("rho", [0.3, 20.0, [np.inf, 20.0, 20.0]])
def test_parts_have_translations_of_their_own(rho):
    """Masses that differ by 3 in one part and 1/3 in another need a translation for each part."""
    rng = np.random.default_rng(0)
    costs, masses = in_parts(4, 5, rng)
    masses[1][:5] *= 3.0
    masses[1][5:10] /= 3.0
    whole = mapuot.multimarginal(as_stored(costs), masses, reg=0.05, reg_m=rho, tol=1e-9)
    assert whole.problem.parts == 4
    assert whole.converged
    check(whole, costs, masses, 0.05, rho if isinstance(rho, list) else [rho] * 3)
    alone = []
    for part in range(4):
        own = slice(part * 5, part * 5 + 5)
        one = mapuot.multimarginal(
            {pair: M[own, own] for pair, M in costs.items()}, [x[own] for x in masses], reg=0.05, reg_m=rho, tol=1e-9
        )
        np.testing.assert_allclose(whole.pair(0, 2)[own, own], one.pair(0, 2), atol=1e-8)
        alone.append(one.n_passes)
    assert whole.n_passes <= 2 * max(alone)
    dense = mapuot.multimarginal(costs, masses, reg=0.05, reg_m=rho, tol=1e-9)
    assert abs(dense.n_passes - whole.n_passes) <= 2


def test_parts_whose_balanced_masses_differ_are_named():
    costs, masses = in_parts(3, 2, np.random.default_rng(0))
    masses = [np.full(6, 1.0) for _ in masses]
    masses[2][:2], masses[2][4:] = 1.5, 0.5
    text = r"costs connect masses\[0\]\[0\], masses\[0\]\[1\] with masses\[2\]\[0\], masses\[2\]\[1\] only, .* 2 and 3"
    for given in (costs, as_stored(costs)):
        with pytest.raises(mapuot.InfeasibleError, match=text):
            mapuot.multimarginal(given, masses, reg=0.1, reg_m=[np.inf, 1.0, np.inf])
        assert mapuot.multimarginal(given, masses, reg=0.1, reg_m=[np.inf, 1.0, 1.0]).converged
    costs[1, 2][1, 2] = 1.0  # one pair between two parts lets mass through, and leaves the third as it is
    masses[2][:] = 1.5, 1.5, 0.5, 0.5, 1.0, 1.0
    for given in (costs, as_stored(costs)):
        assert mapuot.multimarginal(given, masses, reg=0.1, reg_m=[np.inf, 1.0, 1.0]).problem.parts == 2


def test_parts_of_one_cost_between_balanced_marginals():
    """A cost that joins all parts elsewhere, through a balanced marginal, lets no mass through."""
    costs, masses = in_parts(2, 3, np.random.default_rng(0))
    costs[1, 2] = np.ones((6, 4))
    masses[0][:3] *= 1.5
    masses = [x / x.sum() for x in masses[:2]]
    text = r"costs connect masses\[0\]\[0\], .* with masses\[1\]\[0\], .* only"
    for given in (costs, as_stored(costs), {**costs, (0, 2): np.ones((6, 4))}):
        with pytest.raises(mapuot.InfeasibleError, match=text):
            mapuot.multimarginal(given, [*masses, None], reg=0.1, reg_m=np.inf)
    joined = {(0, 2): costs[0, 1], (1, 2): np.ones((6, 6))}  # through the free marginal 2
    assert mapuot.multimarginal(joined, [*masses, None], reg=0.1, reg_m=np.inf).converged


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stored_pairs_are_summed_entry_by_entry_where_kernels_cannot(dtype, monkeypatch):
    """Stored pairs and their coupling are float64, whatever their input's dtype."""
    costs, masses = problem("chain", 3, 9)
    stored = {
        pair: S.astype(dtype)
        for pair, S in as_stored({p: np.where(M < 0.5, M, np.inf) for p, M in costs.items()}).items()
    }
    wide = {pair: S.astype(np.float64) for pair, S in stored.items()}
    plain, same = (mapuot.multimarginal(x, masses, reg=0.05, reg_m=1.0, tol=1e-11) for x in (stored, wide))
    assert same.converged

    def stale(self, y, product):
        raise StaleError

    monkeypatch.setattr("mapuot.backends.kernel.LogKernel.sound", stale)
    slow = mapuot.multimarginal(stored, masses, reg=0.05, reg_m=1.0, tol=1e-11)
    for other in (plain, slow):
        assert other.n_passes == same.n_passes
        for i, j in ((0, 1), (0, 2)):
            P, Q = (x.toarray() if scipy.sparse.issparse(x) else x for x in (other.pair(i, j), same.pair(i, j)))
            np.testing.assert_allclose(P, Q, rtol=1e-9)


@pytest.mark.parametrize("reg", [0.02, 0.3])
def test_a_triangle_of_float32_costs_is_solved_in_float64(reg):
    """An exponent rounded to float32 is off by 1e-7 of its size, which no certificate sees."""
    costs, masses = problem("triangle", 3, 7)
    narrow = {pair: M.astype(np.float32) for pair, M in costs.items()}
    wide = {pair: M.astype(np.float64) for pair, M in narrow.items()}
    one, other = (mapuot.multimarginal(x, masses, reg=reg, reg_m=1.0, tol=1e-10) for x in (narrow, wide))
    assert one.converged
    assert one.dual == pytest.approx(other.dual, rel=1e-13)
    np.testing.assert_allclose(one.pair(0, 1), other.pair(0, 1), rtol=1e-11)


@pytest.mark.parametrize("backend", ["cpu", *CUDA])
@pytest.mark.parametrize("shape", ["chain", "triangle", "array"])
def test_kernels_go_with_their_answer(shape, backend):
    """Kernels are freed with their answer, not at the next collection of cycles, which memory use does not hasten."""
    if (shape, backend) == ("chain", "cpu"):
        costs, masses = drifting(1.0)
    else:
        costs, masses = problem(shape, 3, sizes=20)
    result = mapuot.multimarginal(costs, masses, reg=0.02, reg_m=1.0, backend=backend)
    if shape == "chain":
        kernels = result._body.kernels.values()
    else:
        kernels = [result._body.kernel]
    assert (shape, backend) != ("chain", "cpu") or result._body.coarse is not None
    gone = [weakref.ref(x) for x in kernels]
    del kernels
    gc.collect()
    gc.disable()
    try:
        del result
        assert [x() for x in gone] == [None] * len(gone)
    finally:
        gc.enable()


def in_slabs(kind, C, folder):
    """Return the same costs, read in slabs, so that they need not be in memory."""
    if kind == "function":
        return lambda i0, i1: C[i0:i1]
    np.save(folder / "C.npy", C)
    if kind == "path":
        return folder / "C.npy"
    if kind == "map":
        return np.load(folder / "C.npy", mmap_mode="r")
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "C.h5", "w") as file:
        file["C"] = C
    return h5py.File(folder / "C.h5", "r")["C"]


@pytest.mark.parametrize("kind", ["function", "path", "map", "h5py"])
@pytest.mark.parametrize("stored", [True, False])
def test_slabs_are_their_array(kind, stored, tmp_path, monkeypatch):
    """Slabs give the array's bits where a kernel is stored; otherwise each pass reads them once and stores none."""
    C, masses = problem("array", 3, 12)
    C[3] = C[:, 2, 5] = np.inf
    masses[1][4] = 0.0
    if not stored:
        monkeypatch.setattr("mapuot.marginals.problem.free_memory", lambda: 0.0)
    result = mapuot.multimarginal(in_slabs(kind, C, tmp_path), masses, reg=0.05, reg_m=[1.0, 2.0, 3.0])
    assert result.converged
    assert result.problem.storage == ("float64" if stored else "made")
    check(result, C, masses, 0.05, [1.0, 2.0, 3.0])
    if stored:
        same = mapuot.multimarginal(C, masses, reg=0.05, reg_m=[1.0, 2.0, 3.0])
        np.testing.assert_array_equal(result.pair(0, 2), same.pair(0, 2))


@pytest.mark.parametrize("shape", ["chain", "star"])
def test_points_without_a_kernel(shape, monkeypatch):
    """Where kernels do not fit, passes make their rows from the points, and hold vectors only."""
    n = 500
    rng = np.random.default_rng(0)
    clouds = [rng.random((n + k, 2)) for k in range(3)]
    edges = edges_of(shape, 3, rng)
    costs = {(i, j): mapuot.PointCloud(clouds[i], clouds[j]) for i, j in edges}
    masses = [np.full(len(x), 1.1**k / len(x)) for k, x in enumerate(clouds)]
    stored = mapuot.multimarginal(costs, masses, reg=0.05, reg_m=1.0)
    monkeypatch.setattr("mapuot.marginals.problem.free_memory", lambda: 0.0)
    made, peak = solved_in(costs, masses, reg=0.05, reg_m=1.0, threads=1)
    made.apply(0, 2, clouds[2])
    assert peak < 8 * n * n
    for k in range(3):
        np.testing.assert_allclose(made.marginal(k), stored.marginal(k), rtol=1e-5)


def test_kernels_made_between_the_products_of_a_plan(narrow):
    """Kernels rebuilt between products differ in float32; the certificate counts this as rounding of sums."""
    costs, masses = problem("chain", 3)
    tree = mapuot.multimarginal(costs, masses, reg=0.05, reg_m=1.0)._body
    for anew in (False, True):
        found = tree.sweep(np.zeros(tree.ends[-1]), False)
        if anew:
            child, parent = tree.inner[0]
            tree.kernels[child].absorb(np.ones(len(masses[parent])))
        tree.complete(found)
        assert found.storage > 2.0**-24
        assert (found.rounding > 2.0**-24) == anew


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("shape", ["chain", "star", "tree"])
@pytest.mark.parametrize(("reg", "tol", "storage"), [(0.1, 1e-9, 0.0), (2e-3, 1e-7, 0.0), (0.1, 1e-6, 3 * STORED)])
def test_passes_are_those_edge_by_edge(shape, stored, reg, tol, storage, monkeypatch, using):
    """One call of C and the products of each kernel agree; a call leaves the cases it cannot do to the products."""
    if storage:
        using(TREES, small_entries=0)
    costs, masses = problem(shape, 4, 6)
    given = as_stored(costs) if stored else costs
    rho = [1.0, 0.3, 0.02, 30.0]
    one = mapuot.multimarginal(given, masses, reg=reg, reg_m=rho, tol=tol)
    edge_by_edge(monkeypatch)
    other = mapuot.multimarginal(given, masses, reg=reg, reg_m=rho, tol=tol)
    assert one.converged
    assert abs(one.n_passes - other.n_passes) <= 1 + 0.1 * one.n_passes
    assert other.problem.storage == ("float32" if storage else "float64")
    check(other, costs, masses, reg, rho, storage=storage)
    for k in range(4):
        np.testing.assert_allclose(one.marginal(k), other.marginal(k), atol=10 * tol)


def test_it_says_how_far_it_came():
    costs, masses = problem("chain", 3)
    with pytest.warns(mapuot.ConvergenceWarning, match="max_passes"):
        result = mapuot.multimarginal(costs, masses, reg=0.02, reg_m=1.0, max_passes=3)
    assert result.n_passes == len(result.trace) == 3
    assert "tree of 6 x 7 x 6, max_passes after 3 passes" in repr(result)
    seen = []
    result = mapuot.multimarginal(
        costs, masses, reg=0.02, reg_m=1.0, callback=lambda x: seen.append(x) or len(seen) == 2
    )
    assert (result.status, len(seen)) == ("cancelled", 2)
    loose = mapuot.multimarginal(costs, masses, reg=0.02, reg_m=1.0, tol_gap=1e-3)
    assert loose.converged
    assert loose.how == "float64 tiles"
    assert mapuot.multimarginal(costs, masses, reg=1e-3, reg_m=1.0).how == "float64 tiles, 2 larger regs"
    assert loose.gap <= 1e-3 * abs(loose.dual)
    assert loose.n_passes < mapuot.multimarginal(costs, masses, reg=0.02, reg_m=1.0).n_passes


@pytest.fixture
def narrow(using):
    """Kernels of any size are in float32 where tol allows it."""
    using(TREES, small_entries=0)


@pytest.mark.parametrize("shape", ["chain", "array", "triangle"])
def test_hard_masses_that_differ_by_rounding_are_brought_to_the_first(shape):
    """Masses apart by 4e-7 have no plan that meets both: all are scaled to the sum of the first."""
    costs, masses = problem(shape, 3, ratio=1.0)
    masses = [x / x.sum() for x in masses]
    wanted = mapuot.multimarginal(costs, masses, reg=0.05, reg_m=np.inf, tol=1e-8)
    apart = [x * (1 + 2e-7 * k) for k, x in enumerate(masses)]
    result = mapuot.multimarginal(costs, apart, reg=0.05, reg_m=np.inf, tol=1e-8)
    assert result.converged
    assert result.mass == pytest.approx(wanted.mass, rel=1e-8)
    for found, right in zip(result.marginals, wanted.marginals, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6)


@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.nightly) for k in range(1, 4))])
@pytest.mark.parametrize(
    "kind", ["any", "hard", "stored pairs", "corrected steps", *(pytest.param("cuda", marks=x.marks) for x in CUDA)]
)
@pytest.mark.parametrize("storage", ["float64", "float32"])
def test_no_false_certificate(storage, kind, part, monkeypatch, using):
    """From the second pass on, steps along trees of any size are corrected by nearly as many clusters as points."""
    narrow = storage == "float32"
    steps = []
    step = coarse.TreeCoarse.step
    if narrow:
        using(TREES, small_entries=0)
    if kind == "corrected steps":
        using(TREES, corrected_entries=0, cheap=np.inf)
        monkeypatch.setattr(coarse, "clusters_of", lambda points, entries: 1 << points.bit_length() - 1)
        monkeypatch.setattr(coarse.TreeCoarse, "step", lambda *args: steps.append(step(*args)) or steps[-1])
    most = 20 if narrow else 50
    count = {"stored pairs": 20, "corrected steps": min(25, most), "cuda": 8 if ON_CPU else 250}.get(kind, most)
    first = 2000 * (kind == "corrected steps") + part * count
    seeds = range(first, first + count)
    backend = "cuda" if kind == "cuda" else "cpu"
    solved = [x for seed in seeds if (x := one_random(seed, narrow, kind, backend)) is not None]
    assert len(solved) >= {"stored pairs": 0.5, "hard": 0.7}.get(kind, 1) * count
    assert sum(converged for converged, _ in solved) >= (0.9 * len(solved) if kind == "hard" else len(solved) - 2)
    assert narrow or np.median([ratio for converged, ratio in solved if converged]) > 0.1 or kind != "hard"
    assert len(steps) > count or kind != "corrected steps"  # else it tells nothing of them


@pytest.mark.parametrize("reg_m", [1.0, np.inf])
def test_a_certificate_tells_the_rounding_of_exponents(reg_m, monkeypatch):
    """Newton's bound adds the rounding of the exponents: twice 4 roundings of the largest cost / reg."""
    ratios = []
    certify = certificate.certify

    def recorded(problem, *others):
        told = certify(problem, *others)
        if told.error < np.inf:
            ratios.append(told.rounding[0] / (8 * 2.0**-53 * problem.largest / problem.reg))
        return told

    monkeypatch.setattr(certificate, "certify", recorded)
    costs, masses = problem("chain", 3, 6)
    mapuot.multimarginal(costs, [x / x.sum() for x in masses], reg=1e-3, reg_m=reg_m)
    assert ratios
    assert min(ratios) >= 1


@pytest.mark.parametrize(("reg_m", "most"), [(0.05, 0.5), (1.0, 0.6), (np.inf, 0.7)])
def test_clusters_save_passes(reg_m, most, using):
    costs, masses = drifting(reg_m)
    found = mapuot.multimarginal(costs, masses, reg=0.002, reg_m=reg_m)
    using(TREES, corrected_entries=1e9)
    plain = mapuot.multimarginal(costs, masses, reg=0.002, reg_m=reg_m)
    assert plain._body.coarse is None
    assert found.converged
    assert found.n_passes <= most * plain.n_passes
    for k in range(8):
        apart = np.abs(found.marginal(k) - plain.marginal(k)).sum()
        assert apart <= 1.01 * (found.error_bound + plain.error_bound) * found.mass + 1e-12


def test_a_stalled_solve_tells_its_marginals():
    """The marginals of a stalled solve are found even if its last pass was made without them."""
    costs, masses = problem("star", 5, 5)
    masses[3] = None
    with pytest.warns(mapuot.ConvergenceWarning):
        result = mapuot.multimarginal(costs, masses, reg=0.05, reg_m=20.0, tol=1e-11)
    assert result.status == "stalled"
    assert 1e-11 < result.error_bound < 1e-9
    check(result, costs, masses, 0.05, [20.0] * 5, result.problem.shape)


def test_a_pass_that_fails_certifies_nothing(monkeypatch):
    """Where no kernel can hold a state, a pass certifies nothing; the next products with its kernels are plain."""
    costs, masses = drifting(1.0)
    failed = []
    swept = Tree.swept

    def fails(self, state, narrow):
        if self.coarse.labelled:
            failed.append(self)
            raise StaleError
        return swept(self, state, narrow)

    monkeypatch.setattr(Tree, "swept", fails)
    with pytest.warns(mapuot.ConvergenceWarning):
        result = mapuot.multimarginal(costs, masses, reg=0.002, reg_m=1.0)
    assert (result.status, result.error_bound, result.dual) == ("underflow", np.inf, -np.inf)
    with pytest.raises(ValueError, match="no plan was found: underflow"):
        result.marginal(0)
    assert not any(kernel.operator.state.coarse.labelled for kernel in failed[-1].kernels.values())


def test_costs_below_zero_hide_no_mass():
    """Entries of K up to e^238 would magnify the mass that was flushed from factors of 1e-150."""
    assert one_random(1689)[0]


@pytest.mark.parametrize("as_array", [False, True])
def test_the_price_of_a_tiny_mass_is_not_lost(as_array):
    """rho a = 7e-327 underflows, but its product with 1e299 counts (two marginals: tests/core/test_penalties.py)."""
    M = np.zeros((2, 3))
    a = np.full(2, 1e-300)
    b = np.array([0.5, 0.1, 0.4])
    costs = M if as_array else {(0, 1): M}
    large, small = (
        mapuot.multimarginal(costs, [a, b], reg=z * 5.8e-27, reg_m=[z * 6.7e-27, z * 2.5e-24], tol=1e-9)
        for z in (2.0**90, 1)
    )
    assert small.converged
    assert small.dual <= small.objective
    assert small.dual * 2.0**90 == pytest.approx(large.dual, rel=1e-12)


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("weight", [0.1, 0.3, 0.7])
def test_sums_of_many_points_hide_no_dual_value(isa, as_array, weight):
    """All masses are met at one cost; the rounding errors of equal terms have one sign and add up."""
    a = np.full(100_000, weight)
    M = np.full((100_000, 1), 0.7)
    result = mapuot.multimarginal(M if as_array else {(0, 1): M}, [a, None], reg=0.007, reg_m=np.inf, tol=1e-9)
    assert result.converged
    assert result.dual <= np.longdouble(weight) * len(a) * np.longdouble(0.7)


def test_masses_of_large_logarithms_hide_no_dual_value():
    """For one point on each side log r = (reg log(a b) + rho log(a b)) / (reg + 2 rho) is the optimum."""
    rng = np.random.default_rng(0)
    reg = 1.0
    rho = 3.0
    for a, b in 10.0 ** rng.uniform([-250, 150], [-150, 250], (40, 2)):
        result = mapuot.multimarginal({(0, 1): np.zeros((1, 1))}, [[a], [b]], reg=reg, reg_m=rho)
        x = np.longdouble(a)
        y = np.longdouble(b)
        r = np.exp((reg + rho) * np.log(x * y) / (reg + 2 * rho))
        assert result.converged
        assert result.dual <= reg * (x * y - r) + rho * (x + y - 2 * r)


@pytest.mark.filterwarnings("error")
def test_the_objective_of_masses_far_apart_is_told_without_a_warning():
    """A marginal of 1e380 times a mass exceeds the exponentials of certificates."""
    a = np.full(2, 1e-200)
    b = np.full(3, 1e180)
    with pytest.warns(mapuot.ConvergenceWarning, match="stalled"):
        result = mapuot.multimarginal({(0, 1): np.zeros((2, 3))}, [a, b], reg=1.0, reg_m=[1e-3, 1e3])
    assert result.error_bound == np.inf
    assert 0 < result.objective < np.inf


def test_gaps_are_those_of_costs_as_they_are(narrow):
    """Kernels in float32 round masses; rho / reg of 1e10 shows it."""
    rng = np.random.default_rng(0)
    rho = 1e9
    for _ in range(60):
        n = [int(x) for x in rng.integers(1, 4, 3)]
        costs = {(k, k + 1): 3 * rng.random(n[k : k + 2]) for k in (0, 1)}
        masses = [rng.dirichlet(np.ones(x)) for x in n]
        result = mapuot.multimarginal(costs, masses, reg=0.1, reg_m=rho, tol=1e-5, max_passes=int(rng.integers(2, 14)))
        P = plan_of(whole(costs, masses), masses, 0.1, result.log_u)
        found = [(P.sum(axes_but(P, k)), masses[k] * np.exp(-0.1 / rho * result.log_u[k])) for k in range(3)]
        assert rho * sum(kl_divergence(r, q).sum() for r, q in found) <= result.gap


@pytest.mark.parametrize("ratio", [1e11, 1e13, 1e15])
def test_penalties_far_above_reg_are_certified_by_newtons_step(ratio):
    """Near hard sides rounding alone makes a gap of rho KL above tol; the plan is the balanced one up to reg / rho."""
    rng = np.random.default_rng(0)
    costs = {(0, 1): rng.random((12, 9)), (1, 2): rng.random((9, 5))}
    masses = [rng.dirichlet(np.ones(n)) for n in (12, 9, 5)]
    soft, hard = (mapuot.multimarginal(costs, masses, reg=0.05, reg_m=rho) for rho in (0.05 * ratio, np.inf))
    assert soft.converged
    assert np.abs(soft.pair(0, 1) - hard.pair(0, 1)).sum() <= soft.error_bound + hard.error_bound + 100 / ratio
