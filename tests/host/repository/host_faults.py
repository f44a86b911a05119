"""Faults of host code, and the test that catches each: module, fault, test."""

from mutants import Mutant

SM90, SIMT = "nbflash.backends.sm90", "nbflash.backends.simt"
HOPPER, PORTABLE = "tests/sim/sm90/test_sm90_api.py::", "tests/sim/simt/test_simt_api.py::"
DECODE = "tests/sim/decode/test_decode_api.py::"
IDENTITY, MERGING = "tests/host/api/test_identity.py::", "tests/host/merging/test_merging.py::"
SOURCES = "tests/host/planning/test_sources.py"
QUANTISED = "tests/host/decode/test_quantised_cache.py::"
GRADIENTS = "tests/host/scores/test_score_gradients.py::"

FUNCTION_READS = "tests/host/masks/test_masks_function_reads.py::"
ANOTHER_MASK = f"{IDENTITY}test_each_parameter_makes_another_mask"
ANOTHER_PLAN = f"{IDENTITY}test_plans_differ_in_what_calls_differ"
KEYS = [
    (
        "masks.base",
        Mutant("a key without the shape", "__name__, self.shape, *map", "__name__, *map"),
        f"{ANOTHER_MASK}[dense-nk]",
    ),
    (
        "masks.token",
        Mutant(
            "a neighbourhood's key without its dilation",
            "return self.sizes, self.kernel, self.stride, self.dilation",
            "return self.sizes, self.kernel, self.stride",
        ),
        f"{ANOTHER_MASK}[neighborhood-dilation]",
    ),
    (
        "masks.functions",
        Mutant("classes are constants", "Mask | np.dtype)", "Mask | np.dtype | type)"),
        f"{FUNCTION_READS}test_attention_after_an_attribute_of_a_class_has_changed",
    ),
    (
        "nbflash.planning.plan",
        Mutant(
            "a layout's key without v",
            '("layout", signature(q), signature(k), signature(v))',
            '("layout", signature(q), signature(k))',
        ),
        "tests/host/planning/test_plan.py::test_another_layout_of_one_array_is_planned_again[v]",
    ),
    (
        "nbflash.planning.plan",
        Mutant(
            "a call's key without v",
            "signatures = signature(q), signature(k), signature(v)",
            "signatures = signature(q), signature(k)",
        ),
        ANOTHER_PLAN,
    ),
    (
        "nbflash.planning.plan",
        Mutant("a call's key without the scale", "window, scale, types", "window, types"),
        ANOTHER_PLAN,
    ),
    (
        "nbflash.planning.plan",
        Mutant("a call's key without dropout", "impl, score, dropout)", "impl, score)"),
        ANOTHER_PLAN,
    ),
    (
        "nbflash.cuda.sources",
        Mutant("what is referred to forgotten", "left += refers_to", "pass"),
        SOURCES,
    ),
    (
        "nbflash.cuda.sources",
        Mutant("what is imported forgotten", "if name} | imported", "if name}"),
        SOURCES,
    ),
    (
        "nbflash.cuda.sources",
        Mutant("what a module does besides", "[*refers_to, (module, BESIDES)]", "refers_to"),
        SOURCES,
    ),
]

KEYED, LAUNCHED = "tests/host/keys/", "tests/host/backends/test_launches.py::"
KEYS += [
    (module, Mutant(*fault), test)
    for module, test, *fault in (
        (
            *("masks.block", f"{KEYED}test_keys_masks.py", "tiles of any height"),
            *('(("retiled", grid.tile_m, grid', '(("retiled", grid'),
        ),
        (
            *("nbflash.planning.decode_plan", f"{KEYED}test_keys_calls.py::test_calls_of_decode"),
            *("a cache without V's scales", "(q, *cache)]", "(q, *cache[:5])]"),
        ),
        (
            *("nbflash.cuda.kernel_key", f"{KEYED}test_keys_kernels.py::test_kernels"),
            *("the first function alone", "(*parts.users)", "(*parts.users[:1])"),
        ),
        (
            *(f"{SM90}.backward.host", f"{LAUNCHED}test_backward", "O's strides for dO's"),
            *("*of_dout, *of_out, *strides", "*of_out, *of_dout, *strides"),
        ),
    )
]

SMALL = f"{HOPPER}test_an_out_that_no_tensor_map_describes"
BOTH = f"{HOPPER}test_dropout"
LAUNCHES = [
    (
        "nbflash.cuda.tensor_map",
        Mutant("a length-1 axis with any stride", "if size > 1 else ALIGNMENT", "if size else 0"),
        f"{HOPPER}test_an_axis_of_length_one_has_any_stride",
    ),
    (
        "nbflash.cuda.tensor_map",
        Mutant("heads in the place of rows", "(_PANEL, rows, 1, 1)", "(_PANEL, 1, rows, 1)"),
        SMALL,
    ),
    (
        f"{SM90}.executor",
        Mutant(
            "a map with the rows of another",
            "rows = (cfg.tile_m, cfg.tile_n, cfg.tile_n)",
            "rows = (cfg.tile_m, cfg.tile_n, cfg.tile_n // 2)",
        ),
        SMALL,
    ),
    (
        f"{SM90}.executor",
        Mutant("an out of any stride", "if bits % tensor_map.ALIGNMENT or min", "if min"),
        SMALL,
    ),
    (
        f"{SM90}.backward.host",
        Mutant(
            "an lse with gaps",
            "lse = lse if lse.flags.c_contiguous else lse.copy()",
            "pass",
        ),
        BOTH,
    ),
    (
        f"{SM90}.backward.host",
        Mutant(
            "a dO of any alignment",
            "if arrays.alignment_in_memory(x) >= tensor_map.ALIGNMENT and min(x.strides) >= 0:",
            "if True:",
        ),
        BOTH,
    ),
    (
        f"{SM90}.backward.host",
        Mutant(
            "a map of dO with the rows of keys",
            "of_dout, self.config.tile_m)",
            "of_dout, self.config.tile_n)",
        ),
        BOTH,
    ),
    (
        f"{SM90}.backward.dq_host",
        Mutant(
            "a map of dQ with the rows of keys",
            "(ROWS, n, n, ROWS)",
            "(ROWS, n, n, n)",
        ),
        BOTH,
    ),
    (
        f"{SM90}.decode.host",
        Mutant(
            "V's scales laid out as K's",
            "(cache.k_scale, cache.v_scale)",
            "(cache.k_scale, cache.k_scale)",
        ),
        f"{DECODE}test_scales_of_v_are_laid_out_by_themselves[sm90]",
    ),
    (
        f"{SIMT}.decode_host",
        Mutant(
            "V's scales laid out as K's",
            "map(scale_strides, (k_scale, v_scale))",
            "map(scale_strides, (k_scale, k_scale))",
        ),
        f"{DECODE}test_scales_of_v_are_laid_out_by_themselves[simt]",
    ),
    (
        f"{SIMT}.executor",
        Mutant(
            "an lse with gaps",
            "lse = lse if lse.flags.c_contiguous else lse.copy()",
            "pass",
        ),
        f"{PORTABLE}test_strided_lse",
    ),
]

SUMS = [
    (
        "nbflash.merging",
        Mutant(
            "an exponent by the LSE that was rounded",
            "return p_a / total, p_b / total, largest + xp.log1p(xp.minimum(p_a, p_b))",
            "lse = largest + xp.log1p(xp.minimum(p_a, p_b))\n"
            "    return xp.exp(lse_a - lse), xp.exp(lse_b - lse), lse",
        ),
        f"{MERGING}test_weights_keep_their_precision_at_any_shift",
    ),
    (
        "nbflash.merging",
        Mutant("dsink in float32", "axis=(0, 2), dtype=np.float64)", "axis=(0, 2))"),
        f"{MERGING}test_the_gradient_of_a_sink_is_summed_in_float64",
    ),
    (
        "nbflash.backends.cpu.score_gradient",
        Mutant("long sums of float32", "else np.float64 for part", "else real for part"),
        f"{GRADIENTS}test_long_sums_are_of_float64",
    ),
    (
        "nbflash.kv_cache",
        Mutant(
            "a fork without its scales",
            "for array in self._arrays:\n                    array[page",
            "for array in self._arrays[:2]:\n                    array[page",
        ),
        f"{QUANTISED}test_a_fork_of_a_quantised_cache_grows[int8]",
    ),
    (
        "nbflash.definitions.quantised",
        Mutant("rows of subnormal numbers wrap", "np.clip(stored, -limit, limit)", "stored"),
        f"{QUANTISED}test_rows_of_subnormal_numbers[int8]",
    ),
]

TABLES = [
    (
        "nbflash.backends.split_kv.splits",
        Mutant(
            "heads of the first sequence alone",
            "(planes == planes[:, :1]).all()",
            "(planes[:1] == planes[:1, :1]).all()",
        ),
        "tests/host/decode/test_decode.py::test_heads_go_together_where_every_sequence_lets_them",
    ),
    (
        "nbflash.backends.split_kv.splits",
        Mutant(
            "a window's tiles as if it began with one",
            "(keys + tile_n - 2) // tile_n + 1",
            "(keys + tile_n - 1) // tile_n",
        ),
        "tests/host/decode/test_windows.py::test_the_tiles_of_a_window[3-window3]",
    ),
    (
        "nbflash.backends.split_kv.splits",
        Mutant(
            "splits by the tiles of the capacity",
            "min(-(-p.capacity // tile_n), most)",
            "-(-p.capacity // tile_n)",
        ),
        "tests/host/decode/test_windows.py::test_the_tiles_of_a_window[3-window3]",
    ),
]

PROBLEM, ALL, WINDOW = "nbflash.inputs.decode_problem", "None-alone0", "window2-alone2"
MOST, LEFT, RIGHT = "0 if mask is None else self.nq - 1", "min(left, self.capacity)", "min(right,"
SEEN = "tests/host/decode/test_windows.py::test_what_a_token_sees"
BOUNDS = [
    (PROBLEM, Mutant(*fault), f"{SEEN}[{case}-with_mask{case[-1]}]")
    for case, *fault in (
        (ALL, "the causal rule beside a mask", MOST, "0"),
        (ALL, "no causal rule", MOST, "self.nq - 1"),
        (WINDOW, "no window to the left", LEFT, "self.capacity"),
        (WINDOW, "no window to the right", f"{RIGHT} most)", "most"),
        (ALL, "nothing to the left", "self.capacity if left is None", "0 if left is None"),
        (ALL, "keys behind a mask's columns", "min(self.capacity, mask.shape[1])", "self.capacity"),
    )
]

PLAN, COUNTS = "nbflash.planning.decode_plan", "tests/host/api/test_counts.py"
STREAMS = [
    (
        PLAN,
        Mutant(
            "a graph records the counts of its stream",
            "None if capturing else self._of_stream.get(stream)",
            "self._of_stream.get(stream)",
        ),
        COUNTS,
    ),
    (
        PLAN,
        Mutant("a stream keeps the counts of a graph", "not None and not capturing", "not None"),
        COUNTS,
    ),
    (
        PLAN,
        Mutant("threads share counts", "found is None and stream != _PER_THREAD", "found is None"),
        COUNTS,
    ),
    (
        PLAN,
        Mutant("counts of a number of streams", "_of_stream.get(stream)", "_of_stream.get(0)"),
        COUNTS,
    ),
]

FAULTS = STREAMS + TABLES + KEYS + LAUNCHES + SUMS + BOUNDS
