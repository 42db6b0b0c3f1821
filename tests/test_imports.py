"""The sources import along the order of the rooms, in functions, too; names in comments exist."""

import ast
import re
from functools import cache
from pathlib import Path

import mapuot

ROOT = Path(mapuot.__file__).parent
ABOVE = {"mapuot.api.solve", "mapuot.api.batch", "mapuot.ascend.carry_out", "mapuot.ascend.loop"}
NAMES = (
    "pot", "torch", "compiled", "jax", "da", "flow", "fugw", "cli", "moscot", "wot", "groups", "plot", "report",
    "__main__",
)  # fmt: skip
DOORS = tuple(f"mapuot.{name}" for name in NAMES)
# The rooms from the lowest up; every other module of the package itself is on the floor below them.
ROOMS = "ranks", "problem", "files", "backends", "answer", "ascend", "route", "api marginals spaces"


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources():
    """Return {module: (its tree, whether it is a package)}."""
    return {
        module_name(path): (ast.parse(path.read_text(encoding="utf-8")), path.name == "__init__.py")
        for path in ROOT.rglob("*.py")
    }


def absolute(name, level, package):
    """Return the module that ``from <level dots><name> import`` means in a package."""
    if not level:
        return name or ""
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, *([name] if name else [])])


def named(node, package):
    """Return the modules that one node of a tree imports; for import_module, only whole names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        base = absolute(node.module, node.level, package)
        full = {f"{base}.{alias.name}" for alias in node.names}
        return {name if name in sources() else base for name in full}
    if isinstance(node, ast.Call):
        called = node.func
    else:
        called = None
    if "import_module" in (getattr(called, "id", ""), getattr(called, "attr", "")):
        name = getattr(node.args[0], "value", "")
        if isinstance(name, str):
            return {absolute(name.lstrip("."), int(name.startswith(".")), package)}
        return set()
    return set()


ON_CALL = {("mapuot.answer.result", "mapuot.report")}  # opened by a method that users call, and by nothing else


@cache
def graph():
    """Return {module: the modules of mapuot that it imports}; a module is no importer of the packages it lies in."""
    found = {}
    for module, (tree, is_package) in sources().items():
        if is_package:
            package = module
        else:
            package = module.rpartition(".")[0]
        names = set().union(*(named(node, package) for node in ast.walk(tree)))
        opened = {name for importer, name in ON_CALL if importer == module}
        found[module] = {name for name in names if name in sources()} - {module} - opened
    return found


def reach(start):
    seen = set()
    left = [start]
    while left:
        for name in graph()[left.pop()] - seen:
            seen.add(name)
            left.append(name)
    return seen


def test_no_circle():
    assert "mapuot.api.solve" in graph()["mapuot"]  # of a graph that is not empty
    assert "mapuot.arrays" in graph()["mapuot.problem.problem"]
    assert not [module for module in sources() if module in reach(module)]


def height(module):
    """Return the floor of a module: 0 for the lowest modules, then the rooms, the doors, and the package."""
    if "." in module:
        room = module.split(".")[1]
    else:
        room = None
    if room is None or module.startswith(DOORS):
        return len(ROOMS) + 1 + (room is None)
    return next((k for k, names in enumerate(ROOMS, 1) if room in names.split()), 0)


def test_imports_go_down():
    """A module imports from its own floor and from lower floors only, in functions, too."""
    doors = [name for name in sources() if name.startswith(DOORS)]
    assert doors
    edges = [(one, other) for one in sources() for other in graph()[one] if (one, other) != ("mapuot.cli", "mapuot")]
    assert {height(one) for one, _ in edges} == set(range(len(ROOMS) + 3))  # every floor has importers
    assert [f"{one} -> {other}" for one, other in edges if height(other) > height(one)] == []


def test_backends_know_nothing_of_the_loop():
    assert not {
        name: reach(name) & ABOVE for name in sources() if name.startswith("mapuot.backends") and reach(name) & ABOVE
    }


def test_nothing_below_opens_a_door():
    """The package itself offers mapuot.pot and mapuot.da by name; nothing else does."""
    edges = [(one, other) for one in sources() for other in graph()[one] if other.startswith(DOORS)]
    assert {one for one, _ in edges if not one.startswith(DOORS)} == {"mapuot"}


def test_no_class_name_twice():
    classes = [node.name for tree, _ in sources().values() for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(classes) > 100
    assert sorted(set(classes)) == sorted(classes)


# ---- cross references of the sources


# A path starts beside the file that names it, where the reference before it in the same comment is, at the root of the
# repository, or in src_c, src_cuda, a folder of src_cuda or mapuot. Names in brackets behind a file ("finish.c (judge,
# stalled)"), and one with an underscore or in capitals before it ("row_pass in kernels_tmpl.c"), are defined there.
REPO = Path(__file__).resolve().parent.parent
FOLDERS = ("src_c", "src_cuda", "mapuot", "tests", "bench")
SUFFIXES = {".c", ".h", ".cu", ".cuh", ".py"}
FILE = re.compile(r"(?<![\w./>-])(?:[\w-]+/)*(?:[\w-]+\.(?:cuh?|c|h|py)\b|(?<=/)(?=[\s,.]|$))")
NAMES = re.compile(r"\s*\((\w+(?:,\s*\w+)*)\)")
NAME_BEFORE = re.compile(r"\b([a-z]\w*_\w+|[A-Z][A-Z\d_]+)\s+in\s+$")
LEADER = re.compile(r"^[ \t]*(?://+|/?\*+|#+)", re.MULTILINE)
PYTHON = re.compile(r'""".*?"""|#(?!include)[^\n]*', re.DOTALL)
C = re.compile(r"/\*.*?\*/|(?://[^\n]*\n\s*)+", re.DOTALL)
EXAMPLES = {"program.py"}  # a file of the reader's


def texts():
    for path in sorted(path for folder in FOLDERS for path in (REPO / folder).rglob("*")):
        if path.suffix in SUFFIXES and "_cuda_src" not in path.parts and path != Path(__file__).resolve():
            yield path


def comments(path, text):
    """Yield (line, comment), the marks of its lines blank, so that a reference may go on in the next line."""
    for found in (PYTHON if path.suffix == ".py" else C).finditer(text):
        blank = LEADER.sub(lambda mark: " " * len(mark.group()), found.group())
        yield text.count("\n", 0, found.start()) + 1, blank


def target_of(path, file, last):
    """Return the path of the file that a comment at ``path`` names; None where it is not."""
    kernels = sorted(folder for folder in (REPO / "src_cuda").iterdir() if folder.is_dir())
    homes = (path.parent, last, REPO, *(REPO / name for name in ("src_c", "src_cuda", "mapuot")), *kernels)
    return next((home / file for home in homes if (home / file).exists()), None)


def is_defined(name, path):
    """Return whether the file defines the name: in C from the first column, in Python after def or class or by =."""
    if path.suffix == ".py":
        pattern = rf"^\s*(?:def|class)\s+{name}\b|^{name}\b.* = "
    else:
        pattern = rf"^(?!#include|//| ?\*)(?:\S.*)?\b{name}\b"
    return re.search(pattern, path.read_text(), re.MULTILINE) is not None


def wrong(path, text):
    """Return the names in this text's comments, at ``path``, that do not exist: "file:line: ..."."""
    for first, comment in comments(path, text):
        last = path.parent
        for found in FILE.finditer(comment):
            file = found.group()
            where = f"{path.relative_to(REPO)}:{first + comment.count(chr(10), 0, found.start())}"
            if not file or file in EXAMPLES:
                continue
            target = target_of(path, file, last)
            if target is None:
                yield f"{where}: {file} is not there"
                continue
            last = target.parent
            behind = NAMES.match(comment, found.end())
            before = NAME_BEFORE.search(comment[: found.start()])
            if behind:
                names = re.split(r",\s*", behind.group(1))
            else:
                names = []
            names += [before.group(1)] if before else []
            yield from (f"{where}: {file} does not define {name}" for name in names if not is_defined(name, target))


def test_what_is_named_exists():
    found = [line for path in texts() for line in wrong(path, path.read_text())]
    assert not found, "\n" + "\n".join(found)


def test_a_reference_to_nothing_is_told():
    here = REPO / "src_cuda" / "dense" / "iterate.cu"
    right = "// Mirrors src_c/solver.c (mapuot_iterate), pool.c.\nint x;\n/* Twins: mapuot/,\n * cli.py */"
    assert not list(wrong(here, right))
    for text, told in [
        ("// Mirrors row_passes.cu.\n", "1: row_passes.cu is not there"),
        ("/* Twins: src_c/solver.c,\n * solver_of_nothing.c. */", "2: solver_of_nothing.c is not there"),
        ("// Twin of src_c/solver.c (no_function): text\n", "1: src_c/solver.c does not define no_function"),
        ("// see no_pass in backends/reference.py\n", "1: backends/reference.py does not define no_pass"),
    ]:
        assert list(wrong(here, text)) == [f"src_cuda/dense/iterate.cu:{told}"]
