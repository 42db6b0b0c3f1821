"""What stands in for POT's Sinkhorn functions once it is patched: the answer to the question that its caller asked.

That is the plan, or cost, of the problem, at least as near to the solution as POT's own stop would leave it, and the
certified solver has it soonest, whatever the method's name. A call that asks for iterates gets POT's, made in the C
core: one with ``log=True`` and a named method, with a warm start, with stopThr <= 0, with a numItermax that may be too
small for POT to converge, and every call after ``patch(iterates=True)``. Where a gradient is to go through, the call
is left to POT's function.

How near POT comes: u and v contract by fi1 fi2 an iteration, fi = reg_m / (reg_m + reg), so that behind a change of
stopThr about stopThr fi1 fi2 is left to go, and the last step may have gone below stopThr by another factor fi1 fi2.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Set
from typing import Any

import numpy as np

from ..answer.result import Result
from ..api.solve import solve
from ..errors import MUTED, InfeasibleError, warn
from ..problem.validate import as_pair
from ..route.plain import attempt
from . import sinkhorn
from .arrays import take, tracked
from .caller import WORDS, warn_not_converged
from .iterate import NAMED
from .sinkhorn import Answers, Call

STOP, DEFAULT_ITER = 1e-6, 1000  # POT's stopThr and numItermax: so many iterations, or more, ask for no iterates
START = 700.0  # no first change of log u is larger where POT's K does not underflow
# of what is left to go: in 200 problems POT's error was .1 to 10 stopThr, ours .005 to .2 of the certified one; the
# translation-invariant method contracts by what the plan mixes, too, and came down to .003 stopThr
SURE, FASTER = 0.3, 0.01
LEAST_TOL = 1e-10  # certified whatever stopThr: the rounding of M / reg allows it up to range(M) / reg = 5e4
NUMBERS = (float, int, np.floating, np.integer)

iterates = False  # patch(iterates=True): every call gets POT's
told: set[str] = set()  # unknown keywords that were warned of


def demand(reg: float, rho: tuple[float, float], stop: float, name: str) -> tuple[float, float]:
    """(tol, the iterations within which POT surely stops): the certified error that POT's end would not undercut."""
    translation, every, _ = NAMED[name]
    rate = 1.0 / ((1.0 + reg / rho[0]) * (1.0 + reg / rho[1]))
    tol = stop * rate ** (every + 1) * (FASTER if translation else SURE)
    enough = every + math.log(START / stop) / -math.log(rate) if rate < 1.0 else math.inf
    return max(tol, LEAST_TOL), enough


def quick(a: Any, b: Any, M: Any, reg: Any, reg_m: Any, name: str) -> Any:
    """The plan of the plainest call, numpy arrays and numbers alone; None where it is another."""
    if not (type(M) is type(a) is type(b) is np.ndarray and b.ndim == 1) or iterates:
        return None
    if not (isinstance(reg, NUMBERS) and isinstance(reg_m, NUMBERS) and reg > 0 and reg_m > 0):
        return None
    reg, rho = float(reg), float(reg_m)
    try:
        tol = demand(reg, (rho, rho), STOP, name)[0]
    except ValueError:  # reg_m / reg beneath the range of float64
        return None
    arguments = "auto", "kl", "product", tol, None, DEFAULT_ITER, "auto", sinkhorn.BACKEND, None
    result: Result | None = attempt(M, a, b, reg, rho, arguments, True)
    if result is None:
        before = MUTED.set(True)
        try:
            result = solve(M, a, b, reg=reg, reg_m=rho, tol=tol, max_passes=DEFAULT_ITER, backend=sinkhorn.BACKEND)
        except InfeasibleError:
            return None
        finally:
            MUTED.reset(before)
    if not result.converged:
        warn_not_converged(result, STOP, WORDS)
    return result.plan


def respond(call: Call, name: str, named: bool, tau: Any, log: bool) -> Answers:
    """The answer to any call; ``named`` where the caller named the method."""
    if call.reg_type is None:  # POT solves several targets with ones for c, whatever its documentation says
        call.reg_type = "entropy" if np.ndim(call.b) == 2 else "kl"
    call.together = True
    asked, tol = iterates or call.warmstart is not None or (log and named), None
    try:
        rho1, rho2 = as_pair(take(call.reg_m, "reg_m"), "reg_m")
        tol, enough = demand(float(call.reg), (float(rho1), float(rho2)), call.stop, name)
        asked = asked or call.max_iter < min(enough, DEFAULT_ITER)
    except (TypeError, ValueError, ZeroDivisionError):  # stopThr <= 0, or what Call tells better
        asked = True
    if asked:
        return call.run(name, tau)
    try:
        most, call.tol, call.max_iter = call.max_iter, tol, max(call.max_iter, DEFAULT_ITER)
        return call.run(None)
    except InfeasibleError:  # POT iterates where no plan exists, too
        call.max_iter = most
        return call.run(name, tau)


def swallow(function: str, unknown: Set[str]) -> None:
    """POT takes any keyword and does nothing with it; programs rely on that. One warning a name."""
    for key in sorted(unknown - told):
        told.add(key)
        warn(f"{function} has no argument {key!r}: ignored, as POT ignores it")


def stand_in(function: Callable[..., Any], original: Callable[..., Any], own: str | None) -> Callable[..., Any]:
    """``function`` of `mapuot.pot` as POT's callers find it; ``own``: the method of a function that has but one."""
    parameters = list(inspect.signature(function).parameters.values())[5:]
    names = {parameter.name for parameter in parameters}
    order = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    plain = "returnCost" not in names

    @functools.wraps(function)
    def call(a: Any, b: Any, M: Any, reg: Any, reg_m: Any, *args: Any, **kwargs: Any) -> Any:
        if plain and not (args or kwargs):
            plan = quick(a, b, M, reg, reg_m, own or "sinkhorn")
            if plan is not None:
                return plan
        if len(args) > len(order) or kwargs.keys() & order[: len(args)]:
            return function(a, b, M, reg, reg_m, *args, **kwargs)  # which tells what is one too many
        given = dict(zip(order, args, strict=False), **kwargs)
        method = given.pop("method", own)  # `ot.solve` hands its method on to `sinkhorn_knopp_unbalanced`, None too
        swallow(function.__name__, given.keys() - names)
        if any(map(tracked, (a, b, M, reg_m, given.get("c")))):
            return with_gradient(function, original, (a, b, M, reg, reg_m, *args), kwargs, given)
        cost, log = given.get("returnCost", "linear"), bool(given.get("log", False))
        if cost not in ("linear", "total"):
            raise ValueError(f"Unknown returnCost = {cost!r}: must be 'linear' or 'total'")
        name = own or sinkhorn.method_name(method) or "sinkhorn"
        request = Call(a, b, M, reg, reg_m, given.get("reg_type"), given.get("c"), given.get("warmstart"))
        request.max_iter, request.stop = given.get("numItermax", DEFAULT_ITER), given.get("stopThr", STOP)
        request.verbose = given.get("verbose", False)
        tau = given.get("tau") if name == "sinkhorn_stabilized" else None
        answers = respond(request, name, method is not None, tau, log)
        return answers.plan(log) if plain else answers.cost(cost, log)

    return call


def with_gradient(
    function: Callable[..., Any],
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Any,
    given: dict[str, Any],
) -> Any:
    """The objective with its gradient from the potentials, which is exact; anything else is left to POT.

    POT's own "total" lacks the mass terms: it and its gradient are 0 at every optimum.
    """
    a, b, M, reg, reg_m = args[:5]
    asked = iterates or given.get("log") or given.get("returnCost") != "total"
    if asked or not sinkhorn.differentiable(
        a, b, M, given.get("reg_type", "kl"), given.get("c"), given.get("warmstart")
    ):
        return original(*args, **kwargs)
    return sinkhorn.loss(a, b, M, reg, reg_m, given.get("stopThr", STOP), given.get("numItermax", DEFAULT_ITER))


def left_where_tracked(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, or POT's ``original`` where a gradient is to go through."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = original if any(map(tracked, (*args, *kwargs.values()))) else function
        return chosen(*args, **kwargs)

    return call
