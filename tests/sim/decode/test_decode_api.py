"""`decode` with the CUDA kernels in the simulator: what chooses, binds and launches them."""

import numpy as np
import pytest
from decode_cases import check, contiguous, paged

import masks
import nbflash
from nbflash.cuda.device import Simulated
from nbflash.definitions.quantised import dequantise, quantise
from nbflash.planning.decode_plan import _PER_THREAD
from nbflash.testing import poisoned

LENGTHS = np.array([37, 100], np.int32)


@pytest.mark.parametrize("impl", ["simt", "sm90"])
def test_a_paged_cache_of_two_lengths(impl):
    q, k, v = (
        x.astype(np.float16) for x in contiguous(2, (4, 2), 64, lengths=LENGTHS, capacity=104)
    )
    k_pages, v_pages, table = paged(k, v, lengths=LENGTHS, page_size=8)
    got = nbflash.decode(
        q, k_pages, v_pages, LENGTHS, block_table=table, impl=impl, return_lse=True
    )
    check(got, q, k, v, LENGTHS)
    wide = np.full((2, table.shape[1] + 3), -1, np.int32)
    wide[:, : table.shape[1]] = table
    for given in (table, wide[:, : table.shape[1]]):  # rows of their own, or parts of longer ones
        again = nbflash.decode(q, k_pages, v_pages, LENGTHS, block_table=given, impl=impl)
        np.testing.assert_array_equal(again, got[0])


@pytest.mark.parametrize("impl", ["simt", "sm80", "sm90"])
def test_masks_of_sequences_that_heads_share(impl):
    """A plane for each sequence, of all its heads, two of which are packed."""
    q, k, v = (
        x.astype(np.float16) for x in contiguous(2, (4, 2), 16, lengths=LENGTHS, capacity=112)
    )
    keep = np.random.default_rng(0).random((2, 1, 2, 112)) < 0.5
    got = nbflash.decode(q, k, v, LENGTHS, mask=masks.from_dense(keep), impl=impl, return_lse=True)
    check(got, q, k, v, LENGTHS, lambda b: keep[b, :, :, : LENGTHS[b]])


@pytest.mark.design
@pytest.mark.parametrize("impl", ["simt", "sm80", "sm90"])
def test_scales_of_v_are_laid_out_by_themselves(impl):
    """Of both by token, those of V with gaps; of V by token, of K by head."""
    lengths = np.array([13, 3], np.int32)
    q, k, v = (
        x.astype(np.float16) for x in contiguous(1, (2, 2), 16, lengths=lengths, capacity=16)
    )
    (k, k_scale), (v, v_scale) = (quantise(x, np.int8) for x in (k, v))
    gaps = poisoned((2, 16, 5), np.float32)[..., :2]
    gaps[...] = v_scale
    for scales in ((k_scale, gaps), (np.float32([0.01, 0.02]), v_scale)):
        named = dict(zip(("k_scale", "v_scale"), scales, strict=True))
        got = nbflash.decode(q, k, v, lengths, impl=impl, return_lse=True, **named)
        real = [dequantise(*x, np.dtype(np.float32)) for x in zip((k, v), scales, strict=True)]
        check(got, q, *real, lengths)


@pytest.mark.design
@pytest.mark.parametrize("impl", ["sm80", "sm90"])
def test_each_key_of_a_tile_counts_for_the_unit_of_its_scales(impl):
    """One of V's is large. In the unit of the others its product overflows float16."""
    keys = np.array([0, 1, 2, 4, 8, 9, 16, 32])  # other lanes, others of a lane's keys
    lengths = np.full(len(keys), 64, np.int32)
    q, k, v = (
        x.astype(np.float16) for x in contiguous(1, (1, 1), 16, lengths=lengths, capacity=64)
    )
    (k, k_scale), (v, v_scale) = (quantise(x, np.int8) for x in (k, v))
    small = np.float32(2**-20)
    v_scale = v_scale * np.where(np.arange(64) == keys[:, None], 1, small)[..., None]
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    got = nbflash.decode(q, k, v, lengths, impl=impl, return_lse=True, **scales)
    real = [dequantise(*x, np.dtype(np.float32)) for x in ((k, k_scale), (v, v_scale))]
    check(got, q, *real, lengths)


@pytest.mark.design
@pytest.mark.parametrize("impl", ["simt", "sm80", "sm90"])
def test_a_scale_of_zero(impl):
    """All keys alike."""
    q, k, v = (
        x.astype(np.float16) for x in contiguous(2, (2, 2), 16, lengths=LENGTHS, capacity=100)
    )
    got = nbflash.decode(q, k, v, LENGTHS, scale=0.0, impl=impl, return_lse=True)
    check(got, q, k, v, LENGTHS, scale=0.0)


def test_a_window_is_refused_behind_a_call_without_one():
    q, k, v = (
        x.astype(np.float16) for x in contiguous(2, (4, 2), 64, lengths=LENGTHS, capacity=104)
    )
    nbflash.decode(q, k, v, LENGTHS, impl="sm90")
    with pytest.raises(ValueError, match="decode with window= does not run on sm90"):
        nbflash.decode(q, k, v, LENGTHS, window=(3, 0), impl="sm90")


@pytest.mark.parametrize("impl", ["simt", "sm90"])
def test_a_cache_without_room(impl):
    """Nothing is launched."""
    none = np.zeros(2, np.int32)
    q, k, v = (x.astype(np.float16) for x in contiguous(2, (4, 2), 64, lengths=none, capacity=0))
    out, lse = nbflash.decode(q, k, v, none, impl=impl, return_lse=True)
    assert np.isneginf(lse).all()
    for x in (out, nbflash.decode(q, k, v, none, impl=impl)):
        assert x.shape == q.shape
        assert not x.any()


def test_counts_of_a_call_s_own(monkeypatch):
    """On the default stream of every thread's own a call sets all of its counts to 0."""
    cleared, clear = [], Simulated.clear
    monkeypatch.setattr(Simulated, "stream", lambda self: (_PER_THREAD, False))
    monkeypatch.setattr(
        Simulated, "clear", lambda self, *given: cleared.append(given[1]) or clear(*given)
    )
    q, k, v = (
        x.astype(np.float16) for x in contiguous(2, (4, 2), 64, lengths=LENGTHS, capacity=104)
    )
    check(nbflash.decode(q, k, v, LENGTHS, impl="sm90", return_lse=True), q, k, v, LENGTHS)
    assert len(cleared) == 1


def test_who_cannot_is_named():
    q, k, v = contiguous(1, (2, 2), 64, lengths=LENGTHS, capacity=104)
    with pytest.raises(ValueError, match=r"impl='sm90' cannot run .*\n  needs float16 or bfloat16"):
        nbflash.decode(q, k, v, LENGTHS, impl="sm90")
    with pytest.raises(ValueError, match=r"\n  decode does not run on reference"):
        nbflash.decode(q, k, v, LENGTHS, impl="reference")
    with pytest.raises(ValueError, match="impl must be one of auto, sm90"):
        nbflash.decode(q, k, v, LENGTHS, impl="sm70")
