"""flow: the minibatches of flow matching, 1000 of 128 through a torch DataLoader, coupled by us and by POT.

Each loop takes points from the loader and as much noise, forms squared distances, solves, and draws 128 pairs from the
plan. POT's is the one that programs have: ``ot.unbalanced.sinkhorn_knopp_unbalanced`` on numpy arrays, then
``Generator.choice`` over the entries of the plan; "patched" is the same program after ``mapuot.pot.patch()``; "mapuot"
is ``solve(...).sample(...)`` on the tensors. The loops take turns of 20 minibatches, the same ones. Judged on some of
them against a solve to 1e-10: the plan's error, that of its marginals (both relative, L1) and the mean squared distance
of the pairs that were drawn, in times that of the exact plan.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import mapuot
from mapuot import pot

from . import common

SIZE, COUNT, QUICK_COUNT, TURN = 128, 1000, 60, 20
CASES = ((0.05, 1.0), (0.5, 1.0), (0.5, 4.0))  # reg, reg_m; squared distances as they are, up to some 40
JUDGED = 50
TOL = 1e-4

Draw = Callable[[Any, Any], tuple[Any, Any, Any]]


def data(count: int) -> Any:
    """Eight blobs on a circle of radius 4, as many points as all minibatches take."""
    import torch

    generator = torch.Generator().manual_seed(0)
    angle = torch.randint(8, (count,), generator=generator) * (torch.pi / 4)
    return 4 * torch.stack([angle.cos(), angle.sin()], 1) + 0.25 * torch.randn(count, 2, generator=generator)


def minibatches(count: int) -> Any:
    """(x0, x1) from a DataLoader."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    for (x1,) in DataLoader(TensorDataset(data(count * SIZE)), batch_size=SIZE, shuffle=True, drop_last=True):
        yield torch.randn_like(x1), x1


def costs(x0: Any, x1: Any) -> Any:
    import torch

    return torch.cdist(x0, x1) ** 2


def by_mapuot(reg: float, reg_m: float, rng: Any, x0: Any, x1: Any) -> tuple[Any, Any, Any]:
    result = mapuot.solve(costs(x0, x1), reg=reg, reg_m=reg_m, tol=TOL)
    return (result, *result.sample(SIZE, rng))


def by_pot(reg: float, reg_m: float, rng: Any, x0: Any, x1: Any) -> tuple[Any, Any, Any]:
    import ot

    a = np.full(SIZE, 1.0 / SIZE)
    plan = ot.unbalanced.sinkhorn_knopp_unbalanced(a, a, costs(x0, x1).numpy(), reg, reg_m)
    share = plan.ravel().astype(np.float64)
    return (plan, *np.divmod(rng.choice(share.size, p=share / share.sum(), size=SIZE), SIZE))


WAYS = {"POT": by_pot, "patched": by_pot, "mapuot": by_mapuot}


def judge(found: dict[str, list[Any]], exact: Any, M: Any) -> None:
    """Errors of each way's plan and pairs on one minibatch are added to ``found[name]``."""
    marginals = (exact.sum(1), exact.sum(0))
    best = (exact * M).sum() / exact.sum()
    for answers in found.values():
        plan, i, j = answers[-1]
        plan = np.asarray(plan.plan if isinstance(plan, mapuot.Result) else plan, dtype=np.float64)
        off = np.abs(plan.sum(1) - marginals[0]).sum() + np.abs(plan.sum(0) - marginals[1]).sum()
        answers[-1] = np.abs(plan - exact).sum() / exact.sum(), off / exact.sum(), M[i, j].mean() / best


def time_case(reg: float, reg_m: float, count: int) -> dict[str, Any]:
    ways = {name: functools.partial(way, reg, reg_m, np.random.default_rng(0)) for name, way in WAYS.items()}
    seconds, found = dict.fromkeys(["loader", *ways], 0.0), {name: [] for name in ways}  # type: ignore[var-annotated]
    source, left = minibatches(count), count
    while left:
        begun = time.perf_counter()
        batches = [next(source) for _ in range(min(TURN, left))]
        seconds["loader"] += time.perf_counter() - begun
        for name, way in ways.items():
            with pot.patched() if name == "patched" else contextlib.nullcontext():
                way(*batches[0])
                begun = time.perf_counter()
                answers = [way(*batch) for batch in batches]
                seconds[name] += time.perf_counter() - begun
            found[name].append(answers[0])
        if len(found["POT"]) <= JUDGED:
            M = costs(*batches[0]).numpy()
            a = np.full(SIZE, 1.0 / SIZE)
            exact = mapuot.solve(M.astype(np.float64), a, a, reg=reg, reg_m=reg_m, tol=1e-10).plan
            judge(found, exact, M.astype(np.float64))
        left -= len(batches)
    quality = {
        name: dict(zip(("plan", "marginals", "pairs"), np.mean(answers[:JUDGED], axis=0).tolist(), strict=True))
        for name, answers in found.items()
    }
    speedup = {name: seconds["POT"] / seconds[name] for name in ways}
    return {"reg": reg, "reg_m": reg_m, "count": count, "seconds": seconds, "speedup": speedup, "quality": quality}


def run(args: Any) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        return {"skipped": "torch is not installed"}
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with common.blas_threads(args.threads), warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # POT's, where exp(-M / reg) underflows
            rows = [time_case(*case, QUICK_COUNT if args.quick else COUNT) for case in CASES]
    finally:
        torch.set_num_threads(threads)
    return {"threads": args.threads, "size": SIZE, "flow": rows}


def tables(data: dict[str, Any]) -> str:
    header = ["reg", "reg_m", "way", "ms each", "x POT", "plan's error", "marginals'", "pairs' distance"]
    rows = [
        [r["reg"], r["reg_m"], name, common.three(1e3 * r["seconds"][name] / r["count"]), f"{r['speedup'][name]:.1f}",
         *(f"{r['quality'][name][k]:.1e}" for k in ("plan", "marginals")), f"{r['quality'][name]['pairs']:.3f}"]
        for r in data["flow"] for name in WAYS
    ]  # fmt: skip
    return f"{data['flow'][0]['count']} minibatches of {data['size']}\n\n" + common.table(header, rows)
