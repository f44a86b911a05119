"""Which tests judge mutants of a module; see `mutation`. Cheap ones come first, those of
tests/host before those of tests/sim."""

_MASKS = [
    "host/test_masks_patterns.py",
    "host/test_masks_errors.py",
    "host/test_masks_ends.py",
    "host/test_masks_restriction.py",
    "host/test_masks_block_tiles.py",
    "host/test_identity.py",
    "host/test_pickles.py",
    "host/test_masks_tiles.py",
    "host/test_masks_tools.py",
    "host/test_masks_counting.py",
    "host/test_masks_functions.py",
    "host/test_masks_algebra.py",
]
_PLANS = ["host/test_identity.py", "host/test_plan.py", "host/test_api.py", "host/test_arrays.py"]
_CACHES = [
    "host/test_quantised_cache.py",
    "host/test_kv_cache_model.py",
    "host/test_decode_errors.py",
    "host/test_kv_cache.py",
]


def _first(name, others):
    return [name, *(x for x in others if x != name)]


JUDGES = {
    "masks._check": _first("host/test_masks_errors.py", _MASKS),
    "masks.algebra": _MASKS,
    "masks.base": _MASKS,
    "masks.block": _MASKS,
    "masks.counting": _first("host/test_masks_counting.py", _MASKS),
    "masks.coverage": _first("host/test_masks_tools.py", _MASKS),
    "masks.draw": _first("host/test_masks_tools.py", _MASKS),
    "masks.functions": _first("host/test_masks_functions.py", _MASKS),
    "masks.interval": _MASKS,
    "masks.io": _first("host/test_masks_tools.py", _MASKS),
    "masks.leaves": _MASKS,
    "masks.patterns": _MASKS,
    "masks.planes": _MASKS,
    "masks.reorder": _first("host/test_masks_tools.py", _MASKS),
    "masks.restriction": _first("host/test_masks_restriction.py", _MASKS),
    "masks.stats": _first("host/test_masks_tools.py", _MASKS),
    "masks.tiles": _first("host/test_masks_tiles.py", _MASKS),
    "masks.token": _MASKS,
    "masks.trees": _MASKS,
    "nbflash.schedule.block_tiles": ["host/test_block_tiles.py", "host/test_block_map.py"],
    "nbflash.schedule.tile_schedule": [
        "host/test_schedule.py",
        "host/test_pickles.py",
        "host/test_plan.py",
    ],
    "nbflash.schedule.work_list": [
        "host/test_work_list.py",
        "host/test_schedule.py",
        "host/test_plan.py",
    ],
    "nbflash.planning.cache": _first("host/test_plan.py", _PLANS),
    "nbflash.planning.decode_plan": [
        "host/test_counts.py",
        "host/test_decode_errors.py",
        "host/test_decode.py",
        "sim/test_decode_api.py",
    ],
    "nbflash.planning.dispatch": [
        "host/test_api.py",
        "host/test_plan.py",
        "host/test_block_map.py",
        "host/test_decode_errors.py",
        "host/test_decode.py",
    ],
    "nbflash.planning.kernels": ["host/test_kernels.py"],
    "nbflash.planning.plan": [*_PLANS, "host/test_block_map.py"],
    "nbflash.definitions.quantised": _CACHES,
    "nbflash.kv_cache": _CACHES,
    "nbflash.merging": [
        "host/test_merging_bad_input.py",
        "host/test_merged_parts.py",
        "host/test_merging.py",
    ],
    "nbflash.reference": [
        "host/test_reference.py",
        "host/test_testing.py",
        "host/test_scores.py::test_the_reference_names_what_fails",
        "host/test_scores.py::test_what_is_no_number_is_named",
        "host/test_scores.py::test_moves_of_the_yardstick_add_up",
        "host/test_scores.py::test_gradients_equal_central_differences",
        "host/test_score_gradients.py",
    ],
}

# Measures time, and so fails without a fault where other processes run.
LEFT_OUT = ["host/test_decode.py::test_decode_is_level_with_a_loop"]
