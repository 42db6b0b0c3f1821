"""Bad input: each kind is refused by an error that names the argument, briefly; what looks wrong is told."""

import os
import re
import subprocess
import sys
import warnings

import numpy as np
import ot
import pytest
from conftest import ISAS
from problems import arrays, clouds, csr_of, pairs
from scipy import sparse

import mapuot
from mapuot import da, pot
from mapuot.wot import OTModel

CASE = clouds(4, 5)
HUGE = 10**400  # no float64
MANY = 10**5000  # nor has it a text
WORDS = np.array(["auto", "auto"])
HEAVY = [1e200, 1, 1, 1, 1]
RAGGED = [[1.0], [1.0, 2.0]]
SQUARE = np.eye(4)
MASKED = np.ma.array(np.ones((4, 4)), mask=True)
POINTS = np.random.default_rng(0).random((9, 2))
MASK = mapuot.SeededMask(0.3, 7)
S, _, SA, SB = pairs(4, 5, 0.5)
CSR = sparse.csr_array


def call(M=CASE.M, a=CASE.a, b=CASE.b, **changes):
    """solve on a 4 x 5 problem with some arguments exchanged."""
    return mapuot.solve(M, a, b, **{"reg": 0.05, "reg_m": 1.0, **changes})


def changed(x, value):
    """A copy of x with one entry exchanged."""
    x = np.array(x)
    x.flat[x.size // 2] = value
    return x


def each(name, values, kind, text):
    """A row for each value that is refused in the same words."""
    return [({name: value}, kind, text) for value in values]


REAL = "must hold real numbers, got dtype "
POSITIVE = "must be a positive finite number, got "
WORD = "penalty must be one of ['balanced', 'kl', 'l2', 'range', 'tv'] or a pair"
WEIGHTS = "reference must be finite, >= 0 and not all zero"
START = "warm_start must be a Result or a pair (log_u, log_v)"
REFUSED = [
    # shapes
    ({"M": np.ones(4)}, ValueError, "M must be a non-empty matrix (m, n), got shape (4,)"),
    *each("M", (np.ones((4, 5, 1)), np.ones((0, 5)), [], 3.0), ValueError, "M must be a non-empty matrix (m, n), got"),
    *each("a", (1.0, np.array(1.0)), ValueError, "a must have shape (4,), got ()"),
    ({"a": np.ones(5)}, ValueError, "a must have shape (4,), got (5,)"),
    *each("b", (np.ones(4), np.ones((5, 2))), ValueError, "b must have shape (5,), got "),
    ({"M": [[1.0, 2.0], [3.0]]}, ValueError, "M cannot be read as an array: "),
    ({"a": RAGGED}, ValueError, "a cannot be read as an array: "),
    # entries
    *each(
        "M", (changed(CASE.M, np.nan), changed(CASE.M, -np.inf)), ValueError, "M must not hold NaN or -inf, got 1 such"
    ),
    ({"M": CASE.M + 1j}, TypeError, f"M {REAL}complex128"),
    *each("M", (CASE.M.astype(object), CASE.M > 0.5, CASE.M.astype(str)), TypeError, f"M {REAL}"),
    ({"M": np.zeros((4, 5), "M8[s]")}, TypeError, f"M {REAL}datetime64[s]"),
    ({"M": np.full((4, 5), np.inf)}, mapuot.InfeasibleError, "M forbids every pair"),
    ({"M": np.ma.masked_greater(CASE.M, np.median(CASE.M))}, ValueError, "M must not be masked"),
    *each("a", (changed(CASE.a, np.nan), changed(CASE.a, np.inf)), ValueError, "a must be finite"),
    *each("a", (changed(CASE.a, -0.1), np.zeros(4)), ValueError, "a must "),
    ({"a": np.full(4, 1e308)}, ValueError, "a must have positive, finite mass, got inf"),
    ({"a": CASE.a + 1j}, TypeError, f"a {REAL}complex128"),
    ({"a": {}}, TypeError, f"a {REAL}object"),
    ({"a": np.ma.array(CASE.a, mask=[1, 0, 0, 0])}, ValueError, "a must not be masked"),
    ({"b": changed(CASE.b, np.nan)}, ValueError, "b must be finite"),
    *each("b", (changed(CASE.b, -1e-9), np.zeros(5)), ValueError, "b must "),
    ({"b": CASE.b.astype(object)}, TypeError, f"b {REAL}object"),
    ({"a": HEAVY[:4], "b": HEAVY}, ValueError, "a and b must have masses whose product"),
    ({"reg_m": np.inf, "b": 2 * CASE.b}, ValueError, "equal mass"),
    # reg, reg_m
    ({"reg": -1}, ValueError, f"reg {POSITIVE}-1.0"),
    ({"reg": HUGE}, ValueError, f"reg {POSITIVE}1000"),
    ({"reg": MANY}, ValueError, f"reg {POSITIVE}<int>"),
    *each("reg", (0.0, np.inf, np.nan), ValueError, f"reg {POSITIVE}"),
    ({"reg": "0.1"}, TypeError, f"reg {POSITIVE}'0.1'"),
    ({"reg": np.ma.masked}, TypeError, f"reg {POSITIVE}masked"),
    *each("reg", ("big", None, 1j, [0.1, 0.2], np.complex128(1)), TypeError, f"reg {POSITIVE}"),
    ({"reg": 5e-324}, ValueError, "reg must not be so small that M / reg overflows, got 5e-324"),
    ({"M": 1.7e308 * np.sign(CASE.M - np.median(CASE.M))}, ValueError, "reg must not be so small"),
    ({"reg_m": 0.0}, ValueError, "reg_m[0] must be > 0 (inf = balanced), got 0.0"),
    ({"reg_m": (np.nan, 1.0)}, ValueError, "reg_m[0] must be > 0 (inf = balanced), got nan"),
    *each("reg_m", ((1.0, -2.0), (1.0, changed(np.ones(5), -1))), ValueError, "reg_m[1] must be > 0"),
    ({"reg_m": (1.0, 2.0, 3.0)}, ValueError, "reg_m must be a scalar or have length 1 or 2, got length 3"),
    ({"reg_m": "much"}, ValueError, "reg_m must be a scalar or have length 1 or 2"),
    ({"reg_m": (np.ones(5), 1.0)}, ValueError, "reg_m[0] must have shape (4,), got (5,)"),
    ({"reg_m": HUGE}, ValueError, "reg_m[0] must be a positive number, inf, or one per point, got 1000"),
    *each(
        "reg_m", ("1", None, np.array([1 + 1j, 1])), TypeError, "reg_m[0] must be a positive number, inf, or one per"
    ),
    *each("reg_m", (b"ab", bytearray(b"ab")), TypeError, "reg_m must be a number, inf, or a pair, got b"),
    ({"reg_m": ([[1], [2, 3]], 1.0)}, ValueError, "reg_m[0] cannot be read as an array"),
    ({"reg_m": np.ma.array([1.0, 2.0], mask=[1, 0])}, ValueError, "reg_m[0] must not be masked"),
    ({"penalty": "range", "reg_m": -0.1}, ValueError, "reg_m[0] must be a slack >= 0 for penalty 'range'"),
    ({"penalty": "range", "reg_m": np.inf}, ValueError, "reg_m[0] must be a slack >= 0 for penalty 'range'"),
    # words
    ({"method": "newton"}, ValueError, "Unknown method 'newton': must be one of ['auto', "),
    *each("method", (None, ["auto"], WORDS), ValueError, "Unknown method "),
    *each("penalty", ("kullback", None, ("kl", "tv", "l2"), CASE.M, ("kl", CASE.M)), ValueError, WORD),
    *each("backend", ("tpu", WORDS), ValueError, "backend must be one of ('auto', 'cpu', 'cuda', 'reference'), got "),
    *each("precision", ("float16", WORDS), ValueError, "precision must be one of ['auto', 'float64', 'mixed']"),
    # the reference
    ({"reference": "ones"}, ValueError, "reference must be 'product', 'uniform' or a matrix, got 'ones'"),
    ({"reference": np.ones((5, 4))}, ValueError, "reference must have M's shape (4, 5), got (5, 4)"),
    *each("reference", (np.zeros((4, 5)), changed(CASE.M, -1.0), changed(CASE.M, np.nan)), ValueError, WEIGHTS),
    ({"reference": changed(CASE.M, np.inf)}, ValueError, "and 1 entries that are not finite"),
    ({"reference": np.full((4, 5), 1e308)}, ValueError, "reference is too large: its sum is beyond float64"),
    ({"reference": CASE.M + 1j}, TypeError, f"reference {REAL}complex128"),
    ({"reference": sparse.coo_array(CASE.M)}, TypeError, "reference must be a dense array, got coo_array"),
    # numbers
    *each("tol", (0.0, np.nan), ValueError, f"tol {POSITIVE}"),
    ({"tol": -HUGE}, ValueError, f"tol {POSITIVE}-1000"),
    ({"tol": "tight"}, TypeError, f"tol {POSITIVE}'tight'"),
    ({"tol_gap": -1.0}, ValueError, f"tol_gap {POSITIVE}-1.0"),
    ({"max_passes": -MANY}, ValueError, "max_passes must be an integer >= 1, got <int>"),
    *each("max_passes", (0, 10.0, True), ValueError, "max_passes must be an integer >= 1, got "),
    *each("threads", (0, "two"), ValueError, "threads must be an integer >= 1, got "),
    *each("threads", (10**12, HUGE), ValueError, "threads must be at most 4096, got 1000"),
    # starts and objects
    *each("warm_start", (3, (CASE.a,), (CASE.a + 1j, CASE.b)), TypeError, START),
    ({"warm_start": (CASE.b, CASE.a)}, ValueError, "warm_start must have shapes (4,), (5,), got (5,), (4,)"),
    ({"warm_start": (CASE.a, changed(CASE.b, np.nan))}, ValueError, "warm_start must not hold NaN"),
    ({"callback": 3}, TypeError, "callback must be callable, got 3"),
    ({"comm": object()}, TypeError, "comm must be an intracommunicator of mpi4py"),
    ({"checkpoint": 5}, TypeError, "checkpoint must be a path, got 5"),
]


def fit(Xs=POINTS[:4], ys=(0, 0, 1, 1), Xt=POINTS[4:8], yt=(0, 0, 1, 1), **parameters):
    return da.UnbalancedSinkhornTransport(**parameters).fit(Xs, ys, Xt, yt)


def patched(function="sinkhorn_knopp_unbalanced", args=(), **named):
    """POT's function where mapuot stands in for it."""
    five = [named.pop(x) for x in ("a", "b", "M", "reg", "reg_m")]
    with pot.patched():
        return getattr(ot.unbalanced, function)(*five, *args, **named)


def course(days=(0,) * 5 + (1,) * 7, **parameters):
    return OTModel(np.arange(12.0)[:, None], days=days, **parameters)


def solved_cloud(x=POINTS[:4], y=POINTS[4:], metric="sqeuclidean", **options):
    return mapuot.solve(mapuot.PointCloud(x, y, metric), reg=0.1, reg_m=1.0, **options)


def gradient_of(M, **options):
    return mapuot.solve(M, reg=0.1, reg_m=1.0, **options).gradient()


NUMBERS, NO_NAN, NO_MASK = "must hold real numbers", "M must not hold NaN or -inf", "mask must be a mapuot.SeededMask"
OUTSIDE = S.copy()
OUTSIDE.indices[0] = 99
FULL = mapuot.PointCloud(POINTS[:4], POINTS[4:])
GRID = mapuot.Grid((3, 2), 0.2)
THREE = mapuot.multimarginal({(0, 1): SQUARE, (1, 2): SQUARE}, [np.ones(4)] * 3, reg=0.1, reg_m=1.0)
ONE, M3 = np.ones(3), np.ones((3, 3))
EDGE = {(0, 1): M3}
BALANCED = mapuot.InfeasibleError, "equal masses"
ONLY_ONE = "reg_ms must be a list where two regs have two vectors or pairs"

# {function: (what is called, arguments that it takes, rows of (what is exchanged, error, text))}
FUNCTIONS = {
    "solve": (call, {}, REFUSED),
    "solve of pairs": (mapuot.solve, {"M": S, "a": SA, "b": SB, "reg": 0.1, "reg_m": 1.0}, [
        ({"M": S.astype(complex)}, TypeError, f"M {NUMBERS}"),
        ({"M": S > 0.5}, TypeError, f"M {NUMBERS}, got dtype bool"),
        ({"M": S * np.nan}, ValueError, NO_NAN),
        ({"M": CSR((4, 5))}, mapuot.InfeasibleError, "M forbids every"),
        ({"M": CSR((0, 5))}, ValueError, "M must be a non-empty matrix"),
        ({"M": OUTSIDE}, ValueError,
         "M is no valid sparse matrix"),
        ({"a": SA[:3]}, ValueError, "a must have shape (4,)"),
        ({"method": "map-uot"}, NotImplementedError, "takes no sparse M"),
        ({"out": np.ones((4, 5))}, ValueError, "out must be None"),
        ({"reference": S[:3]}, ValueError, "reference must have M's shape"),
        ({"reference": -S}, ValueError, "reference must be finite, >= 0"),
        ({"mask": MASK}, NotImplementedError, "mask is for costs of all pairs"),
    ]),
    "solve with a mask": (call, {"mask": MASK}, [
        *each("mask", (0.1, np.ones((4, 5), bool)), TypeError, NO_MASK),
        ({"mask": mapuot.SeededMask(1e-9, 0)}, ValueError, "mask must keep pairs"),
    ]),
    "SeededMask": (mapuot.SeededMask, {"keep": 0.5, "seed": 0}, [
        *each("keep", (0.0, 1.1, -1.0, np.nan, np.inf, 5e-324), ValueError, "keep must be in 2^-64 ... 1"),
        *each("keep", ("much", "0.5", 1j), TypeError, "keep must be a number"),
        ({"keep": HUGE}, ValueError, "keep must be a number, got"),
        ({"seed": 1.5}, TypeError, "seed must be an integer"),
        *each("seed", (-1, 2**64), ValueError, "seed must be in"),
    ]),
    "solve_batch": (mapuot.solve_batch, {"M": CASE.M, "reg": 0.1, "reg_m": 1.0}, [
        ({"A": RAGGED}, ValueError, "A cannot be read as"),
        ({"A": CSR(SQUARE)}, TypeError, "A must be a dense"),
        ({"A": np.outer(HEAVY[1::-1], np.ones(4)), "B": HEAVY}, ValueError, "A and B must have masses"),
        ({"A": np.ones((3, 4)), "B": np.ones((2, 5))}, ValueError, "must hold equally many problems"),
        ({"A": np.ones((5, 3))}, ValueError, "A must have shape (5, 4)"),
        ({"A": np.outer([1, 0], np.ones(4))}, ValueError, "A must be of positive mass, problem 1"),
        ({"B": -np.ones((2, 5))}, ValueError, "B must be >= 0, problem 0 is not"),
        ({"B": np.full((2, 5), np.nan)}, ValueError, "B must be finite"),
        ({"M": CASE.M[0]}, ValueError, "M must have shape"),
        ({"M": CASE.M * np.nan}, ValueError, "M must not hold NaN"),
        ({"reg": 0}, ValueError, "reg must be"),
        ({"reg_m": -1.0}, ValueError, "reg_m[0] must be"),
        ({"reg_m": np.inf, "A": np.ones((2, 4)), "B": np.ones((2, 5))}, *BALANCED),
        *each("method", ([], WORDS, "map-uot"), ValueError, "method must be one of"),
        *each("precision", (WORDS, "bfloat16"), ValueError, "precision must be one of"),
        *each("warm_start", (("a", "b"),), TypeError, "warm_start must hold real numbers"),
        ({"warm_start": 3}, TypeError, "warm_start must be"),
        ({"warm_start": (CASE.a, CASE.a)}, ValueError, "warm_start must have shapes"),
        ({"mask": 0.1}, TypeError, NO_MASK),
    ]),
    "solve_batch of pairs": (mapuot.solve_batch, {"M": [S] * 2, "A": SA, "B": SB, "reg": 0.1, "reg_m": 1.0}, [
        ({"M": [S, S[:3]]}, ValueError, "M[1] must store the same pairs"),
        ({"M": [S, S.toarray()]}, TypeError, "M[1] must be a sparse matrix"),
        ({"M": [S, S > 0.5]}, TypeError, f"M[1] {NUMBERS}"),
        ({"M": [S, S * np.nan]}, ValueError, NO_NAN),
        ({"M": [S] * 3, "A": [SA] * 2}, ValueError, "must hold equally many problems"),
        ({"mask": MASK}, NotImplementedError, "mask is for costs of all pairs"),
    ]),
    "path": (lambda **x: list(mapuot.path(CASE.M, CASE.a, CASE.b, **x)), {"regs": [1, 0.5], "reg_ms": 1.0}, [
        *each("reg_ms", (((0.1, 10.0),) * 2, np.ones((2, 2)), ((1.0, 2.0), (3.0, [4.0, 5.0]))), ValueError, ONLY_ONE),
        ({"reg_ms": (np.ones(4), np.ones(5))}, ValueError, ONLY_ONE),
        *each("reg_ms", (np.ones(4), [1, 2, 3, 4]), ValueError, "reg_ms must have the length of regs, 2, got 4"),
        ({"regs": "12"}, TypeError, "regs must be a sequence of numbers, got '12'"),
        ({"regs": np.array(1.0)}, TypeError, "regs must be a sequence of numbers"),
    ]),
    "sinkhorn_divergence": (
        mapuot.sinkhorn_divergence, {"M": CASE.M, "A": CASE.a, "B": CASE.b, "reg": 0.1, "reg_m": 1.0}, [
        ({}, ValueError, "M_a and M_b, the costs within each side, must be given where M is not square"),
        ({"M_a": SQUARE}, ValueError, "M_a and M_b must be given together"),
        ({"M_a": CASE.M, "M_b": CASE.M}, ValueError, "M_a must be square, got shape (4, 5)"),
        ({"M": np.triu(SQUARE + 1), "B": CASE.a}, ValueError, "not symmetric"),
        ({"M": mapuot.Grid((2, 2), offset=1.0), "B": CASE.a}, ValueError, "M_a and M_b"),
        ({"M": mapuot.Grid(4, target=5)}, ValueError, "M_a and M_b"),
        ({"reg_m": (1.0, 2.0)}, ValueError, "reg_m must be one number"),
        ({"reference": "uniform"}, TypeError, "reference is not an option"),
        ({"mask": MASK}, TypeError, "mask is not an option of the divergence"),
    ]),
    "multimarginal": (mapuot.multimarginal, {"costs": EDGE, "masses": [ONE] * 2, "reg": 1, "reg_m": 1}, [
        ({"costs": {(k, (k + 1) % 4): M3 for k in range(4)}, "masses": [ONE] * 4}, ValueError, "the cycle "),
        ({"costs": {(0, 1): M3, (1, 2): M3, (2, 0): M3, (2, 3): M3}, "masses": [ONE] * 4}, ValueError, "cycle"),
        ({"masses": [ONE] * 3}, ValueError, "connect all marginals"),
        *each("costs", (EDGE | {(1, 0): M3}, {(0, 0): M3}), ValueError, "costs must hold one matrix"),
        *each("costs", ({(0, 5): M3}, {"01": M3}), ValueError, "costs must have pairs"),
        ({"costs": EDGE | {(1, 2): np.ones((4, 3))}, "masses": [ONE] * 3}, ValueError, "points of marginal 1"),
        ({"costs": {(0, 1): ONE}}, ValueError, "costs[0, 1] must be a non-empty matrix"),
        *each("costs", ({(0, 1): M3 * np.nan}, {(0, 1): CSR(M3 * np.nan)}), ValueError, "costs[0, 1] must not hold"),
        *each("costs", ({(0, 1): M3 * 1j}, {(0, 1): CSR(M3 * 1j)}), TypeError, "costs[0, 1] must hold real"),
        ({"costs": {(0, 1): CSR((3, 0))}}, ValueError, "non-empty matrix, got shape (3, 0"),
        ({"costs": {(0, 1): CSR((0, 3))}}, ValueError, "non-empty matrix, got shape (0, 3"),
        ({"costs": {(0, 1): mapuot.PointCloud(ONE[:, None], ONE[:, None])[:0]}}, ValueError, "got shape (0, "),
        ({"costs": np.ones((3, 3, 3))}, ValueError, "an axis for each of 2 masses"),
        ({"costs": lambda i0, i1: M3[None], "masses": [ONE, None, ONE]}, ValueError, "masses must be given"),
        ({"costs": lambda i0, i1: M3, "masses": [ONE] * 3}, ValueError, "costs must give shape ("),
        ({"costs": EDGE | {(1, 2): CSR(M3), (0, 2): M3}, "masses": [ONE] * 3}, TypeError,
         "costs[1, 2] must be dense in a triangle"),
        ({"masses": [ONE, np.ones(4)]}, ValueError, "masses[1] must have shape"),
        ({"masses": [ONE, -ONE]}, ValueError, "masses[1] must be >= 0"),
        ({"masses": [None, None]}, ValueError, "masses must not all be None"),
        ({"masses": [ONE]}, ValueError, "at least two"),
        ({"masses": 3.0}, TypeError, "masses must be a list"),
        ({"reg": 0}, ValueError, "reg must be"),
        ({"reg_m": -1}, ValueError, "reg_m[0] must be > 0"),
        ({"reg_m": [1, 2, 3]}, ValueError, "reg_m must be a number or one for each of 2"),
        ({"reg_m": [1, [1, 2, 3]]}, TypeError, "reg_m[1] must be a positive number or inf"),
        ({"backend": "reference"}, ValueError, "backend must be 'auto', 'cpu' or 'cuda' for many marginals"),
        ({"backend": np.ones(2)}, ValueError, "backend must be one of"),
        ({"threads": 0}, ValueError, "threads"),
        ({"masses": [ONE, 2 * ONE], "reg_m": np.inf}, mapuot.InfeasibleError, "masses must be equal"),
        *each("costs", ({(0, 1): M3 * np.inf}, {(0, 1): CSR((3, 3))}), mapuot.InfeasibleError, "forbid every point"),
    ]),
    "MultiResult.pair": (THREE.pair, {"i": 0, "j": 1}, each("j", (3, 0), ValueError, "must be")),
    "MultiResult.marginal": (THREE.marginal, {"k": 0}, each("k", (-1,), ValueError, "must be")),
    "MultiResult.apply": (THREE.apply, {"i": 0, "j": 1}, each("X", (ONE,), ValueError, "X must have shape")),
    "barycenter": (mapuot.barycenter, {"M": SQUARE, "A": SQUARE, "reg": 0.1}, [
        ({"A": MASKED}, ValueError, "A must not be masked"),
        ({"A": SQUARE + 1j}, TypeError, "A must hold real numbers, got dtype complex"),
        ({"A": SQUARE.astype(str)}, TypeError, "A must hold real numbers"),
        ({"A": np.ones((4, 3))}, ValueError, "A must be (p, n) and M (n, n)"),
        ({"A": np.ones(4)}, ValueError, "A must be a non-empty (p, n) array"),
        ({"M": S, "reg_m": 1.0}, ValueError, "A must be (p, n) and M (n, n)"),
        ({"M": np.triu(SQUARE + 1), "debiased": True}, ValueError, "M must be symmetric"),
        ({"M": S[:, :4], "debiased": True}, ValueError, "M must be symmetric"),
        ({"M": CSR((4, 4))}, ValueError, "M must store a pair"),
        ({"M": S[:, :4] * np.inf}, ValueError, "M must be finite"),
        ({"weights": "some"}, TypeError, "weights must hold real numbers"),
        ({"weights": [1.0, -1.0, 1.0, 1.0]}, ValueError, "weights must be"),
        ({"tol_change": 0}, ValueError, "tol_change must be"),
        ({"reg": HUGE}, ValueError, "reg must be a positive finite number"),
        ({"reg_m": HUGE}, ValueError, "reg_m must be a number, got 1000"),
    ]),
    "certify": (mapuot.certify, {"result": mapuot.solve(S, reg=0.1, reg_m=1.0), "M": S.toarray() + 1}, [
        ({"result": mapuot.solve(S.toarray(), reg=0.1, reg_m=1.0)}, TypeError, "result must be that of a solve"),
        ({"M": S.toarray()[:3]}, ValueError, "M must have the shape (4, 5)"),
        ({"M": S}, TypeError, "M must be a dense array"),
        ({"tol": 0}, ValueError, "tol must be"),
        ({"result": mapuot.solve(S, reg=0.1, reg_m=1.0, reference=np.ones((4, 5)))}, ValueError,
         "reference must be 'product' or 'uniform'"),
    ]),
    "knn_cost": (mapuot.knn_cost, {"x": POINTS, "y": POINTS, "k": 3}, [
        ({"k": 10}, ValueError, "k must be at most 9"),
        ({"k": 0}, ValueError, "k must be an integer >= 1"),
        ({"metric": "hamming"}, ValueError, "metric must be one of"),
        ({"y": POINTS[:, :1]}, ValueError, "x and y must have equally many columns"),
    ]),
    "PointCloud": (mapuot.PointCloud, {"x": POINTS[:5], "y": POINTS[5:]}, [
        ({"x": ONE}, ValueError, "x must be a non-empty matrix of points"),
        ({"x": np.ones((3, 1))}, ValueError, "equally many columns"),
        ({"x": np.array([[np.nan, 1.0]])}, ValueError, "x must be finite"),
        ({"y": np.array([[1.0, 1.0], [np.inf, 1.0]])}, ValueError, "y must be finite, got NaN or inf in point 1"),
        ({"y": np.zeros((3, 2)), "metric": "cosine"}, ValueError, "y must hold no zero vector"),
        ({"metric": "manhattan"}, ValueError, "metric must be one of"),
        ({"scale": 0.0}, ValueError, "scale must be"),
        *each("weights", ([1.0], [1.0, -1.0]), ValueError, "weights must be 2 finite numbers"),
        ({"x": POINTS * 1e300, "metric": "cityblock", "weights": [1e300, 1.0]}, ValueError, "weights must leave x"),
        *each("truncate", ("often", -1.0, np.nan), ValueError, "truncate must be"),
    ]),
    "solve of points": (solved_cloud, {}, [
        ({"x": POINTS * 1e200, "y": -POINTS * 1e200}, ValueError, "finite"),
        ({"method": "map-uot"}, ValueError, "map-uot"),
        ({"y": POINTS + 10, "metric": "wfr"}, mapuot.InfeasibleError, "M forbids every pair"),
    ]),
    "solve of boxes": (call, {"M": mapuot.PointCloud(POINTS[:4], POINTS[4:], truncate=5)}, [
        ({"reference": "uniform"}, NotImplementedError, "truncate is not for a reference"),
        ({"M": mapuot.PointCloud(POINTS[:4], POINTS[4:], "wfr", truncate=5)}, NotImplementedError,
         "truncate is not for metric 'wfr'"),
        ({"checkpoint": "never.npz"}, NotImplementedError, "truncate is not for checkpoint"),
    ]),
    "Result.gradient": (gradient_of, {"M": FULL}, [
        ({"M": np.asarray(FULL)}, TypeError, "PointCloud"),
        ({"M": GRID}, TypeError, "PointCloud"),
        ({"penalty": "tv"}, ValueError, "reg_m"),
    ]),
    "Result.potential": (solved_cloud(metric="cosine").potential, {"points": POINTS, "side": "cols"}, [
        ({"points": np.ones((4, 3))}, ValueError, "points must have 2 columns, as x and y have, got 3"),
        ({"points": np.zeros((1, 2))}, ValueError, "points must hold no zero vector"),
    ]),
    "Result.potential of a mask": (solved_cloud(mask=MASK).potential, {}, [
        ({"points": POINTS}, ValueError, "mask: a masked problem has no potential away from its points"),
    ]),
    "Result.hvp": (lambda metric="sqeuclidean", **x: solved_cloud(metric=metric).hvp(**x), {"w": POINTS[:4]}, [
        *each("w", (POINTS[:3], np.full((4, 2), np.nan)), ValueError, "w"),
        ({"w": POINTS[:4].astype(str)}, TypeError, "w"),
        ({"tol": 0.0}, ValueError, "tol"),
        ({"max_steps": 0}, ValueError, "max_steps"),
        *((({"metric": x}, NotImplementedError, x)) for x in ("euclidean", "cosine")),
    ]),
    "Result.hvp of an array": (call().hvp, {}, each("w", (POINTS[:4],), TypeError, "PointCloud")),
    "Grid": (mapuot.Grid, {"shape": (3, 2)}, [
        *each("shape", ((), (3, 0)), ValueError, "shape"),
        *each("spacing", ((1, 2, 3), 0), ValueError, "spacing"),
        ({"spacing": 1e200}, ValueError, "finite"),
        ({"scale": -1}, ValueError, "scale"),
        ({"target": 3}, ValueError, "target"),
        ({"offset": np.inf}, ValueError, "offset"),
    ]),
    "solve of a grid": (mapuot.solve, {"M": GRID, "a": np.ones((3, 2)), "reg": 0.1, "reg_m": 1.0}, [
        ({"penalty": "tv"}, NotImplementedError, "penalty"),
        ({"reference": np.ones((6, 6))}, NotImplementedError, "reference"),
        ({"method": "map-uot"}, ValueError, "map-uot"),
        ({"a": np.ones((2, 3))}, ValueError, "a must have shape"),
    ]),
    "pot": (pot.sinkhorn_unbalanced2, {**dict(zip("abM", arrays()[:3], strict=True)), "reg": 0.1, "reg_m": 1.0}, [
        ({"method": "foo"}, ValueError, "Unknown method 'foo'"),
        ({"method": 3}, ValueError, "Unknown method 3"),
        ({"returnCost": "foo"}, ValueError, "Unknown returnCost = 'foo'"),
        ({"reg_type": "l2"}, ValueError, "reg_type must be 'kl' or 'entropy'"),
        *each("reg", (0, HUGE), ValueError, "reg must be a positive"),
        ({"reg_m": [1, 2, 3]}, ValueError, "reg_m must be a scalar or have length 1 or 2"),
        ({"reg_m": -1}, ValueError, "reg_m[0] must be > 0"),
        ({"numItermax": 0}, ValueError, "numItermax must be"),
        ({"numItermaxx": 10}, TypeError, "numItermaxx"),
        ({"tau": 10.0}, TypeError, "tau is an argument of method 'sinkhorn_stabilized' only"),
        ({"tau": -1.0, "method": "sinkhorn_stabilized"}, ValueError, "tau must be"),
        ({"a": np.ones(5)}, ValueError, "a must have shape"),
        ({"M": np.full((13, 17), np.nan)}, ValueError, "M must not hold NaN"),
        ({"c": np.ones((2, 2))}, ValueError, "c must have M's shape"),
        ({"c": np.full((13, 17), -1.0), "method": "sinkhorn"}, ValueError, "c must be finite, >= 0"),
        ({"warmstart": (np.zeros(2), np.zeros(17))}, ValueError, "warmstart must have shapes"),
        *each("warmstart", ((np.zeros(13),), 3), TypeError, "warmstart must be a pair"),
        ({"stopThr": "small"}, TypeError, "stopThr must be a number, got 'small'"),
        ({"stopThr": HUGE}, ValueError, "stopThr must be a number, got 1000"),
        ({"b": -np.ones((17, 2))}, ValueError, "b must be >= 0"),
        ({"b": np.ones((2, 17))}, ValueError, "b must have shape (n,) or (n, k) for M of shape (13, 17)"),
        ({"b": np.ones((17, 0))}, ValueError, "b must have shape (n,) or (n, k)"),
        ({"b": RAGGED}, ValueError, "b cannot be read as an array"),
        *(({"a": np.ones(13), "b": np.ones(17), "reg_m": np.inf, "method": x}, *BALANCED) for x in (None, "sinkhorn")),
    ]),
    "patched": (patched, {**dict(zip("abM", arrays()[:3], strict=True)), "reg": 0.1, "reg_m": 1.0}, [
        ({"reg": 0}, ValueError, "reg must be"),
        ({"reg": "small"}, TypeError, "reg must be"),
        ({"reg_m": 0}, ValueError, "reg_m"),
        ({"a": -np.ones(13)}, ValueError, "a must be >= 0"),
        ({"M": np.ones(17)}, ValueError, "M must be a non-empty matrix"),
        ({"a": np.ones(13), "b": np.ones(17), "reg_m": np.inf}, *BALANCED),
        ({"numItermax": 0}, ValueError, "numItermax must be"),
        ({"args": ("kl", None, None, 1000, 1e-6, False, False, 1)}, TypeError, "positional arguments"),
        ({"args": ("kl",), "reg_type": "kl"}, TypeError, "multiple values"),
        ({"args": ("l2",)}, ValueError, "reg_type must be"),
        ({"function": "sinkhorn_unbalanced", "method": "foo"}, ValueError, "Unknown method 'foo'"),
        ({"function": "sinkhorn_unbalanced2", "returnCost": "foo"}, ValueError, "Unknown returnCost"),
    ]),
    "pot.barycenter_unbalanced": (pot.barycenter_unbalanced, {"A": SQUARE, "M": SQUARE, "reg": 0.1, "reg_m": 1.0}, [
        ({"method": "foo"}, ValueError, "Unknown method 'foo'"),
        ({"reg": -1}, ValueError, "reg must be"),
        ({"reg_m": 0}, ValueError, "reg_m must be"),
        ({"weights": [1.0]}, ValueError, "weights must be"),
        ({"A": SQUARE[:3]}, ValueError, "A must be (n, k) and M (n, n)"),
        ({"A": -SQUARE}, ValueError, "A must be finite and >= 0"),
        ({"A": MASKED}, ValueError, "A must not be masked"),
        ({"A": RAGGED}, ValueError, "A cannot be read as an array"),
        ({"stopThr": None}, TypeError, "stopThr must be a number, got None"),
        *(({x: 3.0}, TypeError, x) for x in ("tau", "foo")),
    ]),
    "log_matmul": (mapuot.log_matmul, {"A": SQUARE, "B": SQUARE}, [
        ({"A": MASKED}, ValueError, "A must not be masked"),
        ({"A": CSR(SQUARE)}, TypeError, "must be a dense array"),
        ({"B": RAGGED}, ValueError, "B cannot be read as an array"),
        ({"threads": 10**9}, ValueError, "threads must be at most 4096"),
        ({"threads": 0}, ValueError, "threads"),
        ({"A": np.ones((2, 3))}, ValueError, "must share k"),
        ({"A": np.ones(4)}, ValueError, "A must have 2 or 3 dimensions"),
        ({"A": np.ones((2, 4, 4)), "B": np.ones((3, 4, 4))}, ValueError, "equally many products"),
        ({"A": SQUARE + 1j}, TypeError, "A must hold real numbers"),
    ]),
    "BatchResult.plan_sum": (
        mapuot.solve_batch(CASE.M, reg=1, reg_m=1).plan_sum, {},
        each("weights", ([1, 2],), ValueError, "weights must have shape"),
    ),
    "da": (fit, {}, [
        *each("reg_e", (-1, HUGE), ValueError, "reg_e must be a positive finite number, got "),
        ({"limit_max": "x"}, TypeError, "limit_max must be a number, got 'x'"),
        *each("limit_max", (np.nan, -1), ValueError, "limit_max must be a positive finite number"),
        ({"tol": "small"}, TypeError, "tol must be a number, got 'small'"),
        ({"distribution_estimation": "even"}, TypeError, "distribution_estimation must be "),
        ({"Xt": None}, ValueError, "Xt must be given"),
        ({"Xs": MASKED}, ValueError, "Xs must not be masked"),
        ({"Xs": ONE}, ValueError, "Xs must be a 2-D array"),
        ({"Xs": np.full((3, 2), np.nan)}, ValueError, "Xs must not hold NaN"),
        ({"Xt": np.ones((3, 5))}, ValueError, "Xs has 2 features, but Xt has 5"),
        ({"ys": np.zeros(3)}, ValueError, "ys must have shape (4,), got (3,)"),
        ({"yt": np.zeros(5)}, ValueError, "yt must have shape (4,), got (5,)"),
        ({"norm": "foo"}, ValueError, "norm must be None"),
        ({"out_of_sample_map": "foo"}, ValueError, "out_of_sample_map must be"),
        ({"method": "foo"}, ValueError, "Unknown method"),
        ({"max_iter": 0}, ValueError, "max_iter must be"),
    ]),
    "da.transform": (
        lambda **x: fit().transform(POINTS, **x), {},
        each("batch_size", (-1, 0, 2.5), ValueError, "batch_size must be an integer >= 1"),
    ),
    "OTModel": (course, {}, [
        ({"days": None}, ValueError, "days must be given"),
        ({"days": [1, 2]}, ValueError, "days must have shape (12,), got (2,)"),
        ({"growth": np.zeros(12)}, ValueError, "growth must be finite and > 0"),
        ({"epsilon": 0}, ValueError, "epsilon must be a positive finite number"),
        ({"lambda1": -1}, ValueError, "lambda1 must be a positive finite number"),
        ({"tau_b": 1.5}, ValueError, "tau_b must be in (0, 1]"),
        ({"growth_iters": 0}, ValueError, "growth_iters must be an integer >= 1"),
        ({"local_pca": -3}, ValueError, "local_pca must be an integer >= 0"),
        ({"scale_cost": "mode"}, ValueError, "scale_cost must be one of"),
        ({"reference": "a"}, ValueError, "reference must be one of"),
    ]),
    "OTModel.coupling": (lambda t0=0, t1=1, **x: course(**x).coupling(t0, t1), {}, [
        ({"t1": 3}, ValueError, "t1 must be one of the days"),
        ({"t0": 1, "t1": 0}, ValueError, "t0 must be before t1"),
        ({"lambda3": 1}, TypeError, "unexpected keyword"),
    ]),
    "OTModel.descendants": (course().descendants, {"t0": 0, "t1": 1},
        each("population", (ONE, np.zeros(5)), ValueError, "population must be 5 weights")),
    "OTModel.ancestors": (course().ancestors, {"t0": 1, "t1": 0},
        each("population", (np.ones(5),), ValueError, "t0 and t1 must be two of the days")),
}  # fmt: skip
ROWS = [(name, row) for name, (_, _, rows) in FUNCTIONS.items() for row in rows]


def assert_refused(function, arguments, kind, text):
    with pytest.raises(kind, match=re.escape(text)) as told:
        function(**arguments)
    assert len(str(told.value)) < 300


@pytest.mark.parametrize(
    ("name", "row"), ROWS, ids=[f"{name}-{next(iter(row[0]), '')}-{k}" for k, (name, row) in enumerate(ROWS)]
)
def test_refused(name, row):
    function, good, _ = FUNCTIONS[name]
    assert_refused(function, good | row[0], *row[1:])


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_iter_max'"):
        call(num_iter_max=3)
    with pytest.raises(TypeError):
        mapuot.solve(CASE.M, CASE.a, CASE.b, *(0.05, 1.0))  # keyword only from there on
    with pytest.raises(TypeError, match="reg_m"):
        mapuot.solve(CASE.M, CASE.a, CASE.b, reg=0.05)


@pytest.mark.parametrize("form", [np.asarray, csr_of])
@pytest.mark.parametrize(
    ("where", "reg_m", "name"), [(np.s_[:, 2], (1.0, np.inf), "b[2]"), (np.s_[1], (np.inf, 1.0), "a[1]")]
)
def test_unreachable_hard_point_is_named(backend, where, reg_m, name, form):
    M = CASE.M.copy()
    M[where] = np.inf
    M = form(M)
    with pytest.raises(mapuot.InfeasibleError, match=re.escape(f"M forbids every pair of {name}")):
        call(M=M, reg_m=reg_m, backend=backend)


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "text"),
    [
        *(
            (name, {x: factor}, kind, f"{x}{text}")
            for name, x, n in (("apply", "X", 5), ("apply_transpose", "Y", 4))
            for factor, kind, text in (
                *((bad, ValueError, "") for bad in (1.0, np.ones(n + 1), np.ones((n + 1, 2)), np.ones((n, 1, 1)))),
                (np.ones((n, 0)), ValueError, " must have a column"),
                (np.ones(n) + 1j, TypeError, ""),
            )
        ),
        ("barycentric_map", {"Y": np.ones(3)}, ValueError, "Y must have shape (5,) or (5, d), got (3,)"),
        ("rows", {"i0": -1, "i1": 1}, ValueError, "rows must satisfy 0 <= i0 <= i1 <= 4, got -1, 1"),
        ("rows", {"i0": 0, "i1": 5}, ValueError, "rows must satisfy 0 <= i0 <= i1 <= 4, got 0, 5"),
        ("rows", {"i0": 0.5, "i1": 2}, ValueError, "rows must satisfy 0 <= i0 <= i1 <= 4, got 0.5, 2"),
        *(("top_k", {"k": k}, ValueError, f"k must be in 1..5, got {k!r}") for k in (0, 6, 2.5, "3", True)),
        *(("sample", {"size": size}, ValueError, "size must be an integer") for size in (0, 2.5, True)),
        ("sparse", {"threshold": np.nan}, ValueError, "threshold must be a number, got nan"),
        ("sparse", {"threshold": 1j}, TypeError, "threshold must be a number, got 1j"),
        ("sparse", {"threshold": np.ones(5)}, TypeError, "threshold must be a number"),
        ("sparse", {}, ValueError, "threshold or keep, one of both, must be given, got None and None"),
        ("sparse", {"threshold": 0.1, "keep": 0.5}, ValueError, "one of both"),
        ("sparse", {"keep": 0}, ValueError, "keep must be a share in (0, 1], got 0"),
        ("sparse", {"keep": 1.5}, ValueError, "keep must be a share in (0, 1], got 1.5"),
        ("sparse", {"keep": np.nan}, ValueError, "keep must be a share"),
        ("sparse", {"keep": "all"}, TypeError, "keep must be a share"),
        ("push", {"labels": [1, 2, 3]}, ValueError, "labels must have shape (4,), got (3,)"),
        ("pull", {"labels": np.array([1, "a", 1, "a", None], object)}, TypeError, "labels must be labels of one kind"),
    ],
)
def test_products_of_a_plan_refuse(name, arguments, kind, text, backend):
    assert_refused(getattr(call(backend=backend), name), arguments, kind, text)


SPOILED = {
    "grad": lambda x: x.requires_grad_(),
    "bfloat16": lambda x: x.bfloat16(),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "complex": lambda x: x + 1j,
}


@pytest.mark.parametrize("name", ["M", "a", "b", "reg_m", "reference", "warm_start"])
@pytest.mark.parametrize("trouble", SPOILED)
def test_tensors_that_cannot_be_read_are_named(name, trouble):
    torch = pytest.importorskip("torch")
    given = {"M": CASE.M, "a": CASE.a, "b": CASE.b, "reg_m": np.ones(2), "reference": CASE.M, "warm_start": CASE.a}
    spoiled = SPOILED[trouble](torch.tensor(given[name]))
    if name == "reg_m" and trouble in ("grad", "bfloat16", "sparse"):
        pytest.skip("numbers one by one, each of which is read")
    if name in ("M", "a", "b") and trouble in ("grad", "bfloat16"):
        pytest.skip("taken as data, and as float32: test_tensors.py")
    value = (spoiled, CASE.b) if name == "warm_start" else spoiled
    with pytest.raises(
        (TypeError, ValueError), match=rf"^{name}\b.*(read as an array|real numbers|a positive number|must be a Result)"
    ):
        call(**{name: value})


@pytest.mark.parametrize("trouble", ["sparse", "meta", "complex"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensors_of_the_loss(trouble, place):
    torch = pytest.importorskip("torch")
    from mapuot.torch import sinkhorn_loss

    tensors = [torch.tensor(x) for x in (CASE.M, CASE.a, CASE.b)]
    tensors[place] = SPOILED[trouble](tensors[place])
    with pytest.raises(TypeError, match=f"^{'Mab'[place]} must be a dense tensor of real numbers in memory"):
        sinkhorn_loss(*tensors, reg=0.1, reg_m=1.0)


def test_jax_takes_real_numbers():
    jax = pytest.importorskip("jax.numpy")
    from mapuot.jax import sinkhorn_loss

    a, b, M = map(jax.asarray, (CASE.a, CASE.b, CASE.M))
    for x, y, z in ((a + 1j, b, M), (a, b + 1j, M), (a, b, M + 1j)):
        with pytest.raises(TypeError, match="must hold real numbers, got dtype complex"):
            sinkhorn_loss(z, x, y, reg=0.1, reg_m=1.0)
    with pytest.raises(ValueError, match="reg must be a positive finite number"):
        sinkhorn_loss(M, a, b, reg=HUGE, reg_m=1.0)


# ---- callbacks ----


def test_a_callback_cannot_change_the_certificate(backend):
    kept = []

    def meddle(stats):
        kept.append((stats, stats.error))
        stats.error, stats.gap, stats.dual, stats.status, stats.n_pass = 0.0, 0.0, 1e9, "converged", 1000

    plain = call(tol=1e-9, precision="float64", backend=backend)
    result = call(tol=1e-9, precision="float64", backend=backend, callback=meddle)
    assert (result.n_passes, result.error_bound) == (plain.n_passes, plain.error_bound)
    assert [stat.error for stat in result.trace] == [error for _, error in kept]
    assert result.trace[-1].status == "converged"


@pytest.mark.parametrize("answer", [np.ones(2), np.array(["a", "b"])], ids=["numbers", "words"])
def test_a_callback_answers_yes_or_no(answer):
    with pytest.raises(TypeError, match="callback must return a truth value, or None to go on, got array"):
        call(callback=lambda stats: answer)
    assert call(callback=lambda stats: np.array([True])).status == "cancelled"


# ---- the environment ----


def told(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_an_unknown_instruction_set_is_told():
    program = "from mapuot.backends.cpu import native; print(native.isa())"
    code, text = told(program, MAPUOT_ISA="garbage")
    assert code == 0
    assert "MAPUOT_ISA must be auto, scalar, avx2 or avx512, as this machine has it, got 'garbage'" in text
    assert text.splitlines()[0] in ISAS
    assert told(program, MAPUOT_ISA="scalar") == (0, "scalar\n")


@pytest.mark.parametrize("text", ["abc", "nan", "-1"])
def test_seconds_of_a_checkpoint_are_a_number(tmp_path, text):
    program = f"import mapuot; mapuot.solve([[1.]], reg=1, reg_m=1, checkpoint={str(tmp_path / 'x.npz')!r})"
    code, found = told(program, MAPUOT_CHECKPOINT_SECONDS=text)
    assert code != 0
    assert f"MAPUOT_CHECKPOINT_SECONDS must be a number of seconds >= 0, got '{text}'" in found
    assert told("import mapuot", MAPUOT_CHECKPOINT_SECONDS=text) == (0, "")


# ---- units that look wrong ----


def scaling_warnings(function):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = function()
    return [str(x.message) for x in told if x.category is mapuot.ScalingWarning], result


def test_finite_costs_that_stand_for_inf_are_told():
    case = clouds(6, 7)
    for large in (1e8, 1e10):
        M = np.where(np.median(case.M) < case.M, large, case.M)
        (text,), _ = scaling_warnings(lambda M=M: mapuot.solve(M, reg=0.1, reg_m=1.0))
        assert f"M reaches {large:.1e}" in text
        assert "use inf" in text
        (text,), _ = scaling_warnings(lambda M=M: mapuot.solve_batch(M, np.ones((3, 6)), reg=0.1, reg_m=1.0))
        assert "use inf" in text
        told, result = scaling_warnings(lambda M=M: mapuot.solve(np.where(M < 1e8, M, np.inf), reg=0.1, reg_m=1.0))
        assert not told
        assert result.n_passes < 20


def test_a_plan_that_moves_almost_nothing_is_told(backend):
    told, result = scaling_warnings(lambda: call(M=100 * CASE.M + 25, reg=1.0, backend=backend))
    assert result.converged
    assert result.mass < 1e-4
    assert len(told) == 1
    assert f"the plan moves almost nothing, {result.mass:.1e} of a mass of" in told[0]
    assert not scaling_warnings(lambda: call(backend=backend))[0]
    few = np.stack([CASE.M, 100 * CASE.M + 25, CASE.M])
    told, _ = scaling_warnings(lambda: mapuot.solve_batch(few, CASE.a, CASE.b, reg=1.0, reg_m=1.0, backend=backend))
    assert "almost nothing in 1 of 3 problems" in told[0]


def test_unscaled_costs_of_an_estimator_are_told():
    X = np.random.default_rng(0).normal(size=(9, 40)) * 10
    told, _ = scaling_warnings(lambda: da.UnbalancedSinkhornTransport().fit(X, Xt=X + 30))
    assert len(told) == 1
    assert not scaling_warnings(lambda: da.UnbalancedSinkhornTransport(reg_m=10, norm="max").fit(X, Xt=X + 30))[0]


# ---- warnings of numpy from inside ----


@pytest.mark.parametrize(
    "changes",
    [
        {"reg_m": 1.7e308},
        {"M": CASE.M * 1e300, "reg": 1e295},
        {"a": CASE.a * 1e150, "b": CASE.b * 1e150},
        {"penalty": "l2", "reg_m": 1e300, "a": CASE.a * 1e100, "b": CASE.b * 1e100},
        {"warm_start": (np.full(4, 1e308), np.full(5, -1e308))},
        {"reg": 1e-3, "method": "sinkhorn", "warm_start": (np.full(4, 700.0), np.full(5, -700.0))},
    ],
    ids=range(6),
)
def test_numpy_says_nothing_from_inside(changes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        result = call(max_passes=60, **changes)
        for name in ("mass", "objective", "dual", "f", "g"):
            getattr(result, name)
        tables = {k: np.tile(v, (3, 1)) if k in ("a", "b") else v for k, v in changes.items() if k != "warm_start"}
        M, a, b = (tables.pop(name, getattr(CASE, name)) for name in "Mab")
        mapuot.solve_batch(M, a, b, max_passes=60, **{"reg": 0.05, "reg_m": 1.0, **tables})


def test_a_callback_hears_its_own_warnings():
    with pytest.warns(RuntimeWarning, match="divide by zero"):
        call(callback=lambda stats: bool(np.ones(1) / np.zeros(1) < 0))
