"""`entry`: decorates functions that users call, so that tensors and units of cost are settled before they begin."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..answer.tensors import call_with_arrays, listed, tensor_among
from ..problem.scale import scaled
from ..problem.validate import as_flag

F = TypeVar("F", bound=Callable[..., Any])
NamedArguments = dict[str, Any]


def entry(
    *tensors: str, costs: Callable[[NamedArguments], tuple[list[Any], Any]] | None = None,
    units: Callable[[Any, NamedArguments], Any] | None = None, each: bool = True,
) -> Callable[[F], F]:  # fmt: skip
    """Decorate a function of costs and masses.

    If one of the arguments ``tensors`` is a tensor of PyTorch, the function gets all tensors as arrays, and its answer
    returns tensors. With ``scale_cost``, reg and reg_m are in units of the costs that ``costs`` reads from the
    arguments. ``costs`` returns (costs, masses of each); masses of None refuse statistics that are weighted by masses.
    ``units(function, arguments)`` replaces this, and serves ``scale_mass``, too. ``each``: False if the function itself
    finds the units of ``scale_each``.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            if tensors and ("torch" in sys.modules or "pandas" in sys.modules):
                values = (*args[: len(tensors)], *map(named.get, tensors[len(args) :]))
                if type(values[0]).__module__.partition(".")[0] == "pandas":
                    check_order(dict(zip(tensors, values, strict=False)))
                like = tensor_among(*(part for x in values for part in listed(x)))
                if like is not None:
                    return call_with_arrays(call, like, arguments(signature, args, named))
            if "scale_each" in named:
                as_flag(named["scale_each"], "scale_each")
            own_units = named.get("scale_each") and not each
            takes_units = costs is not None or units is not None
            if own_units or not takes_units or (named.get("scale_cost") is None and not named.get("scale_mass")):
                return function(*args, **named)
            given = arguments(signature, args, named)
            if costs is None:
                return units(call, given)  # type: ignore[misc]
            read, masses = costs(given)
            return scaled(call, given, read, masses=masses)

        return call  # type: ignore[return-value]

    return decorate


def check_order(given: NamedArguments) -> None:
    """Raise if masses have the labels of a pandas table in another order: masses are matched by place.

    a and b share their labels with the rows and the columns of M, or with the points x and y.
    """
    if "M" in given:
        tables = [(given["M"], "M", "index"), (given["M"], "M", "columns")]
    else:
        tables = [(given[name], name, "index") for name in ("x", "y")]
    for (table, told, axis), names in zip(tables, ("aA", "bB"), strict=True):
        labels: Any = getattr(table, axis, None)
        for name in names:
            x: Any = given.get(name)
            is_series = hasattr(x, "reindex") and x.ndim == 1
            if not is_series or not hasattr(labels, "sort_values") or len(x) != len(labels) or x.index.equals(labels):
                continue
            if x.index.sort_values().equals(labels.sort_values()):
                cure = f"pass {name}.reindex({told}.{axis})"
                raise ValueError(f"{name} has the labels of {told}.{axis} in another order: {cure}")


def arguments(signature: inspect.Signature, args: Any, named: NamedArguments) -> NamedArguments:
    """Return all arguments of a call by name, with defaults; options that the function hands on are among them."""
    bound = signature.bind(*args, **named)
    bound.apply_defaults()
    given: NamedArguments = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name)
    return given
