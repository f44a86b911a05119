"""Faults of the Hopper forward's two forms, whole tiles and halves."""

from mutants import Mutant, swapped, without

ARRIVE_K = "release_k(base, stage)"
ARRIVE_V = "release_v(base, prior_stage)"
WAIT_V = "wait_v(base, v_stage, v_phase)"
WAIT, LINE = "wait_all()\n", " " * 12
SCALE = "acc_o = scale_fragment(acc_o, alpha)"
SUMMED = "l_i = l_i[0] + sums[0], l_i[1] + sums[1]"
BOTH = (
    Mutant(
        "descriptor of this tile again",
        "smem, place, after[0], after[1]",
        "smem, place, stage, phase",
    ),
    without("Q of the next row", "q_now = q_of(smem, place, q_stage, warpgroup, thread)"),
    Mutant("full V of K's stage", WAIT_V, WAIT_V.replace("v_stage", "stage")),
    Mutant("full V in K's phase", WAIT_V, WAIT_V.replace("v_phase", "phase")),
    Mutant("release of this V", ARRIVE_V, ARRIVE_V.replace("prior_stage", "v_stage")),
    Mutant("release of a V before the first", "if not first or prior_stage >= 0:", "if True:"),
    Mutant(
        "no release of V where a row begins", "if not first or prior_stage >= 0:", "if not first:"
    ),
    Mutant("bad keys of K's stage", "kind, smem, words, v_stage", "kind, smem, words, stage"),
    Mutant(
        "finish before the first row",
        "if m_block != PAST:\n",
        "if True:\n",
    ),
    Mutant("finishes with the next m", "finish_row(acc_o, m_prior,", "finish_row(acc_o, m_i,"),
    Mutant(
        "finishes with the next l",
        "finish_row(acc_o, m_prior, l_prior,",
        "finish_row(acc_o, m_prior, l_i,",
    ),
    Mutant("O goes on into the next row", "acc_o = O_START\n", "pass\n"),
    Mutant("Q never changes", "if next_tile[0] & FIRST:", "if False:"),
    Mutant("Q changes with every tile", "if next_tile[0] & FIRST:", "if True:"),
)
EMPTY = "# empty_k, and empty_v of the tile before: a consumer each arrives, the producer waits.\n"
RELEASE = f"{EMPTY}{LINE}if lead == 0:\n{LINE}    {ARRIVE_K}\n"
RELEASE_V = f"{LINE}    if not first or prior_stage >= 0:\n{LINE}        {ARRIVE_V}\n"
SETTLED = "acc_o, s_b = after_wait(acc_o), after_wait(s_b)\n"
WAITED = WAIT + LINE + SETTLED + LINE
OTHERS = "issue_pv(acc_o, p, v_prior + NEXT_HALF)"
NEXT_K = "k_of(base, stage) + NEXT_HALF"
LATE_RELEASE = "m_block != PAST and not next_tile[0] & FIRST:"
NOT_FULL = "(not first or kind != FULL)"
HALVES = (
    *BOTH,
    *(
        Mutant(f"first half of {name} twice", OTHERS, "issue_pv(acc_o, p, v_prior)", which, 2)
        for which, name in enumerate(("V", "the last V"))
    ),
    Mutant("second half of V twice", "v_of(base, v_stage))", "v_of(base, v_stage) + NEXT_HALF)"),
    Mutant("first half of K twice", NEXT_K, "k_of(base, stage)"),
    Mutant("first halves not masked", NOT_FULL, "not first", 0, 2),
    Mutant("first second halves not masked", NOT_FULL, "not first", 1, 2),
    Mutant("half of a half", "HALF * ROW_BYTES >> 4", "HALF * ROW_BYTES >> 5"),
    Mutant(
        "V of this tile in both halves",
        "issue_pv(acc_o, p, v_prior",
        "issue_pv(acc_o, p, v_of(base, v_stage)",
        0,
        2,
    ),
    Mutant("V of the tile before in both halves", "p, v_of(base, v_stage))", "p, v_prior)"),
    Mutant("next K from this tile", "k_of(base, after[0])", "k_of(base, stage)"),
    Mutant("Q of stage 0", "words + stage * (Q_BYTES // 4) + row", "words + row"),
    Mutant("wide Q of stage 0", "base + stage * Q_BYTES +", "base +"),
    Mutant("wide Q of warpgroup 0", "warpgroup * 64 * ROW_BYTES", "0"),
    Mutant("S in two hands", SETTLED, "acc_o, _ = after_wait(acc_o), after_wait(s_b)\n"),
    Mutant("settled before the wait", WAIT + LINE + SETTLED, SETTLED + LINE + WAIT),
    Mutant("K released too early", WAITED + RELEASE, RELEASE + LINE + WAITED + "if lead == 0:\n"),
    Mutant(
        "V released too early",
        WAITED + RELEASE + RELEASE_V,
        f"if lead == 0:\n{RELEASE_V}{LINE}{WAITED}{RELEASE}",
    ),
    Mutant("no mask on the first half", "s_a = keep_a(s_a, keep)", "pass"),
    Mutant("no mask on the second half", "s_b = keep_b(s_b, keep)", "pass"),
    Mutant("mask of the second half first", "s_a = keep_a(s_a", "s_a = keep_b(s_a"),
    Mutant("mask of the first half again", "s_b = keep_b(s_b", "s_b = keep_a(s_b"),
    Mutant("release of the next K", ARRIVE_K, ARRIVE_K.replace("stage", "after[0]")),
    Mutant("releases of every warp", RELEASE, RELEASE.replace("lead", "lead % 32")),
    Mutant("O not rescaled", SCALE, "pass", 0, 2),
    Mutant("O not rescaled by the second half", SCALE, "pass", 1, 2),
    without("sum of the first half", SUMMED, 2, 0),
    without("sum of the second half", SUMMED, 2, 1),
    Mutant("l of the row before", "l_i = PAIR\n", "pass\n"),
    Mutant("growth of the first half", "elif fresh | outgrew:", "elif fresh:"),
    Mutant("first keys of the first half", "elif fresh | outgrew:", "elif outgrew:"),
    Mutant("growth of the second half", " if fresh | outgrew:", " if fresh:"),
    Mutant("first keys of the second half", " if fresh | outgrew:", " if outgrew:"),
    Mutant("scores of the first half again", "careful(s_b, m_i, l_i", "careful(s_a, m_i, l_i"),
    Mutant(
        "no release of Q after a row of one tile", "elif first and m_block != PAST:", "elif False:"
    ),
    Mutant("finishes in this row's stage", "out_stage = before(q_stage)", "out_stage = q_stage"),
    Mutant("release of no Q", "elif first and m_block != PAST:", "elif first:"),
    Mutant("no release of Q", LATE_RELEASE, "False:"),
    Mutant("two releases of Q", LATE_RELEASE, "m_block != PAST:"),
    Mutant("release of a Q before the first", LATE_RELEASE, "not next_tile[0] & FIRST:"),
    Mutant(
        "releases of Q by every warp",
        "STAGED and lead == 0 and m_block",
        "STAGED and lead % 32 == 0 and m_block",
    ),
    Mutant(
        "release of this Q",
        f"FIRST:\n{LINE}    release_q(base, out_stage)",
        f"FIRST:\n{LINE}    release_q(base, q_stage)",
    ),
    Mutant(
        "release of this Q after one tile",
        f"release_q(base, out_stage)\n{LINE}    q_stage",
        f"release_q(base, q_stage)\n{LINE}    q_stage",
    ),
    Mutant("P of the first half again", "p = dropped_b(pack(weights), drawing)", "pass"),
    Mutant(
        "every row has met a key",
        "s_a, m_i, l_i, fresh), next_tile",
        "s_a, m_i, l_i, False), next_tile",
    ),
    Mutant("panels of half a K", "(cfg.tile_m, cfg.tile_n)", "(cfg.tile_m, HALF)"),
)
S_SETTLED, O_SETTLED = "acc_s = after_wait(acc_s)", "acc_o = after_wait(acc_o)"
COMMENT_K = "# empty_k, empty_q: a consumer each arrives, the producer waits."
COMMENT_V = "# empty_v of the tile before: a consumer each arrives, the producer waits."
RELEASE_Q = "release_q(base, before(q_stage))"
OWED = f"{LINE}    if owed:\n{LINE}        {RELEASE_Q}\n"
EARLY = f"{COMMENT_K}\n{LINE}if not first and lead == 0:\n{LINE}    {ARRIVE_K}\n{OWED}"
S_OF = "issue_qk(issue_score(acc_s, base, ramp), q_now, k_of(base, stage))"
NEXT = "next_tile = wait_k(smem, place, after[0], after[1])"
STAND_IN = "if first:  # the very first one's K has stood in for V"
SHRINK = "weights, m, l, sums, alpha = shrunk(weights, m, l)"
AGAIN = "weights, m, l, sums, _, alpha = careful(s, m, l, scale)"
WHOLE = (
    *BOTH,
    Mutant("K for V", "issue_pv(acc_o, p, v_prior)", "issue_pv(acc_o, p, k_of(base, stage))", 0, 2),
    Mutant("K of the next tile", S_OF, S_OF.replace("stage", "after[0]")),
    Mutant("Q of stage 0", "lower(base + stage * Q_BYTES + warpgroup", "lower(base + warpgroup"),
    Mutant("one warpgroup's rows", " + warpgroup * 64 * ROW_BYTES, 16)", ", 16)"),
    Mutant("wait for all but two", "wgmma_wait(0), wgmma_wait(1)", "wgmma_wait(0), wgmma_wait(2)"),
    without("S settled", S_SETTLED),
    without("O settled", O_SETTLED),
    swapped("S settled before the wait", "wait_for_s()\n" + LINE, S_SETTLED + "\n" + LINE),
    swapped("O settled before the wait", WAIT + LINE, O_SETTLED + "\n" + LINE),
    swapped(
        "K released before S",
        f"{NEXT}\n{LINE}wait_for_s()\n{LINE}{S_SETTLED}\n{LINE}",
        EARLY + LINE,
    ),
    swapped(
        "V released too early",
        f"{WAIT}{LINE}{O_SETTLED}\n{LINE}",
        f"{COMMENT_V}\n{LINE}if lead == 0:\n{LINE}    {STAND_IN}\n"
        f"{LINE}        {ARRIVE_K}\n{RELEASE_V}{LINE}",
    ),
    without("mask", "acc_s = apply_keep(acc_s, keep)"),
    Mutant("two releases of the first K", "if not first and lead == 0:", "if lead == 0:"),
    Mutant("release of the next K", ARRIVE_K, ARRIVE_K.replace("stage", "after[0]"), 0, 2),
    Mutant("releases of every warp", EARLY, EARLY.replace("lead", "lead % 32")),
    Mutant("no release of Q", "if owed:", "if False:", 0, 2),
    Mutant("no release of Q after a row of one tile", "if owed:", "if False:", 1, 2),
    Mutant(
        "releases of Q by every warp",
        f"if lead == 0:\n{LINE}        if not STAGED:",
        f"if lead % 32 == 0:\n{LINE}        if not STAGED:",
    ),
    Mutant("release of this Q", RELEASE_Q, "release_q(base, q_stage)", 0, 2),
    Mutant("release of this Q after one tile", RELEASE_Q, "release_q(base, q_stage)", 1, 2),
    Mutant("no end of what is owed", "owed = False\n", "pass\n"),
    Mutant("P of the tile before", "p = dropped(pack(weights), drawing)", "pass"),
    Mutant(
        "every row has met a key", "l_i, fresh, owed), next_tile", "l_i, False, owed), next_tile"
    ),
    Mutant("finishes in this row's stage", "out = before(q_stage), base", "out = q_stage, base"),
    Mutant("O not rescaled", SCALE, "pass"),
    without("sum", SUMMED),
    Mutant("sum of the other row", SUMMED, "l_i = l_i[0] + sums[1], l_i[1] + sums[0]"),
    Mutant("l of the row before", "l_i, due = PAIR, False", "due = False"),
    Mutant(
        "a turn for oneself",
        "arrive_at(warpgroup + 1 if warpgroup < LAST else 0)",
        "arrive_at(warpgroup)",
    ),
    Mutant(
        "turns at the barriers of the stores",
        "import FIRST, TURNS",
        "import FIRST, STORERS as TURNS",
    ),
    Mutant(
        "turns of two warpgroups",
        "ALONE, LAST = consumers == 1, consumers - 1",
        "ALONE, LAST = consumers == 1, 1",
    ),
)
UPDATE = (Mutant("first keys that leave O alone", "fresh, alpha, True", "fresh, alpha, False"),)
RECOVERY = (
    Mutant("nothing lost", "if lost(sums):", "if False:"),
    Mutant("m never outgrown", "elif outgrown(sums):", "elif False:"),
    Mutant("alpha of weights as they should be", "elif outgrown(sums):", "else:"),
    Mutant("alpha forgotten", SHRINK, SHRINK.replace("alpha", "_")),
    Mutant("sums of an attempt", SHRINK, SHRINK.replace("sums", "_")),
    Mutant("weights of an attempt", SHRINK, SHRINK.replace("weights", "_", 1)),
    Mutant("m of an attempt", SHRINK, SHRINK.replace("m,", "_,", 1)),
    Mutant("l of an attempt", SHRINK, SHRINK.replace("l,", "_,", 1)),
    Mutant("alpha forgotten with the scores", AGAIN, AGAIN.replace("alpha", "_")),
    Mutant("sums of infinite weights", AGAIN, AGAIN.replace("sums", "_")),
    Mutant("infinite weights", AGAIN, AGAIN.replace("weights", "_")),
    Mutant("m that lost the scores", AGAIN, AGAIN.replace("m,", "_,", 1)),
    Mutant("l that lost the scores", AGAIN, AGAIN.replace("l,", "_,", 1)),
)
