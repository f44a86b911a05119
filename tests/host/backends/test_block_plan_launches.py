"""What block maps planned on the device launch kernels with, by the names of their parameters."""

import math

import numpy as np
import pytest
from logged_device import Array, Logged, OwnArray, padded

import masks
from nbflash.backends.registry import prepare
from nbflash.inputs import arrays
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.block_layout import BlockLayout
from nbflash.inputs.problem import Problem

BATCH, NQ, NK, HEADS, HEADS_KV, DIM, WIDTH = 3, 200, 330, 14, 7, 64, 64
PLANES = BATCH * HEADS_KV
Q_SHAPE, KV_SHAPE, LSE_SHAPE = (BATCH, NQ, HEADS, DIM), (BATCH, NK, HEADS_KV, DIM), (3, 14, 200)
DTYPES = {"simt": "float32", "sm80": "float16", "sm90": "float16"}


def _launches(impl, block, direction, more=16):
    dtype, device = np.dtype(DTYPES[impl]), Logged()
    strides = (
        (math.prod(Q_SHAPE[1:]), HEADS * DIM, DIM, 1),
        *[(math.prod(KV_SHAPE[1:]), HEADS_KV * DIM, DIM, 1)] * 2,
    )
    problem = Problem(BATCH, NQ, NK, HEADS, HEADS_KV, DIM, dtype.name, 0.5, strides, "cuda", 0, 16)
    layout = BlockLayout((NQ, NK), block, (BATCH, HEADS_KV), WIDTH, masks.causal(NQ, NK), HEADS)
    executor = prepare(impl, AttentionSpec(problem, layout), device)
    rows = -(-NQ // block[0])
    lists = (
        Array((BATCH, HEADS_KV, rows, WIDTH), np.int32),
        Array((BATCH, HEADS_KV, rows), np.int32),
    )
    strides = padded(Q_SHAPE, dtype, more).strides
    given = {"q": Array(Q_SHAPE, dtype), "out": OwnArray(Q_SHAPE, dtype, strides=strides)}
    given |= {"k": Array(KV_SHAPE, dtype), "v": Array(KV_SHAPE, dtype)}
    given |= {"lse": padded(LSE_SHAPE, np.float32, 5)}
    if direction == "forward":
        executor.forward(*(given[x] for x in ("q", "k", "v", "out", "lse")), lists=lists)
    else:
        given |= {"dout": Array(Q_SHAPE, dtype), "dlse": Array(LSE_SHAPE, np.float32)}
        given |= {"dq": Array(Q_SHAPE, dtype), "lse": Array(LSE_SHAPE, np.float32)}
        given |= {"dk": Array(KV_SHAPE, dtype), "dv": Array(KV_SHAPE, dtype)}
        names = "dout", "q", "k", "v", "out", "lse", "dlse", "dq", "dk", "dv"
        executor.backward(*(given[x] for x in names), True, lists=lists)
    return device.launches, given, lists


@pytest.mark.parametrize("impl", DTYPES)
@pytest.mark.parametrize("block", [(64, 64), (64, 128), (128, 128)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_lists_of_tiles(impl, block, direction):
    """A count, a sum, the lists and an order for each kernel that walks; by columns first the
    lists of columns.
    """
    launches, given, (indices, counts) = _launches(impl, block, direction)
    rows, columns = (-(-n // size) for n, size in zip((NQ, NK), block, strict=True))
    entries, walks = PLANES * rows * WIDTH, 0
    transposed = {}
    for at, found in enumerate(launches):
        kernel = found.kernel.removeprefix("nbflash_")
        if kernel in ("count_columns", "transpose_lists"):
            assert (found["counts"], found["indices"]) == (counts.data.ptr, indices.data.ptr)
            assert (found["width"], found["entries"]) == (WIDTH, entries)
            assert (found["n_rows"], found["n_cols"]) == (rows, columns)
            assert found.blocks == -(-entries // found.config.threads)
            transposed[kernel] = found
        elif "tiles" in kernel and "own" in vars(found.config):
            walks += not found.config.write
            _check_list(
                found, launches[at + 1 :], (rows, columns), (indices, counts), launches[:at]
            )
        elif kernel == "overflow":
            _check_overflow(found, given, counts, block, rows)
        elif "work" in found.values and "kind" in found.values:
            _check_walk(found, launches[:at])
    mains = sum("kind" in x.values and "work" in x.values for x in launches)
    assert mains == walks > 0
    assert len(transposed) == 2 * (direction == "backward")
    assert (launches[-1].kernel == "nbflash_overflow") == (direction == "forward")


@pytest.mark.parametrize("impl", DTYPES)
def test_lists_of_an_out_that_is_copied(impl):
    """Rows that are no chunks of 16 bytes are written elsewhere first, of the same lists."""
    copied, direct = (_launches(impl, (64, 64), "forward", more)[0] for more in (2, 16))
    assert [x.kernel for x in copied] == [x.kernel for x in direct]


def _check_list(found, behind, grid, lists, before):
    cfg = found.config
    n, other = (NK, NQ) if cfg.transposed else (NQ, NK)
    rows, columns = grid[::-1] if cfg.transposed else grid
    main = next(x for x in behind if "kind" in x.values)
    tile = (main.config.tile_m, main.config.tile_n)[:: -1 if cfg.transposed else 1]
    n_row, n_col = -(-n // tile[0]), -(-other // tile[1])
    values = {"width": WIDTH, "n_row": n_row, "n_col": n_col, "all_rows": PLANES * n_row}
    values |= {"n_rows": rows, "n_cols": columns, "query_rows": -(-NQ // main.config.tile_m)}
    assert {name: found[name] for name in values} == values
    assert found.blocks == -(-PLANES * n_row // (cfg.threads // 32))
    bits = -(-columns // cfg.other) * cfg.slot  # a power of two words, no more than they need
    assert (cfg.slot, cfg.words) in ((1, 8), (2, 8), (4, 8), (4, 16), (4, 32))
    assert 32 * cfg.words >= bits
    assert cfg.words == 8 or 16 * cfg.words < bits
    indices, counts = lists
    if not cfg.transposed:
        assert (found["begins"], found["indices"]) == (counts.data.ptr, indices.data.ptr)
    else:
        write = [x for x in before if x.kernel == "nbflash_transpose_lists"][-1]
        sums = [x for x in before if x.kernel == "nbflash_running_sum"]
        assert found["indices"] == write["rows"]
        assert found["begins"] in {x["sums"] for x in sums}
        assert write["cursor"] in {x["cursor"] for x in sums}


def _check_walk(found, before):
    """The order, the sums and the lists that were made last are those of the kernel."""
    order = next(x for x in before[::-1] if x.kernel == "nbflash_work_order")
    written = next(x for x in before[::-1] if "tiles" in x.kernel and x.config.write)
    sums = next(x for x in before[::-1] if x.kernel == "nbflash_running_sum")
    assert found["work"] == order["work"]
    assert found["row_ptr"] == written["row_ptr"] == sums["sums"]
    assert (found["col_idx"], found["kind"]) == (written["col_idx"], written["kinds"])
    assert written["counts"] == order["counts"] == sums["counts"]
    assert order["masked"] == written["masked"]
    group = order["group"]
    assert group == (HEADS // HEADS_KV if written.config.transposed else 1)
    assert order["n_row"] == sums["n"] // PLANES
    assert order["heads"] == HEADS // group
    units, groups, of_unit = order["units"], order["groups"], order["of_unit"]
    assert units * of_unit == BATCH * HEADS // group
    assert order.blocks == groups * order["chunks"]
    longest = -(-units // groups) * of_unit * order["n_row"]
    assert order["chunks"] == -(-longest // order.config.threads)
    assert 1 <= groups <= units


def _check_overflow(found, given, counts, block, rows):
    factor = given["q"].itemsize // 2
    names = {"counts": counts, "out": given["out"], "lse": given["lse"]}
    assert {x: found[x] for x in names} == {x: y.data.ptr for x, y in names.items()}
    values = {"width": WIDTH, "rows": BATCH * HEADS * rows, "n_rows": rows, "size": block[0]}
    values |= {"nq": NQ, "heads": HEADS, "of_batch": BATCH, "of_heads": HEADS_KV}
    assert {name: found[name] for name in values} == values
    assert [*found["o_stride"]] == [factor * s for s in arrays.strides(given["out"])]
    assert [*found["l_stride"]] == [2 * s for s in arrays.strides(given["lse"])]
    assert (found.config.pieces, found.config.lse_pieces) == (DIM * factor, 2)
    assert found.blocks == -(-BATCH * HEADS * rows // 4)
