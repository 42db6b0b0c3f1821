"""Checks of arguments, for one problem and for a batch: every wrong argument is reported here, by its name.

``as_x(value, ...)`` returns ``value`` in the form that the solver reads, or raises ValueError, TypeError,
InfeasibleError. Over ranks, all ranks raise an error that one rank finds, and compare arguments that must be equal.
"""

import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..arrays import any_of, arithmetic, host, namespace, refuse_other
from ..contract import Backend
from ..errors import InfeasibleError, shown
from ..penalties import F64, PENALTIES
from ..ranks import ALONE, Ranks
from ..synonyms import VALUE_REMARKS, VALUES, hint, ours_for
from .cost import Cost, Dense, cost_of
from .parts import Parts
from .side import Side
from .sparse import Sparse, is_sparse

MASS_TOLERANCE = 1e-6  # relative: totals of normalised float32 weights differ by less
EVEN = 1e-14  # relative: totals of normalised float64 weights differ by less
SMALLEST = math.ulp(0.0)
MOST = sys.float_info.max
CPU = 1  # DLPack's device type of the host
MOST_THREADS = 4096  # more than any host has cores
MOST_PASSES = 1 << 53  # at 1 ns a pass 100 days; the core counts them in 64 bits
MISSING = (-99.0, -999.0, -9999.0, -99999.0, -32768.0)  # numbers that files write for missing entries
LITTLE_MASS = 1e-4  # share of the mass: moving less is hardly intended
LITTLE_SHARE = 0.05  # share of the mass: moving less mostly means that M has another unit than reg_m
MUCH_MASS = 10.0  # times both masses: more moves only where costs are very negative
UNIT_SHIFT = 0.1  # log of the factor by which the unit of mass changes the moved share: less goes unnoticed
SENTINEL = 1e8  # range(M) / reg: real costs are below; a larger range takes some 40 passes, inf takes 14


def as_choice(value: Any, name: str, choices: Iterable[str]) -> str:
    names = [*choices]
    if not isinstance(value, str) or value not in names:
        if isinstance(value, str):
            told = hint(value, ours_for(value, VALUES, names), VALUE_REMARKS)
        else:
            told = ""
        cure = ""
        if name == "metric" and callable(value):
            cure = ": give the costs of a function of rows as the matrix M"
        elif name == "metric" and isinstance(value, str):
            cure = f": for another one make the matrix M, as scipy.spatial.distance.cdist(x, y, {value!r}) does"
        raise ValueError(f"{name} must be one of {names}, got {shown(value)}{told or cure}")
    return value


def as_flag(value: Any, name: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def as_index(value: Any) -> int:
    """Check the number of one problem of a batch."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"problems of a batch have integers and slices as indices, got {shown(value)}") from None


def as_float(value: Any, name: str, wanted: str = "a number") -> float:
    """Return float(value); TypeError for text, complex numbers, masks and other objects, ValueError beyond float64."""
    if type(value) is float:
        return value
    if getattr(value, "requires_grad", False):
        raise TypeError(
            f"{name} must be a number, got a tensor with requires_grad: derivatives by {name} are not known"
        )
    odd = isinstance(value, (str, bytes, bytearray, complex, np.complexfloating))
    try:
        if odd or (isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value)):
            raise TypeError("no real number")
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be {wanted}, got {shown(value)}") from error


def as_positive(
    value: Any, name: str, most: float = MOST, wanted: str = "a positive finite number", least: float = SMALLEST
) -> float:  # fmt: skip
    if name == "reg" and isinstance(value, (list, tuple, np.ndarray)) and np.size(value) > 1:
        cure = "mapuot.path solves one problem for a list of regs, mapuot.solve_batch takes one for each problem"
        raise TypeError(f"reg must be {wanted}, got {shown(value)}: {cure}")
    number = as_float(value, name, wanted)
    if not least <= number <= most:
        cure = ": no solve is unregularised, but result.unregularised_bounds() bounds its value"
        raise ValueError(f"{name} must be {wanted}, got {number}{cure * (name == 'reg' and number == 0)}")
    return number


def as_rho(value: Any, name: str) -> float:
    """Check a reg_m that must be one number."""
    if np.ndim(value):
        raise ValueError(f"{name} must be one number, > 0 or inf, got {shown(value)}")
    return as_positive(value, name, math.inf, "> 0, or inf")


def refuse_two_clouds(M: Any, a: Any, function: str) -> None:
    """Raise if a loss of costs is called with two clouds of points, (m, d) and (n, d), as M and a."""
    shapes = tuple(np.shape(M)), tuple(np.shape(a))
    if len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][1] == shapes[1][1] != shapes[0][0]:
        given = f"got shapes {shapes[0]} and {shapes[1]}, as of two clouds"
        raise ValueError(f"M must be costs and a masses, {given}: {function}(x, y, ...) takes points")


def as_share(value: Any, name: str) -> float:
    return as_positive(value, name, 1.0, "a share in (0, 1]")


def as_count(value: Any, name: str, most: float = math.inf, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {shown(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {shown(value)}")
    return int(value)


def as_passes(value: Any, name: str = "max_passes") -> int:
    """Check a number of passes; cut it at the largest number that the core counts to."""
    return min(as_count(value, name), MOST_PASSES)


def as_threads(value: Any) -> int | None:
    if value is None:
        return None
    return as_count(value, "threads", MOST_THREADS)


def as_callback(value: Any) -> Any:
    if value is not None and not callable(value):
        raise TypeError(f"callback must be callable, got {shown(value)}")
    return value


def as_pair(value: Any, name: str) -> tuple[Any, Any]:
    """Read a pair from a scalar or a sequence of length 1 or 2 (POT's rule); members may be per-point vectors."""
    if value is None or isinstance(value, (str, bytes, bytearray)):
        if value is None:
            given = "None"
        else:
            given = f"the text {shown(value)}"
        raise TypeError(f"{name} must be a number, inf (balanced), or a pair, got {given}")
    if not isinstance(value, Sequence) and np.ndim(value) == 0:
        return value, value
    if len(value) not in (1, 2):
        each = " (in a batch also one for each problem)"
        raise ValueError(f"{name} must be a scalar or have length 1 or 2{each}, got length {len(value)}")
    first, *rest = value  # not by index: a pandas Series has its own index
    return first, rest[0] if rest else first


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return `numpy.shape`; None for a sequence of arrays of several shapes."""
    try:
        shape: tuple[int, ...] = np.shape(value)
    except ValueError:
        return None
    return shape


def as_penalties(value: Any) -> tuple[str, str]:
    if isinstance(value, (tuple, list)):
        pair = tuple(value)
    else:
        pair = value, value
    if len(pair) != 2 or any(not isinstance(p, str) or p.lower() not in PENALTIES for p in pair):
        told = ""
        if isinstance(value, str):
            told = hint(value, ours_for(value, VALUES, PENALTIES), {})
        raise ValueError(f"penalty must be one of {sorted(PENALTIES)} or a pair of them, got {shown(value)}{told}")
    return pair[0].lower(), pair[1].lower()


def copied_to_host(x: Any) -> Any:
    """Return x as a NumPy array; what lies on a GPU is copied, arrays of a list, too."""
    if isinstance(x, (list, tuple)):
        return np.asarray([host(part) for part in x])
    return np.asarray(host(x))


def as_array(value: Any, name: str, convert: Callable[[Any], Any] = copied_to_host) -> Any:
    """Return ``convert(value)``; raise an error with the argument's name for input that ``convert`` misreads."""
    if np.ma.is_masked(value):
        raise ValueError(f"{name} must not be masked: fill the masked entries (in M, inf forbids a pair)")
    if hasattr(value, "toarray") and not isinstance(value, np.ndarray):  # AnnData's views are arrays with toarray
        raise TypeError(f"{name} must be a dense array, got {type(value).__name__}: pass {name}.toarray()")
    refuse_other(value, name)
    is_standard = hasattr(value, "__dlpack__") and not hasattr(value, "__array__")
    if is_standard and value.__dlpack_device__()[0] == CPU:
        value = np.from_dlpack(value)
    if hasattr(value, "to_numpy"):
        value = table_of(value, name)
    try:
        return convert(value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch: a gradient, bfloat16, sparse, without memory
        if type(error).__module__ != "builtins":
            raise
        if isinstance(error, ValueError):
            kind: type[Exception] = ValueError
        else:
            kind = TypeError
        if name == "M" and isinstance(value, (tuple, list)) and [np.ndim(x) for x in value[:3]] == [2, 2]:
            cure = "mapuot.PointCloud(x, y) has the costs between two clouds"
        else:
            cure = str(error)
        raise kind(f"{name} cannot be read as an array: {cure}") from error


def table_of(value: Any, name: str) -> Any:
    """Convert a pandas table or column to NumPy; nullable dtypes become float64, missing entries NaN.

    Numeric categories are read as numbers. A column without numbers raises an error with its name.
    """
    if not hasattr(value, "columns"):
        return numbers_of(value)
    dtypes = getattr(value, "dtypes", ())
    if not hasattr(value, "iloc") or all(isinstance(x, np.dtype) and x.kind in "fiub" for x in dtypes):
        return value
    columns = [numbers_of(value.iloc[:, k]) for k in range(value.shape[1])]
    odd = [str(label) for label, x in zip(value.columns, columns, strict=True) if x.dtype.kind not in "fiub"]
    if odd:
        raise TypeError(f"{name} must hold real numbers, got the column {', '.join(map(repr, odd[:3]))}: drop it")
    return np.column_stack(columns)


def numbers_of(column: Any) -> Any:
    """Return a pandas column as an array, with NaN for missing numbers."""
    array = np.asarray(column)
    if array.dtype.kind == "O" and getattr(column.dtype, "kind", "O") in "fiub":
        return column.to_numpy(np.float64, na_value=np.nan)
    return array


def check_kind(array: Any, name: str, kinds: str = "fiub") -> None:
    if array.dtype.kind not in kinds:
        cure = {"O": cure_of_objects(array), "U": ": .astype(float) reads them from texts"}
        cure["b"] = f": costs where {name} is true, and none elsewhere, are numpy.where({name}, costs, inf)"
        raise TypeError(f"{name} must hold real numbers, got dtype {array.dtype}{cure.get(array.dtype.kind, '')}")


def cure_of_objects(array: Any) -> str:
    """Return the end of a message about an array of Python objects: the first that is no number, or the conversion."""
    for place, x in np.ndenumerate(array):
        if not isinstance(x, (int, float, np.number)):
            return f": {shown(x)}{' at index ' * bool(place)}{', '.join(map(str, place))} is no number"
    return ": .astype(float) makes them of objects"


def as_numbers(value: Any, name: str, wanted: str, *shapes: Any, kinds: str = "fiub", least: float = -MOST) -> Any:
    """Return an array of finite numbers >= ``least`` of one of the shapes; ``wanted`` describes it in messages."""
    array = as_array(value, name)
    check_kind(array, name, kinds)
    wrong = f"shape {array.shape}" * (array.shape not in shapes) or "NaN or inf" * (not np.isfinite(array).all())
    with np.errstate(over="ignore"):  # ``least`` may be beyond float32
        below = not wrong and bool((array < least).any())
    if wrong or below:
        raise ValueError(f"{name} must be {wanted}, got {wrong or array.min()}")
    return array


def as_real(M: Any) -> Any:
    """Return M if the core can read it, else a copy: float32 or float64, native, aligned, whole strides."""
    dtype = M.dtype
    if dtype.char not in "fd":
        return M.astype("float32" if dtype.char == "e" else "float64")
    whole = all(s % dtype.itemsize == 0 for s in M.strides) and getattr(M.flags, "aligned", True)
    if whole and dtype.isnative:
        return M
    return M.astype(dtype.newbyteorder("="), copy=True)


def as_out(out: Any, shape: tuple[int, int], dtype: Any, M: Any) -> Any:
    """Check the caller's memory for the plan: M's kind, shape and dtype, in C order, not shared with M."""
    kind = namespace(M).ndarray
    wanted = f"a writeable, C-contiguous array of shape {shape} and dtype {dtype}"
    if not isinstance(out, kind):
        raise TypeError(f"out must be {wanted}, got {type(out).__name__}")
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous or not getattr(out.flags, "carray", True):
        raise ValueError(f"out must be {wanted}, got shape {out.shape}, dtype {out.dtype}, strides {out.strides}")
    if isinstance(M, kind) and namespace(M).may_share_memory(out, M):
        raise ValueError("out must not share memory with M, which the result goes on reading")
    return out


def as_vector(value: Any, length: int, name: str, convert: Callable[[Any], Any] = np.asarray, xp: Any = np) -> F64:
    """Check a vector of numbers; return a float64 copy in xp's memory, so that the caller cannot change it."""
    array = as_array(value, name, convert)
    check_kind(array, name)
    if array.shape != (length,):
        cure = f": one mass for each {'row' if name == 'a' else 'column'} of M"
        if array.ndim == 2 and min(array.shape) > 1:  # looks like points
            cure = f": {name} has masses; costs between points x and y are made by mapuot.PointCloud(x, y)"
            cure += ", between pixels of images by mapuot.Grid(shape)"
            if array.shape[1] == length != array.shape[0]:
                cure = f": mapuot.solve_batch takes masses of {len(array)} problems, {array.shape}"
            elif array.size == length:
                cure = f": masses of an image are for M = mapuot.Grid({array.shape}); else pass {name}.ravel()"
        elif array.ndim > 2:
            cure = f": mapuot.Grid({array.shape}) has costs between the nodes of a volume"
        raise ValueError(f"{name} must have shape ({length},), got {array.shape}{cure * (name in ('a', 'b'))}")
    own = arithmetic(array).asarray(array).astype(np.float64)
    return xp.asarray(own)  # type: ignore[no-any-return]


def as_columns(X: Any, length: int, name: str) -> tuple[F64, bool]:
    """Return X as (length, d) in float64, and whether it came as a vector."""
    X = as_array(X, name)
    check_kind(X, name)
    X = X.astype(np.float64, copy=False)
    check_columns(X, length, name)
    if X.ndim == 1:
        return X[:, None], True
    return X, False


def check_columns(X: Any, length: int, name: str) -> None:
    if X.ndim not in (1, 2) or X.shape[0] != length:
        raise ValueError(f"{name} must have shape ({length},) or ({length}, d), got {X.shape}")
    if X.ndim == 2 and X.shape[1] == 0:
        raise ValueError(f"{name} must have a column, got shape {X.shape}")


def on_host(x: Any) -> Any:
    return np.asarray(host(x))


def as_start(value: Any, shapes: Any, convert: Any = on_host, what: str = "a Result") -> tuple[Any, Any]:
    """Return the initial (log u, log v) of these shapes, with 0 for entries that are not finite."""
    try:
        pair = [as_array(x, "warm_start", convert) for x in value]
        for x in pair:
            check_kind(x, "warm_start")
        log_u, log_v = (x.astype(np.float64) for x in pair)
    except (TypeError, ValueError) as error:
        raise TypeError(f"warm_start must be {what} or a pair (log_u, log_v): {error}") from error
    xp = namespace(log_u)
    given = log_u.shape, log_v.shape
    if shapes != given:
        raise ValueError(f"warm_start must have shapes {', '.join(map(str, shapes))}, got {', '.join(map(str, given))}")
    if any_of(xp.isnan(log_u)) or any_of(xp.isnan(log_v)):
        raise ValueError("warm_start must not hold NaN")
    return xp.where(xp.isfinite(log_u), log_u, 0.0), xp.where(xp.isfinite(log_v), log_v, 0.0)


def as_range(
    cost: Cost, reg: float, backend: Backend, ranks: Ranks = ALONE, threads: int | None = None,
    tell: Callable[[int], Any] | None = None, n_rows: int = 0,
) -> tuple[float, float, bool]:  # fmt: skip
    """Return the smallest and the largest finite cost, and whether a pair is forbidden.

    ``n_rows``: for a message, the rows of one problem if ``cost`` has several problems below one another.
    """
    low, high, bad, infinite = cost.range(backend, threads, tell)
    if bad:
        raise ValueError(bad_costs(cost, "M", int(bad), n_rows))
    if infinite == cost.all_pairs:
        low = math.inf
        high = -math.inf
    lows, highs, some_infinite = zip(*ranks.all((low, high, bool(infinite))), strict=True)
    low = min(lows)
    high = max(highs)
    forbidden = max(some_infinite)
    if not low <= high:
        raise InfeasibleError("M forbids every pair: all its entries are inf")
    if not all(map(math.isfinite, (low / reg, high / reg, (high - low) / reg))):
        raise ValueError(f"reg must not be so small that M / reg overflows, got {reg} for M in [{low}, {high}]")
    return low, high, forbidden


def bad_costs(cost: Cost, name: str, count: int, n_rows: int = 0) -> str:
    """Return the message for ``count`` entries that are NaN or -inf; ``n_rows``: see `as_range`."""
    place = cost.first(lambda M: np.isnan(M) | np.isneginf(M))
    if n_rows and len(place) == 2:
        place = (*divmod(place[0], n_rows), place[1])
    return f"{name} must not hold NaN or -inf, got {count} such entries, first {[*place]} (+inf forbids a pair)"


def mass_of_named(value: Any, cost: Cost, a: F64, b: F64, ranks: Ranks) -> float:
    """Return the mass of the reference measure with this name."""
    if value == "product":
        return float(product_mass(float(ranks.sum(a.sum())), float(b.sum()), "a", "b"))
    if value == "uniform":
        return float(ranks.sum(cost.shape[0]) * cost.shape[1])
    raise ValueError(f"reference must be 'product', 'uniform' or a matrix, got {value!r}")


def as_reference(
    value: Any, cost: Cost, a: F64, b: F64, backend: Backend, ranks: Ranks = ALONE, threads: int | None = None
) -> tuple[str | Cost, float]:
    """Return the reference measure ("product", "uniform" or a cost) and its mass."""
    if value is None or isinstance(value, str):
        return str(value), mass_of_named(value, cost, a, b, ranks)
    places = cost.pairs if cost.operator == "pairs" else None
    value = cost_of(value)
    if places is not None and is_sparse(value):
        value = Sparse.of_matrix(value.tocsr(), "reference")  # a 0, also a padded one, forbids its pair
    whole = isinstance(value, Sparse) or (isinstance(value, Cost) and not cost.held)
    if whole:
        c: Any = value
    else:
        c = as_array(value, "reference", backend.asarray)
    check_kind(c, "reference", "fiub")  # a mask: 1 where a pair is allowed
    if c.shape != cost.shape:
        raise ValueError(f"reference must have M's shape {cost.shape}, got {c.shape}")
    if not isinstance(c, Cost):
        c = Dense(as_real(c))
    low, high, bad, infinite = c.finite_range(backend, threads)
    if bad or infinite or low < 0 or not ranks.max(high) > 0:
        odd = f" and {bad + infinite} entries that are not finite" * bool(bad or infinite)
        raise ValueError(f"reference must be finite, >= 0 and not all zero, got range [{low}, {high}]{odd}")
    mass = float(ranks.sum(c.sum()))
    if not mass < math.inf:
        raise ValueError(f"reference is too large: its sum is beyond float64 (largest entry {high})")
    return c if places is None else places.taken_from(c), mass


def as_kept(mass: Any) -> Any:
    """Check the mass of a masked reference, for one problem or for a batch."""
    if not (np.isfinite(mass) & (mass > 0)).all():
        raise ValueError(f"mask must keep pairs whose reference has a finite mass > 0, got {np.min(mass)}")
    return mass


def product_mass(mass_a: Any, mass_b: Any, *names: str) -> Any:
    """Return the mass of a b^T, for one problem or for a batch."""
    with np.errstate(over="ignore"):
        mass = mass_a * mass_b
    if not np.isfinite(mass).all():
        both = " and ".join(names)
        raise ValueError(f"{both} must have masses whose product, that of {' '.join(names)}^T, is finite: rescale them")
    return mass


def as_weight(
    value: Any, length: int, name: str, backend: Backend, ranks: Ranks = ALONE, xp: Any = np
) -> F64:  # fmt: skip
    """Check a marginal: finite, >= 0, with some mass. None or an empty vector is uniform of mass 1, as in POT.

    ``xp``: NumPy, or the arithmetic of the device that will hold the vector.
    """
    if value is None:
        given = None
    else:
        given = as_array(value, name, reader(backend, xp))
    if given is not None and given.shape == (length, 1):  # a column of a table
        given = given[:, 0]
    uniform = given is None or given.shape == (0,)
    if ranks.max(length > 0 and uniform):
        ranks.same(**{name + " is None": uniform or length == 0})
        whole: F64 = xp.full(length, 1.0 / ranks.sum(length))
        return whole
    if uniform:
        weight = np.zeros(0)
    else:
        weight = as_vector(given, length, name, reader(backend, xp), xp)
    if any_of(~np.isfinite(weight)):
        raise ValueError(f"{name} must be finite, got NaN or inf at index {int(np.argmin(np.isfinite(host(weight))))}")
    if any_of(weight < 0):
        raise ValueError(f"{name} must be >= 0, got {weight.min()} at index {int(np.argmin(host(weight)))}")
    with np.errstate(over="ignore"):
        mass = float(ranks.sum(weight.sum()))
    if not 0 < mass < np.inf:
        raise ValueError(f"{name} must have positive, finite mass, got {mass}")
    return weight


def reader(backend: Backend, xp: Any) -> Callable[[Any], Any]:
    """Return the conversion to host memory, or, on a device, a conversion that leaves numbers in place."""
    if xp is np:
        read: Callable[[Any], Any] = backend.to_numpy
    else:
        read = backend.asarray
    return read


def as_weights(array: Any, p: int, length: int, name: str, backend: Backend, xp: Any) -> tuple[Any, F64]:
    """Return (p, length) float64 weights in xp's memory and (p,) masses; a vector serves all, None is uniform."""
    if array is None:
        return xp.full((p, length), 1.0 / length), np.ones(p)
    check_kind(array, name)
    if array.shape not in ((length,), (p, length)):
        raise ValueError(f"{name} must have shape ({p}, {length}) or ({length},), got {array.shape}")
    table, mass, least = backend.weigh(xp.asarray(array), p)
    for wrong, text in ((~np.isfinite(mass), "finite"), (least < 0, ">= 0"), (~(mass > 0), "of positive mass")):
        if wrong.any():
            raise ValueError(f"{name} must be {text}, problem {int(wrong.argmax())} is not")
    return table, mass


def own_numbers(reg: Any, reg_m: Any, p: int) -> tuple[Any, tuple[Any, Any]] | None:
    """Read reg (p,) and reg_m of both sides, (p,) or None, where problems of a batch have their own; else None.

    reg_m has one entry for each problem as (p,) if p > 2, as (p, 1), as (p, 2) with a column for each side, or as
    (p, 1) in a pair. Other values are those of `solve`, and serve all problems.
    """
    own = bool(np.ndim(reg))
    if own:
        reg = own_regs(reg, p)
    pair = isinstance(reg_m, (tuple, list)) and len(reg_m) <= 2
    # (p, 1) as a list; in a tuple each member is that of a side, with one number for each of its points
    if pair and isinstance(reg_m, list) and len(reg_m) == p and all(np.shape(x) == (1,) for x in reg_m):
        reg_m = np.array(reg_m)
        pair = False
    members: tuple[Any, Any] = (None, None)
    if pair and any(np.shape(x) == (p, 1) for x in reg_m):
        first, second = as_pair(reg_m, "reg_m")
        members = of_each(first, p), of_each(second, p)
    elif not pair and not isinstance(reg_m, str) and np.shape(reg_m) in ((p, 1), (p, 2), *[(p,)] * (p > 2)):
        table = np.asarray(host(reg_m)).reshape(p, -1)
        members = table[:, 0], table[:, -1]
    if not own and all(x is None for x in members):
        return None
    rhos = []
    for found in members:
        if found is None:
            rho = found
        else:
            rho = as_array(found, "reg_m").astype(np.float64)
        if rho is not None and (wrong := ~(rho > 0)).any():
            raise ValueError(f"reg_m must be > 0 (inf = balanced), problem {int(wrong.argmax())} has {rho[wrong][0]}")
        rhos.append(rho)
    return reg if own else np.full(p, as_positive(reg, "reg")), (rhos[0], rhos[1])


def own_regs(reg: Any, p: int) -> F64:
    """Read the reg of each problem of a batch, (p,) or (p, 1), as (p,)."""
    wanted = f"a positive number, or one for each problem, ({p},)"
    regs: F64 = as_numbers(host(reg), "reg", wanted, (p,), (p, 1)).astype(np.float64).ravel()
    wrong = ~((regs > 0) & np.isfinite(regs))
    if wrong.any():
        raise ValueError(f"reg must be > 0 and finite, problem {int(wrong.argmax())} has {regs[wrong][0]}")
    return regs


def of_each(value: Any, p: int) -> Any:
    """Return a member of a pair as (p,) numbers: one number for all problems, or (p, 1); None for other shapes."""
    if np.shape(value) == (p, 1):
        return np.ravel(host(value))
    if value is None or np.ndim(value):  # of a balanced side, or one a point
        return None
    return np.full(p, value, np.float64)


def as_batch_size(M: Any, A: Any, B: Any) -> int:
    """Return p, the length of the batch dimension; 1 if no argument has one."""
    sizes = {name: len(x) for name, x, ndim in (("M", M, 3), ("A", A, 2), ("B", B, 2)) if np.ndim(x) == ndim}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"M, A and B must hold equally many problems, got {sizes}")
    if 0 in sizes.values():
        raise ValueError(f"the batch must not be empty, got {sizes}")
    return next(iter(sizes.values()), 1)


def as_side(
    side: str, weight: F64, penalty: str, reg_m: Any, name: str, ranks: Ranks = ALONE, convert: Any = np.asarray
) -> Side:  # fmt: skip
    """Make a side from its reg_m: a number or one per point; for "range" the slack d: (1 - d) t <= r <= (1 + d) t.

    ``convert`` reads reg_m in place; the side moves it to the memory of the weights.
    """
    xp = arithmetic(weight)
    if penalty == "balanced":
        return Side(side, weight, penalty, xp.full(len(weight), np.inf), ranks=ranks)
    if isinstance(reg_m, (int, float)) or as_array(reg_m, name, convert).ndim == 0:
        rho = xp.full(len(weight), as_float(reg_m, name, "a positive number, inf, or one per point"))
    else:
        rho = as_vector(reg_m, len(weight), name, convert, xp)
    if penalty == "range":
        wrong = ~((rho >= 0) & np.isfinite(rho))
        if any_of(wrong):
            cure = "a large one, such as 1e9, for points that are free"
            raise ValueError(f"{name} must be a finite slack >= 0 for penalty 'range' ({cure}), got {rho[wrong][0]}")
        return Side(side, weight, penalty, np.maximum(0.0, 1 - rho), 1 + rho, ranks)
    if any_of(~(rho > 0)):
        raise ValueError(f"{name} must be > 0 (inf = balanced), got {rho[~(rho > 0)][0]}")
    if ranks.min(not any_of(~np.isinf(rho))):
        return Side(side, weight, "balanced", rho, ranks=ranks)
    if PENALTIES[penalty].finite and any_of(~np.isfinite(rho)):
        raise ValueError(f"{name} must be finite for penalty {penalty!r}; use 'balanced' or 'kl' for inf")
    return Side(side, weight, penalty, rho, ranks=ranks)


def as_sides(
    a: F64, b: F64, penalty: Any, reg_m: Any, ranks: Ranks = ALONE, convert: Any = np.asarray
) -> tuple[Side, Side]:  # fmt: skip
    """Make both sides for the host; their vectors may lie on a device."""
    kinds = as_penalties(penalty)
    pair = as_pair(reg_m, "reg_m")
    rows = as_side("a", a, kinds[0], pair[0], "reg_m[0]", ranks, convert)
    cols = as_side("b", b, kinds[1], pair[1], "reg_m[1]", convert=convert)
    if namespace(a, b) is np:
        return rows, cols
    return rows.hosted(), cols.hosted()


def check_masses(rows: Side, cols: Side, mass_a: Any, mass_b: Any, names: str = "a and b") -> None:
    """Raise if both sides are balanced and their masses differ, in one problem or in a batch."""
    uneven = np.atleast_1d(abs(mass_a - mass_b) > MASS_TOLERANCE * mass_a)
    if rows.penalty == cols.penalty == "balanced" and uneven.any():
        text = f"{names} must have equal masses if both sides are balanced"
        if names == "A and B":
            more = f": problem {int(uneven.argmax())} has not"
        else:
            more = f", got {mass_a} and {mass_b}"
        raise InfeasibleError(f"{text}{more}: divide both by their sums, or let one side be soft (a finite reg_m)")


def evening(mass_a: Any, mass_b: Any) -> Any:
    """Return factors that scale b to the mass of a; 1 if the masses are equal or too far apart.

    Balanced masses that differ by rounding have no plan: potentials would grow without end.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.divide(mass_a, mass_b)
        uneven = (abs(ratio - 1) > EVEN) & (abs(ratio - 1) <= 2 * MASS_TOLERANCE)
    return np.where(uneven, ratio, 1.0)


def evening_of_parts(rows: Side, cols: Side, parts: Parts | None) -> F64 | None:
    """Return such factors for the columns, part by part; None if no part needs one."""
    if parts is None or not rows.penalty == cols.penalty == "balanced":
        return None
    held = [np.bincount(at, side.weight, parts.count + 1) for side, at in ((rows, parts.rows), (cols, parts.cols))]
    factor = evening(rows.ranks.sum(held[0]), held[1])
    factor[parts.count] = 1.0  # points without a partner
    if (factor == 1).all():
        return None
    of_cols: F64 = factor[parts.cols]
    return of_cols


def check_parts(rows: Side, cols: Side, parts: Parts | None, which: str = "") -> None:
    """Raise if a part of M, or the whole, must receive more mass than it can get; ``which`` names the problem."""
    if parts:
        count = parts.count
        numbers: Any = (parts.rows, parts.cols)
    else:
        count = 1
        numbers = [np.zeros(len(side.weight), int) for side in (rows, cols)]
    sides = tuple(zip((rows, cols), numbers, strict=True))
    totals = ([side.ranks.sum(np.bincount(number, x, count + 1)) for x in side.limits] for side, number in sides)
    sums = [[np.asarray(total)[:count] for total in pair] for pair in totals]
    for one in (0, 1):
        least = sums[one][0]
        most = sums[1 - one][1]
        wrong = least > most * (1 + MASS_TOLERANCE)
        if wrong.any():
            k = int(np.argmax(wrong))
            points, others = (name_points(x.name, at == k, x.ranks) for x, at in (sides[one], sides[1 - one]))
            amounts = f"{least[k]:.6g} must be transported and {most[k]:.6g} may be"
            if parts is None:
                text = f"{which}no plan has marginals that {sides[one][0].name} and {sides[1 - one][0].name} allow"
                raise InfeasibleError(f"{text}: {amounts} by {sides[1 - one][0].name}")
            raise InfeasibleError(f"{which}M connects {points} with {others} only, where {amounts}")


def name_points(name: str, chosen: Any, ranks: Ranks = ALONE) -> str:
    """Name up to 5 chosen points of a side and count the others; ``chosen`` is a mask, numbers run over all ranks."""
    index = np.flatnonzero(chosen)
    first = ranks.before(len(chosen))
    count = ranks.sum(len(index))
    found = np.concatenate(ranks.all(first + index[:5]))[:5]
    some = ", ".join(f"{name}[{i}]" for i in found)
    if count <= 5:
        return some
    return f"{some} and {count - 5} others of {name}"


def is_sentinel(low: float, high: float, range_over_reg: float) -> bool:
    """Tell whether some finite costs must stand for inf.

    Then the range of M is very large, in units of reg (``range_over_reg``), or the least cost is in MISSING.
    """
    return range_over_reg > SENTINEL or (low in MISSING and low < high)


def moves_little(mass: Any, mass_a: Any, mass_b: Any, share: float = LITTLE_MASS) -> Any:
    """Tell whether less than this share of the lesser mass moves, in one problem or in each of a batch."""
    return (mass < share * mass_a) & (mass < share * mass_b)


def moves_much(mass: float, mass_a: float, mass_b: float) -> bool:
    """Tell whether the plan has so much mass that the least cost is worth a look, see `is_sentinel`."""
    return mass > MUCH_MASS * max(mass_a, mass_b)


def odd_unit(reg: float, rho_a: float, rho_b: float, mass_a: float, mass_b: float, cure: str = "") -> str | None:
    """Return the text of a ScalingWarning if the unit of the masses changes the moved share, else None.

    With the reference a b^T and KL penalties, the share ``exp((reg log s - M_ij) / (reg + rho_a + rho_b))`` of a mass s
    moves between two lone points; with masses of total 1 the share is exp(-M_ij / (...)).
    """
    rho = reg + rho_a + rho_b
    if rho < math.inf:
        shift = 0.5 * reg / rho * (math.log(mass_a) + math.log(mass_b))
    else:
        shift = 0.0
    if abs(shift) <= UNIT_SHIFT:
        return None
    factor = math.exp(min(shift, 700.0))
    return (
        f"the unit of mass counts: of totals of {mass_a:.3g} and {mass_b:.3g} some {factor:.3g} times as large a share "
        f"moves as of totals of 1 with the same reg and reg_m; {cure}divide both by sqrt(|a| |b|)"
    )


def odd_units(
    problem: Any, mass: Any, mass_a: Any, mass_b: Any, cure: str = "", scaling: str = "scale_cost='median'"
) -> str | None:  # fmt: skip
    """Return the text of a ScalingWarning for a problem, or for some of a batch; None if the units look right.

    The units of M are judged first, then the unit of mass (`odd_unit`). ``scaling``: the caller's option that divides
    costs by their median; ``cure``: begins the advice about the unit of mass.
    """
    low = problem.M_min
    high = problem.M_max
    if is_sentinel(low, high, problem.range_over_reg):
        if low in MISSING:
            cure = f"a negative cost attracts mass; inf forbids a pair: numpy.where(M == {low:g}, numpy.inf, M)"
            return f"M holds costs of {low:g}, by which files mark missing entries: {cure}"
        cure = "where such costs are to forbid pairs, use inf, which takes fewer passes; else raise reg"
        return f"M reaches {high:.1e}, and its range is {problem.range_over_reg:.1e} times reg: {cure}"
    if np.any(moves_little(mass, mass_a, mass_b, LITTLE_SHARE)):
        told = odd_share(mass, mass_a, mass_b, scaling)
        if told is not None:
            return told
    rhos = problem.rows.scalar_rho, problem.cols.scalar_rho
    if problem.unmasked != "product" or None in rhos:
        return None
    masses_a, masses_b = np.broadcast_arrays(np.atleast_1d(host(mass_a)), np.atleast_1d(host(mass_b)))
    worst = int(np.argmax(np.abs(np.log(masses_a) + np.log(masses_b))))  # of a batch
    return odd_unit(problem.reg, *rhos, float(masses_a[worst]), float(masses_b[worst]), cure)


def odd_share(mass: Any, mass_a: Any, mass_b: Any, scaling: str = "scale_cost='median'") -> str | None:
    """Return the text of a ScalingWarning where a plan moves little of the mass, or most plans of a batch do.

    In a batch a single plan is told only if it moves almost nothing: far clouds among near ones are no matter of units.
    """
    little = np.atleast_1d(moves_little(mass, mass_a, mass_b, LITTLE_SHARE))
    if 2 * little.sum() <= len(little):
        little = np.atleast_1d(moves_little(mass, mass_a, mass_b))
    if not little.any():
        return None
    moved, there = (np.broadcast_to(x, little.shape)[little] for x in (mass, np.minimum(mass_a, mass_b)))
    worst = int(np.argmin(moved / there))
    moved = moved[worst]
    there = there[worst]
    if len(little) > 1:
        of = f" in {int(little.sum())} of {len(little)} problems"
    else:
        of = ""
    if moved >= LITTLE_MASS * there:
        few = "little"
    else:
        few = "almost nothing"
    cure = f"M is far above reg_m; rescale M (by its median, as {scaling} does), or raise reg_m"
    return f"the plan moves {few}{of}, {moved:.2g} of a mass of {there:.2g}: {cure}"
