"""The record layouts that mapuot/backends/records.py reads from the headers are the compilers' layouts."""

import pytest
from mapuot._core import ffi, lib
from nvrtc import compiled

from mapuot.backends import records
from mapuot.backends.cuda import kernels
from mapuot.enums import members
from mapuot.penalties import PENALTIES
from mapuot.problem.metrics import METRICS

COMMON = sorted(records.COMMON)
DEVICE = [("iterate.cu", kernels.RECORDS, [*COMMON, "Side", "State", "Progress"]),
          ("batch.cu", kernels.RECORDS, ["Batch", "Report", "Standing"]),
          ("stream.cu", {"View": kernels.VIEW}, ["View"])]  # fmt: skip


def options(file):
    """Return macros without which this file does not compile; no record depends on them."""
    if file == "stream.cu":
        return {"STORE": 1, "COST": 1, "REFERENCE": 1}
    if file == "batch.cu":
        return {"COST": 1, **kernels.small_options((64, 64), narrow=False)}
    shape = kernels.shape_for(512, "float32", narrow=True)
    return {**kernels.shape_options(shape, "float32", (True, True), ORDERED=0), "NARROW": 1}


def assertions(name, record):
    """Return C++ that does not compile if the record has another layout; __INTADDR__ is NVRTC's offsetof."""
    yield f'static_assert(sizeof({name}) == {record.itemsize}, "size of {name}");'
    for member, (_, offset) in ((key, field[:2]) for key, field in record.fields.items()):
        yield f'static_assert(__INTADDR__(&(({name} *)0)->{member}) == {offset}, "{name}.{member}");'


@pytest.mark.parametrize("name", COMMON)
def test_of_the_c_compiler(name):
    """Let cffi compile its module, so that its sizes and offsets are the compiler's."""
    record = records.COMMON[name]
    assert ffi.sizeof(name) == record.itemsize
    found = {member: ffi.offsetof(name, member) for member, _ in ffi.typeof(name).fields}
    assert found == {member: record.fields[member][1] for member in record.names}


@pytest.mark.compile
@pytest.mark.parametrize(("file", "read", "names"), DEVICE, ids=[file for file, _, _ in DEVICE])
def test_of_the_device_compiler(file, read, names):
    assert set(names) <= set(read)
    lines = [line for name in names for line in assertions(name, read[name])]
    flags = ["-std=c++17", "-arch=sm_90", *(f"-D{key}={value}" for key, value in options(file).items())]
    compiled("\n".join([kernels.source(file), *lines]), flags)


@pytest.mark.compile
def test_a_wrong_layout_does_not_compile():
    lines = [line.replace("== 8,", "== 16,") for line in assertions("mapuot_stats", records.STATS)]
    flags = ["-std=c++17", "-arch=sm_90", *(f"-D{key}={value}" for key, value in options("iterate.cu").items())]
    with pytest.raises(AssertionError, match="static assertion failed"):
        compiled("\n".join([kernels.source("iterate.cu"), *lines]), flags)


def test_numbers_of_enums():
    """The number of members of an enum equals the compiler's count and the text's."""
    for enum in ("mapuot_metric", "mapuot_narrow_form", "mapuot_penalty"):
        found = members(enum)
        assert found == {name: getattr(lib, f"MAPUOT_{name.upper()}") for name in found}
    assert {*members("mapuot_metric"), "cosine"} == set(METRICS)
    assert set(members("mapuot_penalty")) == set(PENALTIES)
