"""``python -m bench NAME [--quick] [--threads N] [--out DIR]``; ``python -m bench compare A.json B.json``."""

import argparse
import json
import re
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mapuot.processor import core_count

from . import common, device

PARTS = {
    "pass": "one pass over K against the read limit, POT's two products and the paper's four sweeps",
    "solve": "time to a certified answer against POT and OTT",
    "calls": "POT's functions on minibatches, and ours in their place",
    "zoo": "the data that users have: clusters, heavy tails, outliers, lattices, real data, beside POT",
    "points": "costs of points made in every pass, against a stored matrix and, on a GPU, flash-sinkhorn",
    "sparse": "passes over stored pairs by density and pattern, against the dense pass and SciPy's products",
    "tensors": "many marginals against cyclic updates, OTT's MMSinkhorn and pair solves",
    "batch": "log_matmul, batches of histograms, loss and gradient, against torch and POT",
    "loss": "a debiased loss with its gradient, against GeomLoss",
    "scaling": "GeomLoss's loss by its scaling, and ours at the same error",
    "hard": "hard sides on clustered clouds with equal masses, against a path of Newton steps in torch",
    "words": "calls of other libraries as programs make them, and the same in our words",
    "gromov": "spaces without common coordinates, beside POT and OTT",
    "bound": "a lower bound on the global minimum of Gromov-Wasserstein, within 1 % of the value",
    "shapes": "Gromov-Wasserstein of digits, modalities, tissue, a mesh and a rolled sheet, beside POT and OTT",
    "cluster": "ranks of this machine, or GPUs of one host",
}
ALONE = {  # not in "all"
    "passes": "passes to convergence, and the certificate, against Newton (the same on every machine)",
    "small-reg": "passes where reg is small, now and of another checkout (the same on every machine)",
    "kept": "kept pairs against all where reg is small, beside POT's exact solvers and Newton's method",
    "gpu": "one GPU: passes, tile shapes, dense points",
    "flow": "one GPU: training steps of flow matching, by where their pairs come from",
    "drift": "a drift step over many small batches, and a screen of all pairs of groups of cells, beside torch",
}
ON_GPU = ("gpu", "flow")  # whatever --device says
FILES = {"pass": "one_pass"}  # a keyword of Python


def module_of(name: str) -> Any:
    return import_module("bench." + FILES.get(name, name.replace("-", "_")))


def hindrance(name: str, module: Any, args: argparse.Namespace) -> str:
    """Say why a part cannot be measured here, "" where it can; NEEDS of a part are packages."""
    if (args.device == "gpu" or name in ON_GPU) and (reason := device.missing()):
        return reason
    lacking = [package for package in getattr(module, "NEEDS", ()) if not find_spec(package)]
    if lacking:
        return f"{' and '.join(lacking)} not installed"
    return ""


def run_part(name: str, args: argparse.Namespace) -> None:
    print(f"== {name}: {({**PARTS, **ALONE})[name]}", flush=True)
    module = module_of(name)
    begin = time.perf_counter()
    reason = hindrance(name, module, args)
    if reason:
        found = {"skipped": reason}
    else:
        found = module.run(args)
    if not reason and (args.device == "gpu" or name in ON_GPU or (name == "cluster" and args.gpus)):
        found["device"] = device.device_name()
    file = name
    if common.on_gpu(found):
        file += re.sub(r"\W+", "-", f" {found['device']}").lower()
    data = common.plain({"part": name, "machine": common.machine(), "quick": args.quick, **found})
    data["seconds"] = round(time.perf_counter() - begin, 1)
    path = common.save(file, data, args.out)
    if "skipped" in data:
        print(f"skipped: {data['skipped']}")
    else:
        print(common.aligned(module.tables(data)))
    print(f"-- {path} after {data['seconds']} s\n", flush=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="NAME")
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--quick", action="store_true", help="smaller and fewer, to test the benchmark itself")
    options.add_argument("--threads", type=int, default=core_count(), help="most threads used (default: %(default)s)")
    where = (
        "for solve, batch, zoo, points, tensors, sparse, loss, hard, gromov, bound and small-reg (default: %(default)s)"
    )
    options.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help=where)
    sized = "for calls, zoo, points, sparse, hard, gromov, bound, kept and cluster: how many"
    options.add_argument("--size", type=int, help=sized)
    options.add_argument("--gpus", default="", help="for cluster: numbers of GPUs, as 1,2,4; with --size whole solves")
    options.add_argument("--before", type=Path, help="for small-reg: a checkout, built in place, to compare with")
    options.add_argument("--out", type=Path, help="folder of JSON (default: build/bench)")
    for name, text in {**PARTS, **ALONE, "all": "every part of the CPU"}.items():
        commands.add_parser(name, help=text, parents=[options])
    commands.add_parser(
        "readme", help="write the tables and docs/speed.png from bench/results or --out", parents=[options]
    )
    compare = commands.add_parser("compare", help="ratios of two result files")
    compare.add_argument("files", nargs=2, type=Path, metavar="JSON")
    return top


def main() -> int:
    args = parser().parse_args()
    if args.command == "compare":
        from .compare import compare

        print(common.aligned(compare(*(json.loads(path.read_text()) for path in args.files))))
    elif args.command == "readme":
        from .readme import run

        print(run(args.out or common.RESULTS))
    else:
        args.out = args.out or common.OUT
        for name in PARTS if args.command == "all" else [args.command]:
            run_part(name, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
