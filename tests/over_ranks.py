"""Problems over ranks with any kind of sums: blocks of rows, answers checked against one process, shared cases.

Each function named ``case_*`` runs on every rank of a ``Job``; tests/mpi adds cases of MPI, tests/cuda cases of GPUs.
"""

import functools
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Any
from unittest import mock

import judge
import matrix
import numpy as np
from problems import clouds, csr_of

import mapuot
from mapuot.arrays import host
from mapuot.backends import pick
from mapuot.ranks import join, own_rows

FLOAT64 = {"precision": "float64", "tol": 1e-12}


def named(*programs):
    lines = [line for path in programs for line in path.read_text().splitlines()]
    return [line[9:].partition("(")[0] for line in lines if line.startswith("def case_")]


def numbers(x):
    return host(x.toarray() if hasattr(x, "toarray") else x)


@dataclass(frozen=True)
class Job:
    """The ``comm`` of solves, the backend, and ``form``, which makes the M of a solve from the rank's own rows."""

    comm: Any
    backend: str = "cpu"
    form: Any = np.asarray

    @functools.cached_property
    def ranks(self):
        return join(self.comm)

    @property
    def last(self):
        return self.ranks.rank == self.ranks.size - 1

    def bounds(self, m, split="even"):
        """Return this rank's rows: as the library splits them, or all but a few on the last rank and none on some."""
        rank, size = self.ranks.rank, self.ranks.size
        if split == "even":
            return own_rows(m, rank, size)
        ends = [0, *(min(3 * (r // 2), m) for r in range(1, size)), m]
        return ends[rank], ends[rank + 1]

    def block(self, case, split="even", form=None):
        i0, i1 = self.bounds(len(case.a), split)
        rho = case.reg_m
        if isinstance(rho, tuple) and np.ndim(rho[0]) == 1:
            rho = (rho[0][i0:i1], rho[1])
        if isinstance(case.reference, str):
            c = case.reference
        else:
            c = case.reference[i0:i1]
        return case.replace(M=(form or self.form)(case.M[i0:i1]), a=case.a[i0:i1], reg_m=rho, reference=c)

    def solve(self, case, split="even", form=None, **options):
        return self.block(case, split, form).solve(comm=self.comm, backend=self.backend, **(options or FLOAT64))

    def rows_stay(self):
        """Return a context in which one process, like several ranks, never transposes a matrix of long rows."""
        return mock.patch.object(pick(self.backend), "long_rows", np.inf, create=True)

    def alone(self, case, **options):
        """Return the Result of one process that keeps rows as rows, as several ranks do."""
        with self.rows_stay():
            return case.replace(M=self.form(case.M)).solve(backend=self.backend, **(options or FLOAT64))

    def same(self, *arrays, among=0):
        """Assert equal bits on all ranks with the same ``among``."""
        data = b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)
        found = self.ranks.exchange((among, data))
        assert len(set(found)) == len({key for key, _ in found}), "the ranks differ"

    def check(self, case, split="even", within=1e-12, passes=1, form=None, **options):
        """Return the Result over all ranks, and check each of its members against one process.

        Equal steps need an equal Anderson depth (anderson_depth_of in mapuot/backends/workspace.py): on a GPU up to 119
        rows, or up to 512 columns.
        """
        with self.rows_stay():
            result = self.solve(case, split, form, **options)
            one = self.alone(case, **options)
        self.compare(result, one, *self.bounds(len(case.a), split), within, passes)
        return result

    def compare(self, result, one, i0, i1, within=1e-12, passes=1):
        """Compare every member of a distributed Result with one process's."""
        assert result.status == one.status, (result, one)
        assert abs(result.n_passes - one.n_passes) <= passes, (result.n_passes, one.n_passes)
        self.same([s.error for s in result.trace], [result.objective, result.dual, result.mass], result.log_v)
        self.same(result.log_u, among=(i0, i1))
        np.testing.assert_allclose(result.log_u, one.log_u[i0:i1], atol=within, rtol=within)
        np.testing.assert_allclose(result.log_v, one.log_v, atol=within, rtol=within)
        close = functools.partial(np.testing.assert_allclose, rtol=100 * within, atol=within)
        plan = numbers(one.plan)
        close(numbers(result.plan), plan[i0:i1])
        close(numbers(result.rows(0, i1 - i0)), plan[i0:i1])
        close(result.row_marginal, one.row_marginal[i0:i1])
        close(result.col_marginal, one.col_marginal)
        for name in ("mass", "cost", "objective", "dual"):
            close(getattr(result, name), getattr(one, name), err_msg=name)
        close(result.trace[0].residual, one.trace[0].residual)
        for name in ("mass", "dual"):
            close(getattr(result.trace[-1], name), getattr(result, name), err_msg="last pass: " + name)
        X = np.random.default_rng(0).random((len(one.log_v), 2))
        Y = np.arange(len(one.log_u), dtype=float)
        close(numbers(result.apply(X)), numbers(one.apply(X))[i0:i1])
        close(numbers(result.apply_transpose(Y[i0:i1])), numbers(one.apply_transpose(Y)), atol=within * len(Y))
        close(numbers(result.barycentric_map(X)), numbers(one.barycentric_map(X))[i0:i1])
        index, value = map(numbers, result.top_k(min(3, X.shape[0])))
        close(value, numbers(one.top_k(min(3, X.shape[0]))[1])[i0:i1])
        close(np.take_along_axis(plan[i0:i1], index, 1), value)
        for root in {0, self.ranks.size - 1}:
            mine = root == self.ranks.rank
            whole = result.gather_plan(root), result.gather(result.log_u, root)
            assert mine or whole == (None, None)
            for found, wanted in zip(whole, (plan, one.log_u), strict=True):
                if mine:
                    close(numbers(found), wanted)

    def within_bounds(self, got, want, i0, i1, hard=1.0):
        """Compare a distributed Result's own rows with one process's Result, by the certificates of both."""
        assert got.converged
        self.same(got.log_v, [s.error for s in got.trace], [got.objective, got.dual, got.mass, got.cost])
        plan = numbers(got.plan)
        dense = numbers(want.plan)
        off = self.ranks.sum(float(np.abs(plan - dense[i0:i1]).sum()))
        assert off <= (hard * got.error_bound + want.error_bound) * want.mass
        assert got.dual <= want.objective + 1e-9 * abs(want.objective)
        X = np.linspace(0.0, 1.0, dense.shape[1])
        Y = np.linspace(0.0, 1.0, len(dense))[i0:i1]
        close = np.testing.assert_allclose
        close(numbers(got.apply(X)), plan @ X, rtol=1e-6)
        close(numbers(got.apply_transpose(Y)), self.ranks.sum(plan.T @ Y), rtol=1e-6, atol=1e-12)
        close(got.col_marginal, self.ranks.sum(plan.sum(0)), rtol=1e-4)
        whole = got.gather_plan(0)
        if self.ranks.rank == 0:
            assert np.abs(numbers(whole) - dense).sum() <= (hard * got.error_bound + want.error_bound) * want.mass

    def refused(self, kind, text, case, **options):
        try:
            case.solve(comm=self.comm, **options)
        except kind as error:
            message = str(error)
        else:
            message = "nothing raised"
        assert text in message, message
        self.same(np.frombuffer(message.encode(), np.uint8))

    def run(self, found, only=()):
        """Return {name: failure} of the cases in ``found``, the globals of a program, or of the named cases."""
        failures = {}
        for name, case in sorted(found.items()):
            if not name.startswith("case_") or (only and name[5:] not in only):
                continue
            text = ""
            begin = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", mapuot.ConvergenceWarning)
                    case(self)
            except Exception:
                text = f"rank {self.ranks.rank}: {traceback.format_exc()}"
            if self.ranks.rank == 0:
                print(f"{name} {time.perf_counter() - begin:.2f} s", flush=True)
            failures[name[5:]] = next(filter(None, self.ranks.allgather(text)), "")
        return failures


def own_points(x, y, i0, i1, **options):
    """Return the cloud of the own rows, also of none."""
    return mapuot.PointCloud(x[i0:i1] if i1 > i0 else x[:1], y, **options)[: i1 - i0]


# ---- the same answer


BY_ROWS = "dense", "function", "pairs", "points", "cosine", "cityblock", "euclidean", "boxes"


def case_matrix(job):
    """Cells of costs by rows, started from zeros: the judge believes the ranks' joint claims."""
    exact = {"precision": "float64", "tol": matrix.TOLS["float64"]}
    skipped = []
    cells = [x for x in matrix.cells() if x.door == "solve" and x.kind in BY_ROWS]
    for k, (kind, _, pair, traits) in enumerate(cells):
        if traits.start != "cold" and kind not in ("dense", "pairs"):
            continue
        if job.backend == "cuda" and kind in matrix.POINTS and traits.reference == "given":
            continue  # a GPU takes no matrix as the reference of points
        M, case, options = matrix.posed(kind, pair, traits)
        i0, i1 = job.bounds(len(case.a), "uneven" if k % 3 == 2 and kind not in matrix.POINTS else "even")
        own = case.replace(a=case.a[i0:i1])
        if traits.rho == "one a point":
            own = own.replace(reg_m=(case.reg_m[0][i0:i1], case.reg_m[1]))
        if traits.reference.startswith("given"):
            options = options | {"reference": options["reference"][i0:i1]}
        if kind == "dense":
            M = job.form(M[i0:i1])
        elif kind != "function":
            M = M[i0:i1]
        result = matrix.solve(M, own, comm=job.comm, backend=job.backend, **exact, **options)
        claim = judge.claim_over_ranks(result, job.ranks.rank)
        if claim is not None:
            found, _ = judge.judge(case, claim, exact, matrix.best_of(kind, pair, traits))
            assert not found, (kind, pair, traits, found)
        assert result.converged, (kind, pair, traits, result.status)
        skipped += [kind] * (result.skipped is not None)
    # on a GPU all points are in one box, as are the points of a rank with both groups
    assert skipped or job.backend == "cuda" or matrix.SHAPES["boxes"][0] % job.ranks.size


def case_shapes(job):
    for shape in [(37, 29), (64, 48), (2, 40), (1, 1), (5, 3), (50, 2)]:
        job.check(clouds(*shape, ratio=1.3))
    for shape in [(37, 29), (4, 17)]:
        job.check(clouds(*shape), split="uneven")  # and empty blocks


def case_rows_that_one_rank_alone_has(job):
    """Hard rows, or no mass, may be on rank 0 only; a row and a column may be out of reach, a row have few partners."""
    case = clouds(33, 21)
    first = own_rows(33, 0, job.ranks.size)[1]
    job.check(case.replace(reg_m=(np.where(np.arange(33) < first, np.inf, 2.0), 1.0)))
    case.M[:, 4] = case.M[7] = np.inf
    case.M[9, :15] = np.inf
    job.check(case)
    case.a[: first - (job.ranks.size == 1)] = 0.0
    job.check(case)


def case_methods_and_precisions(job):
    case = clouds(70, 50)
    for method in ("sinkhorn", "translation_invariant", "map-uot"):
        job.check(case.replace(reg=0.2), method=method, precision="float64", tol=1e-9)
    exact = case.solve(backend="cpu", **FLOAT64)
    (i0, i1) = job.bounds(70)
    for tol in (1e-6, 1e-9):  # the finer one by exact passes, straight from M
        for M in (case.M, case.M.astype(np.float32)):
            result = job.check(case.replace(M=M), within=1e-4, passes=6, precision="mixed", tol=tol)
        if tol == 1e-6:
            error = job.ranks.sum(np.abs(numbers(result.plan) - exact.plan[i0:i1]).sum())
            assert (
                error <= (result.error_bound + 1e-6) * result.mass
            )  # the last M is rounded to float32: allow its error, too


def case_warm_start(job):
    case = clouds(33, 21)
    assert job.solve(case, warm_start=job.solve(case), **FLOAT64).n_passes <= 2


def stored_pairs(parts, reg_m):
    """Return (case, whether all pairs of each part are stored); some points have no partner, parts span all ranks."""
    rng = np.random.default_rng(parts)
    case = clouds(41, 33, reg=0.1, ratio=1.3, reg_m=reg_m)
    same_part = (np.arange(41) % parts)[:, None] == np.arange(33) % parts
    M = np.where(same_part & (rng.random((41, 33)) < 0.7), case.M, np.inf)
    M[7] = M[:, 5] = np.inf
    return case.replace(M=M)


def case_stored_pairs(job):
    """Parts of a sparse M that lie on several ranks have the translation of the whole part."""
    rng = np.random.default_rng(5)
    c = np.where(rng.random((41, 33)) < 0.9, rng.random((41, 33)), 0.0)
    for parts, reg_m, reference in ((1, 1.0, "product"), (4, 1.0, "uniform"), (4, (5.0, 2.0), c), (4, 50.0, "product")):
        case = stored_pairs(parts, reg_m).replace(reference=reference)
        options = FLOAT64 | {"max_passes": 2000}
        one = case.replace(M=csr_of(case.M)).solve(backend=job.backend, **options)
        assert one.converged
        for split in ("even", "uneven"):
            i0, i1 = job.bounds(41, split)
            form = {"even": "csc", "uneven": "coo"}[split]
            got = job.solve(case, split, lambda M, form=form: csr_of(M).asformat(form), **options)
            job.within_bounds(got, one, i0, i1)
            assert abs(got.n_passes - one.n_passes) <= 2, (parts, split, got, one)
            assert (got.problem.parts.count if got.problem.parts else 1) == parts
            assert set(got.problem.parts.rows if got.problem.parts else ()) <= set(range(parts + 1))
            kept = job.ranks.sum(float(got.sparse(keep=0.5).sum()))
            np.testing.assert_allclose(kept, one.sparse(keep=0.5).sum(), rtol=1e-8)


# ---- stops and errors


def case_stops(job):
    """A solve over ranks may end in the middle of a batch of enqueued passes."""
    case = clouds(133, 621)
    for count in (1, 2, 3, 13):
        result = job.solve(case, max_passes=count, method="sinkhorn", **FLOAT64)
        assert (result.status, result.n_passes) == ("max_passes", count)
    stop = (lambda stats: stats.n_pass == 4) if job.last else None
    result = job.solve(case, callback=stop, **FLOAT64)
    assert (result.status, result.n_passes) == ("cancelled", 4)


def case_callbacks(job):
    """An exception of a callback on one rank is raised on all, with or without their own callback; then all go on."""
    case = job.block(clouds(33, 21))

    def fail(stats):
        if job.last and stats.n_pass == 3:
            raise KeyError("mine")

    job.refused(KeyError, "mine", case, callback=fail, **FLOAT64)
    job.refused(KeyError, "mine", case, callback=fail if job.last else None, **FLOAT64)
    most = (lambda stats: np.empty(1 << 50)) if job.last else None
    job.refused(MemoryError, "Unable to allocate", case, callback=most)
    job.check(clouds(33, 21))
