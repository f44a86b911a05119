"""What implementations do not run: each limit at its border, alone, with its reason."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from logged_device import Array

import masks
from nbflash import scores
from nbflash.backends.registry import BACKENDS, prepare, prepare_score_backward
from nbflash.backends.simt.executor import vectors_allowed
from nbflash.backends.split_kv.splits import heads_together, most_splits, splits_for
from nbflash.cuda import availability
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.block_layout import BlockLayout
from nbflash.inputs.decode_problem import Cache
from nbflash.inputs.positions import Positions
from nbflash.planning.kernels import cuda_problem, decode_problem

PROBLEM = cuda_problem("float16", 64, 40, 50)
MINUS = ((0, 0, 64, 1), (0, 0, 64, 1), (0, -64, 64, 1))
HALVES = "needs float16 or bfloat16"
WIDTHS = "needs a head_dim of 8, 16, ... 256"
ALIGNED = "needs addresses and strides of q, k and v that are multiples of 16 bytes"
MOST = "takes a dropout of at most 0.96875"


@pytest.mark.parametrize("name", ["sm80", "sm90"])
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"dtype": "bfloat16"}, None),
        ({"dtype": "float32"}, f"{HALVES}, got float32"),
        ({"head_dim": 8}, None),
        ({"head_dim": 12}, f"{WIDTHS}, got 12"),
        ({"head_dim": 256}, None),
        ({"head_dim": 264}, f"{WIDTHS}, got 264"),
        ({"alignment": 8}, f"{ALIGNED}, got 8"),
        ({"alignment": 8, "device": "cpu"}, None),
    ],
)
def test_what_a_kernel_asks_of_arrays(name, changed, reason):
    found = BACKENDS[name].why_not(AttentionSpec(replace(PROBLEM, **changed)))
    assert found == ([] if reason is None else [reason])
    everywhere = (BACKENDS[x].why_not(AttentionSpec(replace(PROBLEM, **changed))) for x in OTHERS)
    assert [*everywhere] == [[]] * len(OTHERS)


OTHERS = "simt", "cpu", "reference"


def test_negative_strides_are_not_for_tensor_maps():
    spec = AttentionSpec(replace(PROBLEM, strides=MINUS))
    (reason,) = BACKENDS["sm90"].why_not(spec)
    assert reason == "needs strides that are not negative: copy the array first"
    assert BACKENDS["sm80"].why_not(spec) == []


@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_the_most_dropout(name):
    """15 bits as float16, whose largest number is 0x7BFF: 31 of 32."""
    assert BACKENDS[name].why_not(AttentionSpec(PROBLEM, dropout=31 / 32)) == []
    above = float(np.nextafter(31 / 32, 1))
    assert BACKENDS[name].why_not(AttentionSpec(PROBLEM, dropout=above)) == [
        f"{name} {MOST}, got {above}"
    ]


DEVICES = (7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)


def test_devices(monkeypatch):
    """Of `why_not_here` the simulator asks nothing, and ptxas only Hopper's kernels."""
    runs = {
        name: [x for x in DEVICES if not BACKENDS[name].why_not_capability(x)] for name in KERNELS
    }
    assert runs == {"sm90": [(9, 0)], "sm80": [*DEVICES[1:]], "simt": [*DEVICES]}
    here = {"kernels": [], "simulator": False, "ptxas": ["no ptxas"], "capability": (9, 0)}
    monkeypatch.setattr(availability, "why_not_kernels", lambda: here["kernels"])
    monkeypatch.setattr(availability, "simulator", lambda: here["simulator"])
    monkeypatch.setattr(availability, "why_not_ptxas", lambda: here["ptxas"])
    asked = []
    monkeypatch.setattr(
        availability, "capability", lambda number: asked.append(number) or here["capability"]
    )

    def found():
        return [BACKENDS[name].why_not_here(1) for name in KERNELS]

    assert found() == [["no ptxas"], [], []]
    assert BACKENDS["sm90"].why_not_here() == ["no ptxas"]
    assert BACKENDS["sm80"].why_not_here() == []
    assert asked == [1, 1, 0, 0]
    here["ptxas"] = []
    assert found() == [[], [], []]
    here["capability"] = 7, 5
    assert found() == [
        ["needs compute capability 9.0 (Hopper), this device has 7.5"],
        ["needs compute capability 8.0 or later, this device has 7.5"],
        [],
    ]
    here["simulator"] = True
    assert found() == [[], [], []]
    here["kernels"] = ["no kernels"]
    assert found() == [["no kernels"]] * 3
    missing = "nothing.there", "no_module"
    assert [availability.installed(name) for name in missing] == [False, False]
    assert availability.installed("numpy")
    assert [BACKENDS[name].why_not_here(1) for name in ("cpu", "reference")] == [[], []]


KERNELS = "sm90", "sm80", "simt"


def test_order_memory_and_gradients_of_scores(monkeypatch):
    assert [*BACKENDS] == [*KERNELS, "cpu", "reference"]
    assert [x.memory for x in BACKENDS.values()] == ["cuda"] * 3 + ["cpu"] * 2
    own = {name: x.score_backward_impl for name, x in BACKENDS.items()}
    assert own == dict(zip(BACKENDS, ("simt", "simt", "simt", "cpu", "reference"), strict=True))
    assert [x.dropout_block for x in BACKENDS.values()] == [64, 64, 64, 32, None]
    for simulated, device in ((False, "cpu"), (False, "cuda"), (True, "cpu"), (True, "cuda")):
        monkeypatch.setattr(availability, "simulator", lambda x=simulated: x)
        problem = replace(PROBLEM, device=device)
        reasons = [x.why_not_memory(problem) for x in BACKENDS.values()]
        runs = [not x for x in reasons]
        on_kernels = simulated if device == "cpu" else not simulated
        assert runs == [on_kernels] * 3 + [device == "cpu"] * 2, (simulated, device)
        assert all(len(x) <= 1 for x in reasons)


@pytest.mark.parametrize("start", [0, 32, 128, 64])
def test_parts_of_a_sequence_with_dropout(start):
    tokens = np.arange(start, start + 128)
    spec = AttentionSpec(PROBLEM, dropout=0.5, positions=Positions(tokens, tokens))
    runs = [not x.why_not_positions(spec) for x in BACKENDS.values()]
    assert runs == [start % 64 == 0] * 3 + [True, False]
    for other in (replace(spec, dropout=0.0), replace(spec, positions=None)):
        assert all(x.why_not_positions(other) == [] for x in BACKENDS.values())


def test_without_elements_nothing_is_prepared():
    """No pair: results are filled; gradients are 0."""
    spec = AttentionSpec(replace(PROBLEM, nk=0), masks.dense(40, 0), scores.alibi([0.5]))
    arrays = {name: Array((2,)) for name in ("out", "lse", "dq", "dk", "dv", "total")}
    executor = prepare("simt", spec)
    assert executor.schedule is executor.two_passes is None
    executor.forward(0, 0, 0, arrays["out"], arrays["lse"])
    executor.backward(0, 0, 0, 0, 0, 0, 0, arrays["dq"], arrays["dk"], arrays["dv"], True)
    prepare_score_backward("simt", spec)(0, 0, 0, 0, 0, 0, 0, [arrays["total"]])
    found = {name: x.filled for name, x in arrays.items()}
    assert found == {"out": 0, "lse": -np.inf, "dq": 0, "dk": 0, "dv": 0, "total": 0}


def _decode(cache_dtype="float16", head_dim=64, page_size=None, alignment=16, **changed):
    problem = decode_problem("float16", head_dim, cache_dtype, 1, 4, page_size)
    address = 2**40 + (alignment % 16)
    x = Array((1, 64, 1, head_dim), np.float16, address=address)
    return replace(problem, **changed), x, Cache(x, x, None)


ALIGNED_ALL = "needs addresses and strides that are multiples of 16 bytes"
COLUMNS = "needs a head_dim of {}, {}, ... 256, got {}"


@pytest.mark.parametrize(
    ("changed", "sm80", "sm90"),
    [
        ({}, [], []),
        ({"dtype": "float32"}, [f"{HALVES}, got float32"], [f"{HALVES}, got float32"]),
        ({"head_dim": 72}, [], []),
        (
            {"head_dim": 76, "device": "cpu"},
            [COLUMNS.format(8, 16, 76)],
            ["head_dim is a multiple of 8, got 76"],
        ),
        (
            {"head_dim": 72, "cache_dtype": "int8"},
            [COLUMNS.format(16, 32, 72)],
            ["head_dim is a multiple of 16, got 72"],
        ),
        ({"head_dim": 256, "cache_dtype": "int8"}, [], []),
        ({"page_size": 48}, [], []),
        (
            {"page_size": 24},
            ["needs pages of a multiple of 16 keys, got 24"],
            [],
        ),
        (
            {"page_size": 20},
            ["needs pages of a multiple of 16 keys, got 20"],
            ["keys come by multiples of 8 that divide 64, got 4"],
        ),
        ({"window": (3, 0)}, [], ["decode with window= does not run on sm90"]),
        ({"alignment": 8}, [f"{ALIGNED_ALL}, got 8"], [f"{ALIGNED_ALL}, got 8"]),
        ({"alignment": 8, "device": "cpu"}, [], []),
    ],
)
def test_what_decode_asks_of_arrays(cupy, changed, sm80, sm90):
    problem, q, cache = _decode(**changed)
    assert BACKENDS["sm80"].why_not_decode(problem, None, q, cache) == sm80
    assert BACKENDS["sm90"].why_not_decode(problem, None, q, cache) == sm90
    assert BACKENDS["simt"].why_not_decode(problem, None, q, cache) == []
    assert BACKENDS["reference"].why_not_decode(problem, None, q, cache) == [
        "decode does not run on reference"
    ]


@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_decode_asks_it_of_each_array(cupy, which):
    problem, x, _ = _decode()
    back = x.strides[0], -x.strides[1], *x.strides[2:]
    for how, of_sm80, of_sm90 in (
        ({"address": 2**40 + 8}, f"{ALIGNED_ALL}, got 8", f"{ALIGNED_ALL}, got 8"),
        ({"strides": back}, None, "needs strides that are not negative: copy the array first"),
    ):
        given = [x, x, x]
        given[which] = Array(x.shape, x.dtype, **how)
        q, cache = given[0], Cache(*given[1:], None)
        for name, reason in (("sm80", of_sm80), ("sm90", of_sm90)):
            found = BACKENDS[name].why_not_decode(problem, None, q, cache)
            assert found == [reason] * (reason is not None)


def test_decode_of_float8_needs_an_instruction(monkeypatch):
    monkeypatch.setattr(availability, "why_not_ptxas", lambda: [])
    on = {x: BACKENDS["sm80"].why_not_decode_on(_decode("float8_e4m3fn")[0], x) for x in DEVICES}
    assert [x for x, reasons in on.items() if not reasons] == [(9, 0), (10, 0), (12, 0)]
    assert on[8, 6] == ["needs compute capability 8.9 for float8, this device has 8.6"]
    assert BACKENDS["sm80"].why_not_decode_on(_decode("float8_e4m3fn")[0], (8, 9)) == []
    assert BACKENDS["sm80"].why_not_decode_on(_decode("int8")[0], (8, 0)) == []


@pytest.mark.parametrize("rows", [15, 16, 17])
def test_few_rows_of_decode_are_for_the_smaller_kernel(rows):
    problem = decode_problem("float16", 64, "float16", 1, rows, None)
    expected = "sm80" if rows <= 16 else None
    assert BACKENDS["sm90"].faster_decode(problem, None) == expected
    stored = decode_problem("float16", 64, "int8", 1, rows, None)
    assert BACKENDS["sm90"].faster_decode(stored, None) is None


def test_splits_take_the_least_time():
    """Of whole waves: those of a split's tiles and four more; the fewest within 5 % of the best."""
    assert [most_splits(n) for n in (0, 1, 3, 4, 7, 511, 512, 4000)] == [
        1,
        1,
        1,
        2,
        3,
        255,
        256,
        256,
    ]
    for items in (1, 5, 40, 131, 400):
        for tiles in (1, 2, 3, 9, 64, 301, 900):
            for slots in (4, 132, 264):

                def time(n, items=items, tiles=tiles, slots=slots):
                    return -(-items * n // slots) * (-(-tiles // n) + 4)

                allowed = range(1, max(min(tiles // 2, 256), 1) + 1)
                best = min(map(time, allowed))
                fewest = next(n for n in allowed if time(n) <= 1.05 * best)
                assert splits_for(items, tiles, slots) == fewest, (items, tiles, slots)


def test_heads_with_one_mask_are_together():
    problem = SimpleNamespace(heads=6, heads_kv=2, batch=2)
    small, other = masks.causal(4), masks.dense(4, 4)
    assert heads_together(problem, None) == 3
    assert heads_together(problem, small) == 3
    by_group = masks.per_head([small] * 3 + [other] * 3)
    assert heads_together(problem, by_group) == 3
    assert heads_together(problem, masks.per_head([small] * 2 + [other] * 4)) == 1


def test_a_tile_has_at_most_four_blocks():
    """Whole ones; or a block has whole tiles."""
    for block, tile, fits in (
        ((16, 16), (64, 16), True),
        ((16, 16), (80, 16), False),
        ((16, 16), (32, 32), True),
        ((16, 16), (16, 96), False),
        ((16, 16), (24, 16), False),
        ((48, 64), (16, 32), True),
        ((48, 64), (32, 32), False),
    ):
        layout = BlockLayout((96, 96), block, (1, 1), 2, masks.dense(96, 96), 1)
        assert layout.fits(*tile) is fits, (block, tile)


@pytest.mark.parametrize(
    ("dtype", "least"), [("float32", 16), ("float64", 16), ("float16", 8), ("int8", 4)]
)
def test_four_elements_at_a_time(dtype, least):
    """Of whole rows, by one access of at most 16 bytes."""
    for head_dim in (4, 6, 63, 64):
        found = [n for n in (1, 2, 4, 8, 16, 32) if vectors_allowed(dtype, head_dim, n)]
        expected = [n for n in (4, 8, 16, 32) if n >= least]
        assert found == ([] if head_dim % 4 else expected), (dtype, head_dim)
