"""The command line in one process; under mpiexec it is tested in tests/mpi/test_mpi.py."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import environment
from problems import clouds

import mapuot

click = pytest.importorskip("click")
from click.testing import CliRunner  # noqa: E402

from mapuot import cli, files  # noqa: E402


@pytest.fixture
def case(tmp_path, monkeypatch):
    """A problem in the files in.npz and M.npy of the working folder."""
    monkeypatch.chdir(tmp_path)
    case = clouds(40, 21, ratio=1.2)
    np.savez("in.npz", M=case.M, a=case.a, b=case.b)
    np.save("M.npy", case.M)
    np.save("a.npy", case.a)
    np.save("b.npy", case.b)
    np.savez("w.npz", w=case.a)
    return case


def call(*arguments):
    return CliRunner().invoke(cli.cli, ["solve", *map(str, arguments)])


def script(*arguments):
    """The command as a shell runs it: (exit code, output, errors)."""
    command = [sys.executable, "-m", "mapuot.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment())
    return done.returncode, done.stdout, done.stderr


def test_answer(case):
    done = call("in.npz", "-o", "out.npz", "--reg", case.reg, "--reg-m", 1)
    assert done.exit_code == 0, done.output
    one = case.solve()
    with np.load("out.npz") as out:
        for name in ("log_u", "log_v", "row_marginal", "col_marginal", "cost", "objective", "dual", "gap", "mass"):
            np.testing.assert_allclose(out[name], getattr(one, name), rtol=1e-12, err_msg=name)
        assert str(out["status"]) == "converged"
        assert "plan" not in out
    assert f"{one.cost:.6g}"[:6] in done.output


def test_weights_of_their_own(case):
    one = case.solve().log_u
    for given in (["M.npy", "--a", "w.npz:w", "--b", "b.npy"], ["in.npz:M"]):
        assert call(*given, "-o", "1.npz", "--reg", 0.05, "--reg-m", 1).exit_code == 0
        np.testing.assert_allclose(np.load("1.npz")["log_u"], one, rtol=1e-12)
    assert call("M.npy", "-o", "2.npz", "--reg", 0.05, "--reg-m", 1).exit_code == 0
    np.testing.assert_allclose(np.load("2.npz")["log_u"], mapuot.solve(case.M, reg=0.05, reg_m=1.0).log_u, rtol=1e-12)


def test_options_reach_the_solver(case):
    np.save("c.npy", np.ones((40, 21)))
    more = ["--penalty", "kl", "--reference", "c.npy", "--precision", "float64", "--method", "translation_invariant"]
    done = call("in.npz", "-o", "out.npz", "--reg", 0.1, "--reg-m", "2,inf", *more, "--tol", 1e-9, "--threads", 1)
    assert done.exit_code == 0, done.output
    one = mapuot.solve(
        case.M, case.a, case.b, reg=0.1, reg_m=(2.0, np.inf), reference="uniform", tol=1e-9, precision="float64",
        method="translation_invariant",
    )  # fmt: skip
    np.testing.assert_allclose(np.load("out.npz")["log_v"], one.log_v, rtol=1e-9)


def test_plans(case):
    one, base = case.solve(), ["in.npz", "--reg", case.reg, "--reg-m", 1]
    assert call(*base, "-o", "1.npz", "--plan", "dense").exit_code == 0
    np.testing.assert_array_equal(np.load("1.npz")["plan"], one.plan)
    assert call(*base, "-o", "2.npy", "--plan", "dense").exit_code == 0
    np.testing.assert_array_equal(np.load("2.npy"), one.plan)
    assert call(*base, "-o", "3.npz", "--plan", "top:3").exit_code == 0
    with np.load("3.npz") as out:
        np.testing.assert_array_equal(out["plan_value"], one.top_k(3)[1])
        np.testing.assert_array_equal(out["plan_index"], one.top_k(3)[0])
    assert call(*base, "-o", "4.npz", "--plan", "sparse:1e-4").exit_code == 0
    right = one.sparse(1e-4)
    with np.load("4.npz") as out:
        np.testing.assert_array_equal(out["plan_indptr"], right.indptr)
        np.testing.assert_array_equal(out["plan_indices"], right.indices)
        np.testing.assert_array_equal(out["plan_data"], right.data)


@pytest.mark.parametrize("header", [False, True])
def test_tables(case, header):
    m, n = case.M.shape
    names = ",".join(f"target {j}" for j in range(n)) if header else ""
    np.savetxt("M.csv", np.where(case.M > 0.9, np.inf, case.M), "%.17g", ",", header=names, comments="")
    np.savetxt("masses.csv", np.column_stack([np.arange(m), case.a]), "%.17g", ",", header="cell,mass", comments="")
    np.savetxt("b.csv", case.b, "%.17g")
    done = call(
        "M.csv",
        "--a",
        "masses.csv:mass",
        "--b",
        "b.csv",
        "-o",
        "out.csv",
        "--plan",
        "dense",
        "--reg",
        0.05,
        "--reg-m",
        1,
    )
    assert done.exit_code == 0, done.output
    right = mapuot.solve(np.where(case.M > 0.9, np.inf, case.M), case.a, case.b, reg=0.05, reg_m=1.0)
    np.testing.assert_allclose(np.loadtxt("out.csv", delimiter=","), right.plan, rtol=1e-12)


@pytest.mark.parametrize("text", ["a,b\n1,x\n", "1,2\n3\n", ""])
def test_tables_that_are_none(case, text):
    Path("bad.csv").write_text(text, encoding="utf-8")
    code, out, err = script("solve", "bad.csv", "--reg", "1", "--reg-m", "1")
    assert (code, out) == (1, "")
    assert "bad.csv" in err.splitlines()[-1]


def annotated(case, anndata):
    """in.h5ad with M as X, a in obs and b in var; by AnnData, or as its format lays them out."""
    m, n = case.M.shape
    if anndata is None:
        with pytest.importorskip("h5py").File("in.h5ad", "w") as file:
            file["X"], file["obs/a"], file["var/b"] = case.M, case.a, case.b
        return
    import pandas as pd

    obs, var = (pd.DataFrame(index=[f"{k}{i}" for i in range(count)]) for k, count in (("x", m), ("y", n)))
    obs["a"], var["b"] = case.a, case.b
    anndata.AnnData(case.M, obs, var).write_h5ad("in.h5ad")


@pytest.mark.parametrize("plan", ["dense", "keep:0.9", "none"])
def test_the_layout_of_annotated_data(case, plan):
    annotated(case, None)
    more = [] if plan == "none" else ["--plan", plan]
    done = call("in.h5ad", "-o", "out.h5ad", "--reg", case.reg, "--reg-m", 1, *more)
    assert done.exit_code == 0, done.output
    import h5py

    one = case.solve()
    with h5py.File("out.h5ad") as file:
        assert file.attrs["encoding-type"] == "anndata"
        assert list(file["obs"].attrs["column-order"]) == ["a", "row_marginal", "log_u", "rho_a"]
        assert len(file["var/_index"]) == case.M.shape[1]
        np.testing.assert_allclose(file["obs/row_marginal"][:], one.row_marginal, rtol=1e-12)
        assert file["uns/status"].asstr()[()] == "converged"
        if plan == "dense":
            np.testing.assert_allclose(file["X"][:], one.plan, rtol=1e-12)
        assert ("X" in file) == (plan != "none")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["dense", "keep:0.9", "none"])
def test_annotated_data(case, plan):
    anndata = pytest.importorskip("anndata")
    annotated(case, anndata)
    more = [] if plan == "none" else ["--plan", plan]
    done = call("in.h5ad", "-o", "out.h5ad", "--reg", case.reg, "--reg-m", 1, *more)
    assert done.exit_code == 0, done.output
    found, one = anndata.read_h5ad("out.h5ad"), case.solve()
    np.testing.assert_allclose(found.obs["row_marginal"], one.row_marginal, rtol=1e-12)
    np.testing.assert_allclose(found.var["log_v"], one.log_v, rtol=1e-12)
    assert found.uns["status"] == "converged"
    assert found.uns["cost"] == pytest.approx(one.cost)
    if plan == "dense":
        np.testing.assert_allclose(found.X, one.plan, rtol=1e-12)
    elif plan != "none":
        np.testing.assert_allclose(found.X.toarray(), one.sparse(keep=0.9).toarray(), rtol=1e-12)


def test_resume_without_a_checkpoint_starts_anew(case):
    done = call("in.npz", "--reg", 0.05, "--reg-m", 1, "--checkpoint", "state.npz", "--resume")
    assert done.exit_code == 0, done.output
    again = call("in.npz", "--reg", 0.05, "--reg-m", 1, "--checkpoint", "state.npz", "--resume", "-o", "out.npz")
    assert again.exit_code == 0
    assert int(np.load("out.npz")["n_passes"]) <= 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["in.npz"], "Missing option '--reg'"),
        (["in.npz", "--reg", "x", "--reg-m", "1"], "'x' is not a valid float"),
        (["in.npz", "--reg", "1", "--reg-m", "1,2,3"], "must be a number, or two with a comma between"),
        (
            ["in.npz", "--reg", "1", "--reg-m", "1", "--plan", "top:0"],
            "must be dense, top:K, sparse:THRESHOLD or keep:SHARE",
        ),
        (["in.npz", "--reg", "1", "--reg-m", "1", "-o", "x.npy"], "an .npy file holds one array"),
        (["in.npz", "--reg", "1", "--reg-m", "1", "-o", "x.csv"], "an .csv file holds one array"),
        (["in.npz", "--reg", "1", "--reg-m", "1", "--plan", "keep:2"], "or keep:SHARE"),
        (["in.npz", "--reg", "1", "--reg-m", "1", "-o", "no/x.npz"], "does not exist"),
        (["in.npz", "--reg", "1", "--reg-m", "1", "--checkpoint", "no/x.npz"], "does not exist"),
        (["in.npz", "--reg", "1", "--reg-m", "1", "-o", "./in.npz"], "./in.npz is a file of another use"),
        (["in.npz:M", "--reg", "1", "--reg-m", "1", "--checkpoint", "in.npz"], "in.npz is a file of another use"),
        (["M.npy", "--a", "x.npz", "--reg", "1", "--reg-m", "1", "-o", "x.npz"], "x.npz is a file of another use"),
        (["M.npy", "--reg", "1", "--reg-m", "1", "-o", "x.npz", "--checkpoint", "x.npz"], "of another use"),
        (["in.npz", "--reg", "1", "--reg-m", "1", "--resume"], "--resume needs --checkpoint"),
        (["in.npz", "--reg", "1", "--reg-m", "1", "--plan", "dense"], "--plan needs --output"),
        (["in.npz", "--reg", "1", "--reg-m", "1", "--method", "magic"], "'magic' is not one of"),
    ],
)
def test_wrong_usage(case, arguments, text):
    done = call(*arguments)
    assert done.exit_code == 2
    assert text in done.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no.npz", "--reg", "1", "--reg-m", "1"], "FileNotFoundError: no.npz does not exist"),
        (
            ["in.npz", "--reg", "1", "--reg-m", "1", "-o", "x.npz", "--plan", "top:22"],
            "K must be at most the 21 columns",
        ),
        (["in.npz", "--reg", "1", "--reg-m", "1", "--checkpoint", "."], "IsADirectoryError"),
        (["in.npz", "--reg", "-1", "--reg-m", "1"], "ValueError: reg must be a positive finite number"),
        (["in.npz:a", "--reg", "1", "--reg-m", "1"], "a must be a matrix"),
        (["M.npy", "--a", "b.npy", "--reg", "1", "--reg-m", "1"], "a must have shape (40,), got (21,)"),
        (
            ["M.npy", "--a", "w.npz", "--reg", "1", "--reg-m", "1"],
            "w.npz holds no array 'a', but w: name one of them, as in w.npz:w",
        ),
        (["in.npz", "--reg", "1", "--reg-m", "1", "-o", "out.txt"], "must end in one of"),
    ],
)
def test_errors_are_one_line(case, arguments, text):
    code, out, err = script("solve", *arguments)
    assert (code, out) == (1, "")
    assert text in err
    assert err.count("\n") == 1


def test_a_missing_library_is_told_first(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    done = call("no.npz", "--reg", 1, "--reg-m", 1, "-o", "out.h5")
    assert "hdf5 files need h5py: pip install 'mapuot[files]'" in str(done.exception)


def test_an_answer_that_is_not_stored_is_told(case):
    _, _, err = script("solve", "in.npz", "--reg", case.reg, "--reg-m", 1)
    assert "nothing is stored: -o OUT" in err
    code, _, err = script("solve", "in.npz", "--reg", case.reg, "--reg-m", 1, "-o", "out.h5")
    assert (code, err) == (0, "")


def test_the_answer_loads(case):
    assert call("in.npz", "-o", "out.npz", "--reg", case.reg, "--reg-m", 1, "--plan", "dense").exit_code == 0
    again, one = mapuot.load("out.npz", "in.npz"), case.solve()
    assert (again.cost, again.n_passes) == (one.cost, one.n_passes)
    np.testing.assert_array_equal(again.plan, one.plan)


def test_not_converged_is_3(case):
    code, out, err = script("solve", "in.npz", "--reg", 0.01, "--reg-m", 1, "--max-passes", 2, "-o", "out.npz")
    assert code == 3
    assert "not converged (max_passes)" in err
    assert "max_passes" in out
    assert files.read_vector("out.npz", "log_u").shape == (40,)


def test_progress_goes_to_standard_error(case):
    code, out, err = script("solve", "in.npz", "--reg", 0.05, "--reg-m", 1, "--progress")
    assert code == 0
    assert "pass" in err
    assert "mapuot:" not in out


@pytest.mark.skipif("tsan" in os.environ.get("LD_PRELOAD", ""), reason="libmpi crashes under ThreadSanitizer")
def test_info():
    """In a process of its own, since it starts MPI."""
    code, out, _ = script("info")
    assert code == 0
    for name in ("mapuot", "isa", "threads", "caches", "gpus", "mpi", "h5py", "zarr", "scipy", "torch"):
        assert name in out
    command = [sys.executable, "-m", "mapuot", "info"]
    module = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment())
    assert module.stdout == out
    assert mapuot.__version__ in out
    assert CliRunner().invoke(cli.cli, ["--version"]).exit_code == 0
