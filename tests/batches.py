"""Batches on each kind of cost, and the comparison of their answers with the single answers."""

import numpy as np
from numpy.testing import assert_allclose
from scipy.sparse import csr_array

import mapuot
from mapuot import PointCloud
from mapuot.arrays import host

P = 5
ROWS, COLUMNS = 9, 11
KINDS = ["one cost", "own costs", "float32", "forbidden", "own regs", "total variation", "reference", "mask", "sparse",
         "grid", "wide", "clouds", "cosine", "ragged"]  # fmt: skip


def clouds_of(kind, rng):
    """Return points of rows and columns, and their masses."""
    if kind == "ragged":
        x, y = ([rng.normal(size=(k, 2)) for k in count] for count in rng.integers(2, 14, (2, P)))
        A, B = ([rng.random(len(z)) for z in side] for side in (x, y))
        A[0][:1] = 0.0
        return x, y, A, B
    return rng.normal(size=(P, ROWS, 2)), rng.normal(size=(P, COLUMNS, 2)), rng.random((P, ROWS)), None


def options_of(kind, rng):
    """Return reg, reg_m, and the penalty, reference or mask."""
    call = {"reg": 0.1, "reg_m": (1.0, 2.0)}
    if kind == "own regs":
        rhos = np.array([[1.0, 2.0], [np.inf, 1.0], [0.3, np.inf], [5.0, 5.0], [1.0, 1.0]])
        return {"reg": np.linspace(0.02, 0.5, P), "reg_m": rhos}
    own = {
        "total variation": {"penalty": "tv", "reg_m": 0.3}, "reference": {"reference": rng.random((ROWS, COLUMNS))},
        "mask": {"mask": mapuot.SeededMask(0.6, 3)},
    }  # fmt: skip
    return call | own.get(kind, {})


def batch_of(kind, convert=np.asarray):
    """Return a batch of each kind of cost; ``convert``: moves its arrays."""
    rng = np.random.default_rng(5)
    M = rng.random((P, ROWS, COLUMNS))
    A = rng.random((P, ROWS))
    B = rng.random((P, COLUMNS))
    A[1, 2] = B[3, :2] = 0.0
    call = options_of(kind, rng)
    if kind in ("clouds", "cosine", "ragged"):
        x, y, A, B = clouds_of(kind, rng)
        if kind == "cosine":
            how = {"metric": "cosine", "weights": [1.0, 2.0]}
        else:
            how = {}
        x, y = ([convert(z) for z in side] if kind == "ragged" else convert(side) for side in (x, y))
        return mapuot.solve_batch(PointCloud(x, y, **how), A, B, **call)
    if kind == "grid":
        A, B = rng.random((2, P, 3, 3))
        return mapuot.solve_batch(mapuot.Grid((3, 3), spacing=0.5), A, B, **call)
    stored = rng.random((ROWS, COLUMNS)) < 0.6
    if kind == "sparse":
        return mapuot.solve_batch(csr_array(np.where(stored, M[0], 0.0) + np.eye(ROWS, COLUMNS)), A, B, **call)
    costs = {
        "one cost": M[0], "mask": M[0], "float32": M.astype(np.float32), "forbidden": np.where(stored, M, np.inf),
        "wide": 3000.0 * M,
    }  # fmt: skip
    return mapuot.solve_batch(convert(costs.get(kind, M)), A, B, **call)


def values(batch, axis, width, seed=2):
    """Return values at the points of one side, in a form that the batch takes."""
    rng = np.random.default_rng(seed)
    parts = [rng.normal(size=(one.problem.shape[axis], *width)) for one in batch]
    if batch.problem.ragged or not width:
        return parts
    return np.stack(parts)


def assert_each(found, batch, want, **tolerance):
    """Each problem's part of an answer equals the single answer."""
    assert len(found) == len(batch)
    for i, one in enumerate(batch):
        expected = host(want(i, one))
        part = host(found[i])
        assert np.shape(part) == np.shape(expected)
        assert_allclose(part, expected, **({"rtol": 1e-9, "atol": 1e-13} | tolerance))
