"""The Hopper decode kernel compiled: every row of its table, without spills or stack."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from compiled import compile_ptx, report_of
from decode_bound import Array, Device, recorded, words_of

import masks
from nbflash.backends.sm90.decode import host as sm90_decode
from nbflash.backends.sm90.decode.config import decode_config
from nbflash.backends.sm90.decode.kernel import decode_sm90_spec
from nbflash.backends.split_kv.combine_in_block import joined_by_the_last
from nbflash.cuda import launch
from nbflash.inputs.decode_problem import Cache, check_decode
from nbflash.planning import decode_plan


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("stored", ["", "int8", "float8_e4m3fn"])
def test_kernel(stored, head_dim, masked):
    config = decode_config("bfloat16", head_dim, 16, stored, masked=masked)
    assert config.why_not() == []
    ptx = compile_ptx(decode_sm90_spec(config), (9, 0))
    report = report_of(ptx, "sm_90a")
    assert " 0 bytes stack frame, 0 bytes spill stores" in report
    assert re.findall(r"C75\d\d", report) == []
    assert ".f64" not in ptx


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_the_executor_gives_what_the_signature_asks_for(paged, masked, monkeypatch):
    """As many words, those that change first; addresses where pointers are."""
    q, k = np.zeros((2, 3, 4, 32), np.float16), np.zeros((2, 64, 2, 32), np.int8)
    scale, lengths = np.ones((2, 64, 2), np.float32), np.full(2, 40, np.int32)
    table = np.zeros((2, 2), np.int32) if paged else None
    arrays = Cache(k, k.copy(), lengths, table, scale, scale.copy())
    mask = masks.dense(3, 64) if masked else None
    problem = check_decode(q, arrays)
    found = recorded(monkeypatch)
    monkeypatch.setattr(sm90_decode, "_layout", lambda *_: [0] * (launch.MAP_WORDS - 1))
    cache = Cache(*(None if x is None else Array(x) for x in arrays))
    partial = sm90_decode.Sm90Partial(Device(), problem, mask, Array(q), cache)
    partial(Array(q), cache, 64, 128)
    partial(Array(q), cache, 64, 128, 192, 256, 320)
    (spec, trailing), (apart, _), (words, maps) = found
    kinds = words_of(spec)
    assert len(maps) == spec.maps
    assert len(maps) + len(words) + len(trailing) == len(kinds)
    assert [address for address, _ in maps] == [cache.k_cache.data.ptr, cache.v_cache.data.ptr]
    given = [Array(q).data.ptr, 64, 128]
    assert words[:8] == [*given, 192, 256, 320, True, cache.lengths.data.ptr]
    assert apart == [*given, 0, 0, 0, False, *words[7:]]
    page_size, capacity, batch, nq, heads, pack, group = trailing[10:17]
    most_keys = 128 if paged and not masked else 64  # the mask has so many columns
    assert (page_size, capacity) == (64 * paged, most_keys)
    assert (batch, nq, heads, pack, group) == (2, 3, 4, 2, 2)
    assert partial.counted == 4  # batch × key heads


def test_another_geometry_and_number_of_shares(monkeypatch):
    q, k = np.zeros((2, 1, 4, 128), np.float16), np.zeros((2, 4096, 2, 128), np.float16)
    arrays = Cache(*map(Array, (k, k, np.zeros(2, np.int32))))
    problem = check_decode(q, Cache(k, k, np.zeros(2, np.int32)))
    bound = []
    monkeypatch.setattr(launch, "bind", lambda *given: bound.append(given) or SimpleNamespace())
    monkeypatch.setattr(sm90_decode, "_layout", lambda *_: [])
    config = replace(sm90_decode.config_for(problem, None), stages=5)
    given = Device(), problem, None, Array(q), arrays
    partial = sm90_decode.Sm90Partial(*given, config=config, splits=7)
    (spec, blocks, *_) = bound.pop()
    assert (spec.config, blocks, partial.splits) == (config, 2 * 2 * 7, 7)
    chosen = sm90_decode.Sm90Partial(*given)
    assert bound.pop()[0].config.stages == 6
    assert chosen.splits == 32  # of 64 tiles, on 132 multiprocessors for four items


@pytest.mark.parametrize(
    ("stored", "head_dim", "rows", "most"),
    [("", 128, 64, 0), ("", 256, 4, 32), ("int8", 128, 4, 48), ("", 128, 4, 64), ("", 64, 5, 32)],
)
def test_how_many_parts_the_last_block_joins(stored, head_dim, rows, most):
    """Two rounds of copies a warp, of 32 parts or 24 of 128 columns of a row each."""
    config = decode_config("bfloat16", head_dim, None, stored)
    assert joined_by_the_last(config, rows, most + 1) is False
    assert joined_by_the_last(config, rows, most) is True or not most


def test_counts_of_streams_and_of_graphs():
    """As many sets as there are, each for a stream or for one captured call."""
    counts = decode_plan._Counts(Device(), 5)
    of_streams = [counts.find(stream, False) for stream in (0, 7, 9)]
    of_graphs = [counts.find(7, True) for _ in range(decode_plan._SETS)]
    found = sorted(of_streams + [x for x in of_graphs if x])
    assert len(found) == decode_plan._SETS
    assert set(np.diff(found)) == {20}
    assert [counts.find(stream, False) for stream in (0, 7, 9)] == of_streams
    assert counts.find(11, False) is counts.find(decode_plan._PER_THREAD, False) is None


def test_no_counts_for_the_streams_of_threads():
    assert decode_plan._Counts(Device(), 1).find(decode_plan._PER_THREAD, False) is None
