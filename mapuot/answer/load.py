"""Read a file that `Result.save` or the command line wrote, as a Result (`load`)."""

from typing import Any

import numpy as np

from ..annotations import BackendName, CostLike, FilePath, Reference
from ..backends import pick
from ..errors import shown
from ..files import opened, read_values
from ..penalties import PENALTIES
from ..problem.cost import Cost, lowered
from ..problem.kinds import as_cost
from ..problem.mask import MaskedReference, SeededMask
from ..problem.problem import Problem
from ..problem.side import Side
from ..problem.validate import as_range, as_reference, as_threads
from ..ranks import ALONE
from ..status import STATUSES
from .result import Result
from .store import FORMAT, LOWERED, MASKED, NUMBERS, TEXTS, VECTORS, trace_of
from .summary import REFERENCES

MASK = ("keep", "seed", "turned")
MORE = ("format", "forbidden", "trace", "how", "upper_a", "upper_b", "constant", "translation")
ANSWERED = ("cost", "objective", "dual", "mass")  # the NUMBERS that belong to the answer, not to its problem
SAME = 1e-6  # relative tolerance for least and largest M: float32 and float64 copies of a matrix differ


class AbsentCost(Cost):
    """The cost of a Result that was loaded without M."""

    kind = "no matrix"

    def __init__(self, shape: tuple[int, int], dtype: Any) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)

    def read(self, i0: int, i1: int) -> Any:
        raise ValueError("M must be given for what needs the plan: mapuot.load(path, M)")

    def transpose(self) -> "AbsentCost":
        return AbsentCost(self.shape[::-1], self.dtype)


def load(
    path: FilePath,
    M: CostLike | None = None,
    *,
    reference: Reference | None = None,
    backend: BackendName = "auto",
    threads: int | None = None,
) -> Result:
    """Read an answer that `Result.save` or ``mapuot solve -o`` wrote.

    Parameters
    ----------
    path : path
        .npz, .h5, .zarr or .h5ad.
    M : (m, n) array, PointCloud, function or path, optional
        The cost of the solved problem, as in `solve`; the file does not contain it. Without M the Result has its
        potentials, marginals, values and certificate; methods that need the plan raise a ValueError.
    reference : (m, n) array, optional
        The reference matrix, if one was given to `solve`.
    backend, threads
        For the methods that need the plan, as in `solve`.

    Returns
    -------
    Result

    Raises
    ------
    ValueError
        The file is not an answer of mapuot, or M is not the matrix of the solved problem.

    See Also
    --------
    Result.save, mapuot.files.load_checkpoint

    Examples
    --------
    >>> import mapuot, numpy as np, tempfile, os
    >>> M = np.abs(np.arange(5.0)[:, None] - np.arange(4.0))
    >>> path = os.path.join(tempfile.mkdtemp(), "answer.npz")
    >>> mapuot.solve(M, reg=0.5, reg_m=2.0).save(path)
    >>> mapuot.load(path).converged
    True
    >>> mapuot.load(path, M).plan.shape
    (5, 4)
    """
    values = read_values(path, (*VECTORS, *NUMBERS, *TEXTS, *MASK, *MORE))
    try:
        sides, trace = checked(values)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        if isinstance(error, KeyError):
            text = f"it lacks {error}"
        else:
            text = str(error)
        raise ValueError(f"{path} holds no answer of mapuot: {text}") from error
    rows, cols = sides
    shape = (len(rows.weight), len(cols.weight))
    chosen = pick(backend, M)
    constant = float(values.get("constant", 0.0))
    low = values["M_min"]
    high = values["M_max"]
    forbidden = values["forbidden"]
    has_cost = M is not None
    cost: Any = AbsentCost(shape, values["dtype"])
    if has_cost:
        cost = lowered(as_cost(opened(M), chosen, a=rows.weight, b=cols.weight), constant)
        check_same(cost, shape, (low, high, forbidden), as_range(cost, values["reg"], chosen))
    c: Any = values["reference"]
    if c == "matrix" and has_cost:
        if reference is None:
            raise ValueError("reference must be given: the answer is of a problem with a reference matrix")
        c = opened(reference)
        if isinstance(c, Cost):
            c = c.own_block(rows.weight, cols.weight, ALONE)
        c = as_reference(c, cost, rows.weight, cols.weight, chosen)[0]
    elif c == "matrix":
        c = AbsentCost(shape, "float64")
    if "mask" in values:
        c = MaskedReference(c, values["mask"], shape)
    less = {"constant": constant, "translation": float(values.get("translation", 0.0))}
    problem = Problem(cost, rows, cols, values["reg"], c, low, high, forbidden, values["c_mass"], **less)
    log_u, log_v, *marginals = (values[name] for name in VECTORS[:4])
    last = values["status"], as_threads(threads), str(values.get("how", ""))
    result = Result(problem, chosen, (log_u, log_v), tuple(marginals), trace, *last)
    vars(result).update({name: values[name] for name in ANSWERED})
    return result


def checked(values: dict[str, Any]) -> tuple[tuple[Side, Side], Any]:
    """Return both sides and the trace of a file; raise if a value is not as `store.contents` writes it."""
    if values["format"] not in (FORMAT, MASKED, LOWERED):
        raise ValueError(f"format must be {FORMAT}, {MASKED} or {LOWERED}, got {shown(values['format'])}")
    if values["format"] == MASKED or "keep" in values:
        values["mask"] = SeededMask(float(values["keep"]), int(values["seed"]), bool(values["turned"]))
    for name in NUMBERS:
        values[name] = float(values[name])
    values["forbidden"] = bool(values["forbidden"])
    values |= {name: np.asarray(values[name]) for name in (*VECTORS, "upper_a", "upper_b", "trace") if name in values}
    names = ("status", STATUSES), ("penalty_a", PENALTIES), ("penalty_b", PENALTIES)
    for name, choices in (*names, ("reference", (*REFERENCES, "matrix")), ("dtype", ("float32", "float64"))):
        if values[name] not in choices:
            raise ValueError(f"{name} must be one of {list(choices)}, got {shown(values[name])}")
    if not values["reg"] > 0:
        raise ValueError(f"reg must be > 0, got {values['reg']}")
    lengths = {name: len(values[side]) for side in "ab" for name in (side, "rho_" + side, "upper_" + side)}
    lengths |= {"log_u": lengths["a"], "row_marginal": lengths["a"]}
    lengths |= {"log_v": lengths["b"], "col_marginal": lengths["b"]}
    for name, length in lengths.items():
        if name not in values and name.startswith("upper_") and values["penalty_" + name[-1]] != "range":
            continue
        vector = values[name]
        if vector.dtype.kind != "f" or vector.shape != (length,) or np.isnan(vector).any():
            raise ValueError(f"{name} must be {length} numbers, got {shown(vector)}")
    told = ((s, values[s], values["penalty_" + s], values["rho_" + s], values.get("upper_" + s)) for s in "ab")
    rows, cols = (Side(*each) for each in told)
    trace = trace_of(values["trace"])
    check_signs(values, trace)
    return (rows, cols), trace


def check_signs(values: dict[str, Any], trace: Any) -> None:
    """Raise if no solve can have left a number of the file; a failed solve may leave inf in most."""
    ended = values["status"] == "converged"
    for name in ("a", "b"):
        if not (np.isfinite(values[name]).all() and values[name].sum() > 0):
            raise ValueError(f"{name} must be finite and have some mass, got {shown(values[name])}")
    for name in (*VECTORS[2:], "upper_a", "upper_b", "mass", "c_mass"):
        if name in values and np.any(np.asarray(values[name]) < 0):
            raise ValueError(f"{name} must be >= 0, got {shown(values[name])}")
    for name in NUMBERS:
        if np.isnan(values[name]) and (ended or name not in ANSWERED):
            raise ValueError(f"{name} must be a number, got NaN")
    if not trace or (ended and not (trace[-1].error >= 0 and trace[-1].gap > -np.inf)):
        raise ValueError("trace must end in a pass with a certificate")


def check_same(cost: Cost, shape: tuple[int, int], saved: tuple[float, float, bool], given: Any) -> None:
    """Raise if M has another shape, least entry or largest entry than the matrix of the answer."""
    if cost.shape != shape:
        raise ValueError(f"M must have the answer's shape {shape}, got {cost.shape}")
    far = SAME * max(1e-300, abs(saved[0]), abs(saved[1]))
    near = all(abs(x - y) <= far for x, y in zip(saved[:2], given[:2], strict=True))
    if not near or saved[2] != given[2]:
        own, other = (f"[{low:.6g}, {high:.6g}]" for low, high in (saved[:2], given[:2]))
        raise ValueError(f"M must be the matrix that was solved, whose finite entries lie in {own}, got one in {other}")
