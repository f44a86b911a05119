"""Which tests judge mutants of a module; see `mutation`. Cheap ones come first, by tiers:
compile, host, sim."""

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


_LAUNCHES = [
    "host/backends/test_device.py",
    "host/backends/test_launches.py",
    "host/backends/test_decode_launches.py",
]
_CHOICES = [
    "host/backends/test_geometries.py",
    "host/backends/test_sm80_configs.py",
    "host/backends/test_sm90_configs.py",
    "host/keys/test_keys_frozen.py",
    "host/planning/test_kernels.py",
]
_KEYS = [
    "host/keys/test_keys_kernels.py",
    "host/keys/test_keys_contents.py",
    "host/keys/test_keys_cached.py",
    "host/keys/test_keys_values.py",
]
_SIMT = ["sim/simt/test_simt_api.py", "sim/simt/test_simt_layouts.py"]
_SM80 = ["sim/sm80/test_sm80.py"]
_SM90 = ["sim/sm90/test_sm90_api.py", "sim/sm90/test_sm90_tables.py"]
_DECODE = ["sim/decode/test_decode_api.py", "sim/decode/test_decode_rules.py"]
_DECODE_CHOICES = [
    "host/decode/test_windows.py",
    "host/decode/test_decode_errors.py",
]
_CPU = [
    "host/backends/test_cpu_threads.py",
    "host/backends/test_cpu.py",
    "host/api/test_dropout.py",
]
_INPUTS = [
    "host/inputs/test_problem.py",
    "host/inputs/test_arrays.py",
    "host/keys/test_keys_values.py",
    "host/keys/test_keys_calls.py",
    "host/api/test_bad_input.py",
    "host/api/test_api.py",
    "host/api/test_dropout.py",
]
_RANKS = [
    "host/distributed/test_distributed_parcels.py",
    "host/distributed/test_distributed_sharding.py",
    "host/keys/test_keys_ranks.py",
    "host/distributed/test_distributed_errors.py",
    "host/distributed/test_distributed_nccl.py",
    "host/distributed/test_distributed_decode.py",
    "host/distributed/test_distributed.py",
]
_SELECTION = ["host/keys/test_keys_selection.py", "host/selection/test_selection.py"]
_SCORES = [
    "host/scores/test_score_arrays.py",
    "host/keys/test_keys_values.py",
    "host/scores/test_scores.py",
    "host/scores/test_score_gradients.py",
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
    "nbflash.cuda.availability": ["host/planning/test_show_config.py", *_KEYS],
    "nbflash.cuda.bundled": _KEYS,
    "nbflash.cuda.device": [*_LAUNCHES, *_KEYS, "host/api/test_counts.py", *_CHOICES],
    "nbflash.cuda.dropout_state": [*_LAUNCHES, "sim/test_placed_dropout.py"],
    "nbflash.cuda.graphs": ["host/inputs/test_arrays.py"],
    "nbflash.cuda.kernel_key": [*_KEYS, "host/planning/test_kernels.py"],
    "nbflash.cuda.kernel_spec": [*_LAUNCHES, *_KEYS],
    "nbflash.cuda.kinds": ["compile/test_compile_launch.py", *_LAUNCHES, *_KEYS],
    "nbflash.cuda.launch": ["compile/test_compile_launch.py", *_LAUNCHES, *_KEYS],
    "nbflash.cuda.score_params": [*_SCORES, "sim/simt/test_simt_scores.py", *_SM90],
    "nbflash.cuda.sources": ["host/planning/test_sources.py"],
    "nbflash.cuda.tensor_map": [*_LAUNCHES, *_KEYS],
    "nbflash.backends.base": [*_INPUTS, "host/decode/test_decode_errors.py", *_SIMT],
    "nbflash.backends.reference": ["host/reference/test_reference.py", *_INPUTS],
    "nbflash.backends.registry": ["host/planning/test_plan.py", *_INPUTS],
    "nbflash.backends.block_plan.host": [
        "host/keys/test_keys_bound.py",
        "sim/block_plan/test_block_plan.py",
        "sim/block_plan/test_block_map_attention.py",
    ],
    "nbflash.backends.block_selection.host": [
        *_LAUNCHES[2:],
        *_SELECTION[:1],
        "host/planning/test_kernels.py",
        "sim/block_selection/test_block_selection.py",
    ],
    "nbflash.backends.cpu": _CPU,
    "nbflash.backends.cpu.blas": _CPU,
    "nbflash.backends.cpu.decode": ["host/decode/test_windows.py", "host/decode/test_decode.py"],
    "nbflash.backends.cpu.executor": _CPU,
    "nbflash.backends.cpu.sizes": _CPU,
    "nbflash.backends.cpu.threads": _CPU,
    "nbflash.backends.simt": [*_INPUTS, *_SIMT],
    "nbflash.backends.simt.configs": [*_LAUNCHES, *_CHOICES, "sim/simt/test_simt_configs.py"],
    "nbflash.backends.simt.decode_configs": [*_LAUNCHES, *_CHOICES, *_DECODE],
    "nbflash.backends.simt.decode_host": [*_LAUNCHES, *_CHOICES, *_DECODE],
    "nbflash.backends.simt.executor": [*_LAUNCHES, "host/keys/test_keys_bound.py", *_SIMT],
    "nbflash.backends.simt.score_gradient_host": [
        "host/keys/test_keys_bound.py",
        "sim/simt/test_simt_score_gradients.py",
    ],
    "nbflash.backends.sm80": [*_CHOICES, *_DECODE_CHOICES, *_SM80],
    "nbflash.backends.sm80.config": [*_CHOICES, *_LAUNCHES, *_SM80],
    "nbflash.backends.sm80.decode.config": [*_LAUNCHES, *_CHOICES, *_DECODE_CHOICES, *_DECODE],
    "nbflash.backends.sm80.decode.host": [*_LAUNCHES, *_DECODE_CHOICES, *_DECODE],
    "nbflash.backends.sm80.executor": [*_LAUNCHES, "host/keys/test_keys_bound.py", *_SM80],
    "nbflash.backends.sm90": [*_CHOICES, *_DECODE_CHOICES, *_SM90],
    "nbflash.backends.sm90.executor": [*_LAUNCHES, "host/keys/test_keys_bound.py", *_SM90],
    "nbflash.backends.sm90.backward.choice": [*_CHOICES, "host/api/test_two_passes.py", *_LAUNCHES],
    "nbflash.backends.sm90.backward.config": [*_CHOICES, "host/api/test_two_passes.py", *_LAUNCHES],
    "nbflash.backends.sm90.backward.dq_config": [*_CHOICES, *_LAUNCHES, *_SM90],
    "nbflash.backends.sm90.backward.dq_host": [*_LAUNCHES, "host/keys/test_keys_bound.py", *_SM90],
    "nbflash.backends.sm90.backward.host": [*_LAUNCHES, "host/keys/test_keys_bound.py", *_SM90],
    "nbflash.backends.sm90.decode.config": [*_LAUNCHES, *_CHOICES, *_DECODE_CHOICES, *_DECODE],
    "nbflash.backends.sm90.decode.host": [*_LAUNCHES, *_DECODE_CHOICES, *_DECODE],
    "nbflash.backends.sm90.forward.choice": [*_CHOICES, *_LAUNCHES],
    "nbflash.backends.sm90.forward.config": [*_CHOICES, *_LAUNCHES, *_SM90],
    "nbflash.backends.sm90.shared.config": [*_CHOICES, *_LAUNCHES, *_SM90],
    "nbflash.backends.split_kv.merge_host": [
        *_LAUNCHES[2:],
        "host/keys/test_keys_selection.py",
        "sim/merging/test_merge_parts.py",
    ],
    "nbflash.backends.split_kv.shares": [*_LAUNCHES[2:], *_DECODE_CHOICES, *_DECODE],
    "nbflash.backends.split_kv.splits": [*_DECODE_CHOICES, *_LAUNCHES[2:], *_DECODE],
    "nbflash.api": _INPUTS,
    "nbflash.decoding": [*_DECODE_CHOICES, "host/keys/test_keys_bound.py", *_CACHES],
    "nbflash.inputs.arrays": _INPUTS,
    "nbflash.inputs.block_layout": [
        "host/schedule/test_block_tiles.py",
        "host/inputs/test_block_map.py",
    ],
    "nbflash.inputs.block_map": [
        "host/keys/test_keys_values.py",
        "host/keys/test_keys_calls.py",
        "host/inputs/test_block_map.py",
    ],
    "nbflash.inputs.decode_problem": [
        *_DECODE_CHOICES,
        "host/keys/test_keys_calls.py",
        "host/inputs/test_arrays.py",
        "host/decode/test_decode.py",
    ],
    "nbflash.inputs.dropout": ["host/keys/test_keys_calls.py", "host/api/test_dropout.py"],
    "nbflash.inputs.given": _INPUTS,
    "nbflash.inputs.positions": [
        "host/keys/test_keys_values.py",
        "host/api/test_identity.py",
        "host/api/test_dropout.py",
        *_RANKS,
        "sim/test_placed_dropout.py",
    ],
    "nbflash.inputs.problem": _INPUTS,
    "nbflash.inputs.score_arrays": _SCORES,
    "nbflash.inputs.score_functions": _SCORES,
    "nbflash.inputs.tensors": ["host/inputs/test_arrays.py", "host/keys/test_keys_values.py"],
    "nbflash.definitions.philox": ["host/api/test_dropout.py", *_LAUNCHES],
    "nbflash.definitions.score_chain": [*_SCORES, "host/reference/test_reference.py"],
    "nbflash.definitions.score_functions": _SCORES,
    "nbflash.scores": _SCORES,
    "nbflash.disk_cache.content": [
        "host/keys/test_keys_contents.py",
        "host/planning/test_disk_cache.py",
    ],
    "nbflash.disk_cache.sealed": ["host/planning/test_disk_cache.py"],
    "nbflash.planning.bundle": ["host/planning/test_kernels.py"],
    "nbflash.distributed.attention": _RANKS,
    "nbflash.distributed.by_heads": _RANKS,
    "nbflash.distributed.call": _RANKS,
    "nbflash.distributed.communicator": _RANKS,
    "nbflash.distributed.dealing": _RANKS,
    "nbflash.distributed.decoding": _RANKS,
    "nbflash.distributed.layout": _RANKS,
    "nbflash.distributed.local": _RANKS,
    "nbflash.distributed.nccl": _RANKS,
    "nbflash.distributed.parcels": _RANKS,
    "nbflash.distributed.placed_score": _RANKS,
    "nbflash.distributed.rank_plan": _RANKS,
    "nbflash.distributed.sharding": _RANKS,
    "nbflash.distributed.stages": _RANKS,
    "nbflash.selection.blocks": _SELECTION,
    "nbflash.selection.compressed_keys": _SELECTION,
    "nbflash.selection.diagonal_sums": _SELECTION,
    "nbflash.selection.kept_share": _SELECTION,
    "nbflash.selection.last_queries": _SELECTION,
    "nbflash.selection.pooled": _SELECTION,
}

# Measures time, and so fails without a fault where other processes run.
LEFT_OUT = ["host/decode/test_decode.py::test_decode_is_level_with_a_loop"]
