"""Backends have the methods of class `Backend` and no others, and callers ask no backend for what it has."""

import ast
from pathlib import Path

import numpy as np
import pytest

import mapuot
from mapuot.backends import BACKENDS, load
from mapuot.contract import Backend

ROOT = Path(mapuot.__file__).parent
NAMES = [name for name in BACKENDS if name != "auto"]
REQUIRED = ["asarray", "extrema", "is_symmetric", "plan_of", "to_numpy", "workspace"]
OWNERS = {"backend", "_backend", "engine"}  # variables and attributes that hold a backend, or its engine of batches


def asks(source):
    """Return the lines that read an attribute of a backend by getattr or hasattr."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            owner = node.args[0]
            if (getattr(owner, "id", None) or getattr(owner, "attr", None)) in OWNERS:
                yield node.lineno


def test_no_caller_asks_a_backend_for_an_attribute():
    assert list(asks("x = getattr(run.backend, 'name', 1)\ny = hasattr(engine, 'a')\nz = getattr(x, 'b')")) == [1, 2]
    found = {str(path): [*asks(path.read_text(encoding="utf-8"))] for path in ROOT.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_has_the_methods_of_the_contract_and_no_others(name):
    own = load(name)
    assert own.name == name
    methods = {key for kind in type(own).__mro__[:-1] for key, value in vars(kind).items() if callable(value)}
    assert methods == {key for key, value in vars(Backend).items() if callable(value)}
    assert all(getattr(type(own), key) is not getattr(Backend, key) for key in REQUIRED)


def test_a_backend_without_options_lacks_only_the_required_methods():
    bare = Backend()
    bare.name = "bare"
    assert bare.long_rows == np.inf
    assert not bare.keeps_pairs(None)
    assert not bare.stores_kernel(None, None)
    assert bare.batches() is None
    assert bare.form_bytes(None) == 0
    assert bare.to_device("a problem") == "a problem"
    assert np.array_equal(bare.weigh(np.ones(3), 2)[1], [3.0, 3.0])
    for method, given in (("asarray", [1]), ("extrema", [1]), ("plan_of", [1, 2, 3]), ("costs", [1])):
        with pytest.raises(NotImplementedError, match=f"backend 'bare' has no {method}"):
            getattr(bare, method)(*given)
