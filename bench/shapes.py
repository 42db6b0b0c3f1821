"""shapes: Gromov-Wasserstein of real data and surfaces, beside POT and OTT, balanced, from one start a b^T.

- digits: all pairs of small handwritten digits; a digit is its inked pixels, with the ink as masses.
- modalities: the pixels of digits against their histograms of gradients. ``matched`` is the mass between equal labels.
- roll: a rolled sheet, by geodesics along its graph of neighbours, against the flat sheet. ``matched`` is the mass
  between points that lie within a tenth of the sheet's length of each other on the sheet; "landmarks" starts from
  several plans and forms no matrix.

``value`` is the objective by its definition, of each plan. POT's epsilon is twice our reg, OTT's is our reg. Each call
has its own process; ``cpu`` is the time of all threads, which a busy machine changes less than the seconds.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from . import common
from .gromov import measured

NEEDS = ("sklearn", "skimage", "ot")
DIGITS = 16  # 120 pairs
CELLS, NODES = 1000, 2200
REG = {"digits": 0.02, "modalities": 0.01, "roll": 0.003}  # in units of the mean squared distance
NEIGHBOURS = 8
LONGEST = 400.0  # seconds until a call is ended
PEER_STEPS = 300


def digits(count: int) -> list[tuple[Any, Any]]:
    """Return the points and the masses of some digits."""
    from sklearn.datasets import load_digits

    images = load_digits().images[:count]
    return [(np.argwhere(image > 0).astype(float), image[image > 0] / image.sum()) for image in images]


def modalities(n: int) -> tuple[Any, Any, Any, Any]:
    """Return two descriptions of each of n digits, and the label of each, twice."""
    from skimage.feature import hog
    from sklearn.datasets import load_digits

    data = load_digits()
    gradients = [
        hog(image, orientations=8, pixels_per_cell=(4, 4), cells_per_block=(1, 1)) for image in data.images[:n]
    ]
    return data.data[:n], np.array(gradients), data.target[:n], data.target[:n]


def roll(n: int) -> tuple[Any, Any, Any, Any]:
    """Return the graph of neighbours of a rolled sheet, the flat sheet, and places on the sheet of both."""
    from sklearn.datasets import make_swiss_roll
    from sklearn.neighbors import kneighbors_graph

    x, turn = make_swiss_roll(n, random_state=0)
    length = 0.5 * (turn * np.sqrt(1 + turn**2) + np.arcsinh(turn))  # of the spiral, from its centre
    flat = np.column_stack([length - length.mean(), x[:, 1] - x[:, 1].mean()])
    graph = kneighbors_graph(x, NEIGHBOURS, mode="distance")
    return graph.maximum(graph.T), flat, flat, flat


SPACES = {"modalities": modalities, "roll": roll}


def distances(case: str, n: int) -> tuple[Any, Any]:
    """Return the distances within both spaces."""
    from scipy.sparse.csgraph import dijkstra
    from scipy.spatial.distance import cdist

    X, Y, *_ = SPACES[case](n)
    if case == "roll":
        return dijkstra(X, directed=False), cdist(Y, Y)
    return cdist(X, X), cdist(Y, Y)


def matches(case: str, n: int) -> Any:
    """Return whether points match, (n, n)."""
    from scipy.spatial.distance import cdist

    *_, own, other = SPACES[case](n)
    if case == "roll":
        return cdist(own, other) < 0.1 * np.ptp(own[:, 0])
    return own[:, None] == other


def value_of(D: Any, E: Any, a: Any, b: Any, P: Any, reg: float) -> float:
    """Return the objective of a balanced plan by its definition."""
    P = np.asarray(P, np.float64)
    r = P.sum(1)
    s = P.sum(0)
    structure = r @ D**2 @ r + s @ E**2 @ s - 2 * ((D @ P @ E) * P).sum()
    ratio = np.where(P > 0, P, 1) / np.where(P > 0, np.outer(a, b), 1)
    return float(structure + 2 * reg * P.sum() * (P * np.log(ratio)).sum())


def clocks() -> Any:
    return np.array([time.perf_counter(), time.process_time()])


def large(case: str, n: int, who: str) -> dict[str, Any]:
    """Return time, value and matched mass of one answer."""
    import mapuot

    D, E = distances(case, n)
    sizes = [np.sqrt((z**2).mean()) for z in (D, E)]
    D = D / sizes[0]
    E = E / sizes[1]
    X, Y, *_ = SPACES[case](n)
    balanced = {"reg": REG[case], "reg_m": np.inf}
    begun = clocks()
    if who == "mapuot":
        result = mapuot.gromov(D, E, **balanced, metric="precomputed", init="independent")
        P, settled = result.plan, result.settled
    elif who == "mapuot, landmarks":
        result = mapuot.gromov(X / sizes[0], Y / sizes[1], **balanced, metric=("geodesic", "euclidean"))
        P, settled = result.plan, result.settled
    elif who == "POT":
        P, settled = pot_plan(D, E, None, None, REG[case])
    else:
        P, settled = ott_plan(D, E, REG[case])
    taken = clocks() - begun
    equal = np.full(n, 1 / n)
    value = value_of(D, E, equal, equal, P, REG[case])
    matched = float(np.asarray(P)[matches(case, n)].sum())
    return {"seconds": taken[0], "cpu": taken[1], "value": value, "matched": matched, "settled": settled}


def pot_plan(D: Any, E: Any, a: Any, b: Any, reg: float) -> tuple[Any, bool]:
    """Return POT's balanced plan, and whether its changes fell below its tol; it notes every tenth change."""
    import ot

    P, log = ot.gromov.entropic_gromov_wasserstein(
        D, E, a, b, epsilon=2 * reg, max_iter=PEER_STEPS, tol=1e-4, log=True, numItermax=2000
    )
    return P, bool(log["err"][-1] <= 1e-4)


def ott_plan(D: Any, E: Any, reg: float) -> tuple[Any, bool]:
    """Return OTT's balanced plan in float64; OTT's epsilon is our reg."""
    import jax

    jax.config.update("jax_enable_x64", True)
    from ott.geometry.geometry import Geometry
    from ott.problems.quadratic.quadratic_problem import QuadraticProblem
    from ott.solvers.linear.sinkhorn import Sinkhorn
    from ott.solvers.quadratic.gromov_wasserstein import GromovWasserstein

    given = QuadraticProblem(Geometry(D), Geometry(E))
    solver = GromovWasserstein(Sinkhorn(max_iterations=2000), epsilon=reg, max_iterations=PEER_STEPS)
    found = solver(given)
    return np.asarray(found.matrix), bool(found.converged)


def small(count: int, who: str) -> dict[str, Any]:
    """Return seconds for a pair of digits, and the mean objective of all pairs."""
    from scipy.spatial.distance import cdist

    import mapuot

    shapes = digits(count)
    spaces = [cdist(x, x) for x, _ in shapes]
    unit = np.sqrt(np.mean([(D**2).mean() for D in spaces]))
    spaces = [D / unit for D in spaces]
    masses = [w for _, w in shapes]
    reg = REG["digits"]
    settled = True
    begun = clocks()
    if who == "mapuot":
        found = mapuot.gromov_pairwise(
            spaces, masses, reg=reg, reg_m=np.inf, metric="precomputed", init="independent", keep_plans=True
        )
        pairs = found.pairs
        plans = found.plans
        settled = bool(found.settled.all())
    else:
        pairs = np.stack(np.triu_indices(count, 1), 1)
        plans = []
        for i, j in pairs:
            plan, is_settled = pot_plan(spaces[i], spaces[j], masses[i], masses[j], reg)
            plans.append(plan)
            settled = settled and is_settled
    taken = (clocks() - begun) / len(pairs)
    values = [
        value_of(spaces[i], spaces[j], masses[i], masses[j], plan, reg)
        for (i, j), plan in zip(pairs, plans, strict=True)
    ]
    return {"seconds": taken[0], "cpu": taken[1], "value": float(np.mean(values)), "settled": settled}


def run(args: Any) -> dict[str, Any]:
    count, cells, nodes = DIGITS, CELLS, NODES
    if args.quick:
        count, cells, nodes = 4, 100, 150
    calls = [("digits, a pair", who, f"shapes.small({count}, '{who}')") for who in ("mapuot", "POT")]
    peers = ("mapuot", "POT", "OTT")
    calls += [(f"modalities, {cells}", who, f"shapes.large('modalities', {cells}, '{who}')") for who in peers]
    words = ("mapuot, landmarks", "mapuot", "POT")
    calls += [(f"roll, {nodes}", who, f"shapes.large('roll', {nodes}, '{who}')") for who in words]
    rows = []
    for case, who, call in calls:
        rows.append({"case": case, "who": who, **measured(call, LONGEST)})
        print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows, "reg": REG}


@common.each
def tables(data: dict[str, Any]) -> str:
    """Return time, objective and matched mass."""
    lines = []
    for row in data["rows"]:
        if "failed" in row:
            lines.append([row["case"], row["who"], row["failed"], "", "", ""])
            continue
        if "matched" in row:
            matched = f"{100 * row['matched']:.0f} %"
        else:
            matched = ""
        who = row["who"] + ("" if row["settled"] else ", stopped")
        lines.append([row["case"], who, row["seconds"], row["cpu"], f"{row['value']:.5f}", matched])
    head = ["data", "", "seconds", "CPU s", "objective", "matched"]
    return common.text_of(f"{common.machine_line(data)}:", common.table(head, lines))
