"""Policies of pairs: the pairs that passes read, and what the numbers of such passes say of all pairs.

A policy has four steps, which a workspace and the loop ask for (ascend/loop.py):

    choose      before K is built: the pairs of its passes
    settle      make passes, and make their numbers hold for the problem with all pairs
    go_on       after a pass: the log v from which passes go on, where it is not their own next log v
    conclude    complete the numbers of the last pass

`AllPairs` is the policy of most solves, `Truncation` of boxes.py the policy of solves that skip pairs of points. Both
leave the workspace as it is: a new choice changes only the entries of K that its passes read.

Passes over kept pairs have no policy of their own. Each choice of pairs is another sparse problem with another K, other
vectors and other kernels, hence another workspace, and its passes read all pairs of that problem. So the choice belongs
outside a run of passes: `KeptPairs` of ascend/kept.py chooses, settles and concludes around whole runs.
"""

from collections.abc import Callable
from typing import Any

from ..contract import Stats
from ..penalties import F64


class AllPairs:
    """Passes read all pairs of the problem, so that their numbers hold as they are."""

    skips = False  # whether passes skip some pairs
    kept: Any = None  # the pairs that passes visit, where some are skipped
    boxes: Any = None  # the boxes of points that choose the kept pairs
    correct: Any = None  # the correction that follows a pass, if there is one
    has_marginals = False  # whether a state of earlier passes scales K; else K is balanced
    absorbed: Callable[[F64, float], tuple[F64, F64]]  # the parts of log u and log v that such a K absorbs

    def choose(self, workspace: Any) -> None:
        """Choose the pairs of the next K."""

    def settle(self, workspace: Any, count: int) -> list[Stats]:
        """Make at most ``count`` passes; return their numbers, for the problem with all pairs."""
        stats: list[Stats] = workspace.coarse.iterate(count)
        return stats

    def go_on(self, workspace: Any, stat: Stats) -> F64 | None:
        """Return the log v that follows a pass; None: the pass's own next log v."""
        return None

    def conclude(self, workspace: Any, stat: Stats) -> None:
        """Complete the numbers of the last pass."""


ALL_PAIRS = AllPairs()  # it has no state
