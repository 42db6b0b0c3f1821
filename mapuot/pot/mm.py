"""Unbalanced transport by majorisation-minimisation, POT's ``mm_unbalanced``: a pass in place an iteration.

    kl: G <- K G^(r1 + r2) / (rowsum^r1 colsum^r2),  K = a^r1 b^r2 c^r exp(-M / t)
    l2: G <- K G / (reg_m1 rowsum + reg_m2 colsum + reg G),  K = max(reg_m1 a + reg_m2 b + reg c - M, 0)

with t = reg + reg_m1 + reg_m2 and r1, r2, r = reg_m1 / t, reg_m2 / t, reg / t. A block of rows is rescaled
while it is in cache and gives the sums of the next iteration on the way. Source: Chapel, Flamary, Wu,
Fevotte, Gasso, Unbalanced optimal transport through non-negative penalized linear regression, 2021.
Of a sparse M, G and K are vectors of its stored pairs (`Pairs`): K is 0 between all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends import host, pick
from ..cached import cached_property
from ..errors import ConvergenceWarning, warn
from ..problem.kinds import as_cost
from ..problem.sparse import Sparse, is_sparse
from ..problem.validate import as_array, as_count, as_pair, as_positive, as_reference, as_weight
from ..progress import counted
from .arrays import give, take, threshold
from .caller import names_of_pot

BLOCK_ENTRIES = 1 << 16  # of G and of K at a time: both stay in the cache of one core
FLOOR = 1e-16  # POT's, added to the denominator
CHANGE = 1e-6  # relative change of the plan in one iteration above which the end is not the limit


def mm_unbalanced(
    a: Any,
    b: Any,
    M: Any,
    reg_m: Any,
    c: Any = None,
    reg: float = 0,
    div: str = "kl",
    G0: Any = None,
    numItermax: int = 1000,
    stopThr: float = 1e-15,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """Unbalanced plan with KL or L2 marginal and regularisation terms, also without regularisation.

    ``min_G <G, M> + reg D(G | c) + reg_m[0] D(G 1 | a) + reg_m[1] D(G^T 1 | b)``,
    D = KL or half the squared distance.

    Parameters
    ----------
    a, b : (m,), (n,) arrays
        Masses, zeros allowed; empty means uniform with mass 1.
    M : (m, n) array or scipy.sparse matrix
        Costs; pairs that a sparse matrix does not store are forbidden.
    reg_m : float or anything of length 1 or 2
        Marginal penalty, > 0 and finite; "kl": in units of M, "l2": in units of M / mass.
    c : (m, n) array, optional
        Reference of the regularisation, default a b^T; not used where reg is 0.
    reg : float
        Regularisation, >= 0, in the units of reg_m.
    div : {"kl", "l2"}
    G0 : (m, n) array, optional
        Start, default a b^T; an entry that starts at 0 stays there.
    numItermax : int
    stopThr : float
        Stop when the plan changes by less, ``|G - G_before|_2``, in units of mass.
    verbose : bool
        A progress bar on standard error.
    log : bool

    Returns
    -------
    plan : (m, n) array in M's dtype, of a sparse M a CSR array
    log : dict
        Only with ``log=True``: err (change at each iteration), G (a list with the last plan; POT keeps every
        one), cost ``<G, M>``, total_cost (the objective).

    Raises
    ------
    ValueError, TypeError
        Bad argument or unknown div.
    NotImplementedError
        A tensor requires grad.

    Warns
    -----
    ConvergenceWarning
        The last iteration still changed the plan by more than 1e-6 of its norm.
    """
    div = div.lower() if isinstance(div, str) else div
    if div not in ("kl", "l2"):
        raise ValueError(f"Unknown div = {div!r}: must be 'kl' or 'l2'")
    problem = Majorised.from_arrays(
        take(a, "a"), take(b, "b"), take(M, "M"), take(reg_m, "reg_m"), take(c, "c"), reg, div
    )
    plan = problem.start(take(G0, "G0"))
    err = minimise(problem, plan, as_count(numItermax, "numItermax"), threshold(stopThr), verbose)
    answer = give(problem.told(plan), M)
    if not log:
        return answer
    cost, total = problem.costs(plan)
    kind = plan.dtype.type
    return answer, {
        "err": err,
        "G": [answer],
        "cost": give(kind(cost), M),
        "total_cost": give(kind(total), M),
    }


def mm_unbalanced2(
    a: Any,
    b: Any,
    M: Any,
    reg_m: Any,
    c: Any = None,
    reg: float = 0,
    div: str = "kl",
    G0: Any = None,
    returnCost: str = "linear",
    numItermax: int = 1000,
    stopThr: float = 1e-15,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """Cost of the `mm_unbalanced` plan: ``<G, M>`` ("linear") or the objective ("total"), and the log.

    Arguments, units and errors as in `mm_unbalanced`; ValueError for another returnCost.
    """
    if returnCost not in ("linear", "total"):
        raise ValueError(f"Unknown returnCost = {returnCost!r}: must be 'linear' or 'total'")
    _, record = mm_unbalanced(a, b, M, reg_m, c, reg, div, G0, numItermax, stopThr, verbose, log=True)
    cost = record["cost" if returnCost == "linear" else "total_cost"]
    return (cost, record) if log else cost


@dataclass
class Majorised:
    """One validated problem; K is kept, in M's dtype."""

    a: Any
    b: Any
    M: Any
    c: Any | None  # None: a b^T, or not used
    reg_m: tuple[float, float]
    reg: float
    div: str
    cost: Any = None
    given: Any = None  # c as it came

    @classmethod
    def from_arrays(cls, a: Any, b: Any, M: Any, reg_m: Any, c: Any, reg: Any, div: str) -> Majorised:
        module = pick("reference")
        cost = as_cost(host(M), module)
        M = cost.data if cost.operator == "pairs" else cost.array
        weight_a, weight_b = (
            as_weight(x, k, name, module) for x, k, name in zip((a, b), cost.shape, "ab", strict=True)
        )  # fmt: skip
        pair = as_pair(reg_m, "reg_m")
        rho = as_positive(pair[0], "reg_m[0]"), as_positive(pair[1], "reg_m[1]")
        reg = 0.0 if np.ndim(reg) == 0 and reg == 0 else as_positive(reg, "reg")
        if not np.isfinite(M).all():
            raise ValueError("M must be finite")
        given = c if reg > 0 else None
        if given is not None:
            with names_of_pot():
                c = as_reference(given, cost, weight_a, weight_b, module)[0]
                c = c.data if cost.operator == "pairs" else np.asarray(c)
        kind = Pairs if cost.operator == "pairs" else cls
        return kind(weight_a, weight_b, M, c if reg > 0 else None, rho, reg, div, cost, given)

    def start(self, G0: Any) -> Any:
        """Check the plan to start from, a b^T where none is given."""
        if G0 is None:
            a, b = self.at(slice(None), self.a, self.b)
            return np.array(a * b, self.M.dtype, order="C")
        start = np.asarray(G0.toarray()) if is_sparse(G0) else as_array(host(G0), "G0")
        if start.dtype.kind not in "fiub":
            raise TypeError(f"G0 must hold real numbers, got dtype {start.dtype}")
        if start.shape != self.cost.shape:
            raise ValueError(f"G0 must have M's shape {self.cost.shape}, got {start.shape}")
        if not (np.isfinite(start).all() and (start >= 0).all()):
            raise ValueError("G0 must be finite and >= 0")
        return np.array(self.among(start), dtype=self.M.dtype, order="C")

    def at(self, i: slice, rows: Any, cols: Any) -> tuple[Any, Any]:
        """Return a vector of the rows and one of the columns, each spread over the entries of the rows i."""
        return rows[i, None], cols

    def add(self, i: slice, block: Any, rows: Any, cols: Any) -> None:
        """Add a block of the rows i to the sums over rows and over columns."""
        rows[i] += block.sum(1, dtype=np.float64)
        cols += block.sum(0, dtype=np.float64)

    def among(self, table: Any) -> Any:
        """Return the entries of an (m, n) array in the layout of G."""
        return table

    def told(self, G: Any) -> Any:
        """Return G as the matrix that the caller is given."""
        return G

    @property
    def elsewhere(self) -> float:
        """Divergence from c between the pairs that a sparse M does not store."""
        return 0.0

    def sums(self, G: Any) -> tuple[Any, Any]:
        rows, cols = np.zeros(len(self.a)), np.zeros(len(self.b))
        for i in self.blocks():
            self.add(i, G[i], rows, cols)
        return rows, cols

    def reference(self, i: slice) -> Any:
        """Return the rows i of c."""
        a, b = self.at(i, self.a, self.b)
        return a * b if self.c is None else self.c[i]

    def kernel(self) -> Any:
        """Form K, block by block."""
        K = np.empty(self.M.shape, self.M.dtype)
        rho1, rho2 = self.reg_m
        total = rho1 + rho2 + self.reg
        for i in self.blocks():
            cost = self.M[i].astype(np.float64)
            a, b = self.at(i, self.a, self.b)
            if self.div == "l2":
                extra = self.reg * self.reference(i) if self.reg else 0.0
                K[i] = np.maximum(rho1 * a + rho2 * b + extra - cost, 0.0)
            else:
                factor = self.reference(i) ** (self.reg / total) if self.reg else 1.0
                sides = a ** (rho1 / total) * b ** (rho2 / total)
                K[i] = sides * factor * np.exp(-cost / total)
        return K

    def blocks(self) -> Iterator[slice]:
        m = len(self.M)
        step = max(1, BLOCK_ENTRIES // (self.M.size // m if m else 1))
        return (slice(i, min(i + step, m)) for i in range(0, m, step))

    def factors(self, rows: Any, cols: Any) -> tuple[Any, Any]:
        """Return the factors (terms, of "l2") that the sums over rows and columns give to the denominator."""
        rho1, rho2 = self.reg_m
        if self.div == "l2":
            return rho1 * rows, rho2 * cols
        total = rho1 + rho2 + self.reg
        return rows ** (rho1 / total), cols ** (rho2 / total)

    def rescale(self, i: slice, G: Any, K: Any, factors: tuple[Any, Any]) -> Any:
        """Return the rows i of the next G from those of G and K, and the ``factors`` of all rows and columns."""
        rows, cols = self.at(i, *factors)
        if self.div == "l2":
            below = rows + cols
            if self.reg:
                below += self.reg * G
            powered = G
        else:
            share = sum(self.reg_m) / (sum(self.reg_m) + self.reg)
            powered = G if self.reg == 0 else G**share
            below = rows * cols
        below += FLOOR
        return np.divide(K * powered, below, out=below)

    def costs(self, G: Any) -> tuple[float, float]:
        """Return (<G, M>, objective) in float64."""
        linear = total = 0.0
        for i in self.blocks():
            block = G[i].astype(np.float64)
            linear += float((block * self.M[i]).sum())
            total += self.divergence(block, self.reference(i)) * self.reg if self.reg else 0.0
        total += self.reg * self.elsewhere
        rows, cols = self.sums(G)
        total += self.reg_m[0] * self.divergence(rows, self.a) + self.reg_m[1] * self.divergence(cols, self.b)
        return linear, linear + total

    def divergence(self, p: Any, q: Any) -> float:
        from scipy.special import rel_entr  # noqa: PLC0415 - on first use

        return float((rel_entr(p, q) - p + q).sum() if self.div == "kl" else 0.5 * ((p - q) ** 2).sum())


class Pairs(Majorised):
    """Problem of a sparse M, where G, K, M and c are vectors of its stored pairs."""

    cost: Sparse

    @cached_property
    def row(self) -> Any:
        return self.cost.row_numbers()

    def at(self, i: slice, rows: Any, cols: Any) -> tuple[Any, Any]:
        return rows[self.row[i]], cols[self.cost.column[i]]

    def add(self, i: slice, block: Any, rows: Any, cols: Any) -> None:
        rows += np.bincount(self.row[i], block, len(rows))
        cols += np.bincount(self.cost.column[i], block, len(cols))

    def among(self, table: Any) -> Any:
        return table[self.row, self.cost.column]

    def told(self, G: Any) -> Any:
        return self.cost.with_data(G)

    @property
    def elsewhere(self) -> float:
        power = 1 if self.div == "kl" else 2
        if self.given is None:
            whole = float((self.a**power).sum() * (self.b**power).sum())
        else:
            c = Sparse.of_matrix(self.given.tocsr()).data if is_sparse(self.given) else np.asarray(self.given)
            whole = float((c**power).sum(dtype=np.float64))
        stored = sum(float((self.reference(i) ** power).sum()) for i in self.blocks())
        return (whole - stored) / power


def minimise(problem: Majorised, G: Any, max_iter: int, stop: float, progress: bool) -> list[float]:
    """Iterate G in place, and return the change |G - G_before|_2 of each iteration."""
    K, err = problem.kernel(), []
    rows, cols = problem.sums(G)
    size = 0.0
    for _ in counted(progress, max_iter, desc="mm", unit="pass"):
        next_rows, next_cols = np.zeros_like(rows), np.zeros_like(cols)
        change, size, factors = 0.0, 0.0, problem.factors(rows, cols)
        for i in problem.blocks():
            new = problem.rescale(i, G[i], K[i], factors)
            step = (new - G[i]).ravel()
            change += float(np.vdot(step, step))
            size += float(np.vdot(new, new))
            problem.add(i, new, next_rows, next_cols)
            G[i] = new
        rows, cols = next_rows, next_cols
        err.append(change**0.5)
        if err[-1] < stop:
            return err
    if err[-1] > CHANGE * size**0.5:
        warn(
            f"mm_unbalanced not converged after {max_iter} iterations: last change {err[-1]:.2e} of a plan "
            f"of norm {size**0.5:.2e}; raise numItermax or reg",
            ConvergenceWarning,
        )
    return err
