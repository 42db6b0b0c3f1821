"""What the ranks of a communicator must do together; run by tests/test_mpi.py as ``mpiexec -n P python cases.py``.

Each function named ``case_*`` runs on every rank; the last line of rank 0 is a JSON object of the failures by name.
"""

import functools
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent.parent))
import fake_cupy
from problems import clouds, with_forbidden, with_zeros

import mapuot
from mapuot.backends.native import SERIAL_ENTRIES
from mapuot.ranks import join, own_rows
from mapuot.solve import QUICK_ENTRIES

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
FLOAT64 = {"precision": "float64", "tol": 1e-12}


def bounds(m, split="even"):
    """The rows of this rank: as the library splits them, or all but a few on the last rank."""
    if split == "even":
        return own_rows(m, RANK, SIZE)
    ends = [0, *(min(3 * (r // 2), m) for r in range(1, SIZE)), m]
    return ends[RANK], ends[RANK + 1]


def block(case, split="even"):
    """The same problem with the own rows only."""
    i0, i1 = bounds(len(case.a), split)
    rho = case.reg_m
    if isinstance(rho, tuple) and np.ndim(rho[0]) == 1:
        rho = (rho[0][i0:i1], rho[1])
    c = case.reference if isinstance(case.reference, str) else case.reference[i0:i1]
    return case.replace(M=case.M[i0:i1], a=case.a[i0:i1], reg_m=rho, reference=c)


def both(case, split="even", **options):
    """(the Result over all ranks, that of one process)."""
    options = options or FLOAT64
    return block(case, split).solve(comm=COMM, **options), case.solve(**options)


def same_everywhere(*arrays, among=0):
    """The same bits on all ranks with the same ``among``."""
    data = b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)
    found = COMM.allgather((among, data))
    assert len(set(found)) == len({key for key, _ in found}), "the ranks differ"


def compare(result, one, i0, i1, tol=1e-12, passes=1, columns=(0, None)):
    """Every member of a distributed Result against that of one process."""
    assert result.status == one.status
    assert abs(result.n_passes - one.n_passes) <= passes, (result.n_passes, one.n_passes)
    own = slice(*columns)
    same_everywhere([s.error for s in result.trace], [result.objective, result.dual, result.mass])
    same_everywhere(result.log_v, among=columns)
    same_everywhere(result.log_u, among=(i0, i1))
    np.testing.assert_allclose(result.log_u, one.log_u[i0:i1], atol=tol, rtol=tol)
    np.testing.assert_allclose(result.log_v, one.log_v[own], atol=tol, rtol=tol)
    close = functools.partial(np.testing.assert_allclose, rtol=100 * tol, atol=tol)
    close(result.plan, one.plan[i0:i1, own])
    close(result.rows(0, i1 - i0), one.plan[i0:i1, own])
    close(result.row_marginal, one.row_marginal[i0:i1])
    close(result.col_marginal, one.col_marginal[own])
    for name in ("mass", "cost", "objective", "dual"):
        close(getattr(result, name), getattr(one, name), err_msg=name)
    close(result.trace[0].residual, one.trace[0].residual)
    for name in ("mass", "dual"):
        close(getattr(result.trace[-1], name), getattr(result, name), err_msg="last pass: " + name)
    X, Y = np.random.default_rng(0).random((len(one.log_v), 2)), np.arange(len(one.log_u), dtype=float)
    close(result.apply(X[own]), one.apply(X)[i0:i1])
    close(result.apply_transpose(Y[i0:i1]), one.apply_transpose(Y)[own])
    close(result.barycentric_map(X[own]), one.barycentric_map(X)[i0:i1])
    index, value = result.top_k(min(3, X.shape[0]))
    close(value, one.top_k(min(3, X.shape[0]))[1][i0:i1])
    close(np.take_along_axis(one.plan[i0:i1], index, 1), value)
    for root in {0, SIZE - 1}:
        whole = (
            result.gather_plan(root), result.gather(result.log_u, root), result.gather(result.log_v, root, "cols")
        )  # fmt: skip
        if root == RANK:
            for found, wanted in zip(whole, (one.plan, one.log_u, one.log_v), strict=True):
                close(found, wanted)
        else:
            assert whole == (None, None, None)


def check(case, split="even", within=1e-12, passes=1, **options):
    compare(*both(case, split, **options), *bounds(len(case.a), split), within, passes)


# ---- the same answer ----


def case_shapes():
    for shape in [(37, 29), (64, 48), (2, 40), (1, 1), (5, 3), (50, 2)]:
        check(clouds(*shape, ratio=1.3))


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
    for reg_m in [(1.0, 5.0), np.inf, (np.inf, 1.0), 100.0]:
        check(clouds(33, 21, reg_m=reg_m))
    check(clouds(33, 21, penalty="l2", reg_m=2.0))
    for penalty, reg_m in (("tv", 0.2), ("range", 0.3)):
        check(
            clouds(33, 21, penalty=penalty, reg_m=reg_m), within=1e-8, passes=1000, precision="float64", tol_gap=1e-10
        )


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
    case = clouds(33, 21)
    c = np.random.default_rng(1).random((33, 21)) + 0.1
    c[::5, ::3] = 0.0
    c[: own_rows(33, 0, SIZE)[1] // 2] = 0.0  # whole rows without reference mass
    check(case.replace(reference="uniform"))
    check(case.replace(reference=c))


def case_zeros_and_forbidden_pairs():
    check(with_zeros(clouds(33, 21)))
    check(with_forbidden(clouds(33, 21)))
    case = clouds(33, 21)
    case.a[: own_rows(33, 0, SIZE)[1] - (SIZE == 1)] = 0.0  # no mass on rank 0
    check(case)
    M = clouds(33, 21).M
    M[:, 4] = np.inf  # a column and a row that nothing reaches
    M[7] = np.inf
    check(clouds(33, 21).replace(M=M))


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


# ---- errors ----


def refused(kind, text, case, **options):
    """The same error on every rank."""
    try:
        case.solve(comm=COMM, **options)
    except kind as error:
        message = str(error)
    else:
        message = "nothing raised"
    assert text in message, message
    same_everywhere(np.frombuffer(message.encode(), np.uint8))


def case_one_bad_block():
    last = SIZE - 1
    name = f"rank {last}: " if SIZE > 1 else ""
    case = block(clouds(33, 21))

    def spoil(array, value):
        array = array.copy()
        if last == RANK:
            array.flat[-1] = value
        return array

    refused(ValueError, name + "M must not hold NaN", case.replace(M=spoil(case.M, np.nan)))
    refused(ValueError, name + "a must be >= 0", case.replace(a=spoil(case.a, -1.0)))
    refused(ValueError, name + "a must be finite", case.replace(a=spoil(case.a, np.inf)))
    bad = case.M.astype(object) if last == RANK else case.M
    refused(TypeError, name + "M must hold real numbers", case.replace(M=bad))
    short = case.a[:-1] if last == RANK else case.a
    refused(ValueError, name + "a must have shape", case.replace(a=short))
    rho = spoil(np.ones(len(case.a)), -1.0)
    refused(ValueError, name + "reg_m[0] must be > 0", case.replace(reg_m=(rho, 1.0)))


def case_bad_for_all():
    case = block(clouds(33, 21))
    refused(ValueError, "reg must be a positive finite number", case.replace(reg=-1.0))
    refused(ValueError, "a must have positive, finite mass", case.replace(a=0 * case.a))
    refused(ValueError, "M must be a non-empty matrix (m, n), got shape (0, 21)", case.replace(M=case.M[:0], a=None))
    refused(mapuot.InfeasibleError, "equal masses", case.replace(a=2 * case.a, reg_m=np.inf))
    hard = case.replace(M=np.where(np.arange(21) == 0, np.inf, case.M), reg_m=(1.0, np.inf))
    refused(mapuot.InfeasibleError, "M forbids every pair of b[0]", hard)
    refused(ValueError, "split must be 'rows', 'grid', 'auto'", case, split="columns")
    refused(ValueError, f"R * C = {SIZE} ranks", case, split=(SIZE, SIZE + 1))
    refused(ValueError, "split='auto' needs M in a file", case, split="auto")
    if SIZE > 1:
        refused(NotImplementedError, "'reference' runs in one process", case, backend="reference")


def case_arguments_that_differ():
    if SIZE == 1:
        return
    case, mine = block(clouds(33, 21)), 1.0 + (RANK == SIZE - 1)
    refused(ValueError, "reg must be the same on every rank, got 1.0 on rank 0", case.replace(reg=mine))
    refused(ValueError, "tol must be the same", case, tol=1e-6 * mine)
    refused(ValueError, "max_passes must be the same", case, max_passes=int(mine))
    refused(ValueError, "b must be the same", case.replace(b=case.b * mine))
    refused(ValueError, "reg_m[1] must be the same", case.replace(reg_m=(1.0, mine)))
    refused(ValueError, "reg_m[0] must be the same", case.replace(reg_m=(mine, 1.0)))
    refused(ValueError, "method must be the same", case, method="auto" if mine == 1 else "sinkhorn")
    source = (lambda i0, i1: case.M) if mine == 1 else case.M
    refused(
        ValueError, "M must be the same on every rank, got 'a function' on rank 0, 'an array'", case.replace(M=source)
    )
    if RANK == SIZE - 1:
        case = case.replace(M=case.M[:, :-1], b=case.b[:-1])
    refused(ValueError, "must be the same on every rank", case)


def case_callbacks():
    case, last = block(clouds(33, 21)), RANK == SIZE - 1

    def fail(stats):
        if last and stats.n_pass == 3:
            raise KeyError("mine")

    refused(KeyError, "mine", case, callback=fail, **FLOAT64)
    refused(KeyError, "mine", case, callback=fail if last else None, **FLOAT64)
    refused(MemoryError, "Unable to allocate", case, callback=(lambda stats: np.empty(1 << 50)) if last else None)
    stop = (lambda stats: stats.n_pass == 4) if last else None
    result = case.solve(comm=COMM, callback=stop, **FLOAT64)
    assert (result.status, result.n_passes) == ("cancelled", 4)


def case_a_function_that_fails_late():
    """In an exact pass, where the others wait in the sum."""
    case, calls = block(clouds(33, 21)), [0]
    M, i0 = case.M, bounds(33)[0]

    def rows(k0, k1):
        calls[0] += 1
        if RANK == SIZE - 1 and calls[0] > 6:
            raise OSError("the disk is gone")
        return M[k0 - i0 : k1 - i0]

    refused(OSError, "the disk is gone", case.replace(M=rows), precision="bfloat16")


def case_results_stay_where_they_are():
    import pickle

    if SIZE == 1:
        return
    result = block(clouds(33, 21)).solve(comm=COMM)
    with pytest.raises(TypeError, match="gather"):
        pickle.dumps(result)
    with pytest.raises(ValueError, match="root must be a rank"):
        result.gather_plan(SIZE)
    with pytest.raises(ValueError, match="root must be the same on every rank"):
        result.gather_plan(RANK % 2)
    with pytest.raises(ValueError, match="blocks must have as many columns on every rank"):
        result.gather(np.ones((2, 1 + RANK)))
    mixed = result.gather(np.full(1, RANK, np.float64 if RANK else np.float32))
    assert RANK or list(mixed) == list(range(SIZE))
    wrong = np.ones(len(result.log_u) + (RANK == SIZE - 1))
    with pytest.raises(ValueError, match=f"rank {SIZE - 1}: Y must have shape"):
        result.apply_transpose(wrong)


def main(found):
    failures = {}
    for name, case in sorted(found.items()):
        if not name.startswith("case_") or (sys.argv[1:] and name[5:] not in sys.argv[1:]):
            continue
        if RANK == 0:
            print(name, flush=True)
        text, begin = "", time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", mapuot.ConvergenceWarning)
                case()
        except Exception:
            text = f"rank {RANK}: {traceback.format_exc()}"
        if RANK == 0:
            print(f"{time.perf_counter() - begin:.2f} s", flush=True)
        texts = [text for text in COMM.allgather(text) if text]
        failures[name[5:]] = texts[0] if texts else ""
    if RANK == 0:
        print(json.dumps({"size": SIZE, "failures": failures}), flush=True)
    sys.exit(any(failures.values()))


if __name__ == "__main__":
    main(globals())
