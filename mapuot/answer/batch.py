"""`BatchResult`: the answers of a batch, as arrays with one row for each problem."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import DrawMethod, Seed, SideName
from ..arrays import host, namespace
from ..backends import Stats
from ..cached import cached_property
from ..contract import Backend
from ..errors import shown
from ..graphs import breaks_graph
from ..outcome import CONVERGED
from ..penalties import F64
from ..problem.labels import as_labels, classes_of, one_hot
from ..problem.problem import BatchProblem
from ..problem.side import largest_log
from ..problem.validate import as_choice, as_count, as_index
from ..ranks import ALONE
from ..status import FAILED
from . import slopes, standard_error
from .batch_plan import BatchPlan, counts_of
from .draw import DRAWS, as_generator, draw_rows, rows_at
from .result import Answer, Result, dual_bound, numbers, primal_value
from .slopes import Gradient
from .unregularised import bounds_of_batch

PRODUCT_RANGE = 600.0  # largest range of exponents for a product of exponentials
PRODUCT_TOP = 600.0  # largest logarithm of its scale: float64 ends at 709


def column(x: Any, xp: Any) -> Any:
    """Return a factor for tables of p rows: one number, or (p, 1) with a number for each problem."""
    if np.ndim(x):
        return xp.asarray(x)[:, None]
    return x


def with_constants(table: Any, constants: Any) -> Any:
    """Return a table plus a constant of each problem; without one the table itself."""
    if not np.any(constants):
        return table
    return table + column(constants, namespace(table))


def without_nan(x: Any) -> Any:
    return namespace(x).where(namespace(x).isnan(x), 0.0, x)


def scaled_by(regs: Any, table: Any) -> Any:
    """Multiply the rows of a table by one number, or each by its own."""
    return column(regs, namespace(table)) * table


class LastPass(NamedTuple):
    """Numbers of the last passes of all problems; the first four on the device of the solve."""

    log_u: F64  # (p, m), as `Answer.own_logs`
    log_v: F64
    r: F64  # marginals
    s: F64
    gap: F64
    error: F64
    dual: F64
    mass: F64


class Sums(NamedTuple):
    """Sums of all plans, from M in float64, on the host."""

    cost: F64  # <P, M> of M less its constant
    known: LastPass  # with the marginals and masses of these sums
    reach: Any  # nats that rounded the entries, beside the plan's own exponents


def log_sizes(weight: Any) -> F64:
    """Return `Side.log_size` of all problems, (p,)."""
    with np.errstate(divide="ignore"):
        logs = np.log(weight)
    return np.array([largest_log(log) for log in logs])


def sums_of_factors(problem: BatchProblem, factors: Any) -> tuple[Any, Any, Any]:
    """Return <P, M> and the marginals of the plans of `BatchResult._factors`."""
    U, K, V, scale, _ = factors
    xp = namespace(K)
    MK = K * xp.asarray(problem.M, dtype=np.float64)
    U = scale[:, None] * U
    if K.ndim == 2:
        return ((U @ MK) * V).sum(1), U * (V @ K.T), (U @ K) * V
    cost = xp.einsum("pi,pij,pj->p", U, MK, V, optimize=True)
    return cost, U * xp.matmul(K, V[:, :, None])[:, :, 0], V * xp.matmul(U[:, None], K)[:, 0]


class BatchResult(Answer, Sequence[Result]):
    """Answers of `solve_batch`: arrays with one row, or one entry, for each of p problems.

    ``batch[i]`` is the `Result` of problem i, and ``for result in batch`` goes through all of them. The methods below
    serve all problems in one call. On a GPU, and on a CPU for problems up to 640 x 640, they form the plans of many
    problems at once, in float64, and keep none. Like the sums of plans (``objective``, ``cost``, ``dual``, ``mass``)
    they read M, A and B again: copy these arrays first if they are changed after the solve.

    Attributes
    ----------
    log_u, log_v : (p, m), (p, n) float64 arrays
        Log scalings in POT's convention; -inf where the mass of a point is 0. They are CuPy arrays if M, A or B is on a
        GPU (with a sparse M: if A or B is).
    row_marginal, col_marginal : (p, m), (p, n) float64 arrays
        ``P 1`` and ``P^T 1``, in units of mass; on the device of log_u.
    gap, error_bound, n_passes, status, how : (p,) arrays
        One entry for each problem, as in `Result`.
    scale_cost : float, or (p,) array
        The unit of reg and reg_m, in units of M; 1 without ``scale_cost``.
    scale_mass : float, or (p,) array
        The divisor of each problem's masses; 1 without ``scale_mass``.

    See Also
    --------
    solve_batch : returns it
    Result : the answer of one problem

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = np.abs(np.linspace(0, 1, 5)[:, None] - np.linspace(0, 1, 6))
    >>> batch = mapuot.solve_batch(M, np.full((3, 5), 0.2), reg=0.1, reg_m=1.0)
    >>> len(batch), batch.row_marginal.shape, batch[0].plan.shape
    (3, (3, 5), (5, 6))
    """

    scale_cost: Any = 1.0
    scale_mass: Any = 1.0

    def __init__(
        self, problem: BatchProblem, backend: Backend, potentials: Any, marginals: Any, ends: Any,
        threads: int | None,
    ) -> None:  # fmt: skip
        self.problem, self._backend, self._threads = problem, backend, threads
        failed = bool(np.isin(ends[-2], FAILED).any())
        if failed:
            potentials = numbers(potentials, -np.inf)
            marginals = numbers(marginals, np.inf)
        self.last_pass = LastPass(*potentials, *marginals, *ends[:4])
        self.error_bound: Any = self.last_pass.error
        self.n_passes: Any
        self.status: Any
        self.how: Any
        self.n_passes, self.status, self.how = ends[4:]

    @cached_property
    def _known(self) -> LastPass:
        """The numbers of the last passes; of problems that their last pass proves nothing of, of their `Result`."""
        found = self.last_pass
        summed = self._proves_nothing
        if not summed.any():
            return found
        found = LastPass(*(x.copy() for x in found))
        for i in np.flatnonzero(summed):
            one = self[int(i)]
            found.gap[i] = one.gap
            for table, own in zip(found, (*one.own_logs, one.row_marginal, one.col_marginal), strict=False):
                table[i, : len(own)] = namespace(table).asarray(own)
        return found

    @property
    def _proves_nothing(self) -> Any:
        """Tell which problems their last pass proves nothing of, (p,): their `Result` sums the plan instead."""
        return ((self.last_pass.dual == -np.inf) & ~self.converged) | np.isin(self.status, FAILED)

    @property
    def own_logs(self) -> tuple[F64, F64]:
        """The log scalings (p, m) and (p, n) for M less its constant, and without a translation."""
        return self._known.log_u, self._known.log_v

    @property
    def row_marginal(self) -> F64:
        """``P 1`` of each problem, (p, m), in units of mass."""
        return self._known.r

    @property
    def col_marginal(self) -> F64:
        """``P^T 1`` of each problem, (p, n), in units of mass."""
        return self._known.s

    @property
    def gap(self) -> F64:
        """Bound on each objective less its optimum, (p,), in units of the objective."""
        return self._known.gap

    @cached_property
    def mass(self) -> F64:
        """Transported masses, ``sum P``, (p,)."""
        with np.errstate(over="ignore"):
            return np.asarray(host(self.row_marginal.sum(1)))

    def empty(self, which: Any) -> None:
        """Set the plans of problems with an empty side to 0; potentials of points with mass are inf."""
        p = self.problem
        last = self.last_pass
        left = (np.where(weight > 0, np.inf, -np.inf) for weight in (p.A, p.B))
        log_u, log_v = (np.where(which[:, None], x, y) for x, y in zip(left, last[:2], strict=True))
        r, s = (np.where(which[:, None], 0.0, x) for x in last[2:4])
        for values in (last.gap, last.error, last.mass, self.n_passes):
            values[which] = 0
        self.status[which], self.how[which] = CONVERGED.status, "a side has no mass"
        self.last_pass = found = LastPass(log_u, log_v, r, s, *last[4:])
        found.dual[which] = self._primal(found)[which]

    def __repr__(self) -> str:
        m, n = self.problem.shape
        worst = self.error_bound.max()
        if worst < 1:
            told = f"error_bound <= {worst:.1e}"
        else:
            told = "of some nothing certified yet"
        return f"<mapuot.BatchResult {len(self)} problems {m}x{n}, {int(self.converged.sum())} converged, {told}>"

    def __len__(self) -> int:
        return len(self.status)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        i = as_index(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"problem {i} of {len(self)}")
        i %= len(self)
        gap, error, dual, mass = (float(x[i]) for x in self.last_pass[4:])
        end = Stats(int(self.n_passes[i]), gap, error, dual, mass, np.nan, False, str(self.status[i]))
        one = self.problem[i]
        m, n = one.shape
        log_u, log_v, r, s = (host(x[i]) for x in self.last_pass[:4])
        potentials = log_u[:m], log_v[:n]
        marginals = r[:m], s[:n]
        result = Result(one, self._backend, potentials, marginals, [end], end.status, self._threads, self.how[i])
        for name in ("scale_cost", "scale_mass"):
            setattr(result, name, float(np.broadcast_to(getattr(self, name), (len(self),))[i]))
        if "cost" in vars(self):  # known already: no need to read M again
            vars(result)["cost"] = float(self.cost[i])
        return result

    @property
    def converged(self) -> Any:
        """Tell which problems converged, (p,) bool."""
        return self.status == "converged"

    @property
    def log_u(self) -> Any:
        """Log scalings of the rows, (p, m), without A in them."""
        return with_constants(self.own_logs[0], self.problem.constants[0] / self.problem.regs)

    @property
    def log_v(self) -> Any:
        """Log scalings of the columns, (p, n), without B in them."""
        return with_constants(self.own_logs[1], self.problem.constants[1] / self.problem.regs)

    @property
    def f(self) -> Any:
        """Dual potentials of the rows, (p, m), in units of M."""
        with np.errstate(over="ignore"):
            return with_constants(scaled_by(self.problem.regs, self.own_logs[0]), self.problem.constants[0])

    @property
    def g(self) -> Any:
        """Dual potentials of the columns, (p, n), in units of M."""
        with np.errstate(over="ignore"):
            return with_constants(scaled_by(self.problem.regs, self.own_logs[1]), self.problem.constants[1])

    def _rho(self, rows: bool) -> Any:
        """Return reg_m of one side for each problem, (p, 1); None where all problems share the side's reg_m."""
        own = self.problem.each
        rho = None if own is None else own[2 - rows]
        return None if rho is None else rho[:, None]

    @cached_property
    def _closed(self) -> tuple[F64, Any, Any]:
        """Dual terms of the potentials, and the exponents of the plans without M; for CuPy arrays."""
        found: tuple[F64, Any, Any] = self._backend.dual_terms(self.problem, *self.own_logs)
        if np.any(self.problem.translation):
            moved = map(with_constants, self.own_logs, self.problem.translations)
            return (self._backend.dual_terms(self.problem, *moved)[0], *found[1:])
        return found

    def _sides(self, known: LastPass) -> Any:
        """Return (side, weights, potentials, marginals) of both sides for all problems, on the host."""
        p = self.problem
        with np.errstate(over="ignore"):
            f, g = (scaled_by(p.regs, host(x)) for x in known[:2])
        return (p.rows, host(p.A), f, host(known.r)), (p.cols, host(p.B), g, host(known.s))

    def _primal(self, known: LastPass) -> F64:
        """Return the primal values of plans with these numbers, (p,)."""
        rhos = self._rho(True), self._rho(False)
        with np.errstate(over="ignore", invalid="ignore"):
            values = primal_value(self.problem, known.mass, self._sides(known), rhos)
            values = values + self.problem.lift_of(known.mass, self.converged)
        return np.where(np.isnan(values), np.inf, values)

    @cached_property
    def objective(self) -> F64:
        """The primal values with every mass term, (p,) (hard constraints count 0); inf for a failed problem.

        On first use the plans are summed from M in float64, as in `Result.objective`.
        """
        values = np.where(np.isin(self.status, FAILED), np.inf, self._primal(self._sums.known))
        for i in np.flatnonzero(self.status == "underflow"):  # the value may be known
            values[i] = self[int(i)].objective
        return values

    @cached_property
    def dual(self) -> F64:
        """The dual values minus a bound on their rounding, (p,); -inf for a failed problem: see `Result.dual`."""
        p = self.problem
        cost, known, reach = self._sums
        moved = [np.reshape(x, (-1, 1)) for x in p.translations]
        sizes = [log_sizes(host(weight)) for weight in (p.A, p.B)]
        rhos = self._rho(True), self._rho(False)
        with np.errstate(over="ignore", invalid="ignore"):
            values = dual_bound(p, cost, known.mass, self._sides(known), moved, sizes, rhos, reach)
        values = np.where(np.isnan(values), known.dual, np.maximum(known.dual, values))
        values = np.where(np.isin(self.status, FAILED), -np.inf, values)
        for i in np.flatnonzero(self.status == "underflow"):
            values[i] = self[int(i)].dual
        return values

    @cached_property
    def _sums(self) -> Sums:
        factors = self._factors()
        reach: Any = 0.0
        if factors is None:
            cost, r, s = BatchPlan(self).sums()
        else:
            cost, r, s = map(host, sums_of_factors(self.problem, factors))
            reach = factors[4]
        left = ~self.converged[:, None]
        r, s = (np.where(left & np.isnan(x), np.inf, x) for x in (r, s))
        with np.errstate(over="ignore"):
            known = self._known._replace(r=r, s=s, mass=r.sum(1))
        return Sums(cost, known, reach)

    @cached_property
    def cost(self) -> F64:
        """Linear transport costs ``<P, M>``, (p,), without forming a plan."""
        cost, known, _ = self._sums
        constant = np.broadcast_to(self.problem.constant, (len(self),))
        with np.errstate(over="ignore", invalid="ignore"):
            return cost + np.where(constant != 0, constant * known.mass, 0.0)  # 0 times an infinite mass is NaN

    @cached_property
    def plan(self) -> Any:
        """All plans as one array, (p, m, n), in M's dtype, formed on first use; a list of CSR arrays for a sparse M."""
        p = self.problem
        xp = namespace(self.problem.M)
        if p.cost.operator == "pairs" or p.ragged:
            return [one.plan for one in self]
        out = xp.empty((len(self), *p.shape), p.cost.dtype)
        for i in range(len(self)):
            self[i]._form_plan(out[i])
        return out

    @breaks_graph
    def apply(self, X: ArrayLike) -> Any:
        """Return ``P @ X`` of all problems in float64: (p, m, d), or (p, m) if X holds vectors.

        Parameters
        ----------
        X : (n,) or (n, d) array, (p, n, d) array, or list of p arrays (n_i,) or (n_i, d)
            Values at the columns: the same for all problems, or one array for each. Clouds of several sizes take a
            list.

        Returns
        -------
        array (p, m, d), or list of p arrays (m_i, d) if clouds have several sizes
            On the GPU if M, A or B is there.

        Raises
        ------
        ValueError
            If X has no such shape.

        Examples
        --------
        >>> import numpy as np, mapuot
        >>> rng = np.random.default_rng(0)
        >>> x, y = rng.random((4, 20, 2)), rng.random((4, 30, 2))
        >>> batch = mapuot.solve_batch(mapuot.PointCloud(x, y), reg=0.05, reg_m=np.inf)
        >>> drift = batch.barycentric_map(y) - x  # where each point goes, less where it is
        >>> drift.shape
        (4, 20, 2)
        """
        return BatchPlan(self).product(X, False, "X")

    @breaks_graph
    def apply_transpose(self, Y: ArrayLike) -> Any:
        """Return ``P.T @ Y`` of all problems, (p, n, d), for Y (m, d), (p, m, d) or a list; see `apply`."""
        return BatchPlan(self).product(Y, True, "Y")

    @breaks_graph
    def barycentric_map(self, Y: ArrayLike, side: SideName = "rows") -> Any:
        """Return the mean target of each row, ``(P @ Y) / (P 1)``, (p, m, d), for targets Y as X in `apply`.

        With ``side="cols"`` return the mean source of each column, (p, n, d), for sources Y at the rows. Points that
        send or receive nothing have NaN, as in `Result.barycentric_map`.
        """
        turned = as_choice(side, "side", ("rows", "cols")) == "cols"
        return BatchPlan(self).images(Y, turned)

    def map(self, points: Any, values: Any = None, side: SideName = "rows") -> Any:
        """Return the images of other points, as `Result.map` does: (p, k, d), or a list if numbers of points differ.

        Parameters
        ----------
        points : (k, d) array, (p, k, d) array, or list of p arrays (k_i, d)
            Points in the space of the rows: the same for all problems, or a cloud for each.
        values : as X in `apply`, optional
            Values at the targets that are averaged instead of the points.
        side : {"rows", "cols"}
            "cols" maps points in the space of the columns to the rows.

        Raises
        ------
        TypeError, ValueError
            If M is not a `PointCloud` of many clouds, or the problem is masked; if a shape is wrong.
        """
        turned = as_choice(side, "side", ("rows", "cols")) == "cols"
        return BatchPlan(self).map(points, values, turned)

    def top_k(self, k: int) -> tuple[Any, Any]:
        """Return the k largest entries of each row, largest first: (column indices, values), both (p, m, k).

        Values are float64. Index -1 and value 0 fill up a row with fewer than k allowed pairs. If clouds have several
        sizes, both are lists of p arrays (m_i, k), and k is at most the number of columns of the largest.

        Raises
        ------
        ValueError
            If k is not in 1..n.
        """
        n = self.problem.shape[1]
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= n:
            raise ValueError(f"k must be in 1..{n}, got {shown(k)}")
        return BatchPlan(self).top_k(int(k))

    def sample(self, size: int, seed: Seed | None = None, *, method: DrawMethod = "independent") -> tuple[Any, Any]:
        """Draw ``size`` pairs from each plan: (i, j) with probability P_ij / mass.

        Parameters
        ----------
        size : int
            Number of pairs of each problem.
        seed : int, generator of NumPy or of PyTorch, or key of JAX, optional
            Source of the random numbers; the same seed draws the same pairs, apart from ties at rounding.
        method : {"independent", "systematic", "rows"}
            How rows are drawn, as in `Result.sample`.

        Returns
        -------
        i, j : (p, size) integer arrays
            Rows and columns; on the GPU if M, A or B is there.

        Raises
        ------
        ValueError
            If a plan has no mass.

        Examples
        --------
        >>> import numpy as np, mapuot
        >>> M = (np.arange(4.0)[:, None] - np.arange(4.0)) ** 2
        >>> i, j = mapuot.solve_batch(M, reg=[0.01, 0.02], reg_m=1.0).sample(4, seed=0, method="rows")
        >>> j
        array([[0, 1, 2, 3],
               [0, 1, 2, 3]])
        """
        size = as_count(size, "size")
        as_choice(method, "method", DRAWS)
        self._check_mass()
        rng = as_generator(seed)
        rows = np.stack([draw_rows(r, size, rng, method) for r in host(self.row_marginal)])
        return self._drawn(rows, rng.random(rows.shape))

    def pairs_at(self, shares: F64) -> tuple[Any, Any]:
        """Return pairs (rows, columns) for ``shares``, (2, p, size), as `Result.pairs_at` does.

        Independent uniform numbers draw independent pairs.
        """
        self._check_mass()
        rows = np.stack([rows_at(r, at) for r, at in zip(host(self.row_marginal), shares[0], strict=True)])
        return self._drawn(rows, shares[1])

    def _check_mass(self) -> None:
        has_mass = (self.mass > 0) & (self.mass < np.inf)
        if not has_mass.all():
            i = int(np.argmin(has_mass))
            raise ValueError(f"size must be of plans with mass, got mass {self.mass[i]} of problem {i}")

    def _drawn(self, rows: Any, shares: F64) -> tuple[Any, Any]:
        columns = BatchPlan(self).columns_of(rows, shares)
        there = namespace(self.own_logs[0])
        if there is np:
            return rows, host(columns)
        return there.asarray(rows), columns

    @breaks_graph
    def push(self, labels: Any) -> tuple[Any, Any]:
        """Move labels of the rows with the mass; return each label's share of the mass that arrives at a column.

        Parameters
        ----------
        labels : (m,) array, (p, m) array, or list of p arrays (m_i,)
            Labels of any sortable type: the same for all problems, or labels for each.

        Returns
        -------
        classes : (k,) array
            The labels that occur in any problem, sorted.
        shares : (p, n, k) array, or list of p arrays (n_i, k)
            Rows with sum 1, or zeros where no mass arrives.
        """
        return self._moved(labels, True)

    @breaks_graph
    def pull(self, labels: Any) -> tuple[Any, Any]:
        """Move labels of the columns back with the mass: return classes (k,) and shares (p, m, k); see `push`."""
        return self._moved(labels, False)

    def _moved(self, labels: Any, forth: bool) -> tuple[Any, Any]:
        count = counts_of(self.problem)[not forth]
        table = host(labels) if not isinstance(labels, (list, tuple)) else labels
        is_shared = np.ndim(table[0]) == 0
        if not is_shared and len(table) != len(self):
            raise ValueError(f"labels must hold an array for each of {len(self)} problems, got {len(table)}")
        if is_shared:
            if (count != count[0]).any():
                raise ValueError("labels must be a list, one array for each cloud, if clouds have several sizes")
            parts = [as_labels(table, int(count[0]), "labels")]
        else:
            parts = [as_labels(host(y), int(count[i]), f"labels[{i}]") for i, y in enumerate(table)]
        classes = np.unique(np.concatenate([classes_of(y, ALONE, "labels") for y in parts]))
        hot = [one_hot(y, classes) for y in parts]
        shares = BatchPlan(self).images(hot[0] if is_shared else hot, forth, "labels")
        if isinstance(shares, list):
            return classes, [without_nan(x) for x in shares]
        return classes, without_nan(shares)

    def unregularised_bounds(self) -> tuple[F64, F64]:
        """Bound the optimal values of the problems without entropy: (low, high), (p,) each.

        See `Result.unregularised_bounds`; M is read twice.
        """
        return bounds_of_batch(self)

    def gradient(self) -> Gradient:
        """Derivatives of the optimal objectives by masses, and by points or costs.

        They are ``a`` (p, m), ``b`` (p, n), of many clouds ``x`` (p, m, d) and ``y`` (p, n, d), of any other M ``M``,
        the plans (p, m, n), a list for a sparse M. If clouds have several sizes, the first four are lists of one array
        for each problem. ``error`` has (p,) bounds. See `Result.gradient`.
        """
        return slopes.gradient(self)

    def standard_error(self, draws: Any = None) -> F64:
        """Return the standard errors of the values between samples, (p,): see `Result.standard_error`."""
        found: F64 = standard_error.standard_error(self, draws)
        return found

    def plan_sum(self, weights: ArrayLike) -> Any:
        """Return ``sum_q weights_q P_q``, (m, n) float64; with a cost for each problem, ``weights_q P_q``, (p, m, n).

        For a sparse M it is a CSR array with the same places, and with a sparse M for each problem a list of them.
        """
        if np.shape(weights) != (len(self),):
            raise ValueError(f"weights must have shape ({len(self)},), got {np.shape(weights)}")
        factors = self._factors()
        xp = namespace(self.problem.M)
        if factors is not None:
            U, K, V, scale, _ = factors
            U *= (scale * namespace(K).asarray(weights, dtype=np.float64))[:, None]
            if K.ndim == 2:
                return K * (U.T @ V)
            return U[:, :, None] * K * V[:, None, :]
        pairs = self.problem.cost.operator == "pairs"
        each = zip(host(weights), self, strict=True)
        plans = (float(w) * (one.plan.astype(np.float64) if pairs else one.plan) for w, one in each)
        if self.problem.M.ndim == 3:
            if pairs:
                return list(plans)
            return xp.stack([*plans]).astype(np.float64)
        if pairs:
            total = next(plans)
        else:
            total = xp.zeros(self.problem.shape)
        for plan in plans:
            if pairs:  # all store their entries, zeros included, in the same places
                total.data += plan.data
            else:
                total += plan
        return total

    def _factors(self) -> tuple[Any, Any, Any, Any, float] | None:
        """Return (U, K, V, scale, range of the exponents) with P_q = scale_q diag(U_q) K diag(V_q).

        None if float64 would lose digits, or could not hold a scale.
        """
        p = self.problem
        xp = namespace(self.own_logs[0])
        range_over_reg = p.range_over_reg
        if p.forbidden or p.c is not None or p.cost.operator != "tiles" or (p.each is not None and p.one_cost):
            return None
        if p.each is None:
            reg = p.regs
        else:
            reg = xp.asarray(p.regs)[:, None, None]
        tops = []
        parts = []
        for log_x, log_w in zip(self.own_logs, p.log_reference, strict=True):
            with np.errstate(invalid="ignore"):
                x = xp.where(xp.isfinite(log_x), log_x + log_w, -np.inf)
            most = x.max(1)
            tops.append(xp.where(xp.isneginf(most), 0.0, most))  # -inf if nothing moves in this problem
            parts.append(xp.exp(x - tops[-1][:, None]))
            low = xp.where(xp.isneginf(x), np.inf, x).min(1)
            range_over_reg = range_over_reg + float((tops[-1] - low).max())
        top = tops[0] + tops[1] - p.M_min / xp.asarray(p.regs)
        if not (range_over_reg < PRODUCT_RANGE and float(top.max()) < PRODUCT_TOP):
            return None
        K = xp.exp((p.M_min - xp.asarray(p.M, dtype=np.float64)) / reg)
        return parts[0], K, parts[1], xp.exp(top), range_over_reg
