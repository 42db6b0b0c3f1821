"""shapes: Gromov-Wasserstein of real data and surfaces, beside POT and OTT, from one start a b^T.

- digits: all pairs of small handwritten digits; a digit is its inked pixels, with the ink as masses. Balanced.
- modalities: the pixels of digits against their histograms of gradients, balanced. ``matched`` is the mass between
  equal labels.
- tissue: spots of two sections through a stained tissue that share three quarters of it, the second one turned, on
  another grid, and with noise. Features are means of the stains around a spot. Unbalanced and fused: POT's function of
  this problem has the formulas of fugw (Thual et al. 2022). ``matched`` is the share of the mass between spots less
  than 1.5 steps of the grid apart.
- mesh: the surface of a figure in two poses, by geodesics along its edges, balanced. ``matched`` is the mass between
  vertices less than a tenth of the longest geodesic apart.
- roll: a rolled sheet, by geodesics along its graph of neighbours, against the flat sheet, balanced. ``matched`` is the
  mass between points that lie within a tenth of the sheet's length of each other on the sheet.

"landmarks" and "all starts" start from several plans; "landmarks" forms no matrix. ``value`` is the objective by its
definition, of each plan. ``missed`` is the sum of the differences between marginals and hard sides: a plan that misses
them may have a lower objective than every balanced plan. POT's balanced epsilon is twice our reg, its unbalanced one
and OTT's are our reg. Each call has its own process; ``cpu`` is the time of all threads, which a busy machine changes
less than the seconds.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any, NamedTuple

import numpy as np

from . import common
from .gromov import measured

NEEDS = ("sklearn", "skimage", "ot")
DIGITS = 10  # 45 pairs
SIZES = {"modalities": 400, "tissue": 300, "mesh": 300, "roll": 2200}  # points, about so many of mesh and tissue
QUICK = {"modalities": 100, "tissue": 100, "mesh": 200, "roll": 150}
NEIGHBOURS = 8  # of a point of the rolled sheet
OVERLAP = 0.75  # share of each section that both have
TURN = 0.6  # radians between both sections
STAIN_NOISE = 0.1  # standard deviation, added to features of the second section; features of the first have 1
LONGEST = 600.0  # seconds until a call is ended
PEER_STEPS = 300
LIMBS = (  # of the figure: ends and radius; left and right have different lengths
    ((0, 0, -0.5), (0, 0, 0.5), 0.32), ((0, 0, 0.5), (0, 0, 0.8), 0.15), ((0, 0, 0.8), (0, 0.1, 1.0), 0.22),
    ((0.2, 0, 0.4), (1.3, 0, 0.4), 0.13), ((-0.2, 0, 0.4), (-1.1, 0, 0.4), 0.13),
    ((0.2, 0, -0.5), (0.25, 0, -1.6), 0.16), ((-0.2, 0, -0.5), (-0.25, 0, -1.5), 0.16),
    ((0.25, 0, -1.6), (0.25, 0.35, -1.6), 0.12), ((-0.25, 0, -1.5), (-0.25, 0.3, -1.5), 0.12),
)  # fmt: skip
BENDS = ((0, 0.75, 2, 1.3), (0, -0.65, 1, 1.1), (2, -1.05, 1, -0.9))  # axis, place of a joint, plane, angle
SURFACE = 9.0  # vertices of a figure are about this over the square of the step of its grid


class Penalties(NamedTuple):
    """reg and reg_m, in units of the mean squared distance, and the weight of the distances beside features."""

    reg: float
    reg_m: float = math.inf
    alpha: float = 1.0


PENALTIES = {
    "digits": Penalties(0.02), "modalities": Penalties(0.003), "tissue": Penalties(0.01, 0.1, 0.5),
    "mesh": Penalties(0.002), "roll": Penalties(0.003),
}  # fmt: skip


class Spaces(NamedTuple):
    """Two spaces as `mapuot.gromov` takes them, the pairs of points that match, and features of the points."""

    given: tuple[Any, Any]
    metric: tuple[str, str]
    matches: Any
    features: tuple[Any, Any] | None = None


class Problem(NamedTuple):
    """The distances in both spaces, of mean square 1, equal masses, and the costs of the features, of mean 1."""

    D: Any
    E: Any
    a: Any
    b: Any
    F: Any
    penalties: Penalties


def digits(count: int) -> list[tuple[Any, Any]]:
    """Return the points and the masses of some digits."""
    from sklearn.datasets import load_digits

    images = load_digits().images[:count]
    return [(np.argwhere(image > 0).astype(float), image[image > 0] / image.sum()) for image in images]


def modalities(n: int) -> Spaces:
    """Return two descriptions of each of n digits."""
    from skimage.feature import hog
    from sklearn.datasets import load_digits

    data = load_digits()
    gradients = [
        hog(image, orientations=8, pixels_per_cell=(4, 4), cells_per_block=(1, 1)) for image in data.images[:n]
    ]
    label = data.target[:n]
    return Spaces((data.data[:n], np.array(gradients)), ("euclidean", "euclidean"), label[:, None] == label)


def tissue(n: int) -> Spaces:
    """Return the places of about n spots of each of two sections through a tissue, with stains around each spot."""
    from scipy.ndimage import gaussian_filter, map_coordinates
    from scipy.spatial.distance import cdist
    from skimage import color, data

    rng = np.random.default_rng(0)
    stains = color.rgb2hed(data.immunohistochemistry())
    height, width = stains.shape[:2]
    reach = width / (2 - OVERLAP)  # of a section
    step = math.sqrt(height * reach / n)
    blurred = [gaussian_filter(stains[..., k], size * step) for k in range(3) for size in (0.5, 2.0)]
    places, features = [], []
    for first in (0.0, width - reach):
        at = np.stack(np.mgrid[0:height:step, first : first + reach : step], -1).reshape(-1, 2)
        at = at + rng.uniform(0, step, 2)
        at = at[(at < [height, first + reach]).all(1)]
        places.append(at)
        features.append(np.column_stack([map_coordinates(image, at.T, mode="nearest") for image in blurred]))
    scale = features[0].std(0)
    features = [z / scale for z in features]
    features[1] += STAIN_NOISE * rng.normal(size=features[1].shape)
    turn = np.array([[math.cos(TURN), -math.sin(TURN)], [math.sin(TURN), math.cos(TURN)]])
    matches = cdist(*places) < 1.5 * step
    return Spaces((places[0], places[1] @ turn), ("euclidean", "euclidean"), matches, (features[0], features[1]))


def figure(n: int) -> tuple[Any, Any]:
    """Return about n vertices of the surface of a figure, and the triangles between them."""
    from skimage.measure import marching_cubes

    step = math.sqrt(SURFACE / n)
    axes = [np.arange(low, high, step) for low, high in ((-1.7, 1.7), (-0.7, 0.8), (-2.0, 1.5))]
    places = np.stack(np.meshgrid(*axes, indexing="ij"), -1)
    inside = np.zeros(places.shape[:3])
    for start, end, radius in LIMBS:
        along = np.subtract(end, start)
        share = np.clip((places - start) @ along / (along @ along), 0, 1)
        gap = np.linalg.norm(places - start - share[..., None] * along, axis=-1) - radius
        inside += np.exp(-gap / 0.04)  # joins limbs smoothly
    vertices, triangles, *_ = marching_cubes(np.log(inside), 0.0, spacing=(step,) * 3)
    return vertices + [axis[0] for axis in axes], triangles


def bent(x: Any) -> Any:
    """Return the places of vertices after both arms and one leg have turned about a joint, without a kink."""
    x = x.copy()
    for along, joint, other, angle in BENDS:
        past = np.abs(x[:, along]) - abs(joint)
        is_side = np.sign(x[:, along]) == np.sign(joint)
        if along == 2:
            is_side &= x[:, 0] > 0
        share = np.clip(past / 0.3 + 0.5, 0, 1)
        turn = np.where(is_side, angle * share**2 * (3 - 2 * share), 0.0)
        moved = x[:, along] - joint
        x[:, along] = joint + np.cos(turn) * moved - np.sin(turn) * x[:, other]
        x[:, other] = np.sin(turn) * moved + np.cos(turn) * x[:, other]
    return x


def edges(x: Any, triangles: Any) -> Any:
    """Return the lengths of the edges of a mesh as a symmetric sparse matrix."""
    from scipy import sparse

    ends = np.vstack([triangles[:, [i, j]] for i, j in ((0, 1), (1, 2), (0, 2))])
    ends = np.unique(np.sort(ends, 1), axis=0)
    lengths = np.linalg.norm(x[ends[:, 0]] - x[ends[:, 1]], axis=1)
    graph = sparse.coo_array((lengths, ends.T), shape=(len(x), len(x))).tocsr()
    return graph + graph.T


def mesh(n: int) -> Spaces:
    """Return the edges of a figure in two poses, the vertices of the second shuffled."""
    from scipy.sparse.csgraph import dijkstra

    x, triangles = figure(n)
    graph = edges(x, triangles)
    order = np.random.default_rng(0).permutation(len(x))
    other = edges(bent(x), triangles)[order][:, order]
    apart = dijkstra(graph, directed=False)
    return Spaces((graph, other), ("geodesic", "geodesic"), apart[:, order] < 0.1 * apart.max())


def roll(n: int) -> Spaces:
    """Return the graph of neighbours of a rolled sheet, and the flat sheet."""
    from scipy.spatial.distance import cdist
    from sklearn.datasets import make_swiss_roll
    from sklearn.neighbors import kneighbors_graph

    x, turn = make_swiss_roll(n, random_state=0)
    length = 0.5 * (turn * np.sqrt(1 + turn**2) + np.arcsinh(turn))  # of the spiral, from its centre
    flat = np.column_stack([length - length.mean(), x[:, 1] - x[:, 1].mean()])
    graph = kneighbors_graph(x, NEIGHBOURS, mode="distance")
    matches = cdist(flat, flat) < 0.1 * np.ptp(flat[:, 0])
    return Spaces((graph.maximum(graph.T), flat), ("geodesic", "euclidean"), matches)


CASES = {"modalities": modalities, "tissue": tissue, "mesh": mesh, "roll": roll}


def distances(given: Any, metric: str) -> Any:
    """Return the distances within one space."""
    from scipy.sparse.csgraph import dijkstra
    from scipy.spatial.distance import cdist

    if metric == "geodesic":
        return dijkstra(given, directed=False)
    return cdist(given, given)


def problem_of(case: str, spaces: Spaces) -> tuple[Problem, list[float]]:
    """Return the problem between two spaces, and the divisors of both spaces' distances."""
    from scipy.spatial.distance import cdist

    both = [distances(x, metric) for x, metric in zip(spaces.given, spaces.metric, strict=True)]
    sizes = [float(np.sqrt((z**2).mean())) for z in both]
    F = None
    if spaces.features is not None:
        F = cdist(*spaces.features, "sqeuclidean")
        F /= F.mean()
    D, E = (z / size for z, size in zip(both, sizes, strict=True))
    masses = [np.full(len(z), 1 / len(z)) for z in (D, E)]
    return Problem(D, E, *masses, F, PENALTIES[case]), sizes


def value_of(problem: Problem, P: Any) -> float:
    """Return the objective of a plan by its definition; hard sides count 0."""
    D, E, a, b, F, (reg, reg_m, alpha) = problem
    P = np.asarray(P, np.float64)
    r = P.sum(1)
    s = P.sum(0)
    mass = P.sum()
    value = alpha * (r @ D**2 @ r + s @ E**2 @ s - 2 * ((D @ P @ E) * P).sum())
    if F is not None:
        value += (1 - alpha) * (P * F).sum()

    def kl(p: Any, q: Any) -> float:
        """Return KL(p x p | q x q)."""
        logs = np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1))
        own = (p * logs).sum() - p.sum() + q.sum()
        return float(2 * mass * own + (p.sum() - q.sum()) ** 2)

    value += reg * kl(P, np.outer(a, b))
    if reg_m < math.inf:
        value += reg_m * (kl(r, a) + kl(s, b))
    return float(value)


def clocks() -> Any:
    return np.array([time.perf_counter(), time.process_time()])


def large(case: str, n: int, who: str) -> dict[str, Any]:
    """Return time, value and matched mass of one answer."""
    import mapuot

    spaces = CASES[case](n)
    problem, sizes = problem_of(case, spaces)
    D, E, a, b, F, (reg, reg_m, alpha) = problem
    given = {"reg": reg, "reg_m": reg_m, "features": F, "alpha": alpha}
    begun = clocks()
    if who.startswith("mapuot"):
        if "landmarks" in who:
            X, Y = (x / size for x, size in zip(spaces.given, sizes, strict=True))
            result = mapuot.gromov(X, Y, a, b, **given, metric=spaces.metric)
        else:
            init = "auto" if "all starts" in who else "independent"
            result = mapuot.gromov(D, E, a, b, **given, metric="precomputed", init=init)
        P, settled = result.plan, result.settled
    elif who == "OTT":
        P, settled = ott_plan(D, E, reg)
    elif reg_m < math.inf:
        P, settled = unbalanced_plan(problem)
    else:
        P, settled = pot_plan(D, E, a, b, reg)
    taken = clocks() - begun
    P = np.asarray(P, np.float64)
    missed = 0.0
    if reg_m == math.inf:
        missed = float(np.abs(P.sum(1) - a).sum() + np.abs(P.sum(0) - b).sum())
    return {
        "points": P.shape, "seconds": taken[0], "cpu": taken[1], "value": value_of(problem, P),
        "matched": float(P[spaces.matches].sum() / P.sum()), "missed": missed, "settled": settled,
    }  # fmt: skip


def pot_plan(D: Any, E: Any, a: Any, b: Any, reg: float) -> tuple[Any, bool]:
    """Return POT's balanced plan, and whether its changes fell below its tol; it notes every tenth change."""
    import ot

    P, log = ot.gromov.entropic_gromov_wasserstein(
        D, E, a, b, epsilon=2 * reg, max_iter=PEER_STEPS, tol=1e-4, log=True, numItermax=2000
    )
    return P, bool(log["err"][-1] <= 1e-4)


def unbalanced_plan(problem: Problem) -> tuple[Any, bool]:
    """Return the plan of POT's fused unbalanced function, and whether it ended before its last step."""
    import ot

    D, E, a, b, F, (reg, reg_m, alpha) = problem
    P, _, log = ot.gromov.fused_unbalanced_gromov_wasserstein(
        D, E, a, b, reg_marginals=reg_m / alpha, epsilon=reg / alpha, M=F, alpha=(1 - alpha) / alpha,
        unbalanced_solver="sinkhorn_log", max_iter=PEER_STEPS, tol=1e-5, max_iter_ot=1000, tol_ot=1e-7, log=True,
    )  # fmt: skip
    return P, len(log["error"]) < PEER_STEPS


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
    penalties = PENALTIES["digits"]
    settled = True
    begun = clocks()
    if who == "mapuot":
        found = mapuot.gromov_pairwise(
            spaces, masses, reg=penalties.reg, reg_m=np.inf, metric="precomputed", init="independent", keep_plans=True
        )
        pairs = found.pairs
        plans = found.plans
        settled = bool(found.settled.all())
    else:
        pairs = np.stack(np.triu_indices(count, 1), 1)
        plans = []
        for i, j in pairs:
            plan, is_settled = pot_plan(spaces[i], spaces[j], masses[i], masses[j], penalties.reg)
            plans.append(plan)
            settled = settled and is_settled
    taken = (clocks() - begun) / len(pairs)
    values = [
        value_of(Problem(spaces[i], spaces[j], masses[i], masses[j], None, penalties), plan)
        for (i, j), plan in zip(pairs, plans, strict=True)
    ]
    return {"seconds": taken[0], "cpu": taken[1], "value": float(np.mean(values)), "settled": settled}


def run(args: Any) -> dict[str, Any]:
    count, sizes = DIGITS, SIZES
    if args.quick:
        count, sizes = 4, QUICK
    calls = [("digits, a pair", who, f"shapes.small({count}, '{who}')") for who in ("mapuot", "POT")]
    for case, *who in (
        ("modalities", "mapuot", "POT", "OTT"), ("tissue", "mapuot", "POT, fugw's formulas"),
        ("mesh", "mapuot", "mapuot, all starts", "POT", "OTT"), ("roll", "mapuot, landmarks", "mapuot", "POT"),
    ):  # fmt: skip
        calls += [(case, one, f'shapes.large("{case}", {sizes[case]}, "{one}")') for one in who]
    rows = []
    for case, who, call in calls:
        rows.append({"case": case, "who": who, **measured(call, LONGEST)})
        print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows, "penalties": {case: one._asdict() for case, one in PENALTIES.items()}}


@common.each
def tables(data: dict[str, Any]) -> str:
    """Return time, objective, matched mass and missed marginals."""
    lines = []
    for row in data["rows"]:
        case = row["case"]
        if "points" in row:
            case += ", {:,} x {:,}".format(*row["points"])
        if "failed" in row:
            lines.append([case, row["who"], row["failed"], "", "", "", ""])
            continue
        matched = f"{100 * row['matched']:.0f} %" if "matched" in row else ""
        missed = f"{row['missed']:.0e}" if row.get("missed") else ""
        who = row["who"] + ("" if row["settled"] else ", stopped")
        lines.append([case, who, row["seconds"], row["cpu"], f"{row['value']:.5f}", matched, missed])
    head = ["data", "", "seconds", "CPU s", "objective", "matched", "missed"]
    return common.text_of(f"{common.machine_line(data)}:", common.table(head, lines))
