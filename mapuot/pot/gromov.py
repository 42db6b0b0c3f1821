"""POT's entropic Gromov-Wasserstein functions (``ot.gromov``) on `mapuot.gromov`: the same arguments and return types.

POT minimises ``S(T) + alpha <T, M> + ...`` where unbalanced, which is `mapuot.gromov` with the share 1 / (1 + alpha) of
the structures and everything else times this share; its balanced functions have ``alpha S(T) + (1 - alpha) <T, M>`` and
an epsilon of twice a reg.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import CostLike
from ..api.gromov import gromov
from ..arrays import host
from ..errors import ConvergenceWarning, muted, warn
from ..problem.symmetry import differs
from ..problem.validate import as_choice, as_float
from ..spaces.answer import GromovResult
from .arrays import give, to_array, tracked

LEAST_TOL, INNER_TOL = 1e-6, 1e-8  # of the plan: a change, the root of a rounded number, is accurate to 1e-7


def fused_unbalanced_gromov_wasserstein(
    Cx: ArrayLike,
    Cy: ArrayLike,
    wx: ArrayLike | None = None,
    wy: ArrayLike | None = None,
    reg_marginals: ArrayLike = 10,
    epsilon: float = 0,
    divergence: str = "kl",
    unbalanced_solver: Any = "mm",
    alpha: float = 0,
    M: CostLike | None = None,
    init_duals: ArrayLike | None = None,
    init_pi: ArrayLike | None = None,
    max_iter: int = 100,
    tol: float = 1e-7,
    max_iter_ot: int = 500,
    tol_ot: float = 1e-7,
    log: bool = False,
    verbose: bool = False,
) -> Any:
    """Compute a fused unbalanced Gromov-Wasserstein plan: ``ot.gromov.fused_unbalanced_gromov_wasserstein``.

    ``sum (Cx_ik - Cy_jl)^2 P_ij P_kl + alpha <P, M> + reg_marginals[0] KL(P1 x P1 | wx x wx)
    + reg_marginals[1] KL(P^T 1 x P^T 1 | wy x wy) + epsilon KL(P x P | wx wy^T x wx wy^T)``

    Parameters
    ----------
    Cx, Cy : (m, m), (n, n) arrays
        Symmetric similarities within both spaces.
    wx, wy, reg_marginals
        Masses and penalties, as in `mapuot.gromov`.
    epsilon : float
        Entropic regularisation; 0: none, by the proximal steps of `mapuot.gromov`.
    divergence : {"kl"}
        POT's own function also has "l2".
    unbalanced_solver, init_duals, max_iter_ot, tol_ot
        Accepted and not used: `mapuot.solve` solves and certifies each step.
    alpha, M : float, (m, n) array
        Weight and costs of the features.
    init_pi : (m, n) array, optional
        Where to start. By default the best of several starts is kept; wx wy^T is one of them.
    max_iter, tol : int, float
        Largest number of steps; the change of the plan at which to stop, at least 1e-6 of its mass.
    log, verbose : bool
        log: return the log, too. verbose is not used.

    Returns
    -------
    pi_samp, pi_feat : (m, n) arrays in Cx's dtype
        The plan, twice: POT alternates between two, which end equal.
    log : dict
        Only with ``log=True``. error: changes of the plan. duals: potentials of the last step. linear_cost: the
        term of the distances. fugw_cost: the objective. result: the `GromovResult`.

    Warns
    -----
    ConvergenceWarning
        The plan still changes, or the last step is not certified.

    See Also
    --------
    mapuot.gromov

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> C = np.abs(np.arange(4.0)[:, None] - np.arange(4.0)) ** 1.5
    >>> plan, _ = mapuot.pot.fused_unbalanced_gromov_wasserstein(C, C, reg_marginals=5.0, epsilon=0.1)
    >>> bool(abs(plan.sum() - 1) < 0.1)
    True
    """
    as_choice(divergence, "divergence", ("kl",))
    if M is not None:
        share = 1.0 / (1.0 + as_float(alpha, "alpha"))
    else:
        share = 1.0
    if isinstance(reg_marginals, (tuple, list)):
        pair = reg_marginals
    else:
        pair = (reg_marginals,)
    rho = [share * as_float(x, "reg_marginals") for x in pair]
    result = answer(
        Cx, Cy, wx, wy, M, share, init_pi, max_iter, tol, "fused_unbalanced_gromov_wasserstein",
        reg=share * as_float(epsilon, "epsilon"), reg_m=rho,
    )  # fmt: skip
    plan = given_back(result.plan, Cx)
    if not log:
        return plan, plan
    told: dict[str, Any] = {"error": [step.change * step.mass for step in result.steps]}
    told["linear_cost"] = result.parts.structure / share
    duals = tuple(given_back(z / result.mass / share, Cx) for z in result.potentials)
    return plan, plan, told | {"duals": duals, "fugw_cost": result.value / share, "result": result}


def fused_unbalanced_gromov_wasserstein2(*args: Any, **kwargs: Any) -> Any:
    """Compute the objective of `fused_unbalanced_gromov_wasserstein`: ``ot.gromov.fused_unbalanced...2``.

    Parameters
    ----------
    *args, **kwargs
        As in `fused_unbalanced_gromov_wasserstein`.

    Returns
    -------
    fugw_cost : float
    log : dict
        Only with ``log=True``.

    See Also
    --------
    fused_unbalanced_gromov_wasserstein

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> C = np.abs(np.arange(4.0)[:, None] - np.arange(4.0)) ** 1.5
    >>> mapuot.pot.fused_unbalanced_gromov_wasserstein2(C, C, reg_marginals=5.0, epsilon=0.1) > 0
    True
    """
    given = inspect.signature(fused_unbalanced_gromov_wasserstein).bind(*args, **kwargs).arguments
    *_, told = fused_unbalanced_gromov_wasserstein(**given | {"log": True})
    if given.get("log"):
        return told["fugw_cost"], told
    return told["fugw_cost"]


def entropic_gromov_wasserstein(
    C1: ArrayLike,
    C2: ArrayLike,
    p: ArrayLike | None = None,
    q: ArrayLike | None = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = None,
    G0: ArrayLike | None = None,
    max_iter: int = 1000,
    tol: float = 1e-9,
    solver: str = "PGD",
    warmstart: bool = False,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """Compute a balanced entropic Gromov-Wasserstein plan: ``ot.gromov.entropic_gromov_wasserstein``.

    ``sum (C1_ik - C2_jl)^2 T_ij T_kl - epsilon H(T)`` between the marginals p and q.

    Parameters
    ----------
    C1, C2, p, q
        Symmetric similarities and masses.
    loss_fun, symmetric, solver : {"square_loss"}, {None, True}, {"PGD"}
        POT's own function also has "kl_loss", asymmetric similarities and proximal steps.
    epsilon : float
        Entropic regularisation, > 0: twice the reg of `mapuot.gromov`.
    G0 : (m, n) array, optional
        Where to start. By default the best of several starts is kept; p q^T is one of them.
    max_iter, tol : int, float
        Largest number of steps; the change of the plan at which to stop, at least 1e-6.
    warmstart, verbose : bool
        Accepted and not used.
    log : bool
        Return the log, too.

    Returns
    -------
    T : (m, n) array in C1's dtype
    log : dict
        Only with ``log=True``. err: changes of the plan. gw_dist: the loss without entropy. result: the `GromovResult`.

    See Also
    --------
    mapuot.gromov

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> C = np.abs(np.arange(4.0)[:, None] - np.arange(4.0)) ** 1.5
    >>> mapuot.pot.entropic_gromov_wasserstein(C, C, epsilon=0.1).shape
    (4, 4)
    """
    return balanced(None, C1, C2, p, q, loss_fun, epsilon, symmetric, 1.0, G0, max_iter, tol, solver, log)


def entropic_fused_gromov_wasserstein(
    M: CostLike,
    C1: ArrayLike,
    C2: ArrayLike,
    p: ArrayLike | None = None,
    q: ArrayLike | None = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = None,
    alpha: float = 0.5,
    G0: ArrayLike | None = None,
    max_iter: int = 1000,
    tol: float = 1e-9,
    solver: str = "PGD",
    warmstart: bool = False,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """Compute a balanced fused plan: ``ot.gromov.entropic_fused_gromov_wasserstein``.

    ``alpha sum (C1_ik - C2_jl)^2 T_ij T_kl + (1 - alpha) <T, M> - epsilon H(T)`` between the marginals p and q.

    Parameters
    ----------
    M, alpha : (m, n) array, float
        Costs of the features, and the share of the structures, in (0, 1].
    C1, C2, p, q, loss_fun, epsilon, symmetric, G0, max_iter, tol, solver, warmstart, verbose, log
        As in `entropic_gromov_wasserstein`; the log has fgw_dist.

    Returns
    -------
    T : (m, n) array in C1's dtype
    log : dict
        Only with ``log=True``.

    See Also
    --------
    entropic_gromov_wasserstein

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> C = np.abs(np.arange(4.0)[:, None] - np.arange(4.0)) ** 1.5
    >>> plan = mapuot.pot.entropic_fused_gromov_wasserstein(C, C, C, epsilon=0.1)
    >>> plan.argmax(1)
    array([0, 1, 2, 3])
    """
    return balanced(M, C1, C2, p, q, loss_fun, epsilon, symmetric, alpha, G0, max_iter, tol, solver, log)


def entropic_gromov_wasserstein2(*args: Any, **kwargs: Any) -> Any:
    """Compute the loss of `entropic_gromov_wasserstein` without entropy: ``ot.gromov.entropic_gromov_wasserstein2``.

    Parameters
    ----------
    *args, **kwargs
        As in `entropic_gromov_wasserstein`.

    Returns
    -------
    gw_dist : float
    log : dict
        Only with ``log=True``; T: the plan.

    See Also
    --------
    entropic_gromov_wasserstein

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> C = np.abs(np.arange(4.0)[:, None] - np.arange(4.0)) ** 1.5
    >>> mapuot.pot.entropic_gromov_wasserstein2(C, C, epsilon=0.1) < 0.1
    True
    """
    return loss_of(entropic_gromov_wasserstein, "gw_dist", args, kwargs)


def entropic_fused_gromov_wasserstein2(*args: Any, **kwargs: Any) -> Any:
    """Compute the loss of `entropic_fused_gromov_wasserstein` without entropy.

    Parameters
    ----------
    *args, **kwargs
        As in `entropic_fused_gromov_wasserstein`.

    Returns
    -------
    fgw_dist : float
    log : dict
        Only with ``log=True``; T: the plan.

    See Also
    --------
    entropic_fused_gromov_wasserstein

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> C = np.abs(np.arange(4.0)[:, None] - np.arange(4.0)) ** 1.5
    >>> mapuot.pot.entropic_fused_gromov_wasserstein2(C, C, C, epsilon=0.1) < 0.1
    True
    """
    return loss_of(entropic_fused_gromov_wasserstein, "fgw_dist", args, kwargs)


def loss_of(function: Callable[..., Any], key: str, args: Any, kwargs: Any) -> Any:
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    plan, told = function(**given | {"log": True})
    if given.get("log"):
        return told[key], told | {"T": plan}
    return told[key]


def balanced(
    M: Any, C1: Any, C2: Any, p: Any, q: Any, loss_fun: str, epsilon: float, symmetric: Any, alpha: float, G0: Any,
    max_iter: int, tol: float, solver: str, log: bool,
) -> Any:  # fmt: skip
    """Answer POT's balanced functions, fused if M is given."""
    as_choice(loss_fun, "loss_fun", ("square_loss",))
    as_choice(solver, "solver", ("PGD",))
    if symmetric not in (None, True):
        raise ValueError("symmetric must be None or True: asymmetric similarities are not implemented")
    if M is None:
        name = "entropic_gromov_wasserstein"
    else:
        name = "entropic_fused_gromov_wasserstein"
    result = answer(
        C1, C2, p, q, M, alpha, G0, max_iter, tol, name, reg=0.5 * as_float(epsilon, "epsilon"), reg_m=np.inf
    )
    plan = given_back(result.plan, C1)
    if not log:
        return plan
    loss = result.parts.structure + result.parts.features
    key = "gw_dist" if M is None else "fgw_dist"
    return plan, {"err": [step.change for step in result.steps], key: loss, "result": result}


def answer(
    X: Any, Y: Any, a: Any, b: Any, M: Any, share: float, start: Any, max_iter: int, tol: float, name: str,
    **prices: Any,
) -> GromovResult:  # fmt: skip
    """Solve one of POT's problems, and warn if the plan still changes."""
    X, Y, a, b, M, start = (
        x if x is None else host(to_array(x, label))
        for x, label in zip((X, Y, a, b, M, start), ("C1", "C2", "p", "q", "M", "G0"), strict=True)
    )
    fused: dict[str, Any] = {}
    if M is not None:
        fused = {"features": M, "alpha": share}
    with muted():
        result = gromov(
            X, Y, a, b, metric="precomputed", init="auto" if start is None else start, max_iter=int(max_iter),
            tol=max(as_float(tol, "tol"), LEAST_TOL), inner_tol=INNER_TOL, **fused, **prices,
        )  # fmt: skip
    if not (result.settled and result.converged):
        text = f"the plan still changes by {result.steps[-1].change:.1e} after {len(result.steps)} steps"
        warn(f"{name} not converged: {text}; raise max_iter or epsilon", ConvergenceWarning)
    return result


def given_back(x: Any, like: Any) -> Any:
    """Return x in the dtype and the array library of an argument."""
    dtype = str(getattr(like, "dtype", "float64")).rpartition(".")[2]
    return give(np.asarray(x).astype(dtype if dtype.startswith("float") else "float64", copy=False), like)


OURS = {function.__name__: function for function in (
    fused_unbalanced_gromov_wasserstein, fused_unbalanced_gromov_wasserstein2, entropic_gromov_wasserstein,
    entropic_gromov_wasserstein2, entropic_fused_gromov_wasserstein, entropic_fused_gromov_wasserstein2,
)}  # fmt: skip
SERVED = {"divergence": "kl", "loss_fun": "square_loss", "solver": "PGD"}


def serves(given: dict[str, Any]) -> bool:
    """Tell whether `mapuot.gromov` can solve the problem of this call."""
    if any(given.get(name, value) != value for name, value in SERVED.items()) or not given.get("epsilon", 0.1) > 0:
        return False
    if given.get("symmetric") is False or any(map(tracked, given.values())):
        return False
    pair = [given[x] for x in ("Cx", "Cy", "C1", "C2") if x in given]
    return all(not differs(x, x.swapaxes(-1, -2)).any() for x in (host(to_array(x, "C")) for x in pair))


def of_gromov(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the stand-in of one of POT's functions; POT solves the problems that `mapuot.gromov` cannot."""
    ours = OURS[original.__name__]
    signature = inspect.signature(original)
    parameters = inspect.signature(OURS[original.__name__.removesuffix("2")]).parameters

    @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__"))
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {name: x for name, x in bound.arguments.items() if name in parameters}
        if serves(given):
            return ours(**given)
        return original(*args, **kwargs)

    return call
