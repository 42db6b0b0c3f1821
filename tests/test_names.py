"""Classes are nouns and functions are verbs; the glossary names classes that exist, and each word once."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
# Participles and other words that name no thing; a class with one of them has a noun behind it, as in KeptPairs.
NO_NOUNS = {
    "Absent", "Alone", "Begun", "Between", "Bounded", "Closed", "Derived", "Done", "Found", "Given", "Judged", "Kept",
    "Later", "Left", "Lie", "Masked", "Ordered", "Posed", "Prepared", "Reached", "Rescaled", "Sent", "Solved", "Sorted",
    "Tilted", "Told", "Turn",
}  # fmt: skip
NO_VERBS = {"begun", "held", "known", "sent", "take", "told"}  # words that once had up to twelve meanings


@cache
def definitions(kind):
    """Return {name: files} of the classes or functions of the package."""
    found = {}
    for path in (ROOT / "mapuot").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                found.setdefault(node.name, []).append(path.name)
    return found


@cache
def glossary():
    """Return the rows of the glossary: (word, idea)."""
    text = PAGE.read_text(encoding="utf-8").split("\n## Glossary\n")[1].split("\n## ")[0]
    rows = [re.split(r" ?(?<!\\)\| ?", line.strip("| "), maxsplit=1) for line in text.splitlines() if "| " in line]
    return [tuple(row) for row in rows if row[0] not in ("word", "---")]


def test_classes_are_nouns():
    names = definitions(ast.ClassDef)
    assert "KeptPairs" in names
    assert {name: files for name, files in names.items() if name in NO_NOUNS} == {}


def test_functions_are_verbs():
    names = definitions((ast.FunctionDef, ast.AsyncFunctionDef))
    assert "solve" in names
    assert {name: files for name, files in names.items() if name in NO_VERBS} == {}


def test_whole_is_the_cloud_of_which_a_cost_takes_points():
    """Functions, arguments and attributes of this name are costs between points; other things have other names."""
    homes = set()
    for path in (ROOT / "mapuot").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            names = getattr(node, "name", None), getattr(node, "arg", None), node.attr if is_set else None
            if "whole" in names:
                homes.add(path.name)
    assert homes == {"clouds.py", "points.py"}


@pytest.mark.skipif(not PAGE.exists(), reason="no pages beside an installed package")
def test_the_glossary_says_each_word_once():
    words = [word for entry, _ in glossary() for word in entry.split(", ")]
    assert len(words) > 60
    assert sorted(set(words)) == sorted(words)


@pytest.mark.skipif(not PAGE.exists(), reason="no pages beside an installed package")
def test_the_glossary_names_classes_that_exist():
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+|Backend|Call|Options|Outcome|Run|Stats)`", str(glossary())))
    assert len(named) > 12
    assert named - set(definitions(ast.ClassDef)) == set()
