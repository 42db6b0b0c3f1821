"""Rows over ranks: the answer of one process; run by tests/mpi/test_mpi.py as ``mpiexec -n P python cases.py``."""

import functools
import math
import os
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import fake_cupy
import judge
import matrix
import numpy as np
import pytest
from common import COMM, FLOAT64, RANK, SIZE, block, bounds, compare, main, same_everywhere
from problems import clouds, with_forbidden, with_zeros
from scipy import sparse

import mapuot
from mapuot.ascend import groups
from mapuot.backends import boxes
from mapuot.backends.coarse import FOUND
from mapuot.backends.cpu import QUICK_ENTRIES
from mapuot.processor import SERIAL_ENTRIES
from mapuot.ranks import join, own_rows


def both(case, split="even", **options):
    """(the Result over all ranks, that of one process)."""
    options = options or FLOAT64
    return block(case, split).solve(comm=COMM, **options), case.solve(**options)


def check(case, split="even", within=1e-12, passes=1, **options):
    compare(*both(case, split, **options), *bounds(len(case.a), split), within, passes)


# ---- the same answer ----


def case_matrix():
    """Each kind of cost that has rows, for each penalty: the judge believes what the ranks say together."""
    for kind, door, pair in matrix.CELLS:
        if door != "solve" or kind == "grid" or not (kind == "dense" or "kl" in pair):
            continue
        M, case, options = matrix.posed(kind, pair)
        i0, i1 = bounds(len(case.a))
        own = case.replace(a=case.a[i0:i1])
        if kind in ("given", "stored"):
            options = {"reference": options["reference"][i0:i1]}
        result = matrix.solve(M if kind == "function" else M[i0:i1], own, comm=COMM, **FLOAT64, **options)
        claim = judge.claim_over_ranks(result, COMM)
        if claim is not None:
            found, _ = judge.judge(case, claim, FLOAT64, matrix.best_of(kind, pair))
            assert not found, (kind, pair, found)
        assert result.converged, (kind, pair, result.status)


def case_shapes():
    for shape in [(37, 29), (64, 48), (2, 40), (1, 1), (5, 3), (50, 2)]:
        check(clouds(*shape, ratio=1.3))


def case_points():
    """Float32 passes that each rank makes of its own rows; and scalings that on one rank alone float32 cannot hold."""
    x, y = np.random.default_rng(3).random((41, 3)), np.random.default_rng(4).random((33, 3))
    for far in (0.0, 3.0):
        x[0] += far
        for i0, i1 in (bounds(41), bounds(41, "uneven")):
            for reg in (0.3, 0.02, 0.001):
                case = clouds(41, 33, reg=reg).replace(M=np.asarray(mapuot.PointCloud(x, y)))
                mine = mapuot.PointCloud(x[i0:i1], y) if i1 > i0 else mapuot.PointCloud(x[:1], y)[:0]
                got = mapuot.solve(mine, case.a[i0:i1], case.b, reg=reg, reg_m=case.reg_m, comm=COMM)
                want = case.solve(tol=1e-9)
                off = COMM.allreduce(float(np.abs(got.plan - want.plan[i0:i1]).sum()))
                assert off <= (got.error_bound + want.error_bound) * want.mass
                same_everywhere(got.error_bound, got.n_passes, got.status)
    x[0], weights = 1e3, [0.3, 0.7, 2.0]  # coordinates that are scaled are rounded, on one rank by far the most
    far, case = mapuot.PointCloud(x, y, "euclidean", weights=weights), clouds(41, 33, reg=0.3)
    for i0, i1 in (bounds(41), bounds(41, "uneven")):
        got = mapuot.solve(far[i0:i1], case.a[i0:i1], case.b, reg=0.3, reg_m=1.0, tol=1e-9, max_passes=30, comm=COMM)
        same_everywhere(got.error_bound, got.n_passes, got.status)


def pairs_of(M):
    """The finite pairs."""
    return sparse.csr_array((M[np.isfinite(M)], np.isfinite(M).nonzero()), shape=M.shape)


def stored_pairs(parts, reg_m):
    """(case, whether every pair is stored that a part has); points without a partner, rows of a part on all ranks."""
    rng = np.random.default_rng(parts)
    case = clouds(41, 33, reg=0.1, ratio=1.3, reg_m=reg_m)
    same_part = (np.arange(41) % parts)[:, None] == np.arange(33) % parts
    M = np.where(same_part & (rng.random((41, 33)) < 0.7), case.M, np.inf)
    M[7] = M[:, 5] = np.inf
    return case.replace(M=M)


def case_stored_pairs():
    """Rows of a sparse M: parts of it lie on several ranks, and have the translation of the whole part."""
    rng = np.random.default_rng(5)
    c = np.where(rng.random((41, 33)) < 0.9, rng.random((41, 33)), 0.0)
    for parts, reg_m, reference in ((1, 1.0, "product"), (4, 1.0, "uniform"), (4, (5.0, 2.0), c), (4, 50.0, "product")):
        case = stored_pairs(parts, reg_m)
        options = FLOAT64 | {"max_passes": 2000}
        one = mapuot.solve(pairs_of(case.M), case.a, case.b, reg=case.reg, reg_m=reg_m, reference=reference, **options)
        assert one.converged
        for split in ("even", "uneven"):
            i0, i1 = bounds(41, split)
            own = reference if isinstance(reference, str) else reference[i0:i1]
            rows = pairs_of(case.M[i0:i1]).asformat({"even": "csc", "uneven": "coo"}[split])
            got = mapuot.solve(
                rows, case.a[i0:i1], case.b, reg=case.reg, reg_m=reg_m, reference=own, comm=COMM, **options
            )
            assert got.converged
            assert abs(got.n_passes - one.n_passes) <= 2, (parts, split, got, one)
            assert (got.problem.parts.count if got.problem.parts else 1) == parts
            assert set(got.problem.parts.rows if got.problem.parts else ()) <= set(range(parts + 1))
            same_everywhere(got.log_v, [got.objective, got.dual, got.mass, got.error_bound])
            np.testing.assert_allclose(got.log_u, one.log_u[i0:i1], atol=1e-10)
            np.testing.assert_allclose(got.plan.toarray(), one.plan[i0:i1].toarray(), rtol=1e-9, atol=1e-15)
            np.testing.assert_allclose(got.apply_transpose(case.a[i0:i1]), one.apply_transpose(case.a), rtol=1e-9)
            for name in ("mass", "cost", "objective", "dual"):
                np.testing.assert_allclose(getattr(got, name), getattr(one, name), rtol=1e-10)
            whole = got.gather_plan(SIZE - 1)
            assert (whole is None) == (RANK < SIZE - 1)
            if whole is not None:
                assert whole.nnz == one.plan.nnz
                assert abs(whole - one.plan).max() <= 1e-9 * one.plan.max()
            kept = COMM.allreduce(got.sparse(keep=0.5).sum())
            np.testing.assert_allclose(kept, one.sparse(keep=0.5).sum(), rtol=1e-9)
            np.testing.assert_allclose(got.top_k(2)[1], one.top_k(2)[1][i0:i1], rtol=1e-9, atol=1e-15)


def case_files_of_pairs():
    """A file is that of the whole matrix; rows lie as those of a do, or evenly."""
    case = stored_pairs(3, 2.0)
    folder = COMM.bcast(tempfile.mkdtemp() if RANK == 0 else None)
    path = Path(folder) / "S.npz"
    if RANK == 0:
        sparse.save_npz(path, pairs_of(case.M))
    COMM.Barrier()
    want = mapuot.solve(pairs_of(case.M), case.a, case.b, reg=case.reg, reg_m=2.0, **FLOAT64)
    for split in ("even", "uneven"):
        i0, i1 = bounds(41, split)
        got = mapuot.solve(path, case.a[i0:i1], case.b, reg=case.reg, reg_m=2.0, comm=COMM, **FLOAT64)
        np.testing.assert_allclose(got.plan.toarray(), want.plan[i0:i1].toarray(), rtol=1e-9, atol=1e-15)
    even = mapuot.solve(path, None, case.b, reg=case.reg, reg_m=2.0, comm=COMM, **FLOAT64)
    assert even.plan.shape[0] == np.subtract(*bounds(41)[::-1])
    h5py = pytest.importorskip("h5py")
    for form in ("csr", "csc"):
        path = Path(folder) / f"{form}.h5"
        if RANK == 0:
            given = pairs_of(case.M).asformat(form)
            with h5py.File(path, "w") as file:
                group = file.create_group("M")
                group.attrs["encoding-type"], group.attrs["shape"] = f"{form}_matrix", given.shape
                for member in ("data", "indices", "indptr"):
                    group[member] = getattr(given, member)
        COMM.Barrier()
        i0, i1 = bounds(41, "uneven")
        got = mapuot.solve(path, case.a[i0:i1], case.b, reg=case.reg, reg_m=2.0, comm=COMM, **FLOAT64)
        assert got.problem.cost.data.base is None, "no more than the own rows"
        np.testing.assert_allclose(got.plan.toarray(), want.plan[i0:i1].toarray(), rtol=1e-9, atol=1e-15)


def case_truncated_points():
    """Each rank skips pairs of its own boxes; the bound is of all of them."""
    rng = np.random.default_rng(5)
    x, y, a, b = rng.random((300, 2)), 0.9 * rng.random((260, 2)) + 0.2, rng.random(300) + 0.1, rng.random(260) + 0.1
    x = x[np.argsort(x[:, 0])]  # ranks have points that are near each other, so that all find pairs to skip
    a[3:40] = 0.0
    Y, X = rng.random((260, 2)), rng.random(300)
    lies = bounds(300), bounds(300, "uneven"), (0, 300) if RANK == 0 else (300, 300)
    for penalty, reg_m, blocks, most in (
        ("kl", (1.0, 2.0), lies, groups.GROUPS),
        ("l2", 1.0, lies[:1], groups.GROUPS),
        (("balanced", "kl"), 1.0, lies[:1], groups.GROUPS),
        ("kl", (1.0, 2.0), lies, 150),  # passes are corrected by groups of 2, of the own rows
        ("l2", 1.0, lies[:1], 150),
        (("balanced", "kl"), 1.0, lies[:1], 150),
    ):
        exact = mapuot.PointCloud(x, y, truncate=None)
        want = mapuot.solve(exact, a, b, reg=3e-4, reg_m=reg_m, penalty=penalty, tol=1e-10)
        for i0, i1 in blocks:
            mine = mapuot.PointCloud(x[i0:i1] if i1 > i0 else x[:1], y, truncate=3.0)[: i1 - i0]
            warm = (want.log_u[i0:i1] + 0.1, want.log_v - 0.1) if blocks is not lies else None
            options = {"penalty": penalty, "tol": 1e-5, "comm": COMM, "warm_start": warm}
            always = mock.patch.object(boxes, "CORRECTION", math.inf)
            with always, mock.patch.multiple(groups, GROUPS=most, WIDE=math.inf):
                got = mapuot.solve(mine, a[i0:i1], b, reg=3e-4, reg_m=reg_m, **options)
            same_everywhere([s.error for s in got.trace], [got.objective, got.dual, got.mass, got.cost], got.log_v)
            assert got.converged
            kept = COMM.allgather(got.skipped.kept.share)
            assert set(kept) == {kept[0]}
            assert kept[0] < 0.6
            off = COMM.allreduce(float(np.abs(got.plan - want.plan[i0:i1]).sum()))
            hard = 5 if "balanced" in penalty else 1
            assert off <= (hard * got.error_bound + want.error_bound) * want.mass
            assert got.dual <= want.objective * (1 + 1e-12)
            close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
            close(got.apply(Y), got.plan @ Y)
            close(got.apply_transpose(X[i0:i1]), COMM.allreduce(got.plan.T @ X[i0:i1]))
            close(got.col_marginal, COMM.allreduce(got.plan.sum(0)), rtol=1e-5)


def case_uneven_and_empty_blocks():
    for shape in [(37, 29), (4, 17)]:
        check(clouds(*shape), split="uneven")


def case_blocks_that_differ_by_a_row():
    """Around every size at which a rank by itself would go another way."""
    for entries in (QUICK_ENTRIES, SERIAL_ENTRIES):
        n, m = entries // 512, 512 * SIZE + SIZE // 2
        i0, i1 = bounds(m)
        x, y = np.random.default_rng(0).random((m, 1)), np.random.default_rng(1).random(n)
        result = mapuot.solve((x[i0:i1] - y) ** 2, reg=0.1, reg_m=1.0, comm=COMM)
        assert result.converged
        same_everywhere(result.log_v)


def case_one_rho_a_row():
    case = clouds(33, 21)
    rho = np.linspace(0.5, 2.0, 33)
    check(case.replace(reg_m=(rho, 1.0)))
    steps = np.where(np.arange(33) < own_rows(33, 0, SIZE)[1], 1.0, 2.0)  # one value in each block
    check(case.replace(reg_m=(steps, 1.0)))
    hard = np.where(np.arange(33) < own_rows(33, 0, SIZE)[1], np.inf, 2.0)  # balanced on rank 0 only
    check(case.replace(reg_m=(hard, 1.0)))


def case_references():
    """Ones, and a matrix with zeros, among them whole rows and a column."""
    case = clouds(33, 21)
    c = np.random.default_rng(1).random((33, 21)) + 0.1
    c[::5, ::3] = c[:3] = 0.0
    c[:, 20] = 0.0
    check(case.replace(reference="uniform"))
    check(case.replace(reference=c))


def case_masks():
    """A pair is kept by its number in the whole matrix, wherever the blocks begin."""
    mask = mapuot.SeededMask(0.4, 5)
    for split in ("even", "uneven"):
        for case in (clouds(37, 29, reg_m=(np.inf, 1.0)), clouds(64, 48, reference="uniform"), clouds(37, 29)):
            check(case, split, mask=mask, **FLOAT64)


def case_zeros_and_forbidden_pairs():
    """Zero masses, forbidden pairs, a column and a row that nothing reaches, a row with partners far right only."""
    check(with_zeros(clouds(33, 21)))
    check(with_forbidden(clouds(33, 21)))
    case = clouds(33, 21)
    case.M[:, 4] = case.M[7] = np.inf
    case.M[9, :15] = np.inf
    check(case)
    case = clouds(33, 21)
    case.a[: own_rows(33, 0, SIZE)[1] - (SIZE == 1)] = 0.0  # no mass on rank 0
    check(case)


def case_small_reg():
    """K is rebuilt, and reg is lowered in steps."""
    compare(*both(clouds(40, 31, reg=0.004)), *bounds(40), tol=1e-10, passes=8)
    result, one = both(clouds(40, 31, reg=0.001), precision="float64", tol=1e-6)
    assert result.converged
    np.testing.assert_allclose(result.objective, one.objective, rtol=1e-9)


def case_clusters():
    """Those of all ranks together correct every rank's steps, nearly as those of one process do."""
    case = clouds(660, 640, reg=0.003)
    result, one = both(case, precision="float64", tol=1e-7)
    assert result.converged
    assert FOUND[result.problem.cost].clusters == {1: 64, 2: 32, 3: 16, 4: 16}[SIZE]
    assert result.n_passes <= 1.25 * one.n_passes
    same_everywhere(result.log_v)
    np.testing.assert_allclose(result.objective, one.objective, rtol=1e-9)


def case_methods_and_precisions():
    case = clouds(70, 50)
    for method in ("sinkhorn", "translation_invariant", "map-uot"):
        check(case.replace(reg=0.2), method=method, precision="float64", tol=1e-9)
    for tol in (1e-6, 1e-9):  # the finer one by exact passes, straight from M
        check(case, within=1e-4, passes=6, precision="mixed", tol=tol)
        check(case.replace(M=case.M.astype(np.float32)), within=1e-4, passes=6, precision="mixed", tol=tol)


def case_threads():
    result, one = both(clouds(90, 50), threads=2, **FLOAT64)
    compare(result, one, *bounds(90))


def case_uniform_weights():
    case = clouds(33, 21)
    i0, i1 = bounds(33)
    one = mapuot.solve(case.M, reg=0.05, reg_m=1.0, **FLOAT64)
    compare(mapuot.solve(case.M[i0:i1], reg=0.05, reg_m=1.0, comm=COMM, **FLOAT64), one, i0, i1)


def case_function_and_files():
    case = clouds(33, 21)
    i0, i1 = bounds(33)
    one = case.solve(**FLOAT64)
    asked = []

    def rows(k0, k1):
        asked.append((k0, k1))
        return case.M[k0:k1]

    compare(block(case).replace(M=rows).solve(comm=COMM, **FLOAT64), one, i0, i1)
    assert all(i0 <= k0 <= k1 <= i1 for k0, k1 in asked)
    folder = COMM.bcast(tempfile.mkdtemp() if RANK == 0 else None)
    path = Path(folder) / "M.npy"
    if RANK == 0:
        np.save(path, case.M)
    COMM.Barrier()
    compare(block(case).replace(M=path).solve(comm=COMM, **FLOAT64), one, i0, i1)
    one = case.solve(precision="mixed", tol=1e-9)
    result = block(case).replace(M=path).solve(comm=COMM, precision="mixed", tol=1e-9)
    compare(result, one, i0, i1, tol=1e-4, passes=3)


def case_warm_start():
    case = clouds(33, 21)
    first = block(case).solve(comm=COMM, **FLOAT64)
    again = block(case).solve(comm=COMM, warm_start=first, **FLOAT64)
    assert again.n_passes <= 2


def case_sub_communicators():
    """Groups of ranks solve problems of their own."""
    part = COMM.Split(RANK % 2)
    case = clouds(20 + RANK % 2, 15)
    i0, i1 = own_rows(len(case.a), part.rank, part.size)
    result = case.replace(M=case.M[i0:i1], a=case.a[i0:i1]).solve(comm=part, **FLOAT64)
    np.testing.assert_allclose(result.log_v, case.solve(**FLOAT64).log_v, atol=1e-12)
    part.Free()


def case_warning_on_one_rank_only():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = block(clouds(33, 21)).solve(comm=COMM, max_passes=2)
    assert result.status == "max_passes"
    assert len(caught) == (RANK == 0)


# ---- sums of GPUs, without one ----


def device_sum(comm, ranks=None, **fake):
    """(the way that the sum took, communicators of NCCL made, ranks)."""
    ranks = ranks or join(comm)
    with fake_cupy.installed(comm, **fake) as made:
        total = np.arange(comm.size + 3.0).view(fake_cupy.OnDevice)
        for _ in range(2):
            mine = total * (comm.rank + 1)
            with ranks.adding(mine):
                pass
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(total) * sum(range(comm.size + 1)))
    return ranks.device_sum.way, len(made), ranks


def case_device_sums():
    comm = COMM.Dup()
    assert device_sum(comm, device=RANK)[:2] == ("nccl", 1)
    assert device_sum(comm, device=RANK)[:2] == ("nccl", 0), "a solve later it is there still"
    assert device_sum(comm, device=RANK + 1)[:2] == ("nccl", 1), "on other GPUs a new one"
    assert device_sum(comm, device=0)[0] == ("host" if SIZE > 1 else "nccl"), "NCCL shares no GPU"
    assert device_sum(comm, device=RANK, with_nccl=RANK < SIZE - 1)[0] == "host", "not every rank has NCCL"
    for value, way in (("1", "mpi"), ("0", "host")):
        os.environ["MAPUOT_CUDA_MPI"] = value
        assert device_sum(comm, device=RANK)[:2] == (way, 0)
    os.environ["MAPUOT_CUDA_MPI"] = str(int(RANK == 0))
    if SIZE > 1:
        with pytest.raises(ValueError, match="MAPUOT_CUDA_MPI must be the same on every rank"):
            device_sum(comm, device=RANK)
    del os.environ["MAPUOT_CUDA_MPI"]
    comm.Free()


def case_sums_that_a_rank_never_comes_to():
    """The others meet its error before they wait for their GPUs, whose sums end."""
    if SIZE == 1:
        return
    comm, last = COMM.Dup(), RANK == SIZE - 1
    ranks = join(comm)

    def passes(total):
        for turn in range(3):
            with ranks.adding(total):
                if last and turn == 2:
                    raise OSError("no row half")
        ranks.all(None)
        fake_cupy.Stream().synchronize()

    with fake_cupy.installed(comm, device=RANK, never=True) as made:
        with pytest.raises(OSError, match="no row half"), ranks.together():
            passes(np.ones(5).view(fake_cupy.OnDevice))
        assert len(made) == 1
        fake_cupy.Stream().synchronize()
    assert device_sum(comm, device=RANK)[:2] == ("nccl", 1), "the next solve makes its own"
    with pytest.raises(OSError, match="mine"), ranks.together():
        raise OSError("mine")
    assert device_sum(comm, device=RANK)[:2] == ("nccl", 0), "an error beside no sum leaves it"
    comm.Free()


if __name__ == "__main__":
    main(globals())
