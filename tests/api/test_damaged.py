"""Files from anyone: damaged bytes, forged headers, pipes, what killed processes left. None is believed, none hangs."""

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

CASE = clouds(30, 20)
GIBIBYTE = 1 << 30


def write(path, **arrays):
    (np.savez_compressed if "packed" in path.name else np.savez)(path, **arrays)
    return path


def test_damaged_checkpoints(tmp_path):
    """What is damaged at random: readers of tests/fuzz."""
    path = tmp_path / "state.npz"
    (tmp_path / "text.npz").write_text("no")
    np.save(tmp_path / "one.npy", np.ones(3))
    wrong = [{"x": 1}, {"side": "b"}, {"side": np.array(["b"] * 2), "potential": "x"}, {"side": 1, "potential": CASE.b}]
    given = (write(tmp_path / f"{k}.npz", **arrays) for k, arrays in enumerate(wrong))
    for other in (*given, tmp_path / "text.npz", tmp_path / "one.npy"):
        with pytest.raises(ValueError, match="is not a checkpoint"):
            files.load_checkpoint(other, 30, 20, 0.1)
    with pytest.raises(ValueError, match="potential is not finite"):
        files.load_checkpoint(write(path, side="b", potential=np.full(20, np.nan)), 30, 20, 0.1)
    with pytest.raises(TypeError, match="path must be that of a checkpoint, got 5"):
        files.load_checkpoint(5, 30, 20, 0.1)


# ---- what a header claims ----


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
    """Under a limit of 1 GiB beyond what the process has: MemoryError would be another line than "refused"."""
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
        data, real = text.getvalue(), len(npy()).to_bytes(4, "little")
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


# ---- what is no file, and what processes leave ----


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
    """A file that shrinks under a mapping would kill the process: now the block is missing, and said to be."""
    path = tmp_path / "fortran.npy"
    np.save(path, np.asfortranarray(CASE.M))
    matrix = files.open_matrix(path)
    np.testing.assert_array_equal(matrix.function(3, 17), CASE.M[3:17])
    np.testing.assert_array_equal(np.asarray(matrix), CASE.M)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"fortran\.npy cannot be read as npy"):
        np.asarray(matrix)


def test_a_file_that_grows_nan_is_told():
    calls = []

    def rows(i0, i1):
        calls.append(i0)
        return np.where(len(calls) > 2, np.nan, CASE.M[i0:i1])

    for precision in ("float64", "mixed"):
        calls.clear()
        with pytest.raises(ValueError, match="M must not hold NaN or -inf, got 600 such entries"):
            mapuot.solve(rows, CASE.a, CASE.b, reg=0.05, reg_m=1.0, precision=precision, tol=1e-9)
    calls.clear()
    result = mapuot.solve(lambda i0, i1: CASE.M[i0:i1], CASE.a, CASE.b, reg=0.05, reg_m=1.0)
    result.problem.cost.function = lambda i0, i1: np.full((i1 - i0, 20), -np.inf)
    for read in (lambda: result.cost, lambda: result.plan, lambda: result.apply(CASE.b), lambda: result.top_k(1)):
        with pytest.raises(ValueError, match="M must not hold NaN or -inf, got 600 such entries"):
            read()
