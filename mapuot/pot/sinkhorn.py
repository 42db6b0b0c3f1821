"""POT's unbalanced Sinkhorn functions: its arguments, return types, log keys and errors over mapuot's solver.

With no method named they run mapuot's certified solver; a named method makes POT's iterates. Where POT is
wrong (zeros in a or b, small reg, reg_m1 != reg_m2, the mass terms of total_cost, several b) the answer here
is right.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any

import numpy as np

from ..answer.result import MOST_FLOAT32, Result
from ..answer.tensors import is_csr
from ..api.batch import solve_batch
from ..api.solve import solve
from ..ascend.carry_out import start_potentials
from ..backends import pick
from ..errors import InfeasibleError, warn
from ..problem.problem import Problem
from ..problem.validate import as_array, as_count, as_positive, as_side
from ..status import Words
from .arrays import give, library, take, threshold, tracked
from .caller import WORDS, muted, names_of_pot, warn_not_converged
from .iterate import NAMED, TINY, iterate

BACKEND = "auto"  # of every function here: by the arrays


def sinkhorn_unbalanced(
    a: Any,
    b: Any,
    M: Any,
    reg: float,
    reg_m: Any,
    method: str | None = None,
    reg_type: str = "kl",
    c: Any = None,
    warmstart: Any = None,
    numItermax: int = 1000,
    stopThr: float = 1e-6,
    verbose: bool = False,
    log: bool = False,
    *,
    tau: float | None = None,
) -> Any:
    """Unbalanced entropic transport plan: ``ot.sinkhorn_unbalanced`` on mapuot.

    ``min_P <P, M> + reg KL(P | c) + reg_m[0] KL(P 1 | a) + reg_m[1] KL(P^T 1 | b)``

    Parameters
    ----------
    a : (m,) array
        Source masses, zeros allowed; empty means uniform with mass 1.
    b : (n,) or (n, k) array
        Target masses, or k of them in columns: then the k costs come back instead of a plan.
    M : (m, n) array or scipy.sparse matrix
        Costs. numpy and CuPy arrays and lists as they are; torch, JAX and TensorFlow ones are converted and
        the answer is of their kind. Pairs that a sparse matrix does not store are forbidden; c may be sparse, too.
    reg : float
        Entropic regularisation, > 0, in units of M.
    reg_m : float, inf, or anything of length 1 or 2
        Marginal penalty, in units of M; inf is the balanced constraint.
    method : str, optional
        None: the certified solver of `mapuot.solve`; numItermax counts passes, stopThr is its ``tol``
        (certified relative plan error) and the log's err is that error. "sinkhorn", "sinkhorn_stabilized",
        "sinkhorn_translation_invariant" (any case): POT's iterates and err, absorbed so that they stay finite
        at any reg, translated so that unequal reg_m are right. "sinkhorn_reg_scaling": "sinkhorn", with a
        warning.
    reg_type : {"kl", "entropy"}
        "entropy" takes ones for c, and warns.
    c : (m, n) array, optional
        Reference measure, default a b^T; honoured for several b too.
    warmstart : (log u, log v), optional
        Shapes (m,), (n,); for k targets also (m, k), (n, k).
    numItermax : int
    stopThr : float
        With a named method, 0 or less runs all iterations.
    verbose : bool
        A progress bar on standard error.
    log : bool
        Return the log too.
    tau : float, optional
        POT's threshold of "sinkhorn_stabilized"; accepted, K is absorbed when its scalings need it.

    Returns
    -------
    plan : (m, n) array in M's dtype, of a sparse M a CSR array, or (k,) linear costs ``<P, M>`` for k targets
    log : dict
        Only with ``log=True``. err: list; logu, logv: scalings without a and b, (m,) and (n,) or with k
        columns; cost: ``<P, M>``; total_cost: the objective with its mass terms ``sum q - sum p`` (POT leaves
        them out and so reports 0 at every optimum). For k targets the costs are (k,) arrays.

    Raises
    ------
    ValueError, TypeError
        Bad argument, unknown method, unknown keyword (POT swallows those).
    NotImplementedError
        A tensor requires grad.

    Warns
    -----
    ConvergenceWarning
        stopThr was not reached (POT is silent).

    References
    ----------
    Chizat, Peyre, Schmitzer, Vialard, Scaling algorithms for unbalanced optimal transport problems, 2018.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> mapuot.pot.sinkhorn_unbalanced([0.5, 0.5], [0.5, 0.5], M, reg=1.0, reg_m=1.0).round(4)
    array([[0.3221, 0.1185],
           [0.1185, 0.3221]])
    """
    call = Call(a, b, M, reg, reg_m, reg_type, c, warmstart, numItermax, stopThr, verbose)
    answers = call.run(method, tau)
    return answers.plan(log)


def sinkhorn_unbalanced2(
    a: Any,
    b: Any,
    M: Any,
    reg: float,
    reg_m: Any,
    method: str | None = None,
    reg_type: str = "kl",
    c: Any = None,
    warmstart: Any = None,
    returnCost: str = "linear",
    numItermax: int = 1000,
    stopThr: float = 1e-6,
    verbose: bool = False,
    log: bool = False,
    *,
    tau: float | None = None,
) -> Any:
    """Cost of the unbalanced entropic plan: ``ot.sinkhorn_unbalanced2`` on mapuot; the plan is never formed.

    Parameters
    ----------
    returnCost : {"linear", "total"}
        ``<P, M>``, or the objective with its mass terms (POT's lacks them), in units of M times mass.
    a, b, M, reg, reg_m, method, reg_type, c, warmstart, numItermax, stopThr, verbose, log, tau
        As in `sinkhorn_unbalanced`.

    Returns
    -------
    cost : scalar, or (k,) array for k targets
    log : dict
        Only with ``log=True``; as in `sinkhorn_unbalanced`.

    Notes
    -----
    With ``returnCost="total"`` and without log, PyTorch tensors a, b, M that require grad get the gradient of the
    objective from the potentials (`mapuot.torch.sinkhorn_loss`).

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As in `sinkhorn_unbalanced`; also an unknown returnCost.
    """
    if returnCost not in ("linear", "total"):
        raise ValueError(f"Unknown returnCost = {returnCost!r}: must be 'linear' or 'total'")
    if returnCost == "total" and not log and differentiable(a, b, M, reg_type, c, warmstart):
        return loss(a, b, M, reg, reg_m, stopThr, numItermax)
    call = Call(a, b, M, reg, reg_m, reg_type, c, warmstart, numItermax, stopThr, verbose)
    answers = call.run(method, tau)
    return answers.cost(returnCost, log)


def sinkhorn_knopp_unbalanced(
    a: Any,
    b: Any,
    M: Any,
    reg: float,
    reg_m: Any,
    reg_type: str = "kl",
    c: Any = None,
    warmstart: Any = None,
    numItermax: int = 1000,
    stopThr: float = 1e-6,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """`sinkhorn_unbalanced` by the plain iteration, POT's iterates; arguments, returns, errors as there."""
    call = Call(a, b, M, reg, reg_m, reg_type, c, warmstart, numItermax, stopThr, verbose)
    return call.run("sinkhorn").plan(log)


def sinkhorn_stabilized_unbalanced(
    a: Any,
    b: Any,
    M: Any,
    reg: float,
    reg_m: Any,
    reg_type: str = "kl",
    c: Any = None,
    warmstart: Any = None,
    tau: float = 1e5,
    numItermax: int = 1000,
    stopThr: float = 1e-6,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """`sinkhorn_unbalanced` by the plain iteration on an absorbed K; err is looked at every tenth iteration.

    POT's function of this name leaves the iteration once it absorbs; this one keeps the plain iterates.
    ``tau`` is checked and accepted: K is absorbed when its scalings need it. Other arguments, returns, errors
    as there.
    """
    call = Call(a, b, M, reg, reg_m, reg_type, c, warmstart, numItermax, stopThr, verbose)
    return call.run("sinkhorn_stabilized", tau).plan(log)


def sinkhorn_unbalanced_translation_invariant(
    a: Any,
    b: Any,
    M: Any,
    reg: float,
    reg_m: Any,
    reg_type: str = "kl",
    c: Any = None,
    warmstart: Any = None,
    numItermax: int = 1000,
    stopThr: float = 1e-6,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """`sinkhorn_unbalanced` by the translation-invariant iteration, right for unequal reg_m (POT's is not).

    Arguments, returns and errors as there. Source: Sejourne, Vialard, Peyre, Faster unbalanced optimal
    transport: translation invariant Sinkhorn and 1-D Frank-Wolfe, 2022.
    """
    call = Call(a, b, M, reg, reg_m, reg_type, c, warmstart, numItermax, stopThr, verbose)
    return call.run("sinkhorn_translation_invariant").plan(log)


@dataclasses.dataclass
class Call:
    """The arguments that every function shares, as the user gave them."""

    a: Any
    b: Any
    M: Any
    reg: Any
    reg_m: Any
    reg_type: str | None = "kl"  # None: POT's, which is "entropy" for several targets
    c: Any = None
    warmstart: Any = None
    max_iter: int = 1000
    stop: float = 1e-6
    verbose: bool = False
    tol: float | None = None  # of the certified solver, default stop
    together: bool = False  # several targets iterate until their common err is below stop, as in POT
    words: Words = WORDS  # the caller's for max_iter and stop

    def run(self, method: str | None, tau: float | None = None) -> Answers:
        name = method_name(method)
        if tau is not None:
            as_positive(tau, "tau")
            if name != "sinkhorn_stabilized":
                raise TypeError(f"tau is an argument of method 'sinkhorn_stabilized' only, not of {method!r}")
        like = self.M
        for key in ("a", "b", "M", "reg_m", "c"):
            setattr(self, key, take(getattr(self, key), key))
        reference = self.reference()
        self.max_iter, self.stop = as_count(self.max_iter, self.words[0]), threshold(self.stop, self.words[1])
        self.b = as_array(self.b, "b") if isinstance(self.b, (list, tuple)) else self.b
        several, shape = np.ndim(self.b) == 2, np.shape(self.M)
        if several and (0 in self.b.shape or self.b.shape[:1] != shape[1:]):
            raise ValueError(f"b must have shape (n,) or (n, k) for M of shape {shape}, got {self.b.shape}")
        columns: list[int | None] = [*range(self.b.shape[1])] if several else [None]
        with names_of_pot(), muted():
            if name is None:
                return self.certified(reference, several, like)
            if self.together or not several:
                return Answers(*self.iterated(name, reference, columns), several, like)
            each = [self.iterated(name, reference, [j]) for j in columns]
            return Answers([results[0] for results, _ in each], largest([err for _, err in each]), several, like)

    def reference(self) -> Any:
        """c in the words of `mapuot.solve`."""
        kind = self.reg_type.lower() if isinstance(self.reg_type, str) else self.reg_type
        if kind == "entropy":
            warn("reg_type='entropy': ones are taken for the reference measure c")
            return "uniform"
        if kind != "kl":
            raise ValueError(f"reg_type must be 'kl' or 'entropy', got {self.reg_type!r}")
        return "product" if self.c is None else self.c

    def certified(self, reference: Any, several: bool, like: Any) -> Answers:
        """By the certified solver; err is the certified error of every pass, of several targets that reached."""
        tol = self.tol or (self.stop if self.stop > 0 else TINY)
        options: dict[str, Any] = {"tol": tol, "max_passes": self.max_iter, "backend": BACKEND}
        options["progress"] = self.verbose
        if not several:
            start = self.start(None)
            result = solve(
                self.M, self.a, self.b, reg=self.reg, reg_m=self.reg_m, reference=reference, warm_start=start, **options
            )
            warn_not_converged(result, max(tol, self.stop), self.words)
            return Answers([result], [stat.error for stat in result.trace], several, like)
        a = self.a if np.size(self.a) else None
        results = solve_batch(
            self.M,
            a,
            self.b.T,
            reg=self.reg,
            reg_m=self.reg_m,
            reference=reference,
            warm_start=self.starts(),
            **options,
        )
        if not results.converged.all():
            warn_not_converged(results[int(results.error_bound.argmax())], max(tol, self.stop), self.words)
        _ = results.cost  # of all in one product
        return Answers(list(results), [float(results.error_bound.max())], several, like)

    def iterated(self, name: str, reference: Any, columns: list[int | None]) -> tuple[list[Result], list[float]]:
        """POT's iterates for these columns of b (None: b itself), which stop together."""
        targets = [self.b if j is None else self.b[:, j] for j in columns]
        module = pick(BACKEND, self.M, self.a, self.b)
        problems = [as_problem(self.M, self.a, b, self.reg, self.reg_m, reference, module) for b in targets]
        starts = [start_potentials(self.start(j), problem) for j, problem in zip(columns, problems, strict=True)]
        return iterate(problems, module, name, starts, self.max_iter, self.stop, self.verbose, self.words)

    def start(self, j: int | None) -> Any:
        """The warm start of target j: a column where it has columns (one column serves all)."""
        if self.warmstart is None:
            return None
        if not isinstance(self.warmstart, (tuple, list)) or len(self.warmstart) != 2:
            raise TypeError(f"warmstart must be a pair (log u, log v), got {type(self.warmstart).__name__}")
        pair = [take(x, "warmstart") for x in self.warmstart]
        return pair if j is None else [x if np.ndim(x) < 2 else x[:, min(j, x.shape[1] - 1)] for x in pair]

    def starts(self) -> Any:
        """The warm starts of all targets, in rows."""
        if self.warmstart is None:
            return None
        columns = [self.start(j) for j in range(self.b.shape[1])]
        return tuple(np.stack([np.asarray(pair[k], dtype=np.float64) for pair in columns]) for k in (0, 1))


def as_problem(M: Any, a: Any, b: Any, reg: Any, reg_m: Any, reference: Any, module: ModuleType) -> Problem:
    """The problem of a named method: as POT it iterates, with a warning, where no plan exists too."""
    try:
        return Problem.from_arrays(M, a, b, reg, reg_m, "kl", reference, module)
    except InfeasibleError as error:
        warn(f"no plan has both marginals: {error}")
    problem = Problem.from_arrays(M, a, b, reg, 1.0, "kl", reference, module)
    rows, cols = (as_side(side.name, side.weight, "balanced", np.inf, "reg_m") for side in (problem.rows, problem.cols))
    return dataclasses.replace(problem, rows=rows, cols=cols)


def largest(errs: list[list[float]]) -> list[float]:
    """Of targets that stop alone the largest err at each look, one that has stopped keeping its last."""
    length = max(map(len, errs))
    return [max((e[min(i, len(e) - 1)] for e in errs if e), default=math.nan) for i in range(length)]


def differentiable(a: Any, b: Any, M: Any, reg_type: Any, c: Any, warmstart: Any) -> bool:
    """Whether the objective has its gradient from the potentials: tensors, some require grad, c = a b^T, one target."""
    plain = c is None and warmstart is None and isinstance(reg_type, str) and reg_type.lower() == "kl"
    tensors = all(library(x) == "torch" for x in (a, b, M))
    return plain and tensors and b.ndim == 1 and any(map(tracked, (a, b, M)))


def loss(a: Any, b: Any, M: Any, reg: Any, reg_m: Any, tol: Any, max_passes: Any) -> Any:
    """The objective as a tensor with its gradient; empty a or b means uniform."""
    from ..torch import sinkhorn_loss  # noqa: PLC0415 - only for tensors

    like = M.values().detach() if is_csr(M) else M
    a, b = (x if len(x) else like.new_full((size,), 1 / size) for x, size in ((a, M.shape[0]), (b, M.shape[1])))
    tol, max_passes = threshold(tol), as_count(max_passes, WORDS[0])
    return sinkhorn_loss(M, a, b, reg=reg, reg_m=reg_m, tol=tol if tol > 0 else TINY, max_passes=max_passes)


def method_name(method: str | None) -> str | None:
    """The name in lower case; ValueError for a name that POT does not know."""
    if method is None:
        return None
    name = method.lower() if isinstance(method, str) else method
    if name == "sinkhorn_reg_scaling":
        warn("Method not implemented yet. Running 'sinkhorn' instead")
        return "sinkhorn"
    if name not in NAMED:
        known = [*NAMED, "sinkhorn_reg_scaling"]
        raise ValueError(f"Unknown method {method!r}: must be one of {known} or None")
    return name


class Answers:
    """The results of one call in POT's shapes and in the array library of its cost matrix."""

    def __init__(self, results: list[Result], err: list[float], several: bool, like: Any) -> None:
        self.results, self.err, self.several, self.like = results, err, several, like
        self.dtype = np.dtype(self.results[0].problem.M.dtype.name)

    def plan(self, log: bool) -> Any:
        """The plan, or the linear costs of several targets, and the log where asked for."""
        value = self.costs("cost") if self.several else give(self.results[0].plan, self.like)
        return (value, self.log()) if log else value

    def cost(self, kind: str, log: bool) -> Any:
        value = self.costs("cost" if kind == "linear" else "total_cost")
        return (value, self.log()) if log else value

    def costs(self, key: str) -> Any:
        values = [r.cost if key == "cost" else r.objective for r in self.results]
        return give(self.narrowed(np.array(values if self.several else values[0]))[()], self.like)

    def narrowed(self, x: Any) -> Any:
        """``x`` in M's dtype; as it is where float32 would make inf of a number."""
        held = (np.abs(x) <= MOST_FLOAT32) | ~np.isfinite(x)
        return x.astype(self.dtype) if held.all() else x

    def log(self) -> dict[str, Any]:
        return {
            "err": self.err,
            "logu": self.vectors([r.log_u for r in self.results]),
            "logv": self.vectors([r.log_v for r in self.results]),
            "cost": self.costs("cost"),
            "total_cost": self.costs("total_cost"),
        }

    def vectors(self, values: list[Any]) -> Any:
        to_numpy = self.results[0]._backend.to_numpy
        table = [to_numpy(x) for x in values]
        return give(self.narrowed(np.stack(table, axis=1) if self.several else table[0]), self.like)
