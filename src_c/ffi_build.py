"""The foreign interface: cffi reads the very headers that the C core is compiled with."""

from pathlib import Path

from cffi import FFI

SOURCE = Path(__file__).resolve().parent
HEADERS = [SOURCE / "common" / "record.h", SOURCE / "mapuot.h"]

ffi = FFI()
ffi.cdef("".join(line for path in HEADERS for line in path.open(encoding="utf-8") if not line.startswith("#")))
ffi.set_source("mapuot._core", '#include "mapuot.h"', include_dirs=["src_c"], py_limited_api=True)
