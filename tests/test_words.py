"""Comments and docstrings use no more stand-ins for nouns than the limits below, by folder."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PREPOSITIONS = "of|from|by|with|in|at|to|for|on|after|beyond|below|above|within"
WORDS = {
    "what": re.compile(r"\bwhat\b", re.IGNORECASE),
    "which": re.compile(rf"\b(?:whose|(?:{PREPOSITIONS}) which)\b", re.IGNORECASE),
    "those": re.compile(r"\b(?:that of|those (?:of|that|which)|the ones? that|such as are)\b", re.IGNORECASE),
    "opening": re.compile(r"(?:^|[.:;!?]\s+)(?:Of|Those|That|What|Such|Likewise|The same|As above)\b"),
}
# Most places per 1000 words, in the order of WORDS. A limit may only fall: a sentence that says its noun needs none.
LIMITS = {
    "mapuot": (0.3, 0.6, 0.3, 0.1),
    "src_c": (0.1, 0.2, 0.2, 0.1),
    "src_cuda": (0.1, 0.2, 0.2, 0.1),
    "tests": (0.1, 0.6, 0.1, 0.1),
    "bench": (0.2, 0.6, 0.1, 0.1),
}


def texts_of_python(source):
    """Return the docstrings, and the comments joined where they follow line by line."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, owners)]
    last = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("# ")
            if last == token.start[0] - 1:
                texts[-1] += " " + words
            else:
                texts.append(words)
            last = token.start[0]
    return texts


def texts_of_c(source):
    """Return the comments without the marks of their lines."""
    found = re.findall(r"/\*.*?\*/|(?://[^\n]*\n\s*)+", source + "\n", re.DOTALL)
    return [re.sub(r"/\*+|\*+/|//+|^\s*\*+", " ", text, flags=re.MULTILINE) for text in found]


def texts_of(folder):
    """Return the texts of a folder's files, each in one line; links to other folders' files are left out."""
    texts = []
    for path in sorted((ROOT / folder).rglob("*")):
        if path.is_symlink() or "_cuda_src" in path.parts or "_ahead" in path.parts:
            continue
        if path.suffix == ".py":
            texts += texts_of_python(path.read_text(encoding="utf-8"))
        elif path.suffix in {".c", ".h", ".cu", ".cuh"}:
            texts += texts_of_c(path.read_text(encoding="utf-8"))
    return [" ".join(text.split()) for text in texts]


@pytest.mark.parametrize("folder", LIMITS)
def test_sentences_say_their_nouns(folder):
    texts = texts_of(folder)
    thousands = sum(len(text.split()) for text in texts) / 1000
    assert thousands > 1
    for (word, pattern), limit in zip(WORDS.items(), LIMITS[folder], strict=True):
        places = [text[max(0, at.start() - 40) : at.end() + 40] for text in texts for at in pattern.finditer(text)]
        assert len(places) <= limit * thousands, f"{word}: {len(places) / thousands:.2f} > {limit}: {places[-20:]}"


def test_patterns_find_stand_ins():
    """A docstring, a comment of several lines and a comment of C are one text each; the patterns search these texts."""
    python = 'x = 1  # one that\n# is\n"""no docstring"""\ndef f():\n    """Of a row."""\n'
    assert texts_of_python(python) == ["", "Of a row.", "one that is"]
    assert [" ".join(text.split()) for text in texts_of_c("/* those\n * of b */ int i; // at which\n")] == [
        "those of b",
        "at which",
    ]
    found = {word: bool(pattern.search("Of K what leaves those of b, at which")) for word, pattern in WORDS.items()}
    assert found == dict.fromkeys(WORDS, True)
