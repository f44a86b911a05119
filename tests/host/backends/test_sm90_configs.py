"""Configurations of the Hopper kernels that would hang or not fit are refused, with the reason."""

from dataclasses import replace

import pytest

import masks
from nbflash.backends.sm90.backward.choice import for_tiles
from nbflash.backends.sm90.backward.config import backward_configs, columns_configs
from nbflash.backends.sm90.backward.dq_config import completed, dq_configs
from nbflash.backends.sm90.decode.config import decode_config
from nbflash.backends.sm90.forward.choice import choose
from nbflash.backends.sm90.forward.config import Sm90Config, forward_configs
from nbflash.schedule.tile_schedule import TileSchedule

WIDE = Sm90Config("bfloat16", 128, 2, 128, registers=(56, 224))
DQ = dq_configs("bfloat16", 128)[0]
ONE_PASS = backward_configs("bfloat16", 128)[0]
COLUMNS = columns_configs("bfloat16", 192)[0]
DECODE, DECODE_INT8 = (decode_config("float16", 64, None, stored) for stored in ("", "int8"))


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 192, 256])
def test_the_tables_hold_what_fits(head_dim):
    configs = forward_configs("bfloat16", head_dim)
    for table in (columns_configs, dq_configs, backward_configs):
        configs += table("bfloat16", head_dim)
    assert [config.why_not() for config in configs] == [[]] * len(configs)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 192, 256])
def test_so_do_they_with_dropout(head_dim):
    configs = forward_configs("bfloat16", head_dim, dropout=True)
    configs += [replace(c, dropout=True) for c in columns_configs("bfloat16", head_dim)]
    configs += [completed(c, dropout=True) for c in dq_configs("bfloat16", head_dim)]
    assert [config.why_not() for config in configs] == [[]] * len(configs)
    assert all(config.dropout for config in configs)


@pytest.mark.parametrize(
    ("head_dim", "mask", "full"),
    [
        (64, masks.butterfly(1024, block=128), True),
        (64, masks.causal(1024), False),
        (64, masks.dense(1024, 1000), False),
        (128, masks.butterfly(1024, block=128), False),  # whole tiles: nothing gained
    ],
)
def test_halves_without_masked_tiles_have_a_kernel_of_their_own(head_dim, mask, full):
    configs = forward_configs("bfloat16", head_dim)
    config, schedule = choose(
        configs, mask, lambda c: TileSchedule.from_mask(mask, c.tile_m, c.tile_n)
    )
    assert config.full_tiles is full
    assert (config.tile_m, config.tile_n) == (schedule.tile_m, schedule.tile_n)


@pytest.mark.parametrize(
    ("mask", "tile"),
    [
        (masks.dense(8192), (192, 112)),
        (masks.causal(8192), (192, 112)),
        (masks.butterfly(8192, block=128), (128, 128)),
        (masks.window(8192, left=1024, right=0), (128, 128)),
        (masks.window(8192, left=512, right=512), (128, 128)),
        (masks.window(8192, left=256, right=256), (128, 128)),
        (masks.window(8192, left=128, right=128), (64, 64)),
        (masks.random(8192, 64, 0.125), (64, 64)),
    ],
)
def test_the_tiles_that_were_fastest_are_chosen(mask, tile):
    """Of narrow heads, as measured: see the notes."""
    configs = forward_configs("bfloat16", 64)
    config, _ = choose(configs, mask, lambda c: TileSchedule.from_mask(mask, c.tile_m, c.tile_n))
    assert (config.tile_m, config.tile_n) == tile


@pytest.mark.parametrize("config", [ONE_PASS, COLUMNS], ids=["one-pass", "columns"])
@pytest.mark.parametrize(
    ("mask", "full_tiles", "edge"),
    [
        (masks.dense(256), True, False),
        (masks.butterfly(256, block=128), True, False),
        (masks.dense(256, 250), True, True),
        (masks.causal(256), False, False),
        (masks.causal(256, 250), False, False),
        (masks.dense(250, 256), True, False),
    ],
    ids=repr,
)
def test_backward_kernels_without_masked_tiles(config, mask, full_tiles, edge):
    """Past the last key a sum over keys alone, that of dQ, is kept from what is not there."""
    schedule = TileSchedule.from_mask(mask, config.tile_m, config.tile_n)
    for walked in (schedule, schedule.T):
        found = for_tiles(config, walked)
        assert (found.full_tiles, found.edge) == (full_tiles, edge and config.with_dq)
        assert replace(found, full_tiles=False, edge=False) == config


@pytest.mark.parametrize(
    ("config", "changed", "reason"),
    [
        (WIDE, {"k_stages": 1}, "k_stages is at least 2, got 1"),
        (WIDE, {"v_stages": 1}, "v_stages is at least 2, got 1"),
        (WIDE, {"q_stages": 0}, "q_stages is at least 1, got 0"),
        (WIDE, {"consumers": 4, "head_dim": 64, "registers": ()}, "consumers is at most 3, got 4"),
        (WIDE, {"registers": (32, 240)}, "65536 registers, a block is launched with 64512"),
        (WIDE, {"registers": (24, 236)}, "multiples of 8, got (24, 236)"),
        (WIDE, {"tile_n": 72}, "tile_n is a multiple of 16 up to 128, got 72"),
        (WIDE, {"tile_n": 144}, "tile_n is a multiple of 16 up to 128, got 144"),
        (WIDE, {"tile_n": 48, "halves": True}, "tile_n is a multiple of 32 up to 128, got 48"),
        (WIDE, {"tile_n": 48, "dropout": True}, "tile_n is a multiple of 32 up to 128, got 48"),
        (WIDE, {"k_stages": 5}, "bytes of shared memory, there are 233472"),
        (DQ, {"k_stages": 1}, "k_stages is at least 2, got 1"),
        (DQ, {"do_stages": 0}, "do_stages is at least 1, got 0"),
        (DQ, {"head_dim": 60}, "head_dim is a multiple of 8, got 60"),
        (DQ, {"tile_n": 32}, "tile_n is 64 or 128, got 32"),
        (DQ, {"stats_m": 32}, "stats_m is 64 or 128, got 32"),
        (ONE_PASS, {"head_dim": 60}, "head_dim is a multiple of 8, got 60"),
        (ONE_PASS, {"tile_m": 192}, "tile_m is 64 or 128, got 192"),
        (ONE_PASS, {"stages": 1}, "S of the next tile needs two stages, got 1"),
        (ONE_PASS, {"head_dim": 136}, "head_dim is at most 128 with dQ, got 136"),
        (ONE_PASS, {"consumers": 3}, "parts of dQ for 3 warpgroups"),
        (ONE_PASS, {"k_stages": 1}, "the search in K needs two stages, got 1"),
        (COLUMNS, {"tile_m": 128}, "without dQ a tile has 64 queries, got 128"),
        (COLUMNS, {"consumers": 1}, "above 128 columns two warpgroups share keys, got 1"),
        (ONE_PASS, {"dropout": True}, "dropout takes two passes, one without dQ"),
        (DECODE, {"stages": 1}, "stages is at least 2, got 1"),
        (DECODE, {"tile_n": 48}, "tile_n is 32, 64, 96 or 128, got 48"),
        (DECODE, {"tile_n": 160}, "tile_n is 32, 64, 96 or 128, got 160"),
        (DECODE, {"head_dim": 60}, "head_dim is a multiple of 8, got 60"),
        (DECODE, {"box": 12}, "keys come by multiples of 8 that divide"),
        (DECODE_INT8, {"tile_n": 128}, "tile_n is 64 for 8-bit quantised caches, got 128"),
        (DECODE_INT8, {"head_dim": 72}, "head_dim is a multiple of 16, got 72"),
    ],
)
def test_what_would_hang_or_does_not_fit(config, changed, reason):
    assert any(reason in found for found in replace(config, **changed).why_not())
