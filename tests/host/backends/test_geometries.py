"""Configurations of kernels, in numbers, and at the border of what fits."""

from dataclasses import replace

import pytest
from geometries import TABLE, text

from nbflash.backends.simt import configs as simt
from nbflash.backends.sm80 import config as sm80
from nbflash.backends.sm80.decode.config import decode_config
from nbflash.backends.sm90.backward.config import backward_configs, columns_configs
from nbflash.backends.sm90.backward.dq_config import dq_configs
from nbflash.backends.sm90.decode.config import decode_config as sm90_decode_config
from nbflash.backends.sm90.forward.config import forward_configs
from nbflash.backends.sm90.shared.config import Panels

FLOATS = "float32", "float64", "float16"
FLAGS = "dropout", "negate", "edge", "full_tiles", "masked", "score", "stored"
RESERVED = 1024  # of every block, and of a multiprocessor beyond the most that a block may have


def test_configurations_are_those_that_were_measured():
    """A change of them is one on purpose: ``python tests/host/geometries.py``."""
    assert text().splitlines() == TABLE.read_text().splitlines()


def _forward(dtype, head_dim, limit):
    return simt.forward_config(dtype, head_dim, vectors=True, smem_limit=limit)


def _backward(dtype, head_dim, limit):
    how = {"vectors": True, "deterministic": False, "vector_red": False}
    (found,) = simt.backward_configs(dtype, head_dim, smem_limit=limit, **how) or (None,)
    return found


@pytest.mark.parametrize("choose", [_forward, _backward])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [1, 64, 65, 192, 256])
def test_a_row_is_chosen_down_to_its_last_byte(choose, dtype, head_dim):
    config, sizes = choose(dtype, head_dim, 2**20), []
    while config is not None:
        sizes.append(config.smem_bytes)
        assert choose(dtype, head_dim, sizes[-1]) == config
        config = choose(dtype, head_dim, sizes[-1] - 1)
    assert sizes == sorted(set(sizes), reverse=True)
    assert 1 <= len(sizes) <= 7


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 136, 256])
def test_blocks_of_a_multiprocessor_fit_to_the_last_byte(head_dim):
    """Each has 1 KB besides, and the multiprocessor 1 KB more than a block may have."""
    how = {"deterministic": True, "vector_red": False, "smem_limit": 163 << 10}
    configs = sm80.forward_configs("float16", head_dim, smem_limit=163 << 10)
    configs += [x for passes in sm80.backward_configs("float16", head_dim, **how) for x in passes]
    configs.append(decode_config("float16", head_dim, smem_limit=163 << 10))
    for config in configs:
        least = config.min_blocks * (config.smem_bytes + RESERVED) - RESERVED
        assert sm80.fits(config, least), config
        assert not sm80.fits(config, least - 1), config


@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
def test_a_table_asks_for_nothing_that_a_spec_has_not(head_dim):
    """Flags that are set where they are asked for: with another one, another kernel."""
    how = {"deterministic": True, "vector_red": False, "smem_limit": 163 << 10}
    given = "float16", head_dim
    configs = [*sm80.forward_configs(*given, smem_limit=163 << 10), *forward_configs(*given)]
    configs += [x for passes in sm80.backward_configs(*given, **how) for x in passes]
    configs += [*columns_configs(*given), *dq_configs(*given), *backward_configs(*given)]
    configs += [decode_config(*given, smem_limit=163 << 10), sm90_decode_config(*given, None)]
    configs += [_forward(*given, 163 << 10), _backward(*given, 163 << 10)]
    for config in configs:
        assert [x for x in FLAGS if getattr(config, x, None)] == [], config


class Block(Panels):
    """As much of a multiprocessor as there is."""

    smem_bytes = (228 << 10) - RESERVED
    min_blocks, consumers, registers = 1, 2, (24, 240)


def test_a_multiprocessor_of_hopper_is_full():
    """228 KB and 65536 registers, of which launches give threads multiples of 8: 168 to 384."""
    assert Block().why_not() == []
    more = Block()
    more.smem_bytes += 1
    assert more.why_not() == ["233473 bytes of shared memory, there are 233472"]
    more = Block()
    more.registers = 24, 248
    assert more.why_not() == ["66560 registers, a block is launched with 64512"]
    for registers in ((20, 240), (24, 236)):
        more.registers = registers
        assert more.why_not() == [f"registers of a thread are multiples of 8, got {registers}"]
    more.registers = ()
    assert more.why_not() == []
    more.k_stages = 1
    assert more.too_few(k_stages=1) == []
    assert more.too_few(k_stages=2) == ["k_stages is at least 2, got 1"]


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (sm80.Sm80Config, {"head_dim": 68}),
        (sm80.Sm80Config, {"tile_n": 24}),
        (sm80.Sm80Config, {"tile_n": 48, "dropout": True}),
        (sm80.Sm80Config, {"stages": 1}),
        (sm80.Sm80BackwardConfig, {"head_dim": 68}),
        (sm80.Sm80BackwardConfig, {"length": 24}),
        (sm80.Sm80BackwardConfig, {"length": 48, "dropout": True}),
        (sm80.Sm80BackwardConfig, {"stages": 0}),
        (sm80.Sm80BackwardConfig, {"warps": 1, "length": 80}),
    ],
)
def test_what_there_is_no_kernel_of(make, changed):
    walked = "tile_n" if make is sm80.Sm80Config else "length"
    given = {"dtype": "float16", "head_dim": 72, "warps": 2, "m_tiles": 1, walked: 48}
    assert make(**given).stages == 2
    assert make(**given | {walked: 64, "dropout": True}).dropout
    with pytest.raises(ValueError, match=r"no such kernel|two rows at most"):
        make(**given | changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"head_dim": 68},
        {"head_dim": 264},
        {"head_dim": 72, "stored": "int8"},
        {"warps": 9},
        {"stages": 1},
    ],
)
def test_what_there_is_no_kernel_of_decode_of(changed):
    config = decode_config("float16", 72, "", smem_limit=99 * 1024)
    with pytest.raises(ValueError, match="no such kernel"):
        replace(config, **changed)


@pytest.mark.parametrize("warps", range(1, 9))
@pytest.mark.parametrize("length", [16, 32, 48, 64, 128])
def test_a_sum_has_parts_for_every_number_of_warps(warps, length):
    for head_dim in range(8, 257, 8):
        if length > 64 * warps:
            continue
        config = sm80.Sm80BackwardConfig(
            "float16", head_dim, warps, m_tiles=1, length=length, atomic_dq=True
        )
        tiles, columns = config.dq_part
        assert tiles * columns * warps == length // 16 * config.tile.width
        assert columns % 16 == 0
        assert warps % (config.tile.width // columns) == 0


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 136])
def test_rows_are_wide_enough_for_parts_of_a_sum(head_dim):
    """Of one tile of 16 rows each of eight warps has as many columns, in whole tiles of 16."""
    base = sm80.Sm80BackwardConfig("float16", head_dim, warps=8, m_tiles=1, length=16)
    adds = replace(base, atomic_dq=True)
    assert head_dim <= base.tile.width <= adds.tile.width
    assert adds.tile.width == -(-head_dim // 128) * 128
    assert adds.dq_part == (1, adds.tile.width // 8)
