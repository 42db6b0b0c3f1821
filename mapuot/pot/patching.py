"""Make POT itself run on mapuot: every module of ``ot`` that holds one of its functions gets a stand-in.

It answers the question that its caller asked: the plan, cost or barycenter, at least as near to the solution as POT's
own stop would leave it (`sinkhorn.demand`). Where a gradient is to go through, the call is left to POT's function.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..api.solve import solve
from ..errors import muted, warn
from ..route.front import Call, read
from ..route.plain import PlainResult, solve_in_core
from . import sinkhorn
from .arrays import is_product, tracked
from .barycenter import barycenter_unbalanced
from .gromov import OURS, of_gromov
from .sinkhorn import DEFAULT_ITER, STOP

OWN_METHOD = {  # functions with one fixed method
    "sinkhorn_unbalanced": None,
    "sinkhorn_unbalanced2": None,
    "sinkhorn_knopp_unbalanced": "sinkhorn",
    "sinkhorn_stabilized_unbalanced": "sinkhorn_stabilized",
    "sinkhorn_unbalanced_translation_invariant": "sinkhorn_translation_invariant",
    "barycenter_unbalanced": None,
    "barycenter_unbalanced_sinkhorn": "sinkhorn",
    "barycenter_unbalanced_stabilized": "sinkhorn_stabilized",
}

# with the name and the documentation of POT's function, but with its own place
named_as = functools.partial(functools.wraps, assigned=("__name__", "__qualname__", "__doc__"))
NUMBERS = (float, int, np.floating, np.integer)

LEFT = "a call that is left to POT"
told: set[str] = set()  # warnings already given: unknown keywords, and LEFT
installed: dict[str, tuple[Any, Any]] = {}  # name: (POT's function, its stand-in)


def patch() -> None:
    """Replace POT's functions by mapuot's in every module of ``ot``.

    From then on ``ot.sinkhorn_unbalanced``, ``ot.unbalanced``, ``ot.da.UnbalancedSinkhornTransport`` and
    ``ot.solve(..., unbalanced=...)`` run on mapuot. Names that a program imported from ``ot`` before the call keep
    POT's functions. `mapuot.pot.unpatch` undoes it.

    Raises
    ------
    ImportError
        POT is not installed.

    See Also
    --------
    patched : for a part of a program only

    Examples
    --------
    >>> import mapuot, ot
    >>> mapuot.pot.patch()
    >>> ot.unbalanced.sinkhorn_unbalanced([0.5, 0.5], [0.5, 0.5], [[0.0, 1.0], [1.0, 0.0]], 1.0, 1.0).shape
    (2, 2)
    >>> mapuot.pot.unpatch()
    """
    if installed:
        return
    try:
        import ot  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise ImportError("mapuot.pot.patch needs POT: pip install 'mapuot[pot]'") from error
    for name, own in OWN_METHOD.items():
        if name.startswith("bary"):
            kind = of_barycenter
        else:
            kind = of_sinkhorn
        theirs = getattr(ot.unbalanced, name)
        installed[name] = theirs, kind(theirs, own)
    for name in OURS:
        theirs = getattr(ot.gromov, name)
        installed[name] = theirs, of_gromov(theirs)
    exchange({id(theirs): ours for theirs, ours in installed.values()})


def unpatch() -> None:
    """Undo `patch`; do nothing if POT is not patched."""
    exchange({id(ours): theirs for theirs, ours in installed.values()})
    installed.clear()
    told.clear()


@contextmanager
def patched() -> Iterator[None]:
    """Make POT run on mapuot within a ``with`` block; an earlier `patch` stays in force afterwards.

    See Also
    --------
    patch : for a whole program

    Examples
    --------
    >>> import mapuot, ot
    >>> with mapuot.pot.patched():
    ...     plan = ot.unbalanced.sinkhorn_unbalanced([0.5, 0.5], [0.5, 0.5], [[0.0, 1.0], [1.0, 0.0]], 1.0, 1.0)
    >>> plan.shape
    (2, 2)
    """
    before = bool(installed)
    patch()
    try:
        yield
    finally:
        if not before:
            unpatch()


def exchange(new_of: dict[int, Any]) -> None:
    """Replace functions, identified by id, in every loaded module of POT."""
    for name, module in list(sys.modules.items()):
        if name == "ot" or name.startswith("ot."):
            for key, value in list(vars(module).items()):
                if id(value) in new_of:
                    setattr(module, key, new_of[id(value)])


def quick(a: Any, b: Any, M: Any, reg: Any, reg_m: Any, name: str) -> Any:
    """Return the plan of a call with NumPy arrays and numbers only; None for any other call."""
    if not (type(M) is type(a) is type(b) is np.ndarray and b.ndim == 1):
        return None
    if not (isinstance(reg, NUMBERS) and isinstance(reg_m, NUMBERS) and reg > 0 and reg_m > 0):
        return None
    reg = float(reg)
    rho = float(reg_m)
    if rho == np.inf:  # as in POT, masses may differ here
        return None
    try:
        tol = sinkhorn.demand(reg, rho, rho, STOP, name)
    except (ValueError, ZeroDivisionError):  # reg_m / reg underflows
        return None
    call = Call(M, a, b, reg, rho, tol=tol, max_passes=DEFAULT_ITER, backend=sinkhorn.BACKEND, out=True)
    plain = read(call)
    if plain and not plain.shared_sides:
        result: Any = solve_in_core(call, plain)
    else:
        result = None
    if not isinstance(result, PlainResult):
        with muted():
            result = solve(M, a, b, reg=reg, reg_m=rho, tol=tol, max_passes=DEFAULT_ITER, backend=sinkhorn.BACKEND)
    if not result.converged:
        sinkhorn.warn_not_converged(result, STOP, sinkhorn.WORDS)
    return result.plan


def swallow(function: str, unknown: Set[str]) -> None:
    """Drop unknown keywords, with one warning for each name: POT ignores them, and programs rely on that."""
    for key in sorted(unknown - told):
        told.add(key)
        warn(f"{function} has no argument {key!r}: ignored, as POT ignores it")


def parameters_of(original: Callable[..., Any], first: int) -> list[str]:
    """Return the names of the parameters of POT's function, from this one on, without ``**kwargs``."""
    parameters = [*inspect.signature(original).parameters.values()][first:]
    return [x.name for x in parameters if x.kind is not x.VAR_KEYWORD]


def of_sinkhorn(original: Callable[..., Any], own: str | None) -> Callable[..., Any]:
    """Make the stand-in of one of POT's Sinkhorn functions; ``own``: its method, if it has only one."""
    order = parameters_of(original, 5)
    names = {*order, "tau"}
    plain = "returnCost" not in order

    @named_as(original)
    def call(a: Any, b: Any, M: Any, reg: Any, reg_m: Any, *args: Any, **kwargs: Any) -> Any:
        if plain and not (args or kwargs):
            plan = quick(a, b, M, reg, reg_m, own or "sinkhorn")
            if plan is not None:
                return plan
        if len(args) > len(order) or kwargs.keys() & order[: len(args)]:
            return original(a, b, M, reg, reg_m, *args, **kwargs)  # it reports the surplus argument
        given = dict(zip(order, args, strict=False), **kwargs)
        method = given.pop("method", own)  # `ot.solve` hands its method on to `sinkhorn_knopp_unbalanced`, None too
        swallow(original.__name__, given.keys() - names)
        kind = given.get("reg_type", "kl" if len(np.shape(b)) < 2 else None)  # POT's own of several targets: "entropy"
        c = given.get("c")
        if tracked(c) and is_product(c, a, b):  # `ot.solve` passes the default on
            c = None
        others = any(map(tracked, (reg, reg_m, c)))
        if others or (any(map(tracked, (a, b, M))) and not sinkhorn.differentiable(a, b, M, kind, c)):
            leave(original.__name__)
            return original(a, b, M, reg, reg_m, *args, **kwargs)
        cost = given.get("returnCost", "linear")
        log = bool(given.get("log", False))
        if cost not in ("linear", "total"):
            raise ValueError(f"Unknown returnCost = {cost!r}: must be 'linear' or 'total'")
        name = own or sinkhorn.method_name(method) or "sinkhorn"
        request = sinkhorn.Arguments(a, b, M, reg, reg_m, kind, c, given.get("warmstart"))
        request.max_iter = given.get("numItermax", DEFAULT_ITER)
        request.stop = given.get("stopThr", STOP)
        request.verbose = given.get("verbose", False)
        answers = request.run(name, given.get("tau") if name == "sinkhorn_stabilized" else None)
        if plain:
            return answers.plan(log)
        return answers.cost(cost, log)

    return call


def leave(function: str) -> None:
    """Warn, once, that POT's own function answers a call."""
    if LEFT not in told:
        told.add(LEFT)
        warn(
            f"{function}: POT's own function answers, since a gradient is to go through its iterations; mapuot's "
            "answers have gradients by dense PyTorch tensors a, b and M, for reg_type 'kl' and without c"
        )


def of_barycenter(original: Callable[..., Any], own: str | None) -> Callable[..., Any]:
    """Make the stand-in of one of POT's barycenters; ``own`` as in `of_sinkhorn`."""
    order = parameters_of(original, 0)
    named: dict[str, Any] = {}
    if own is not None:
        named["method"] = own

    @named_as(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        wrong = len(args) > len(order) or kwargs.keys() & order[: len(args)]
        followed = any(map(tracked, (*args, *kwargs.values())))
        if followed:
            leave(original.__name__)
        if wrong or followed:
            return original(*args, **kwargs)
        return barycenter_unbalanced(**dict(zip(order, args, strict=False)), **kwargs, **named)

    return call
