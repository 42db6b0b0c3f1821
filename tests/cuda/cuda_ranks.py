"""Joint work of ranks with a GPU each; tests/cuda/test_cuda_ranks.py runs it in child processes, without MPI.

These cases add to ../over_ranks.py. The reference is one process on the GPU, which other tests compare with the CPU.
Ranks may share a GPU: then the sums go through the host. Without a GPU some cases run on its emulation (cuda_on_cpu),
with sums through an emulated NCCL.
"""

import os
from unittest import mock

import cupy as cp
import numpy as np
import over_ranks
from cupyx.scipy import sparse as device_sparse
from over_ranks import FLOAT64, Job, numbers, own_points
from problems import clouds, pairs
from scipy import sparse

import mapuot
from mapuot.ascend import groups
from mapuot.ascend.settings import GROUPS
from mapuot.backends.cuda import workspace
from mapuot.backends.cuda.settings import DEVICE_LAUNCHES
from mapuot.backends.cuda.workspace import DeviceWorkspace

PORTABLE = {"MAPUOT_CUDA": "portable"}
HOST_SUMS = {"MAPUOT_CUDA_MPI": "0"}


def case_wide_shapes(job):
    for shape in [(301, 515), (70, 1030), (130, 4100), (9, 20001)]:
        job.check(clouds(*shape, ratio=1.3), passes=2)  # an H200 took 12 and 14
    job.check(clouds(113, 621, reg_m=(1.0, 5.0)))
    for reg_m in [np.inf, (np.inf, 1.0)]:  # between hard sides float64 ends at errors of 1e-12 to 5e-12
        job.check(clouds(113, 621, reg_m=reg_m), within=1e-10, precision="float64", tol=1e-11)
    job.check(clouds(113, 621, reg_m=100.0), within=1e-10)  # rho / reg amplifies rounding


def case_where_rows_lie(job):
    """Rows may lie on the host, be read by a function, or be made on the device; a rank may have none."""
    for shape, split in [((37, 29), "even"), ((37, 29), "uneven"), ((5, 1100), "uneven")]:
        case = clouds(*shape)
        for form in (
            cp.asarray, np.asarray, lambda own, M=case.M: lambda i0, i1: M[i0:i1],
            lambda own, M=case.M: lambda i0, i1: cp.asarray(M[i0:i1]),
        ):  # fmt: skip
            job.check(case, split, form=form)


def case_a_kernel_that_one_rank_has_no_room_for(job):
    """If one rank has no room for K, all ranks rebuild K in every pass."""
    free = workspace.free_memory
    with mock.patch.object(workspace, "free_memory", (lambda enough: 0) if job.last else free):
        result = job.solve(clouds(37, 29))
    one = clouds(37, 29).solve(backend="cpu", **FLOAT64)
    (i0, i1) = job.bounds(37)
    np.testing.assert_allclose(numbers(result.plan), one.plan[i0:i1], rtol=1e-10, atol=1e-14)
    job.same(result.log_v, [s.error for s in result.trace])


def case_portable_kernels(job):
    with mock.patch.dict(os.environ, PORTABLE):
        for shape in [(37, 29), (70, 1030), (9, 20001), (5, 66000)]:
            job.check(clouds(*shape, ratio=1.3), passes=2)
        job.check(clouds(37, 29), "uneven")
        job.check(clouds(33, 21), within=1e-4, passes=3, precision="mixed")


def case_through_the_host(job):
    ranks = job.ranks
    ranks.device_sum = None
    try:
        with mock.patch.dict(os.environ, HOST_SUMS):
            job.check(clouds(70, 1030))
        assert ranks.size == 1 or ranks.device_sum.way == "host"
    finally:
        ranks.device_sum = None


def case_truncated_points(job):
    """Each rank skips pairs of its own boxes; the bound covers all ranks, which agree on their start."""
    reached = groups.Groups.reached
    noisy = {"reached": lambda own, *by: reached(own, *by) + 1e-9 * job.ranks.rank}  # as last bits of GPUs are
    rng = np.random.default_rng(5)
    x = rng.random((220, 2))
    y = rng.random((200, 2)) + 0.2
    a = rng.random(220) + 0.1
    b = rng.random(200) + 0.1
    # boxes of 32 points skip little of a square
    x = x * [20.0, 1.0]
    y = y * [20.0, 1.0]
    x = x[np.argsort(x[:, 0])]  # ranks have points that are near each other, so that all find pairs to skip
    options = {"reg": 0.03, "reg_m": (1.0, 2.0)}
    want = mapuot.solve(mapuot.PointCloud(x, y, truncate=None), a, b, tol=1e-10, backend="cpu", **options)
    for split in ("even", "uneven"):
        i0, i1 = job.bounds(220, split)
        if split == "uneven":
            options["warm_start"] = (want.log_u[i0:i1] + 0.1, want.log_v - 0.1)
        else:
            options["warm_start"] = None
        mine = own_points(x, y, i0, i1, truncate=3.0)
        with GROUPS.using(usual_groups=64), mock.patch.multiple(groups.Groups, **noisy):
            got = mapuot.solve(mine, a[i0:i1], b, tol=1e-5, backend="cuda", comm=job.comm, **options)
        job.same(got.log_v)
        assert got.skipped.kept.share < 0.6
        job.within_bounds(got, want, i0, i1)


def case_points_in_many_dimensions(job):
    """Ranks multiply the coordinates of their own rows by those of all columns; a rank may have no row."""
    rng = np.random.default_rng(6)
    x = rng.random((50, 19))
    y = rng.random((46, 19)) + 0.1
    a = rng.dirichlet(np.ones(50))
    b = rng.dirichlet(np.ones(46))
    for metric, reg_m, split in (("sqeuclidean", (1.0, 2.0), "uneven"), ("inner", (2.0, np.inf), "even")):
        options = {"reg": 0.3, "reg_m": reg_m}
        want = mapuot.solve(mapuot.PointCloud(x, y, metric), a, b, tol=1e-10, backend="cpu", **options)
        i0, i1 = job.bounds(50, split)
        mine = own_points(x, y, i0, i1, metric=metric, form=None, truncate=None)
        got = mapuot.solve(mine, a[i0:i1], b, tol=1e-6, backend="cuda", comm=job.comm, **options)
        job.within_bounds(got, want, i0, i1)
        with DEVICE_LAUNCHES.using(least_corrected=1):  # float32 passes with corrected sums follow float64 ones
            got = mapuot.solve(mine, a[i0:i1], b, tol=1e-7, backend="cuda", comm=job.comm, **options)
        job.within_bounds(got, want, i0, i1)


def case_pairs_from_the_device(job):
    """Pairs stay on their GPU, whatever the rank's number is, and so does the plan."""
    S, _, a, b = pairs(21, 17, 0.6)
    (i0, i1) = job.bounds(21)
    count = cp.cuda.runtime.getDeviceCount()
    was = cp.cuda.Device()
    own = cp.cuda.Device((count - 1 - job.ranks.rank) % count)
    want = mapuot.solve(S, a, b, reg=0.1, reg_m=1.0, tol=1e-10, backend="cpu")
    own.use()
    try:
        given = device_sparse.csr_matrix(sparse.csr_matrix(S[i0:i1]))
        got = mapuot.solve(given, a[i0:i1], b, reg=0.1, reg_m=1.0, comm=job.comm)
        assert cp.cuda.Device() == own
        assert isinstance(got.plan, device_sparse.csr_matrix)
        assert abs(got.plan.get() - want.plan[i0:i1]).max() <= 1e-5 * want.plan.max()
        assert isinstance(got.apply_transpose(np.ones(i1 - i0)), cp.ndarray)
    finally:
        was.use()


def case_errors_reach_everyone(job):
    case = clouds(33, 21)
    calls = []
    if job.ranks.size > 1:
        name = f"rank {job.ranks.size - 1}: "
    else:
        name = ""
    mine = job.block(case)

    def rows(i0, i1):
        if job.last and len(calls) > 1:
            raise OSError("the disk is gone")
        calls.append(i0)
        return case.M[i0:i1]

    M = mine.M.copy()
    M[-1:, -1:] = np.nan if job.last else 0.5
    job.refused(ValueError, name + "M must not hold NaN", mine.replace(M=M))
    job.refused(OSError, "the disk is gone", mine.replace(M=rows), backend="cuda")
    nothing = mine.replace(M=cp.full_like(M, np.inf), reg_m=np.inf)
    job.refused(mapuot.InfeasibleError, "M forbids every pair", nothing)
    job.check(case)  # and all can go on


def case_an_error_before_a_sum(job):
    """An error on one rank reaches the others, some of which already wait for its sum on their GPUs."""
    row_pass = DeviceWorkspace.row_pass
    made = []

    def fail(self):
        made.append(1)
        if job.last and len(made) == 3:
            raise OSError("no row half")
        row_pass(self)

    if job.ranks.size > 1:
        with mock.patch.object(DeviceWorkspace, "row_pass", fail):
            told = f"rank {job.ranks.size - 1}: no row half"
            job.refused(OSError, told, job.block(clouds(133, 621)), method="sinkhorn", **FLOAT64)
        job.check(clouds(37, 29))


def main(ranks, only=""):
    """Return {case: failure} for the named cases, or for all, and the transport of the sums."""
    cp.cuda.Device(ranks.rank % cp.cuda.runtime.getDeviceCount()).use()
    failures = Job(ranks, "cuda", cp.asarray).run(vars(over_ranks) | globals(), only.split())
    return failures, ranks.device_sum.way if ranks.device_sum else ""
