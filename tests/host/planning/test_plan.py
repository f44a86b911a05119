"""plan and the cache behind it."""

import copy
import functools
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
from api_calls import LAYOUTS, by_impl, heads_first, run_all
from cuda_arrays import DeviceArray, ForeignByDLPack

import masks
import nbflash
from nbflash import scores
from nbflash.backends.registry import BACKENDS
from nbflash.cuda.collector import collector_off
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import check_forward
from nbflash.planning import cache, dispatch
from nbflash.planning import plan as planning
from nbflash.testing import make_qkv, poisoned


@by_impl
def test_plan_gives_the_results_of_the_functions(impl):
    q, k, v, dout = make_qkv(2, 45, 37, 4, 2, 8)
    mask = masks.from_dense(np.random.default_rng(3).random((45, 37)) < 0.4)
    options = {"causal": True, "window": (9, None), "scale": 0.7}
    expected = run_all(impl, q, k, v, dout, mask, **options)
    plan = nbflash.plan(q, k, v, mask, impl=impl, **options)
    target = poisoned(q.shape)
    out, lse = plan(q, k, v, out=target)
    assert out is target
    out_by_vjp, pullback = plan.vjp(q, k, v)
    np.testing.assert_array_equal(out_by_vjp, out)
    both, pullback_of_both = plan.vjp(q, k, v, return_lse=True)
    for x, y in zip(both, (out, lse), strict=True):
        np.testing.assert_array_equal(x, y)
    for deterministic in (False, True):
        for gradients in (
            plan.backward(dout, q, k, v, out, lse, deterministic=deterministic),
            pullback(dout, deterministic=deterministic),
            pullback_of_both(dout, np.zeros_like(lse), deterministic=deterministic),
        ):
            for x, y in zip((out, lse, *gradients), expected, strict=True):
                np.testing.assert_array_equal(x, y)
    with pytest.raises(TypeError, match="deterministic must be"):
        pullback(dout, deterministic=1)


@by_impl
def test_plan_serves_other_layouts(impl):
    q, k, v, _ = make_qkv(2, 45, 37, 4, 2, 8)
    plan = nbflash.plan(q, k, v, impl=impl)
    expected, _ = plan(q, k, v)
    for layout in LAYOUTS:
        for _ in range(2):
            np.testing.assert_array_equal(plan(*map(layout, (q, k, v)))[0], expected)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_another_layout_of_one_array_is_planned_again(name):
    given = dict(zip("qkv", make_qkv(2, 45, 37, 4, 2, 8), strict=False))
    plan = nbflash.plan(**given, impl="cpu")
    assert plan._matching(**given) is plan
    x = given[name]
    given[name] = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    other = plan._matching(**given)
    assert other.problem == check_forward(**given, scale=plan.problem.scale)
    assert other.problem != plan.problem


def test_a_layout_is_checked_once(monkeypatch):
    """Other arrays of the same form are taken as they are."""
    checked, inputs = [], [make_qkv(1, 20, 20, 2, 1, 8, seed=seed)[:3] for seed in range(2)]
    plan = nbflash.plan(*inputs[0])
    real = planning.check_forward
    monkeypatch.setattr(planning, "check_forward", lambda *x: checked.append(x) or real(*x))
    for arrays in (*inputs, *inputs):
        plan(*arrays)
    assert len(checked) <= 1


def test_equal_calls_share_a_plan():
    q, k, v, _ = make_qkv(2, 40, 40, 4, 2, 8)
    make = functools.partial(nbflash.plan, impl="reference")
    plan = make(q, k, v, causal=True)
    assert make(q + 1, k, v, causal=True) is plan
    assert make(q, k, v, masks.causal(40)) is plan
    assert make(q, k, v, causal=np.True_) is plan
    assert make(q, k, v, causal=True, scale=8**-0.5) is plan
    others = (
        make(q, k, v),
        make(q, k, v, causal=True, scale=0.5),
        make(q[:1], k[:1], v[:1], causal=True),
        make(*(x.astype(np.float64) for x in (q, k, v)), causal=True),
        make(heads_first(q), k, v, causal=True),
        nbflash.plan(q, k, v, causal=True, impl="cpu"),
    )
    assert len({plan, *others}) == 7


def test_plans_are_forgotten_when_there_are_too_many(monkeypatch):
    """A plan is known by its call and by its problem, so four entries are two plans."""
    monkeypatch.setattr(cache, "plans", cache.PlanCache(4))
    q, k, v, _ = make_qkv(1, 40, 40, 1, 1, 8)
    make = functools.partial(nbflash.plan, q, k, v, impl="reference")
    first, second = make(scale=1.0), make(scale=2.0)
    assert make(scale=1.0) is first
    assert make(scale=2.0) is second
    make(scale=3.0)
    make(scale=4.0)
    assert make(scale=1.0) is not first


def test_cache_forgets_what_was_used_longest_ago():
    few = cache.Cache(2)
    few.put("a", 1)
    few.put("b", 2)
    assert few.get("a") == 1
    few.put("c", 3)
    assert [few.get(key) for key in "abc"] == [1, None, 3]


def test_cache_holds_256_items_unless_told_otherwise():
    for made in (cache.Cache(), cache.PlanCache()):
        for key in range(257):
            made.put(key, None if key else "first")
        assert (len(made), made.get(0)) == (256, None)
        assert 1 in made._items


def test_caches_are_cleared_and_kept_alive_only_if_they_ask_for_it():
    own, of_all = cache.Cache(), cache.Cache(clearable=True)
    for made in (own, of_all):
        made.put("a", 1)
    nbflash.clear_cache()
    assert (own.get("a"), of_all.get("a")) == (1, None)
    cache._clearable.remove(of_all)
    found = weakref.ref(own)
    del own, made
    gc.collect()
    assert found() is None


@pytest.fixture
def plans(monkeypatch):
    """An empty cache of plans."""
    plans = cache.PlanCache()
    monkeypatch.setattr(cache, "plans", plans)
    return plans


def test_a_class_of_arrays_holds_no_memory():
    """As a decoder holds CuPy's, which makes arrays; it has their methods."""
    assert cache.buffers_of([ForeignByDLPack, np.ndarray]) == {}


def test_arrays_of_other_libraries_are_not_asked(cupy):
    """A function closes over one, say, that has no address as CuPy's have, or none any more."""
    deleted, own = ForeignByDLPack(None), DeviceArray((3, 4))
    assert cache.buffers_of(lambda: (deleted, own)) == {("device", own.data.ptr): ("device", 48)}


def test_cache_keeps_to_its_bytes(plans):
    """What several items share counts once, and what grew is measured again."""
    nbflash.set_cache_limit(host=800)
    shared, grows = np.zeros(40), {"x": None}
    plans.put("a", (shared, np.zeros(10)[2:5]))
    plans.put("b", lambda: shared)
    plans.put("c", grows)
    assert nbflash.cache_info() == (3, 400, 0, 800, 2**28)
    grows["x"] = np.zeros(60)
    assert plans.get("c") is grows
    assert nbflash.cache_info().host_bytes == 880
    plans.put("d", None)
    assert [plans.get(key) is None for key in "abc"] == [True, False, False]
    assert nbflash.cache_info().host_bytes == 800
    nbflash.set_cache_limit(host=479)
    assert nbflash.cache_info()[:2] == (1, 480)
    nbflash.clear_cache()
    assert nbflash.cache_info() == (0, 0, 0, 479, 2**28)


def test_what_stood_under_a_key_counts_no_more(plans):
    """Two threads may make the same plan at once."""
    for n in (8, 16):
        plans.put("key", np.zeros(n))
    assert nbflash.cache_info()[:2] == (1, 128)


def test_plans_of_large_masks_are_forgotten_first(plans):
    """Each call has a mask of its own: the cache does not hold on to them all."""
    nbflash.set_cache_limit(host=3 * 2**18)
    q, k, v, dout = make_qkv(1, 1024, 1024, 1, 1, 8)
    rng, kept = np.random.default_rng(0), []
    for _ in range(4):
        mask = masks.from_dense(rng.random((1024, 1024)) < 0.1)
        plan = nbflash.plan(q, k, v, mask, impl="cpu")
        _, pullback = plan.vjp(q, k, v)
        pullback(dout)
        kept.append(weakref.ref(plan))
        del plan, pullback, mask
    gc.collect()
    assert [plan() is None for plan in kept] == [True, True, True, False]
    # The mask, its tiles, and those of the schedule, at the least.
    assert 3 * 1024 * 1024 // 8 < nbflash.cache_info().host_bytes < 3 * 2**18


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_a_plan_that_is_forgotten_gives_its_memory_back_at_once(impl, plans):
    """Without the collector of cycles, which knows nothing of CUDA memory."""
    q, k, v, dout = make_qkv(1, 40, 40, 1, 1, 8)
    with collector_off():
        plan = nbflash.plan(q, k, v, causal=True, impl=impl)
        out, lse = plan(q, k, v)
        plan.backward(dout, q, k, v, out, lse)
        found = weakref.ref(plan)
        nbflash.clear_cache()
        del plan
        assert found() is None


def test_plans_of_large_scores_are_forgotten_first(plans):
    """Each step of training has a score of its own: the cache does not hold on to them all."""
    nbflash.set_cache_limit(host=3 * 40 * 40 * 8)
    q, k, v, _ = make_qkv(1, 40, 40, 1, 1, 8)
    make = functools.partial(nbflash.plan, q, k, v, impl="reference")
    biases = [scores.bias(np.full((1, 1, 40, 40), float(step))) for step in range(3)]
    first, second, third = (make(score=bias) for bias in biases)
    assert make(score=biases[2]) is third
    assert make(score=biases[1]) is second
    assert make(score=biases[0]) is not first
    table = scores.relative(np.zeros((1, 3)))
    assert scores.compose(table, biases[0]).nbytes == 3 * 8 + 40 * 40 * 8


def test_limits_are_set_one_by_one(plans):
    default = 2**28
    assert nbflash.cache_info() == (0, 0, 0, default, default)
    nbflash.set_cache_limit(device=np.int64(7))
    assert nbflash.cache_info()[3:] == (default, 7)
    nbflash.set_cache_limit(host=0)
    assert nbflash.cache_info()[3:] == (0, 7)
    nbflash.set_cache_limit(host=5, device=0)
    assert nbflash.cache_info()[3:] == (5, 0)
    nbflash.set_cache_limit()
    assert nbflash.cache_info()[3:] == (5, 0)


@pytest.mark.parametrize("name", ["host", "device"])
def test_a_limit_is_a_number_of_bytes(name):
    for wrong in (1.5, True):
        with pytest.raises(TypeError, match=f"{name} must be an integer, a number of bytes, got"):
            nbflash.set_cache_limit(**{name: wrong})
    with pytest.raises(ValueError, match=f"{name} must be at least 0 bytes, got -1"):
        nbflash.set_cache_limit(**{name: -1})


def test_what_keeps_an_implementation_from_running_is_asked_of_the_first_device(monkeypatch):
    kind = type(BACKENDS["simt"])
    monkeypatch.setattr(kind, "why_not_here", lambda self, device_id: [f"none of {device_id}"])
    assert dispatch.why_not_here("simt") == ["none of 0"]
    assert dispatch.why_not_here("simt", 3) == ["none of 3"]


def test_threads_share_plans():
    q, k, v, _ = make_qkv(1, 70, 70, 2, 1, 8)
    expected = [nbflash.attention(q, k, v, window=(w, 0), impl="reference") for w in range(8)]
    wrong = []

    def work():
        for w in range(8):
            got = nbflash.attention(q, k, v, window=(w, 0), impl="reference")
            if not np.array_equal(got, expected[w]):
                wrong.append(w)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_plan_tells_what_it_is():
    q, k, v, _ = make_qkv(2, 40, 50, 4, 2, 8)
    assert repr(nbflash.plan(q, k, v, causal=True, impl="cpu")) == (
        "AttentionPlan(cpu: q (2, 40, 4, 8), k and v (2, 50, 2, 8), float32, scale 0.3536, cpu, "
        f"{nbflash.plan(q, k, v, causal=True).schedule!r})"
    )
    dense = nbflash.plan(q, k, v, impl="reference")
    assert dense.schedule is None
    assert repr(dense).startswith("AttentionPlan(reference: q (2, 40, 4, 8)")
    assert isinstance(nbflash.plan(q, k, v).schedule, nbflash.TileSchedule)


class Device:
    """A device's context, and whether it is entered."""

    entered = 0

    def __enter__(self):
        self.entered += 1

    def __exit__(self, *_):
        self.entered -= 1


@pytest.mark.parametrize("maker", ["prepare", "prepare_score_backward"])
def test_executors_are_made_on_the_device_of_the_arrays(monkeypatch, maker):
    """What they keep in its memory would lie on the current one otherwise."""
    device, made, right = Device(), [], getattr(planning, maker)

    def make(*args):
        made.append(device.entered)
        return right(*args)

    monkeypatch.setattr(planning, "allocator", lambda *where: (np.empty, device))
    monkeypatch.setattr(planning, maker, make)
    q, k, v, dout = make_qkv(1, 8, 8, 2, 1, 16)
    score = scores.bias(np.zeros((1, 1, 1, 8)))
    problem, mask = check_forward(q, k, v, None), masks.dense(8, 8)
    plan = planning.AttentionPlan(AttentionSpec(problem, mask, score), "cpu")
    _, pullback = plan.vjp(q, k, v, with_score=True)
    *_, (gradient,) = pullback(dout)
    assert gradient.shape == (1, 1, 1, 8)
    assert made == [1]


@by_impl
def test_a_pickled_plan_is_planned_anew(impl):
    q, k, v, dout = make_qkv(2, 45, 37, 4, 2, 8)
    how = {"causal": True, "scale": 0.3, "score": scores.softcap(2.0), "dropout": 0.2}
    plan = nbflash.plan(q, k, v, masks.window(45, 37, left=9), impl=impl, **how)
    assert copy.copy(plan) is plan
    (out, lse), sent = plan(q, k, v, seed=3), pickle.dumps(plan)
    nbflash.clear_cache()
    again = pickle.loads(sent)
    assert again is not plan
    assert (again.impl, again.mask, again.problem) == (impl, plan.mask, plan.problem)
    np.testing.assert_array_equal(again(q, k, v, seed=3)[0], out)
    args = dout, q, k, v, out, lse
    for x, y in zip(again.backward(*args, seed=3), plan.backward(*args, seed=3), strict=True):
        np.testing.assert_array_equal(x, y)


class Halved:
    """An executor of one's own."""

    def forward(self, q, k, v, out, lse):
        out[...] = q / 2


def test_a_plan_is_pickled_with_an_executor_of_ones_own():
    q, k, v, _ = make_qkv(1, 6, 6, 1, 1, 8)
    plan = planning.AttentionPlan(
        AttentionSpec(check_forward(q, k, v), masks.dense(6)), "own", Halved()
    )
    again = pickle.loads(pickle.dumps(plan))
    assert again.impl == "own"
    np.testing.assert_array_equal(again(q, k, v)[0], q / 2)


@by_impl
@pytest.mark.parametrize(
    "layout", [np.asfortranarray, lambda x: np.broadcast_to(x[:1, :1], x.shape)]
)
def test_a_gradient_in_any_layout_is_copied(impl, layout):
    """That of ``out.sum()`` is one number for all elements."""
    q, k, v, dout = make_qkv(1, 9, 9, 2, 1, 8)
    dout = layout(dout)
    one = np.broadcast_to(dout[..., :1], dout.shape)
    _, pullback = nbflash.plan(q, k, v, score=scores.bias(np.zeros((9, 9))), impl=impl).vjp(
        q, k, v, with_score=True
    )
    for given in (dout, one):
        gradients, expected = pullback(given), pullback(np.ascontiguousarray(given))
        for x, y in zip(
            (*gradients[:3], *gradients[3]), (*expected[:3], *expected[3]), strict=True
        ):
            np.testing.assert_array_equal(x, y)


def test_what_a_new_item_grows_by_is_counted_with_the_next_one():
    """A plan has run by then, perhaps, and nobody has asked for it again."""
    held, item = cache.PlanCache(), [np.zeros(10)]
    held.put("one", item)
    assert held.bytes["host"] == 80
    item.append(np.zeros(1000))
    held.put("two", ())
    assert held.bytes["host"] == 8080
