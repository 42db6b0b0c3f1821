"""The command line in one process; tests/mpi/test_mpi.py tests it under mpiexec."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import environment
from problems import clouds
from scipy import sparse

import mapuot

click = pytest.importorskip("click")
from click.testing import CliRunner  # noqa: E402

from mapuot import cli, files  # noqa: E402


@pytest.fixture
def case(tmp_path, monkeypatch):
    """Write a problem to the files in.npz and M.npy of the working folder."""
    monkeypatch.chdir(tmp_path)
    case = clouds(40, 21, ratio=1.2)
    np.savez("in.npz", M=case.M, a=case.a, b=case.b)
    np.save("M.npy", case.M)
    np.save("a.npy", case.a)
    np.save("b.npy", case.b)
    np.savez("w.npz", w=case.a)
    return case


def call(*arguments):
    """Run the command in this process, with --reg 0.05 --reg-m 1 unless they are given again."""
    return CliRunner().invoke(cli.cli, ["solve", "--reg", "0.05", "--reg-m", "1", *map(str, arguments)])


def script(*arguments, module="mapuot.cli"):
    """Run the command as a shell does; return (exit code, output, errors)."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment())
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def refused(monkeypatch, capsys):
    """Return the command's last line, on standard error and with code 1."""

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
    if header:
        names = ",".join(f"target {j}" for j in range(n))
    else:
        names = ""
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


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz"])
@pytest.mark.parametrize("form", ["plain", "rows", "columns", "both", "pandas", "R", "numbered", "comment"])
def test_tables_with_names(case, form, suffix):
    """Names of rows and columns are skipped in files of any program; masses may stand in a column beside words."""
    M = case.M[:6, :4]
    if suffix.startswith(".csv"):
        between = ","
    elif suffix == ".txt":
        between = " "
    else:
        between = "\t"
    rows = [[f"{x:.17g}" for x in row] for row in M]
    named = [[f'"cell{between}{i}"', *row] for i, row in enumerate(rows)]
    columns = [f"t{j}" for j in range(4)]
    lines = {
        "plain": rows, "rows": named, "columns": [columns, *rows], "both": [["cell", *columns], *named],
        "pandas": [["", *columns], *named], "R": [columns, *named],
        "numbered": [["", *"0123"], *([str(i), *row] for i, row in enumerate(rows))],
        "comment": [["#t0", *columns[1:]], *rows],
    }[form]  # fmt: skip
    if suffix == ".txt" and form not in ("plain", "columns", "comment"):
        pytest.skip("white space cannot stand for an empty name")
    text = "\n".join(between.join(line) for line in lines) + "\n"
    if suffix.endswith(".gz"):
        opened = gzip.open
    else:
        opened = open
    with opened(f"M{suffix}", "wt", encoding="utf-8") as file:
        file.write(text)
    np.testing.assert_array_equal(np.asarray(files.open_matrix(f"M{suffix}")), M)
    done = call(f"M{suffix}", "-o", f"out{suffix}", "--plan", "dense")
    assert done.exit_code == 0, done.output
    plan = np.asarray(files.open_matrix(f"out{suffix}"))
    np.testing.assert_allclose(plan, mapuot.solve(M, reg=0.05, reg_m=1.0).plan, rtol=1e-12)
    if form in ("columns", "both", "pandas", "comment"):
        np.testing.assert_array_equal(files.read_vector(f"M{suffix}:t2", "a"), M[:, 2])


@pytest.mark.parametrize("text", [
    "x;y\n0,5;1\n", "\ufeffx,y\r\n0.5,1\r\n2,3\r\n", "x;y\n0.5;1\n2;3\n", '"x, in m",y\n0.5,1\n2,3', "0.5\t1\n\n2\t3\n",
])  # fmt: skip
def test_tables_of_other_programs(case, text, refused):
    """Tables may have a byte order mark, Windows line ends, semicolons, blank lines, but no commas within numbers."""
    Path("t.csv").write_bytes(text.encode())
    if "0,5" in text:
        assert "t.csv cannot be read as csv: its column 'x' holds words" in refused("--points", "t.csv", "t.csv")
    else:
        np.testing.assert_array_equal(np.asarray(files.open_matrix("t.csv")), [[0.5, 1], [2, 3]])


def test_columns_of_cells(case):
    """Nullable and categorical columns of an AnnData are accepted as masses, like plain ones."""
    anndata = pytest.importorskip("anndata")
    pandas = pytest.importorskip("pandas")
    counts = np.arange(40) % 3 + 1
    obs = pandas.DataFrame(index=[f"cell {i}" for i in range(40)])
    obs["plain"] = counts
    obs["nullable"] = pandas.array(counts, dtype="Int64")
    obs["kind"] = pandas.Categorical(counts)
    anndata.AnnData(case.M, obs).write_h5ad("cells.h5ad")
    for name in obs:
        np.testing.assert_array_equal(files.read_vector(f"cells.h5ad:obs/{name}", "a"), counts)
    with pytest.raises(ValueError, match="holds no array 'obs/mass', but X, obs/kind, obs/nullable, obs/plain: name"):
        files.read_vector("cells.h5ad:obs/mass", "a")
    for missing in ("obsm/X_pca", "obsp/distances"):  # points that are not there were told to be no costs
        with pytest.raises(ValueError, match=f"holds no array '{missing}', but X, "):
            mapuot.solve(f"cells.h5ad:{missing}", reg=0.1, reg_m=1.0)


def test_columns_of_words(case, refused):
    text = "cell,kind,mass,x,y\n" + "".join(f"c{i},k,{x:.17g},{x},1\n" for i, x in enumerate(case.a))
    Path("cells.csv").write_text(text, encoding="utf-8")
    assert call("M.npy", "--a", "cells.csv:mass").exit_code == 0
    assert "cells.csv cannot be read as csv: its column 'kind' holds words: name the column" in refused("cells.csv")
    assert "it has no column 'weight', but cell, kind, mass, x, y" in refused("M.npy", "--a", "cells.csv:weight")
    Path("points.csv").write_text("x,y\n" + "".join(f"{x},1\n" for x in case.a), encoding="utf-8")
    points = np.column_stack([case.a, np.ones(40)])
    np.testing.assert_allclose(np.asarray(files.open_matrix("points.csv", "x")), points, rtol=1e-15)  # not its x alone


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_cells_are_no_costs_but_points(case, form, refused):
    """An AnnData without masses has expression in X; the answer has the names of the cells, and can be read again."""
    anndata = pytest.importorskip("anndata")
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    pairs = []
    for name, count in (("early", 30), ("late", 20)):
        X = rng.poisson(1.0, (count, 8)).astype(float)
        obs = pandas.DataFrame(index=[f"{name} {i}" for i in range(count)])
        cells = anndata.AnnData(X if form == "dense" else sparse.csr_matrix(X), obs)
        cells.obsm["X_pca"] = rng.normal(size=(count, 3))
        cells.obsp["distances"] = rng.random((count, count))
        cells.write_h5ad(f"{name}.h5ad")
        pairs.append(cells)
    assert "X of an AnnData is cells x genes, no matrix of costs" in refused("early.h5ad")
    assert "--points early.h5ad:obsm/X_pca OTHER" in refused("early.h5ad")
    pairs[0].write_zarr("early.zarr")
    for file in ("early.h5ad", "early.h5ad:obsm/X_pca", "early.zarr:obsm/X_pca"):
        with pytest.raises(ValueError, match="no matrix of costs"):
            mapuot.solve(file, reg=1.0, reg_m=1.0)
    assert "--points early.h5ad:obsm/X_pca OTHER" in refused("early.h5ad:obsm/X_pca")
    done = call("--points", "early.h5ad:obsm/X_pca", "late.h5ad:obsm/X_pca", "-o", "out.h5ad", "--plan", "dense")
    assert done.exit_code == 0, done.output
    right = mapuot.solve_sample(*(cells.obsm["X_pca"] for cells in pairs), reg=0.05, reg_m=1.0)
    found = mapuot.load("out.h5ad", mapuot.PointCloud(*(cells.obsm["X_pca"] for cells in pairs)))
    np.testing.assert_allclose(found.plan, right.plan, rtol=1e-6)
    assert (found.status, found.n_passes, found.problem.reg) == (right.status, right.n_passes, 0.05)
    answer = anndata.read_h5ad("out.h5ad")
    assert list(answer.obs_names) == list(pairs[0].obs_names)
    assert list(answer.var_names) == list(pairs[1].obs_names)
    right.save("saved.h5ad")
    assert mapuot.load("saved.h5ad").cost == right.cost
    assert call("early.h5ad:obsp/distances").exit_code == 0
    told = refused("--points", "early.h5ad:X_pca", "late.h5ad:X_pca")
    assert "name one of them, as in early.h5ad:obsm/X_pca" in told
    assert len(told) < 300
    if form == "sparse":
        told = refused("--points", "early.h5ad:X", "late.h5ad:X")
        assert "X is sparse, where a dense array is wanted: name one, as in early.h5ad:obsm/X_pca" in told
    del cells.obsm["X_pca"], cells.obsp["distances"]
    cells.write_h5ad("bare.h5ad")
    told = refused("bare.h5ad")
    assert ("--points bare.h5ad:X OTHER" if form == "dense" else "scanpy.pp.pca(data)") in told
    assert "name them, as in bare.h5ad:X" in told
    if form == "sparse":
        assert "a dense array is wanted: scanpy.pp.pca(data)" in refused("--points", "bare.h5ad:X", "bare.h5ad:X")


def test_scales_and_gaps(case):
    done = call("in.npz", "--scale-cost", "median", "--tol-gap", "1e-9", "--tol", "1e-12", "-o", "out.npz")
    assert done.exit_code == 0, done.output
    right = case.replace(reg=0.05 * np.median(case.M), reg_m=np.median(case.M)).solve(tol_gap=1e-9, tol=1e-12)
    assert mapuot.load("out.npz").cost == pytest.approx(right.cost, rel=1e-7)
    assert f"scale_cost   {np.median(case.M):.10g}" in done.output
    assert done.output.startswith("status       converged")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["h5py", "anndata"])
@pytest.mark.parametrize("plan", ["dense", "keep:0.9", "none"])
def test_annotated_data(case, plan, library):
    """M is X, a is in obs and b in var, laid out by h5py or AnnData; the answer has the same layout."""
    h5py = pytest.importorskip("h5py")
    anndata = library == "anndata" and pytest.importorskip("anndata")
    n = case.M.shape[1]
    one = case.solve()
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
                          ("in.npz --reg-m 1,2,3", "must be a number or inf (balanced), or two"),
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
                          ("in.npz -o out.doc", "must end in one of")])  # fmt: skip
def test_errors_are_one_line(case, arguments, text, refused):
    assert text in refused(*arguments.split())


def test_a_missing_library_is_told_first(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    done = call("no.npz", "-o", "out.h5")
    assert "hdf5 files need h5py: pip install 'mapuot[files]'" in str(done.exception)


def test_what_the_shell_is_told(case):
    """A solve ends with code 0 and progress on standard error; unconverged, with code 3, and the answer is stored."""
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
    code, out, err = script(*solve, "--reg", 1e-5, "--reg-m", 1e3, "--max-passes", 1, "-o", "out.npz")
    assert code == 3
    assert "error_bound  none yet" in out
    assert "nothing certified yet" in err
    assert files.read_vector("out.npz", "log_u").shape == (40,)


def test_tune(case):
    """`tune` prints the reg and reg_m of `mapuot.tune`; it refuses a problem named twice or not at all."""

    def printed(*arguments):
        done = CliRunner().invoke(cli.cli, ["tune", *arguments])
        assert done.exit_code == 0, done.output
        return {name: float(value) for name, value in map(str.split, done.output.splitlines())}

    one = mapuot.tune(case.M, case.a, case.b, mass=0.8, sharpness=0.6, scale_cost="median")
    found = printed("in.npz", "--mass", "0.8", "--sharpness", "0.6", "--scale-cost", "median")
    wanted = {"reg": one.reg, "reg_m": one.reg_m, "mass": one.result.mass, "sharpness": one.result.sharpness}
    assert found == {name: pytest.approx(value, rel=1e-5) for name, value in wanted.items()}
    assert printed("M.npy", "--a", "a.npy", "--b", "b.npy", "--reg", "0.1")["reg"] == pytest.approx(0.1)
    assert CliRunner().invoke(cli.cli, ["tune", "M.npy", "--points", "x", "y"]).exit_code == 2
    assert CliRunner().invoke(cli.cli, ["tune"]).exit_code == 2


@pytest.mark.skipif("tsan" in os.environ.get("LD_PRELOAD", ""), reason="libmpi crashes under ThreadSanitizer")
def test_info():
    """`info` runs in its own process, since it starts MPI."""
    code, out, _ = script("info")
    assert (code, script("info", module="mapuot")[1]) == (0, out)
    for name in ("mapuot", "isa", "threads", "caches", "gpus", "mpi", "h5py", "zarr", "scipy", "torch"):
        assert name in out
    assert mapuot.__version__ in out
    assert CliRunner().invoke(cli.cli, ["--version"]).exit_code == 0
