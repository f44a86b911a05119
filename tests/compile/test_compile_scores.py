"""Kernels with score functions: no spills that a plain kernel has not, no float64 by accident."""

import re
from dataclasses import replace

import numpy as np
import pytest
from assembly import assemble
from compiled import compile_ptx, report_of
from score_cases import NAMES, code_of, scores_for

from nbflash import scores
from nbflash.backends.simt.backward import bwd_simt_spec
from nbflash.backends.simt.configs import backward_configs, forward_config
from nbflash.backends.simt.forward import fwd_simt_spec
from nbflash.backends.sm90.backward import config as sm90_backward
from nbflash.backends.sm90.backward.dq_config import completed, dq_configs
from nbflash.backends.sm90.backward.dq_kernel import bwd_sm90_dq_spec
from nbflash.backends.sm90.backward.kernel import bwd_sm90_spec
from nbflash.backends.sm90.forward.config import forward_configs
from nbflash.backends.sm90.forward.kernel import fwd_sm90_spec
from nbflash.cuda import launch
from nbflash.distributed.placed_score import placed
from nbflash.inputs.positions import Positions

HOPPER = (9, 0)
LIMITS = {"vectors": True, "smem_limit": 227 * 1024}
# One's own function computes in float64, being Python, and may ask for registers.
OWN = tuple(name for name in NAMES if name != "custom")
SPILLS = {"bias": 40, "relative": 64, "custom": 352}


def simt_specs(dtype, head_dim, score):
    forward = forward_config(dtype, head_dim, cp_async=True, **LIMITS)
    specs = [fwd_simt_spec(replace(forward, score=score))]
    for deterministic in (False, True):
        configs = backward_configs(
            dtype, head_dim, deterministic=deterministic, vector_red=True, **LIMITS
        )
        specs += [bwd_simt_spec(replace(config, score=score)) for config in configs]
    return specs


@pytest.mark.parametrize(
    ("name", "head_dim"), [*((name, 64) for name in NAMES), ("softcap", 128), ("alibi", 128)]
)
def test_simt_kernels(name, head_dim):
    for spec in simt_specs("float32", head_dim, code_of(scores_for(100, 120)[name])):
        report = assemble(compile_ptx(spec, HOPPER), "sm_90a")
        assert report.spill_stores <= SPILLS.get(name, 0)
        assert ".local" not in report.ptx
        assert (".f64" in report.ptx) == (name not in OWN)


def spills_of(spec):
    """Bytes that a thread of a Hopper kernel stores for want of registers."""
    report = report_of(compile_ptx(spec, HOPPER), "sm_90a")
    # C7510 to C7520: ptxas waits for every single wgmma, or ignores setmaxnreg.
    assert re.findall(r"C75\d\d", report) == []
    return max(map(int, re.findall(r"(\d+) bytes spill stores", report)))


# Bytes that a thread stores where tiles are masked: one pass about what the plain one does.
HOPPER_SPILLS = {
    ("softcap", "one"): 72,
    ("softcap", "columns"): 4,
    ("alibi", "one"): 64,
    ("alibi", "dq"): 8,
}


def sm90_spec(kernel, dtype, head_dim, score):
    if kernel == "forward":
        return fwd_sm90_spec(forward_configs(dtype, head_dim, score=score)[0])
    if kernel == "one":
        config = sm90_backward.backward_configs(dtype, head_dim)[0]
        return bwd_sm90_spec(replace(config, score=score))
    if kernel == "columns":
        config = sm90_backward.columns_configs(dtype, head_dim)[0]
        return bwd_sm90_spec(replace(config, score=score))
    return bwd_sm90_dq_spec(completed(dq_configs(dtype, head_dim)[0], score))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kernel", ["forward", "one", "columns", "dq"])
@pytest.mark.parametrize("name", ["softcap", "alibi"])
def test_hopper_kernels(name, kernel, full):
    spec = sm90_spec(kernel, "bfloat16", 128, code_of(scores_for(100, 120)[name], "float16"))
    spec = replace(spec, config=replace(spec.config, full_tiles=full))
    assert spec.config.why_not() == []
    ptx = compile_ptx(spec, HOPPER)
    report = report_of(ptx, "sm_90a")
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", report)))
    assert spilled <= (0 if full else HOPPER_SPILLS.get((name, kernel), 0))
    # C7510 to C7520: ptxas waits for every single wgmma, or ignores setmaxnreg.
    assert re.findall(r"C75\d\d", report) == []
    assert ".f64" not in ptx
    assert ("tanh.approx.f32" in ptx) == (name == "softcap")


# In full tiles; where some are masked softcap would spill 904 bytes.
NARROW_SPILLS = {"softcap": (76, None), "alibi": (0, 68), "bias": (80, 84), "relative": (84, 96)}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("name", NARROW_SPILLS)
def test_one_pass_of_128_queries(name, full, dtype):
    """What narrow heads take."""
    code, most = code_of(scores_for(100, 120)[name], "float16"), NARROW_SPILLS[name][not full]
    config = replace(sm90_backward.backward_configs(dtype, 64)[0], score=code, full_tiles=full)
    assert config.tile_m == 128
    if most is None:
        assert re.search("128$", *config.why_not())
        return
    assert config.why_not() == []
    assert spills_of(bwd_sm90_spec(config)) <= most


@pytest.mark.parametrize("name", NARROW_SPILLS)
def test_one_pass_of_64_queries(name):
    code = code_of(scores_for(100, 120)[name], "float16")
    config = replace(sm90_backward.backward_configs("bfloat16", 64)[1], score=code)
    assert (config.tile_m, config.why_not()) == (64, [])
    assert spills_of(bwd_sm90_spec(config)) <= 12


# In full tiles; where some are masked.
COLUMNS_SPILLS = {"softcap": (4, 236), "alibi": (0, 120), "bias": (88, 432), "relative": (204, 628)}


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("name", COLUMNS_SPILLS)
def test_columns_of_64_keys(name, full):
    """At 128 columns; still faster than tiles of 128 keys, half of them dead, and with alibi even
    where none is.
    """
    code, most = code_of(scores_for(100, 120)[name], "float16"), COLUMNS_SPILLS[name][not full]
    config = replace(sm90_backward.columns_configs("bfloat16", 128)[1], score=code, full_tiles=full)
    assert (config.tile_n, config.why_not()) == (64, [])
    assert spills_of(bwd_sm90_spec(config)) <= most


@pytest.mark.parametrize("name", COLUMNS_SPILLS)
def test_rows_of_64_keys(name):
    code = code_of(scores_for(100, 120)[name], "float16")
    config = completed(dq_configs("bfloat16", 128)[1], code)
    assert (config.tile_n, config.why_not()) == (64, [])
    assert spills_of(bwd_sm90_dq_spec(config)) == 0


def test_softcap_and_dropout_by_columns():
    code = code_of(scores.softcap(30), "float16")
    config = replace(sm90_backward.columns_configs("bfloat16", 128)[0], score=code, dropout=True)
    report = report_of(compile_ptx(bwd_sm90_spec(config), HOPPER), "sm_90a")
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", report))) <= 4


SOFTCAPPED = [(d, i) for d in (64, 128, 192, 256) for i in range(2 if d <= 128 else 1)]


@pytest.mark.parametrize(("head_dim", "row"), SOFTCAPPED)
def test_softcap_by_halves(head_dim, row):
    """At every width, for masks of small blocks too; with dropout at the second row of each."""
    more = {"score": code_of(scores.softcap(30), "float16"), "dropout": row == 1}
    configs = forward_configs("bfloat16", head_dim, **more)
    assert all(config.halves and not config.why_not() for config in configs)
    report = report_of(compile_ptx(fwd_sm90_spec(configs[row]), HOPPER), "sm_90a")
    assert re.findall(r"C75\d\d|[1-9]\d* bytes (?:stack|spill)", report) == []


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("head_dim", [40, 64])
def test_alibi_of_narrow_heads(head_dim, row):
    """By a product where tiles are whole: the keys and registers of plain attention."""
    config = forward_configs("float16", head_dim, score=code_of(scores.alibi(0.1), "float16"))[row]
    assert config.ramp == (not config.halves)
    assert config == replace(forward_configs("float16", head_dim)[row], score=config.score)
    assert config.why_not() == []
    ptx = compile_ptx(fwd_sm90_spec(config), HOPPER)
    assert re.findall(r"C75\d\d|[1-9]\d* bytes (?:stack|spill)", report_of(ptx, "sm_90a")) == []
    assert ".f64" not in ptx


def _unknown(s, b, h, q_idx, kv_idx):
    return s + kv_idx.page


def _pair(s, b, h, q_idx, kv_idx):
    return s, h


@pytest.mark.parametrize(
    ("score", "match"),
    [
        (scores.custom(_unknown), r"score: _unknown, .*test_compile_scores.py:\d+ cannot be comp"),
        (scores.custom(_pair), r"score: _pair, .*test_compile_scores.py:\d+ must return a number"),
    ],
)
def test_what_cannot_be_compiled_is_named(score, match):
    with pytest.raises(TypeError, match=match):
        code_of(score)


_TABLE = np.ones(1, np.float32)


def _by_distance(s, b, h, q_idx, kv_idx):
    return s / (1 + abs(q_idx - kv_idx))


def _one_over_distance(s, b, h, q_idx, kv_idx):
    return 1 / (1 + abs(q_idx - kv_idx))


def test_a_function_of_ones_own_beside_one_with_two_parameters():
    """That of ALiBi is not compiled by itself: its derivative takes any number of them."""
    own = scores.custom(_by_distance, _one_over_distance)
    code = code_of(scores.compose(scores.alibi(np.array([0.1, 0.2])), own))
    assert [len(kinds) for kinds in code.kinds] == [2, 0]


def test_scores_of_a_part_of_a_sequence():
    """Functions that are jitted for a CPU, and given the places of a rank's tokens by arrays."""
    own = scores.custom(_by_distance, _one_over_distance)
    score = scores.compose(scores.softcap(3.0), scores.alibi(np.array([0.1, 0.2])), own)
    code = code_of(placed(score, Positions(np.arange(100), np.arange(120)), (200, 240)))
    assert [form is not None for form in code.forms] == [True, False, False]
    report = assemble(compile_ptx(simt_specs("float32", 64, code)[0], HOPPER), "sm_90a")
    assert report.spill_stores <= SPILLS["custom"]


def _from_table(s, b, h, q_idx, kv_idx):
    return s + _TABLE[0]


def test_kernels_of_functions_without_a_content_stay_out_of_the_disk_cache(monkeypatch, tmp_path):
    """An array may change without a trace."""
    monkeypatch.setenv("NBFLASH_CACHE_DIR", str(tmp_path))
    spec = simt_specs("float32", 64, code_of(scores.custom(_from_table)))[0]
    assert launch.cached_cubin(spec, HOPPER).startswith(b"\x7fELF")
    assert not list(tmp_path.rglob("*.cubin"))


def test_the_cap_is_an_argument():
    """Other parameters of the same types are the same kernel."""
    assert code_of(scores.softcap(30)) == code_of(scores.softcap(50))
    assert code_of(scores.softcap(30)) != code_of(scores.alibi(30))
