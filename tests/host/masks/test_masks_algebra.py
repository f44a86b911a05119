"""Properties of the mask algebra over random expressions, and round trips through formats."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_cases import assert_tiles_exact, plain_cases
from scipy import sparse

import masks
from masks.io import CLASSES

EXAMPLES = settings(max_examples=200)
SIDE = st.integers(1, 40)
SEED = st.integers(0, 2**32 - 1)


@st.composite
def leaves(draw, nq, nk):
    """Any leaf of shape (nq, nk), small enough that every tile kind and ragged edge occurs."""
    rng = np.random.default_rng(draw(SEED))
    block = draw(st.integers(1, 12))
    makers = [
        lambda: masks.dense(nq, nk),
        lambda: masks.causal(nq, nk),
        lambda: masks.window(nq, nk, left=int(rng.integers(9)), right=int(rng.integers(5))),
        lambda: masks.prefix(nq, int(rng.integers(nk + 1)), nk=nk),
        lambda: masks.chunked(nq, block, nk=nk),
        lambda: masks.sinks(nq, int(rng.integers(4)), block, nk=nk),
        lambda: masks.documents(_split(rng, nq), _split(rng, nk)),
        lambda: masks.from_dense(rng.random((nq, nk)) < rng.random()),
        lambda: masks.from_function(lambda q, kv: (q * block + kv) % 3 == 0, nq, nk),
        lambda: _random_blocks(rng, nq, nk, block),
    ]
    if nq == nk:
        makers += [
            lambda: masks.butterfly(nq, block, radix=draw(st.integers(2, 4))),
            lambda: masks.local(nq, block),
            lambda: masks.strided(nq, 1, block, 2),
            lambda: masks.vertical_slash(nq, [0], sorted({0, nq - 1})),
            lambda: masks.neighborhood(nq, 1 + nq // 3, dilation=1 + (nq > 8)),
        ]
    return draw(st.sampled_from(makers))()


def _split(rng, total):
    cuts = np.sort(rng.integers(0, total + 1, 2))
    return np.diff([0, *cuts, total])


def _random_blocks(rng, nq, nk, block):
    pattern = rng.random((-(-nq // block), -(-nk // block))) < 0.4
    return masks.from_scipy(sparse.csr_array(pattern), block, shape=(nq, nk))


@st.composite
def pairs(draw, count=2):
    """Masks of one common shape, some of them compound."""
    nq = draw(SIDE)
    nk = draw(st.one_of(st.just(nq), SIDE))
    return [draw(expressions(nq, nk)) for _ in range(count)]


@st.composite
def expressions(draw, nq, nk):
    mask = draw(leaves(nq, nk))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(leaves(nq, nk))
        mask = draw(st.sampled_from([mask | other, mask & other, ~mask, mask & ~other]))
    return mask


one = pairs(1).map(lambda m: m[0])
two, three = pairs(2), pairs(3)


@EXAMPLES
@given(two)
def test_union_is_or(ab):
    a, b = ab
    assert ((a | b).dense() == (a.dense() | b.dense())).all()


@EXAMPLES
@given(two)
def test_intersection_is_and(ab):
    a, b = ab
    assert ((a & b).dense() == (a.dense() & b.dense())).all()


@EXAMPLES
@given(one)
def test_complement_is_not(a):
    assert ((~a).dense() == ~a.dense()).all()
    assert ((~~a).dense() == a.dense()).all()


@EXAMPLES
@given(one)
def test_transpose_is_transpose(a):
    assert a.T.shape == a.shape[::-1]
    assert (a.T.dense() == a.dense().T).all()
    assert (a.T.T.dense() == a.dense()).all()


@EXAMPLES
@given(two)
def test_operands_commute_and_are_idempotent(ab):
    a, b = ab
    assert ((a | b) == (b | a)) is True
    assert (a & b) == (b & a)
    assert hash(a | b) == hash(b | a)
    assert (a | a) == a
    assert (a & a) == a


@EXAMPLES
@given(three)
def test_union_and_intersection_distribute(abc):
    a, b, c = abc
    assert ((a & (b | c)).dense() == ((a & b) | (a & c)).dense()).all()
    assert ((a | (b & c)).dense() == ((a | b) & (a | c)).dense()).all()


@EXAMPLES
@given(two)
def test_de_morgan(ab):
    a, b = ab
    assert ((~(a | b)).dense() == (~a & ~b).dense()).all()
    assert ((~(a & b)).dense() == (~a | ~b).dense()).all()


@EXAMPLES
@given(two)
def test_transpose_distributes(ab):
    a, b = ab
    assert ((a | b).T.dense() == (a.T | b.T).dense()).all()
    assert ((a & b).T.dense() == (a.T & b.T).dense()).all()


@EXAMPLES
@given(one, SIDE, st.integers(1, 70))
def test_tiles_never_drop_or_add_a_cell(a, tile_m, tile_n):
    assert_tiles_exact(a, a.dense(), tile_m, tile_n)


@EXAMPLES
@given(one, SIDE, SIDE)
def test_tiles_of_the_complement(a, tile_m, tile_n):
    assert_tiles_exact(~a, ~a.dense(), tile_m, tile_n)


@EXAMPLES
@given(one, SIDE, SIDE)
def test_tiles_of_the_transpose(a, tile_m, tile_n):
    assert_tiles_exact(a.T, a.dense().T, tile_m, tile_n)


@EXAMPLES
@given(two, SIDE, SIDE)
def test_tiles_of_a_compound(ab, tile_m, tile_n):
    a, b = ab
    assert_tiles_exact(a & ~b, a.dense() & ~b.dense(), tile_m, tile_n)
    assert_tiles_exact(a.T | b.T, (a.dense() | b.dense()).T, tile_m, tile_n)


@EXAMPLES
@given(one)
def test_call_is_dense(a):
    q, kv = np.indices(a.shape)
    assert (a(q, kv) == a.dense()).all()


@EXAMPLES
@given(one)
def test_count_nonzero(a):
    assert a.count_nonzero() == a.dense().sum()


@EXAMPLES
@given(two)
def test_equal_masks_have_equal_cells_and_hashes(ab):
    a, b = ab
    if a == b:
        assert (a.dense() == b.dense()).all()
        assert hash(a) == hash(b)
    if (a.dense() != b.dense()).any():
        assert a != b
    rebuilt = masks.from_dense(a.dense())
    assert rebuilt == masks.from_dense(a.dense())
    assert hash(rebuilt) == hash(masks.from_dense(a.dense()))


FORMATS = ["csr", "csc", "coo", "dia", "lil", "dok", "bsr"]


@EXAMPLES
@given(one, st.sampled_from(FORMATS))
def test_token_round_trip_through_every_scipy_format(a, name):
    matrix = a.to_scipy()
    assert matrix.dtype == bool
    assert (matrix.toarray() == a.dense()).all()
    stored = matrix.tobsr(blocksize=(1, 1)) if name == "bsr" else matrix.asformat(name)
    back = masks.from_scipy(stored)
    assert (back.dense() == a.dense()).all()


@pytest.mark.parametrize("name", ["csr", "csc", "bsr"])
def test_entries_in_any_order(name):
    """As the products of SciPy have them; the matrix stays as it is."""
    rng = np.random.default_rng(0)
    a, b = (sparse.csr_array(rng.random((40, 40)) < 0.1).astype(np.int32) for _ in "ab")
    product = a.T @ b if name == "csc" else a @ b
    matrix = product.tobsr(blocksize=(1, 1)) if name == "bsr" else product.asformat(name)
    matrix.indices[:2] = matrix.indices[:2][::-1]
    matrix.has_sorted_indices = False
    before = matrix.indices.copy()
    assert (masks.from_scipy(matrix).dense() == (matrix.toarray() != 0)).all()
    assert (matrix.indices == before).all()


def test_entries_below_zero_are_attended():
    matrix = sparse.csr_array([[-1.5, 0.0], [0.25, -2.0]])
    assert masks.from_scipy(matrix).dense().tolist() == [[True, False], [True, True]]


@EXAMPLES
@given(SEED, SIDE, SIDE, st.integers(1, 9))
def test_block_round_trip_through_scipy(seed, nq, nk, block):
    mask = _random_blocks(np.random.default_rng(seed), nq, nk, block)
    assert masks.from_scipy(mask.to_scipy(block), block, shape=(nq, nk)) == mask


@EXAMPLES
@given(one, st.integers(1, 9))
def test_touched_blocks_are_those_with_a_cell(a, block):
    nq, nk = a.shape
    padded = np.zeros((-(-nq // block) * block, -(-nk // block) * block), bool)
    padded[:nq, :nk] = a.dense()
    cells = padded.reshape(padded.shape[0] // block, block, -1, block)
    assert (a.to_scipy(block, touched=True).toarray() == cells.any((1, 3))).all()


@EXAMPLES
@given(one)
def test_file_round_trip(a):
    frozen = masks.from_dense(a.dense())
    for mask in (frozen, frozen & masks.causal(*a.shape), frozen.T):
        file = io.BytesIO()
        masks.save(file, mask)
        file.seek(0)
        assert masks.load(file) == mask


@EXAMPLES
@given(st.integers(1, 30).flatmap(lambda n: st.lists(expressions(n, n), min_size=2, max_size=5)))
def test_planes_keep_each_heads_mask(entries):
    mask = masks.per_head(entries)
    assert mask.heads == len(entries)
    assert mask.plane_index.shape == (1, len(entries))
    assert len(set(mask.planes)) == len(mask.planes)
    assert (mask.dense()[0] == np.stack([m.dense() for m in entries])).all()
    q, kv = np.indices(mask.shape)
    for head, m in enumerate(entries):
        assert (mask(q, kv, head=head) == m.dense()).all()
    assert ((~mask).dense() == ~mask.dense()).all()
    assert (mask.T.dense() == mask.dense().swapaxes(2, 3)).all()


@EXAMPLES
@given(three)
def test_planes_broadcast(abc):
    a, b, c = abc
    head, batch = masks.per_head([a, b]), masks.per_batch([c, a, c])
    assert masks.per_batch(x for x in (c, a, c)) == batch  # any iterable
    both = head & batch
    assert (both.batch, both.heads) == (3, 2)
    assert (both.dense() == (head.dense() & batch.dense())).all()
    assert ((head | c).dense() == (head.dense() | c.dense())).all()
    nested = masks.per_batch([masks.per_head([a, b]), c, masks.per_head([c, c])])
    assert (nested.dense()[1] == c.dense()).all()
    assert (nested.dense()[0] == np.stack([a.dense(), b.dense()])).all()


@settings(max_examples=40)
@given(st.integers(1, 40).flatmap(lambda n: expressions(n, n)), st.integers(1, 16))
def test_reorder_permutes_and_never_needs_more_tiles(a, tile):
    permutation, reordered = masks.reorder(a, tile)
    assert sorted(permutation) == list(range(a.shape[0]))
    assert (reordered.dense() == a.dense()[permutation][:, permutation]).all()
    assert reordered.tiles(tile).kinds.nnz <= a.tiles(tile).kinds.nnz


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 6), st.integers(2, 5))
def test_butterfly_rows_in_closed_form(n, block, stages, radix):
    """Row I holds itself and each other value of each low digit that stays below the end."""
    count = -(-n // block)
    mask = masks.butterfly(n, block, stages=stages, radix=radix)
    expected = [
        1
        + sum(
            abs(digit - i // radix**s % radix) > 0
            and i + (digit - i // radix**s % radix) * radix**s < count
            for s in range(stages)
            for digit in range(radix)
        )
        for i in range(count)
    ]
    assert np.diff(mask.to_scipy(block).indptr).tolist() == expected
    assert mask == mask.T


def test_identical_planes_are_stored_once():
    mask = masks.per_head([masks.causal(8), masks.dense(8), masks.causal(8)])
    assert len(mask.planes) == 2
    assert mask.plane_index.tolist() == [[0, 1, 0]]
    same = masks.per_head([masks.causal(8)] * 4)
    assert (same.heads, len(same.planes)) == (4, 1)
    assert masks.per_head([masks.causal(8)]) == masks.causal(8)


def test_from_dense_of_four_dimensions_is_per_batch_and_head():
    array = np.random.default_rng(0).random((2, 3, 5, 7)) < 0.5
    mask = masks.from_dense(array)
    assert (mask.batch, mask.heads, mask.shape) == (2, 3, (5, 7))
    assert (mask.dense() == array).all()
    assert mask.count_nonzero() == array.sum()


def test_intervals_and_blocks_fold_into_one_leaf():
    assert masks.causal(9) & masks.window(9, left=2) == masks.window(9, left=2, right=0)
    assert masks.documents([4, 5]) & masks.causal(9) == masks.documents([4, 5], causal=True)
    assert masks.local(64, 8, 1) | masks.local(64, 8, 2) == masks.local(64, 8, 2)
    assert masks.window(9, left=0, right=2) == masks.window(9, left=2, right=0).T
    assert ~masks.causal(9) | masks.causal(9) == masks.dense(9)


@pytest.mark.parametrize("name", [n for n in plain_cases() if n != "function"])
def test_every_case_survives_a_file(name, tmp_path):
    mask, _ = plain_cases()[name]
    mask.save(tmp_path / "mask.npz")
    loaded = masks.load(tmp_path / "mask.npz")
    assert loaded == mask
    assert (loaded.dense() == mask.dense()).all()


@pytest.mark.parametrize("name", ["noext", "mask.npz", "mask.mask"])
def test_a_file_is_written_exactly_where_it_was_asked_for(name, tmp_path):
    for path in (tmp_path / name, str(tmp_path / name)):
        masks.save(path, masks.causal(5))
        assert [p.name for p in tmp_path.iterdir()] == [name]
        assert masks.load(path) == masks.causal(5)


def test_files_hold_every_mask_without_a_function(tmp_path):
    """A restricted one among them, of a leaf whose restriction has no closed form."""
    mask = masks.restrict(masks.from_dense(np.eye(9, dtype=bool)), [0, 2, 5], [2, 5, 6])
    mask.save(tmp_path / "mask.npz")
    assert masks.load(tmp_path / "mask.npz") == mask
    kinds, left = set(), [masks.Mask]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.__module__.startswith("masks.") and kind.__name__[0] != "_":
            kinds.add(kind.__name__)
    assert kinds - {"Mask", "Predicate"} == set(CLASSES)


def test_planes_survive_a_file(tmp_path):
    mask = masks.padding([3, 8, 0], 8) & masks.per_head([masks.causal(8), masks.butterfly(8, 2)])
    mask.save(tmp_path / "mask.npz")
    assert masks.load(tmp_path / "mask.npz") == mask


@pytest.mark.parametrize("name", ["butterfly", "planes"])
def test_differences_and_arrays(name):
    a = masks.butterfly(32, 8) if name == "butterfly" else masks.padding([5, 32], 32)
    b = masks.causal(32)
    for got, want in (
        (a ^ b, a.dense() ^ b.dense()),
        (a - b, a.dense() & ~b.dense()),
        (b - a, b.dense() & ~a.dense()),
    ):
        np.testing.assert_array_equal(np.asarray(got), want)
        assert got.nnz == want.sum()
    assert np.asarray(b, np.float32).dtype == np.float32
    assert np.array(b).dtype == bool
    with pytest.raises(ValueError, match="the array of a mask is always a new one"):
        np.asarray(b, copy=False)
    for combine in (lambda: b - b.dense(), lambda: b.dense() ^ b):
        with pytest.raises(TypeError, match=r"wrap the array in masks\.from_dense"):
            combine()
