"""Answers in files, loaded again; labels that move; the fewest entries that hold a share; what a notebook shows."""

import subprocess
import sys

import matrix
import numpy as np
import pytest
from problems import clouds

import mapuot
from mapuot.answer import store

PLAIN, KL = clouds(23, 31, reg=0.05, reg_m=(0.7, 2.0), ratio=1.4), ("kl", "kl")
FORMATS = {".npz": "numpy", ".h5": "h5py", ".zarr": "zarr"}  # and what each needs
KINDS = [
    ("dense", KL, {}), ("dense", ("range", "tv"), {"rho": "one a point"}),
    ("dense", ("kl", "balanced"), {"masses": "zeros", "pairs": "forbidden"}), ("dense", KL, {"reference": "given"}),
    ("dense", KL, {"mask": "mask", "reference": "given"}), ("dense", KL, {"mask": "mask"}),
    ("pairs", KL, {"pairs": "forbidden"}), ("points", KL, {}), ("grid", KL, {}), ("boxes", KL, {"shape": "boxes"}),
]  # fmt: skip


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(("kind", "pair", "traits"), KINDS)
def test_a_file_gives_the_answer_again(kind, pair, traits, suffix, tmp_path):
    pytest.importorskip(FORMATS[suffix])
    M, case, options = matrix.posed(kind, pair, matrix.PLAIN._replace(**traits))
    result, path = matrix.solve(M, case, **options), tmp_path / f"answer{suffix}"
    result.save(path)
    again = mapuot.load(path, M, reference=options.get("reference"))
    for one in (mapuot.load(path), again):
        assert repr(one) == repr(result)
        for name in ("log_u", "log_v", "row_marginal", "col_marginal", "f", "g"):
            np.testing.assert_array_equal(getattr(one, name), getattr(result, name), err_msg=name)
        for name in ("cost", "objective", "dual", "mass", "gap", "error_bound", "status", "n_passes"):
            assert getattr(one, name) == getattr(result, name), name
        assert store.trace_table(one.trace).tolist() == store.trace_table(result.trace).tolist()
        for side in ("rows", "cols"):
            found, right = getattr(one.problem, side), getattr(result.problem, side)
            assert (found.penalty, found.name) == (right.penalty, right.name)
            np.testing.assert_array_equal([found.rho, found.weight], [right.rho, right.weight])
    assert again._repr_html_() == result._repr_html_()
    skipped = 1e-30 if kind == "boxes" else 0.0  # of the mass, by pairs that the solve skipped: a file has no mask
    np.testing.assert_allclose(matrix.array_of(again.plan), matrix.array_of(result.plan), rtol=0, atol=skipped)
    assert (f"% of its pairs kept, seed {matrix.MASK.seed}" in result._repr_html_()) == ("mask" in traits)


def test_what_needs_m_says_so(tmp_path):
    case, path = PLAIN, tmp_path / "answer.npz"
    case.solve().save(path)
    bare = mapuot.load(path)
    assert case.solve(warm_start=bare).n_passes <= 2
    for ask in (lambda: bare.plan, lambda: bare.rows(0, 2), lambda: bare.top_k(2), lambda: bare.sparse(0.1),
                lambda: bare.apply(case.b), lambda: bare.push(np.arange(23) % 2)):  # fmt: skip
        with pytest.raises(ValueError, match=r"M must be given .*mapuot.load\(path, M\)"):
            ask()
    with pytest.raises(ValueError, match=r"M must have the answer's shape \(23, 31\), got \(22, 31\)"):
        mapuot.load(path, case.M[:-1])
    inner = np.argsort(case.M.ravel())[5:6]  # neither the least nor the largest
    without = case.M.copy()
    np.put(without, inner, np.inf)
    for other in (2 * case.M, case.M * (1 + 2e-6), without):
        with pytest.raises(ValueError, match="M must be the matrix that was solved, whose finite entries lie in"):
            mapuot.load(path, other)
    assert mapuot.load(path, case.M * (1 + 1e-7)).plan.shape == (23, 31)
    case.replace(reference=case.M + 1).solve().save(path)
    with pytest.raises(ValueError, match="reference must be given"):
        mapuot.load(path, case.M)


@pytest.mark.parametrize(("change", "text"),
                         [({"log_u": np.zeros(3)}, "log_u must be 23 numbers"), ({"log_v": None}, "it lacks 'log_v'"),
                          ({"format": 7}, "format must be 1 or 2, got 7"),
                          ({"a": np.full(23, np.nan)}, "a must be 23 numbers"),
                          ({"penalty_b": "magic"}, "penalty_b must be one of"),
                          ({"trace": np.zeros((2, 3))}, "trace must have 9 columns"),
                          ({"reg": -1.0}, "reg must be > 0"), ({"cost": "dear"}, "could not convert"),
                          ({"dual": np.nan}, "dual must be a number, got NaN"), ({"mass": -1.0}, "mass must be >= 0"),
                          ({"b": np.full(31, -0.1)}, "b must be finite and have some mass"),
                          ({"a": np.r_[np.ones(22), -0.1]}, "a must be >= 0"),
                          ({"row_marginal": np.full(23, -1e-9)}, "row_marginal must be >= 0"),
                          ({"rho_a": np.full(23, -2.0)}, "rho_a must be >= 0"),
                          ({"trace": np.zeros((0, 9))}, "trace must end in a pass"),
                          ({"trace": np.full((1, 9), [1, 0, np.nan, 0, 1, 0, 0, 1, 0])},
                           "trace must end in a pass")])  # fmt: skip
def test_what_is_no_answer(change, text, tmp_path):
    values = store.contents(PLAIN.solve()) | change
    np.savez(tmp_path / "x.npz", **{name: value for name, value in values.items() if value is not None})
    with pytest.raises(ValueError, match=f"x.npz holds no answer of mapuot: {text}"):
        mapuot.load(tmp_path / "x.npz")


def test_a_threshold_beyond_float32(recwarn):
    result = clouds(5, 4).replace(M=np.ones((5, 4), np.float32)).solve()
    assert result.sparse(1e300).nnz == 0
    assert result.sparse(-1e300).nnz == 20
    assert not recwarn.list


def test_import_takes_no_heavy_library():
    code = """
import sys, numpy as np, mapuot
heavy = {"scipy.special", "scipy.sparse", "scipy.spatial", "tqdm", "sklearn", "matplotlib", "click", "h5py", "torch"}
print(sorted(heavy & set(sys.modules)))
mapuot.solve(np.ones((3, 4)), reg=0.1, reg_m=1.0).plan
print(sorted(heavy & set(sys.modules)))
mapuot.plot
print("matplotlib" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]", "False"]


def test_doors_open_by_name():
    code = "import mapuot; print(mapuot.da.__name__)\ntry: mapuot.no_such_door\nexcept AttributeError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["mapuot.da", "module 'mapuot' has no attribute 'no_such_door'"]
    assert {*mapuot.__all__, "torch", "jax", "plot"} == {*dir(mapuot)}
    assert all(f"``mapuot.{name}``" in mapuot.__doc__ for name in mapuot.DOORS)


def test_a_function_that_is_read_shows_a_bar(capsys):
    case = PLAIN
    mapuot.solve(lambda i0, i1: case.M[i0:i1], case.a, case.b, reg=0.05, reg_m=1.0, progress=True)
    shown = capsys.readouterr().err
    assert "mapuot: reading M: 100%" in shown
    assert shown.index("reading M") < shown.index("passes")
    mapuot.solve(case.M, case.a, case.b, reg=0.05, reg_m=1.0, progress=True)
    assert "reading" not in capsys.readouterr().err
