"""Build mapuot._core: the C library of src_c, compiled once per instruction set and dtype, behind cffi.

Metadata stand in pyproject.toml, but for the README, whose links become absolute here; UNITS is the one list of
compilations. Importing this file
builds nothing: bench/bandwidth.py does so, to compile its C with the same flags.
The environment's CFLAGS come last on every command line.  MAPUOT_ISAS, as in
MAPUOT_ISAS=scalar,neon, names the instruction sets: those of another machine, with its compiler in CC, or fewer.
"""

import os
import re
import shlex
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

from setuptools import setup
from setuptools.command.build_ext import build_ext as setuptools_build_ext

FLAGS = shlex.split(
    "-g0 -std=c11 -D_GNU_SOURCE -O3 -fPIC -fvisibility=hidden -pthread -fno-math-errno"
    " -Wall -Wextra -Werror=implicit-function-declaration"
)
ISA_FLAGS = {
    "scalar": "-O1",  # as fast as -O3, and compiled in a quarter of the time
    "avx2": "-mavx2 -mfma",
    "avx512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mprefer-vector-width=512",
    "neon": "",
}
# the instruction sets of a machine, the best last; of others, and of 32 bits, the first alone
MACHINES = {
    "x86_64": "scalar,avx2,avx512",
    "amd64": "scalar,avx2,avx512",
    "aarch64": "scalar,neon",
    "arm64": "scalar,neon",
}
DTYPES = ["f64", "f32"]
PLAIN_SOURCES = [
    "dispatch",
    "machine",
    "pool",
    "limits",
    "schedule",
    "solver",
    "finish",
    "newton",
    "solve",
    "coarse",
    "boxes",
    "streams",
    "batch",
    "log_matmul",
    "marginals",
    "tree",
    "left",
    "differences",
    "barycenter",
]
INCLUDES = ["src_c"]

MACHINE = sysconfig.get_platform().rpartition("-")[2] if sys.maxsize > 2**32 else ""
ISAS = os.environ.get("MAPUOT_ISAS", MACHINES.get(MACHINE, "scalar")).split(",")
PLAIN = ["-DMAPUOT_EACH_ISA(DO)=" + " ".join(f"DO({isa})" for isa in ISAS)]


def isa_flags(isa):
    return [*PLAIN, *shlex.split(ISA_FLAGS[isa]), f"-DMAPUOT_ISA={isa}", f"-DMAPUOT_ISA_{isa.upper()}"]


def dtype_flags(dtype):
    return [f"-DMAPUOT_DTYPE={dtype}", f"-DMAPUOT_DTYPE_{dtype.upper()}"]


# one wheel for every Python from 3.10 on; free-threaded builds have no stable ABI
ABI3 = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp310"}}

# (object folder, source, flags): one entry, one call of the compiler
UNITS = [
    *[("plain", f"{name}.c", PLAIN) for name in PLAIN_SOURCES],
    *[
        (isa, f"{name}_tmpl.c", isa_flags(isa))
        for isa in ISAS
        for name in ["stream", "finish", "coarse", "boxes", "marginals", "left"]
    ],
    *[
        (f"{isa}_{dtype}", source, isa_flags(isa) + dtype_flags(dtype))
        for isa in ISAS
        for dtype in DTYPES
        for source in ["kernels_tmpl.c", "batch_tmpl.c", "log_matmul_tmpl.c"]
    ],
]


HOME = "https://github.com/mapuot/mapuot/blob/v{version}/"
PICTURES = "https://raw.githubusercontent.com/mapuot/mapuot/v{version}/"


def front_page():
    """Return README.md with absolute links and pictures of this version: PyPI shows it outside the repository."""
    with open("README.md", encoding="utf-8") as file:
        text = file.read()
    with open("mapuot/__init__.py", encoding="utf-8") as file:
        version = re.search(r'__version__ = "(.*)"', file.read())[1]
    pictures = re.compile(r"(!\[[^]]*\]\()(?!https?:)")
    links = re.compile(r"(\]\()(?!https?:|#)")
    text = pictures.sub(r"\1" + PICTURES.format(version=version), text)
    return links.sub(r"\1" + HOME.format(version=version), text)


def check_tools(compiler, core):
    """End with one line that says which tool is missing, and how to get it."""
    cure = "install gcc or clang and Python's headers (Debian, Ubuntu: apt install gcc python3-dev), or a wheel"
    if shutil.which(compiler) is None:
        sys.exit(f"mapuot: there is no C compiler {compiler!r}: {cure}")
    headers = [sysconfig.get_path(name) for name in ("include", "platinclude")]
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    headers += [flag[2:] for flag in flags if flag.startswith("-I")]
    if not core and not any(os.path.exists(os.path.join(folder, "Python.h")) for folder in headers):
        sys.exit(f"mapuot: Python.h is not in {headers[0]}: {cure}")


class build_ext(setuptools_build_ext):
    """Compile UNITS, each variant into its own folder, and link their objects into the extension, but with --core."""

    user_options = [*setuptools_build_ext.user_options, ("core", None, "only compile the C core: Python.h is not read")]
    boolean_options = [*setuptools_build_ext.boolean_options, "core"]

    def initialize_options(self):
        super().initialize_options()
        self.core = False

    def build_extension(self, ext):
        cflags = shlex.split(os.environ.get("CFLAGS", ""))
        check_tools(self.compiler.compiler_so[0], self.core)

        def compile_unit(unit):
            folder, source, flags = unit
            return self.compiler.compile(
                [f"src_c/{source}"],
                output_dir=os.path.join(self.build_temp, folder),
                include_dirs=["src_c"],
                extra_postargs=[*FLAGS, *flags, *cflags],
            )

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            ext.extra_objects = [path for paths in threads.map(compile_unit, UNITS) for path in paths]
        if self.core:
            return
        ext.include_dirs = INCLUDES
        ext.extra_compile_args = [*FLAGS, *PLAIN, *cflags]
        ext.extra_link_args = ["-pthread", "-lm"]
        self.force = True  # the objects are new even where the C file that cffi writes is not
        super().build_extension(ext)


if __name__ == "__main__":
    setup(
        long_description=front_page(),
        long_description_content_type="text/markdown",
        cffi_modules=["src_c/ffi_build.py:ffi"],
        cmdclass={"build_ext": build_ext},
        options=ABI3,
    )
