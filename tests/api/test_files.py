"""Matrices that are read block by block, from functions and files, against the same matrix in memory."""

import pickle

import numpy as np
import pytest
from problems import clouds

import mapuot
from mapuot import files
from mapuot.problem import cost

FORMATS = ["plain.npy", "fortran.npy", "plain.npz", "packed.npz", "some.h5", "packed.hdf5", "some.zarr"]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of about seven rows of 21 columns."""
    monkeypatch.setattr(cost, "BLOCK_BYTES", 7 * 21 * 8)


def write(path, M, **more):
    kind, packed = path.suffix, path.stem == "packed"
    if kind == ".npy":
        np.save(path, np.asfortranarray(M) if path.stem == "fortran" else M)
    elif kind == ".npz":
        (np.savez_compressed if packed else np.savez)(path, M=M, **more)
    elif kind == ".zarr":
        zarr = pytest.importorskip("zarr", minversion="3")
        group = zarr.open_group(path, mode="w")
        for name, value in {"M": M, **more}.items():
            group.create_array(name, data=value)
    else:
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            file.create_dataset("M", data=M, chunks=(5, 4) if packed else None, compression="gzip" if packed else None)
            for name, value in more.items():
                file[name] = value
    return path


def same(one, two):
    assert (one.status, one.n_passes) == (two.status, two.n_passes)
    for name in ("log_u", "log_v", "row_marginal", "col_marginal", "plan"):
        np.testing.assert_allclose(getattr(one, name), getattr(two, name), rtol=1e-12, atol=1e-13, err_msg=name)
    for name in ("cost", "objective", "dual", "mass"):
        np.testing.assert_allclose(getattr(one, name), getattr(two, name), rtol=1e-13, err_msg=name)
    m, n = one.plan.shape
    np.testing.assert_allclose(one.apply(np.arange(n)), two.apply(np.arange(n)), rtol=1e-12)
    np.testing.assert_allclose(one.apply_transpose(np.ones((m, 2))), two.apply_transpose(np.ones((m, 2))), rtol=1e-12)
    np.testing.assert_array_equal(one.rows(3, 12), one.plan[3:12])
    np.testing.assert_array_equal(one.top_k(2)[0], two.top_k(2)[0])


def test_reference_in_a_file(small_blocks, tmp_path):
    case = clouds(40, 21)
    c = np.random.default_rng(0).random((40, 21))
    M, kept = write(tmp_path / "plain.npz", case.M), write(tmp_path / "plain.npy", c)
    found = case.replace(M=M, reference=files.open_matrix(kept)).solve()
    same(found, case.replace(reference=c).solve())


@pytest.mark.parametrize("name", FORMATS)
def test_formats(small_blocks, tmp_path, name):
    case = clouds(40, 21)
    path = write(tmp_path / name, case.M, a=case.a, b=case.b)
    opened = files.open_matrix(path)
    assert opened.shape == (40, 21)
    np.testing.assert_array_equal(np.asarray(opened), case.M)
    np.testing.assert_array_equal(np.asarray(opened[30:37]), case.M[30:37])
    np.testing.assert_array_equal(np.asarray(opened[3:20][2:5]), case.M[5:8])
    found, right = case.replace(M=path).solve(), case.solve()
    for result in (found, case.replace(M=str(path)).solve(), pickle.loads(pickle.dumps(found))):
        same(result, right)
    if path.suffix != ".npy":
        np.testing.assert_array_equal(files.read_vector(path, "a"), case.a)
        np.testing.assert_array_equal(files.find_vector(path, "b"), case.b)
        np.testing.assert_array_equal(files.find_vector(f"{path}:M", "b"), case.b)
        np.testing.assert_array_equal(files.read_vector(f"{path}:b", "a"), case.b)
        with pytest.raises(ValueError, match=r"holds no array 'w', but .*M"):
            files.read_vector(path, "w")
        with pytest.raises(ValueError, match=r"holds no array 'Q', but .*M"):
            files.open_matrix(f"{path}:Q")
    assert files.find_vector(path, "w") is None


@pytest.mark.parametrize("suffix", [".npz", ".h5", ".zarr"])
def test_written_is_read(tmp_path, suffix):
    pytest.importorskip("h5py")
    pytest.importorskip("zarr", minversion="3")
    P = np.random.default_rng(0).random((9, 5)).astype(np.float32)
    path = tmp_path / ("out" + suffix)
    for _ in range(2):  # the second replaces the first
        blocks = files.Blocks(P.shape, P.dtype, iter([P[:4], P[4:4], P[4:]]))
        files.write(path, {"x": np.arange(3.0), "plan": blocks, "cost": 1.5, "status": "converged"})
    np.testing.assert_array_equal(np.asarray(files.open_matrix(path, "plan")), P)
    np.testing.assert_array_equal(files.read_vector(path, "x"), np.arange(3.0))
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.npz"
    files.write(path, {"x": np.zeros(2)})

    def blocks():
        yield np.zeros((1, 2))
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        files.write(path, {"x": np.ones(2), "plan": files.Blocks((2, 2), float, blocks())})
    np.testing.assert_array_equal(files.read_vector(path, "x"), np.zeros(2))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["results", "out.npz", "out.zarr"])
def test_a_folder_is_never_replaced(tmp_path, name):
    kept = tmp_path / name / "work" / "data.txt"
    kept.parent.mkdir(parents=True)
    kept.touch()
    calls = [lambda: mapuot.solve(np.eye(3), reg=1.0, reg_m=1.0, checkpoint=tmp_path / name)]
    if "." in name:
        calls.append(lambda: files.write(tmp_path / name, {"log_u": np.ones(3)}))
    for call in calls:
        with pytest.raises(IsADirectoryError, match=f"{name} is a folder"):
            call()
    assert kept.exists()


@pytest.mark.parametrize(("name", "content", "kind", "text"),
                         [("no.npy", None, FileNotFoundError, "does not exist"),
                          ("cost.txt", None, ValueError, "must end in one of"),
                          ("vector.npy", np.zeros(3), ValueError, r"M must be a matrix, got shape \(3,\)"),
                          ("objects.npy", np.full((2, 2), {}, object), ValueError, "none of numbers"),
                          ("packed.npz", np.asfortranarray(np.zeros((3, 2))), ValueError, "Fortran order")]
                         )  # fmt: skip
def test_bad_files(tmp_path, name, content, kind, text):
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(kind, match=text):
        mapuot.solve(tmp_path / name, reg=1.0, reg_m=1.0)


@pytest.mark.parametrize("name", ["grouped.h5", "grouped.zarr"])
def test_groups(tmp_path, name):
    """a and b are looked for beside M; a path may hold colons; a group is no array."""
    case, path = clouds(40, 21), tmp_path / "x:y" / name
    path.parent.mkdir()
    library = pytest.importorskip(*(["h5py"] if path.suffix == ".h5" else ["zarr", "3"]))
    file = library.File(path, "w") if path.suffix == ".h5" else library.open_group(path, mode="w")
    for array, value in {"a": np.zeros(40), "run/M": case.M, "run/a": case.a}.items():
        (file.create_dataset if path.suffix == ".h5" else file.create_array)(array, data=value)
    if path.suffix == ".h5":
        file.close()
    np.testing.assert_array_equal(np.asarray(files.open_matrix(f"{path}:run/M")), case.M)
    np.testing.assert_array_equal(files.find_vector(f"{path}:run/M", "a"), case.a)
    assert files.find_vector(f"{path}:run/M", "b") is None
    with pytest.raises(ValueError, match="holds no array 'run', but a, run, run/M, run/a"):
        files.open_matrix(f"{path}:run")


def test_a_file_of_one_array(tmp_path):
    zarr = pytest.importorskip("zarr", minversion="3")
    case = clouds(40, 21)
    zarr.create_array(tmp_path / "M.zarr", data=case.M)
    zarr.create_array(tmp_path / "a.zarr", data=case.a)
    np.save(tmp_path / "a.npy", case.a)
    assert files.find_vector(tmp_path / "M.zarr", "a") is None
    for name in ("a.zarr", "a.npy"):
        np.testing.assert_array_equal(files.read_vector(tmp_path / name, "a"), case.a)
    same(case.replace(M=tmp_path / "M.zarr").solve(), case.solve())


# ---- checkpoints ----


@pytest.mark.parametrize("reg_m", [1.0, (1.0, np.inf)], ids=["kl", "turned"])
def test_checkpoint(tmp_path, reg_m, monkeypatch):
    monkeypatch.setattr(files.checkpoint, "CHECKPOINT_SECONDS", 0.0)
    case, path = clouds(40, 21, reg_m=reg_m), tmp_path / "state.npz"
    case.solve(checkpoint=path, callback=lambda stats: stats.n_pass == 6)
    start = files.load_checkpoint(path, 40, 21, case.reg)
    again, whole = case.solve(warm_start=start), case.solve()
    assert again.converged
    assert again.n_passes < whole.n_passes
    np.testing.assert_allclose(again.objective, whole.objective, rtol=1e-7)
    with pytest.raises(ValueError, match="checkpoint of another problem"):
        files.load_checkpoint(path, 41, 20, case.reg)


def test_a_folder_of_the_checkpoint_that_goes_or_never_was(tmp_path):
    """Told before the first pass, or a warning."""
    case, folder, passes = clouds(9, 8), tmp_path / "gone", []
    with pytest.raises(FileNotFoundError, match="gone does not exist"):
        case.solve(checkpoint=folder / "state.npz", callback=passes.append)
    assert not passes
    folder.mkdir()
    with pytest.warns(RuntimeWarning, match="could not be written"):
        result = case.solve(checkpoint=folder / "state.npz", callback=lambda stats: folder.exists() and folder.rmdir())
    assert result.converged


def test_a_function_of_two_dtypes():
    """The first row tells the dtype: later ones of more digits are not rounded to it in silence."""
    M = np.random.default_rng(0).random((6, 5))
    array = np.random.default_rng(1).random((6, 5, 4))

    def of(costs, more):
        return lambda i0, i1: costs[i0:i1].astype(np.float32) if i1 == 1 else costs[i0:i1].astype(more)

    weights = [np.ones(n) for n in array.shape]
    with pytest.raises(TypeError, match="costs must be of one dtype, got float32 at first, float64 in 0 to 6"):
        mapuot.solve(of(M, np.float64), *weights[:2], reg=0.1, reg_m=1.0)
    with pytest.raises(TypeError, match="costs must be of one dtype"):
        mapuot.multimarginal(of(array, np.float64), weights, reg=0.1, reg_m=1.0)
    whole = np.round(M * 8)
    assert mapuot.solve(of(whole, np.int64), *weights[:2], reg=0.1, reg_m=1.0).converged
