"""dlse in the simulator: merged partial attentions, garbage, and the planted fault of its sign."""

import ml_dtypes
import numpy as np
import pytest
import sm90_dq_runs
from merged_parts import check, check_merge, check_sink
from mutants import Mutant, mutated_modules
from simt_runs import DTYPES
from sm90_bwd_runs import ALONE, BROAD, COLUMN, SHARED, TALL, run
from sm90_bwd_runs import check as check_sm90

import nbflash.backends.cpu.passes
from nbflash import reference
from nbflash.backends.sm90.backward import row_statistics as bwd_sm90_rows
from nbflash.cuda import simulator as sim
from nbflash.schedule.tile_schedule import TileSchedule
from nbflash.testing import make_qkv, mask_gallery, poisoned

T = 64
CONFIGS = {"alone": ALONE, "tall": TALL, "broad": BROAD, "column": COLUMN, "shared": SHARED}
CAUSAL, DEAD = "causal", "dead-scattered"


def vjp_of_simt(inputs, scale=None, *, deterministic=False):
    q, k, v, _ = inputs

    def vjp(part):
        plan = nbflash.plan(q, k, v, part, scale=scale, impl="simt")
        results, pullback = plan.vjp(q, k, v, return_lse=True)
        return results, lambda dout, dlse: pullback(dout, dlse, deterministic=deterministic)

    return vjp


def gradients_of(cfg, mask, inputs, **more):
    """In one pass; or dQ by rows, which leaves the statistics for dK and dV by columns."""
    if cfg.with_dq:
        return run(cfg, mask, inputs, **more)
    stats = sm90_dq_runs.statistics_for(sm90_dq_runs.ALONE, inputs[0])
    dq = sm90_dq_runs.run(sm90_dq_runs.ALONE, mask, inputs, stats=stats, **more)
    return dq, *run(cfg, mask, inputs, stats=stats, **more)


def vjp_of_sm90(inputs, cfg, scale=None, **more):
    """The forward is the reference's, rounded."""
    q, k, v, _ = inputs

    def vjp(part):
        out, lse = reference.attention(q, k, v, part, scale)
        results = out.astype(q.dtype), lse.astype(np.float32)

        def pullback(dout, dlse):
            values = q, k, v, dout
            options = {"scale": scale, "results": results, "dlse": dlse}
            return gradients_of(cfg, part, values, **options, **more)

        return results, pullback

    return vjp


@pytest.mark.parametrize(
    ("name", "shape", "cut", "heads", "head_dim", "dtype", "deterministic"),
    [
        (CAUSAL, (5, 9), 4, (1, 1), 8, "float32", False),
        (DEAD, (9, 5), 2, (2, 1), 3, "float16", True),
        ("window", (3, 7), 6, (2, 1), 16, "bfloat16", False),
        ("per-batch-per-head", (4, 6), 3, (2, 2), 5, "float64", True),
        ("dense", (1, 2), 1, (3, 1), 8, "float64", False),
        (CAUSAL, (70, 75), 37, (2, 1), 8, "float32", True),
    ],
)
def test_simt(name, shape, cut, heads, head_dim, dtype, deterministic):
    mask = mask_gallery(*shape, heads=heads[0])[name]
    inputs = make_qkv(mask.batch or 1, *shape, *heads, head_dim, DTYPES[dtype])
    check(vjp_of_simt(inputs, -0.6, deterministic=deterministic), mask, inputs, cut, scale=-0.6)


@pytest.mark.parametrize("of_simt", [True, False], ids=["simt", "sm90"])
def test_merge_and_sink(of_simt):
    """Rows that see one part alone, or nothing but the sink."""
    mask, inputs = mask_gallery(9, 5)[DEAD], make_qkv(1, 9, 5, 2, 1, 16, np.float16)
    vjp = vjp_of_simt(inputs) if of_simt else vjp_of_sm90(inputs, ALONE)
    check_merge(vjp, mask, inputs, 2)
    check_sink(vjp, mask, inputs, np.float32([-0.5, 2]))


@pytest.mark.parametrize(
    ("name", "shape", "cut", "heads", "config", "dtype"),
    [
        (CAUSAL, (1, 2), 1, (1, 1), "alone", np.float16),
        (CAUSAL, (5, 9), 7, (2, 1), "alone", ml_dtypes.bfloat16),
        (DEAD, (T + 3, T - 1), 20, (4, 2), "alone", np.float16),
        ("checkerboard", (T, T + 1), T, (3, 1), "alone", np.float16),
        (DEAD, (130, T + 9), 30, (1, 1), "tall", np.float16),
        (CAUSAL, (T + 1, T + 1), 40, (1, 1), "broad", ml_dtypes.bfloat16),
        (CAUSAL, (1, 2), 1, (1, 1), "column", ml_dtypes.bfloat16),
        (DEAD, (T + 3, T - 1), 20, (4, 2), "column", np.float16),
        ("window", (T + 1, T + 9), 40, (1, 1), "shared", np.float16),
    ],
)
def test_sm90(name, shape, cut, heads, config, dtype):
    cfg, mask = CONFIGS[config], mask_gallery(*shape)[name]
    inputs = make_qkv(1, *shape, *heads, cfg.head_dim, dtype)
    check(vjp_of_sm90(inputs, cfg, 0.4, blocks=2), mask, inputs, cut, scale=0.4)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_sm90_reads_any_layout_of_dlse(order):
    mask, inputs = mask_gallery(T + 1)[CAUSAL], make_qkv(2, T + 1, T + 1, 2, 1, 16, np.float16)
    dlse = np.random.default_rng(0).standard_normal((2, 2, T + 1)).astype(np.float32)
    moved = np.ascontiguousarray(dlse.transpose(order)).transpose(np.argsort(order))
    with sim.options(race=True):
        check_sm90(ALONE, mask, inputs, dlse=moved)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["window", DEAD, "checkerboard", "dense"])
@pytest.mark.parametrize("config", ["alone", "column"])
def test_one_poisoned_row(config, name, poison):
    """It reaches dq of its row and dk of what the row attends; all else, every dv, stays as it is,
    bit for bit."""
    n, bad = 2 * T + 1, T + 2
    mask, inputs = mask_gallery(n)[name], make_qkv(1, n, n, 1, 1, 16, np.float16)
    keys = mask.dense()[bad]
    dlse = np.random.default_rng(0).standard_normal((1, 1, n)).astype(np.float32)
    before = gradients_of(CONFIGS[config], mask, inputs, dlse=dlse)
    dlse[..., bad] = poison
    after = gradients_of(CONFIGS[config], mask, inputs, dlse=dlse)
    hits = (np.arange(n) == bad) & keys.any(), keys, np.zeros(n, bool)
    for a, b, hit in zip(after, before, hits, strict=True):
        np.testing.assert_array_equal(a[:, ~hit], b[:, ~hit])
        assert not np.isfinite(a[:, hit]).any()


def vjp_of_reference(inputs, scale, sign):
    q, k, v, _ = inputs
    fault = Mutant("sign of dlse", "delta = delta - np", f"delta = delta {sign} np")
    name = reference.__name__
    backward = mutated_modules(name, fault, ())[name].attention_backward

    def vjp(part):
        results = reference.attention(q, k, v, part, scale)
        return results, lambda dout, dlse: backward(dout, q, k, v, part, scale, dlse)

    return vjp


def vjp_of_cpu(inputs, scale, sign):
    q, k, v, _ = inputs
    fault = Mutant("sign of dlse", "dout, out) - dlse", f"dout, out) {sign} dlse")
    name = nbflash.backends.cpu.passes.__name__
    cpu = mutated_modules(name, fault, ())[name]

    def vjp(part):
        schedule = TileSchedule.from_mask(part, 16, 16)
        results = poisoned(q.shape, q.dtype), poisoned((q.shape[0], q.shape[2], q.shape[1]))
        cpu.forward(q, k, v, *results, schedule, scale)

        def pullback(dout, dlse):
            gradients = [poisoned(x.shape, x.dtype) for x in (q, k, v)]
            cpu.backward(dout, q, k, v, *results, dlse, *gradients, schedule, scale)
            return gradients

        return results, pullback

    return vjp


def vjp_of_rebuilt_sm90(inputs, scale, sign):
    name = bwd_sm90_rows.__name__
    fault = Mutant("sign of dlse", "gradient - x", f"-(x {sign} gradient)")
    statistics = mutated_modules(name, fault, ())[name].statistics_sm90_spec
    return vjp_of_sm90(inputs, ALONE, scale, statistics=statistics)


@pytest.mark.parametrize("made", [vjp_of_reference, vjp_of_cpu, vjp_of_rebuilt_sm90])
def test_sign_of_dlse(made):
    """With the right one the same case passes; the fault of simt is in `mutants_bwd`."""
    mask, inputs = mask_gallery(9, 20)[CAUSAL], make_qkv(1, 9, 20, 2, 1, 16, np.float16)
    check(made(inputs, 0.3, "-"), mask, inputs, 12, scale=0.3)
    with pytest.raises(AssertionError, match="dq"):
        check(made(inputs, 0.3, "+"), mask, inputs, 12, scale=0.3)


@pytest.mark.design
@pytest.mark.parametrize("impl", ["simt", "sm80", "sm90"])
def test_an_lse_with_gaps(impl):
    q, k, v, dout = make_qkv(1, 9, 12, 2, 1, 8, np.float16)
    out, lse = nbflash.attention(q, k, v, impl=impl, return_lse=True)
    gaps = poisoned((1, 2, 14), np.float32)[..., :9]
    gaps[...] = lse
    both = [
        nbflash.attention_backward(dout, q, k, v, out, x, impl=impl, deterministic=True)
        for x in (lse, gaps)
    ]
    for want, got in zip(*both, strict=True):
        np.testing.assert_array_equal(got, want)
