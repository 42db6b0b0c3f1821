"""Vectors on the device for formulas that also run in NumPy; src_cuda/vectors.cu interprets their arithmetic.

CuPy would compile a kernel for each operation, type and layout, .08 s each: a first solve that skips pairs needs 84.
All other names of this module are CuPy's.
"""

import math
import re
import struct
import sys
from functools import lru_cache
from typing import Any

import cupy as cp
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ...arrays import PAD
from .kernels import kernel, source

NAMES = re.search(r"enum \{([^}]*PLACE[^}]*)\}", source("vectors.cu"))[1]  # type: ignore[index]
OPERATIONS = {name.strip().lower(): number for number, name in enumerate(NAMES.split(","))}
TRUTHS = range(OPERATIONS["isfinite"], OPERATIONS["invert"] + 1)  # operations that return masks
REAL = {OPERATIONS[name] for name in ("divide", "sqrt", "exp", "log", "log1p", "rint")}
KINDS = {"?": 0, "l": 1, "f": 2, "d": 3}
NUMBER = 4
DTYPES = (np.bool_, np.int64, np.float32, np.float64)
REALS = (float, np.floating, np.ndarray)  # types of real numbers on the host; others are integers or truth values
SLOTS = 32  # most operands of a formula, and most operations
HEAD = struct.Struct("6q")
OPERAND = struct.Struct("6qd")
SIZE = HEAD.size + (4 + OPERAND.size) * SLOTS
MOST_BLOCKS = 4096
GIVEN = struct.Struct("4q")  # of Given in point_tables.cu
TILE = 32  # points and coordinates of a tile in point_tables.cu
broadcast = lru_cache(maxsize=1024)(np.broadcast_shapes)


def __getattr__(name: str) -> Any:
    return getattr(cp, name)


class Vector(NDArrayOperatorsMixin, cp.ndarray):  # type: ignore[misc]
    """Array of up to three axes; operations on it give arrays of this class."""

    __module__ = "cupy"  # so that CuPy's functions accept it
    xp = sys.modules[__name__]

    def __array_ufunc__(self, ufunc: Any, method: Any, *inputs: Any, out: Any = (), **options: Any) -> Any:
        if ufunc.__name__ in OPERATIONS and method == "__call__":
            return evaluated(ufunc, inputs, out)
        if ufunc.__name__ in OPERATIONS and method == "reduceat":
            return merged(ufunc, *inputs)
        if out:
            options["out"] = out
        return super().__array_ufunc__(ufunc, method, *inputs, **options)

    def __array_function__(self, function: Any, kinds: Any, args: Any, options: Any) -> Any:
        if function in OWN:
            return OWN[function](*args)
        found = super().__array_function__(function, kinds, args, options)
        if isinstance(found, cp.ndarray):
            return found.view(Vector)
        return found

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, cp.ndarray):  # indices >= 0, or a mask
            if key.dtype == bool:
                index = flatnonzero(key)
            else:
                index = key
            return evaluated(np.positive, (self,), index=index)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, cp.ndarray):
            if isinstance(key, int):
                key = slice(key, key + 1 or None)
            part = super().__getitem__(key)
            evaluated(np.positive, (value,), [part])
        elif key.dtype == bool:
            evaluated(np.where, (key, value, self), [self])
        else:
            evaluated(np.positive, (value,), [self], to=key)

    def copy(self, order: str = "C") -> Any:
        return np.positive(self)

    def astype(self, dtype: Any, *given: Any, **options: Any) -> Any:
        if not {self.dtype.char, np.dtype(dtype).char} <= KINDS.keys():  # CuPy's argmax of a mask needs other types
            return super().astype(dtype)
        return evaluated(np.positive, (self,), [empty(self.shape, dtype)])

    def sum(self, axis: int | None = None, **options: Any) -> Any:
        if axis is None:
            return super().sum(**options)
        return merged(np.add, self.T if axis else self)[0]


def empty(shape: Any, dtype: Any = np.float64) -> Any:
    return cp.empty(shape, dtype).view(Vector)


def zeros(shape: Any, dtype: Any = np.float64) -> Any:
    return cp.zeros(shape, dtype).view(Vector)


def full(shape: Any, value: float) -> Any:
    found = empty(shape)
    found[...] = value
    return found


def asarray(x: Any) -> Any:
    if isinstance(x, Vector):
        return x
    return cp.asarray(x).view(Vector)


def pinned(count: int) -> Any:
    """Return uninitialised pinned memory for ``count`` numbers on the host, which a kernel may write to.

    A copy to the device is asynchronous: the sender keeps this memory alive until a later read from the device.
    """
    return np.frombuffer(cp.cuda.alloc_pinned_memory(8 * count + 8), np.float64)[:count]


def take_points(x: Any, y: Any) -> tuple[Any, Any, list[bool]]:
    """Copy points to float64 tables, (m, d) and (d, n padded), and tell whether x or y has a NaN or inf.

    It takes one launch and one wait.
    """
    if x.dtype != y.dtype or x.dtype.char not in "fd":
        x, y = (z.astype(np.float64) for z in (x, y))
    (m, d), n = x.shape, len(y)
    ld = n + -n % PAD
    rows = cp.empty((m, d))
    columns = cp.empty((d, ld))
    odd = pinned(2)
    odd[:] = 0.0
    tiles = -(-ld // TILE) * -(-d // TILE)
    blocks = tiles + max(1, min(-(-m * d // 1024), MOST_BLOCKS))
    run = kernel("point_tables.cu", "take_points", STORE=0, COST=int(x.dtype.char == "f"))
    words = *map(given_points, (x, y)), np.int64(d), np.int64(ld)
    run((blocks,), (256,), (*words, rows, columns, np.uint64(odd.__array_interface__["data"][0])))
    cp.cuda.get_current_stream().synchronize()
    return rows, columns, [bool(x) for x in odd]


def given_points(x: Any) -> Any:
    """Pack the Given record of point_tables.cu."""
    words = GIVEN.pack(x.data.ptr, len(x), *(step // x.itemsize for step in x.strides))
    return np.frombuffer(words, f"V{GIVEN.size}").reshape(())


def fill(x: Any, bits: int) -> None:
    """Fill a vector with these 8 bytes."""
    asarray(x.view(np.float64))[...] = np.uint64(bits).view(np.float64)


def concatenate(parts: Any) -> Any:
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    found = empty(ends[-1], parts[0].dtype)
    for i, part in zip(ends, parts, strict=False):
        found[i : i + len(part)] = part
    return found


def flatnonzero(mask: Any) -> Any:
    """Return the indices of the true entries of a mask."""
    last = asarray(cp.cumsum(asarray(mask).astype(np.int64)))
    if len(mask):
        count = int(last[-1:].get()[0])
    else:
        count = 0
    found = empty(count + 1, np.int64)
    evaluated(place, (mask,), [found], to=np.where(mask, last - 1, count))  # false: the slot at the end
    return found[:count]


def where(*x: Any) -> Any:
    return evaluated(np.where, x)


OWN: dict[Any, Any] = {np.where: where, np.concatenate: concatenate, np.flatnonzero: flatnonzero}


@lru_cache(maxsize=1024)
def steps_of(size: tuple[int, ...], strides: tuple[int, ...], width: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of three axes in entries; 0 for broadcast axes."""
    steps = [0 if k == 1 else step // width for k, step in zip(size, strides, strict=True)]
    return *[0] * (len(shape) - len(size)), *steps, *[0] * (3 - len(shape))


def operand(x: Any, shape: tuple[int, ...], index: Any = None, place: int = 0) -> bytes:
    """Return the words of an operand, broadcast to this shape; ``place``: for a result, the slot of its value."""
    if not isinstance(x, cp.ndarray):
        return OPERAND.pack(0, 0, NUMBER, 0, 0, 0, x)
    steps = steps_of(x.shape, x.strides, x.itemsize, shape)
    return OPERAND.pack(x.data.ptr, 0 if index is None else index.data.ptr, KINDS[x.dtype.char], *steps, place)


def launch(name: str, shape: tuple[int, ...], code: bytes, numbers: tuple[int, ...], operands: list[bytes]) -> None:
    """Launch a kernel of vectors.cu; ``numbers``: counts of operations, inputs and results."""
    if blocks := -(-math.prod(shape) // 256):
        words = HEAD.pack(*shape, *(1, 1, 1)[len(shape) :], *numbers) + code + b"".join(operands)
        record = np.frombuffer(words.ljust(SIZE, b"\0"), f"V{SIZE}")
        kernel("vectors.cu", name, STORE=0)((min(blocks, MOST_BLOCKS),), (256,), (record,))


def kind_of(x: Any) -> int:
    if isinstance(x, cp.ndarray):
        return KINDS[x.dtype.char]
    if isinstance(x, REALS):
        return 3
    return int(not isinstance(x, bool))


class Term(NDArrayOperatorsMixin):
    """A value in a formula that is traced into a program: its slot."""

    def __init__(self, program: "Program", place: int, kind: int) -> None:
        self.program, self.place, self.kind = program, place, kind

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any) -> Any:
        return self.program.add(OPERATIONS[ufunc.__name__], *inputs)

    def __array_function__(self, function: Any, kinds: Any, args: Any, options: Any) -> Any:
        assert function is np.where, function
        return self.program.add(OPERATIONS["where"], *args)


def place(x: Term) -> Term:
    return x.program.add(OPERATIONS["place"])


class Program:
    """The operations of a traced function, its constants, and the slots of its results."""

    def __init__(self, function: Any, inputs: tuple[Any, ...]) -> None:
        self.code = bytearray()
        self.numbers = list[float]()
        self.inputs = len(inputs)
        found = function(*(Term(self, k, kind_of(x)) for k, x in enumerate(inputs)))
        self.single = not isinstance(found, tuple)
        self.results = [self.term(x) for x in ((found,) if self.single else found)]
        slots = self.inputs + len(self.numbers)
        self.counts = len(self.code) // 4, slots, len(self.results)
        assert max(self.counts[0], slots + len(self.results)) <= SLOTS
        self.words = bytes(self.code).ljust(4 * SLOTS, b"\0")

    def term(self, x: Any) -> Term:
        """Return x as a term; a number becomes a constant in a slot behind the inputs."""
        if isinstance(x, Term):
            return x
        self.numbers.append(float(x))
        return Term(self, self.inputs + len(self.numbers) - 1, kind_of(x))

    def add(self, operation: int, *inputs: Any) -> Term:
        terms = [self.term(x) for x in inputs]
        self.code += bytes([operation, *(x.place for x in terms), 0, 0, 0][:4])
        kinds = [x.kind for x in terms[operation == OPERATIONS["where"] :]] or [1]
        mixed = max(kinds) == 2 > min(kinds)
        if operation in TRUTHS:
            kind = 0
        elif operation in REAL or mixed:
            kind = 3
        else:
            kind = max(kinds)
        return Term(self, SLOTS - 1 + len(self.code) // 4, kind)


PROGRAMS: dict[Any, Program] = {}  # by the function and the kinds of its arguments


def evaluated(function: Any, inputs: tuple[Any, ...], into: Any = (), index: Any = None, to: Any = None) -> Any:
    """Evaluate a function of vectors and numbers by one launch.

    ``into``: arrays for the results, written at the indices ``to`` of their first axis. ``index``: indices into the
    first axis of the input.
    """
    shape: tuple[int, ...] = ()
    if index is not None or to is not None:
        if to is None:
            x = inputs[0]
            at = index
        else:
            x = into[0]
            at = to
        if at.dtype != np.int64 or at.ndim != 1 or not at.flags.c_contiguous:  # the kernel reads raw int64
            raise TypeError("places that are not int64, one behind the other")
        shape = at.shape + x.shape[1:]
    else:
        for x in (*into, *inputs):
            if isinstance(x, cp.ndarray):
                if x.shape != shape:
                    shape = broadcast(shape, x.shape)
            elif isinstance(x, np.ndarray) and x.ndim:
                raise TypeError("an array of the host among those of the device")
        assert all(x.shape == shape for x in into)
    key = function, *map(kind_of, inputs)
    program = PROGRAMS.get(key) or PROGRAMS.setdefault(key, Program(function, inputs))
    outs = into or [empty(shape, DTYPES[x.kind]) for x in program.results]
    operands = [operand(x, shape, index) for x in (*inputs, *program.numbers)]
    operands += [operand(x, shape, to, term.place) for x, term in zip(outs, program.results, strict=True)]
    launch("evaluate", shape, program.words, program.counts, operands)
    if program.single:
        return outs[0]
    return tuple(outs)


def merged(ufunc: Any, x: Any, starts: Any = None, each: Any = np.positive) -> Any:
    """Return ufunc.reduceat(each(x), starts) for increasing starts; None: reduce all of x."""
    if starts is None:
        starts = zeros(1, np.int64)
    found = empty((len(starts), *x.shape[1:]), np.int64 if x.dtype == np.int64 else np.float64)
    operands = [operand(k, k.shape) for k in (x, starts)] + [operand(len(x), ()), operand(found, found.shape)]
    code = bytes((OPERATIONS[ufunc.__name__], OPERATIONS[each.__name__])).ljust(4 * SLOTS, b"\0")
    launch("reduceat", found.shape, code, (1, 3, 1), operands)
    return found
