"""Problems of the benchmark: four families of data, range(M) = 1, reproducible from a seed.

a  uniform clouds in the plane, squared Euclidean cost, random weights
b  clustered clouds in 10 dimensions, masses 1 and 1.5
c  histograms on a line, a mixture of bumps each, masses 1 and 0.8
d  a matrix of independent uniform costs
"""

from typing import Any

import numpy as np

FAMILIES = ("a", "b", "c", "d")
MASSES = {"a": 1.0, "b": 1.5, "c": 0.8, "d": 1.0}  # of b; a has mass 1

Arrays = tuple[Any, Any, Any]


def make(family: str, m: int, n: int, seed: int, mass: float | None = None) -> Arrays:
    """(M, a, b) in float64; ``mass`` overrides the mass of b."""
    rng = np.random.default_rng([seed, ord(family), m, n])
    M, a, b = {"a": plane, "b": clusters, "c": line, "d": uniform_costs}[family](rng, m, n)
    M -= M.min()
    M /= M.max()
    return M, a / a.sum(), b / b.sum() * (MASSES[family] if mass is None else mass)


def squared_distances(x: Any, y: Any) -> Any:
    distances = -2 * x @ y.T
    distances += (x * x).sum(1)[:, None]
    distances += (y * y).sum(1)
    return np.maximum(distances, 0, out=distances)


def plane(rng: Any, m: int, n: int) -> Arrays:
    x = rng.random((m, 2))
    y = rng.random((n, 2))
    return squared_distances(x, y), 0.2 + rng.random(m), 0.2 + rng.random(n)


def clusters(rng: Any, m: int, n: int) -> Arrays:
    centres = rng.normal(size=(6, 10))
    x = centres[rng.integers(0, 6, m)] + 0.3 * rng.normal(size=(m, 10))
    y = centres[rng.integers(0, 4, n)] + 0.3 * rng.normal(size=(n, 10)) + 0.2
    return squared_distances(x, y), rng.gamma(2.0, size=m), rng.gamma(2.0, size=n)


def line(rng: Any, m: int, n: int) -> Arrays:
    x = np.linspace(0, 1, m)
    y = np.linspace(0, 1, n)

    def bumps(t: Any) -> Any:
        centre = rng.random(3)
        width = 0.03 + 0.1 * rng.random(3)
        return 1e-3 + np.exp(-(((t[:, None] - centre) / width) ** 2)).sum(1)

    return (x[:, None] - y) ** 2, bumps(x), bumps(y)


def uniform_costs(rng: Any, m: int, n: int) -> Arrays:
    return rng.random((m, n)), 0.2 + rng.random(m), 0.2 + rng.random(n)
