"""``mapuot solve IN -o OUT``, ``tune``, ``warm-up``, ``info``: the library for files, alone or under mpiexec.

Exit codes: 0 done, 1 error, 2 wrong usage, 3 not converged (the answer is written all the same).
"""

import inspect
import os
import platform
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from . import __version__, files
from .answer.result import Result
from .answer.store import contents
from .answer.summary import REFERENCES
from .api.solve import solve
from .api.tune import tune
from .backends import BACKENDS
from .drawing import pyplot
from .errors import ConvergenceWarning
from .penalties import PENALTIES
from .problem.clouds import PointCloud
from .problem.kinds import stores_pairs
from .problem.mask import SeededMask
from .problem.metrics import METRICS
from .problem.scale import SCALES, WEIGHTED
from .problem.settings import BLOCKS
from .processor import isa, thread_count
from .ranks import Ranks, join, mpi, own_rows
from .report import write_report
from .route.options import METHODS, PRECISIONS, SCHEDULES
from .status import describe_bound
from .synonyms import ARGUMENTS, OPTIONS, REQUIRED, hint, ours_for

F = TypeVar("F", bound=Callable[..., Any])
NOT_CONVERGED = 3
DEFAULTS = inspect.signature(solve).parameters
LIBRARIES = (  # `mapuot info` shows their versions
    "numpy", "scipy", "cffi", "cupy-cuda13x", "cupy-cuda12x", "mpi4py", "h5py", "zarr", "anndata", "pandas",
    "matplotlib", "scikit-learn", "pot", "torch", "jax", "ott-jax", "moscot", "geomloss",
)  # fmt: skip
VARIABLES = ("MAPUOT_", "OMP_", "OPENBLAS_", "MKL_", "CUDA_", "CUPY_")  # prefixes of variables that info shows
TUNED_PENALTIES = sorted(name for name in PENALTIES if name not in ("balanced", "range"))
PLAN = "Write the plan: dense, the K largest of each row, all above X, or the fewest with a share S of it."


def numbers(ctx: Any, param: Any, value: str) -> Any:
    try:
        found = [float(text) for text in value.split(",")]
    except ValueError:
        found = []
    if len(found) not in (1, 2):
        raise click.BadParameter(f"{value!r} must be a number or inf (balanced), or two with a comma between")
    if len(found) == 1:
        return found[0]
    return tuple(found)


def plan_form(ctx: Any, param: Any, value: str | None) -> tuple[str, Any] | None:
    form, _, number = (value or "").partition(":")
    try:
        if form == "top" and int(number) > 0:
            return form, int(number)
        if form == "sparse" and float(number) >= 0:
            return form, float(number)
        if form == "keep" and 0 < float(number) <= 1:
            return form, float(number)
    except ValueError:
        pass
    if value not in (None, "dense"):
        raise click.BadParameter(f"{value!r} must be dense, top:K, sparse:THRESHOLD or keep:SHARE")
    if value is None:
        return None
    return form, None


def seeded_mask(ctx: Any, param: Any, value: str | None) -> SeededMask | None:
    if value is None:
        return None
    keep, _, seed = value.partition(",")
    try:
        return SeededMask(float(keep), int(seed))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} must be KEEP,SEED, as .1,7 ({error})") from error


class Commands(click.Group):
    """Commands; for an unknown one that looks like a file the error names the command that reads such files."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and Path(name).suffix:
            raise click.UsageError(f"no command {name!r}: did you mean mapuot solve {' '.join(args)}?", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Entropic unbalanced optimal transport, with a certificate."""


def option(name: str, text: str | None = None, choices: Iterable[str] = (), **more: Any) -> Callable[[F], F]:
    """Make an option of the command, with the default that `solve` gives the argument of this name."""
    parameter = DEFAULTS.get(name.strip("-").replace("-", "_"))
    if parameter is not None and parameter.default not in (None, parameter.empty, REQUIRED):
        more = {"default": parameter.default, "show_default": True} | more
    if choices:
        more["type"] = click.Choice(list(choices))
    return click.option(name, help=text, **more)


def options_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Combine options into one decorator, which keeps their order."""

    def decorate(command: F) -> F:
        for one in reversed(options):
            command = one(command)
        return command

    return decorate


problem_options = options_of(
    click.argument("problem", metavar="[IN]", required=False),
    option("--points", "In the place of IN: files with points, (m, d) and (n, d).", nargs=2, metavar="X Y"),
    option("--metric", "Cost of --points.", METRICS, default="sqeuclidean", show_default=True),
    option("--a", "Masses of the rows.  [default: a in IN, or uniform]", metavar="FILE"),
    option("--b", "Masses of the columns.  [default: b in IN, or uniform]", metavar="FILE"),
    option("--scale-cost", "Take --reg and --reg-m in units of this statistic of the costs.", [*SCALES, *WEIGHTED]),
    option("--scale-mass", "Take masses in units of sqrt(sum(a) sum(b)).", is_flag=True),
)
solver_options = options_of(
    option("--mask", "Keep this share of the pairs, at random.", callback=seeded_mask, metavar="KEEP,SEED"),
    option("--method", "The iteration, as mapuot.solve explains it.", METHODS),
    option("--tol", "Largest certified relative error of the plan.", type=float),
    option("--tol-gap", "Stop also where the value is certified to this relative accuracy.", type=float),
    option("--max-passes", "Most passes over the kernel.", type=int),
    option("--precision", "Storage of the kernel; mixed is float32.", ("auto", *PRECISIONS)),
    option("--backend", "Where to solve; auto is the CPU, since files are there.", BACKENDS),
    option("--threads", "CPU threads of each process.  [default: its share of the cores]", type=int),
    option("--schedule", "How threads share rows: by speed, or evenly (the same bits in every run).", SCHEDULES),
)


@cli.command("solve")
@problem_options
@click.option(
    "-o", "--output", metavar="OUT", help="The answer: .npz, .h5, .zarr, .h5ad; .npy, .csv, .tsv: a dense plan."
)
@option("--reg", "Entropic regularisation, in units of M.", type=float, required=True)
@option(
    "--reg-m", "Penalty of both sides, or ROWS,COLUMNS, in units of M; inf is balanced.", callback=numbers,
    required=True, metavar="X[,Y]",
)  # fmt: skip
@option("--penalty", "Divergence between the marginals of the plan and the masses.", sorted(PENALTIES))
@option("--reference", "Measure of the entropy: product, uniform, or a file with the matrix.", metavar="TEXT")
@solver_options
@option("--plan", PLAN, callback=plan_form, metavar="dense|top:K|sparse:X|keep:S")
@option("--report", "Write one HTML page: problem, certificate, trace, marginals, pictures.", metavar="FILE")
@option("--checkpoint", "Write the potentials here every minute.", metavar="FILE")
@option("--resume", "Go on from the checkpoint, where there is one.", is_flag=True)
@option("--progress/--no-progress", "The bar on standard error.  [default: on a terminal]", default=None)
def solve_command(**options: Any) -> None:
    """Solve the problem in the file IN.

    IN holds a cost matrix M. The masses a and b are in IN, too, or options name them. Files are .npy, .npz, HDF5 (.h5,
    .hdf5), Zarr, AnnData's .h5ad, or tables (.csv, .tsv, .txt, each also as .gz); names of the rows and columns of a
    table are ignored. FILE:NAME is one array of a file, or one column of a table. Under mpiexec each process reads its
    own part only. A sparse M is an .npz of scipy.sparse or a group of an AnnData file; pairs that it does not store are
    forbidden.

    In an .h5ad, X is M if obs has a column of masses a or var has b. Otherwise its cells are points, as in
    --points early.h5ad:obsm/X_pca late.h5ad:obsm/X_pca. An answer in an .h5ad has the names of the cells.

    OUT holds the arrays from which mapuot.load restores a Result (log_u, log_v, row_marginal, col_marginal, a, b, the
    printed numbers and status, and more; numbers are attributes in HDF5 and Zarr). The plan is plan (dense), plan_index
    and plan_value (top), or plan_data, plan_indices and plan_indptr (sparse, CSR).

    Exit codes: 0 done, 1 error, 2 wrong usage, 3 not converged (the answer is written all the same).
    """
    check_named(options)
    check_written(options)
    ranks = join(mpi.world() if mpi.launched() > 1 else None)  # all processes that the launcher started
    with ranks.together():
        code = run(ranks, **options)
    sys.exit(code)


def check_named(options: dict[str, Any]) -> None:
    if (options["problem"] is None) == (options["points"] is None):
        raise click.UsageError("the problem is a file IN, or two with --points X Y")


@cli.command("tune")
@problem_options
@option("--mass", "Share of the mass that should move.", type=float, default=0.9, show_default=True)
@option("--sharpness", "Sharpness of the plan (Result.sharpness).", type=float, default=0.8, show_default=True)
@option("--reg", "Fix reg, and search for --reg-m alone.", type=float, default=None)
@option("--reg-m", "Fix the penalty, and search for --reg alone.", type=float, default=None)
@option("--penalty", "Divergence between the marginals of the plan and the masses.", TUNED_PENALTIES)
@option("--reference", "Measure of the entropy.", REFERENCES)
@solver_options
def tune_command(
    problem: str | None, points: tuple[str, str] | None, metric: str, a: str | None, b: str | None, **given: Any
) -> None:
    """Find --reg and --reg-m for the problem in the file IN.

    The plan then moves the share --mass of the mass and has this --sharpness, from 0 (every point goes everywhere) to 1
    (every point has one partner). IN, --points, --a and --b are as in mapuot solve. The command runs in one process.
    """
    check_named({"problem": problem, "points": points})
    if mpi.launched() > 1:
        raise click.UsageError("mapuot tune runs in one process: give its answer to mapuot solve")
    M = costs(problem, points, metric)
    m, n = M.shape
    masses = weights(a, problem, "a", m), weights(b, problem, "b", n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        tuned = tune(M, *masses, **given)
    result = tuned.result
    click.echo(f"{'reg':<12} {tuned.reg:.6g}\n{'reg_m':<12} {tuned.reg_m:.6g}")
    click.echo(f"{'mass':<12} {result.mass:.6g}\n{'sharpness':<12} {result.sharpness:.6g}")


def check_written(options: dict[str, Any]) -> None:
    """Before a long solve, refuse output that cannot be written or would overwrite a file of the problem."""
    output = options["output"]
    checkpoint = options["checkpoint"]
    if options["plan"] and not output:
        raise click.UsageError("--plan needs --output OUT")
    if options["resume"] and not checkpoint:
        raise click.UsageError("--resume needs --checkpoint FILE")
    suffix = Path(output or "").suffix
    kind = files.split_name(output, "")[1] if output else ""
    if kind in ("npy", "csv") and (options["plan"] or ("", None))[0] != "dense":
        raise click.UsageError(f"an {suffix} file holds one array: ask for --plan dense, or name another kind of OUT")
    if options["report"]:
        pyplot()
    if kind in files.LIBRARIES:
        files.library(kind)
    read = [*(options[name] for name in ("problem", "a", "b", "reference")), *(options["points"] or ())]
    used = {resolved(files.split_name(name, "")[0]) for name in read if name and name not in REFERENCES}
    for name, text in (("--output", output), ("--report", options["report"]), ("--checkpoint", checkpoint)):
        if text is not None:
            check_target(name, text, used)
            used.add(resolved(text))


def check_target(name: str, text: str, used: set[Any]) -> None:
    """Raise if the file of an option cannot be written, or is one of ``used``."""
    path = resolved(text)
    if path in used:
        raise click.UsageError(f"{name}: {text} is a file of another use")
    if isinstance(path, str):
        if name != "--output":
            raise click.UsageError(f"{name}: {text} must be a file on this machine")
        return
    files.refuse_folder(path)
    if not os.access(path.parent, os.W_OK):
        raise click.UsageError(f"{name}: the folder of {text} does not exist or cannot be written")


def resolved(text: str) -> Path | str:
    """Return the whole path of a file; a URL as it is."""
    if files.is_url(text):
        return text
    return Path(text).resolve()


def run(
    ranks: Ranks, problem: str | None, output: str | None, plan: Any, progress: bool | None, report: str | None,
    points: tuple[str, str] | None, metric: str, **given: Any,
) -> int:  # fmt: skip
    """Read, solve and write; return the exit code."""
    arguments = {"problem": problem} if problem else {"points": " and ".join(points or ()), "metric": metric}
    arguments |= given
    if plan:
        arguments["plan"] = ":".join(str(part) for part in plan if part is not None)
    M = costs(problem, points, metric)
    m, n = M.shape
    ranks.same(**{"the shape of M": repr(M.shape)})
    check_plan(plan, M)
    i0, i1 = own_rows(m, ranks.rank, ranks.size)
    M = M[i0:i1] if isinstance(M, PointCloud) else M
    a = weights(given.pop("a"), problem, "a", m)
    b = weights(given.pop("b"), problem, "b", n)
    reference = given.pop("reference")
    if reference not in REFERENCES:
        reference = files.open_matrix(reference, "c")
    checkpoint = given["checkpoint"]
    resume = given.pop("resume")
    start = None
    if resume and ranks.max(Path(checkpoint).exists()):
        log_u, log_v = files.load_checkpoint(checkpoint, m, n, given["reg"])
        start = log_u[i0:i1], log_v
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # reported below
        result = solve(
            M, None if a is None else a[i0:i1], b, reference=reference, warm_start=start,
            progress=sys.stderr.isatty() if progress is None else progress,
            comm=ranks, **given,
        )  # fmt: skip
    values = contents(result)
    if report:
        title = " to ".join(Path(name).name for name in ([problem] if problem else points or ()))
        write_report(result, report, title, arguments, values)  # all ranks join
    if output:
        if ranks.rank == 0 and files.split_name(output, "")[1] == "h5ad":
            values = values | row_and_column_names(problem, points, (m, n))
        save(ranks, result, output, values, plan)
    if ranks.rank == 0:
        print_values(result, values)
        if not output and not report:
            click.echo("mapuot: nothing is stored: -o OUT writes the potentials, marginals and values", err=True)
    if result.converged:
        return 0
    return NOT_CONVERGED


def check_plan(plan: Any, M: Any) -> None:
    """Raise if the plan for this M has no such form."""
    form, number = plan or ("", None)
    if form == "top" and number > M.shape[1]:
        raise ValueError(f"--plan top:K: K must be at most the {M.shape[1]} columns of M, got {number}")
    if form == "dense" and stores_pairs(M):
        raise ValueError("--plan dense needs a dense M: --plan sparse:0 writes the entries of the pairs that M stores")


def costs(problem: str | None, points: tuple[str, str] | None, metric: Any) -> Any:
    if points:
        return PointCloud(files.open_matrix(points[0], "x"), files.open_matrix(points[1], "y"), metric)
    return files.open_cost(problem)


def row_and_column_names(problem: str | None, points: tuple[str, str] | None, shape: tuple[int, int]) -> dict[str, Any]:
    """Return the names of rows and columns in AnnData files, if the answer is such a file."""
    if points:
        given = files.names_along(points[0])[0], files.names_along(points[1])[0]
    else:
        given = files.names_along(problem)
    named = zip(("row_names", "col_names"), given, shape, strict=True)
    return {name: x for name, x, length in named if x is not None and len(x) == length}


def weights(path: str | None, problem: str | None, name: str, length: int) -> Any:
    if path is None and problem is None:
        return None
    if path is None:
        found = files.find_vector(problem, name)
    else:
        found = files.read_vector(path, name)
    if found is not None and found.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},), got {found.shape}")
    return found


def save(ranks: Ranks, result: Result, output: str, values: dict[str, Any], plan: Any) -> None:
    """Write the answer and the plan in the requested form, from all ranks into one file."""
    form: str
    number: Any
    form, number = plan or ("", None)
    if form == "dense":
        m, n = result.problem.shape
        step = max(1, BLOCKS.plan_entries // n)  # blocks of the same rows on all processes
        blocks = (result.rows(i0, min(i0 + step, m)) for i0 in range(0, m, step))
        shape = int(ranks.sum(m)), n
        values["plan"] = files.Blocks(shape, result.problem.M.dtype.name, ranks.stream(blocks))
    elif form == "top":
        index, value = result.top_k(number)
        values.update(plan_index=result.gather(index), plan_value=result.gather(value))
    elif form in ("sparse", "keep"):
        if form == "sparse":
            part = result.sparse(number)
        else:
            part = result.sparse(keep=number)
        counts = result.gather(np.diff(part.indptr).astype(np.int64))
        values.update(plan_data=result.gather(part.data), plan_indices=result.gather(part.indices.astype(np.int64)))
        if counts is not None:
            values["plan_indptr"] = np.concatenate([[0], np.cumsum(counts)])
    if ranks.rank == 0:
        files.write(output, values)
    elif form == "dense":
        for _ in values["plan"].blocks:
            pass


def print_values(result: Result, values: dict[str, Any]) -> None:
    for name in ("status", "n_passes", "error_bound", "gap", "objective", "cost", "mass", "how"):
        value = values[name]
        if name == "error_bound" and not value < 1:
            value = "none yet"  # an error of 1 or more says nothing about the plan
        click.echo(f"{name:<12} {value:.10g}" if isinstance(value, float) else f"{name:<12} {value}")
    for name in ("scale_cost", "scale_mass"):
        if getattr(result, name) != 1:
            click.echo(f"{name:<12} {getattr(result, name):.10g}")
    if not result.converged:
        text = describe_bound(result.error_bound, "certified relative plan error")
        click.echo(f"mapuot: not converged ({result.status}): {text}", err=True)


@cli.command("info")
def info_command() -> None:
    """Show the facts for a bug report: versions, machine, instruction set, threads, caches, GPUs, MPI, environment."""
    lines = {
        "mapuot": f"{__version__} in {Path(__file__).parent}",
        "python": f"{sys.version.split()[0]} in {sys.prefix}", "system": platform.platform(),
        "processor": processor(), "isa": isa(), "threads": str(thread_count()), "caches": caches(), "gpus": gpus(),
        "mpi": mpi_library(), "environment": environment(),
    }  # fmt: skip
    for name in LIBRARIES:
        lines[name] = module_version(name)
    for name, text in lines.items() if first_rank() else ():
        click.echo(f"{name:<12} {text}")


@cli.command("warm-up")
def warm_up_command() -> None:
    """Compile the CUDA kernels of common problems, so that no first solve on this machine waits for them.

    They stay in CuPy's cache (~/.cupy/kernel_cache, or CUPY_CACHE_DIR). It takes some minutes of one core.
    """
    from .backends.cuda import warm_up  # noqa: PLC0415  needs an extra

    click.echo(f"{warm_up.warm_up()} files compiled")


def module_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    except OSError:
        found = None
    if found:
        return found[1]
    return platform.processor() or platform.machine()


def environment() -> str:
    found = (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES))
    return " ".join(found) or "nothing set"


def caches() -> str:
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found) or "unknown"


def gpus() -> str:
    try:
        import cupy  # noqa: PLC0415  an extra
    except ImportError:
        return "CuPy is not installed"
    if not cupy.cuda.is_available():
        return "none, or no driver"
    runtime = cupy.cuda.runtime
    names = (runtime.getDeviceProperties(k)["name"].decode() for k in range(runtime.getDeviceCount()))
    return f"{', '.join(names)}; CUDA {runtime.runtimeGetVersion()}, driver for {runtime.driverGetVersion()}"


def mpi_library() -> str:
    try:
        from mpi4py import MPI  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        return f"not usable: {error}"
    return str(MPI.Get_library_version().split("\n")[0].strip("\0 "))


def main() -> None:
    """Run the command; every error is one line on rank 0 and exit code 1, and ends all ranks."""
    try:
        cli(standalone_mode=False)
    except click.NoSuchOption as error:
        taken = error.ctx.command.params if error.ctx else []
        meant = ours_for(error.option_name.strip("-").replace("-", "_"), [*ARGUMENTS, *OPTIONS], spelled(taken))
        told = hint("", [spelled(taken)[name] for name in meant], {})
        if first_rank():
            click.UsageError(f"no such option {error.option_name}{told}", error.ctx).show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        if first_rank():
            error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        end_job(130)
    except (ValueError, TypeError, OSError, MemoryError, RuntimeError, KeyError, ImportError) as error:
        if os.environ.get("MAPUOT_TRACEBACK"):
            traceback.print_exc()
        if first_rank():
            click.echo(f"mapuot: {type(error).__name__}: {error}", err=True)
        sys.exit(1)
    except Exception:
        traceback.print_exc()
        end_job(1)


def spelled(parameters: list[Any]) -> dict[str, str]:
    """Return {name: how a shell spells it} of the options and arguments of a command."""
    return {str(one.name): one.opts[-1] if one.param_type_name == "option" else "the file IN" for one in parameters}


def first_rank() -> bool:
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized():
        return bool(module.COMM_WORLD.rank == 0)
    return all(os.environ.get(name, "0") == "0" for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"))


def end_job(code: int) -> None:
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and module.COMM_WORLD.size > 1:
        module.COMM_WORLD.Abort(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
