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

from bench import newton, passes, problems, readme, sparse  # noqa: E402


def record(*dense):
    """Rows of three patterns, with the time of the dense pass where ``dense`` has one."""
    passes = [
        {"pattern": pattern, "n": n, "density": 0.01, "pairs": n * n // 100, "MiB": {"mixed": 1.0},
         "seconds": {"mixed": 1e-4, "float64": 2e-4} | ({} if found is None else {"dense mixed": found})}
        for (pattern, n), found in zip((("uniform", 1000), ("banded", 1000), ("uniform", 10**6)), dense, strict=True)
    ]  # fmt: skip
    parts = [{"reg_m": 0.5, "together": 14, "alone": [14, 12]}]
    return {"n": 1000, "device": "gpu", "passes": passes, "parts": parts, "machine": {}}


@pytest.mark.parametrize("dense", [(1e-3, 1e-3, None), (None, None, None), (None, 1e-3, None)])
def test_rows_too_large_for_a_dense_pass_are_drawn_and_told(dense, tmp_path):
    data = json.loads(json.dumps(record(*dense)))
    sparse.plot(data, tmp_path / "sparse.png")
    assert (tmp_path / "sparse.png").stat().st_size > 1000
    assert sparse.report(data).count("1000000") == 1
    table = readme.sparse_table(data)
    assert table.count("(10.0)") == sum(x is not None for x in dense)
    assert ("the dense pass 1 ms" in table) == any(dense)


def test_the_table_of_stored_pairs_is_that_of_the_record():
    data = readme.load(readme.RESULTS, "sparse_gpu")
    assert readme.sparse_table(data) in (ROOT / "docs/speed.md").read_text()


@pytest.mark.parametrize("name", list(passes.METHODS))
def test_passes_are_counted_to_every_goal(name):
    arrays = problems.make(next(iter(problems.FAMILIES)), 20, 20, seed=1)
    found = passes.count_passes(arrays, 0.1, 1.0, name, newton.solve(*arrays, 0.1, 1.0))
    assert found["ended"] == "reached"
    assert all(0 < made < passes.CAP for made in found["passes"].values())
