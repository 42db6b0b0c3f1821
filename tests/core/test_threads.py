"""Threads, forks and signals: the answers do not depend on the worker, and a solve can be stopped."""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl
from problems import clouds
from soak.trials import Child

import mapuot
from mapuot import processor
from mapuot.backends.cpu import native
from mapuot.backends.cpu.operator import HostOperator
from mapuot.processor import core_count

CASE = clouds(90, 70, reg=0.02, reg_m=(1.0, 3.0), ratio=1.3)


def test_threads_by_default_are_one_for_small_and_all_for_large(monkeypatch):
    """Pools of more than one thread are made on first use and kept."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    small = clouds(20, 20)
    large = clouds(700, 700)
    cores = core_count()
    calls = (small, None, False), (large, 1, False), (large, None, cores > 1), (small, cores + 1, True)
    native.pool_of.cache_clear()
    for case, threads, pooled in calls:
        before = native.pool_of.cache_info()
        case.solve(tol=1e-2, threads=threads, callback=lambda stats: None)  # not by one call of the core
        after = native.pool_of.cache_info()
        assert (after.hits + after.misses > before.hits + before.misses) == pooled
    for threads in {cores, cores + 1} - {1}:
        native.pool_of(threads)
    assert native.pool_of.cache_info().misses == after.misses, "pools of these sizes, which are kept"


@pytest.mark.parametrize(
    ("told", "most"), [("1", 1), ("3", 3), ("2,4", 2), ("", 8), ("0", 8), ("many", 8), ("99", 8), (" 5 ", 5)]
)
def test_omp_num_threads_limits_calls_without_threads(told, most, monkeypatch):
    """OMP_NUM_THREADS can only lower the number of threads: more threads than cores never help."""
    monkeypatch.setattr(processor, "core_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert processor.thread_count() == most
    assert processor.default_threads(1 << 30) == most
    assert processor.default_threads(1 << 30, 7.0) == min(7, most)
    assert processor.default_threads(100) == 1


def test_threadpoolctl_limits_calls_without_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processor, "core_count", lambda: 8)
    found = [x for x in threadpoolctl.threadpool_info() if x["user_api"] == "mapuot"]
    assert [(x["num_threads"], Path(x["filepath"]).parent) for x in found] == [(8, Path(mapuot.__file__).parent)]
    large = clouds(700, 700)
    with threadpoolctl.threadpool_limits(1):
        assert processor.default_threads(1 << 30) == 1
        native.pool_of.cache_clear()
        large.solve(tol=1e-2)
        mapuot.solve_batch(large.M, [large.a] * 2, [large.b] * 2, reg=large.reg, reg_m=large.reg_m, tol=1e-2)
        assert native.pool_of.cache_info().misses == 0
        large.solve(tol=1e-2, threads=2)
        assert native.pool_of.cache_info().misses == 1, "an argument counts more"
    with threadpoolctl.threadpool_limits({"mapuot": 3}):
        assert processor.thread_count() == 3
    assert processor.thread_count() == 8


def test_a_solve_releases_the_interpreter():
    """While one thread is in the core, this one runs Python."""
    case = clouds(700, 700, reg=0.002, reg_m=100.0)
    done = threading.Event()

    def work():
        with pytest.warns(mapuot.ConvergenceWarning):
            case.solve(method="sinkhorn", tol=1e-14, max_passes=1000, threads=1)
        done.set()

    worker = threading.Thread(target=work)
    ticks = 0
    worker.start()
    while not done.is_set():
        time.sleep(0.001)
        ticks += 1
    worker.join()
    assert ticks > 20


def test_few_pools_are_kept():
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("threads are counted in /proc")
    before = len(list(tasks.iterdir()))
    for k in range(27):
        clouds(9, 9).solve(threads=2 + k % 9, tol=1e-3)
    gc.collect()
    assert len(list(tasks.iterdir())) <= before + 9 + 8 + 7 + 6
    native.pool_of.cache_clear()
    gc.collect()
    assert len(list(tasks.iterdir())) <= before


# ---- quotas of containers ----


MOUNTED_V1 = "32 31 0:29 {} /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
MOUNTED_V2 = "24 1 0:22 {} /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = {"proc/self/cgroup": "9:name=systemd:/job\n4:cpu,cpuacct:/job/step\n3:cpuset:/other\n"}
V2 = {"proc/self/cgroup": "0::/job/step\n", "proc/self/mountinfo": MOUNTED_V2.format("/")}


def test_memory_of_a_container(tmp_path):
    whole = processor.memory_bytes(str(tmp_path))
    assert whole > 1 << 26
    folder = tmp_path / "container" / "sys" / "fs" / "cgroup"
    folder.mkdir(parents=True)
    for told, bytes_ in (("max", whole), (str(1 << 25), 1 << 25)):
        (folder / "memory.max").write_text(told + "\n")
        processor.memory_bytes.cache_clear()
        assert processor.memory_bytes(str(tmp_path / "container")) == bytes_


def limits_v1(folder, quota, period=100_000):
    values = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": period}
    return {f"sys/fs/cgroup/cpu/{folder}{name}": f"{value}\n" for name, value in values.items()}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, np.inf),  # no Linux
        ({**V2, "sys/fs/cgroup/job/step/cpu.max": "max 100000\n"}, np.inf),
        ({**V2, "sys/fs/cgroup/job/step/cpu.max": "150000 100000\n"}, 1.5),
        # those above bind, too, and nothing beside
        ({**V2, "sys/fs/cgroup/job/cpu.max": "50000 20000\n", "sys/fs/cgroup/job/step/cpu.max": "max 100000\n"}, 2.5),
        ({**V2, "sys/fs/cgroup/other/cpu.max": "1 1\n"}, np.inf),
        # in a container: its own cgroup is the mounted one, whatever the path on the host
        ({**V2, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "2 1\n"}, 2.0),
        ({**V1, **limits_v1("", -1), **limits_v1("job/", -1), **limits_v1("job/step/", 25_000)}, 0.25),
        ({**V1, **limits_v1("job/", 300_000), **limits_v1("job/step/", -1)}, 3.0),
        ({**V1, "proc/self/mountinfo": MOUNTED_V1.format("/job"), **limits_v1("step/", 700_000)}, 7.0),
        ({**V1, "proc/self/mountinfo": MOUNTED_V1.format("/docker/f00"), **limits_v1("", 400_000)}, 4.0),
        ({**V1, "proc/self/cgroup": "4:cpuset:/job/step\n", **limits_v1("job/step/", 400_000)}, np.inf),
        # both versions at once
        ({**V1, "proc/self/cgroup": V1["proc/self/cgroup"] + "0::/job/step\n", "proc/self/mountinfo":
          MOUNTED_V1.format("/") + MOUNTED_V2.format("/"), "sys/fs/cgroup/job/step/cpu.max": "6 1\n",
          **limits_v1("job/", 500_000)}, 5.0),
        ({**V2, "sys/fs/cgroup/job/step/cpu.max": "nonsense\n"}, np.inf),
        # beside a mount without a source and with a line break of Python in its name; for a cgroup outside of the
        # namespace the mounted one is visible
        ({"proc/self/mountinfo": "9 1 0:5 / /a\x0c\x85\rb rw - tmpfs  rw\n" + MOUNTED_V2.format("/"),
          "proc/self/cgroup": "0::/../job\n", "sys/fs/job/cpu.max": "1 1\n", "sys/fs/cgroup/cpu.max": "9 1\n"}, 9.0),
    ],
)  # fmt: skip
def test_the_least_quota_of_the_cgroups(tmp_path, files, quota):
    if "sys/fs/cgroup/cpu/" in "".join(files):
        files = {"proc/self/mountinfo": MOUNTED_V1.format("/"), **files}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    assert processor.quota(str(tmp_path)) == quota


def test_a_plan_that_is_being_formed_stops_nobody_else(monkeypatch):
    """While one thread forms a plan, another thread and a forked child form other plans."""
    case = CASE.replace(penalty=("kl", "tv"))
    plan = HostOperator.plan
    one = case.solve()
    other = case.replace(reg=0.05).solve()
    right = case.replace(reg=0.05).solve().plan
    forms = threading.Event()
    ends = threading.Event()

    def slow(stream, *rows):
        if stream.cost is one.problem.cost:
            forms.set()
            ends.wait(60)
        return plan(stream, *rows)

    monkeypatch.setattr(HostOperator, "plan", slow)

    def child(say):
        np.testing.assert_array_equal(other.plan, right)

    thread = threading.Thread(target=lambda: one.plan)
    thread.start()
    try:
        assert forms.wait(60)
        code, said = Child(child).end()
        assert code == 0, said
        np.testing.assert_array_equal(other.plan, right)
        assert "plan" not in vars(one)
    finally:
        ends.set()
        thread.join()
    assert "plan" in vars(one)
