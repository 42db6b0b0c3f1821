"""Run a block of trials in one process, or in step on all ranks of one job; print each trial's counts as JSON.

``python -m hostile.worker PATH BACKEND SEED FIRST COUNT LARGEST SIDES NUMBERS``.
"""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from judge import Failure, LossClaim, judge, judge_loss

from .problem import ODDS
from .trial import NAMES, OVER_RANKS, Trial, as_users_have, at_the_ends, call, call_over_ranks, draw_trial

STALLS = "stalled", "stalled: options", "stalled: float64"  # by no reason, see `reason_of_stall`
SECONDS = 60  # one trial may take: far more is a hang
REFUSED = ("must not be so small that M / reg overflows", "must have positive, finite mass",
           "must be finite, >= 0 and not all", "must be finite, problem", "must have masses whose product",
           "must be > 0 (inf = balanced)",
           "must be 'product' or 'uniform' for points on a GPU")  # fmt: skip


class Runner:
    """Call the library on a trial and judge its claims; over ranks the root judges for all."""

    def __init__(self, backend: str, over_ranks: bool) -> None:
        self.backend, self.comm = backend, None
        signal.signal(signal.SIGALRM, late)
        if find_spec("torch"):  # before the clock of the first trial runs
            import_module("mapuot.torch")
        if over_ranks:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
        elif backend == "cuda":
            import conftest  # noqa: F401  where the kernels run on the CPU: what its stand-in for CuPy lacks

    @property
    def root(self) -> bool:
        return self.comm is None or self.comm.Get_rank() == 0

    def claims(self, trial: Trial) -> list[Any]:
        if self.comm is None:
            return call(trial, self.backend)
        return call_over_ranks(trial, self.comm, self.backend)

    def verdict(self, trial: Trial) -> tuple[str, list[Failure], list[dict[str, float]]]:
        """Return ("answered", "refused" or "raised", failures, figures of each problem)."""
        answer = self.one_verdict(trial)
        if self.comm is None:
            return answer
        return self.comm.bcast(answer, 0)

    def one_verdict(self, trial: Trial) -> tuple[str, list[Failure], list[dict[str, float]]]:
        import mapuot

        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            signal.alarm(SECONDS)
            try:
                claims = self.claims(trial)
            except mapuot.InfeasibleError:
                return "refused", [], []
            except Exception as error:
                if any(words in str(error) for words in REFUSED):
                    return "refused", [], []
                return "raised", [Failure("raised", 1.0, f"{type(error).__name__}: {error}")], []
            finally:
                signal.alarm(0)
        if not self.root:
            return "answered", [], []
        found = [
            Failure("warning", 1.0, f"{one.category.__name__}: {one.message} ({one.filename}:{one.lineno})")
            for one in heard
            if issubclass(one.category, RuntimeWarning) and not issubclass(one.category, mapuot.ConvergenceWarning)
        ][:1]
        figures = []
        if "stopThr" in trial.options:
            options = {"tol": trial.options["stopThr"]}
        else:
            options = {"tol": 1e-6, **trial.options}
        for problem, claim in zip(trial.problems, claims, strict=True):
            failures, numbers = (judge_loss if isinstance(claim, LossClaim) else judge)(problem, claim, options)
            found += failures
            figures.append({**numbers, "tol >= 1e-7": options["tol"] >= 1e-7})
            if options["tol"] >= 1e-7 and claim.status == "stalled":
                figures[-1][reason_of_stall(trial, claim.lost > options["tol"] / 4)] = True
        return "answered", found, figures


def reason_of_stall(trial: Trial, is_lost: bool) -> str:
    """Say in the words of the table why a solve stalled; ``is_lost``: exponents have too few digits, says the warning.

    Methods without Newton's steps, float32 kernels and a number of nats to truncate at are the user's will.
    """
    if is_lost:
        return "stalled: float64"
    chosen = trial.options.get("method", "auto"), trial.options.get("precision", "auto")
    is_chosen = chosen[0] not in (None, "auto") or chosen[1] == "mixed" or trial.options.get("truncate") is not None
    if is_chosen:
        return "stalled: options"
    return "stalled"


def late(*_: Any) -> None:
    raise TimeoutError(f"no answer within {SECONDS} s")


def trial_of(how: str, seed: int, index: int, largest: int, numbers: str = "all") -> Trial:
    """Draw a trial; of each four one is typical of users and one extreme, unless ``numbers`` names a kind."""
    trial = draw_trial(how, np.random.default_rng([seed, NAMES.index(how), index]), largest)
    rng = np.random.default_rng([seed, NAMES.index(how), index, 1])
    kind = index % 4
    if numbers == "extreme" or (numbers == "all" and kind == 2):
        return at_the_ends(trial, rng)
    if numbers == "usual" or (numbers == "all" and kind == 0):
        return as_users_have(trial, rng)
    return trial


def judged_trial(
    runner: Runner, how: str, seed: int, index: int, largest: int = 12, numbers: str = "all"
) -> dict[str, Any]:
    """Judge one trial; return its failures and the counts of the summary."""
    totals: Counter[str] = Counter()
    ended, found, figures = runner.verdict(trial_of(how, seed, index, largest, numbers))
    totals["trials"] += 1
    totals[ended] += 1
    totals["problems"] += len(figures)
    for figure in figures:
        totals["without reference"] += "no reference" in figure
        totals["judged"] += "no reference" not in figure
        for name in ("converged", "truncated", "kept", "tol >= 1e-7", *STALLS):
            totals[name] += bool(figure.get(name))
    worst = {"error / bound": max((figure.get("error / bound", 0.0) for figure in figures), default=0.0)}
    failures = [{"index": index, "kind": f.kind, "size": f.size, "text": f.text} for f in found]
    return {"totals": dict(totals), "worst": worst, "failures": failures}


def main(words: list[str]) -> None:
    how, backend, seed, first, count, largest = words[0], words[1], *map(int, words[2:6])
    ODDS["all"] = ODDS[words[6]]
    runner = Runner(backend, how in OVER_RANKS)
    for index in range(first, first + count):
        answer = judged_trial(runner, how, seed, index, largest, words[7])
        if runner.root:
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
