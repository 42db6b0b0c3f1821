"""SYNONYMS: the words of other libraries for our arguments and attributes, for hints in messages.

An unknown keyword argument, an unknown attribute of an answer or of the package, and an unknown option of the command
line are looked up here; the table of docs/coming_from/index.md is compared with it by a test. A group serves in every
direction: OTModel, which has wot's ``epsilon``, answers ``reg`` with it.
"""

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from traceback import walk_tb
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypeVar

from .graphs import breaks_graph

F = TypeVar("F", bound=Callable[..., Any])


class Group(NamedTuple):
    """Words with one meaning: ours first, then the words of other libraries."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]


ARGUMENTS = (
    Group(("reg", "regs"), ("eps", "epsilon", "blur", "gamma", "lam", "lambd", "regularization", "entropy", "reg_e")),
    Group(
        ("reg_m", "reg_ms"),
        ("tau", "tau_a", "tau_b", "rho", "unbalanced", "lambda1", "lambda2", "reach", "reg_m_kl", "marginal_penalty"),
    ),
    Group(("max_passes",), ("numItermax", "max_iter", "maxiter", "n_iter", "num_iter", "max_iterations", "niter")),
    Group(("tol",), ("stopThr", "threshold", "tolerance", "rtol", "atol", "eps_stop")),
    Group(("tol_gap",), ("gap_tol", "tol_value")),
    Group(("progress",), ("verbose", "show_progress", "progress_bar")),
    Group(("trace",), ("log", "return_log")),  # an attribute of each answer
    Group(("threads",), ("n_jobs", "num_threads", "nthreads", "n_threads", "workers", "numThreads")),
    Group(("backend",), ("device", "use_gpu", "gpu")),
    Group(("warm_start",), ("init", "warmstart", "initializer", "init_dual", "potentials_init")),
    Group(("precision",), ("dtype", "float_type")),
    Group(("penalty",), ("reg_type", "div", "divergence", "marginal_divergence")),
    Group(("M", "costs"), ("C", "cost_matrix", "cost", "cost_fn")),
    Group(("a", "A", "masses"), ("mu", "source_weights", "p")),
    Group(("b", "B"), ("nu", "target_weights", "q")),
    Group(("x",), ("X", "xs", "X_a", "source")),
    Group(("y",), ("Y", "xt", "X_b", "target")),
    Group(("metric",), ("distance", "cost_type")),
    Group(("scale_cost",), ("norm", "normalize", "normalise", "normalize_cost")),
    Group(("seed",), ("random_state", "rng", "generator", "random_seed", "key")),
    Group(("callback",), ("hook", "on_step")),
    Group(("truncate",), ("sparsify", "cutoff")),
    Group(("size",), ("n_samples", "num_samples")),
    Group(("k",), ("n", "n_neighbors")),
    Group(("keep",), ("mass_share",)),
    Group(("reference",), ("c", "prior")),
    Group(("representation",), ("joint_attr", "use_rep", "obsm_key", "basis", "layer")),
    Group(("day_field",), ("time_key", "day_key", "time", "timepoint_key", "batch_key")),
    Group(("reduction",), ("size_average", "reduce")),
)
# How a word differs from the argument of ours that it stands for.
REMARKS = {
    "blur": "reg = blur ** p",
    "reach": "reg_m = reach ** p",
    "tau": "of OTT and moscot: reg_m = reg * tau / (1 - tau)",
    "tau_a": "reg_m = (rows, columns), of OTT and moscot each reg * tau / (1 - tau)",
    "tau_b": "reg_m = (rows, columns), of OTT and moscot each reg * tau / (1 - tau)",
    "lambda1": "reg_m = (lambda1, lambda2)",
    "lambda2": "reg_m = (lambda1, lambda2)",
    "log": "result.trace has all passes, always",
    "return_log": "result.trace has all passes, always",
    "device": "arrays on a GPU are solved there",
    "dtype": "'float64' or 'mixed'",
    "layer": "set X to the layer, or put it into obsm",
    "reduction": "a value for each problem comes back: take its sum() or mean(), or use SinkhornLoss",
    "init": "a Result or (log_u, log_v)",
    "random_state": "a solve draws nothing; result.sample and SeededMask take a seed",
    "rng": "a solve draws nothing; result.sample and SeededMask take a seed",
    "log_domain": "every solve is safe at a small reg",
    "lse_mode": "every solve is safe at a small reg",
    "warn": "warnings.simplefilter('ignore', mapuot.ConvergenceWarning) silences the warning",
    "check_marginals": "result.row_marginal and result.col_marginal have the moved masses",
    "batch_size": "PointCloud forms no matrix, and a function of rows is read block by block",
    "mass": "mapuot.tune(M, mass=...) finds the reg_m with which a share moves",
    "m": "mapuot.tune(M, mass=...) finds the reg_m with which a share moves",
    "labels": "PointCloud and solve_sample take it",
    "metric": "PointCloud and solve_sample take it",
}
# options of the command line that are no arguments of `solve`
OPTIONS = (
    Group(("output",), ("out", "save", "outfile", "dest", "to")),
    Group(("problem",), ("M", "C", "cost", "costs", "input", "file")),
)
ATTRIBUTES = (
    Group(
        ("objective",),
        ("wasserstein", "W", "W2", "emd", "value", "total_cost", "loss", "distance", "reg_ot_cost", "primal",
         "primal_cost", "ent_reg_cost", "val"),
    ),
    Group(("cost",), ("costs", "value_linear", "transport_cost", "linear_cost", "ot_cost")),
    Group(("dual",), ("dual_cost", "dual_value", "lower_bound")),
    Group(
        ("plan",),
        ("P", "T", "G", "pi", "matrix", "transport", "coupling", "gamma", "transport_matrix", "transport_plan",
         "coupling_", "lazy_plan", "sparse_plan", "todense", "toarray", "plans", "to_numpy", "to_pandas", "to_dense"),
    ),
    Group(("log_u",), ("u", "alpha")),
    Group(("log_v",), ("v", "beta")),
    Group(("f",), ("potential_a", "phi")),
    Group(("g",), ("potential_b", "psi")),
    Group(("n_passes",), ("n_iter", "n_iters", "niter", "nit", "n_iterations", "iterations")),
    Group(("converged",), ("success", "is_converged", "has_converged")),
    Group(("trace",), ("time", "seconds", "runtime", "elapsed", "errors", "log", "err", "history", "errs")),
    Group(("status",), ("message", "info")),
    Group(("error_bound",), ("error", "tol", "accuracy", "certificate", "bound")),
    Group(("gap",), ("duality_gap",)),
    Group(("row_marginal",), ("row_sum", "marginal_a", "a_marginal", "row_sums")),
    Group(("col_marginal",), ("col_sum", "marginal_b", "b_marginal", "column_marginal", "col_sums")),
    Group(
        ("mass",),
        ("matched_mass", "moved_mass", "total_mass", "transported_mass", "transport_mass", "sum"),
    ),
    Group(("barycentric_map",), ("transform", "barycentric_projection", "to_dual_potentials")),
    Group(("push_forward",), ("push",)),
    Group(("pull_back",), ("pull",)),
    Group(("descendants",), ("push", "push_forward")),
    Group(("ancestors",), ("pull", "pull_back")),
    Group(("transition_table",), ("cell_transition", "transition_matrix", "transitions")),
    Group(
        ("coupling",),
        ("coupling_between", "transport_map", "transition", "solve", "solutions", "problems", "compute_transport_map",
         "compute_all_transport_maps", "get_coupling"),
    ),
    Group(("q",), ("barycenter", "barycentre", "image", "histogram", "mean")),
    Group(("growth",), ("growth_rates", "posterior_growth_rates", "prior_growth_rates")),
    Group(("top_k",), ("argmax", "match", "matching", "matches", "assignment", "partners", "pairs")),
    Group(("map",), ("predict",)),
    Group(("report",), ("summary", "describe")),
    Group(("problem",), ("reg", "reg_m", "M", "a", "b", "shape")),
    Group(("save",), ("to_file", "dump", "write", "to_dict", "to_csv", "to_pickle")),
)  # fmt: skip
ATTRIBUTE_REMARKS = {
    "value": "cost leaves the penalties out",
    "total_cost": "cost leaves the penalties out",
    "loss": "cost leaves the penalties out; mapuot.torch.sinkhorn_loss has a gradient",
    "u": "u = exp(log_u), which may overflow",
    "v": "v = exp(log_v), which may overflow",
    "reg": "result.problem.reg",
    "reg_m": "result.problem.rows.rho_range",
    "M": "result.problem.M",
    "a": "result.problem.rows.weight",
    "b": "result.problem.cols.weight",
    "shape": "result.problem.shape; result.plan has it, too",
    "time": "result.trace[-1].seconds",
    "seconds": "result.trace[-1].seconds",
    "kl": "result.objective - result.cost is the penalties and the entropy",
    "plot": "mapuot.plot.plan(result) and its neighbours draw answers",
    "show": "mapuot.plot.plan(result) and its neighbours draw answers",
    "imshow": "mapuot.plot.plan(result) and its neighbours draw answers",
}
VALUES = (
    Group(("cityblock",), ("l1", "L1", "manhattan", "taxicab", "minkowski")),
    Group(("euclidean",), ("l2", "L2", "minkowski")),
    Group(("chebyshev",), ("linf", "l_inf", "infinity", "max", "minkowski")),
    Group(("sqeuclidean",), ("sqeuclid", "squared_euclidean", "l2sq", "quadratic", "W2")),
    Group(("cosine",), ("angular", "cos", "haversine", "great_circle", "geodesic")),
    Group(("inner",), ("dot", "dot_product", "inner_product", "ip")),
    Group(("cuda",), ("gpu", "GPU", "device")),
    Group(("cpu",), ("CPU", "numpy", "torch", "jax")),
    Group(("mixed",), ("float32", "single", "fp32")),
    Group(("float64",), ("double", "fp64")),
    Group(("kl",), ("KL", "kullback", "entropy", "kl_divergence")),
    Group(("tv",), ("TV", "l1", "partial")),
    Group(("l2",), ("L2", "quadratic", "chi2")),
    Group(("balanced",), ("hard", "exact", "none")),
)
VALUE_REMARKS = {
    **dict.fromkeys(
        ("haversine", "great_circle", "geodesic"),
        "of unit vectors (n, 3): half the squared chord; for arcs give M as a function of rows, M(i0, i1)",
    ),
    "precomputed": "give the costs as M to mapuot.solve",
}
# Names that other packages have at their top, and where they are in this one.
PLACES = {
    "sinkhorn": "use mapuot.solve (reg_m=inf is balanced)",
    "sinkhorn2": "use mapuot.solve(...).cost (reg_m=inf is balanced)",
    "sinkhorn_unbalanced": "use mapuot.solve, or as in POT mapuot.pot.sinkhorn_unbalanced",
    "sinkhorn_unbalanced2": "use mapuot.solve(...).objective, or as in POT mapuot.pot.sinkhorn_unbalanced2",
    "unbalanced": "mapuot.pot has the functions of ot.unbalanced",
    "barycenter_unbalanced": "use mapuot.barycenter, or as in POT mapuot.pot.barycenter_unbalanced",
    "mm_unbalanced": "use mapuot.pot.mm_unbalanced",
    "emd": "there is no unregularised solve: use mapuot.solve with a small reg and reg_m=inf",
    "emd2": "there is no unregularised solve: use mapuot.solve(...).cost with a small reg and reg_m=inf",
    "dist": "use mapuot.PointCloud(x, y, metric), whose matrix is numpy.asarray(cloud)",
    "cdist": "use mapuot.PointCloud(x, y, metric), whose matrix is numpy.asarray(cloud)",
    "unif": "leave out a and b, which are uniform by default",
    "patch": "use mapuot.pot.patch",
    "patched": "use mapuot.pot.patched",
    "SamplesLoss": "use mapuot.torch.SamplesLoss",
    "SinkhornLoss": "use mapuot.torch.SinkhornLoss",
    "sinkhorn_loss": "use mapuot.torch.sinkhorn_loss or mapuot.jax.sinkhorn_loss",
    "sample_loss": "use mapuot.torch.sample_loss or mapuot.jax.sample_loss",
    "OTModel": "use mapuot.wot.OTModel",
    "TemporalProblem": "use mapuot.wot.OTModel, or moscot's own after import mapuot.moscot",
    "OTPlanSampler": "use mapuot.flow.OTPlanSampler",
    "UnbalancedSinkhornTransport": "use mapuot.da.UnbalancedSinkhornTransport",
    "SinkhornTransport": "use mapuot.da.UnbalancedSinkhornTransport",
    "Sinkhorn": "use mapuot.solve",
    "LinearProblem": "use mapuot.solve",
    "Geometry": "use an array M, a mapuot.PointCloud or a mapuot.Grid",
    "gromov_wasserstein": "use mapuot.gromov",
    "solve_gromov": "use mapuot.gromov",
    "partial_wasserstein": "use mapuot.tune (mass=...) or mapuot.solve with penalty='tv'",
    "Solver": "use mapuot.solve",
    "transport": "use mapuot.solve",
    "version": "use mapuot.__version__",
    "set_num_threads": "pass threads= to mapuot.solve, or set OMP_NUM_THREADS",
    "FUGW": "use mapuot.fugw.FUGW",
    "wasserstein": "use mapuot.solve(...).cost (reg_m=inf is balanced)",
    "ot": "mapuot.pot has the unbalanced functions of POT (ot)",
    "entropic_gromov_wasserstein": "use mapuot.gromov, or as in POT mapuot.pot.entropic_gromov_wasserstein",
}


def ours_for(word: str, groups: Iterable[Group], candidates: Iterable[str]) -> list[str]:
    """Return the known names whose group has the word, or else the known names that are spelled like it."""
    names = list(candidates)
    meant = [name for group in groups if word in group.ours + group.theirs for name in group.ours + group.theirs]
    return [name for name in dict.fromkeys(meant) if name in names] or difflib.get_close_matches(word, names, 2, 0.75)


def hint(word: str, meant: list[str], remarks: dict[str, str]) -> str:
    """Return the end of a message: the names that are meant, and how the word differs from them."""
    remark = remarks.get(word, "")
    if not meant:
        if remark:
            return f": {remark}"
        return ""
    return f": did you mean {' or '.join(meant)}?" + (f" ({remark})" if remark else "")


class Required:
    """Type of `REQUIRED`, the default of an argument that must be given, by name or by place (see `hinted`)."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = Required()


def hinted_onward(onward: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate as `hinted` does a function that hands other keywords to ``onward``: it takes the keywords of both.

    A keyword that both lack raises at once, in the name of the decorated function.
    """

    def decorate(function: F) -> F:
        return hinted(function, onward)

    return decorate


def hinted(function: F, onward: Callable[..., Any] | None = None) -> F:
    """Decorate a function, or ``__init__``, so that its error of an unknown keyword names the argument that is meant.

    An argument with the default REQUIRED must be given. A call that succeeds pays for one more frame, .2 us. Within
    ``torch.compile`` a call breaks the graph; the constructors of losses do not, since compiled programs make losses.
    """
    parameters = inspect.signature(function).parameters
    open_ended = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    called = function.__qualname__.removesuffix(".__init__")
    check = check_of(called, parameters, onward)
    required = [(place, name) for place, (name, x) in enumerate(parameters.items()) if x.default is REQUIRED]

    is_loss = function.__module__ == "mapuot.torch" and function.__name__ == "__init__"
    if is_loss:
        outside = function
    else:
        outside = breaks_graph(function)
    code = inspect.unwrap(function).__code__

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            run = outside
        else:
            run = function
        try:
            for place, name in required:
                if name not in named and place >= len(args):
                    raise TypeError(f"{called}() missing required argument: {name!r}")
            if check:
                check(named)
            return run(*args, **named)
        except TypeError as error:
            if has_entered(code, error.__traceback__):
                raise
            told = unknown_argument(called, named, parameters, open_ended)
            if told is None:
                raise
            raise TypeError(told) from None

    return call  # type: ignore[return-value]


def check_of(
    called: str, parameters: Mapping[str, Any], onward: Callable[..., Any] | None
) -> Callable[[dict[str, Any]], None] | None:  # fmt: skip
    """Return a function that raises for a keyword that both functions lack; None without ``onward``."""
    if onward is None:
        return None
    handed = inspect.signature(onward).parameters.items()
    takes = {**parameters, **{name: x for name, x in handed if x.kind is x.KEYWORD_ONLY}}

    def check(named: dict[str, Any]) -> None:
        for name in named:
            if name not in takes:
                raise TypeError(unknown_argument(called, [name], takes, False))

    return check


def has_entered(code: CodeType, trace: TracebackType | None) -> bool:
    """Tell whether an error was raised within the function of this code, which then has accepted its arguments."""
    return any(frame.f_code is code for frame, _ in walk_tb(trace))


def unknown_argument(called: str, named: Iterable[str], parameters: Iterable[str], open_ended: bool) -> str | None:
    """Return the message about the first keyword that the function lacks; None where Python's own says more.

    ``open_ended``: the function hands other keywords on, so that only words of the table are mistakes.
    """
    own = [name for name in parameters if name not in ("self", "options")]
    for word in named:
        foreign = any(word in group.theirs for group in ARGUMENTS)
        if word in own or (open_ended and not foreign):
            continue
        known_word = foreign or word not in REMARKS
        meant = ours_for(word, ARGUMENTS, own) if known_word else []  # a remark says more than a like spelling
        if meant or not open_ended:
            told = hint(word, meant, REMARKS) or f": it takes {', '.join(own)}"
            return f"{called}() has no {word}{told}"
    return None


class Hints:
    """Base of classes with hints: the error about an unknown attribute names the attribute that is meant.

    ``_parts``: {expression: class}: other objects with attributes that users look for here.
    """

    _parts: ClassVar[dict[str, type]] = {}

    if not TYPE_CHECKING:  # so that checkers of types find unknown attributes

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(self)
            if hasattr(kind, name):  # a property has raised an AttributeError: raise it again
                return object.__getattribute__(self, name)
            text = f"{public_name(kind)} has no {name}"
            if not name.startswith("__"):
                words = [name, *(group.ours[0] for group in ATTRIBUTES if name in group.theirs)]
                present = [x for x in words if x in vars(self) or hasattr(kind, x)]
                parts = [f"{at}.{x}" for at, part in kind._parts.items() for x in words if hasattr(part, x)]
                text += hint(name, present or parts[:1], ATTRIBUTE_REMARKS)
            raise AttributeError(text, name=name, obj=self)


class AnswerHints(Hints):
    """Base of answers: used as an array, a sequence or a number, they raise an error that names the right attribute."""

    if not TYPE_CHECKING:

        def __getitem__(self, key: Any) -> NoReturn:
            kind = public_name(type(self))
            raise TypeError(f"{kind} has no items: its parts are attributes, such as {main_part(self)}")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        kind = public_name(type(self))
        raise TypeError(f"{kind} is no array: its numbers are in attributes, such as {main_part(self)}")

    def __float__(self) -> float:
        values = [f"result.{name}" for name in ("objective", "cost") if hasattr(type(self), name)]
        told = " and ".join(values or [main_part(self)])
        raise TypeError(f"{public_name(type(self))} is no number: its values are {told}")


def main_part(answer: AnswerHints) -> str:
    """Return the attribute that a user of this answer most likely wants."""
    if hasattr(type(answer), "plan"):
        return "result.plan"
    if "q" in vars(answer):
        return "result.q"
    return "result.marginals"


def public_name(kind: type) -> str:
    """Return the name of the public class of an answer."""
    return next(one.__name__ for one in kind.__mro__ if not one.__module__.startswith("mapuot.route"))


def no_such_name(name: str) -> AttributeError:
    """Return the error about a name that the package lacks, with the place of another library's thing of this name."""
    text = f"module 'mapuot' has no attribute {name!r}"
    return AttributeError(f"{text}: {PLACES[name]}" if name in PLACES else text, name=name)
