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
    """The command in this process, with --reg 0.05 --reg-m 1 unless they are given again."""
    return CliRunner().invoke(cli.cli, ["solve", "--reg", "0.05", "--reg-m", "1", *map(str, arguments)])


def script(*arguments, module="mapuot.cli"):
    """The command as a shell runs it: (exit code, output, errors)."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment())
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def refused(monkeypatch, capsys):
    """The line that the command ends with, on standard error and with code 1."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mapuot", "solve", "--reg", "1", "--reg-m", "1", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (1, "", 1)
        return err

    return run


def test_answer(case):
    done = call("in.npz", "-o", "out.npz", "--report", "page.html")
    assert done.exit_code == 0, done.output
    one = case.solve()
    with np.load("out.npz") as out:
        for name in ("log_u", "log_v", "row_marginal", "col_marginal", "cost", "objective", "dual", "gap", "mass"):
            np.testing.assert_allclose(out[name], getattr(one, name), rtol=1e-12, err_msg=name)
        assert str(out["status"]) == "converged"
        assert "plan" not in out
    assert f"{one.cost:.6g}"[:6] in done.output
    assert "largest difference" in Path("page.html").read_text(encoding="utf-8")
    assert "Missing option '--reg'" in CliRunner().invoke(cli.cli, ["solve", "in.npz"]).output


def test_weights_of_their_own(case):
    one = case.solve().log_u
    for given in (["M.npy", "--a", "w.npz:w", "--b", "b.npy"], ["in.npz:M"]):
        assert call(*given, "-o", "1.npz").exit_code == 0
        np.testing.assert_allclose(np.load("1.npz")["log_u"], one, rtol=1e-12)
    assert call("M.npy", "-o", "2.npz").exit_code == 0
    np.testing.assert_allclose(np.load("2.npz")["log_u"], mapuot.solve(case.M, reg=0.05, reg_m=1.0).log_u, rtol=1e-12)


def test_points(case):
    np.save("x.npy", np.random.default_rng(0).random((30, 3)))
    np.save("y.npy", np.random.default_rng(1).random((20, 3)))
    points = ["--points", "x.npy", "y.npy", "--metric", "euclidean"]
    assert call(*points, "-o", "out.npz", "--plan", "dense").exit_code == 0
    want = mapuot.solve_sample(np.load("x.npy"), np.load("y.npy"), reg=0.05, reg_m=1.0, metric="euclidean")
    np.testing.assert_allclose(np.load("out.npz")["plan"], want.plan, rtol=1e-6, atol=1e-12)
    assert call().exit_code == call("M.npy", *points).exit_code == 2


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
    one = case.solve()
    right = one.sparse(1e-4)
    for kind, wanted in (
        ("dense", {"plan": one.plan}),
        ("top:3", {"plan_index": one.top_k(3)[0], "plan_value": one.top_k(3)[1]}),
        ("sparse:1e-4", {"plan_" + name: getattr(right, name) for name in ("indptr", "indices", "data")}),
    ):
        assert call("in.npz", "-o", "out.npz", "--plan", kind).exit_code == 0
        with np.load("out.npz") as out:
            for name, value in wanted.items():
                np.testing.assert_array_equal(out[name], value)
    assert call("in.npz", "-o", "out.npy", "--plan", "dense").exit_code == 0
    np.testing.assert_array_equal(np.load("out.npy"), one.plan)
    assert call("in.npz", "-o", "again.npz", "--plan", "dense").exit_code == 0
    again = mapuot.load("again.npz", "in.npz")
    assert (again.cost, again.n_passes) == (one.cost, one.n_passes)
    np.testing.assert_array_equal(again.plan, one.plan)


@pytest.mark.parametrize("header", [False, True])
def test_tables(case, header, refused):
    m, n = case.M.shape
    names = ",".join(f"target {j}" for j in range(n)) if header else ""
    np.savetxt("M.csv", np.where(case.M > 0.9, np.inf, case.M), "%.17g", ",", header=names, comments="")
    np.savetxt("masses.csv", np.column_stack([np.arange(m), case.a]), "%.17g", ",", header="cell,mass", comments="")
    np.savetxt("b.csv", case.b, "%.17g")
    masses = ["--a", "masses.csv:mass", "--b", "b.csv"]
    done = call("M.csv", *masses, "-o", "out.csv", "--plan", "dense")
    assert done.exit_code == 0, done.output
    right = mapuot.solve(np.where(case.M > 0.9, np.inf, case.M), case.a, case.b, reg=0.05, reg_m=1.0)
    np.testing.assert_allclose(np.loadtxt("out.csv", delimiter=","), right.plan, rtol=1e-12)
    for text in ("a,b\n1,x\n", "1,2\n3\n", ""):
        Path("bad.csv").write_text(text, encoding="utf-8")
        assert "bad.csv" in refused("bad.csv")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["h5py", "anndata"])
@pytest.mark.parametrize("plan", ["dense", "keep:0.9", "none"])
def test_annotated_data(case, plan, library):
    """M is X, a in obs and b in var, as h5py lays them out or AnnData itself; the answer is laid out likewise."""
    h5py, anndata = pytest.importorskip("h5py"), library == "anndata" and pytest.importorskip("anndata")
    n, one = case.M.shape[1], case.solve()
    if anndata:
        frames = pytest.importorskip("pandas").DataFrame
        obs, var = (frames({x: w}, [f"{x}{i}" for i in range(len(w))]) for x, w in (("a", case.a), ("b", case.b)))
        anndata.AnnData(case.M, obs, var).write_h5ad("in.h5ad")
    else:
        with h5py.File("in.h5ad", "w") as file:
            file["X"], file["obs/a"], file["var/b"] = case.M, case.a, case.b
    done = call("in.h5ad", "-o", "out.h5ad", *([] if plan == "none" else ["--plan", plan]))
    assert done.exit_code == 0, done.output
    with h5py.File("out.h5ad") as file:
        assert file.attrs["encoding-type"] == "anndata"
        assert list(file["obs"].attrs["column-order"]) == ["a", "row_marginal", "log_u", "rho_a"]
        assert len(file["var/_index"]) == n
        np.testing.assert_allclose(file["obs/row_marginal"][:], one.row_marginal, rtol=1e-12)
        assert file["uns/status"].asstr()[()] == "converged"
        if plan == "dense":
            np.testing.assert_allclose(file["X"][:], one.plan, rtol=1e-12)
        assert ("X" in file) == (plan != "none")
    if anndata:
        found = anndata.read_h5ad("out.h5ad")
        np.testing.assert_allclose(found.var["log_v"], one.log_v, rtol=1e-12)
        assert found.uns["cost"] == pytest.approx(one.cost)
        if plan == "keep:0.9":
            np.testing.assert_allclose(found.X.toarray(), one.sparse(keep=0.9).toarray(), rtol=1e-12)


def test_resume_without_a_checkpoint_starts_anew(case):
    done = call("in.npz", "--checkpoint", "state.npz", "--resume")
    assert done.exit_code == 0, done.output
    again = call("in.npz", "--checkpoint", "state.npz", "--resume", "-o", "out.npz")
    assert again.exit_code == 0
    assert int(np.load("out.npz")["n_passes"]) <= 2


@pytest.mark.parametrize(("arguments", "text"),
                         [("in.npz --reg x", "'x' is not a valid float"),
                          ("in.npz --reg-m 1,2,3", "must be a number, or two with a comma between"),
                          ("in.npz --plan top:0", "must be dense, top:K, sparse:THRESHOLD or keep:SHARE"),
                          ("in.npz --plan keep:2", "or keep:SHARE"), ("in.npz --plan dense", "--plan needs --output"),
                          ("in.npz -o x.npy", "an .npy file holds one array"),
                          ("in.npz -o x.csv", "an .csv file holds one array"), ("in.npz -o no/x.npz", "does not exist"),
                          ("in.npz -o ./in.npz", "./in.npz is a file of another use"),
                          ("in.npz:M --checkpoint in.npz", "in.npz is a file of another use"),
                          ("M.npy --a x.npz -o x.npz", "x.npz is a file of another use"),
                          ("M.npy -o x.npz --checkpoint x.npz", "of another use"),
                          ("M.npy --report M.npy", "M.npy is a file of another use"),
                          ("M.npy --report no/x.html", "does not exist"),
                          ("in.npz --checkpoint no/x.npz", "does not exist"),
                          ("in.npz --resume", "--resume needs --checkpoint"),
                          ("in.npz --method magic", "'magic' is not one of")])  # fmt: skip
def test_wrong_usage(case, arguments, text):
    done = call(*arguments.split())
    assert done.exit_code == 2
    assert text in done.output


@pytest.mark.parametrize(("arguments", "text"),
                         [("no.npz", "FileNotFoundError: no.npz does not exist"),
                          ("in.npz -o x.npz --plan top:22", "K must be at most the 21 columns"),
                          ("in.npz --checkpoint .", "IsADirectoryError"),
                          ("in.npz --reg -1", "ValueError: reg must be a positive finite number"),
                          ("in.npz:a", "a must be a matrix"), ("M.npy --a b.npy", "a must have shape (40,), got (21,)"),
                          ("M.npy --a w.npz", "w.npz holds no array 'a', but w: name one of them, as in w.npz:w"),
                          ("in.npz -o out.txt", "must end in one of")])  # fmt: skip
def test_errors_are_one_line(case, arguments, text, refused):
    assert text in refused(*arguments.split())


def test_a_missing_library_is_told_first(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    done = call("no.npz", "-o", "out.h5")
    assert "hdf5 files need h5py: pip install 'mapuot[files]'" in str(done.exception)


def test_what_the_shell_is_told(case):
    """Code 0 and the progress on standard error; 3 where it did not converge, and the answer is stored all the same."""
    solve = ["solve", "in.npz", "--reg-m", 1]
    code, out, err = script(*solve, "--reg", 0.05, "--progress")
    assert code == 0
    assert "pass" in err
    assert "mapuot:" not in out
    assert "nothing is stored: -o OUT" in err
    assert script(*solve, "--reg", 0.05, "-o", "out.h5")[::2] == (0, "")
    code, out, err = script(*solve, "--reg", 0.01, "--max-passes", 2, "-o", "out.npz")
    assert code == 3
    assert "not converged (max_passes)" in err
    assert "max_passes" in out
    assert files.read_vector("out.npz", "log_u").shape == (40,)


@pytest.mark.skipif("tsan" in os.environ.get("LD_PRELOAD", ""), reason="libmpi crashes under ThreadSanitizer")
def test_info():
    """In a process of its own, since it starts MPI."""
    code, out, _ = script("info")
    assert (code, script("info", module="mapuot")[1]) == (0, out)
    for name in ("mapuot", "isa", "threads", "caches", "gpus", "mpi", "h5py", "zarr", "scipy", "torch"):
        assert name in out
    assert mapuot.__version__ in out
    assert CliRunner().invoke(cli.cli, ["--version"]).exit_code == 0
