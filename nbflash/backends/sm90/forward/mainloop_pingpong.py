"""The Hopper forward's tiles as a whole: see :mod:`.kernel`.

S of a tile is asked for together with P V of the one before, which then runs under the softmax. The
warpgroups take turns: one issues its products while the others compute.
"""

from masks import FULL
from nbflash.backends.sm90.forward.alibi_gemm import make_ramp
from nbflash.backends.sm90.forward.config import FIRST, TURNS
from nbflash.backends.sm90.forward.epilogue import (
    PAST,
    make_finish_row,
    make_masking,
    make_stages,
    poisoned,
)
from nbflash.backends.sm90.shared.dropout import make_dropped
from nbflash.backends.sm90.shared.online_softmax import make_online_softmax, make_scores_again
from nbflash.backends.sm90.shared.score import make_scored
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.mbarrier import bar_arrive, bar_sync, mbarrier_arrive, mbarrier_wait
from nbflash.cuda.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbflash.cuda.tile.ring import make_advance, make_before
from nbflash.cuda.tile.tracing import opaque
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES, after_wait, lower, make_gemm_pv, make_gemm_qk
from nbflash.cuda.tile.wgmma.softmax import make_apply_keep, make_wgmma_softmax, scale_fragment


def make_turns(consumers):
    """``begin_turn(turn), end_turn(turn)`` and, before and after all of them, ``open_, close``.

        warpgroup 0   products  softmax                    products  softmax
        warpgroup 1             products  softmax                    products  softmax

    Each waits at its own barrier, at which the one before it arrives when it has issued.
    """
    ALONE, LAST = consumers == 1, consumers - 1

    @inlined
    def arrive_at(turn):
        bar_arrive(TURNS + turn, 256)

    @inlined
    def begin_turn(turn):
        if not ALONE:
            bar_sync(TURNS + turn, 256)

    @inlined
    def end_turn(turn):
        if not ALONE:
            arrive_at(turn + 1 if turn < LAST else 0)

    @inlined
    def open_turns(turn):
        if not ALONE and turn == LAST:
            arrive_at(0)

    @inlined
    def close_turns(turn):
        if not ALONE and turn == 0:
            bar_sync(TURNS, 256)

    return begin_turn, end_turn, open_turns, close_turns


def make_whole(cfg):
    """``q_of, start, make_step, last``: see :func:`~.consumer.make_compute_stream`.

    ``state`` is O, P of the last tile, m, l, whether the next scores are looked at first (a row
    of the warp has met no key, or m has risen and may rise again, as one's own score may make it),
    and whether the stage of the last row's Q is owed to the loader: TMA has a tile's
    time to take O out of it.
    """
    TILE_N, Q_BYTES, STAGED = cfg.tile_n, cfg.q_bytes, cfg.q_stages > 1
    barriers = cfg.barriers
    FULL_Q, EMPTY_Q, EMPTY_K = barriers.full_q, barriers.empty_q, barriers.empty_k
    FULL_V, EMPTY_V = barriers.full_v, barriers.empty_v
    S_START, P_START = (types.float32(0),) * (TILE_N // 2), (types.uint32(0),) * (TILE_N // 4)
    ONE = (types.float32(1),) * 2
    O_START, PAIR = (types.float32(0),) * (cfg.head_dim // 2), (types.float32(0),) * 2
    tiles = cfg.tile_m, cfg.tile_n
    SCORED = cfg.score is not None
    # A row's first tile is masked even where it is full: registers do not suffice for a branch.
    MASK_FIRST = cfg.dropout
    RAMP, ADDS = cfg.ramp, SCORED and cfg.score.adds
    issue_qk = make_gemm_qk(cfg.dtype, cfg.head_dim, *tiles, negate=cfg.negate, accumulate=ADDS)
    ramp = make_ramp(cfg)
    slant_of, issue_ramp, in_tile = ramp.slant_of, ramp.issue_ramp, ramp.in_tile
    of_row, of_first = ramp.of_row, ramp.of_first
    bent, bent_again = ramp.bent, ramp.bent_again
    issue_pv = make_gemm_pv(cfg.dtype, TILE_N)
    pack = make_wgmma_softmax(TILE_N, cfg.dtype).pack
    softmax = make_online_softmax(TILE_N, cfg.dtype)
    begin, attempt, careful = softmax.begin, softmax.attempt, softmax.careful
    shrunk, outgrown, lost = softmax.shrunk, softmax.outgrown, softmax.lost
    scores_again = make_scores_again(cfg)
    apply_keep, (scored, unit_of) = make_apply_keep(TILE_N, 0), make_scored(cfg, TILE_N, 0)
    dropped = make_dropped(cfg, TILE_N)
    _, bad_of = make_masking(cfg)
    finish_row = make_finish_row(cfg)
    record_of, k_of, _, release_q = make_stages(cfg)
    wait_all, wait_for_s = wgmma_wait(0), wgmma_wait(1)
    advance, advance_q = map(make_advance, (cfg.k_stages, cfg.q_stages))
    before = make_before(cfg.q_stages)
    begin_turn, end_turn, open_turns, close_turns = make_turns(cfg.consumers)

    @inlined
    def q_of(smem, place, stage, turn, thread):
        """The lower word of Q's descriptor."""
        base, _ = place
        return types.uint32(lower(base + stage * Q_BYTES + turn * 64 * ROW_BYTES, 16))

    @inlined
    def go_on(s, m, l, fresh, scale):
        """P, m, l, Σ P, ``fresh`` and α of a row's next scores, and whether to catch up."""
        if fresh:
            weights, m, l, sums, fresh, alpha = careful(s, m, l, scale)
            return weights, m, l, sums, fresh, alpha, True
        weights, sums, outgrew = attempt(s, m, scale)
        return weights, m, l, sums, outgrew, ONE, outgrew

    @inlined
    def catch_up(weights, m, l, sums, alpha, scale, where, keep, scoring, slant, thread):
        """P, m, l, Σ P and α where an attempt has failed; S has left its registers to P."""
        if lost(sums):
            keep = opaque(keep[0]), opaque(keep[1])  # or 64 predicates are kept for here
            s = scores_again(where, keep, scoring[1], thread)
            if RAMP:
                s = apply_keep(bent_again(s, slant, thread), keep)
            elif SCORED:
                s = apply_keep(scored(s, scoring[0]), keep)
            weights, m, l, sums, _, alpha = careful(s, m, l, scale)
        elif outgrown(sums):
            weights, m, l, sums, alpha = shrunk(weights, m, l)
        return weights, m, l, sums, alpha

    @inlined
    def start(base, q, turn):
        open_turns(turn)
        return O_START, P_START, PAIR, PAIR, types.boolean(1), types.boolean(0)

    def make_step(masked, first):
        @inlined
        def step(state, q, now, ago, tile, keep, ending, smem, place, scoring, who):
            acc, p, m, l, fresh, owed = state
            (kind, where), scale = tile, unit_of(scoring[0])
            base, words = place
            (q_now, q_stage, q_phase), (stage, phase, v_stage, v_phase) = q, now
            v_ago, is_there = ago
            thread, lead, turn = who
            after = advance(stage, phase)
            s, row_m, slant = S_START, m, slant_of(where[0], scoring[0], thread)
            if RAMP:
                m = in_tile(m, slant, scale)
            elif ADDS:  # under the other warpgroup's products
                s = scored(s, scoring[0])
            begin_turn(turn)
            # S = Q Kᵀ of this tile, beside what its score adds;  O += P V of the last
            wgmma_fence()
            if RAMP:
                s = issue_ramp(s, base, slant)
            s = issue_qk(s, q_now, k_of(base, stage))
            wgmma_commit()
            acc = issue_pv(acc, p, v_ago)
            wgmma_commit()
            end_turn(turn)
            following = record_of(smem, place, after[0], after[1])
            wait_for_s()
            s = after_wait(s)
            if not first and lead == 0:
                mbarrier_arrive(base + EMPTY_K + 8 * stage)
                if owed:
                    release_q(base, before(q_stage))
            owed = False
            if RAMP:
                if masked:
                    s = bent(s, slant, thread)
            elif not ADDS:
                s = scored(s, scoring[0])
            if masked and (MASK_FIRST or not first or kind != FULL):
                s = apply_keep(s, keep)
            if first:
                m_ago, l_ago = row_m, l
                weights, m, sums, fresh = begin(s, scale)
                l, due = PAIR, False
            else:
                weights, m, l, sums, fresh, alpha, due = go_on(s, m, l, fresh, scale)
            mbarrier_wait(base + FULL_V + 8 * v_stage, v_phase)
            wait_all()
            acc = after_wait(acc)
            if lead == 0:
                if first:  # the very first one's K has stood in for V
                    mbarrier_arrive(base + EMPTY_K + 8 * stage)
                if not first or is_there >= 0:
                    mbarrier_arrive(base + EMPTY_V + 8 * is_there)
            if first:
                row, bh, result = ending
                if row != PAST:
                    q_ago = before(q_stage)
                    finish_row(acc, m_ago, l_ago, row, bh, result, q_ago, base, turn, thread)
                    owed = STAGED
                acc = O_START
            elif due:
                weights, m, l, sums, alpha = catch_up(
                    weights, m, l, sums, alpha, scale, where, keep, scoring, slant, thread
                )
                acc = scale_fragment(acc, alpha)
            if RAMP:
                if first:
                    m = of_first(m, slant, scale)
                else:
                    m = of_row(row_m, m, slant, scale) if due else row_m
            l = l[0] + sums[0], l[1] + sums[1]
            if masked and kind != FULL:
                l = poisoned(l, bad_of(smem, words, v_stage, keep, thread))
            if following[0] & FIRST:
                if not STAGED and lead == 0:
                    mbarrier_arrive(base + EMPTY_Q + 8 * q_stage)
                # A row of one tile: the Q to come goes there. The next step forgets what was owed.
                if owed and lead == 0:
                    release_q(base, before(q_stage))
                q_stage, q_phase = advance_q(q_stage, q_phase)
                mbarrier_wait(base + FULL_Q + 8 * q_stage, q_phase)
                q_now = q_of(smem, place, q_stage, turn, thread)
            p = dropped(pack(weights), scoring[2])
            return (acc, p, m, l, fresh, owed), following, (q_now, q_stage, q_phase)

        return step

    @inlined
    def last(state, v_ago, turn):
        acc, p, m, l, _, _ = state
        begin_turn(turn)
        wgmma_fence()
        acc = issue_pv(acc, p, v_ago)
        wgmma_commit()
        end_turn(turn)
        close_turns(turn)
        wait_all()
        return after_wait(acc), m, l

    return q_of, start, make_step, last
