"""What is equal, hashes alike and shares a plan: every argument counts, each one alone."""

import inspect

import numpy as np
import pytest
from scipy import sparse

import masks
from nbflash import scores
from nbflash.distributed.placed_score import placed
from nbflash.inputs.positions import Positions
from nbflash.planning.plan import lookup

N = 24
SEEN = np.arange(N * N).reshape(N, N) % 5 < 2
ARRAY = np.linspace(-1, 1, N * N, dtype=np.float32).reshape(N, N)


def attended(q, kv):
    return (q + kv) % 3 == 0


def attended_too(q, kv):
    return (q + kv) % 4 == 0


def halved(s, b, h, q, kv):
    return s / 2


def negated(s, b, h, q, kv):
    return -s


def slope(s, b, h, q, kv):
    return 0.5


def steeper(s, b, h, q, kv):
    return 1.0


def scaled(s, b, h, q, kv, factor):
    return s * factor


def of_factor(s, b, h, q, kv, factor):
    return s


# Of each generator: a call, and for each of its parameters another value.
MASKS = {
    "axial": ({"height": 4, "width": 6}, {"height": 6, "width": 4, "causal": True}),
    "bigbird": (
        {"n": 48, "block": 4, "n_random": 1},
        {"n": 44, "block": 6, "n_random": 2, "width": 2, "seed": 1, "causal": True},
    ),
    "block_diagonal": ({"n": N, "block": 4}, {"n": 20, "block": 6}),
    "butterfly": (
        {"n": 64, "block": 4},
        {"n": 60, "block": 8, "stages": 1, "radix": 4, "causal": True},
    ),
    "causal": ({"nq": N, "nk": N}, {"nq": 20, "nk": 28}),
    "chunked": ({"n": N, "chunk": 4}, {"n": 20, "chunk": 6, "causal": False, "nk": 28}),
    "dense": ({"nq": N, "nk": N}, {"nq": 20, "nk": 28}),
    "dilated": (
        {"n": N, "width": 2, "dilation": 2},
        {"n": 20, "width": 3, "dilation": 3, "causal": True},
    ),
    "documents": (
        {"lengths": [10, 14]},
        {"lengths": [14, 10], "lengths_k": [12, 12], "causal": True},
    ),
    "documents_from_cu_seqlens": (
        {"cu_seqlens": [0, 10, N]},
        {"cu_seqlens": [0, 14, N], "cu_seqlens_k": [0, 12, N], "causal": True},
    ),
    "fixed": (
        {"n": 48, "block": 4, "stride": 4},
        {"n": 44, "block": 6, "stride": 3, "summary": 2, "causal": True},
    ),
    "from_dense": ({"array": SEEN}, {"array": ~SEEN}),
    "from_function": (
        {"fn": attended, "nq": N, "nk": N},
        {"fn": attended_too, "nq": 20, "nk": 28},
    ),
    "from_scipy": (
        {"matrix": sparse.csr_array(SEEN[:6, :6]), "block": 4},
        {"matrix": sparse.csr_array(~SEEN[:6, :6]), "block": 3, "shape": (23, 24)},
    ),
    "global_local": (
        {"n": 48, "block": 4},
        {"n": 44, "block": 6, "n_global": 2, "width": 2, "causal": True},
    ),
    "local": ({"n": N, "block": 4}, {"n": 20, "block": 2, "width": 2, "causal": True}),
    "neighborhood": (
        {"shape": (6, 8), "kernel": 3},
        {"shape": (8, 6), "kernel": 5, "stride": 2, "dilation": 2},
    ),
    "padding": (
        {"lengths": [20, 18], "nq": N},
        {"lengths": [20, 16], "nq": 28, "nk": 28, "causal": True},
    ),
    "per_batch": (
        {"masks": [masks.causal(N), masks.dense(N)]},
        {"masks": [masks.dense(N), masks.causal(N)]},
    ),
    "per_head": (
        {"masks": [masks.causal(N), masks.dense(N)]},
        {"masks": [masks.dense(N), masks.causal(N)]},
    ),
    "prefix": ({"n": N, "prefix_len": 4}, {"n": 20, "prefix_len": 6, "nk": 28}),
    "random": (
        {"n": 48, "block": 4, "density": 0.3},
        {"n": 44, "block": 6, "density": 0.5, "seed": 1, "causal": True},
    ),
    "sinks": ({"n": N, "sink": 2, "window": 4}, {"n": 20, "sink": 3, "window": 5, "nk": 28}),
    "strided": (
        {"n": 48, "block": 4, "stride": 4},
        {"n": 44, "block": 6, "stride": 3, "width": 2, "causal": True},
    ),
    "toeplitz": (
        {"n": N, "offsets": (0, 5)},
        {"n": 20, "offsets": (0, 7), "block": 2, "causal": True},
    ),
    "tree": (
        {"parents": [-1, 0, 0, 1, 3]},
        {"parents": [-1, 0, 1, 1, 3], "prefix": 2, "nk": 9},
    ),
    "vertical_slash": (
        {"n": N, "verticals": [1], "slashes": [0, 3]},
        {"n": 20, "verticals": [2], "slashes": [0, 4]},
    ),
    "window": (
        {"nq": N, "nk": N, "left": 4, "right": 2},
        {"nq": 20, "nk": 28, "left": 5, "right": 3},
    ),
}
SCORES = {
    "softcap": ({"cap": 2.0}, {"cap": 3.0}),
    "alibi": ({"slopes": ARRAY[0, :2]}, {"slopes": ARRAY[1, :2]}),
    "relative": ({"table": ARRAY[:2, :5]}, {"table": ARRAY[2:4, :5]}),
    "bias": ({"array": ARRAY[None, None]}, {"array": ARRAY[None, None, ::-1]}),
    "custom": (
        {"fn": scaled, "grad": of_factor, "params": (2.0,), "param_grads": None},
        {"fn": of_factor, "grad": scaled, "params": (3.0,)},
    ),
    "compose": None,
}
# Make neither.
OTHERS = {"coverage", "load", "reorder", "restrict", "save", "check_score"}


def _changed(table):
    """Every generator with every parameter that is changed."""
    return [(name, parameter) for name, entry in table.items() if entry for parameter in entry[1]]


def test_every_generator_and_parameter_is_listed():
    for module, table in ((masks, MASKS), (scores, SCORES)):
        public = {x for x in dir(module) if inspect.isfunction(getattr(module, x)) and x[0] != "_"}
        own = {x for x in public if getattr(module, x).__module__.startswith(module.__name__)}
        assert own - OTHERS == set(table)
        for name, entry in table.items():
            if entry and name != "custom":
                assert set(entry[1]) == set(inspect.signature(getattr(module, name)).parameters)


@pytest.mark.parametrize(("name", "parameter"), _changed(MASKS))
def test_each_parameter_makes_another_mask(name, parameter):
    make, (call, changes) = getattr(masks, name), MASKS[name]
    one, same, other = make(**call), make(**call), make(**call | {parameter: changes[parameter]})
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert hash(one) != hash(other)
    assert one.shape != other.shape or (one.dense() != other.dense()).any()
    assert (~one == ~same, ~one == ~other) == (True, False)


# Of one class, shape and all other parts.
ALIKE = {
    "prefix-of-a-tree": [masks.tree([-1, 0], prefix, nk=6) for prefix in (2, 3)],
    "size-of-blocks": [
        masks.from_scipy(sparse.eye_array(2, format="csr"), block, shape=(6, 6)) for block in (3, 4)
    ],
}


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=ALIKE)
def test_masks_that_have_all_but_one_part_in_common(one, other):
    assert one.shape == other.shape
    assert one != other
    assert hash(one) != hash(other)
    assert (one.dense() != other.dense()).any()


@pytest.mark.parametrize(("name", "parameter"), _changed(SCORES))
def test_each_parameter_makes_another_score(name, parameter):
    make, (call, changes) = getattr(scores, name), SCORES[name]
    one, same, other = make(**call), make(**call), make(**call | {parameter: changes[parameter]})
    assert (one == same, hash(one) == hash(same)) == (True, True)
    assert (one == other, hash(one) == hash(other)) == (False, False)


def test_the_order_of_composed_scores_counts():
    cap, bias = scores.softcap(2.0), scores.bias(ARRAY[None, None])
    one, other = scores.compose(cap, bias), scores.compose(bias, cap)
    assert one == scores.compose(cap, bias)
    assert (one == other, hash(one) == hash(other)) == (False, False)


def test_a_function_is_the_same_with_the_same_gradient_alone():
    one, other = scores.custom(halved, slope), scores.custom(halved, steeper)
    assert (one == scores.custom(halved, slope), one == other) == (True, False)
    assert one != scores.custom(negated, slope)


def _arrays(batch=2, nq=N, nk=N, heads=4, heads_kv=2, head_dim=8, dtype=np.float32):
    q = np.zeros((batch, nq, heads, head_dim), dtype)
    k, v = np.zeros((2, batch, nk, heads_kv, head_dim), dtype)
    return {"q": q, "k": k, "v": v}


def _transposed(x):
    """The same shape in another memory layout."""
    return np.zeros((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype).swapaxes(1, 2)


BASE = {"mask": masks.causal(N), "causal": False, "window": None, "scale": 0.5, "impl": "cpu"}
CALLS = {
    "batch": _arrays(batch=3),
    "head_dim": _arrays(head_dim=16),
    "heads": _arrays(heads=6),
    "heads_kv": _arrays(heads_kv=1),
    "dtype": _arrays(dtype=np.float64),
    **{f"layout of {x}": {x: _transposed(_arrays()[x])} for x in "qkv"},
    "nq": _arrays(nq=20) | {"mask": masks.causal(20, N)},
    "nk": _arrays(nk=20) | {"mask": masks.causal(N, 20)},
    "mask": {"mask": masks.dense(N)},
    "no mask": {"mask": None},
    "causal": {"causal": True, "mask": masks.chunked(N, 4, causal=False)},
    "window": {"window": (4, 0)},
    "scale": {"scale": 0.25},
    "score": {"score": scores.softcap(2.0)},
    "another score": {"score": scores.softcap(3.0)},
    "dropout": {"dropout": 0.5},
    "less dropout": {"dropout": 0.25},
    "impl": {"impl": "auto"},
}


def test_a_call_is_planned_once():
    assert lookup(**_arrays(), **BASE) is lookup(**_arrays(), **BASE)
    for change in CALLS.values():
        assert lookup(**_arrays() | BASE | change) is lookup(**_arrays() | BASE | change)


def test_plans_differ_in_what_calls_differ():
    problems = {name: lookup(**_arrays() | BASE | change) for name, change in CALLS.items()}
    problems["base"] = lookup(**_arrays(), **BASE)
    by_plan = {}
    for name, plan in problems.items():
        by_plan.setdefault(id(plan), set()).add(name)
    together = {frozenset(names) for names in by_plan.values() if len(names) > 1}
    # ``auto`` is ``cpu`` here, and no mask is the dense one.
    assert together == {frozenset({"base", "impl"}), frozenset({"mask", "no mask"})}


def test_a_placed_score_knows_the_shape_of_the_whole():
    """ALiBi counts distances from its last query and key."""
    positions = Positions(np.arange(4), np.arange(4))
    one, other = (placed(scores.alibi(0.5), positions, shape) for shape in ((8, 8), (8, 10)))
    assert one.stages(4, 4)[0][2][2] == 0
    assert other.stages(4, 4)[0][2][2] == 2
    assert one != other
