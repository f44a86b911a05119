"""Faults of the Hopper forward's two forms, whole tiles and halves."""

from mutants import Mutant, swapped, without

ARRIVE_K = "mbarrier_arrive(base + EMPTY_K + 8 * stage)"
ARRIVE_V = "mbarrier_arrive(base + EMPTY_V + 8 * is_there)"
WAIT_V = "mbarrier_wait(base + FULL_V + 8 * v_stage, v_phase)"
WAIT, LINE = "wait_all()\n", " " * 12
SCALE = "acc = scale_fragment(acc, alpha)"
SUMMED = "l = l[0] + sums[0], l[1] + sums[1]"
BOTH = (
    Mutant(
        "record of this tile again", "smem, place, after[0], after[1]", "smem, place, stage, phase"
    ),
    without("Q of the next row", "q_now = q_of(smem, place, q_stage, turn, thread)"),
    Mutant("full V of K's stage", WAIT_V, WAIT_V.replace("v_stage", "stage")),
    Mutant("full V in K's phase", WAIT_V, WAIT_V.replace("v_phase", "phase")),
    Mutant("empty V awaited", WAIT_V, WAIT_V.replace("FULL_V", "EMPTY_V")),
    Mutant("release of this V", ARRIVE_V, ARRIVE_V.replace("is_there", "v_stage")),
    Mutant("release of a V before the first", "if not first or is_there >= 0:", "if True:"),
    Mutant("no release of V where a row begins", "if not first or is_there >= 0:", "if not first:"),
    Mutant("full tiles poisoned", "if masked and kind != FULL:", "if masked:"),
    Mutant("bad keys of K's stage", "bad_of(smem, words, v_stage", "bad_of(smem, words, stage"),
    Mutant(
        "finish before the first row",
        "if row != PAST:\n",
        "if True:\n",
    ),
    Mutant("finishes with the next m", "finish_row(acc, m_ago,", "finish_row(acc, m,"),
    Mutant(
        "finishes with the next l", "finish_row(acc, m_ago, l_ago,", "finish_row(acc, m_ago, l,"
    ),
    Mutant("finishes in this row's stage", "q_ago = before(q_stage)", "q_ago = q_stage"),
    Mutant("O goes on into the next row", "acc = O_START\n", "pass\n"),
    Mutant("Q never changes", "if following[0] & FIRST:", "if False:"),
    Mutant("Q changes with every tile", "if following[0] & FIRST:", "if True:"),
)
RELEASE = f"if lead == 0:\n{LINE}    {ARRIVE_K}\n"
RELEASE_V = f"{LINE}    if not first or is_there >= 0:\n{LINE}        {ARRIVE_V}\n"
SETTLED = "acc, s_b = after_wait(acc), after_wait(s_b)\n"
WAITED = WAIT + LINE + SETTLED + LINE
OTHERS = "issue_pv(acc, p, v_ago + NEXT_HALF)"
NEXT_K = "k_of(base, stage) + NEXT_HALF"
LATE_RELEASE = "row != PAST and not following[0] & FIRST:"
NOT_FULL = "(not first or kind != FULL)"
HALVES = (
    *BOTH,
    *(
        Mutant(f"first half of {name} twice", OTHERS, "issue_pv(acc, p, v_ago)", which, 2)
        for which, name in enumerate(("V", "the last V"))
    ),
    Mutant("second half of V twice", "v_of(base, v_stage))", "v_of(base, v_stage) + NEXT_HALF)"),
    Mutant("first half of K twice", NEXT_K, "k_of(base, stage)"),
    Mutant("first halves not masked", NOT_FULL, "not first", 0, 2),
    Mutant("first second halves not masked", NOT_FULL, "not first", 1, 2),
    Mutant("half of a half", "HALF * ROW_BYTES >> 4", "HALF * ROW_BYTES >> 5"),
    Mutant(
        "V of this tile in both halves",
        "issue_pv(acc, p, v_ago",
        "issue_pv(acc, p, v_of(base, v_stage)",
        0,
        2,
    ),
    Mutant("V of the tile before in both halves", "p, v_of(base, v_stage))", "p, v_ago)"),
    Mutant("next K from this tile", "k_of(base, after[0])", "k_of(base, stage)"),
    Mutant("Q of stage 0", "words + stage * (Q_BYTES // 4) + row", "words + row"),
    Mutant("wide Q of stage 0", "base + stage * Q_BYTES +", "base +"),
    Mutant("wide Q of warpgroup 0", "turn * 64 * ROW_BYTES", "0"),
    Mutant("S in two hands", SETTLED, "acc, _ = after_wait(acc), after_wait(s_b)\n"),
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
    Mutant("l of the row before", "l = PAIR\n", "pass\n"),
    Mutant("growth of the first half", "elif fresh | outgrew:", "elif fresh:"),
    Mutant("first keys of the first half", "elif fresh | outgrew:", "elif outgrew:"),
    Mutant("growth of the second half", " if fresh | outgrew:", " if fresh:"),
    Mutant("first keys of the second half", " if fresh | outgrew:", " if outgrew:"),
    Mutant("scores of the first half again", "careful(s_b, m, l", "careful(s_a, m, l"),
    Mutant("no release of Q after a row of one tile", "elif first and row != PAST:", "elif False:"),
    Mutant("release of no Q", "elif first and row != PAST:", "elif first:"),
    Mutant("no release of Q", LATE_RELEASE, "False:"),
    Mutant("two releases of Q", LATE_RELEASE, "row != PAST:"),
    Mutant("release of a Q before the first", LATE_RELEASE, "not following[0] & FIRST:"),
    Mutant(
        "releases of Q by every warp",
        "STAGED and lead == 0 and row",
        "STAGED and lead % 32 == 0 and row",
    ),
    Mutant(
        "release of this Q",
        f"FIRST:\n{LINE}    release_q(base, q_ago)",
        f"FIRST:\n{LINE}    release_q(base, q_stage)",
    ),
    Mutant(
        "release of this Q after one tile",
        f"release_q(base, q_ago)\n{LINE}    q_stage",
        f"release_q(base, q_stage)\n{LINE}    q_stage",
    ),
    Mutant("P of the first half again", "p = dropped_b(pack(weights), scoring[2])", "pass"),
    Mutant(
        "every row has met a key", "s_a, m, l, fresh), following", "s_a, m, l, False), following"
    ),
    Mutant("panels of half a K", "(cfg.tile_m, cfg.tile_n)", "(cfg.tile_m, HALF)"),
)
RELEASE_Q = "release_q(base, before(q_stage))"
OWED = f"{LINE}    if owed:\n{LINE}        {RELEASE_Q}\n"
EARLY = f"if not first and lead == 0:\n{LINE}    {ARRIVE_K}\n{OWED}"
S_OF = "issue_qk(s, q_now, k_of(base, stage))"
NEXT = "following = record_of(smem, place, after[0], after[1])"
STAND_IN = "if first:  # the very first one's K has stood in for V"
SHRINK = "weights, m, l, sums, alpha = shrunk(weights, m, l)"
AGAIN = "weights, m, l, sums, _, alpha = careful(s, m, l, scale)"
WHOLE = (
    *BOTH,
    Mutant("K for V", "issue_pv(acc, p, v_ago)", "issue_pv(acc, p, k_of(base, stage))", 0, 2),
    Mutant("K of the next tile", S_OF, S_OF.replace("stage", "after[0]")),
    Mutant("Q of stage 0", "lower(base + stage * Q_BYTES + turn", "lower(base + turn"),
    Mutant("one warpgroup's rows", " + turn * 64 * ROW_BYTES, 16)", ", 16)"),
    Mutant("wait for all but two", "wgmma_wait(0), wgmma_wait(1)", "wgmma_wait(0), wgmma_wait(2)"),
    without("S settled", "s = after_wait(s)"),
    without("O settled", "acc = after_wait(acc)"),
    swapped("S settled before the wait", "wait_for_s()\n" + LINE, "s = after_wait(s)\n" + LINE),
    swapped("O settled before the wait", WAIT + LINE, "acc = after_wait(acc)\n" + LINE),
    swapped(
        "K released before S",
        f"{NEXT}\n{LINE}wait_for_s()\n{LINE}s = after_wait(s)\n{LINE}",
        EARLY + LINE,
    ),
    swapped(
        "V released too early",
        f"{WAIT}{LINE}acc = after_wait(acc)\n{LINE}",
        f"if lead == 0:\n{LINE}    {STAND_IN}\n{LINE}        {ARRIVE_K}\n{RELEASE_V}{LINE}",
    ),
    without("mask", "s = apply_keep(s, keep)"),
    Mutant("two releases of the first K", "if not first and lead == 0:", "if lead == 0:"),
    Mutant("release of the next K", ARRIVE_K, ARRIVE_K.replace("stage", "after[0]"), 0, 2),
    Mutant("releases of every warp", EARLY, EARLY.replace("lead", "lead % 32")),
    Mutant("no release of Q", "if owed:", "if False:"),
    Mutant("no release of Q after a row of one tile", "if owed and lead == 0:", "if False:"),
    Mutant("releases of Q by every warp", "if owed and lead == 0:", "if owed and lead % 32 == 0:"),
    Mutant("release of this Q", RELEASE_Q, "release_q(base, q_stage)", 0, 2),
    Mutant("release of this Q after one tile", RELEASE_Q, "release_q(base, q_stage)", 1, 2),
    Mutant("no end of what is owed", "owed = False\n", "pass\n"),
    Mutant("P of the tile before", "p = dropped(pack(weights), scoring[2])", "pass"),
    Mutant("every row has met a key", "l, fresh, owed), following", "l, False, owed), following"),
    Mutant("O not rescaled", SCALE, "pass"),
    without("sum", SUMMED),
    Mutant("sum of the other row", SUMMED, "l = l[0] + sums[1], l[1] + sums[0]"),
    Mutant("l of the row before", "l, due = PAIR, False", "due = False"),
    Mutant("first keys that leave O alone", "fresh, alpha, True", "fresh, alpha, False"),
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
    Mutant("a turn for oneself", "arrive_at(turn + 1 if turn < LAST else 0)", "arrive_at(turn)"),
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
