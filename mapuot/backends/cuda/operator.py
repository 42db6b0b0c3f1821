"""All products with one cost on a GPU: K on the device, and the plan of potentials.

Passes of two marginals are launches of `Iterate` over this K (workspace.py). For ``fused``, from sm_90 on,
src_cuda/many/fused_pass.cu reads K once, in float32 on request. On older devices, and if rows are too wide for all
multiprocessors together, K is in float64, and CuPy's products read it twice. The plan is made from M in float64, block
by block: as numpy array if M is numpy's, else as CuPy array. Twin: backends/cpu/operator.py.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import cupy as cp
import numpy as np

from ...arrays import PAD, even_parts, host
from ...cached import cached_property
from ...penalties import F64
from ...problem.cost import Cost, Dense
from ...problem.mask import MaskedReference
from ...problem.settings import BLOCKS
from ...problem.sparse import Sparse
from ...ranks import ALONE, Ranks
from ..coarse import Labels
from ..draw import runs
from ..kernel import FLUSH_PRODUCT, TINY
from ..operator import BLOCK_BYTES, Operator
from ..records import put
from ..settings import KERNELS
from ..workspace import STORAGE
from . import backend, log_matmul, vectors
from .arrays import MANY, Carrier, Room, as_columns, free_memory, most_bytes, on_device, pinned
from .kernels import BESIDE, ITEMSIZE, PASS, STORES, UNSET, Strips, by_value, kernel, ring_offset, strips_for
from .launch import BULK, device_limits
from .settings import DEVICE_ARRAYS
from .stream import PLAIN, apply_rows, fill_rows, joined, parts, reduce_rows, stream, view_of

FEW_COLUMNS = 4  # columns that one kernel multiplies with a row of the plan while making it


def places_of(shares: Any, rows: Any) -> tuple[Any, ...]:
    """Return the arguments of the kernel ``draw`` from ``masses`` to ``rows`` for rows that are known."""
    nothing = np.uint64(0)
    return nothing, nothing, shares, np.int64(0), rows


class NearPairs(Sparse):
    """Pairs of a dense M that may carry mass; the arrays stay on the device.

    Disconnected parts are not reported: pairs between parts are left out for now, not forbidden.
    """

    def parts_between(self, out_rows: Any, out_cols: Any, ranks: Ranks = ALONE) -> None:  # type: ignore[override]
        return None

    def row_numbers(self) -> Any:
        return cp.searchsorted(self.start, cp.arange(self.size), side="right") - 1

    def taken_from(self, other: Any) -> Sparse:
        row = self.row_numbers()
        column = self.column
        if other.xp is cp:
            given = other.at(row, column)
        else:
            given = other.at(row.get(), column.get())
        return NearPairs(cp.asarray(given, np.float64), column, self.start, self.shape, on_device=True)


class DeviceOperator(Operator):
    """K on the current device, its rows padded with zeros, and the plan."""

    PIECE = 1 << 22
    arrays = backend
    as_columns = staticmethod(as_columns)
    log_matmul = staticmethod(log_matmul.product)
    stages: tuple[Carrier, Carrier] | None = None  # carriers of M and of c, kept from one sweep to the next
    formed: Any = None  # the matrix of costs between points, if it is there

    def __init__(
        self, cost: Cost, reg: float, c: Cost | None = None, ranks: Ranks = ALONE, threads: int | None = None
    ) -> None:
        super().__init__(cost, reg, c, ranks)
        self.there = isinstance(cost.array, cp.ndarray)  # is M on the device? the plan is made there, too
        self.ld = -(-self.shape[1] // PAD) * PAD
        self.K: Any = cp.empty((0, 0))
        self.labels: Labels | None = None
        self.stored = ""

    def blocks(
        self, i0: int = 0, i1: int | None = None, most: int | None = None
    ) -> Iterator[tuple[int, int, Any, Any]]:
        """Yield row blocks (k0, k1, M, c) on the device; c is None without a reference matrix.

        ``most``: most rows of a block; by default all rows if M is on the device.
        """
        if self.formed is None:
            cost = self.cost
        else:
            cost = Dense(self.formed)
        if most is None:
            size = most_bytes(cost.array)
        else:
            size = most * self.shape[1] * cost.dtype.itemsize
        stage, stage_c = self.stages or (Carrier(), Carrier())
        for k0, k1, M, c in cost.blocks(self.c, i0, i1, size):
            if isinstance(c, MaskedReference):
                moved = c.with_given(stage_c)
            elif c is None:
                moved = None
            else:
                moved = stage_c(c)
            yield k0, k1, stage(M), moved

    def set_exponents(self, alpha: Any, beta: Any) -> Any:
        """Set the exponents; copy them to the device unless they are there."""
        if not isinstance(alpha, cp.ndarray):
            alpha, beta = on_device(alpha, beta)
        return super().set_exponents(alpha, beta)

    # ---- the plan

    def back(self, x: Any) -> Any:
        return x if self.cost.xp is cp else x.get()

    def over_ranks(self, x: Any) -> Any:
        if self.ranks.size > 1:
            return cp.asarray(self.ranks.sum(x.get()))
        return x

    def plan(self, i0: int, i1: int, out: Any = None) -> Any:
        n = self.shape[1]
        dtype = self.dtype
        if out is None:
            stays = self.there
        else:
            stays = isinstance(out, cp.ndarray)
        needed = stays * (out is None) * (i1 - i0) * n * dtype.itemsize
        if needed > (free := free_memory(needed)):
            text = f"{needed / 2**30:.2f} GiB on the device, {free / 2**30:.2f} GiB are free: Result.rows makes fewer"
            raise MemoryError(f"{i1 - i0} rows of the plan need {text}")
        if out is None:
            out = (cp if stays else np).empty((i1 - i0, n), dtype)
        for k0, k1, M, c in self.blocks(i0, i1):
            if stays:
                block = out[k0 - i0 : k1 - i0]
            else:
                block = cp.empty((k1 - k0, n), dtype)
            fill_rows(block, dtype.name, M, c, self.alpha[k0:k1], self.beta, self.reg)
            if not stays:
                block.get(out=out[k0 - i0 : k1 - i0])
        return out

    def product(self, X: Any, turned: bool) -> Any:
        out: Any = None
        for i0, i1, M, c in self.blocks():
            alpha = self.alpha[i0:i1]
            beta = self.beta
            Y = X
            if turned:
                M, c, alpha, beta, Y = M.T, None if c is None else c.T, beta, alpha, X[i0:i1]  # noqa: PLW2901
            if self.there or X.shape[1] <= FEW_COLUMNS:
                part = apply_rows(M, c, alpha, beta, self.reg, Y)
            else:  # form the plan: one exponential for an entry serves all columns
                P = cp.empty(M.shape)
                fill_rows(P, "float64", M, c, alpha, beta, self.reg)
                part = P @ Y
            if i1 - i0 == self.shape[0]:
                return part
            if out is None:
                out = cp.zeros((self.shape[turned], X.shape[1]))
            if turned:
                out += part
            else:
                out[i0:i1] = part
        if out is None:
            return cp.zeros((self.shape[turned], X.shape[1]))
        return out

    def exponents(self, i0: int, i1: int) -> Any:
        x = cp.empty((i1 - i0, self.shape[1]))
        for k0, k1, M, _ in self.blocks(i0, i1):
            x[k0 - i0 : k1 - i0] = cp.asarray(M, np.float64) * (-1.0 / self.reg) + self.beta
        if self.c is not None:
            with np.errstate(divide="ignore"):
                x += cp.asarray(np.log(np.asarray(host(self.c.read(i0, i1)), np.float64)))
        return x

    def weighed(self, into: Any) -> Callable[[F64], F64]:
        """Return the product with the plan; form the plan if it fits, which takes as long as one product."""
        size = 8 * self.cost.size
        if not self.there or self.ranks.size > 1 or self.cost.operator != "tiles" or size > free_memory(size):
            return super().weighed(into)
        ((_, _, M, c),) = self.blocks()
        m, n = self.shape
        P = cp.empty((m, n))
        d = cp.empty(n)
        sent = pinned(n)
        found = pinned(n)
        fill_rows(P, "float64", M, c, self.alpha, self.beta, self.reg)

        def product(x: F64) -> F64:
            """Return one product; the next call overwrites its memory."""
            sent[:] = x
            d.set(sent, stream=cp.cuda.get_current_stream())
            return ((into * (P @ d)) @ P).get(out=found)  # type: ignore[no-any-return]

        return product

    def own_sums(self) -> tuple[float, F64, F64]:
        (m, n), reg = self.shape, self.reg
        row = cp.empty(m)
        col = cp.zeros(n)
        cost = 0.0
        for i0, i1, M, c in self.blocks():
            own, paid = reduce_rows("plan_sums", M, c, self.alpha[i0:i1], self.beta, reg, 2)
            row[i0:i1] = joined("plan_sums", own)
            turned = None if c is None else c.T
            col += joined("plan_sums", reduce_rows("plan_sums", M.T, turned, self.beta, self.alpha[i0:i1], reg, 2)[0])
            cost += float(paid.sum())
        return cost, row.get(), col.get()

    def sums_and_products(self, X: Any, Y: Any) -> tuple[tuple[float, F64, F64], Any, Any]:
        """Return `sums`, P X and P^T Y; between points in many dimensions, each tile of the plan is made once."""
        cloud: Any = self.cost.cloud
        is_other = self.cost is not cloud
        if is_other or cloud.dim < MANY or not cloud.core[0].product:
            return super().sums_and_products(X, Y)
        if self.c is not None or self.ranks.size > 1:
            return super().sums_and_products(X, Y)
        (m, n), reg = self.shape, self.reg
        metric, scale = cloud.core
        X, _ = as_columns(X, n, "X")
        Y, _ = as_columns(Y, m, "Y")
        Y = cp.concatenate([Y, cp.ones((m, 1))], axis=1)
        rows, columns = cloud.coordinates(cp)
        rows = rows * (metric.product * scale)
        columns = cp.ascontiguousarray(columns[:, :n].T)
        cost: Any = cp.zeros(())
        row = cp.zeros(m)
        PX = cp.zeros((m, X.shape[1]))
        PY = cp.zeros((n, Y.shape[1]))
        side = math.isqrt(DEVICE_ARRAYS.block_bytes // 8)
        for i in even_parts(m, side):
            for j in even_parts(n, side):
                M = rows[i] @ columns[j].T
                alpha = self.alpha[i]
                beta = self.beta[j]
                own, paid = reduce_rows("plan_sums", M, None, alpha, beta, reg, 2)
                row[i] += joined("plan_sums", own)
                cost = cost + paid.sum()
                P = cp.empty(M.shape)
                fill_rows(P, "float64", M, None, alpha, beta, reg)
                PX[i] += P @ X[j]
                PY[j] += P.T @ Y[i]
        return (float(cost), row.get(), PY[:, -1].get()), PX, PY[:, :-1]

    def logarithms(self, cost: Cost) -> Iterator[tuple[int, int, Any]]:
        for i0, i1, M, _ in DeviceOperator(cost, self.reg).blocks():
            for k0 in range(i0, i1, rows := max(1, BLOCK_BYTES // (8 * cost.shape[1]))):
                k1 = min(k0 + rows, i1)
                yield k0, k1, cp.asarray(M[k0 - i0 : k1 - i0], np.float64) / -self.reg

    def draw_by(self, masses: Any, *shares: F64) -> Any:
        """Draw pairs (2, size) on the device: rows where cumulated masses exceed ``shares``, then their columns.

        ``shares``: of the rows and of the columns; float64, on the host or the device.
        """
        pairs = cp.empty((2, len(shares[0])), np.int64)
        ((_, _, M, c),) = self.blocks()
        there = shares if isinstance(shares[0], cp.ndarray) else on_device(*shares)
        self.launch_draw(M, c, self.alpha, (masses, *there, np.int64(0), pairs[0]), 0, pairs[1])
        return pairs

    def launch_draw(self, M: Any, c: Any, alpha: Any, given: tuple[Any, ...], i0: int, found: Any) -> None:
        """Draw a column for each row; one warp makes a row and cumulates it at once.

        ``given``: the arguments of the kernel from ``masses`` to ``rows``; i0: first row of this block.
        """
        view = view_of(M, c, alpha, self.beta, self.reg)
        words = np.int64(i0), np.int64(len(found)), found, np.int64(0)
        stream("draw", M, c)((-(-len(found) // 8),), (256,), (view, *given, *words))

    def draw(self, rows: Any, at: F64) -> tuple[Any, Any]:
        wanted = cp.empty((2, len(rows)))
        pairs = cp.empty((2, len(rows)), np.int64)
        there = self.formed is not None or self.cost.xp is cp
        if there:
            order: Any = slice(None)
        else:
            order = np.argsort(rows, kind="stable")
        rows = rows[order].astype(np.int64)
        wanted.set(np.stack((rows.view(np.float64), at[order])))
        pairs[0] = wanted[0].view(np.int64)
        if there:
            ((_, _, M, c),) = self.blocks()
            self.launch_draw(M, c, self.alpha, places_of(wanted[1], pairs[0]), 0, pairs[1])
        elif self.cost.cloud is self.cost and self.c is None:
            self.draw_from_points(rows, wanted[1], pairs[1])
        else:
            self.draw_from_rows(rows, wanted[1], pairs)
        if self.cost.xp is cp:
            return pairs[0], pairs[1]
        drawn = np.empty((2, len(rows)), np.int64)
        drawn[:, order] = pairs.get()
        return drawn[0], drawn[1]

    def draw_from_rows(self, rows: Any, shares: Any, pairs: Any) -> None:
        """Draw a column for each of these sorted rows, from blocks of rows that hold them and few others."""
        for i0, i1 in runs(np.unique(rows), self.shape[1]):
            for k0, k1, M, c in self.blocks(i0, i1):
                own = slice(*np.searchsorted(rows, (k0, k1)))
                if own.start < own.stop:
                    given = places_of(shares[own], pairs[0, own])
                    self.launch_draw(M, c, self.alpha[k0:k1], given, k0, pairs[1, own])

    def draw_from_points(self, rows: Any, shares: Any, found: Any) -> None:
        """Draw a column for each of these sorted rows; the costs of each are made once, of many rows at a time."""
        cost: Any = self.cost
        some, first = np.unique(rows, return_index=True)
        step = max(1, BLOCKS.plan_entries // self.shape[1])
        ends = np.append(first, len(rows))
        place = cp.asarray(np.repeat(np.arange(len(some)), np.diff(ends)))
        stage = Carrier()
        for k0 in range(0, len(some), step):
            k1 = min(k0 + step, len(some))
            own = slice(ends[k0], ends[k1])
            alpha = vectors.asarray(self.alpha)[vectors.asarray(some[k0:k1])]
            given = places_of(shares[own], place[own])
            self.launch_draw(stage(cost[some[k0:k1]]), None, alpha, given, k0, found[own])

    # ---- K

    def balance(self, alpha: F64, x: F64) -> F64:
        (m, n), reg = self.shape, self.reg
        if m == 0:
            return np.full(n, -np.inf)
        beta, used = on_device(x, alpha)
        told = cp.empty(m + n)
        balances = kernel("stream.cu", "balance_rows", **PLAIN)
        for i0, i1, M, c in self.blocks():
            rows = used[i0:i1]
            (high,) = reduce_rows("row_max", M, c, rows, beta, reg)
            numbers = np.int64(i1 - i0), np.int32(len(high))
            balances((-(-(i1 - i0) // 256),), (256,), (high, *numbers, rows, told[i0:i1]))
            (high,) = reduce_rows("row_max", M.T, None if c is None else c.T, beta, rows, reg)
            joined("row_max", high, told[m:], i0 > 0)
        found = told.get()
        alpha[:] = found[:m]
        return np.asarray(found[m:])

    def kept_pairs(self, alpha: F64, beta: F64, nats: float, most: int) -> Sparse | None:
        """Return the pairs of an M on the device with exponents of -``nats`` or more; None if more than ``most``."""
        ((_, _, M, c),) = self.blocks()
        grid = parts(*M.shape)
        none = np.uint64(0)
        run = stream("kept_pairs", M, c)
        alpha, beta = on_device(alpha, beta)  # kept alive: the view points at them
        view = view_of(M, c, alpha, beta, self.reg)
        count = cp.empty((len(M), grid[1]), np.int64)
        run(grid, (256,), (view, np.float64(-nats), count, none, none))
        start = cp.zeros(count.size + 1, np.int64)
        cp.cumsum(count.ravel(), out=start[1:])
        size = int(start[-1])
        if size > most:
            return None
        data = cp.empty(size)
        column = cp.empty(size, np.int32)
        run(grid, (256,), (view, np.float64(-nats), start, column, data))
        return NearPairs(data, column, start[:: grid[1]].copy(), self.shape, on_device=True)

    def store(self, dtype: str, rows: int | None = None) -> None:
        """Allocate K; ``rows``: rows that it holds at once, by default all."""
        for name in ("strips", "v", "ends", "posts", "room", "parts", "out"):  # free old arrays first
            vars(self).pop(name, None)
        self.K = None
        if rows is None:
            rows = self.shape[0]
        needed = rows * self.ld * ITEMSIZE[dtype]
        if needed > (free := free_memory(needed)):
            told = f"{needed / 2**30:.2f} GiB on the device, {free / 2**30:.2f} GiB are free"
            raise MemoryError(f"the kernel of {self.shape[0]} x {self.shape[1]} costs needs {told}: use backend='cpu'")
        self.K = cp.empty((rows, self.ld), STORAGE[dtype])
        self.stored = dtype

    def build(self, alpha: F64, beta: F64, flush: float = 0.0, held: bool = True) -> None:
        """Build K with entries below ``flush`` set to 0; not ``held``: K holds only some rows, which `fill` makes."""
        self.set_exponents(alpha, beta)
        for i0, i1, M, c in self.blocks() if held else ():
            self.fill(i0, i1, M, c, flush, i0)

    def fill(self, i0: int, i1: int, M: Any, c: Any, flush: float = 0.0, to: int = 0) -> None:
        """Make the rows i0 to i1 in K, from its row ``to`` on."""
        whole = i1 - i0 == len(self.K) == self.shape[0]  # a slice takes CuPy 5 us
        if whole:
            out, alpha = self.K, self.alpha
        else:
            out = self.K[to : to + i1 - i0]
            alpha = self.alpha[i0:i1]
        fill_rows(out, self.stored, M, c, alpha, self.beta, self.reg, flush)

    def close(self) -> None:
        self.K = self.stages = None

    @property
    def matrix(self) -> Any:
        return self.K[:, : self.shape[1]]

    # ---- passes with given ``base`` and ``fi`` instead of a prox

    def strips_of(self, dtype: str) -> Strips | None:
        """Return the grid of one read of such a K; None if the device has no bulk copies, or rows are too wide."""
        capability, processors, shared = device_limits(cp.cuda.Device().id)
        if capability >= BULK:
            return strips_for(self.shape[0], self.ld, ITEMSIZE[dtype], processors, shared)
        return None

    def open(self, dtype: str) -> str:
        if self.strips_of(dtype):
            return dtype
        return "float64"

    @cached_property
    def strips(self) -> Strips | None:
        """The grid of one read of K, with its kernels and vectors prepared; None where K is read twice."""
        shape = self.strips_of(self.stored)
        if shape:
            self.lay_out(shape)
        return shape

    def lay_out(self, shape: Strips) -> None:
        """Make the kernels and vectors of one read of K, and two records, which alternate with their posts."""
        m, _ = self.shape
        options = {"STORE": STORES[self.stored], **shape.options}
        self.run, self.join = (kernel("fused_pass.cu", name, **options) for name in ("fused_pass", "join_streams"))
        self.shared = ring_offset("fused_pass.cu", **options) + shape.bytes(self.K.itemsize)
        self.run.max_dynamic_shared_size_bytes = max(self.shared, self.run.max_dynamic_shared_size_bytes)
        rows = -(-m // shape.R) * shape.R
        self.v = cp.zeros(self.ld)
        self.ends = cp.empty(2 * m)  # base, and s
        self.posts = part, scale = cp.empty((2, rows * shape.strips)), cp.empty((2, rows))
        for posts in self.posts:
            vectors.fill(posts.ravel(), UNSET)
        self.records = np.zeros(2, PASS)
        self.turn = 0
        for back, record in enumerate(self.records):
            put(record, {name: getattr(shape, name) for name in ("strips", "slice", "slots", "lag")})
            put(record, {"m": m, "ld": self.ld, "kernel": self.K, "v": self.v, "s": self.ends[m:]})
            put(record, {"part": part[back], "old_part": part[1 - back]})
            put(record, {"scale": scale[back], "old_scale": scale[1 - back]})
        self.own = self.records  # records for products with vectors of factors; sizes: lengths of the factors
        self.sizes = [0]

    def make_room(self, sizes: list[int], flush: float) -> None:
        """Allocate the vectors that calls send and read, and the sums; few sums are read together with s."""
        m, n = self.shape
        if self.strips:
            streams = self.strips.streams
        else:
            streams = 0
        self.sizes = sizes
        self.starts = np.cumsum([0, *sizes]).view(np.float64)  # sent along
        few = self.ld if n <= KERNELS.host_entries else 0
        self.room = Room({"starts": len(self.starts), "factors": sum(sizes), "base": m, "s": m, "sums": few})
        self.parts = cp.empty(0 if few and streams == 1 else streams * self.ld)
        if few:
            self.out = self.room.there[self.room.at["sums"]]
        else:
            self.out = self.parts[: self.ld]
        self.own = self.records.copy()
        address = self.room.address
        numbers = {"v": address("factors"), "s": address("s"), "starts": address("starts"), "axes": len(sizes)}
        put(self.own, {**numbers, "flush": flush})

    def read(self, v: F64, base: F64, fi: float, sizes: Any) -> tuple[F64, Any]:
        """Return (s = K v, K^T u), u = e^base s^-fi, valid until the next call; two copies, and one or two launches."""
        if sizes is None:
            own = [len(v)]
        else:
            own = sizes.tolist()
        if own != self.sizes:
            self.make_room(own, 0.0 if sizes is None else FLUSH_PRODUCT)
        room = self.room
        n = self.shape[1]
        room.send(starts=self.starts, factors=v, base=base)
        self.sweep(fi)
        if n <= KERNELS.host_entries:
            room.bring("s", "sums")
            return room["s"], room["sums"][:n]
        room.bring("s")
        return room["s"], self.out[:n]

    def sweep(self, fi: float) -> None:
        """Launch a read of K with the vectors sent last."""
        assert self.strips
        sums = self.parts if self.parts.size else self.out
        streams = self.strips.streams
        self.launch_read(sums, self.room.address("base"), 0, fi, self.own)
        if streams > 1:
            grid = (min(-(-self.ld // 256), streams * self.strips.strips),)
            self.join(grid, (256,), (sums, self.out, np.int64(self.ld), np.int32(streams)))

    def launch_read(self, sums: Any, base: int, own: int, fi: float, records: Any = None) -> None:
        """Launch a read of K with ``v`` and the vector at ``base`` less the number at ``own``; sums: a row a stream."""
        assert self.strips
        turn = self.turn
        blocks = self.strips.streams * self.strips.strips
        if records is None:
            records = self.records
        record = records[turn : turn + 1].reshape(())
        threads = self.strips.THREADS + BESIDE
        record["sums"], record["base"], record["own"], record["fi"] = sums.data.ptr, base, own, fi
        self.run((blocks,), (threads,), (by_value(record), np.int32(turn)), shared_mem=self.shared)
        self.turn = 1 - turn

    def fused(self, v: F64, base: F64, fi: float, narrow: bool, sizes: Any = None) -> tuple[F64, Any, float]:
        if self.strips:
            s, sums = self.read(v, base, fi, sizes)
        else:
            s = self.dots(v, sizes)
            sums = None
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            log_s = np.log(s)
            u = np.exp(base - fi * log_s)
        if self.labels and 0 < u.max() < np.inf:
            self.clusters = self.exchange(self.labels, u / u.max(), self.vector(v, sizes))
        if sums is None:
            sums = cp.asarray(u) @ self.matrix
        return log_s, host(sums) if self.shape[1] <= KERNELS.host_entries else sums, float(u.max())

    def vector(self, v: F64, sizes: Any) -> Any:
        """Return the vector v on the device; ``sizes``: v holds its factors; form their product."""
        factors = [cp.asarray(x) for x in np.split(v, [] if sizes is None else np.cumsum(sizes)[:-1])]
        out = factors[0]
        for x in factors[1:]:
            out = (out[:, None] * x).ravel()
        if sizes is None:
            return out
        return cp.where(out < FLUSH_PRODUCT, 0.0, out)

    def dots(self, v: F64, sizes: Any = None) -> F64:
        if self.strips:
            return self.read(v, np.zeros(self.shape[0]), 0.0, sizes)[0]
        return np.asarray(host(self.matrix @ self.vector(v, sizes)))

    def label(self, labels: Labels | None) -> None:
        self.labels = labels
        if labels:  # zeros, in case no later pass can be labelled
            self.clusters = np.zeros(labels.clusters), cp.zeros((labels.clusters, self.shape[1]), np.float32)

    def exchange(self, labels: Labels, u: F64, v: Any) -> tuple[F64, Any]:
        """Return the mass and the column shares of each cluster, by one more product with K that counts as no pass."""
        members = cp.zeros((labels.clusters, len(u)), self.K.dtype)
        members[cp.asarray(labels.label), cp.arange(len(u))] = cp.asarray(u.astype(self.K.dtype))
        blocks = (members @ self.matrix) * v
        mass = blocks.sum(1)
        shares = (blocks / cp.maximum(mass, TINY)[:, None]).astype(np.float32)
        return host(mass), shares

    def exchanged(self) -> tuple[F64, Any]:
        return self.clusters
