"""The likeliest mistakes of a first hour, with all that a beginner then reads: a text changes to become plainer."""

import re
import subprocess
import sys
import warnings

import numpy as np
import pytest

import mapuot

x, y = np.random.default_rng(0).random((4, 2)), np.random.default_rng(1).random((5, 2))
M = ((x[:, None] - y) ** 2).sum(-1)
a, b = np.full(4, 0.25), np.full(5, 0.2)
HOLED = np.where(M.max() == M, np.nan, M)


def solve(*arrays, **changes):
    """A first call, with what is wrong about it."""
    return mapuot.solve(*(arrays or (M, a, b)), **{"reg": 0.1, "reg_m": 1.0, **changes})


def meta(array):
    return pytest.importorskip("torch").tensor(array, device="meta")


MISTAKES = {
    "POT's order": (lambda: solve(a, b, M), ValueError,
        "M must be a non-empty matrix (m, n), got shape (4,): the order is M, a, b "
        "(in mapuot.pot, as in POT: a, b, M)"),
    "M transposed": (lambda: solve(M.T, a, b), ValueError,
        "a must have shape (5,), got (4,): one mass for each row of M"),
    "a and b exchanged": (lambda: solve(M, b, a), ValueError,
        "a must have shape (4,), got (5,): one mass for each row of M"),
    "points for costs": (lambda: solve(x, y), ValueError,
        "a must have shape (4,), got (5, 2): a has masses; "
        "costs between points x and y are made by mapuot.PointCloud(x, y)"),
    "points of unlike dimension": (lambda: mapuot.PointCloud(x, y[:, :1]), ValueError,
        "x and y must have equally many columns, got 2, 1"),
    "NaN in M": (lambda: solve(HOLED, a, b), ValueError,
        "M must not hold NaN or -inf, got 1 such entries (+inf forbids a pair)"),
    "NaN in a": (lambda: solve(M, a * [np.nan, 1, 1, 1], b), ValueError, "a must be finite, got NaN or inf at index 0"),
    "negative mass": (lambda: solve(M, a * [1, 1, -2, 1], b), ValueError, "a must be >= 0, got -0.5 at index 2"),
    "no mass": (lambda: solve(M, 0 * a, b), ValueError, "a must have positive, finite mass, got 0.0"),
    "texts": (lambda: solve(M.astype(str), a, b), TypeError,
        "M must hold real numbers, got dtype <U32: .astype(float) reads them from texts"),
    "objects": (lambda: solve(M.astype(object), a, b), TypeError,
        "M must hold real numbers, got dtype object: .astype(float) makes them of objects"),
    "no file": (lambda: solve("costs.npy"), FileNotFoundError, "costs.npy does not exist"),
    "reg 0": (lambda: solve(reg=0), ValueError, "reg must be a positive finite number, got 0.0"),
    "reg a text": (lambda: solve(reg="0.1"), TypeError, "reg must be a positive finite number, got '0.1'"),
    "reg_m None": (lambda: solve(reg_m=None), TypeError,
        "reg_m[0] must be a positive number, inf, or one per point, got None"),
    "balanced, unequal masses": (lambda: solve(M, 2 * a, b, reg_m=np.inf), mapuot.InfeasibleError,
        "a and b must have equal masses if both sides are balanced, got 2.0 and 1.0"),
    "float16": (lambda: solve(precision="float16"), ValueError,
        "precision must be one of ['auto', 'float64', 'mixed'], got 'float16'"),
    "a method of POT": (lambda: solve(method="sinkhorn_stabilized"), ValueError,
        "Unknown method 'sinkhorn_stabilized': must be one of "
        "['auto', 'map-uot', 'sinkhorn', 'translation_invariant']"),
    "a word for the GPU": (lambda: solve(backend="gpu"), ValueError,
        "backend must be one of ('auto', 'cpu', 'cuda', 'reference'), got 'gpu'"),
    "no communicator": (lambda: solve(comm="world"), TypeError,
        "comm must be an intracommunicator of mpi4py, got str"),
    "a tensor without memory": (lambda: solve(meta(M), a, b), TypeError,
        "M cannot be read as an array: can't convert meta device type tensor to numpy. Use Tensor.cpu() to copy the "
        "tensor to host memory first."),
    "M not square in a divergence": (lambda: mapuot.sinkhorn_divergence(M, a, b, reg=0.1, reg_m=1.0), ValueError,
        "M_a and M_b, the costs within each side, must be given where M is not square, got M of shape (4, 5)"),
}  # fmt: skip

# what solves, but not what was meant: the category, and the words that say what to do
ODD = {
    "costs far above reg_m": (lambda: solve(100 * M + 25), mapuot.ScalingWarning,
        "M is far above reg_m; rescale M (by its median, as scale_cost='median' does), or raise reg_m"),
    "costs beyond float64": (lambda: solve(1e6 * M + 1e6), mapuot.ConvergenceWarning,
        "M is so far above reg_m that float64 cannot hold the plan: raise reg or reg_m, bring the costs nearer 0"),
    "a number for a pair that is forbidden": (lambda: solve(np.where(np.median(M) < M, 1e10, M)), mapuot.ScalingWarning,
        "where such costs are to forbid pairs, use inf, which takes fewer passes; else raise reg"),
    "reg too small": (lambda: solve(reg=1e-12), mapuot.ConvergenceWarning, "raise reg"),
    "too few passes": (lambda: solve(reg=1e-3, reg_m=100.0, max_passes=2), mapuot.ConvergenceWarning,
        "raise max_passes, reg or tol"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_these_words(name):
    call, kind, text = MISTAKES[name]
    with pytest.raises(kind) as told:
        call()
    assert str(told.value) == text


@pytest.mark.parametrize("name", ODD)
def test_an_odd_problem_is_told_what_to_do(name):
    call, kind, text = ODD[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.warns(kind, match=re.escape(text)):
            call()


def test_a_missing_library_is_named_with_its_extra():
    """In a process of its own: here the backend may be loaded already."""
    code = "import sys; sys.modules['cupy'] = None; import mapuot; mapuot.solve([[0]], reg=1, reg_m=1, backend='cuda')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "backend 'cuda' needs CuPy: pip install 'mapuot[gpu]'" in done.stderr
