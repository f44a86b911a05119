"""The Hopper forward's tiles as a whole: see :mod:`.kernel`.

S of a tile is issued together with P V of the tile before, which then runs under the softmax. The
warpgroups take turns: one issues its products while the others compute.

    tensor cores    S(t) P V(t−1)                      S(t+1) P V(t)
    this warpgroup  ├─ issue ─┤ wait S │ mask, softmax │ wait P V │ α O │ issue …

A warpgroup's accumulators are tiles in registers, S of 64 × tile_n and O of 64 × head_dim:

    columns            8 j, + 1      + 2, + 3      + 4, + 5      + 6, + 7     elements of a thread
    row 16 w + r       lane 4 r      lane 4 r + 1  lane 4 r + 2  lane 4 r + 3    4 j, 4 j + 1
    row 16 w + r + 8   lane 4 r      lane 4 r + 1  lane 4 r + 2  lane 4 r + 3    4 j + 2, 4 j + 3

of warp w, r below 8. A thread has two rows, which the four lanes of a quad share,
so that m, l and α are pairs, and P, rounded and packed by twos, is P V's A operand where it is.
"""

from collections.abc import Callable
from typing import NamedTuple

from masks import FULL
from nbflash.backends.sm90.forward.alibi_gemm import make_ramp_hooks
from nbflash.backends.sm90.forward.epilogue import PAST, make_finish_row
from nbflash.backends.sm90.forward.mainloop import Mainloop
from nbflash.backends.sm90.forward.recovery import make_recover
from nbflash.backends.sm90.forward.rings import make_rings
from nbflash.backends.sm90.forward.score_hooks import make_score_hooks
from nbflash.backends.sm90.shared.config import FIRST, TURNS
from nbflash.backends.sm90.shared.dropout import make_dropped
from nbflash.backends.sm90.shared.nan_watch import make_nan_watch
from nbflash.backends.sm90.shared.online_softmax import make_online_softmax
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.mbarrier import bar_arrive, bar_sync
from nbflash.cuda.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbflash.cuda.tile.ring import make_advance, make_before
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES, after_wait, lower, make_gemm_pv, make_gemm_qk
from nbflash.cuda.tile.wgmma.softmax import make_apply_keep, make_wgmma_softmax, scale_fragment


class Turns(NamedTuple):
    """``begin, end`` of a warpgroup's turn to issue, ``open, close`` around all of them."""

    begin: Callable
    end: Callable
    open: Callable
    close: Callable


def make_turns(consumers):
    """`Turns` of so many consumer warpgroups.

        warpgroup 0   products  softmax                    products  softmax
        warpgroup 1             products  softmax                    products  softmax

    Each waits at its own barrier, at which the one before it arrives when it has issued.
    """
    ALONE, LAST = consumers == 1, consumers - 1

    @inlined
    def arrive_at(warpgroup):
        bar_arrive(TURNS + warpgroup, 256)

    @inlined
    def begin_turn(warpgroup):
        if not ALONE:
            bar_sync(TURNS + warpgroup, 256)

    @inlined
    def end_turn(warpgroup):
        if not ALONE:
            arrive_at(warpgroup + 1 if warpgroup < LAST else 0)

    @inlined
    def open_turns(warpgroup):
        if not ALONE and warpgroup == LAST:
            arrive_at(0)

    @inlined
    def close_turns(warpgroup):
        if not ALONE and warpgroup == 0:
            bar_sync(TURNS, 256)

    return Turns(begin_turn, end_turn, open_turns, close_turns)


def make_whole(cfg):
    """The `Mainloop` of a configuration that works on a tile as a whole.

    ``state`` is O, P of the last tile, m, l, ``fresh`` of the online softmax, and whether the stage
    of the last row's Q is owed to the producer: TMA has a tile's time to take O out of it.
    """
    TILE_N, Q_BYTES, STAGED = cfg.tile_n, cfg.q_bytes, cfg.q_stages > 1
    S_START, P_START = (types.float32(0),) * (TILE_N // 2), (types.uint32(0),) * (TILE_N // 4)
    O_START, PAIR = (types.float32(0),) * (cfg.head_dim // 2), (types.float32(0),) * 2
    tiles = cfg.tile_m, cfg.tile_n
    # A row's first tile is masked even where it is full: registers do not suffice for a branch.
    MASK_FIRST = bool(cfg.dropout)
    RAMP, ADDS = cfg.ramp, cfg.score is not None and cfg.score.adds
    issue_qk = make_gemm_qk(cfg.dtype, cfg.head_dim, *tiles, negate=cfg.negate, accumulate=ADDS)
    issue_pv = make_gemm_pv(cfg.dtype, TILE_N)
    pack, apply_keep = make_wgmma_softmax(TILE_N, cfg.dtype).pack, make_apply_keep(TILE_N, 0)
    softmax, dropped = make_online_softmax(TILE_N, cfg.dtype), make_dropped(cfg, TILE_N)
    begin, update = softmax.begin, softmax.update
    finish_row = make_finish_row(cfg)
    rings = make_rings(cfg)
    wait_k, wait_q, wait_v, k_of = rings.wait_k, rings.wait_q, rings.wait_v, rings.k_of
    release_k, release_q, release_v = rings.release_k, rings.release_q, rings.release_v
    wait_all, wait_for_s = wgmma_wait(0), wgmma_wait(1)
    advance, advance_q = map(make_advance, (cfg.k_stages, cfg.q_stages))
    before = make_before(cfg.q_stages)
    turns = make_turns(cfg.consumers)
    begin_turn, end_turn, open_turns, close_turns = turns.begin, turns.end, turns.open, turns.close

    @inlined
    def q_of(smem, place, stage, warpgroup, thread):
        """The lower word of Q's descriptor."""
        base, _ = place
        return types.uint32(lower(base + stage * Q_BYTES + warpgroup * 64 * ROW_BYTES, 16))

    @inlined
    def start(base, q, warpgroup):
        open_turns(warpgroup)
        return O_START, P_START, PAIR, PAIR, types.boolean(1), types.boolean(0)

    def make_step(masked, first):
        hooks = make_ramp_hooks(cfg, masked, first) if cfg.ramp else make_score_hooks(cfg)
        unit_of, before_qk, issue_score = hooks.unit_of, hooks.before_qk, hooks.issue
        after_qk, after_softmax = hooks.after_qk, hooks.after_softmax
        recover, nan_watch = make_recover(cfg, hooks), make_nan_watch(cfg, masked)

        @inlined
        def step(state, q, now, prior, tile, keep, ending, smem, place, scoring, ids):
            acc_o, p, m_i, l_i, fresh, owed = state
            (kind, where), (score, _, drawing) = tile, scoring
            (base, words), scale = place, unit_of(score)
            (q_now, q_stage, q_phase), (stage, phase, v_stage, v_phase) = q, now
            v_prior, prior_stage = prior
            thread, lead, warpgroup = ids
            after = advance(stage, phase)
            m_row = m_i
            acc_s, m_i, ramp = before_qk(S_START, m_i, where[0], scale, score, thread)

            # This tile's K is there: the step before has waited for it. In turn with the others:
            begin_turn(warpgroup)
            wgmma_fence()
            # S = Q Kᵀ
            acc_s = issue_qk(issue_score(acc_s, base, ramp), q_now, k_of(base, stage))
            wgmma_commit()
            # O += P V, of the tile before
            acc_o = issue_pv(acc_o, p, v_prior)
            wgmma_commit()
            end_turn(warpgroup)
            # full_k of the next tile: its bytes arrive by TMA, every consumer waits.
            next_tile = wait_k(smem, place, after[0], after[1])
            wait_for_s()
            acc_s = after_wait(acc_s)
            # empty_k, empty_q: a consumer each arrives, the producer waits.
            if not first and lead == 0:
                release_k(base, stage)
                if owed:
                    release_q(base, before(q_stage))
            owed = False

            acc_s = after_qk(acc_s, ramp, score, thread)
            # S = −∞ where the mask hides it
            if masked and (MASK_FIRST or not first or kind != FULL):
                acc_s = apply_keep(acc_s, keep)
            # P = 2^(S · scale − m), Σ P, and where m has risen α for O and l
            if first:
                m_prior, l_prior = m_row, l_i
                weights, m_i, sums, fresh = begin(acc_s, scale)
                l_i, due = PAIR, False
            else:
                weights, m_i, l_i, sums, fresh, alpha, due = update(acc_s, m_i, l_i, fresh, scale)

            # full_v: TMA arrives, or the NaN watch once V is clean; every consumer waits.
            wait_v(base, v_stage, v_phase)
            wait_all()
            acc_o = after_wait(acc_o)
            # empty_v of the tile before: a consumer each arrives, the producer waits.
            if lead == 0:
                if first:  # the very first one's K has stood in for V
                    release_k(base, stage)
                if not first or prior_stage >= 0:
                    release_v(base, prior_stage)
            # Where a row begins, O / l → out of the one before and O = 0; else O = α O
            if first:
                m_block, bh, result = ending
                if m_block != PAST:
                    out = before(q_stage), base, warpgroup, thread
                    finish_row(acc_o, m_prior, l_prior, m_block, bh, result, out)
                    owed = STAGED
                acc_o = O_START
            elif due:
                weights, m_i, l_i, sums, alpha = recover(
                    weights, m_i, l_i, sums, alpha, scale, where, keep, scoring, ramp, thread
                )
                acc_o = scale_fragment(acc_o, alpha)
            if RAMP:  # ALiBi's m is the tile's
                if first:
                    m_i = after_softmax(m_i, m_row, ramp, scale)
                else:
                    m_i = after_softmax(m_i, m_row, ramp, scale) if due else m_row
            # l += Σ P
            l_i = l_i[0] + sums[0], l_i[1] + sums[1]
            l_i = nan_watch(l_i, kind, smem, words, v_stage, keep, thread)

            if next_tile[0] & FIRST:
                if lead == 0:
                    if not STAGED:
                        release_q(base, q_stage)
                    # A row of one tile: the Q to come goes there. The next step forgets it.
                    if owed:
                        release_q(base, before(q_stage))
                q_stage, q_phase = advance_q(q_stage, q_phase)
                # full_q: its bytes arrive by TMA, every consumer waits.
                wait_q(base, q_stage, q_phase)
                q_now = q_of(smem, place, q_stage, warpgroup, thread)
            p = dropped(pack(weights), drawing)
            return (acc_o, p, m_i, l_i, fresh, owed), next_tile, (q_now, q_stage, q_phase)

        return step

    @inlined
    def last(state, v_prior, warpgroup):
        acc_o, p, m_i, l_i, _, _ = state
        begin_turn(warpgroup)
        wgmma_fence()
        # O += P V, of the last tile
        acc_o = issue_pv(acc_o, p, v_prior)
        wgmma_commit()
        end_turn(warpgroup)
        close_turns(warpgroup)
        wait_all()
        return after_wait(acc_o), m_i, l_i

    return Mainloop(q_of, start, make_step, last)
