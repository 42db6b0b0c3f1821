"""The rooms of the package: who imports whom, read from the sources, those in functions, too."""

import ast
from functools import cache
from pathlib import Path

import mapuot

ROOT = Path(mapuot.__file__).parent
ABOVE = {"mapuot.api.solve", "mapuot.api.batch", "mapuot.ascend.carry_out", "mapuot.ascend.loop"}
NAMES = ("pot", "torch", "compiled", "jax", "da", "flow", "cli", "moscot", "wot", "plot", "report", "__main__")
DOORS = tuple(f"mapuot.{name}" for name in NAMES)


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources():
    """{module: (its tree, whether it is a package)}."""
    return {
        module_name(path): (ast.parse(path.read_text(encoding="utf-8")), path.name == "__init__.py")
        for path in ROOT.rglob("*.py")
    }


def absolute(name, level, package):
    """The module that ``from <level dots><name> import`` means in a package."""
    if not level:
        return name or ""
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, *([name] if name else [])])


def named(node, package):
    """The modules that one node of a tree imports; by import_module those whose whole name stands there."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        base = absolute(node.module, node.level, package)
        full = {f"{base}.{alias.name}" for alias in node.names}
        return {name if name in sources() else base for name in full}
    called = node.func if isinstance(node, ast.Call) else None
    if "import_module" in (getattr(called, "id", ""), getattr(called, "attr", "")):
        name = getattr(node.args[0], "value", "")
        return {absolute(name.lstrip("."), int(name.startswith(".")), package)} if isinstance(name, str) else set()
    return set()


@cache
def graph():
    """{module: the modules of mapuot that it imports}; a module is no importer of the packages it lies in."""
    found = {}
    for module, (tree, is_package) in sources().items():
        package = module if is_package else module.rpartition(".")[0]
        names = set().union(*(named(node, package) for node in ast.walk(tree)))
        found[module] = {name for name in names if name in sources()} - {module}
    return found


def reach(start):
    seen, left = set(), [start]
    while left:
        for name in graph()[left.pop()] - seen:
            seen.add(name)
            left.append(name)
    return seen


def test_the_graph_is_not_empty():
    edges = graph()
    assert "mapuot.api.solve" in edges["mapuot"]
    assert "mapuot.backends.contract" in edges["mapuot.problem.problem"]


def test_no_circle():
    assert not [module for module in sources() if module in reach(module)]


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
