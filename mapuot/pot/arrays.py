"""Conversion from other array libraries: NumPy, CuPy and lists pass unchanged; torch, JAX, TensorFlow are converted."""

import sys
from typing import Any

import numpy as np

from ..answer.tensors import array_of, requires_grad, tensor_of
from ..problem.validate import as_array


def library(x: Any) -> str:
    """Return the top-level package of ``type(x)``: "numpy", "cupy", "torch", "jax", "builtins" ..."""
    root = type(x).__module__.partition(".")[0]
    return "jax" if root == "jaxlib" else root


def tracked(x: Any) -> bool:
    """Tell whether x needs a gradient: a tensor that requires grad while grads are recorded, or a JAX tracer."""
    root = library(x)
    if root == "torch":
        return requires_grad(x)
    return root == "jax" and isinstance(x, sys.modules["jax"].core.Tracer)


def is_dense_tensor(x: Any) -> bool:
    """Tell whether x is a dense PyTorch tensor in memory, outside the transforms of torch.func."""
    if library(x) != "torch":
        return False
    torch = sys.modules["torch"]
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return not (wrapped or x.is_meta or x.is_complex()) and x.layout == torch.strided


def is_product(c: Any, a: Any, b: Any) -> bool:
    """Tell whether tensor c is a b^T."""
    return all(map(is_dense_tensor, (c, a, b))) and bool((c == a[:, None] * b).all())


def no_grad() -> Any:
    """Return a context that records no operations on PyTorch tensors."""
    return sys.modules["torch"].no_grad()


def lowered(word: Any) -> Any:
    """Return a word in lower case, as POT reads it; anything else unchanged."""
    if isinstance(word, str):
        return word.lower()
    return word


def to_array(x: Any, name: str) -> Any:
    """Return ``x`` in the solver's form, a view if possible; a needed gradient raises an error."""
    root = library(x)
    if root == "torch":
        if tracked(x):
            raise NotImplementedError(
                f"{name} requires grad, and no gradient goes through this call: a, b and M must all be dense tensors, "
                f"reg_type 'kl' and c None for one; {name}.detach() gives the answer alone"
            )
        return array_of(x)
    if root == "pandas":
        return as_array(x, name)
    if root == "jax":
        return np.asarray(x)
    if root == "tensorflow":
        return x.numpy()
    return x


def give(x: Any, like: Any) -> Any:
    """Return ``x``, of NumPy or CuPy, as an array in the library and on the device of ``like``."""
    root = library(like)
    if root == "torch":
        return tensor_of(x, like.device)
    if root == "jax":
        return sys.modules["jax"].numpy.asarray(x)
    if root == "tensorflow":
        return sys.modules["tensorflow"].convert_to_tensor(x)
    if root == "cupy":
        return sys.modules["cupy"].asarray(x)
    return x
