"""Solves between points on the device: no K; each pass makes its entries twice, for the rows and for the columns.

Portable kernels make the passes; src_cuda/points/points.cuh replaces their row half, which would read K. Passes work in
float32 while the error is large, then in float64; on tensor cores float32 passes begin with coordinates rounded to
float16. Twin: backends/cpu/workspace.py.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from ...arrays import PAD, formula, host, largest, namespace, squares
from ...cached import cached_property
from ...contract import Options, Stats
from ...penalties import F64
from ...problem.mask import MaskedReference
from ...problem.problem import Problem
from .. import narrow_points
from ..boxes import Truncation
from ..cpu.native import pool_for
from ..kernel import TINY
from ..narrow_points import FORMS
from ..records import put
from ..rules import START
from . import vectors
from .arrays import FEW, free_memory, need_memory
from .boxes import DeviceBoxes
from .kernels import (
    ITEMSIZE,
    MASK,
    Job,
    Shape,
    begin,
    by_value,
    kernel,
    point_blocks,
    portable_jobs,
    shape_options,
    together,
)
from .launch import Iterate, device_limits, switches
from .settings import DEVICE_LAUNCHES
from .stream import joined
from .workspace import NARROW_NOISE, DeviceWorkspace

DIM = 4  # most dimensions with the coordinates in a thread's registers
# point_tiles.cuh: points of a tile that get sums; points that it sums over; most coordinates at a time
TO_TILE = 128
FROM_TILE = {"float32": 128, "float64": 64}
DEPTH = {"float32": 16, "float64": 8}
# point_products.cuh: coordinates of a chunk and of a step; points that get sums, points summed over at a time
PIECE, STEP, PRODUCT_TO, PRODUCT_FROM = 32, 16, 256, 64
PRODUCTS = 80  # least compute capability of its instructions
# point_wide_products.cuh: coordinates of a chunk, chunks that registers hold, and the least compute capability
WIDE_PIECE, WIDE_CHUNKS, WIDE_PRODUCTS = 16, 8, 90
MOST_WIDE = 512  # dimensions in which float64 passes multiply on tensor cores
KEPT_TOL = 5e-7  # least error that a float32 K certifies: route/options.py
MOST_PIECE = 2.0**15  # largest coordinate that float16 pieces hold
# Where float64 passes may correct float32 ones, these begin with one product of first pieces in the place of three. An
# exponent then errs by at most 2^-8 r^2, r the length of the farthest point: with r^2 below MOST_ROUNDED no entry
# exceeds 2^16.
MOST_ROUNDED = 2.0**12
# At an error of MEASURE_AT one pass with three products corrects the passes with one, which then err by the product of
# both errors, of few points by up to MEASURED_MOST times that: their error stands there. The pass comes later where the
# product exceeds MEASURED_SHARE of the error at which float32 passes end. Between both kinds the
# image jumps, which spoils Anderson's next steps the more, the smaller the error is: at .1 for .3 one pass was lost.
MEASURE_AT, MEASURED_SHARE, MEASURED_MOST = 0.3, 0.3, 2.0
# That jump raises the error to some ROUNDED_JUMP times the error of entries, times the factor of rho / reg in the floor
# of float32 passes. It has to be small beside the error there (LEAST_JUMPS; else passes stand), and below MOST_JUMP.
ROUNDED_JUMP, LEAST_JUMPS, MOST_JUMP = 0.5, 4.0, 0.1
WAVES = 8  # most times that the blocks of the parts of a sum may fill the device
KEPT_WAVES = 32  # the same where pairs are skipped: a box may have 15 times as many pairs as others
QUICK_ERROR, QUICK_TOL = 2e-9, 1e-7  # error of float64 powers of 2 by a short polynomial; least tol that allows it
ROUGH_ERROR, ROUGH_TOL = 3e-7, 1e-4  # the same by float32's unit
ROUGH_LEAST = 2.0**-256  # smaller rough powers are 0
QUICK_MOST = 2.0**-22  # while exponents err by less, all are below 2^30 in size, and QUICK_OUT can mark points left out
QUICK_OUT = -(2.0**30)
ENDS = ("join_rows", "point_columns")  # kernels after the sums over rows and over columns
MOST_ACROSS = 2**26  # most partial sums, half a GiB, if a symmetric pass makes only half of the pairs
# Float32 passes follow a float64 pass with an error above WORTH_AGAIN tol, with sums corrected by its sums: a float64
# pass takes three to four times as long. Each such float64 pass has at most FELL times the error of the one before.
WORTH_AGAIN, FELL = 2.0, 0.25
# Where the floor of float32 passes, times NOISY, lies above tol, a float64 pass corrects their sums early: at an error
# of CORRECT_AT, or of CORRECT_FROM tol. Passes near the floor add their noise; corrected sums err by some thousandth of
# the error at which they were corrected.
CORRECT_AT, CORRECT_FROM, NOISY = 1e-3, 1e3, 2.0
CORRECTED_FLOOR = 0.1  # floor of their errors, in units of the floor of other float32 passes: the noise of their sums
# A float64 pass comes where the slower of the last two falls of the error, again, would bring it to so much of tol: it
# saves a float32 pass where that holds, and costs three where it does not.
LIKELY = 0.8
# Rows find their scalings from one of at most MOST_APART tiles of columns. If v then exceeds e^MOST_TOP, all columns
# count: a cluster may lie in none of these tiles.
MOST_APART, MOST_TOP = 8, 20.0
EXPANDED = -1  # a FORM of points.cuh that is no metric: quick passes have only products of coordinates left


@formula
def ratio_of(exact: F64, rough: F64) -> F64:
    """Return exact / rough, and 1 where this is no number above 0."""
    ratio = exact / rough
    return np.where(np.isfinite(ratio) & (ratio > 0), ratio, 1.0)


def on_device(x: Any) -> Any:
    """Return a vector on the device, and a number as it is."""
    if np.ndim(x):
        return vectors.asarray(x)
    return x


def sizes_of(d: int, narrow: bool, masked: bool, kept: bool) -> tuple[int, int]:
    """Return (points of a thread that get sums, points summed over at a time): RT and FROM of points.cuh."""
    few = d <= DIM
    return (4 if narrow else 2) * (2 if few and not masked and (kept or not narrow) else 1), 4 if few else 8


def multiplies(problem: Problem) -> bool:
    """Tell whether float64 passes over all pairs may multiply coordinates on tensor cores."""
    cloud = problem.cost.cloud
    d = cloud.dim - cloud.apart
    able = device_limits(cp.cuda.Device().id)[0] >= WIDE_PRODUCTS and d <= WIDE_CHUNKS * WIDE_PIECE
    return able and not (cloud.bits or problem.masked) and narrow_points.product_error(problem) <= QUICK_ERROR


def stores_kernel(problem: Problem, options: Options) -> bool:
    """Tell whether passes read a stored float32 K of points in many dimensions, where the cost matrix does not fit.

    One H200, 100,000 points in 30 dimensions: 9 ms a pass, against 108 ms for a float64 pass that makes the entries
    without tensor cores. With them float32 passes take 11 ms and float64 ones 43; to make K takes .3 s, and the whole
    solve .53 s for .46.
    """
    cloud = problem.cost.cloud
    size = ITEMSIZE["float32"] * problem.size
    if options.precision != "float32" or options.tol < KEPT_TOL or cloud.dim <= FEW or problem.ranks.size > 1:
        return False
    if cloud.form == "auto":
        return 2 * size <= free_memory(2 * size) and not multiplies(problem)
    return bool(size <= float(cloud.form or 0))


def sums_job(kl: tuple[bool, bool], depth: int, d: int, narrow: bool, form: int, **more: int) -> Job:
    """Return the job of float32 or float64 passes; ``more``: options of points/points.cuh; default: all pairs."""
    options = shape_options(Shape(1, 4, 2), "float64", kl, ANDERSON_DEPTH=depth)
    options |= {"POINTS": 1, "POINTS_NARROW": int(narrow), "FORM": form}
    if d <= DIM and "DEPTH" not in more:
        options["DIM"] = d
    else:
        options["DIM"] = 0
    options |= {"KEPT": 0, "QUICK": 0, "MASKED": 0, "SPLIT": 1} | more
    options["POINT_BLOCKS"] = point_blocks(options)
    if "STEPS" in options:
        name = "product_sums"
    elif "WIDE_CHUNKS" in options:
        name = "wide_product_sums"
    elif "DEPTH" in options:
        name = "tile_sums"
    else:
        name = "point_sums"
    return "portable.cu", name, options


def ends_of(options: dict[str, int]) -> tuple[str, ...]:
    """Name the kernels that follow sums with these options."""
    return *ENDS, "gather_sums", *(["fold_halves"] if "HALVED" in options else [])


def depth_of(d: int, dtype: str) -> int:
    """Return the coordinates that point_tiles.cuh takes at a time: equal steps with the least padding."""
    return -(-d // -(-d // DEPTH[dtype]))


class PackedSide:
    """The points of one side in one precision: ``to`` for points that get sums, ``packed`` for points summed over.

    ``tiled``: the layout of point_tiles.cuh for both, whole tiles of points and ``depth`` coordinates a step.
    """

    lost: Any = 0.0  # terms of the points to add to the logarithms
    rounded = False  # do sums multiply first pieces alone?

    def __init__(self, points: Any, count: int, tiled: bool, dtype: Any, factor: float, depth: int = 0) -> None:
        """``points``: (d, count or more); columns beyond ``count`` are ignored. ``depth``: 0: a usual one."""
        d = len(points)
        self.dim = d
        unit = TO_TILE if tiled else PAD
        if tiled:
            self.depth = depth or depth_of(d, np.dtype(dtype).name)
        else:
            self.depth = 0
        room = -(-count // unit) * unit
        self.count, self.ld = count, room
        self.to = self.packed = vectors.zeros((-(-d // self.depth) * self.depth if tiled else d, room), dtype)
        np.multiply(points[:, :count], factor, out=self.to[:d, :count])
        if not tiled:
            at_once = sizes_of(d, True, False, False)[1]
            self.packed = vectors.empty((room // at_once, d, at_once), dtype)
            self.packed[...] = self.to.reshape(d, -1, at_once).swapaxes(0, 1)
        self.log = vectors.zeros(room, dtype)

    def set(self, log: Any, left_out: float, finite: bool = False) -> None:
        log = vectors.asarray(log) + self.lost
        if finite:
            self.log[: len(log)] = np.where(np.isinf(log), left_out, log)
        else:
            self.log[: len(log)] = log
        self.log[len(log) :] = left_out


class SplitSide(PackedSide):
    """The points of one side in two float16 pieces, for point_products.cuh."""

    def __init__(self, points: Any, count: int, factor: float, largest: Any) -> None:
        """``points``: (d, count or more) float64; ``largest``: gets the largest size of a coordinate."""
        d = len(points)
        self.dim = d
        chunks = -(-d // PIECE)
        self.depth = 0
        self.count = count
        self.ld = -(-count // PRODUCT_TO) * PRODUCT_TO
        self.to = self.packed = cp.empty((chunks, self.ld, 4 * PIECE // 8))
        self.log = vectors.zeros(self.ld, np.float32)
        steps = (np.int64(step // 8) for step in points.strides)
        sizes = map(np.int64, (d, count, self.ld, chunks))
        blocks = min(vectors.MOST_BLOCKS, -(-4 * chunks * self.ld // 256))
        run = kernel("point_tables.cu", "split_points", STORE=0, COST=0)
        run((blocks,), (256,), (points, *steps, *sizes, np.float64(factor), self.to, largest))

    def round(self, points: Any, factor: float) -> "SplitSide":
        """Return the same points rounded to their first pieces, which share the memory of coordinates.

        ``lost``: their squares change by so much. With their own squares, rounded points x' and y' have exponents that
        are off by 2 (x - y).(dx - dy); with the squares of x and y, by 2 (x.dy + y.dx), which is more for near points.
        """
        side = copy.copy(self)
        side.rounded = True
        side.log = vectors.zeros(self.ld, np.float32)
        side.lost = vectors.empty(self.count)
        steps = (np.int64(step // 8) for step in points.strides)
        run = kernel("point_tables.cu", "lost_squares", STORE=0, COST=0)
        words = points, *steps, np.int64(self.dim), np.int64(self.count), np.float64(factor), side.lost
        if self.count:
            run((-(-self.count // 256),), (256,), words)
        return side


class Passes(NamedTuple):
    """Compiled kernels and options of passes of one precision."""

    sides: tuple[PackedSide, PackedSide]  # of the rows and of the columns
    narrow: bool
    form: int  # FORM of points.cuh
    factor: float = 1.0  # factor of the metric in an exponent
    quick: int = 0  # QUICK of points.cuh: 1 and 2 for float64 powers of 2 with errors of QUICK_ERROR and ROUGH_ERROR
    own: tuple[Any, Any] = 0.0, 0.0  # terms of costs that depend on one point, to subtract from the logarithms
    tops: bool = False  # find the largest exponents instead of sums


class PointIterate(Iterate):
    """Passes that make their entries; `set_passes` chooses float32 or float64 passes."""

    lists: list[Any]  # for rows and for columns: (first run of each box, runs, boxes by width, points of a box)

    def __init__(
        self, state: Any, shape: tuple[int, int, int], kl: tuple[bool, bool], masked: MaskedReference | None,
        tiled: bool, together: bool,
    ) -> None:  # fmt: skip
        """``tiled``: point_tiles.cuh makes passes over all pairs; ``together``: one potential, no ranks share rows."""
        self.kl, self.ld, self.masked, self.tiled = kl, shape[2], int(masked is not None), tiled
        self.products = tiled and device_limits(cp.cuda.Device().id)[0] >= PRODUCTS  # float32 passes on tensor cores
        self.together = together
        self.count = shape[0]
        self.masks = np.zeros(2, MASK)  # for the sums over rows and over columns
        for mask, cut in zip(self.masks, (masked, masked.T) if masked else (), strict=False):
            put(mask, cut.words())
        super().__init__(state, shape, "float64", kl, in_place=False, portable=True)

    def take_shape(self, shape: Shape, fused: bool, ld: int, dtype: str, kl: tuple[bool, bool]) -> None:
        """Do nothing yet: the kernels depend on the points."""

    def job(
        self, d: int, narrow: bool, form: int, lists: Any = None, quick: int = 0, tops: bool = False,
        rounded: bool = False,
    ) -> Job:  # fmt: skip
        """Return the job of sums in ``d`` dimensions; ``lists``: lists of DeviceBoxes, None for all pairs.

        ``rounded``: multiply first pieces alone.
        """
        kept = lists is not None
        most = 32 * sizes_of(d, narrow, bool(self.masked), kept)[0]
        if kept:
            warp = lists[0][-1]  # a box, of at most 64 points
        else:
            warp = most
        more = {"KEPT": int(kept), "QUICK": quick, "MASKED": self.masked, "SPLIT": most // warp}
        if self.products and narrow and form == FORMS["products"]:
            more["STEPS"] = -(-d // STEP)
            more |= {"PRODUCTS": 1} if rounded else {}
        elif self.takes_wide_products(d) and form == EXPANDED:
            more["WIDE_CHUNKS"] = -(-d // WIDE_PIECE)
        elif self.tiled:
            more["DEPTH"] = depth_of(d, "float32" if narrow else "float64")
        whole = d > DIM or kept or self.masked or tops
        across = self.count * -(-self.count // (8 * most))
        more |= {"HALVED": 1} if self.together and not whole and across <= MOST_ACROSS else {}
        return sums_job(self.kl, self.anderson_depth, d, narrow, form, **more, **({"TOPS": 1} if tops else {}))

    def takes_wide_products(self, d: int) -> bool:
        """Tell whether float64 passes over products of ``d`` coordinates multiply on tensor cores."""
        able = device_limits(cp.cuda.Device().id)[0] >= WIDE_PRODUCTS
        return self.tiled and able and d <= MOST_WIDE

    def set_passes(self, passes: Passes, lists: Any) -> None:
        (rows, cols), narrow = passes.sides, passes.narrow
        self.graphs = {}
        self.ratios: tuple[Any, Any] = np.uint64(0), np.uint64(0)  # factors of the sums over rows and over columns
        self.begun = False
        self.sides = passes.sides
        self.factor = passes.factor
        none = [(np.uint64(0),) * 3 + (other.ld,) for other in (cols, rows)]
        self.lists = [(*own, np.int64(unit)) for *own, unit in lists or none]
        split = isinstance(rows, SplitSide)
        d = rows.dim
        _, self.sums, options = self.job(d, narrow, passes.form, lists, passes.quick, passes.tops, rows.rounded)
        each, at_once = sizes_of(d, narrow, bool(self.masked), lists is not None)
        self.block = 256 * each // options["SPLIT"]
        self.resident = options["POINT_BLOCKS"]
        if rows.depth:
            self.block = TO_TILE
            at_once = FROM_TILE[rows.log.dtype.name]
        elif split:
            self.block = PRODUCT_TO
            at_once = PRODUCT_FROM
        self.halved = "HALVED" in options
        self.take_kernels(options, self.sums, *ends_of(options))
        pairs = (rows, cols), (cols, rows)
        if lists is None:
            self.slabs = [self.parts_of(to, other.ld // at_once) for to, other in pairs]
        else:
            self.slabs = [self.kept_parts_of(to) for to, _ in pairs]
        u = self.state["u_scale"]
        v = self.state["v_scale"]
        if narrow:
            self.narrow_u = cp.zeros(rows.ld, np.float32)
        else:
            self.narrow_u = np.uint64(0)
        self.weights = [np.uint64(v), np.uint64(u)]  # of the points summed over
        if narrow:
            self.weights = [np.uint64(self.state["narrow_v"]), self.narrow_u]
        across = rows.count * -(-rows.count // self.block) * self.halved
        self.out = cp.empty(max(s * side.count for s, side in zip(self.slabs, self.sides, strict=True)) + across)

    def parts_of(self, to: PackedSide, most: int) -> int:
        """Choose the number of parts of a sum, so that the last blocks to run leave few multiprocessors idle."""
        blocks = max(1, -(-to.count // self.block))
        resident = self.resident * self.processors
        waves = {
            parts: parts * blocks / resident for parts in range(1, min(DEVICE_LAUNCHES.most_parts, max(1, most)) + 1)
        }
        parts = [k for k, wave in waves.items() if wave <= WAVES] or [1]
        return max(parts, key=lambda k: waves[k] / math.ceil(waves[k]))

    def kept_parts_of(self, to: PackedSide) -> int:
        """Choose the number of parts of a sum over kept pairs: many, since boxes differ in their number of pairs."""
        waves = max(1, -(-to.count // self.block)) / (self.resident * self.processors)
        return max(1, min(DEVICE_LAUNCHES.most_parts, int(KEPT_WAVES / waves)))

    def row_kernels(self) -> None:
        parity = np.int32(self.parity)
        for k, name in enumerate(ENDS):
            to = self.sides[k]
            if to.count == 0:  # a rank without rows
                continue
            if k == 0 or not self.state["limits"]["symmetric"]:  # else K^T u = K v is known
                parts = np.int32(len(self.sum_over(k, self.weights[k])))
            self.launch(name, (-(-to.count // 256),), 256, parity, self.out, parts, self.narrow_u, self.ratios[k])

    def sum_over(self, k: int, weights: Any) -> Any:
        """Compute K w (k = 0) or K^T w (1) in parts, one behind the other."""
        to = self.sides[k]
        other = self.sides[1 - k]
        slabs = self.slabs[k]
        if isinstance(to, SplitSide):
            word = k
        else:
            word = to.to.shape[0]
        numbers = np.int64(to.count), np.int64(other.count), np.int64(word), np.float64(self.factor)
        self.launch(
            self.sums, (-(-to.count // self.block), slabs), 256, np.int32(self.parity), to.to, np.int64(to.ld), to.log,
            other.packed, other.log, weights, self.out, *numbers, *self.lists[k], by_value(self.masks[k, ...]),
        )  # fmt: skip
        if self.halved:
            folded = np.int32(self.parity), self.out, np.int64(to.count), np.int32(slabs)
            self.launch("fold_halves", (-(-to.count // 256),), 256, *folded)
        return self.parts_in_out(k)

    def parts_in_out(self, k: int) -> Any:
        """Return the parts of the sums over rows (k = 0) or columns (1), the last sums that were computed."""
        count = self.sides[k].count
        if self.halved:
            slabs = 1
        else:
            slabs = self.slabs[k]
        return self.out[: slabs * count].reshape(slabs, count)

    def tops(self, k: int, x: Any, mask: Any, hidden: float) -> Any:
        """Return -max_j (x_j - c_ij / reg) for each row (k = 0), or the same for columns (1); masked: ``hidden``."""
        to = self.sides[k]
        other = self.sides[1 - k]
        to.log[: to.count] = to.lost
        other.set(x, -np.inf, True)
        if to.count:
            tops = joined("row_max", self.sum_over(k, other.log))
        else:
            tops = to.log
        return np.where(vectors.asarray(mask), hidden, -vectors.asarray(tops))

    def rough_sums(self, k: int, weights: Any) -> Any:
        """Return K w (k = 0) or K^T w (1) as float32 passes compute it."""
        if self.sides[k].count == 0:  # a rank without rows
            return vectors.zeros(0)
        narrow = vectors.zeros(self.sides[1 - k].ld, np.float32)
        narrow[: len(weights)] = weights
        return vectors.asarray(joined("sums", self.sum_over(k, narrow)))

    def product(self, k: int, x: Any, y: Any) -> Any:
        """Return K x y (k = 0) or K^T x y (1), by float64 passes."""
        weights = vectors.zeros(self.sides[1 - k].ld)
        np.multiply(x, y, out=weights[: len(x)])
        return vectors.asarray(joined("sums", self.sum_over(k, weights)))


class PointWorkspace(DeviceWorkspace):
    launch: PointIterate
    narrow: tuple[PackedSide, PackedSide] | None = None
    split: tuple[SplitSide, SplitSide] | None = None  # points in float16 pieces
    rounded: tuple[SplitSide, SplitSide] | None = None  # points rounded to their first pieces
    rounds = False  # do float32 passes multiply first pieces alone now?
    measures = False  # does the next pass, with both pieces, correct such passes?
    measured_at = math.inf  # error of the pass that corrected them last
    narrow_limits: dict[str, float]  # of float32 passes with both pieces
    spare: tuple[PackedSide, PackedSide] | None = None  # points for float32 passes that may follow float64 ones
    corrected_at = math.inf  # error of the float64 pass whose sums corrected float32 passes last
    narrow_errors: tuple[float, ...] = ()  # of up to three last float32 passes, without the rounding of their entries
    own: Any  # of `Passes`

    def __init__(self, problem: Problem, options: Options, skip: Truncation | None = None) -> None:
        if not isinstance(problem.unmasked, str):
            raise NotImplementedError("reference must be 'product' or 'uniform' for points on a GPU")
        if "ordered" in switches():
            raise NotImplementedError("MAPUOT_CUDA=ordered is not for points")
        self.cloud, self.narrow_points = problem.cost.cloud, None
        self.quick = options.precision != "float64" and options.tol >= QUICK_TOL and not self.cloud.bits  # finite
        expansion = narrow_points.product_error(problem)
        self.expands = self.quick and expansion <= QUICK_ERROR  # are all but products of coordinates in the logarithms?
        self.rounding = 0.0  # of exponents: relative error of an entry, infinite where no powers may be quick
        self.expansion = expansion if self.expands else 0.0
        if options.precision != "float64":
            self.size = narrow_points.fitting(problem)
        else:
            self.size = None
        # may float32 passes follow a float64 pass, with sums corrected by its sums?
        many = problem.ranks.max(problem.size) >= DEVICE_LAUNCHES.least_corrected
        self.may_correct = many and options.tol > 0 and skip is None and not options.symmetric
        logarithmic = problem.rows.logarithmic and problem.cols.logarithmic
        # no value is asked for, and only the certificate of passes rests on their sums
        self.may_be_rough = skip is None and options.tol_gap < 0 and logarithmic and not problem.misses
        # the first float64 pass corrects float32 passes, and need not certify
        self.corrects_first = self.may_be_rough and self.may_correct and self.size is not None
        self.tiled = self.cloud.dim > DIM and not problem.masked and skip is None
        super().__init__(problem, options, skip)
        self.coarse.wanted = False  # a labelled pass needs a stored K

    def take_kernel(self) -> None:
        (m, n), self.dtype = self.problem.shape, "float64"
        self.most = int(self.problem.ranks.max(m))
        vectors = 8 * (40 + 7 * self.cloud.dim) * (m + n) + 8 * DEVICE_LAUNCHES.most_parts * max(m, n)
        need_memory(0, self.dtype, vectors)
        masked = self.problem.masked
        one = self.options.symmetric and self.problem.ranks.size == 1
        self.launch = PointIterate(self.state, (self.most, n, self.ld), self.kl, masked, self.tiled, one)
        needed = [] if self.policy.skips else self.needed()
        begin(needed)
        self.place()
        together(needed)

    def place(self) -> None:
        """Lay out the points for float32 passes, and for float64 passes that expand costs into products."""
        cloud, reg, weight = self.cloud, self.problem.reg, self.problem.rows.weight
        if self.size is None and not self.expands:
            return
        x, y = map(cp.asarray, narrow_points.centred(cloud, reg, namespace(*(cloud.here or (weight,)))))
        if self.size is not None:
            self.narrow_points = narrow_points.NarrowPoints(self.problem, self.size, (x, y))
            self.narrow = self.narrow_sides(x, y, 1.0 + narrow_points.expands_squares(cloud))
        if self.expands:
            factor = 1.0
            if cloud.core[0].product:
                found = narrow_points.addends(cloud, reg, cp)
            else:
                found = squares(x.T), squares(y[:, : cloud.shape[1]])
                factor = 2.0
            if namespace(weight) is np:
                self.own = tuple(map(host, found))
            else:
                self.own = found
            depth = WIDE_PIECE * self.launch.takes_wide_products(cloud.dim - cloud.apart)
            self.products = self.sides(x, y, factor=factor, depth=depth)

    def needed(self) -> list[Job]:
        """List the kernels of passes over all pairs: the float32, float64 and balancing kernels."""
        d = self.cloud.dim
        exact = self.cloud.core[0].number
        few, form = narrow_points.form_of(self.cloud)
        if self.size is None:
            jobs = []
        else:
            jobs = [self.launch.job(few, True, form, rounded=r) for r in {False, self.may_round}]
        for quick in {self.powers, self.last_powers}:
            expands = quick and self.expands
            jobs.append(self.launch.job(few if expands else d, False, EXPANDED if expands else exact, quick=quick))
        if not self.tiled:
            jobs.append(self.launch.job(d, False, exact, tops=True))
        return [job for _, sums, options in jobs for job in portable_jobs(options, sums, *ends_of(options))]

    def passes_of(self, narrow: bool) -> Passes:
        """Return the passes of a precision; float64 passes use quick powers and expand costs if the error allows."""
        if narrow and self.narrow and self.narrow_points:
            return Passes(self.rounded if self.rounded and self.rounds else self.narrow, True, self.narrow_points.form)
        metric, scale = self.cloud.core
        quick = self.powers
        if quick and self.expands:
            return Passes(self.products, False, EXPANDED, quick=quick, own=self.own)
        if quick:
            unit = narrow_points.LOG2_E
        else:
            unit = 1.0
        return Passes(self.wide, False, metric.number, scale / self.problem.reg * unit, quick)

    @property
    def last_powers(self) -> int:
        """Return QUICK of points.cuh for float64 passes that certify."""
        if not self.quick or math.isinf(self.rounding):
            return 0
        return 1 + (self.may_be_rough and self.options.tol >= ROUGH_TOL)

    @property
    def powers(self) -> int:
        """Return QUICK of points.cuh for float64 passes now."""
        return 2 if self.corrects_first and self.last_powers else self.last_powers

    @property
    def exact_limits(self) -> dict[str, float]:
        """Return the limits of float64 passes: the relative error of an entry, and the least entry."""
        error = (0.0, QUICK_ERROR, ROUGH_ERROR)[self.powers]
        if self.powers:
            error += self.expansion + self.rounding
        return {"storage_error": error, "flush": ROUGH_LEAST if self.powers == 2 else float(np.finfo(np.float64).tiny)}

    @property
    def tops(self) -> Passes:
        metric, scale = self.cloud.core
        return Passes(self.wide, False, metric.number, scale / self.problem.reg, tops=True)

    def sides(
        self, x: Any, y: Any, dtype: Any = np.float64, factor: float = 1.0, depth: int = 0
    ) -> tuple[PackedSide, PackedSide]:  # fmt: skip
        """Make both sides from points x (m, d), times a factor, and y (d, n padded)."""
        m, n = self.problem.shape
        rows = PackedSide(x.T, m, self.tiled, dtype, factor, depth)
        return rows, PackedSide(y, n, self.tiled, dtype, 1.0, depth)

    def narrow_sides(self, x: Any, y: Any, factor: float) -> tuple[PackedSide, PackedSide]:
        """Make both sides for float32 passes: for tensor cores, if these make products and coordinates fit float16."""
        m, n = self.problem.shape
        launch = self.launch
        launch.products = launch.products and narrow_points.form_of(self.cloud)[1] == FORMS["products"]
        if launch.products:
            largest = cp.zeros(1)
            sides = SplitSide(x.T, m, factor, largest), SplitSide(y, n, 1.0, largest)
            if self.problem.ranks.max(float(largest[0])) < MOST_PIECE:
                self.split = sides
                if self.may_round and self.problem.ranks.max(self.farthest) < MOST_ROUNDED:
                    self.rounded = sides[0].round(x.T, factor), sides[1].round(y, 1.0)
                return sides
            launch.products = False
        return self.sides(x, y, np.float32, factor)

    @property
    def may_round(self) -> bool:
        """Tell whether the first float32 passes may multiply first pieces alone, as far as the mean point tells."""
        able = self.launch.products and self.may_correct and narrow_points.expands_squares(self.cloud)
        return (
            able
            and self.size is not None
            and narrow_points.rounded_error(self.problem, self.size) <= DEVICE_LAUNCHES.rounded_worth
        )

    @property
    def farthest(self) -> float:
        """Return the largest square of a point, centred and scaled."""
        assert self.narrow_points
        own = self.narrow_points.own_x, self.narrow_points.own_y
        return max(float(x.max()) if x.size else 0.0 for x in own)

    @cached_property
    def wide(self) -> tuple[PackedSide, PackedSide]:
        """Unscaled coordinates, for float64 passes that do not expand squares."""
        return self.sides(*self.cloud.coordinates(cp))

    def start(self) -> None:
        super().start()
        self.progress["narrow"] = self.narrow is not None
        self.rounds = self.rounded is not None
        if self.narrow is not None:
            limits = self.state["limits"]
            self.floor = float(limits["narrow_floor"])
            put(limits, {"flush": 2.0**-126})
        self.choose()

    @property
    def kept_lists(self) -> Any:
        """Return the lists of the kept pairs; None if all pairs are kept."""
        if self.policy.kept:
            boxes = self.policy.boxes
        else:
            boxes = None
        if isinstance(boxes, DeviceBoxes):
            return boxes.lists
        return None

    def choose(self) -> None:
        """Take the kernels of the current precision, for all pairs or for kept pairs."""
        lists = self.kept_lists
        if self.narrow and self.progress["narrow"] > 0:
            self.launch.set_passes(self.passes_of(True), lists)
            return
        if self.narrow and self.may_correct:
            self.spare = self.narrow
        self.narrow = None
        self.rounds = self.measures = False
        put(self.state["limits"], self.exact_limits)
        self.launch.set_passes(self.passes_of(False), lists)

    def take_both_pieces(self) -> None:
        """Make a float32 pass with both pieces of coordinates, which corrects passes over rounded points."""
        self.rounds = False
        self.measures = True
        put(self.progress, {"narrow": 1, "floor_error": 0, "floor_passes": 0})
        put(self.state["limits"], self.narrow_limits)
        self.send_report()
        self.choose()

    def round_again(self, error: float) -> None:
        """Follow a pass with both pieces, and this error, by passes over rounded points whose sums it corrects.

        Passes go on with both pieces instead, if the correction before did not lower the error.
        """
        assert self.rounded
        assert self.narrow_points
        self.measures = False
        if not error < min(FELL * self.measured_at, math.inf):
            return
        self.measured_at = error
        self.rounds = True
        self.correct_sums(self.rounded)
        floor = max(self.narrow_limits["narrow_floor"], MEASURED_MOST * error * self.narrow_points.rounded_error)
        put(self.state["limits"], self.narrow_limits | {"narrow_floor": floor})

    def follow_float64(self) -> None:
        """Follow a float64 pass by float32 ones whose sums it corrects."""
        assert self.spare
        assert self.narrow_points
        self.corrects_first = False
        self.narrow_errors = ()
        put(self.progress, {"narrow": 1, "floor_error": 0, "floor_passes": 0})
        self.send_report()
        self.rounds = False
        sides = self.spare
        if self.rounded and self.corrected_at * self.narrow_points.rounded_error <= self.options.tol:
            self.rounds = True
            sides = self.rounded
        self.correct_sums(sides)
        floor = CORRECTED_FLOOR * self.floor
        put(self.state["limits"], self.exact_limits | {"narrow_floor": floor, "flush": 2.0**-126})

    def correct_sums(self, sides: tuple[PackedSide, PackedSide]) -> None:
        """Take float32 kernels over these points; correct their sums by the sums of the last, more exact pass.

        In K~ v = (1 + e_i) K v, e_i is the mean over the row's mass of the relative errors of entries. It changes by
        the product of these errors and the change of log v, so that near this v a ratio of sums leaves no error.
        """
        assert self.narrow_points
        launch = self.launch
        n = self.problem.shape[1]
        u = vectors.asarray(self.arrays["u_scale"])[: self.problem.shape[0]]
        r, log_v, e = map(vectors.asarray, (self.answers["r"], self.potentials()[1], self.absorbed[0]))
        v = np.exp(log_v + float(self.progress["shift"]) - e)
        exact = r / u, vectors.asarray(joined("sums", launch.parts_in_out(1)))
        launch.set_passes(Passes(sides, True, self.narrow_points.form), None)
        pairs = zip(exact, (v[:n], u), strict=True)
        launch.ratios = tuple(ratio_of(known, launch.rough_sums(k, w)) for k, (known, w) in enumerate(pairs))

    def stay_in_float64(self) -> None:
        """Make no float32 passes from here on."""
        self.spare = None
        self.corrects_first = False
        self.choose()

    def take_mask(self, pairs: Truncation) -> None:
        assert pairs.problem.cost is self.cloud
        pairs.renew(pool_for(self.options.threads, self.problem.cost.size), DeviceBoxes)
        put(self.progress, START)
        self.choose()

    def balance(self, out_u: Any, plan_v: F64) -> tuple[F64, F64]:
        """Balance K by the kernels of a pass, over the kept pairs if some are skipped.

        Products on tensor cores find scalings in float32, so that the largest entries are near 1. Rows then look for
        their largest entry among some columns only. Every row still has an entry of 1, at such a column j: beta_j is
        log v_j there, as alpha_i <= M_ij / reg - log v_j for all i.
        """
        unit, own_x, own_y = 1.0, 0.0, 0.0  # a power is unit times the logarithm, less the own term of the point
        passes = self.tops
        if self.split and self.narrow_points:
            passes = Passes(self.rounded or self.split, True, self.narrow_points.form, tops=True)
            unit = narrow_points.LOG2_E
            own_x, own_y = map(on_device, (self.narrow_points.own_x, self.narrow_points.own_y))
        elif self.tiled:
            return super().balance(out_u, plan_v)
        x = vectors.asarray(plan_v)
        ranks = self.problem.ranks
        launch = self.launch
        launch.set_passes(passes, self.kept_lists)
        some = 1
        if passes.narrow:
            some = max(1, min(MOST_APART, x.size // DEVICE_LAUNCHES.least_tops))
        for apart in sorted({some, 1}, reverse=True):
            launch.factor = apart * passes.factor
            alpha = (launch.tops(0, unit * x - own_y, out_u, -np.inf) + own_x) / unit
            launch.factor = passes.factor
            beta = (launch.tops(1, unit * alpha - own_x, plan_v == -np.inf, np.inf) + own_y) / unit
            with np.errstate(invalid="ignore"):
                if apart == 1 or ranks.max(largest(np.where(np.isfinite(x), x - beta, 0.0))) <= MOST_TOP:
                    break
        self.choose()
        if namespace(plan_v) is np:
            return (alpha.get(), -ranks.max(-beta.get()))
        return (alpha, beta)

    def fitted(self, alpha: F64, beta: F64) -> tuple[F64, F64]:
        if self.narrow and self.narrow_points:
            found = self.narrow_points.fitted(alpha, beta)
        else:
            found = None
        if self.narrow and self.problem.ranks.max(found is None):  # all ranks go on in float64
            self.progress["narrow"] = 0
            self.choose()
            return alpha, beta
        if found and self.narrow_points:
            limits = self.narrow_points.limits(self.floor, self.policy)
            tol = self.options.tol
            if self.may_correct and tol < NOISY * limits["narrow_floor"]:
                limits["narrow_floor"] = max(limits["narrow_floor"], min(CORRECT_AT, CORRECT_FROM * tol))
            self.narrow_limits = limits
            if self.rounded:  # an earlier correction was of the sums of another K
                error = self.narrow_points.rounded_error
                jump = ROUNDED_JUMP * error * self.floor / NARROW_NOISE
                self.rounds = error <= DEVICE_LAUNCHES.rounded_worth and jump <= MOST_JUMP
                self.measures = False
                self.measured_at = math.inf
                self.choose()
                at = max(min(MEASURE_AT, MEASURED_SHARE * self.goal / error), LEAST_JUMPS * jump)
                limits = limits | ({"storage_error": error, "narrow_floor": at + 3 * error} if self.rounds else {})
            put(self.state["limits"], limits)
        return found or (alpha, beta)

    def build(self, alpha: F64, beta: F64, error: float) -> None:
        self.progress["exponent_error"] = error
        if self.spare:  # the sums of another K would need other corrections
            self.progress["narrow"] = 0
            self.stay_in_float64()
        was = self.powers
        self.rounding = error if error <= QUICK_MOST else math.inf
        wide = self.passes_of(False)
        for side, log, own in zip(wide.sides, (alpha, beta), wide.own, strict=True):
            if wide.quick:
                power = np.maximum(narrow_points.LOG2_E * log - own, QUICK_OUT)
            else:
                power = log
            side.set(power, QUICK_OUT if wide.quick else -np.inf)
        if not self.narrow and wide.quick != was:
            self.choose()
        elif not self.narrow:
            put(self.state["limits"], self.exact_limits)
        if self.narrow and self.narrow_points:
            self.narrow[0].set(self.narrow_points.row, narrow_points.LEFT_OUT)
            self.narrow[1].set(self.narrow_points.col[: len(beta)], narrow_points.LEFT_OUT)
            if self.rounded:
                self.rounded[0].set(self.narrow_points.row, narrow_points.LEFT_OUT)
                self.rounded[1].set(self.narrow_points.col[: len(beta)], narrow_points.LEFT_OUT)

    @property
    def makes_products(self) -> bool:  # type: ignore[override]
        """Tell whether Newton's step uses products with K by the kernels of a pass: only without ranks."""
        return self.problem.ranks.size == 1

    def take_float64(self) -> None:
        self.choose()
        self.resume()

    def newton_product(self) -> Callable[[F64], F64]:
        """Return the product for Newton's step from the last pass: P^T (fi / r) P d, or -P d with one potential.

        The product lies where d lies.
        """
        self.progress["narrow"] = 0.0
        self.take_float64()
        reg = self.problem.reg
        shift = float(self.progress["shift"])
        kappa = float(self.progress["kappa"])
        inputs = self.answers["r"], self.answers["u_log"], self.problem.rows.rho, self.potentials()[1], self.absorbed[0]
        r, log_u, rho, log_v, e = map(vectors.asarray, inputs)
        with np.errstate(divide="ignore", invalid="ignore"):
            u = np.exp(log_u)
            v = np.exp(log_v + shift - e)
            factor = kappa / (1 + reg / rho) * u * (u / r)
            factor = np.where((factor >= TINY) & (factor < np.inf), factor, np.nan)  # 0 would silently drop a row
            factor = np.where(r > TINY, factor, 0.0)
        v = np.where(np.isfinite(v), v, 0.0)

        def product(d: F64) -> F64:
            sums = self.launch.product(0, v, vectors.asarray(d))
            found: F64 = -v * sums if self.options.symmetric else v * self.launch.product(1, factor, sums)
            return host(found) if namespace(d) is np else found

        return product

    def passes(self, count: int, before: int = 0) -> None:
        """Enqueue passes; after a pass that may correct the next ones, its numbers are read first."""
        if self.measures or (self.spare and not self.progress["narrow"] > 0):
            count = 1
        super().passes(count, before)

    def may_end_next(self, found: list[Stats]) -> bool:
        """Tell whether the pass after these float32 passes is likely to reach tol."""
        rounding = 3 * float(self.state["limits"]["storage_error"])
        self.narrow_errors = (*self.narrow_errors, *(stat.error - rounding for stat in found))[-3:]
        if not found or found[-1].status != "running" or found[-1].rejected or len(self.narrow_errors) < 3:
            return False
        if self.measures or (self.rounds and self.narrow and math.isinf(self.measured_at)):  # not corrected yet
            return False
        first, second, last = self.narrow_errors
        if not first > second > last > 0:
            return False
        return last * max(last / second, second / first) <= LIKELY * self.options.tol

    @property
    def goal(self) -> float:
        """Return the error at which the first float32 passes end."""
        return max(self.options.tol, self.narrow_limits["narrow_floor"])

    def leave_float32(self) -> None:
        """Make float64 passes next, as widen_passes of rules.h does."""
        best = float(self.progress["best_dual"]) - 2 * float(self.progress["moved"])
        put(self.progress, {"narrow": 0, "best_dual": best if math.isfinite(best) else -math.inf})
        self.send_report()

    def read(self) -> list[Stats]:
        was_narrow = self.progress["narrow"] > 0
        rounded = self.rounds and self.narrow is not None
        found = super().read()
        if not self.progress["narrow"] > 0 and rounded and found and found[-1].error > self.goal:
            self.take_both_pieces()
        elif was_narrow and self.may_correct and self.progress["narrow"] > 0 and self.may_end_next(found):
            self.leave_float32()
        accepted = bool(found) and found[-1].status == "running" and not found[-1].rejected
        if (self.narrow or was_narrow) and not self.progress["narrow"] > 0:
            self.choose()
        elif self.measures and accepted and not rounded:
            self.round_again(found[-1].error)
        elif self.spare and found and not was_narrow:
            last = found[-1]
            if not last.error <= FELL * self.corrected_at:
                self.stay_in_float64()
            elif accepted:
                if last.error > WORTH_AGAIN * self.options.tol:
                    self.corrected_at = last.error
                    self.follow_float64()
                elif self.corrects_first:
                    self.stay_in_float64()
        return found

    def close(self) -> None:
        """Do nothing: the points are freed with the workspace."""
