"""Use one fuzzer input as a file (``readers``), a call (``arguments``) or arbitrary bits of numbers (``core``).

The library may refuse an input, by a ValueError or TypeError that names the file or an argument, or answer it. Any
other exception, a warning of numpy from inside, or a converged answer that is no number is a finding. The sanitizers of
`make fuzz` find reads and writes of the C core beyond its arrays.
"""

import math
import os
import re
import struct
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
from conftest import ISAS, available
from core.test_kernels import read_by_all_streams
from problems import clouds

import mapuot
from mapuot import files
from mapuot.backends.cpu import batch, native, workspace
from mapuot.backends.records import stats_of

FOLDER = Path(tempfile.mkdtemp(prefix="mapuot-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))  # noqa: PTH112
SUFFIXES = (".npy", ".npz", ".npz", ".csv", ".npz")
TABLES = 224  # first bytes from here on: a table, or an answer
MOST_READ = 1 << 22  # entries: a small file may claim as many as it likes in compressed zeros


# ---- files ----


def readers(data):
    """Read the input as a file: the first byte chooses the reader."""
    first = data[0] if data else 0
    data = data[1:]
    kind = first % 3 if first < TABLES else 3 + first % 2
    path = FOLDER / f"input{SUFFIXES[kind]}"
    path.write_bytes(data)
    try:
        if kind == 2:
            log_u, log_v = files.load_checkpoint(path, 3, 2, 0.5)
            assert log_u.shape == (3,)
            assert log_v.shape == (2,)
            assert np.isfinite(log_u).all()
            assert np.isfinite(log_v).all()
            return
        if kind == 4:
            again = mapuot.load(path)
            assert repr(again)
            assert again.f.shape == again.problem.shape[:1]
            return
        matrix = files.open_matrix(path)
        files.find_vector(path, "a")
        if matrix.size <= MOST_READ:
            assert np.asarray(matrix).shape == matrix.shape
    except ValueError as error:
        assert path.name in str(error), error  # noqa: PT017
    except TypeError as error:
        assert str(error).startswith("M must hold real numbers"), error  # noqa: PT017


# ---- arguments ----

NAMES = (
    "M|a|b|reg|reg_m|method|penalty|reference|tol|tol_gap|max_passes|precision|backend|threads|warm_start|callback|"
    "checkpoint|A|B|regs|reg_ms|weights|exact|comm|X|Y|k|rows|threshold"
)
NAMED = re.compile(rf"^({NAMES})\b|\b({NAMES})\b must|^Unknown method|^the batch must|^no plan has|'map-uot'")
NUMBERS = (
    0.0, -0.0, 1.0, 0.5, 2, -1, 1e-300, 5e-324, 1e300, 1.7e308, 1e-8, 1e8, math.inf, -math.inf, math.nan, 10**400, True,
    None, "1", b"ab", 1j, "auto", "kl", "tv", "range", "l2", "balanced", "sinkhorn", "mixed", "float64",
    "uniform", "product", "rows", "grid", "", "\0", "translation_invariant", "map-uot", "reference", "cpu",
)  # fmt: skip
OPTIONS = (
    "method", "penalty", "reference", "tol", "tol_gap", "max_passes", "precision", "backend", "threads", "warm_start",
)  # fmt: skip
DTYPES = ("f8", "f4", "f2", "i4", "i8", "u1", "?", "c16", "O", "U3", "M8[s]", ">f8", "f16")


class Reader:
    """Bytes as choices; zeros after their end."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def byte(self):
        self.at += 1
        if self.at <= len(self.data):
            return self.data[self.at - 1]
        return 0

    def below(self, n):
        return self.byte() % n

    def number(self):
        """Return a tame or odd number, or one of any bits."""
        kind = self.byte()
        if kind < 128:
            return kind / 32
        if kind < 240:
            odd = NUMBERS[self.below(17)]
            if isinstance(odd, (int, float)) and abs(odd) < 1e308 * 10 and odd != 10**400:
                return float(odd)
            return 1e308
        return struct.unpack("<d", bytes(self.byte() for _ in range(8)))[0]

    def array(self, shape):
        kept = [self.number() for _ in range(1 + self.below(12))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind = self.below(40)
            array = np.resize(np.array(kept), shape).astype(DTYPES[kind] if kind < len(DTYPES) else "f8")
        layout = self.below(12)
        if layout == 0:
            return array.tolist()
        if layout == 1:
            if array.size:
                return np.ma.array(array, mask=array == array.flat[0])
            return array
        if layout == 2:
            return np.asfortranarray(array)
        if layout == 3:
            return np.repeat(array, 2, axis=-1)[..., ::2]
        return array

    def bits(self, *shape):
        """Return numbers of any bits; a matrix may be reversed, strided, in Fortran order, or repeat one row."""
        layout = self.below(6)
        if len(shape) == 2:
            dtype = (np.float64, np.float32)[self.below(2)]
        else:
            dtype = np.float64
        with np.errstate(all="ignore"):
            array = np.resize(np.array([self.number() for _ in range(1 + self.below(24))]), shape).astype(dtype)
        if len(shape) == 1 or layout > 3:
            return array
        one_row = np.broadcast_to(array[:1], shape)
        return (np.asfortranarray(array), array[::-1, ::-1], np.repeat(array, 2, 1)[:, ::2], one_row)[layout]

    def masses(self, shape):
        """Return masses, mostly >= 0."""
        array = self.array(shape)
        if getattr(array, "dtype", np.dtype("O")).kind in "fiu" and self.below(8):
            return np.abs(array)
        return array

    def value(self, m, n):
        """Return any object in the place of an argument."""
        kind = self.below(8)
        if kind < 4:
            return NUMBERS[self.below(len(NUMBERS))]
        if kind == 4:
            return self.number()
        if kind == 5:
            return self.value(m, n), self.value(m, n)
        shapes = (m,), (n,), (m, n), (), (2,), (0,), (2, m, n), (n, m)
        return self.array(shapes[self.below(len(shapes))])


def call(reader, m, n):
    """Make one call with mostly valid arguments."""
    M = reader.array((m, n))
    a = reader.masses((m,))
    b = reader.masses((n,))
    reg, reg_m = (reader.number() if reader.below(8) else reader.value(m, n) for _ in range(2))
    options = {"max_passes": 50, "threads": 1}
    for _ in range(reader.below(4)):
        options[OPTIONS[reader.below(len(OPTIONS))]] = reader.value(m, n)
    which = reader.below(8)
    if isinstance(options.get("max_passes"), int):
        options["max_passes"] = min(options["max_passes"], 500)
    if which == 6:
        return [mapuot.log_matmul(M, reader.array((n, m)), exact=bool(reader.below(2)))]
    if which == 5:
        return list(mapuot.path(M, a, b, regs=[reg, 0.5], reg_ms=reg_m, **options))
    if which == 4:
        return list(mapuot.solve_batch(M, reader.masses((3, m)), b, reg=reg, reg_m=reg_m, **options))
    result = mapuot.solve(M, a, b, reg=reg, reg_m=reg_m, **options)
    if which == 3:
        result.apply(reader.value(m, n))
    if which == 2:
        result.sparse(reader.value(m, n))
    if which == 1:
        mapuot.solve(
            M, a, b, reg=reg, reg_m=reg_m, **{**options, "warm_start": (reader.array((m,)), reader.array((n,)))}
        )
    return [result]


def arguments(data):
    """Call solve, solve_batch, path or log_matmul with arguments drawn from the bytes."""
    reader = Reader(data)
    m = 1 + reader.below(6)
    n = 1 + reader.below(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            warnings.simplefilter("error", RuntimeWarning)
            found = call(reader, m, n)
        except (ValueError, TypeError, NotImplementedError) as error:
            if not NAMED.search(str(error)):
                raise
            return
    for result in found:
        if getattr(result, "converged", False) is True:
            numbers = result.mass, result.dual, 0.0 if result.mass > 1e300 else result.objective
            assert np.isfinite(numbers).all(), (result, numbers)
            assert not math.isnan(result.error_bound), result  # inf where tol_gap was met
            assert not np.isnan(np.asarray(result.log_u)).any(), result


# ---- the core ----

LIMITS = (
    "tol", "tol_gap", "storage_error", "exponent_error", "flush", "scale_limit", "most_scale", "lam_rate", "mu_rate",
    "dual_constant", "dual_scale",
)  # fmt: skip
SIDES = "kl", "balanced", "tv", "l2", "range"


class DoneError(Exception):
    """End a solve after enough passes of a damaged state."""


def spoiled(reader, make, sides, states):
    """Make passes after numbers of any bits have come into K, both sides and the limits; check their statistics."""

    def passes(self, _):
        every = states(self)
        m, n, ld = every[0].m, every[0].n, every[0].ld
        for side, size in zip(sides(self), (m, n), strict=True):
            for name in ("weight", "absorbed", "scale", "rho"):
                if reader.below(3) == 0:
                    side[name][..., :size] = reader.bits(size)
        K = (self.operator if hasattr(self, "operator") else self).K
        with np.errstate(over="ignore"):
            K[: K.size // ld * ld].reshape(-1, ld)[reader.below(9) :: 9, :n] = reader.bits(n)
        for state in every:
            for name in LIMITS:
                if reader.below(4) == 0:
                    value = reader.number()
                    setattr(state.limits, name, value if name.startswith(("tol", "lam", "mu")) else abs(value))
        made = make(self, 1 + reader.below(30))
        stats = made if isinstance(made, list) else stats_of(self.stats, 1)
        for stat, state in zip(stats, every if len(every) > 1 else every * len(stats), strict=True):
            if stat.status == "converged":
                assert stat.error <= state.limits.tol or stat.gap <= state.limits.tol_gap * abs(stat.dual), stat
                assert stat.error >= 0, stat
                assert math.isfinite(stat.mass), stat
        raise DoneError

    return passes


def core(data):
    """Run streams over costs of any numbers and layout, by each instruction set; passes of damaged states."""
    reader = Reader(data)
    isas = [*filter(available, ISAS)]
    m = 1 + reader.below(40)
    n = 1 + reader.below(40)
    threads = 1 + reader.below(3)
    what = reader.below(3)
    native.set_isa(isas[reader.below(len(isas))])
    case = clouds(m, n, 0.1, (0.4, 0.7), penalty=(SIDES[reader.below(5)], SIDES[reader.below(5)]))
    options = {"precision": ("auto", "float64", "mixed")[reader.below(3)], "tol": 10.0 ** -reader.below(12)}
    on_one = spoiled(
        reader, workspace.HostWorkspace.make_passes, lambda w: (w.row_side, w.col_side), lambda w: [w.state]
    )
    on_many = spoiled(reader, batch.HostBatch.iterate, lambda w: (w.rows, w.cols), lambda w: [*w.states])
    try:
        if what == 0:
            M = reader.bits(m, n)
            X = native.zeros(2 * native.padded(n))
            X.reshape(2, -1)[:, :n] = reader.bits(2, n)
            c = (None, M, reader.bits(m, n))[reader.below(3)]
            vectors = reader.bits(m), reader.bits(n), X, np.ascontiguousarray(reader.bits(m, 2), float)
            found = read_by_all_streams(M, c, vectors, threads)["extrema"]
            assert found[2:].sum() <= m * n
        elif what == 1:
            options["method"] = ("auto", "sinkhorn", "map-uot")[reader.below(3)]
            with mock.patch.object(workspace.HostWorkspace, "make_passes", on_one):
                case.solve(callback=lambda stats: None, threads=threads, **options)
        else:
            A = np.stack([case.a] * (1 + reader.below(20)))
            M = case.M
            with mock.patch.object(batch.HostBatch, "iterate", on_many):
                M = M if reader.below(2) else np.stack([M] * len(A))
                mapuot.solve_batch(M, A, case.b, reg=0.1, reg_m=case.reg_m, penalty=case.penalty, **options)
    except (DoneError, mapuot.InfeasibleError):
        pass
    finally:
        native.set_isa("auto")


TARGETS = {"readers": readers, "arguments": arguments, "core": core}
