"""Plans and equations of Newton's steps with a factor, and equations between groups, by NumPy and LAPACK."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ...penalties import F64
from ..array_plans import ArrayPlans
from ..factored import Margin
from ..settings import FACTORS
from .blas import limited

LEAST_LOG = -700.0  # exponents below count as this one and give 0: NumPy takes 10 times as long where they underflow
LEAST_WEIGHT = np.exp(np.full(8, LEAST_LOG))[0]  # by the same vectors


class HostPlans(ArrayPlans):
    """A `FactoredPlans` of backends/factored.py; lower triangles of S are used, in Fortran's order.

    ``threads``: most threads of BLAS.
    """

    def __init__(
        self, costs: F64, log_c: tuple[F64, F64], sides: tuple[Margin, Margin], log_u: F64, log_v: F64,
        threads: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(costs, log_c, sides, log_u, log_v)
        self.threads = threads

    def exponentiate(self, weights: F64) -> None:
        np.maximum(weights, LEAST_LOG, out=weights)
        np.exp(weights, out=weights)
        weights -= LEAST_WEIGHT

    def working(self) -> AbstractContextManager[None]:
        if min(self.m, self.n) <= FACTORS.serial_unknowns:
            return limited(1)
        return limited(self.threads)

    def form_product(self, place: int) -> Any:
        from scipy.linalg.blas import dsymv, dsyrk  # noqa: PLC0415 - on first use

        S = self.S[place].T
        dsyrk(-1.0, self.scaled.T, c=S, lower=True, overwrite_c=True)
        self.S[place].reshape(-1)[:: self.n + 1] = 0.0
        return dsymv(1.0, S, np.ones(self.n), lower=True)

    def add_square(self, place: int, x: F64, factor: float) -> None:
        from scipy.linalg.blas import dsyr  # noqa: PLC0415 - on first use

        dsyr(factor, x, a=self.S[place].T, lower=True, overwrite_a=True)

    def solve_one(self, place: int, added: F64) -> Any:
        from scipy.linalg.blas import dsymv  # noqa: PLC0415 - on first use
        from scipy.linalg.lapack import dposv  # noqa: PLC0415

        right = self.right[place]
        shifted = self.scaled if self.m >= self.n else np.empty((self.n, self.n))
        shifted = shifted.reshape(-1)[: self.n**2].reshape(self.n, self.n)
        shifted[:] = self.S[place]
        shifted.reshape(-1)[:: self.n + 1] += added
        _, y, failed = dposv(shifted.T, right, lower=True, overwrite_a=True)
        self.y[place] = np.nan if failed else y
        return right - dsymv(1.0, self.S[place].T, self.y[place], lower=True) - added * self.y[place]


class HostLaplacian:
    """Equations of S = diag(sums) - R^T R, the lower triangle of S; the rows of S have the sum 0."""

    def __init__(self, roots: F64) -> None:
        from scipy.linalg.blas import dsymv, dsyrk  # noqa: PLC0415 - on first use

        S = dsyrk(-1.0, roots.T, lower=1)
        np.fill_diagonal(S, 0.0)
        np.fill_diagonal(S, -dsymv(1.0, S, np.ones(len(S)), lower=1))
        self.S = S

    def inverse(self, added: F64, along: F64) -> Callable[[F64], F64]:
        """Return the product with (S + diag(added) + w w^T / |w|_1)^-1, w = ``along``: NaN if it has no factor."""
        from scipy.linalg import cho_factor, cho_solve  # noqa: PLC0415 - on first use
        from scipy.linalg.blas import dsyr  # noqa: PLC0415 - on first use

        shifted = dsyr(1.0 / float(along.sum()), along, a=self.S, lower=1)
        shifted.T.reshape(-1)[:: len(along) + 1] += added
        try:
            factor = cho_factor(shifted, lower=True, overwrite_a=True, check_finite=False)
        except np.linalg.LinAlgError:
            return lambda x: np.full(len(x), np.nan)
        return functools.partial(cho_solve, factor, check_finite=False)
