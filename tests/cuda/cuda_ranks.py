"""What ranks with a GPU must do together; run in processes of their own by tests/cuda/test_cuda_ranks.py, without MPI.

Each function named ``case_*`` runs on every rank. The standard is one process on the GPU, whose twin on the CPU the
other tests hold it against. Ranks may share a GPU: then the sums go through the host. Without a GPU a part of them runs
on its stand-in (cuda_on_cpu), with sums through one of NCCL.
"""

import os
import tempfile
import traceback
import warnings
from pathlib import Path
from unittest import mock

import cupy as cp
import numpy as np
import pytest
from cupyx.scipy import sparse as device_sparse
from problems import Case, clouds, pairs, with_forbidden, with_zeros
from scipy import sparse

import mapuot
from mapuot.backends import cuda
from mapuot.backends.cuda import workspace
from mapuot.backends.cuda.workspace import DeviceWorkspace
from mapuot.ranks import own_rows

FLOAT64 = {"precision": "float64", "tol": 1e-12}


def bounds(ranks, m, split="even"):
    """The rows of this rank: as the library splits them, or all but a few on the last rank and none on the first."""
    if split == "even":
        return own_rows(m, ranks.rank, ranks.size)
    ends = [0, *(min(2 * r, m) for r in range(ranks.size - 1)), m]
    return ends[ranks.rank], ends[ranks.rank + 1]


def block(ranks, case, split="even", kind="cupy"):
    """The same problem with the own rows only; M on the device, on the host or as a function."""
    i0, i1 = bounds(ranks, len(case.a), split)
    rho = case.reg_m
    if isinstance(rho, tuple) and np.ndim(rho[0]) == 1:
        rho = (rho[0][i0:i1], rho[1])
    c = case.reference if isinstance(case.reference, str) else case.reference[i0:i1]
    M = {
        "cupy": lambda: cp.asarray(case.M[i0:i1]), "numpy": lambda: case.M[i0:i1], "streamed": lambda: case.read,
        "made on the device": lambda: lambda i0, i1: cp.asarray(case.M[i0:i1]),
    }  # fmt: skip
    return Case(M[kind](), case.a[i0:i1], case.b, case.reg, rho, case.penalty, c)


class Streamed(Case):
    def read(self, i0, i1):
        return self.M[i0:i1]


def same_everywhere(ranks, *arrays):
    data = b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)
    assert len(set(ranks.exchange(data))) == 1, "the ranks differ"


def check(ranks, case, split="even", kind="cupy", within=1e-12, passes=1, **options):
    """Every member of a distributed Result against that of one process; the Result.

    The same steps need the same Anderson memory (memory_of in mapuot/backends/contract.py): up to 119 rows, or up to
    512 columns; and rows that stay rows, as those of ranks do.
    """
    options = options or FLOAT64
    (i0, i1), m = bounds(ranks, len(case.a), split), len(case.a)
    case = Streamed(**vars(case))
    result = block(ranks, case, split, kind).solve(comm=ranks, backend="cuda", **options)
    with mock.patch.object(cuda, "LONG_ROWS", np.inf):
        one = case.replace(M=cp.asarray(case.M)).solve(**options)
    assert result.status == one.status
    assert abs(result.n_passes - one.n_passes) <= passes, (result.n_passes, one.n_passes)
    same_everywhere(ranks, result.log_v, [s.error for s in result.trace], [result.objective, result.dual, result.mass])
    close = np.testing.assert_allclose
    close(result.log_u, one.log_u[i0:i1], atol=within, rtol=within)
    close(result.log_v, one.log_v, atol=within, rtol=within)
    loose = {"rtol": 100 * within, "atol": within}
    close(cuda.to_numpy(result.plan), one.plan.get()[i0:i1], **loose)
    close(result.row_marginal, one.row_marginal[i0:i1], **loose)
    close(result.col_marginal, one.col_marginal, **loose)
    for name in ("mass", "cost", "objective", "dual"):
        close(getattr(result, name), getattr(one, name), err_msg=name, **loose)
    X, Y = np.random.default_rng(0).random((len(case.b), 2)), np.arange(float(m))
    close(cuda.to_numpy(result.apply(X)), one.apply(X).get()[i0:i1], **loose)
    close(cuda.to_numpy(result.apply_transpose(Y[i0:i1])), one.apply_transpose(Y).get(), rtol=100 * within)
    whole = result.gather_plan(0)
    if ranks.rank == 0:
        close(whole, one.plan.get(), **loose)
    return result


# ---- the same answer ----


def case_shapes(ranks):
    for shape in [(37, 29), (301, 515), (2, 40), (1, 1), (70, 1030), (130, 4100), (50, 2), (9, 20001)]:
        check(ranks, clouds(*shape, ratio=1.3))


def case_uneven_and_empty_blocks(ranks):
    for shape in [(37, 29), (5, 1100)]:
        for kind in ("cupy", "numpy", "streamed"):
            check(ranks, clouds(*shape), "uneven", kind)


def case_rows_made_on_the_device(ranks):
    for shape, split in [((37, 29), "even"), ((5, 1100), "uneven")]:
        check(ranks, clouds(*shape), split, "made on the device")


def case_a_kernel_that_one_rank_has_no_room_for(ranks):
    """All of them make K anew in every pass."""
    free = workspace.free_memory
    if ranks.rank == ranks.size - 1:
        workspace.free_memory = lambda enough: 0
    try:
        result = block(ranks, clouds(37, 29)).solve(comm=ranks, backend="cuda", **FLOAT64)
    finally:
        workspace.free_memory = free
    one = clouds(37, 29).solve(backend="cpu", **FLOAT64)
    i0, i1 = bounds(ranks, 37)
    np.testing.assert_allclose(cuda.to_numpy(result.plan), one.plan[i0:i1], rtol=1e-10, atol=1e-14)
    same_everywhere(ranks, result.log_v, [s.error for s in result.trace])


def case_penalties(ranks):
    for reg_m in [(1.0, 5.0), np.inf, (np.inf, 1.0)]:
        check(ranks, clouds(113, 621, reg_m=reg_m))
    check(ranks, clouds(113, 621, reg_m=100.0), within=1e-10)  # rho / reg amplifies rounding
    check(ranks, clouds(33, 21, penalty="l2", reg_m=2.0))
    for penalty, reg_m in (("tv", 0.2), ("range", 0.3), (("kl", "tv"), 0.5)):
        case = clouds(33, 21, penalty=penalty, reg_m=reg_m)
        check(ranks, case, within=1e-8, passes=1000, precision="float64", tol_gap=1e-10)


def case_one_rho_a_row(ranks):
    case = clouds(33, 21)
    end = own_rows(33, 0, ranks.size)[1]
    check(ranks, case.replace(reg_m=(np.linspace(0.5, 2.0, 33), 1.0)))
    check(ranks, case.replace(reg_m=(np.where(np.arange(33) < end, 1.0, 2.0), 1.0)))  # one value in each block
    check(ranks, case.replace(reg_m=(np.where(np.arange(33) < end, np.inf, 2.0), 1.0)))  # balanced on rank 0 only


def case_references_zeros_and_forbidden_pairs(ranks):
    case = clouds(33, 21)
    c = np.random.default_rng(1).random((33, 21)) + 0.1
    c[::5, ::3] = 0.0
    c[: own_rows(33, 0, ranks.size)[1] // 2] = 0.0  # whole rows without reference mass
    check(ranks, case.replace(reference="uniform"))
    check(ranks, case.replace(reference=c))
    check(ranks, with_zeros(case))
    check(ranks, with_forbidden(case))
    M = case.M.copy()
    M[:, 4] = np.inf  # a column and a row that nothing reaches
    M[7] = np.inf
    check(ranks, case.replace(M=M))


def case_small_reg(ranks):
    """K is rebuilt, and reg is lowered in steps."""
    check(ranks, clouds(113, 631, reg=0.004), within=1e-10, passes=8)
    case = clouds(40, 31, reg=0.001)
    result = block(ranks, case).solve(comm=ranks, precision="float64", tol=1e-6)
    one = case.solve(backend="cpu", precision="float64", tol=1e-6)
    assert result.converged
    np.testing.assert_allclose(result.objective, one.objective, rtol=1e-9)


def case_methods_and_precisions(ranks):
    case = clouds(170, 650)
    for method in ("sinkhorn", "translation_invariant", "map-uot"):
        check(ranks, case.replace(reg=0.2), method=method, precision="float64", tol=1e-9)
    result = check(ranks, case, within=1e-4, passes=3, precision="mixed")  # float32 passes first
    exact = case.solve(backend="cpu", **FLOAT64)
    i0, i1 = bounds(ranks, 170)
    error = ranks.sum(np.abs(result.plan.get() - exact.plan[i0:i1]).sum())
    assert error <= result.error_bound * result.mass


def case_portable_kernels(ranks):
    os.environ["MAPUOT_CUDA"] = "portable"
    try:
        for shape in [(37, 29), (70, 1030), (9, 20001), (5, 66000)]:
            check(ranks, clouds(*shape, ratio=1.3))
        check(ranks, clouds(37, 29), "uneven")
        check(ranks, clouds(33, 21), within=1e-4, passes=3, precision="mixed")
    finally:
        del os.environ["MAPUOT_CUDA"]


def case_through_the_host(ranks):
    ranks.device_sum = None
    os.environ["MAPUOT_CUDA_MPI"] = "0"
    try:
        check(ranks, clouds(70, 1030))
        assert ranks.size == 1 or ranks.device_sum.way == "host"
    finally:
        del os.environ["MAPUOT_CUDA_MPI"]
        ranks.device_sum = None


def case_columns_balanced_and_files(ranks):
    """Rows over ranks cannot be turned: the same plan on another way; M from a file of all rows."""
    case = clouds(33, 21, reg_m=(1.0, np.inf))
    i0, i1 = bounds(ranks, 33)
    one = case.solve(backend="cpu", **FLOAT64)
    result = block(ranks, case).solve(comm=ranks, **FLOAT64)
    np.testing.assert_allclose(result.plan.get(), one.plan[i0:i1], atol=1e-11)
    folder = ranks.exchange(tempfile.mkdtemp() if ranks.rank == 0 else None)[0]
    if ranks.rank == 0:
        np.save(Path(folder) / "M.npy", case.M)
    ranks.exchange(None)
    streamed = block(ranks, case).replace(M=Path(folder) / "M.npy")
    result = streamed.solve(comm=ranks, backend="cuda", **FLOAT64)
    np.testing.assert_allclose(result.plan, one.plan[i0:i1], atol=1e-11)


# ---- points and stored pairs ----


def within_bounds(ranks, got, want, i0, i1, hard=1.0):
    """The own rows of a distributed Result against the whole of one process, by the certificates of both."""
    assert got.converged
    same_everywhere(ranks, got.log_v, [s.error for s in got.trace], [got.objective, got.dual, got.mass, got.cost])
    plan, dense = (cuda.to_numpy(x.toarray() if hasattr(x, "toarray") else x) for x in (got.plan, want.plan))
    off = ranks.sum(float(np.abs(plan - dense[i0:i1]).sum()))
    assert off <= (hard * got.error_bound + want.error_bound) * want.mass
    assert got.dual <= want.objective * (1 + 1e-9)
    X = np.linspace(0.0, 1.0, dense.shape[1])
    Y = np.linspace(0.0, 1.0, len(dense))
    close = np.testing.assert_allclose
    close(cuda.to_numpy(got.apply(X)), plan @ X, rtol=1e-6)
    close(cuda.to_numpy(got.apply_transpose(Y[i0:i1])), ranks.sum(plan.T @ Y[i0:i1]), rtol=1e-6, atol=1e-12)
    close(got.col_marginal, ranks.sum(plan.sum(0)), rtol=1e-4)
    whole = got.gather_plan(0)
    if ranks.rank == 0:
        assert np.abs(whole - dense).sum() <= (hard * got.error_bound + want.error_bound) * want.mass


def own_points(x, y, i0, i1, **options):
    return mapuot.PointCloud(x[i0:i1] if i1 > i0 else x[:1], y, **options)[: i1 - i0]


def case_points(ranks):
    """Float32 passes of the own rows, then float64 ones; and scalings that on one rank alone float32 cannot hold."""
    rng = np.random.default_rng(3)
    squares = "sqeuclidean"
    for d, metric, reg, far in ((2, squares, 0.02, 0.0), (6, "euclidean", 0.1, 0.0), (3, squares, 1e-3, 3.0)):
        x, y, a, b = rng.random((41, d)), rng.random((33, d)), rng.random(41) + 0.1, rng.random(33) + 0.1
        x[0] += far
        want = mapuot.solve(mapuot.PointCloud(x, y, metric), a, b, reg=reg, reg_m=1.0, tol=1e-10, backend="cpu")
        one = mapuot.solve(mapuot.PointCloud(x, y, metric), a, b, reg=reg, reg_m=1.0, backend="cuda")
        for split in ("even", "uneven"):
            i0, i1 = bounds(ranks, 41, split)
            mine = own_points(x, y, i0, i1, metric=metric)
            got = mapuot.solve(mine, a[i0:i1], b, reg=reg, reg_m=1.0, backend="cuda", comm=ranks)
            within_bounds(ranks, got, want, i0, i1)
            assert abs(got.n_passes - one.n_passes) <= 2 or far, (got, one)


def case_points_of_every_kind(ranks):
    """Weights, whose rounding depends on the own points; masks, that know the rows before; sides that are hard."""
    rng = np.random.default_rng(4)
    x, y, a, b = rng.random((41, 3)), rng.random((33, 3)), rng.random(41) + 0.1, rng.random(33) + 0.1
    x[0] += 3.0
    mask = mapuot.SeededMask(0.5, 3)
    for penalty, cloud, more, split in (
        ("kl", {"weights": [0.3, 0.7, 2.0]}, {}, "uneven"), ("kl", {"metric": "cityblock"}, {"mask": mask}, "even"),
        (("balanced", "l2"), {"metric": "cosine"}, {"reference": "uniform"}, "even"),
    ):  # fmt: skip
        i0, i1 = bounds(ranks, 41, split)
        rest = {"penalty": penalty, **more}
        want = mapuot.solve(
            mapuot.PointCloud(x, y, **cloud), a, b, reg=0.2, reg_m=1.0, tol=1e-10, backend="cpu", **rest
        )
        mine = own_points(x, y, i0, i1, **cloud)
        got = mapuot.solve(mine, a[i0:i1], b, reg=0.2, reg_m=1.0, tol=1e-9, backend="cuda", comm=ranks, **rest)
        within_bounds(ranks, got, want, i0, i1, hard=5.0 if "balanced" in penalty else 1.0)


def case_truncated_points(ranks):
    """Each rank skips pairs of its own boxes; the bound is of all of them."""
    rng = np.random.default_rng(5)
    x, y, a, b = rng.random((220, 2)), rng.random((200, 2)) + 0.2, rng.random(220) + 0.1, rng.random(200) + 0.1
    x, y = x * [20.0, 1.0], y * [20.0, 1.0]  # boxes of 32 points skip little of a square
    x = x[np.argsort(x[:, 0])]  # ranks have points that are near each other, so that all find pairs to skip
    want = mapuot.solve(
        mapuot.PointCloud(x, y, truncate=None), a, b, reg=0.03, reg_m=(1.0, 2.0), tol=1e-10, backend="cpu"
    )
    for split in ("even", "uneven"):
        i0, i1 = bounds(ranks, 220, split)
        mine = own_points(x, y, i0, i1, truncate=3.0)
        warm = (want.log_u[i0:i1] + 0.1, want.log_v - 0.1) if split == "uneven" else None
        got = mapuot.solve(
            mine, a[i0:i1], b, reg=0.03, reg_m=(1.0, 2.0), tol=1e-5, backend="cuda", comm=ranks, warm_start=warm
        )
        assert got.skipped.kept.share < 0.6
        within_bounds(ranks, got, want, i0, i1)


def case_stored_pairs(ranks):
    """Parts lie on several ranks, and have the translation of the whole part; a rank without rows or pairs."""
    for parts, reg_m, reference in ((1, 1.0, "product"), (3, 5.0, "uniform"), (3, (5.0, 2.0), "given")):
        S, M, a, b = pairs(41, 33, 0.6, parts=parts)
        at = np.random.default_rng(1).permutation(41)  # a part has rows on all ranks
        S, M, a = S[at], M[at], a[at] * np.array([0.1, 1.0, 10.0])[at % 3]
        c = np.random.default_rng(5).random(M.shape) if reference == "given" else None
        whole, options = (S, a, b), {"reg": 0.1, "reg_m": reg_m, "precision": "float64", "tol": 1e-10}
        want, one = (
            mapuot.solve(*whole, reference=reference if c is None else c, backend=backend, **options)
            for backend in ("cpu", "cuda")
        )
        for split in ("even", "uneven"):
            i0, i1 = bounds(ranks, 41, split)
            own = reference if c is None else c[i0:i1]
            given = S[i0:i1], a[i0:i1], b
            got = mapuot.solve(*given, reference=own, backend="cuda", comm=ranks, **options)
            within_bounds(ranks, got, want, i0, i1)
            assert abs(got.n_passes - one.n_passes) <= 2, (parts, split, got, one)
            np.testing.assert_allclose(got.plan.toarray(), one.plan[i0:i1].toarray(), rtol=1e-7, atol=1e-15)
            if split == "uneven":
                got = mapuot.solve(
                    *given, reference=own, precision="mixed", reg=0.1, reg_m=reg_m, backend="cuda", comm=ranks
                )
                within_bounds(ranks, got, want, i0, i1)


def case_pairs_from_the_device(ranks):
    """They stay on the GPU where they lie, whatever the rank's number is, and the plan is there."""
    S, _, a, b = pairs(21, 17, 0.6)
    (i0, i1), count = bounds(ranks, 21), cp.cuda.runtime.getDeviceCount()
    was, own = cp.cuda.Device(), cp.cuda.Device((count - 1 - ranks.rank) % count)
    want = mapuot.solve(S, a, b, reg=0.1, reg_m=1.0, tol=1e-10, backend="cpu")
    own.use()
    try:
        given = device_sparse.csr_matrix(sparse.csr_matrix(S[i0:i1]))
        got = mapuot.solve(given, a[i0:i1], b, reg=0.1, reg_m=1.0, comm=ranks)
        assert cp.cuda.Device() == own
        assert isinstance(got.plan, device_sparse.csr_matrix)
        assert abs(got.plan.get() - want.plan[i0:i1]).max() <= 1e-5 * want.plan.max()
        assert isinstance(got.apply_transpose(np.ones(i1 - i0)), cp.ndarray)
    finally:
        was.use()


# ---- stops and errors ----


def case_stops(ranks):
    """In the middle of what is enqueued at once."""
    case, last = block(ranks, clouds(133, 621)), ranks.rank == ranks.size - 1
    for count in (1, 2, 3, 13):
        result = case.solve(comm=ranks, max_passes=count, method="sinkhorn", **FLOAT64)
        assert (result.status, result.n_passes) == ("max_passes", count)
    stop = (lambda stats: stats.n_pass == 4) if last else None
    result = case.solve(comm=ranks, callback=stop, **FLOAT64)
    assert (result.status, result.n_passes) == ("cancelled", 4)


def case_a_warm_start(ranks):
    case = block(ranks, clouds(133, 621))
    first = case.solve(comm=ranks, **FLOAT64)
    assert case.solve(comm=ranks, warm_start=first, **FLOAT64).n_passes <= 2


def case_errors_reach_everyone(ranks):
    case, last = clouds(33, 21), ranks.rank == ranks.size - 1
    name = f"rank {ranks.size - 1}: " if ranks.size > 1 else ""
    mine = block(ranks, case)

    def fail(stats):
        if last and stats.n_pass == 3:
            raise KeyError("mine")

    def rows(i0, i1):
        if last and ranks.asked > 1:
            raise OSError("the disk is gone")
        ranks.asked += 1
        return case.M[i0:i1]

    ranks.asked = 0
    M = mine.M.copy()
    M[-1:, -1:] = np.nan if last else 0.5
    for bad, kind, text, options in [
        (mine.replace(M=M), ValueError, name + "M must not hold NaN", {}),
        (mine, KeyError, "mine", {"callback": fail, **FLOAT64}),
        (mine.replace(M=rows), OSError, "the disk is gone", {"backend": "cuda"}),
        (mine.replace(M=cp.full_like(M, np.inf), reg_m=np.inf), mapuot.InfeasibleError, "M forbids every pair", {}),
    ]:
        with pytest.raises(kind, match=text):
            bad.solve(comm=ranks, **options)
    check(ranks, case)  # and all can go on


def case_an_error_before_a_sum(ranks):
    """The others have asked for it, and some wait for it on their GPUs."""
    case, last, made = block(ranks, clouds(133, 621)), ranks.rank == ranks.size - 1, []
    row_pass = DeviceWorkspace.row_pass

    def fail(self):
        made.append(1)
        if last and len(made) == 3:
            raise OSError("no row half")
        row_pass(self)

    if ranks.size == 1:
        return
    DeviceWorkspace.row_pass = fail
    try:
        with pytest.raises(OSError, match=f"rank {ranks.size - 1}: no row half"):
            case.solve(comm=ranks, method="sinkhorn", **FLOAT64)
    finally:
        DeviceWorkspace.row_pass = row_pass
    check(ranks, clouds(37, 29))


def main(ranks, only=""):
    """{case: what failed} of the cases named, or of all, and how the sums went."""
    cp.cuda.Device(ranks.rank % cp.cuda.runtime.getDeviceCount()).use()
    failures = {}
    for name, case in sorted(globals().items()):
        if not name.startswith("case_") or (only and name[5:] not in only.split()):
            continue
        text = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", mapuot.ConvergenceWarning)
                case(ranks)
        except Exception:
            text = f"rank {ranks.rank}: {traceback.format_exc()}"
        texts = [text for text in ranks.allgather(text) if text]
        failures[name[5:]] = texts[0] if texts else ""
    return failures, ranks.device_sum.way if ranks.device_sum else ""
