"""Losses of `mapuot.torch` within ``torch.compile``: one operator, into which the compiler does not look.

A compiler runs a loss on tensors without numbers. What it then sees is ``mapuot::value`` of the tensors, whose shape
follows from theirs, and ``mapuot::slopes`` for the way back; at run time they call the loss and ``backward()`` as a
program without a compiler does. The way back of a value is kept as long as its second output lives, an integer that
names it. Tensors on a GPU, and costs that are sparse, break the graph: there a loss is called as it is.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

# a loss, its tensors (0), or how many are in a list, by name, and its other arguments
Call = tuple[str, tuple[tuple[str, int], ...], dict[str, Any]]

LOSSES: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {}  # by name; what tells how many problems there are
CALLS: list[Call] = []  # of compiled programs
KEPT: dict[int, tuple[list[Tensor], Tensor]] = {}  # by a value's number: its inputs, and the value with its graph
NUMBERS, WORKERS = itertools.count(), ThreadPoolExecutor()


def tensors_in(x: Any) -> list[Tensor] | None:
    """Return the tensors of an argument, None where it has none."""
    if isinstance(x, Tensor):
        return [x]
    return list(x) if isinstance(x, (list, tuple)) and len(x) > 0 and isinstance(x[0], Tensor) else None


def compilable(**single: int) -> Callable[[Any], Any]:
    """Let a loss be one operator of a compiled program; elsewhere it is called as it is.

    ``single``: the arguments that tell how many problems there are, each with the dimensions that it has for one.
    """

    def decorated(loss: Any) -> Any:
        LOSSES[loss.__name__] = loss, single
        outside, names = torch.compiler.disable(loss), tuple(inspect.signature(loss).parameters)

        @functools.wraps(loss)
        def call(*args: Any, **options: Any) -> Any:
            if not torch.compiler.is_compiling():
                return outside(*args, **options)
            given = [*zip(names, args, strict=False), *options.items()]
            found = [(name, x, tensors_in(x)) for name, x in given]
            inputs = [t for *_, tensors in found for t in tensors or []]
            if any(x.layout != torch.strided or x.device.type != "cpu" for x in inputs):
                return outside(*args, **options)
            places = tuple((name, 0 if isinstance(x, Tensor) else len(x)) for name, x, ts in found if ts is not None)
            rest = {name: x for name, x, tensors in found if tensors is None}
            return torch.ops.mapuot.value(inputs, number_of(loss.__name__, places, rest))[0]

        return call

    return decorated


@torch.compiler.assume_constant_result
def number_of(loss: str, places: Any, rest: Any) -> int:
    """Return the number of a call, by which the operator knows it."""
    wanted = loss, places, rest
    if wanted not in CALLS:
        CALLS.append(wanted)
    return CALLS.index(wanted)


def arguments(inputs: list[Tensor], number: int) -> tuple[str, dict[str, Any]]:
    """Return the loss of a call, and its arguments with these tensors in their places."""
    loss, places, rest = CALLS[number]
    left = iter(inputs)
    return loss, rest | {k: [next(left) for _ in range(count)] if count else next(left) for k, count in places}


VALUE = "(Tensor[] inputs, int number) -> (Tensor, Tensor)"
SLOPES = "(Tensor grad, Tensor name, Tensor[] inputs, bool[] needed) -> Tensor[]"


@torch.library.custom_op("mapuot::value", mutates_args=(), schema=VALUE)
def value(inputs: list[Tensor], number: int) -> tuple[Tensor, Tensor]:
    """Return the value of a loss, and what names its way back."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    loss, given = arguments(inputs, number)
    found = WORKERS.submit(LOSSES[loss][0], **given).result()  # an operator runs below autograd, a thread does not
    name = torch.tensor(next(NUMBERS))
    KEPT[int(name)] = inputs, found
    weakref.finalize(name, KEPT.pop, int(name), None)
    return found.detach(), name


@value.register_fake
def value_without_numbers(inputs: list[Tensor], number: int) -> tuple[Tensor, Tensor]:
    loss, given = arguments(inputs, number)
    several = []
    for name, least in LOSSES[loss][1].items():
        x = given.get(name)
        if isinstance(x, list):
            several.append(len(x))
        elif isinstance(x, Tensor) and x.ndim > least:
            several.append(x.shape[0])
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32
    return inputs[0].new_empty(several[:1], dtype=dtype), torch.empty((), dtype=torch.int64)


@torch.library.custom_op("mapuot::slopes", mutates_args=(), schema=SLOPES)
def slopes(grad: Tensor, name: Tensor, inputs: list[Tensor], needed: list[bool]) -> list[Tensor]:
    """Return grad times the derivatives of a value by its inputs, zeros where they are not needed."""
    kept, found = KEPT[int(name)]
    wanted = [x for x, need in zip(kept, needed, strict=True) if need]
    some = iter(torch.autograd.grad(found, wanted, grad, retain_graph=True, materialize_grads=True))
    return [next(some).clone() if need else torch.zeros_like(x) for x, need in zip(inputs, needed, strict=True)]


@slopes.register_fake
def slopes_without_numbers(grad: Tensor, name: Tensor, inputs: list[Tensor], needed: list[bool]) -> list[Tensor]:
    return [torch.empty_like(x) for x in inputs]


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1], *inputs[0])


def way_back(ctx: Any, grad: Tensor, _: Any) -> tuple[list[Tensor | None], None]:
    name, *inputs = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[0])
    found = torch.ops.mapuot.slopes(grad, name, inputs, needed)
    return [x if need else None for x, need in zip(found, needed, strict=True)], None


value.register_autograd(way_back, setup_context=keep)
