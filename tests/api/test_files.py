"""Matrices read block by block, from functions and files, solve like the matrix in memory; files may be damaged."""

import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from problems import clouds

import mapuot
from mapuot import files
from mapuot.problem.settings import BLOCKS

CASE = clouds(40, 21)
FORMATS = ["plain.npy", "fortran.npy", "plain.npz", "packed.npz", "some.h5", "packed.hdf5", "some.zarr", "plain.zarr"]


@pytest.fixture
def small_blocks(using):
    """Read blocks of about seven rows of 21 columns."""
    using(BLOCKS, cost_bytes=7 * 21 * 8)


def write(path, M, **more):
    kind = path.suffix
    packed = path.stem == "packed"
    if kind == ".npy":
        np.save(path, np.asfortranarray(M) if path.stem == "fortran" else M)
    elif kind == ".npz":
        (np.savez_compressed if packed else np.savez)(path, M=M, **more)
    elif kind == ".zarr":
        zarr = pytest.importorskip("zarr", minversion="3")
        if path.stem in ("plain", "a"):
            zarr.create_array(path, data=M)
            return path
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
    c = np.random.default_rng(0).random((40, 21))
    M = write(tmp_path / "plain.npz", CASE.M)
    kept = write(tmp_path / "plain.npy", c)
    found = CASE.replace(M=M, reference=files.open_matrix(kept)).solve()
    same(found, CASE.replace(reference=c).solve())


@pytest.mark.parametrize("name", FORMATS)
def test_formats(small_blocks, tmp_path, name):
    path = write(tmp_path / name, CASE.M, a=CASE.a, b=CASE.b)
    opened = files.open_matrix(path)
    assert opened.shape == (40, 21)
    np.testing.assert_array_equal(np.asarray(opened), CASE.M)
    np.testing.assert_array_equal(np.asarray(opened[30:37]), CASE.M[30:37])
    np.testing.assert_array_equal(np.asarray(opened[3:20][2:5]), CASE.M[5:8])
    found = CASE.replace(M=path).solve()
    right = CASE.solve()
    for result in (found, CASE.replace(M=str(path)).solve(), pickle.loads(pickle.dumps(found))):
        same(result, right)
    if path.suffix == ".npy" or path.name == "plain.zarr":  # of one array
        of_one = write(path.with_stem("a"), CASE.a)
        np.testing.assert_array_equal(files.read_vector(of_one, "a"), CASE.a)
    else:
        np.testing.assert_array_equal(files.read_vector(path, "a"), CASE.a)
        np.testing.assert_array_equal(files.find_vector(path, "b"), CASE.b)
        np.testing.assert_array_equal(files.find_vector(f"{path}:M", "b"), CASE.b)
        np.testing.assert_array_equal(files.read_vector(f"{path}:b", "a"), CASE.b)
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
                          ("cost.doc", None, ValueError, "must end in one of"),
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
    """a and b are read beside M; a path may contain colons; a group is no array."""
    path = tmp_path / "x:y" / name
    path.parent.mkdir()
    library = pytest.importorskip(*(["h5py"] if path.suffix == ".h5" else ["zarr", "3"]))
    if path.suffix == ".h5":
        file = library.File(path, "w")
    else:
        file = library.open_group(path, mode="w")
    for array, value in {"a": np.zeros(40), "run/M": CASE.M, "run/a": CASE.a}.items():
        (file.create_dataset if path.suffix == ".h5" else file.create_array)(array, data=value)
    if path.suffix == ".h5":
        file.close()
    np.testing.assert_array_equal(np.asarray(files.open_matrix(f"{path}:run/M")), CASE.M)
    np.testing.assert_array_equal(files.find_vector(f"{path}:run/M", "a"), CASE.a)
    assert files.find_vector(f"{path}:run/M", "b") is None
    with pytest.raises(ValueError, match="holds no array 'run', but a, run/M, run/a: name"):
        files.open_matrix(f"{path}:run")


# ---- checkpoints ----


@pytest.mark.parametrize("reg_m", [1.0, (1.0, np.inf)], ids=["kl", "turned"])
def test_checkpoint(tmp_path, reg_m, monkeypatch):
    monkeypatch.setenv("MAPUOT_CHECKPOINT_SECONDS", "0")
    case = clouds(40, 21, reg_m=reg_m)
    path = tmp_path / "state.npz"
    case.solve(checkpoint=path, callback=lambda stats: stats.n_pass == 6)
    start = files.load_checkpoint(path, 40, 21, case.reg)
    again = case.solve(warm_start=start)
    whole = case.solve()
    assert again.converged
    assert again.n_passes < whole.n_passes
    np.testing.assert_allclose(again.objective, whole.objective, rtol=1e-7)
    with pytest.raises(ValueError, match="checkpoint of another problem"):
        files.load_checkpoint(path, 41, 20, case.reg)


def test_a_folder_of_the_checkpoint_that_goes_or_never_was(tmp_path):
    """A missing folder of the checkpoint is an error before the first pass; one that vanishes later, a warning."""
    case = clouds(9, 8)
    folder = tmp_path / "gone"
    passes = []
    with pytest.raises(FileNotFoundError, match="gone does not exist"):
        case.solve(checkpoint=folder / "state.npz", callback=passes.append)
    assert not passes
    folder.mkdir()
    with pytest.warns(RuntimeWarning, match="could not be written"):
        result = case.solve(checkpoint=folder / "state.npz", callback=lambda stats: folder.exists() and folder.rmdir())
    assert result.converged


def test_a_function_of_two_dtypes():
    """The first row sets the dtype: a later row with more digits is an error instead of being rounded."""
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


# ---- untrusted files: damaged bytes, forged headers, pipes, files of killed processes. No reader accepts one or hangs.

GIBIBYTE = 1 << 30


def test_damaged_checkpoints(tmp_path):
    """The readers of tests/fuzz refuse randomly damaged files or read them correctly."""
    (tmp_path / "text.npz").write_text("no")
    np.save(tmp_path / "one.npy", np.ones(3))
    wrong = [{"x": 1}, {"side": "b"}, {"side": np.array(["b"] * 2), "potential": "x"}, {"side": 1, "potential": CASE.b}]
    wrong.append({"side": "b", "potential": np.full(21, np.nan)})
    for k, arrays in enumerate(wrong):
        np.savez(tmp_path / f"{k}.npz", **arrays)
    for other in ("0.npz", "1.npz", "2.npz", "3.npz", "text.npz", "one.npy"):
        with pytest.raises(ValueError, match="is not a checkpoint"):
            files.load_checkpoint(tmp_path / other, 40, 21, 0.1)
    with pytest.raises(ValueError, match="potential is not finite"):
        files.load_checkpoint(tmp_path / "4.npz", 40, 21, 0.1)
    with pytest.raises(TypeError, match="path must be that of a checkpoint, got 5"):
        files.load_checkpoint(5, 40, 21, 0.1)


# the size that a header claims


def npy(shape="(30, 20)", descr="'<f8'", length=None, version=b"\x01\x00", data=b"\0" * 4800):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    size = len(text) if length is None else length
    return b"\x93NUMPY" + version + size.to_bytes(2 if version == b"\x01\x00" else 4, "little") + text + data


FORGED = {"rows": npy("(1 << 50, 20)".replace("1 << 50", str(1 << 50))), "columns": npy(f"(1, {1 << 60})"),
          "both": npy(f"({1 << 62}, {1 << 62})"), "negative": npy("(-30, -20)"), "one negative": npy("(-1, 20)"),
          "length": npy(length=4_000_000_000, version=b"\x02\x00"), "version": npy(version=b"\x07\x00"),
          "objects": npy(descr="'|O'"), "nothing": npy("(4000000000, 4000000000)", descr="'|V0'"),
          "records": npy(descr="[('x', '<f8')]"), "deep": npy("(" * 5000 + ")" * 5000),
          "long": npy("(30, 20)" + " " * 60000), "code": npy("__import__('os').abort()"), "text": npy("('30', 20)"),
          "unfinished": b"\x93NUMPY\x01"}  # fmt: skip
LIMITED = """
import resource, sys
from mapuot import files
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
for path in sys.argv[2:]:
    try:
        files.open_matrix(path)
        print("opened", path)
    except ValueError as error:
        print("refused" if path in str(error) else error)
"""


@pytest.mark.parametrize("kind", ["npy", "stored", "packed"])
def test_forged_headers_take_no_memory(tmp_path, kind):
    """Under a limit of 1 GiB above the present memory a reader refuses the file; it never raises MemoryError."""
    if "LD_PRELOAD" in os.environ:
        pytest.skip("a sanitizer takes memory of its own")
    paths = []
    for name, data in FORGED.items():
        paths.append(tmp_path / f"{name}.{'npy' if kind == 'npy' else 'npz'}")
        if kind == "npy":
            paths[-1].write_bytes(data)
            continue
        with zipfile.ZipFile(paths[-1], "w", zipfile.ZIP_DEFLATED if kind == "packed" else 0) as archive:
            archive.writestr("M.npy", data)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(4 * used + GIBIBYTE), *map(str, paths)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["refused"] * len(paths)


def test_archives_that_claim_what_they_cannot_hold(tmp_path):
    path = tmp_path / "claims.npz"
    text = io.BytesIO()
    with zipfile.ZipFile(text, "w") as archive:
        archive.writestr("M.npy", npy())
    for size in (1 << 31, 0xFFFFFFFE):
        data = text.getvalue()
        real = len(npy()).to_bytes(4, "little")
        path.write_bytes(data.replace(real, size.to_bytes(4, "little")))
        with pytest.raises(ValueError, match=r"claims\.npz cannot be read as npz: M claims"):
            files.open_matrix(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("M.npy", npy())
    with pytest.raises(ValueError, match="M is compressed by method 12, not by deflate"):
        files.open_matrix(path)


class Trap:
    def __reduce__(self):
        return os.kill, (os.getpid(), signal.SIGKILL)


def test_no_pickle_is_opened(tmp_path):
    np.save(tmp_path / "M.npy", np.array([[Trap()]], object), allow_pickle=True)
    np.savez(tmp_path / "state.npz", side="b", potential=np.array([Trap()], object))
    (tmp_path / "bare.npz").write_bytes(pickle.dumps(Trap()))
    for name in ("M.npy", "bare.npz"):
        with pytest.raises(ValueError, match=name):
            mapuot.solve(tmp_path / name, reg=1.0, reg_m=1.0)
    with pytest.raises(ValueError, match=r"state\.npz is not a checkpoint"):
        files.load_checkpoint(tmp_path / "state.npz", 1, 1, 1.0)
    pytest.importorskip("zarr")
    for packed in ({"filters": [{"id": "pickle"}]}, {"compressor": {"id": "pickle"}}):
        folder = tmp_path / "M.zarr"
        folder.mkdir(exist_ok=True)
        meta = {"zarr_format": 2, "shape": [1, 1], "chunks": [1, 1], "dtype": "<f8", "fill_value": 0, "order": "C"}
        (folder / ".zarray").write_text(json.dumps({**meta, "compressor": None, "filters": None, **packed}))
        (folder / "0.0").write_bytes(pickle.dumps(Trap()))
        with pytest.raises(ValueError, match=r"M\.zarr cannot be read as zarr"):
            np.asarray(files.open_matrix(folder))


@pytest.mark.parametrize("name", ["M.npy", "M.npz", "M.h5", "M.zarr"])
def test_pipes_and_folders_are_no_files(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} cannot be read as .*: it is no regular file"):
        files.open_matrix(tmp_path / name)
    with pytest.raises(ValueError, match="no regular file"):
        files.find_vector(tmp_path / name, "a")
    with pytest.raises(ValueError, match="no regular file"):
        files.load_checkpoint(tmp_path / name, 3, 3, 1.0)


def test_fortran_order_is_read_by_plain_reads(tmp_path):
    """A file that shrinks under a mapping would kill the process: the missing block is reported instead."""
    path = tmp_path / "fortran.npy"
    np.save(path, np.asfortranarray(CASE.M))
    matrix = files.open_matrix(path)
    np.testing.assert_array_equal(matrix.function(3, 17), CASE.M[3:17])
    np.testing.assert_array_equal(np.asarray(matrix), CASE.M)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"fortran\.npy cannot be read as npy"):
        np.asarray(matrix)


def test_a_file_that_grows_nan_is_told():
    case = clouds(30, 20)
    calls = []

    def rows(i0, i1):
        calls.append(i0)
        return np.where(len(calls) > 2, np.nan, case.M[i0:i1])

    for precision in ("float64", "mixed"):
        calls.clear()
        with pytest.raises(ValueError, match="M must not hold NaN or -inf, got 600 such entries"):
            mapuot.solve(rows, case.a, case.b, reg=0.05, reg_m=1.0, precision=precision, tol=1e-9)
    calls.clear()
    result = mapuot.solve(lambda i0, i1: case.M[i0:i1], case.a, case.b, reg=0.05, reg_m=1.0)
    result.problem.cost.function = lambda i0, i1: np.full((i1 - i0, 20), -np.inf)
    for read in (lambda: result.cost, lambda: result.plan, lambda: result.apply(case.b), lambda: result.top_k(1)):
        with pytest.raises(ValueError, match="M must not hold NaN or -inf, got 600 such entries"):
            read()


@pytest.mark.parametrize("begin", ["0,1,2", "1,2,3", "# 0,1,2"])
def test_a_first_line_that_counts_the_columns_is_told(tmp_path, begin):
    """Names that are numbers were read as costs, and nothing said so."""
    path = tmp_path / "M.csv"
    path.write_text(f"{begin}\n0.5,1,2\n2,3,0.25\n3,2,1\n")
    if begin.startswith("#"):
        assert np.asarray(files.open_matrix(path)).shape == (3, 3)
        return
    with pytest.warns(UserWarning, match=r"the first line of M.csv counts its columns, and is read as numbers: put #"):
        assert np.asarray(files.open_matrix(path)).shape == (4, 3)
    path.write_text("0,1,2\n1,0,1\n2,1,0\n")  # distances along a line
    assert np.asarray(files.open_matrix(path))[2, 0] == 2


@pytest.mark.parametrize("name", ["answer.npz", "answer.h5"])
def test_urls_name_files_of_fsspec(name):
    """Costs and answers behind a URL equal the files; a file that changes is read anew."""
    fsspec = pytest.importorskip("fsspec")
    there = fsspec.filesystem("memory")
    M = np.random.default_rng(0).random((5, 4))
    for costs in (M, 2 * M):
        with there.open("/urls/costs.npz", "wb") as file:
            np.savez(file, M=costs, a=np.arange(1.0, 6))
        result = mapuot.solve("memory://urls/costs.npz:M", np.arange(1.0, 6), reg=0.1, reg_m=1.0)
        np.testing.assert_array_equal(result.plan, mapuot.solve(costs, np.arange(1.0, 6), reg=0.1, reg_m=1.0).plan)
        result.save(f"memory://urls/{name}")
        found = mapuot.load(f"memory://urls/{name}", "memory://urls/costs.npz")
        np.testing.assert_array_equal(found.plan, result.plan)
    assert files.read_vector("memory://urls/costs.npz", "a").tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(FileNotFoundError, match=r"memory://urls/none.npz does not exist"):
        mapuot.load("memory://urls/none.npz")
    with pytest.raises(ValueError, match=r"memory://urls/costs.npz holds no array 'Q', .*costs.npz:M"):
        mapuot.solve("memory://urls/costs.npz:Q", reg=0.1, reg_m=1.0)
    with pytest.raises(ValueError, match=r"none://costs.npz: Protocol not known"):
        mapuot.solve("none://costs.npz", reg=0.1, reg_m=1.0)
    with pytest.raises(ValueError, match="Zarr is a folder"):
        mapuot.solve("memory://urls/costs.zarr", reg=0.1, reg_m=1.0)


def test_urls_of_chains_have_the_suffix_of_the_file_inside(tmp_path):
    pytest.importorskip("fsspec")
    M = np.random.default_rng(0).random((5, 4))
    np.save(tmp_path / "M.npy", M)
    with zipfile.ZipFile(tmp_path / "costs.zip", "w") as packed:
        packed.write(tmp_path / "M.npy", "M.npy")
    result = mapuot.solve(f"zip://M.npy::{tmp_path}/costs.zip", reg=0.1, reg_m=1.0)
    np.testing.assert_array_equal(result.plan, mapuot.solve(M, reg=0.1, reg_m=1.0).plan)


def test_urls_on_the_command_line(tmp_path):
    """--output may be a URL, a report must be a file of this machine."""
    pytest.importorskip("fsspec")
    click_testing = pytest.importorskip("click.testing")
    from mapuot.cli import cli

    np.save(tmp_path / "M.npy", np.random.default_rng(0).random((5, 4)))
    words = ["solve", f"file://{tmp_path}/M.npy", "--reg", "0.1", "--reg-m", "1", "-o", f"file://{tmp_path}/out.npz"]
    run = click_testing.CliRunner().invoke(cli, words)
    assert run.exit_code == 0, run.output
    assert mapuot.load(tmp_path / "out.npz").converged
    run = click_testing.CliRunner().invoke(cli, [*words, "--report", f"file://{tmp_path}/out.html"])
    assert "must be a file on this machine" in run.output
