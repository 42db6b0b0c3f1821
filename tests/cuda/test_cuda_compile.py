"""Every kernel compiles for sm_80, sm_90 and sm_100 without a GPU; the hot ones within their registers, no spills."""

import re

import numpy as np
import pytest
from nvrtc import compiled

from mapuot.backends.cuda import kernels

pytestmark = pytest.mark.compile
ARCHES = ("sm_80", "sm_90", "sm_100")
SPILLED = {True: 48, False: 700}  # bytes of a block of a batch: narrow, wide
HOT = {"row_pass", "plan_pass", "row_sums", "column_sums", "plan_rows", "plan_columns"}
PORTABLE = HOT | {"join_rows", "gather_sums", "finish_first", "finish_join", "finish_second"}


def usage(name, arch, **options):
    """{function: (registers, spilled bytes)} from the compiler's log."""
    flags = [
        "-std=c++17",
        "-ftz=true",
        f"-arch={arch}",
        "--ptxas-options=-v",
        *(f"-D{k}={v}" for k, v in options.items()),
    ]
    found = {}
    for part in re.split(r"Compiling entry function ", compiled(kernels.source(name), flags))[1:]:
        function = re.match(r"'(\w+)'", part).group(1)
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", part.split("Function properties for _Z")[0])))
        found[function] = int(re.search(r"Used (\d+) registers", part).group(1)), spilled
    return found


def shape_options(shape, dtype, kl, **more):
    return kernels.shape_options(shape, dtype, (kl, kl), ORDERED=0, **more)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("dtype", "ld", "narrow"),
    [
        ("float32", 512, 1),
        ("float32", 8192, 1),
        ("float32", 32768, 1),
        ("float32", 8192, 0),
        ("float32", 20000, 0),
        ("bfloat16", 16384, 1),
        ("float32", 65536, 1),
        ("float32", 49152, 0),
        ("bfloat16", 131072, 1),
    ],
)
def test_persistent_kernel_holds_its_registers(arch, dtype, ld, narrow):
    shape = kernels.shape_for(ld, dtype, bool(narrow))
    held = {"NARROW": narrow, "MEMORY": kernels.MEMORY[ld > 512]}
    registers, spilled = usage("iterate.cu", arch, **shape_options(shape, dtype, True, **held))["iterate"]
    assert registers <= 65536 // kernels.THREADS
    assert spilled <= (32 if narrow else 200)  # the float64 pass is for certificates: some words spill


@pytest.mark.parametrize("memory", kernels.MEMORY)
@pytest.mark.parametrize("narrow", [0, 1])
def test_general_penalties_compile(narrow, memory):
    held = {"NARROW": narrow, "MEMORY": memory}
    options = shape_options(kernels.shape_for(2048, "float32", bool(narrow)), "float32", False, **held)
    assert "iterate" in usage("iterate.cu", "sm_90", **options)


def test_ordered_sums_compile():
    options = kernels.shape_options(kernels.shape_for(1024, "float32", True), "float32", (True, True))
    assert "iterate" in usage("iterate.cu", "sm_90", **options, NARROW=1, ORDERED=1)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", kernels.STORES)
def test_portable_kernels_hold_their_registers(arch, dtype):
    used = usage("portable.cu", arch, **shape_options(kernels.Shape(16, 16, 1), dtype, True, MEMORY=kernels.MEMORY[1]))
    assert set(used) == PORTABLE
    for function in HOT:
        registers, spilled = used[function]
        assert registers <= 128, function
        assert spilled <= 96, function


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", kernels.STORES)
def test_reads_of_wide_rows_do_not_spill(arch, dtype):
    used = usage("portable.cu", arch, **shape_options(kernels.Shape(8, 8, 4), dtype, True, MEMORY=kernels.MEMORY[0]))
    for function in ("row_sums", "column_sums"):
        registers, spilled = used[function]
        assert registers <= 128, function
        assert spilled == 0, function


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("narrow", "form", "dim"), [(1, 0, 3), (1, 1, 0), (1, 2, 4), (0, 0, 3), (0, 3, 2)])
@pytest.mark.parametrize("kept", [0, 1])
def test_sums_between_points_hold_their_registers(arch, narrow, form, dim, kept):
    options = shape_options(kernels.Shape(1, 4, 2), "float64", True, MEMORY=kernels.MEMORY[1])
    points = {"POINTS": 1, "POINTS_NARROW": narrow, "QUICK": 1 - narrow, "SPLIT": 4 if kept else 1}
    points |= {"FORM": form, "DIM": dim, "KEPT": kept, "MASKED": 0}
    used = usage("portable.cu", arch, **options, **points)
    registers, spilled = used["point_sums"]
    assert registers <= 128
    assert spilled <= (192 if kept and not narrow else 0)  # float64 sums over runs: outside of their inner loop
    assert {"join_rows", "point_columns", "finish_first", "finish_join", "finish_second"} <= set(used)
    assert usage("point_costs.cu", arch, METRIC=form, STORE=0)["point_costs"][1] == 0


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("narrow", "quick", "form"), [(1, 0, 1), (1, 0, 2), (1, 0, 3), (0, 1, 4), (0, 0, 3)])
def test_sums_over_tiles_hold_their_registers(arch, narrow, quick, form):
    options = shape_options(kernels.Shape(1, 4, 2), "float64", True, MEMORY=kernels.MEMORY[1])
    points = {"POINTS": 1, "POINTS_NARROW": narrow, "QUICK": quick, "FORM": form, "DIM": 0, "KEPT": 0, "MASKED": 0}
    registers, spilled = usage("portable.cu", arch, **options, **points, DEPTH=16 if narrow else 8)["tile_sums"]
    assert registers <= (128 if narrow else 168)
    assert spilled <= 32  # outside of the loop over coordinates


@pytest.mark.parametrize("arch", ARCHES)
def test_masked_sums_between_points_do_not_spill(arch):
    options = shape_options(kernels.Shape(1, 4, 2), "float64", True, MEMORY=kernels.MEMORY[1])
    used = usage("portable.cu", arch, **options, POINTS=1, POINTS_NARROW=0, FORM=0, DIM=3, KEPT=0, MASKED=1)
    registers, spilled = used["point_sums"]
    assert registers <= (255 if arch == "sm_100" else 168)
    assert spilled <= (32 if arch == "sm_100" else 0)


@pytest.mark.parametrize("arch", ARCHES)
def test_bounds_between_boxes_compile_without_spills(arch):
    for metric in range(3):
        used = usage("boxes.cu", arch, METRIC=metric)
        assert set(used) == {"box_tilt", "box_masses", "box_turn", "box_runs"}
        assert all(spilled == 0 for _, spilled in used.values())


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", kernels.STORES)
@pytest.mark.parametrize(("kl", "short"), [(True, 0), (True, 1), (False, 1)])
def test_passes_over_stored_pairs_do_not_spill(arch, dtype, kl, short):
    held = {"MEMORY": 20, "SPARSE": 1, "SHORT_INDEX": short}
    used = usage("portable.cu", arch, **shape_options(kernels.Shape(1, 8, 2), dtype, kl, **held))
    for function in ("sparse_rows", "sparse_columns", "part_sums", "part_moves"):
        registers, spilled = used[function]
        assert registers <= (80 if function == "sparse_rows" and not kl else 64), function
        assert spilled <= {"part_sums": 4, "sparse_rows": 0 if kl else 12}.get(function, 0), function


@pytest.mark.parametrize("arch", [arch for arch in ARCHES if arch != "sm_80"])
@pytest.mark.parametrize(
    ("dtype", "kl", "held", "own"), [("float32", 1, 1, 10), ("float64", 1, 0, 5), ("float32", 0, 0, 20)]
)
def test_many_passes_over_stored_pairs_hold_their_registers(arch, dtype, kl, held, own):
    """What is spilled is read again once a row or once a pass, not once an entry."""
    words = {"MEMORY": 20, "SPARSE": 1, "SHORT_INDEX": 1, "HELD": held, "OWN_DIFFERENCES": own}
    used = usage("iterate.cu", arch, **shape_options(kernels.Shape(16, 8, 2), dtype, kl, **words))
    assert set(used) == {"iterate_pairs", "ring_offset", "gather_sums"}
    registers, spilled = used["iterate_pairs"]
    assert registers <= 128
    assert spilled <= 800


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("store", "cost", "short"), [(0, 0, 1), (1, 1, 1), (2, 0, 0)])
def test_streams_over_stored_pairs_do_not_spill(arch, store, cost, short):
    used = usage("sparse_stream.cu", arch, STORE=store, COST=cost, SHORT_INDEX=short)
    assert set(used) == {"sparse_entries", "sparse_max", "sparse_sums", "sparse_apply"}
    assert all(registers <= 64 and spilled == 0 for registers, spilled in used.values())


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("cost", "reference", "masked"), [(0, 0, 0), (0, 1, 0), (1, 1, 0), (0, 1, 1)])
def test_streams_compile_without_spills(arch, cost, reference, masked):
    used = usage("stream.cu", arch, STORE=1, COST=cost, REFERENCE=reference, MASKED=masked)
    assert set(used) == {"build_kernel", "row_max", "plan_sums", "apply", "extrema"}
    assert all(spilled == 0 for _, spilled in used.values())


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", [(100, 100), (128, 128)])
@pytest.mark.parametrize("narrow", [True, False])
def test_blocks_of_a_batch_hold_their_registers(arch, shape, narrow):
    """The blocks a multiprocessor that the launch bound asks for; what spills is of the column half, once a pass."""
    options = kernels.small_options(shape, narrow)
    file, function = ("batch_narrow.cu", "batch_narrow") if narrow else ("batch.cu", "batch_solve")
    registers, spilled = usage(file, arch, COST=1, **options)[function]
    assert registers * 16 * options["GROUPS"] * options["RESIDENT"] <= 65536
    assert spilled <= SPILLED[narrow]


@pytest.mark.parametrize("arch", ARCHES)
def test_products_and_log_matmul_compile_without_spills(arch):
    steps = usage("batch_products.cu", arch, COST=0, NARROW=0, STORE=0)
    assert set(steps) == {"weigh", "open_problems", "prox_rows", "finish_problems"}
    for wide in (0, 1):
        for tile in (32, 64):
            steps |= usage("log_matmul.cu", arch, WIDE=wide, TILE=tile)
            assert all(spilled == 0 for _, spilled in steps.values())


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("m", "n"), [(512, 512 * 512), (300, 7 * 1001), (100, 1000 * 1000), (10**5, 77), (1, 1)])
def test_one_read_of_many_marginals_does_not_spill(arch, dtype, m, n):
    shape = kernels.strips_for(m, -(-n // kernels.PAD) * kernels.PAD, kernels.ITEMSIZE[dtype], 132, 227 << 10)
    threads = (shape.THREADS + 64) * kernels.THREADS // shape.THREADS
    used = usage("fused_pass.cu", arch, STORE=kernels.STORES[dtype], **shape.options)
    assert set(used) == {"fused_pass", "join_streams", "ring_offset"}
    assert all(registers * threads <= 65536 and spilled == 0 for registers, spilled in used.values())


@pytest.mark.parametrize("arch", ARCHES)
def test_differences_do_not_spill(arch):
    used = usage("differences.cu", arch, STORE=0)
    assert set(used) == {"add_difference", "products", "combine"}
    assert all(registers <= 64 and spilled == 0 for registers, spilled in used.values())


@pytest.mark.parametrize("arch", ARCHES)
def test_passes_along_a_tree_do_not_spill(arch):
    used = usage("tree_pass.cu", arch, STORE=0)
    assert set(used) == {"open_pass", "close_edge", "open_back", "close_back"}
    assert max(used["open_pass"][0], used["open_back"][0]) <= 64
    assert all(spilled == 0 for _, spilled in used.values())


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
                assert 1 <= shape.lag <= shape.slots - 2 <= kernels.MAX_SLOTS - 2
                ring = shape.slots * shape.R * kernels.row_bytes(shape.slice, itemsize, shape.THREADS)
                assert ring + kernels.RING_BEFORE <= (227 << 10) * shape.THREADS // kernels.THREADS
        assert kernels.strips_for(3, 8192 * 132 + 16, itemsize, 132, 227 << 10) is None


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", kernels.STORES)
def test_clusters_compile_without_spills(arch, dtype):
    used = usage("coarse.cu", arch, STORE=kernels.STORES[dtype], COST=1)
    assert len(used) == 7
    assert all(spilled == 0 for _, spilled in used.values())


def test_headers_are_in_the_source():
    text = kernels.source("iterate.cu")
    assert "#include" not in text
    for word in ("struct State", "struct Progress", "grid_barrier", "row_scale"):
        assert word in text


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


def test_records_are_words():
    for record in (kernels.STATE, kernels.PROGRESS, kernels.TRACE, kernels.PASS):
        assert record.itemsize % 8 == 0
        assert not record.isalignedstruct
        assert np.zeros((), record).nbytes == record.itemsize


def test_a_driverless_machine_gets_one_clear_sentence(monkeypatch):
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    from mapuot.backends import cuda

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
