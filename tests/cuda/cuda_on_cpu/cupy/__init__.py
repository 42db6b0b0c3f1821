"""The part of CuPy that mapuot uses, over numpy: host arrays, and CUDA kernels compiled as C++ (../emulate.h).

Tests without a GPU put tests/cuda/cuda_on_cpu before CuPy in PYTHONPATH. The device has compute capability 9.0 and 8
multiprocessors, and runs all blocks of a launch at once. EMULATED_GPUS sets the number of devices.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from pathlib import Path

import numpy as np

from . import nccl

HEADER = Path(__file__).resolve().parent.parent / "emulate.h"
CACHE = Path(tempfile.gettempdir()) / f"mapuot-cuda-on-cpu-{os.getuid()}"
PTX = {  # start of an asm statement: the C++ in its place, {0} the first operand
    "rcp.approx": "{0} = 1 / {1};",
    "ex2.approx": "{0} = exp2f({1});",
    "lg2.approx": "{0} = log2f({1});",
    "sqrt.approx": "{0} = sqrtf({1});",
    "mov.u32 %0, %%nsmid": "{0} = 1;",
    "mov.u32 %0, %%cluster_ctarank": "{0} = blockIdx.x % CLUSTER;",
    "bar.sync": "named_barrier({0}, {1});",
    "barrier.cluster": "cluster_barrier(CLUSTER);",
    "mapa": "{0} = {1} | {2} << 20;",
    "st.shared::cluster": "*(decltype({1}) *)in_cluster(CLUSTER, {0} & 0xfffff, {0} >> 20) = {1};",
    "st.relaxed.cluster": "*(device_uint64 *)in_cluster(CLUSTER, {0} & 0xfffff, {0} >> 20) = {1};",
    "ld.relaxed.cluster": "{0} = *(device_uint64 *)from_shared({1}); change();",
    "fence.acq_rel.gpu;\\nred": "++*{0};",
    "fence": "",
    "mbarrier.init": "mbarrier_init(from_shared({0}), {1});",
    "mbarrier.arrive": "mbarrier_arrive(from_shared({0}));",  # the copies that it expects are made before a change
    "{\\n.reg .pred done": "while (mbarrier_in_phase(from_shared({0}), {1})) change();",
    "cp.async.cg": "memcpy(self->block->shared + (size_t)({0}), {1}, 16);",
    "cp.async.wait_all": "",
    "cp.async.mbarrier": "mbarrier_arrive(from_shared({0}));",
    "cp.async.bulk.wait_group": "",
    "cp.async.bulk.shared": "memcpy(from_shared({0}), {1}, {2});",
    "cp.reduce.async.bulk": "for (unsigned q = 0; q < {2} / 8; q++) ({0})[q] += ((double *)from_shared({1}))[q];",
    "red.relaxed.gpu.global.add.v4.f32": "({0})[0] += {1}, ({0})[1] += {2}, ({0})[2] += {3}, ({0})[3] += {4};",
    "cvt.rn.f16.f32": "{0} = short_of_float({1});",
    "cvt.f32.f16": "{0} = float_of_short({1});",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "multiply_tiles(&{0}, &{4}, {8}, {9});",  # arrays of 4
    "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64": "multiply_doubles(&{0}, &{4}, &{12});",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "matrices_of(&{0}, self->block->shared + (size_t)({4}));",
    "st.relaxed": "*({0}) = {1};",
    "ld.relaxed.gpu.global.u32": "{0} = *{1}; change();",
    "ld.relaxed.gpu.global.f64": "{0} = *{1}; if (is_unset({0})) change();",
    "ld.relaxed.gpu.global.v2": "memcpy(&{0}, {2}, 16); if (is_unset({0}) || is_unset({1})) change();",
    "ld.relaxed.gpu.global.v4":
        "memcpy(&{0}, {4}, 16); if (is_unset({0}) || is_unset({1}) || is_unset({2}) || is_unset({3})) change();",
}  # fmt: skip
ASM = re.compile(r'\basm(?: volatile)?\("((?:[^"\\]|\\.)*)".*?\);', re.DOTALL)
KERNEL = re.compile(r'extern "C" __global__ void(?:\s+__launch_bounds__\([^)]*\)|\s+SHAPE)?\s+(\w+)\(')
COOPERATIVE = "begin", "iterate", "iterate_pairs", "fused_pass", "finish"
SHARED = "extern __shared__ __align__(128) unsigned char memory[];"


# ---- arrays


class ndarray(np.ndarray):  # noqa: N801
    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data if self.size else 0)  # an empty array has no address

    @property
    def device(self):
        return Device()

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.ctypes.data, False), "version": 3}

    def get(self, out=None, stream=None):
        if out is None:
            return np.array(self)
        out[...] = self
        return out

    def set(self, values, stream=None):
        plain(self)[...] = values

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        """numpy's function; like CuPy's it refuses a host array beside a device array."""
        out = options.get("out", ())
        refuse_host((*inputs, *out))
        if method == "reduce" and ufunc.identity is None and 0 in inputs[0].shape:
            raise ValueError(f"zero-size array to reduction operation {ufunc.__name__}")
        found = getattr(ufunc, method)(*plain(inputs), **plain(options))
        if out:
            return out[0]
        if isinstance(found, np.ndarray):
            return found.view(ndarray)
        return found

    def __array_function__(self, function, kinds, args, options):
        refuse_host(args)
        if type(args[0]) in (int, float):
            raise AttributeError(f"{function.__name__}: CuPy calls a method of the first argument, {args[0]!r}")
        found = function(*plain(args), **plain(options))
        if isinstance(found, np.ndarray):
            return found.view(ndarray)
        return found


def plain(x):
    """Replace our arrays in the arguments by numpy's."""
    if isinstance(x, (list, tuple)):
        return type(x)(map(plain, x))
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(x, ndarray):
        return x.view(np.ndarray)
    return x


def refuse_host(arrays):
    for x in arrays:
        if isinstance(x, np.ndarray) and not isinstance(x, ndarray):
            raise TypeError("an array of the host among those of the device")


def __getattr__(name):
    value = getattr(np, name)
    if isinstance(value, (type, np.ufunc)) or not callable(value):
        return value

    def call(*args, **options):
        out = value(*args, **options)
        if isinstance(out, np.ndarray):
            return out.view(ndarray)
        return out

    return call


def empty(shape, dtype=np.float64):
    """Return memory aligned as on a device, and not zeroed."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape))
    buffer = np.full(size * dtype.itemsize + 256, 0xA5, np.uint8)
    for pool in MemoryPool.used:
        pool.count(buffer, size * dtype.itemsize)
    at = -buffer.ctypes.data % 256
    return buffer[at : at + size * dtype.itemsize].view(dtype).reshape(shape).view(ndarray)


def zeros(shape, dtype=np.float64):
    return full(shape, 0, dtype)


def full(shape, value, dtype=np.float64):
    out = empty(shape, dtype)
    out[...] = value
    return out


def asarray(x, dtype=None, order=None):
    if isinstance(x, ndarray) and dtype in (None, x.dtype) and order is None:
        return x
    if type(x).__module__ == "jax.experimental.buffer_callback":  # it stands for memory of the device
        return np.asarray(x).view(ndarray)
    x = np.asarray(x, dtype, order)
    if x.flags.c_contiguous:
        out = empty(x.shape, x.dtype)
    else:
        out = np.empty_like(x).view(ndarray)
    out[...] = x
    return out


def ascontiguousarray(x, dtype=None):
    if x.flags.c_contiguous and dtype in (None, x.dtype):
        return x
    return asarray(np.ascontiguousarray(x, dtype))


class MemoryPool:
    """The peak of bytes that ``empty`` hands out, in pieces as CuPy's would hold them."""

    used = ()  # by using_allocator

    def __init__(self):
        self.held = self.most = 0

    def malloc(self, size):
        raise NotImplementedError("an array has memory of the host")

    def count(self, buffer, size):
        size = max(1, -(-size // 512)) * 512
        self.add(size)
        weakref.finalize(buffer, self.add, -size)

    def add(self, size):
        self.held += size
        self.most = max(self.most, self.held)

    def total_bytes(self):
        return self.most


@contextlib.contextmanager
def using_allocator(malloc):
    before = MemoryPool.used
    MemoryPool.used = (malloc.__self__,)
    yield
    MemoryPool.used = before


# ---- kernels


def operands(statement):
    """Return the expressions in the parentheses after the constraints of an asm statement."""
    found = []
    for match in re.finditer(r'"[=+]?\w"\(', statement):
        end = match.end()
        depth = 1
        while depth:
            depth += {"(": 1, ")": -1}.get(statement[end], 0)
            end += 1
        found.append(statement[match.end() : end - 1])
    return found


def without_ptx(match):
    start = next((key for key in PTX if match.group(1).startswith(key)), None)
    if start is None:
        raise NotImplementedError(match.group(0))
    return "{ " + PTX[start].format(*operands(match.group(0)), "1") + " }"


def conditions(code):
    """Return the #if lines around the end of ``code``; an #ifndef is none."""
    found = []
    for line in re.findall(r"^ *#(?:if|endif).*", code, re.MULTILINE):
        if "#endif" in line:
            found.pop()
        else:
            found.append(line + "\n")
    return [line for line in found if "#if " in line]


def translated(code):
    """Translate CUDA C++ to C++ and give each kernel a function launch_NAME, under the same conditions."""
    kernels = [(match.group(1), conditions(code[: match.start()])) for match in KERNEL.finditer(code)]
    before, mark, after = ASM.sub(without_ptx, code).partition(SHARED)
    code = before + (re.sub(r"(?<![.\w])memory\b", "self->block->shared", after) if mark else "")
    visible = 'extern "C" __attribute__((visibility("default"))) void'
    entries = [
        "".join(around)
        + f"{visible} launch_{n}(const int *shape, void **with) {{ launch({n}, shape, with); }}\n"
        + "#endif\n" * len(around)
        for n, around in kernels
    ]
    return '#include "emulate.h"\n' + code + "".join(entries)


class RawModule:
    def __init__(self, code, options=(), enable_cooperative_groups=False):
        self.cooperative = enable_cooperative_groups
        text = translated(code.replace("template <int> __global__", 'extern "C" __global__'))  # one library a file
        defines = [option for option in options if option.startswith("-D")]
        key = hashlib.sha256(repr((text, defines, HEADER.read_text())).encode()).hexdigest()[:24]
        path = CACHE / f"{key}.so"
        if not path.exists():
            CACHE.mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                source = Path(folder, "kernel.cpp")
                built = Path(folder, "kernel.so")
                source.write_text(text)
                flags = ["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-fvisibility=hidden"]
                subprocess.run(["g++", *flags, *defines, f"-I{HEADER.parent}", "-o", built, source], check=True)
                built.rename(path)
        self.library = ctypes.CDLL(path)

    module = True

    def get_function(self, name):
        return Function(getattr(self.library, f"launch_{name}"), self.cooperative and name in COOPERATIVE)


class Function:
    max_dynamic_shared_size_bytes = 0
    made = []  # noqa: RUF012 - by the number that stands for the address
    alone = threading.Lock()  # __shared__ memory is static

    def __init__(self, launch, cooperative):
        self.run, self.cooperative = launch, cooperative
        self.kernel = types.SimpleNamespace(ptr=len(Function.made))
        Function.made.append(self)

    def launch(self, shape, given):
        with Function.alone:
            self.run(shape, given)

    def __call__(self, grid, block, args, shared_mem=0):
        shape = (ctypes.c_int * 6)(*(*grid, 1)[:2], *(*block, 1)[:2], shared_mem, self.cooperative)
        words = [np.asarray(x.data.ptr if isinstance(x, ndarray) else x).tobytes() for x in args]
        copies = [ctypes.create_string_buffer(word, len(word) + 16) for word in words]
        with_ = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, copies))
        call = lambda keep=copies: self.launch(shape, with_)  # noqa: E731
        if Stream.captured is None:
            call()
        else:
            Stream.captured.append(call)


def launch_kernel(function, gx, gy, gz, bx, by, bz, shared, stream, with_, extra=0):
    one = Function.made[function]
    one.launch((ctypes.c_int * 6)(gx, gy, bx, by, shared, one.cooperative), ctypes.c_void_p(with_))


class Current(contextlib.AbstractContextManager):
    def __exit__(self, *error):
        pass


class Stream(Current):
    captured = None  # launches since begin_capture
    ptr, done = 0, True

    def __init__(self, non_blocking=False):
        pass

    @classmethod
    def from_external(cls, given):
        return cls()

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def begin_capture(self):
        Stream.captured = []

    def end_capture(self):
        calls, Stream.captured = Stream.captured, None
        return types.SimpleNamespace(launch=lambda stream: [call() for call in calls])


class Here(threading.local):
    """The current device of a thread."""

    device = 0


HERE = Here()


class Device(Current):
    compute_capability = "90"

    def __init__(self, device=None):
        if device is None:
            self.id = HERE.device
        else:
            self.id = device
        self.pci_bus_id = f"bus {self.id}"

    def use(self):
        HERE.device = self.id

    def __enter__(self):
        self.before = HERE.device
        self.use()
        return self

    def __exit__(self, *error):
        HERE.device = self.before

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self):
        return self.id


def cholesky(matrices):
    """Return the factors of a matrix or a stack; NaN where one is not positive definite, as CuPy says nothing."""
    found = np.full(matrices.shape, np.nan)
    stacked = (x.reshape(-1, *matrices.shape[-2:]) for x in (found, matrices.get()))
    for factor, matrix in zip(*stacked, strict=True):
        with contextlib.suppress(np.linalg.LinAlgError):
            factor[:] = np.linalg.cholesky(matrix)
    return asarray(found)


linalg = types.SimpleNamespace(cholesky=cholesky)


def syrk(trans, a, out, lower):
    """Write the lower triangle of a^T a; NaN above it, which CuPy leaves as it is."""
    assert trans == "T"
    assert lower
    product = plain(a).T @ plain(a)
    plain(out)[...] = np.where(np.tri(len(product), dtype=bool), product, np.nan)


def gemv(trans, alpha, a, x, beta, y):
    """Write alpha a x + beta y, or with a^T, to y; beta 0: y may be NaN."""
    found = alpha * ((plain(a).T if trans == "T" else plain(a)) @ plain(x))
    plain(y)[...] = found + beta * plain(y) if beta else found


cublas = types.SimpleNamespace(syrk=syrk, gemv=gemv)


def get_default_memory_pool():
    return types.SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None)


cuda = types.ModuleType("cupy.cuda")
cuda.Device = Device
cuda.Stream = Stream
cuda.get_current_stream = Stream
cuda.is_available = lambda: True
cuda.driver = types.SimpleNamespace(launchKernel=launch_kernel, launchCooperativeKernel=launch_kernel)
cuda.nccl, cuda.alloc_pinned_memory = nccl, bytearray
cuda.Event = lambda disable_timing: types.SimpleNamespace(ptr=0, synchronize=lambda: None)
cuda.MemoryPool, cuda.using_allocator = MemoryPool, using_allocator
cuda.runtime = types.SimpleNamespace(
    getDeviceCount=lambda: int(os.environ.get("EMULATED_GPUS", "1")),
    getDevice=lambda: HERE.device,
    eventRecord=lambda event, stream: None,
    streamWaitEvent=lambda stream, event: None,
    getDeviceProperties=lambda device: {"name": b"none", "multiProcessorCount": 8},
    memGetInfo=lambda: (1 << 32, 1 << 32),
    CUDARuntimeError=RuntimeError,
    deviceGetAttribute=lambda attribute, device: {75: 9, 76: 0, 16: 8, 97: 227 << 10}[attribute],
)
sys.modules["cupy.cuda"] = cuda
