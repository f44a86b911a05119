"""Block maps on a GPU: plans as the host's, values, graphs with other contents, selections."""

import cupy
import numpy as np
import pytest
from device_runs import DTYPES, bits, by_impl, host

import masks
import nbflash
from nbflash import BlockMap, reference, selection
from nbflash.backends.block_plan.host import BlockSchedule, Walk
from nbflash.cuda.device import cuda_device
from nbflash.inputs.block_layout import check_block_map
from nbflash.inputs.problem import check_forward
from nbflash.schedule.block_tiles import BlockTiles, item_lengths, work_order
from nbflash.testing import (
    assert_within_reference,
    low_precision,
    low_precision_backward,
    make_qkv,
)

N, NAMES, FACTOR = 700, ("out", "lse", "dq", "dk", "dv"), (2, 2, 3, 3, 3)


def lists(n, heads, k, block=64, batch=1, seed=0):
    """Unsorted, with duplicates and entries out of range."""
    rng, rows = np.random.default_rng(seed), -(-n // block)
    indices = rng.integers(-1, rows + 1, (batch, heads, rows, k)).astype(np.int32)
    return indices, rng.integers(0, k + 1, (batch, heads, rows)).astype(np.int32)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("tile", [(64, 64), (128, 128), (64, 128), (32, 64)])
@pytest.mark.parametrize("n", [N, 5000])
def test_plan_is_that_of_the_host(n, tile, transposed):
    made = BlockMap(*lists(n, 2, 9), shape=n, block=64, within=masks.causal(n))
    q, k, v = (cupy.empty((1, n, heads, 8), np.float16) for heads in (4, 2, 2))
    problem = check_forward(q, k, v)
    on_device = BlockMap(
        *map(cupy.asarray, (made.indices, made.counts)), shape=n, block=64, within=made.within
    )
    layout = check_block_map(on_device, problem)
    tiles, group = BlockTiles(layout, *tile), 2 if transposed else 1
    schedule = BlockSchedule(cuda_device(0), layout, tiles, transposed)
    walk = Walk(schedule, 1, 4, group, 2)
    _, (arrays, _) = walk((on_device.indices, on_device.counts))
    _, _, row_ptr, col_idx, kind, work = map(cupy.asnumpy, arrays)
    expected = tiles.lists(made.dense()[0], transposed)
    for got, want in zip((row_ptr, col_idx, kind), expected, strict=True):
        assert np.array_equal(got[: want.size], want)
    lengths = item_lengths(np.diff(row_ptr), tiles.plane_of(1, 4), schedule.n_row, group)
    head, row = np.divmod(work_order(lengths, schedule.n_row, 4 // group, 2), schedule.n_row)
    assert np.array_equal(work.reshape(-1, 2), np.stack([row, head], 1))


def results(q, k, v, dout, made, **options):
    out, lse = nbflash.attention(q, k, v, made, causal=True, return_lse=True, impl=options["impl"])
    return (
        out,
        lse,
        *nbflash.attention_backward(dout, q, k, v, out, lse, made, causal=True, **options),
    )


@by_impl
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_values(block, deterministic, impl):
    inputs = make_qkv(1, N, N, 4, 2, 64, np.float16)
    on_device = list(map(cupy.asarray, inputs))
    made = BlockMap(*map(cupy.asarray, lists(N, 2, 4, block)), shape=N, block=block)
    got = results(*on_device, made, impl=impl, deterministic=deterministic)
    mask, (q, k, v, dout) = made.to_mask(4) & masks.causal(N), inputs
    exact = *reference.attention(q, k, v, mask), *reference.attention_backward(dout, q, k, v, mask)
    low = *low_precision(q, k, v, mask), *low_precision_backward(dout, q, k, v, mask)
    for name, factor, *values in zip(NAMES, FACTOR, map(host, got), exact, low, strict=True):
        assert_within_reference(*values, name, factor)


@by_impl
def test_a_graph_is_replayed_with_other_blocks(impl):
    q, k, v, dout = map(cupy.asarray, make_qkv(1, N, N, 4, 2, 64, np.float16))
    indices, counts = map(cupy.asarray, lists(N, 4, 4))
    made, how = BlockMap(indices, counts, shape=N, block=64), {"impl": impl, "deterministic": True}
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        results(q, k, v, dout, made, **how)
        stream.synchronize()
        stream.begin_capture()
        captured = results(q, k, v, dout, made, **how)
        graph = stream.end_capture()
        for seed in range(1, 4):
            for x, new in zip((indices, counts), lists(N, 4, 4, seed=seed), strict=True):
                x[...] = cupy.asarray(new)
            graph.launch(stream)
            replayed = bits(captured)
            assert replayed == bits(results(q, k, v, dout, made, **how))


@by_impl
def test_rows_without_room_are_nan(impl):
    q, k, v, _ = map(cupy.asarray, make_qkv(1, 128, 128, 2, 2, 64, np.float16))
    indices, counts = cupy.zeros((1, 2, 2, 1), np.int32), cupy.ones((1, 2, 2), np.int32)
    counts[0, 1, 0] = 2
    made = BlockMap(indices, counts, shape=128, block=64)
    out = host(nbflash.attention(q, k, v, made, impl=impl))
    assert np.isnan(out[0, :64, 1]).all()
    assert np.isfinite(out[0, :, 0]).all()
    assert np.isfinite(out[0, 64:, 1]).all()
    with pytest.raises(ValueError, match="the row needs 2 entries"):
        made.check()


METHODS = {
    "mean_pooled": {"topk": 3, "causal": True},
    "compressed": {"topk": 4, "causal": True},
    "cumulative": {"threshold": 0.5, "causal": True},
    "antidiagonal": {"threshold": 0.5, "causal": True},
    "vertical_slash": {"vertical": 5, "slash": 5},
}


@pytest.mark.parametrize("name", METHODS)
def test_selections_are_those_of_numpy(name):
    q, k, _, _ = make_qkv(1, N, N, 4, 2, 64, np.float32)
    select = getattr(selection, name)
    of_host = select(q, k, block=64, **METHODS[name])
    of_device = select(cupy.asarray(q), cupy.asarray(k), block=64, **METHODS[name])
    assert np.array_equal(of_host.dense(), host(of_device.dense()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_compressed_of_16_bits_is_that_of_numpy(dtype, monkeypatch):
    """In several steps; products are of tensor cores."""
    monkeypatch.setattr("nbflash.selection.compressed_keys._SCORES", 1 << 15)
    q, k, _, _ = make_qkv(2, N, N, 4, 2, 64, DTYPES[dtype])
    of_host = selection.compressed(q, k, topk=4, causal=True)
    of_device = selection.compressed(cupy.asarray(q), cupy.asarray(k), topk=4, causal=True)
    assert np.array_equal(of_host.dense(), host(of_device.dense()))
