"""The mask gallery of the tests: every kind of tile, dead rows, planes, and what its names say."""

import numpy as np
import pytest

import masks
from nbflash import reference
from nbflash.testing import (
    assert_blocks_within_reference,
    low_precision,
    low_precision_backward,
    make_qkv,
    mask_gallery,
)

SHAPES = [(1, 1), (1, 40), (40, 1), (33, 33), (130, 200), (200, 130)]

# Attended cells of the plain masks with 50 queries and 80 keys, and with 80 and 50.
CELLS = {
    "dense": (4_000, 4_000),
    "causal": (2_775, 1_275),
    "window": (1_334, 1_264),
    "window-causal": (1_050, 840),
    "prefix": (2_775, 1_921),
    "documents": (901, 891),
    "documents-causal": (1_143, 693),
    "chunked": (367, 351),
    "sinks": (1_100, 869),
    "butterfly": (2_436, 2_436),
    "butterfly-causal": (1_968, 492),
    "local": (1_904, 1_904),
    "butterfly-or-local-causal": (2_472, 492),
    "random": (1_368, 1_092),
    "strided": (697, 697),
    "dilated": (505, 505),
    "fixed": (2_600, 2_544),
    "global-local": (2_940, 2_940),
    "bigbird": (3_264, 3_216),
    "vertical-slash": (131, 216),
    "axial": (845, 845),
    "neighborhood": (450, 450),
    "tree": (1_743, 410),
    "checkerboard": (2_000, 2_000),
    "dead-first": (2_640, 2_650),
    "dead-last": (561, 1_425),
    "dead-scattered": (1_202, 1_205),
    "dead-keys": (1_750, 1_760),
    "empty": (0, 0),
}


class TestGallery:
    @pytest.mark.parametrize(("nq", "nk"), SHAPES)
    def test_every_mask_has_the_shape_and_agrees_with_its_tiles(self, nq, nk):
        gallery = mask_gallery(nq, nk, batch=3, heads=2)
        for name, mask in gallery.items():
            assert mask.shape == (nq, nk), name
            assert mask.batch in (None, 3), name
            assert mask.heads in (None, 2), name
            dense = np.broadcast_to(mask.dense(), (3, 2, nq, nk))
            for b, h in np.ndindex(3, 2):
                plane = mask.planes[
                    np.broadcast_to(mask.plane_index, (3, 2))[b, h] if mask.plane_index.size else 0
                ]
                assert np.array_equal(plane.dense(), dense[b, h]), name
                kinds = plane.tiles(32, 32).kinds.toarray()
                for i, j in np.ndindex(kinds.shape):
                    tile = dense[b, h, 32 * i : 32 * i + 32, 32 * j : 32 * j + 32]
                    assert tile.any() == (kinds[i, j] != masks.ABSENT), name

    @pytest.mark.parametrize("tall", [False, True])
    def test_what_a_name_stands_for_stays_the_same(self, tall):
        """Measurements and choices of cases go by it."""
        shape = (80, 50) if tall else (50, 80)
        gallery = mask_gallery(*shape, batch=3, heads=5)
        plain = {name: mask.count_nonzero() for name, mask in gallery.items() if mask.is_plain}
        assert plain == {name: cells[tall] for name, cells in CELLS.items()}
        cycle = ["causal", "dead-scattered", "butterfly", "empty", "dense"]
        cells = np.array([plain[name] for name in cycle])
        most = shape[1] - -(-shape[1] // 3)
        of_planes = {
            "per-head": [cells],
            "per-batch": cells[:3, None],
            "per-batch-per-head": [np.roll(cells, -1), cells, np.roll(cells, -1)],
            "padding": shape[0] * np.array([[most], [most // 2], [0]]),
        }
        assert gallery.keys() == plain.keys() | of_planes.keys()
        for name, expected in of_planes.items():
            assert np.array_equal(gallery[name].dense().sum((2, 3)), expected), name

    def test_two_batch_entries_of_two_heads_unless_asked_otherwise(self):
        gallery = mask_gallery(7)
        assert gallery["per-batch-per-head"].plane_index.shape == (2, 2)
        assert {mask.shape for mask in gallery.values()} == {(7, 7)}

    def test_every_kind_of_tile_occurs(self):
        kinds = {
            name: set(np.minimum(mask.tiles(32, 32).kinds.data, masks.BITS).tolist())
            for name, mask in mask_gallery(200).items()
            if len(mask.planes) == 1
        }
        assert masks.FULL in kinds["dense"]
        assert masks.INTERVAL in kinds["causal"] & kinds["window"] & kinds["documents"]
        assert masks.BITS in kinds["tree"] & kinds["strided"] & kinds["checkerboard"]
        assert kinds["butterfly-or-local-causal"] == {masks.INTERVAL, masks.FULL, masks.BITS}
        assert kinds["empty"] == set()

    @pytest.mark.parametrize(("nq", "nk"), [(130, 200), (200, 130), (200, 200)])
    def test_dead_rows_first_last_scattered_and_all(self, nq, nk):
        gallery = mask_gallery(nq, nk)
        alive = {
            name: np.broadcast_to(mask.dense(), (2, 2, nq, nk)).any(axis=3)
            for name, mask in gallery.items()
        }
        third = -(-nq // 3)
        assert not alive["dead-first"][..., :third].any()
        assert alive["dead-first"][..., third:].all()
        assert not alive["dead-last"][..., nq - third :].any()
        assert alive["dead-last"][..., : nq - third].all()
        assert not alive["dead-scattered"][..., 1::3].any()
        assert alive["dead-scattered"][..., ::3].all()
        assert not alive["empty"].any()
        live = (np.arange(nk) >= -(-nk // 3)) & (np.arange(nk) % 3 != 1)
        assert (gallery["dead-keys"].dense() == live).all()
        assert not alive["documents"][0, 0, third:].any()  # a document of queries without keys
        assert alive["padding"][0].all()
        assert not alive["padding"][1].any()
        assert alive["causal"].sum() == 4 * min(nq, nk)

    @pytest.mark.parametrize(("nq", "nk"), SHAPES)
    def test_causal_masks_look_at_nothing_ahead(self, nq, nk):
        gallery = mask_gallery(nq, nk)
        causal = masks.causal(nq, nk).dense()
        for name in ("causal", "window-causal", "butterfly-causal", "butterfly-or-local-causal"):
            assert not (gallery[name].dense() & ~causal).any(), name
        # Of two documents each: the last query sees all keys of its own, each before it one less.
        third, third_k = -(-nq // 3), -(-nk // 3)
        seen = gallery["documents-causal"].dense().sum(axis=1)
        sizes = (nq - third, third_k), (third, nk - third_k)
        want = [np.maximum(keys - np.arange(rows)[::-1], 0) for rows, keys in sizes]
        assert np.array_equal(seen, np.concatenate(want))

    def test_planes_differ_where_they_should(self):
        gallery = mask_gallery(60, 50, batch=2, heads=3)
        assert (gallery["per-head"].batch, gallery["per-head"].heads) == (None, 3)
        assert (gallery["per-batch"].batch, gallery["per-batch"].heads) == (2, None)
        both = gallery["per-batch-per-head"]
        assert (both.batch, both.heads) == (2, 3)
        assert len({m.tobytes() for m in both.dense().reshape(6, -1)}) == 4

    @pytest.mark.parametrize(("nq", "nk"), SHAPES)
    def test_reference_and_yardstick_agree_on_every_mask(self, nq, nk):
        """The budget holds the correctly rounded result on all of them, tile by tile."""
        q, k, v, dout = make_qkv(2, nq, nk, 2, 1, 8, np.float32)
        for name, mask in mask_gallery(nq, nk).items():
            out, lse = reference.attention(q, k, v, mask)
            out_low, lse_low = low_precision(q, k, v, mask)
            f32 = np.float32
            assert_blocks_within_reference(out.astype(f32), out, out_low, 32, f"{name} out")
            assert_blocks_within_reference(lse.astype(f32), lse, lse_low, 32, f"{name} lse", axis=2)
            grads = reference.attention_backward(dout, q, k, v, mask)
            lows = low_precision_backward(dout, q, k, v, mask)
            for grad, low in zip(grads, lows, strict=True):
                assert_blocks_within_reference(grad.astype(f32), grad, low, 32, name)
