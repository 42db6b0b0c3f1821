"""Public functions tell an editor the types of their arguments; doors list their names; properties have docstrings."""

import importlib
import inspect
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import mapuot

DOORS = "pot", "torch", "jax", "da", "flow", "wot", "plot", "report", "files"
HERE = Path(__file__).resolve().parent
MOST_ANY = 0.12  # of the named arguments of public functions: their type is Any
VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


@cache
def public():
    """Return {name: object} of everything that the package and its doors list, for doors that can be imported."""
    found = {name: getattr(mapuot, name) for name in mapuot.__all__}
    for door in DOORS:
        try:
            module = importlib.import_module(f"mapuot.{door}")
        except ImportError:
            continue
        found.update({f"{door}.{name}": getattr(module, name) for name in module.__all__})
    return {name: x for name, x in found.items() if callable(x) and x.__module__.startswith("mapuot")}


def functions(name, owner):
    """Yield (name, function) of a function, or of the public methods that a class defines."""
    if not inspect.isclass(owner):
        yield name, owner
        return
    for key, member in inspect.getmembers(owner, inspect.isfunction):
        if member.__module__.startswith("mapuot") and (not key.startswith("_") or key == "__init__"):
            yield f"{name}.{key}", member


def arguments():
    """Yield (name of a public function, argument, whether its type is unknown)."""
    for name, owner in public().items():
        if not (inspect.isclass(owner) and issubclass(owner, tuple)):
            for place, function in functions(name, owner):
                parameters = [*inspect.signature(function).parameters.values()][inspect.isclass(owner) :]
                for one in parameters:
                    if one.kind not in VARIADIC:
                        kind = getattr(one.annotation, "__name__", one.annotation)
                        yield place, one.name, kind in ("Any", "_empty")


def test_few_public_arguments_are_any():
    known = list(arguments())
    assert len(known) > 300
    unknown = [f"{place}({name})" for place, name, is_any in known if is_any]
    assert len(unknown) <= MOST_ANY * len(known), unknown


@pytest.mark.parametrize("door", DOORS)
def test_a_door_lists_its_names(door):
    try:
        module = importlib.import_module(f"mapuot.{door}")
    except ImportError as error:
        pytest.skip(str(error))
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_a_checker_of_types_finds_a_users_mistakes():
    """mypy finds nine mistakes, each marked as an error to ignore; one that is not found fails."""
    pytest.importorskip("mypy")
    programs = [HERE / "user_types.py", HERE / "user_mistakes.py"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *programs], capture_output=True, text=True, check=False, cwd=HERE.parents[1]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert programs[1].read_text(encoding="utf-8").count("# type: ignore") == 9


def test_properties_have_docstrings():
    found = [
        f"{name}.{key}"
        for name, owner in public().items()
        if inspect.isclass(owner)
        for key, member in inspect.getmembers(owner)
        if not key.startswith("_") and isinstance(inspect.getattr_static(owner, key), property) and not member.__doc__
    ]
    assert found == []
