"""PyTorch tensors in and out: a call with tensors as arguments returns tensors.

Nothing here imports torch: a tensor among the arguments means that torch is loaded. An answer has no gradient;
mapuot.torch has a loss with a gradient.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..arrays import import_cupy
from ..errors import warn
from ..graphs import breaks_graph
from ..tensors import array_of, is_csr, share_stream
from .result import Answer

HERE = contextlib.nullcontext()
NO_TENSORS = {float, int, bool, str, type(None)}


def tensor_among(*values: Any) -> Any:
    """Return the first value that is a tensor of real numbers in memory, dense or CSR, else None."""
    torch: Any = sys.modules.get("torch")
    for x in values if torch else ():
        is_tensor = isinstance(x, torch.Tensor) and x.layout in (torch.strided, torch.sparse_csr)
        if is_tensor and not (x.is_complex() or x.is_meta):
            return x
    return None


def check_csr(x: Any, name: str) -> None:
    if not is_csr(x):
        return
    if x.ndim != 2:
        raise ValueError(f"{name} must be a matrix (m, n) where it is sparse, got shape {tuple(x.shape)}")
    if x.device.type != "cpu":
        raise NotImplementedError(f"{name} must lie on the CPU where it is sparse, got {x.device}: pass {name}.cpu()")


def requires_grad(x: Any) -> bool:
    return bool(x.requires_grad and sys.modules["torch"].is_grad_enabled())


def tensor_of(x: Any, device: Any) -> Any:
    """Convert a NumPy, CuPy or CSR array to a tensor on a device; an array on this device is not copied."""
    torch = sys.modules["torch"]
    if hasattr(x, "indptr"):
        start, column, data = (torch.as_tensor(y, device=device) for y in (x.indptr, x.indices, x.data))
        return torch.sparse_csr_tensor(start, column, data, x.shape)
    if type(x).__module__.startswith("cupy"):
        waits = device.type != "cuda" or not share_stream(device)
        x = torch.from_dlpack(x if waits else x.__dlpack__(stream=-1))
    return torch.as_tensor(x, device=device)


def stream_of(device: Any) -> Any:
    """Return a context where CuPy uses torch's current stream; for a CPU an empty context."""
    if device.type != "cuda":
        return HERE
    cupy = import_cupy()
    torch = sys.modules["torch"]
    if torch._C._cuda_isCurrentStreamCapturing():
        raise RuntimeError("a CUDA graph cannot hold a solve, which ends when the host has read its certificate")
    if share_stream(device):
        return HERE
    return cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))


def taken(x: Any, name: str) -> Any:
    """Convert a tensor, an answer, or a pair or list of these to arrays; return any other object unchanged."""
    if issubclass(type(x), Tensors):
        return x.arrays
    if isinstance(x, (tuple, list)) and (len(x) <= 2 or tensor_among(*x) is not None):
        return type(x)(taken(y, name) for y in x)
    if tensor_among(x) is None:
        return x
    check_csr(x, name)
    if requires_grad(x):
        text = f"{name} requires grad and is taken as data: no gradient goes through this call"
        loss = "sample_loss" if name in ("x", "y") else "sinkhorn_loss"
        warn(f"{text}; mapuot.torch.{loss} is the value with its gradient")
    return array_of(x)


def listed(M: Any) -> Any:
    return M if isinstance(M, (list, tuple)) else (M,)


def call_with_arrays(function: Callable[..., Any], like: Any, arguments: dict[str, Any]) -> Any:
    """Call ``function(**arguments)`` with tensors as arrays on their device; return its answer as `Tensors`."""
    with stream_of(like.device):
        arrays = {name: x if type(x) in NO_TENSORS else taken(x, name) for name, x in arguments.items()}
        return Tensors(function(**arrays), like.device, any(map(is_csr, listed(arguments.get("M")))))


class Tensors:
    """A Result or BatchResult with tensors in place of arrays; isinstance sees the class of the answer, ``arrays``.

    ``csr``: convert CSR arrays to tensors, too, because M was a CSR tensor.
    """

    def __init__(self, answer: Answer | None, device: Any, csr: bool = False) -> None:
        """``answer``: None if the method `_found` of a subclass computes the answer on first use."""
        self.answer, self.device, self.csr = answer, device, csr

    @property
    def arrays(self) -> Answer:
        if self.answer is None:
            with stream_of(self.device):
                self.answer = self._found()
        return self.answer

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.arrays)

    def __reduce__(self) -> Any:
        return Tensors, (self.arrays, self.device, self.csr)

    def __repr__(self) -> str:
        return repr(self.arrays)

    def __dir__(self) -> list[str]:
        return dir(self.arrays)

    @breaks_graph
    def __getattr__(self, name: str) -> Any:
        if name == "arrays":  # the property raised an AttributeError during the solve
            raise AttributeError(name)
        with stream_of(self.device):
            there = self.arrays._there.get(name)
            return self._as_tensors(getattr(self.arrays, name) if there is None else there)

    def __bool__(self) -> bool:
        return bool(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)  # type: ignore[arg-type]

    @breaks_graph
    def __getitem__(self, i: Any) -> Any:
        return self._as_tensors(self.arrays[i])  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        return map(self._as_tensors, self.arrays)  # type: ignore[call-overload,no-any-return]

    def _as_tensors(self, value: Any) -> Any:
        if callable(value):
            return functools.partial(self._call, value)
        if isinstance(value, Answer):
            return Tensors(value, self.device, self.csr)
        if isinstance(value, (tuple, list)):
            parts = map(self._as_tensors, value)
            if hasattr(value, "_fields"):
                return type(value)(*parts)
            return type(value)(parts)
        if hasattr(value, "tocsr"):
            becomes_tensor = self.csr
        else:
            becomes_tensor = hasattr(value, "dtype") and np.ndim(value) > 0 and value.dtype.kind in "fiub"
        if becomes_tensor:
            return tensor_of(value, self.device)
        return value

    @breaks_graph
    def _call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with stream_of(self.device):
            args = tuple(taken(x, "the argument") for x in args)
            kwargs = {name: taken(x, name) for name, x in kwargs.items()}
            return self._as_tensors(method(*args, **kwargs))
