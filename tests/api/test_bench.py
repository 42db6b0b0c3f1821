"""The pictures and tables of the benchmark, from records as its parts make them."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "bench").is_dir():
    pytest.skip("no benchmark beside an installed package", allow_module_level=True)
pytest.importorskip("matplotlib")
sys.path.append(str(ROOT))

from bench import common, passes, problems, readme, sparse  # noqa: E402


def record(*dense):
    """Rows of three patterns, with the time of the dense pass where ``dense`` has one."""
    passes = [
        {"pattern": pattern, "n": n, "density": 0.01, "pairs": n * n // 100, "MiB": {"mixed": 1.0},
         "seconds": {"mixed": 1e-4, "float64": 2e-4} | ({} if found is None else {"dense mixed": found})}
        for (pattern, n), found in zip((("uniform", 1000), ("banded", 1000), ("uniform", 10**6)), dense, strict=True)
    ]  # fmt: skip
    parts = [{"reg_m": 0.5, "together": 14, "alone": [14, 12]}]
    return {"n": 1000, "device": "NVIDIA H200", "passes": passes, "parts": parts, "machine": {}}


@pytest.mark.parametrize("dense", [(1e-3, 1e-3, None), (None, None, None), (None, 1e-3, None)])
def test_rows_too_large_for_a_dense_pass_are_drawn_and_told(dense, tmp_path):
    data = json.loads(json.dumps(record(*dense)))
    common.picture(tmp_path / "sparse.png", sparse.panels(data))
    assert (tmp_path / "sparse.png").stat().st_size > 1000
    table = sparse.tables(data)
    assert table.count("(10.0)") == sum(x is not None for x in dense)
    assert ("the dense pass 1 ms" in table) == any(dense)


@pytest.mark.parametrize("part", readme.TABLES)
def test_tables_of_the_docs_are_those_of_the_records(part):
    page, records = readme.TABLES[part]
    found = readme.module_of(part).tables(*(readme.load(readme.RESULTS, record) for record in records))
    assert found in (ROOT / page).read_text()


@pytest.mark.parametrize("name", list(passes.METHODS))
def test_passes_are_counted_to_every_tolerance(name):
    case = *problems.make(next(iter(problems.FAMILIES)), 20, 20, seed=1), 0.1, 1.0
    counts = [passes.count(case, name, tol) for tol in passes.TOLS]
    assert 0 < counts[0] <= counts[1] < passes.CAP


def test_a_true_error_is_found_by_newtons_method():
    row = passes.hard_case("a", 0.01, 1.0, 3.0)
    assert row["status"] == "converged"
    assert 0 < row["true"] <= row["bound"]
    assert not row["lies"]


def test_tables_are_aligned_for_a_screen():
    shown = common.aligned(common.table(["n", "seconds"], [[10, 0.5], [2000, 12.25]]))
    assert shown == "   n  seconds\n  10      0.5\n2000     12.2"
