"""Every kernel compiles without a GPU, within the registers of its launch and without spills in hot loops.

`make test` compiles each kernel once, for sm_90, and a few by NVRTC 12. Other architectures and the rest are nightly.
"""

import re

import ahead
import numpy as np
import pytest
from nvrtc import compiled

from mapuot.backends.cuda import kernels

pytestmark = pytest.mark.compile
ARCHES = ("sm_90", "sm_80", "sm_100")
BLOCK = 65536 // kernels.THREADS  # registers of a thread where a block has a multiprocessor for itself
WIDE_ROWS = dict.fromkeys(("row_sums", "column_sums"), (128, 0))


def usage(name, arch, options, cuda):
    """Return {function: (registers, spilled bytes)} from the compiler's log."""
    flags = ["-std=c++17", "-ftz=true", f"-arch={arch}", "--ptxas-options=-v"]
    log = compiled(kernels.source(name), [*flags, *(f"-D{k}={v}" for k, v in options.items())], cuda)
    found = {}
    for part in re.split(r"Compiling entry function ", log)[1:]:
        function = re.match(r"'(\w+)'", part).group(1)
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", part.split("Function properties for _Z")[0])))
        found[function] = int(re.search(r"Used (\d+) registers", part).group(1)), spilled
    return found


def persistent(dtype, ld, narrow, kl=True, **more):
    """Return the options of the passes over such a K in one launch."""
    shape = kernels.shape_for(ld, dtype, bool(narrow))
    held = kernels.ANDERSON_DEPTHS[ld > kernels.SHALLOW_COLUMNS]
    return kernels.shape_options(
        shape, dtype, (kl, kl), **({"NARROW": narrow, "ANDERSON_DEPTH": held, "ORDERED": 0} | more)
    )


def portable(dtype, shape, kl=True, **more):
    return kernels.shape_options(
        kernels.Shape(*shape), dtype, (kl, kl), **({"ANDERSON_DEPTH": kernels.ANDERSON_DEPTHS[1]} | more)
    )


def points(narrow, form, dim, **more):
    known = {"POINTS": 1, "POINTS_NARROW": narrow, "FORM": form, "DIM": dim, "KEPT": 0, "MASKED": 0}
    known |= more
    return portable("float64", (1, 4, 2), **known, POINT_BLOCKS=kernels.point_blocks(known))


def strips(m, n, dtype):
    """Return the options of one read of K for many marginals, and the registers of its threads."""
    ld = -(-n // kernels.PAD) * kernels.PAD
    shape = kernels.strips_for(m, ld, kernels.ITEMSIZE[dtype], 132, 227 << 10)
    registers = 65536 // ((shape.THREADS + kernels.BESIDE) * kernels.THREADS // shape.THREADS)
    return {"STORE": kernels.STORES[dtype], **shape.options}, registers


def one_read(m, n, dtype="float32"):
    options, registers = strips(m, n, dtype)
    return "fused_pass.cu", options, {"fused_pass": (registers, 0), "join_streams": (64, 0)}


def blocks(m, n, narrow, **more):
    """Compile a batch: only the column half spills registers, once a pass."""
    options = kernels.small_options((m, n), narrow)
    registers = 65536 // (16 * options["GROUPS"] * options["RESIDENT"])
    if narrow:
        name = "batch_narrow"
    else:
        name = "batch_solve"
    limits = {name: (registers, 48 if narrow else 700)}
    return f"{name.replace('_solve', '')}.cu", {"COST": 1, **options, **more}, limits


def made(dim, **more):
    """Compile a batch with a cost each: only the column half spills registers, once a pass."""
    known = {"DIM": dim, "METRIC": 0, "FORM": 0, "COST": 0, "NARROW": 0, "STORE": 0} | more
    return "batch_made.cu", known, {"batch_made": (128, 800)}


def finish(options, spilled=200):
    file, function, known = kernels.finish_job(options)
    return file, known, {function: (BLOCK, spilled)}


PAIRS = dict.fromkeys(("part_sums", "part_moves", "sparse_rows", "sparse_columns"), (64, 0))
STREAM = {"build_kernel": (84, 0), "row_max": (84, 0)}
STREAM |= dict.fromkeys(("plan_sums", "apply", "draw", "extrema", "join_parts", "balance_rows", "kept_pairs"), (255, 0))
STORED = dict.fromkeys(
    ("sparse_entries", "sparse_max", "sparse_sums", "sparse_apply", "join_parts_of", "end_parts"), (64, 0)
)
TREE = {"open_pass": (64, 0), "open_back": (64, 0), "close_edge": (255, 0), "close_back": (255, 0)}
CLUSTERS = dict.fromkeys(("nearest", "order_rows", "cluster_rows", "cluster_blocks", "cluster_products",
                          "cluster_matrix", "cluster_means"), (255, 0))  # fmt: skip
# name: (file, options, {function: (registers, bytes spilled) at most}); float64 passes certify, once: some words spill
CASES = {
    "rows of a warp": ("iterate.cu", persistent("float32", 512, 1), {"iterate": (BLOCK, 32), "ring_offset": (255, 0)}),
    "wide passes": ("iterate.cu", persistent("float32", 8192, 0), {"iterate": (BLOCK, 200)}),
    "spread rows": ("iterate.cu", persistent("float32", 65536, 1), {"iterate": (BLOCK, 32)}),
    "narrow passes of older GPUs": ("iterate.cu", persistent("float32", 8192, 1, BULK=0), {"iterate": (BLOCK, 32)}),
    "wide passes of older GPUs": ("iterate.cu", persistent("float32", 6144, 0, BULK=0), {"iterate": (BLOCK, 200)}),
    "passes over pairs": (
        "iterate.cu",  # spilled registers are read again once a row or once a pass, not once an entry
        portable("float32", (16, 8, 2), ANDERSON_DEPTH=20, SPARSE=1, SHORT_INDEX=1, HELD=1, OWN_DIFFERENCES=10),
        {"iterate_pairs": (BLOCK, 800)},
    ),
    "steps between them": (  # of a cluster; of all blocks the same spills
        "iterate.cu",
        portable("float64", (16, 8, 2, 8), ANDERSON_DEPTH=5, SPARSE=1, SHORT_INDEX=1, HELD=1, LEAPS=1),
        {"iterate_pairs": (BLOCK, 500)},
    ),
    "portable": (
        "portable.cu", portable("float32", (16, 16, 1)),
        {"gather_sums": (255, 0), **dict.fromkeys(("row_pass", "join_rows"), (128, 96))},
    ),
    "finish": finish(portable("float32", (16, 16, 1))),
    "in place": ("portable.cu", portable("float32", (16, 16, 1), IN_PLACE=1), {"row_pass": (128, 96)}),
    "wide rows": ("portable.cu", portable("float32", (8, 8, 4), ANDERSON_DEPTH=5), WIDE_ROWS),
    "points": ("portable.cu", points(1, 0, 3), {"point_sums": (128, 0), "point_columns": (128, 0)}),
    "quick powers": ("portable.cu", points(0, 0, 3, QUICK=1), {"point_sums": (128, 0)}),
    "products of float16 pieces": (
        "portable.cu", points(1, 1, 0, STEPS=4), {"product_sums": (128, 64), "point_columns": (128, 0)},
    ),
    "largest exponents of products": ("portable.cu", points(1, 1, 0, STEPS=1, TOPS=1), {"product_sums": (128, 0)}),
    "products of rounded points": ("portable.cu", points(1, 1, 0, STEPS=2, PRODUCTS=1), {"product_sums": (85, 0)}),
    "more products of rounded points": (
        "portable.cu", points(1, 1, 0, STEPS=9, PRODUCTS=1), {"product_sums": (128, 0)},
    ),
    "float64 products": ("portable.cu", points(0, -1, 0, QUICK=1, WIDE_CHUNKS=2), {"wide_product_sums": (128, 0)}),
    "more float64 products": ("portable.cu", points(0, -1, 0, QUICK=1, WIDE_CHUNKS=4), {"wide_product_sums": (128, 8)}),
    "float64 products of more pieces": (
        "portable.cu", points(0, -1, 0, QUICK=1, WIDE_CHUNKS=16), {"wide_product_sums": (128, 16)},
    ),
    "rough float64 products": (
        "portable.cu", points(0, -1, 0, QUICK=2, WIDE_CHUNKS=4), {"wide_product_sums": (128, 48)},
    ),
    "float64 products of many pieces": (
        "portable.cu", points(0, -1, 0, QUICK=1, WIDE_CHUNKS=8), {"wide_product_sums": (255, 0)},
    ),
    "products of many pieces": ("portable.cu", points(1, 1, 0, STEPS=8), {"product_sums": (255, 0)}),
    "products of more pieces": ("portable.cu", points(1, 1, 0, STEPS=9), {"product_sums": (128, 64)}),
    "half of the pairs": (
        "portable.cu", points(0, -1, 3, QUICK=1, HALVED=1), {"point_sums": (128, 0), "fold_halves": (64, 0)},
    ),
    "largest exponents": ("portable.cu", points(0, 0, 3, KEPT=1, TOPS=1), {"point_sums": (128, 0)}),
    "tiles of points": ("portable.cu", points(1, 1, 0, DEPTH=16), {"tile_sums": (128, 32)}),
    "pairs": ("portable.cu", portable("float32", (1, 8, 2), SPARSE=1, SHORT_INDEX=1), PAIRS),
    "tables of points": (
        "point_tables.cu", {"STORE": 0, "COST": 1},
        {"take_points": (255, 0), "take_candidates": (64, 0), "square_factors": (64, 0), "split_points": (64, 0),
         "lost_squares": (64, 0)},
    ),
    "costs of points": ("point_costs.cu", {"METRIC": 0, "STORE": 0}, {"point_costs": (255, 0)}),
    "formulas of vectors": ("vectors.cu", {"STORE": 0}, {"evaluate": (255, 512), "reduceat": (255, 0)}),
    "plans of clouds": ("point_costs.cu", {"METRIC": 0, "PLAN": 1, "STORE": 0}, {"point_costs": (255, 0)}),
    "clouds": (
        "clouds.cu", {"NORM": 2, "STORE": 0},
        dict.fromkeys(("cloud_ranges", "cloud_tables", "cloud_slopes"), (64, 0)),
    ),
    "boxes": (
        "boxes.cu", {"METRIC": 0}, dict.fromkeys(("box_tilt", "box_masses", "box_turn", "box_runs"), (255, 0)),
    ),
    "streams over pairs": ("sparse_stream.cu", {"STORE": 1, "COST": 1, "SHORT_INDEX": 1}, STORED),
    "streams": ("stream.cu", {"STORE": 1, "COST": 1, "REFERENCE": 1, "MASKED": 0}, STREAM),
    "a plain problem": ("plain.cu", {"STORE": 1, "COST": 1}, {"begin": (BLOCK, 0), "tell": (BLOCK, 0)}),
    "narrow batch": blocks(100, 100, True),
    "batch": blocks(100, 100, False),
    "batch of clouds": made(3),
    "batch by products": (
        "batch_products.cu", {"COST": 0, "NARROW": 0, "STORE": 0},
        dict.fromkeys(("weigh", "close_problems", "open_problems", "prox_rows", "finish_problems"), (128, 0)),
    ),
    "log_matmul": (
        "log_matmul.cu", {"WIDE": 1, "TILE": 64},
        dict.fromkeys(("shifts", "log_tiles", "log_sums", "exponentials"), (255, 0)),
    ),
    "many marginals": one_read(512, 512 * 512),
    "differences": ("differences.cu", {"STORE": 0}, dict.fromkeys(("add_difference", "products", "combine"), (64, 0))),
    "points of marginals": (
        "marginals.cu", {"STORE": 0},
        dict.fromkeys(("log_amounts", "close_root", "translation", "worth", "moved", "at_edges", "mass_shares",
                       "change_sums"), (64, 64)),  # values that spill once each while the block computes a sum
    ),
    "steps with a factor": (
        "factored.cu", {"STORE": 0},
        dict.fromkeys(("meet_rows", "meet_columns", "sum_columns", "accept_trials", "mirror_products", "shift_rows"),
                      (64, 0)) | dict.fromkeys(("solve_triangles", "find_residuals"), (64, 8)),
    ),
    "tree": ("tree_pass.cu", {"STORE": 0}, TREE),
    "clusters": ("coarse.cu", {"STORE": 1, "COST": 1}, CLUSTERS),
}  # fmt: skip
NIGHTLY = pytest.mark.nightly


def needs_bulk(file, options, _):
    """Return whether a kernel uses bulk copies or clusters, which sm_80 has not."""
    clusters = options.get("CLUSTER", 1) > 1
    return file == "fused_pass.cu" or (file == "iterate.cu" and (clusters or not {"SPARSE", "BULK"} & {*options}))


FEW = ("rows of a warp", 12, "sm_90"), ("points", 12, "sm_80"), ("streams", 12, "sm_100")  # of the older compiler's
ALL = [
    pytest.param(name, cuda, arch, marks=() if (arch, cuda) == ("sm_90", 13) or (name, cuda, arch) in FEW else NIGHTLY)
    for name in CASES for cuda in (13, 12) for arch in ARCHES if arch != "sm_80" or not needs_bulk(*CASES[name])
]  # fmt: skip


@pytest.mark.parametrize(("name", "cuda", "arch"), ALL)
def test_kernels_hold_their_registers(name, cuda, arch):
    file, options, limits = CASES[name]
    used = usage(file, arch, options, cuda)
    for function, most in limits.items():
        assert all(x <= y for x, y in zip(used[function], most, strict=True)), (function, used[function], most)


def test_no_kernel_is_forgotten():
    texts = [path.read_text() for path in kernels.SOURCE.rglob("*.cu*")]
    kernel = r'extern "C" __global__[^;{]*?(\w+)\((?:const|int|int64_t|real) '
    there = {name for text in texts for name in re.findall(kernel, text)}
    assert there == {name for _, _, limits in CASES.values() for name in limits}


def test_one_read_covers_every_kernel_that_all_blocks_hold():
    for itemsize in (4, 8):
        for m in (1, 3, 40, 1000, 10**5):
            for ld in [*range(16, 40_000, 1616), *range(40_000, 8192 * 132, 48_016)]:
                shape = kernels.strips_for(m, ld, itemsize, 132, 227 << 10)
                assert shape is not None, (m, ld)
                assert ld <= shape.strips * shape.slice < ld + shape.slice
                assert shape.slice <= shape.THREADS * shape.CPT
                assert shape.strips * shape.streams * shape.THREADS <= 132 * kernels.THREADS
                assert 1 <= shape.streams <= -(-m // shape.R)
                assert 1 <= shape.lag < shape.slots <= kernels.MAX_SLOTS
                assert shape.bytes(itemsize) + kernels.RING_BEFORE <= (227 << 10) * shape.THREADS // kernels.THREADS
        assert kernels.strips_for(3, 8192 * 132 + 16, itemsize, 132, 227 << 10) is None


def test_every_width_up_to_a_cluster_has_a_shape():
    for dtype, narrow in [(d, w) for d in kernels.STORES for w in (False, True)]:
        for ld in [*range(16, 131072, 1008), 131072]:
            shape = kernels.shape_for(ld, dtype, narrow)
            assert shape.width >= ld
            if shape.SPREAD:
                streams, strips, columns = shape.spread(10**6, ld, kernels.ITEMSIZE[dtype], 132)
                assert streams == 132 // shape.CLUSTER
                assert ld <= strips * columns < ld + columns
                assert columns <= 32 * shape.CPT
        assert kernels.shape_for(131088, dtype, narrow) is None


def test_a_long_kernel_is_compiled_without_the_others_of_its_file():
    flags = ["-std=c++17", "-arch=sm_90", "--ptxas-options=-v", "-DSTORE=1", "-DCOST=1", "-DREFERENCE=1", "-DMASKED=0"]
    log = compiled(kernels.source_of("stream.cu", "extrema"), flags)
    assert re.findall(r"Compiling entry function '(\w+)'", log) == ["extrema"]
    log = compiled(kernels.source_of("stream.cu", ""), flags)
    assert set(re.findall(r"Compiling entry function '(\w+)'", log)) == {"balance_rows", "join_parts"}


@pytest.mark.parametrize("file", sorted(p.name for p in kernels.SOURCE.rglob("*.cu")))
def test_every_kernel_of_a_file_is_found_by_its_name(file):
    names = [m.group(2) for m in kernels.ENTRY.finditer(kernels.source(file))]
    assert len(names) == len(set(names)) == kernels.source(file).count('extern "C"')
    assert kernels.ALONE.get(file, set()) <= set(names)


def test_a_binary_is_found_by_all_that_it_is_made_of(monkeypatch, tmp_path):
    file = "point_costs.cu"
    options = [("METRIC", 0), ("PLAN", 0), ("STORE", 0)]
    made = {(arch, file, ""): {kernels.key_of(file, "", options): b"of %d" % arch} for arch in (80, 90, 100)}
    for folder in ("one", "other"):
        ahead.pack(tmp_path / folder, made)
    files = [[path.read_bytes() for path in sorted(tmp_path.glob(f"{folder}/*/*"))] for folder in ("one", "other")]
    assert files[0] == files[1]
    assert len(files[0]) == 3
    monkeypatch.setattr(kernels, "AHEAD", tmp_path / "one")
    found = {arch: kernels.ahead(arch, file, "", options) for arch in (75, 80, 89, 90, 100, 103, 120)}
    assert found == {75: None, 80: b"of 80", 89: b"of 80", 90: b"of 90", 100: b"of 100", 103: b"of 100", 120: None}
    assert kernels.ahead(90, file, "", [("METRIC", 1), *options[1:]]) is None
    monkeypatch.setattr(kernels, "source_of", lambda name, part: "another text")
    assert kernels.ahead(90, file, "", options) is None


def test_a_driverless_machine_gets_one_clear_sentence(monkeypatch):
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    from mapuot.backends.cuda import backend as cuda

    class MissingError(Exception):
        pass

    def none():
        raise MissingError("no CUDA-capable device is detected")

    monkeypatch.setattr(cupy.cuda.runtime, "CUDARuntimeError", MissingError)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", none)
    with pytest.raises(RuntimeError, match="needs a GPU and its driver, found none"):
        cuda.asarray(np.ones((3, 3)))
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(RuntimeError, match="needs a GPU, found none"):
        cuda.asarray(np.ones((3, 3)))
