"""What users read runs: the examples of all docstrings, and every block of code of the README."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import mapuot

ROOT = Path(__file__).parents[2]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NEEDS = {"torch": "torch", "jax": "jax", "cli": "click", "__main__": "click", "plot": "matplotlib"}


def modules():
    """Those with examples."""
    for path in Path(mapuot.__file__).parent.rglob("*.py"):
        if ">>> " in path.read_text(encoding="utf-8"):
            yield "mapuot." + ".".join(path.relative_to(Path(mapuot.__file__).parent).with_suffix("").parts)


@pytest.mark.parametrize("name", sorted(modules()))
def test_examples_of_docstrings(name, tmp_path, monkeypatch):
    needed = NEEDS.get(name.rpartition(".")[2])
    if needed:
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
        runner.run(test)
    assert runner.failures == 0


@pytest.mark.parametrize("name", sorted(x for x in mapuot.__all__ if x not in ("__version__", "da", "pot")))
def test_everything_public_has_an_example(name):
    """But warnings, errors and records, which nobody calls."""
    thing = getattr(mapuot, name)
    records = (mapuot.BatchResult, mapuot.BarycenterResult, mapuot.Stats)
    if (inspect.isclass(thing) and issubclass(thing, Exception)) or thing in records:
        assert thing.__doc__
        return
    assert ">>>" in thing.__doc__ or "As in `sinkhorn_unbalanced`" in thing.__doc__
