"""Configurations of the portable tensor-core kernels: what fits a device, and a mask's tiles."""

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest

import masks
from nbflash.backends.sm80.config import backward_configs, fits, forward_configs
from nbflash.backends.sm80.executor import Sm80Executor, choose
from nbflash.cuda.device import SHARED_MEMORY, Recording
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.block_layout import BlockLayout
from nbflash.planning.kernels import cuda_problem
from nbflash.schedule.tile_choice import fastest

N = 4096


class Counted:
    """A mask of ten queries and keys whose tiles are numbers."""

    planes, shape = (None,), (10, 10)

    def __init__(self, large, small):
        self.numbers = {10: large, 5: small}

    def live_tiles(self, tile_m, tile_n):
        return self.numbers[min(tile_m, tile_n)]


@pytest.mark.parametrize(
    ("choose_of", "large", "small", "area"),
    [
        (partial(choose, "forward"), (2, 2), (2, 2), 800),  # a row of tiles costs 8000 scores
        (partial(choose, "backward"), (2, 2), (2, 2), 800),
        (partial(choose, "forward"), (3, 3), (4, 4), 800),
        (partial(choose, "forward"), (8, 8), (10, 0), 800),  # masked ones 1.4 full ones
        (fastest, (3, 3), (6, 6), 800),
        (partial(fastest, masked=2), (4, 4), (4, 0), 800),
        (partial(fastest, masked=2), (5, 3), (7, 0), 800),
    ],
)
def test_of_two_that_take_as_long_the_first_is_chosen(choose_of, large, small, area):
    """Tiles times their scores over the speed, and the cost of rows, or of columns."""
    by_columns = getattr(choose_of, "args", ()) == ("backward",)
    sizes = [(10, area), (5, area)]
    pair = [SimpleNamespace(tile_m=m, tile_n=n, speed=1.0) for m, n in sizes]
    if by_columns:
        pair = [SimpleNamespace(tile_m=n, tile_n=m, speed=1.0) for m, n in sizes]
    mask = Counted(large, small)
    assert choose_of(pair, mask) is pair[0]
    assert choose_of(pair[::-1], mask) is pair[1]
    for faster in pair:
        faster.speed = 1 + 2**-16
        assert choose_of(pair, mask) is choose_of(pair[::-1], mask) is faster
        faster.speed = 1.0


DEVICES = [capability for capability in SHARED_MEMORY if capability >= (8, 0)]
WINDOW = masks.window(512, left=255, right=0)
SMALL = masks.random(N, 64, density=0.1, seed=0)


@pytest.mark.parametrize("capability", DEVICES)
def test_tables_fit_every_head_dim(capability):
    """So that `why_not` need not ask for shared memory."""
    limit = SHARED_MEMORY[capability]
    for head_dim in range(8, 257, 8):
        first, *small = forward_configs("float16", head_dim, smem_limit=limit)
        assert first.tile_m == 128 or head_dim > 128
        assert [(c.tile_m, c.tile_n) for c in small] == [(64, 64)] * (head_dim <= 128)
        assert fits(first, limit)
        for deterministic, dropout in product((False, True), repeat=2):
            how = {"deterministic": deterministic, "vector_red": False, "dropout": dropout}
            found = backward_configs("float16", head_dim, smem_limit=limit, **how)
            assert len(found) == 1 + (head_dim <= 128), head_dim
            for passes in found:
                assert [replace(config, dropout=dropout) for config in passes], head_dim
                assert all(fits(config, limit) for config in passes)


@pytest.mark.parametrize(
    ("head_dim", "mask", "forward", "backward"),
    [
        (128, masks.dense(N), (128, 64), (64, 128)),
        (128, masks.causal(N), (128, 64), (64, 128)),
        (128, masks.butterfly(N, 128), (128, 64), (64, 128)),
        (128, masks.causal(512), (128, 64), (64, 128)),
        (64, masks.causal(512), (128, 64), (32, 128)),
        (128, masks.causal(1024), (128, 64), (64, 128)),
        (128, WINDOW, (64, 64), (64, 64)),
        (64, WINDOW, (64, 64), (32, 64)),
        (128, SMALL, (64, 64), (64, 64)),
        (64, SMALL, (64, 64), (32, 64)),
        (192, SMALL, (64, 64), (64, 128)),
        (128, BlockLayout((N, N), (64, 64), (1, 1), 8, masks.dense(N), 1), (64, 64), (64, 64)),
        (128, BlockLayout((N, N), (128, 128), (1, 1), 8, masks.dense(N), 1), (128, 64), (64, 128)),
    ],
)
def test_tiles_of_a_mask(head_dim, mask, forward, backward):
    spec = AttentionSpec(cuda_problem("bfloat16", head_dim, *mask.shape), mask)
    executor = Sm80Executor(spec, device=Recording((9, 0)))
    *_, by_columns = executor._table_backward(False)
    assert (executor._config.tile_m, executor._config.tile_n) == forward
    assert (by_columns.tile_m, by_columns.tile_n) == backward
