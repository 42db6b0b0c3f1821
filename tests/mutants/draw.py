"""Changes drawn by a rule: each comparison, constant and term in the functions of bounds, statuses and values.

A comparison is turned round, a number doubled (0 becomes 1), a term of a sum, a factor of a product or an operand of
"and" and "or" left out. One reading by tokens serves C, CUDA and Python. ``FUNCTIONS`` names the functions of a file,
all of them where it names none, and the tests that have to notice.
"""

import itertools
import random
import re
from pathlib import Path
from typing import NamedTuple

PARTS = "api/test_refusals.py::test_parts_with_unlike_masses_are_told_before_a_pass api/test_sparse.py"
CUTS = (
    "api/test_refusals.py::test_told_where_and_only_where_there_is_no_plan "
    "api/test_refusals.py::test_a_flow_shows_what_potentials_do_not "
    "api/test_refusals.py::test_each_search_names_the_points_and_allows_for_rounding"
)
BATCHES = [
    "test_float64_passes_are_those_of_the_oracle", "test_totals_far_apart_are_certified_truly",
    "test_passes_certify_what_hard_columns_miss", "test_no_gap_is_known_while_hard_columns_miss_more_than_tol_gap",
    "test_certified_error_counts_masses_that_differ_by_rounding",
    "test_a_dual_value_counts_what_large_potentials_round", "test_last_pass_is_a_float64_one",
    "test_scales_beyond_float32_go_to_float64_passes", "test_small_reg_needs_no_help", "test_own_reg_and_reg_m",
    "test_every_problem_is_certified", "test_clouds_are_solved_on_the_device",
]  # fmt: skip
PASSES = [
    "test_every_penalty_equals_the_oracle", "test_passes_equal_the_oracle", "test_deep_memory_equals_the_oracle",
    "test_captured_passes_know_of_a_rebuilt_kernel", "test_masses_beyond_float32",
    "test_numbers_fit_the_plan_where_scalings_are_clipped", "test_a_wrong_correction_is_dropped",
    "test_corrected_solves_are_certified", "test_one_row_far_away_costs_no_certificate",
    "test_a_plain_problem_is_solved_in_one_call",
]  # fmt: skip
JUDGES = "judge", "act", "conclude", "check_in_place", "meet", "undo_rejected", "certify_last"
FUNCTIONS = {
    "src_c/common/rules.h": ("core/test_rules.py", ()),
    "src_c/newton.c": ("core/test_newton.py hostile/test_bounds.py", ()),
    "src_c/batch.c": ("api/test_batch.py core/test_newton.py", ()),
    "src_cuda/batch/batch_finish.cuh": (" ".join(f"cuda/test_batch_cuda.py::{test}" for test in BATCHES), ()),
    "src_cuda/dense/finish_scalars.cuh": (" ".join(f"cuda/test_cuda.py::{test}" for test in PASSES), ()),
    "mapuot/ascend/loop.py": ("core/test_newton.py core/test_solve.py", JUDGES),
    "mapuot/outcome.py": ("core/test_outcome.py core/test_newton.py core/test_solve.py", ()),
    "mapuot/ascend/barycenters.py": ("api/test_barycenter.py", ("certified", "hard_bounds", "soft_gap", "apart")),
    "mapuot/backends/operator.py": ("api/test_barycenter.py", ("least_eigenvalue", "log_products")),
    "src_c/barycenter.c": ("api/test_barycenter.py", ("logarithms", "log_products", "multiply")),
    "mapuot/ascend/kept.py": ("core/test_kept.py", ()),
    "mapuot/backends/newton.py": ("core/test_newton.py", ()),
    "mapuot/backends/workspace.py": ("hostile/test_far.py", ("exponents", "check_idle", "dual_constants")),
    "mapuot/problem/problem.py": ("hostile/test_far.py core/test_solve.py", ("exponent_error", "idle_points", "holds")),
    "mapuot/problem/parts.py": (PARTS, ()),
    "mapuot/problem/cut.py": (CUTS, ()),
    "mapuot/problem/points.py": ("api/test_points.py", ("error", "_bounds")),
    "mapuot/answer/result.py": ("api/test_result.py api/test_uses.py", ("dual", "objective", "error_bound")),
    "mapuot/answer/unregularised.py": ("api/test_uses.py api/test_batch_answers.py api/test_result.py", ()),
    "mapuot/marginals/certificate.py": ("api/test_marginals.py", ()),
}  # fmt: skip
TURNED = {"<": ">=", ">": "<=", "<=": ">", ">=": "<", "==": "!=", "!=": "=="}
TOKEN = re.compile(
    r'(?P<skipped>"""[\s\S]*?"""|/\*[\s\S]*?\*/|//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')'
    r"|(?P<number>(?<![\w.])(?:0x[\da-fA-F.]+p?[+-]?\d*|\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)f?(?![\w.]))"
    r"|(?P<comparison><=|>=|==|!=|(?<=\s)[<>](?=\s))"
    r"|(?P<joint>&&|\|\||\band\b|\bor\b|(?<=\s)[-+*/&|](?=\s))"
    r"|(?P<open>[([{])|(?P<close>[)\]}])|(?P<end>[,;:?]|(?<![<>=!])=(?!=)|\breturn\b|\bif\b|\belse\b|\bfor\b|\bin\b)"
)
LOOSER = {"or": 0, "||": 0, "and": 1, "&&": 1, "|": 2, "&": 2, "+": 4, "-": 4, "*": 5, "/": 5}
COMPARED = 3  # how tightly a comparison binds


class Change(NamedTuple):
    """The text from ``first`` to ``last`` in a file becomes ``new``."""

    file: str
    first: int
    last: int
    new: str
    tests: str

    def told(self, text: str) -> str:
        """Show the change in its line."""
        line = text.count("\n", 0, self.first) + 1
        begin = text.rfind("\n", 0, self.first) + 1
        before = text[begin : self.first].lstrip()
        old = " ".join(text[self.first : self.last].split())
        return f"{self.file}:{line}: {before}[{old} ~> {self.new}]"


def bodies(text: str, names: tuple[str, ...], of_python: bool) -> list[tuple[int, int]]:
    """Return where the functions ``names`` of a file begin and end; by default all functions."""
    some = "|".join(names) or r"\w+"
    if of_python:
        heads = re.finditer(rf"^( *)def (?:{some})\(", text, re.MULTILINE)
        ends = [
            (found.start(), re.compile(rf"^ {{0,{len(found[1])}}}\S", re.MULTILINE), found.end()) for found in heads
        ]
        return [(first, (end.start() if (end := rule.search(text, at)) else len(text))) for first, rule, at in ends]
    heads = re.finditer(rf"^[\w/].*\b(?:{some})\([^;{{}}]*\)\s*\{{$", text, re.MULTILINE)
    return [(found.end(), text.index("\n}", found.end())) for found in heads]


def changes_in(file: str, text: str, first: int, last: int, tests: str) -> list[Change]:
    """Return all changes of one function."""
    tokens = [(found.lastgroup, found[0], found.start(), found.end()) for found in TOKEN.finditer(text, first, last)]
    found = []
    for k, (kind, word, begin, end) in enumerate(tokens):
        if kind == "number" and not (text[begin - 1] == "[" and text[end] == "]"):  # an index is no constant
            if not float(re.sub(r"0x.*", "1", word.rstrip("f"))):
                new = "1"
            else:
                new = f"(2 * {word})"
            found.append(Change(file, begin, end, new, tests))
        elif kind == "comparison":
            found.append(Change(file, begin, end, TURNED[word], tests))
        elif kind == "joint":
            to = end_of_operand(tokens[k + 1 :], LOOSER[word], last)
            found.append(Change(file, begin, to, "", tests))
    return found


def end_of_operand(tokens: list[tuple[str | None, str, int, int]], binding: int, last: int) -> int:
    """Return the end of the operand before these tokens' first looser operator."""
    depth = 0
    for kind, word, begin, _ in tokens:
        depth += (kind == "open") - (kind == "close")
        looser = kind == "joint" and LOOSER[word] <= binding
        if depth < 0 or (not depth and (looser or kind == "end" or (kind == "comparison" and binding > COMPARED))):
            return begin
    return last


def all_changes(root: Path) -> list[Change]:
    found = []
    for file, (tests, names) in FUNCTIONS.items():
        text = (root / file).read_text()
        for first, last in bodies(text, names, file.endswith(".py")):
            found += changes_in(file, text, first, last, tests)
    return found


def drawn(root: Path, count: int, seed: int) -> list[Change]:
    """Draw so many changes, equally many from each file as far as there are."""
    by_file: dict[str, list[Change]] = {}
    for change in all_changes(root):
        by_file.setdefault(change.file, []).append(change)
    rng = random.Random(seed)
    for changes in by_file.values():
        rng.shuffle(changes)
    rounds = itertools.zip_longest(*by_file.values())
    return [change for one in rounds for change in one if change][:count]
