"""Distances between groups of cells: AnnData, or points with labels, in; tables of pandas out.

Each distance is a debiased Sinkhorn divergence between the points of two groups, with a standard error that takes the
cells of a group for independent draws. All pairs are solved in batches, on the GPU if the points are there.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .annotations import MetricName
from .api.pairwise import CloudPairs, PairTask, as_devices, divergences
from .arrays import is_on_device
from .errors import shown
from .penalties import F64
from .problem.clouds import PointCloud, there
from .problem.labels import as_labels, classes_of, is_missing
from .problem.scale import scale_of
from .problem.validate import as_array, as_flag
from .ranks import ALONE, join
from .synonyms import REQUIRED, hinted

__all__ = ["against", "against_rest", "contrasts", "pairwise"]


class CellGroups:
    """The points of all groups, one group behind the other, and the names of the groups in order."""

    def __init__(self, data: Any, groupby: Any, representation: str | None, chosen: Iterable[Any] | None) -> None:
        points = points_of(data, representation)
        labels = labels_of(data, groupby, len(points))
        is_labelled = ~is_missing(labels)
        names = names_of(labels[is_labelled])
        if chosen is not None:
            wanted = as_names([*chosen], names)
            check_names(wanted, names, "groups")
            if not 0 < len(wanted) == len(set(wanted.tolist())):
                raise ValueError(f"groups must be labels, each once, got {shown(wanted.tolist())}")
            names = wanted
        place = {name: k for k, name in enumerate(names.tolist())}
        number = np.array([place.get(x, -1) if y else -1 for x, y in zip(labels.tolist(), is_labelled, strict=True)])
        order = np.argsort(number, kind="stable")
        order = order[number[order] >= 0]
        self.names = names
        self.sizes = np.bincount(number[order], minlength=len(names))
        self.points = taken(points, order)

    @property
    def starts(self) -> Any:
        return np.concatenate([[0], np.cumsum(self.sizes)])

    def numbers(self, names: Any, argument: str) -> Any:
        """Return the numbers of some groups by their names."""
        wanted = as_names(names, self.names)
        check_names(wanted, self.names, argument)
        place = {name: k for k, name in enumerate(self.names.tolist())}
        return np.array([place[x] for x in wanted.tolist()], np.int64)

    def task(self, cost: dict[str, Any], terms: tuple[Any, Any], scale: Any, options: dict[str, Any]) -> PairTask:
        """Return the data of all pairs; ``scale``: scale_cost and scale_each."""
        return task_of(PointCloud(self.points, starts=self.starts, **cost), terms, scale, options, self.names.tolist())


def task_of(
    cloud: PointCloud, terms: tuple[Any, Any], scale: Any, options: dict[str, Any], names: Sequence[Any]
) -> PairTask:  # fmt: skip
    """Return the data of all pairs of clouds with these names; ``scale``: scale_cost and scale_each."""
    name, each = scale[0], as_flag(scale[1], "scale_each")
    if each and name is None:
        raise ValueError("scale_each needs scale_cost, the unit of each pair's costs")
    unit = 1.0
    if name is not None and not each:
        unit = scale_of([cloud._cost.whole], name)
    task = PairTask.of(CloudPairs(cloud), None, terms, name if each else None, options)
    return task._replace(reg=unit * task.reg, reg_m=unit * task.reg_m, names=names)


def points_of(data: Any, representation: str | None) -> Any:
    """Return (cells, d) points: X, or a matrix of obsm, of an AnnData; or the array itself."""
    obsm = getattr(data, "obsm", None)
    if obsm is None:
        found = data
    elif representation is None:
        found = data.X
    elif representation in obsm:
        found = obsm[representation]
    else:
        raise ValueError(f"representation must be a matrix of data.obsm, {shown([*obsm])}, got {representation!r}")
    if hasattr(found, "toarray"):
        found = found.toarray()
    points = found if is_on_device(found) else as_array(found, "data")
    if points.ndim != 2:
        raise ValueError(f"data must hold points (cells, d), got shape {tuple(points.shape)}")
    return points


def labels_of(data: Any, groupby: Any, count: int) -> Any:
    """Return the label of each cell, a column of obs or the values themselves."""
    if isinstance(groupby, str):
        obs = getattr(data, "obs", None)
        if obs is None or groupby not in obs:
            choices = "of an AnnData" if obs is None else f"one of {shown([*obs])}"
            raise ValueError(f"groupby must be (cells,) labels or a column of obs, {choices}, got {groupby!r}")
        groupby = obs[groupby]
    return as_labels(np.asarray(groupby), count, "groupby", may_lack=True)


def names_of(labels: Any) -> Any:
    """Return the labels that occur, sorted."""
    names = classes_of(labels, ALONE, "groupby")
    if not len(names):
        raise ValueError("groupby must hold labels, got none")
    return names


def as_names(wanted: Any, names: Any) -> Any:
    """Return chosen labels as an array; dates, which come in several types, in the unit of the known ones."""
    return np.asarray(wanted, names.dtype if names.dtype.kind in "mM" else None)


def check_names(wanted: Any, names: Any, argument: str) -> None:
    lost = [x for x in np.ravel(wanted).tolist() if x not in names.tolist()]
    if lost:
        raise ValueError(f"{argument} must be labels of cells, got {lost[0]!r} where they are {shown(names.tolist())}")


def table_of(groups: CellGroups, pairs: Any, found: F64, of_second: Any = None) -> Any:
    """Return a table with a row for each pair: the names, the sizes, the divergence and its standard error."""
    frame = import_pandas().DataFrame
    second = groups.names[pairs[:, 1]] if of_second is None else "rest"
    sizes = groups.sizes[pairs[:, 1]] if of_second is None else of_second
    return frame({
        "group": groups.names[pairs[:, 0]], "reference": second, "divergence": found[0], "standard_error": found[1],
        "cells": groups.sizes[pairs[:, 0]], "cells_of_reference": sizes,
    })  # fmt: skip


def import_pandas() -> Any:
    try:
        import pandas  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError("mapuot.groups needs pandas: pip install pandas") from error
    return pandas


@hinted
def pairwise(
    data: Any,
    groupby: Any,
    reg: float = REQUIRED,
    reg_m: float = REQUIRED,
    *,
    representation: str | None = "X_pca",
    groups: Iterable[Any] | None = None,
    scale_cost: str | None = None,
    scale_each: bool = False,
    standard_error: bool = False,
    metric: MetricName = "sqeuclidean",
    comm: Any = None,
    devices: Sequence[int] | None = None,
    progress: bool = False,
    **options: Any,
) -> Any:
    """Compute the divergences between all pairs of groups of cells, as `mapuot.pairwise` does between clouds.

    Parameters
    ----------
    data : AnnData, or (cells, d) array
        Points of the cells, of NumPy or CuPy.
    groupby : str, or (cells,) array
        A column of ``obs``, or the labels. Cells without a label are left out.
    reg, reg_m, scale_cost, scale_each, metric, comm, devices, progress
        As in `mapuot.pairwise`; reg and reg_m are numbers.
    representation : str or None
        The matrix of ``obsm`` that holds the points; None takes ``X``. Of no effect for an array.
    groups : list, optional
        The groups to compare, in this order; by default all, sorted.
    standard_error : bool
        Return the standard errors, too, which take the cells of a group for independent draws. They are no test of
        equality, see `mapuot.sinkhorn_divergence`.
    **options
        tol, backend and further options of `solve_batch`.

    Returns
    -------
    DataFrame (groups, groups), or a pair of them
        The divergences, and with ``standard_error`` their errors.

    Raises
    ------
    ValueError
        If a label, a column or a matrix is not known; the message names the known ones.

    See Also
    --------
    contrasts, against, against_rest, mapuot.pairwise

    Examples
    --------
    >>> import numpy as np
    >>> from mapuot import groups
    >>> rng = np.random.default_rng(0)
    >>> label = np.repeat(["a", "b", "c"], 40)
    >>> cells = rng.normal(size=(120, 5)) + 2.0 * (label == "c")[:, None]
    >>> D = groups.pairwise(cells, label, reg=0.05, reg_m=np.inf, scale_cost="std", scale_each=True)
    >>> bool(D.loc["a", "b"] < D.loc["a", "c"])
    True
    """
    all_groups = CellGroups(data, groupby, representation, groups)
    task = all_groups.task({"metric": metric}, (reg, reg_m), (scale_cost, scale_each), options)
    k = len(all_groups.names)
    pairs = np.stack(np.triu_indices(k, 1), 1)
    tables = np.zeros((2, k, k))
    tables[:, pairs[:, 0], pairs[:, 1]] = divergences(
        task, pairs, standard_error, join(comm), progress, as_devices(devices, options)
    )
    frames = [import_pandas().DataFrame(x + x.T, all_groups.names, all_groups.names) for x in tables]
    return tuple(frames) if standard_error else frames[0]


@hinted
def contrasts(
    data: Any, groupby: Any, contrasts: Iterable[tuple[Any, Any]], reg: float = REQUIRED, reg_m: float = REQUIRED, *,
    representation: str | None = "X_pca", scale_cost: str | None = None, scale_each: bool = False,
    metric: MetricName = "sqeuclidean", comm: Any = None, devices: Sequence[int] | None = None, progress: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """Compute the divergences of chosen pairs of groups.

    Parameters
    ----------
    data, groupby, reg, reg_m, representation, scale_cost, scale_each
        As in `pairwise`.
    metric, comm, devices, progress, **options
        As in `pairwise`.
    contrasts : list of pairs
        (group, reference) labels.

    Returns
    -------
    DataFrame
        A row for each pair: group, reference, divergence, standard_error, cells, cells_of_reference. The standard
        errors are those of `pairwise`.

    Raises
    ------
    ValueError
        As in `pairwise`, or if contrasts are no pairs.

    See Also
    --------
    pairwise, against, against_rest

    Examples
    --------
    >>> import numpy as np
    >>> from mapuot import groups
    >>> label = np.repeat(["a", "b", "control"], 40)
    >>> cells = np.random.default_rng(0).normal(size=(120, 5)) + 2.0 * (label == "b")[:, None]
    >>> found = groups.contrasts(cells, label, [("a", "control"), ("b", "control")], reg=0.5, reg_m=np.inf)
    >>> found.divergence.round(1).tolist()
    [2.4, 20.6]
    """
    wanted = [tuple(pair) for pair in contrasts]
    if not wanted or any(len(pair) != 2 for pair in wanted):
        raise ValueError(f"contrasts must be pairs of labels, got {shown(wanted)}")
    all_groups = CellGroups(data, groupby, representation, None)
    pairs = np.stack([all_groups.numbers([pair[k] for pair in wanted], "contrasts") for k in (0, 1)], 1)
    task = all_groups.task({"metric": metric}, (reg, reg_m), (scale_cost, scale_each), options)
    found = divergences(task, pairs, True, join(comm), progress, as_devices(devices, options))
    return table_of(all_groups, pairs, found)


@hinted
def against(
    data: Any, groupby: Any, reference: Any, reg: float = REQUIRED, reg_m: float = REQUIRED, *,
    representation: str | None = "X_pca", **options: Any,
) -> Any:  # fmt: skip
    """Compute the divergence of every other group from one reference group, controls say.

    Parameters
    ----------
    data, groupby, reg, reg_m, representation, **options
        As in `contrasts`.
    reference : label
        The group to compare with.

    Returns
    -------
    DataFrame
        As in `contrasts`, a row for each other group, sorted by label.

    Raises
    ------
    ValueError
        As in `pairwise`.

    See Also
    --------
    contrasts, against_rest

    Examples
    --------
    >>> import numpy as np
    >>> from mapuot import groups
    >>> label = np.repeat(["a", "b", "control"], 40)
    >>> cells = np.random.default_rng(0).normal(size=(120, 5)) + 2.0 * (label == "b")[:, None]
    >>> groups.against(cells, label, "control", reg=0.5, reg_m=np.inf).group.tolist()
    ['a', 'b']
    """
    labels = labels_of(data, groupby, len(points_of(data, representation)))
    names = names_of(labels[~is_missing(labels)])
    chosen = as_names([reference], names)
    check_names(chosen, names, "reference")
    if len(names) == 1:
        raise ValueError(f"groupby must hold labels beside the reference, got {shown(names.tolist())}")
    pairs = [(x, chosen[0]) for x in names[names != chosen[0]]]
    return contrasts(data, groupby, pairs, reg, reg_m, representation=representation, **options)


@hinted
def against_rest(
    data: Any, groupby: Any, reg: float = REQUIRED, reg_m: float = REQUIRED, *, representation: str | None = "X_pca",
    groups: Iterable[Any] | None = None, scale_cost: str | None = None, scale_each: bool = False,
    metric: MetricName = "sqeuclidean", **options: Any,
) -> Any:  # fmt: skip
    """Compute the divergence of each group from all other cells, one group after the other.

    Parameters
    ----------
    data, groupby, reg, reg_m, representation, scale_cost, scale_each, metric, **options
        As in `contrasts`. The unit of ``scale_cost`` is that of each group and its rest.
    groups : list, optional
        The groups to compare; by default all.

    Returns
    -------
    DataFrame
        As in `contrasts`, with "rest" as the reference.

    Raises
    ------
    ValueError
        As in `pairwise`.

    See Also
    --------
    contrasts, against

    Notes
    -----
    A problem between n and N cells takes O(n N), and the self term of the rest O(N^2).

    Examples
    --------
    >>> import numpy as np
    >>> from mapuot import groups
    >>> label = np.repeat(["a", "b", "c"], 40)
    >>> cells = np.random.default_rng(0).normal(size=(120, 5)) + 2.0 * (label == "b")[:, None]
    >>> found = groups.against_rest(cells, label, reg=0.5, reg_m=np.inf)
    >>> found.group[found.divergence.argmax()]
    'b'
    """
    all_groups = CellGroups(data, groupby, representation, None)
    numbers = np.arange(len(all_groups.names))
    if groups is not None:
        numbers = all_groups.numbers([*groups], "groups")
    if len(all_groups.names) == 1:
        raise ValueError(f"groupby must hold two labels, got {shown(all_groups.names.tolist())}")
    starts = all_groups.starts
    total = int(starts[-1])
    found = np.zeros((2, len(numbers)))
    for i, k in enumerate(numbers.tolist()):
        own = np.arange(starts[k], starts[k + 1])
        order = np.concatenate([own, np.arange(starts[k]), np.arange(starts[k + 1], total)])
        both = taken(all_groups.points, order)
        cloud = PointCloud(both, starts=[0, len(own), total], metric=metric)
        names = all_groups.names.tolist()[k], "the rest"
        task = task_of(cloud, (reg, reg_m), (scale_cost, scale_each), options, names)
        found[:, i] = divergences(task, np.array([[0, 1]]), True, join(None), False)[:, 0]
    pairs = np.stack([numbers, numbers], 1)
    return table_of(all_groups, pairs, found, total - all_groups.sizes[numbers])


def taken(points: Any, order: Any) -> Any:
    """Return some points, where they lie."""
    if is_on_device(points):
        return points[there(order)]
    return points[order]
