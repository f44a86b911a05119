"""Caches of plans, decoders, ranks' plans and checks: a changed argument never finds another's."""

import dataclasses
import inspect

import numpy as np
import pytest
from cuda_arrays import DeviceArray
from keyed import check_cached

import masks
import nbflash
from nbflash import scores
from nbflash.distributed import rank_plan
from nbflash.distributed.sharding import Sharding
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.block_map import BlockMap
from nbflash.inputs.decode_problem import Cache
from nbflash.inputs.positions import Positions
from nbflash.inputs.problem import check_forward
from nbflash.planning import cache, decode_plan, dispatch
from nbflash.planning import plan as planning

SHAPE, N = (2, 24, 4, 8), 24
MASK, OTHER = masks.causal(N), masks.window(N, left=5, right=0)


def parameters(fn, *besides):
    return {*inspect.signature(fn).parameters, *besides} - {"self", "options"}


def array(shape=SHAPE, dtype=np.float32):
    return np.ones(shape, dtype)


def arrays_of(shape=SHAPE):
    """Others than `array`: of another size along each axis, dtype, layout and alignment."""
    sizes = [(*shape[:i], 2 * shape[i], *shape[i + 1 :]) for i in range(4)]
    others = [array(size) for size in sizes]
    others += [array(shape, np.float16), array(shape, np.float64)]
    others.append(array((shape[0], shape[2], shape[1], shape[3])).swapaxes(1, 2))
    others.append(array((shape[0], shape[1], shape[2], 2 * shape[3]))[..., : shape[3]])
    room = np.ones(4 * int(np.prod(shape)) + 1, np.uint8)
    others.append(room[1:].view(np.float32).reshape(shape))
    return others


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.setattr(cache, "plans", cache.PlanCache())
    return cache.plans


SCORED = scores.softcap(2.0)
CALL = {"q": array(), "k": array(), "v": array(), "mask": MASK, "causal": False, "window": None}
CALL |= {"scale": 0.5, "impl": "cpu", "score": SCORED, "dropout": 0.5}
CALLS = {
    **{name: arrays_of() for name in "qkv"},
    "mask": [OTHER, None, masks.per_head([MASK, OTHER, MASK, OTHER])],
    "causal": [True, 0],
    "window": [(4, 0), (5, 0), (4, None)],
    "scale": [0.25, np.float32(0.5), None, np.nextafter(0.5, 1)],
    "impl": ["auto", "reference"],
    "score": [scores.softcap(3.0), None, scores.compose(SCORED, SCORED)],
    "dropout": [0.25, 0.0, np.float64(0.5)],
}


def test_calls_of_attention(plans, monkeypatch):
    monkeypatch.setattr(planning, "plan_of", lambda spec, impl: [spec, impl])
    check_cached(planning.lookup, CALL, CALLS, names=parameters(planning.lookup))


def test_calls_of_block_maps(plans, monkeypatch):
    """All of their layout, where they are planned on the device."""
    monkeypatch.setattr(dispatch, "plans_on_device", lambda *_: True)

    class Reads(list):
        def reading(self, lists):
            return self

    monkeypatch.setattr(planning, "plan_of", lambda spec, impl: Reads([spec, impl]))

    def called(heads=4, width=2, block=(4, 4), within=None):
        rows = -(-N // block[0])
        indices = np.zeros((1, heads, rows, width), np.int32)
        given = BlockMap(indices, shape=(N, N), block=block, within=within)
        return planning.lookup(**CALL | {"mask": given, "causal": False})

    base = {"heads": 4, "width": 2, "block": (4, 4), "within": None}
    changes = {"heads": [2, 1], "width": [3], "block": [(4, 8), (8, 4)], "within": [MASK, OTHER]}
    check_cached(called, base, changes)


def test_what_a_check_refuses_is_not_found_behind_an_equal_value(plans):
    """1 == True and 0 == False, and other numbers have other types."""
    plan = planning.lookup(**CALL)
    assert planning.lookup(**CALL) is plan
    for name, value in (("causal", 0), ("scale", "0.5"), ("dropout", "0.5"), ("impl", b"cpu")):
        with pytest.raises(TypeError, match=name):
            planning.lookup(**CALL | {name: value})
    with pytest.raises(TypeError, match="causal"):
        planning.lookup(**CALL | {"causal": True} | {"causal": 1})


def _spec():
    problem = check_forward(array(), array(), array(), 0.5)
    return AttentionSpec(problem, MASK, SCORED, 0.5, Positions(np.arange(N), np.arange(N)))


def test_plans_of_specs(plans, monkeypatch):
    monkeypatch.setattr(dispatch, "choose", lambda impl, spec: impl)
    monkeypatch.setattr(planning, "AttentionPlan", lambda spec, impl: [spec, impl])
    spec = _spec()
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    problem = spec.problem
    problems = [
        dataclasses.replace(problem, **{field.name: ("another", getattr(problem, field.name))})
        for field in dataclasses.fields(problem)
    ]
    changes = {
        "problem": problems,
        "mask": [OTHER, None],
        "score": [None, scores.softcap(3.0)],
        "dropout": [0.25],
        "positions": [None, Positions(np.arange(N) + 1, np.arange(N))],
        "impl": ["simt", "reference"],
    }

    def made(impl, **given):
        return planning.plan_of(AttentionSpec(**given), impl)

    check_cached(made, {**values, "impl": "cpu"}, changes)


def _cached(shape, dtype=np.float32):
    return DeviceArray(shape, dtype, address=2**40)


def _device_arrays(shape, dtype=np.float32):
    """Of other sizes, dtype, strides, device and alignment."""
    yield from (_cached((*shape[:i], 2 * n, *shape[i + 1 :]), dtype) for i, n in enumerate(shape))
    yield _cached(shape, np.float16 if dtype != np.float16 else np.float32)
    own = _cached(shape, dtype).strides
    for i in range(len(shape)):
        strides = (*own[:i], 2 * own[i], *own[i + 1 :])
        yield DeviceArray(shape, dtype, strides=strides, address=2**40)
    yield DeviceArray(shape, dtype, device_id=1, address=2**40)
    yield DeviceArray(shape, dtype, address=2**40 + 8)


OF_CACHE = {"k_cache": (5, 16, 2, 8), "v_cache": (5, 16, 2, 8), "lengths": (2,)}
OF_CACHE |= {"block_table": (2, 3), "k_scale": (5, 16, 2), "v_scale": (5, 16, 2)}


def test_calls_of_decode(plans, cupy, monkeypatch):
    """Every array of a cache by itself, as the decoder's kernels are bound to their layouts."""
    assert set(OF_CACHE) == set(Cache._fields)
    monkeypatch.setattr(decode_plan, "checked", lambda *_: None)
    monkeypatch.setattr(decode_plan, "CudaDecoder", lambda *given: [*given])
    monkeypatch.setattr(dispatch, "choose_decode", lambda *_: "simt")
    base = {name: _cached(shape) for name, shape in OF_CACHE.items()}
    changes = {name: [None, *_device_arrays(shape)] for name, shape in OF_CACHE.items()}
    base |= {"q": _cached((2, 1, 4, 8)), "mask": None, "scale": 0.5, "impl": "auto"}
    base |= {"window": None, "score": None}
    changes |= {
        "q": [*_device_arrays((2, 1, 4, 8))],
        "mask": [MASK, OTHER],
        "scale": [0.25, np.float64(0.5), None],
        "impl": ["simt", "sm90"],
        "window": [(4, 0), (3, 0)],
        "score": [SCORED],
    }

    def key(q, mask, scale, impl, window, score, **of_cache):
        return decode_plan.lookup(q, Cache(**of_cache), mask, scale, impl, window, score)

    names = parameters(decode_plan.key_of, *Cache._fields) - {"cache"}
    check_cached(key, base, changes, names=names)


SHARDING = Sharding.of(MASK, 2, 4)
RANK = {"q": array(), "k": array(), "v": array(), "sharding": SHARDING, "rank": 0, "scale": 0.5}
RANK |= {"score": SCORED, "dropout": 0.5, "stages": 1, "split": "ranks", "impl": "cpu"}


def of_rank(q, k, v, sharding, rank, **options):
    """The arguments of a plan of a rank."""
    return q, k, v, sharding, rank, rank_plan.RankOptions(**options)


RANKS = {
    **{name: arrays_of() for name in "qkv"},
    "sharding": [Sharding.of(OTHER, 2, 4), Sharding.of(MASK, 3, 4), Sharding.of(MASK, 2, 8)],
    "rank": [1],
    "scale": [0.25, None, np.float64(0.5)],
    "score": [None, scores.softcap(3.0)],
    "dropout": [0.25, np.float64(0.5), 0.0],
    "stages": [2, None, True, 1.0],
    "split": ["heads"],
    "impl": ["auto", "reference"],
}


def test_plans_of_ranks(plans, monkeypatch):
    names = parameters(rank_plan.RankPlan, *rank_plan.RankOptions._fields)
    monkeypatch.setattr(rank_plan, "RankPlan", lambda *given: [*given])

    def called(**given):
        return rank_plan.rank_plan(*of_rank(**given))

    check_cached(called, RANK, RANKS, names=names)


def test_what_ranks_agree_on(plans):
    """A rank whose call differs says so; but for what each rank has or chooses for itself."""
    part, mask = array((2, 32, 4, 8)), masks.causal(64)
    base = RANK | {"q": part, "k": part, "v": part, "score": None, "dropout": 0.0}
    base["sharding"] = Sharding.of(mask, 2, 32)

    def note(seed=None, more=(("call", "attention"),), **changed):
        return rank_plan.RankPlan(*of_rank(**(base | changed))).note(seed, **dict(more))

    own, wide = note(), array((2, 32, 4, 8), np.float64)
    assert note() == own
    heads_kv, batch = array((2, 32, 2, 8)), array((1, 32, 4, 8))
    head_dim = array((2, 32, 4, 16))
    for changed in (
        {"q": batch, "k": batch, "v": batch},
        {"k": heads_kv, "v": heads_kv},
        {"q": array((2, 32, 8, 8))},
        {"q": head_dim, "k": head_dim, "v": head_dim},
        {"q": wide, "k": wide, "v": wide},
        {"sharding": Sharding.of(masks.window(64, left=40, right=0), 2, 32)},
        {"scale": 0.25},
        {"score": SCORED},
        {"dropout": 0.5},
        {"stages": None},
        {"split": "heads"},
        {"seed": (1, 2)},
        {"more": (("call", "backward"),)},
    ):
        assert note(**changed) != own, changed
    for changed in ({"rank": 1}, {"impl": "auto"}):
        assert note(**changed) == own, changed
    plan = rank_plan.RankPlan(*of_rank(**base))
    kinds = [{"call": "a"}, {"call": "b"}, {"call": "a", "x": 1}, {"call": "a", "x": 2}]
    notes = [plan.note(None, **kind) for kind in kinds] + [plan.note((1, 2), **kinds[0])]
    assert len(set(notes)) == 5
    assert notes[:4] == [plan.note(None, **kind) for kind in kinds]


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
def test_results_are_checked_again_where_they_are_others(name, plans):
    """After a call that was right, one with another array is checked by itself."""
    q, k, v = (array() for _ in range(3))
    plan = nbflash.plan(q, k, v, MASK, impl="cpu")
    out, lse = plan(q, k, v)
    given = {"dout": array(), "out": out, "lse": lse, "dlse": np.ones_like(lse)}
    right = plan.backward(given["dout"], q, k, v, out, lse, dlse=given["dlse"])

    def again(x):
        dout, out, lse, dlse = (given | {name: x}).values()
        return plan.backward(dout, q, k, v, out, lse, dlse=dlse)

    x = given[name]
    wrong = [x[:1], x[:, :1], x[:, :, :1], x.astype(np.float64), x.astype(np.float16)]
    for other in wrong:
        with pytest.raises((TypeError, ValueError), match=name):
            again(other)
    strided = np.ones((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]
    strided[...] = x
    if name in ("out", "lse"):
        with pytest.raises(ValueError, match=f"{name} must have a contiguous last axis"):
            again(strided)
        return
    for one, two in zip(again(strided), right, strict=True):
        np.testing.assert_array_equal(one, two)


def test_an_out_is_checked_again_where_it_is_another(plans):
    room = np.ones((2, 2 * N, 4, 8), np.float32)
    q, k, v = (array() for _ in range(3))
    plan = nbflash.plan(q, k, v, MASK, impl="cpu")
    right, _ = plan(q, k, v, out=array())
    frozen = array()
    frozen.flags.writeable = False
    for x in (*arrays_of()[:6], frozen):
        with pytest.raises((TypeError, ValueError), match="out"):
            plan(q, k, v, out=x)
    other = room.copy()
    for i in range(3):
        operands = [array(), array(), array()]
        operands[i] = room[:, :N]
        plan(*operands, out=other[:, 4 : 4 + N])
        with pytest.raises(ValueError, match="out"):
            plan(*operands, out=room[:, 4 : 4 + N])
    np.testing.assert_array_equal(plan(q, k, v, out=array())[0], right)
    behind = room.reshape(2, 2, N, 4, 8)[1]  # of the second sequence, where out has gaps
    plan(behind, k, v, out=array())
    with pytest.raises(ValueError, match="out"):
        plan(behind, k, v, out=room[:, :N])
