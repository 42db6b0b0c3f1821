"""Anderson's differences of a state of many marginals, and the step made of them: see docs/mathematics.md.

Twin: src_cuda/differences.cu, by cuda/anderson.py. For two marginals: src_c/finish_tmpl.c.
"""

from __future__ import annotations

import numpy as np

from ..penalties import F64

RIDGE = 1e-10  # of the normal equations, whose columns are normalised


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
        """Whether there is a difference to extrapolate with."""
        self.take(residual, image, self.made % self.depth if self.begun else None)
        self.made += self.begun
        self.residual, self.image, self.begun = residual, image, True
        return self.made > 0

    def next(self, weight: F64, alone: float) -> tuple[F64, F64]:
        """(G - sum gamma_i dG_i, F - sum gamma_i dF_i), gamma = argmin of the latter in the norm of ``weight``.

        G and F are the image and the residual that came last; ``alone``: how much of gamma each part has for itself, 1
        where parts hardly know of each other.
        """
        grams, rights = self.products(weight)
        gram, right = grams.sum(0), rights.sum(0)  # of all parts together
        if not alone or len(self.parts) == 1:
            gamma = weights_of(gram[None], right[None])
            return self.combined(np.repeat(gamma, len(self.parts), 0))
        found = weights_of(np.concatenate([grams, gram[None]]), np.concatenate([rights, right[None]]))
        return self.combined(alone * found[:-1] + (1 - alone) * found[-1])

    # ---- where the differences are held

    def open(self, ends: list[int]) -> None:
        self.dF, self.dG = np.empty((self.depth, ends[-1])), np.empty((self.depth, ends[-1]))

    def take(self, residual: F64, image: F64, slot: int | None) -> None:
        """The difference to what came last, if there is a slot for it."""
        if slot is not None:
            np.subtract(residual, self.residual, out=self.dF[slot])
            np.subtract(image, self.image, out=self.dG[slot])

    def products(self, weight: F64) -> tuple[F64, F64]:
        """Of each part: sum w dF_i dF_j, and sum w dF_i F."""
        dF, grams, rights = self.dF[: self.count], [], []
        for part in self.parts:  # one at a time, which a cache holds: a third of the time of all at once
            weighted = dF[:, part] * weight[part]
            grams.append(weighted @ dF[:, part].T)
            rights.append(weighted @ self.residual[part])
        return np.stack(grams), np.stack(rights)

    def combined(self, gammas: F64) -> tuple[F64, F64]:
        """What ``next`` returns, with a row of gamma for each part."""
        image, residual = self.image.copy(), self.residual.copy()
        for part, gamma in zip(self.parts, gammas, strict=True):
            image[part] -= gamma @ self.dG[: self.count, part]
            residual[part] -= gamma @ self.dF[: self.count, part]
        return image, residual


def weights_of(grams: F64, rights: F64) -> F64:
    """argmin |F - sum gamma_i dF_i| of each problem."""
    diagonal = np.diagonal(grams, axis1=1, axis2=2)
    scale = 1 / np.sqrt(np.maximum(diagonal, np.finfo(float).tiny))
    systems = grams * scale[:, :, None] * scale[:, None] + RIDGE * np.eye(grams.shape[1])
    return np.asarray(scale * np.linalg.solve(systems, (scale * rights)[:, :, None])[:, :, 0])
