"""Masks of any description against dense arrays that are computed from the definitions alone."""

import numpy as np
from fuzzing import drawn_masks, plain_masks
from fuzzing.drawn_masks import SIDES, Drawn
from fuzzing.examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from mask_cases import assert_tiles_exact

import masks

TILES = st.one_of(st.integers(1, 9), st.integers(1, 70), st.sampled_from([16, 32, 64, 128]))


@st.composite
def plain(draw):
    nq = draw(SIDES)
    return draw(drawn_masks.plain(nq, draw(st.just(nq) | SIDES)))


@st.composite
def of_heads(draw):
    nq, batch, heads = draw(SIDES), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return draw(drawn_masks.of_heads(nq, draw(st.just(nq) | SIDES), batch, heads))


def test_every_generator_has_a_definition():
    tools = {"Mask", "MaskStats", "Tiles", "coverage", "load", "save", "reorder"}
    generators = {x for x in masks.__all__ if not x.isupper()} - tools
    assert generators <= vars(plain_masks).keys()


@examples(40)
@given(of_heads(), st.data())
def test_cells(drawn: Drawn, data):
    mask, cells = drawn.mask, drawn.cells
    assert mask.shape == drawn.shape
    assert mask.is_plain == (cells.ndim == 2)
    np.testing.assert_array_equal(mask.dense(), cells)
    np.testing.assert_array_equal(mask.T.dense(), cells.swapaxes(-1, -2))
    np.testing.assert_array_equal(~mask, ~cells)
    assert mask.nnz == mask.count_nonzero() == cells.sum()
    rng = np.random.default_rng(data.draw(drawn_masks.SEEDS))
    q, kv = (rng.integers(0, n, (5, 3)) for n in mask.shape)
    batch, head = (rng.integers(n or 3) for n in (mask.batch, mask.heads))
    whole = np.broadcast_to(cells, (mask.batch or 3, mask.heads or 3, *mask.shape))
    own = whole[batch, head]
    np.testing.assert_array_equal(mask(q, kv, batch=batch, head=head), own[q, kv])


@examples(50)
@given(plain(), TILES, TILES)
def test_tiles(drawn, tile_m, tile_n):
    """By rows, and those of the transposed mask, by which the backward goes through columns."""
    assert_tiles_exact(drawn.mask, drawn.cells, tile_m, tile_n)
    assert_tiles_exact(drawn.make().T, drawn.cells.T, tile_n, tile_m)


@examples(30)
@given(plain(), TILES)
def test_scipy_and_statistics(drawn, block):
    mask, cells = drawn.mask, drawn.cells
    np.testing.assert_array_equal(mask.to_scipy().toarray(), cells)
    rows, cols = (-(-n // block) for n in mask.shape)
    padded = np.zeros((rows * block, cols * block), bool)
    padded[: mask.shape[0], : mask.shape[1]] = cells
    touched = padded.reshape(rows, block, cols, block).any((1, 3))
    np.testing.assert_array_equal(mask.to_scipy(block, touched=True).toarray(), touched)
    stats = mask.stats(block)
    assert stats.tokens == cells.sum()
    assert stats.token_density == stats.tokens / cells.size
    assert stats.tiles == touched.sum()
    assert stats.empty_rows == (~cells.any(axis=1)).sum()
    assert (stats.row_min, stats.row_max) == (touched.sum(1).min(), touched.sum(1).max())
    if rows and cells.shape[0] == cells.shape[1]:
        _check_reach(stats, cells)


def _check_reach(stats, cells):
    """Steps from token to token; a layer keeps what it had."""
    step = cells | np.eye(len(cells), dtype=bool)
    wanted = np.tri(len(cells), dtype=bool) if not np.triu(cells, 1).any() else True
    reached, layers = np.eye(len(cells), dtype=bool), 0
    while not (reached | ~np.broadcast_to(wanted, reached.shape)).all():
        further = reached @ step
        if (further == reached).all():
            layers = None
            break
        reached, layers = further, layers + 1
    assert stats.layers == layers
    both = step | step.T
    for _ in range(len(cells).bit_length()):
        both = both @ both
    assert stats.components == len({row.tobytes() for row in both})


@examples(30)
@given(drawn_masks.SIDES.flatmap(lambda n: drawn_masks.plain(n, n)), TILES)
def test_reorder(drawn, tile):
    permutation, mask = masks.reorder(drawn.mask, tile)
    np.testing.assert_array_equal(np.sort(permutation), np.arange(len(drawn.cells)))
    np.testing.assert_array_equal(mask.dense(), drawn.cells[permutation][:, permutation])
    assert mask.tiles(tile).kinds.nnz <= drawn.mask.tiles(tile).kinds.nnz


@examples(30)
@given(plain(), st.data())
def test_coverage(drawn, data):
    within = data.draw(st.none() | drawn_masks.plain(*drawn.shape))
    rng, (nq, nk) = np.random.default_rng(data.draw(drawn_masks.SEEDS)), drawn.shape
    q, k = rng.standard_normal((2, nq, 4, 3)), rng.standard_normal((2, nk, 2, 3))
    scale = data.draw(st.none() | st.floats(-2, 2))
    found = masks.coverage(q, k, drawn.mask, scale=scale, within=within and within.mask)
    possible = np.ones(drawn.shape, bool) if within is None else within.cells
    s = np.einsum("bihd,bjhd->bhij", q, k.repeat(2, 2)) * (3**-0.5 if scale is None else scale)
    weights = np.exp(s) * possible
    rows = possible.any(axis=1)
    share = (weights * drawn.cells).sum(-1)[..., rows] / weights.sum(-1)[..., rows]
    with np.errstate(invalid="ignore"):
        want = share.sum(axis=-1) / np.float64(rows.sum())
    np.testing.assert_allclose(found, want)


@st.composite
def alike(draw):
    """Two masks of one shape, most often of one kind."""
    nq = draw(SIDES)
    shape = nq, draw(st.just(nq) | SIDES)
    kind = draw(drawn_masks.kinds(*shape) | st.just(drawn_masks.functions(*shape)))
    return draw(kind), draw(kind | drawn_masks.plain(*shape))


@examples(60)
@given(alike())
def test_identity(pair):
    """Two of one description are equal; of those that are, the cells are the same."""
    one, other = pair
    mask, again = one.make(), one.make()
    assert mask == again
    assert hash(mask) == hash(again)
    assert (mask == other.mask) <= (one.shape == other.shape and (one.cells == other.cells).all())
    if mask == other.mask:
        assert hash(mask) == hash(other.mask)


@examples(40)
@given(of_heads())
def test_files_and_pickles(drawn):
    assume("from_function" not in drawn.text)
    mask = drawn.mask
    for copy in (drawn_masks.saved, drawn_masks.pickled):
        found = copy(mask)
        assert found == mask
        assert hash(found) == hash(mask)
        np.testing.assert_array_equal(found.dense(), drawn.cells)
