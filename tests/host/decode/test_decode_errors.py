"""Every mistake in a call of `decode` raises a sentence that names it, before it computes."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from bad_input_cases import CONTIGUOUS, CudaInterface, misaligned, zeros

import masks
import nbflash
from nbflash import scores
from nbflash.backends.cpu.executor import CpuExecutor
from nbflash.backends.reference import EmptyExecutor
from nbflash.backends.registry import BACKENDS
from nbflash.cuda import availability, ptxas
from nbflash.inputs.decode_problem import Cache, check_decode
from nbflash.planning import dispatch

B, NQ, HEADS, HEADS_KV, D, PAGE, PAGES, WIDTH = 2, 3, 4, 2, 8, 4, 5, 3
CAPACITY = PAGE * WIDTH
POOL = (PAGES, PAGE, HEADS_KV, D)
PLANE = (B, CAPACITY, HEADS_KV, D)
E4M3 = ml_dtypes.float8_e4m3fn


def ints(*values, dtype=np.int32):
    return np.array(values, dtype)


PAGED = {
    "q": zeros(B, NQ, HEADS, D),
    "k_cache": zeros(*POOL),
    "v_cache": zeros(*POOL),
    "lengths": ints(5, 9),
    "block_table": ints([0, 1, -1], [2, 3, 4]),
}
PLAIN = PAGED | {"k_cache": zeros(*PLANE), "v_cache": zeros(*PLANE), "block_table": None}
SCALE = zeros(HEADS_KV)


def stored(dtype, **changed):
    """A quantised paged cache with its scales."""
    pools = {name: zeros(*POOL, dtype=dtype) for name in ("k_cache", "v_cache")}
    return pools | {"k_scale": SCALE, "v_scale": SCALE} | changed


TABLE = r"block_table must hold pages 0 to 4 where lengths has tokens, got"
COLUMNS = "mask must have 3 rows, one for each query token, and at most 12 columns"
CASES = {
    "q-list": ({"q": [1.0]}, TypeError, "q must be a NumPy or CuPy array, .* got list"),
    "q-axes": ({"q": zeros(B, HEADS, D)}, ValueError, r"q must have 4 axes .*got shape \(2, 4, 8"),
    "q-dtype": ({"q": zeros(B, NQ, HEADS, D, dtype=np.int8)}, TypeError, "q must have dtype float"),
    "q-none": ({"q": zeros(B, 0, HEADS, D)}, ValueError, "q must have 1 to 64 tokens .* got 0"),
    "q-many": (
        {"q": zeros(B, 65, HEADS, D)},
        ValueError,
        r"q must have 1 to 64 tokens of each sequence, got 65, .*; nbflash.attention takes more",
    ),
    "q-head-dim": ({"q": zeros(B, NQ, HEADS, 257)}, ValueError, "q must have head_dim 1 to 256"),
    "q-layout": (
        {"q": np.asfortranarray(zeros(B, NQ, HEADS, D))},
        ValueError,
        f"q {CONTIGUOUS}",
    ),
    "k-cuda": ({"k_cache": CudaInterface()}, TypeError, "k_cache is a .* in CUDA memory but q"),
    "k-none": ({"k_cache": None}, TypeError, "k_cache must be a NumPy or CuPy .* got NoneType"),
    "k-axes": ({"k_cache": zeros(*POOL[1:])}, ValueError, "k_cache must have 4 axes"),
    "k-dtype": (
        {"k_cache": zeros(*POOL, dtype=np.float16)},
        TypeError,
        "k_cache must have the dtype of q, float32, or int8 or float8_e4m3fn, got float16",
    ),
    "k-head-dim": (
        {"k_cache": zeros(PAGES, PAGE, HEADS_KV, 16)},
        ValueError,
        r"k_cache must have head_dim=8 like q, got shape \(5, 4, 2, 16\)",
    ),
    "k-heads": (
        {"k_cache": zeros(PAGES, PAGE, 3, D)},
        ValueError,
        "k_cache must have a number of heads that divides the 4 heads of q, got 3",
    ),
    "k-no-heads": ({"k_cache": zeros(PAGES, PAGE, 0, D)}, ValueError, "4 heads of q, got 0"),
    "k-misaligned": ({"k_cache": misaligned(POOL)}, ValueError, "k_cache must be aligned"),
    "k-no-page": (
        {"k_cache": zeros(5, 0, 2, 8), "v_cache": zeros(5, 0, 2, 8)},
        ValueError,
        "1 tok",
    ),
    "v-shape": (
        {"v_cache": zeros(PAGES + 1, *POOL[1:])},
        ValueError,
        r"v_cache must have shape .* = \(5, 4, 2, 8\), got \(6, 4, 2, 8\)",
    ),
    "v-dtype": (
        {"v_cache": zeros(*POOL, dtype=np.float64)},
        TypeError,
        "v_cache must have dtype float32, got float64",
    ),
    "v-layout": (
        {"v_cache": np.asfortranarray(zeros(*POOL))},
        ValueError,
        f"v_cache {CONTIGUOUS}",
    ),
    "batch": (
        PLAIN | {"k_cache": zeros(3, *PLANE[1:]), "v_cache": zeros(3, *PLANE[1:])},
        ValueError,
        "k_cache must have batch=2 like q, .*; pages need a block_table",
    ),
    "lengths-number": ({"lengths": 5}, TypeError, "lengths must be a NumPy .* got int"),
    "lengths-dtype": (
        {"lengths": ints(5, 9, dtype=np.float64)},
        TypeError,
        "lengths must have dtype int32, got float64",
    ),
    "lengths-flags": ({"lengths": [True, False]}, TypeError, "lengths must hold integers, got"),
    "lengths-words": ({"lengths": ["5", "9"]}, TypeError, "lengths must have dtype int32, got <U1"),
    "lengths-too-large": (
        {"lengths": ints(5, 2**32 + 5, dtype=np.int64)},
        ValueError,
        "lengths must fit int32, got 4294967301",
    ),
    "lengths-too-small": ({"lengths": [-(2**31) - 1, 5]}, ValueError, "int32, got -2147483649"),
    "lengths-shape": (
        {"lengths": ints(5)},
        ValueError,
        r"lengths must have shape \(batch,\) = \(2,\), got \(1,\)",
    ),
    "lengths-axes": ({"lengths": ints([5], [9])}, ValueError, r"lengths must have 1 axes \(batch"),
    "lengths-negative": (
        {"lengths": ints(5, -1)},
        ValueError,
        "lengths must be 0 to the capacity 12, got -1 at 1",
    ),
    "lengths-beyond": ({"lengths": ints(13, 9)}, ValueError, "the capacity 12, got 13 at 0"),
    "lengths-beyond-contiguous": (
        PLAIN | {"lengths": ints(5, 13)},
        ValueError,
        "lengths must be 0 to the capacity 12, got 13 at 1",
    ),
    "table-dtype": (
        {"block_table": PAGED["block_table"].astype(np.float32)},
        TypeError,
        "block_table must have dtype int32, got float32",
    ),
    "table-too-large": (
        {"block_table": np.full((2, 3), 2**63, np.uint64)},
        ValueError,
        "block_table must fit int32, got 9223372036854775808",
    ),
    "table-ragged": (
        {"block_table": [[0, 1], [2, 3, 4]]},
        TypeError,
        "block_table must be an array or a list of integers: setting an array element",
    ),
    "table-axes": ({"block_table": ints(0, 1)}, ValueError, "block_table must have 2 axes"),
    "table-batch": (
        {"block_table": ints([0, 1, 2])},
        ValueError,
        r"block_table must have shape .* = \(2, 3\), got \(1, 3\)",
    ),
    "table-beyond": (
        {"block_table": ints([0, 1, -1], [2, 3, 5])},
        ValueError,
        rf"{TABLE} 5 at \(1, 2\), and lengths 9",
    ),
    "table-unset": (
        {"block_table": ints([0, -1, -1], [2, 3, 4])},
        ValueError,
        rf"{TABLE} -1 at \(0, 1\), and lengths 5",
    ),
    "mask-array": (
        {"mask": np.ones((NQ, CAPACITY), bool)},
        TypeError,
        r"mask must be a masks.Mask .* use masks.from_dense\(mask\)",
    ),
    "mask-rows": ({"mask": masks.dense(2, CAPACITY)}, ValueError, rf"{COLUMNS}, .* \(2, 12\)"),
    "mask-wide": ({"mask": masks.dense(NQ, 13)}, ValueError, rf"{COLUMNS}, .* \(3, 13\)"),
    "mask-narrow": (
        {"mask": masks.dense(NQ, 8)},
        ValueError,
        r"mask must have a column for every key, at least 9, got shape \(3, 8\)",
    ),
    "mask-batch": (
        {"mask": masks.per_batch([masks.dense(NQ, 12)] * 2 + [masks.causal(NQ, 12)])},
        ValueError,
        "mask has batch=3, but q has batch=2",
    ),
    "mask-heads": (
        {"mask": masks.per_head([masks.dense(NQ, 12), masks.causal(NQ, 12)])},
        ValueError,
        "mask has heads=2, but q has heads=4",
    ),
    "k-scale-missing": (
        stored(np.int8, k_scale=None),
        ValueError,
        "k_scale must be given for a cache of int8, got None",
    ),
    "v-scale-missing": (stored(E4M3, v_scale=None), ValueError, "v_scale must be given .* float8"),
    "scale-unasked": (
        {"v_scale": SCALE},
        ValueError,
        "v_scale must be None for a cache of float32",
    ),
    "scale-dtype": (
        stored(np.int8, v_scale=SCALE.astype(np.float64)),
        TypeError,
        "v_scale must have dtype float32, got float64",
    ),
    "scale-heads": (
        stored(np.int8, k_scale=zeros(HEADS)),
        ValueError,
        r"k_scale must have shape \(heads_kv,\) or .* = \(2,\), got \(4,\)",
    ),
    "scale-tokens": (
        stored(np.int8, k_scale=zeros(B, CAPACITY, HEADS_KV)),
        ValueError,
        r"k_scale must have shape .* = \(5, 4, 2\), got \(2, 12, 2\)",
    ),
    "scale-axes": (
        stored(np.int8, k_scale=zeros(2, 2)),
        ValueError,
        r"k_scale must have shape \(heads_kv,\) = \(2,\) or \(5, 4, 2\), got \(2, 2\)",
    ),
    "scale-nan": (
        {"scale": float("nan")},
        ValueError,
        r"scale must be finite in float32, at most 1.7e\+38 in magnitude, got nan",
    ),
    "scale-word": ({"scale": "1"}, TypeError, "scale must be a real number or None, got '1'"),
    "return-lse": ({"return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
}


@pytest.fixture
def _nothing_runs(monkeypatch):
    def launched(*arguments):
        raise AssertionError("an implementation was launched")

    for executor in (CpuExecutor, EmptyExecutor):
        monkeypatch.setattr(executor, "forward", launched)


@pytest.mark.usefixtures("_nothing_runs")
@pytest.mark.parametrize(("changed", "error", "match"), CASES.values(), ids=CASES)
def test_decode_refuses(changed, error, match):
    with pytest.raises(error, match=match):
        nbflash.decode(**PAGED | changed)


@pytest.mark.parametrize("arguments", [PAGED, PLAIN, PAGED | stored(E4M3)], ids=["p", "c", "q"])
def test_the_unchanged_calls_run(arguments):
    assert not nbflash.decode(**arguments).any()


def test_cuda_arrays_are_refused_with_the_reason(monkeypatch):
    problem = check_decode(PAGED["q"], Cache(**{k: v for k, v in PAGED.items() if k != "q"}))
    assert dispatch.choose_decode("auto", problem, None, None, None) == "cpu"
    on_cuda = replace(problem, device="cuda")
    monkeypatch.setattr(availability, "why_not_cuda", lambda: ["no CUDA device is visible"])
    with pytest.raises(ValueError, match=r"impl='simt' cannot run \(.*cuda\):\n  no CUDA device"):
        dispatch.choose_decode("simt", on_cuda, None, None, None)
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    monkeypatch.setattr(availability, "why_not_simulator", list)
    with pytest.raises(ValueError, match=r"impl='simt' cannot run \(.*\):\n  the CUDA sim.* got"):
        dispatch.choose_decode("simt", on_cuda, None, None, None)


def test_what_auto_prefers(monkeypatch):
    """On Hopper the portable kernel where few rows attend keys of 16 bits, if it can run at all."""
    monkeypatch.setattr(availability, "why_not_kernels", list)
    monkeypatch.setattr(availability, "capability", lambda device_id: (9, 0))
    monkeypatch.setattr(ptxas, "find_ptxas", lambda: "ptxas")
    monkeypatch.setattr("nbflash.inputs.arrays.alignment", lambda array: 16)
    caches = (np.zeros((1, 32, 2, 64), np.float16) for _ in range(2))
    arrays = np.zeros((1, 4, 8, 64), np.float16), Cache(*caches, ints(5))
    given = replace(check_decode(*arrays), device="cuda", page_size=16)
    heads = masks.per_head([masks.window(4, 32, left=i) for i in range(8)])

    def chosen(mask=None, **changed):
        problem = replace(given, **changed)
        return dispatch.choose_decode("auto", problem, mask, *arrays)

    assert chosen() == "sm80"
    for name in ("sm80", "sm90", "simt"):  # what is named is taken, faster or not
        assert dispatch.choose_decode(name, given, None, *arrays) == name
    assert chosen(nq=5) == "sm90"  # 20 rows
    assert chosen(nq=5, mask=heads) == "sm80"  # of heads that have nothing in common
    assert chosen(page_size=8) == "sm90"
    assert chosen(cache_dtype="int8") == "sm90"
    for rules in ({"window": (9, None)}, {"score": scores.softcap(3.0)}):
        assert chosen(cache_dtype="int8", **rules) == "sm80"
        assert chosen(page_size=8, **rules) == "simt"
    assert chosen(dtype="float32", cache_dtype="float32") == "simt"
    monkeypatch.setattr(ptxas, "find_ptxas", lambda: None)
    assert chosen() == "simt"


def test_a_kernel_without_window_and_score_says_so():
    cache = Cache(**{k: v for k, v in PLAIN.items() if k != "q"})
    given = check_decode(PLAIN["q"], cache, None, (5, None), scores.softcap(3.0))
    reasons = BACKENDS["sm90"].why_not_decode(given, None, PLAIN["q"], cache)
    assert reasons[:2] == [
        "decode with window= does not run on sm90",
        "decode with score= does not run on sm90",
    ]


def test_windows_and_scores_are_checked():
    with pytest.raises(TypeError, match="window must be"):
        nbflash.decode(**PLAIN, window=3)
    with pytest.raises(TypeError, match=r"score must be made by nbflash\.scores"):
        nbflash.decode(**PLAIN, score=abs)
    with pytest.raises(ValueError, match="alibi has heads=3, got inputs with heads=4"):
        nbflash.decode(**PLAIN, score=scores.alibi([0.5, 0.1, 0.1]))


def test_a_missing_package_is_named(monkeypatch):
    nbflash.clear_cache()  # of problems that were checked
    monkeypatch.setattr(availability, "installed", lambda module: False)
    with pytest.raises(ValueError, match=r"impl='auto' cannot run .*\n .*numba is not installed"):
        nbflash.decode(**PAGED)


def test_a_problem_reads_well():
    cache = Cache(**{k: v for k, v in PAGED.items() if k != "q"})
    assert str(check_decode(PAGED["q"], cache)) == (
        "q (2, 3, 4, 8), float32, up to 12 keys in pages of 4 of 2 heads, float32, "
        "scale 0.3536, cpu"
    )


def test_why_not_decode_takes_what_decode_takes(monkeypatch):
    """And reads neither lengths nor pages; the reasons are those that `decode` would raise with."""
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    wrong = PAGED | {"lengths": ints(500, -1)}
    for given in (PAGED, PLAIN, wrong):
        assert (
            nbflash.why_not_decode("auto", **given) == nbflash.why_not_decode("cpu", **given) == []
        )
    rules = {"window": (3, None), "score": scores.softcap(2.0), "scale": 0.5}
    assert nbflash.why_not_decode("cpu", **PLAIN, mask=masks.causal(NQ, CAPACITY), **rules) == []
    lists = np.zeros((1, HEADS_KV, 1, 1), np.int32)
    chosen = nbflash.BlockMap(lists, shape=(NQ, CAPACITY), block=(NQ, PAGE))
    assert nbflash.why_not_decode("cpu", **PLAIN, mask=chosen) == []
    reasons = nbflash.why_not_decode("simt", **PLAIN)
    assert any("got NumPy arrays" in reason for reason in reasons)
    with pytest.raises(ValueError, match="decode: impl='simt' cannot run") as error:
        nbflash.decode(**PLAIN, impl="simt")
    assert all(reason in str(error.value) for reason in reasons)


@pytest.mark.parametrize(
    ("impl", "given", "match"),
    [
        ("sm91", {}, "impl must be one of auto"),
        ("cpu", {"window": 3}, "window must be"),
        ("cpu", {"k_scale": SCALE}, "k_scale must be None"),
        ("cpu", {"scale": np.nan}, "scale"),
        ("cpu", {"mask": masks.causal(NQ + 1)}, "mask must have 3 rows"),
        ("cpu", {"score": 3}, "score"),
        ("cpu", {"q": []}, "q"),
    ],
)
def test_why_not_decode_refuses_what_is_no_call(impl, given, match):
    with pytest.raises((TypeError, ValueError), match=match):
        nbflash.why_not_decode(impl, **(PLAIN | given))
