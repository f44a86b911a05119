"""The Hopper forward kernel in the simulator: lengths, masks, heads, scales, layouts, schedules."""

from dataclasses import replace
from itertools import product

import axes
import numpy as np
import poisoned_rows
import pytest
import sm90_runs
from sm90_runs import ALONE, DTYPES, HALVES, HALVES_PAIR, PAIR, check, run

import masks
from nbflash import reference, testing
from nbflash.backends.sm90.forward import recovery
from nbflash.cuda import simulator as sim
from nbflash.testing import code_word_oracle, mask_gallery

T = 64
EDGES = (1, 2, T - 1, T, T + 1, 2 * T + 1)
CONFIGS = {
    "alone": ALONE,
    "pair": PAIR,
    "wide": replace(ALONE, tile_n=128),
    "deep": replace(ALONE, k_stages=4, v_stages=3),
    "straight": replace(ALONE, q_stages=1),
    "three": replace(PAIR, consumers=3, tile_n=112),
    "words": replace(ALONE, tile_n=112),
    "narrow": replace(ALONE, tile_n=48),
    "halves": HALVES,
    "halves-pair": HALVES_PAIR,
    "halves-wide": replace(HALVES, tile_n=128),
    "halves-deep": replace(HALVES, k_stages=4, v_stages=3),
    "halves-straight": replace(HALVES, q_stages=1),
}
forms = pytest.mark.parametrize("config", ["alone", "halves"])
both = pytest.mark.parametrize("config", ["alone", "pair", "halves", "halves-pair"])
configs = pytest.mark.parametrize("config", CONFIGS)


def inputs(*sizes, **more):
    """q, k and v."""
    return sm90_runs.inputs(*sizes, **more)[:3]


@forms
@pytest.mark.parametrize("nk", EDGES)
@pytest.mark.parametrize("nq", EDGES)
def test_lengths(nq, nk, config):
    """Every pair, with masks, dtypes, schedules and numbers of blocks that change from one to the
    next, half of them with race detection."""
    at = EDGES.index(nq) + 2 * EDGES.index(nk)
    name = ("dense", "causal", "checkerboard", "window")[at % 4]
    dtype = tuple(DTYPES)[nq % 2]
    with sim.options(seed=at, race=nk % 2 == 1):
        values = inputs(nq, nk, dtype=dtype)
        check(CONFIGS[config], mask_gallery(nq, nk)[name], *values, blocks=1 + at % 3)


AXES = axes.AXES | {
    "config": ("alone", "halves", "narrow"),
    "dtype": tuple(DTYPES),
    "head_dim": (16, 24, 72),
    "blocks": (1, 2, 3),
    "poison": (None, "k"),  # V that is NaN takes the LSE of its rows along
}
CASES = axes.design(AXES, config="narrow", head_dim=16, score="none")


def label(case):
    return axes.label(case, case["config"], case["dtype"], f"d{case['head_dim']}")


@pytest.mark.design
@pytest.mark.parametrize("seed", [pytest.param(n, id=label(c)) for n, c in enumerate(CASES)])
def test_every_axis(seed):
    """A covering design: see `axes`."""
    case = CASES[seed]
    cfg = CONFIGS[case["config"]]
    tile = cfg.tile_m, cfg.tile_n
    given = axes.problem(case, tile, case["head_dim"], DTYPES[case["dtype"]], seed)

    def by(function):
        return lambda mask, q, k, v, _, **how: function(
            cfg, mask, q, k, v, blocks=case["blocks"], **how
        )

    with sim.options(seed=seed):
        axes.check(by(run), by(check), case, cfg.tile_n, *given)


@configs
@pytest.mark.parametrize("name", ["causal", "dead-scattered", "global-local", "window", "dense"])
def test_configurations(name, config):
    cfg = CONFIGS[config]
    nq, nk = cfg.tile_m + 1, 2 * cfg.tile_n + 1
    mask = mask_gallery(nq, nk, batch=1)[name]
    check(cfg, mask, *inputs(nq, nk), blocks=2)


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [*product(("alone", "pair", "halves", "halves-pair"), (8, 64, 72, 128))],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(config, dtype, head_dim):
    """One panel that the head fills or does not, two of them with a ragged second."""
    nq, nk = CONFIGS[config].tile_m + 1, T + 1
    values = inputs(nq, nk, head_dim=head_dim, dtype=dtype)
    check(CONFIGS[config], mask_gallery(nq, nk)["butterfly-or-local-causal"], *values)


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("name", ["dead-first", "dead-last", "dead-keys", "empty", "one-row"])
@both
def test_rows_without_keys(config, name, blocks):
    """Whole row tiles without a key at either end, and blocks that find nothing to do."""
    n = 3 * CONFIGS[config].tile_m - 5
    gallery = mask_gallery(n, T) | {"one-row": masks.from_function(lambda q, _: q == n - 1, n, T)}
    with sim.options(seed=blocks, race=blocks == 2):
        check(CONFIGS[config], gallery[name], *inputs(n, T), blocks=blocks)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
@both
def test_scales(config, dtype, scale):
    n = T + 3
    check(CONFIGS[config], mask_gallery(n)["causal"], *inputs(n, dtype=dtype), scale=scale)


@pytest.mark.parametrize("nk", [1, T + 1])
@configs
def test_lse_of_a_single_score_of_zero_is_zero(config, nk):
    """Of the only key there is, and of one of a tile behind others that no row sees."""
    mask = masks.from_function(lambda _, kv: kv == nk - 1, 3, nk)
    q, k, v = inputs(3, nk)
    _, lse = run(CONFIGS[config], mask, q, k, v, scale=-0.0)
    assert not lse.any()
    check(CONFIGS[config], mask, q, k, v, scale=-0.0)


@pytest.mark.parametrize("head_dim", [72, 128])
@pytest.mark.parametrize("config", ["halves", "halves-pair", "halves-straight"])
@pytest.mark.parametrize("name", ["dense", "causal", "checkerboard", "dead-scattered"])
def test_halves_with_q_in_shared_memory(name, config, head_dim):
    """Rows of one tile and of several, beside each other; of heads too wide for registers."""
    cfg, seed = CONFIGS[config], len(name)
    nq, nk = 2 * cfg.tile_m + 1, 2 * T + 1
    q, k, v = inputs(nq, nk, head_dim=head_dim, dtype=tuple(DTYPES)[seed % 2])
    with sim.options(seed=seed, race=head_dim == 72):
        check(cfg, mask_gallery(nq, nk)[name], q, k, v, blocks=1 + seed % 2)


@forms
@pytest.mark.parametrize("factor", [3.0, 8.0])
def test_maximum_that_grows_from_tile_to_tile(factor, config):
    """Later keys are larger, so that O is rescaled in some rows and tiles and in others is not."""
    q, k, v = inputs(T, 4 * T, head_dim=64)
    k *= np.linspace(0.1, factor, 4 * T).astype(k.dtype)[:, None, None]
    check(CONFIGS[config], mask_gallery(T, 4 * T)["dense"], q, k, v)


@forms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("below", [14, 19, 22])
def test_weights_far_below_a_rows_largest_count(below, dtype, config):
    """One key has the weight 1, the others 2^-below, and values in proportion."""
    q, k, v = (np.zeros_like(x) for x in inputs(T, 3 * T, dtype=dtype))
    q[..., 0], k[:, T + 5, :, 0] = below * np.log(2.0) / 4, 4
    v[:] = 2.0 ** (below - 8)
    v[:, T + 5] = 1
    check(CONFIGS[config], masks.dense(T, 3 * T), q, k, v, scale=1.0)


LEAPS = {  # by so many powers of two, for the rows that get all; see `raise_scores`
    "30": ((T, 70),),
    "30-60": ((T // 2 + 3, 70), (2 * T, 210)),
    "118": ((T, 272),),
    "130": ((T + 9, 300),),
    "260-30": ((T, 600), (2 * T, 670)),
    "260-down-300": ((T // 2, 600), (T + 9, 0), (2 * T + 3, 1300)),
}


def test_scores_that_leap_at_every_tile_are_lost_once(monkeypatch):
    """After the first leap the next tile's scores are looked at before their weights."""
    again, make = [], recovery.make_scores_again

    def counted(cfg):
        compute = make(cfg)

        def scores_again(where, *rest):
            again.append(where[0])
            return compute(where, *rest)

        return scores_again

    monkeypatch.setattr(recovery, "make_scores_again", counted)
    q, k, v = inputs(T, 5 * T)
    sm90_runs.raise_scores(q, k, [(n * T, 300.0 * n) for n in range(1, 5)], 0.3)
    cfg = replace(CONFIGS["alone"], k_stages=5)  # of no other test: a kernel of its own
    sm90_runs.check(cfg, masks.dense(T, 5 * T), q, k, v, scale=0.3, yardstick=sm90_runs.precise)
    assert set(again) == {T}, again


@pytest.mark.parametrize("config", ["alone", "narrow", "halves"])
@pytest.mark.parametrize(("dtype", "scale"), [("float16", -0.3), ("bfloat16", 0.3)])
@pytest.mark.parametrize("leap", LEAPS)
def test_scores_that_leap(leap, scale, dtype, config):
    """Some rows of a warp leap so far that their weights are lost, some less, some not at all; in
    tiles that are full, that are an interval, that are bits; of a row of tiles that is ragged."""
    for at, name in enumerate(("dense", "window", "checkerboard")):
        q, k, v = inputs(T + 5, 3 * T - 7, dtype=dtype, seed=at)
        sm90_runs.raise_scores(q, k, LEAPS[leap], scale)
        mask = mask_gallery(T + 5, 3 * T - 7)[name]
        check(CONFIGS[config], mask, q, k, v, scale=scale, yardstick=sm90_runs.precise)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
@pytest.mark.parametrize("axes", [((0, 2, 1, 3), (1, 0, 2, 3)), ((1, 2, 0, 3), (0, 2, 1, 3))])
@forms
def test_scores_that_leap_in_other_heads_and_layouts(config, axes, heads):
    """What is computed once more comes from global memory."""
    q, k, v = inputs(2 * T + 5, 2 * T + 7, batch=2, heads=heads)
    sm90_runs.raise_scores(q, k, LEAPS["118"], -0.3)
    q, k = sm90_runs.ordered(q, *axes[0]), sm90_runs.ordered(k, *axes[1])
    mask = mask_gallery(2 * T + 5, 2 * T + 7, batch=2, heads=heads[0])["per-batch-per-head"]
    check(CONFIGS[config], mask, q, k, v, scale=-0.3, blocks=2, yardstick=sm90_runs.precise)


@forms
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("leap", [None, "30", "130", "260-down-300"])
def test_scores_that_are_no_numbers(leap, poison, config):
    """NaN and +∞ make NaN of their rows, −∞ is an absent key; the rows beside them stay within
    their budgets, and leap."""
    n, bad = CONFIGS[config].tile_m + 2 * T + 1, (3, T + 2, 2 * T + 1)
    q, k, v = inputs(n)
    if leap is not None:
        sm90_runs.raise_scores(q, k, LEAPS[leap], 0.3)
    k[:, bad, :, 1] = poison
    mask = mask_gallery(n)["window"]
    out, lse = run(CONFIGS[config], mask, q, k, v, scale=0.3)
    with np.errstate(invalid="ignore"):
        exact, exact_lse = reference.attention(q, k, v, mask, 0.3)
    hit = np.isnan(exact_lse)
    assert 0 < hit.sum() < hit.size
    np.testing.assert_array_equal(np.isnan(lse), hit)
    hidden = mask.dense() & ~(np.isin(np.arange(n), bad) & ~hit[0, 0, :, None])
    low, low_lse = sm90_runs.precise(q, np.nan_to_num(k, posinf=0, neginf=0), v, hidden, 0.3)
    rows = hit.transpose(0, 2, 1)
    assert np.isnan(out[rows]).all()
    testing.assert_within_reference(out[~rows], exact[~rows], low[~rows], name="out")
    testing.assert_within_reference(lse[~hit], exact_lse[~hit], low_lse[~hit], name="lse")


@forms
@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (1, 2, 0, 3), (2, 0, 1, 3)])
def test_layouts(axes, config):
    """Other orders of the axes in memory, for the inputs and for the output."""
    n, back = T + 1, np.argsort(axes)
    values = [sm90_runs.ordered(x, *axes) for x in inputs(n, batch=2)]
    out = np.full(np.array(values[0].shape)[list(axes)], np.nan, np.float16).transpose(back)
    check(CONFIGS[config], mask_gallery(n)["causal"], *values, out=out)


@configs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dense", "checkerboard", "dead-scattered"])
def test_saturated_softmax_gathers(name, dtype, config):
    """Bit for bit: no tolerance."""
    nq, nk = 70, 129
    words = code_word_oracle(nq, 16, nk, mask_gallery(nq, nk)[name], DTYPES[dtype])
    mask = mask_gallery(nq, nk)[name]
    out, lse = run(CONFIGS[config], mask, words.q, words.k, words.v, scale=words.scale)
    np.testing.assert_array_equal(out, words.out)
    np.testing.assert_array_equal(lse, words.lse.astype(np.float32))


@pytest.mark.parametrize("config", ["pair", "straight", "deep", "halves-pair", "halves-deep"])
@pytest.mark.parametrize("name", ["causal", "per-head"])
def test_result_does_not_depend_on_the_schedule(name, config):
    """Nor on the number of blocks: whatever order the tiles come in, the sums are the same."""
    cfg = CONFIGS[config]
    n = cfg.tile_m + T + 1
    mask, values, results = mask_gallery(n)[name], inputs(n, heads=(2, 1)), set()
    for seed in range(4):
        with sim.options(seed=seed):
            out, lse = check(cfg, mask, *values, blocks=1 + seed % 3)
        results.add((out.tobytes(), lse.tobytes()))
    assert len(results) == 1


@configs
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["causal", "dead-scattered"])
def test_no_races(name, seed, config):
    cfg = CONFIGS[config]
    n = cfg.tile_m + cfg.tile_n + 1
    with sim.options(race=True, seed=seed):
        check(cfg, mask_gallery(n)[name], *inputs(n), blocks=1 + seed)


def check_poisoned(cfg, mask, n, bad, poison):
    """Run with the keys ``bad`` and without."""
    q, k, v = inputs(n)
    hit = mask.dense()[:, bad].any(-1)
    clean_out, clean_lse = run(cfg, mask, q, k, v)
    k[:, bad] = v[:, bad] = poison
    out, lse = run(cfg, mask, q, k, v)
    np.testing.assert_array_equal(out[:, ~hit], clean_out[:, ~hit])
    np.testing.assert_array_equal(lse[..., ~hit], clean_lse[..., ~hit])
    assert np.isnan(out[:, hit]).all(axis=-1).all() or np.isinf(poison)


@both
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["window", "dead-scattered", "checkerboard"])
def test_one_poisoned_key(name, config, poison):
    """Rows that do not attend it keep their results bit for bit; the others show it."""
    n = CONFIGS[config].tile_m + 2 * T + 1
    check_poisoned(CONFIGS[config], mask_gallery(n)[name], n, [T + 2], poison)


@both
@pytest.mark.parametrize("name", poisoned_rows.MASKS)
@pytest.mark.parametrize("which", ["q", "k"])
def test_one_row_of_nan(which, name, config):
    """In every score of a row, or in one of it; V that is NaN takes the LSE of its rows along."""
    cfg = CONFIGS[config]
    n = cfg.tile_m + 2 * T + 1
    mask = mask_gallery(n)[name]
    poisoned_rows.check(
        lambda q, k, v, dout: run(cfg, mask, q, k, v), mask, sm90_runs.inputs(n), which, T + 2
    )


@pytest.mark.parametrize("config", ["words", "narrow"])
@pytest.mark.parametrize("name", ["dense", "causal", "window", "dead-scattered", "checkerboard"])
def test_poisoned_keys_in_a_word_that_is_not_full(name, config):
    """The last of a tile's words of keys has 16 of them; every kind of tile."""
    cfg = CONFIGS[config]
    n = max(cfg.tile_m, 2 * cfg.tile_n) + 5
    last = cfg.tile_n - 1
    for bad in ([last], [last - 15, cfg.tile_n, last + cfg.tile_n], [2 * cfg.tile_n + 1]):
        check_poisoned(cfg, mask_gallery(n)[name], n, bad, np.nan)


@forms
@pytest.mark.parametrize("name", ["padding", "dead-keys", "documents"])
def test_what_nothing_attends_may_hold_anything(name, config):
    n = 2 * T + 1
    mask, (q, k, v) = mask_gallery(n)[name], inputs(n, batch=2, heads=(2, 1))
    clean = run(CONFIGS[config], mask, q, k, v, blocks=2)
    keep = np.broadcast_to(mask.dense(), (2, 2, n, n))
    unseen = ~keep.any(axis=(1, 2))
    assert unseen.any()
    k[unseen], v[unseen] = np.nan, np.inf
    dirty = run(CONFIGS[config], mask, q, k, v, blocks=2)
    for a, b in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(a, b)
