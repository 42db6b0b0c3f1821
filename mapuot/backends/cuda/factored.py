"""Plans and equations of Newton's steps with a factor, by src_cuda/dense/factored.cu, cuBLAS and cuSOLVER.

`DevicePlans` is a twin of backends/array_plans.py for KL and hard sides. A step of it takes ten launches, whatever the
number of problems.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import cupy as cp
import numpy as np

from ...arrays import host
from ...penalties import F64
from .. import records
from ..array_plans import ArrayPlans
from ..factored import CONSTANT, EXPONENT_ROUNDING, GAIN_ROUNDING, RESIDUAL, Margin, StepNumbers, TrialNumbers
from .arrays import pinned
from .kernels import Job, by_value, kernel

FACTORED = records.read("factored.cu")["Factored"]
THREADS, COLUMNS, GROUPS, TILE = 256, 32, 16, 32
FEW = 2  # equations that are solved in less time one by one than in a batch, where they are small
FEW_OF = 250  # unknowns for each of these: 4 equations of 1000 and 16 of 4000 (H200, cupyx.lapack.posv beside cholesky)
WAITING = 16  # requests that may wait in pinned memory: at most 5 lie between two answers
JOB: Job = ("factored.cu", "meet_rows", {"STORE": 0})  # compiles all kernels of the file


class DevicePlans:
    """A `FactoredPlans` of backends/factored.py; parameters as of `ArrayPlans`, all CuPy arrays."""

    def __init__(
        self, costs: Any, log_c: tuple[Any, Any], sides: tuple[Margin, Margin], log_u: Any, log_v: Any
    ) -> None:
        p, m, n = self.count, self.m, self.n = costs.shape
        self.costs = cp.ascontiguousarray(costs)
        self.log_u = cp.array(log_u, order="C")
        self.log_v = cp.array(log_v, order="C")
        self.best = self.log_u.copy(), self.log_v.copy()
        # on the host: a reduction of CuPy is compiled for ranges of shapes, 3 s each (H200)
        self.all_hard = not any((host(side.k) > 0).any() for side in sides)
        self.slope = np.zeros(p)  # <y, q - s> of the last steps
        self.y = cp.zeros((p, n))
        self.weighed = cp.empty((p, m, n))
        rows = {name: cp.zeros((p, m)) for name in ("r", "next_u", "next_r", "back", "row_gain")}
        names = "s", "q", "next_v", "next_s", "next_q", "soft", "col_gain", "own", "size", "right"
        columns = {name: cp.zeros((p, n)) for name in names}
        inputs = dict(zip("ab", (cp.ascontiguousarray(side.weight) for side in sides), strict=True))
        inputs |= {name: cp.ascontiguousarray(x.k) for name, x in zip(("k_rows", "k_cols"), sides, strict=True)}
        inputs |= {"log_c_rows": cp.ascontiguousarray(log_c[0]), "log_c_cols": cp.ascontiguousarray(log_c[1])}
        self.numbers = cp.empty((p, 4))
        self.answers = pinned(4 * p).reshape(p, 4)
        self.requests = cp.empty((p, 3))
        self.waiting = pinned(WAITING * 3 * p).reshape(WAITING, p, 3)
        self.sent = 0
        self.arrays = inputs | rows | columns | {"added": cp.zeros(p), "numbers": self.numbers, "costs": self.costs}
        self.arrays["requests"] = self.requests
        self.arrays |= {"log_u": self.log_u, "log_v": self.log_v, "y": self.y, "weighed": self.weighed}
        self.record = np.zeros((), FACTORED)
        sizes = {"m": m, "n": n, "all_hard": self.all_hard, "level": 1.0}
        sizes |= {"rounding": GAIN_ROUNDING, "exponents": EXPONENT_ROUNDING, "constant": CONSTANT, "residual": RESIDUAL}
        records.put(self.record, sizes)
        records.put(self.record, self.arrays)

    def set_level(self, level: float) -> None:
        self.record["level"] = level

    def of(self, places: Any) -> Any:
        """Return an index of these problems: all of them as a slice, which copies nothing."""
        if len(places) == self.count:
            return slice(None)
        return cp.asarray(places)

    def place(self, places: Any, log_u: Any, log_v: Any) -> None:
        which = self.of(places)
        for x, given in ((self.log_u, cp.asarray(log_u)), (self.log_v, cp.asarray(log_v))):
            x[which] = cp.where(cp.isfinite(x[which]), cp.where(cp.isfinite(given), given, 0.0), -np.inf)

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
        """Send the entries of the next launches: problems, the slots of their equations, and a number for each."""
        self.sent = (self.sent + 1) % WAITING
        entries = self.waiting[self.sent, : len(places)]
        for column, given in zip(entries.T, (places, slots, numbers), strict=True):
            column[:] = given
        self.requests[: len(places)].set(entries, stream=cp.cuda.get_current_stream())

    def launch(self, name: str, blocks: int, threads: int = THREADS) -> None:
        kernel(JOB[0], name, **JOB[2])((blocks,), (threads,), (by_value(self.record),))

    def read_numbers(self, count: int) -> F64:
        """Return the four numbers of each entry."""
        found: F64 = self.numbers[:count].get(out=self.answers[:count])
        return found.T.copy()

    def meet_columns(self, places: Any) -> None:
        self.request(places, 0, 0)
        self.launch("meet_columns", len(places) * -(-self.n // COLUMNS), COLUMNS * GROUPS)

    def trial(self, places: Any, lengths: F64) -> TrialNumbers:
        count = len(places)
        self.request(places, 0, lengths)
        self.launch("meet_rows", count * self.m)
        self.launch("sum_columns", count * -(-self.n // COLUMNS), COLUMNS * GROUPS)
        self.launch("judge_plans", count)
        missed, gain, noise, rounding = self.read_numbers(count)
        return TrialNumbers(missed, gain, noise, rounding, lengths * self.slope[places])

    def accept(self, places: Any) -> None:
        if len(places):
            self.request(places, 0, 0)
            self.launch("accept_trials", len(places))

    def form_equations(self, places: Any) -> None:
        weighed = self.weighed[self.of(places)]
        self.gram = cp.matmul(weighed.swapaxes(1, 2), weighed)
        self.slots = np.zeros(self.count, int)
        self.slots[places] = np.arange(len(places))
        records.put(self.record, {"gram": self.gram})
        self.request(places, self.slots[places], 0)
        self.launch("form_rows", len(places) * self.n)

    def solve(self, places: Any, shifts: F64) -> StepNumbers:
        count = len(places)
        n = self.n
        shifted = cp.empty((count, n, n))
        wanted = cp.empty((count, n))
        rest = cp.empty((count, n))
        records.put(self.record, {"shifted": shifted, "wanted": wanted, "rest": rest})
        self.request(places, self.slots[places], shifts)
        self.launch("shift_rows", count * n)
        if count > max(FEW, n // FEW_OF):
            factor = cp.linalg.cholesky(shifted)  # has a name: the record holds its address only
            records.put(self.record, {"factor": factor})
            self.launch("solve_triangles", count, TILE * TILE)
        else:
            from cupyx.lapack import posv  # noqa: PLC0415 - loads cuSOLVER

            y = cp.stack([posv(*one) for one in zip(shifted, wanted, strict=True)])
            records.put(self.record, {"wanted": y})
        self.launch("find_residuals", count * n)
        self.launch("judge_steps", count)
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
