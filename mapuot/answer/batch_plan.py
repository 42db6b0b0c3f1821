"""`BatchPlan`: products with the plans of a batch, many problems at once, where the backend computes.

    P = diag(e^alpha) exp(-M / reg) diag(e^beta),   alpha = log u + log a,   beta = log v + log b,   of each problem

A block holds the exponents of as many problems as a limit of memory allows, (k, m, n). A smaller cloud is padded with
its last point; alpha or beta is -inf there. A batch on a sparse matrix or a grid, with a mask or a reference matrix has
no blocks, and on a CPU large problems have none: `Result` computes them one by one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import any_of, formula, host, namespace
from ..backends.conditional import LEAST, MOST, largest
from ..penalties import F64
from ..problem.clouds import Clouds, is_list
from ..problem.problem import BatchProblem
from ..problem.validate import as_array, check_kind
from ..processor import thread_count
from ..status import FAILED
from ..threads import each
from .settings import BATCH_PLANS

DEVICE_ENTRIES = 1 << 27  # of a block on a GPU: 1 GiB


@formula
def log_masses(log: Any, weight: Any) -> tuple[Any]:
    """Return log scalings times the masses; -inf where a point has no mass, or where a problem failed."""
    return (np.where(np.isfinite(log), log + np.log(weight), -np.inf),)


@formula
def finite_logs(log: Any, weight: Any) -> tuple[Any]:
    """Return log scalings, -inf where they are not finite: the reference has no masses."""
    return (np.where(np.isfinite(log), log, -np.inf),)


@formula
def are_lost(mass: Any, log: Any, least: Any) -> tuple[Any]:
    """Tell which sums of a plan have lost digits, though a point has mass: of the sums larger than ``least``."""
    return ((log > -np.inf) & (mass > least) & ~((mass > LEAST) & (mass < MOST)),)


def table_of(function: Any, *inputs: Any, dtype: Any = np.float64) -> Any:
    """Return the table that a formula of tables gives."""
    out = namespace(inputs[0]).empty(inputs[0].shape, dtype)
    function(*inputs, into=[out])
    return out


class Values:
    """Values at the points of one side of all problems: one table (n, d) for all, or (p, n, d), padded with zeros.

    ``flat``: given as vectors, without the last axis.
    """

    def __init__(self, problem: BatchProblem, given: Any, axis: int, name: str, asarray: Callable[[Any], Any]) -> None:
        p = len(problem)
        count = counts_of(problem)[axis]
        n = problem.shape[axis]
        if is_list(given) and len(given) and not np.isscalar(given[0]) and np.ndim(given[0]):
            parts = [real(x, f"{name}[{i}]", asarray) for i, x in enumerate(given)]
            if [len(x) for x in parts] == count.tolist() and len({x.shape[1:] for x in parts}) == 1:
                self.set(namespace(*parts).concatenate(parts), parts[0].ndim == 1, problem, axis, name)
                return
            if len(parts) != n or any(x.ndim != 1 for x in parts) or len({x.shape for x in parts}) != 1:
                raise ValueError(f"{name} must hold one array for each of {p} problems, with a row for each point")
            given = np.stack([host(x) for x in parts])
        table = real(given, name, asarray)
        if table.ndim in (1, 2) and len(table) == n and (count == n).all():
            self.flat = table.ndim == 1
            self.table = table[:, None] if self.flat else table
        elif table.ndim == 3 and table.shape[:2] == (p, n) and (count == n).all():
            self.flat = False
            self.table = table
        else:
            shapes = f"({n},), ({n}, d) or ({p}, {n}, d)"
            if not (count == n).all():
                shapes = f"those of a list of {p} arrays, with a row for each point of a cloud"
            raise ValueError(f"{name} must have shape {shapes}, got {table.shape}")
        check_width(self.table, name)

    def set(self, flat: Any, vectors: bool, problem: BatchProblem, axis: int, name: str) -> None:
        """Set the table from the values of all problems, one problem behind the other."""
        flat = flat[:, None] if vectors else flat
        check_width(flat, name)
        self.flat = vectors
        if problem.several is None:
            self.table = flat.reshape(len(problem), -1, *flat.shape[1:])
        else:
            self.table = problem.several.to_table(flat, axis)

    def of(self, which: Any, n: int) -> Any:
        """Return the values of some problems, (k, n, d), or the one table that serves all."""
        if self.table.ndim == 2:
            return self.table[:n]
        return rows_of(self.table, which)[:, :n]

    def one(self, i: int, n: int) -> Any:
        """Return the values of problem i on the host, (n, d)."""
        return host(self.table if self.table.ndim == 2 else self.table[i])[:n]


def real(value: Any, name: str, asarray: Callable[[Any], Any]) -> Any:
    array = as_array(value, name, asarray)
    check_kind(array, name)
    return array.astype(np.float64, copy=False)


def check_width(table: Any, name: str) -> None:
    if table.shape[-1] == 0:
        raise ValueError(f"{name} must have a column, got shape {table.shape}")


def run_of(which: Any) -> Any:
    """Return increasing numbers as a slice if they follow one another: arrays are then not copied."""
    if which[-1] - which[0] + 1 == len(which):
        return slice(int(which[0]), int(which[-1]) + 1)
    return which


def rows_of(table: Any, which: Any) -> Any:
    """Return rows of a table: a view for a slice, a copy for numbers."""
    if isinstance(which, slice):
        return table[which]
    return table[namespace(table).asarray(which)]


def counts_of(problem: BatchProblem) -> list[Any]:
    """Return the number of points of each problem, (p,), of the rows and of the columns."""
    if problem.several is None:
        return [np.full(len(problem), k) for k in problem.shape]
    return [places.count for places in problem.several.places]


class BatchPlan:
    """The plans of a `BatchResult`; ``result``: the answers."""

    def __init__(self, result: Any) -> None:
        self.result, self.problem = result, result.problem
        self.backend = result._backend
        self.on_device = self.backend.name == "cuda"
        self.count = counts_of(self.problem)
        p = self.problem
        formula_of = log_masses if p.unmasked == "product" else finite_logs
        logs = (
            table_of(formula_of, log, namespace(log).asarray(weight))
            for log, weight in zip(result.own_logs, (p.A, p.B), strict=True)
        )
        self.alpha, self.beta = map(self.backend.to_memory, logs)
        self.xp = namespace(self.alpha)
        self.all_regs = self.xp.asarray(np.broadcast_to(p.regs, (len(p),)))
        several = p.several
        formed = p.cost.operator == "tiles" or (several is not None and self.backend.makes_costs and several.may_form)
        self.may_have_block = np.broadcast_to((p.c is None) & ~np.isin(result.status, FAILED) & formed, (len(p),))
        self.clouds: Clouds | None = several
        if several is not None and self.on_device:
            self.clouds = several.placed(self.xp)

    # ---- blocks

    def blocks(self, rows: Any, cols: Any) -> tuple[list[Any], Any]:
        """Group problems of so many rows and columns, similar sizes together, for one block each.

        Return the numbers of each group, and the numbers of the problems without a block.
        """
        most = BATCH_PLANS.block_entries
        largest_one = BATCH_PLANS.largest_entries
        if self.on_device:
            most = largest_one = DEVICE_ENTRIES
        in_block = self.may_have_block & (rows * cols <= largest_one)
        left = np.flatnonzero(in_block)
        left = left[np.argsort(-(rows * cols)[left], kind="stable")]
        groups = []
        while len(left):
            k = max(1, min(len(left), most // int(rows[left[0]] * cols[left[0]])))
            while k > 1 and int(rows[left[:k]].max() * cols[left[:k]].max()) * k > most:
                k //= 2
            groups.append(run_of(np.sort(left[:k])))
            left = left[k:]
        return groups, np.flatnonzero(~in_block)

    def costs(self, which: Any) -> Any:
        """Return the costs of some problems in float64, (k, m, n) or (1, m, n) where all share them."""
        if self.clouds is not None:
            return self.backend.tables(self.clouds.of(which))
        M = self.problem.M
        if M.ndim == 2:
            return self.backend.to_memory(M).astype(np.float64, copy=False)[None]
        return self.backend.to_memory(rows_of(M, which)).astype(np.float64, copy=False)

    def at(self, which: Any) -> Any:
        """Return the numbers of the problems of a block where its arrays are; a slice remains one."""
        if isinstance(which, slice):
            return which
        return self.xp.asarray(which)

    def regs(self, which: Any) -> Any:
        """Return the reg of some problems, (k, 1, 1)."""
        return rows_of(self.all_regs, which)[:, None, None]

    def logs(self, which: Any, shape: Any) -> tuple[Any, Any]:
        """Return alpha (k, m) and beta (k, n) of the problems of a block."""
        m, n = shape
        return rows_of(self.alpha, which)[:, :m], rows_of(self.beta, which)[:, :n]

    def exponents(self, which: Any) -> tuple[Any, Any, Any]:
        """Return (alpha (k, m, 1), beta - M / reg (k, m, n), M)."""
        M = self.costs(which)
        alpha, beta = self.logs(which, M.shape[1:])
        return alpha[:, :, None], beta[:, None] - M / self.regs(which), M

    def plans_and_costs(self, which: Any) -> tuple[Any, Any]:
        """Return (P, M) of some problems."""
        alpha, x, M = self.exponents(which)
        x += alpha
        return self.xp.exp(x, out=x), M

    def plans(self, which: Any) -> Any:
        """Return the plans of some problems, (k, m, n)."""
        if self.clouds is None:
            return self.plans_and_costs(which)[0]
        here = self.clouds.of(which)
        logs = map(self.xp.ascontiguousarray, self.logs(which, here.shape))
        return self.backend.tables(here, (*logs, rows_of(self.all_regs, which)))

    def sweep(self, block: Callable[[Any], None], one: Callable[[int], None], count: Any = None) -> None:
        """Call ``block(numbers)`` for the groups of problems in blocks, ``one(i)`` for every other problem.

        ``count``: numbers of rows and of columns, by default as in the problems. On a CPU up to as many threads
        as the solve had share these calls.
        """
        groups, alone = self.blocks(*(count or self.count))
        calls = [(block, which) for which in groups] + [(one, int(i)) for i in alone]
        threads = min(self.result._threads or thread_count(), len(calls))

        def run(call: Any) -> None:
            function, problems = call
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # plans may be beyond float64
                function(problems)

        if self.on_device or threads <= 1:
            for call in calls:
                run(call)
        else:
            each(run, calls, lambda: None, threads=threads)

    # ---- tables of answers

    def empty(self, axis: int, *width: int, fill: float = 0.0, dtype: Any = np.float64) -> Any:
        """Return a table for all points of one side, (p, m, ...)."""
        return self.xp.full((len(self.problem), self.problem.shape[axis], *width), fill, dtype)

    def put(self, table: Any, which: Any, values: Any) -> None:
        """Store the values of a block in a table."""
        table[self.at(which), : values.shape[1]] = values

    def put_one(self, table: Any, i: int, values: Any) -> None:
        """Store the values of one problem, from anywhere, in a table."""
        table[i, : len(values)] = self.xp.asarray(host(values))

    def given(self, table: Any, axis: int) -> Any:
        """Return a table where the caller's arrays lie; a list of one table for each problem if clouds differ."""
        if namespace(self.result.own_logs[0]) is np:
            table = host(table)
        if self.problem.ragged:
            return [table[i, :k] for i, k in enumerate(self.count[axis].tolist())]
        return table

    def values(self, given: Any, axis: int, name: str) -> Values:
        """Check values at the points of rows (``axis`` 0) or columns, and move them to the backend."""
        found = Values(self.problem, given, axis, name, self.backend.asarray)
        found.table = self.backend.to_memory(found.table)
        return found

    # ---- products

    def product(self, given: Any, turned: bool, name: str) -> Any:
        """Return P X of all problems, or P^T X."""
        X = self.values(given, int(not turned), name)
        axis = int(turned)
        out = self.empty(axis, X.table.shape[-1])
        self.multiply(X, turned, out)
        return self.given(out[..., 0] if X.flat else out, axis)

    def multiply(self, X: Values, turned: bool, out: Any) -> None:
        axis = int(turned)

        def block(which: Any) -> None:
            P = self.plans(which)
            if turned:
                P = P.swapaxes(1, 2)
            self.put(out, which, self.xp.matmul(P, X.of(which, P.shape[2])))

        def one(i: int) -> None:
            answer = self.result[i]
            apply = answer.apply_transpose if turned else answer.apply
            self.put_one(out, i, apply(X.one(i, self.count[1 - axis][i])))

        self.sweep(block, one)

    def images(self, given: Any, turned: bool, name: str = "Y") -> Any:
        """Return the means of values under the conditional plans of all rows, or of all columns."""
        Y = self.values(given, int(not turned), name)
        table = self.means(Y, turned)
        return self.given(table[..., 0] if Y.flat else table, int(turned))

    def means(self, Y: Values, turned: bool) -> Any:
        axis = int(turned)
        out = self.empty(axis, Y.table.shape[-1], fill=np.nan)
        log = self.beta if turned else self.alpha
        least = 0.0 if self.problem.sides[turned].may_stay else -1.0

        def block(which: Any) -> None:
            P = self.plans(which)
            if turned:
                P = P.swapaxes(1, 2)
            mass = P.sum(2)
            self.put(out, which, self.xp.matmul(P, Y.of(which, P.shape[2])) / mass[:, :, None])
            lost = table_of(are_lost, mass, rows_of(log, which)[:, : mass.shape[1]], least, dtype=bool)
            if any_of(lost):  # sums that underflow: the exponents tell the conditional plan
                for i in np.arange(len(self.problem))[which][host(lost).any(1)]:
                    one(int(i))

        def one(i: int) -> None:
            means = self.result[i]._images(Y.one(i, self.count[1 - axis][i]), turned)
            self.put_one(out, i, means)

        self.sweep(block, one)
        return out

    def sums(self) -> tuple[F64, F64, F64]:
        """Return (<P, M> (p,) of M less its constant, row sums (p, m), column sums (p, n)) on the host."""
        cost = np.zeros(len(self.problem))
        rows = self.empty(0)
        cols = self.empty(1)

        def block(which: Any) -> None:
            P, M = self.plans_and_costs(which)
            self.put(rows, which, P.sum(2))
            self.put(cols, which, P.sum(1))
            if self.problem.forbidden:
                M = self.xp.where(self.xp.isinf(M), 0.0, M)
            P *= M
            cost[which] = host(P.sum((1, 2)))

        def one(i: int) -> None:
            cost[i], row, col = self.result[i]._sums
            self.put_one(rows, i, row)
            self.put_one(cols, i, col)

        self.sweep(block, one)
        return cost, host(rows), host(cols)

    def top_k(self, k: int) -> tuple[Any, Any]:
        """Return the columns and values of the k largest entries of each row, (p, m, k) each."""
        index = self.empty(0, k, fill=-1, dtype=np.int64)
        value = self.empty(0, k)
        stays = self.problem.rows.may_stay

        def block(which: Any) -> None:
            alpha, x, _ = self.exponents(which)
            p, m, n = x.shape
            few = min(k, n)
            columns, log = largest(x.reshape(p * m, n), few)
            entries = self.xp.exp(log.reshape(p, m, few) + alpha)
            absent = entries <= 0 if stays else (log.reshape(p, m, few) + alpha) == -np.inf
            at = self.at(which)
            index[at, :m, :few] = self.xp.where(absent, -1, columns.reshape(p, m, few))
            value[at, :m, :few] = self.xp.where(absent, 0.0, entries)

        def one(i: int) -> None:
            answer = self.result[i]
            m, n = answer.problem.shape
            columns, entries = answer.top_k(min(k, n))
            index[i, :m, : min(k, n)] = self.xp.asarray(host(columns))
            value[i, :m, : min(k, n)] = self.xp.asarray(host(entries))

        self.sweep(block, one)
        return self.given(index, 0), self.given(value, 0)

    def columns_of(self, rows: Any, shares: F64) -> Any:
        """Return in each of these rows, (p, size), the column where the cumulated mass exceeds the share."""
        xp = self.xp
        found = xp.zeros(rows.shape, np.int64)

        def block(which: Any) -> None:
            _, x, _ = self.exponents(which)
            top = x.max(2, keepdims=True)
            x -= xp.where(xp.isfinite(top), top, 0.0)
            ends = xp.cumsum(xp.exp(x, out=x), axis=2)
            k, _, n = ends.shape
            problem = xp.arange(k)[:, None]
            row = xp.asarray(rows[which])
            total = ends[problem, row, n - 1]
            wanted = xp.minimum(xp.asarray(shares[which]) * total, xp.nextafter(total, 0.0))
            first = xp.zeros(row.shape, np.int64)
            last = xp.full(row.shape, n - 1, np.int64)
            for _ in range(n.bit_length()):  # halve the runs of columns that hold the place
                middle = (first + last) // 2
                beyond = ends[problem, row, middle] > wanted
                last = xp.where(beyond, middle, last)
                first = xp.minimum(xp.where(beyond, first, middle + 1), last)
            found[self.at(which)] = last

        def one(i: int) -> None:
            found[i] = xp.asarray(host(self.result[i]._drawn(rows[i], shares[i])[1]))

        self.sweep(block, one)
        return found

    # ---- maps of new points

    def map(self, points: Any, values: Any, turned: bool) -> Any:
        """Return the images of other points, one cloud of them for all problems or one for each."""
        p = self.problem
        if self.clouds is None:
            raise TypeError(f"map needs M to be a PointCloud of many clouds, got {p.cost.kind}")
        if p.masked or not isinstance(p.unmasked, str):
            raise ValueError("a map needs reference 'product' or 'uniform', which tells of new points, and no mask")
        count = self.count[not turned]
        clouds = self.clouds
        beta = self.beta
        if turned:
            clouds = clouds.transpose()
            beta = self.alpha
        if values is None:
            own = clouds.to_table(clouds.gathered(clouds.whole.y, 1), 1)
            values = [own[i, :k] for i, k in enumerate(count.tolist())]
        Y = self.values(values, int(not turned), "values")
        clouds = clouds.beside(points, "points")
        n_points = clouds.places[0].count
        out = self.xp.full((len(p), clouds.shape[0], Y.table.shape[-1]), np.nan)

        def block(which: Any) -> None:
            here = clouds.of(which)
            x = self.xp.broadcast_to(rows_of(beta, which)[:, None, : here.shape[1]], (len(here), *here.shape))
            x = x - self.backend.tables(here) / self.regs(which)
            top = x.max(2, keepdims=True)
            x -= self.xp.where(self.xp.isfinite(top), top, 0.0)
            weights = self.xp.exp(x, out=x)
            sums = weights.sum(2, keepdims=True)  # 0 where every target is forbidden
            self.put(out, which, self.xp.matmul(weights, Y.of(which, here.shape[1])) / sums)

        def one(i: int) -> None:
            here = Y.one(i, count[i])
            mine = clouds.at_home.of(i).x
            self.put_one(out, i, self.result[i].map(mine, here, "cols" if turned else "rows"))

        self.sweep(block, one, (n_points, count))
        if Y.flat:
            out = out[..., 0]
        if namespace(self.result.own_logs[0]) is np:
            out = host(out)
        if (n_points == n_points[0]).all():
            return out
        return [out[i, :k] for i, k in enumerate(n_points.tolist())]

    # ---- transforms of potentials

    def transforms(self, g: Any, out_rows: Any, out_cols: Any) -> tuple[F64, F64, Any]:
        """Return f_i = min_j (M_ij - g_j), then g_j = min_i (M_ij - f_i), and a mask of the problems in blocks.

        ``out_rows``, ``out_cols``: points that take no part; their potential is -inf. f is inf where all pairs of a row
        are forbidden, and such a row does not count for g.
        """
        xp = self.xp
        f = self.empty(0)
        back = self.empty(1)
        is_computed = np.zeros(len(self.problem), bool)
        g, out_rows, out_cols = map(self.backend.to_memory, (g, out_rows, out_cols))

        def block(which: Any) -> None:
            M = self.costs(which)
            m, n = M.shape[1:]
            at = self.at(which)
            low = (M - g[at][:, None, :n]).min(2)
            low = xp.where(out_rows[at][:, :m], -np.inf, low)
            self.put(f, which, low)
            high = (M - xp.where(low == np.inf, -np.inf, low)[:, :, None]).min(1)
            self.put(back, which, xp.where(out_cols[at][:, :n], -np.inf, high))
            is_computed[which] = True

        self.sweep(block, lambda _: None)
        return host(f), host(back), is_computed
