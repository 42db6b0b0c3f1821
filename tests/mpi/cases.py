"""Rows over ranks have one process's answer, and every rank gets the same error, whichever rank is at fault.

``mpiexec -n P python cases.py`` runs each function ``case_*`` on every rank; the last line of rank 0 is a JSON object
of the failures by name.
"""

import contextlib
import itertools
import json
import os
import pickle
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import over_ranks
import pytest
from launch import HERE
from mpi4py import MPI
from over_ranks import FLOAT64, Job, own_points, stored_pairs
from problems import clouds, csr_of
from scipy import sparse

import mapuot
from mapuot.backends.coarse import FOUND
from mapuot.backends.cpu import backend as cpu
from mapuot.backends.cpu import native
from mapuot.processor import SERIAL_ENTRIES
from mapuot.ranks import join, own_rows

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


def written(name, write):
    """Return the path of a file that rank 0 has written, in a new folder."""
    path = Path(COMM.bcast(tempfile.mkdtemp() if RANK == 0 else None)) / name
    if RANK == 0:
        write(path)
    COMM.Barrier()
    return path


def case_files_of_pairs(job):
    """Every rank opens the whole matrix's file; its rows follow the split of a, even or not."""
    case = stored_pairs(3, 2.0)
    path = written("S.npz", lambda path: sparse.save_npz(path, csr_of(case.M)))
    want = mapuot.solve(csr_of(case.M), case.a, case.b, reg=case.reg, reg_m=2.0, **FLOAT64)
    for split in ("even", "uneven"):
        i0, i1 = job.bounds(41, split)
        got = mapuot.solve(path, case.a[i0:i1], case.b, reg=case.reg, reg_m=2.0, comm=COMM, **FLOAT64)
        np.testing.assert_allclose(got.plan.toarray(), want.plan[i0:i1].toarray(), rtol=1e-9, atol=1e-15)
    even = mapuot.solve(path, None, case.b, reg=case.reg, reg_m=2.0, comm=COMM, **FLOAT64)
    assert even.plan.shape[0] == np.subtract(*job.bounds(41)[::-1])
    h5py = pytest.importorskip("h5py")
    for form in ("csr", "csc"):

        def write(path, form=form):
            given = csr_of(case.M).asformat(form)
            with h5py.File(path, "w") as file:
                group = file.create_group("M")
                group.attrs["encoding-type"], group.attrs["shape"] = f"{given.format}_matrix", given.shape
                for member in ("data", "indices", "indptr"):
                    group[member] = getattr(given, member)

        path = written(f"{form}.h5", write)
        i0, i1 = job.bounds(41, "uneven")
        got = mapuot.solve(path, case.a[i0:i1], case.b, reg=case.reg, reg_m=2.0, comm=COMM, **FLOAT64)
        assert got.problem.cost.data.base is None, "no more than the own rows"
        np.testing.assert_allclose(got.plan.toarray(), want.plan[i0:i1].toarray(), rtol=1e-9, atol=1e-15)


def case_scale_of_the_costs(job):
    """Ranks have one scale, from the whole M: of an array, of stored pairs, of points and of some rows of many."""
    case = stored_pairs(3, 2.0)
    rng = np.random.default_rng(7)
    x = rng.random((3000, 2))
    y = rng.random((2000, 2))
    dense = np.where(np.isfinite(case.M), case.M, 3.0)
    wholes = {"array": dense, "pairs": csr_of(case.M), "points": mapuot.PointCloud(x, y)}
    for kind, M in wholes.items():
        i0, i1 = job.bounds(M.shape[0], "even" if kind == "points" else "uneven")
        if kind == "points":
            own = mapuot.PointCloud(x[i0:i1], y)
        else:
            own = M[i0:i1]
        for how in ("median", "mean", "max", "weighted_median"):
            numbers = {"reg": 0.2, "reg_m": 1.0, "scale_cost": how, "max_passes": 3}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                want = mapuot.solve(M, **numbers).scale_cost
                got = mapuot.solve(own, np.full(i1 - i0, 1 / M.shape[0]), comm=COMM, **numbers)
            assert abs(got.scale_cost / want - 1) < 1e-12, (kind, how)


def case_all_pairs(job):
    """Ranks share the pairs of many clouds; all get the matrix of one process."""
    rng = np.random.default_rng(6)
    clouds = [rng.random((k, 2)) for k in (5, 12, 8, 20, 3)]
    got = mapuot.pairwise(clouds, reg=0.05, reg_m=1.0, comm=COMM)
    np.testing.assert_array_equal(got, mapuot.pairwise(clouds, reg=0.05, reg_m=1.0))


def case_one_potential(job):
    """Each rank has its own rows' marginals, which are columns; the ordinary path takes values that differ by rank."""
    rng = np.random.default_rng(8)
    x = rng.random((67, 2))
    a = rng.random(67) + 0.01
    a[[3, 66]] = 0.0
    lies = (job.bounds(67), job.bounds(67, "uneven"))
    regs = ((0.1, 0.3), (1e-3, np.inf), (1e-5, 1.0))
    for (reg, reg_m), (i0, i1) in itertools.product(regs, lies):
        cloud = mapuot.PointCloud(x, form=None)
        want = mapuot.solve(cloud, a, a, reg=reg, reg_m=reg_m, symmetric=False, tol=1e-10, precision="float64")
        for options in ({}, {"precision": "float64", "tol": 1e-8}, {"warm_start": (want.log_u[i0:i1], want.log_v)}):
            own = own_points(x, x, i0, i1, form=None)
            got = mapuot.solve(own, a[i0:i1], a, reg=reg, reg_m=reg_m, comm=COMM, **options)
            assert "one potential" in got.how, got.how
            assert got.n_passes <= 14, got
            job.within_bounds(got, want, i0, i1, hard=5.0 if reg_m == np.inf else 1.0)
            np.testing.assert_allclose(got.log_u, got.log_v[i0:i1], rtol=1e-12, atol=1e-12)
        for b, z in ((np.r_[a[:65], 2 * a[65], 0], x), (a, np.r_[x[:66], 2 * x[66:]])):
            own = own_points(x, z, i0, i1, form=None)
            other = mapuot.solve(own, a[i0:i1], b, reg=0.1, reg_m=0.3, comm=COMM)
            assert "one potential" not in other.how, other.how


def case_blocks_that_differ_by_a_row(job):
    """Ranks take one path together near every size where a rank by itself would take another."""
    for entries in (cpu.quick_entries, SERIAL_ENTRIES):
        n = entries // 512
        m = 512 * SIZE + SIZE // 2
        i0, i1 = job.bounds(m)
        x = np.random.default_rng(0).random((m, 1))
        y = np.random.default_rng(1).random(n)
        result = mapuot.solve((x[i0:i1] - y) ** 2, reg=0.1, reg_m=1.0, comm=COMM)
        assert result.converged
        job.same(result.log_v)


def case_clusters(job):
    """The ranks' differences together correct every rank's steps, nearly as one process does."""
    case = clouds(660, 640, reg=0.003)
    options = {"precision": "float64", "tol": 1e-7}
    result = job.solve(case, **options)
    one = case.solve(**options)
    assert result.converged
    assert FOUND[result.problem.cost].clusters == {1: 64, 2: 32, 3: 16, 4: 16}[SIZE]
    assert result.n_passes <= 1.25 * one.n_passes
    job.same(result.log_v)
    np.testing.assert_allclose(result.objective, one.objective, rtol=1e-9)


def case_uniform_weights_and_threads(job):
    M = clouds(33, 21).M
    (i0, i1) = job.bounds(33)
    options = {"reg": 0.05, "reg_m": 1.0, "threads": 2, **FLOAT64}
    job.compare(mapuot.solve(M[i0:i1], comm=COMM, **options), mapuot.solve(M, **options), i0, i1)


def case_function_and_files(job):
    case = clouds(33, 21)
    i0, i1 = job.bounds(33)
    one = case.solve(**FLOAT64)
    asked = []

    def rows(k0, k1):
        asked.append((k0, k1))
        return case.M[k0:k1]

    job.compare(job.block(case).replace(M=rows).solve(comm=COMM, **FLOAT64), one, i0, i1)
    assert all(i0 <= k0 <= k1 <= i1 for k0, k1 in asked)
    path = written("M.npy", lambda path: np.save(path, case.M))
    job.compare(job.block(case).replace(M=path).solve(comm=COMM, **FLOAT64), one, i0, i1)
    one = case.solve(precision="mixed", tol=1e-9)
    result = job.block(case).replace(M=path).solve(comm=COMM, precision="mixed", tol=1e-9)
    job.compare(result, one, i0, i1, within=1e-4, passes=3)


def case_sub_communicators(job):
    """Groups of ranks solve problems of their own."""
    part = COMM.Split(RANK % 2)
    case = clouds(20 + RANK % 2, 15)
    i0, i1 = own_rows(len(case.a), part.rank, part.size)
    result = case.replace(M=case.M[i0:i1], a=case.a[i0:i1]).solve(comm=part, **FLOAT64)
    np.testing.assert_allclose(result.log_v, case.solve(**FLOAT64).log_v, atol=1e-12)
    part.Free()


def case_labels_and_shares(job):
    """The share counts the whole plan, and labels are numbered over all ranks."""
    case = clouds(33, 21)
    labels = np.array(list("abc") * 11)
    kinds = np.arange(21) % 3
    result = job.solve(case)
    one = case.solve(**FLOAT64)
    (i0, i1) = job.bounds(33)
    np.testing.assert_allclose(result.sparse(keep=0.7).toarray(), one.sparse(keep=0.7).toarray()[i0:i1], atol=1e-12)
    np.testing.assert_allclose(result.push(labels[i0:i1])[1], one.push(labels)[1], atol=1e-10)
    np.testing.assert_allclose(result.pull(kinds)[1], one.pull(kinds)[1][i0:i1], atol=1e-10)
    classes, _ = result.push(np.full(i1 - i0, f"rank {RANK}"))
    assert list(classes) == [f"rank {rank}" for rank in range(SIZE)]
    path = written("out.npz", lambda path: None)
    result.save(path)
    np.testing.assert_allclose(mapuot.load(path, case.M).plan, one.plan, atol=1e-12)
    assert "mapuot.Result" in result._repr_html_()


def case_points_whose_mass_underflows(job):
    """Conditional plans of rows and columns far from all others equal one process's."""
    case = clouds(33, 21)
    labels = np.array(list("abc") * 11)
    kinds = np.arange(21) % 3
    M = np.array(case.M)
    M[5] += 20000.0 * case.reg
    M[:, 7] += 20000.0 * case.reg
    case = case.replace(M=M)
    result = job.solve(case)
    one = case.solve(**FLOAT64)
    (i0, i1) = job.bounds(33)
    assert one.row_marginal[5] == one.col_marginal[7] == 0
    np.testing.assert_allclose(result.push(labels[i0:i1])[1], one.push(labels)[1], atol=1e-9)
    np.testing.assert_allclose(one.push(labels)[1].sum(1), 1.0)
    np.testing.assert_allclose(result.pull(kinds)[1], one.pull(kinds)[1][i0:i1], atol=1e-9)
    np.testing.assert_array_equal(result.top_k(1)[0], one.top_k(1)[0][i0:i1])


def case_warning_on_one_rank_only(job):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = job.block(clouds(33, 21)).solve(comm=COMM, max_passes=2)
    assert result.status == "max_passes"
    assert len(caught) == (RANK == 0)


# ---- sums of GPUs, without one ----


@contextlib.contextmanager
def on_device(comm, with_nccl=True, device=0, never=False):
    """Replace CuPy by its emulation in ../cuda and make its communicators; ``never``: some rank comes to no sum."""
    # waiting: sums that the device waits for
    made = []
    waiting = []
    path = [str(HERE / "cuda" / "cuda_on_cpu"), *sys.path]
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "path", path):
        for name in [*sys.modules]:
            if name.split(".")[0] == "cupy" or name == "mapuot.ranks.device_sum":
                del sys.modules[name]
        import cupy

        class Communicator(cupy.nccl.NcclCommunicator):
            def __init__(self, *given):
                super().__init__(*given)
                made.append(self)

            def allReduce(self, *given):  # noqa: N802
                if never:
                    return waiting.append(self)
                return super().allReduce(*given)

            def abort(self):
                waiting.clear()
                super().abort()

        class Stream(cupy.cuda.Stream):
            done = property(lambda self: not waiting)

            def synchronize(self):
                assert self.done, "the host waits for ever"

        cupy.cuda.Device(device).use()
        cupy.cuda.get_current_stream = Stream
        cupy.nccl.available, cupy.nccl.NcclCommunicator = with_nccl, Communicator
        yield cupy, made


def device_sum(comm, ranks=None, **fake):
    """Return (the way that the sum took, the number of NCCL communicators made)."""
    ranks = ranks or join(comm)
    with on_device(comm, **fake) as (cupy, made):
        total = np.arange(comm.size + 3.0)
        for _ in range(2):
            mine = cupy.asarray(total * (comm.rank + 1))
            with ranks.adding(mine):
                pass
            np.testing.assert_array_equal(mine.get(), total * sum(range(comm.size + 1)))
    return ranks.device_sum.way, len(made)


def case_device_sums(job):
    comm = COMM.Dup()
    assert device_sum(comm, device=RANK) == ("nccl", 1)
    assert device_sum(comm, device=RANK) == ("nccl", 0), "a solve later it is there still"
    assert device_sum(comm, device=RANK + 1) == ("nccl", 1), "on other GPUs a new one"
    assert device_sum(comm, device=0)[0] == ("host" if SIZE > 1 else "nccl"), "NCCL shares no GPU"
    assert device_sum(comm, device=RANK, with_nccl=RANK < SIZE - 1)[0] == "host", "not every rank has NCCL"
    for value, way in (("1", "mpi"), ("0", "host")):
        os.environ["MAPUOT_CUDA_MPI"] = value
        assert device_sum(comm, device=RANK) == (way, 0)
    os.environ["MAPUOT_CUDA_MPI"] = str(int(RANK == 0))
    if SIZE > 1:
        with pytest.raises(ValueError, match="MAPUOT_CUDA_MPI must be the same on every rank"):
            device_sum(comm, device=RANK)
    del os.environ["MAPUOT_CUDA_MPI"]
    comm.Free()


def case_sums_that_a_rank_never_comes_to(job):
    """The other ranks raise a rank's error before they wait for their GPUs, so that no sum hangs."""
    if SIZE == 1:
        return
    comm = COMM.Dup()
    last = RANK == SIZE - 1
    ranks = join(comm)

    def passes(total, stream):
        for turn in range(3):
            with ranks.adding(total):
                if last and turn == 2:
                    raise OSError("no row half")
        ranks.all(None)
        stream.synchronize()

    with on_device(comm, device=RANK, never=True) as (cupy, made):
        with pytest.raises(OSError, match="no row half"), ranks.together():
            passes(cupy.asarray(np.ones(5)), cupy.cuda.get_current_stream())
        assert len(made) == 1
        cupy.cuda.get_current_stream().synchronize()
    assert device_sum(comm, device=RANK) == ("nccl", 1), "the next solve makes its own"
    with pytest.raises(OSError, match="mine"), ranks.together():
        raise OSError("mine")
    assert device_sum(comm, device=RANK) == ("nccl", 0), "an error beside no sum leaves it"
    comm.Free()


# ---- errors


def case_one_bad_block(job):
    last = SIZE - 1
    name = f"rank {last}: " if SIZE > 1 else ""
    case = job.block(clouds(33, 21))

    def spoil(array, value):
        array = array.copy()
        if last == RANK:
            array.flat[-1] = value
        return array

    job.refused(ValueError, name + "M must not hold NaN", case.replace(M=spoil(case.M, np.nan)))
    job.refused(ValueError, name + "a must be >= 0", case.replace(a=spoil(case.a, -1.0)))
    job.refused(ValueError, name + "a must be finite", case.replace(a=spoil(case.a, np.inf)))
    if last == RANK:
        bad = case.M.astype(object)
    else:
        bad = case.M
    job.refused(TypeError, name + "M must hold real numbers", case.replace(M=bad))
    if last == RANK:
        short = case.a[:-1]
    else:
        short = case.a
    job.refused(ValueError, name + "a must have shape", case.replace(a=short))
    rho = spoil(np.ones(len(case.a)), -1.0)
    job.refused(ValueError, name + "reg_m[0] must be > 0", case.replace(reg_m=(rho, 1.0)))


def case_bad_for_all(job):
    case = job.block(clouds(33, 21))
    job.refused(ValueError, "reg must be a positive finite number", case.replace(reg=-1.0))
    job.refused(ValueError, "a must have positive, finite mass", case.replace(a=0 * case.a))
    job.refused(
        ValueError, "M must be a non-empty matrix (m, n), got shape (0, 21)", case.replace(M=case.M[:0], a=None)
    )
    job.refused(mapuot.InfeasibleError, "equal masses", case.replace(a=2 * case.a, reg_m=np.inf))
    hard = case.replace(M=np.where(np.arange(21) == 0, np.inf, case.M), reg_m=(1.0, np.inf))
    job.refused(mapuot.InfeasibleError, "M forbids every pair of b[0]", hard)
    if SIZE > 1:
        job.refused(NotImplementedError, "'reference' runs in one process", case, backend="reference")


def case_stored_pairs_that_are_refused(job):
    """Every rank names the same part that cannot be balanced, with points numbered over all blocks."""
    S = sparse.block_diag([np.ones((2, 2)), np.ones((7, 1))], "csr")
    i0, i1 = job.bounds(9)
    case = job.block(clouds(9, 3, reg_m=np.inf)).replace(M=S[i0:i1], a=np.ones(i1 - i0), b=np.array([1.0, 0.5, 7.5]))
    told = "M connects a[0], a[1] with b[0], b[1] only, where 2 must be transported and 1.5 may be"
    job.refused(mapuot.InfeasibleError, told, case)
    job.refused(mapuot.InfeasibleError, told, case.replace(M=np.where(case.M.toarray() > 0, 1.0, np.inf)))
    told = "M connects b[2] with a[2], a[3], a[4], a[5], a[6] and 2 others of a only, where 15 must be transported"
    wide = case.replace(b=np.array([0.9, 0.6, 15.0]), reg_m=(1.0, np.inf), penalty=("range", "balanced"))
    job.refused(mapuot.InfeasibleError, told, wide)
    if SIZE > 1:
        mixed = case.replace(M=case.M if RANK else case.M.toarray())
        job.refused(ValueError, "M must be the same on every rank, got 'an array' on rank 0, 'a sparse matrix'", mixed)
        result = case.replace(b=np.array([1.0, 1.0, 7.0])).solve(comm=COMM)
        with pytest.raises(NotImplementedError, match="result must be of one process"):
            mapuot.certify(result, np.ones((i1 - i0, 3)))
    bad = S[i0:i1].copy()
    if RANK == SIZE - 1:
        bad.data[-1] = np.nan
    job.refused(ValueError, "M must not hold NaN", case.replace(M=bad))


def case_arguments_that_differ(job):
    if SIZE == 1:
        return
    case = job.block(clouds(33, 21))
    mine = 1.0 + (RANK == SIZE - 1)
    job.refused(ValueError, "reg must be the same on every rank, got 1.0 on rank 0", case.replace(reg=mine))
    job.refused(ValueError, "tol must be the same", case, tol=1e-6 * mine)
    job.refused(ValueError, "max_passes must be the same", case, max_passes=int(mine))
    job.refused(ValueError, "b must be the same", case.replace(b=case.b * mine))
    job.refused(ValueError, "reg_m[1] must be the same", case.replace(reg_m=(1.0, mine)))
    job.refused(ValueError, "reg_m[0] must be the same", case.replace(reg_m=(mine, 1.0)))
    job.refused(ValueError, "method must be the same", case, method="auto" if mine == 1 else "sinkhorn")
    source = (lambda i0, i1: case.M) if mine == 1 else case.M
    job.refused(
        ValueError, "M must be the same on every rank, got 'a function' on rank 0, 'an array'", case.replace(M=source)
    )
    if RANK == SIZE - 1:
        case = case.replace(M=case.M[:, :-1], b=case.b[:-1])
    job.refused(ValueError, "must be the same on every rank", case)


def case_instruction_sets_that_differ(job):
    best = native.isa()
    if SIZE == 1 or best == "scalar":
        return
    if RANK == SIZE - 1:
        native.set_isa("scalar")
    got = f"got '{best}' on rank 0, 'scalar' on {SIZE - 1}"
    try:
        job.refused(ValueError, "the instruction set (MAPUOT_ISA lowers it) must be the same on every rank, " + got,
                    job.block(clouds(33, 21)))  # fmt: skip
    finally:
        native.set_isa(best)


def case_a_function_that_fails_late(job):
    """An error in an exact pass, while the others wait in the sum, reaches all ranks."""
    case = job.block(clouds(33, 21))
    calls = [0]
    M = case.M
    i0 = job.bounds(33)[0]

    def rows(k0, k1):
        calls[0] += 1
        if RANK == SIZE - 1 and calls[0] > 6:
            raise OSError("the disk is gone")
        return M[k0 - i0 : k1 - i0]

    job.refused(OSError, "the disk is gone", case.replace(M=rows), precision="mixed", tol=1e-9)


def case_results_stay_where_they_are(job):
    if SIZE == 1:
        return
    result = job.block(clouds(33, 21)).solve(comm=COMM)
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


if __name__ == "__main__":
    failures = Job(COMM).run(vars(over_ranks) | globals(), sys.argv[1:])
    if RANK == 0:
        print(json.dumps({"size": SIZE, "failures": failures}), flush=True)
    sys.exit(any(failures.values()))
