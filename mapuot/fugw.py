"""Fused unbalanced Gromov-Wasserstein as an estimator, shaped like fugw's ``FUGW``.

As in fugw (Thual et al. 2022), an array of features has a row for each feature and a column for each point.
`mapuot.gromov` solves the problem. Tensors of PyTorch may be passed; the answers then are tensors on their device.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from .api.gromov import GromovResult, gromov
from .arrays import host, is_on_device
from .da import BaseEstimator, NotFittedError
from .errors import shown
from .penalties import F64
from .pot.arrays import give, library, to_array
from .problem.validate import as_choice
from .synonyms import hinted

__all__ = ["FUGW"]

# the subjects of messages of `gromov`, and of messages here
NAMES = {
    "X": "source_geometry", "Y": "target_geometry", "a": "source_weights", "b": "target_weights", "reg": "eps",
    "reg_m": "rho", "reg_m[0]": "rho[0]", "reg_m[1]": "rho[1]", "features[0]": "source_features",
    "features[1]": "target_features", "features": "source_features and target_features", "init": "init_plan",
    "a and b": "source_weights and target_weights", "reg and reg_m": "eps and rho",
}  # fmt: skip


class FUGW(BaseEstimator):  # type: ignore[misc]
    """Align two spaces by their geometries and by features that both share.

    Parameters
    ----------
    alpha : float
        Weight of the geometries beside the features, in (0, 1].
    rho : float or pair
        Price of marginals that differ from the weights, ``reg_m`` of `mapuot.gromov`; inf: balanced.
    eps : float
        Entropic regularisation, ``reg`` of `mapuot.gromov`.
    reg_mode : {"joint", "independent"}
        Entropy of the product of the plan with itself, or twice that of the plan.
    divergence : {"kl"}
        fugw also has "l2", squared norms in place of entropy and of the penalties of the marginals. Its steps are
        quadratic programs, not entropic problems; see the guide to spaces.
    metric : {"precomputed", "sqeuclidean", "euclidean", "geodesic"}
        What a geometry is: distances, points or a graph; see `mapuot.gromov`. fugw's own estimator takes distances.
    options : dict, optional
        Other arguments of `mapuot.gromov`, as ``{"init": "rows", "tol": 1e-3}``.

    Attributes
    ----------
    result_ : GromovResult
        Answer of `mapuot.gromov`, with its certificate.
    pi : (m, n) array
        The plan, formed on first use, in the library and on the device of the weights or features given to `fit`.
    loss : float
        Objective of the plan.

    See Also
    --------
    mapuot.gromov

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> places = rng.normal(size=(30, 3)) * [3.0, 2.0, 1.0]
    >>> signals = rng.normal(size=(5, 30))
    >>> model = mapuot.fugw.FUGW(alpha=0.5, rho=1.0, eps=0.01, metric="euclidean")
    >>> model = model.fit(signals, signals[:, ::-1], source_geometry=places, target_geometry=places[::-1])
    >>> bool(np.abs(model.transform(signals) - signals[:, ::-1]).max() < 0.1)
    True
    """

    @hinted
    def __init__(
        self, alpha: float = 0.5, rho: Any = 1.0, eps: float = 1e-2, reg_mode: str = "joint", divergence: str = "kl",
        metric: str = "precomputed", options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.alpha = alpha
        self.rho = rho
        self.eps = eps
        self.reg_mode = reg_mode
        self.divergence = divergence
        self.metric = metric
        self.options = options

    def fit(
        self, source_features: ArrayLike | None = None, target_features: ArrayLike | None = None,
        source_geometry: ArrayLike | None = None, target_geometry: ArrayLike | None = None,
        source_weights: ArrayLike | None = None, target_weights: ArrayLike | None = None,
        init_plan: ArrayLike | None = None,
    ) -> FUGW:  # fmt: skip
        """Find the plan between the spaces.

        Parameters
        ----------
        source_features, target_features : (k, m), (k, n) arrays, optional
            Features in rows. Without features alpha is 1.
        source_geometry, target_geometry : (m, m), (n, n) or (m, d), (n, e) arrays
            By ``metric``.
        source_weights, target_weights : (m,), (n,) arrays, optional
            Default: equal weights that add up to 1.
        init_plan : (m, n) array, optional
            Where to start.

        Raises
        ------
        ValueError
            Geometries are missing or have the wrong shapes; only one space has features; other words of reg_mode or
            divergence.
        """
        as_choice(self.reg_mode, "reg_mode", ("joint", "independent"))
        as_choice(self.divergence, "divergence", ("kl",))
        given = {
            "source_features": source_features, "target_features": target_features, "source_geometry": source_geometry,
            "target_geometry": target_geometry, "source_weights": source_weights, "target_weights": target_weights,
        }  # fmt: skip
        f, g, X, Y, a, b = (None if x is None else host(to_array(x, name)) for name, x in given.items())
        if X is None or Y is None:
            raise ValueError("source_geometry and target_geometry must be given")
        if (f is None) != (g is None):
            raise ValueError("source_features and target_features must both be given, or neither")
        options = dict(self.options or {})
        if f is not None and g is not None:
            options |= {"features": (np.atleast_2d(f).T, np.atleast_2d(g).T), "alpha": self.alpha}
        if init_plan is not None:
            options["init"] = host(to_array(init_plan, "init_plan"))
        arrays = [x for x in given.values() if x is not None]
        if any(map(is_on_device, arrays)):
            options.setdefault("backend", "cuda")
        self._like = next((x for x in arrays if library(x) == "torch"), arrays[0])
        prices = {"reg": self.eps, "reg_m": self.rho, "reg_mode": self.reg_mode}
        try:
            self.result_ = gromov(X, Y, a, b, **prices, metric=self.metric, **options)
        except (TypeError, ValueError) as error:
            subject = re.match(r"\S+( and \S+)?(?= must )", str(error))
            if subject is None or subject[0] not in NAMES:
                raise
            raise type(error)(NAMES[subject[0]] + str(error)[subject.end() :]) from error
        return self

    @property
    def pi(self) -> Any:
        return give(np.asarray(self._fitted.plan, np.float64), self._like)

    @property
    def loss(self) -> float:
        return self._fitted.value

    def transform(self, source_features: ArrayLike) -> Any:
        """Return the features (k, n) that the targets receive: the mean over the sources, weighted by the plan.

        One row of features may be given as a vector. Targets that receive nothing have NaN.
        """
        return self._moved(source_features, "cols", "source_features")

    def inverse_transform(self, target_features: ArrayLike) -> Any:
        """Return the features (k, m) that the sources receive from the targets."""
        return self._moved(target_features, "rows", "target_features")

    @property
    def _fitted(self) -> GromovResult:
        found: GromovResult | None = getattr(self, "result_", None)
        if found is None:
            raise NotFittedError("FUGW is not fitted: call fit first")
        return found

    def _moved(self, features: Any, side: Literal["rows", "cols"], name: str) -> Any:
        result = self._fitted
        values: F64 = np.asarray(host(to_array(features, name)), np.float64)
        count = result.problem.shape[side == "rows"]
        if values.ndim not in (1, 2) or values.shape[-1] != count:
            raise ValueError(f"{name} must have shape (k, {count}) or ({count},), got {shown(values.shape)}")
        moved = np.asarray(result.barycentric_map(np.atleast_2d(values).T, side)).T
        return give(moved.reshape(*values.shape[:-1], -1), features)
