"""A sparse M solves like the dense one with inf elsewhere; disconnected parts are solved by themselves."""

import contextlib
import re
import tracemalloc

import numpy as np
import pytest
from problems import csr_of, pairs
from scipy import sparse

import mapuot
from mapuot.answer.slopes import marginal_gradient
from mapuot.files.pairs import PairsFile
from mapuot.problem.metrics import METRICS
from mapuot.problem.settings import BLOCKS
from mapuot.problem.sparse import Sparse


def solve(M, a, b, **options):
    """Return the answer at reg .1 and reg_m 1, changed by the options."""
    return mapuot.solve(M, a, b, **({"reg": 0.1, "reg_m": 1.0} | options))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("length", [1, 3, 8, 500, 512, 513, 1100])
def test_rows_of_every_length(isa, dtype, length):
    """Ends of vectors and of blocks are right in every instruction set, on all streams over M."""
    rng = np.random.default_rng(length)
    m = 11
    n = length + 5
    M = np.full((m, n), np.inf, dtype)
    for i in range(m):
        M[i, rng.choice(n, length if i % 3 else (i + length) // 2, replace=False)] = 0.5
    M[np.isfinite(M)] = rng.random(np.isfinite(M).sum())
    a = rng.random(m) + 0.1
    b = rng.random(n) + 0.1
    Y = rng.random((m, 2))
    got = solve(csr_of(M), a, b, reg=0.2, tol=1e-8)
    want = solve(M, a, b, reg=0.2, tol=1e-8, backend="reference")
    assert got.converged
    assert np.abs(got.plan.toarray() - want.plan).sum() <= 1e-6 * want.mass
    np.testing.assert_allclose(got.apply_transpose(Y), got.plan.T @ Y, rtol=1e-6)
    np.testing.assert_allclose(got.apply(np.ones(n)), got.plan.sum(1), rtol=1e-6)
    assert got.cost == pytest.approx((got.plan.toarray() * np.where(np.isfinite(M), M, 0)).sum(), rel=1e-6)


def test_every_format():
    """Inputs that the sparse trials of tests/hostile do not draw: unsorted rows, blocks, keys, float32, integers."""
    S, _, a, b = pairs(20, 30, 0.3)
    S.data[::5], S.data[3::11] = 0.0, np.inf
    want = solve(np.asarray(Sparse.of_matrix(S)), a, b, tol=1e-9).plan
    unsorted = S.copy()
    for i in range(20):
        row = slice(*unsorted.indptr[i : i + 2])
        unsorted.indices[row], unsorted.data[row] = unsorted.indices[row][::-1].copy(), unsorted.data[row][::-1].copy()
    unsorted.has_sorted_indices = False
    given = [S, unsorted, sparse.csr_matrix(S), S.tobsr(), S.astype(np.float32), S.todok()]
    for one in given:
        kept = one.copy()
        got = solve(one, a, b, tol=1e-9).plan
        assert got.nnz == S.nnz
        assert np.abs(got.toarray() - want).sum() <= (1e-9 if one.dtype == np.float64 else 1e-5) * want.sum()
        assert (kept != one).nnz == 0, "the caller's matrix is as it was"
    assert not unsorted.has_sorted_indices
    for plan in mapuot.solve_batch(given, a, b, reg=0.1, reg_m=1.0, tol=1e-9, threads=3).plan:
        assert np.abs(plan.toarray() - want).sum() <= 1e-5 * want.sum()
    integers = sparse.csr_array(np.array([[0, 2], [3, 0]]))
    assert mapuot.solve(integers, reg=1.0, reg_m=1.0).plan.dtype == np.float64


@pytest.mark.parametrize(("kind", "full"), [(sparse.bsr_array, np.kron(np.eye(2), np.ones((2, 2)))),
                                            (sparse.dia_array, np.eye(4))])  # fmt: skip
def test_padding_is_no_cost(kind, full):
    """Zeros that pad blocks and diagonals are refused (test_refusals.py); matrices without them are accepted."""
    padded = kind(np.triu(full) + np.diag([1.0], 3))
    csr = padded.tocsr()
    csr.eliminate_zeros()
    assert mapuot.solve(csr, reg=1.0, reg_m=1.0, reference=padded).converged, "a reference of 0 forbids as none does"
    assert mapuot.solve(kind(full), reg=1.0, reg_m=1.0).plan.nnz == kind(full).nnz == full.sum()


def test_the_plan_is_the_callers():
    """Dropping zeros of a plan changes neither M nor another plan."""
    S, _, a, b = pairs(20, 30, 0.3)
    S.data[0] = 1e5
    result = solve(S, a, b)
    nnz = S.nnz
    indices = S.indices.copy()
    result.plan.eliminate_zeros()
    assert result.plan.nnz < nnz == result.rows(0, 20).nnz
    assert (result.gather_plan() != result.plan).nnz == 0
    np.testing.assert_array_equal(S.indices, indices)


@pytest.mark.parametrize("reg_m", [1.0, 50.0, (np.inf, 5.0), (5.0, np.inf)])
def test_parts_take_no_more_passes_than_one(backend, reg_m):
    """Eight parts with different masses solve like each of them alone: each has its own translation."""
    parts = []
    passes = []
    alone = []
    rng = np.random.default_rng(5)
    for seed in range(8):
        S, _, a, b = pairs(15, 15, 0.3, seed)
        parts.append((S, a, b * 10.0 ** rng.uniform(-1, 1)))
    whole = [sparse.block_diag([p[0] for p in parts], "csr"), *(np.concatenate([p[k] for p in parts]) for k in (1, 2))]
    options = {"tol": 1e-6, "method": "translation_invariant", "max_passes": 3000, "backend": backend}
    got = mapuot.solve(*whole, reg=0.2, reg_m=reg_m, **options)
    assert got.problem.parts.count == 8
    for S, a, b in parts:
        result = mapuot.solve(S, a, b, reg=0.2, reg_m=reg_m, **options)
        alone.append(result.plan.toarray())
        passes.append(result.n_passes)
    assert got.converged
    assert got.n_passes <= 1.2 * max(passes) + 2
    plan = sparse.block_diag(alone).toarray()
    assert np.abs(got.plan.toarray() - plan).sum() <= 4e-6 * plan.sum()


def test_parts_that_can_be_balanced_are():
    """Parts that can be balanced are, and a point without mass connects none."""
    S = sparse.block_diag([np.ones((2, 2)), np.ones((7, 1))], "csr")
    a = np.ones(9)
    b = np.array([1.0, 1.0, 7.0])
    assert solve(S, a, b, reg_m=np.inf).converged
    assert mapuot.solve_batch([S, S], a, b, reg=0.1, reg_m=np.inf).converged.all()
    chain = sparse.csr_array(np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]))
    assert solve(chain, np.ones(2), np.array([1.0, 0.0, 1.0])).problem.parts.rows.tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_blocks_are_those_of_the_whole(seed, using):
    """Reading a few rows at a time finds the same parts, up to their order, whatever lies between them."""
    rng = np.random.default_rng(seed)
    m, n = map(int, rng.integers(2, 40, 2))
    S = sparse.random_array((m, n), density=min(1.0, 1.2 / n), rng=rng, format="csr")
    S.data[rng.random(S.nnz) < 0.1] = np.inf
    out = rng.random(m) < 0.1, rng.random(n) < 0.1
    whole = Sparse.of_matrix(S).parts_between(*out)
    using(BLOCKS, searched_pairs=int(rng.integers(1, 9)))
    parts = Sparse.of_matrix(S).parts_between(*out)
    assert parts.count == whole.count
    pairs_of_numbers = {*zip(np.r_[whole.rows, whole.cols], np.r_[parts.rows, parts.cols], strict=True)}
    assert len(pairs_of_numbers) == len(set(np.r_[whole.rows, whole.cols]))
    assert all(x < whole.count or y == parts.count for x, y in pairs_of_numbers)


@pytest.mark.parametrize("each", [False, True])
def test_a_batch_is_its_problems(each):
    """With one cost for all or one each, a batch has the bits of `solve`, and its plans' sum is theirs."""
    S, *_ = pairs(30, 24, 0.3, parts=2)
    rng = np.random.default_rng(0)
    A = rng.random((4, 30)) + 0.1
    B = rng.random((4, 24)) + 0.1
    weights = np.array([1.0, -2.0, 0.5, 3.0])
    if each:
        data = rng.random((4, S.nnz))
    else:
        data = [S.data] * 4
    matrices = [sparse.csr_array((x, S.indices, S.indptr), shape=S.shape) for x in data]
    batch = mapuot.solve_batch(matrices if each else S, A, B, reg=0.1, reg_m=0.7, tol=1e-9)
    plans = []
    for i, one in enumerate(batch):
        alone = solve(matrices[i], A[i], B[i], precision="float64", reg_m=0.7, tol=1e-9)
        assert one.n_passes == alone.n_passes
        np.testing.assert_array_equal(one.plan.data, alone.plan.data)
        np.testing.assert_array_equal(batch.plan[i].data, alone.plan.data)
        plans.append(weights[i] * alone.plan.toarray())
    total = batch.plan_sum(weights)
    if each:
        found = np.stack([x.toarray() for x in total])
    else:
        found = total.toarray()
    np.testing.assert_allclose(found, plans if each else sum(plans), atol=1e-9)


def test_slopes_of_float32_costs_have_float64_exponents():
    """Potentials of points without mass come from costs in float64; M / reg once had float32 digits there."""
    M, _, A, b = pairs(9, 7, 0.5, dtype=np.float32)
    A[2] = 0.0
    slopes = [
        marginal_gradient(mapuot.solve_batch(costs, A[None], b[None], reg=1e-3, reg_m=1.0, precision="float64"), "rows")
        for costs in (M, M.astype(float))
    ]
    np.testing.assert_allclose(*slopes, rtol=1e-11)


def test_storage_finer_than_tol_needs():
    """K of stored pairs is not rebuilt in every pass: where float32 cannot certify tol, K is float64."""
    S, _, a, b = pairs(50, 60, 0.2)
    for tol, how in ((1e-6, "float32 pairs"), (1e-8, "float64 pairs")):
        result = solve(S, a, b, tol=tol, precision="mixed")
        assert result.converged
        assert result.how.startswith(how)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("given", [False, True], ids=["no c", "c"])
def test_names_of_pot(dtype, given):
    """One target has a sparse plan, several return costs; a reference may be stored, too."""
    S, M, a, b = pairs(40, 30, 0.3, parts=3, dtype=dtype)
    B = np.stack([b, b[::-1]], 1)
    c = np.random.default_rng(0).random(M.shape)
    rtol = 1e-8 if dtype == np.float64 else 2e-5
    got, want = ({"M": x, "reg": 0.1, "reg_m": (1.0, 4.0), "stopThr": 1e-11} for x in (S, M))
    if given:
        got["c"], want["c"] = sparse.csr_array(c), c
    plan, log = mapuot.pot.sinkhorn_unbalanced(a, b, log=True, **got)
    assert isinstance(plan, sparse.csr_array)
    assert plan.dtype == dtype
    np.testing.assert_allclose(plan.toarray(), mapuot.pot.sinkhorn_unbalanced(a, b, **want), rtol=10 * rtol, atol=1e-12)
    assert log["cost"] == pytest.approx((plan.multiply(S)).sum(), rel=rtol)
    for function in (mapuot.pot.sinkhorn_unbalanced, mapuot.pot.sinkhorn_unbalanced2):
        np.testing.assert_allclose(function(a, B, **got), function(a, B, **want), rtol=rtol)
    total, exact = (mapuot.pot.sinkhorn_unbalanced2(a, b, returnCost="total", **x) for x in (got, want))
    assert total == pytest.approx(exact, rel=rtol)


# ---- neighbours, and the dense problem that they stand for


@pytest.mark.parametrize("metric", [name for name in METRICS if name != "inner"])  # no distance: refused
@pytest.mark.parametrize("weights", [None, [2.0, 0.5, 1.0]])
def test_costs_of_neighbours(metric, weights):
    """The k least costs of each row, and if symmetric of each column, equal SciPy's matrix."""
    rng = np.random.default_rng(0)
    x = rng.random((60, 3)) + 0.1
    y = rng.random((40, 3)) + 0.2
    M = np.asarray(mapuot.PointCloud(x, y, metric, 0.7, weights))
    for symmetric in (False, True):
        S = mapuot.knn_cost(x, y, 5, metric=metric, scale=0.7, weights=weights, symmetric=symmetric)
        stored = S.toarray() != 0
        np.testing.assert_allclose(S.toarray()[stored], M[stored], rtol=1e-12)
        wanted = np.sort(M, 1)[:, 4:5] >= M
        wanted |= (np.sort(M, 0)[4] >= M) & symmetric
        np.testing.assert_array_equal(stored, wanted)
        assert S.has_canonical_format
    same = mapuot.knn_cost(np.repeat(x, 2, axis=0), np.repeat(x, 2, axis=0), 2, metric=metric)
    assert same.nnz >= 240  # pairs at no distance are stored, too


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock", "cosine"])
@pytest.mark.parametrize("far", [0.0, 1e7])
def test_neighbours_in_many_dimensions(metric, far, using):
    """Costs come from products in blocks; for a cluster far from the mean, where products cancel, from differences."""
    using(BLOCKS, distances=300)
    rng = np.random.default_rng(0)
    x = rng.random((60, 40))
    y = rng.random((50, 40))
    x[:20, 0] += far
    y[:25, 0] += far
    M = np.asarray(mapuot.PointCloud(x, y, metric))
    S = mapuot.knn_cost(x, y, 4, metric=metric)
    wanted = (np.sort(M, 1)[:, 3:4] >= M) | (np.sort(M, 0)[3] >= M)
    if metric == "cosine" and far:  # directions that differ by 1e-7 count as alike
        assert (S.toarray()[20:] != 0).sum() == wanted[20:].sum()
        return
    np.testing.assert_array_equal(S.toarray() != 0, wanted)
    np.testing.assert_allclose(S.data, M[wanted], rtol=1e-9)


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock", "cosine"])
@pytest.mark.parametrize("d", [3, 20])
def test_costs_of_given_neighbours_and_within_a_radius(metric, d):
    """Indices with -1 for absent ones, the pattern of any sparse matrix, and all pairs that cost little."""
    rng = np.random.default_rng(0)
    x = rng.random((30, d)) + 0.1
    y = rng.random((20, d))
    how = {"metric": metric, "scale": 0.7, "weights": rng.random(d) + 0.5}
    M = np.asarray(mapuot.PointCloud(x, y, **how))
    index = np.argsort(M, 1)[:, :4]
    wanted = np.zeros(M.shape, bool)
    np.put_along_axis(wanted, index, True, 1)
    wanted[5, index[5, 2:]] = False
    index[5, 2:] = -1
    index[6, 1] = index[6, 0]  # twice the same
    wanted[6] = False
    wanted[6, index[6]] = True
    for given in (index, sparse.csr_array(wanted), sparse.coo_matrix(wanted.astype(float))):
        S = mapuot.knn_cost(x, y, neighbours=given, **how)
        np.testing.assert_array_equal(S.toarray() != 0, wanted)
        np.testing.assert_allclose(S.data, M[wanted], rtol=1e-9)
        assert S.has_canonical_format
    assert mapuot.solve(S, reg=0.1, reg_m=1.0).converged
    radius = np.median(M)
    S = mapuot.knn_cost(x, y, radius=radius, **how)
    np.testing.assert_array_equal(S.toarray() != 0, radius >= M)
    assert mapuot.knn_cost(x, x, radius=radius, **how).diagonal().max() < 1e-15
    assert mapuot.knn_cost(x + 5, y - 5, radius=1e-9, metric=metric).nnz == 0 or metric == "cosine"


@pytest.mark.parametrize("form", ["points", "array", "function"])
@pytest.mark.parametrize("reference", ["product", "uniform"])
@pytest.mark.parametrize("change", [0.5, 1 - 1e-6, 1.0, 1.2])
def test_the_bound_is_true(form, reference, change):
    """The bound is true for every pattern, from half of the mass missing to nearly all pairs, and any kind of side.

    Stored costs may differ from the formula: with lower ones a plan once had the bound 0 below its true price.
    """
    rng = np.random.default_rng(3)
    x = rng.random((50, 2))
    y = rng.random((60, 2))
    a = rng.random(50) + 0.1
    b = rng.random(60) + 0.1
    cloud = mapuot.PointCloud(x, y)
    M = {"points": cloud, "array": np.asarray(cloud), "function": lambda i0, i1: np.asarray(cloud)[i0:i1]}[form]
    sides = [(1.0, "kl"), ((0.2, 5.0), "kl"), (0.3, "tv"), (1.0, ("l2", "kl")), ((np.inf, 1.0), "kl")]
    for reg_m, penalty in sides if change == 1 else sides[:1]:
        options = {"penalty": penalty, "reference": reference}
        true = mapuot.solve(cloud, a, b, reg=0.02, reg_m=reg_m, tol=1e-7 if penalty != "tv" else 1e-5, **options)
        told = []
        for k in (1, 4, 20, 50):
            result = mapuot.solve(change * mapuot.knn_cost(x, y, k), a, b, reg=0.02, reg_m=reg_m, **options)
            found = mapuot.certify(result, M, pairs=7)
            error = np.abs(result.plan.toarray() - true.plan).sum() / result.mass
            assert found.error_bound >= error - true.error_bound * true.mass / result.mass
            assert found.dual <= true.objective
            assert found.objective >= true.dual * (1 - 1e-9)  # it omits the marginal errors of hard rows
            assert change != 1 or found.objective == pytest.approx(result.objective, rel=1e-14)
            i, j, mass = found.pairs
            assert len(i) <= 7
            assert (result.plan.toarray()[i, j] == 0).all()
            assert (np.diff(mass) <= 0).all()
            told.append(found)
        assert told[-1].missing < 1e-3 < told[0].missing
        assert change != 1 or told[-1].error_bound < told[0].error_bound


@pytest.mark.parametrize("penalty", ["kl", "l2", ("balanced", "kl")])
def test_refinement_ends_within_tol(penalty):
    rng = np.random.default_rng(4)
    x = rng.random((150, 2))
    y = rng.random((120, 2))
    a = rng.random(150) + 0.1
    b = rng.random(120) + 0.1
    cloud = mapuot.PointCloud(x, y)
    result = mapuot.solve(mapuot.knn_cost(x, y, 2), a, b, reg=0.002, reg_m=1.0, penalty=penalty)
    true = mapuot.solve(cloud, a, b, reg=0.002, reg_m=1.0, penalty=penalty, tol=1e-7)
    found = mapuot.certify(result, cloud, refine=True, tol=0.02)
    assert found.converged
    assert found.rounds > 0
    better = found.result
    assert np.abs(better.plan.toarray() - true.plan).sum() <= 0.02 * better.mass + 1e-6 * true.mass
    assert better.plan.nnz < 0.6 * 150 * 120
    np.testing.assert_allclose(
        better.problem.cost.__array__()[better.plan.nonzero()], np.asarray(cloud)[better.plan.nonzero()]
    )
    with pytest.warns(mapuot.ConvergenceWarning, match="after 1 rounds"):
        once = mapuot.certify(result, cloud, refine=True, tol=1e-5, rounds=1)
    assert once.rounds == 1
    assert not once.converged
    assert once.error_bound < mapuot.certify(result, cloud).error_bound


@pytest.mark.parametrize(("reg", "few"), [(1e-3, True), (0.1, False)])
def test_refinement_solves_m_itself_where_most_pairs_matter(reg, few):
    """A plan that spreads over all pairs is found by one dense solve, a sharp plan by stored pairs."""
    rng = np.random.default_rng(1)
    x = rng.random((1100, 2))
    y = rng.random((1000, 2))
    a = rng.random(1100)
    b = rng.random(1000)
    a = a / a.sum()
    b = b / b.sum()
    cloud = mapuot.PointCloud(x, y)
    result = mapuot.solve(mapuot.knn_cost(x, y, 10), a, b, reg=reg, reg_m=1.0)
    true = mapuot.solve(cloud, a, b, reg=reg, reg_m=1.0, tol=1e-8)
    found = mapuot.certify(result, cloud, refine=True)
    assert found.converged
    assert sparse.issparse(found.result.plan) == few
    if few:
        plan = found.result.plan.toarray()
    else:
        plan = found.result.plan
    assert np.abs(plan - true.plan).sum() <= (found.error_bound + 1e-8) * true.mass
    assert found.dual - 1e-12 <= true.objective <= found.objective + 1e-12
    assert few or (found.rounds, found.missing, len(found.pairs[0])) == (1, 0.0, 0)


@pytest.mark.filterwarnings("ignore::mapuot.ScalingWarning")
def test_refining_tells_what_it_did_not_reach_and_finds_columns_without_pairs():
    """Only each row's nearest columns are stored; a column that is in no row has no potential until a round adds it."""
    rng = np.random.default_rng(0)
    x = 900 * rng.random((150, 2))
    y = 1500 * rng.random((120, 2))
    a, b = (np.exp(rng.normal(9.5, 1.2, k)) for k in (150, 120))
    cloud = mapuot.PointCloud(x, y, "euclidean")
    options = {"reg": 20.0, "reg_m": 500.0}
    result = mapuot.solve(mapuot.knn_cost(x, y, 5, metric="euclidean", symmetric=False), a, b, **options)
    told = "certify not converged: after 1 rounds, with 1750 pairs, .* raise"
    with pytest.warns(mapuot.ConvergenceWarning, match=told):
        once = mapuot.certify(result, cloud, refine=True, rounds=1)
    assert not once.converged
    assert len(repr(once)) < 200
    assert "\n" not in repr(once)
    found = mapuot.certify(result, cloud, refine=True)
    dense = mapuot.solve(cloud, a, b, **options)
    assert found.converged
    assert found.rounds < 6
    assert abs(found.result.plan.toarray() - dense.plan).sum() <= (found.error_bound + dense.error_bound) * dense.mass


# ---- doors


def write_group(file, inside, given):
    group = file.create_group(inside)
    group.attrs["encoding-type"], group.attrs["shape"] = f"{given.format}_matrix", given.shape
    for member in ("data", "indices", "indptr"):
        group[member] = getattr(given, member)


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
@pytest.mark.parametrize("kind", ["packed.npz", "S.npz", "S.h5", "S.h5ad"])
def test_files(tmp_path, kind, form):
    S, _, a, b = pairs(20, 30, 0.3)
    path = tmp_path / kind
    given = S.asformat(form)
    if path.suffix == ".npz":
        sparse.save_npz(path, given, compressed="packed" in kind)
    elif form == "coo":
        pytest.skip("AnnData has none")
    else:
        with pytest.importorskip("h5py").File(path, "w") as file:
            write_group(file, "X" if path.suffix == ".h5ad" else "some/M", given)
    if path.suffix == ".h5":
        path = f"{path}:some/M"
    np.testing.assert_array_equal(solve(path, a, b).plan.data, solve(S, a, b).plan.data)


class Slices:
    """An array of a file that records the entries read from it."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.read = []

    def __getitem__(self, part):
        self.read.append((part.start, part.stop))
        return self.array[part].copy()  # a copy, as a read from a file gives


def kept_pairs(S, form):
    """Return (PairsFile over slices of the arrays of S, these arrays by name)."""
    given = S.asformat(form)
    arrays = {name: Slices(getattr(given, name)) for name in ("data", "indices", "indptr")}
    return PairsFile(arrays, form, S.shape, contextlib.nullcontext), arrays


@pytest.mark.parametrize("form", ["csr", "csc"])
@pytest.mark.parametrize("seed", range(30))
def test_rows_of_files_come_in_blocks(form, seed, using):
    """Rows are read in order, in blocks of any size: each pair once, each column index twice."""
    rng = np.random.default_rng(seed)
    m, n = rng.integers(1, 30, 2)
    S = sparse.random_array((int(m), int(n)), density=rng.random(), rng=rng, format="csr")
    S = S.astype([np.float64, np.float32, np.int64][seed % 3])
    using(BLOCKS, stored_pairs=int(rng.integers(1, 40)))
    file, arrays = kept_pairs(S, form)
    cuts = np.sort(rng.integers(0, m + 1, 2))
    for i0, i1 in ((0, int(m)), tuple(map(int, cuts))):
        for array in arrays.values():
            array.read.clear()
        got = file.read(i0, i1)
        want = Sparse.of_matrix(S[i0:i1])
        for name in ("data", "column", "start"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
            assert getattr(got, name).dtype == getattr(want, name).dtype
        asked = [sum(stop - start for start, stop in arrays[name].read) for name in ("data", "indices")]
        assert asked == ([want.size] * 2 if form == "csr" else [S.nnz, 2 * S.nnz])
        assert max([stop - start for x in ("data", "indices") for start, stop in arrays[x].read], default=0) <= (
            BLOCKS.stored_pairs
        )


def test_files_out_of_order_are_mended():
    """A file with falling indices and repeated pairs, in one block or two, is read as SciPy's sorted matrix."""
    data = np.arange(1.0, 9)
    indices = np.array([3, 1, 1, 0, 2, 2, 2, 5])
    S = sparse.csr_array((data, indices, np.array([0, 3, 3, 8])), shape=(3, 6))
    for form, given in (("csr", S), ("csc", sparse.csc_array((data, indices, S.indptr), shape=(6, 3)))):
        got = kept_pairs(given, form)[0].read(0, given.shape[0])
        want = Sparse.of_matrix(given)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
        assert got.size == want.size == 5


@pytest.mark.parametrize("form", ["csr", "csc"])
def test_the_memory_of_a_file_is_that_of_its_pairs(form, using):
    """Each pair takes 12 bytes where it begins, plus a block and its products; two ranks take half each."""
    using(BLOCKS, stored_pairs=1 << 14)
    S = sparse.random_array((3000, 2000), density=0.2, rng=np.random.default_rng(0), format="csr")
    file, _ = kept_pairs(S, form)
    for i0, i1 in ((0, 3000), (1500, 3000)):
        tracemalloc.start()
        rows = file.read(i0, i1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= (12 + 1 + 1) * rows.size + (1 << 14) * 100 + 8 * 5000 * 4  # the order is looked at in 2 bytes


@pytest.mark.parametrize(("name", "value", "text"),
                         [("indptr", [0, 2, 1, 3], "indptr must begin at 0 and never fall"),
                          ("indptr", [1, 2, 3, 3], "indptr must begin at 0 and never fall"),
                          ("indptr", [0, 1, 3], "indptr must be 4 integers, got shape (3,)"),
                          ("indptr", [0.0, 1.0, 2.0, 3.0], "indptr must be 4 integers"),
                          ("indptr", [0, 1, 2, 4], "indptr must end at most at the 3 stored costs, got 4"),
                          ("indices", [0, 1, 7], "indices must be in 0..4, got 0 and 7"),
                          ("indices", [0, -1, 2], "indices must be in 0..4, got -1 and 2"),
                          ("indices", [0.0, 1.0, 2.0], "indices must be integers"),
                          ("data", [1j, 2j, 3j], "data must hold real numbers, got dtype complex128"),
                          ("shape", [3, 2**31], "a sparse M must have at most 2147483647 columns")])  # fmt: skip
def test_groups_that_lie(tmp_path, name, value, text):
    h5py = pytest.importorskip("h5py")
    values = {"indptr": [0, 1, 2, 3], "indices": [0, 1, 2], "data": [1.0, 2.0, 3.0], "shape": [3, 5]} | {name: value}
    with h5py.File(tmp_path / "S.h5", "w") as file:
        group = file.create_group("M")
        group.attrs["shape"] = values.pop("shape")
        for key, array in values.items():
            group[key] = np.array(array)
    with pytest.raises(ValueError, match=re.escape("S.h5 cannot be read as hdf5: ") + ".*" + re.escape(text)):
        mapuot.solve(tmp_path / "S.h5", reg=0.1, reg_m=1.0)


def test_archives_that_lie(tmp_path):
    S = sparse.csr_array(np.eye(9))
    values = {"format": np.array(b"csr"), "shape": np.array([9, 8]), "indices": S.indices % 8, "indptr": S.indptr}
    for change in ({"shape": np.array([3, 30])}, {"indices": np.arange(9)}, {"format": np.array(b"dia")}):
        np.savez(tmp_path / "S.npz", data=S.data, **(values | change))
        with pytest.raises(ValueError, match=re.escape("S.npz cannot be read as npz")):
            mapuot.solve(tmp_path / "S.npz", reg=0.1, reg_m=1.0)


def test_what_belongs_to_a_file_of_pairs(tmp_path):
    """The rows of a file are the rows of a; `load` and `certify` say which part of it they accept."""
    h5py = pytest.importorskip("h5py")
    S, _, a, b = pairs(20, 30, 0.3)
    with h5py.File(tmp_path / "S.h5", "w") as file:
        write_group(file, "M", S)
        file["a"], file["b"] = a, b
    path = tmp_path / "S.h5"
    result = solve(path, a, b)
    result.save(tmp_path / "answer.npz")
    np.testing.assert_array_equal(mapuot.load(tmp_path / "answer.npz", path).plan.data, result.plan.data)
    for call, text in (
        (lambda: mapuot.solve(path, a[:3], b, reg=0.1, reg_m=1.0), "M has 20 rows, but the blocks of a have 3"),
        (lambda: mapuot.solve(path, "a.npy", b, reg=0.1, reg_m=1.0), "a must be an array, got 'a.npy'"),
        (lambda: mapuot.certify(result, path), "M must be a dense array, got a sparse matrix"),
        (lambda: solve(path, a, b, backend="cuda"), "takes no sparse M|CuPy|cupy"),
    ):
        with pytest.raises((ValueError, TypeError, NotImplementedError, ImportError), match=text):
            call()
    pytest.importorskip("click")
    from click.testing import CliRunner

    from mapuot.cli import cli

    words = ["solve", f"{path}:M", "--reg", "0.1", "--reg-m", "1"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert f"{result.objective:.6g}" in done.output
    done = CliRunner().invoke(cli, [*words, "-o", "x.npz", "--plan", "dense"])
    assert "--plan dense needs a dense M" in str(done.exception)
