"""Costs between the nodes of regular grids (images and volumes), with products along one axis after the other.

The cost is a sum over the axes, so that exp(-M / reg) is a product of small matrices, one for each axis: a product with
it takes n^(1 + 1/d) multiplications, and no more memory than its vectors (backends/cpu/grid.py).
"""

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..contract import Backend
from ..penalties import F64
from ..ranks import Ranks
from ..synonyms import hinted
from .cost import Cost, Range, Tell, UserCost
from .validate import MOST, as_count, as_positive

MOST_LISTED = 1 << 32  # largest plan that is listed entry by entry, in about a minute


class Grid(UserCost):
    """Cost ``scale * |x_i - y_j|^2`` between the nodes of two regular grids, which takes the place of M in `solve`.

    Parameters
    ----------
    shape : tuple of int
        Nodes of the rows along each of d axes: the shape of an image or a volume. Node i lies at ``spacing * i``.
    spacing, scale : float or d of them; float
        Distance between neighbours along each axis, and factor of the squared distance, > 0.
    target : tuple of int, optional
        Nodes of the columns along each axis. Default: ``shape``.
    offset : float or d of them
        Node j of the columns lies at ``offset + spacing * j``.

    See Also
    --------
    PointCloud, barycenter, log_matmul

    Notes
    -----
    ``grid.nodes`` is the pair ``(shape, target)``; masses and per-point reg_m may have these shapes. All vectors of an
    answer are flat, in C order: ``result.row_marginal.reshape(grid.nodes[0])``. ``grid.shape`` is the shape of the
    matrix.

    Penalties are "kl" and "balanced", the reference is a b^T or ones, and passes are float64, in one process. With
    ``backend="cuda"`` the products are computed on the GPU. A plan of more than 2^32 entries is not listed: ``plan``,
    ``top_k``, ``sparse``, ``plot.links`` and ``sample(replace=False)`` raise at once; ``apply``, ``barycentric_map``,
    ``push``, ``cost``, ``rows`` and ``sample`` with replacement work.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> grid = mapuot.Grid((40, 30), spacing=1 / 40)
    >>> x, y = np.moveaxis(grid.points().reshape(40, 30, 2), 2, 0)
    >>> a, b = np.exp(-20 * ((x - 0.3) ** 2 + (y - 0.2) ** 2)), np.exp(-20 * ((x - 0.6) ** 2 + (y - 0.5) ** 2))
    >>> result = mapuot.solve(grid, a / a.sum(), b / b.sum(), reg=0.01, reg_m=1.0)
    >>> result.converged
    True
    >>> result.barycentric_map(grid.points()).reshape(40, 30, 2)[12, 8].round(1)
    array([0.6, 0.5])
    """

    _cost: "GridCosts"

    @hinted
    def __init__(
        self,
        shape: Any,
        spacing: ArrayLike = 1.0,
        scale: float = 1.0,
        *,
        target: ArrayLike | None = None,
        offset: ArrayLike = 0.0,
    ):
        if isinstance(shape, int) and isinstance(spacing, int) and spacing > 1:
            image = f"a grid of {shape} x {spacing} nodes is Grid(({shape}, {spacing}))"
            raise ValueError(f"spacing must be a float for a shape of one number, got {spacing}: {image}")
        super().__init__(GridCosts(shape, spacing, scale, target=target, offset=offset))

    def _hold(self, cost: Any) -> None:
        super()._hold(cost)
        self.nodes, self.spacing, self.offset, self.scale = cost.nodes, cost.spacing, cost.offset, cost.scale

    def points(self, side: str = "rows") -> F64:
        """Return the coordinates of the nodes of the rows, (m, d), or with ``side="cols"`` of the columns, (n, d)."""
        return self._cost.points(cols=side != "rows")


class GridCosts(Cost):
    operator = "products"
    remade = wide = True
    turns = True
    dtype = np.dtype(np.float64)

    def __init__(self, shape: Any, spacing: Any = 1.0, scale: float = 1.0, *, target: Any = None, offset: Any = 0.0):
        self.nodes = as_nodes(shape, "shape"), as_nodes(shape if target is None else target, "target")
        d = len(self.nodes[0])
        if len(self.nodes[1]) != d:
            raise ValueError(f"target must have {d} axes, as shape has, got {len(self.nodes[1])}")
        self.spacing = each_axis(spacing, d, "spacing", as_positive)
        self.scale = as_positive(scale, "scale")
        self.offset = each_axis(offset, d, "offset", partial(as_positive, least=-MOST, wanted="a finite number"))
        self.shape = math.prod(self.nodes[0]), math.prod(self.nodes[1])
        with np.errstate(over="ignore"):
            if not math.isfinite(self.error(0.0)):
                raise ValueError("spacing, offset and scale must be such that all costs are finite")

    @property
    def kind(self) -> str:
        return f"a grid of {' x '.join(map(str, self.nodes[0]))} nodes"

    def points(self, cols: bool) -> F64:
        """Return the coordinates of the nodes of a side, (nodes, d)."""
        starts = self.offset if cols else [0.0] * len(self.spacing)
        lines = [o + h * np.arange(k) for k, h, o in zip(self.nodes[cols], self.spacing, starts, strict=True)]
        return np.stack(np.meshgrid(*lines, indexing="ij"), -1).reshape(-1, len(lines))

    def symmetric(self, backend: Backend | None = None) -> bool:
        return self.nodes[0] == self.nodes[1] and not any(self.offset)

    @property
    def axes(self) -> list[F64]:
        """Costs along each axis: a matrix (nodes of the rows, nodes of the columns) for each."""
        sides = zip(*self.nodes, self.spacing, self.offset, strict=True)
        return [np.asarray(self.scale * (h * (np.arange(m)[:, None] - np.arange(n)) - o) ** 2) for m, n, h, o in sides]

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, i0: int, i1: int) -> F64:
        out = np.zeros((i1 - i0, *self.nodes[1]))
        for k, (C, i) in enumerate(zip(self.axes, np.unravel_index(np.arange(i0, i1), self.nodes[0]), strict=True)):
            out += C[i].reshape(len(out), *(-1 if axis == k else 1 for axis in range(len(self.spacing))))
        return out.reshape(len(out), -1)

    def transpose(self) -> "GridCosts":
        back = tuple(-o for o in self.offset)
        return GridCosts(self.nodes[1], self.spacing, self.scale, target=self.nodes[0], offset=back)

    def own_block(self, a: Any, b: Any, ranks: Ranks) -> "GridCosts":
        if ranks.size > 1:
            raise NotImplementedError(f"{self.kind} is solved in one process: comm must be None")
        return self

    def range(self, backend: Backend, threads: int | None = None, tell: Tell = None) -> Range:
        return sum(float(C.min()) for C in self.axes), sum(float(C.max()) for C in self.axes), 0, 0

    def error(self, largest: float) -> float:
        """Bound the rounding of a cost: 8 roundings for each axis (coordinates may cancel), and d + 2 for the sum."""
        sides = zip(*self.nodes, self.spacing, self.offset, strict=True)
        reach = sum(np.float64(h * max(m, n) + abs(o)) ** 2 for m, n, h, o in sides)
        return float(2.0**-53 * (8 * self.scale * reach + (len(self.spacing) + 2) * largest))

    def flattened(self, a: Any, b: Any, reg_m: Any) -> tuple[Any, Any, Any]:
        """Flatten masses and penalties of the nodes' shape to vectors; a batch has one problem in each row."""
        if isinstance(reg_m, (tuple, list)) and len(reg_m) == 2:
            reg_m = tuple(flat(rho, nodes) for rho, nodes in zip(reg_m, self.nodes, strict=True))
        return flat(a, self.nodes[0]), flat(b, self.nodes[1]), reg_m

    def check_listed(self, name: str) -> None:
        if self.size > MOST_LISTED:
            many = f"all {self.size:.1e} entries of the plan of {self.kind}, which takes too long"
            cure = "apply, barycentric_map, push, pull and sample make none or few of them, and rows some rows"
            raise MemoryError(f"{name} makes {many}: {cure}")


def flat(value: Any, nodes: tuple[int, ...]) -> Any:
    shape = getattr(value, "shape", None) or np.shape(value)
    lead = len(shape) - len(nodes)
    if len(nodes) < 2 or lead not in (0, 1) or tuple(shape[lead:]) != nodes:
        return value
    if hasattr(value, "reshape"):
        array = value
    else:
        array = np.asarray(value)
    return array.reshape((*shape[:lead], math.prod(nodes)))


def as_nodes(value: Any, name: str) -> tuple[int, ...]:
    if np.ndim(value) > 1:
        raise ValueError(f"{name} must be a shape, such as image.shape[:2], got an array of shape {np.shape(value)}")
    if isinstance(value, (tuple, list)):
        sizes = value
    else:
        sizes = (value,)
    if not sizes:
        raise ValueError(f"{name} must have an axis, got {value!r}")
    return tuple(as_count(n, f"{name}[{k}]") for k, n in enumerate(sizes))


def each_axis(value: Any, d: int, name: str, check: Any) -> tuple[float, ...]:
    if np.ndim(value) == 0:
        values = [value] * d
    else:
        values = list(value)
    if len(values) != d:
        raise ValueError(f"{name} must be a number or one for each of {d} axes, got {len(values)}")
    return tuple(check(x, name) for x in values)
