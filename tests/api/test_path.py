"""Which reg_ms of a path is one for each reg, and which the reg_m of all; what may be either is refused."""

import numpy as np
import pytest
from problems import clouds

import mapuot

CASE = clouds(4, 5)
PAIR = (0.1, 10.0)


def masses(regs, reg_ms):
    return [result.mass for result in mapuot.path(CASE.M, CASE.a, CASE.b, regs=regs, reg_ms=reg_ms)]


def right(regs, reg_ms):
    return [mapuot.solve(CASE.M, CASE.a, CASE.b, reg=x, reg_m=y).mass for x, y in zip(regs, reg_ms, strict=True)]


@pytest.mark.parametrize(("regs", "given", "meant"),
                         [([1, 0.5], [0.1, 10.0], [0.1, 10.0]), ([1, 0.5], np.array([0.1, 10.0]), [0.1, 10.0]),
                          ([1, 0.5], (0.1, 10.0), [0.1, 10.0]), ([1, 0.5, 0.2], (0.1, 1.0, 10.0), [0.1, 1.0, 10.0]),
                          ([1, 0.5, 0.2], np.array([0.1, 1.0, 10.0]), [0.1, 1.0, 10.0]),
                          ([1, 0.5, 0.2], PAIR, [PAIR] * 3), ([1, 0.5, 0.2], np.array(PAIR), [PAIR] * 3),
                          ([1, 0.5, 0.2], np.array([PAIR] * 3), [PAIR] * 3), ([1, 0.5], [PAIR, PAIR], [PAIR] * 2),
                          ([1, 0.5, 0.2], (np.full(4, 0.1), np.full(5, 10.0)), [PAIR] * 3), ([1], PAIR, [PAIR]),
                          ([1, 0.5], np.array(0.1), [0.1] * 2), ([1, 0.5], [np.inf, 1.0], [np.inf, 1.0]),
                          (np.array([1, 0.5]), 0.1, [0.1] * 2)])  # fmt: skip
def test_one_for_each_reg_or_for_all(regs, given, meant):
    np.testing.assert_allclose(masses(regs, given), right(regs, meant), rtol=2e-6)


def batch_of(kind):
    rng = np.random.default_rng(0)
    x, y = ([rng.random((k, 2)) for k in sizes] for sizes in ((20, 31, 25), (30, 12, 18)))
    A, B = (rng.uniform(0.5, 1, (3, k)) / k for k in (4, 5))
    if kind == "clouds":
        return mapuot.PointCloud(x, y), None, None
    return (CASE.M, A, B) if kind == "one cost" else (np.stack([CASE.M, 2 * CASE.M, 3 * CASE.M]), A[0], None)


@pytest.mark.parametrize("kind", ["clouds", "one cost", "own costs"])
def test_a_batch_goes_from_answer_to_answer(kind, monkeypatch):
    """Each starts from the one before it, so that it takes fewer passes than from nothing."""
    M, a, b = batch_of(kind)
    regs = [0.2, 0.19, 0.185]
    answers = list(mapuot.path(M, a, b, regs=regs, reg_ms=1.0, tol=1e-8))
    for reg, answer in zip(regs, answers, strict=True):
        cold = mapuot.solve_batch(M, a, b, reg=reg, reg_m=1.0, tol=1e-8)
        assert isinstance(answer, mapuot.BatchResult)
        assert answer.converged.all()
        np.testing.assert_allclose(answer.dual, cold.dual, rtol=1e-7)
        assert reg == regs[0] or answer.n_passes.sum() < cold.n_passes.sum()
