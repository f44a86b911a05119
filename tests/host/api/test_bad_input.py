"""Every mistake a caller can make raises a sentence that names it, before anything is written."""

import functools

import numpy as np
import pytest
from bad_input_cases import (
    BATCH,
    CASES,
    CONTIGUOUS,
    HEADS,
    HEADS_KV,
    KV_SHAPE,
    LSE_SHAPE,
    NK,
    NQ,
    Q_SHAPE,
    CudaInterface,
    D,
    misaligned,
    read_only,
    zeros,
)

import nbflash
from nbflash.backends.reference import ReferenceExecutor
from nbflash.testing import make_qkv, poisoned

FORWARD = functools.partial(nbflash.attention, impl="reference")
BACKWARD = functools.partial(nbflash.attention_backward, impl="reference")

# The checks of q, k, v, scale, mask and impl are the forward's: one case of each shows the wiring.
BACKWARD_CASES = {
    **{name: CASES[name] for name in ("q-list", "k-mixed", "heads-ratio", "q-misaligned")},
    **{name: CASES[name] for name in ("scale-nan", "causal-int", "mask-size", "impl-unknown")},
    "dout-list": ({"dout": [0.0]}, TypeError, "dout must be a NumPy or CuPy array, .* got list"),
    "dout-on-cuda": ({"dout": CudaInterface()}, TypeError, "dout is a .* in CUDA memory but q"),
    "dout-axes": ({"dout": zeros(NQ, HEADS, D)}, ValueError, "dout must have 4 axes"),
    "dout-shape": (
        {"dout": zeros(*KV_SHAPE)},
        ValueError,
        r"dout must have shape .* \(2, 6, 4, 8\), got \(2, 9, 2, 8\)",
    ),
    "dout-dtype": (
        {"dout": zeros(*Q_SHAPE, dtype=np.float64)},
        TypeError,
        "dout must have dtype float32, got float64",
    ),
    "dout-misaligned": ({"dout": misaligned(Q_SHAPE)}, ValueError, "dout must be aligned"),
    "out-shape": ({"out": zeros(BATCH, NQ + 1, HEADS, D)}, ValueError, "out must have shape"),
    "out-dtype": (
        {"out": zeros(*Q_SHAPE, dtype=np.float16)},
        TypeError,
        "out must have dtype float32, got float16",
    ),
    "out-none": ({"out": None}, TypeError, "out must be a NumPy or CuPy array, .* got NoneType"),
    "out-layout": ({"out": np.asfortranarray(zeros(*Q_SHAPE))}, ValueError, f"out {CONTIGUOUS}"),
    "lse-none": ({"lse": None}, TypeError, "lse must be a NumPy or CuPy array, .* got NoneType"),
    "lse-axes": ({"lse": zeros(BATCH, NQ)}, ValueError, r"lse must have 3 axes .* \(2, 6\)"),
    "lse-like-out": (
        {"lse": zeros(*Q_SHAPE)},
        ValueError,
        r"lse must have 3 axes .*\(2, 6, 4, 8\)",
    ),
    "lse-heads-last": (
        {"lse": zeros(BATCH, NQ, HEADS)},
        ValueError,
        r"lse must have shape \(batch, heads, seqlen_q\) = \(2, 4, 6\), got \(2, 6, 4\)",
    ),
    "lse-dtype": (
        {"lse": zeros(*LSE_SHAPE, dtype=np.float64)},
        TypeError,
        "lse must have dtype float32, got float64",
    ),
    "lse-layout": (
        {"lse": zeros(BATCH, NQ, HEADS).swapaxes(1, 2)},
        ValueError,
        f"lse {CONTIGUOUS}",
    ),
    "dlse-list": ({"dlse": [0.0]}, TypeError, "dlse must be a NumPy or CuPy array, .* got list"),
    "dlse-number": ({"dlse": 1.0}, TypeError, "dlse must be a NumPy or CuPy array, .* got float"),
    "dlse-on-cuda": ({"dlse": CudaInterface()}, TypeError, "dlse is a .* in CUDA memory but q"),
    "dlse-axes": ({"dlse": zeros(BATCH, NQ)}, ValueError, r"dlse must have 3 axes .* \(2, 6\)"),
    "dlse-heads-last": (
        {"dlse": zeros(BATCH, NQ, HEADS)},
        ValueError,
        r"dlse must have shape \(batch, heads, seqlen_q\) = \(2, 4, 6\), got \(2, 6, 4\)",
    ),
    "dlse-dtype": (
        {"dlse": zeros(*LSE_SHAPE, dtype=np.float64)},
        TypeError,
        "dlse must have dtype float32, got float64",
    ),
    "dlse-misaligned": ({"dlse": misaligned(LSE_SHAPE)}, ValueError, "dlse must be aligned"),
    "deterministic-int": ({"deterministic": 1}, TypeError, "deterministic must be True or False"),
    "deterministic-none": ({"deterministic": None}, TypeError, "deterministic must be .* got None"),
}


def inputs():
    q, k, v, dout = make_qkv(BATCH, NQ, NK, HEADS, HEADS_KV, D)
    return {"q": q, "k": k, "v": v}, dout


def bytes_of(arguments):
    return {name: x.tobytes() for name, x in arguments.items() if type(x) is np.ndarray and x.size}


@pytest.fixture(autouse=True)
def _nothing_is_launched(monkeypatch):
    def launched(*arguments):
        raise AssertionError("an implementation was launched")

    for method in ("forward", "backward"):
        monkeypatch.setattr(ReferenceExecutor, method, launched)


def assert_refused(function, arguments, error, match):
    before = bytes_of({n: x for n, x in arguments.items() if getattr(x, "size", 0) < 10**6})
    with pytest.raises(error, match=match):
        function(**arguments)
    assert {name: arguments[name].tobytes() for name in before} == before


@pytest.mark.parametrize(("changed", "error", "match"), CASES.values(), ids=CASES)
def test_attention_refuses(changed, error, match):
    arguments = {**inputs()[0], "out": poisoned(Q_SHAPE), **changed}
    assert_refused(FORWARD, arguments, error, match)
    assert "out" in changed or np.isnan(arguments["out"]).all()


@pytest.mark.parametrize(("changed", "error", "match"), BACKWARD_CASES.values(), ids=BACKWARD_CASES)
def test_attention_backward_refuses(changed, error, match):
    arrays, dout = inputs()
    lse = zeros(*LSE_SHAPE)
    arguments = {"dout": dout, **arrays, "out": zeros(*Q_SHAPE), "lse": lse, **changed}
    assert_refused(BACKWARD, arguments, error, match)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("offset", [0, 1, -1], ids=["same", "ahead", "behind"])
def test_out_must_not_overlap_an_input(monkeypatch, name, offset):
    """Shifted by one row they share all memory but a row; known layouts are checked again."""
    arrays = {x: zeros(BATCH, NQ, HEADS, D) for x in ("q", "k", "v")}
    memory = poisoned((Q_SHAPE[0] * NQ + 1, HEADS, D))
    first, second = (memory[i : i + BATCH * NQ].reshape(Q_SHAPE) for i in (0, 1))
    arrays[name], out = {0: (first, first), 1: (first, second), -1: (second, first)}[offset]
    arguments = {**arrays, "out": out}
    match = f"out must not overlap {name}; pass separate"
    assert_refused(FORWARD, arguments, ValueError, match)
    monkeypatch.setattr(ReferenceExecutor, "forward", lambda *arguments: None)
    FORWARD(**arrays, out=poisoned(Q_SHAPE))
    assert_refused(FORWARD, arguments, ValueError, match)


def test_a_mistake_is_found_after_a_good_call_of_the_same_layout(monkeypatch):
    """The good call is cached; 1 == True and 0 == False must not find its plan."""
    monkeypatch.setattr(ReferenceExecutor, "forward", lambda *arguments: None)
    arrays, _ = inputs()
    FORWARD(**arrays, causal=True, window=(1, 2), scale=1.0)
    good = {"causal": True, "window": (1, 2), "scale": 1.0}
    for changed, match in (
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"window": (1.0, 2)}, "window must be"),
        ({"window": (True, 2)}, "window must be"),
        ({"scale": True}, "scale must be a real number"),
    ):
        assert_refused(FORWARD, {**arrays, **good, **changed}, TypeError, match)
    misaligned_q = misaligned(Q_SHAPE)
    assert_refused(FORWARD, {**arrays, **good, "q": misaligned_q}, ValueError, "q must be aligned")
    writeable, fixed = poisoned(Q_SHAPE), read_only(Q_SHAPE)
    FORWARD(**arrays, **good, out=writeable)
    assert_refused(FORWARD, {**arrays, **good, "out": fixed}, ValueError, "out must be writeable")


PLAN_CALLS = {
    "batch": (
        dict.fromkeys("qkv", 1),
        r"the plan is for \(q \(2, 6, 4, 8\).* got \(q \(1, 6, 4, 8\)",
    ),
    "dtype": (dict.fromkeys("qkv", np.float64), r"the plan is for .*float32.* got .*float64"),
}


@pytest.mark.parametrize(("changed", "match"), PLAN_CALLS.values(), ids=PLAN_CALLS)
def test_a_plan_refuses_arrays_of_another_problem(changed, match):
    arrays, dout = inputs()
    plan = nbflash.plan(**arrays, impl="reference")
    other = {
        name: arrays[name][:how] if isinstance(how, int) else arrays[name].astype(how)
        for name, how in changed.items()
    }
    assert_refused(plan, {**other, "out": poisoned(Q_SHAPE)}, ValueError, match)
    assert_refused(plan.vjp, other, ValueError, match)
    backward = {"dout": dout, **other, "out": zeros(*Q_SHAPE), "lse": zeros(*LSE_SHAPE)}
    assert_refused(plan.backward, backward, ValueError, match)


def test_a_plan_refuses_a_flag_that_is_none():
    arrays, dout = inputs()
    plan = nbflash.plan(**arrays, impl="reference")
    arguments = {"dout": dout, **arrays, "out": zeros(*Q_SHAPE), "lse": zeros(*LSE_SHAPE)}
    match = "deterministic must be True or False, got None"
    assert_refused(plan.backward, {**arguments, "deterministic": None}, TypeError, match)
    match = "return_lse must be True or False, got None"
    assert_refused(plan.vjp, {**arrays, "return_lse": None}, TypeError, match)


def test_dlse_is_checked_after_a_good_call_without_it(monkeypatch):
    """The checks of a call are cached by what it gives."""
    arrays, dout = inputs()
    plan = nbflash.plan(**arrays, impl="reference")
    monkeypatch.setattr(ReferenceExecutor, "forward", lambda *arguments: None)
    monkeypatch.setattr(ReferenceExecutor, "backward", lambda *arguments: None)
    _, pullback = plan.vjp(**arrays)
    good = zeros(*LSE_SHAPE)
    pullback(dout)
    pullback(dout, good)
    match = r"dlse must have shape .* got \(2, 4, 5\)"
    assert_refused(pullback, {"dout": dout, "dlse": good[..., 1:]}, ValueError, match)
    wide = good.astype(np.float64)
    match = "dlse must have dtype float32, got float64"
    assert_refused(pullback, {"dout": dout, "dlse": wide}, TypeError, match)


@pytest.mark.parametrize(
    ("impl", "error", "match"),
    [("turbo", ValueError, "impl must be one of auto"), (1, TypeError, "impl must be a string")],
)
def test_why_not_refuses_an_unknown_implementation(impl, error, match):
    with pytest.raises(error, match=match):
        nbflash.why_not(impl, **inputs()[0])


def test_why_not_refuses_bad_arrays():
    with pytest.raises(TypeError, match="q must be a NumPy or CuPy array"):
        nbflash.why_not("cpu", [], [], [])
