"""``python -m bench NAME [--quick] [--threads N] [--out DIR]``; ``python -m bench compare A.json B.json``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import import_module
from pathlib import Path

from mapuot.processor import core_count

from . import common

PARTS = {
    "limits": "read and copy bandwidth by size and threads",
    "pass": "one pass over K: ours, POT's two products, the paper's four sweeps, two sweeps in C",
    "solve": "time to a certified answer against POT",
    "threads": "scaling over threads, with and without false sharing",
    "cache": "simulated cache misses of the pass and the baselines",
    "memory": "peak memory beyond M",
    "roofline": "the machine's roofline and where each pass stands",
    "calls": "POT's functions as programs call them, patched and as they are",
    "flow": "flow matching: minibatches of a torch DataLoader, coupled by us and by POT",
    "application": "colour transfer and domain adaptation, end to end",
    "passes": "passes to convergence, and the certificate, against Newton (the same on every machine: not in all)",
    "small-reg": "passes where reg is small, now and of another checkout (the same on every machine: not in all)",
    "cluster": "ranks of this machine, and the communication model",
    "accuracy": "error of the plan by storage of K",
    "points": "costs of points made in every pass, against a stored matrix and the peers",
    "sparse": "passes over stored pairs by density and pattern, against the dense pass and SciPy's products",
    "tensors": "many marginals against cyclic updates, OTT's MMSinkhorn and pair solves",
    "gpu": "one GPU: passes, tile shapes, dense points (not in all)",
    "gpu-solves": "one GPU: whole solves against POT and OTT (not in all)",
    "batch": "log_matmul, batches of histograms, loss and gradient, against torch and POT",
}


def module_of(name: str) -> object:
    return import_module("bench." + {"pass": "one_pass"}.get(name, name.replace("-", "_")))


def run_part(name: str, args: argparse.Namespace) -> None:
    print(f"== {name}: {PARTS[name]}", flush=True)
    if name == "batch" and (args.device or device()) == "gpu":
        name = "batch_gpu"
    module = module_of(name)
    begin = time.perf_counter()
    data = module.run(args)
    data = common.plain({"part": name, "machine": common.machine(), "quick": args.quick, **data})
    data["seconds"] = round(time.perf_counter() - begin, 1)
    path = common.save(data.pop("file", name), data, args.out)
    print(module.report(data))
    if "skipped" not in data:
        module.plot(data, path.with_suffix(".png"))
    print(f"-- {path} after {data['seconds']} s\n", flush=True)


def device() -> str:
    """What batch runs on: a GPU where CuPy finds one."""
    try:
        cupy = import_module("cupy")
        return "gpu" if cupy.cuda.is_available() else "cpu"
    except ImportError:
        return "cpu"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="NAME")
    common_options = argparse.ArgumentParser(add_help=False)
    common_options.add_argument("--quick", action="store_true", help="smaller and fewer, to test the benchmark itself")
    common_options.add_argument(
        "--threads", type=int, default=core_count(), help="most threads used (default: %(default)s)"
    )
    common_options.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="for batch (default: gpu where there is one), points, tensors, sparse and small-reg (default: cpu)",
    )
    common_options.add_argument("--size", type=int, help="for points: how many")
    common_options.add_argument(
        "--before", type=Path, help="for small-reg: a checkout, built in place, to compare with"
    )
    common_options.add_argument("--out", type=Path, help="folder of JSON and PNG (default: build/bench)")
    for name, text in {**PARTS, "all": "every part of the CPU"}.items():
        commands.add_parser(name, help=text, parents=[common_options])
    commands.add_parser("readme", help="write README.md's tables from bench/results or --out", parents=[common_options])
    compare = commands.add_parser("compare", help="ratios of two result files")
    compare.add_argument("files", nargs=2, type=Path, metavar="JSON")
    return top


def main() -> int:
    args = parser().parse_args()
    if args.command == "compare":
        from .compare import compare

        print(compare(*(json.loads(path.read_text()) for path in args.files)))
        return 0
    if args.command == "readme":
        from .readme import run

        print(run(args.out or common.RESULTS))
        return 0
    args.out = args.out or common.OUT
    for name in (
        [part for part in PARTS if part not in ("gpu", "gpu-solves", "passes", "small-reg")]
        if args.command == "all"
        else [args.command]
    ):
        run_part(name, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
