"""Logs of NVRTC, which compiles the CUDA kernels for any architecture without a GPU: src_cuda/ahead.py.

The logs are kept in a folder of temporary files, by a digest of compiler, source and flags: all kernels take a minute
of one core, and most runs of the tests change none.
"""

import ctypes
import hashlib
import os
import tempfile
from pathlib import Path

import ahead
import pytest

CACHE = Path(tempfile.gettempdir()) / f"mapuot-nvrtc-{os.getuid()}"


def library(major):
    """Return the path of NVRTC as `ahead` finds it; skips without it."""
    return ahead.library(major) or pytest.skip(f"needs NVRTC {major}: pip install --group test")


def identity(major):
    """Return a compiler's identity: its version and, of a wheel, the size of its file."""
    numbers = (ctypes.c_int(), ctypes.c_int())
    path = Path(library(major)._name)
    library(major).nvrtcVersion(*map(ctypes.byref, numbers))
    return *(number.value for number in numbers), path.name, path.stat().st_size if path.exists() else 0


def compiled(source, flags, major=13):
    """Return the log of this CUDA's compiler; raise AssertionError with it if the source does not compile."""
    name = hashlib.sha256(repr((identity(major), source, flags)).encode()).hexdigest()[:24]
    kept = CACHE / name
    if not kept.exists():
        _, log = ahead.compiled(library(major), source, flags)
        CACHE.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=CACHE, delete=False) as file:
            file.write(log)
        Path(file.name).rename(kept)
    return kept.read_text()
