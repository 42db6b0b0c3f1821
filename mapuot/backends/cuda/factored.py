"""Plans and equations of Newton's steps with a factor, by src_cuda/dense/factored.cu, cuBLAS and cuSOLVER.

`DevicePlans` is a twin of backends/array_plans.py for KL and hard sides. A step of it takes five launches and two waits
beside the product and the factor, whatever the number of problems.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import cupy as cp
import numpy as np
from cupy import cublas

from ...arrays import host, namespace
from ...penalties import F64
from .. import records
from ..array_plans import ArrayPlans
from ..factored import CONSTANT, EXPONENT_ROUNDING, GAIN_ROUNDING, RESIDUAL, Margin, StepNumbers, TrialNumbers
from . import vectors
from .arrays import pinned
from .kernels import Job, by_value, kernel
from .launch import Launch

FACTORED = records.read("factored.cu")["Factored"]
THREADS, COLUMNS, GROUPS, TILE = 256, 32, 16, 32
FEW = 2  # equations that are solved in less time one by one than in a batch, where they are small
FEW_OF = 250  # unknowns for each of these: 4 equations of 1000 and 16 of 4000 (H200, cupyx.lapack.posv beside cholesky)
WAITING = 16  # requests that may wait in pinned memory: at most 5 lie between two answers
KERNELS = (
    "meet_rows", "sum_columns", "meet_columns", "accept_trials", "mirror_products", "shift_rows", "solve_triangles",
    "find_residuals",
)  # fmt: skip
# vectors of the last accepted steps, and of the last trials
TRIALS = {"log_u": "next_u", "log_v": "next_v"} | {name: f"next_{name}" for name in ("r", "s", "q", "size")}
JOB: Job = ("factored.cu", "meet_rows", {"STORE": 0})  # compiles all kernels of the file


class DevicePlans:
    """A `FactoredPlans` of backends/factored.py; parameters as of `ArrayPlans`: costs on the device, vectors anywhere.

    A launch for one problem has its request in the record, which is an argument of the kernel: nothing is copied. The
    numbers that judge trials and steps are written to the host's memory.
    """

    def __init__(
        self, costs: Any, log_c: tuple[Any, Any], sides: tuple[Margin, Margin], log_u: Any, log_v: Any
    ) -> None:
        p, m, n = self.count, self.m, self.n = costs.shape
        self.costs = cp.ascontiguousarray(costs)
        # on the host: a reduction of CuPy is compiled for ranges of shapes, 3 s each (H200)
        self.all_hard = not any((host(side.k) > 0).any() for side in sides)
        self.used = np.isfinite(log_u), np.isfinite(log_v)
        self.slope = np.zeros(p)  # <y, q - s> of the last steps
        rows, cols = ({"weight": side.weight, "k": side.k, "log_c": x} for side, x in zip(sides, log_c, strict=True))
        inputs = [log_u, log_v, *rows.values(), *cols.values()]
        xp = np if namespace(*inputs) is np else cp
        self.inputs = cp.asarray(xp.concatenate([xp.asarray(x, np.float64).ravel() for x in inputs]))
        names = ("log_u", "log_v", "a", "k_rows", "log_c_rows", "b", "k_cols", "log_c_cols")
        sizes = p * m, p * n, *[p * m] * 3, *[p * n] * 3
        places = self.parts(self.inputs, zip(names, sizes, strict=True))
        words = dict.fromkeys(("next_u", "r", "next_r", "back", "row_gain"), p * m)
        words |= dict.fromkeys(("next_v", "s", "next_s", "q", "next_q", "size", "next_size"), p * n)
        words |= dict.fromkeys(("soft", "col_gain", "own", "y"), p * n) | {"added": p, "arrived": p}
        self.vectors = cp.zeros(sum(words.values()))
        places |= self.parts(self.vectors, words.items())
        self.log_u, self.next_u = (places[name].reshape(p, m) for name in ("log_u", "next_u"))
        self.log_v, self.next_v = (places[name].reshape(p, n) for name in ("log_v", "next_v"))
        self.best = self.log_u.copy(), self.log_v.copy()
        self.weighed = cp.empty((p, m, n))
        self.answers = pinned(4 * p)
        self.slots = np.zeros(p, int)
        self.record = np.zeros((), FACTORED)
        numbers = {"m": m, "n": n, "all_hard": self.all_hard, "level": 1.0, "residual": RESIDUAL}
        numbers |= {"rounding": GAIN_ROUNDING, "exponents": EXPONENT_ROUNDING, "constant": CONSTANT}
        numbers |= {"numbers": self.answers.__array_interface__["data"][0]}
        records.put(self.record, numbers | places | {"costs": self.costs, "weighed": self.weighed})
        self.launches = {name: Launch(kernel(JOB[0], name, **JOB[2]), 0, (by_value(self.record),)) for name in KERNELS}
        self.requests = cp.empty((p, 3))
        self.waiting = pinned(WAITING * 3 * p).reshape(WAITING, p, 3)
        self.sent = 0

    @staticmethod
    def parts(block: Any, sizes: Iterable[tuple[str, int]]) -> dict[str, Any]:
        """Return named parts of a block, one behind the other."""
        found = {}
        at = 0
        for name, count in sizes:
            found[name] = block[at : at + count]
            at += count
        return found

    def set_level(self, level: float) -> None:
        self.record["level"] = level

    def of(self, places: Any) -> Any:
        """Return an index of these problems: all of them as a slice, which copies nothing."""
        if len(places) == self.count:
            return slice(None)
        return cp.asarray(places)

    def place(self, places: Any, log_u: Any, log_v: Any) -> None:
        which = self.of(places)
        for x, given, used in zip((self.log_u, self.log_v), (log_u, log_v), self.used, strict=True):
            xp = np if namespace(given, used) is np else cp
            some = xp.asarray(used)[which if xp is cp or len(places) == self.count else places]
            start = xp.asarray(given)
            x[which] = cp.asarray(xp.where(some, xp.where(xp.isfinite(start), start, 0.0), -np.inf))

    def scale(self, places: Any, factor: float) -> None:
        which = self.of(places)
        for x in (self.log_u, self.log_v):
            x[which] *= factor

    def keep(self, places: Any) -> None:
        which = self.of(places)
        for x, own in zip(self.best, (self.log_u, self.log_v), strict=True):
            x[which] = own[which]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Wait at the end: the memory of requests may then be reused."""
        yield
        cp.cuda.get_current_stream().synchronize()

    def request(self, places: Any, slots: Any, numbers: Any) -> None:
        """Set the entries of the next launches: problems, the slots of their equations, and a number for each."""
        if len(places) == 1:
            (own, slot, number) = (np.ravel(x)[0] for x in (places, slots, numbers))
            records.put(self.record, {"requests": None, "problem": own, "slot": slot, "number": number})
            return
        self.sent = (self.sent + 1) % WAITING
        entries = self.waiting[self.sent, : len(places)]
        for column, given in zip(entries.T, (places, slots, numbers), strict=True):
            column[:] = given
        self.requests[: len(places)].set(entries, stream=cp.cuda.get_current_stream())
        records.put(self.record, {"requests": self.requests})

    def launch(self, name: str, blocks: int, threads: int = THREADS) -> None:
        self.launches[name](blocks, threads, cp.cuda.get_current_stream().ptr)

    def read_numbers(self, count: int) -> F64:
        """Wait, and return the four numbers of each entry."""
        cp.cuda.get_current_stream().synchronize()
        numbers: F64 = self.answers[: 4 * count].reshape(count, 4).T.copy()
        return numbers

    def meet_columns(self, places: Any) -> None:
        self.request(places, 0, 0)
        self.launch("meet_columns", len(places) * -(-self.n // COLUMNS), COLUMNS * GROUPS)

    def trial(self, places: Any, lengths: F64) -> TrialNumbers:
        count = len(places)
        self.request(places, 0, lengths)
        self.launch("meet_rows", count * self.m)
        self.launch("sum_columns", count * -(-self.n // COLUMNS), COLUMNS * GROUPS)
        missed, gain, noise, rounding = self.read_numbers(count)
        return TrialNumbers(missed, gain, noise, rounding, lengths * self.slope[places])

    def accept(self, places: Any) -> None:
        if len(places) == self.count:  # the trials become the problems' own, and their memory is for later trials
            for own, other in TRIALS.items():
                self.record[own], self.record[other] = self.record[other].copy(), self.record[own].copy()
            self.log_u, self.next_u = self.next_u, self.log_u
            self.log_v, self.next_v = self.next_v, self.log_v
        elif len(places):
            self.request(places, 0, 0)
            self.launch("accept_trials", len(places))

    def form_equations(self, places: Any) -> None:
        count = len(places)
        n = self.n
        self.slots[places] = np.arange(count)
        if self.in_turn(count):
            self.gram = cp.empty((count, n, n))
            for out, place in zip(self.gram, places, strict=True):
                cublas.syrk("T", self.weighed[int(place)], out=out, lower=True)
            records.put(self.record, {"gram": self.gram})
            self.launch("mirror_products", count * (-(-n // TILE)) ** 2, TILE * TILE)
        else:
            weighed = self.weighed[self.of(places)]
            self.gram = cp.matmul(weighed.swapaxes(1, 2), weighed)
            records.put(self.record, {"gram": self.gram})

    def in_turn(self, count: int) -> bool:
        """Tell whether so many equations are made and solved one by one."""
        return bool(count <= max(FEW, self.n // FEW_OF))

    def solve(self, places: Any, shifts: F64) -> StepNumbers:
        count = len(places)
        n = self.n
        shifted = cp.empty((count, n, n))
        wanted = cp.empty((count, n))
        rest = cp.empty((count, n))
        records.put(self.record, {"shifted": shifted, "wanted": wanted, "rest": rest})
        self.request(places, self.slots[places], shifts)
        self.launch("shift_rows", count * n)
        if self.in_turn(count):
            from cupyx.lapack import posv  # noqa: PLC0415 - loads cuSOLVER

            # transposed: it copies them to Fortran's order
            found = [posv(S.T, right) for S, right in zip(shifted, wanted, strict=True)]
            y = found[0] if count == 1 else cp.stack(found)
            records.put(self.record, {"wanted": y})
        else:
            factor = cp.linalg.cholesky(shifted)  # has a name: the record holds its address only
            records.put(self.record, {"factor": factor})
            self.launch("solve_triangles", count, TILE * TILE)
        self.launch("find_residuals", count * n)
        solved, far, slope, _ = self.read_numbers(count)
        self.slope[places] = slope
        return StepNumbers(solved > 0, far)


class DeviceArrayPlans(ArrayPlans):
    """A `FactoredPlans` for any penalties by CuPy's operations: some 300 launches a step, and 40 for each problem."""

    def exponentiate(self, weights: Any) -> None:
        cp.exp(weights, out=weights)

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def form_product(self, place: int) -> Any:
        S = self.S[place]
        cp.matmul(self.scaled.T, self.scaled, out=S)
        S *= -1.0
        S.reshape(-1)[:: self.n + 1] = 0.0
        return S.sum(1)

    def add_square(self, place: int, x: Any, factor: float) -> None:
        self.S[place] += factor * x[:, None] * x

    def solve_one(self, place: int, added: Any) -> Any:
        from cupyx.lapack import posv  # noqa: PLC0415 - loads cuSOLVER

        right = self.right[place]
        shifted = self.S[place].copy()
        shifted.reshape(-1)[:: self.n + 1] += added
        y = posv(shifted, right)
        self.y[place] = y
        return right - self.S[place] @ y - added * y


class DeviceLaplacian:
    """Equations of S = diag(sums) - R^T R on the device; the rows of S have the sum 0.

    Matrices are CuPy's: src_cuda/vectors.cu interprets its operations for each entry.
    """

    def __init__(self, roots: Any) -> None:
        S = cp.matmul(roots.T, roots)
        S *= -1.0
        diagonal = S.reshape(-1)[:: len(S) + 1]
        diagonal[...] = 0.0
        diagonal[...] = -cp.matmul(S, cp.ones(len(S)))
        self.S = S

    def inverse(self, added: Any, along: Any) -> Callable[[Any], Any]:
        """Return the product with (S + diag(added) + w w^T / |w|_1)^-1, w = ``along``; L is its Cholesky factor.

        The product is L^-T (L^-1 x) with a stored L^-1: it is positive definite whatever the rounding, even if the
        factor is not finished, and reads the matrix twice, while triangular equations go row by row.
        """
        from cupyx.scipy.linalg import solve_triangular  # noqa: PLC0415 - loads cuBLAS

        k = len(self.S)
        shifted = (along / float(along.sum())).view(cp.ndarray)[:, None] * along.view(cp.ndarray)
        shifted += self.S
        shifted.reshape(-1)[:: k + 1] += added.view(cp.ndarray)
        inverse = solve_triangular(cp.linalg.cholesky(shifted), cp.eye(k), lower=True)
        half = cp.empty(k)

        def product(x: Any) -> Any:
            found = vectors.empty(k)
            cublas.gemv("N", 1.0, inverse, x.view(cp.ndarray), 0.0, half)
            cublas.gemv("T", 1.0, inverse, half, 0.0, found.view(cp.ndarray))
            return found

        return product
