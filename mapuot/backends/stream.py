"""StreamedPlan: products with a plan and its sums, alike for all backends and costs; a child says how they are made."""

from __future__ import annotations

from typing import Any

from ..penalties import F64
from ..problem.problem import Problem
from ..problem.validate import as_columns


class StreamedPlan:
    """The plan of given potentials, which is made from M where it is asked for."""

    problem: Problem
    dtype: Any  # of rows of the plan
    as_columns = staticmethod(as_columns)  # (length, d) factors in the memory of this backend, and whether one vector

    def apply(self, X: Any, name: str = "X") -> Any:
        """P X, of a vector or of columns."""
        X, flat = self.as_columns(X, self.problem.shape[1], name)
        return self.told(self.product(X, False), flat)

    def apply_transpose(self, Y: Any) -> Any:
        """P^T Y, summed over the ranks."""
        Y, flat = self.as_columns(Y, self.problem.shape[0], "Y")
        return self.told(self.over_ranks(self.product(Y, True)), flat)

    def told(self, out: Any, flat: bool) -> Any:
        out = self.back(out)
        return out[:, 0] if flat else out

    def sums(self) -> tuple[float, F64, F64]:
        """(cost, row sums, column sums), of all ranks but for the rows."""
        cost, row, col = self.own_sums()
        return float(self.problem.ranks.sum(cost)), row, self.problem.ranks.sum(col)

    # ---- what a backend adds ----

    def plan(self, i0: int, i1: int, out: Any = None) -> Any:
        """Rows i0 to i1, in ``out`` where it is given; of a sparse M a CSR array."""
        raise NotImplementedError

    def product(self, X: Any, turned: bool) -> Any:
        """P X or, of the rows of this rank, P^T X, (length, d)."""
        raise NotImplementedError

    def own_sums(self) -> tuple[float, F64, F64]:
        """As `sums`, of the rows of this rank."""
        raise NotImplementedError

    def back(self, x: Any) -> Any:
        """An array where the caller has M."""
        return x

    def over_ranks(self, x: Any) -> Any:
        return self.problem.ranks.sum(x)
