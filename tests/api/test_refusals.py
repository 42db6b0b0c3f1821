"""Errors name the argument and stay brief; suspicious but valid input gets a warning: tables of both.

Change a text only to make it plainer. The likeliest mistakes of a first hour stand here as a beginner reads them.
"""

import importlib
import itertools
import os
import re
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import ot
import pytest
from conftest import ISAS
from problems import arrays, clouds, csr_of, pairs
from scipy import sparse

import mapuot
from mapuot import da, pot
from mapuot.backends import pick
from mapuot.flow import OTPlanSampler
from mapuot.problem.cut import check_cut, cut_of_flow, cut_of_potentials, find_cut
from mapuot.problem.problem import Problem
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
TWO = mapuot.SeededMask(0.3, 2)
S, _, SA, SB = pairs(4, 5, 0.5)
CSR = sparse.csr_array
OUTSIDE = S.copy()
OUTSIDE.indices[0] = 99
PADDED = [sparse.bsr_array(np.eye(4, 6), blocksize=(2, 2)), sparse.dia_array(np.diag([1.0, 0.0, 1.0, 1.0, 1.0])[:4])]
ON_GPU = type("csr_matrix", (), {"__module__": "cupyx.scipy.sparse._csr"})()
FULL = mapuot.PointCloud(POINTS[:4], POINTS[4:])
GRID = mapuot.Grid((3, 2), 0.2)
THREE = mapuot.multimarginal({(0, 1): SQUARE, (1, 2): SQUARE}, [np.ones(4)] * 3, reg=0.1, reg_m=1.0)
ONE = np.ones(3)
M3 = np.ones((3, 3))
INNER = mapuot.PointCloud(SQUARE, SQUARE, "inner", addends=(1.0, 1.0))
EDGE = {(0, 1): M3}
POTS = {**dict(zip("abM", arrays()[:3], strict=True)), "reg": 0.1, "reg_m": 1.0}
LABELS = {"x": np.ones((3, 2)), "y": np.ones((5, 2)), "labels": (np.zeros(3), np.zeros(5)), "across": 1.0}
CLOUDS = [[POINTS[k : k + 4] for k in range(3)], [POINTS[k : k + 5] for k in range(3)]]
PARTS = sparse.block_diag([np.ones((2, 2)), np.ones((7, 1))], "csr")
APART_B = ("connects a[0], a[1] with b[0], b[1] only",
           "connects b[2] with a[2], a[3], a[4], a[5], a[6] and 2 others of a only")  # fmt: skip
OPEN = np.arange(20.0).reshape(4, 5) % 7 / 7
CUT = np.ones((4, 5), bool)
CUT[:2, 3:] = False  # of masses .1, .1, .2, .3, .3 the last two need .6, of the two rows that have .5
FORBIDDEN = np.where(CUT, OPEN, np.inf)
UNEVEN = np.array([0.1, 0.1, 0.2, 0.3, 0.3])
CUT_CALL = {"M": FORBIDDEN, "reg": 0.1, "reg_m": np.inf}
TOLD = "b[3], b[4] with a[2], a[3] only, where 0.6 must be transported and 0.5 may be"
WAYS = list(itertools.product(("auto", "sinkhorn"), ("cpu", "reference")))
APART = "labels take a finite across with metric"


def call(M=CASE.M, a=CASE.a, b=CASE.b, **changes):
    """Solve a 4 x 5 problem with some arguments exchanged."""
    return mapuot.solve(M, a, b, **{"reg": 0.05, "reg_m": 1.0, **changes})


def changed(x, value):
    x = np.array(x)
    x.flat[x.size // 2] = value
    return x


def fit(Xs=POINTS[:4], ys=(0, 0, 1, 1), Xt=POINTS[4:8], yt=(0, 0, 1, 1), **parameters):
    return da.UnbalancedSinkhornTransport(**parameters).fit(Xs, ys, Xt, yt)


def patched(function="sinkhorn_knopp_unbalanced", args=(), **named):
    """Call POT's function where mapuot stands in for it."""
    five = [named.pop(x) for x in ("a", "b", "M", "reg", "reg_m")]
    with pot.patched():
        return getattr(ot.unbalanced, function)(*five, *args, **named)


def course(days=(0,) * 5 + (1,) * 7, **parameters):
    return OTModel(np.arange(12.0)[:, None], days=days, **parameters)


def solved_cloud(x=POINTS[:4], y=POINTS[4:], metric="sqeuclidean", **options):
    return mapuot.solve(mapuot.PointCloud(x, y, metric), reg=0.1, reg_m=1.0, **options)


def inner(addends=(1.0, 1.0), **options):
    return mapuot.solve(mapuot.PointCloud(SQUARE, SQUARE, "inner", addends=addends, **options), reg=0.5, reg_m=1.0)


def as_csr(torch):
    return torch.ones(4, 5).to_sparse_csr()


STRANGE = (lambda t: t.ones(4).to_sparse_coo(), lambda t: t.ones(4).to("meta"), lambda t: t.ones(4) + 1j)


def torch_loss(**named):
    """Return torch's loss of a small case; an argument may be a function that makes it from the module torch."""
    torch = pytest.importorskip("torch")
    given = {x: torch.tensor(getattr(CASE, x)) for x in "Mab"} | {"reg": 0.1, "reg_m": 1.0} | named
    return mapuot.torch.sinkhorn_loss(**{k: x(torch) if callable(x) else x for k, x in given.items()})


def samples_loss(given=None, **named):
    """Call GeomLoss's class with the arguments that ``given`` makes of (a, x, b, y)."""
    torch = pytest.importorskip("torch")
    loss = mapuot.torch.SamplesLoss(**named)
    tensors = torch.ones(4) / 4, torch.ones(4, 2), torch.ones(5) / 5, torch.ones(5, 2)
    if given:
        return loss(*given(*tensors))
    return loss


def jax_loss(**named):
    """Return the loss of arrays of JAX; a number among the arguments multiplies its array."""
    jax = pytest.importorskip("jax.numpy")
    given = {x: named.pop(x, 1) * jax.asarray(getattr(CASE, x)) for x in "Mab"}
    return importlib.import_module("mapuot.jax").sinkhorn_loss(**given, **{"reg": 0.1, "reg_m": 1.0} | named)


def picture(kind, *given, **named):
    pytest.importorskip("matplotlib").use("agg")
    return getattr(mapuot.plot, kind)(call(), *given, **named)


V, T, N, I = ValueError, TypeError, NotImplementedError, mapuot.InfeasibleError  # noqa: E741
# {function: (callable, its arguments, {error: rows of (name, text, value, ...)})}: the function refuses the value for
# the argument of this name; a row of several arguments begins with them. Before " " or "[" the name is repeated.
FUNCTIONS = {
    "solve": (call, {}, {
        V: [("M", " must be a non-empty matrix (m, n), got shape (4,): the order is M, a, b (in mapuot.pot, as in POT: "
             "a, b, M)", np.ones(4)),
            ("M", " must be a non-empty matrix (m, n), got", np.ones((4, 5, 1)), np.ones((0, 5)), [], 3.0),
            ("a", " must have shape (4,), got ()", 1.0, np.array(1.0)),
            ("a", " must have shape (4,), got (5,): one mass for each row of M", CASE.b),
            ("a", " must have shape (4,), got (5, 2): a has masses; costs between points x and y are made by "
             "mapuot.PointCloud(x, y)", POINTS[4:]),
            ("b", " must have shape (5,), got ", np.ones(4), np.ones((5, 2))),
            ("M", " cannot be read as an array: ", RAGGED), ("a", " cannot be read as an array: ", RAGGED),
            ("M", " must not hold NaN or -inf, got 1 such entries, first [2, 0] (+inf forbids a pair)",
             changed(CASE.M, np.nan), changed(CASE.M, -np.inf)),
            ("M", " must not be masked", np.ma.masked_greater(CASE.M, np.median(CASE.M))),
            ("a", " must be finite, got NaN or inf at index 2", changed(CASE.a, np.nan), changed(CASE.a, np.inf)),
            ("a", " must be >= 0, got -0.5 at index 2", changed(CASE.a, -0.5)),
            ("a", " must have positive, finite mass, got 0.0", np.zeros(4)),
            ("a", " must have positive, finite mass, got inf", np.full(4, 1e308)),
            ("a", " must not be masked", np.ma.array(CASE.a, mask=[1, 0, 0, 0])),
            ("b", " must be finite", changed(CASE.b, np.nan)), ("b", " must ", changed(CASE.b, -1e-9), np.zeros(5)),
            ({"a": HEAVY[:4], "b": HEAVY}, "a and b must have masses whose product"),
            ("reg", " must be a positive finite number, got ", -1, HUGE, 0.0, np.inf, np.nan),
            ("reg", " must be a positive finite number, got <int>", MANY),
            ("reg", " must not be so small that M / reg overflows, got 5e-324", 5e-324),
            ("M", "reg must not be so small", 1.7e308 * np.sign(CASE.M - np.median(CASE.M))),
            ("reg_m", "[0] must be > 0 (inf = balanced), got ", 0.0, (np.nan, 1.0)),
            ("reg_m", "[1] must be > 0", (1.0, -2.0), (1.0, changed(np.ones(5), -1))),
            ("reg_m", " must be a scalar or have length 1 or 2", (1.0, 2.0, 3.0)),
            ("reg_m", "[0] must have shape (4,), got (5,)", (np.ones(5), 1.0)),
            ("reg_m", "[0] must be a positive number, inf, or one per point, got 1000", HUGE),
            ("reg_m", "[0] cannot be read as an array", ([[1], [2, 3]], 1.0)),
            ("reg_m", "[0] must not be masked", np.ma.array([1.0, 2.0], mask=[1, 0])),
            *(({"penalty": "range", "reg_m": x}, f"reg_m[0] must be a finite slack >= 0 for penalty 'range' (a large "
               f"one, such as 1e9, for points that are free), got {wrong}")
              for x, wrong in ((-0.1, -0.1), (np.inf, np.inf), ((np.array([0.0, np.inf, 1.0, 2.0]), 1.0), np.inf))),
            ("method", "Unknown method 'newton': must be one of ['auto', 'map-uot', 'sinkhorn', "
             "'translation_invariant']", "newton"),
            ("method", "Unknown method ", None, ["auto"], WORDS),
            ("penalty", " must be one of ['balanced', 'kl', 'l2', 'range', 'tv'] or a pair", "kullback", None,
             ("kl", "tv", "l2"), CASE.M, ("kl", CASE.M)),
            ("backend", " must be one of ('auto', 'cpu', 'cuda', 'reference'), got ", "gpu", WORDS),
            ("precision", " must be one of ['auto', 'float64', 'mixed']", "float16", WORDS),
            ("reference", " must be 'product', 'uniform' or a matrix, got 'ones'", "ones"),
            ("reference", " must have M's shape (4, 5), got (5, 4)", np.ones((5, 4))),
            ("reference", " must be finite, >= 0 and not all zero", np.zeros((4, 5)), changed(CASE.M, -1.0),
             changed(CASE.M, np.nan)),
            ("reference", "and 1 entries that are not finite", changed(CASE.M, np.inf)),
            ("reference", " is too large: its sum is beyond float64", np.full((4, 5), 1e308)),
            ("tol", " must be a positive finite number, got ", 0.0, np.nan, -HUGE),
            ("tol_gap", " must be a positive", -1.0),
            ("max_passes", " must be an integer >= 1, got <int>", -MANY),
            ("max_passes", " must be an integer >= 1, got ", 0, 10.0, True),
            ("threads", " must be an integer >= 1, got ", 0, "two"),
            ("threads", " must be at most 4096, got 1000", 10**12, HUGE),
            ("warm_start", " must have shapes (4,), (5,), got (5,), (4,)", (CASE.b, CASE.a)),
            ("warm_start", " must not hold NaN", (CASE.a, changed(CASE.b, np.nan)))],
        T: [("M", " must hold real numbers, got dtype <U32: .astype(float) reads them from texts", CASE.M.astype(str)),
            ("M", " must hold real numbers, got dtype object: .astype(float) makes them of objects",
             CASE.M.astype(object)),
            ("M", " must hold real numbers, got dtype ", CASE.M + 1j, CASE.M > 0.5, np.zeros((4, 5), "M8[s]")),
            ("a", " must hold real numbers, got dtype ", CASE.a + 1j, {}),
            ("b", " must hold real numbers, got dtype object", CASE.b.astype(object)),
            ("reg", " must be a positive finite number, got ", "0.1", np.ma.masked, None, 1j, [0.1, 0.2],
             np.complex128(1)),
            ("reg_m", "[0] must be a positive number, inf, or one per point, got ", ("1", 1.0), (None, 1.0),
             np.array([1 + 1j, 1])),
            ("reg_m", " must be a number, inf (balanced), or a pair, got the text ", "inf", b"ab", bytearray(b"ab")),
            ("reg_m", " must be a number, inf (balanced), or a pair, got None", None),
            ("reference", " must hold real numbers, got dtype complex128", CASE.M + 1j),
            ("reference", " must be a dense array, got coo_array", sparse.coo_array(CASE.M)),
            ("tol", " must be a positive finite number, got 'tight'", "tight"),
            ("warm_start", " must be a Result or a pair (log_u, log_v)", 3, (CASE.a,), (CASE.a + 1j, CASE.b)),
            *(({"M": ON_GPU, "backend": x}, f"M must not lie on a GPU for backend '{x}'")
              for x in ("cpu", "reference")),
            ("callback", " must return a truth value, or None to go on, got array", lambda stats: np.ones(2),
             lambda stats: np.array(["a", "b"])),
            ("callback", " must be callable, got 3", 3), ("checkpoint", " must be a path, got 5", 5),
            ("comm", " must be an intracommunicator of mpi4py, got str", "world"), ("num_iter_max", "num_iter_max", 3)],
        I: [("M", " forbids every pair", np.full((4, 5), np.inf)),
            ({"reg_m": np.inf, "a": 2 * CASE.a},
             "a and b must have equal masses if both sides are balanced, got 2.0 and 1.0")],
        FileNotFoundError: [("M", "costs.npy does not exist", "costs.npy")]}),
    "solve of pairs": (mapuot.solve, {"M": S, "a": SA, "b": SB, "reg": 0.1, "reg_m": 1.0}, {
        T: [("M", " must hold real numbers", S.astype(complex)),
            ("M", " must hold real numbers, got dtype bool", S > 0.5)],
        V: [("M", f" must not hold NaN or -inf, got {S.nnz} such entries, first [0,", S * np.nan),
            ("M", " must be a non-empty matrix", CSR((0, 5))),
            ("M", " is no valid sparse matrix", OUTSIDE), ("a", " must have shape (4,)", SA[:3]),
            *(("M", f" must not be in {x.format.upper()} format", x) for x in PADDED),
            ("out", " must be None", np.ones((4, 5))), ("reference", " must have M's shape", S[:3]),
            ("reference", " must be finite, >= 0", -S)],
        I: [("M", " forbids every", CSR((4, 5)))],
        N: [("method", "takes no sparse M", "map-uot"), ("mask", " is for costs of all pairs", MASK)]}),
    "solve with a mask": (call, {"mask": MASK}, {
        T: [("mask", " must be a mapuot.SeededMask", 0.1, np.ones((4, 5), bool))],
        V: [("mask", " must keep pairs", mapuot.SeededMask(1e-9, 0))]}),
    "SeededMask": (mapuot.SeededMask, {"keep": 0.5, "seed": 0}, {
        V: [("keep", " must be in 2^-64 ... 1", 0.0, 1.1, -1.0, np.nan, np.inf, 5e-324),
            ("keep", " must be a number, got", HUGE), ("seed", " must be in", -1, 2 ** 64)],
        T: [("keep", " must be a number", "much", "0.5", 1j), ("seed", " must be an integer", 1.5)]}),
    "solve_batch": (mapuot.solve_batch, {"M": CASE.M, "reg": 0.1, "reg_m": 1.0}, {
        V: [("A", " cannot be read as", RAGGED),
            ({"A": np.outer(HEAVY[1::-1], np.ones(4)), "B": HEAVY}, "A and B must have masses"),
            ({"A": np.ones((3, 4)), "B": np.ones((2, 5))}, "must hold equally many problems"),
            ("A", " must have shape (5, 4)", np.ones((5, 3))),
            ({"A": np.outer([1, 0], np.ones(4)), "penalty": "tv", "reference": "uniform"}, "A must be of positive"),
            ("B", " must be >= 0, problem 0 is not", -np.ones((2, 5))),
            ("B", " must be finite", np.full((2, 5), np.nan)), ("M", " must have shape", CASE.M[0]),
            ("M", " must not hold NaN", CASE.M * np.nan),
            ("M", " must not hold NaN or -inf, got 1 such entries, first [1, 2, 0]",
             np.stack([CASE.M, changed(CASE.M, np.nan), CASE.M])),
            ("reg", " must be", 0), ("reg_m", "[0] must be", -1.0),
            ("method", " must be one of", [], WORDS, "map-uot"), ("precision", " must be one of", WORDS, "bfloat16"),
            ("warm_start", " must have shapes", (CASE.a, CASE.a))],
        T: [("A", " must be a dense", CSR(SQUARE)), ("warm_start", " must hold real numbers", ("a", "b")),
            ("warm_start", " must be", 3), ("mask", " must be a mapuot.SeededMask", 0.1)],
        I: [({"reg_m": np.inf, "A": np.ones((2, 4)), "B": np.ones((2, 5))}, "equal masses"),
            ({"reg_m": (1.0, np.inf), "A": np.outer([1, 0], np.ones(4))}, "B[1] must be transported")]}),
    "solve_batch of pairs": (mapuot.solve_batch, {"M": [S] * 2, "A": SA, "B": SB, "reg": 0.1, "reg_m": 1.0}, {
        V: [("M", "[0] must not be in BSR format", PADDED[:1]),
            ("M", "[1] must store the same pairs", [S, S[:3]]),
            ("M", f" must not hold NaN or -inf, got {S.nnz} such entries, first [1, 0,", [S, S * np.nan]),
            ({"M": [S] * 3, "A": [SA] * 2}, "must hold equally many problems")],
        T: [("M", "[1] must be a sparse matrix", [S, S.toarray()]), ("M", "[1] must hold real numbers", [S, S > 0.5])],
        N: [("mask", " is for costs of all pairs", MASK)]}),
    "path": (lambda **x: list(mapuot.path(CASE.M, CASE.a, CASE.b, **x)), {"regs": [1, 0.5], "reg_ms": 1.0}, {
        V: [
            ("reg_ms", " must be a list where two regs have two vectors or pairs", ((0.1, 10.0),) * 2, np.ones((2,
             2)), ((1.0, 2.0), (3.0, [4.0, 5.0])), (np.ones(4), np.ones(5))),
            ("reg_ms", " must have the length of regs, 2, got 4", np.ones(4), [1, 2, 3, 4])],
        T: [("regs", " must be a sequence of numbers, got '12'", "12"),
            ("regs", " must be a sequence of numbers", np.array(1.0))]}),
    "names of files": (lambda door: door("costs.npy"), {}, {
        T: [("door", "must be an array, got 'costs.npy': numpy.load",
             partial(door, reg=0.1, reg_m=1.0)) for door in (mapuot.solve_batch, mapuot.sinkhorn_divergence,
                                                             mapuot.pairwise)]
        + [("door", "must be an array, got 'costs.npy': numpy.load",
            lambda M: mapuot.barycenter(M, np.ones((2, 4)), reg=0.1, reg_m=1.0))]}),
    "reg_m of sides": (lambda door: door(reg=0.1), {}, {
        V: [("door", "reg_m must be one number for a divergence, the same on both sides, got ([1.0, 2.0], 1.0)",
             partial(mapuot.sinkhorn_divergence, SQUARE, reg_m=([1.0, 2.0], 1.0))),
            ("door", "reg_m must be one number, or one for each pair of clouds, (3, 3), got ([1.0, 2.0], 1.0)",
             partial(mapuot.pairwise, CLOUDS[0], reg_m=([1.0, 2.0], 1.0)))]}),
    "labels of a grid": (lambda door: door(), {}, {
        V: [("door", "row_labels must have shape (6,), got (3, 2): row_labels.ravel() has one for each node",
             lambda: mapuot.solve(GRID, reg=0.1, reg_m=1.0).transitions(np.ones((3, 2)), np.ones(6)))]}),
    "sinkhorn_divergence": (mapuot.sinkhorn_divergence, {"M": CASE.M, "reg": 0.1, "reg_m": 1.0}, {
        V: [({}, "M_a and M_b, costs within each side, must be given where M is not square"),
            ("M_a", " and M_b must be given together", SQUARE),
            ({"M_a": CASE.M, "M_b": CASE.M}, "M_a must be square, got shape (4, 5)"),
            ({"M": SQUARE, "a": np.ones(3)}, "a must have shape (1, 4) or (4,), got (3,)"),
            ({"M": SQUARE, "b": np.ones(3)}, "b must have shape (1, 4) or (4,), got (3,)"),
            ({"M": SQUARE, "M_a": SQUARE * np.nan, "M_b": SQUARE}, "M_a must not hold NaN"),
            ({"M": np.triu(SQUARE + 1), "b": CASE.a}, "not symmetric"),
            ({"M": mapuot.Grid((2, 2), offset=1.0), "b": CASE.a}, "M_a and M_b"),
            ("M", "M_a and M_b", mapuot.Grid(4, target=5)), ("reg_m", " must be one number", (1.0, 2.0))],
        T: [("reference", " is not an option", "uniform"), ("mask", " is not an option of the divergence", MASK)]}),
    "multimarginal": (mapuot.multimarginal, {"costs": EDGE, "masses": [ONE] * 2, "reg": 1, "reg_m": 1}, {
        V: [({"costs": {(k, (k + 1) % 4): M3 for k in range(4)}, "masses": [ONE] * 4}, "the cycle "),
            ({"costs": {(0, 1): M3, (1, 2): M3, (2, 0): M3, (2, 3): M3}, "masses": [ONE] * 4}, "cycle"),
            ("masses", "connect all marginals", [ONE] * 3),
            ("costs", " must be the path of an .npy file, got '/'", "/"),
            ("costs", " must hold one matrix", EDGE | {(1, 0): M3}, {(0, 0): M3}),
            ("costs", " must have pairs", {(0, 5): M3}, {"01": M3}),
            ({"costs": EDGE | {(1, 2): np.ones((4, 3))}, "masses": [ONE] * 3}, "points of marginal 1"),
            ("costs", "[0, 1] must be a non-empty matrix", {(0, 1): ONE}),
            ("costs", "[0, 1] must not hold", {(0, 1): M3 * np.nan}, {(0, 1): CSR(M3 * np.nan)}),
            ("costs", "non-empty matrix, got shape (3, 0", {(0, 1): CSR((3, 0))}),
            ("costs", "non-empty matrix, got shape (0, 3", {(0, 1): CSR((0, 3))}),
            ("costs", "got shape (0, ", {(0, 1): mapuot.PointCloud(ONE[:, None], ONE[:, None])[:0]}),
            ("costs", "an axis for each of 2 masses", np.ones((3, 3, 3))),
            ({"costs": lambda i0, i1: M3[None], "masses": [ONE, None, ONE]}, "masses must be given"),
            ({"costs": lambda i0, i1: M3, "masses": [ONE] * 3}, "costs must give shape ("),
            ("masses", "[1] must have shape", [ONE, np.ones(4)]), ("masses", "[1] must be >= 0", [ONE, -ONE]),
            ("masses", " must not all be None", [None, None]), ("masses", "at least two", [ONE]),
            ("reg", " must be", 0), ("reg_m", "[0] must be > 0", -1),
            ("reg_m", " must be a number or one for each of 2", [1, 2, 3]),
            ("backend", " must be 'auto', 'cpu' or 'cuda' for many marginals", "reference"),
            ("backend", " must be one of", np.ones(2)), ("threads", "threads", 0)],
        T: [("costs", "[0, 1] must hold real", {(0, 1): M3 * 1j}, {(0, 1): CSR(M3 * 1j)}),
            ({"costs": EDGE | {(1, 2): CSR(M3),
            (0, 2): M3}, "masses": [ONE] * 3}, "costs[1, 2] must be dense in a triangle"),
            ("masses", " must be a list", 3.0), ("reg_m", "[1] must be a positive number or inf", [1, [1, 2, 3]])],
        I: [({"masses": [ONE, 2 * ONE], "reg_m": np.inf}, "masses must be equal"),
            ("costs", "forbid every point", {(0, 1): M3 * np.inf}, {(0, 1): CSR((3, 3))})]}),
    "MultiResult.pair": (THREE.pair, {"i": 0, "j": 1}, {V: [("j", "must be", 3, 0)]}),
    "MultiResult.marginal": (THREE.marginal, {"k": 0}, {V: [("k", "must be", -1)]}),
    "MultiResult.apply": (THREE.apply, {"i": 0, "j": 1}, {V: [("X", " must have shape", ONE)]}),
    "barycenter": (mapuot.barycenter, {"M": SQUARE, "A": SQUARE, "reg": 0.1}, {
        V: [("A", " must not be masked", MASKED), ("A", " must be (p, n) and M (n, n)", np.ones((4, 3))),
            ("A", " must be a non-empty (p, n) array", np.ones(4)),
            ("A", " must hold histograms of the same length, each on the n points of M", [np.ones(4), np.ones(3)]),
            ({"M": GRID, "A": np.ones((3, 2, 5))}, "A must be images (p, 3, 2) on the Grid, their number first"),
            ({"M": GRID, "A": np.ones((3, 2, 5))}, "got shape (3, 2, 5): pass np.moveaxis(A, -1, 0)"),
            ({"M": GRID, "A": np.ones((3, 2))}, "got shape (3, 2): pass A[None]"),
            ({"M": S, "reg_m": 1.0}, "A must be (p, n) and M (n, n)"),
            ({"M": np.triu(SQUARE + 1), "debiased": True}, "M must be symmetric"),
            ({"M": S[:, :4], "debiased": True}, "M must be symmetric"), ("M", " must store a pair", CSR((4, 4))),
            ("M", " must be finite", S[:, :4] * np.inf), ("weights", " must be", [1.0, -1.0, 1.0, 1.0]),
            ("tol_change", " must be", 0), ("reg", " must be a positive finite number", HUGE),
            ("reg_m", " must be > 0, or inf, got 1000", HUGE)],
        T: [("A", " must hold real numbers, got dtype complex", SQUARE + 1j),
            ("A", " must hold real numbers", SQUARE.astype(str)), ("weights", " must hold real numbers", "some")]}),
    "certify": (mapuot.certify, {"result": mapuot.solve(S, reg=0.1, reg_m=1.0), "M": S.toarray() + 1}, {
        T: [("result", " must be that of a solve", mapuot.solve(S.toarray(), reg=0.1, reg_m=1.0)),
            ("M", " must be a dense array", S)],
        V: [("M", " must have the shape (4, 5)", S.toarray()[:3]), ("tol", " must be", 0),
            ("result", "reference must be 'product' or 'uniform'", mapuot.solve(S, reg=0.1, reg_m=1.0,
             reference=np.ones((4, 5))))]}),
    "knn_cost": (mapuot.knn_cost, {"x": POINTS, "y": POINTS, "k": 3}, {
        V: [("k", " must be at most 9", 10), ("k", " must be an integer >= 1", 0),
            ("neighbours", "k, neighbours or radius must be given, one of the three", np.zeros((9, 1), int)),
            ({"k": None, "neighbours": np.zeros((3, 1), int)}, "neighbours must be integers (9, k)"),
            ({"k": None, "neighbours": np.full((9, 1), 9)}, "neighbours must be points of y, in 0..8, or -1"),
            ({"k": None, "neighbours": S}, "neighbours must have shape (9, 9)"),
            ({"k": None, "radius": -1.0}, "radius must be"),
            ({"k": None, "radius": 1.0, "metric": "wfr"}, "radius must be for a metric that is a power"),
            ("metric", " must be one of", "hamming"), ("y", "x and y must have equally many columns", POINTS[:, :1])]}),
    "PointCloud": (mapuot.PointCloud, {"x": POINTS[:5], "y": POINTS[5:]}, {
        V: [("x", " must be a non-empty matrix of points", ONE), ("x", "equally many columns", np.ones((3, 1))),
            ("x", " must be finite", np.array([[np.nan, 1.0]])),
            ("y", " must be finite, got NaN or inf in point 1", np.array([[1.0, 1.0], [np.inf, 1.0]])),
            ({"y": np.zeros((3, 2)), "metric": "cosine"}, "y must hold no zero vector"),
            ("metric", " must be one of", "manhattan"), ("scale", " must be", 0.0),
            ("weights", " must be 2 finite numbers", [1.0], [1.0, -1.0]),
            ({"x": POINTS * 1e300, "metric": "cityblock", "weights": [1e300, 1.0]}, "weights must leave x"),
            ("truncate", " must be", "often", -1.0, np.nan), ("form", " must be", 0, "never")],
        T: [("form", " must be", [1])]}),
    "PointCloud of rows": (lambda rows: FULL[rows], {}, {
        T: [("rows", "must be a slice, (k,) integers or (4,) booleans, got ", 3, np.int64(3), 2.5, None, ...,
             (slice(0, 2), 1), [0.5], "x", np.ones(3, bool))],
        IndexError: [("rows", " of a PointCloud must be in [-4, 4), got [", [4], [0, -5])]}),
    "solve of points": (solved_cloud, {}, {
        V: [({"x": POINTS * 1e200, "y": -POINTS * 1e200}, "finite"), ("method", "map-uot", "map-uot")],
        I: [({"y": POINTS + 10, "metric": "wfr"}, "M forbids every pair")]}),
    "solve of boxes": (call, {"M": mapuot.PointCloud(POINTS[:4], POINTS[4:], truncate=5)}, {
        N: [("reference", "truncate is not for a reference", "uniform"),
            ("M", "truncate is not for metric 'wfr'", mapuot.PointCloud(POINTS[:4], POINTS[4:], "wfr", truncate=5)),
            ("checkpoint", "truncate is not for checkpoint", "never.npz")]}),
    "Result.gradient": (lambda **x: mapuot.solve(**x).gradient(), {"M": FULL, "reg": 0.1, "reg_m": 1.0}, {
        V: [("penalty", "reg_m", "tv"), ("reference", "reference must be 'product'", "uniform"),
            ({"M": np.asarray(FULL), "penalty": "l2"}, "reg_m[0] must be one number")]}),
    "Result.potential": (solved_cloud(metric="cosine").potential, {"points": POINTS, "side": "cols"}, {
        V: [("points", " must have 2 columns, as x and y have, got 3", np.ones((4, 3))),
            ("points", " must hold no zero vector", np.zeros((1, 2)))]}),
    "Result.potential of a mask": (solved_cloud(mask=MASK).potential, {}, {
        V: [("points", "mask: a masked problem has no potential away from its points", POINTS)]}),
    "Result.hvp": (lambda metric="sqeuclidean", **x: solved_cloud(metric=metric).hvp(**x), {"w": POINTS[:4]}, {
        V: [("w", "w", POINTS[:3], np.full((4, 2), np.nan)), ("tol", "tol", 0.0), ("max_steps", "max_steps", 0)],
        T: [("w", "w", POINTS[:4].astype(str))],
        N: [({"metric": x}, x) for x in ("euclidean", "cosine")]}),
    "Result.hvp of an array": (call().hvp, {}, {T: [("w", "PointCloud", POINTS[:4])]}),
    "Grid": (mapuot.Grid, {"shape": (3, 2)}, {
        V: [("shape", "shape", (), (3, 0)), ("spacing", "spacing", (1, 2, 3), 0), ("spacing", "finite", 1e200),
            ("scale", "scale", -1), ("target", "target", 3), ("offset", "offset", np.inf)]}),
    "solve of a grid": (mapuot.solve, {"M": GRID, "a": np.ones((3, 2)), "reg": 0.1, "reg_m": 1.0}, {
        N: [("penalty", "penalty", "tv"), ("reference", "reference", np.ones((6, 6)))],
        V: [("method", "map-uot", "map-uot"), ("a", " must have shape", np.ones((2, 3)))]}),
    "pot": (pot.sinkhorn_unbalanced2, POTS, {
        V: [("method", "Unknown method 'foo'", "foo"), ("method", "Unknown method 3", 3),
            ("returnCost", "Unknown returnCost = 'foo'", "foo"), ("reg_type", " must be 'kl' or 'entropy'", "l2"),
            ("reg", " must be a positive", 0, HUGE), ("reg_m", " must be a scalar or have length 1 or 2", [1, 2, 3]),
            ("reg_m", "[0] must be > 0", -1), ("numItermax", " must be", 0),
            ({"tau": -1.0, "method": "sinkhorn_stabilized"}, "tau must be"), ("a", " must have shape", np.ones(5)),
            ("M", " must not hold NaN", np.full((13, 17), np.nan)), ("c", " must have M's shape", np.ones((2, 2))),
            ({"c": np.full((13, 17), -1.0), "method": "sinkhorn"}, "c must be finite, >= 0"),
            ("warmstart", " must have shapes", (np.zeros(2), np.zeros(17))),
            ("stopThr", " must be a number, got 1000", HUGE), ("b", " must be >= 0", -np.ones((17, 2))),
            ("b", " must have shape (n,) or (n, k) for M of shape (13, 17)", np.ones((2, 17))),
            ("b", " must have shape (n,) or (n, k)", np.ones((17, 0))), ("b", " cannot be read as an array", RAGGED)],
        T: [("numItermaxx", "numItermaxx", 10), ("tau", " is an argument of method 'sinkhorn_stabilized' only", 10.0),
            ("warmstart", " must be a pair", (np.zeros(13),), 3),
            ("stopThr", " must be a number, got 'small'", "small")]}),
    "patched": (patched, POTS, {
        V: [("reg", " must be", 0), ("reg_m", "reg_m", 0), ("a", " must be >= 0", -np.ones(13)),
            ("M", " must be a non-empty matrix", np.ones(17)), ("numItermax", " must be", 0),
            ("args", "reg_type must be", ("l2",)),
            ({"function": "sinkhorn_unbalanced", "method": "foo"}, "Unknown method 'foo'"),
            ({"function": "sinkhorn_unbalanced2", "returnCost": "foo"}, "Unknown returnCost")],
        T: [("reg", " must be", "small"),
            ("args", "positional arguments", ("kl", None, None, 1000, 1e-6, False, False, 1)),
            ({"args": ("kl",), "reg_type": "kl"}, "multiple values")]}),
    "pot.barycenter_unbalanced": (pot.barycenter_unbalanced, {"A": SQUARE, "M": SQUARE, "reg": 0.1, "reg_m": 1.0}, {
        V: [("method", "Unknown method 'foo'", "foo"), ("reg", " must be", -1), ("reg_m", " must be", 0),
            ("weights", " must be", [1.0]), ("A", " must be (n, k) and M (n, n)", SQUARE[:3]),
            ("A", " must be finite and >= 0", -SQUARE), ("A", " must not be masked", MASKED),
            ("A", " cannot be read as an array", RAGGED)],
        T: [("stopThr", " must be a number, got None", None), ("tau", "tau", 3.0), ("foo", "foo", 3.0)]}),
    "log_matmul": (mapuot.log_matmul, {"A": SQUARE, "B": SQUARE}, {
        V: [("A", " must not be masked", MASKED), ("B", " cannot be read as an array", RAGGED),
            ("threads", " must be at most 4096", 10 ** 9), ("threads", "threads", 0),
            ("A", "must share k", np.ones((2, 3))), ("A", " must have 2 or 3 dimensions", np.ones(4)),
            ({"A": np.ones((2, 4, 4)), "B": np.ones((3, 4, 4))}, "equally many products")],
        T: [("A", "must be a dense array", CSR(SQUARE)), ("A", " must hold real numbers", SQUARE + 1j)]}),
    "BatchResult.plan_sum": (mapuot.solve_batch(CASE.M, reg=1, reg_m=1).plan_sum, {}, {
        V: [("weights", " must have shape", [1, 2])]}),
    "da": (fit, {}, {
        V: [("reg_e", " must be a positive finite number, got ", -1, HUGE),
            ("limit_max", " must be > 0, or inf", np.nan, -1), ("Xt", " must be given", None),
            ("Xs", " must not be masked", MASKED), ("Xs", " must be a 2-D array", ONE),
            ("Xs", " must not hold NaN", np.full((3, 2), np.nan)),
            ("Xt", "Xs has 2 features, but Xt has 5", np.ones((3, 5))),
            ("ys", " must have shape (4,), got (3,)", np.zeros(3)),
            ("yt", " must have shape (4,), got (5,)", np.zeros(5)), ("norm", " must be None", "foo"),
            ("out_of_sample_map", " must be", "foo"), ("method", "Unknown method", "foo"), ("max_iter", " must be", 0),
            ({"metric": "chebyshev", "out_of_sample_map": "entropic"}, "ferradans")],
        T: [("limit_max", " must be > 0, or inf, got 'x'", "x"), ("tol", " must be a number, got 'small'", "small"),
            ("distribution_estimation", " must be ", "even")]}),
    "da.transform": (lambda **x: fit().transform(POINTS, **x), {}, {
        V: [("batch_size", " must be an integer >= 1", -1, 0, 2.5)]}),
    "OTModel": (course, {}, {
        V: [("days", " must be given", None), ("days", " must have shape (12,), got (2,)", [1, 2]),
            ("growth", " must be finite and >= 0", -np.ones(12)), ("growth", "pair", (ONE,)),
            ("growth", "gene 9", (["gene 9"], np.ones(12))),
            ("growth", "shape", (ONE, np.ones(12))), ("epsilon", " must be a positive finite number", 0),
            ("lambda1", " must be > 0, or inf", -1), ("tau_b", " must be in (0, 1]", 1.5),
            ("growth_iters", " must be an integer >= 1", 0), ("local_pca", " must be an integer >= 0", -3),
            ("scale_cost", " must be one of", "mode"), ("reference", " must be one of", "a")]}),
    "OTModel.coupling": (lambda t0=0, t1=1, **x: course(**x).coupling(t0, t1), {}, {
        V: [("t1", " must be one of the days", 3), ({"t0": 1, "t1": 0}, "t0 must be before t1")],
        T: [("lambda3", "OTModel() has no lambda3: did you mean lambda", 1)]}),
    "OTModel.descendants": (course().descendants, {"t0": 0, "t1": 1}, {
        V: [("population", " must be 5 weights", ONE, np.zeros(5))]}),
    "OTModel.ancestors": (course().ancestors, {"t0": 1, "t1": 0}, {
        V: [("population", "t1, the later day, comes first: ancestors(population, 1, 0)", np.ones(5))]}),
    "labels of PointCloud": (mapuot.PointCloud, LABELS, {
        V: [("labels", " must be a pair", np.zeros(3)), ("across", " must be >= 0", -1.0),
            ("labels", "[1] must have shape (5,), got (4,)", (np.zeros(3), np.zeros(4)))],
        T: [("across", " must be a number", None)],
        N: [({"metric": "inner", "across": np.inf}, APART), ("metric", APART, "euclidean", "cosine", "wfr"),
            ("x", "labels of many clouds take across=inf", [np.ones((3, 2))] * 2)]}),
    "torch.sinkhorn_loss": (torch_loss, {}, {
        T: [("M", "sample_loss", FULL), ("a", "takes tensors, got ndarray", ONE),
            ("reference", "reference, penalty and warm_start", "uniform"),
            ("M", " must be a dense tensor of real numbers in memory or M.to_sparse_csr()",
             *STRANGE), ("a", " must be a dense tensor of real", *STRANGE),
            ("b", " must be a dense tensor of real", *STRANGE),
            ("values", " must be None where M is dense", lambda t: t.ones(20)),
            ({"M": as_csr, "values": 3.0}, "takes tensors, got float for values")],
        V: [("reg", " must be", -0.1), ("a", " must be >= 0", lambda t: -t.ones(2, 4)),
            ("M", " must be a matrix (m, n) where it is sparse, got shape (2, 4, 5)",
             lambda t: t.ones(2, 4, 5).to_sparse_csr()),
            ({"M": as_csr, "values": lambda t: t.ones(19)}, "values must be one for each of the"),
            ({"a": lambda t: t.ones(3, 4), "b": lambda t: t.ones(2, 5)}, "M, a and b must hold")],
        I: [({"a": lambda t: t.ones(2, 4), "reg_m": np.inf}, "a and b must have equal masses")]}),
    "jax.sinkhorn_loss": (jax_loss, {}, {
        T: [("penalty", "options may be", "tv"),
            *((x, "must hold real numbers, got dtype complex", 1j) for x in "Mab")],
        V: [("reg", " must be a positive", HUGE), ("a", " must be", -1), ("b", " must be", -1)]}),
    "SamplesLoss": (samples_loss, {}, {
        N: [("loss", "loss", "hausdorff"), ("cost", "cost", "Norm2(X-Y)")], T: [("blurr", "blurr", 0.1)],
        V: [("p", " must", 3), ("blur", "blur", 0.0), ("reach", "reach", -1.0), ("reach_x", "reach_x", 0.0),
            ("backend", "backend", "cuda")]}),
    "SamplesLoss of tensors": (samples_loss, {}, {
        V: [("given", "SamplesLoss takes", lambda a, x, b, y: (x,)), ("given", "x must", lambda a, x, b, y: (x[0], y)),
            ("given", "y must", lambda a, x, b, y: (x.expand(2, 4, 2), y.expand(3, 5, 2)),
             lambda a, x, b, y: (x, y[:, :1])),
            ("given", "a must", lambda a, x, b, y: (a[:3], x, b, y)),
            ("given", "b must", lambda a, x, b, y: (a, x, b[None], y))],
        T: [("given", "x", lambda a, x, b, y: (x.numpy(), y))],
        I: [("given", "a and b must have equal masses", lambda a, x, b, y: (2 * a, x, b, y))]}),
    "torch.SinkhornLoss": (lambda **x: pytest.importorskip("torch") and mapuot.torch.SinkhornLoss(**x),
                           {"reg": 0.2, "reg_m": 1.0}, {
        V: [("reduction", " must be one of", "median"), ("reg", " must be a positive finite number", -1)]}),
    "plot": (picture, {"kind": "masses"}, {
        V: [("side", " must be one of", "left"), ({"kind": "plan", "most": 0}, "most must be an integer >= 1")]}),
    "plot.links": (lambda **x: picture("links", **x), {"x": np.ones((4, 2)), "y": np.ones((5, 2))}, {
        V: [("x", " must be points in the plane, shape (4, 2)", np.ones((4, 1))),
            ("y", " must be points in the plane, shape (5, 2)", np.ones((3, 2))), ("keep", " must be a share", 2)]}),
    "Result.apply": (call().apply, {}, {
        V: [("X", "X", 1.0, np.ones(6), np.ones((6, 2)), np.ones((5, 1, 1))),
            ("X", " must have a column", np.ones((5, 0)))],
        T: [("X", "X", np.ones(5) + 1j)]}),
    "Result.apply_transpose": (call().apply_transpose, {}, {
        V: [("Y", "Y", 1.0, np.ones(5), np.ones((5, 2)), np.ones((4, 1, 1))),
            ("Y", " must have a column", np.ones((4, 0)))],
        T: [("Y", "Y", np.ones(4) + 1j)]}),
    "Result.barycentric_map": (call().barycentric_map, {}, {
        V: [("Y", " must have shape (5,) or (5, d), got (3,)", np.ones(3))]}),
    "Result.rows": (call().rows, {"i0": 0, "i1": 2}, {
        V: [("i0", "rows must satisfy 0 <= i0 <= i1 <= 4, got ", -1, 0.5), ("i1", "rows must satisfy 0 <= i0", 5)]}),
    "Result.top_k": (call().top_k, {}, {V: [("k", " must be in 1..5, got ", 0, 6, 2.5, "3", True)]}),
    "Result.sample": (call().sample, {"size": 21, "replace": False}, {
        V: [("size", " must be an integer", 0, 2.5, True), ({}, "at most the 20 "), ("method", "replace", "rows")]}),
    "SeededMask.sample": (MASK.sample, {}, {
        V: [("M", " must be a matrix of real numbers", np.zeros(3), np.zeros((2, 2), complex))]}),
    "pairwise": (mapuot.pairwise, {"clouds": CLOUDS[0], "reg": 0.05, "reg_m": 1.0}, {
        V: [("clouds", " must hold", POINTS)], T: [("penalty", "penalty", "tv")]}),
    "OTPlanSampler": (OTPlanSampler, {}, {V: [("method", "method", "partial")]}),
    "pot.mm_unbalanced": (pot.mm_unbalanced, {k: POTS[k] for k in ("a", "b", "M", "reg_m")}, {
        V: [("div", " must be", "l2"), ("reg_m", "reg_m", np.inf), ("stopThr", "stopThr", 0)]}),
    "GromovResult.gradient": (lambda **x: mapuot.gromov(**x).gradient(), {"reg": 20.0, "reg_m": 9.0}, {
        N: [({"X": SQUARE, "Y": POINTS, "metric": ("precomputed", "sqeuclidean")}, "distances have no points"),
            ({"X": POINTS, "Y": POINTS, "reg": 0.0}, "gradient is for a positive reg")]}),
    "solve of parts": (mapuot.solve, {"M": PARTS, "a": np.ones(9), "reg": 0.1, "reg_m": np.inf}, {
        I: [("b", f"M {APART_B[0]}, where 2 must be transported and 1.5 may be", [1.0, 0.5, 7.5]),
            ({"b": [0.9, 0.6, 15.0], "reg_m": (1.0, np.inf), "penalty": ("range", "balanced")},
             f"M {APART_B[1]}, where 15 must be transported")]}),
    "solve of what is cut": (mapuot.solve, CUT_CALL | {"a": np.full(4, 0.25), "b": UNEVEN, "max_passes": 999}, {
        I: [*(({"method": x, "backend": y}, f"M connects {TOLD}") for x, y in WAYS),
            *(({"M": OPEN, "reference": CUT, "method": x, "backend": y}, f"connect {TOLD}") for x, y in WAYS),
            *(({"M": FORBIDDEN.T, "a": UNEVEN, "b": np.full(4, 0.73 / 4),
                "reg_m": (np.inf, 0.5), "penalty": ("balanced", "range"), "method": x, "backend": y},
               "M connects a[3], a[4] with b[2], b[3] only, where") for x, y in WAYS),
            *(({"M": x, "reference": CUT}, f"connect {TOLD}")
              for x in (FULL, mapuot.PointCloud(FULL.x, FULL.y, form=None), lambda i0, i1: OPEN[i0:i1])),
            ("M", f" connects {TOLD}", CSR(np.where(CUT, OPEN + 1, 0))),
            ({"M": np.zeros((40, 40)), "a": [*np.ones(39), 961], "b": np.full(40, 25.0), "mask": TWO},
             "M and the reference connect")]}),
    "solve_batch of what is cut": (mapuot.solve_batch, CUT_CALL, {
        I: [("B", "problem 1: M connects b[3], b[4] with", [np.full(5, 0.2), UNEVEN])]}),
    "solve_batch of parts": (mapuot.solve_batch, {"M": PARTS, "A": np.ones((2, 9)), "reg": 0.1, "reg_m": np.inf}, {
        I: [("B", f"problem 1: M {APART_B[0]}", [[1.0, 1.0, 7.0], [1.0, 0.5, 7.5]])]}),
    "Result.save": (call().save, {}, {
        V: [("path", " must end in .npz, .h5, .zarr or .h5ad", "x.npy", "x.txt", "x.doc")]}),
    "load": (mapuot.load, {}, {FileNotFoundError: [("path", "none.npz", "none.npz")]}),
    "Result.map": (lambda **x: mapuot.solve(**x).map(POINTS), {"M": FULL, "reg": 0.1, "reg_m": 1.0}, {
        T: [("M", "PointCloud", np.asarray(FULL))], V: [("reference", "reference", np.ones((4, 5)))]}),
    "tune": (mapuot.tune, {"M": CASE.M}, {V: [("mass", "mass", 1.2)]}),
    "Result.sparse": (call().sparse, {}, {
        V: [("threshold", " must be a number, got nan", np.nan),
            ("keep", " must be a share in (0, 1], got ", 0, 1.5, np.nan),
            ({}, "threshold or keep, one of both, must be given, got None and None"),
            ({"threshold": 0.1, "keep": 0.5}, "one of both")],
        T: [("threshold", " must be a number", 1j, np.ones(5)), ("keep", " must be a share", "all")]}),
    "Result.push": (call().push, {}, {V: [("labels", " must have shape (4,), got (3,)", [1, 2, 3])]}),
    "Result.pull": (call().pull, {}, {
        V: [("labels", " must not lack labels, got 1 None or NaN, first at 4", np.array(["a", "b", "a", "a", None])),
            ("labels", " must not lack labels, got 5 None or NaN, first at 0", np.full(5, np.nan))],
        T: [("labels", " must be labels of one kind", np.array([1, "a", 1, "a", 2], object))]}),
    "Result.hvp of both": (lambda **x: solved_cloud().hvp(**x), {"w": POINTS[:4]}, {
        V: [("both", " must be False", True)]}),
    "gromov_pairwise": (mapuot.gromov_pairwise, {"spaces": [POINTS[:4], POINTS[4:]], "reg": 0.1, "reg_m": 1.0}, {
        V: [("spaces", "[0] must be a non-empty matrix of points", [np.zeros(3)]),
            ("masses", "[1] must have shape (5,)", [None, np.ones(4)]), ("reg_m", "[1] must be > 0", (1.0, -1.0)),
            ("pairs", " must be a (p, 2) array", [0, 1], [[0.0, 1.0]]), ("pairs", " must have indices", [[0, 2]]),
            ("features", " must be one array (n_i, d)", [np.ones((4, 1)), np.ones((4, 1))]),
            ("init", " must be one of ['rows', ", "axes"), ("power", " must be in (0, 2]", 3.0)],
        T: [("comm", "options must be of", None)]}),
    "gromov": (mapuot.gromov, {"X": POINTS[:4], "Y": POINTS[4:], "reg": 0.1, "reg_m": 1.0}, {
        V: [("X", " must be a non-empty matrix of points", np.zeros(3)),
            ("metric", "X must be a square matrix of distances", "precomputed"),
            ("metric", " must be one of", "cityblock", ("sqeuclidean",) * 3),
            ("metric", "X must be a square matrix of lengths of edges", "geodesic"),
            ({"X": 1e200 * POINTS, "metric": "euclidean"}, "X must have points whose distances have squares within"),
            ({"metric": "euclidean", "power": 3}, "power must be in (0, 2], got 3"), ("landmarks", " must be", 1),
            ({"X": np.triu(np.ones((4, 4))), "metric": ("precomputed", "sqeuclidean")}, "X must be symmetric for"),
            ({"X": 1e80 * POINTS}, "X must have points whose distances have squares within float64"),
            ({"X": 1e200 * POINTS}, "X must have points whose distances have squares within float64"),
            ({"Y": 1e-90 * POINTS}, "Y must have points whose distances have squares within float64"),
            ({"X": 1e200 * SQUARE, "metric": ("precomputed", "sqeuclidean")}, "X must have distances that"),
            ("features", " must be points whose", (np.full((4, 1), 1e160), np.ones((5, 1)))),
            ("scale_cost", " must be one of ['median', ", "best"),
            ("a", " must be >= 0, got -1", -np.ones(4)), ("b", " must have shape (5,)", ONE),
            ("reg", " must be >= 0 and finite", -1.0, np.inf), ("reg_m", "[1] must be > 0, or inf", (1.0, -1.0)),
            ("reg_m", "[0] must be one number", (np.ones(4), 1.0)),
            ("features", " must be a pair of arrays or a finite matrix", np.ones((4, 4))),
            ("features", " must be", (np.ones((4, 1)), np.ones((5, 2)))),
            ({"features": np.ones((4, 5)), "alpha": 0.0}, "alpha must be in"),
            ("init", " must be one of ['auto', ", "best"),
            *(({"a": np.full(4, x), "b": np.full(5, x)}, "a and b must have masses") for x in (1e200, 1e90, 1e-200)),
            ("init", " must be a plan", np.ones((5, 4))), ("init", " must name a start", []),
            ("max_iter", " must be", 0), ("inner_tol", " must be", -1.0)],
        T: [("comm", "options must be of", None)]}),
    "solve into out": (call, {}, {
        V: [("out", " must be", np.empty((5, 4)), np.empty((4, 5), order="F"), np.broadcast_to(0.0, (4, 5))),
            ("out", "float64, got", np.empty((4, 5), np.float32)), ("out", "share memory with M", CASE.M)],
        T: [("out", "got list", [[0.0] * 5] * 4)]}),
    "solve of a function": (call, {"M": lambda i0, i1: np.zeros((i1 - i0, 5))}, {
        V: [("a", " must be given where M is a function", None), ("b", " must be given where M is a function", None),
            ("M", " must give shape (4, 5) for rows 0 to 4, got (4, 4)", lambda i0, i1: np.zeros((i1 - i0, 4))),
            ("M", " must not hold NaN", lambda i0, i1: np.full((i1 - i0, 5), np.nan))]}),
    "PointCloud with addends": (mapuot.PointCloud, {"x": SQUARE, "y": SQUARE, "metric": "inner", "addends": (0, 0)}, {
        V: [("metric", "addends must be None but for metric 'inner'", "euclidean"),
            ("addends", "[0] must be a finite number or (4,)", ([1.0], 0)),
            ("addends", "[1] must be a finite number", (0, [1, np.nan, 0, 0]))],
        T: [("addends", " must be a pair", 1.0)],
        N: [({"addends": None, "labels": (np.zeros(4), np.ones(4)), "across": 1.0}, "labels take"),
            ({"addends": None, "x": [SQUARE] * 2, "y": [SQUARE] * 2}, "are for one cloud")]}),
    "of inner products": (lambda door: door(), {}, {
        V: [("door", "metric must be a distance", lambda: mapuot.knn_cost(SQUARE, SQUARE, 1, metric="inner"))],
        N: [("door", "must have no costs of their own", lambda: inner().map(SQUARE)),
            ("door", "a metric that is a distance", lambda: inner().interpolate(0.5)),
            ("door", "'sqeuclidean', got 'inner'", lambda: inner().hvp(SQUARE)),
            ("door", "metric 'inner'", lambda: inner(addends=None, truncate=8.0)),
            ("door", "those within one have others",
             lambda: mapuot.sinkhorn_divergence(INNER, np.ones(4), np.ones(4), reg=1, reg_m=1))]}),
    "many clouds": (mapuot.PointCloud, {"x": CLOUDS[0], "y": CLOUDS[1]}, {
        V: [("y", "many clouds", CLOUDS[1][:2]), ("x", "equally", [*CLOUDS[0][:2], CLOUDS[0][2][:, :1]]),
            ("x", "[1]", [CLOUDS[0][0], CLOUDS[0][1][:0], CLOUDS[0][2]]),
            ({"x": POINTS[:4], "y": POINTS[4:], "starts": [0, 3]}, "starts")]}),
    "solve of many clouds": (mapuot.solve, {"reg": 1.0, "reg_m": 1.0}, {
        V: [("M", " must", mapuot.PointCloud(*CLOUDS))]}),
    "solve_batch of clouds": (mapuot.solve_batch, {"M": mapuot.PointCloud(*CLOUDS), "reg": 1.0, "reg_m": 1.0}, {
        V: [("A", " must", [np.ones(9)] * 3), ("B", " must", np.ones((3, 60)))],
        N: [({"M": mapuot.PointCloud([POINTS[:3], *CLOUDS[0][1:]], CLOUDS[1]), "mask": MASK},
             "mask and a reference matrix are for clouds of one size")]}),
}  # fmt: skip
ROWS = [
    (name, error, row[0] if isinstance(row[0], dict) else {row[0]: value}, row[:2])
    for name, (_, _, errors) in FUNCTIONS.items()
    for error, rows in errors.items()
    for row in rows
    for value in row[2:] or [None]
]


@pytest.mark.parametrize(("name", "error", "changes", "words"), ROWS,
                         ids=[f"{row[0]}-{next(iter(row[2]), None)}-{k}" for k, row in enumerate(ROWS)])  # fmt: skip
def test_refused(name, error, changes, words):
    function, good, _ = FUNCTIONS[name]
    argument, text = words
    if text[0] in " [":
        text = argument + text
    with pytest.raises(error, match=re.escape(text)) as told:
        function(**good | changes)
    assert len(str(told.value)) < 300


def test_arguments_behind_the_penalties_are_named():
    with pytest.raises(TypeError):
        mapuot.solve(CASE.M, CASE.a, CASE.b, 0.05, 1.0, "median")
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


def two_parts(m, n):
    """Return costs with all pairs forbidden between the two halves of the points, and different masses in each half."""
    rng = np.random.default_rng(m * n)
    M = rng.random((m, n))
    M[(np.arange(m) < m // 2)[:, None] != (np.arange(n) < n // 2)] = np.inf
    return M, np.full(m, 1 / m), np.where(np.arange(n) < n // 2, 0.8, 1.2) / n


TWO = two_parts(40, 60)
WFR = np.repeat([0.0, 9.0], [20, 20])[:, None], np.repeat([0.0, 9.0], [30, 30])[:, None]
APART = np.where(np.isfinite(TWO[0]), 0.5, 0.0)
UNLIKE_PARTS = {
    "dense": lambda M, a, b: mapuot.solve(M, a, b, reg=0.2, reg_m=np.inf),
    "beyond one call": lambda M, a, b: mapuot.solve(*two_parts(900, 1300), reg=0.2, reg_m=np.inf),
    "float32": lambda M, a, b: mapuot.solve(M.astype(np.float32), a, b, reg=0.2, reg_m=np.inf),
    "by columns": lambda M, a, b: mapuot.solve(np.asfortranarray(M), a, b, reg=0.2, reg_m=np.inf),
    "a point without mass": lambda M, a, b: mapuot.solve(
        np.where(np.arange(60) == 7, 0.3, M), a, np.where(np.arange(60) == 7, 0, b) * 60 / 59.2, reg=0.2, reg_m=np.inf
    ),
    "range": lambda M, a, b: mapuot.solve(M, a, b, reg=0.2, reg_m=(0.01, np.inf), penalty=("range", "balanced")),
    "rows": lambda M, a, b: mapuot.solve(lambda i, j: M[i:j], a, b, reg=0.2, reg_m=np.inf),
    "reference": lambda M, a, b: mapuot.solve(np.ones((40, 60)), a, b, reg=0.2, reg_m=np.inf, reference=APART),
    "points": lambda M, a, b: mapuot.solve_sample(*WFR, a, b, reg=0.2, reg_m=np.inf, metric="wfr", form=None),
    "formed points": lambda M, a, b: mapuot.solve_sample(*WFR, a, b, reg=0.2, reg_m=np.inf, metric="wfr"),
    "scale_cost": lambda M, a, b: mapuot.solve(M, a, b, reg=0.2, reg_m=np.inf, scale_cost="max"),
    "batch": lambda M, a, b: mapuot.solve_batch(M, [a, a], [b, b], reg=0.2, reg_m=np.inf),
    "batch of matrices": lambda M, a, b: mapuot.solve_batch(np.stack([M, M]), a, b, reg=0.2, reg_m=np.inf),
    "batch of clouds": lambda M, a, b: mapuot.solve_batch(
        mapuot.PointCloud([WFR[0]] * 2, [WFR[1]] * 2, "wfr"), a, b, reg=0.2, reg_m=np.inf
    ),
    "path": lambda M, a, b: [*mapuot.path(M, a, b, regs=[0.4, 0.2], reg_ms=[np.inf, np.inf])],
    "reference backend": lambda M, a, b: mapuot.solve(M, a, b, reg=0.2, reg_m=np.inf, backend="reference"),
    "tree": lambda M, a, b: mapuot.multimarginal({(0, 1): M}, [a, b], reg=0.2, reg_m=np.inf),
    "torch": lambda M, a, b: mapuot.solve(
        *map(pytest.importorskip("torch").as_tensor, (M, a, b)), reg=0.2, reg_m=np.inf
    ),
}


@pytest.mark.parametrize("call", UNLIKE_PARTS.values(), ids=UNLIKE_PARTS)
def test_parts_with_unlike_masses_are_told_before_a_pass(call, monkeypatch):
    def look(*_):
        raise AssertionError("passes were made")

    monkeypatch.setattr("mapuot.api.solve.check_cut", look)
    with pytest.raises(mapuot.InfeasibleError, match=r"connects? .* only, where .* must be transported"):
        call(*TWO)


SPOILED = {"grad": lambda x: x.requires_grad_(), "bfloat16": lambda x: x.bfloat16(), "sparse": lambda x: x.to_sparse(),
           "meta": lambda x: x.to("meta"), "complex": lambda x: x + 1j}  # fmt: skip


@pytest.mark.parametrize("name", ["M", "a", "b", "reg_m", "reference", "warm_start"])
@pytest.mark.parametrize("trouble", SPOILED)
def test_tensors_that_cannot_be_read_are_named(name, trouble):
    torch = pytest.importorskip("torch")
    given = {"M": CASE.M, "a": CASE.a, "b": CASE.b, "reg_m": np.ones(2), "reference": CASE.M, "warm_start": CASE.a}
    spoiled = SPOILED[trouble](torch.tensor(given[name]))
    if name == "reg_m" and trouble in ("grad", "bfloat16", "sparse"):
        pytest.skip("numbers one by one, each of which is read")
    if name in ("M", "a", "b") and trouble in ("grad", "bfloat16"):
        pytest.skip("taken as data, and as float32: test_torch.py")
    if name == "warm_start":
        value = (spoiled, CASE.b)
    else:
        value = spoiled
    with pytest.raises(
        (TypeError, ValueError), match=rf"^{name}\b.*(read as an array|real numbers|a positive number|must be a Result)"
    ):
        call(**{name: value})


@pytest.mark.parametrize("trouble", ["sparse", "meta", "complex"])
def test_points_in_tensors_that_cannot_be_read_are_named(trouble):
    torch = pytest.importorskip("torch")
    points = torch.ones(4, 2)
    assert mapuot.PointCloud(torch.nn.Parameter(points.bfloat16())).dtype == np.float32
    with pytest.raises(TypeError, match=r"^x\b.*(read as an array|real numbers)"):
        mapuot.PointCloud(SPOILED[trouble](points))


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
    assert call(callback=lambda stats: np.array([True])).status == "cancelled"
    with pytest.warns(RuntimeWarning, match="divide by zero"):
        call(callback=lambda stats: bool(np.ones(1) / np.zeros(1) < 0))


# ---- the environment ----


def told(code, **environment):
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


ISA = "from mapuot.backends.cpu import native; print(native.isa())"
SECONDS = "MAPUOT_CHECKPOINT_SECONDS"
WITHOUT = "import sys; sys.modules[{!r}] = None; import mapuot; mapuot.solve([[0]], reg=1, reg_m=1, {})".format
STORED = WITHOUT("nothing", "checkpoint='/tmp/never-written.npz'")


@pytest.mark.parametrize(("program", "environment", "text"), [
    (ISA, {"MAPUOT_ISA": "garbage"}, "MAPUOT_ISA must be auto, scalar, avx2 or avx512, as this machine has it, got 'g"),
    *((STORED, {SECONDS: x}, f"{SECONDS} must be a number of seconds >= 0, got '{x}'") for x in ("abc", "nan", "-1")),
    (WITHOUT("cupy", "backend='cuda'"), {}, "backend 'cuda' needs CuPy: pip install 'mapuot[gpu]'"),
    (WITHOUT("mapuot._core", ""), {}, "mapuot's C library is not built in"),
    (f"{WITHOUT('matplotlib', '')}; mapuot.plot.plan(mapuot.solve([[0]], reg=1, reg_m=1))", {},
     "pip install 'mapuot[plot]'"),
])  # fmt: skip
def test_the_environment_is_told(program, environment, text):
    code, found = told(program, **environment)
    assert text in found
    assert (code == 0) == (program is ISA)
    assert program is not ISA or found.splitlines()[0] in ISAS
    assert told("import mapuot", **environment) == (0, "")
    assert told(ISA, MAPUOT_ISA="scalar") == (0, "scalar\n")


# ---- valid input that may not be meant ----


def warnings_of(function, kind=mapuot.ScalingWarning):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        result = function()
    return [str(x.message) for x in heard if x.category is kind], result


LARGE = np.where(np.median(CASE.M) < CASE.M, 1e10, CASE.M)
FAR = np.stack([CASE.M, 100 * CASE.M + 25, CASE.M])
X40 = np.random.default_rng(0).normal(size=(9, 40)) * 10
ODD = {
    "costs far above reg_m": (lambda: call(100 * CASE.M + 25, reg=0.1), [
        "the plan moves almost nothing",
             "M is far above reg_m; rescale M (by its median, as scale_cost='median' does), or "
        "raise reg_m"]),
    "costs above reg_m": (lambda: call(10 * CASE.M + 8, reg=0.1), [
        "the plan moves little, 0.012 of a mass of 1", "scale_cost='median'"]),
    "one of a batch": (lambda: mapuot.solve_batch(FAR, CASE.a, CASE.b, reg=1.0, reg_m=1.0),
             ["almost nothing in 1 of 3"]),
    "unscaled costs of an estimator": (lambda: da.UnbalancedSinkhornTransport().fit(X40, Xt=X40 + 30),
             ["by its median, as norm='median' does"]),
    "a number for a forbidden pair": (lambda: call(LARGE, reg=0.1), [
        "M reaches 1.0e+10",
             "where such costs are to forbid pairs, use inf, which takes fewer passes; else raise reg"]),
    "such a number in a batch": (lambda: mapuot.solve_batch(LARGE, np.ones((3, 4)), reg=0.1, reg_m=1.0), ["use inf"]),
    "masses in persons": (lambda: call(a=1e6 * CASE.a, b=1e6 * CASE.b, reg=0.1), [
        "the unit of mass counts: of totals of 1e+06 and ", "as large a share moves as of totals of 1",
        "pass scale_mass=True, or divide both by sqrt(|a| |b|)"]),
    "masses in persons of a float32 M": (lambda: mapuot.solve(CASE.M.astype("f4"), 1e6 * CASE.a, 1e6 * CASE.b, reg=0.1,
                                                             reg_m=1.0, callback=lambda stats: None), ["unit of mass"]),
    "masses in persons of a batch": (
        lambda: mapuot.solve_batch(CASE.M, np.stack([CASE.a, 1e6 * CASE.a]), CASE.b, reg=0.1, reg_m=1.0),
        ["the unit of mass counts: of totals of 1e+06"]),
    "masses in persons, scaled": (lambda: call(a=1e6 * CASE.a, b=1e6 * CASE.b, reg=0.1, scale_mass=True), []),
    "masses in persons at a small reg": (lambda: call(a=1e6 * CASE.a, b=1e6 * CASE.b, reg=0.01), []),
    "masses in persons, hard": (lambda: call(a=1e6 * CASE.a, b=1e6 * CASE.b, reg_m=(np.inf, 1.0)), []),
    "masses in persons, uniform": (lambda: call(a=1e6 * CASE.a, b=1e6 * CASE.b, reference="uniform"), []),
    "inf": (lambda: call(np.where(LARGE < 1e8, LARGE, np.inf)), []),
    "plain": (call, []),
    "scaled costs of an estimator": (
        lambda: da.UnbalancedSinkhornTransport(reg_m=10, norm="max").fit(X40, Xt=X40 + 30), []),
    "costs beyond float64": (lambda: call(1e6 * CASE.M + 1e6), [
        "M is so far above reg_m that float64 cannot hold the plan: raise reg or reg_m, bring the costs nearer 0"],
        mapuot.ConvergenceWarning),
    "costs of denormal numbers": (
        lambda: call(1e-312 * CASE.M, np.full(4, 0.25), np.full(5, 0.2), reg=1e-313, reg_m=np.inf), [
        "reg is near the least number of float64: multiply M, reg and reg_m by the same large number"],
        mapuot.ConvergenceWarning),
    "reg too small": (lambda: call(reg=1e-12), ["raise reg"], mapuot.ConvergenceWarning),
    "too few passes": (lambda: call(reg=1e-3, reg_m=100.0, max_passes=2), ["raise max_passes, reg or tol"],
        mapuot.ConvergenceWarning),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_an_odd_problem_is_told_once_what_to_do(name):
    function, texts, *kind = ODD[name]
    heard, _ = warnings_of(function, *kind)
    assert len(heard) == bool(texts)
    assert all(text in heard[0] for text in texts)


# ---- warnings of numpy from inside ----


@pytest.mark.parametrize("changes",
                         [{"reg_m": 1.7e308}, {"M": CASE.M * 1e300, "reg": 1e295},
                          {"M": CASE.M - 1e6, "reg": 0.02, "reg_m": 0.04, "a": CASE.a * [0, 1, 1, 1]},
                          {"a": CASE.a * 1e150, "b": CASE.b * 1e150},
                          {"penalty": "l2", "reg_m": 1e300, "a": CASE.a * 1e100, "b": CASE.b * 1e100},
                          {"warm_start": (np.full(4, 1e308), np.full(5, -1e308))},
                          {"reg": 1e-3, "method": "sinkhorn", "warm_start": (np.full(4, 700.0), np.full(5, -700.0))}],
                         ids=range(7))  # fmt: skip
def test_numpy_says_nothing_from_inside(changes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        result = call(max_passes=60, **changes)
        for name in ("mass", "objective", "dual", "f", "g"):
            getattr(result, name)
        tables = {k: np.tile(v, (3, 1)) if k in ("a", "b") else v for k, v in changes.items() if k != "warm_start"}
        M, a, b = (tables.pop(name, getattr(CASE, name)) for name in "Mab")
        batch = mapuot.solve_batch(M, a, b, max_passes=60, **{"reg": 0.05, "reg_m": 1.0, **tables})
        assert not np.isnan(batch.cost).any()


# ---- masses that forbidden pairs leave without a plan


def most_wanting(allowed, rows, cols):
    sets = itertools.product((False, True), repeat=len(cols))
    return max(cols[list(s)].sum() - rows[allowed[:, list(s)].any(1)].sum() for s in sets)


def test_told_where_and_only_where_there_is_no_plan():
    """Exactly the random problems without a plan are reported, by all sets of columns, from any potentials."""
    told = 0
    for seed in range(150):
        rng = np.random.default_rng([36, seed])
        m, n = rng.integers(2, 6, 2)
        allowed = rng.random((m, n)) < 0.6
        allowed[np.arange(max(m, n)) % m, np.arange(max(m, n)) % n] = True
        a = rng.integers(1, 5, m) * 1.0
        b = rng.integers(1, 5, n) * 1.0
        b *= a.sum() / b.sum()
        M = np.where(allowed, rng.random((m, n)), np.inf)
        if most_wanting(allowed, a, b) > 1e-9:
            told += 1
            with pytest.raises(mapuot.InfeasibleError, match="must be transported"):
                mapuot.solve(M, a, b, reg=0.2, reg_m=np.inf)
            continue
        problem = Problem.from_arrays(M, a, b, 0.2, np.inf, "kl", "product", pick("cpu"))
        for _ in range(20):
            check_cut(problem, *(10 * rng.standard_normal(k) for k in (m, n)))
    assert 25 < told < 125


def test_a_flow_shows_what_potentials_do_not():
    """Small problems without a plan are reported by potentials of 0, and no others, for one and two hard sides."""
    told = 0
    for seed in range(150):
        rng = np.random.default_rng([37, seed])
        m, n = rng.integers(2, 6, 2)
        M = np.where(rng.random((m, n)) < 0.5, rng.random((m, n)), np.inf)
        M[0] = M[:, 0] = 0.0  # one part
        a = rng.integers(1, 5, m) * 1.0
        b = rng.integers(1, 5, n) * 1.0
        b *= a.sum() / b.sum()
        hard = seed % 3 > 0
        reg_m = np.inf if hard else (np.inf, 1.0)
        if seed % 2:
            cost = CSR(np.where(np.isfinite(M), M + 1, 0.0))
        else:
            cost = M
        problem = Problem.from_arrays(cost, a, b, 0.2, reg_m, "kl", "product", pick("cpu"))
        infeasible = hard and most_wanting(np.isfinite(M), a, b) > 1e-9
        told += infeasible
        assert (find_cut(problem, np.zeros(m), np.zeros(n)) is not None) == infeasible
    assert 25 < told < 125


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("search", ["potentials", "flow"])
def test_each_search_names_the_points_and_allows_for_rounding(search, turned):
    """Columns 1 and 2 have row 1 and, without mass, row 2: they may ask for row 1's mass and 1e-6 of it."""
    M = np.array([[0.0, np.inf, np.inf], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    a = np.array([0.6, 0.4, 0.0])
    log_u, log_v = np.array([0.0, 3.0, -np.inf]), np.array([0.0, 5.0, 4.0])

    def cut(needed):
        b = np.array([1 - needed, needed / 2, needed / 2])
        given = (M.T, b, a) if turned else (M, a, b)
        problem = Problem.from_arrays(*given, 0.2, np.inf, "kl", "product", pick("cpu"))
        if search == "flow":
            return cut_of_flow(problem)
        return cut_of_potentials(problem, *((log_v, log_u) if turned else (log_u, log_v)))

    words = "M connects {} with {} only, where {:.6g} must be transported and {:.6g} may be"
    for needed in (0.6, 0.45, 0.4 * (1 + 2e-6)):
        if turned and search == "flow":  # the flow from the columns shows the same cut from its other end
            right = words.format("b[0]", "a[0]", 0.6, 1 - needed)
        else:
            right = words.format("a[1], a[2]" if turned else "b[1], b[2]", "b[1]" if turned else "a[1]", needed, 0.4)
        assert cut(needed) == right
    assert cut(0.4 * (1 + 0.5e-6)) is None
    assert cut(0.3) is None


def test_masses_without_a_plan_are_told_before_steps_with_a_factor(monkeypatch):
    """Stalled passes of a problem without a plan are followed by one pass, for one problem and for a batch."""
    monkeypatch.setattr("mapuot.ascend.carry_out.factored_start", None)
    M = np.random.default_rng(5).random((40, 40))
    M[20:, 18:] = np.inf
    for solve in (mapuot.solve, lambda M, **named: mapuot.solve_batch(M[None], **named)):
        with pytest.raises(mapuot.InfeasibleError, match=r"M connects .* only, where .* must be transported"):
            solve(M, reg=1e-3, reg_m=np.inf)
