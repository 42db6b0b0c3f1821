"""Newton's step towards hard columns, by the C library (src_c/newton.c), for drivers that make its products."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import host, namespace
from ..contract import Options, Stats
from ..penalties import F64
from ..problem.problem import Problem
from ..problem.side import Side
from .kernel import TINY
from .rules import core

VERDICTS = HOLDS, HOLDS_AFTER, OPEN, GIVES_UP = "holds", "holds after", "open", "gives up"  # mapuot_verdict


class Newton:
    """Newton's steps of one solve.

    ``y`` is the change of log v by the last step, ``wait`` the number of passes before another step is worth its
    products.
    """

    needed = True  # steps are needed to certify a pass; False: they only help stalled passes
    part: Any = None
    parts = 1  # number of disconnected parts of M; ``part``: the part of each column

    def __init__(self, reg: float, weight: F64, rho: F64) -> None:
        ffi, lib = core()
        self.record = ffi.new("mapuot_newton *")
        n = len(weight)
        self.weight = weight
        self.rho = rho
        self.room = np.zeros(lib.mapuot_newton_room(n))
        w = self.record
        lib.mapuot_newton_place(w, n, ffi.from_buffer("double *", self.room))
        w.n, w.reg = n, reg
        self.y, self.d, self.t = (np.frombuffer(ffi.buffer(x, 8 * n)) for x in (w.y, w.d, w.t))

    def set_rows(self, rows: Side) -> None:
        """Set the penalty and the number of the rows, which each pass meets."""
        self.record.m = rows.n_points
        self.record.hard_rows = rows.rho_range[0] == math.inf
        self.record.least = 1 / (1 + rows.rho_range[1] / self.record.reg)

    @property
    def wait(self) -> int:
        return int(self.record.wait)

    @property
    def products(self) -> int:
        return int(self.record.all_products)

    def error_after(self, found: float) -> float:
        """Return the certified error of the pass from log v + y; ``found``: the error that this pass found."""
        return float(core()[1].mapuot_newton_error(found, self.record.after))

    def solve(
        self, found: float, tol: float, log_v: F64, marginal: F64, product: Callable[[F64], F64] | None = None
    ) -> str:  # fmt: skip
        """Find the step from a pass with the error ``found``, these potentials and marginals; return the verdict.

        ``product(d)`` is P^T ((fi / r) P d) over all ranks, for the plan of a pass that meets its rows. For one
        potential it is -P d, for many marginals -sum_l P_kl d_l. Without it the pass itself is judged: OPEN where its
        columns miss too much.
        """
        ffi, lib = core()
        w = self.record
        vectors = [np.ascontiguousarray(host(x)) for x in (marginal, self.weight, self.rho, log_v)]
        w.marginal, *given = (ffi.from_buffer("double *", x) for x in vectors)
        w.found, w.tol = found, tol
        if self.part is None:
            part = ffi.NULL
        else:
            part = ffi.from_buffer("int32_t *", self.part)
        verdict = lib.mapuot_newton_begin(w, *given, part, self.parts)
        while verdict == lib.MAPUOT_ASKS:
            if product is None:
                return OPEN
            self.t[:] = product(self.d)
            verdict = lib.mapuot_newton_next(w)
        return VERDICTS[verdict]


class ColumnsNewton(Newton):
    """Newton's steps towards the hard columns of a problem; each pass meets the rows."""

    def __init__(self, problem: Problem) -> None:
        rows, cols, parts = problem.rows, problem.cols, problem.parts
        super().__init__(problem.reg, cols.weight, cols.rho)
        self.problem = problem
        self.set_rows(rows)
        if parts:
            self.part = np.ascontiguousarray(parts.cols, np.int32)
            self.parts = parts.count + 1

    def start(self, workspace: Any, backend: Any) -> F64:
        """Return the log v after the step; passes go on from it."""
        return np.asarray(backend.to_numpy(workspace.potentials()[1]) + self.y)

    def step(self, workspace: Any, backend: Any, stat: Stats, tol: float) -> str:
        """Find the step from the last pass; replace the error in ``stat`` by the error that the step certifies."""
        made = None
        if workspace.makes_products:
            made = workspace.marginals()[1], workspace.newton_product()
        elif workspace.has_exact_marginals and self.judge(workspace, stat, tol):  # near the end
            return HOLDS
        return self.step_from(workspace.potentials(), workspace.options, backend, stat, tol, made)

    def judge(self, workspace: Any, stat: Stats, tol: float) -> bool:
        """Tell whether the last pass is certified as it is, without products, and put that error in ``stat``."""
        found = self.solve(stat.error, tol, workspace.potentials()[1], workspace.marginals()[1])
        if found == HOLDS:
            stat.error = float(self.record.error)
        return found == HOLDS

    def step_from(
        self, potentials: Any, options: Options, backend: Any, stat: Stats, tol: float, made: Any = None
    ) -> str:  # fmt: skip
        """Find the step from these potentials; ``made``: column marginal and product, if a workspace makes them."""
        self.record.symmetric = symmetric = options.symmetric
        self.record.least *= not symmetric
        if made:
            found = self.solve(stat.error, tol, potentials[1], *made)
        else:
            found = self.step_of_plan(potentials, options, backend, stat, tol)
        stat.error = float(self.record.error)
        return found

    def step_of_plan(self, potentials: Any, options: Options, backend: Any, stat: Stats, tol: float) -> str:
        """Find the step by products with the plan, made from M, where a workspace makes no products.

        One prox step on log u comes first, so that the plan meets its rows.
        """
        problem, threads = self.problem, options.threads
        (m, n), rows, ranks = problem.shape, problem.rows, problem.ranks
        log_u, log_v = (np.asarray(backend.to_numpy(x)) for x in potentials)
        if options.symmetric:
            apply = backend.plan_of(problem, log_u, log_v, threads).apply
            return self.solve(stat.error, tol, log_v, host(apply(np.ones(n))), lambda d: -host(apply(d)))
        own = backend.plan_of(problem, log_u, log_v, threads).apply(np.ones(n))
        r = host(own)
        xp = namespace(own)
        fi = 1 / (1 + problem.reg / rows.rho)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            asked = np.where(rows.hard, rows.weight, rows.weight * np.exp(-problem.reg * log_u / rows.rho))
            move = np.where(r > 0, fi * np.log(asked / r), 0.0)
        r_met = r * np.exp(move)
        plan = backend.plan_of(problem, log_u + move, log_v, threads)
        into = xp.asarray(np.divide(fi, r_met, out=np.zeros(m), where=r_met > TINY))
        s = np.asarray(host(plan.apply_transpose(np.ones(m))))
        with np.errstate(invalid="ignore"):
            apart = float(ranks.sum(float(np.abs(r_met - r).sum())))
            mass = float(s.sum())
        if not (mass > 0 and math.isfinite(apart)):  # the plan has left the range of float64
            self.record.error = math.inf
            return GIVES_UP
        return self.solve(stat.error + apart / mass, tol, log_v, s, plan.weighed(into))
