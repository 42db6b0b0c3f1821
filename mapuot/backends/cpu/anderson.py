"""Anderson's differences of a state of many marginals, and the step made of them: see docs/mathematics.md.

The host's work is done by src_c/differences.c, a device's by src_cuda/differences.cu (backends/cuda/anderson.py).
For two marginals: src_c/finish_tmpl.c.
"""

from typing import Any

import numpy as np

from ..._core import lib
from ...penalties import F64
from .native import pointer


class History:
    """Differences of a state made of parts that end at ``ends``, ``depth`` of them at most."""

    def __init__(self, depth: int, ends: list[int]) -> None:
        self.parts = [slice(i, j) for i, j in zip([0, *ends], ends, strict=False)]
        self.depth = depth
        self.residual = self.image = np.zeros(0)
        self.clear()
        self.open(ends)

    def clear(self) -> None:
        self.made, self.begun = 0, False

    @property
    def count(self) -> int:
        return min(self.made, self.depth)

    def add(self, residual: F64, image: F64) -> bool:
        """Take up a pass; tell whether there is a difference to extrapolate with."""
        self.take(residual, image, self.made % self.depth if self.begun else None)
        self.made += self.begun
        self.residual, self.image, self.begun = residual, image, True
        return self.made > 0

    def next(self, weight: F64, alone: float) -> tuple[F64, F64]:
        """Return (G - sum gamma_i dG_i, F - sum gamma_i dF_i), the latter as small as can be in the norm of ``weight``.

        G and F are the image and the residual that came last; ``alone``: how much of gamma each part has for itself, 1
        where parts hardly know of each other.
        """
        grams, rights = self.products(weight)
        gram, right = grams.sum(0), rights.sum(0)  # the sums over all parts
        if not alone or len(self.parts) == 1:
            gamma = weights_of(gram[None], right[None])
            return self.combined(np.repeat(gamma, len(self.parts), 0))
        found = weights_of(np.concatenate([grams, gram[None]]), np.concatenate([rights, right[None]]))
        return self.combined(alone * found[:-1] + (1 - alone) * found[-1])

    # ---- where the differences are held

    def open(self, ends: list[int]) -> None:
        self.ends: Any = np.array(ends, np.int64)
        self.dF, self.dG = np.empty((self.depth, ends[-1])), np.empty((self.depth, ends[-1]))

    def take(self, residual: F64, image: F64, slot: int | None) -> None:
        """Keep the difference from the pass before in a slot, if there is one."""
        if slot is not None:
            np.subtract(residual, self.residual, out=self.dF[slot])
            np.subtract(image, self.image, out=self.dG[slot])

    def products(self, weight: F64) -> tuple[F64, F64]:
        """Return sum w dF_i dF_j and sum w dF_i F of each part."""
        parts, count = len(self.parts), self.count
        grams, rights = np.empty((parts, count, count)), np.empty((parts, count))
        vectors = self.dF, self.residual, weight, grams, rights
        lib.mapuot_anderson_products(parts, pointer(self.ends, "int64_t *"), count, *map(pointer, vectors))
        return grams, rights

    def combined(self, gammas: F64) -> tuple[F64, F64]:
        """Return what ``next`` returns, for a row of gammas for each part."""
        image, residual, ends = np.empty_like(self.image), np.empty_like(self.residual), pointer(self.ends, "int64_t *")
        vectors = np.ascontiguousarray(gammas), self.dF, self.dG, self.residual, self.image, image, residual
        lib.mapuot_anderson_combined(len(self.parts), ends, self.count, *map(pointer, vectors))
        return image, residual


def weights_of(grams: F64, rights: F64) -> F64:
    """Solve for gamma with the least |F - sum gamma_i dF_i|, by normal equations whose columns are normalised."""
    grams, gammas = np.ascontiguousarray(grams), np.empty(rights.shape)
    vectors = grams, np.ascontiguousarray(rights), gammas
    lib.mapuot_anderson_weights(*rights.shape, *map(pointer, vectors))
    return gammas
