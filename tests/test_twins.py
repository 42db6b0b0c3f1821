"""Cross references of the sources: the twin, the oracle or any other file that a comment names is there.

A path starts beside the file that names it, where the reference before it in the same comment is, at the root of the
repository, or in src_c, src_cuda or mapuot. Names in brackets behind a file ("finish.c (judge, stalled)"), and one with
an underscore or in capitals before it ("row_pass in kernels_tmpl.c"), are defined in that file.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src_c", "src_cuda", "mapuot", "tests", "bench")
SUFFIXES = {".c", ".h", ".cu", ".cuh", ".py"}
FILE = re.compile(r"(?<![\w./>-])(?:[\w-]+/)*(?:[\w-]+\.(?:cuh?|c|h|py)\b|(?<=/)(?=[\s,.]|$))")
NAMES = re.compile(r"\s*\((\w+(?:,\s*\w+)*)\)")
NAME_BEFORE = re.compile(r"\b([a-z]\w*_\w+|[A-Z][A-Z\d_]+)\s+in\s+$")
LEADER = re.compile(r"^[ \t]*(?://+|/?\*+|#+)", re.MULTILINE)
PYTHON = re.compile(r'""".*?"""|#(?!include)[^\n]*', re.DOTALL)
C = re.compile(r"/\*.*?\*/|(?://[^\n]*\n\s*)+", re.DOTALL)
EXAMPLES = {"program.py"}  # a file of the reader's


def sources():
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.suffix in SUFFIXES and "_cuda_src" not in path.parts and path != Path(__file__).resolve():
            yield path


def comments(path, text):
    """(line, comment), the marks of its lines blank, so that a reference may go on in the next line."""
    for found in (PYTHON if path.suffix == ".py" else C).finditer(text):
        blank = LEADER.sub(lambda mark: " " * len(mark.group()), found.group())
        yield text.count("\n", 0, found.start()) + 1, blank


def target_of(path, file, last):
    """Where the file is that a comment at ``path`` names; None where it is not."""
    homes = (path.parent, last, ROOT, *(ROOT / name for name in ("src_c", "src_cuda", "mapuot")))
    return next((home / file for home in homes if (home / file).exists()), None)


def is_defined(name, path):
    """A definition of C starts in the first column, of Python after def or class, or as an assignment there."""
    if path.suffix == ".py":
        pattern = rf"^\s*(?:def|class)\s+{name}\b|^{name}\b.* = "
    else:
        pattern = rf"^(?!#include|//| ?\*)(?:\S.*)?\b{name}\b"
    return re.search(pattern, path.read_text(), re.MULTILINE) is not None


def wrong(path, text):
    """What the comments of this text, at ``path``, name and is not there: "file:line: ..."."""
    for first, comment in comments(path, text):
        last = path.parent
        for found in FILE.finditer(comment):
            file, where = found.group(), f"{path.relative_to(ROOT)}:{first + comment.count(chr(10), 0, found.start())}"
            if not file or file in EXAMPLES:
                continue
            target = target_of(path, file, last)
            if target is None:
                yield f"{where}: {file} is not there"
                continue
            last = target.parent
            behind, before = NAMES.match(comment, found.end()), NAME_BEFORE.search(comment[: found.start()])
            names = re.split(r",\s*", behind.group(1)) if behind else []
            names += [before.group(1)] if before else []
            yield from (f"{where}: {file} does not define {name}" for name in names if not is_defined(name, target))


def test_what_is_named_exists():
    found = [line for path in sources() for line in wrong(path, path.read_text())]
    assert not found, "\n" + "\n".join(found)


def test_a_reference_to_nothing_is_told():
    here = ROOT / "src_cuda" / "iterate.cu"
    right = "// Mirrors src_c/solver.c (mapuot_iterate), pool.c.\nint x;\n/* Twins: mapuot/,\n * cli.py */"
    assert not list(wrong(here, right))
    for text, told in [
        ("// Mirrors row_passes.cu.\n", "1: row_passes.cu is not there"),
        ("/* Twins: src_c/solver.c,\n * solver_of_nothing.c. */", "2: solver_of_nothing.c is not there"),
        ("// Twin of src_c/solver.c (no_function): text\n", "1: src_c/solver.c does not define no_function"),
        ("// see no_pass in backends/reference.py\n", "1: backends/reference.py does not define no_pass"),
    ]:
        assert list(wrong(here, text)) == [f"src_cuda/iterate.cu:{told}"]
