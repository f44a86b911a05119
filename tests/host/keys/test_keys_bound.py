"""What holds bound kernels, results or places: it answers as if it were asked nothing else.

Every call is made alone and behind every other one, which must change nothing.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from keyed import assert_answers_differ, check_transparent
from logged_device import Array, Logged

import masks
import nbflash
from nbflash import decoding, scores
from nbflash.backends.block_plan.host import BlockSchedule
from nbflash.backends.cpu import decode_host
from nbflash.backends.simt import executor as simt_executor
from nbflash.backends.simt.executor import SimtExecutor, SimtLaunches
from nbflash.backends.simt.score_gradient_host import SimtScoreBackward
from nbflash.backends.sm80.executor import Sm80Executor
from nbflash.backends.sm90.executor import Sm90Executor
from nbflash.distributed import parcels
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.block_layout import BlockLayout
from nbflash.inputs.problem import Problem
from nbflash.planning import cache, decode_plan
from nbflash.schedule.block_tiles import BlockTiles


def _spec(dtype, score=None, alignment=16):
    shapes = (3, 200, 14, 64), (3, 330, 7, 64), (3, 330, 7, 64)
    strides = tuple((b * h * d, h * d, d, 1) for _, b, h, d in shapes)
    sizes = 3, 200, 330, 14, 7, 64, dtype, 0.375
    problem = Problem(*sizes, strides, "cuda", 0, alignment)
    return AttentionSpec(problem, masks.causal(200, 330), score)


def _new(make, dtype):
    def new():
        device = Logged()
        executor = make(_spec(dtype), device=device)
        if make is Sm90Executor:
            executor.two_passes = False  # as of masks of another kind
        return executor, device

    return new


def _backward(deterministic):
    def call(state):
        executor, device = state
        before = len(device.launches)
        problem = getattr(executor, "_problem", None) or executor._launches.problem
        dtype = np.dtype(problem.dtype)
        q, kv, lse = (3, 200, 14, 64), (3, 330, 7, 64), (3, 14, 200)
        shapes = q, q, kv, kv, q, lse, lse, q, kv, kv
        given = [Array(s, np.float32 if s == lse else dtype) for s in shapes]
        executor.backward(*given, deterministic)
        return [(x.kernel, x.config, x.blocks) for x in device.launches[before:]]

    return call


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(SimtExecutor, "float32"), (Sm80Executor, "float16"), (Sm90Executor, "float16")],
)
def test_backward_kernels(make, dtype, cupy):
    calls = {"as it is": _backward(False), "deterministic": _backward(True)}
    assert_answers_differ(check_transparent(_new(make, dtype), calls))


def _with_dout(alignment):
    def call(state):
        executor, _ = state
        return [cfg for cfg, _ in executor._passes(False, alignment)]

    return call


@pytest.mark.parametrize(("of_q", "of_dout"), [(16, 16), (16, 4), (4, 16)])
def test_vectors_are_read_where_all_arrays_are_aligned(of_q, of_dout, cupy):
    launches = SimtLaunches(_spec("float32", alignment=of_q), device=Logged())
    dout = Array((3, 200, 14, 64), address=2**40 + of_dout)
    assert launches.vectors_with(dout) == (of_q == of_dout == 16)


@pytest.mark.parametrize("columns", [1, 256, 257, 512, 513])
def test_every_block_of_a_row_has_a_bit(columns, cupy):
    """Of lists by rows and by columns, which have a row of blocks and as many columns."""
    layout = BlockLayout((64, 64 * columns), (64, 64), (1, 1), 1, masks.dense(64, 64 * columns), 1)
    other = BlockLayout((64 * columns, 64), (64, 64), (1, 1), 1, masks.dense(64 * columns, 64), 1)
    device = Logged()
    for schedule in (
        BlockSchedule(device, layout, BlockTiles(layout, 64, 64)),
        BlockSchedule(device, other, BlockTiles(other, 64, 64)).T,
    ):
        schedule.tables(1, 1)
    configs = [x.config for x in device.specs if x.name.endswith("_tiles")]
    assert len(configs) == 4
    assert all(32 * config.words // config.own >= columns for config in configs)


def test_kernels_by_the_alignment_of_dout(cupy, monkeypatch):
    """Of the portable backward, and of its gradients of scores."""
    calls = {"vectors": _with_dout(True), "single": _with_dout(False)}
    assert_answers_differ(check_transparent(_new(SimtExecutor, "float32"), calls))
    bias = scores.bias(np.ones((14, 200, 330), np.float32))

    def new():
        device = Logged()
        monkeypatch.setattr(simt_executor, "cuda_device", lambda *_: device)
        return SimtScoreBackward(_spec("float32", bias)), device

    def kernel(vectors):
        def call(state):
            before = set(state[1].specs)
            found = state[0]._kernel(vectors)
            assert state[0]._kernel(vectors) is found
            return [x.config.vectors for x in state[1].specs if x not in before]

        return call

    assert_answers_differ(
        check_transparent(new, {"vectors": kernel(True), "single": kernel(False)})
    )


def test_places_of_tokens_on_every_device_and_in_every_batch(monkeypatch):
    places = {1: np.array([0, 2]), 2: np.array([1, 3])}
    batches = {n: lambda made, n=n: [x._host.tolist() for x in made._tables(n)] for n in (1, 2, 3)}
    assert_answers_differ(check_transparent(lambda: parcels.Parcels(places, 4), batches))
    monkeypatch.setattr(parcels, "library", lambda x: (None, x.current))
    current = []
    monkeypatch.setattr(parcels, "resident", lambda tables: [(current[-1], *tables[0])])

    def on(device):
        context = _Current(current, device)
        x = SimpleNamespace(data=SimpleNamespace(device_id=device), current=context)
        return lambda made: made.of(x)

    answers = check_transparent(lambda: parcels.Index(places[1]), {n: on(n) for n in (0, 1)})
    assert answers == {0: (0, 0, 2), 1: (1, 0, 2)}


class _Current:
    def __init__(self, stack, device):
        self._stack, self._device = stack, device

    def __enter__(self):
        self._stack.append(self._device)

    def __exit__(self, *_):
        self._stack.pop()


def test_counts_of_streams(cupy):
    def find(stream, capturing=False):
        return lambda counts: counts.find(stream, capturing)

    counts = decode_plan._Counts(Logged(), 4)
    one, two = counts.find(3, False), counts.find(4, False)
    assert one != two
    assert (counts.find(3, False), counts.find(4, False)) == (one, two)
    assert counts.find(3, True) not in (one, two)


def _decoded(**changed):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 2, 4, 8), *((2, 12, 2, 8),) * 2))
    given = {"dtype": np.float32, "mask": None, "window": None, "score": None, "scale": None}
    given |= {"batch": 2, "heads": 4, "lengths": [12, 9]} | changed
    batch = given.pop("batch")
    dtype, heads, lengths = (given.pop(name) for name in ("dtype", "heads", "lengths"))
    arrays = q[:batch, :, :heads], k[:batch], v[:batch]

    def call(_):
        own = [np.ascontiguousarray(x, dtype) for x in arrays]
        return decoding.decode(*own, np.array(lengths[:batch], np.int32), **given).tobytes()

    return call


def test_decode_on_the_host():
    """What is remembered: problems, cells of masks and windows, compiled scores."""
    mask, other = (masks.from_dense(np.random.default_rng(n).random((2, 12)) < 0.6) for n in (1, 2))
    heads = masks.per_head([mask, other, other, mask])
    changes = {"dtype": [np.float64], "batch": [1], "heads": [2], "lengths": [[9, 12]]}
    changes |= {"mask": [mask, other, heads], "window": [(2, 0), (3, 0)], "scale": [0.25]}
    changes["score"] = [scores.softcap(0.5), scores.softcap(0.25), scores.alibi(0.5)]
    calls = {"as it is": _decoded()}
    calls |= {f"{n} {i}": _decoded(**{n: x}) for n in changes for i, x in enumerate(changes[n])}
    for one, other in itertools.combinations(changes, 2):  # what each is remembered with
        both = {one: changes[one][0], other: changes[other][0]}
        calls[f"{one} and {other}"] = _decoded(**both)

    def new():
        nbflash.clear_cache()
        return cache

    assert_answers_differ(check_transparent(new, calls))


def test_cells_are_of_the_mask_the_window_the_batch_and_the_heads(monkeypatch):
    made, used = {}, []
    real = decode_host.cells_of, decode_host.decode

    def cells_of(*given):
        cells = real[0](*given)
        made[id(cells)] = given, cells
        return cells

    def decode(q, keys, heads_kv, out, lse, cells, *more):
        used.append((made[id(cells)][0], q.shape[0], q.shape[2]))
        return real[1](q, keys, heads_kv, out, lse, cells, *more)

    monkeypatch.setattr(decode_host, "cells_of", cells_of)
    monkeypatch.setattr(decode_host, "decode", decode)
    nbflash.clear_cache()
    mask = masks.causal(2, 12)
    for batch, heads, own, window in itertools.product(
        (1, 2), (2, 4), (None, mask), (None, (3, 0))
    ):
        _decoded(batch=batch, heads=heads, mask=own, window=window)(None)
        (given_mask, (left, _), *sizes), *asked = used.pop()
        assert sizes == asked == [batch, heads]
        assert (given_mask, left) == (own, 12 if window is None else 3)
