"""The kernel of a score's gradients: no spills, no atomics where every score has its element."""

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from assembly import assemble
from compiled import compile_ptx
from score_cases import HEADS
from score_gradients import NAMES, learned_scores

import masks
from nbflash import scores
from nbflash.backends.simt import executor as simt
from nbflash.backends.simt import score_gradient_host as simt_score
from nbflash.backends.simt.configs import SimtBackwardConfig, backward_configs
from nbflash.backends.simt.score_gradient import ScoreBackwardConfig, dscore_simt_spec
from nbflash.cuda import launch, score_params
from nbflash.cuda.device import Gpu
from nbflash.inputs import arrays
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import check_forward

HOPPER, SM_75 = (9, 0), (7, 5)
SMEM = {HOPPER: 227 * 1024, SM_75: 64 * 1024}
TARGET = {HOPPER: "sm_90a", SM_75: "sm_75"}
# Python's numbers are float64, and distances are integers: to Numba their products are float64.
IN_FLOAT64 = ("alibi", "alibi-of-all", "custom", "composed")
ATOMIC = "red.relaxed.gpu.add.f32"


def problem_of(dtype, head_dim):
    q, k = np.zeros((2, 100, HEADS, head_dim), dtype), np.zeros((2, 120, HEADS, head_dim), dtype)
    return check_forward(q, k, k, None)


def spec_of(score, dtype="float32", head_dim=64, capability=HOPPER, dropout=False):
    problem = problem_of(dtype, head_dim)
    limits = {"vectors": True, "smem_limit": SMEM[capability], "vector_red": False}
    rows, _ = backward_configs(dtype, head_dim, deterministic=True, **limits)
    given = {f.name: getattr(rows, f.name) for f in fields(SimtBackwardConfig)}
    given |= {"score": score_params.prepare(score, problem, capability)[0], "dropout": dropout}
    parts = [part for parts in score.parts for part in parts]
    return dscore_simt_spec(
        ScoreBackwardConfig(
            **given,
            parts=score_params.part_functions(score, problem, capability),
            axes=tuple(len(part.shape) for part in parts),
            alone=tuple(part.alone(problem) for part in parts),
        )
    )


@pytest.mark.parametrize(
    ("name", "head_dim", "capability"),
    [
        *((name, 64, HOPPER) for name in NAMES),
        ("bias", 128, HOPPER),
        ("composed", 128, HOPPER),
        ("relative", 64, SM_75),
    ],
)
def test_kernel(name, head_dim, capability):
    spec = spec_of(learned_scores(100, 120, 2)[name], head_dim=head_dim, capability=capability)
    report = assemble(compile_ptx(spec, capability), TARGET[capability])
    assert (report.spill_stores, report.stack) == (0, 0)
    assert ".local" not in report.ptx
    assert (".f64" in report.ptx) == (name in IN_FLOAT64)
    assert (ATOMIC in report.ptx) == (name != "bias")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(dtype):
    spec = spec_of(learned_scores(100, 120, 2)["bias-of-heads"], dtype)
    report = assemble(compile_ptx(spec, HOPPER), "sm_90a")
    assert (report.spill_stores, report.stack) == (0, 0)


def test_dropout():
    """Philox is there where it is asked for, by its multiplier."""
    spec = spec_of(learned_scores(100, 120, 2)["bias"], dropout=True)
    report = assemble(compile_ptx(spec, HOPPER), "sm_90a")
    assert (report.spill_stores, report.stack) == (0, 0)
    assert str(0xD2511F53) in report.ptx


def test_the_disk_cache_knows_what_sums_are_of(monkeypatch, tmp_path):
    """By the functions and what is alone, not by where Python put them."""
    monkeypatch.setenv("NBFLASH_CACHE_DIR", str(tmp_path))
    made = learned_scores(100, 120, 2)
    for score, files in ((made["bias"], 1), (made["bias-of-heads"], 2), (made["custom"], 3)):
        spec = spec_of(score)
        assert "0x" not in repr(spec.config)
        assert launch.cached_cubin(spec, HOPPER).startswith(b"\x7fELF")
        assert len(list(tmp_path.rglob("*.cubin"))) == files


def test_which_function_learns_is_part_of_the_kernel():
    learned, cap, fixed = scores.alibi([0.3]), scores.softcap(2.0), scores.alibi(0.3)
    orders = (learned, cap, fixed), (fixed, cap, learned)
    first, second = (spec_of(scores.compose(*order)).config for order in orders)
    assert (first.score, first.axes) == (second.score, second.axes)
    assert repr(first) != repr(second)


def _plus(s, b, h, q_idx, kv_idx, table):
    return s + table[q_idx, kv_idx]


def _slope(s, b, h, q_idx, kv_idx, table):
    return 1.0


def _unknown(s, b, h, q_idx, kv_idx, table):
    return kv_idx.page, 1


@pytest.mark.parametrize(
    ("part", "match"),
    [
        (_unknown, r"score: _unknown, .*score_gradients.py:\d+ cannot be compiled"),
        (_slope, r"score: _slope, .*score_gradients.py:\d+ must return an index and a number"),
    ],
)
def test_what_cannot_be_compiled_is_named(part, match):
    score = scores.custom(_plus, _slope, (np.zeros((100, 120)),), (part,))
    with pytest.raises(TypeError, match=match):
        score_params.part_functions(score, problem_of("float32", 64), HOPPER)


class Array:
    """A NumPy array that says where it is as CuPy's do."""

    def __init__(self, x):
        self.x, self.data = x, SimpleNamespace(ptr=x.ctypes.data)
        self.shape, self.ndim, self.size, self.dtype = x.shape, x.ndim, x.size, x.dtype
        self.flags, self.fill = x.flags, x.fill
        self.strides, self.itemsize = x.strides, x.itemsize


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", ["bias", "custom", "composed"])
def test_the_arguments_of_a_launch(name, dropout, monkeypatch):
    """As many words as the signature has, each gradient with its address and its shape."""
    found = {}

    class Recorder:
        def __init__(self, spec, blocks, trailing, *of_device):
            self.spec, self.trailing = spec, list(trailing)

        def __call__(self, words, maps=(), lists=()):
            found[self.spec.name] = self.spec, list(words), self.trailing

    class Device(Gpu):
        smem_limit, capability, _id, _stream = 227 * 1024, HOPPER, 0, None
        cp_async = vector_red = True
        _no_state = 0

        def __init__(self):
            pass

        def empty(self, shape, dtype):
            return Array(np.empty(shape, dtype))

    monkeypatch.setattr(launch, "bind", Recorder)
    monkeypatch.setattr(simt, "cuda_device", lambda *_: Device())
    monkeypatch.setattr(arrays, "resident", lambda tables: [Array(np.asarray(x)) for x in tables])
    monkeypatch.setattr(arrays, "alignment", lambda x: 16)
    monkeypatch.setattr(arrays, "resident_params", lambda params: params_of(params))
    score, problem = learned_scores(100, 120, 2)[name], problem_of("float32", 64)
    spec = AttentionSpec(problem, masks.causal(100, 120), score, dropout)
    run = simt_score.SimtScoreBackward(spec)
    like_q, like_k = (Array(np.zeros((2, n, HEADS, 64), np.float32)) for n in (100, 120))
    lse = Array(np.zeros((2, HEADS, 100), np.float32))
    sums = [Array(np.ones(p.shape, np.float32)) for parts in score.parts for p in parts]
    run(like_q, like_q, like_k, like_k, like_q, lse, lse, sums, (1, 2))
    spec, words, trailing = found["nbflash_dscore_simt"]
    kinds = [word for kind in spec.signature for word in launch._words_of(kind)]
    assert len(words) + len(trailing) == len(kinds)
    places = [word for x in sums for word in (x.data.ptr, *x.shape)]
    assert words[-len(places) :] == places
    assert trailing[:5] == [100, 120, HEADS, 1, -(-100 // spec.config.tile_m)]
    assert not any(x.x.any() for x in sums)


def params_of(params):
    """Parameters on a device: arrays with addresses, the rest as it is."""
    if isinstance(params, tuple):
        return tuple(map(params_of, params))
    return Array(params) if params.ndim else params
