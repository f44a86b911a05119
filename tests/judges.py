"""Which tests judge mutants of a module; see `mutation`. Cheap ones come first, those of
tests/host before those of tests/sim."""

_MASKS = [
    "host/masks/test_masks_patterns.py",
    "host/masks/test_masks_errors.py",
    "host/masks/test_masks_ends.py",
    "host/masks/test_masks_restriction.py",
    "host/masks/test_masks_block_tiles.py",
    "host/keys/test_keys_masks.py",
    "host/api/test_identity.py",
    "host/api/test_pickles.py",
    "host/masks/test_masks_tiles.py",
    "host/masks/test_masks_tools.py",
    "host/masks/test_masks_counting.py",
    "host/masks/test_masks_functions.py",
    "host/masks/test_masks_algebra.py",
]
_PLANS = [
    "host/keys/test_keys_calls.py",
    "host/api/test_identity.py",
    "host/planning/test_plan.py",
    "host/api/test_api.py",
    "host/inputs/test_arrays.py",
]
_CACHES = [
    "host/decode/test_quantised_cache.py",
    "host/decode/test_kv_cache_model.py",
    "host/decode/test_decode_errors.py",
    "host/decode/test_kv_cache.py",
]


def _first(name, others):
    return [name, *(x for x in others if x != name)]


JUDGES = {
    "masks._check": _first("host/masks/test_masks_errors.py", _MASKS),
    "masks.algebra": _MASKS,
    "masks.base": _MASKS,
    "masks.block": _MASKS,
    "masks.counting": _first("host/masks/test_masks_counting.py", _MASKS),
    "masks.coverage": _first("host/masks/test_masks_tools.py", _MASKS),
    "masks.draw": _first("host/masks/test_masks_tools.py", _MASKS),
    "masks.functions": _first("host/masks/test_masks_functions.py", _MASKS),
    "masks.interval": _MASKS,
    "masks.io": _first("host/masks/test_masks_tools.py", _MASKS),
    "masks.leaves": _MASKS,
    "masks.patterns": _MASKS,
    "masks.planes": _MASKS,
    "masks.reorder": _first("host/masks/test_masks_tools.py", _MASKS),
    "masks.restriction": _first("host/masks/test_masks_restriction.py", _MASKS),
    "masks.stats": _first("host/masks/test_masks_tools.py", _MASKS),
    "masks.tiles": _first("host/masks/test_masks_tiles.py", _MASKS),
    "masks.token": _MASKS,
    "masks.trees": _MASKS,
    "nbflash.schedule.block_tiles": [
        "host/schedule/test_block_tiles.py",
        "host/inputs/test_block_map.py",
    ],
    "nbflash.schedule.tile_choice": [
        "host/backends/test_sm80_configs.py",
        "host/backends/test_sm90_configs.py",
    ],
    "nbflash.schedule.tile_schedule": [
        "host/schedule/test_schedule.py",
        "host/api/test_pickles.py",
        "host/planning/test_plan.py",
    ],
    "nbflash.schedule.work_list": [
        "host/schedule/test_work_list.py",
        "host/schedule/test_schedule.py",
        "host/planning/test_plan.py",
    ],
    "nbflash.planning.cache": _first("host/planning/test_plan.py", _PLANS),
    "nbflash.planning.decode_plan": [
        "host/api/test_counts.py",
        "host/keys/test_keys_calls.py",
        "host/decode/test_decode_errors.py",
        "host/decode/test_decode.py",
        "sim/decode/test_decode_api.py",
    ],
    "nbflash.planning.dispatch": [
        "host/api/test_api.py",
        "host/planning/test_plan.py",
        "host/inputs/test_block_map.py",
        "host/decode/test_decode_errors.py",
        "host/decode/test_decode.py",
    ],
    "nbflash.planning.kernels": ["host/planning/test_kernels.py"],
    "nbflash.planning.plan": [*_PLANS, "host/inputs/test_block_map.py"],
    "nbflash.definitions.quantised": _CACHES,
    "nbflash.kv_cache": _CACHES,
    "nbflash.merging": [
        "host/merging/test_merging_bad_input.py",
        "host/merging/test_merged_parts.py",
        "host/merging/test_merging.py",
    ],
    "nbflash.reference": [
        "host/reference/test_reference.py",
        "host/api/test_testing.py",
        "host/scores/test_scores.py::test_the_reference_names_what_fails",
        "host/scores/test_scores.py::test_what_is_no_number_is_named",
        "host/scores/test_scores.py::test_moves_of_the_yardstick_add_up",
        "host/scores/test_scores.py::test_gradients_equal_central_differences",
        "host/scores/test_score_gradients.py",
    ],
}

# Measures time, and so fails without a fault where other processes run.
LEFT_OUT = ["host/decode/test_decode.py::test_decode_is_level_with_a_loop"]
