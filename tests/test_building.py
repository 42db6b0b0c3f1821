"""Building the package: the page that PyPI shows, the message about a missing compiler, the list of make's targets."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the sources are elsewhere")


def setup_module_of_the_package():
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("setup_of_mapuot", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_pypi_has_absolute_links(monkeypatch):
    """Every link and picture of README.md is absolute, and names a file that exists."""
    monkeypatch.chdir(ROOT)
    module = setup_module_of_the_package()
    targets = re.findall(r"\]\(([^)]*)\)", module.front_page())
    assert len(targets) > 10
    for target in targets:
        assert target.startswith("https://")
        path = re.sub(r"https://(raw\.githubusercontent|github)\.com/mapuot/mapuot/(blob/)?v[^/]*/", "", target)
        assert path.startswith("https:") or (ROOT / path.partition("#")[0]).exists(), target
    assert "![" in module.front_page()


def test_a_missing_compiler_is_named_in_the_last_line(tmp_path):
    pytest.importorskip("cffi")
    setup_module_of_the_package()
    words = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path]
    environment = {**os.environ, "CC": "no-such-compiler", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("mapuot: there is no C compiler 'no-such-compiler': install gcc")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_lists_every_target_in_groups():
    """`make` lists each target of .PHONY that has a text, in groups, in lines of less than 100 columns."""
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    source = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", source, re.M)[1].replace("\\", " ").split()
    assert max(map(len, listed.splitlines())) < 100
    assert [title for title in re.findall(r"^##@ (.*)$", source, re.M) if f"\n\n{title}\n" not in listed] == []
    assert [name for name in phony if not re.search(rf"^  (\S+ )*{name}\b", listed, re.M)] == []
