"""Results: potentials and certificate come with the solve; members that need the matrix are computed on first use."""

import operator
from collections.abc import Iterator
from contextlib import nullcontext
from html import escape
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .. import penalties
from ..annotations import DrawMethod, FilePath, Seed, SideName
from ..arrays import host, namespace
from ..backends import Stats, pick
from ..backends.boxes import KeptPlan, SortedPoints
from ..backends.conditional import LEAST, scaled_rows
from ..backends.operator import Operator
from ..cached import cached_property
from ..contract import Backend
from ..errors import shown
from ..files import split_answer, write
from ..graphs import breaks_graph
from ..penalties import F64
from ..problem.grid import GridCosts
from ..problem.labels import as_labels, classes_of, one_hot
from ..problem.points import PointCosts
from ..problem.problem import Problem
from ..problem.settings import BLOCKS
from ..problem.sparse import entries, gathered, is_sparse
from ..problem.validate import as_choice, as_count, as_float, as_share
from ..status import FAILED, describe_bound
from ..synonyms import AnswerHints, hinted
from . import between, curvature, sharpness, slopes, standard_error, transitions, unregularised
from .draw import DRAWS, as_generator, draw_once, draw_rows, rows_at
from .store import contents
from .summary import as_table

ROUNDING = 2.0**-51  # relative rounding of the dual value's terms: 4 roundings
LEAST_FLOAT32, MOST_FLOAT32 = 2e-31, 3e38  # 2^24 times the least normal number, 1.2e-38; the largest sum
FAR_COSTS = 300.0  # least cost over reg and reg_m: a plan with less than e^-300 of the mass of its reference


def holds_float32(mass: float, entries: int) -> bool:
    """Return whether float32 can hold a plan: entries flushed to zero add up to at most 2^-24 of its mass."""
    return LEAST_FLOAT32 * entries <= mass <= MOST_FLOAT32


def numbers(tables: Any, instead: float) -> Any:
    """Replace NaN (from 0 inf, or the prox of inf) in the vectors of a failed solve by ``instead``."""
    return tuple(namespace(x).where(namespace(x).isnan(x), instead, x) for x in tables)


def far_potentials(problem: Problem, potentials: Any, backend: Backend) -> tuple[Any, Any] | None:
    """Return log u and log v for costs so far above reg_m that the plan has no mass in float64; None for other costs.

    Passes stop at such a plan before both sides have paid their part of the costs. A side pays at most rho (TV) or rho
    t_i (L2) for each point. KL sides and reg share the remaining least cost in proportion to rho and reg. The dual
    value is then the value of the plan 0, up to a share exp(-FAR_COSTS).
    """
    sides = problem.sides
    if problem.ranks.size > 1 or any(side.demands for side in sides):
        return None
    rhos = [host(side.rho) for side in sides]
    is_kl = [side.penalty == "kl" for side in sides]
    most = [rho if side.penalty == "tv" else rho * host(side.weight) for side, rho in zip(sides, rhos, strict=True)]
    least = problem.cost.range(backend)[0]  # in a batch M_min may be the least cost of all problems
    rest = least - sum(float(x.max()) for x, kl in zip(most, is_kl, strict=True) if not kl)
    level = rest / (problem.reg + sum(float(rho.max()) for rho, kl in zip(rhos, is_kl, strict=True) if kl))
    if not level > FAR_COSTS:
        return None
    paid = [level * rho if kl else x for x, rho, kl in zip(most, rhos, is_kl, strict=True)]
    found = []
    for log, f in zip(potentials, paid, strict=True):
        xp = namespace(log)
        found.append(xp.where(log == -np.inf, log, xp.asarray(f / problem.reg)))
    return found[0], found[1]


def with_constant(x: Any, constant: float) -> Any:
    if constant:
        return x + constant
    return x


def primal_value(problem: Any, mass: Any, sides: Any, rhos: Any = (None, None)) -> Any:
    """Return reg (|c| - mass) + sum f r + sum D(r | t) over both sides, for one problem or a batch; inf for NaN.

    ``rhos``: reg_m of both sides where the problems of a batch have their own, (p, 1).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total = getattr(problem, "regs", problem.reg) * (problem.c_mass - mass)
        for (side, t, f, r), own in zip(sides, rhos, strict=True):
            if own is not None and side.logarithmic:
                kind = "kl"
            else:
                kind = side.penalty
            paid = penalties.divergence(kind, r, t, side.rho if own is None else own, side.upper)
            total = total + side.ranks.sum((np.where(r > 0, f, 0.0) * r + paid).sum(-1))
    return np.where(np.isnan(total), np.inf, total)


def dual_bound(
    problem: Any, cost: Any, mass: Any, sides: Any, moved: Any, log_sizes: Any, rhos: Any = (None, None),
    reach: Any = 0.0,
) -> Any:  # fmt: skip
    """Return reg (|c| - mass) - sum D*(-f) over both sides less its rounding, for one problem or a batch.

    Parameters
    ----------
    cost, mass : <P, M> and the mass of the plan
    sides : pair of (side, weights, potentials, marginal)
    moved : pair, the parts that the potentials over reg lack
    log_sizes : pair, `Side.log_size`
    rhos : pair, reg_m where the problems of a batch have their own, (p, 1)
    reach : sum of exponents that rounded the entries of the plan, beside these terms
    """
    reg = getattr(problem, "regs", problem.reg)
    total = reg * (problem.c_mass - mass)
    size = reg * (problem.c_mass + mass)
    size = size + cost + 2 * max(0.0, -problem.M_min) * mass + reg * mass * reach  # >= <P, |M|>: exponents round
    if problem.unmasked == "product":  # log a and log b are parts of the exponents
        size = size + reg * mass * sum(log_sizes)
    for (side, t, own, r), more, rho in zip(sides, moved, rhos, strict=True):
        kind = "kl" if rho is not None and side.logarithmic else side.penalty
        f = own + np.reshape(reg, (-1, 1)) * more if np.ndim(own) == 2 else own + reg * more
        term = penalties.dual_term(kind, f, t, side.rho if rho is None else rho, side.upper)
        total = total + term.sum(-1)
        size = size + (np.abs(term) + np.where(r > 0, np.abs(f), 0.0) * r).sum(-1)
    return total - ROUNDING * size - problem.cost.error(problem.M_max) * mass + problem.least_lift


class CertifiedAnswer:
    """Base of answers: the certificate of the last pass."""

    trace: list[Stats]
    status: str
    how: str
    scale_cost = 1.0  # the factor that multiplied reg and reg_m
    scale_mass = 1.0  # the divisor of all masses
    _missed = 0.0  # mass that hard marginals miss, relative to the plan's mass

    @property
    def converged(self) -> bool:
        """Whether tol, or tol_gap, was reached."""
        return self.status == "converged"

    @property
    def n_passes(self) -> int:
        """Number of passes."""
        if self.trace:
            return self.trace[-1].n_pass
        return 0

    @property
    def gap(self) -> float:
        """Bound on the objective of this plan less the optimum."""
        return self.trace[-1].gap

    @property
    def error_bound(self) -> float:
        """Certified bound on ``|P - P*|_1 / mass``."""
        return self.trace[-1].error


class Answer(AnswerHints):
    """Base of Result and BatchResult: potentials and marginals, and a backend that is pickled by its name."""

    _logs: Any = ()  # (log u, log v), on the device of the solve; _marginals alike
    _marginals: Any = None

    problem: Any
    _backend: Backend
    own_logs: Any  # (log u, log v) for `problem.cost`, M less `problem.constant`, and without `problem.translation`
    row_marginal: Any
    col_marginal: Any

    def __getstate__(self) -> dict[str, Any]:
        state = {key: x for key, x in vars(self).items() if key not in ("_stream", *self._there)}  # _logs has these
        state |= {key: tuple(map(host, state[key])) for key in ("_logs", "_marginals") if state.get(key)}
        return {**state, "_backend": self._backend.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _backend=pick(state["_backend"]))

    @property
    def _there(self) -> dict[str, Any]:
        """The vectors that lie on a device, by name."""
        logs = (self._for_users(side, log) for side, log in enumerate(self._logs))
        found = zip(("log_u", "log_v", "row_marginal", "col_marginal"), (*logs, *(self._marginals or ())), strict=False)
        return {name: x for name, x in found if namespace(x) is not np}

    def _for_users(self, side: int, log: Any) -> Any:
        """Return the log scalings of the rows (0) or the columns (1) for M, from `own_logs`: M may have a constant."""
        return with_constant(log, self.problem.constants[side] / self.problem.reg)

    @property
    def log_u(self) -> Any:
        """Log scalings of the rows, without a in them."""
        return self._for_users(0, self.own_logs[0])

    @property
    def log_v(self) -> Any:
        """Log scalings of the columns, without b in them."""
        return self._for_users(1, self.own_logs[1])

    @property
    def f(self) -> Any:
        """Dual potentials of the rows, ``reg * log_u``, in units of M."""
        with np.errstate(over="ignore"):
            return with_constant(self.problem.reg * self.own_logs[0], self.problem.constants[0])

    @property
    def g(self) -> Any:
        """Dual potentials of the columns, ``reg * log_v``, in units of M."""
        with np.errstate(over="ignore"):
            return with_constant(self.problem.reg * self.own_logs[1], self.problem.constants[1])

    @property
    def potentials(self) -> tuple[Any, Any]:
        """Pair (f, g) of the dual potentials, in units of M."""
        return self.f, self.g

    @property
    def marginals(self) -> tuple[Any, Any]:
        """Pair (row_marginal, col_marginal), in units of mass."""
        return self.row_marginal, self.col_marginal


class Result(CertifiedAnswer, Answer):
    """Answer of `solve`: the potentials, the certificate, and the plan on request.

    The plan is formed only when ``plan`` is read. ``apply``, ``barycentric_map``, ``map``, ``top_k``, ``sparse``,
    ``push``, ``pull``, ``sample``, ``cost`` and ``objective`` work without it. All of them read M, a and b again: copy
    these arrays first if they are changed after the solve. Points are copied by `PointCloud`.

    Attributes
    ----------
    log_u, log_v : (m,), (n,) float64 arrays
        Log scalings in POT's convention: ``P_ij = u_i c_ij exp(-M_ij / reg) v_j``; -inf where a or b is 0. If M has a
        large constant and a side is hard, the plan is made from `own_logs`, which have more digits.
    own_logs : pair of arrays
        log_u and log_v for M less ``problem.constant``, log_u plus and log_v less ``problem.translation``. The constant
        is 0 unless it is 1000 times the range of M, the translation unless the masses of both sides differ and reg_m /
        reg is large: it is 1e4 at least.
    row_marginal, col_marginal : (m,), (n,) float64 arrays
        ``P 1`` and ``P^T 1``, in units of mass.
    error_bound : float
        Certified bound on ``|P - P*|_1 / mass``: the plan P differs from the optimal plan P* by at most this fraction
        of its mass. inf without a certificate, for example if ``tol_gap`` ended a solve with hard sides early.
    gap : float
        Bound on the objective of this plan less the optimum, in units of the objective. For a balanced problem it is
        inf until the column sums match b up to tol_gap (without tol_gap: tol) times the mass; the cost of this
        remaining mismatch is not counted.
    converged, status : bool, str
        Whether tol (or tol_gap) was reached, and "converged", "max_passes", "stalled", "cancelled", "not finite" or
        "underflow" (the plan is below 1e-290).
    n_passes : int
        Number of passes; each reads the kernel K once. If pairs of points are skipped, a pass reads the kept pairs
        only, and passes between groups of points are not counted.
    trace : list of Stats
        One entry for each pass: gap, error, dual, mass, residual, seconds.
    how : str
        A line for bug reports. It names the data that passes read ("tiles" of a dense K, stored "pairs", "points", or
        "products" along the axes of a grid), whether rows and columns were exchanged ("turned"), the number of larger
        regs that came first, the start that was used or abandoned, the corrections of the passes, the share of the
        pairs of a dense M that was kept for a small reg, and the fallback "after" a failed stage.
    scale_cost : float
        The cost that was the unit of reg and reg_m in the call of `solve`; 1 if they were in units of M.
    scale_mass : float
        The unit of all masses and values: ``sqrt(sum(a) sum(b))`` of the given masses if `solve` had
        ``scale_mass=True``, else 1.

    See Also
    --------
    solve, load, BatchResult

    Notes
    -----
    Members that need the plan compute it from M (and from a reference matrix) on use; do not change these arrays
    before.

    After a solve with ``comm`` each rank has a Result of its own rows. ``log_u``, ``row_marginal``, ``plan``,
    ``apply``, ``rows``, ``top_k``, ``sparse`` and ``barycentric_map`` describe these rows and need no other rank.
    Vectors of the columns and all numbers are the same on every rank. ``cost``, ``apply_transpose`` (given the own rows
    of Y), ``gather`` and ``gather_plan`` exchange data: all ranks must call them.

    ``error_bound`` bounds the error of the plan, ``gap`` the error of the value. The error of the plan grows as the
    square root of the gap, so that the value is known to more digits than the plan.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> x, y = np.linspace(0, 1, 30), np.linspace(0.2, 1.4, 20)
    >>> result = mapuot.solve((x[:, None] - y) ** 2, reg=0.01, reg_m=1.0)
    >>> result.converged, result.dual <= result.objective
    (True, True)
    >>> result.barycentric_map(y).round(2)[:3]  # where each of the first points goes
    array([0.22, 0.24, 0.25])
    >>> index, value = result.top_k(1)
    >>> index.shape
    (30, 1)
    """

    problem: Problem
    _vanishes = False  # whether the plan has no mass in float64, and its value is known
    skipped: SortedPoints | None = None  # the skipped pairs, with the order of the points
    sharpness = cached_property(sharpness.sharpness)
    unregularised_bounds = unregularised.unregularised_bounds
    gradient, potential, map = slopes.gradient, slopes.potential, slopes.map
    standard_error = standard_error.standard_error
    transitions = transitions.transitions
    hvp, interpolate = curvature.hvp, between.interpolate

    def __init__(
        self, problem: Problem, backend: Backend, potentials: tuple[F64, F64], marginals: tuple[F64, F64] | None,
        trace: list[Stats], status: str, threads: int | None, how: str = "", skipped: SortedPoints | None = None,
    ) -> None:  # fmt: skip
        self.problem, self._backend, self._threads = problem, backend, threads
        self.how, self.skipped = how, skipped
        failed = status in FAILED
        if failed:
            potentials = numbers(potentials, -np.inf)
        if status == "underflow" and (far := far_potentials(problem, potentials, backend)):
            potentials = far
            self._vanishes = True
        self._logs = problem.project(*potentials)  # rounding of large sums may move potentials out of the dual's domain
        self._marginals = marginals
        is_clipped = failed or (status != "converged" and bool(trace) and trace[-1].dual == -np.inf)
        if is_clipped and problem.ranks.size > 1:
            self._marginals = marginals and numbers(marginals, np.inf)
        elif is_clipped:  # the last pass may have clipped scalings: sum the plan instead
            self._marginals = None
        self.trace, self.status = trace, status
        if problem.ranks.size > 1:  # compute now the numbers that need communication between ranks
            self.mass, self.objective, self.dual  # noqa: B018

    def __repr__(self) -> str:
        m, n = self.problem.shape
        told = describe_bound(self.error_bound, "error_bound")
        given = " and ".join(dict.fromkeys(f"{side.mass:.6g}" for side in self.problem.sides))
        mass = f"mass {self.mass:.6g} of {given}"
        return f"<mapuot.Result {m}x{n} {self.status} after {self.n_passes} passes, {told}, {mass}>"

    def __str__(self) -> str:
        if self.how:
            return f"{self!r}\n{self.how}"
        return repr(self)

    def _repr_html_(self) -> str:
        """Return the HTML table that a notebook shows: the problem, the moved mass and the accuracy."""
        if self.problem.ranks.size == 1:
            return as_table(self)
        return f"<code>{escape(repr(self))}</code>"

    own_logs = cached_property(lambda self: tuple(map(host, self._logs)))
    row_marginal = cached_property(lambda self: host(self._marginals[0]) if self._marginals else self._sums[1])
    col_marginal = cached_property(lambda self: host(self._marginals[1]) if self._marginals else self._sums[2])

    @cached_property
    def mass(self) -> float:
        """Transported mass, ``sum P``."""
        with np.errstate(over="ignore", invalid="ignore"):
            return float(self.problem.rows.ranks.sum((self._marginals or self._sums[1:])[0].sum()))

    @cached_property
    def objective(self) -> float:
        """Value of the plan, with all mass terms; hard constraints count 0 (see ``error_bound``).

        inf if the solve failed, or if a term is beyond float64 (masses of 1e307). The value of a plan without mass
        ("underflow" where no side is hard) is known. On first use the plan is summed from M in float64; with several
        ranks, the marginals of the last pass are used instead.
        """
        if self.status in FAILED and not self._vanishes:
            return np.inf
        values = self._values()
        found = float(primal_value(self.problem, *values) + self.problem.lift_of(values[0], self.converged))
        return np.inf if np.isnan(found) else found  # NaN: the mass of the plan overflows

    @cached_property
    def dual(self) -> float:
        """Dual value minus a bound on its rounding: a lower bound on every plan's objective.

        It is -inf if the solve failed, except for a plan that moves no mass, as in ``objective``. On first use the plan
        is summed from M in float64; with several ranks, the last pass gives the dual value.
        """
        if self.status in FAILED and not self._vanishes:
            return -np.inf
        p = self.problem
        if p.ranks.size > 1:
            return self.trace[-1].dual
        mass, sides = self._values()
        sizes = [side.log_size for side in p.sides]
        with np.errstate(over="ignore", invalid="ignore"):
            value = dual_bound(p, self._sums[0], mass, sides, p.translations, sizes)
        if self.skipped and not self._vanishes:
            value -= p.reg * self.skipped.hidden
        last = self.trace[-1].dual
        # two lower bounds
        if np.isnan(value):
            return last
        return max(last, float(value))

    @property
    def gap(self) -> float:
        """Bound on the objective of this plan less the optimum."""
        if self._vanishes:
            return max(0.0, self.objective - self.dual)
        return self.trace[-1].gap

    @property
    def _missed(self) -> float:  # type: ignore[override]
        """Return the mass that hard marginals miss, relative to the plan's mass; with ranks, of the own rows."""
        sides = (self.problem.rows, self.row_marginal), (self.problem.cols, self.col_marginal)
        with np.errstate(over="ignore", invalid="ignore"):
            missed = sum(penalties.violation(x.penalty, r, x.weight, x.rho, x.upper).sum() for x, r in sides)
            if self.mass:
                return float(missed) / self.mass
            return 0.0

    def _values(self) -> tuple[float, Any]:
        """Return (mass, [(side, weight, potentials, marginal)] of both sides), the arguments of `primal_value`."""
        p = self.problem
        if p.ranks.size == 1:
            r, s = self._sums[1:]
        else:
            r, s = self.row_marginal, self.col_marginal
        with np.errstate(over="ignore", invalid="ignore"):
            mass = float(p.rows.ranks.sum(r.sum()))
            f, g = (p.reg * x for x in self.own_logs)
        return mass, ((p.rows, p.rows.weight, f, r), (p.cols, p.cols.weight, g, s))

    def _new_stream(self) -> Operator:
        log_u, log_v = self.own_logs
        stream: Operator = self._backend.plan_of(self.problem, log_u, log_v, self._threads)
        if self.skipped is None:
            return stream
        return KeptPlan(self.problem, self.skipped, pick("cpu").plan_of, stream, self.own_logs, self._threads)

    @cached_property
    def _stream(self) -> Operator:
        return self._new_stream()  # a DeviceResult uses the exponents on its device

    @property
    def _formed(self) -> Operator:
        """Return the stream that computes the plan, with a dtype that can hold the plan's mass."""
        if self._stream.dtype == np.float32:
            entries = self.problem.cost.size * self.problem.ranks.size  # estimated without communication
            with np.errstate(over="ignore", invalid="ignore"):  # marginals may lag behind before convergence
                if self.converged:
                    mass = self.mass
                else:
                    mass = float(self._sums[1].sum())
            if not holds_float32(mass, entries):
                self._stream.dtype = np.dtype(np.float64)
        return self._stream

    @property
    def _exact_stream(self) -> Operator:
        """The stream for sums: it reads M, without the rounding of a matrix formed from points."""
        return self._stream

    @cached_property
    def _sums(self) -> tuple[float, F64, F64]:
        with self.problem.ranks.together():
            return self._checked_sums(*self._exact_stream.sums())

    def _sums_and_products(self, X: Any, Y: Any) -> tuple[tuple[float, F64, F64], Any, Any]:
        """Return ``_sums``, P X and P^T Y, by one read of M where the backend can; the products stay on its device."""
        with self.problem.ranks.together():
            sums, *products = self._exact_stream.sums_and_products(X, Y)
        vars(self)["_sums"] = self._checked_sums(*sums)
        return self._sums, *products

    def _checked_sums(self, cost: float, *marginals: F64) -> tuple[float, F64, F64]:
        if not self.converged:
            marginals = numbers(marginals, np.inf)
        return cost, marginals[0], marginals[1]

    @cached_property
    def plan(self) -> Any:
        """Plan P, (m, n), in units of mass: formed from M on first use, then kept; a CSR array for a sparse M.

        It has M's dtype, or float64 if float32 cannot hold it (a mass above 3e38, or below 2e-31 times the number of
        entries).
        """
        return self._formed.plan(0, self.problem.shape[0])

    def _form_plan(self, out: Any) -> None:
        """Form the plan in ``out``, an array that has been checked."""
        vars(self)["plan"] = self._stream.plan(0, self.problem.shape[0], out)

    @cached_property
    def cost(self) -> float:
        """Linear transport cost ``<P, M>``, without forming P."""
        constant = self.problem.constant
        return self._sums[0] + (constant * self._values()[0] if constant else 0.0)

    @breaks_graph
    def apply(self, X: ArrayLike) -> Any:
        """Return ``P @ X`` for X of shape (n,) or (n, d), in float64, without forming P."""
        return self._stream.apply(X)

    @breaks_graph
    def apply_transpose(self, Y: ArrayLike) -> Any:
        """Return ``P.T @ Y`` for Y of shape (m,) or (m, d), in float64, without forming P."""
        with self.problem.ranks.together():
            return self._stream.apply_transpose(Y)

    @breaks_graph
    def barycentric_map(self, Y: ArrayLike | None = None, side: SideName = "rows") -> Any:
        """Return the mean target of each row, ``(P @ Y) / (P 1)``, (m, d), for targets Y (n, d).

        With ``side="cols"`` return the mean source of each column, (n, d), for sources Y (m, d). By default Y are the
        points of the other side, of a `PointCloud` or a `Grid`.

        If the mass of a row underflows float64, the row still has the mean of its conditional plan. Rows that send
        nothing have NaN: rows with mass 0, without an allowed pair, or with all mass kept back (penalties "tv", "l2"
        and "range").
        """
        turned = as_choice(side, "side", ("rows", "cols")) == "cols"
        if Y is None:
            cost = self.problem.cost
            if isinstance(cost, GridCosts):
                Y = cost.points(cols=not turned)
            elif isinstance(cost.cloud, PointCosts) and self.problem.ranks.size == 1:
                Y = cost.cloud.x if turned else cost.cloud.y
            else:
                raise TypeError(
                    f"Y must be given, the points of the {'rows' if turned else 'columns'}, for {cost.kind}"
                )
        return self._images(Y, turned)

    def _images(self, Y: Any, turned: bool) -> Any:
        with self.problem.ranks.together() if turned else nullcontext():
            return self._stream.images(Y, turned, self.problem.sides[turned].may_stay)

    def rows(self, i0: int, i1: int) -> Any:
        """Return the rows i0 to i1 of the plan, (i1 - i0, n)."""
        m = self.problem.shape[0]
        whole = all(isinstance(i, (int, np.integer)) for i in (i0, i1))
        if not whole or not 0 <= i0 <= i1 <= m:
            raise ValueError(f"rows must satisfy 0 <= i0 <= i1 <= {m}, got {shown(i0)}, {shown(i1)}")
        return self._formed.plan(i0, i1)

    def gather(self, x: ArrayLike, root: int = 0) -> Any:
        """Stack the row blocks ``x`` of all ranks (``log_u``, say) on rank ``root``, and return None elsewhere."""
        return self.problem.ranks.gather(self._backend.to_numpy(x), root)

    def gather_plan(self, root: int = 0) -> Any:
        """Return the whole plan on rank ``root``, and None elsewhere."""
        if is_sparse(self.plan):
            return gathered(host(self.plan), self.problem.ranks, root)
        return self.problem.ranks.gather(self._backend.to_numpy(self.plan), root)

    def _blocks(self) -> Iterator[tuple[int, Any]]:
        return self._blocks_of(self._formed)

    def _blocks_of(self, stream: Operator) -> Iterator[tuple[int, Any]]:
        m, n = self.problem.shape
        if self.problem.cost.operator == "pairs":
            for i0, i1, _, _ in self.problem.cost.blocks(most=BLOCKS.plan_entries * self.problem.cost.dtype.itemsize):
                yield i0, host(stream.plan(i0, i1))
            return
        step = max(1, BLOCKS.plan_entries // n)
        for i0 in range(0, m, step):
            yield i0, stream.plan(i0, min(i0 + step, m))

    def _wide_blocks(self) -> Iterator[tuple[int, Any]]:
        return ((i0, host(block)) for i0, block in self._blocks_of(self._wide))

    @property
    def _wide(self) -> Operator:
        """Return a float64 stream; for a float32 plan a second stream, since other threads may use the first."""
        stream = self._formed
        if stream.dtype != np.float64:
            stream = self._new_stream()
            stream.dtype = np.dtype(np.float64)
        return stream

    @hinted
    def top_k(self, k: int) -> tuple[Any, Any]:
        """Return the k largest entries of each row, largest first: (column indices, values), both (m, k).

        Entries are compared by their logarithms, so that entries that underflow float64 are ordered, too. Index -1 and
        value 0 fill up a row with fewer than k allowed pairs, and a row that keeps back all its mass (penalties "tv",
        "l2" and "range").
        """
        m, n = self.problem.shape
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= n:
            raise ValueError(f"k must be in 1..{n}, got {shown(k)}")
        self.problem.cost.check_listed("top_k")
        xp, dtype = self.problem.cost.xp, self._formed.dtype
        index = xp.empty((m, k), np.int64)
        value = xp.empty((m, k), dtype)
        for i0, columns, log in self._formed.top_k(k):
            here = slice(i0, i0 + len(log))
            there = namespace(log)
            entries = there.exp(log)
            if self.problem.rows.may_stay:
                absent = entries <= 0
            else:
                absent = log == -np.inf
            index[here] = xp.asarray(host(there.where(absent, -1, columns)))
            value[here] = xp.asarray(host(entries.astype(dtype)))
        return index, value

    @hinted
    def sample(
        self, size: int, seed: Seed | None = None, *, method: DrawMethod = "independent", replace: bool = True
    ) -> tuple[Any, Any]:  # fmt: skip
        """Draw pairs from the plan: (i, j) with probability P_ij / mass. Only the drawn rows of the plan are formed.

        Parameters
        ----------
        size : int
            Number of pairs.
        seed : int, generator of NumPy or of PyTorch, or key of JAX, optional
            Source of the random numbers; the same seed draws the same pairs.
        method : {"independent", "systematic", "rows"}
            How rows are drawn. "independent": independently. "systematic": by equal steps along the cumulative mass, in
            random order; the count of each row differs from size times its share of the mass by less than one. "rows":
            each row with mass equally often, up to one, in order. Columns are drawn independently, each from its row.
        replace : bool
            False draws no pair twice, as in `numpy.random.Generator.choice`; for method "independent" only. All rows
            are then formed, and a random number is drawn for each pair of the plan.

        Returns
        -------
        i, j : (size,) integer arrays
            Rows and columns, in the order of the draws.

        Examples
        --------
        >>> import numpy as np, mapuot
        >>> M = (np.arange(4.0)[:, None] - np.arange(4.0)) ** 2
        >>> i, j = mapuot.solve(M, reg=0.01, reg_m=1.0).sample(8, seed=0, method="rows")
        >>> i, j
        (array([0, 0, 1, 1, 2, 2, 3, 3]), array([0, 0, 1, 1, 2, 2, 3, 3]))
        >>> i, j = mapuot.solve(M, reg=1.0, reg_m=1.0).sample(9, seed=0, replace=False)
        >>> len({*zip(i.tolist(), j.tolist())})
        9
        """
        if self.problem.ranks.size > 1:
            raise NotImplementedError("sample needs the whole plan in one process, without comm")
        size = as_count(size, "size")
        as_choice(method, "method", DRAWS)
        rng = as_generator(seed)
        self._check_mass()
        if not replace:
            if method != "independent":
                raise ValueError(f"replace must be True for method {method!r}, got {shown(replace)}")
            self.problem.cost.check_listed("sample(replace=False)")
            return draw_once(self._wide_blocks(), size, rng)
        return self._pairs(size, rng, method)

    def pairs_at(self, shares: F64) -> tuple[Any, Any]:
        """Return pairs (rows, columns) for ``shares``, (2, size), in [0, 1): of the plan's mass, and of a row's mass.

        The row of a pair is the first where the cumulated mass of the rows exceeds this share; its column alike.
        Independent uniform numbers draw independent pairs.
        """
        self._check_mass()
        at = host(shares)
        return self._drawn(rows_at(host(self.row_marginal), at[0]), at[1])

    def _check_mass(self) -> None:
        if not 0 < self.mass < np.inf:
            raise ValueError(f"size must be of a plan with mass, got mass {self.mass}")

    def _pairs(self, size: int, rng: np.random.Generator, method: str) -> tuple[Any, Any]:
        rows = draw_rows(self._sends if method == "rows" else self.row_marginal, size, rng, method)
        return self._drawn(rows, rng.random(size))

    @cached_property
    def _sends(self) -> F64:
        """Return the marginal of the rows; the least positive number for a row with a mass below float64."""
        r: F64 = self.row_marginal
        lost = np.flatnonzero((r == 0) & (host(self._stream.alpha) > -np.inf) & (not self.problem.rows.may_stay))
        if len(lost):
            r = r.copy()
            for some, block in self._stream.exponents_of(lost):
                r[lost[some]] = np.where(host(scaled_rows(block)[1]) > -np.inf, np.nextafter(0.0, 1.0), 0.0)
        return r

    def _drawn(self, rows: Any, at: F64) -> tuple[Any, Any]:
        """Return the rows, and in each row the column at the fraction ``at`` of its cumulative mass."""
        if self._holds(rows):
            return self._formed.draw(rows, at)
        if self.row_marginal[rows].min() > LEAST:
            return self._wide.draw(rows, at)
        return self._stream.draw_by_exponents(rows, at)

    def _holds(self, rows: Any) -> bool:
        return holds_float32(float(self.row_marginal[rows].min()), len(self.log_v))

    @hinted
    def sparse(self, threshold: float | None = None, *, keep: float | None = None) -> Any:
        """Return the largest entries of the plan as a sparse matrix, without holding the plan.

        Parameters
        ----------
        threshold : float
            Keep the entries above this threshold, in units of mass.
        keep : float
            Or keep the fewest entries that hold this share of the mass, in (0, 1]. Entries that differ by less than
            4e-9, relative, count as equal. With several ranks the share refers to the whole plan, and all ranks must
            call this method.

        Returns
        -------
        csr_array (m, n)
            Of SciPy; of cupyx if M is a CuPy array.

        Examples
        --------
        >>> import numpy as np, mapuot
        >>> M = (np.arange(6.0)[:, None] - np.arange(6.0)) ** 2
        >>> result = mapuot.solve(M, reg=0.1, reg_m=1.0)
        >>> result.sparse(keep=0.99).nnz
        6
        """
        if (threshold is None) == (keep is None):
            raise ValueError(f"threshold or keep, one of both, must be given, got {shown(threshold)} and {shown(keep)}")
        self.problem.cost.check_listed("sparse")
        if keep is not None:
            least = self._least_kept(as_share(keep, "keep"))
            above = operator.ge
        else:
            least = as_float(threshold, "threshold")
            above = operator.gt
            if np.isnan(least):
                raise ValueError("threshold must be a number, got nan")
        xp = self.problem.cost.xp
        sparse = import_module("scipy.sparse" if xp is np else "cupyx.scipy.sparse")
        n = self.problem.shape[1]
        empty = xp.empty(0, np.int64), xp.empty(0, np.int64), xp.empty(0, self._formed.dtype)
        with np.errstate(over="ignore"):  # the threshold may be beyond float32
            found = [empty, *(entries(block, lambda values: above(values, least)) for _, block in self._blocks())]
        count, column, data = (xp.concatenate([xp.asarray(x) for x in one]) for one in zip(*found, strict=True))
        start = xp.concatenate([xp.zeros(1, np.int64), xp.cumsum(count)])
        if xp is np:
            csr = sparse.csr_array
        else:
            csr = sparse.csr_matrix
        return csr((data, column, start), shape=(len(count), n))

    def _least_kept(self, share: float) -> float:
        """Return the least of the fewest entries that hold this share of the mass, by two histograms of their bits.

        Floats >= 0 have the same order as their bit patterns. The first histogram is by the leading 19 bits after the
        sign, the second by the next 20 bits of the entries in one bin.
        """
        found, wanted = 0, np.nan
        for n_done, bits in ((0, 19), (19, 20)):
            mass = np.zeros(1 << bits)
            shift = 63 - n_done - bits
            for _, block in self._blocks():
                values = block.data if is_sparse(block) else block
                entries = values.astype(np.float64, order="C", copy=False).ravel()
                code = entries.view(np.int64) >> shift
                if n_done:
                    inside = code >> bits == found
                    entries = entries[inside]
                    code = code[inside] & ((1 << bits) - 1)
                mass += host(namespace(entries).bincount(code, entries, 1 << bits))
            total = np.cumsum(np.asarray(self.problem.ranks.sum(mass))[::-1])
            if np.isnan(wanted):
                wanted = share * total[-1]
            else:
                wanted = min(wanted, total[-1])
            place = int(np.searchsorted(total, wanted))
            wanted -= total[place - 1] if place else 0.0
            found = (found << bits) + (1 << bits) - 1 - place
        return float(np.int64(found << shift).view(np.float64))

    @breaks_graph
    def push(self, labels: ArrayLike) -> tuple[Any, F64]:
        """Move labels of the rows with the mass; return each label's share of the mass that arrives at a column.

        Parameters
        ----------
        labels : (m,) array or list
            Labels of any sortable type; with several ranks, labels of the own rows.

        Returns
        -------
        classes : (k,) array
            The labels that occur, sorted.
        shares : (n, k) array
            Rows with sum 1, or zeros where no mass arrives. Numeric labels on a device give shares on this device.

        Examples
        --------
        >>> import numpy as np, mapuot
        >>> M = np.abs(np.arange(4.0)[:, None] - np.arange(3.0))
        >>> classes, shares = mapuot.solve(M, reg=0.1, reg_m=9.0).push(["old", "old", "new", "new"])
        >>> classes
        array(['new', 'old'], dtype='<U3')
        >>> classes[shares.argmax(1)]
        array(['old', 'old', 'new'], dtype='<U3')
        """
        return self._moved(labels, True)

    @breaks_graph
    def pull(self, labels: ArrayLike) -> tuple[Any, F64]:
        """Move labels of the columns back with the mass: return classes (k,) and shares (m, k) of each row's mass."""
        return self._moved(labels, False)

    def _moved(self, labels: Any, forth: bool) -> tuple[Any, F64]:
        source = self.problem.sides[not forth]
        with self.problem.ranks.together():
            labels = as_labels(labels, len(source.weight), "labels")
            classes = classes_of(labels, source.ranks, "labels")
        shares = self._images(one_hot(labels, classes), forth)
        xp = namespace(labels)
        if xp is np:
            shares = host(shares)
        else:
            shares = xp.asarray(shares)
        return classes, xp.where(xp.isnan(shares), 0.0, shares)

    def report(self, path: FilePath, title: str | None = None) -> None:
        """Write one HTML page about the answer: the problem, its values with their meaning, pictures and all passes.

        The page loads no other file. For a `Grid` with two axes its pictures are images, else the plan and the masses
        that each point moves. The costs M are read several times. With several ranks all must call this; rank 0 writes
        the page, without pictures of the plan.

        Parameters
        ----------
        path : str or path
            The file, such as "answer.html".
        title : str, optional
            Heading of the page. Default: the size of the problem.

        Raises
        ------
        ImportError
            Without Matplotlib.

        Examples
        --------
        >>> import numpy as np, mapuot
        >>> result = mapuot.solve(np.random.default_rng(0).random((30, 20)), reg=0.05, reg_m=1.0)
        >>> result.report("answer.html", title="A first answer")  # doctest: +SKIP
        """
        from ..report import write_report  # noqa: PLC0415 - a door above this room, opened on call

        write_report(self, path, title)

    def save(self, path: FilePath) -> None:
        """Write the answer, without M and the plan, to an .npz, .h5, .zarr or .h5ad file.

        The file holds log_u, log_v (of an M with a large constant: `own_logs`, and the constant), the marginals, a, b
        and their penalties, all values, the certificate and the trace.
        All ranks must call this, and rank 0 writes. `load` reads the file. A pickle of a Result contains M as well.
        """
        split_answer(path)
        values = contents(self)
        with self.problem.ranks.together():
            if self.problem.ranks.rank == 0:
                write(path, values)
