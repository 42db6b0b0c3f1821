"""`BatchRun`: the solve of a batch, first of its problems together, then of the remaining problems one by one."""

import dataclasses
from typing import Any

import numpy as np

from .. import outcome as outcomes
from ..answer.batch import BatchResult
from ..arrays import host, namespace
from ..ascend.carry_out import carry_out
from ..ascend.factored import factored_batch
from ..ascend.loop import Run
from ..ascend.settings import STAGES
from ..ascend.stages import FORMED, Stage, climb, in_words, ladder
from ..backends import Options
from ..backends.factored import START_TOL, LevelStart
from ..backends.workspace import ROUNDING_PART
from ..contract import Backend, BatchEngine
from ..outcome import CONVERGED, OUTCOMES
from ..penalties import F64
from ..problem.problem import EXPONENT_ROUNDING, FAR_APART, BatchProblem
from ..processor import thread_count
from ..threads import each
from .options import PRECISIONS, options_alone
from .plain import core, in_core, is_plain

COARSE_PASSES = 200  # at most, at each larger reg


class BatchRun:
    """A running batch solve; answers are filled in chunk by chunk and problem by problem."""

    def __init__(self, backend: Backend, task: BatchProblem, options: Options, precision: str, max_passes: int) -> None:
        self.backend, self.task, self.options, self.precision = backend, task, options, precision
        self.max_passes, self.stopped = max_passes, False
        p = len(task)
        self.tables: Any = None  # log u, log v, r, s
        self.ends = {name: np.empty(p) for name in ("gap", "error", "dual", "mass")}
        self.n_passes = np.zeros(p, np.int64)
        self.status = outcomes.unsolved(p)
        self.how = np.full(p, "", dtype=object)
        self.translation = np.zeros(p)  # of problems solved alone

    def solve(self, log_v: Any, bar: Any) -> None:
        engine = self.backend.batches()
        if engine:
            if self.task.each is None:
                self.together(engine, log_v, bar)
            else:
                self.by_groups(engine, log_v, bar)
        if self.tables is None:
            self.tables = self.empty_tables()
        left = np.flatnonzero((self.status != "converged") & (self.status != "max_passes"))
        if not len(left):
            return
        if engine:  # a problem alone takes 4 ms on a GPU, at any size
            plain = np.broadcast_to(is_plain(self.task), len(self.task))[left]
            left = np.concatenate([self.plainly(left[plain], log_v, bar), left[~plain]])
        on_cpu = self.backend.name != "cuda"
        if on_cpu:
            threads = self.options.threads or thread_count()
        else:
            threads = 1
        of_each = max(1, threads // max(1, len(left))) if self.task.several else 1
        each(lambda i: self.alone(i, log_v, of_each), left, self.stop, threads=threads, report=bar.update)

    def stop(self) -> None:
        """Make each solve in a thread end after its current call of the core."""
        self.stopped = True

    def empty_tables(self) -> Any:
        xp = namespace(self.task.A)
        shapes = [x.shape for x in (self.task.A, self.task.B)]
        return tuple(xp.full(shape, left_out) for left_out in (-np.inf, 0.0) for shape in shapes)

    def together(self, engine: BatchEngine, log_v: Any, bar: Any) -> None:
        task = self.task
        rounding = EXPONENT_ROUNDING * task.range_over_reg
        far = task.range_over_reg > FAR_APART and rounding > ROUNDING_PART * self.options.tol
        if far and task.rows.largest_soft_rho + task.cols.largest_soft_rho > 0:
            return  # distant points alone may keep the rounding above tol: each problem decides for itself
        if task.forbidden or task.c is not None or not (task.cost.operator == "tiles" or self.forms(engine)):
            return
        reach = 0.0
        if log_v is not None:
            reach = float(abs(log_v).max())
        dtype = engine.storage(task, PRECISIONS.get(self.precision), self.options.tol, reach)
        if dtype is None:
            return
        symmetric = self.options.symmetric and engine.has_one_potential
        options = dataclasses.replace(self.options, precision=dtype, symmetric=symmetric)
        leaves = symmetric and engine.leaves_one_potential
        most = self.max_passes
        if symmetric and not leaves:
            most = min(most, STAGES.most_together)
        step = max(1, engine.chunk_bytes // engine.bytes_each(task, options.anderson_depth, dtype))
        for i0 in range(0, len(task), step):
            i1 = min(i0 + step, len(task))
            start = None if log_v is None else log_v[i0:i1]
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # status reports failures
                workspace = engine.workspace(task.problems(i0, i1), options, start)
                cold = start is None or not bool((start != 0).any())
                climbs = engine.climbs and cold and not options.symmetric
                stages = climb(workspace.task, options, COARSE_PASSES) if climbs else []
                left = np.zeros(i1 - i0, bool)
                follows = task.misses and not workspace.meets and engine.factors(workspace.task)
                if follows:
                    self.factor(workspace, stages, i0, i1, min(most, engine.patience), bar)
                else:
                    for stage in stages:
                        workspace.climb(stage.reg, stage.options(options), stage.most)
                    if leaves:
                        workspace.iterate(min(most, STAGES.most_together))
                        left = workspace.leave()
                    self.chunk(workspace, i0, i1, most, bar)
            more = [FORMED] * bool(task.several) + ["one potential"] * bool(options.symmetric)
            reads, count = f"{dtype} tiles", f"{i1 - i0} problems together"
            self.how[i0:i1] = in_words(reads, len(stages), *more, count)
            self.how[i0:i1][left] = in_words(reads, 0, "one potential left", count)

    def by_groups(self, engine: BatchEngine, log_v: Any, bar: Any) -> None:
        """Solve problems that share reg and reg_m, in units of their own, together."""
        task = self.task
        on_cpu = self.backend.name == "cpu"
        if on_cpu and (task.several or not task.one_cost):
            return  # the core solves each of them by one thread
        xp = namespace(task.A)
        for which, some, factor in task.groups(self.backend, not on_cpu):
            if len(which) == 1 and on_cpu:
                continue
            run = BatchRun(self.backend, some, self.options, self.precision, self.max_passes)
            is_whole = len(which) == len(task)
            if log_v is None or is_whole:
                start = log_v
            else:
                start = log_v[xp.asarray(which)]
            run.together(engine, start, bar)
            if run.tables is None:
                continue
            if is_whole:
                self.tables = run.tables
            else:
                self.tables = self.tables or self.empty_tables()
                for table, values in zip(self.tables, run.tables, strict=True):
                    table[xp.asarray(which), : values.shape[1]] = values
            for name, values in run.ends.items():
                self.ends[name][which] = values * (factor if name in ("gap", "dual") else 1.0)
            self.n_passes[which], self.status[which], self.how[which] = run.n_passes, run.status, run.how

    def forms(self, engine: BatchEngine) -> bool:
        """Tell whether the engine solves many clouds together; smaller clouds are padded."""
        several = self.task.several
        if several is None or not engine.forms_clouds or isinstance(several.whole.truncate, float):
            return False
        return self.task.reference == "product" or not several.ragged

    def chunk(self, workspace: Any, i0: int, i1: int, most: int, bar: Any) -> None:
        running = int((workspace.stats["status"] == 0).sum())
        if self.options.symmetric:
            passes = int(workspace.field("passes").max())
        else:
            passes = 0
        bar.update(i1 - i0 - running)
        while running and passes < most:
            now = workspace.iterate(most - passes)
            passes = int(workspace.field("passes").max())
            bar.update(running - now)
            running = now
        self.read(workspace, i0, i1)
        status = workspace.status()
        certifies = workspace.meets or not self.task.misses  # else the problems are solved alone
        self.status[i0:i1] = outcomes.after_passes_together(status, most == self.max_passes, certifies)

    def read(self, workspace: Any, i0: int, i1: int) -> None:
        """Copy the last potentials, marginals and statistics of problems i0 to i1 into the tables."""
        part = slice(i0, i1)
        found = (*workspace.potentials(), *workspace.marginals())
        if namespace(self.task.A) is np:
            found = tuple(map(host, found))
        if i1 - i0 == len(self.task):
            self.tables = found
        else:
            self.tables = self.tables or self.empty_tables()
            for table, values in zip(self.tables, found, strict=True):
                table[part, : values.shape[1]] = values
        for name, values in self.ends.items():
            values[part] = workspace.stats[name]
        self.n_passes[part] = workspace.field("passes")

    def factor(self, workspace: Any, stages: list[Stage], i0: int, i1: int, most: int, bar: Any) -> None:
        """Solve problems i0 to i1, with hard columns, by at most ``most`` passes at each reg, then by factored steps.

        Passes certify what columns miss by paths. Problems that passes do not certify make Newton's steps from what
        the passes have reached, and one pass more.
        """
        task, options = workspace.task, workspace.options
        starts = list[LevelStart]()
        rough = dataclasses.replace(options, tol=max(options.tol, START_TOL))
        for stage in stages:
            if (left := self.passes_before_steps(workspace)) > 0:
                workspace.climb(stage.reg, rough, min(most, left))
                starts.insert(0, workspace.reached(stage.reg / task.reg))
        workspace.options = dataclasses.replace(options, by_paths=True)
        if (left := self.passes_before_steps(workspace)) > 0:
            workspace.iterate(min(most, left))
            starts.insert(0, workspace.reached(1.0))
        open_ones = np.flatnonzero(workspace.status() != "converged")
        if len(open_ones):
            log_v = factored_batch(task, open_ones, workspace.exponents, starts, options)
            workspace.begin_at(open_ones, log_v)
            workspace.iterate(1)
        self.read(workspace, i0, i1)
        holds = workspace.status() == "converged"
        self.status[i0:i1][holds] = CONVERGED.status
        bar.update(int(holds.sum()))

    def passes_before_steps(self, workspace: Any) -> int:
        """Return how many more passes all problems may make, less the pass that follows factored steps."""
        return self.max_passes - 1 - int(workspace.field("passes").max())

    def plainly(self, left: Any, log_v: Any, bar: Any) -> Any:
        """Solve problems one by one in the C core, and return the problems that it left unsolved."""
        if not len(left):
            return left
        most = self.task.cost.size
        if self.task.several:  # largest first, so that one call gets problems of similar size
            sizes = self.task.several.pairs_of_each[left]
            left = left[np.argsort(-sizes, kind="stable")]
            most = int(sizes.max())
        module = core()
        task = self.task.on_host()
        options = options_alone(self.options, self.precision, most)
        options = dataclasses.replace(options, threads=self.options.threads)
        xp = namespace(self.tables[0])
        spent = self.n_passes[left]
        starts = self.begin(left, log_v, task.B)
        for part, records, found in module.solve_many(task, left, starts, spent, options, self.max_passes, ladder):
            stalled = (records["status"] == module.STALLED) & (records["hard_passes"] > 0)
            done = np.isin(records["status"], (module.CONVERGED, module.OUT_OF_PASSES)) | stalled
            where = part[done]
            for table, values in zip(self.tables, found, strict=True):
                table[xp.asarray(where), : values.shape[1]] = xp.asarray(values[done])
            for name, values in self.ends.items():
                values[where] = records["last"][name][done]
            self.n_passes[where] = records["made"][done]
            ways = zip(records["larger"][done], records["symmetric"][done], strict=True)
            whose = " for some problems"
            more = [FORMED] * bool(task.several)
            self.how[where] = [in_core(options, int(larger), bool(one), more, whose) for larger, one in ways]
            converged = records["status"][done] == module.CONVERGED
            self.status[where] = outcomes.after_core_calls(converged, stalled[done])
            bar.update(len(where) - int(stalled.sum()))
        return left[~np.isin(self.status[left], ("converged", "max_passes"))]

    def begin(self, which: Any, log_v: Any, B: Any) -> F64:
        """Return the initial log v of problems solved alone, one row each: from the batch if it is finite."""
        begin = np.zeros((len(which), self.task.shape[1]))
        if log_v is not None:
            begin[:] = host(log_v[which])
        tried = self.n_passes[which] > 0
        if tried.any():
            reached = host(self.tables[1][which])
            good = tried & (np.isfinite(reached) | (host(B[which]) <= 0)).all(1)
            begin[good] = reached[good]
        return begin

    def alone(self, i: int, log_v: Any, threads: int = 1) -> None:
        """Solve problem i as `solve` does, from the last log v of the batch."""
        problem = self.task.alone(i, self.backend, threads)
        spent = int(self.n_passes[i])
        begin = self.begin(np.array([i]), log_v, self.task.B)[0, : problem.shape[1]]
        log_u = np.zeros(problem.shape[0])
        if self.status[i] == "stalled":  # in one call of the core; factored steps follow
            log_u = host(self.tables[0][i])[: problem.shape[0]]
        start = problem.project(*(np.where(np.isfinite(x), x, 0.0) for x in (log_u, begin)))
        options = options_alone(self.options, self.precision, problem.cost.size)
        options = dataclasses.replace(options, symmetric=options.symmetric and spent == 0, threads=threads)
        run = Run(self.backend, max(1, self.max_passes - spent))
        run.stopped = lambda: self.stopped
        if self.status[i] == "stalled":
            run.outcome = OUTCOMES["stalled"]
        result = carry_out(run, problem, options, start, escalate=self.precision == "auto")
        self.translation[i] = result.problem.translation
        marginals = result._marginals or map(np.zeros, problem.shape)  # without them the answer sums the plan
        for table, vector in zip(self.tables, (*result.own_logs, *marginals), strict=True):
            table[i, : len(vector)] = namespace(table).asarray(host(vector))
        last = result.trace[-1]
        end = last.gap, last.error, last.dual - problem.least_lift, last.mass  # `result` adds it to all
        for values, value in zip(self.ends.values(), end, strict=True):
            values[i] = value
        self.n_passes[i] = spent + result.n_passes
        self.status[i] = result.status
        self.how[i] = f"{result.how}, alone"

    def result(self, problem: BatchProblem, turns: bool) -> "BatchResult":
        potentials = self.tables[:2]
        marginals = self.tables[2:]
        if turns:
            potentials = potentials[::-1]
            marginals = marginals[::-1]
        if self.translation.any():
            problem = dataclasses.replace(problem, translation=-self.translation if turns else self.translation)
        self.ends["dual"] = self.ends["dual"] + problem.least_lift
        ends = (*self.ends.values(), self.n_passes, self.status, self.how)
        return BatchResult(problem, self.backend, potentials, marginals, ends, self.options.threads)
