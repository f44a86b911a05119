"""Scores, positions, shardings, layouts and signatures of arrays: whatever is part of a key."""

import inspect

import numpy as np
import pytest
from cuda_arrays import DeviceArray
from keyed import assert_apart, check_keyed, each, others

import masks
from masks.interval import Interval
from nbflash import scores
from nbflash.distributed.placed_score import _PlacedStage, placed
from nbflash.distributed.sharding import Sharding
from nbflash.inputs import score_arrays
from nbflash.inputs.arrays import signature
from nbflash.inputs.block_map import BlockMap
from nbflash.inputs.positions import Positions
from nbflash.inputs.tensors import CudaTensor

OWNERS = np.array([0, 1, 0, 1], np.int32)
MASK = masks.causal(16)


def scaled(s, b, h, q, kv, factor):
    return s * factor


def of_factor(s, b, h, q, kv, factor):
    return factor


def of_array(s, b, h, q, kv, array):
    return 0, s


def of_array_too(s, b, h, q, kv, array):
    return 0, 2 * s


def parameters(fn):
    return [name for name in inspect.signature(fn).parameters if name != "self"]


def test_positions():
    base = {"queries": np.array([0, 2]), "keys": np.array([1, 3, 4])}
    changes = {name: [*each(x), x[:-1]] for name, x in base.items()}
    check_keyed(Positions, base, changes, names=parameters(Positions))
    joined = np.array([0, 1, 2, 3])
    made = [Positions(joined[:n], joined[n:]) for n in range(5)]
    for i, one in enumerate(made):
        for other in made[:i]:
            assert_apart(one, other)


SHARDING = {"mask": MASK, "ranks": 2, "tile": 4, "query_owner": OWNERS, "key_owner": OWNERS}
HEADS = [masks.causal(16), masks.window(16, left=3, right=0)]
SHARDINGS = {
    "mask": [masks.window(16, left=9, right=0), masks.per_head(HEADS), masks.causal(16) & HEADS[1]],
    "ranks": [3],
    "tile": [5],
    "query_owner": [x % 2 for x in each(OWNERS)],
    "key_owner": [x % 2 for x in each(OWNERS)],
}


def test_shardings():
    check_keyed(Sharding, SHARDING, SHARDINGS, names=parameters(Sharding))


def test_all_of_a_sharding_is_in_the_digest_that_ranks_compare():
    """Masks that differ by batch, by head, or in the order of their heads, too."""
    of_masks = [masks.per_batch(HEADS), masks.per_head(HEADS[::-1])]
    of_masks += [masks.per_head([*HEADS, HEADS[0]]), masks.per_batch([*HEADS, HEADS[0]])]
    of_masks += [masks.causal(15, 16), masks.from_dense(np.tri(16, k=-1, dtype=bool))]
    lo, hi = np.zeros(16, np.int64), np.full(16, 6)
    of_masks += [Interval(16, *x) for x in ((lo, hi), (lo, hi + (hi.cumsum() == 24)))]
    of_masks.append(Interval(16, lo + (hi.cumsum() == 24), hi))
    made = [Sharding(**SHARDING)]
    made += [Sharding(**SHARDING | {name: x}) for name in SHARDINGS for x in SHARDINGS[name]]
    made += [Sharding(**SHARDING | {"mask": mask}) for mask in of_masks]
    digests = [sharding.digest for sharding in made]
    assert digests[0] == Sharding(**SHARDING).digest
    for i, one in enumerate(digests):
        for j, other in enumerate(digests[:i]):
            assert one != other, (made[i].mask, made[j].mask)


STAGE = {
    "name": "custom",
    "fn": scaled,
    "grad": of_factor,
    "params": (np.float64(2), np.arange(6.0).reshape(2, 3)),
    "sizes": (),
    "aligned": False,
    "parts": (scores.Part(of_array, (2, 3), ("heads", "nk")),),
}
STAGES = {
    "fn": [of_factor],
    "grad": [scaled, None],
    "params": [(np.float64(2), *x) for x in zip(others(np.arange(6.0).reshape(2, 3)), strict=True)]
    + [(x, STAGE["params"][1]) for x in (np.float64(3), np.float32(2), np.int64(2))]
    + [STAGE["params"][::-1], STAGE["params"][:1]],
    "parts": [
        (scores.Part(of_array_too, (2, 3), ("heads", "nk")),),
        (scores.Part(of_array, (3, 2), ("heads", "nk")),),
        (scores.Part(of_array, (2, 3), ("heads", "nq")),),
        (scores.Part(of_array, (2, 3), ("heads", "nk"), (1, 2, 3)),),
        (),
        None,
    ],
}
FOLLOWS = {
    "name": "what messages call it",
    "sizes": "of nbflash's own functions, each of which has one",
    "aligned": "of nbflash's own functions, each of which is or is not",
}


def test_stages_of_scores():
    def made(**given):
        return scores.Score([scores._Stage(**given)])

    check_keyed(made, STAGE, STAGES, FOLLOWS, names=parameters(scores._Stage))


def test_a_function_of_nbflash_has_sizes_and_a_place_by_itself():
    """The reason why they are in no key."""
    two, three = np.ones(2), np.ones(3)
    made = [scores.alibi(0.5), scores.alibi(two[:1]), scores.alibi(two), scores.alibi(three)]
    made += [scores.relative(np.ones((2, 3))), scores.relative(np.ones((3, 5)))]
    made += [scores.bias(np.ones(shape)) for shape in ((3, 3), (2, 3, 3), (1, 2, 3, 3))]
    made += [scores.softcap(1.0), scores.custom(scaled, params=(2,))]
    of_function = {}
    for score in made:
        (stage,) = score._stages
        how = stage._sizes, stage._aligned
        assert of_function.setdefault(stage._fn, how) == how


def test_scores_are_their_stages_in_order():
    one, two = (scores._Stage(**STAGE | {"fn": fn}) for fn in (scaled, of_factor))
    changes = {"stages": [(two, one), (one,), (one, one), (one, two, two)]}
    check_keyed(scores.Score, {"stages": (one, two)}, changes, names=parameters(scores.Score))


def test_scores_at_places():
    """Of a part of a sequence: whole stages, where the tokens are, and the whole's shape."""
    (stage,) = scores.alibi(np.ones(2))._stages
    base = {"positions": Positions([0, 1], [1, 2]), "shape": (8, 8), "stage": stage}
    changes = {
        "positions": [Positions([0, 2], [1, 2]), Positions([0, 1], [1, 3])],
        "shape": [(7, 8), (8, 9)],
        "stage": scores.alibi(np.full(2, 0.5))._stages,
    }

    def made(**given):
        return scores.Score([_PlacedStage(**given)])

    check_keyed(made, base, changes, names=parameters(_PlacedStage))

    def by_function(positions, shape, stage):
        return placed(scores.Score([stage]), positions, shape)

    check_keyed(by_function, base, changes)


def test_parameters_of_scores(cupy):
    x = np.arange(6.0).reshape(2, 3)
    for other in [*others(x), x.astype(np.float32), np.ascontiguousarray(x.T)]:
        assert score_arrays.key_of(other) != score_arrays.key_of(x)
    assert score_arrays.key_of(x) == score_arrays.key_of(np.asfortranarray(x))
    base = {"shape": (2, 4), "dtype": np.float32, "device_id": 0, "address": 2**40}
    changes = {"shape": (4, 2), "dtype": np.int32, "device_id": 1, "address": 2**40 + 16}
    own = score_arrays.key_of(DeviceArray(**base))
    assert own == score_arrays.key_of(DeviceArray(**base))
    for name, value in changes.items():
        assert score_arrays.key_of(DeviceArray(**base | {name: value})) != own, name


def test_a_layout_of_blocks():
    indices = np.zeros((2, 4, 3, 2), np.int32)
    base = {"indices": indices, "counts": None, "shape": (9, 9), "block": (3, 3)}
    base |= {"within": None, "checked": False}
    changes = {
        "indices": [indices[:1], indices[:, :2], indices[..., :1]],
        "shape": [(8, 9), (9, 8)],
        "block": [(3, 4), (4, 3)],
        "within": [masks.causal(9), masks.window(9, left=3, right=0)],
    }
    left_out = {
        "counts": "contents, which are read when a call runs; of the shape of indices",
        "checked": "whether contents are checked when a map is made",
    }
    check_keyed(
        lambda **given: BlockMap(**given).layout, base, changes, left_out, parameters(BlockMap)
    )


class _Tensor:
    """What a `CudaTensor` reads of a tensor of PyTorch."""

    def __init__(self, shape, dtype, device_id, strides, address):
        self.shape, self.dtype = shape, dtype
        self._given = strides, device_id, address

    def stride(self):
        return self._given[0]

    def get_device(self):
        return self._given[1]

    def data_ptr(self):
        return self._given[2]


def _of_torch(**given):
    return signature(CudaTensor(_Tensor(**given)))


def _of_cupy(**given):
    return signature(DeviceArray(**given))


LAYOUT = {"shape": (2, 6, 4, 8), "strides": (1024, 32, 256, 4)}
DEVICE = LAYOUT | {"dtype": np.float32, "device_id": 0, "address": 2**40}
LAYOUTS = {name: [x for x in others(LAYOUT[name]) if len(x) == 4] for name in LAYOUT}
DEVICES = LAYOUTS | {
    "dtype": [np.float16, np.float64, np.int32],
    "device_id": [1, 2],
    "address": [2**40 + n for n in range(1, 16)],
}


@pytest.mark.parametrize("make", [_of_cupy, _of_torch])
def test_signatures_of_device_memory(make):
    check_keyed(make, DEVICE, DEVICES)
    assert make(**DEVICE) == make(**DEVICE | {"address": 2**41})
    assert _of_cupy(**DEVICE) != _of_torch(**DEVICE | {"dtype": object()})


def test_signatures_of_host_memory():
    """Shape, strides, dtype with its order of bytes, and whether it is aligned."""
    room = np.zeros(4096, np.uint8)

    def made(shape, strides, dtype, first):
        return signature(np.ndarray(shape, dtype, room[first:], strides=strides))

    base = {"shape": (2, 3, 2, 4), "strides": (512, 64, 32, 4), "dtype": "<f4", "first": 0}
    changes = {
        "shape": [(1, 3, 2, 4), (2, 2, 2, 4), (2, 3, 1, 4), (2, 3, 2, 3)],
        "strides": [(256, 64, 32, 4), (512, 96, 32, 4), (512, 64, 16, 4), (512, 64, 32, 8)],
        "dtype": ["<f2", "<i4", ">f4", "<u4"],
        "first": [1, 2, 3],
    }
    check_keyed(made, base, changes)
