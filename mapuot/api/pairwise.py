"""Debiased Sinkhorn divergences between pairs of many clouds, or of many histograms, in batches of similar sizes."""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import MarginalPenalty, MassStatistic, MetricName
from ..answer.slopes import dual_value
from ..answer.standard_error import error_of_divergence, self_slope
from ..arrays import host, import_cupy, namespace
from ..backends import pick
from ..errors import for_value, problems_named, renamed, shown
from ..penalties import F64
from ..problem.clouds import Clouds, Places, PointCloud
from ..problem.grid import Grid
from ..problem.kinds import as_costs
from ..problem.points import there
from ..problem.scale import is_weighted, scales_of
from ..problem.validate import as_array, as_positive, as_rho, check_kind, shape_of
from ..progress import bar as progress_bar
from ..ranks import Ranks, join
from ..route.options import options_of_value
from ..synonyms import REQUIRED, hinted
from ..tensors import array_of, is_tensor
from ..threads import each
from .batch import solve_batch
from .divergence import check_options, self_costs
from .entry import entry

CHUNK_BYTES = 1 << 26  # vectors of the problems that are solved in one batch


def as_clouds(clouds: Any, metric: Any, scale: Any, weights: Any) -> PointCloud:
    """Return several clouds of points as one `PointCloud`."""
    cloud = PointCloud(clouds, metric=metric, scale=scale, weights=weights)
    if cloud.ndim != 3:
        cure = "histograms over common costs M are the rows of masses, mapuot.pairwise(M, masses, ...), "
        cure += "or go to mapuot.sinkhorn_divergence(M, A, B)"
        raise ValueError(f"clouds must hold several clouds of points, got one of shape {cloud.shape}: {cure}")
    return cloud


def shares_costs(clouds: Any, masses: Any) -> bool:
    """Tell whether ``clouds`` are costs between the points of one space, with a histogram in each row of ``masses``."""
    if not isinstance(clouds, Grid) and len(getattr(clouds, "shape", ())) != 2:
        return False
    return masses is not None and np.ndim(masses) == 2


def shared_costs(given: dict[str, Any]) -> Any:
    """Check the costs that all histograms share, and return them; ``given``: the arguments of `pairwise`."""
    is_given = {"metric": given["metric"] != "sqeuclidean", "scale": given["scale"] != 1.0}
    is_given |= {"weights": given["weights"] is not None, "scale_each": given["scale_each"]}
    names = [name for name, is_own in is_given.items() if is_own]
    if names:
        raise ValueError(f"{' and '.join(names)} must be left out where histograms share given costs")
    M = given["clouds"]
    if is_tensor(M):
        M = array_of(M)
    with renamed({"M": "clouds"}):
        return self_costs(M, None, None)[0]


def costs_of_clouds(given: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the costs between the points of all clouds, and their masses, for the statistic of ``scale_cost``."""
    check_options(given, given["reg_m"])
    source = source_of(given)
    weights = None
    if is_weighted(given["scale_cost"]):
        total = source.all_masses(given["masses"])
        weights = [(total, total)]
    return [source.all_costs()], weights


class CloudPairs:
    """The costs between pairs of several clouds."""

    def __init__(self, cloud: PointCloud) -> None:
        self.cloud = cloud

    def sizes(self, masses: F64) -> Any:
        """Return the number of points of each cloud, (k,)."""
        return self.cloud._cost.places[0].count

    def masses(self, given: Any) -> F64:
        """Check the masses of all clouds, and return them as a table (k, n)."""
        return table_of_masses(self.cloud._cost, given)

    def between(self, i: Any, j: Any) -> tuple[Any, int, int]:
        """Return the costs between clouds i and clouds j, and the most rows and columns of a pair."""
        found = between(self.cloud, i, j)
        return found, *found._cost.shape

    def here(self) -> "CloudPairs":
        """Return the costs with points of a GPU on the current one."""
        return CloudPairs(self.cloud._of(self.cloud._cost.here()))

    def all_costs(self) -> Any:
        return self.cloud._cost.whole

    def all_masses(self, given: Any) -> F64:
        """Return the masses of all points, one cloud behind the other."""
        found: F64 = self.masses(given)[host(self.cloud._cost.inside(0))]
        return found


class CommonCosts:
    """The costs between points that all histograms share."""

    def __init__(self, M: Any) -> None:
        self.cloud = M

    def sizes(self, masses: F64) -> Any:
        return np.full(len(masses), masses.shape[1])

    def masses(self, given: Any) -> F64:
        return histograms_of(self.cloud, given)

    def between(self, i: Any, j: Any) -> tuple[Any, int, int]:
        n = np.shape(self.cloud)[-1]
        return self.cloud, n, n

    def here(self) -> "CommonCosts":
        """Return the costs on the current GPU, if they are on one."""
        if namespace(self.cloud) is np:
            return self
        return CommonCosts(there(self.cloud))

    def all_costs(self) -> Any:
        return as_costs(self.cloud, pick("auto", self.cloud))

    def all_masses(self, given: Any) -> F64:
        """Return the mass of all histograms at each point."""
        return np.asarray(self.masses(given).sum(0))


def source_of(given: dict[str, Any]) -> CloudPairs | CommonCosts:
    """Return the source of the costs of all pairs; ``given``: the arguments of `pairwise`."""
    if shares_costs(given["clouds"], given["masses"]):
        return CommonCosts(shared_costs(given))
    return CloudPairs(as_clouds(given["clouds"], given["metric"], given["scale"], given["weights"]))


def table_of_masses(cost: Any, masses: Any) -> F64:
    """Return the masses of the points of several clouds, (k, n), padded with zeros for smaller clouds."""
    is_several = masses is None or isinstance(masses, (list, tuple)) or np.ndim(masses) > 0
    if not is_several:
        raise TypeError(f"masses must be a vector for each cloud, got {shown(masses)}")
    with renamed({"A": "masses"}):
        table = cost.flattened(masses, None, None)[0]
        if table is not None:
            check_kind(table, "A")
    k, n = cost.inside(0).shape
    if table is None:
        return np.full((k, n), 1.0 / n)
    if np.shape(table) not in ((n,), (k, n)):
        raise ValueError(f"masses must have shape ({k}, {n}) or ({n},), got {np.shape(table)}")
    return checked_masses(np.broadcast_to(np.asarray(host(table), np.float64), (k, n)))


def histograms_of(M: Any, masses: Any) -> F64:
    """Return the histograms over the points of M, (k, n)."""
    table = np.asarray(host(as_array(masses, "masses")), np.float64)
    n = np.shape(M)[-1]
    if table.shape[1] != n:
        raise ValueError(f"masses must have {n} columns, as the costs have, got shape {table.shape}")
    return checked_masses(table)


def checked_masses(found: F64) -> F64:
    """Return the masses if all are finite and >= 0."""
    for wrong, text in ((~np.isfinite(found), "finite"), (found < 0, ">= 0")):
        if wrong.any():
            raise ValueError(f"masses must be {text}, those of cloud {int(wrong.any(1).argmax())} are not")
    return found


@hinted
@entry(costs=costs_of_clouds, each=False)
def pairwise(
    clouds: Any,
    masses: Any = None,
    reg: ArrayLike = REQUIRED,
    reg_m: MarginalPenalty = REQUIRED,
    *,
    scale_cost: MassStatistic | None = None,
    scale_each: bool = False,
    metric: MetricName = "sqeuclidean",
    scale: float = 1.0,
    weights: ArrayLike | None = None,
    comm: Any = None,
    devices: Sequence[int] | None = None,
    progress: bool = False,
    standard_error: bool = False,
    **options: Any,
) -> Any:
    """Compute the debiased Sinkhorn divergences between all pairs of k clouds of points.

    Parameters
    ----------
    clouds : (k, n, d) array, or list of k arrays (n_i, d), or (n, n) array or `Grid`
        Points, one in a row; clouds may have any sizes. With k histograms as ``masses`` also the symmetric costs
        between n common points, such as distances along a graph.
    masses : (k, n) array, or list of k vectors, optional
        Masses of the points, >= 0. Default: equal masses that add up to 1 in each cloud; common points need masses.
    reg, reg_m : float, or (k, k) array; float or inf, or (k, k) array
        As in `sinkhorn_divergence`, for all pairs or for each; the entries above the diagonal are read.
    scale_cost, scale_each : {"median", "mean", "std", "max", "weighted_median", "weighted_mean"}, optional; bool
        The unit of reg and reg_m, as in `solve`: a statistic of the costs between the points of all clouds. With
        ``scale_each`` each pair has the unit of the costs between its two clouds.
    metric, scale, weights
        The cost, as in `PointCloud`.
    comm : mpi4py communicator, optional
        Its ranks share the pairs. Each rank passes all clouds and receives all divergences.
    devices : sequence of int, optional
        Numbers of GPUs that share the pairs, each with a thread of this process and a copy of the points. By default
        the current GPU solves all pairs, if the points or ``backend`` ask for one.
    progress : bool
        Show a bar with the number of solved pairs.
    standard_error : bool
        Return standard errors, too, as `sinkhorn_divergence` does.
    **options
        tol, tol_gap (by default as in `sinkhorn_divergence`), max_passes, precision, threads and backend, as in
        `solve_batch`.

    Returns
    -------
    divergence : (k, k) array
        Symmetric, with zeros on its diagonal; in units of the cost times mass. With ``standard_error`` a pair of such
        arrays: the divergences and their standard errors.

    See Also
    --------
    sinkhorn_divergence, solve_batch

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> clouds = [rng.random((n, 2)) + shift for n, shift in ((30, 0.0), (40, 0.0), (50, 2.0))]
    >>> D = mapuot.pairwise(clouds, reg=0.01, reg_m=1.0)
    >>> bool(D[0, 1] < 0.05 < D[0, 2])
    True
    >>> steps = np.abs(np.subtract.outer(np.arange(6), np.arange(6)))  # along a graph of six nodes in a row
    >>> D = mapuot.pairwise(steps, np.eye(6)[:3], reg=0.1, reg_m=np.inf)
    >>> D.round(6).tolist()
    [[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]]
    """
    given = {"clouds": clouds, "masses": masses, "metric": metric, "scale": scale, "weights": weights}
    source = source_of({**given, "scale_each": scale_each})
    task = PairTask.of(source, masses, (reg, reg_m), scale_cost if scale_each else None, options)
    k = len(task.masses)
    if scale_each and scale_cost is None:
        raise ValueError("scale_each needs scale_cost, the unit of each pair's costs")
    pairs = np.stack(np.triu_indices(k, 1), 1)
    tables = np.zeros((2, k, k))
    tables[:, pairs[:, 0], pairs[:, 1]] = divergences(
        task, pairs, standard_error, join(comm), progress, as_devices(devices, options)
    )
    tables += tables.swapaxes(1, 2)
    if standard_error:
        return tables[0], tables[1]
    return tables[0]


class SelfTerms(NamedTuple):
    """Values of each cloud's problem with itself, (k,), and half the sums of their slopes, (k, n) or empty."""

    value: F64
    slope: F64

    def of(self, which: Any) -> "SelfTerms":
        return SelfTerms(self.value[which], self.slope[which])


class PairTask(NamedTuple):
    """The data of all pairs: costs, masses (k, n), reg and reg_m of all or of each, (k, k), and options of the solve.

    ``unit``: the statistic of a pair's costs that is the unit of its reg and reg_m; None: the unit of the costs.
    """

    source: CloudPairs | CommonCosts
    masses: F64
    reg: Any
    reg_m: Any
    unit: str | None
    options: dict[str, Any]
    names: Sequence[Any] = ()  # of the clouds, in messages; none: their numbers

    @classmethod
    def of(
        cls, source: CloudPairs | CommonCosts, masses: Any, terms: Any, unit: str | None, options: dict[str, Any]
    ) -> "PairTask":  # fmt: skip
        """Check the arguments of `pairwise`; ``terms``: reg and reg_m."""
        table = source.masses(masses)
        regs, rhos = (as_of_pairs(x, name, len(table)) for x, name in zip(terms, ("reg", "reg_m"), strict=True))
        is_shared = unit is None and not (np.ndim(regs) or np.ndim(rhos))
        if is_shared:
            check_options(options, rhos)
            options = options_of_value(options, rhos)
        else:
            check_options(options, 1.0)
            options = options_of_value(options, np.ravel(rhos)[:, None])
        return cls(source, table, regs, rhos, unit, options)

    @property
    def is_shared(self) -> bool:
        """Tell whether all pairs have one reg and one reg_m."""
        return self.unit is None and not (np.ndim(self.reg) or np.ndim(self.reg_m))

    def terms(self, i: Any, j: Any) -> tuple[Any, Any]:
        """Return reg, and reg_m of both sides, of some pairs."""
        if self.is_shared:
            return self.reg, self.reg_m
        unit: Any = 1.0
        if self.unit:
            backend = pick(self.options.get("backend", "auto"), self.source.cloud)
            both, m, n = self.source.between(i, j)
            with self.named(i, j):
                unit = scales_of(both._cost, self.unit, backend.tables, (self.masses[i, :m], self.masses[j, :n]))
        k = len(self.masses)
        reg, reg_m = (unit * np.broadcast_to(x, (k, k))[i, j] for x in (self.reg, self.reg_m))
        return reg, reg_m[:, None]

    def named(self, i: Any, j: Any) -> Any:
        """Return a context in which messages name the pairs of clouds i and j."""
        names = self.names or range(len(self.masses))
        return problems_named(lambda k: f"the pair {names[i[k]]!r}, {names[j[k]]!r}")

    def solve(self, i: Any, j: Any, terms: tuple[Any, Any]) -> Any:
        """Solve the problems between clouds i and clouds j."""
        both, m, n = self.source.between(i, j)
        reg, reg_m = terms
        with for_value({}), self.named(i, j):
            return solve_batch(both, self.masses[i, :m], self.masses[j, :n], reg=reg, reg_m=reg_m, **self.options)

    def chunks(self, pairs: Any, least: int) -> list[Any]:
        """Divide numbers of pairs, (q,), into batches, ``least`` of them if there are so many pairs."""
        step = max(1, min(CHUNK_BYTES // (16 * 8 * self.masses.shape[1]), -(-len(pairs) // least)))
        return [pairs[i0 : i0 + step] for i0 in range(0, len(pairs), step)]

    def share(self, numbers: Any, work: Callable[["PairTask", Any], None], devices: Sequence[int]) -> None:
        """Call ``work(task, some)`` for batches of these numbers; each device takes the next batch when it is free."""
        if not devices:
            for some in self.chunks(numbers, 1):
                work(self, some)
            return
        cupy = import_cupy()
        left = self.chunks(numbers, len(devices))
        batches = iter(left)
        contexts = {device: copy_context() for device in devices}

        def serve(device: int) -> None:
            with cupy.cuda.Device(device):
                own = self._replace(source=self.source.here(), options=self.options | {"backend": "cuda"})
                for some in batches:
                    contexts[device].run(work, own, some)

        each(serve, devices, left.clear, threads=len(devices))


def as_devices(devices: Any, options: dict[str, Any]) -> Sequence[int]:
    """Check the numbers of the GPUs that share the pairs; none by default."""
    if devices is None:
        return ()
    if (backend := options.get("backend", "auto")) not in ("auto", "cuda"):
        raise ValueError(f"devices are GPUs: backend must be 'auto' or 'cuda', got {backend!r}")
    count = import_cupy().cuda.runtime.getDeviceCount()
    table = np.asarray(devices)
    if table.ndim != 1 or not table.size or table.dtype.kind not in "iu":
        raise TypeError(f"devices must be numbers of GPUs, such as [0, 1], got {shown(devices)}")
    found: list[int] = table.tolist()
    if len(set(found)) < len(found) or min(found) < 0 or max(found) >= count:
        raise ValueError(f"devices must be different numbers from 0 to {count - 1}, got {found}")
    return found


def divergences(
    task: PairTask, pairs: Any, needs_error: bool, ranks: Ranks, progress: bool, devices: Sequence[int] = ()
) -> F64:  # fmt: skip
    """Return (divergences, standard errors), (2, q), of pairs of clouds, (q, 2); zeros for errors not needed."""
    found = np.zeros((2, len(pairs)))
    total = task.masses.sum(1)
    order = np.argsort(-task.source.sizes(task.masses)[pairs].prod(1), kind="stable")  # like sizes together
    own = order[ranks.rank :: ranks.size]
    shown = progress_bar(progress and ranks.rank == 0, total=len(own), desc="mapuot", unit="pair")

    def work(task: PairTask, some: Any) -> None:
        i, j = pairs[some].T
        terms = task.terms(i, j)
        ab = task.solve(i, j, terms)
        if task.is_shared:
            a, b = (selves.of(z) for z in (i, j))
        else:
            a, b = (self_terms_of(task, z, terms, needs_error) for z in (i, j))
        apart = total[i] - total[j]
        found[0, some] = host(dual_value(ab)) - 0.5 * (a.value + b.value) + 0.5 * np.asarray(terms[0]) * apart**2
        if needs_error:
            found[1, some] = error_of_divergence(ab, a.slope, b.slope)
        bar.update(len(some))

    with ranks.together(), shown as bar:
        if task.is_shared:
            selves = self_terms(task, np.unique(pairs), needs_error, ranks, devices)
        task.share(own, work, devices)
    return np.asarray(ranks.sum(found))


def self_terms(task: PairTask, which: Any, needs_error: bool, ranks: Ranks, devices: Sequence[int]) -> SelfTerms:
    """Solve each cloud of ``which`` against itself; all pairs use these self terms."""
    k, n = task.masses.shape
    value = np.zeros(k)
    slope = np.zeros((k, n * needs_error))

    def work(task: PairTask, some: Any) -> None:
        found = self_terms_of(task, some, (task.reg, task.reg_m), needs_error)
        value[some] = found.value
        slope[some, : found.slope.shape[1]] = found.slope

    task.share(which[ranks.rank :: ranks.size], work, devices)
    return SelfTerms(np.asarray(ranks.sum(value)), np.asarray(ranks.sum(slope)))


def self_terms_of(task: PairTask, i: Any, terms: tuple[Any, Any], needs_error: bool) -> SelfTerms:
    """Solve the problems of clouds i with themselves."""
    found = task.solve(i, i, terms)
    slope = np.zeros((len(i), 0))
    if needs_error:
        slope = self_slope(found)
    return SelfTerms(host(dual_value(found)), slope)


def as_of_pairs(value: Any, name: str, k: int) -> Any:
    """Check a number, or (k, k) of them; the entries above the diagonal count."""
    shape = shape_of(value)
    if shape == ():
        return as_rho(value, name) if name == "reg_m" else as_positive(value, name)
    if shape != (k, k):
        given = shown(value) if shape is None else f"shape {shape}"
        raise ValueError(f"{name} must be one number, or one for each pair of clouds, ({k}, {k}), got {given}")
    table = as_array(value, name).astype(np.float64)
    upper = table[np.triu_indices(k, 1)]
    if not (upper > 0).all():
        raise ValueError(f"{name} must be > 0 for each pair of clouds, got {upper[~(upper > 0)][0]}")
    return table


def between(cloud: PointCloud, i: Any, j: Any) -> PointCloud:
    """Return the costs between clouds i and clouds j; points are not copied."""
    places = (Places(*(x[which] for x in cloud._cost.places[0])) for which in (i, j))
    found: PointCloud = cloud._of(object.__new__(Clouds)._hold(cloud._cost.whole, *places))
    return found
