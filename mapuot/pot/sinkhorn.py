"""POT's unbalanced Sinkhorn functions: its arguments, return types, log keys and errors over mapuot's solver.

The certified solver answers every call, whatever the method's name. `Arguments` holds the arguments of one call under
POT's names.

The answer is at least as near to the solution as POT's method would end. POT's u and v contract by fi1 fi2 in each
iteration, fi = reg_m / (reg_m + reg). After a change of stopThr they are about stopThr fi1 fi2 from the solution, and
the last step may have gone below stopThr by another factor fi1 fi2.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import BackendName, CostLike, MarginalPenalty
from ..answer.result import Result
from ..answer.tensors import is_csr
from ..api.batch import solve_batch
from ..api.solve import solve
from ..errors import OF_BATCH, ConvergenceWarning, muted, renamed, warn
from ..problem.validate import MASS_TOLERANCE, as_array, as_float, as_pair, as_passes, as_positive
from ..status import Words, not_converged
from .answers import Answers
from .arrays import is_dense_tensor, lowered, no_grad, to_array, tracked

WORDS = Words("numItermax", "stopThr")
NAMES = {"reference": "c", "warm_start": "warmstart"} | OF_BATCH  # ours, POT's
BACKEND: BackendName = "auto"  # chosen by the arrays
STOP, DEFAULT_ITER = 1e-6, 1000  # POT's stopThr and numItermax, the least limit of a named method
NAMED = {"sinkhorn": 2, "sinkhorn_stabilized": 11, "sinkhorn_translation_invariant": 2}  # powers of fi1 fi2 that remain
# factors on the estimated remaining error: in 200 problems POT's error was .1 to 10 stopThr, ours .005 to .2 of the
# certified error; the translation-invariant method also contracts by mixing, and reached .003 stopThr
SURE, FASTER = 0.3, 0.01
LEAST_TOL = 1e-10  # smallest certified error: rounding of M / reg allows it up to range(M) / reg = 5e4


def sinkhorn_unbalanced(
    a: ArrayLike,
    b: ArrayLike,
    M: CostLike,
    reg: float,
    reg_m: MarginalPenalty,
    method: str | None = None,
    reg_type: str = "kl",
    c: ArrayLike | None = None,
    warmstart: ArrayLike | None = None,
    numItermax: int = 1000,
    stopThr: float = 1e-6,
    verbose: bool = False,
    log: bool = False,
    *,
    tau: float | None = None,
) -> Any:
    """Compute the unbalanced entropic transport plan: ``ot.unbalanced.sinkhorn_unbalanced`` on mapuot.

    ``min_P <P, M> + reg KL(P | c) + reg_m[0] KL(P 1 | a) + reg_m[1] KL(P^T 1 | b)``

    Parameters
    ----------
    a, b : (m,) and (n,) arrays, or b (n, k)
        Masses; zeros are allowed, and an empty array means equal masses that add up to 1. If b has k columns, k costs
        are returned instead of a plan.
    M : (m, n) array or scipy.sparse matrix
        Costs: an array of NumPy, CuPy, PyTorch, JAX or TensorFlow, or a list; the answer is of the same kind. Pairs
        that a sparse matrix does not store are forbidden; then c may be sparse, too.
    reg, reg_m : float > 0; float, inf (balanced), or anything of length 1 or 2
        Entropic regularisation and marginal penalty, in units of M.
    method : str, optional
        None: ``stopThr`` is the certified relative error of the plan to reach, and ``numItermax`` the largest number of
        passes. "sinkhorn", "sinkhorn_stabilized", "sinkhorn_translation_invariant" or "sinkhorn_reg_scaling" (in any
        case): the answer is at least as near to the solution as POT's method is when it stops at this ``stopThr``. It
        may take 1000 passes, or ``numItermax`` if that is more.
    reg_type, c : {"kl", "entropy"}; (m, n) array, optional
        The reference measure; default a b^T, also for several b. "entropy" takes ones, with a warning.
    warmstart : (log u, log v), optional
        Where to start; shapes (m,), (n,), or for k targets (m, k), (n, k).
    numItermax, stopThr : int, float
        See ``method``. A stopThr of 0 or less asks for a certified error of 1e-10, without a warning if that is not
        reached.
    verbose, log : bool
        Show a progress bar on standard error; return the log, too.
    tau : float, optional
        POT's threshold of "sinkhorn_stabilized"; checked and not used.

    Returns
    -------
    plan : (m, n) array in M's dtype, a CSR array for a sparse M, or (k,) linear costs ``<P, M>`` for k targets
        If a, b and M are dense PyTorch tensors, reg_type is "kl" and c is None, plan and costs have gradients by each
        of a, b and M that requires one: the derivatives of the solution, not of iterations.
    log : dict
        Only with ``log=True``. err: certified relative errors of the plan, one for each pass (for k targets the largest
        at the end). logu, logv: log scalings without a and b, (m,) and (n,), or with k columns. cost: ``<P, M>``.
        total_cost: the objective with its mass terms ``sum q - sum p``, which POT omits.

    Raises
    ------
    NotImplementedError, InfeasibleError
        A tensor requires a gradient that the answer cannot have; forbidden pairs leave no plan with both balanced
        marginals.

    Warns
    -----
    ConvergenceWarning
        stopThr was not reached (POT is silent); or both sides are balanced and their totals differ: the plan meets b,
        with rows in proportion to a, as in POT.

    See Also
    --------
    sinkhorn_unbalanced2, patched, mapuot.solve

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> mapuot.pot.sinkhorn_unbalanced([0.5, 0.5], [0.5, 0.5], M, reg=1.0, reg_m=1.0).round(4)
    array([[0.3221, 0.1185],
           [0.1185, 0.3221]])
    """
    call = Arguments(a, b, M, reg, reg_m, reg_type, c, warmstart, numItermax, stopThr, verbose)
    return call.run(method, tau).plan(log)


def sinkhorn_knopp_unbalanced(
    a: ArrayLike, b: ArrayLike, M: CostLike, reg: float, reg_m: MarginalPenalty, *args: Any, **options: Any
) -> Any:
    """Call `sinkhorn_unbalanced` with method "sinkhorn".

    The other arguments follow in the order of `sinkhorn_unbalanced`. Return values and errors are the same, too.

    See Also
    --------
    sinkhorn_unbalanced : all parameters

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> mapuot.pot.sinkhorn_knopp_unbalanced([0.5, 0.5], [0.5, 0.5], M, reg=1.0, reg_m=1.0).round(4)
    array([[0.3221, 0.1185],
           [0.1185, 0.3221]])
    """
    return sinkhorn_unbalanced(a, b, M, reg, reg_m, "sinkhorn", *args, **options)


def sinkhorn_stabilized_unbalanced(
    a: ArrayLike,
    b: ArrayLike,
    M: CostLike,
    reg: float,
    reg_m: MarginalPenalty,
    reg_type: str = "kl",
    c: ArrayLike | None = None,
    warmstart: ArrayLike | None = None,
    tau: float = 1e5,
    *args: Any,
    **options: Any,
) -> Any:
    """Call `sinkhorn_unbalanced` with method "sinkhorn_stabilized".

    The other arguments, return values and errors are those of `sinkhorn_unbalanced`. Every call of mapuot is stable at
    any reg; ``tau`` is checked and not needed.

    See Also
    --------
    sinkhorn_unbalanced : all parameters

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> mapuot.pot.sinkhorn_stabilized_unbalanced([0.5, 0.5], [0.5, 0.5], M, reg=1.0, reg_m=1.0).round(4)
    array([[0.3221, 0.1185],
           [0.1185, 0.3221]])
    """
    options["tau"] = tau
    return sinkhorn_unbalanced(a, b, M, reg, reg_m, "sinkhorn_stabilized", reg_type, c, warmstart, *args, **options)


def sinkhorn_unbalanced_translation_invariant(
    a: ArrayLike, b: ArrayLike, M: CostLike, reg: float, reg_m: MarginalPenalty, *args: Any, **options: Any
) -> Any:
    """Call `sinkhorn_unbalanced` with method "sinkhorn_translation_invariant".

    The other arguments follow in the order of `sinkhorn_unbalanced`, whose return values and errors it has. With two
    different reg_m the answer is right, where POT's own iteration ends elsewhere.

    See Also
    --------
    sinkhorn_unbalanced : all parameters

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> mapuot.pot.sinkhorn_unbalanced_translation_invariant([0.5, 0.5], [0.5, 0.5], M, reg=1.0, reg_m=1.0).round(4)
    array([[0.3221, 0.1185],
           [0.1185, 0.3221]])
    """
    return sinkhorn_unbalanced(a, b, M, reg, reg_m, "sinkhorn_translation_invariant", *args, **options)


def sinkhorn_unbalanced2(
    a: ArrayLike,
    b: ArrayLike,
    M: CostLike,
    reg: float,
    reg_m: MarginalPenalty,
    method: str | None = None,
    reg_type: str = "kl",
    c: ArrayLike | None = None,
    warmstart: ArrayLike | None = None,
    returnCost: str = "linear",
    numItermax: int = 1000,
    stopThr: float = 1e-6,
    verbose: bool = False,
    log: bool = False,
    *,
    tau: float | None = None,
) -> Any:
    """Compute the cost of the unbalanced entropic plan: ``ot.unbalanced.sinkhorn_unbalanced2`` on mapuot.

    The plan is never formed. All arguments but ``returnCost``, the log and the errors are those of
    `sinkhorn_unbalanced`.

    Parameters
    ----------
    returnCost : {"linear", "total"}
        ``<P, M>``, or the objective with its mass terms, which POT leaves out.

    Returns
    -------
    cost : float, or (k,) array for k targets
        In units of M times mass; gradients by PyTorch tensors as in `sinkhorn_unbalanced`.
    log : dict
        Only with ``log=True``.

    See Also
    --------
    sinkhorn_unbalanced, mapuot.torch.sinkhorn_loss

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> round(float(mapuot.pot.sinkhorn_unbalanced2([0.5, 0.5], [0.5, 0.5], M, reg=1.0, reg_m=1.0)), 4)
    0.237
    """
    if returnCost not in ("linear", "total"):
        raise ValueError(f"Unknown returnCost = {returnCost!r}: must be 'linear' or 'total'")
    call = Arguments(a, b, M, reg, reg_m, reg_type, c, warmstart, numItermax, stopThr, verbose)
    if returnCost == "total" and not log and call.has_sparse_total():
        return call.sparse_total()
    return call.run(method, tau).cost(returnCost, log)


def demand(reg: float, rho1: float, rho2: float, stop: float, name: str) -> float:
    """Return a certified error that is at most the error at which POT's method stops."""
    if not (rho1 > 0 and rho2 > 0):
        return stop  # `solve` refuses them
    rate = 1.0 / ((1.0 + reg / rho1) * (1.0 + reg / rho2))
    return max(stop * rate ** NAMED[name] * (FASTER if name == "sinkhorn_translation_invariant" else SURE), LEAST_TOL)


@dataclasses.dataclass
class Arguments:
    """The common arguments of all functions, as the user gave them."""

    a: Any
    b: Any
    M: Any
    reg: Any
    reg_m: Any
    reg_type: str | None = "kl"  # None: POT's choice, in fact "entropy" for several targets
    c: Any = None
    warmstart: Any = None
    max_iter: int = DEFAULT_ITER
    stop: float = STOP
    verbose: bool = False
    words: Words = WORDS  # the caller's names of max_iter and stop

    def run(self, method: str | None, tau: float | None = None) -> "Answers":
        """Solve; the answers have gradients if a, b or M requires one and it exists."""
        tensors = self.a, self.b, self.M
        if not differentiable(*tensors, self.reg_type, self.c):
            return self.solved(method, tau)
        from .tracked import TrackedAnswers  # noqa: PLC0415 - it loads torch

        with no_grad():
            answers = self.solved(method, tau)
        return TrackedAnswers(answers, *tensors)

    def has_sparse_total(self) -> bool:
        """Tell whether the objective, but no plan, has a gradient: M is a sparse tensor, and there is one target."""
        tensors = self.a, self.b, self.M
        plain = self.c is None and self.warmstart is None
        is_kl = lowered(self.reg_type) == "kl"
        return plain and is_kl and is_csr(self.M) and len(self.b.shape) == 1 and any(map(tracked, tensors))

    def sparse_total(self) -> Any:
        """Return the objective of a sparse M as a tensor with its gradient."""
        from ..torch import sinkhorn_loss  # noqa: PLC0415 - only for tensors

        a, b = (x if len(x) else None for x in (self.a, self.b))
        tol = as_float(self.stop, self.words.tol)
        passes = as_passes(self.max_iter, self.words.passes)
        limits = {"tol": tol if tol > 0 else LEAST_TOL, "max_passes": passes}
        return sinkhorn_loss(self.M, a, b, reg=self.reg, reg_m=self.reg_m, **limits)

    def solved(self, method: str | None, tau: float | None) -> "Answers":
        """Solve without gradients."""
        name = method_name(method)
        like = self.M
        if tau is not None:
            as_positive(tau, "tau")
            if name != "sinkhorn_stabilized":
                raise TypeError(f"tau is an argument of method 'sinkhorn_stabilized' only, not of {method!r}")
        for key in ("a", "b", "M", "reg_m", "c"):
            setattr(self, key, to_array(getattr(self, key), key))
        if isinstance(self.b, (list, tuple)):
            self.b = as_array(self.b, "b")
        several = np.ndim(self.b) == 2
        shape = np.shape(self.M)
        reference = self.reference(several)
        self.max_iter = as_passes(self.max_iter, self.words.passes)
        self.stop = as_float(self.stop, self.words.tol)
        if several and (0 in self.b.shape or self.b.shape[:1] != shape[1:]):
            raise ValueError(f"b must have shape (n,) or (n, k) for M of shape {shape}, got {self.b.shape}")
        with renamed(NAMES):
            options = {"reg": self.reg, "reg_m": self.reg_m, "reference": reference, **self.limits(name)}
            with muted():
                answers = self.answers(several, options, like)
        worst = max(answers.results, key=lambda result: float(result.error_bound))
        if self.stop > 0:
            warn_not_converged(worst, max(options["tol"], self.stop), self.words)
        return answers

    def limits(self, name: str | None) -> dict[str, Any]:
        """Return the solver's options for a method: tolerance and largest number of passes."""
        tol = self.stop if self.stop > 0 else LEAST_TOL
        passes = self.max_iter
        if name is not None:
            pair = as_pair(self.reg_m, "reg_m")
            reg = as_positive(self.reg, "reg")
            rho = [as_float(x, "reg_m") for x in pair]
            tol = demand(reg, min(rho), max(rho), max(tol, LEAST_TOL), name)
            passes = max(passes, DEFAULT_ITER)
        return {"tol": tol, "max_passes": passes, "backend": BACKEND, "progress": self.verbose}

    def reference(self, several: bool) -> Any:
        kind = lowered(self.reg_type)
        if kind is None:
            kind = "entropy" if several else "kl"
        if kind == "entropy":
            warn("reg_type='entropy': ones are taken for the reference measure c")
            return "uniform"
        if kind != "kl":
            raise ValueError(f"reg_type must be 'kl' or 'entropy', got {self.reg_type!r}")
        if self.c is None:
            return "product"
        return self.c

    def even_out(self) -> tuple[Any, Any]:
        """Return a scaled to the mass of b, and the log of the factor: a row and a number for each column of b.

        If both sides are balanced and their totals differ, POT's scalings diverge but its plan converges: it meets b,
        and its rows are in proportion to a.
        """
        given = self.a if np.size(self.a) else None
        none = np.zeros(np.shape(self.b)[1:])
        if not all(np.ndim(x) == 0 and as_float(x, "reg_m") == np.inf for x in as_pair(self.reg_m, "reg_m")):
            return given, none
        m, n = np.shape(self.M)
        a = as_array(self.a, "a")
        b = as_array(self.b, "b")
        a, b = (x.astype(np.float64) if x.size else np.full(k, 1 / k) for x, k in ((a, m), (b, n)))
        total = a.sum()
        asked = b.sum(0)
        uneven = abs(asked - total) > MASS_TOLERANCE * total
        if not (0 < total < np.inf and np.min(asked) > 0 and np.max(asked) < np.inf and np.any(uneven)):
            return given, none
        warn(
            f"a and b have masses {total:.6g} and {np.max(asked):.6g} and reg_m is inf, so that no plan meets both: "
            "this one meets b, with rows in proportion to a, as POT's iteration does; divide a and b by their sums",
            ConvergenceWarning,
        )
        growth = np.where(uneven, asked / total, 1.0)
        return growth[..., None] * a, np.log(growth)

    def answers(self, several: bool, options: dict[str, Any], like: Any) -> "Answers":
        """Solve; err is the certified error of every pass, or for ``several`` targets the largest final error."""
        start = self.warmstart
        a, growth = self.even_out()
        growth *= isinstance(options["reference"], str) and options["reference"] == "product"
        if start is not None:
            if not isinstance(start, (tuple, list)) or len(start) != 2:
                raise TypeError(f"warmstart must be a pair (log u, log v), got {type(start).__name__}")
            start = [to_array(x, "warmstart") for x in start]
        if not several:
            result = solve(self.M, a, self.b, warm_start=start, **options)
            return Answers([result], [stat.error for stat in result.trace], False, like, growth[None])
        if start is not None:  # one column serves all targets
            count = self.b.shape[1]
            start = [np.asarray(x, np.float64) for x in start]
            start = tuple(np.stack([x] * count if x.ndim < 2 else [*x.T[:count]]) for x in start)
        found = solve_batch(self.M, a, self.b.T, warm_start=start, **options)
        _ = found.cost  # all costs in one product
        return Answers(list(found), [float(found.error_bound.max())], True, like, growth)


def differentiable(a: Any, b: Any, M: Any, reg_type: Any, c: Any) -> bool:
    """Tell whether the answer can have gradients: dense tensors, one of which requires it, and c = a b^T."""
    plain = c is None and lowered(reg_type) == "kl"
    return plain and any(map(tracked, (a, b, M))) and all(map(is_dense_tensor, (a, b, M)))


def method_name(method: str | None) -> str | None:
    """Return the name in lower case; raise ValueError if POT does not know it."""
    if method is None:
        return None
    name: str = lowered(method)
    if name == "sinkhorn_reg_scaling":
        warn("Method not implemented yet. Running 'sinkhorn' instead")
        return "sinkhorn"
    if name not in NAMED:
        names = [*NAMED, "sinkhorn_reg_scaling"]
        raise ValueError(f"Unknown method {method!r}: must be one of {names} or None")
    return name


def warn_not_converged(result: Result, stop: float, words: Words) -> None:
    """Warn of a solve that did not reach ``stop``; ``words``: the caller's names of passes and stop."""
    if not (result.converged or result.error_bound <= stop):
        warn(not_converged(result, stop, words=words), ConvergenceWarning)
