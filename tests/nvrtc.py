"""NVRTC by ctypes: it compiles the CUDA kernels for any architecture without a GPU; of NVIDIA's wheel or toolkit.

The logs are kept in a folder of temporary files, by a digest of compiler, source and flags: all kernels take a minute
of one core, and most runs of the tests change none.
"""

import ctypes
import ctypes.util
import functools
import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

CACHE = Path(tempfile.gettempdir()) / f"mapuot-nvrtc-{os.getuid()}"


@functools.cache
def library():
    """libnvrtc of the wheel nvidia-cuda-nvrtc, else the system's; skips without it."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations
    found = [path for folder in folders for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))]
    for path in [path for folder in folders for path in Path(folder).glob("*/lib/libnvrtc-builtins.so.*")]:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)  # libnvrtc asks for it by name alone
    path = found[0] if found else ctypes.util.find_library("nvrtc")
    if path is None:
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    return ctypes.CDLL(path)


def identity():
    """What tells one compiler from another: its version and, of a wheel, the size of its file."""
    major, minor, path = ctypes.c_int(), ctypes.c_int(), Path(library()._name)
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value, path.name, path.stat().st_size if path.exists() else 0


def compiled(source, flags):
    """The compiler's log; AssertionError with it where the source does not compile."""
    name = hashlib.sha256(repr((identity(), source, flags)).encode()).hexdigest()[:24]
    kept = CACHE / name
    if not kept.exists():
        log = compiled_now(source, flags)
        CACHE.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=CACHE, delete=False) as file:
            file.write(log)
        Path(file.name).rename(kept)
    return kept.read_text()


def compiled_now(source, flags):
    nvrtc, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
    status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*map(str.encode, flags)))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, log.value.decode()
    return log.value.decode()
