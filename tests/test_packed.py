"""Code of a room packs no more assignments and conditional expressions than the limits below."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Most packed assignments (% of all assignments) and conditional expressions (per 1000 lines) of a room. A limit may
# only fall: a reader needs one look at an assignment a line, and at an if statement in place of long arms.
LIMITS = {
    "mapuot": (1, 17),
    "mapuot/answer": (0.5, 23),
    "mapuot/api": (2, 17),
    "mapuot/ascend": (1, 18),
    "mapuot/backends": (1.5, 15),
    "mapuot/files": (0.5, 15),
    "mapuot/marginals": (0.5, 17),
    "mapuot/pot": (0.5, 15),
    "mapuot/problem": (0.5, 15),
    "mapuot/ranks": (0.5, 11),
    "mapuot/route": (1, 15),
    "mapuot/spaces": (0.5, 16),
    "tests": (1, 15),
    "src_cuda": (0.5, 12),
    "bench": (0.5, 15),
}


def is_packed(node):
    """Say whether a statement binds several names at once, one of them to more than a name or a constant."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple) or len(node.value.elts) == 1:
        return False
    is_unpacked = any(isinstance(target, ast.Tuple) for target in node.targets)
    return is_unpacked and not all(isinstance(x, ast.Name | ast.Constant | ast.Attribute) for x in node.value.elts)


def count_packed(sources):
    """Return the percentage of packed assignments and the conditional expressions per 1000 lines."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    n_lines = sum(source.count("\n") for source in sources)
    n_conditionals = sum(isinstance(node, ast.IfExp) for node in nodes)
    return 100 * sum(map(is_packed, assignments)) / len(assignments), 1000 * n_conditionals / n_lines


def sources_of(room):
    """Return the texts of a room's files: of mapuot the single files, of other rooms those in folders, too."""
    folder = ROOT / room
    paths = sorted(folder.glob("*.py") if room == "mapuot" else folder.rglob("*.py"))
    return [path.read_text(encoding="utf-8") for path in paths]


@pytest.mark.parametrize("room", LIMITS)
def test_assignments_and_conditionals_are_unpacked(room):
    packed, conditionals = count_packed(sources_of(room))
    most_packed, most_conditionals = LIMITS[room]
    assert packed <= most_packed
    assert conditionals <= most_conditionals


def test_every_room_has_limits():
    rooms = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "mapuot").glob("*/__init__.py")}
    assert rooms <= set(LIMITS)


def test_counts():
    source = "a, b = f(x), 1\nc = a if b else 2\nd, e = a.b, 3\na, b = f(x)\n"
    assert count_packed([source]) == (25, 250)
