"""NVRTC by ctypes: it compiles the CUDA kernels for any architecture without a GPU; of NVIDIA's wheel or toolkit."""

import ctypes
import ctypes.util
import functools
import importlib.util
from pathlib import Path

import pytest


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


def compiled(source, flags):
    """The compiler's log; AssertionError with it where the source does not compile."""
    nvrtc, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
    status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*map(str.encode, flags)))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, log.value.decode()
    return log.value.decode()
