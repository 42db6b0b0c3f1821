"""One trial: problems, the call of the public API that solves them, and the library's claims about each.

A trial is drawn from (path, seed, index) alone and holds numbers only: its repr is the trial.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
from judge import Claim, LossClaim, claim_of, claim_over_ranks
from oracle import spread
from over_ranks import Job, own_points
from scipy import sparse

import mapuot
from mapuot.ascend import groups
from mapuot.ascend.settings import GROUPS, LEVELS, PAIRS, STAGES
from mapuot.backends import pick
from mapuot.backends.cuda.settings import DEVICE_ARRAYS, DEVICE_BATCHES, DEVICE_CALLS, DEVICE_LAUNCHES, DEVICE_PAIRS
from mapuot.backends.settings import BOXES, FACTORS, KERNELS
from mapuot.problem.settings import EXTENT, POINTS
from mapuot.settings import Settings

from .problem import (
    Problem,
    draw,
    draw_boxes,
    draw_clouds,
    draw_embeddings,
    draw_grid,
    draw_masses,
    draw_own,
    draw_pairs,
    draw_points,
    draw_ragged,
    draw_rho,
    extreme,
    usual,
)

NAMES = (  # their numbers are the generators' seeds: none is moved
    "cold", "warm", "batch", "path", "stream", "pot", "ranks", "points", "sparse", "grids", "sparse ranks",
    "sparse batch", "truncated", "self", "clouds", "kept", "point ranks", "kept points", "embeddings",
    "own batch", "ragged", "boxes",
)  # fmt: skip
OVER_RANKS = "ranks", "sparse ranks", "point ranks"  # one job each, in step
PATHS = tuple(name for name in NAMES if name not in OVER_RANKS)
BATCHES = "batch", "sparse batch", "own batch", "ragged"
KEPT = "kept", "kept points"
MOST_PASSES = 3000
FEW_GROUPS = 20  # points of a side between which all pairs are taken: of more there are groups, which correct passes
WORTH = 0.98  # share of pairs up to which some are skipped: few boxes exceed it
ALONE = "cold", "warm", "batch", "path", "points", "sparse", "grids", "sparse batch", "truncated"  # with themselves
FUNCTIONS = "solve", "solve", "solve_batch", "solve_batch", "sample_loss"  # for embeddings
# Limits of sizes, by names: a trial of a few points lowers some, and takes the kernels of large clouds.
LIMITS: dict[str, tuple[Settings, dict[str, Any]]] = {
    "corrected sums": (DEVICE_LAUNCHES, {"least_corrected": 1}),
    "few tops": (DEVICE_LAUNCHES, {"least_tops": 4}),
    "one part": (DEVICE_LAUNCHES, {"most_parts": 1}),
    "small tiles": (DEVICE_LAUNCHES, {"few_tiles": 0}),
    "matrix by products": (DEVICE_ARRAYS, {"many_terms": 0}),
    "one call": (DEVICE_CALLS, {"sees_masses_first": False}),
    "vectors outside of shared memory": (DEVICE_BATCHES, {"shared_room": 0}),
    "no room for a block": (DEVICE_BATCHES, {"room": 0}),
    "vectors stay": (POINTS, {"stays_from": 0}),
    "bounds for M": (POINTS, {"auto_entries": 1}),
    "few points for the extent": (EXTENT, {"most_far": 5}),
    "products between hard sides": (STAGES, {"most_without_products": 0}),
    "small groups": (LEVELS, {"least_in_group": 2, "rows_of_group": 2}),
    "chunks": (FACTORS, {"chunk_bytes": 1}),
    "sums on the device": (KERNELS, {"host_entries": 0}),
}
TWO_LEVELS = "two levels"  # a further name: no problem is small enough for a factor
POT_METHODS = (None, None, "sinkhorn", "sinkhorn_stabilized", "sinkhorn_translation_invariant")


@dataclass(frozen=True)
class Trial:
    """``how``: a path; ``start``: (log_u, log_v), a Problem to take its Result from, or None."""

    how: str
    problems: tuple[Problem, ...]
    options: dict[str, Any] = field(default_factory=dict)
    start: Any = None
    own_cost: bool = False  # a batch with a cost each
    limits: tuple[str, ...] = ()  # of LIMITS
    function: str = "solve"  # of FUNCTIONS


# ---- drawing


def draw_options(rng: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"tol": float(10.0 ** rng.uniform(-10, -2)), "max_passes": MOST_PASSES}
    options["precision"] = str(rng.choice(["auto", "float64", "mixed"], p=[0.4, 0.3, 0.3]))
    options["method"] = str(
        rng.choice(["auto", "translation_invariant", "sinkhorn", "map-uot"], p=[0.7, 0.1, 0.1, 0.1])
    )
    if rng.random() < 0.15:
        options["tol_gap"] = float(10.0 ** rng.uniform(-12, -3))
    if rng.random() < 0.15:
        options["max_passes"] = int(rng.integers(1, 40))
    if rng.random() < 0.1:
        options["threads"] = 2
    return options


def draw_start(rng: Any, problem: Problem) -> Any:
    """Draw a start: near, far, one-sided, infinite, another problem's answer, or this answer with its sides swapped."""
    m, n = problem.shape
    kind = rng.integers(0, 8)
    if kind == 0:
        return rng.standard_normal(m), rng.standard_normal(n)
    if kind == 1:
        size = 10.0 ** rng.uniform(1, 4)
        return rng.uniform(-size, size) * np.ones(m), rng.uniform(-size, size) * np.ones(n)
    if kind == 2:
        size = 10.0 ** rng.uniform(1, 4)
        return size * rng.standard_normal(m), size * rng.standard_normal(n)
    if kind in (3, 6, 7):
        far = 10.0 ** rng.integers(2, 6)
        return far * rng.integers(-1, 2) * np.ones(m), far * rng.integers(-1, 2) * np.ones(n)
    if kind == 4:
        other = draw(rng)
        a = draw_masses(rng, m)
        b = draw_masses(rng, n)
        return other.replace(
            M=rng.random((m, n)), a=a, b=b, reference="product", reg_m=(1.0, 1.0), penalty=("kl", "kl")
        )
    change = 1 + 1e-2 * rng.standard_normal((m, n))
    return problem.replace(M=np.where(np.isfinite(problem.M), problem.M * change, problem.M).astype(problem.M.dtype))


def draw_call(how: str, rng: Any, largest: int) -> tuple[Problem, dict[str, Any]]:
    drawn = {"points": draw_points, "grids": draw_grid, "embeddings": draw_embeddings}
    drawn |= dict.fromkeys(("sparse", "sparse ranks", "sparse batch"), draw_pairs)
    drawn |= {"point ranks": lambda rng, most: draw_points(rng, most) if rng.random() < 0.5 else draw_boxes(rng)}
    drawn |= {"truncated": lambda rng, _: draw_boxes(rng), "clouds": lambda rng, _: draw_boxes(rng, uneven=True)}
    many = (65, 140)  # points: boxes of a GPU have 32
    drawn["boxes"] = lambda rng, _: draw_boxes(rng, bool(rng.random() < 0.5), many)
    drawn["kept points"] = lambda rng, _: draw_boxes(rng, uneven=bool(rng.random() < 0.5))
    if how in drawn:
        problem = drawn[how](rng, largest)
    else:
        problem = draw(rng, largest, plain=how == "pot")
    options = draw_options(rng)
    if how == "truncated":
        options["truncate"] = float(rng.choice([0.5, 3.0, 8.0]))
    if how in ("clouds", "kept points", "point ranks", "boxes"):  # half of them by all pairs
        skips = problem.points[2] != "wfr" and str(problem.reference) == "product" and rng.random() < 0.5
        if skips:
            options["truncate"] = float(rng.choice([0.5, 3.0, 8.0]))
        else:
            options["truncate"] = None
    if how in drawn and options["method"] == "map-uot":  # there is no K to overwrite
        options["method"] = "auto"
    if how == "embeddings":
        skips = problem.points[2] != "inner" and problem.reference == "product" and rng.random() < 0.4
        options["truncate"] = float(rng.choice([0.5, 3.0, 8.0])) if skips else None
    if how == "grids":
        options["precision"] = "float64"
    if how in KEPT:
        problem = draw_kept(rng, problem)
        options = options | {"method": "auto", "symmetric": False}
    return problem, options


def draw_kept(rng: Any, problem: Problem) -> Problem:
    """Return a problem of a small reg, one of three, with costs of a few values only unless it has points."""
    size = spread(problem.M) or 1.0
    if rng.random() < 0.3 and not problem.points:
        M = np.round(3 / size * problem.M) * size / 3
    else:
        M = problem.M
    reg = size * 10.0 ** rng.uniform(-7, -3)
    pair = tuple(draw_rho(rng, p, reg, t) for p, t in zip(problem.penalty, (problem.a, problem.b), strict=True))
    return problem.replace(M=M.astype(problem.M.dtype), reg=reg, reg_m=pair, points=problem.points).feasible()


def draw_trial(how: str, rng: Any, largest: int) -> Trial:
    if how == "self":
        return draw_alone(rng, largest)
    if how == "embeddings":
        return draw_of_embeddings(rng, *draw_call(how, rng, largest), largest)
    return draw_apart(how, rng, largest)


def as_users_have(trial: Trial, rng: Any) -> Trial:
    """Return the trial with equally many points on both sides, all of one mass."""
    problems = usual(rng, trial.problems)
    start = trial.start
    m, n = problems[0].shape
    if isinstance(start, Problem):
        if start.shape != (m, n):
            start = start.cut(m)
    elif start is not None:
        start = start[0][..., :m], start[1][..., :n]
    return dataclasses.replace(trial, problems=problems, start=start)


def at_the_ends(trial: Trial, rng: Any) -> Trial:
    """Return the trial with numbers near the limits of float64."""
    return dataclasses.replace(trial, problems=extreme(rng, trial.problems))


def draw_apart(how: str, rng: Any, largest: int) -> Trial:
    problem, options = draw_call(how, rng, largest)
    if how in OVER_RANKS:
        return draw_over_ranks(how, rng, problem, options)
    if how in ("cold", "stream", "points", "sparse", "grids", "truncated", "clouds", "boxes", *KEPT):
        return Trial(how, (problem,), options)
    if how == "warm":
        return Trial(how, (problem,), options, draw_start(rng, problem))
    if how == "path":
        count = int(rng.integers(2, 5))
        regs = np.sort(problem.reg * 10.0 ** rng.uniform(-2, 1, count))[::-1]
        if rng.random() < 0.3:
            regs = rng.permutation(regs)
        steps = [problem.replace(reg=float(reg)) for reg in regs]
        if rng.random() < 0.4:
            kinds = problem.penalty
            weights = (problem.a, problem.b)
            draws = [tuple(draw_rho(rng, p, s.reg, t) for p, t in zip(kinds, weights, strict=True)) for s in steps]
            steps = [step.replace(reg_m=pair) for step, pair in zip(steps, draws, strict=True)]
        return Trial(how, tuple(steps), options)
    if how == "pot":
        options = {"stopThr": options["tol"], "numItermax": MOST_PASSES, "method": rng.choice(np.array(POT_METHODS))}
        if rng.random() < 0.2:
            start = draw_start(rng, problem)
        else:
            start = None
        return Trial(how, (problem,), options, start if isinstance(start, tuple) else None)
    return draw_batch(how, rng, problem, options, largest)


def draw_of_embeddings(rng: Any, problem: Problem, options: dict[str, Any], largest: int) -> Trial:
    """Return a trial of one problem, points with themselves, a batch or a loss; some limits are lowered."""
    limits = tuple(name for name in (*LIMITS, TWO_LEVELS) if rng.random() < 0.3)
    function = str(rng.choice(np.array(FUNCTIONS)))
    problems: tuple[Problem, ...] = (problem,)
    if function == "solve_batch" and problem.points[2] == "inner":  # these are solved one by one
        function = "solve"
    if function == "solve_batch":
        problems = draw_clouds(rng, problem, largest)
        options.pop("truncate")
    elif function == "sample_loss":
        options = {name: options[name] for name in ("tol", "max_passes", "precision")}
        problems = (as_loss(rng, problem),)
    elif rng.random() < 0.25:
        problems = (problem.itself(),)
    return Trial("embeddings", problems, options, limits=limits, function=function)


def as_loss(rng: Any, problem: Problem) -> Problem:
    """Return the problem with the penalties that losses take."""
    sides = zip((problem.a, problem.b), problem.penalty, strict=True)
    reg_m = tuple(
        np.inf if kind == "balanced" else float(np.max(draw_rho(rng, "kl", problem.reg, t))) for t, kind in sides
    )
    return problem.replace(reg_m=reg_m, penalty=("kl", "kl"), reference="product", points=problem.points).feasible()


def draw_alone(rng: Any, largest: int) -> Trial:
    """Return another path's trial with each problem made symmetric, for one potential."""
    trial = draw_apart(str(rng.choice(np.array(ALONE))), rng, largest)
    problems = tuple(problem.itself() for problem in trial.problems)
    start = trial.start
    if isinstance(start, Problem):
        start = start.itself()
    elif start is not None:
        start = tuple(x[..., : len(problems[0].a)] for x in start)
    return dataclasses.replace(trial, problems=problems, start=start)


def draw_over_ranks(how: str, rng: Any, problem: Problem, options: dict[str, Any]) -> Trial:
    """Return a trial over ranks. A sparse problem starts near: K keeps the rounding of a far start in each part.

    Its passes are limited: all ranks meet in each, and parts at a huge reg_m / reg can take thousands.
    """
    near = how == "sparse ranks"
    if near:
        options["max_passes"] = min(options["max_passes"], 500)
    start = None
    if rng.random() < 0.4:
        if near:
            start = tuple(map(rng.standard_normal, problem.shape))
        else:
            start = draw_start(rng, problem)
    return Trial(how, (problem,), options, start if isinstance(start, tuple) else None)


def draw_batch(how: str, rng: Any, problem: Problem, options: dict[str, Any], largest: int) -> Trial:
    options["method"] = {"map-uot": "auto"}.get(options["method"], options["method"])
    if how == "own batch":
        own = bool(rng.random() < 0.4)
        return Trial(how, draw_own(rng, problem, own), options, None, own)
    if how == "ragged":
        return Trial(how, draw_ragged(rng, largest), options)
    count = int(rng.integers(1, 6))
    own = bool(rng.random() < 0.4)
    problems = [problem]
    for _ in range(count - 1):
        a = draw_masses(rng, problem.shape[0])
        b = draw_masses(rng, problem.shape[1])
        a = a * problem.a.mean() * 10.0 ** rng.uniform(-1, 1)
        b = b * problem.b.mean() * 10.0 ** rng.uniform(-1, 1)
        next_one = problem.replace(a=a, b=b).feasible()
        if own:
            M = np.asarray(problem.M, float) + spread(problem.M) * rng.random(problem.shape)
            next_one = next_one.replace(M=M.astype(problem.M.dtype))
        problems.append(next_one)
    start = None
    if rng.random() < 0.4:
        starts = [draw_start(rng, p) for p in problems]
        if all(isinstance(s, tuple) for s in starts):
            start = tuple(np.stack([s[k] for s in starts]) for k in (0, 1))
    return Trial(how, tuple(problems), options, start, own)


# ---- calling


def arguments(problem: Problem, truncate: Any = "auto", backend: str = "") -> tuple[tuple[Any, ...], dict[str, Any]]:
    M = problem.M
    if problem.points is not None:
        form = "auto" if len(problem.a) % 2 else None  # half of the trials form the matrix
        x, y, *how = problem.points
        there = lies_there(problem, backend)
        if y is x:
            x = as_given(x, there)
            y = None
        else:
            x, y = (as_given(z, there) for z in (x, y))
        M = mapuot.PointCloud(x, y, *how, truncate=truncate, form=form)
    if problem.grid is not None:
        M = mapuot.Grid(*problem.grid[:3], target=problem.grid[3], offset=problem.grid[4])
    named = {"reg": problem.reg, "reg_m": problem.reg_m, "penalty": problem.penalty, "reference": problem.reference}
    if set(problem.penalty) <= {"kl", "balanced"} and not any(map(np.ndim, problem.reg_m)):  # plain, as users write it
        sides = zip(problem.penalty, problem.reg_m, strict=True)
        named |= {"penalty": "kl", "reg_m": tuple(math.inf if kind == "balanced" else float(r) for kind, r in sides)}
    return (M, problem.a, problem.b), named


def lies_there(problem: Problem, backend: str) -> bool:
    """Tell whether the points lie on the GPU that solves the problem: half of the time."""
    return backend == "cuda" and len(problem.b) % 2 > 0


def limits_of(trial: Trial, backend: str) -> ExitStack:
    """Return a context with the trial's limits, and with the limits that its sizes decide."""
    lowered = ExitStack()
    first = trial.problems[0]
    for name in trial.limits:
        if name == TWO_LEVELS:
            lowered.enter_context(mock.patch.object(type(pick(backend)), "most_factored", 0))
        else:
            settings, numbers = LIMITS[name]
            lowered.enter_context(settings.using(**numbers))
    if first.points is not None and lies_there(first, backend):
        lowered.enter_context(DEVICE_CALLS.using(sees_masses_first=False))  # some are solved in one call
        lowered.enter_context(DEVICE_ARRAYS.using(many_terms=(0, 1 << 29)[len(first.a) // 2 % 2]))
        lowered.enter_context(POINTS.using(stays_from=0))
    elif is_on_device(trial, backend):  # some are solved in one call
        lowered.enter_context(DEVICE_CALLS.using(sees_masses_first=False))
        lowered.enter_context(DEVICE_PAIRS.using(least_entries=0, most_reg=1.0))
    return lowered


def is_on_device(trial: Trial, backend: str) -> bool:
    """Tell whether the matrix lies on the GPU that solves the problem."""
    first = trial.problems[0]
    chosen = trial.how == "kept" or (trial.how in ("cold", "warm") and first.M.size % 2 > 0)
    return backend == "cuda" and chosen and first.points is None and first.grid is None


def as_given(x: Any, there: bool) -> Any:
    """Return points as a caller would: bfloat16 numbers in a tensor; ``there``: on a GPU."""
    if x.dtype == np.float32 and find_spec("torch") and not (x.view(np.uint32) & 0xFFFF).any():
        torch = import_module("torch")
        tensor = torch.from_numpy(x).bfloat16()
        if there and torch.cuda.is_available():
            return tensor.cuda()
        return tensor
    return import_module("cupy").asarray(x) if there else x


def stored(M: Any) -> Any:
    """Return the finite pairs as a SciPy matrix; its shape decides the format, and whether some inf are stored."""
    (m, n) = M.shape
    finite = np.isfinite(M)
    form = 7 * m + 3 * n + int(finite.sum())
    i, j = np.nonzero(finite | (np.arange(m)[:, None] + np.arange(n) & 3 == 0) if form % 2 else finite)
    data = M[i, j]
    if form % 5 == 1 and M.dtype == np.float64:  # twice a half is the number
        i = np.r_[i, i]
        j = np.r_[j, j]
        data = np.r_[data / 2, data / 2]
    order = np.random.default_rng(form).permutation(len(i))
    coo = sparse.coo_array((data[order], (i[order], j[order])), shape=M.shape)
    if form % 5 == 2:
        coo = sparse.coo_array((coo.data, (coo.row.astype(np.int64), coo.col.astype(np.int64))), shape=M.shape)
    return (coo.tocsr, coo.tocsc, lambda: coo)[form % 3]()


def call(trial: Trial, backend: str) -> list[Any]:
    """Return the library's claims about each problem of the trial; its exceptions pass through."""
    with limits_of(trial, backend):
        if trial.function == "sample_loss":
            return [loss_of(trial.problems[0], {"backend": backend, **trial.options})]
        return claims_of(trial, backend)


def claims_of(trial: Trial, backend: str) -> list[Any]:
    options = {"backend": backend, **trial.options}
    first = trial.problems[0]
    start = trial.start
    positional, named = arguments(first, options.pop("truncate", "auto"), backend)
    if is_on_device(trial, backend):
        import cupy

        positional = (cupy.asarray(positional[0]), *positional[1:])
    if isinstance(start, Problem):
        before = arguments(start)
        start = mapuot.solve(*before[0], **before[1], backend=backend, max_passes=500)
    if trial.how in BATCHES or trial.function == "solve_batch":
        return claims_of_batch(trial, named, options, backend)
    if trial.how in ("cold", "warm", "points", "grids", "truncated", "clouds", "embeddings", "boxes", *KEPT):
        few = {"nats": 4.0, "moved_nats": 0.0} if first.M.size % 3 == 0 else {}  # some pairs are missed at first
        with skipping() as always:
            if trial.how in KEPT:
                always.enter_context(STAGES.using(kept_entries=0, kept_below=1.0))
                always.enter_context(mock.patch.object(groups.Groups, "correct", None))
                always.enter_context(PAIRS.using(most_share=1.0, **few))
            return [claim_of(mapuot.solve(*positional, **named, **options, warm_start=start))]
    if trial.how == "sparse":
        c = first.reference if isinstance(first.reference, str) else sparse.csr_array(first.reference)
        return [claim_of(mapuot.solve(stored(first.M), *positional[1:], **named | {"reference": c}, **options))]
    if trial.how == "stream":
        read = lambda i0, i1: first.M[i0:i1]  # noqa: E731
        return [claim_of(mapuot.solve(read, *positional[1:], **named, **options))]
    if trial.how == "path":
        regs = [p.reg for p in trial.problems]
        reg_ms = [p.reg_m for p in trial.problems]
        kinds = {"penalty": first.penalty, "reference": first.reference}
        found = mapuot.path(*positional, regs=regs, reg_ms=reg_ms, **kinds, **options)
        return [claim_of(result) for result in found]
    return [call_pot(first, trial)]


def claims_of_batch(trial: Trial, named: dict[str, Any], options: dict[str, Any], backend: str) -> list[Claim]:
    M, A, B, named = batch_arguments(trial, named, backend)
    first = trial.problems[0]
    if trial.how == "sparse batch":
        M = [stored(x) for x in M] if trial.own_cost else stored(M)
        c = first.reference if isinstance(first.reference, str) else sparse.csr_array(first.reference)
        named |= {"reference": c}
    results = mapuot.solve_batch(M, A, B, **named, **options, warm_start=trial.start)
    tables = zip(results, results.objective, results.error_bound, results.gap, results.dual, strict=True)
    return [
        dataclasses.replace(
            claim_of(result), objective=float(objective), error_bound=float(bound), gap=float(gap), dual=float(dual)
        )
        for result, objective, bound, gap, dual in tables
    ]


def batch_arguments(trial: Trial, named: dict[str, Any], backend: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return M, A, B and the named arguments of `solve_batch`; ``named``: the arguments of the first problem."""
    problems = trial.problems
    first = trial.problems[0]
    A = [p.a for p in problems]
    B = [p.b for p in problems]
    has_clouds = first.points is not None and (trial.how == "ragged" or trial.function == "solve_batch")
    if trial.how == "own batch" or has_clouds:
        named = named | {"reg": np.array([p.reg for p in problems]), "reg_m": np.array([p.reg_m for p in problems])}
    if has_clouds:
        there = lies_there(first, backend)
        x, y = ([as_given(p.points[k], there) for p in problems] for k in (0, 1))
        return mapuot.PointCloud(x, y, *first.points[2:]), A, B, named
    if trial.own_cost:
        M = np.stack([p.M for p in problems])
    else:
        M = first.M
    return M, np.stack(A), np.stack(B), named


def loss_of(problem: Problem, options: dict[str, Any]) -> LossClaim:
    """Return the claims of a loss: its value, and its slopes by the points of rows."""
    torch = import_module("torch")
    losses = import_module("mapuot.torch")
    x, y, metric, scale = problem.points
    there = lies_there(problem, options["backend"]) and torch.cuda.is_available()
    x, y, a, b = (as_tensor(z, there) for z in (x, y, problem.a, problem.b))
    x.requires_grad_()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        value = losses.sample_loss(
            x, y, a, b, reg=problem.reg, reg_m=problem.reg_m, metric=metric, scale=scale, **options
        )
        (slopes,) = torch.autograd.grad(value, x)
    unmet = any(issubclass(one.category, mapuot.ConvergenceWarning) for one in heard)
    kind = torch.finfo(x.dtype)
    numbers = kind.eps / 2, kind.tiny * kind.eps, 0.9 * kind.max
    return LossClaim(not unmet, float(value.detach()), slopes.double().cpu().numpy(), *numbers)


def as_tensor(x: Any, there: bool) -> Any:
    torch = import_module("torch")
    given = as_given(x, False)
    tensor = given if torch.is_tensor(given) else torch.from_numpy(np.ascontiguousarray(given))
    return tensor.cuda() if there else tensor.clone()


def skipping() -> ExitStack:
    """Return a context in which few boxes are worth their pairs, and are corrected by groups."""
    always = ExitStack()
    always.enter_context(BOXES.using(most_kept_share=WORTH, correction_passes=math.inf))
    always.enter_context(GROUPS.using(usual_groups=FEW_GROUPS, most_spread=math.inf))
    return always


def call_over_ranks(trial: Trial, comm: Any, backend: str) -> list[Claim]:
    """Return the claims, on rank 0, of ranks that give their own blocks; the others return an empty list."""
    job = Job(comm)
    pairs = trial.how == "sparse ranks"
    own = job.block(trial.problems[0], form=stored if pairs else np.asarray)
    if pairs and not isinstance(own.reference, str):
        own = own.replace(reference=sparse.csr_array(own.reference))
    i0, i1 = job.bounds(trial.problems[0].shape[0])
    options = {"backend": backend, **trial.options}
    if trial.problems[0].points is not None:
        x, y, metric, scale = trial.problems[0].points
        skips = options.pop("truncate", "auto")
        own = own.replace(M=own_points(x, y, i0, i1, metric=metric, scale=scale, truncate=skips))
    if trial.start is None:
        start = None
    else:
        start = (trial.start[0][i0:i1], trial.start[1])
    with skipping():
        claim = claim_over_ranks(own.solve(comm=comm, warm_start=start, **options), job.ranks.rank)
    return [] if claim is None else [claim]


def call_pot(problem: Problem, trial: Trial) -> Claim:
    """``sinkhorn_unbalanced``: with no method named the log's err is a certificate; the named ones promise none."""
    options = dict(trial.options)
    named = options.get("method") is not None
    c = problem.reference
    if isinstance(c, str):
        options.update({"reg_type": "entropy"} if c == "uniform" else {})
    else:
        options["c"] = c
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        plan, log = mapuot.pot.sinkhorn_unbalanced(
            problem.a, problem.b, problem.M, problem.reg, problem.reg_m, warmstart=trial.start, log=True, **options
        )
    for one in heard:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    silent = not any(isinstance(one.message, mapuot.ConvergenceWarning) for one in heard)
    bound = None if named else float(log["err"][-1])
    return Claim(
        silent and not named, "silent" if silent else "warned", np.asarray(plan), log["logu"], log["logv"],
        error_bound=bound, objective=float(log["total_cost"]),
    )  # fmt: skip
