"""Domain adaptation by unbalanced transport: an estimator shaped like ``ot.da.UnbalancedSinkhornTransport``.

Images of the samples come from ``Result.apply``; the plan is formed only if ``coupling_`` is read.
Out-of-sample map: Ferradans, Papadakis, Peyre, Aujol 2014.
"""

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.spatial.distance import cdist

from .annotations import MarginalPenalty
from .answer.result import Result
from .errors import InfeasibleError, ScalingWarning, warn
from .penalties import F64
from .pot.sinkhorn import Arguments
from .problem.clouds import PointCloud
from .problem.labels import as_labels, is_missing
from .problem.metrics import METRICS
from .problem.scale import scale_of
from .problem.settings import POINTS
from .problem.validate import as_array, as_choice, as_count, as_float, as_positive, as_rho, odd_units
from .status import Words
from .synonyms import hinted

try:
    from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
    from sklearn.exceptions import NotFittedError
except ImportError:  # scikit-learn is optional
    NotFittedError = AttributeError

    class BaseEstimator:  # type: ignore[no-redef]
        """Stand-in without methods: the estimator has its own."""

        def __init_subclass__(cls, auto_wrap_output_keys: Any = None) -> None:
            super().__init_subclass__()

    class TransformerMixin:  # type: ignore[no-redef]
        """Stand-in without methods."""

    class OneToOneFeatureMixin:  # type: ignore[no-redef]
        """Stand-in without methods."""


__all__ = ["TransportOnto", "UnbalancedSinkhornTransport"]


NEVER_FORMED = tuple(name for name, metric in METRICS.items() if metric.reach == np.inf and not metric.product)
MISSING_LABEL = -1  # POT's label of an unlabelled sample


# not wrapped for set_output: the wrapper takes no Xs= by name, as POT's callers write it
class UnbalancedSinkhornTransport(TransformerMixin, BaseEstimator, auto_wrap_output_keys=None):  # type: ignore[misc, call-arg]
    """Move samples of a source domain onto a target domain by unbalanced entropic transport.

    It has the interface of ``ot.da.UnbalancedSinkhornTransport``. By default it iterates until convergence; POT stops
    after ten iterations.

    Parameters
    ----------
    reg_e, reg_m : float > 0; float, inf, or anything of length 1 or 2
        Entropic regularisation and marginal penalty, in units of the (normalised) cost; inf is the balanced constraint.
    method, max_iter, tol : str, optional; int; float
        As ``method``, ``numItermax`` and ``stopThr`` of `mapuot.pot.sinkhorn_unbalanced`.
    verbose, log : bool
        Show a progress bar on standard error; keep the solver's log in ``log_``.
    metric, norm : str or callable; {None, "median", "max", "log", "loglog"}
        metric: a metric of `scipy.spatial.distance.cdist`. norm: divide the cost by its median or maximum, or apply
        ``log(1 + M)`` once or twice.
    distribution_estimation : callable, optional
        ``f(X)`` returns the masses (n_samples,). Default: equal masses that add up to 1.
    out_of_sample_map : {"ferradans", "entropic"}
        "ferradans" moves a new sample like its nearest fitted sample. "entropic" moves it to its mean target under the
        potentials (`mapuot.Result.map`), a smooth map; it needs a metric of `mapuot.PointCloud`, without labels, method
        and logarithmic norm.
    limit_max : float
        With labels on both sides, the cost between unequal classes is this times the largest cost; inf forbids it.

    Attributes
    ----------
    result_ : mapuot.Result
        The answer of the solver.
    coupling_, cost_ : (n_source, n_target) arrays
        The plan, formed on first use, and the cost. Beyond 2^27 entries only the points are kept and the cost is formed
        on first use, if the metric is one of `mapuot.PointCloud` other than "wfr", without labels, norm and method.
    xs_, xt_, mu_s, mu_t : (n_source, d), (n_target, d), (n_source,), (n_target,) arrays
        The samples and their masses.
    log_, n_features_in_, n_iter_ : dict, int, int
        The log of `mapuot.pot.sinkhorn_unbalanced`, if ``log`` is set; the number of features, and of passes.

    See Also
    --------
    TransportOnto : scikit-learn's interface, for pipelines

    Examples
    --------
    >>> import numpy as np
    >>> from mapuot.da import UnbalancedSinkhornTransport
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.normal(size=(200, 2)), rng.normal(size=(150, 2)) + [3, 0]
    >>> moved = UnbalancedSinkhornTransport(reg_e=0.1, reg_m=100.0).fit_transform(x, Xt=y)
    >>> bool(abs(moved.mean(0) - y.mean(0)).max() < 0.3)
    True
    """

    @hinted
    def __init__(
        self, reg_e: float = 1.0, reg_m: MarginalPenalty = 0.1, method: str | None = None, max_iter: int = 10_000,
        tol: float = 1e-6, verbose: bool = False, log: bool = False,
        metric: str | Callable[[Any, Any], float] = "sqeuclidean", norm: str | None = None,
        distribution_estimation: Callable[[Any], Any] | None = None, out_of_sample_map: str = "ferradans",
        limit_max: float = 10,
    ) -> None:  # fmt: skip
        self.reg_e, self.reg_m, self.method, self.max_iter, self.tol = reg_e, reg_m, method, max_iter, tol
        self.verbose, self.log, self.metric, self.norm = verbose, log, metric, norm
        self.distribution_estimation, self.limit_max = distribution_estimation, limit_max
        self.out_of_sample_map = out_of_sample_map

    def fit(
        self, Xs: ArrayLike, ys: ArrayLike | None = None, Xt: ArrayLike | None = None, yt: ArrayLike | None = None
    ) -> "UnbalancedSinkhornTransport":
        """Solve the transport from Xs, (n_source, d), to Xt, (n_target, d).

        ys and yt are class labels; -1, NaN and None mean unknown. They are used only if both are given.

        Warns
        -----
        ConvergenceWarning
            ``tol`` was not reached in ``max_iter``.
        ScalingWarning
            Less than 1e-4 of the mass moves: the costs are far above ``reg_m`` (see ``norm``).
        UserWarning
            Both sides have the labels -1 and one other: -1 means unknown here, but may be meant as a class.

        Raises
        ------
        InfeasibleError
            ``limit_max`` is inf, and the labels leave a balanced sample without a partner of its class.
        """
        as_choice(self.out_of_sample_map, "out_of_sample_map", ("ferradans", "entropic"))
        Xs = as_samples(Xs, "Xs")
        if Xt is None:
            raise ValueError("Xt must be given: the samples of the target domain")
        Xt = as_samples(Xt, "Xt")
        if Xs.shape[1] != Xt.shape[1]:
            raise ValueError(f"Xs has {Xs.shape[1]} features, but Xt has {Xt.shape[1]}")
        if ys is not None:
            ys = as_labels(ys, len(Xs), "ys", may_lack=True)
        if yt is not None:
            yt = as_labels(yt, len(Xt), "yt", may_lack=True)
        labels = None if ys is None or yt is None else (ys, yt)
        cost = self._costs(Xs, Xt, labels)
        estimate = self.distribution_estimation or (lambda X: np.full(len(X), 1.0 / len(X)))
        if not callable(estimate):
            raise TypeError(f"distribution_estimation must be callable, got {estimate!r}")
        self.mu_s_ = estimate(Xs)
        self.mu_t_ = estimate(Xt)
        call = Arguments(self.mu_s_, self.mu_t_, cost, as_positive(self.reg_e, "reg_e"), self.reg_m)
        call.max_iter = as_count(self.max_iter, "max_iter")
        call.verbose = self.verbose
        call.stop = as_float(self.tol, "tol")
        call.words = Words("max_iter")
        try:
            answers = call.run(self.method)
        except InfeasibleError as error:
            if labels is None or self.limit_max != np.inf:
                raise
            raise InfeasibleError(f"ys and yt forbid too many pairs by limit_max=inf: {error}") from error
        self.result_: Result = answers.results[0]
        problem, mass = self.result_.problem, self.result_.mass
        masses = problem.rows.mass, problem.cols.mass
        odd = odd_units(problem, mass, *masses, scaling="norm='median'")
        if odd:
            warnings.warn(odd, ScalingWarning, stacklevel=2)
        self.costs_, self.xs_, self.xt_ = cost, Xs, Xt
        self.n_features_in_ = Xs.shape[1]
        self.n_iter_ = self.result_.n_passes
        if self.log:
            self.log_ = answers.log()
        else:
            self.log_ = {}
        return self

    def _costs(self, Xs: F64, Xt: F64, labels: Any) -> Any:
        """Return the cost as a matrix, or as points if the matrix would be large and is not needed."""
        m = len(Xs)
        n = len(Xt)
        metric: Any = self.metric
        if self.out_of_sample_map == "entropic":
            if labels is not None or self.method is not None or self.metric not in NEVER_FORMED:
                raise ValueError(f"out_of_sample_map must be 'ferradans' but for a metric of {NEVER_FORMED} alone")
            cloud = PointCloud(Xs, Xt, metric)
            scale = 1.0
            if self.norm is not None:
                scale /= scale_of([cloud], as_choice(self.norm, "norm", ("median", "max")))
            return PointCloud(Xs, Xt, metric, scale)
        points = labels is None and self.norm is None and self.method is None and self.metric in NEVER_FORMED
        if points and m * n > POINTS.most_formed:
            return PointCloud(Xs, Xt, metric)
        try:
            ours = self.metric in NEVER_FORMED and not METRICS[metric].is_scipys(metric)
            if ours:
                cost = np.asarray(PointCloud(Xs, Xt, metric))
            else:
                cost = cdist(Xs, Xt, self.metric)
            cost = normalised(cost, self.norm)
            if labels is not None:
                separate_classes(cost, labels[0], labels[1], self.limit_max)
        except MemoryError as error:
            raise MemoryError(
                f"the costs of {m} x {n} samples take {m * n * 8 / 2**30:.3g} GiB and do not fit: without labels, norm "
                f"and method, and with metric one of {NEVER_FORMED}, they are never formed; else fit fewer samples, "
                "transform moves the others"
            ) from error
        return cost

    @property
    def cost_(self) -> Any:
        """Cost matrix of the fitted plan."""
        self._fitted()
        return np.asarray(self.costs_)

    @property
    def coupling_(self) -> Any:
        """Plan between the fitted samples."""
        return self._fitted().plan

    mu_s = property(attrgetter("mu_s_"))  # mu_s and mu_t: the names of POT
    mu_t = property(attrgetter("mu_t_"))

    def fit_transform(
        self, Xs: ArrayLike, ys: ArrayLike | None = None, Xt: ArrayLike | None = None, yt: ArrayLike | None = None
    ) -> F64:
        """Fit, and return the images of Xs."""
        return self.fit(Xs, ys, Xt, yt).transform(Xs)

    def transform(
        self,
        Xs: ArrayLike,
        ys: ArrayLike | None = None,
        Xt: ArrayLike | None = None,
        yt: ArrayLike | None = None,
        batch_size: int = 128,
    ) -> F64:
        """Return the images of source samples, the barycentres of their targets: (n, d).

        The fitted samples map exactly, others move as their nearest fitted sample does. A sample that sends
        no mass stays where it is (POT moves it to the origin). ys, Xt, yt are not used; ``batch_size`` new
        samples are compared with the fitted ones at a time.
        """
        return self._extended(as_samples(Xs, "Xs"), True, batch_size)

    def inverse_transform(
        self,
        Xs: ArrayLike | None = None,
        ys: ArrayLike | None = None,
        Xt: ArrayLike | None = None,
        yt: ArrayLike | None = None,
        batch_size: int = 128,
    ) -> F64:
        """Return the images of target samples Xt in the source domain, as `transform` the other way: (n, d)."""
        if Xt is None:
            raise ValueError("Xt must be given: the target samples to map back")
        return self._extended(as_samples(Xt, "Xt"), False, batch_size)

    def transform_labels(self, ys: ArrayLike) -> F64:
        """Return the class proportions that each target receives from labels ys of the sources, (n_target, classes).

        Classes are ``np.unique(ys)``; zeros for a target that receives no mass.
        """
        return self._fitted().push(as_labels(ys, len(self.xs_), "ys"))[1]

    def inverse_transform_labels(self, yt: ArrayLike) -> F64:
        """Return the class proportions that each source sends to labels yt of the targets, (n_source, classes)."""
        return self._fitted().pull(as_labels(yt, len(self.xt_), "yt"))[1]

    def _fitted(self) -> Result:
        if not hasattr(self, "result_"):
            raise NotFittedError(f"This {type(self).__name__} is not fitted yet: call fit with Xs and Xt first")
        return self.result_

    def _extended(self, X: F64, rows: bool, batch_size: int) -> F64:
        """Move samples of one side: fitted samples to their images, new samples by ``out_of_sample_map``."""
        result = self._fitted()
        fitted = self.xs_ if rows else self.xt_
        if X.shape[1] != fitted.shape[1]:
            wanted = f"{type(self).__name__} is expecting {fitted.shape[1]} features as input"
            raise ValueError(f"X has {X.shape[1]} features, but {wanted}")
        if self.out_of_sample_map == "entropic":
            image = result.map(X, side="rows" if rows else "cols")
            return np.where(np.isfinite(image), image, X)
        if rows:
            image = result.barycentric_map(self.xt_)
        else:
            image = result.barycentric_map(self.xs_, "cols")
        image = np.asarray(np.where(np.isfinite(image), image, fitted))
        if X.shape == fitted.shape and np.array_equal(X, fitted):
            return image
        moved = np.empty_like(X)
        size = as_count(batch_size, "batch_size")
        for i in (slice(k, k + size) for k in range(0, len(X), size)):
            nearest = cdist(X[i], fitted, "sqeuclidean").argmin(axis=1)
            moved[i] = X[i] + (image - fitted)[nearest]
        return moved


class TransportOnto(OneToOneFeatureMixin, UnbalancedSinkhornTransport, auto_wrap_output_keys=("transform",)):  # type: ignore[misc, call-arg]
    """Move samples onto a target that is a parameter: an estimator for pipelines, searches and ``set_output``.

    It is `UnbalancedSinkhornTransport` with the methods that scikit-learn asks for: ``fit(X)``, ``transform(X)`` and
    ``inverse_transform(X)``.

    Parameters
    ----------
    target : (n_target, d) array, optional
        The samples to move onto. Default: the samples of ``fit``; each then moves to the mean of its neighbours.
    reg_e, reg_m, method, max_iter, tol, metric, norm, out_of_sample_map
        As in `UnbalancedSinkhornTransport`; the attributes are the same, too.

    Attributes
    ----------
    feature_names_in_ : (d,) array of str
        The names of the columns, if X is a table with names.

    See Also
    --------
    UnbalancedSinkhornTransport : POT's interface

    Examples
    --------
    >>> import numpy as np
    >>> from mapuot.da import TransportOnto
    >>> rng = np.random.default_rng(0)
    >>> target = rng.normal(size=(50, 2)) + [3, 0]
    >>> TransportOnto(target, reg_e=0.1).fit_transform(rng.normal(size=(40, 2))).shape
    (40, 2)
    """

    @hinted
    def __init__(
        self,
        target: ArrayLike | None = None,
        reg_e: float = 1.0,
        reg_m: MarginalPenalty = 0.1,
        method: str | None = None,
        max_iter: int = 10_000,
        tol: float = 1e-6,
        metric: str | Callable[[Any, Any], float] = "sqeuclidean",
        norm: str | None = None,
        out_of_sample_map: str = "ferradans",
    ) -> None:
        super().__init__(reg_e, reg_m, method, max_iter, tol, metric=metric, norm=norm)
        self.out_of_sample_map = out_of_sample_map
        self.target = target

    def fit(self, X: ArrayLike, y: ArrayLike | None = None) -> "TransportOnto":  # type: ignore[override]
        """Solve the transport from X, (n_samples, d), to the target; y is not used."""
        super().fit(X, None, X if self.target is None else self.target)
        columns = getattr(X, "columns", None)
        self.__dict__.pop("feature_names_in_", None)
        if columns is not None and all(isinstance(name, str) for name in columns):
            self.feature_names_in_ = np.asarray(columns, dtype=object)
        return self

    def fit_transform(self, X: ArrayLike, y: ArrayLike | None = None) -> Any:  # type: ignore[override]
        """Fit, and return the images of X."""
        return self.fit(X, y).transform(X)

    def transform(self, X: ArrayLike) -> Any:  # type: ignore[override]
        """Return the images of samples, (n_samples, d), as `UnbalancedSinkhornTransport.transform`."""
        return super().transform(self._named(X))

    def inverse_transform(self, X: ArrayLike) -> Any:  # type: ignore[override]
        """Return the images of target samples in the source domain, (n_samples, d)."""
        return super().inverse_transform(Xt=X)

    def _named(self, X: Any) -> Any:
        """Check that X has the columns of ``fit``, and return it."""
        self._fitted()
        try:
            from sklearn.utils.validation import _check_feature_names  # noqa: PLC0415 - optional, of 1.6 and later
        except ImportError:
            return X
        _check_feature_names(self, X, reset=False)
        return X


def as_samples(X: Any, name: str) -> F64:
    """Return a finite (n_samples, n_features) float64 matrix; errors have scikit-learn's wording."""
    if sparse.issparse(X):
        raise TypeError(f"{name}: sparse input is not supported, pass a dense array")
    X = as_array(X, name)
    if X.dtype.kind == "c":
        raise ValueError(f"{name}: Complex data not supported")
    if X.ndim != 2:
        raise ValueError(f"{name} must be a 2-D array, got shape {X.shape}. Reshape your data")
    for axis, count in enumerate(("sample", "feature")):
        if X.shape[axis] == 0:
            raise ValueError(f"{name}: 0 {count}(s) (shape={X.shape}) while a minimum of 1 is required.")
    try:
        samples: F64 = np.ascontiguousarray(X, dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"{name} must hold real numbers: {error}") from error
    if not np.isfinite(samples).all():
        i, j = np.argwhere(~np.isfinite(samples))[0]
        raise ValueError(f"{name} must not hold NaN or inf, got {samples[i, j]} in sample {i}, feature {j}")
    return samples


def normalised(M: F64, norm: str | None) -> F64:
    if norm is None:
        return M
    if norm in ("median", "max"):
        return M / as_positive(np.median(M) if norm == "median" else M.max(), f"the {norm} of the costs")
    if norm in ("log", "loglog"):
        M = np.log1p(M)
        if norm == "log":
            return M
        return np.log1p(M)
    raise ValueError(f"norm must be None, 'median', 'max', 'log' or 'loglog', got {norm!r}")


def separate_classes(M: F64, ys: Any, yt: Any, limit_max: float) -> None:
    """Increase, in place, the cost between samples of different known classes."""
    labelled_s = is_labelled(ys)
    labelled_t = is_labelled(yt)
    limit = as_rho(limit_max, "limit_max")
    if limit != np.inf:  # costs may all be 0
        limit = limit * M.max()
    check_classes(ys, yt, labelled_s, labelled_t)
    apart = np.zeros(M.shape, bool)
    apart[np.ix_(labelled_s, labelled_t)] = ys[labelled_s][:, None] != yt[labelled_t]
    if limit == np.inf and apart.all():
        raise InfeasibleError("ys and yt must share a class, or have samples without label, where limit_max is inf")
    np.maximum(M, limit, out=M, where=apart)


def is_labelled(y: Any) -> Any:
    """Tell which labels are known: neither -1, as in POT, nor NaN, None or pandas' NA."""
    labelled = ~is_missing(y)
    labelled[labelled] = y[labelled] != MISSING_LABEL
    return labelled


def check_classes(ys: Any, yt: Any, labelled_s: Any, labelled_t: Any) -> None:
    """Warn if -1 looks like one of two classes: it means unknown."""
    classes = {*ys[labelled_s].tolist(), *yt[labelled_t].tolist()}
    marked = all(not labelled.all() and not is_missing(y).any() for y, labelled in ((ys, labelled_s), (yt, labelled_t)))
    if marked and len(classes) == 1:
        (other,) = classes
        warn(f"ys and yt hold {other!r} and -1 only, and -1 means unknown: give the class another name if it is one")
