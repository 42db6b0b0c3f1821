"""The tables of the benchmark, from records as its parts make them."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "bench").is_dir():
    pytest.skip("no benchmark beside an installed package", allow_module_level=True)
sys.path.append(str(ROOT))

from bench import passes, readme  # noqa: E402


@pytest.mark.parametrize("marker", readme.TABLES)
def test_tables_of_the_docs_are_those_of_the_records(marker):
    found = readme.found(marker, readme.RESULTS)
    for page in readme.TABLES[marker][0]:
        assert f"<!-- {marker} -->\n{found}\n<!-- /{marker} -->" in (ROOT / page).read_text()


def test_a_true_error_is_found_by_newtons_method():
    row = passes.hard_case("a", 0.01, 1.0, 3.0)
    assert row["status"] == "converged"
    assert 0 < row["true"] <= row["bound"]
    assert not row["lies"]
