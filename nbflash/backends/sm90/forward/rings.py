"""The rings of Q, K and V as a consumer sees them: where a stage lies, its waits and releases.

    stage        0      1      2      0      1   …       of a ring of three
    phase        0      0      0      1      1   …       flips with every round
    producer     wait empty[stage], phase ^ 1 │ TMA ► stage │ its last byte completes full[stage]
    consumer     wait full[stage], phase │ products read the stage │ arrive at empty[stage]

One thread of a consumer warpgroup arrives for all of it.
"""

from collections.abc import Callable
from typing import NamedTuple

from nbflash.backends.sm90.shared.config import DESCRIPTOR_WORDS
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
from nbflash.cuda.ptx.tma import bulk_wait_read
from nbflash.cuda.tile.ring import read_descriptor
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES, lower


class Rings(NamedTuple):
    """What `make_rings` returns; ``k_of`` and ``v_of`` are lower words of descriptors.

    wait_k(smem, place, stage, phase)    K has arrived; the descriptor of its tile
    wait_q(base, stage, phase)           Q has arrived
    wait_v(base, stage, phase)           V has arrived, and the NaN watch has seen it
    release_k(base, stage)               S of the tile is done
    release_v(base, stage)               P V of the tile is done
    release_q(base, stage)               TMA has taken O, which leaves through it, out of the stage
    k_of(base, stage), v_of(base, stage)
    """

    wait_k: Callable
    wait_q: Callable
    wait_v: Callable
    release_k: Callable
    release_v: Callable
    release_q: Callable
    k_of: Callable
    v_of: Callable


def make_rings(cfg):
    """`Rings` of a configuration."""
    KV_BYTES, KV_PANEL = cfg.kv_bytes, cfg.tile_n * ROW_BYTES
    K, V, DESCRIPTORS, STAGED = cfg.smem.k, cfg.smem.v, cfg.smem.descriptors, cfg.q_stages > 1
    barriers = cfg.barriers
    FULL_Q, FULL_K, FULL_V = barriers.full_q, barriers.full_k, barriers.full_v
    EMPTY_Q, EMPTY_K, EMPTY_V = barriers.empty_q, barriers.empty_k, barriers.empty_v

    @inlined
    def wait_k(smem, place, stage, phase):
        base, words = place
        mbarrier_wait(base + FULL_K + 8 * stage, phase)
        return read_descriptor(smem, words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage)

    @inlined
    def wait_q(base, stage, phase):
        mbarrier_wait(base + FULL_Q + 8 * stage, phase)

    @inlined
    def wait_v(base, stage, phase):
        mbarrier_wait(base + FULL_V + 8 * stage, phase)

    @inlined
    def release_k(base, stage):
        mbarrier_arrive(base + EMPTY_K + 8 * stage)

    @inlined
    def release_v(base, stage):
        mbarrier_arrive(base + EMPTY_V + 8 * stage)

    @inlined
    def release_q(base, stage):
        if STAGED:
            bulk_wait_read()
        mbarrier_arrive(base + EMPTY_Q + 8 * stage)

    @inlined
    def k_of(base, stage):
        return types.uint32(lower(base + K, 16) + stage * (KV_BYTES >> 4))

    @inlined
    def v_of(base, stage):
        return types.uint32(lower(base + V, KV_PANEL) + stage * (KV_BYTES >> 4))

    return Rings(wait_k, wait_q, wait_v, release_k, release_v, release_q, k_of, v_of)
