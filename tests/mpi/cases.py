"""Rows over ranks: the answer of one process; run by tests/mpi/test_mpi.py as ``mpiexec -n P python cases.py``."""

import functools
import os
import tempfile
import warnings
from pathlib import Path

import fake_cupy
import numpy as np
import pytest
from common import (
    COMM,
    FLOAT64,
    RANK,
    SIZE,
    block,
    bounds,
    check_forbidden,
    check_masks,
    check_penalties,
    check_references,
    compare,
    main,
    same_everywhere,
)  # fmt: skip
from problems import clouds

import mapuot
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
                got = mapuot.solve(mine, case.a[i0:i1], case.b, reg, case.reg_m, comm=COMM)
                want = case.solve(tol=1e-9)
                off = COMM.allreduce(float(np.abs(got.plan - want.plan[i0:i1]).sum()))
                assert off <= (got.error_bound + want.error_bound) * want.mass
                same_everywhere(got.error_bound, got.n_passes, got.status)


def case_uneven_and_empty_blocks():
    for shape in [(37, 29), (4, 17)]:
        check(clouds(*shape), split="uneven")


def case_blocks_that_differ_by_a_row():
    """Around every size at which a rank by itself would go another way."""
    for entries in (QUICK_ENTRIES, SERIAL_ENTRIES):
        n, m = entries // 512, 512 * SIZE + SIZE // 2
        i0, i1 = bounds(m)
        x, y = np.random.default_rng(0).random((m, 1)), np.random.default_rng(1).random(n)
        result = mapuot.solve((x[i0:i1] - y) ** 2, None, None, 0.1, 1.0, comm=COMM)
        assert result.converged
        same_everywhere(result.log_v)


def case_penalties():
    check_penalties(check)


def case_only_the_columns_balanced():
    """One process turns the problem, which rows over ranks cannot: the same answer on another way."""
    result, one = both(clouds(33, 21, reg_m=(1.0, np.inf)))
    assert result.converged
    assert one.converged
    i0, i1 = bounds(33)
    np.testing.assert_allclose(result.plan, one.plan[i0:i1], atol=1e-11)


def case_one_rho_a_row():
    case = clouds(33, 21)
    rho = np.linspace(0.5, 2.0, 33)
    check(case.replace(reg_m=(rho, 1.0)))
    steps = np.where(np.arange(33) < own_rows(33, 0, SIZE)[1], 1.0, 2.0)  # one value in each block
    check(case.replace(reg_m=(steps, 1.0)))
    hard = np.where(np.arange(33) < own_rows(33, 0, SIZE)[1], np.inf, 2.0)  # balanced on rank 0 only
    check(case.replace(reg_m=(hard, 1.0)))


def case_references():
    check_references(check)


def case_masks():
    check_masks(check)
    check_masks(functools.partial(check, split="uneven"))


def case_zeros_and_forbidden_pairs():
    check_forbidden(check)
    case = clouds(33, 21)
    case.a[: own_rows(33, 0, SIZE)[1] - (SIZE == 1)] = 0.0  # no mass on rank 0
    check(case)


def case_small_reg():
    """K is rebuilt, and reg is lowered in steps."""
    compare(*both(clouds(40, 31, reg=0.004)), *bounds(40), tol=1e-10, passes=8)
    result, one = both(clouds(40, 31, reg=0.001), precision="float64", tol=1e-6)
    assert result.converged
    np.testing.assert_allclose(result.objective, one.objective, rtol=1e-9)


def case_methods_and_precisions():
    case = clouds(70, 50)
    for method in ("sinkhorn", "translation_invariant", "map-uot"):
        check(case.replace(reg=0.2), method=method, precision="float64", tol=1e-9)
    for precision in ("mixed", "bfloat16"):  # bfloat16: exact passes, straight from M
        check(case, within=1e-4, passes=3, precision=precision)
        check(case.replace(M=case.M.astype(np.float32)), within=1e-4, passes=3, precision=precision)


def case_threads():
    result, one = both(clouds(90, 50), threads=2, **FLOAT64)
    compare(result, one, *bounds(90))


def case_uniform_weights():
    case = clouds(33, 21)
    i0, i1 = bounds(33)
    one = mapuot.solve(case.M, None, None, 0.05, 1.0, **FLOAT64)
    compare(mapuot.solve(case.M[i0:i1], None, None, 0.05, 1.0, comm=COMM, **FLOAT64), one, i0, i1)


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
    one = case.solve(precision="bfloat16")
    result = block(case).replace(M=path).solve(comm=COMM, precision="bfloat16")
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
