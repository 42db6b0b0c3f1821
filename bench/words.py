"""words: calls that programs make of other libraries, in their words and in ours, each timed as it stands.

Every row is a call found in published programs: POT's in a training loop, on numpy copies of tensors; its stabilised
solver; GeomLoss's loss of a finite reach, with its gradient; wot's transport map; moscot's temporal problem. Both calls
get the same numbers. The error is the plan's relative L1 error, or the value's error for a loss and for mm_unbalanced,
against a solve to 1e-10 (1e-9) of the same problem. Each library stops where it does by default.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import mapuot

from . import common, peers

EXACT, WRONG = 1e-10, 1e-3  # WRONG: of our answers, an error that stops the benchmark

Call = Callable[[], Any]
Row = tuple[str, Call, Call, Any]  # name, before, after, the exact answer


def batch(n: int, seed: int = 0) -> Any:
    """Return squared distances between two clouds in 16 dimensions over the largest, as a tensor, and equal masses."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=generator)
    y = torch.randn(n, 16, generator=generator) + 0.5
    M = torch.cdist(x, y) ** 2
    return M / M.max(), np.full(n, 1 / n)


def of_pot(n: int) -> list[Row]:
    import ot

    M, a = batch(n)
    M.requires_grad_()
    costs = M.detach().double().numpy()
    rows = []
    for name, call in (
        ("sinkhorn_knopp_unbalanced", ot.unbalanced.sinkhorn_knopp_unbalanced),
        ("sinkhorn_stabilized_unbalanced", ot.unbalanced.sinkhorn_stabilized_unbalanced),
    ):
        exact = mapuot.solve(costs, a, a, reg=0.01, reg_m=0.5, tol=EXACT).plan
        before = lambda call=call: call(a, a, M.detach().cpu().numpy(), 0.01, 0.5)  # noqa: E731
        rows.append((f"{name}, {n} points", before, lambda: mapuot.solve(M.detach(), reg=0.01, reg_m=0.5).plan, exact))

    def objective(plan: Any) -> float:
        """Return the value of a plan without entropy."""
        r = plan.sum(1)
        s = plan.sum(0)
        return float((plan * costs).sum() + 0.5 * sum((x * np.log(x / a) - x + a).sum() for x in (r, s)))

    best = mapuot.pot.mm_unbalanced(a, a, costs, 0.5, stopThr=1e-9, log=True)[1]["total_cost"]
    without: list[Call] = [
        lambda call=call: objective(call(a, a, costs, 0.5))  # type: ignore[misc]
        for call in (ot.unbalanced.mm_unbalanced, mapuot.pot.mm_unbalanced)
    ]
    return [*rows, (f"mm_unbalanced, {n} points", *without, best)]


def of_geomloss(n: int) -> list[Row]:
    import geomloss
    import torch

    import mapuot.torch

    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n, 3, generator=generator).requires_grad_()
    y = torch.rand(n, 3, generator=generator) + 0.2
    words: dict[str, Any] = {"loss": "sinkhorn", "p": 2, "blur": 0.05, "reach": 0.5}

    def step(loss: Any) -> Any:
        x.grad = None
        value = loss(x, y)
        value.backward()
        return value.detach().numpy()

    exact = mapuot.torch.SamplesLoss(**words, tol=1e-8)(x.detach().double(), y.double()).numpy()
    theirs = geomloss.SamplesLoss(**words, backend="tensorized")
    ours = mapuot.torch.SamplesLoss(**words)
    return [(f"SamplesLoss of reach 0.5, {n} points", lambda: step(theirs), lambda: step(ours), exact)]


def cells(n: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(2)
    kind = rng.integers(0, 3, 2 * n)
    days = np.repeat([0, 1], n)
    return np.eye(30)[kind] * 5 + rng.normal(size=(2 * n, 30)), days


def of_wot(n: int) -> list[Row]:
    from wot.ot.optimal_transport import compute_transport_matrix, optimal_transport_duality_gap

    from mapuot.wot import OTModel

    X, days = cells(n)
    common_words: dict[str, Any] = {"epsilon": 0.05, "lambda1": 1.0, "lambda2": 50.0, "growth_iters": 1}

    def before() -> Any:
        C = ((X[days == 0][:, None] - X[days == 1]) ** 2).sum(-1)
        return compute_transport_matrix(
            optimal_transport_duality_gap, C=C / np.median(C), G=np.ones(n), tolerance=1e-8, batch_size=5, tau=10000,
            epsilon0=1, max_iter=10**7, **common_words,
        )[0]  # fmt: skip

    def after(**more: Any) -> Any:
        return OTModel(X, days=days, local_pca=0, **common_words, **more).coupling(0, 1).result.plan

    return [(f"OTModel, lambda 1 and 50, {n} cells", before, after, after(tol=EXACT))]


def of_moscot(n: int) -> list[Row]:
    import anndata
    import pandas
    from moscot.problems.time import TemporalProblem

    from mapuot.wot import OTModel

    X, days = cells(n)
    obs = pandas.DataFrame({"day": pandas.Categorical(days)}, index=[f"cell {i}" for i in range(2 * n)])
    data = anndata.AnnData(X, obs=obs, obsm={"X_pca": X})

    def before() -> Any:
        problem = TemporalProblem(data).prepare(time_key="day", joint_attr="X_pca")
        found = problem.solve(epsilon=0.05, tau_a=0.95, scale_cost="mean")
        return np.asarray(found[0, 1].solution.transport_matrix)

    def after(**more: Any) -> Any:
        words: dict[str, Any] = {"epsilon": 0.05, "tau_a": 0.95, "tau_b": 1.0, "scale_cost": "mean"}
        model = OTModel(data, representation="X_pca", **words, **more)
        return model.coupling(0, 1).result.plan / n

    return [(f"TemporalProblem, tau_a 0.95, {n} cells", before, after, after(tol=EXACT))]


def run(args: Any) -> dict[str, Any]:
    found = []
    if args.quick:
        divisor = 8
        budget = 0.2
    else:
        divisor = 1
        budget = 2.0
    for make, n in ((of_pot, 256), (of_geomloss, 1000), (of_wot, 500), (of_moscot, 1000)):
        try:
            rows = make(n // divisor)
        except ImportError as missing:
            found.append({"call": make.__name__.replace("_", " "), "skipped": str(missing)})
            continue
        found += [timed(*row, budget) for row in rows]
    return {"threads": args.threads, "words": found}


def timed(name: str, before: Call, after: Call, exact: Any, budget: float) -> dict[str, Any]:
    """Return the errors of both calls, and their least seconds, in turns."""
    calls = {"before": before, "after": after}
    off = {who: apart(peers.quiet(call), exact) for who, call in calls.items()}
    if not off["after"] < WRONG:
        raise RuntimeError(f"{name}: our answer is off by {off['after']}")
    times = peers.quiet(lambda: common.interleave(calls, budget, (3, 50)))
    return {"call": name, "seconds": {who: min(times[who]) for who in calls}, "error": off}


def apart(found: Any, exact: Any) -> float:
    found = np.asarray(found, np.float64)
    exact = np.asarray(exact, np.float64)
    return float(np.abs(found - exact).sum() / np.abs(exact).sum())


def tables(data: dict[str, Any]) -> str:
    who = "before", "after"
    rows = [
        [r["call"], *(1e3 * r["seconds"][k] for k in who), *(f"{r['error'][k]:.0e}" for k in who)]
        for r in data["words"]
        if "seconds" in r
    ]
    left = [f"{r['call']}: {r['skipped']}" for r in data["words"] if "skipped" in r]
    return common.text_of(common.table(["call", "before, ms", "after, ms", "error before", "error after"], rows), *left)
