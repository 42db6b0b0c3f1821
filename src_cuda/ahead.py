"""Compile kernels for GPUs that need not be present, for the Linux wheels: ``python src_cuda/ahead.py FOLDER``.

NVRTC, from the wheel nvidia-cuda-nvrtc, needs no driver. FOLDER gets the kernels that ``mapuot warm-up`` compiles: one
archive for each part of a file and each architecture. `mapuot.backends.cuda.kernels.key_of` finds a member. Kernels of
one text are so similar that xz packs them together in a third of the space. Equal sources give equal bytes. CuPy only
has to be importable: tests/cuda/cuda_on_cpu will do.
"""

import ctypes
import functools
import importlib.util
import io
import os
import sys
import tarfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARCHES = 80, 90, 100, 120  # a binary runs on newer GPUs of its major version, too: 80 on 86 and 89


@functools.cache
def library(major=13):
    """libnvrtc of this CUDA, of NVIDIA's wheel or the system's; None without it."""
    spec = importlib.util.find_spec("nvidia")
    name = f"libnvrtc.so.{major}"
    if spec is None:
        folders = []
    else:
        folders = spec.submodule_search_locations
    found = [path for folder in folders for path in Path(folder).glob(f"*/lib/{name}")]
    for path in found:
        for builtins in path.parent.glob(f"libnvrtc-builtins.so.{major}.*"):
            ctypes.CDLL(builtins, ctypes.RTLD_GLOBAL)  # libnvrtc asks for it by name alone
    try:
        return ctypes.CDLL(found[0] if found else name)
    except OSError:
        return None


def compiled(nvrtc, source, flags):
    """(the binary, the log) of a source; AssertionError with the log where it does not compile."""
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()

    def take(what):
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        room = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, room)
        return room.raw

    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
    status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*map(str.encode, flags)))
    log = take("ProgramLog").rstrip(b"\0").decode()
    assert status == 0, log
    binary = take("CUBIN")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary, log


def pack(folder, binaries):
    """Write {(architecture, file, part): {key: binary}}, one archive each."""
    for (arch, name, part), found in sorted(binaries.items()):
        path = Path(folder) / f"sm_{arch}" / f"{name}.{part}.tar.xz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:xz", preset=9) as archive:
            for key, binary in found.items():
                member = tarfile.TarInfo(key)
                member.size = len(binary)
                archive.addfile(member, io.BytesIO(binary))


def main(folder):
    from mapuot.backends.cuda import kernels, warm_up  # noqa: PLC0415 - the tests take the functions above

    jobs = {(arch, *kernels.module_key(0, name, function, *sorted(options.items()))[1:])
            for arch in ARCHES for name, function, options in warm_up.jobs(arch)}  # fmt: skip

    def compile_one(job):
        arch, name, part, *options = job
        flags = [*kernels.flags_of(options), "-ftz=true", f"-arch=sm_{arch}"]  # as CuPy does
        return job, compiled(library(), kernels.source_of(name, part), flags)[0]

    binaries = defaultdict(dict)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (arch, name, part, *options), binary in pool.map(compile_one, sorted(jobs)):
            binaries[arch, name, part][kernels.key_of(name, part, options)] = binary
    pack(folder, binaries)


if __name__ == "__main__":
    main(sys.argv[1])
