"""The scale of costs, an optional unit of reg and reg_m: their median, mean, standard deviation or largest cost."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import host, namespace
from ..errors import name_of_problem, shown
from ..penalties import F64
from ..ranks import ALONE, Ranks
from .cost import cost_of
from .settings import STATISTICS
from .validate import as_array, as_choice, as_pair, as_penalties, as_positive, own_regs


def in_units(statistic: Callable[[F64], Any]) -> Callable[[F64], float]:
    """Return the statistic of values near 1: sums of squares of 1e-200 are 0, and sums of 1e308 are inf."""

    def found(values: F64) -> float:
        exponent = int(np.frexp(np.abs(values).max(initial=0.0))[1])
        return float(np.ldexp(statistic(np.ldexp(values, -exponent)), exponent))

    return found


SCALES: dict[str, Any] = {"median": np.median, "mean": in_units(np.mean), "std": in_units(np.std), "max": np.max}
TIED = 1e-12  # relative: cumulative weights nearer to a half than this reach it exactly


def weighted_median(values: F64, weights: F64) -> float:
    """Return the value that half of the weight does not exceed; the mean of two values if exactly half lies below."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    half = 0.5 * reached[-1]
    middle = np.searchsorted(reached, [half * (1 - TIED), half * (1 + TIED)])
    return float(values[order[middle]].mean())


def weighted_mean(values: F64, weights: F64) -> float:
    return float(values @ (weights / weights.sum()))


# statistics that count a pair as a_i b_j
WEIGHTED: dict[str, Any] = {"weighted_median": weighted_median, "weighted_mean": weighted_mean}
ROWS = 16  # at least so many rows are read of larger costs
Masses = list[tuple[F64, F64]]  # a and b of each of several costs


def some_costs(cost: Any, most: int, ranks: Ranks, masses: tuple[F64, F64] | None = None) -> tuple[F64, F64]:
    """Return finite costs of this rank, and the weights of their pairs: a_i b_j, or True without ``masses``.

    The costs are all stored ones, all of at most ``most``, or the costs of some rows.
    """
    m, n = cost.shape
    total = int(ranks.sum(m))
    before = ranks.before(m)
    if cost.operator == "pairs":
        found = np.asarray(host(cost.data), np.float64)
    elif total * n <= most:
        rows = np.arange(m)
        found = np.ravel(np.asarray(host(cost.read(0, m)), np.float64))
    else:
        drawn = np.random.default_rng(0).choice(total, min(total, max(ROWS, most // n)), replace=False) - before
        rows = np.sort(drawn[(drawn >= 0) & (drawn < m)])
        parts = (np.ravel(np.asarray(host(cost.read(i, i + 1)), np.float64)) for i in rows.tolist())
        found = np.concatenate([np.empty(0), *parts])
    finite = np.isfinite(found)
    if masses is None:
        weights: Any = finite
    elif cost.operator == "pairs":
        weights = np.repeat(masses[0], np.diff(cost.start)) * masses[1][cost.column]
    else:
        weights = np.outer(masses[0][rows], masses[1]).ravel()
    return found[finite], weights[finite]


def matrices_of(cost: Any) -> list[Any]:
    """Return the costs of a batch as matrices; for very many clouds only some problems."""
    if not hasattr(cost, "places"):
        return [cost.flat]
    few = max(1, STATISTICS.all_costs // (ROWS * cost.shape[1]))
    return [cost.of(int(i)) for i in np.random.default_rng(0).permutation(len(cost))[:few]]


def is_weighted(how: Any) -> bool:
    """Tell whether this statistic weighs the costs by masses; raise for a word that is no statistic."""
    return as_choice(how, "scale_cost", [*SCALES, *WEIGHTED]) in WEIGHTED


def scale_of(
    costs: list[Any], how: Any, ranks: Ranks = ALONE, masses: Masses | None = None, which: str = ""
) -> float:  # fmt: skip
    """Return this statistic of the finite costs; with the ``masses`` of each of the costs also one of WEIGHTED.

    ``which`` tells whose costs they are, in messages.
    """
    if masses is None and isinstance(how, str) and how in WEIGHTED:
        cure = "its costs belong to no pair of given masses"
        raise ValueError(f"scale_cost must be one of {[*SCALES]} here, got {how!r}: {cure}")
    name = as_choice(how, "scale_cost", SCALES if masses is None else [*SCALES, *WEIGHTED])
    weighing: Any = [None] * len(costs)
    if name in WEIGHTED:
        weighing = masses
    own = [
        some_costs(cost_of(one), STATISTICS.all_costs // len(costs), ranks, w)
        for one, w in zip(costs, weighing, strict=True)
    ]
    found, weights = (np.concatenate(ranks.all(np.concatenate(parts))) for parts in zip(*own, strict=True))
    if not weights.any():
        scale = 0.0
    elif name in WEIGHTED:
        scale = WEIGHTED[name](found, weights)
    else:
        scale = SCALES[name](found)
    return as_positive(float(scale), f"the {name} of the costs{which}")


def scales_one_by_one(costs: list[Any], how: Any, masses: Masses | None = None) -> F64:
    """Return the scale of each of several costs, (p,); its masses count for a statistic of WEIGHTED."""
    pairs = zip(costs, masses or [None] * len(costs), strict=True)  # type: ignore[list-item]
    return np.array(
        [scale_of([one], how, masses=w and [w], which=f" of {name_of_problem(k)}") for k, (one, w) in enumerate(pairs)]
    )


def problems_of(cost: Any) -> list[Any]:
    """Return the costs of each problem of a batch."""
    return [cost.of(i) for i in range(len(cost if hasattr(cost, "places") else cost.array))]


def with_masses(cost: Any, A: Any, B: Any) -> tuple[list[Any], Masses]:
    """Return the costs of each problem of a batch, and its a and b. A and B: (p, m) and (p, n), or vectors for all.

    Where all problems share the costs, these are repeated.
    """
    shared = not hasattr(cost, "places") and cost.array.ndim < 3
    A, B = (np.atleast_2d(np.asarray(host(x), np.float64)) for x in (A, B))
    count = max(len(A), len(B), 1 if shared else len(problems_of(cost)))
    costs = [cost] * count if shared else problems_of(cost)
    masses = []
    for k, one in enumerate(costs):
        m, n = one.shape
        masses.append((A[k % len(A), :m], B[k % len(B), :n]))  # masses of clouds end in zeros
    return costs, masses


def scales_of(cost: Any, how: Any, form: Callable[[Any], Any], masses: tuple[Any, Any] | None = None) -> F64:
    """Return the scale of the costs of each problem of a batch, (p,).

    ``masses``: A and B, for a statistic of WEIGHTED. ``form`` makes the costs of clouds on a device, (k, m, n). Clouds
    there are formed and summed many at once: reading the costs of 20,000 pairs one by one would take the host minutes.
    """
    if masses is not None and is_weighted(how):
        costs, weights = with_masses(cost, *masses)
        return scales_one_by_one(costs, how, weights)
    if not (getattr(cost, "on_device", False) and hasattr(cost, "places")):
        return scales_one_by_one(problems_of(cost), how)
    name = as_choice(how, "scale_cost", SCALES)
    rows, cols = (places.count for places in cost.places)
    found = np.empty(len(cost))
    order = np.argsort(-(rows * cols), kind="stable")
    while len(order):
        which = order[: max(1, STATISTICS.costs_at_once // int(rows[order[0]] * cols[order[0]]))]
        order = order[len(which) :]
        if rows[which[0]] * cols[which[0]] > STATISTICS.all_costs:  # so many costs are not all read
            found[which] = [scale_of([cost.of(int(i))], how) for i in which]
            continue
        M = form(cost.of(which))
        xp = namespace(M)
        inside = [
            xp.arange(k) < xp.asarray(count[which])[:, None] for k, count in zip(M.shape[1:], (rows, cols), strict=True)
        ]
        is_counted = inside[0][:, :, None] & inside[1][:, None] & xp.isfinite(M)
        found[which] = host(statistics(name, M.reshape(len(which), -1), is_counted.reshape(len(which), -1)))
    return np.array(
        [as_positive(float(x), f"the {name} of the costs of {name_of_problem(k)}") for k, x in enumerate(found)]
    )


def statistics(name: str, values: Any, is_counted: Any) -> Any:
    """Return the statistic of the known values of each row, (p,); 0 for a row without any."""
    xp = namespace(values)
    count = is_counted.sum(1)
    some = xp.maximum(count, 1)
    if name == "max":
        found = xp.where(is_counted, values, -np.inf).max(1)
    elif name == "median":
        ordered = xp.sort(xp.where(is_counted, values, np.inf), axis=1)
        row = xp.arange(len(values))
        found = 0.5 * (ordered[row, (some - 1) // 2] + ordered[row, some // 2])
    else:
        known = xp.where(is_counted, values, 0.0)
        unit = xp.abs(known).max(1)  # squares of costs of 1e-200 are 0
        unit = xp.where(unit > 0, unit, 1.0)
        known = known / unit[:, None]
        found = known.sum(1) / some
        if name == "std":
            apart = xp.where(is_counted, known - found[:, None], 0.0)
            found = xp.sqrt((apart * apart).sum(1) / some)
        found = unit * found
    return xp.where(count > 0, found, 0.0)


def scaled(
    function: Callable[..., Any], given: dict[str, Any], costs: list[Any], ranks: Ranks = ALONE,
    masses: Masses | None = None,
) -> Any:  # fmt: skip
    """Call a function with reg and reg_m in units of these costs; store the scale in its answer, if possible.

    ``masses``: a and b of each of the costs. With ``scale_each`` and the costs of several problems, each problem has
    its own unit.
    """
    how = given["scale_cost"]
    given = dict(given)
    if given.pop("scale_each", False) and len(costs) > 1:
        return scaled_by(function, given, scales_one_by_one(costs, how, masses))
    scale = scale_of(costs, how, ranks, masses)
    reg_m = given["reg_m"]
    kinds = as_penalties(given.get("penalty", "kl"))
    if "range" in kinds:
        sides = zip(as_pair(reg_m, "reg_m"), kinds, strict=True)
        given["reg_m"] = tuple(x if kind == "range" else times(scale, x) for x, kind in sides)
    else:
        given["reg_m"] = times(scale, reg_m)
    reg = given["reg"]
    if np.ndim(reg):
        reg = scale * np.asarray(host(reg), np.float64)
    else:
        reg = scale * as_positive(reg, "reg")
    found = function(**given | {"scale_cost": None, "reg": reg})
    if hasattr(found, "scale_cost"):
        vars(found)["scale_cost"] = scale
    return found


def scaled_by(function: Callable[..., Any], given: dict[str, Any], each: F64) -> Any:
    """Call a function with reg and reg_m in the unit of each problem, (p,); store the units in its answer."""
    reg, reg_m = scaled_each(given["reg"], given["reg_m"], each)
    given = {name: x for name, x in given.items() if name != "scale_each"}
    found = function(**given | {"scale_cost": None, "reg": reg, "reg_m": reg_m})
    if hasattr(found, "scale_cost"):
        vars(found)["scale_cost"] = each
    return found


def scaled_each(reg: Any, reg_m: Any, each: F64) -> tuple[Any, Any]:
    """Multiply reg and reg_m by the unit of each problem, (p,)."""
    reg = each * (own_regs(reg, len(each)) if np.ndim(reg) else as_positive(reg, "reg"))
    pair = isinstance(reg_m, (tuple, list)) and len(reg_m) <= 2
    if pair:
        return reg, tuple(rho_scaled_each(x, each) for x in reg_m)
    return reg, rho_scaled_each(reg_m, each)


def rho_scaled_each(rho: Any, each: F64) -> Any:
    """Multiply the reg_m of a side, or of both, by the unit of each problem; the solver checks None and texts."""
    if rho is None or isinstance(rho, str):
        return rho
    x = as_array(rho, "reg_m").astype(np.float64)
    if x.size == 1:
        return each[:, None] * x.reshape(())
    if x.ndim and x.shape[0] != len(each):
        wanted = f"one number for all problems or one for each, ({len(each)}, 1)"
        raise NotImplementedError(f"reg_m must be {wanted}, where scale_each is True, got shape {x.shape}")
    return each[:, None] * x.reshape(len(each), -1)


def mass_scaled(function: Callable[..., Any], given: dict[str, Any], a: F64, b: F64, ranks: Ranks = ALONE) -> Any:
    """Call a function with masses in units of sqrt(|a| |b|), and store this unit in its answer."""
    check_scales_mass(given)
    scale = math.sqrt(float(ranks.sum(a.sum()))) * math.sqrt(float(b.sum()))
    found = function(**given | {"scale_mass": False, "a": a / scale, "b": b / scale})
    vars(found)["scale_mass"] = scale
    return found


def masses_scaled(function: Callable[..., Any], given: dict[str, Any], A: Any, B: Any) -> Any:
    """Call a function of a batch with the masses of each problem in units of sqrt(|A_i| |B_i|); store the units."""
    check_scales_mass(given)
    units = np.sqrt(host(A.sum(-1))) * np.sqrt(host(B.sum(-1)))
    units = np.where((units > 0) & np.isfinite(units), units, 1.0)  # the solver names what is wrong
    scaled_A, scaled_B = (x / namespace(x).asarray(units if units.ndim == 0 else units[:, None]) for x in (A, B))
    found = function(**given | {"scale_mass": False, "A": scaled_A, "B": scaled_A if A is B else scaled_B})
    vars(found)["scale_mass"] = units
    return found


def check_scales_mass(given: dict[str, Any]) -> None:
    if given["scale_mass"] is not True:
        raise TypeError(f"scale_mass must be True or False, got {shown(given['scale_mass'])}")


def times(scale: float, x: Any) -> Any:
    """Multiply a penalty, or each of several, by the scale; leave other values to the checks of the solver."""
    if isinstance(x, (list, tuple)):
        return type(x)(times(scale, one) for one in x)
    if x is None or isinstance(x, str):
        return x
    return scale * x
