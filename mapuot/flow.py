"""Training pairs for flows: a sampler with the interface of torchcfm's ``OTPlanSampler``; only an import changes.

The costs of a batch are computed and solved on the device of its tensors, and only the drawn rows are computed. Source
of the interface: Tong et al., Improving and generalizing flow-based generative models with minibatch optimal transport,
2024.
"""

import copy
import math
import os
import sys
import warnings
from importlib import import_module
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment

from .annotations import Statistic
from .answer.draw import as_generator, seed_of
from .answer.result import Result
from .answer.tensors import Tensors, array_of, stream_of, tensor_among
from .api.solve import solve
from .arrays import host, namespace
from .errors import ConvergenceWarning, shown
from .problem.labels import pair_of
from .problem.validate import as_choice, as_count, as_positive
from .route import on_device
from .synonyms import hinted_onward

__all__ = ["OTPlanSampler"]


START_REG = 0.01  # of the median cost, for potentials of an exact assignment
START_TOL = 1e-2


class PendingResult(Tensors):
    """A Result for squared distances between points on a GPU; its solve may still be running.

    After the solve the GPU draws as many pairs as there are rows, for a later ``sample`` with the same ``rng``. Drawing
    them later would take the host as long as the rest of the call.
    """

    def __init__(self, x: Any, y: Any, rng: np.random.Generator, options: dict[str, Any]) -> None:
        """Start the solve of tensors (m, d) and (n, d) on one GPU, on its current stream, with options of `solve`."""
        super().__init__(None, x.device)
        torch = sys.modules["torch"]
        index = x.device.index
        x = x.contiguous()
        y = y.contiguous()
        self._options = options
        self._rng = rng
        self._captured = None
        self._pairs = None
        alike = x.shape[1] == y.shape[1] and x.dtype == y.dtype
        with stream_of(x.device):
            on = torch._C._cuda_getCurrentRawStream(index)
            here = index, on, os.environ.get("MAPUOT_CUDA")
            if alike and x.dtype in (torch.float32, torch.float64) and torch._C._cuda_getDevice() == index:
                n, d = y.shape
                self._captured = on_device.capture(here, len(x), n, d, x.element_size(), options)
            if self._captured is None:
                self._costs = on_device.distances(array_of(x), array_of(y))
                return
        self._buffer = torch.empty(self._captured.words, dtype=torch.float64, device=x.device)
        self._pairs = torch.empty((2, x.shape[0]), dtype=torch.int64, device=x.device)
        at = self._buffer.data_ptr()
        first = self._pairs.data_ptr()
        to = first, first + 8 * x.shape[0]
        seed = seed_of(rng)
        self._pending = self._captured.begin((x.data_ptr(), y.data_ptr()), at, to, x.shape[0], seed, on)

    def _found(self) -> Result:
        """Wait for the answer, or solve again if one call was not enough."""
        if self._captured is None:
            self._costs.device.synchronize()  # the work may be on another stream
            return solve(self._costs, **self._options)
        result, costs = self._captured.result(self._pending, array_of(self._buffer))
        if result is None:
            self._pairs = None
            return solve(costs, **self._options)
        return result

    def sample(
        self, size: int, seed: Any = None, *, method: str = "independent", replace: bool = True
    ) -> tuple[Any, Any]:  # fmt: skip
        """Draw pairs as `Result.sample` does."""
        pairs = self._pairs
        if pairs is not None and seed is self._rng and size == pairs.shape[1] and method == "independent" and replace:
            if not self._pending.certain:
                _ = self.arrays
            if self._pairs is not None:
                self._pairs = None
                return pairs.unbind()  # type: ignore[no-any-return]
        arrays: Any = self.arrays
        return self._call(arrays.sample, size, seed, method=method, replace=replace)  # type: ignore[no-any-return]


class OTPlanSampler:
    """Sampler that draws pairs of points of two batches from their entropic plan, with torchcfm's interface.

    Parameters
    ----------
    method : {"sinkhorn", "unbalanced", "exact"}
        Balanced, unbalanced with ``reg_m``, or without entropy: "exact" finds the permutation of least total cost
        between equally many points, and ignores reg. torchcfm's "partial" raises an error.
    reg, reg_m : float
        Entropic regularisation and marginal penalty, in units of the squared distances.
    normalize_cost : bool
        Take reg and reg_m in units of the largest squared distance.
    num_threads : int or "max"
        CPU threads.
    warn : bool
        Accepted for compatibility with torchcfm, and ignored; a solve that does not converge always warns.
    across : float > 0, or inf, optional
        Cost of a pair with different labels y0 and y1 (conditions of the flow) in addition to its squared distance; inf
        pairs points with equal labels only. The points x1 of a label then share the mass of its points x0, except for
        "unbalanced"; "exact" needs equally many of both. Without it labels only follow their points.
    seed : int or generator of NumPy, optional
        Source of the random numbers.
    **options
        Further arguments of `mapuot.solve`: tol, backend and so on.

    See Also
    --------
    mapuot.Result.sample : draws pairs from any plan

    Examples
    --------
    >>> import numpy as np
    >>> from mapuot.flow import OTPlanSampler
    >>> x0 = np.random.default_rng(0).normal(size=(64, 2))
    >>> x, y = OTPlanSampler("unbalanced", reg=0.01, seed=0).sample_plan(x0, x0 + 0.1)
    >>> bool(abs(y - x - 0.1).mean() < 0.1)
    True
    """

    @hinted_onward(solve)
    def __init__(
        self, method: str, reg: float = 0.05, reg_m: float = 1.0, normalize_cost: bool = False,
        num_threads: int | Literal["max"] = 1, warn: bool = True, *, across: float | None = None,
        seed: int | np.random.Generator | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.across = None if across is None else as_positive(across, "across", math.inf, "> 0, or inf")
        self.method = as_choice(method, "method", ("sinkhorn", "unbalanced", "exact"))
        self.reg = as_positive(reg, "reg")
        self.reg_m = reg_m if method == "unbalanced" else math.inf
        self.normalize_cost, self.warn, self.rng = normalize_cost, warn, as_generator(seed)
        if num_threads == "max":
            threads = None
        else:
            threads = as_count(num_threads, "num_threads")
        self.options: dict[str, Any] = {"threads": threads} | options

    def __repr__(self) -> str:
        told = f"OTPlanSampler({self.method!r}"
        if self.method != "exact":
            told += f", reg={self.reg:g}"
        if self.method == "unbalanced":
            told += f", reg_m={self.reg_m!r}"
        if self.across is not None:
            told += f", across={self.across:g}"
        return told + ", normalize_cost=True" * self.normalize_cost + ")"

    def solved(self, x0: Any, x1: Any, y0: ArrayLike | None = None, y1: ArrayLike | None = None) -> Result:
        """Return the `mapuot.Result` between two batches; points may have any shape.

        For tensors on a GPU the solve runs in the background until the Result is first used, on the same stream. Start
        it for the next batch before the training step on this one: the solve runs meanwhile. If one call does not
        solve the problem, the first use finishes the solve; a balanced problem makes Newton's step then, too. With
        ``across`` the call waits.

        Raises
        ------
        ValueError
            If the method is "exact": its plan is a permutation, see `assigned`. If ``across`` is given and labels are
            not, or a label has points on one side only.
        """
        if self.method == "exact":
            raise ValueError("method 'exact' has no entropic plan: assigned(x0, x1) returns its permutation")
        rows, columns = (x if x.ndim == 2 else x.reshape(len(x), -1) for x in (x0, x1))
        labels = self._conditions(len(x0), len(x1), y0, y1)
        if (like := tensor_among(rows, columns)) is not None:
            rows = rows.to(like.device)
            columns = columns.to(like.device)
            if like.is_cuda and not self.normalize_cost and labels is None:
                return PendingResult(rows, columns, self.rng, {"reg": self.reg, "reg_m": self.reg_m} | self.options)  # type: ignore[return-value]
        M = squared_distances(rows, columns)
        if labels is not None:
            unit = float(M.max()) if self.normalize_cost else 1.0
            M = M / (unit or 1.0) + array_like(M, self._added(labels, 1.0))
            masses = {}
            if self.across == math.inf and self.method == "sinkhorn":
                masses["b"] = shared_masses(*labels)
            return solve(M, reg=self.reg, reg_m=self.reg_m, **masses, **self.options)
        scale: Statistic | None = "max" if self.normalize_cost else None
        return solve(M, reg=self.reg, reg_m=self.reg_m, scale_cost=scale, **self.options)

    def _conditions(self, m: int, n: int, y0: Any, y1: Any) -> tuple[Any, Any] | None:
        """Return the number of the label of each of m and n points; None without ``across``."""
        if self.across is None:
            return None
        if y0 is None or y1 is None:
            raise ValueError("y0 and y1 must be given where across is, the cost of pairs with different labels")
        (first, second), classes = pair_of(tuple(map(labels_of, (y0, y1))), [m, n], ("y0", "y1"))
        numbers = np.searchsorted(classes, first), np.searchsorted(classes, second)
        counts = np.stack([np.bincount(k, minlength=len(classes)) for k in numbers])
        if self.across == math.inf:
            if self.method == "exact":
                wrong = counts[0] != counts[1]
            else:
                wrong = (counts == 0).any(0)
            if wrong.any():
                k = int(wrong.argmax())
                needs = "equally many" if self.method == "exact" else "some"
                told = f"got {counts[0, k]} and {counts[1, k]} points of label {shown(classes[k].item())}"
                raise ValueError(f"y0 and y1 must have {needs} points of each label where across is inf, {told}")
        return numbers

    def _added(self, labels: tuple[Any, Any], unit: float) -> Any:
        """Return the costs of pairs with different labels, 0 for equal ones."""
        return np.where(labels[0][:, None] != labels[1], unit * float(self.across or 0.0), 0.0)

    def assigned(self, x0: Any, x1: Any, y0: ArrayLike | None = None, y1: ArrayLike | None = None) -> Any:
        """Return the permutation j of least total cost ``sum_i |x0_i - x1_j(i)|^2``, (n,) integers on the host.

        A balanced entropic plan at 1 % of the median cost gives potentials; less these, nearly all costs of the best
        permutation are 0, so that shortest augmenting paths are short: 1024 points in 2 dimensions take 0.3 s on one
        core, the paths alone 1.8 s. The permutation is optimal whatever the potentials are.

        Raises
        ------
        ValueError
            If x0 and x1 hold different numbers of points.
        """
        if len(x0) != len(x1):
            raise ValueError(f"x1 must hold {len(x0)} points, as x0, where method is 'exact', got {len(x1)}")
        rows, columns = (x.reshape(len(x), -1) for x in (x0, x1))
        M = squared_distances(rows, columns)
        costs = np.asarray(M.cpu() if hasattr(M, "cpu") else M, np.float64)
        labels = self._conditions(len(x0), len(x1), y0, y1)
        if labels is not None and self.across == math.inf:
            found = np.empty(len(x0), np.int64)
            for k in np.unique(labels[0]):
                i, j = (np.flatnonzero(own == k) for own in labels)
                found[i] = j[self._permutation(costs[np.ix_(i, j)])]
            return found
        if labels is not None:
            costs += self._added(labels, float(costs.max()) if self.normalize_cost else 1.0)
        return self._permutation(costs)

    def _permutation(self, M: Any) -> Any:
        """Return the permutation of least total cost; M is on the host."""
        costs = M
        if costs.max() > 0:
            with warnings.catch_warnings():  # any potentials will do
                warnings.simplefilter("ignore", ConvergenceWarning)
                options = {"tol": START_TOL} | self.options
                g = solve(M, reg=START_REG, reg_m=math.inf, scale_cost="median", **options).g
            costs = costs - np.asarray(g.cpu() if hasattr(g, "cpu") else g)
            costs -= costs.min(1, keepdims=True)
        return linear_sum_assignment(costs)[1]

    def get_map(self, x0: Any, x1: Any, y0: ArrayLike | None = None, y1: ArrayLike | None = None) -> Any:
        """Return the plan between two batches, as a NumPy array."""
        if self.method == "exact":
            n = len(x0)
            plan = np.zeros((n, n))
            plan[np.arange(n), self.assigned(x0, x1, y0, y1)] = 1 / n
            return plan
        plan = self.solved(x0, x1, y0, y1).plan
        if hasattr(plan, "cpu"):
            return plan.cpu().numpy()
        return plan

    def sample_map(self, pi: ArrayLike, batch_size: int, replace: bool = True) -> tuple[Any, Any]:
        """Draw (i, j) from a plan that `get_map` made."""
        plan = np.asarray(pi, np.float64)
        drawn = self.rng.choice(plan.size, batch_size, replace, (plan / plan.sum()).ravel())
        return drawn // plan.shape[1], drawn % plan.shape[1]

    def sample_plan(self, x0: Any, x1: Any, replace: bool = True) -> tuple[Any, Any]:
        """Draw as many pairs as x0 has points: (x0[i], x1[j])."""
        return self.sample_plan_with_labels(x0, x1, replace=replace)[:2]

    def sample_plan_with_labels(
        self, x0: Any, x1: Any, y0: Any = None, y1: Any = None, replace: bool = True
    ) -> tuple[Any, Any, Any, Any]:  # fmt: skip
        """Draw pairs, and return (x0[i], x1[j], y0[i], y1[j]); labels that are not given are None."""
        if self.method == "exact":
            n = len(x0)
            i = self.rng.integers(n, size=n) if replace else self.rng.permutation(n)
            j = self.assigned(x0, x1, y0, y1)[i]
        else:
            i, j = self.solved(x0, x1, y0, y1).sample(len(x0), self.rng, replace=replace)
        return x0[i], x1[j], None if y0 is None else y0[i], None if y1 is None else y1[j]

    def sample_plan_over_ranks(
        self, x0: Any, x1: Any, y0: Any = None, y1: Any = None, replace: bool = True, group: Any = None
    ) -> tuple[Any, Any, Any, Any]:  # fmt: skip
        """Draw pairs from one plan between the batches of all ranks of a torch.distributed job.

        Each rank passes its own batch and gets as many pairs as its x0 has points, as from `sample_plan_with_labels`;
        either point may come from any rank. Each rank solves the whole problem, and rank 0's generator draws.

        Parameters
        ----------
        x0, x1, y0, y1 : tensors
            Points and labels, equally many on all ranks.
        group : process group, optional
            The ranks that take part; by default all.

        Raises
        ------
        ValueError
            If ranks pass different numbers of points.
        """
        distributed = import_module("torch.distributed")
        size, rank = distributed.get_world_size(group), distributed.get_rank(group)
        known: list[Any] = [None] * size
        seed = seed_of(self.rng)
        distributed.all_gather_object(known, (len(x0), len(x1), seed), group)
        if len({counts[:2] for counts in known}) > 1:
            raise ValueError(f"x0 and x1 must hold equally many points on all ranks, got {[x[:2] for x in known]}")
        whole = copy.copy(self)
        whole.rng = as_generator(known[0][2])
        X0, X1, Y0, Y1 = (gathered_over(distributed, x, size, group) for x in (x0, x1, y0, y1))
        found = whole.sample_plan_with_labels(X0, X1, Y0, Y1, replace)
        own = slice(rank * len(x0), (rank + 1) * len(x0))
        first, second, *labels = (None if x is None else x[own] for x in found)
        return first, second, *labels  # type: ignore[return-value]

    def sample_trajectory(self, X: Any) -> Any:
        """Draw paths through batches of points at several times, X and result (batch, times, ...), plan by plan."""
        if hasattr(X, "detach"):
            X = X.detach().cpu().numpy()
        else:
            X = np.asarray(X)
        at = [np.arange(len(X))]
        for k in range(X.shape[1] - 1):
            P = np.asarray(self.get_map(X[:, k], X[:, k + 1]), np.float64)[at[-1]]
            ends = np.cumsum(P, 1)
            drawn = self.rng.random(len(X))[:, None] * ends[:, -1:]
            at.append(np.minimum((ends <= drawn).sum(1), P.shape[1] - 1))
        return np.stack([X[i, k] for k, i in enumerate(at)], 1)


def gathered_over(distributed: Any, x: Any, size: int, group: Any) -> Any:
    """Return the tensors of all ranks, in their order, as one; None for None."""
    if x is None:
        return None
    x = x.detach().contiguous()
    parts = [x.new_empty(x.shape) for _ in range(size)]
    distributed.all_gather(parts, x, group)
    return import_module("torch").cat(parts)


def labels_of(y: Any) -> Any:
    """Return labels on the host; each row of a table is one label."""
    table = np.asarray(y.detach().cpu() if hasattr(y, "detach") else host(y))
    if table.ndim > 1:
        return np.array([*map(repr, table.reshape(len(table), -1).tolist())])
    return table


def shared_masses(rows: Any, columns: Any) -> Any:
    """Return masses of the columns such that each label has its share of the rows."""
    counts = [np.bincount(k, minlength=max(rows.max(), columns.max()) + 1) for k in (rows, columns)]
    return (counts[0] / np.maximum(counts[1], 1))[columns] / len(rows)


def array_like(M: Any, x: Any) -> Any:
    """Return an array where M is."""
    if hasattr(M, "detach"):
        return import_module("torch").as_tensor(x, dtype=M.dtype, device=M.device)
    return namespace(M).asarray(x)


def squared_distances(x: Any, y: Any) -> Any:
    """Return the squared distances between points (m, d) and (n, d), arrays or tensors."""
    if hasattr(x, "detach"):
        x = x.detach()
        y = y.detach()
    centre = x.mean(0)
    x = x - centre
    y = y - centre
    M = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
    return M * (M > 0)
