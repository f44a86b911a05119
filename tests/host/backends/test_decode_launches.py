"""What decode, merging and selection launch kernels with, by the names of their parameters."""

import math

import ml_dtypes
import numpy as np
import pytest
from logged_device import Array, Logged, padded

import masks
from nbflash import scores
from nbflash.backends.block_selection import host as selection
from nbflash.backends.merging import host as merge_host
from nbflash.backends.registry import BACKENDS
from nbflash.backends.sm80.decode.host import Sm80Partial
from nbflash.backends.split_kv import shares
from nbflash.cuda import device as devices
from nbflash.cuda import tensor_map
from nbflash.definitions.constants import LOG2_E
from nbflash.inputs import arrays
from nbflash.inputs.decode_problem import Cache, check_decode
from nbflash.merging import add_into
from nbflash.planning import decode_plan
from nbflash.planning.decode_plan import CudaDecoder

BATCH, NQ, HEADS, HEADS_KV, DIM, PAGES, PAGE, ENTRIES = 3, 2, 14, 7, 64, 11, 32, 90
SCALE = 0.375
LOG2 = pytest.approx(SCALE * LOG2_E, rel=1e-6)
SIZES = {"batch": BATCH, "nq": NQ, "heads": HEADS, "group": HEADS // HEADS_KV, "page_size": PAGE}


def _given(stored, paged):
    """q and a cache of a dtype, None is that of q; every array has gaps of its own."""
    dtype = np.dtype(getattr(ml_dtypes, stored, stored)) if stored else np.float16
    pages = (PAGES, PAGE) if paged else (BATCH, PAGE * ENTRIES)
    shape = *pages, HEADS_KV, DIM
    found = {"q": padded((BATCH, NQ, HEADS, DIM), np.float16, 16)}
    found |= {"k": padded(shape, dtype, 32), "v": padded(shape, dtype, 48)}
    found |= {"k_scale": None, "v_scale": None, "table": None}
    if stored:
        found |= {"k_scale": padded(shape[:3], np.float32, 4)}
        found |= {"v_scale": padded(shape[:3], np.float32, 8)}
    if paged:
        found["table"] = padded((BATCH, ENTRIES), np.int32, 3)
    return found | {"lengths": Array((BATCH,), np.int32)}


def _decoder(impl, given, mask=None, window=None, scale=SCALE, score=None):
    """The decoder of what `_given` returns, what it is called with, and the problem."""
    order = "k", "v", "lengths", "table", "k_scale", "v_scale"
    q, cache = given["q"], Cache(*(given[name] for name in order))
    problem = check_decode(q, cache, scale, window, score)
    return CudaDecoder(problem, mask, q, cache, BACKENDS[impl].decode_partial), (q, cache), problem


@pytest.fixture
def device(cupy, monkeypatch):
    made = Logged()
    for module in (devices, merge_host, selection):
        monkeypatch.setattr(module, "cuda_device", lambda *_: made)
    _forget()
    yield made
    _forget()


def _forget():
    for name in ("_bound_means", "_bound_products", "_bound_weights", "_bound_best"):
        getattr(selection, name).cache_clear()
    merge_host._bound.cache_clear()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("impl", ["simt", "sm80", "sm90"])
@pytest.mark.parametrize("mask", [None, masks.window(NQ, 150, left=70, right=0)])
def test_decode(impl, quantised, paged, mask, device):
    given = _given("int8" if quantised else None, paged)
    window = None if impl == "sm90" or mask is None else (40, 0)
    decoder, call, problem = _decoder(impl, given, mask, window)
    out, lse = decoder(*call)
    first, *others = device.launches
    assert device.encoded == [("float16", 128 if quantised else 256)] * (impl == "sm90")
    given |= {"out": out, "lse": lse}
    assert len(others) == ("out" not in first.values)
    row_tiles = first.blocks // decoder._partial.splits
    assert decoder._partial.counted == (0 if others else row_tiles)
    for found in device.launches:
        _check_decode(found, given, paged, decoder._partial.splits)
    _check_keys(first, problem, mask)
    parts = {(found["part_o"], found["part_lse"]) for found in device.launches}
    assert len(parts) == 1
    if not others:
        assert (first["joining"], len({first["counts"], *parts.pop(), out.data.ptr})) == (True, 4)
    else:
        assert others[0]["rows"] == BATCH * NQ * HEADS
        assert tuple(others[0]["o_stride"]) == arrays.strides(out)


@pytest.mark.parametrize("scale", [SCALE, -SCALE])
@pytest.mark.parametrize("mask", [None, masks.causal(NQ, 150)])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("stored", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("impl", ["simt", "sm80", "sm90"])
def test_a_kernel_is_that_of_the_problem(impl, stored, paged, mask, scale, device):
    given = _given(stored, paged)
    decoder, call, _ = _decoder(impl, given, mask, scale=scale)
    decoder(*call)
    cfg = device.launches[0].config
    assert (cfg.dtype, cfg.head_dim, cfg.masked) == ("float16", DIM, mask is not None)
    if impl == "simt":
        assert (cfg.cache_dtype, cfg.vectors) == (stored or "float16", True)
        return
    assert (cfg.stored, cfg.negate) == (stored or "", scale < 0)
    assert impl == "sm80" or cfg.box == (math.gcd(PAGE, cfg.tile_n) if paged else cfg.tile_n)


@pytest.mark.parametrize("impl", ["simt", "sm80"])
def test_a_kernel_has_the_functions_of_a_score(impl, device):
    for score in (None, scores.softcap(3.0)):
        decoder, call, _ = _decoder(impl, _given(None, paged=True), score=score)
        decoder(*call)
        found = device.launches[-2 if impl == "simt" else -1].config.score
        assert (found and found.forms) == (score and ("softcap",))


@pytest.mark.parametrize(
    ("score", "capability", "row"),
    [
        (None, (9, 0), (8, 3, 2)),
        (scores.softcap(3.0), (9, 0), (4, 3, 2)),
        (scores.softcap(3.0), (8, 6), (4, 3, 1)),
        (None, (8, 6), (4, 3, 1)),
    ],
)
def test_a_kernel_fits_a_score_and_the_memory_of_a_device(score, capability, row):
    """Of 8-bit caches of 128 columns: warps, stages, and blocks of a multiprocessor."""
    q, k = Array((1, 1, 1, 128), np.float16), Array((1, 64, 1, 128), np.int8)
    scale = Array((1, 64, 1), np.float32)
    cache = Cache(k, k, Array((1,), np.int32), None, scale, scale)
    problem = check_decode(q, cache, SCALE, None, score)
    cfg = Sm80Partial.config_for(devices.Recording(capability), problem, None)
    assert (cfg.warps, cfg.stages, cfg.min_blocks) == row


@pytest.mark.parametrize("impl", ["sm80", "sm90"])
def test_many_parts_are_joined_by_a_second_kernel(impl, device, monkeypatch):
    """It counts no row tiles."""
    monkeypatch.setattr(shares, "joined_by_the_last", lambda *_: False)
    decoder, call, _ = _decoder(impl, _given(None, paged=True))
    out, _ = decoder(*call)
    assert decoder._partial.counted == 0
    first, second = device.launches
    assert first["joining"] is False
    assert (second["part_o"], second["part_lse"]) == (first["part_o"], first["part_lse"])
    assert (second["rows"], second["splits"]) == (BATCH * NQ * HEADS, decoder._partial.splits)
    assert out.data.ptr in second.values.values()


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_graph_keeps_the_decoder_and_its_parts(second, records, device, monkeypatch):
    """Joined by the last block or by a second kernel."""
    kept, memory = [], object()
    monkeypatch.setattr(decode_plan, "_captured", kept)
    monkeypatch.setattr(shares, "joined_by_the_last", lambda *_: not second)
    monkeypatch.setattr(device, "stream", lambda: (7, records))
    addresses = range(1 << 20, 5 << 20, 1 << 20)
    monkeypatch.setattr(device, "scratch", lambda *_: lambda: (memory, addresses))
    decoder, call, _ = _decoder("sm80", _given(None, paged=True))
    decoder(*call)
    assert kept == ([(decoder, memory)] if records else [])


def _check_keys(found, problem, mask):
    """How far keys are counted, and which tiles of them are walked."""
    assert found["capacity"] == (150 if mask is not None else PAGE * ENTRIES)
    assert found["scale"] == LOG2
    if "left" in found.values:
        assert found["left"] == (PAGE * ENTRIES if problem.window is None else 40)
        assert found["right"] == 0
    assert found["splits"] > 1 or problem.window or mask is not None
    cfg, pack = found.config, found.values.get("pack", getattr(found.config, "pack", 1))
    assert pack in (1, HEADS // HEADS_KV)
    rows = BATCH * HEADS // pack * -(-NQ // getattr(cfg, "queries", NQ))
    assert found.blocks == found["splits"] * rows or "simt" not in found.kernel


def _check_decode(found, given, paged, splits):
    for name, value in found.values.items():
        what = found.kernel, name
        if name == "page_size" and not paged:
            assert value == (PAGE * ENTRIES if "simt" in found.kernel else 0), what
        elif name in SIZES:
            assert value == SIZES[name], what
        elif name == "splits":
            assert value == splits, what
        elif name == "table_stride":
            assert value == (ENTRIES + 3 if paged else 1), what
        elif name == "strides":
            known = [given[x] for x in ("k", "v", "k_scale", "v_scale")]
            flat = [[0] * 3 if x is None else [*arrays.strides(x)] for x in known]
            assert [*value] == [n for three in flat for n in three], what
        elif name.endswith("_stride") and name[0] in "qkv":
            x = given[name.removesuffix("_stride")]
            shrink = 2 // x.itemsize if x is not None and x.itemsize < 2 else 1
            expected = (0, 0, 0) if x is None else tuple(s // shrink for s in arrays.strides(x))
            assert tuple(value) == expected, what
        elif name.endswith("_map"):
            _check_map(found, given[name[0]], value)
        elif given.get(name) is not None:
            assert value == given[name].data.ptr, what


def _check_map(found, x, value):
    shrink = 2 // x.itemsize
    shape, strides = (*x.shape[:3], DIM // shrink), [s // shrink for s in arrays.strides(x)]
    expected = tensor_map.geometry(shape, tuple(strides), found.config.box)
    assert value == (x.data.ptr, expected), found.kernel


PARTS = {"out_a": ((2, 9, 5, 64), np.float32, 16), "lse_a": ((2, 5, 9), np.float32, 3)}
PARTS |= {"out_b": ((2, 6, 5, 64), np.float16, 32), "lse_b": ((2, 5, 6), np.float32, 4)}
PARTS |= {"out": ((2, 9, 5, 64), np.float32, 48), "lse": ((2, 5, 9), np.float32, 5)}
MERGED = {"a": "out_a", "la": "lse_a", "b": "out_b", "lb": "lse_b", "o": "out", "l": "lse"}


@pytest.mark.parametrize("placed", [False, True])
def test_merging(placed, device):
    given = {name: padded(*how) for name, how in PARTS.items()}
    places = Array((6,), np.int32) if placed else None
    pairs = [tuple(given[f"{x}{of}"] for x in ("out", "lse")) for of in ("_a", "_b", "")]
    merge_host.merge(*pairs, places)
    (found,) = device.launches
    for name, x in given.items():
        assert found[name] == x.data.ptr, name
    for name, of in MERGED.items():
        assert tuple(found[f"{name}_stride"]) == arrays.strides(given[of]), name
    assert (found["n"], found["heads"]) == (6, 5)
    assert found["places"] == (given["lse"] if places is None else places).data.ptr
    cfg = found.config
    assert (cfg.dtype, cfg.part_dtype, cfg.head_dim) == ("float32", "float16", 64)
    assert (cfg.indexed, cfg.weighted, cfg.lanes) == (placed, True, 4)


@pytest.mark.parametrize("off", ["out_a", "out_b", "out"])
def test_merging_an_array_off_alignment(off, device):
    """Four bytes, which one of the three alone is: no access is wider."""
    given = {name: padded(*how) for name, how in PARTS.items()}
    assert merge_lanes(given, device) == 4
    given[off].data.ptr += 4
    assert merge_lanes(given, device) == (2 if off == "out_b" else 1)


def merge_lanes(given, device):
    pairs = [tuple(given[f"{x}{of}"] for x in ("out", "lse")) for of in ("_a", "_b", "")]
    merge_host.merge(*pairs)
    return device.launches[-1].config.lanes


@pytest.mark.parametrize("placed", [False, True])
def test_adding(placed, device):
    total, part = (padded(*PARTS[name]) for name in ("out_a", "out_b"))
    places = Array((6,), np.int32) if placed else None
    add_into(total, part, places)
    (found,) = device.launches
    expected = {"out_a": total, "out_b": part, "out": total, "a": total, "b": part, "o": total}
    for name, x in expected.items():
        if name in found.values:
            assert found[name] == x.data.ptr, name
        else:
            assert tuple(found[f"{name}_stride"]) == arrays.strides(x), name
    assert (found["n"], found["heads"]) == (6, 5)
    assert (found.config.indexed, found.config.weighted) == (placed, False)
    assert not placed or found["places"] == places.data.ptr


def test_more_sinks_than_blocks_are_all_of_them(device):
    last = np.arange(9, dtype=np.int32)
    scores = Array((1, 1, 9, 40), np.float32)
    selection.best_blocks(scores, last.tobytes(), 5, 41, 2**31 - 1)
    (found,) = device.launches
    assert (found["sinks"], found["local"]) == (40, 40)


def test_selection(device):
    x = padded((2, 50, 6, 64), np.float16, 16)
    means = selection.block_means(x, 8)
    q, k = Array((2, 6, 7, 64), np.float32), Array((2, 3, 13, 64), np.float32)
    products = selection.block_products(q, k)
    weights = Array((2, 3, 10, 5), np.float32)
    selection.block_weights(products, weights, 2, 3, 0.25, (4, 16), 8, 77)
    last = np.arange(9, dtype=np.int32)
    scores = Array((2, 3, 9, 40), np.float32)
    indices, counts = selection.best_blocks(scores, last.tobytes(), 5, 2, 3)
    of_means, of_products, of_rows, of_blocks, best = device.launches
    names = [found.kernel.removeprefix("nbflash_") for found in device.launches]
    assert names[:2] == ["block_means", "block_products"]
    packed = of_means.config.packed
    assert tuple(of_means["stride"]) == tuple(s // packed for s in arrays.strides(x))
    expected = (
        (of_means, {"x": x, "means": means, "n": 50, "size": 8, "blocks": 7, "heads": 6}),
        (of_products, {"q": q, "k": k, "s": products, "m": 7, "n": 13, "width": 64, "group": 2}),
        (of_rows, {"scores": products, "first": 3, "rows": 84, "queries": 7, "n": 13}),
        (of_rows, {"last": 76, "length": 8, "scale": 0.25}),
        (of_blocks, {"scores": products, "weights": weights, "first": 3, "first_row": 2}),
        (of_blocks, {"queries": 7, "n": 13, "group": 2, "size": 4, "per_column": 2, "rows": 2}),
        (of_blocks, {"all_rows": 10, "columns": 5, "last": 76, "length": 8, "scale": 0.25}),
        (best, {"columns": 40, "width": 5, "sinks": 2, "local": 3, "n_rows": 9, "scores": scores}),
    )
    for found, values in expected:
        for name, value in values.items():
            value = value.data.ptr if isinstance(value, Array) else value
            assert found[name] == value, (found.kernel, name)
    assert of_rows["statistics"] == of_blocks["statistics"]
    assert of_means.blocks == 2 * 7 * 6
    assert of_blocks.blocks == 2 * 3 * 2 * of_blocks["parts"]
    assert of_products.blocks == 12 * of_products["tiles_m"] * of_products["tiles_n"]
    assert best.blocks == 2 * 3 * 9
    assert (indices.shape, counts.shape) == ((2, 3, 9, 5), (2, 3, 9))
    np.testing.assert_array_equal(best["last"], last)
