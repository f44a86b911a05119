"""Cost: closed forms are O(live tiles), at a million tokens on a laptop."""

import time
import tracemalloc

import pytest

import masks

N, BLOCK = 1 << 20, 128
M = N // BLOCK

MASKS = {
    "butterfly": lambda: masks.butterfly(N, block=BLOCK),
    "butterfly | local & causal": lambda: (
        masks.butterfly(N, BLOCK) | masks.local(N, BLOCK) & masks.causal(N)
    ),
    "(butterfly | local) & causal": lambda: (
        (masks.butterfly(N, BLOCK) | masks.local(N, BLOCK)) & masks.causal(N)
    ),
    "sinks": lambda: masks.sinks(N, 64, 4096),
    "random 0.1 %": lambda: masks.random(N, BLOCK, 0.001),
    "bigbird": lambda: masks.bigbird(N, BLOCK),
}

# Live tiles at 128 x 128. Offset 1 is in the butterfly for every other block, so a causal local
# band adds M/2 - 1 blocks before the diagonal; sinks: 33 tiles a row and the sink column.
TILES = {
    "butterfly": M * 14,
    "butterfly | local & causal": M * 14 + M // 2 - 1,
    "(butterfly | local) & causal": M + M * 13 // 2 + M // 2 - 1,
    "sinks": sum(min(r + 1, 33) + (r >= 33) for r in range(M)),
    "random 0.1 %": round(0.001 * M * M),
}

MIB = 2**20


@pytest.mark.parametrize("name", MASKS)
def test_a_million_tokens(name):
    """Bounds: an interval costs 8 bytes a token, a block 8 bytes; a dense mask would be 1 TiB."""
    started = time.perf_counter()
    mask = MASKS[name]()
    seconds = time.perf_counter() - started
    tiles = mask.tiles(BLOCK, BLOCK)
    assert seconds < 1
    assert tiles.kinds.nnz == TILES.get(name, tiles.kinds.nnz)
    assert mask.shape == (N, N)

    tracemalloc.start()
    mask = MASKS[name]()
    held, peak = tracemalloc.get_traced_memory()
    mask.tiles(BLOCK, BLOCK)
    held_tiles, peak_tiles = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 17 * MIB
    assert peak < 64 * MIB
    assert held_tiles < 32 * MIB
    assert peak_tiles < 64 * MIB


def test_a_million_token_butterfly_is_small():
    tracemalloc.start()
    mask = masks.butterfly(N, block=BLOCK)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert mask.shape == (N, N)
    assert held < 2 * MIB
    assert peak < 10 * MIB


def test_statistics_of_a_million_tokens_without_a_token_matrix():
    mask = masks.butterfly(N, block=BLOCK)
    assert mask.count_nonzero() == M * 14 * BLOCK**2
    stats = mask.stats(BLOCK)
    assert (stats.row_min, stats.row_max, stats.empty_rows) == (14, 14, 0)
    assert stats.fill == 1.0
    assert not stats.reach_exact


def test_memory_follows_the_live_tiles_not_the_square():
    """Eight times the tokens at a fixed window may not cost more than ten times the memory."""

    def peak(n):
        tracemalloc.start()
        (masks.local(n, BLOCK) & masks.window(n, left=300, right=40)).tiles(BLOCK, BLOCK)
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    assert peak(8 << 17) < 10 * peak(1 << 17)


def test_a_tree_behind_a_long_prefix_costs_what_it_attends():
    """Blocks of one token: nothing of what it allocates is as long as the keys."""
    tracemalloc.start()
    mask = masks.tree([-1, 0, 0], prefix=N)
    tiles = mask.tiles(BLOCK, BLOCK)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tiles.kinds.nnz == M + 1
    assert mask.count_nonzero() == 3 * N + 5
    assert peak < MIB


def test_keys_up_to_the_largest_number():
    """Cells are counted in square tiles, which are much taller than a few queries."""
    n, started = 2**31 - 1, time.thread_time()
    assert masks.window(1, n, left=5).count_nonzero() == 6
    assert masks.window(3, n, left=5, right=1).count_nonzero() == 3 * 7 - 1
    assert masks.causal(2, n).count_nonzero() == 2 * n - 1
    assert masks.chunked(3, 2**30, causal=False, nk=n).count_nonzero() == 3 * (2**30 - 1)
    assert masks.prefix(2, 5, nk=n).count_nonzero() == 2 * n - 1
    assert time.thread_time() - started < 1
