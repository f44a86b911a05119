"""What executors launch kernels with: every argument is what the kernel's parameter is called.

Sizes and strides are all different, so that one in the place of another is seen.
"""

from dataclasses import replace

import numpy as np
import pytest
from logged_device import Array, Logged, OwnArray, padded

import masks
from nbflash.backends.simt import row_statistics
from nbflash.backends.simt.executor import SimtExecutor
from nbflash.backends.sm80 import row_kernels
from nbflash.backends.sm80.executor import Sm80Executor
from nbflash.backends.sm90.backward import host as sm90_host
from nbflash.backends.sm90.backward.config import backward_configs, columns_configs
from nbflash.backends.sm90.backward.dq_config import ROWS
from nbflash.backends.sm90.executor import Sm90Executor
from nbflash.backends.sm90.forward.config import forward_configs
from nbflash.cuda import kinds, tensor_map
from nbflash.definitions import philox
from nbflash.definitions.constants import LEAST_SCALE, LOG2_E
from nbflash.inputs import arrays
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import Problem

BATCH, NQ, NK, HEADS, HEADS_KV, DIM = 3, 200, 330, 14, 7, 64
SCALE, SEED, P = 0.375, (11, 13), 0.25
Q_SHAPE, KV_SHAPE, LSE_SHAPE = (BATCH, NQ, HEADS, DIM), (BATCH, NK, HEADS_KV, DIM), (3, 14, 200)
EXECUTORS = {
    "simt": (SimtExecutor, np.float32),
    "simt in half precision": (SimtExecutor, np.float16),
    "sm80": (Sm80Executor, np.float16),
    "sm90": (Sm90Executor, np.float16),
}
# Of strides, which array they are of.
STRIDES = {"q": "q", "k": "k", "v": "v", "o": "out", "do": "dout", "l": "dlse", "dq": "dq"}
STRIDES |= {"dk": "dk", "dv": "dv"}
SIZES = {"batch": BATCH, "nq": NQ, "nk": NK, "heads": HEADS, "heads_kv": HEADS_KV, "group": 2}


def _given(dtype, impl):
    """Arrays of a call, each with gaps of its own; sm90 takes contiguous gradients alone."""
    gaps = iter(range(16, 16 * 12, 16))
    shapes = {"q": Q_SHAPE, "k": KV_SHAPE, "v": KV_SHAPE, "out": Q_SHAPE, "dout": Q_SHAPE}
    found = {name: padded(shape, dtype, next(gaps)) for name, shape in shapes.items()}
    found["dlse"] = padded(LSE_SHAPE, np.float32, next(gaps))
    found["lse"] = Array(LSE_SHAPE, np.float32)
    found |= {"dq": padded(Q_SHAPE, dtype, next(gaps)), "dk": padded(KV_SHAPE, dtype, next(gaps))}
    found["dv"] = padded(KV_SHAPE, dtype, next(gaps))
    if impl == "sm90":
        found |= {name: Array(found[name].shape, dtype) for name in ("dq", "dk", "dv")}
    return found


@pytest.fixture(params=EXECUTORS)
def impl(request, cupy):
    return request.param


def _executor(impl, given, dropout=0.0, scale=SCALE):
    make, dtype = EXECUTORS[impl]
    strides = tuple((*arrays.strides(given[name]), 1) for name in "qkv")
    sizes = BATCH, NQ, NK, HEADS, HEADS_KV, DIM, np.dtype(dtype).name, scale
    problem = Problem(*sizes, strides, "cuda", 0, 16)
    device = Logged()
    spec = AttentionSpec(problem, masks.causal(NQ, NK), None, dropout)
    more = {}
    if (
        make is Sm90Executor and not dropout and scale == SCALE
    ):  # of which other tiles of q than of k and v
        more = {"config": forward_configs("float16", DIM)[0]}
    return make(spec, device=device, **more), device


def _check_named(found, given, scratch):
    """Whatever of a launch has the name of an array, of strides or of a size."""
    for name, value in found.values.items():
        if name in given:
            if (found.kernel, name) not in scratch:
                assert value == given[name].data.ptr, (found.kernel, name)
        elif name in SIZES:
            assert value == SIZES[name], (found.kernel, name)
        elif name.removesuffix("_stride") in STRIDES and name.endswith("_stride"):
            of = STRIDES[name.removesuffix("_stride")]
            if (found.kernel, of) not in scratch:
                assert tuple(value) == arrays.strides(given[of]), (found.kernel, name)
        elif name.endswith("_map"):
            _check_map(found, name, given)


def _check_map(found, name, given):
    of = {"o": "out", "do": "dout"}.get(name.removesuffix("_map"), name.removesuffix("_map"))
    x, cfg = given[of], found.config
    rows = {"q": "tile_m", "dout": "tile_m", "k": "tile_n", "v": "tile_n"}
    box = 64 if of == "out" else getattr(cfg, rows.get(of, ""), ROWS)
    if found.kernel == "nbflash_bwd_sm90_dq" and of not in "kv":
        box = ROWS
    expected = tensor_map.geometry(x.shape, arrays.strides(x), box)
    address, layout = found[name]
    assert (address, layout) == (x.data.ptr, expected), (found.kernel, name)


def _tiles(found):
    """Rows of tiles, and launched blocks where there is one for each."""
    cfg = found.config
    by_columns = "bwd" in found.kernel and getattr(cfg, "walk", "columns") == "columns"
    by_columns = by_columns and "dq" not in found.kernel
    n, tile = (NK, cfg.tile_n) if by_columns else (NQ, cfg.tile_m)
    rows, heads = -(-n // tile), HEADS_KV if by_columns else HEADS
    return rows, rows * BATCH * heads


def _check_walk(found):
    rows, items = _tiles(found)
    assert found["n_row"] == rows, found.kernel
    if "sm90" in found.kernel:
        assert found["items"] == items
        assert 0 < found["live"] <= items
        assert found.blocks == min(Logged.multiprocessors * found.config.min_blocks, items)
        assert found.kernel != "nbflash_bwd_sm90" or found["n_col"] == -(-NQ // found.config.tile_m)
    else:
        assert found.blocks == items, found.kernel


@pytest.mark.parametrize("dropout", [0.0, P])
def test_forward(impl, dropout):
    given = _given(EXECUTORS[impl][1], impl)
    executor, device = _executor(impl, given, dropout)
    executor.forward(*(given[name] for name in ("q", "k", "v", "out", "lse")), seed=SEED)
    (found,) = device.launches
    assert device.encoded == [("float16", 256)] * (impl == "sm90")
    _check_named(found, given, ())
    _check_walk(found)
    assert found["scale"] == pytest.approx(SCALE * LOG2_E, rel=1e-7)
    _check_dropout(found, dropout)


def _check_dropout(found, dropout):
    if not dropout:
        assert found["state"] == []
        assert found["dropping"] == []
        return
    assert found["state"][:2] == list(SEED)
    threshold, share = found["dropping"]
    halves = 1 if "simt" in found.kernel else 0x10001
    assert threshold == halves * philox.threshold(P)
    kept = found.kernel.removeprefix("nbflash_") in ("fwd_sm80", "fwd_sm90", "bwd_sm90_dq")
    assert share == pytest.approx(1 - P if kept else 1 / (1 - P), rel=1e-6)


CONTIGUOUS = {n: (n * h * DIM, h * DIM, DIM) for n, h in ((NQ, HEADS), (NK, HEADS_KV))}


def _expected(kernel, cfg, factor):
    """Numbers of the backward's kernels besides `SIZES`; ``factor``: 1 / (1 − p)."""
    n_col = -(-NQ // cfg.tile_m) if hasattr(cfg, "tile_m") else 0
    rows, base = BATCH * HEADS * NQ, SCALE * LOG2_E
    return {
        "bwd_simt_columns": {"scale": SCALE, "q_factor": base},
        "bwd_simt_rows": {"scale": SCALE, "q_factor": base},
        "delta_simt": {"rows": rows},
        "convert_dq_simt": {"rows": rows},
        "bwd_sm80_columns": {"scale": SCALE, "factor": base},
        "bwd_sm80_rows": {"scale": SCALE, "factor": base},
        "convert_dq_sm80": {"factor": SCALE * factor},
        "statistics_sm80": {"share": 1 / factor},
        "bwd_sm90": {"factor": base, "scale": SCALE * factor, "kv_stride": CONTIGUOUS[NK]},
        "bwd_sm90_dq": {"factor": base, "scale": SCALE * factor, "stride": CONTIGUOUS[NQ]},
        "statistics_sm90": {"n_col": n_col},
        "convert_dq_sm90": {"scale": SCALE, "stride": CONTIGUOUS[NQ]},
    }[kernel.removeprefix("nbflash_")]


BLOCKS = {
    "delta_simt": lambda x: row_statistics.blocks_for(BATCH * HEADS * NQ),
    "convert_dq_simt": lambda x: row_statistics.blocks_for(BATCH * HEADS * NQ),
    "statistics_sm80": lambda x: row_kernels.blocks_for_rows(x["rows"]),
    "convert_dq_sm80": lambda x: row_kernels.blocks_for_pieces(x.config, 16 * x["tiles"]),
    "statistics_sm90": lambda x: x.config.statistics_blocks(x["rows"]),
}


def _check_numbers(found, factor):
    blocks = BLOCKS.get(found.kernel.removeprefix("nbflash_"))
    assert blocks is None or found.blocks == blocks(found), found.kernel
    for name, value in _expected(found.kernel, found.config, factor).items():
        what = found.kernel, name
        if isinstance(value, tuple):
            assert tuple(found[name]) == value, what
        elif value is not None:
            assert found[name] == pytest.approx(value, rel=1e-6), what


def _check_kinds(found):
    """Of heads of one column 2³¹ rows fit into memory; tensor cores take 16 columns."""
    if found.kernel in ("nbflash_delta_simt", "nbflash_convert_dq_simt"):
        assert found.kinds["rows"] == kinds.int64, found.kernel


def _check_padding(launches):
    """Numbers of queries are laid out by whole tiles: of one tile in all kernels of a backward."""
    tiles = [-(-NQ // x.config.tile_m) * x.config.tile_m for x in launches if "work" in x.values]
    for found in launches:
        if "padded" in found.values:
            assert found["padded"] == max(tiles), found.kernel
        if "rows" in found.values and "simt" not in found.kernel:
            assert found["rows"] == BATCH * HEADS * max(tiles), found.kernel
        if "tiles" in found.values:
            assert found["tiles"] == BATCH * HEADS * max(tiles) // 16


def _check_where_dq_is(launches, given):
    """A kernel that walks columns adds to the sum that others clear and convert; rows write dQ."""
    own = given["dq"].data.ptr
    by_kernel = {found.kernel.removeprefix("nbflash_"): found for found in launches}
    _check_padding(launches)
    sums = {found["dq"] for name, found in by_kernel.items() if name in ("statistics_sm90",)}
    for name, found in by_kernel.items():
        if name.startswith("convert"):
            source, target = ("source", "target") if "source" in found.values else ("total", "dq")
            assert found[target] == own, name
            if "s_stride" in found.values:
                assert tuple(found["s_stride"]) == CONTIGUOUS[NQ]
            stride = found.values.get("t_stride", found.values.get("stride"))
            assert tuple(stride) == arrays.strides(given["dq"]), name
            sums.add(found[source])
        if name in ("bwd_sm80_rows", "bwd_sm90_dq", "bwd_simt_rows"):
            assert found["dq"] == own, name
    main = [by_kernel[x] for x in ("bwd_sm80_columns", "bwd_simt_columns") if x in by_kernel]
    if "convert_dq_sm90" in by_kernel:
        main.append(by_kernel["bwd_sm90"])
    if sums:
        assert {found["dq"] for found in main} | sums == sums
        assert len(sums) == 1
        assert own not in sums


# Pointers that are of temporary memory, though they have the name of a result.
SCRATCH = {
    "simt": set(),
    "simt in half precision": {("nbflash_bwd_simt_columns", "dq")},
    "sm80": {("nbflash_bwd_sm80_columns", "dq")},
    "sm90": {("nbflash_statistics_sm90", "dq"), ("nbflash_bwd_sm90", "dq")},
}


def _kernels(impl, deterministic, two_passes):
    """Those of a backward, in the order in which they run."""
    if impl == "sm90":
        return (
            ["bwd_sm90_dq", "bwd_sm90"]
            if two_passes
            else ["statistics_sm90", "bwd_sm90", "convert_dq_sm90"]
        )
    family = "simt" if "simt" in impl else "sm80"
    first = "delta_simt" if family == "simt" else "statistics_sm80"
    if deterministic:
        return [first, f"bwd_{family}_rows", f"bwd_{family}_columns"]
    last = {"simt": [], "simt in half precision": ["convert_dq_simt"], "sm80": ["convert_dq_sm80"]}
    return [first, f"bwd_{family}_columns", *last[impl]]


@pytest.mark.parametrize("dropout", [0.0, P])
@pytest.mark.parametrize("deterministic", [False, True, None])
def test_backward(impl, deterministic, dropout):
    """None: as it is where nothing chooses two passes, in one."""
    given = _given(EXECUTORS[impl][1], impl)
    executor, device = _executor(impl, given, dropout)
    if impl == "sm90" and deterministic is None and not dropout:
        executor.two_passes = False
    names = "dout", "q", "k", "v", "out", "lse", "dlse", "dq", "dk", "dv"
    executor.backward(*(given[name] for name in names), bool(deterministic), seed=SEED)
    two_passes = bool(deterministic) or bool(executor.two_passes)
    scratch = SCRATCH[impl]
    if impl == "sm90" and two_passes:
        scratch = {("nbflash_bwd_sm90", "dq")}
    temporary = {}
    # Of the forward, of the pass over columns and of that over rows.
    assert device.encoded == [("float16", 256)] * ((2 + two_passes) * (impl == "sm90"))
    for found in device.launches:
        _check_named(found, given, scratch)
        if "n_row" in found.values:
            _check_walk(found)
            _check_dropout(found, dropout)
        _check_numbers(found, 1 / (1 - dropout))
        _check_kinds(found)
        for name in ("delta", "shift", "stats", "total"):
            if name in found.values:
                temporary.setdefault(name, set()).add(found[name])
    assert temporary
    assert all(len(x) == 1 for x in temporary.values()), temporary
    ran = [found.kernel.removeprefix("nbflash_") for found in device.launches]
    assert ran == _kernels(impl, bool(deterministic), two_passes)
    _check_where_dq_is(device.launches, given)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("table", [backward_configs, columns_configs])
def test_a_backward_that_is_given_runs_where_it_fits(table, deterministic, cupy):
    """A configuration with dQ in one pass, one without in two: the other pass takes the table's."""
    given = _given(np.float16, "sm90")
    strides = tuple((*arrays.strides(given[name]), 1) for name in "qkv")
    sizes = BATCH, NQ, NK, HEADS, HEADS_KV, DIM, "float16", SCALE
    spec = AttentionSpec(Problem(*sizes, strides, "cuda", 0, 16), masks.causal(NQ, NK))
    config, device = replace(table("float16", DIM)[-1], stages=3), Logged()
    executor = Sm90Executor(spec, backward=config, device=device)
    assert executor.two_passes is not config.with_dq
    names = "dout", "q", "k", "v", "out", "lse", "dlse", "dq", "dk", "dv"
    executor.backward(*(given[name] for name in names), deterministic)
    (main,) = (x for x in device.launches if x.kernel == "nbflash_bwd_sm90")
    in_two = deterministic or not config.with_dq
    assert main.config.with_dq is not in_two
    assert (main.config.stages == 3) == (in_two is not config.with_dq)
    assert Sm90Executor(spec, backward=config, device=Logged()).two_passes == (not config.with_dq)


@pytest.mark.parametrize("scale", [-0.375, 0.0])
def test_scales_below_zero_and_of_zero(impl, scale):
    """Kernels of tensor cores negate, and multiply with what is not 0; the others take any."""
    given = _given(EXECUTORS[impl][1], impl)
    executor, device = _executor(impl, given, scale=scale)
    executor.forward(*(given[name] for name in ("q", "k", "v", "out", "lse")))
    (found,) = device.launches
    if "simt" in impl:
        assert found["scale"] == scale * LOG2_E
        return
    assert found.config.negate is (scale < 0)
    assert found["scale"] == max(abs(scale) * LOG2_E, LEAST_SCALE)


# Bytes off alignment, elements of a gap, the sign of a stride: the first is right everywhere.
LAYOUTS = (16, 16, 1), (8, 16, 1), (0, 4, 1), (0, 16, -1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["out", "dout"])
def test_what_is_off_alignment_is_copied(impl, name, layout):
    """What kernels read and write in chunks of 16 bytes; maps of tensors have no way back."""
    (shift, more, sign), given = layout, _given(EXECUTORS[impl][1], impl)
    x = padded(Q_SHAPE, EXECUTORS[impl][1], more)
    strides = x.strides[0], sign * x.strides[1], *x.strides[2:]
    given[name] = OwnArray(x.shape, x.dtype, strides=strides, address=2**45 + shift)
    fits = {"sm80": layout[:2] == (16, 16) or sign < 0, "sm90": layout == LAYOUTS[0]}.get(
        impl, True
    )
    executor, device = _executor(impl, given)
    executor.forward(*(given[x] for x in ("q", "k", "v", "out", "lse")))
    (found,) = device.launches
    written = found["o" if "o" in found.values else "out"]
    assert (written == given["out"].data.ptr) == (fits or name == "dout")
    device.launches.clear()
    names = "dout", "q", "k", "v", "out", "lse", "dlse", "dq", "dk", "dv"
    executor.backward(*(given[x] for x in names), False)
    for of, read in READ.items():
        pointers = {x[n] for x in device.launches for n in read if n in x.values}
        pointers = {x[0] if isinstance(x, tuple) else x for x in pointers}
        assert (given[of].data.ptr in pointers) == (fits or of != name)
        assert len(pointers) == 1


READ = {"dout": ("dout", "do", "do_map", "dout_map"), "out": ("out", "o")}


@pytest.mark.parametrize("two_passes", [False, True])
def test_heads_share_the_cache_with_what_columns_read(two_passes, cupy, monkeypatch):
    """Q and dO in two bytes, and in one pass the sum of dQ in four, of the heads of a group."""
    asked = []
    monkeypatch.setattr(sm90_host, "heads_at_a_time", lambda nbytes: asked.append(nbytes) or 1)
    given = _given(np.float16, "sm90")
    executor, _ = _executor("sm90", given)
    executor.two_passes = two_passes
    executor.bind_backward()
    assert asked == [NQ * (HEADS // HEADS_KV) * DIM * (4 if two_passes else 8)]
