"""Losses of `mapuot.torch` within ``torch.compile``: one operator, into which the compiler does not look.

A compiler traces a loss with tensors that have shapes but no numbers. It sees two operators: ``mapuot::value`` of all
tensors, and in the backward pass ``mapuot::slope`` of one tensor. At run time they call the loss and ``backward()`` as
a program without a compiler does, on the stream of the compiled program. The second output of ``mapuot::value`` is an
integer that names the value; its graph is kept as long as this integer lives. Both operators solve the problems of
torch.vmap as one batch. Sparse costs break the graph: there a loss is called as it is.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function

# a loss, its tensors (0), or how many are in a list, by name, and its other arguments
Call = tuple[str, tuple[tuple[str, int], ...], dict[str, Any]]

LOSSES: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {}  # by name; what tells how many problems there are
CALLS: dict[int, Call] = {}  # of compiled programs, which outlive a process in the compiler's cache
VALUES: dict[int, tuple[list[Tensor], Tensor]] = {}  # by a value's number: its inputs, and the value with its graph
NUMBERS = itertools.count()
WORKERS = ThreadPoolExecutor()


def tensors_in(x: Any) -> list[Tensor] | None:
    """Return the tensors of an argument, None where it has none."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, (list, tuple)) and len(x) > 0 and isinstance(x[0], Tensor):
        return list(x)
    return None


def compilable(**single: int) -> Callable[[Any], Any]:
    """Let a loss be one operator of a compiled program; elsewhere it is called as it is.

    ``single``: the arguments that tell how many problems there are, each with the dimensions that it has for one.
    """

    def decorated(loss: Any) -> Any:
        LOSSES[loss.__name__] = loss, single
        outside = torch.compiler.disable(loss)
        names = tuple(inspect.signature(loss).parameters)

        @functools.wraps(loss)
        def call(*args: Any, **options: Any) -> Any:
            if not torch.compiler.is_compiling():
                return outside(*args, **options)
            given = [*zip(names, args, strict=False), *options.items()]
            found = [(name, x, tensors_in(x)) for name, x in given]
            inputs = [t for *_, tensors in found for t in tensors or []]
            if any(x.layout != torch.strided for x in inputs):
                return outside(*args, **options)
            places = tuple((name, 0 if isinstance(x, Tensor) else len(x)) for name, x, ts in found if ts is not None)
            rest = {name: x for name, x, tensors in found if tensors is None}
            return torch.ops.mapuot.value(inputs, number_of(loss.__name__, places, rest))[0]

        return call

    return decorated


@torch.compiler.assume_constant_result
def number_of(loss: str, places: Any, rest: Any) -> int:
    """Return the number that names a call to the operator: a hash of the loss and its arguments but tensors."""
    wanted = loss, places, rest
    number = int.from_bytes(hashlib.sha256(pickle.dumps(wanted)).digest()[:7], "big")
    CALLS[number] = wanted
    return number


def arguments(inputs: list[Tensor], number: int) -> tuple[str, dict[str, Any]]:
    """Return the name of a call's loss, and its arguments with these tensors in their places."""
    loss, places, rest = CALLS[number]
    left = iter(inputs)
    return loss, rest | {k: [next(left) for _ in range(count)] if count else next(left) for k, count in places}


VALUE = "(Tensor[] inputs, int number) -> (Tensor, Tensor)"
SLOPE = "(Tensor grad, Tensor name, Tensor[] inputs, int place) -> Tensor"
TAGS: tuple[Any, ...] = ()
if hasattr(torch.Tag, "cudagraph_unsafe"):  # not in PyTorch 2.5
    TAGS = (torch.Tag.cudagraph_unsafe,)
torch.library.define("mapuot::value", VALUE, tags=TAGS)
torch.library.define("mapuot::slope", SLOPE, tags=TAGS)


@torch.library.impl("mapuot::value", "CompositeExplicitAutograd")
def value(inputs: list[Tensor], number: int) -> tuple[Tensor, Tensor]:
    """Return the value of a loss, and the integer that names its graph for the backward pass."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    loss, given = arguments(inputs, number)
    if inputs[0].is_cuda:
        stream = torch.cuda.current_stream(inputs[0].device)
    else:
        stream = None

    def work() -> Any:
        with torch.cuda.stream(stream):
            return LOSSES[loss][0](**given)

    found = WORKERS.submit(work).result()  # an operator runs below autograd, a thread does not
    name = torch.tensor(next(NUMBERS))
    VALUES[int(name)] = inputs, found
    weakref.finalize(name, VALUES.pop, int(name), None)
    return found.detach(), name


@torch.library.register_fake("mapuot::value")
def value_without_numbers(inputs: list[Tensor], number: int) -> tuple[Tensor, Tensor]:
    loss, given = arguments(inputs, number)
    several = []
    for name, least in LOSSES[loss][1].items():
        x = given.get(name)
        if isinstance(x, list):
            several.append(len(x))
        elif isinstance(x, Tensor) and x.ndim > least:
            several.append(x.shape[0])
    if any(x.dtype == torch.float64 for x in inputs):
        dtype = torch.float64
    else:
        dtype = torch.float32
    return inputs[0].new_empty(several[:1], dtype=dtype), torch.empty((), dtype=torch.int64)


@torch.library.impl("mapuot::slope", "CompositeExplicitAutograd")
def slope(grad: Tensor, name: Tensor, inputs: list[Tensor], place: int) -> Tensor:
    """Return grad times the derivative of a value by one of its inputs."""
    # in this thread: on a GPU a backward pass in another thread would wait for this one
    kept, found = VALUES[int(name)]
    (one,) = torch.autograd.grad(found, kept[place], grad, retain_graph=True, materialize_grads=True)
    return one.clone(memory_format=torch.contiguous_format)


torch.library.register_fake("mapuot::slope", lambda grad, name, x, place: x[place].new_empty(x[place].shape))


def stacked(size: int, inputs: list[Tensor], dims: list[int | None]) -> list[Tensor]:
    """Return the inputs of all problems of torch.vmap, with a first axis of problems; shared inputs are repeated."""
    return [x.expand(size, *x.shape) if at is None else x.movedim(at, 0) for x, at in zip(inputs, dims, strict=True)]


@torch.library.register_vmap("mapuot::value")
def values(info: Any, dims: Any, inputs: list[Tensor], number: int) -> Any:
    one = [x if at is None else x.select(at, 0) for x, at in zip(inputs, dims[0], strict=True)]
    if value_without_numbers(one, number)[0].ndim or any(count for _, count in CALLS[number][1]):
        raise NotImplementedError("torch.vmap goes over single problems, and not over batches of them")
    return torch.ops.mapuot.value(stacked(info.batch_size, inputs, dims[0]), number), (0, None)


@torch.library.register_vmap("mapuot::slope")
def slopes(info: Any, dims: Any, grad: Tensor, name: Tensor, inputs: list[Tensor], place: int) -> Any:
    """Return the slopes of all problems of a batch, or of one answer for each of several weights."""
    (grads,) = stacked(info.batch_size, [grad], dims[:1])
    size = info.batch_size
    if any(at is not None for at in dims[2]):
        return torch.ops.mapuot.slope(grads, name, stacked(size, inputs, dims[2]), place), 0
    return torch.stack([torch.ops.mapuot.slope(one, name, inputs, place) for one in grads]), 0


class _Value(torch.autograd.Function):
    """``mapuot::value`` with its backward pass; the compiler leaves out slopes that nobody needs."""

    @staticmethod
    def forward(ctx: Any, number: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            found, name = torch.ops.mapuot.value(list(inputs), number)
        ctx.save_for_backward(name, *inputs)
        ctx.mark_non_differentiable(name)
        return found, name

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        name, *inputs = ctx.saved_tensors
        places = enumerate(ctx.needs_input_grad[1:])
        return None, *(torch.ops.mapuot.slope(grad, name, inputs, k) if need else None for k, need in places)


class _Slope(torch.autograd.Function):
    """``mapuot::slope``, which has no derivative."""

    @staticmethod
    def forward(ctx: Any, place: int, grad: Tensor, name: Tensor, *inputs: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = torch.ops.mapuot.slope(grad, name, list(inputs), place)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("a compiled loss of mapuot.torch has no second derivatives")


def applied(function: Any, *args: Any) -> Any:
    """Apply a function within an operator that a transform of torch.func has called.

    Only the innermost gradient has a backward pass. A second gradient around it would be zero, so it raises an error.
    """
    unwrapped, at_once = torch._C._functorch.get_unwrapped, torch._C._functorch.is_batchedtensor
    traced = torch._C._functorch.is_gradtrackingtensor
    for x in args:
        if isinstance(x, Tensor) and traced(x):
            inner = unwrapped(x)
        else:
            inner = None
        while inner is not None and at_once(inner):
            inner = unwrapped(inner)
        if inner is not None and (traced(inner) or inner.requires_grad):
            raise NotImplementedError("a compiled loss of mapuot.torch has one gradient, and none around it")
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*args)


torch.library.impl("mapuot::value", "Autograd", lambda inputs, number: applied(_Value, number, *inputs))
torch.library.impl("mapuot::slope", "Autograd", lambda grad, name, x, place: applied(_Slope, place, grad, name, *x))
