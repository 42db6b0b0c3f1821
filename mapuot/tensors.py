"""PyTorch tensors as the solver reads them: who asks with tensors is answered with tensors.

Nothing here imports torch: where a tensor is among the arguments, its library is loaded. No gradient goes through an
answer; mapuot.torch has the loss that has one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .errors import warn
from .result import Answer

PLAIN = {float, int, bool, str, type(None)}


def tensor_among(*values: Any) -> Any:
    """The first that is a dense tensor of real numbers in memory, else None."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    found = (x for x in values if isinstance(x, torch.Tensor))
    return next((x for x in found if x.layout == torch.strided and not (x.is_complex() or x.is_meta)), None)


def requires_grad(x: Any) -> bool:
    """Whether a gradient is to go through this tensor."""
    return bool(x.requires_grad and sys.modules["torch"].is_grad_enabled())


def array_of(x: Any) -> Any:
    """The memory of such a tensor as a numpy or CuPy array; half precision in float32."""
    x = x.detach()
    if x.is_floating_point() and x.dtype.itemsize < 4:
        x = x.float()
    if x.device.type != "cuda":
        return x.cpu().numpy()
    import cupy  # noqa: PLC0415 - only where torch brings GPU memory

    return cupy.from_dlpack(x)


def tensor_of(x: Any, device: Any) -> Any:
    """A numpy or CuPy array as a tensor on that device, over its memory where it lies there."""
    torch = sys.modules["torch"]
    return torch.as_tensor(torch.from_dlpack(x) if type(x).__module__.startswith("cupy") else x, device=device)


def stream_of(device: Any) -> Any:
    """A context in which CuPy works on torch's current stream of a device that is a GPU."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    import cupy  # noqa: PLC0415 - only for tensors on a GPU

    stream = sys.modules["torch"].cuda.current_stream(device)
    same = stream.cuda_stream == cupy.cuda.get_current_stream().ptr
    return contextlib.nullcontext() if same else cupy.cuda.Stream.from_external(stream)


def taken(x: Any, name: str) -> Any:
    """A tensor, an answer or a pair of them as arrays; anything else, other tensors too, as it is."""
    if type(x) is Tensors:
        return x.arrays
    if isinstance(x, (tuple, list)) and len(x) <= 2:
        return type(x)(taken(y, name) for y in x)
    if tensor_among(x) is None:
        return x
    if requires_grad(x):
        warn(
            f"{name} requires grad and is taken as data: no gradient goes through this call; "
            "mapuot.torch.sinkhorn_loss is the cost with its gradient"
        )
    return array_of(x)


def answered(function: Callable[..., Any], like: Any, arguments: dict[str, Any]) -> Any:
    """``function(**arguments)``, its tensors read where they lie, and what it returns as `Tensors`."""
    with stream_of(like.device):
        arrays = {name: x if type(x) in PLAIN else taken(x, name) for name, x in arguments.items()}
        return Tensors(function(**arrays), like.device)


class Tensors:
    """A Result or BatchResult, as which it passes, with tensors for arrays; ``arrays`` is the answer itself."""

    def __init__(self, arrays: Answer, device: Any) -> None:
        self.arrays, self.device = arrays, device

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.arrays)

    def __reduce__(self) -> Any:
        return Tensors, (self.arrays, self.device)

    def __repr__(self) -> str:
        return repr(self.arrays)

    def __dir__(self) -> list[str]:
        return dir(self.arrays)

    def __getattr__(self, name: str) -> Any:
        with stream_of(self.device):
            return self._as_tensors(getattr(self.arrays, name))

    def __len__(self) -> int:
        return len(self.arrays)  # type: ignore[arg-type]

    def __getitem__(self, i: Any) -> Any:
        return self._as_tensors(self.arrays[i])  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        return map(self._as_tensors, self.arrays)  # type: ignore[call-overload,no-any-return]

    def _as_tensors(self, value: Any) -> Any:
        if isinstance(value, Answer):
            return Tensors(value, self.device)
        if isinstance(value, (tuple, list)):
            parts = map(self._as_tensors, value)
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if hasattr(value, "dtype") and np.ndim(value) and value.dtype.kind in "fiub" and not hasattr(value, "tocsr"):
            return tensor_of(value, self.device)
        return functools.partial(self._call, value) if callable(value) else value

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with stream_of(self.device):
            args = tuple(taken(x, "the argument") for x in args)
            kwargs = {name: taken(x, name) for name, x in kwargs.items()}
            return self._as_tensors(method(*args, **kwargs))
