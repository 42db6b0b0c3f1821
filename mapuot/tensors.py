"""Tensors of PyTorch as arrays, in place where possible.

Nothing here imports torch: a tensor among the arguments means that torch is loaded.
"""

import sys
from typing import Any

from .arrays import import_cupy


def is_tensor(x: Any) -> bool:
    """Tell whether x is a tensor of PyTorch, a parameter, say."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_csr(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor) and x.layout == torch.sparse_csr


def array_of(x: Any) -> Any:
    """Return the memory of a tensor as a NumPy, CuPy or (CSR) SciPy array; half precision becomes float32."""
    x = x.detach()
    if x.is_floating_point() and x.dtype.itemsize < 4:
        x = x.float()
    if is_csr(x):
        from scipy.sparse import csr_array  # noqa: PLC0415 - on first use

        data, column, start = (y.numpy() for y in (x.values(), x.col_indices(), x.crow_indices()))
        return csr_array((data, column, start), shape=tuple(x.shape))
    if x.device.type != "cuda":
        return x.cpu().numpy()
    cupy = import_cupy()
    if not (x.is_contiguous() and x.numel() and x.is_floating_point() and share_stream(x.device)):
        return cupy.from_dlpack(x)
    # the same as from_dlpack without its event, which takes a fifth of the time of a small solve
    memory = cupy.cuda.UnownedMemory(x.data_ptr(), x.numel() * x.element_size(), x, x.device.index)
    return cupy.ndarray(tuple(x.shape), f"f{x.element_size()}", cupy.cuda.MemoryPointer(memory, 0))


def share_stream(device: Any) -> bool:
    """Return whether CuPy uses torch's current stream on a GPU, as in `stream_of`: then neither must wait."""
    import cupy  # noqa: PLC0415 - only for tensors on a GPU

    torch = sys.modules["torch"]
    if device.index is None:
        index = torch.cuda.current_device()
    else:
        index = device.index
    on = torch._C._cuda_getCurrentRawStream(index)  # .3 us; torch.cuda.current_stream takes 9 us
    return bool(on == cupy.cuda.get_current_stream().ptr)
