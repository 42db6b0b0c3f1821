"""Fixtures of the tests: a backend, a precision, an instruction set of this machine, threads.

``make test`` runs the tests that guard an answer. ``make test-all`` adds the tests marked ``nightly``, which guard a
machine (other GPUs, three ranks and more, sanitizers, the soak) or draw more of the problems that a faster test draws,
too.
"""

import importlib.util
import os
import signal
import sys
import warnings
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.register_assert_rewrite("judge", "launch", "matrix", "nvrtc", "problems")

ON_CPU = any(Path(folder).name == "cuda_on_cpu" for folder in sys.path)  # the CUDA kernels, without a GPU
if ON_CPU:
    from mapuot.backends.cuda import launch

    launch.resident_clusters = lambda function, cluster, blocks, shared: blocks // cluster  # no driver to ask

os.environ.setdefault("TQDM_DISABLE", "0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX takes 75 % of a GPU otherwise
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background, and their children, ignore it
warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)

LONGEST = "test_cuda_on_cpu", "test_mpi", "test_cuda_compile"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Put the longest tests first; in ``make test`` only a few cases of each CUDA test run without a GPU."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    if not ON_CPU or "not nightly" not in config.option.markexpr:
        return
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    kept = {item for cases in tests.values() for item in few(cases)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def few(cases):
    """Return cases of one test that together have every value of every parameter."""

    def parts(name, value):
        """Return the values of a named tuple's fields."""
        if hasattr(value, "_fields"):
            fields = zip(getattr(value, "_fields", ()), value, strict=False)
        else:
            fields = ()
        return set().union(*(parts(*field) for field in fields)) or {(name, repr(value))}

    def values(case):
        if hasattr(case, "callspec"):
            return set().union(*(parts(*x) for x in case.callspec.params.items()))
        return set()

    found = []
    unseen = set().union(*map(values, cases))
    while unseen or not found:
        found.append(max(cases, key=lambda case: len(values(case) & unseen)))
        unseen -= values(found[-1])
    return found


ISAS = ("scalar", "avx2", "avx512", "neon")


def available(name: str) -> bool:
    from mapuot.backends.cpu import native

    try:
        native.set_isa(name)
    except ValueError:
        return False
    native.set_isa("auto")
    return True


def has_gpu() -> bool:
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return bool(cupy.cuda.is_available())


if has_gpu():
    CUDA = [pytest.param("cuda", marks=pytest.mark.gpu)]
else:
    CUDA = []
if CUDA:
    collect_ignore_glob = []
else:
    collect_ignore_glob = ["cuda/test_*_cuda.py", "cuda/test_cuda.py", "cuda/test_cuda_ranks.py"]


@pytest.fixture
def using():
    """Set some numbers of a `Settings` to the end of the test."""
    with ExitStack() as stack:
        yield lambda settings, **numbers: stack.enter_context(settings.using(**numbers))


@pytest.fixture(params=["cpu", "reference", *CUDA])
def backend(request):
    return request.param


@pytest.fixture
def pot_backend(backend, monkeypatch):
    from mapuot.pot import sinkhorn

    monkeypatch.setattr(sinkhorn, "BACKEND", backend)
    return backend


@pytest.fixture(params=["float64", "mixed"])
def precision(request):
    return request.param


@pytest.fixture(params=ISAS)
def isa(request):
    """Each instruction set of this machine; the earlier one is restored afterwards."""
    from mapuot.backends.cpu import native

    before = native.isa()
    if not available(request.param):
        pytest.skip(f"this machine has no {request.param}")
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@pytest.fixture(params=[1, 2, 3, 40], ids=lambda t: f"threads{t}")
def threads(request):
    """One, two, an odd number, and more than there are tiles of rows in a small problem."""
    return request.param
