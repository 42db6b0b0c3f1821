"""Validated problems, one or a batch of them.

    min_P  <P, M> + reg KL(P | c) + D1(P 1 | a) + D2(P^T 1 | b),     KL(p|q) = sum p log(p/q) - p + q

with P = diag(u) K diag(v), K = c exp(-M / reg), and log u, log v in POT's convention (a and b are not in them).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..arrays import any_of, arithmetic, formula, host, largest, namespace
from ..cached import cached_property
from ..contract import Backend
from ..errors import InfeasibleError
from ..penalties import F64, project
from ..ranks import ALONE, Ranks
from . import validate
from .clouds import Clouds
from .cost import Blocks, Cost, Dense
from .kinds import as_cost, as_costs, formed
from .mask import MaskedReference, as_mask
from .parts import Parts, allowed_pairs, joined, parts_of_masks
from .settings import EXTENT, POINTS
from .side import Side
from .side import equal as equal_vectors

Alike = TypeVar("Alike", bound="Common")
EXPONENT_ROUNDING = 2.0**-50  # 8 roundings of the terms of log u + log v - M / reg
BLOCK_BYTES = 1 << 24  # of M, in one block of the search for forbidden pairs
MOST_CONSTANT = 1024.0  # in ranges of M: a larger constant in M is taken out of the costs
CONSTANT_NATS = 1e5  # constant / reg: a larger constant is taken out, too, as it rounds exponents by 1e-10
LIFT_ROUNDING = 2.0**-50  # relative: 8 roundings, of the masses too
VANISHING = 750.0  # e^-750 is 0 in float64, with any rounding
NOTHING = 800.0  # e^-800 times any float64 factor of a plan is negligible
FAR_APART = 3 * NOTHING  # least M / reg of a point that takes no part


def constant_of(low: float, high: float, reg: float) -> float:
    """Return the least cost where M less this constant has more digits, else 0.

    The difference is exact: all entries lie within a factor of 2 of the constant (Sterbenz).
    """
    if abs(low) > max(MOST_CONSTANT * (high - low), CONSTANT_NATS * reg):
        return float(low)
    return 0.0


def heavy(weight: F64) -> Any:
    """Choose `EXTENT.lines` points, in their order: the middle of each of so many equal parts of the mass.

    On a device read one sum from each of up to `EXTENT.most_far` parts, then the parts that hold these points.
    """
    xp = namespace(weight)
    n = len(weight)
    if xp is np:
        each = 1
    else:
        each = -(-n // EXTENT.most_far)
    sums = np.cumsum(weight)
    mass = host(sums[xp.asarray(np.minimum(np.arange(each, n + each, each), n) - 1)])
    middle = (np.arange(EXTENT.lines) + 0.5) / EXTENT.lines * mass[-1]
    first = each * np.minimum(np.searchsorted(mass, middle), len(mass) - 1)
    inside = np.minimum(first[:, None] + np.arange(each), n - 1)
    before = host(sums[xp.asarray(inside.ravel())]).reshape(inside.shape) < middle[:, None]
    return np.minimum(first + before.sum(1), n - 1)


def some(weight: F64) -> Any:
    """Choose all points if there are at most `EXTENT.most_far`, else every k-th."""
    return np.arange(0, len(weight), -(-len(weight) // EXTENT.most_far))


def farthest(costs: F64) -> float:
    """Return the distance of the farthest points except a few outliers; inf for too few points.

    The distance of a point is the second largest of its `EXTENT.lines` costs.
    """
    second = np.sort(np.where(np.isfinite(costs), costs, -np.inf), 1)[:, -2]
    count = len(second)
    few = min(2, count // 64) + count // 1000
    if few:
        return float(np.sort(second)[-1 - few])
    return math.inf


@formula
def exponent(log: F64, log_reference: F64) -> F64:
    total = log + log_reference
    return np.where(np.isfinite(total), total, -np.inf)


class Idle(NamedTuple):
    """Points that take no part in any plan near the optimum (`Problem.idle_points`)."""

    masks: tuple[Any, Any]  # of the rows and of the columns
    rows_from: float  # least cost of a pair of an idle row, and of an idle column, in units of reg
    cols_from: float

    def holds(self, potentials: Any, marginals: Any, ranks: Ranks) -> bool:
        """Tell whether these points have no mass, and all other log scalings are small enough to leave them none."""
        good = True
        for k, nearest in ((0, self.cols_from), (1, self.rows_from)):
            log = potentials[k]
            mask = self.masks[k]
            most = largest(np.where(np.isfinite(log) & ~mask, log, -np.inf), -np.inf)
            good &= most <= 2 / 3 * nearest - NOTHING and not any_of(mask & (marginals[k] != 0))
        return bool(ranks.min(good))


class DerivedMembers:
    """Members of a problem that follow from its fields."""

    shape: tuple[int, int]
    size: int  # number of stored pairs
    range_over_reg: float  # range(M) / reg
    sides: tuple[Side, Side]
    ranks: Ranks  # the processes that share M; all other members belong to this rank's block
    c: Cost | None  # the reference measure, if the user gave a matrix or a mask
    masked: MaskedReference | None
    unmasked: str | Cost  # the reference measure without its mask
    balanced: bool  # whether all points of both sides are hard

    def __post_init__(self: Any) -> None:
        reference = self.reference
        if isinstance(reference, MaskedReference):
            masked = reference
        else:
            masked = None
        vars(self).update(
            shape=self.cost.shape, size=self.cost.size, range_over_reg=(self.M_max - self.M_min) / self.reg,
            sides=(self.rows, self.cols), ranks=self.rows.ranks, masked=masked,
            c=None if isinstance(reference, str) else reference,
            unmasked=masked.base if masked else reference,
            balanced=self.rows.penalty == self.cols.penalty == "balanced",
        )  # fmt: skip


@dataclass(frozen=True)
class Common(DerivedMembers):
    """Base of Problem and BatchProblem."""

    cost: Cost  # in the caller's memory (any strides) and dtype, float32 or float64
    rows: Side
    cols: Side
    reg: float
    reference: str | Cost  # "product", "uniform", c, or `MaskedReference`: one of these with a mask
    M_min: float
    M_max: float
    forbidden: bool  # some M_ij is inf
    constant: Any = field(default=0.0, kw_only=True)  # taken out of M: `cost` has M less this; (p,) of own costs
    # log u is `Answer.own_logs` less this, log v more (translation.py); (p,) of a batch
    translation: Any = field(default=0.0, kw_only=True)
    offset: float = field(default=0.0, kw_only=True)  # of the dual value: by scaled masses it is off by so much

    M = property(attrgetter("cost.array"))  # an array, or an object that `numpy.asarray` reads as one

    def lowered(self: Alike) -> Alike:
        """Return the problem with M less a large constant; itself where there is none or no side is hard.

        A constant c in M adds c times the mass to the value of every plan. Where a side is hard all plans have one
        mass, so that the optimal plan stays, and only the potential of this side changes, by c.
        """
        if "balanced" not in (self.rows.penalty, self.cols.penalty):
            return self
        constant = constant_of(self.M_min, self.M_max, self.reg)
        cost = self.cost.less(constant) if constant else None
        if cost is None:
            return self
        high = self.M_max - constant
        return dataclasses.replace(self, cost=cost, M_min=0.0, M_max=high, constant=self.constant + constant)

    @property
    def lift(self) -> Any:
        """The value of the constant, which every plan pays: one number, (p,) for a batch."""
        raise NotImplementedError

    @property
    def least_lift(self) -> Any:
        """Return the lift minus its rounding; lower bounds use it."""
        if not np.any(self.constant):
            return self.offset
        lift = self.lift
        return lift - LIFT_ROUNDING * np.abs(lift) + self.offset

    def lift_of(self, mass: Any, converged: Any) -> Any:
        """Return the constant's part of the value of plans of this mass; of converged plans, the lift."""
        if not np.any(self.constant):
            return 0.0
        with np.errstate(invalid="ignore"):  # the mass of a failed problem is infinite, its constant may be 0
            paid = np.where(np.equal(self.constant, 0), 0.0, self.constant * mass)
        return np.where(converged, self.lift, paid)

    @property
    def translations(self) -> tuple[Any, Any]:
        """The parts of log u and log v that `Answer.own_logs` lack, beside the constant of M."""
        return -self.translation, self.translation

    @property
    def constants(self) -> tuple[Any, Any]:
        """The parts of f and g that reg times `Answer.own_logs` lacks."""
        if not (np.any(self.constant) or np.any(self.translation)):
            return 0.0, 0.0
        regs = getattr(self, "regs", self.reg)
        f, g = (c + regs * t for c, t in zip(self.cost_constants, self.translations, strict=True))
        return f, g

    @property
    def cost_constants(self) -> tuple[Any, Any]:
        """The parts of the constant in f and in g: it belongs to the hard side, or to both, half to each."""
        if self.balanced:
            return 0.5 * self.constant, 0.5 * self.constant
        if self.rows.penalty == "balanced":
            return self.constant, 0.0
        return 0.0, self.constant

    @property
    def extent(self) -> float:
        """The range of M, or the part of the range that matters."""
        return self.M_max - self.M_min

    @property
    def alike(self) -> bool:
        return self.rows.alike(self.cols)

    @property
    def misses(self) -> bool:
        """Whether passes may miss hard column marginals, for sides with a logarithmic prox."""
        return self.rows.logarithmic and self.cols.logarithmic and self.cols.demands

    def unlike(self, backend: Backend) -> str | None:
        """Name the argument that makes rows and columns different problems; None if they are the same."""
        if self.rows.ranks.size > 1:
            fits = backend.ranks_share_one_potential and self.own_alike()
            return None if self.rows.ranks.min(fits) else "comm"
        if self.masked is not None:
            return "mask"
        if not self.alike:
            return "masses, reg_m or penalty"
        if not self.cost.symmetric(backend):
            return "M"
        if self.c is not None and not self.c.symmetric(backend):
            return "reference"
        return None

    @property
    def own(self) -> slice:
        """The columns equal to this rank's rows, if rows and columns are the same problem."""
        before = self.rows.ranks.before(self.shape[0])
        m = self.shape[0]
        return slice(before, before + m)

    def own_alike(self) -> bool:
        """Tell whether the rows of this rank are the columns ``own`` of a cloud without skipped pairs."""
        cloud, own = self.cost.cloud, self.own
        count = self.rows.n_points
        n = self.shape[1]
        if cloud is None or cloud.core[0].product or cloud.truncates(count * n) or not isinstance(self.reference, str):
            return False
        return count == n and np.array_equal(cloud.rows, cloud.targets[own]) and self.rows.alike(self.cols, own)

    def shares(self, backend: Backend, X: Any, rows: bool = True, threads: int | None = None) -> Any:
        """Multiply the masked reference, without a b^T, by X (n,) or (n, p); its transpose unless ``rows``."""
        assert self.masked is not None
        xp = namespace(X)
        cut = self.masked
        if isinstance(cut.base, str):
            base: Any = "uniform"
        else:
            base = cut.base
        c = MaskedReference(base, cut.mask, cut.shape, cut.row, cut.col)
        nothing = xp.broadcast_to(xp.zeros(1), self.shape)
        task = Problem(Dense(nothing), self.rows, self.cols, 1.0, c, 0.0, 0.0, False, 0.0)
        if not rows:
            task = task.transpose()
        log_u, log_v = map(np.zeros, task.shape)
        return backend.plan_of(task, log_u, log_v, threads).apply(X)

    @property
    def exchanged(self) -> dict[str, Any]:
        """The fields of the problem with rows and columns exchanged."""
        if self.c is None:
            reference = self.reference
        else:
            reference = self.c.transpose()
        found = {"cost": self.cost.transpose(), "rows": self.cols, "cols": self.rows, "reference": reference}
        return {**found, "translation": -self.translation}


@dataclass(frozen=True)
class Problem(Common):
    """A problem with one plan; over ranks, the block of one rank."""

    c_mass: float

    @property
    def turns(self) -> bool:
        """Tell whether the transposed problem can be solved at no cost."""
        return self.ranks.size == 1 and self.cost.turns

    def blocks(self, i0: int = 0, i1: int | None = None, most: int | None = None) -> Blocks:
        """Yield (k0, k1, rows of M, rows of c or None), see ``Cost.blocks``."""
        return self.cost.blocks(self.c, i0, i1, most)

    @cached_property
    def extent(self) -> float:
        """The range of M, cut at `EXTENT.tail` times the distance of the farthest points except a few outliers.

        One distant point can make the range arbitrarily large without changing the rest of the plan. But if both sides
        are hard, it must exchange mass with the others, and only larger regs find its price in few passes.
        """
        whole = self.M_max - self.M_min
        sides = [(side.there or side).weight for side in self.sides]
        if self.ranks.size > 1 or not self.cost.at_hand or (self.rows.demands and self.cols.demands):
            return whole
        rows = farthest(self.cost.at(some(sides[0])[:, None], heavy(sides[1])))
        columns = farthest(self.cost.at(heavy(sides[0]), some(sides[1])[:, None]))
        return min(whole, EXTENT.tail * (max(rows, columns) - self.M_min))

    @property
    def usual(self) -> float:
        """The median cost between points chosen by mass, minus the least cost; the largest median of all ranks."""
        rows, cols = (heavy((side.there or side).weight) for side in self.sides)
        if self.shape[0]:
            costs = self.cost.at(rows[:, None], cols)
        else:
            costs = np.empty(0)
        costs = costs[np.isfinite(costs)]
        if costs.size:
            own = float(np.median(costs))
        else:
            own = self.M_min
        return float(self.ranks.max(own)) - self.M_min

    @cached_property
    def log_reference(self) -> tuple[F64, F64]:
        """Return (log a, log b) for c = a b^T, else zeros: the part of c that scales rows and columns."""
        if self.unmasked == "product":
            return self.rows.log_weight, self.cols.log_weight
        return np.zeros_like(self.rows.weight), np.zeros_like(self.cols.weight)

    @cached_property
    def left_out(self) -> tuple[Any, Any]:
        """Masks of the rows and columns with scaling 0: see ``Side.left_out``."""
        log_a, log_b = self.log_reference
        return self.rows.left_out(log_a), self.cols.left_out(log_b)

    @cached_property
    def parts(self) -> Parts | None:
        """The parts of a sparse M that no pair connects, if there are several; over ranks, of the whole M."""
        if self.cost.operator != "pairs":
            return None
        parts: Parts | None = self.cost.parts_between(*self.left_out, self.ranks)
        if parts is not None and parts.count > 1:
            return parts
        return None

    @property
    def several_parts(self) -> Parts | None:
        """The parts between which M and the reference forbid all pairs, if there are several; it reads M once."""
        if self.cost.operator == "pairs" or not (self.forbidden or self.c is not None):
            return self.parts
        out_rows, out_cols = self.left_out
        parts: Parts | None = self.cost.parts_between(out_rows, out_cols, self.ranks)
        if parts is None and not (self.cost.remade and self.cost.size > POINTS.auto_entries):
            masks = (
                allowed_pairs(M, c) & ~(out_rows[i0:i1, None] | out_cols)
                for i0, i1, M, c in self.blocks(most=BLOCK_BYTES)
            )
            parts = parts_of_masks(masks, self.shape[1])
            if self.ranks.size > 1:
                count, new, cols = joined(self.ranks.all(parts.packed), self.shape[1])
                parts = Parts(count, new[self.ranks.rank][parts.rows], cols)
        if parts is not None and parts.count > 1:
            return parts
        return None

    def project(self, log_u: F64, log_v: F64) -> tuple[F64, F64]:
        """Project potentials onto the domain of the dual."""
        if self.rows.penalty == "tv":
            log_u = project("tv", host(log_u), self.rows.rho, self.reg)
        if self.cols.penalty == "tv":
            log_v = project("tv", host(log_v), self.cols.rho, self.reg)
        return log_u, log_v

    def transpose(self) -> "Problem":
        return dataclasses.replace(self, **self.exchanged)

    def exponent_error(self, log_u: F64, log_v: F64, idle: "Idle | None" = None) -> float:
        """Bound the relative plan error from rounding log u + log v - M / reg, by its largest terms.

        Costs above log u + log v by VANISHING (finite costs that stand for inf) give entries of 0 and do not count;
        neither do the points of ``idle``.
        """
        if idle is not None:
            log_u = np.where(idle.masks[0], 0.0, log_u)
            log_v = np.where(idle.masks[1], 0.0, log_v)
        terms = largest(np.where(np.isfinite(log_u), np.abs(log_u), 0.0))
        terms += largest(np.where(np.isfinite(log_v), np.abs(log_v), 0.0))
        if self.unmasked == "product":
            terms += self.rows.log_size + self.cols.log_size
        terms = self.ranks.max(terms)
        paid = min(self.range_over_reg, terms + abs(self.M_min) / self.reg + VANISHING)
        most = min(self.M_max, self.M_min + paid * self.reg)
        error = self.ranks.max(self.cost.error(most))  # with weights it differs between ranks
        return EXPONENT_ROUNDING * float(paid + terms) + float(error) / self.reg

    def idle_points(self, alpha: F64, beta: F64) -> "Idle | None":
        """Find points too far from all others to take part, by alpha_i + beta_j <= M_ij / reg; None if there is none.

        With L_i the least M_ij / reg of such a row, let log u_i be L_i / 3. Then its dual term is below the dual term
        of a row without mass by rho a_i e^(-L_i reg / (3 rho)). Its P_ij is a_i b_j e^(L_i / 3 + log v_j - M_ij / reg):
        negligible while log v_j is below 2 L_i / 3 - NOTHING, and negligible between two idle points. So the gap of a
        plan without these points is valid, and the rounding of their exponents does not matter.
        """
        found = []
        floors = [-self.ranks.max(largest(np.where(np.isfinite(x), -x, -np.inf), -np.inf)) for x in (alpha, beta)]
        for side, log, floor in zip(self.sides, (alpha, beta), reversed(floors), strict=True):
            least = log + floor
            soft = side.penalty in ("kl", "tv")
            apart: Any = np.inf
            if soft:
                with np.errstate(over="ignore"):
                    apart = FAR_APART * np.maximum(1.0, side.soft_rho / self.reg)
            found.append((np.isfinite(log) & ~side.hard & (least >= apart), least))
        masks = found[0][0], found[1][0]
        if not self.ranks.max(any(map(any_of, masks))):
            return None
        nearest = (largest(np.where(mask, -least, -np.inf), -np.inf) for mask, least in found)
        return Idle(masks, *(-self.ranks.max(x) for x in nearest))

    def exponents(self, log_u: F64, log_v: F64) -> tuple[F64, F64]:
        """Return log u_i + log a_i and log v_j + log b_j, the plan's exponent without M and c; -inf for zeros."""
        alpha, beta = (exponent(x, reference) for x, reference in zip((log_u, log_v), self.log_reference, strict=True))
        return alpha, beta

    def check_reachable(self, dead_rows: Any, dead_cols: Any) -> None:
        """Raise if mass must be transported from or to a point with all pairs forbidden (the masks ``dead``).

        If no pair is forbidden, points without a partner have costs beyond float64, and the status reports this.
        """
        if not (self.forbidden or self.c is not None or self.masked or self.cost.operator == "pairs"):
            return
        for side, dead in ((self.rows, dead_rows), (self.cols, dead_cols)):
            if side.penalty == "range":
                needs = side.rho > 0
            else:
                needs = side.hard
            hard = dead & (side.weight > 0) & needs
            if any_of(hard):
                point = f"{side.name}[{int(np.argmax(host(hard)))}]"
                if self.masked:
                    by = "M and the mask forbid"
                else:
                    by = "M forbids"
                raise InfeasibleError(f"{by} every pair of {point}, which must be transported")

    @classmethod
    def from_arrays(
        cls, M: Any, a: Any, b: Any, reg: Any, reg_m: Any, penalty: Any, reference: Any, backend: Backend,
        ranks: Ranks = ALONE, threads: int | None = None,
    ) -> "Problem":  # fmt: skip
        """Make the problem from the arguments of `solve`."""
        cost = as_cost(M, backend, ranks, a, b)
        return cls.from_cost(cost, a, b, reg, reg_m, penalty, reference, backend, ranks, threads)

    @classmethod
    def from_cost(
        cls, cost: Cost, a: Any, b: Any, reg: Any, reg_m: Any, penalty: Any, reference: Any, backend: Backend,
        ranks: Ranks = ALONE, threads: int | None = None, mask: Any = None, tell: Callable[[int], Any] | None = None,
    ) -> "Problem":  # fmt: skip
        """Make a problem from a cost (over ranks, this rank's block) and a SeededMask or None."""
        reg = validate.as_positive(reg, "reg")
        m, n = cost.shape
        ranks.same(**{"the number of columns of M": n})
        fits = backend.reads_vectors_on_device and isinstance(reference, str)
        if fits and ranks.size == 1 and max(m, n) >= POINTS.stays_from:  # vectors lie beside the points
            xp = arithmetic(*(getattr(cost, "here", None) or ()))
        else:
            xp = np
        weight_a = validate.as_weight(a, m, "a", backend, ranks, xp)
        weight_b = validate.as_weight(b, n, "b", backend, xp=xp)
        rows, cols = validate.as_sides(weight_a, weight_b, penalty, reg_m, ranks, validate.reader(backend, xp))
        validate.check_masses(rows, cols, rows.mass, cols.mass)
        if rows.penalty == cols.penalty == "balanced":
            even = validate.evening(rows.mass, cols.mass)
        else:
            even = 1.0
        if even != 1:
            weight_b = weight_b * float(even)
            rows, cols = validate.as_sides(weight_a, weight_b, penalty, reg_m, ranks, validate.reader(backend, xp))
        low, high, forbidden = validate.as_range(cost, reg, backend, ranks, threads, tell)
        if isinstance(reference, Cost):
            reference = reference.own_block(a, b, ranks)
        c, mass = validate.as_reference(reference, cost, weight_a, weight_b, backend, ranks, threads)
        problem = cls(cost, rows, cols, reg, c, low, high, forbidden, mass)
        if mask is not None:
            c = MaskedReference(c, as_mask(mask, cost), cost.shape, ranks.before(m), 0)
            problem = dataclasses.replace(problem, reference=c)
            if problem.unmasked == "product":
                own_mass = rows.weight @ problem.shares(backend, cols.weight, threads=threads)
            else:
                own_mass = problem.shares(backend, np.ones(n), threads=threads).sum()
            mass = float(ranks.sum(own_mass))
            problem = dataclasses.replace(problem, c_mass=validate.as_kept(mass))
        if problem.parts or (ranks.max(rows.demands) and cols.demands):
            validate.check_parts(rows, cols, problem.several_parts)
            factor = validate.evening_of_parts(rows, cols, problem.several_parts)
            if factor is not None:
                weight_b = cols.weight * factor
                more = reference, backend, ranks, threads, mask, tell
                return cls.from_cost(cost, a, weight_b, reg, reg_m, penalty, *more)
        return problem.lowered()

    @property
    def lift(self) -> float:
        if not self.constant:
            return 0.0
        f, g = self.cost_constants
        return float(f * self.rows.mass + g * self.cols.mass)


class Own(NamedTuple):
    """reg, and reg_m of both sides, of each problem of a batch; (p,) each, None: the penalty is shared."""

    reg: F64
    rows: F64 | None
    cols: F64 | None

    def of(self, which: Any) -> "Own":
        first, second = (x if x is None else x[which] for x in self[1:])
        return Own(self.reg[which], first, second)

    @property
    def patterns(self) -> Any:
        """Number the combinations of hard and soft sides, (p,)."""
        first, second = (0 if x is None else np.isinf(x) for x in self[1:])
        return np.zeros(len(self.reg), np.int64) + first + 2 * np.asarray(second)


@dataclass(frozen=True)
class BatchProblem(Common):
    """A batch of p problems.

    ``rows`` and ``cols`` are sides of the first. All share penalty, reg and reg_m, or have their ``each``: reg is then
    the smallest.
    """

    cost: Dense | Cost  # one for all problems, or one for each
    A: Any  # (p, m) float64, CuPy if M, A or B is on a GPU
    B: Any  # (p, n)
    masses: tuple[F64, F64]  # of A and of B
    c_mass: F64
    each: Own | None = None

    def __len__(self) -> int:
        return len(self.A)

    @property
    def regs(self) -> Any:
        """The reg of all problems, or (p,) where each has its own."""
        if self.each is None:
            return self.reg
        return self.each.reg

    def rhos(self, rows: bool) -> Any:
        """Return the reg_m of one side: for all problems, or (p,); ``check_problem`` has refused one for each point."""
        if self.each is None:
            rho = None
        else:
            rho = self.each[2 - rows]
        if rho is None:
            return float((self.rows if rows else self.cols).rho[0])
        return rho

    def side_of(self, i: int, rows: bool, count: int) -> Side:
        """Return a side of problem i, with ``count`` points."""
        if rows:
            side, table = (self.rows, self.A)
        else:
            side, table = (self.cols, self.B)
        weight = host(table[i])[:count]
        rho = None if self.each is None else self.each[2 - rows]
        if rho is None:
            return side.of(weight)
        if side.penalty == "balanced":
            soft = "kl"
        else:
            soft = side.penalty
        return Side(side.name, weight, "balanced" if np.isinf(rho[i]) else soft, np.full(count, rho[i]))

    @property
    def one_cost(self) -> bool:
        """Tell whether all problems have one cost."""
        return bool(self.M.ndim == 2)

    @property
    def alike(self) -> bool:
        equal = self.A is self.B or (self.A.shape == self.B.shape and not any_of(self.A != self.B))
        own = self.each is None or equal_vectors(self.each.rows, self.each.cols)
        return equal and own and super().alike

    @property
    def log_reference(self) -> tuple[Any, Any]:
        """Return (log A, log B) for c = a b^T, else zeros."""
        xp = namespace(self.A)
        if self.unmasked == "product":
            with np.errstate(divide="ignore"):
                return xp.log(self.A), xp.log(self.B)
        return xp.zeros_like(self.A), xp.zeros_like(self.B)

    def __getitem__(self, i: int) -> Problem:
        cost = self.cost.of(i)
        rows, cols = (self.side_of(i, axis == 0, count) for axis, count in enumerate(cost.shape))
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Common)}
        fields |= {} if self.each is None else {"reg": float(self.each.reg[i])}
        fields |= {name: float(np.broadcast_to(fields[name], len(self))[i]) for name in ("constant", "translation")}
        return Problem(**{**fields, "cost": cost, "rows": rows, "cols": cols}, c_mass=float(self.c_mass[i]))

    def some(self, which: Any) -> "BatchProblem":
        """Return some of the problems: a slice, or numbers."""
        cost = self.cost.of(which)
        m, n = cost.shape
        at = which if isinstance(which, slice) else namespace(self.A).asarray(which)
        A = self.A[at][:, :m]
        if self.A is self.B:
            B = A
        else:
            B = self.B[at][:, :n]
        if self.each is None:
            own = None
        else:
            own = self.each.of(which)
        masses = self.masses[0][which], self.masses[1][which]
        members = {"cost": cost, "A": A, "B": B, "masses": masses, "c_mass": self.c_mass[which], "each": own}
        given = {"constant": self.constant, "translation": self.translation}
        members |= {name: value[which] if np.ndim(value) else value for name, value in given.items()}
        if own is not None or (m, n) != self.shape:
            if isinstance(which, slice):
                first = which.indices(len(self))[0]
            else:
                first = int(which[0])
            members |= {side: self.side_of(first, side == "rows", k) for side, k in (("rows", m), ("cols", n))}
        if own is not None:
            members |= {"reg": float(own.reg.min())}
        return dataclasses.replace(self, **members)

    def groups(self, backend: Backend, scales: bool) -> Iterator[tuple[Any, "BatchProblem", F64]]:
        """Divide problems with their own reg and reg_m into batches that share both.

        Yields (numbers of the problems, their batch, factor of its costs to those of the problems). With ``scales``,
        problems with equal reg_m / reg form one batch; the costs of each problem are then in units of its own reg.
        One batch of all problems keeps their arrays.
        """
        assert self.each is not None
        reg = self.each.reg
        rhos = [x for x in self.each[1:] if x is not None]
        if scales and not self.one_cost and self.cost.scalable and None not in (x.scalar_rho for x in self.sides):
            rhos = [np.broadcast_to(self.rhos(rows), reg.shape) for rows in (True, False)]
            keys = [np.zeros(len(reg)), *(np.rint(2.0**50 * np.log(rho / reg)) for rho in rhos)]
        else:
            keys = [reg, *rhos]
        number = numbered(keys)
        count = int(number.max()) + 1
        for k in range(count):
            which = np.flatnonzero(number == k)
            if count == 1:
                some = self
            else:
                some = self.some(which)
            first = int(which[0])
            factor = reg[which] / reg[first]
            members: dict[str, Any] = {"each": None, "reg": float(reg[first])}
            if (factor != 1).any():
                largest = max(abs(some.M_min), abs(some.M_max))
                cost = some.cost.scaled(1 / factor, largest)
                low, high, forbidden = validate.as_range(cost.flat, members["reg"], backend)
                members |= {"cost": cost, "M_min": low, "M_max": high, "forbidden": forbidden}
            yield which, dataclasses.replace(some, **members), factor

    def alone(self, i: int, backend: Backend, threads: int) -> Problem:
        """Return problem i as `solve` makes it, with its own range, and for clouds a formed matrix if it saves time."""
        one = self[i]
        if not self.several:
            return one
        cost = formed(one.cost, backend, threads=threads)
        low, high, forbidden = validate.as_range(cost, one.reg, backend, threads=threads)
        return dataclasses.replace(one, cost=cost, M_min=low, M_max=high, forbidden=forbidden)

    @property
    def several(self) -> Any:
        if isinstance(self.cost, Clouds):
            return self.cost
        return None

    @property
    def ragged(self) -> bool:
        return self.several is not None and self.several.ragged

    def problems(self, i0: int, i1: int) -> "BatchProblem":
        return self.some(slice(i0, i1))

    def check_parts(self) -> F64 | None:
        """Check the masses of the parts of each problem; return factors that equalise them, or None.

        Parts of a shared M are computed once for equal sets of points.
        """
        factors: dict[int, F64] = {}
        parts: dict[Any, Parts | None] = {}
        for i, one in enumerate(map(self.__getitem__, range(len(self)))):
            key = 0 if self.one_cost else i, *(out.tobytes() for out in one.left_out)
            if key not in parts:
                parts = {key: one.several_parts}
            validate.check_parts(one.rows, one.cols, parts[key], f"problem {i}: ")
            factor = validate.evening_of_parts(one.rows, one.cols, parts[key])
            if factor is not None:
                factors[i] = factor
        if not factors:
            return None
        found = np.ones(self.B.shape)
        for i, factor in factors.items():
            found[i, : len(factor)] = factor
        return found

    def transpose(self) -> "BatchProblem":
        if self.each is None:
            own = None
        else:
            own = Own(self.each.reg, *self.each[:0:-1])
        return dataclasses.replace(self, **self.exchanged, A=self.B, B=self.A, masses=self.masses[::-1], each=own)

    def on_host(self) -> "BatchProblem":
        if self.several:
            cost = self.several.at_home
        else:
            cost = Dense(host(self.M))
        return dataclasses.replace(self, cost=cost, A=host(self.A), B=host(self.B))

    def masked_mass(self, backend: Backend) -> F64:
        """Return the mass of the masked reference, for each problem."""
        if self.unmasked == "product":
            mass: F64 = host((self.A * self.shares(backend, self.B.T).T).sum(1))
            return mass
        xp = namespace(self.cost.where, self.A, self.B)
        return np.full(len(self.A), float(self.shares(backend, xp.ones(self.shape[1])).sum()))

    @classmethod
    def from_arrays(
        cls, M: Any, A: Any, B: Any, reg: Any, reg_m: Any, penalty: Any, reference: Any, backend: Backend,
        mask: Any = None, own: Own | None = None,
    ) -> "BatchProblem":  # fmt: skip
        """Make the problems from the arguments of `solve_batch`; ``own``: of one pattern of hard and soft sides."""
        cost = as_costs(M, backend)
        reg = validate.as_positive(reg, "reg")
        (m, n), flat = cost.shape, cost.flat
        alike = A is B and m == n
        A, B = (x if x is None else validate.as_array(x, name, backend.asarray) for x, name in ((A, "A"), (B, "B")))
        p = size_of_batch(cost.array, A, B, own)
        xp = namespace(cost.where, A, B)
        A, mass_a = validate.as_weights(A, p, m, "A", backend, xp)
        if alike:
            B, mass_b = A, mass_a
        else:
            B, mass_b = validate.as_weights(B, p, n, "B", backend, xp)
        first_a = host(A[0])
        first_b = host(B[0])
        rows, cols = validate.as_sides(first_a, first_b, penalty, reg_m)
        low, high, forbidden = validate.as_range(flat, reg, backend, n_rows=0 if flat is cost else m)
        if isinstance(cost, Clouds) and cost.ragged and not (mask is None and isinstance(reference, str)):
            raise NotImplementedError("mask and a reference matrix are for clouds of one size")
        one = cost if isinstance(reference, str) else cost.of(0)
        c, mass = validate.as_reference(reference, one, first_a, first_b, backend)
        validate.check_masses(rows, cols, mass_a, mass_b, "A and B")
        even = validate.evening(mass_a, mass_b)
        if rows.penalty == cols.penalty == "balanced" and (even != 1).any():
            B = B * xp.asarray(even)[:, None]
            mass_b = mass_b * even
            first_b = host(B[0])
            rows, cols = validate.as_sides(first_a, first_b, penalty, reg_m)
        if c == "product":
            c_mass = validate.product_mass(mass_a, mass_b, "A", "B")
        elif c == "uniform" and isinstance(cost, Clouds):
            c_mass = cost.pairs_of_each.astype(np.float64)
        else:
            c_mass = np.full(p, mass)
        if mask is not None:
            c = MaskedReference(c, as_mask(mask, cost), (m, n))
        problem = cls(cost, rows, cols, reg, c, low, high, forbidden, A, B, (mass_a, mass_b), c_mass, own)
        if mask is not None:
            c_mass = validate.as_kept(problem.masked_mass(backend))
            problem = dataclasses.replace(problem, c_mass=c_mass)
        both = rows.demands and cols.demands
        forbids = forbidden or problem.c is not None or not problem.balanced
        if (both and forbids) or (cost.operator == "pairs" and rows.demands | cols.demands):
            factors = problem.check_parts()
            if factors is not None:
                B = B * xp.asarray(factors)
                return cls.from_arrays(M, A, B, reg, reg_m, penalty, reference, backend, mask, own)
        return problem.lowered()

    def lowered(self) -> "BatchProblem":
        """Return the problems without large constants in M; each M has its own constant."""
        if self.one_cost:
            return super().lowered()
        is_small = max(abs(self.M_min), abs(self.M_max)) <= CONSTANT_NATS * self.reg
        if is_small or not self.is_hard.any() or not (ranges := self.cost.ranges()):
            return self
        low, high = ranges
        regs = np.broadcast_to(self.regs, len(self))
        found = np.array([constant_of(*one) for one in zip(low, high, regs, strict=True)])
        if not found.any():
            return self
        members: dict[str, Any] = {"M_min": float((low - found).min()), "M_max": float((high - found).max())}
        return dataclasses.replace(self, cost=self.cost.less_each(found), **members, constant=found)

    @property
    def is_hard(self) -> Any:
        """Tell for the rows and the columns of each problem whether all their points are hard, (2, p)."""
        sides = zip((self.rows, self.cols), (None, None) if self.each is None else self.each[1:], strict=True)
        found = [side.penalty == "balanced" if rho is None else np.isinf(rho) for side, rho in sides]
        return np.stack([np.broadcast_to(x, len(self)) for x in found])

    @property
    def cost_constants(self) -> Any:
        if not np.any(self.constant):
            return 0.0, 0.0
        rows, cols = self.is_hard
        of_rows = np.where(rows, np.where(cols, 0.5, 1.0), 0.0) * self.constant
        return of_rows, self.constant - of_rows

    @property
    def lift(self) -> F64:
        f, g = self.cost_constants
        return np.asarray(f * host(self.masses[0]) + g * host(self.masses[1]))


def numbered(keys: list[F64]) -> Any:
    """Number the different combinations of some keys, (p,) each."""
    if all((key == key[0]).all() for key in keys):
        return np.zeros(len(keys[0]), np.int64)
    return np.ravel(np.unique(np.stack(keys), axis=1, return_inverse=True)[1])


def size_of_batch(M: Any, A: Any, B: Any, own: Own | None) -> int:
    """Return the number of problems, from the shape of M, A, B or their own regs."""
    p = validate.as_batch_size(M, A, B)
    if own is None:
        return p
    if p == 1:
        p = len(own.reg)
    if len(own.reg) != p or (np.ndim(M) == 3 and len(M) != p):
        raise ValueError(f"reg and reg_m must be one number, or one for each of {p} problems")
    return p
