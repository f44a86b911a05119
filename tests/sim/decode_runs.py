"""Runs of decode's kernels in the simulator, and what they must give."""

import functools
from dataclasses import replace

import numpy as np

import nbflash
from nbflash import testing
from nbflash.backends.simt import decode_host
from nbflash.backends.split_kv import combine as combine_simt
from nbflash.cuda import launch
from nbflash.inputs.decode_problem import Cache, check_decode
from nbflash.planning import decode_plan


def parts(splits, batch, nq, heads, head_dim, dtype=np.float32, seed=0, empty=0.0):
    """Results over ``splits`` parts, (out, lse); a share of ``empty`` rows attends nothing."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((splits, batch, nq, heads, head_dim)).astype(dtype)
    lse = (8 * rng.standard_normal((splits, batch, heads, nq))).astype(dtype)
    lse[rng.random(lse.shape) < empty] = -np.inf
    out[np.isneginf(lse).swapaxes(2, 3)] = 0
    return out, lse


def combined(part_o, part_lse, out_dtype, *, module=combine_simt, out=None, warps=None):
    """``(out, lse)`` from the kernel of ``module``, in poisoned memory or in ``out``."""
    splits, batch, nq, heads, head_dim = part_o.shape
    name = np.dtype(out_dtype).name
    config = module.combine_config(name, head_dim, splits)
    if warps is not None:
        config = module.CombineConfig(name, head_dim, warps)
    out = testing.poisoned(part_o.shape[1:], out_dtype) if out is None else out
    lse = testing.poisoned(part_lse.shape[1:], part_lse.dtype)
    strides = tuple(s // out.itemsize for s in out.strides[:3])
    rows = batch * nq * heads
    arguments = *map(flat, (part_o, part_lse, out, lse)), strides, nq, heads, splits, rows
    launch.simulate(module.combine_simt_spec(config), rows, arguments)
    return out, lse


def merged(part_o, part_lse):
    """The parts one after the other through `nbflash.merge`."""
    parts_ = zip(part_o, part_lse, strict=True)
    return functools.reduce(lambda a, b: nbflash.merge(*a, *b), parts_)


def check_combined(part_o, part_lse, dtype=np.float32, **how):
    """Hold the kernel that joins to `nbflash.merge` of float64 parts; returns its results."""
    got = combined(part_o, part_lse, dtype, **how)
    ref = merged(part_o.astype(np.float64), part_lse.astype(np.float64))
    low_out, low_lse = merged(part_o, part_lse)
    with np.errstate(over="ignore"):
        low = low_out.astype(dtype), low_lse
    for name, *values in zip(("out", "lse"), got, ref, low, strict=True):
        testing.assert_within_reference(*values, name=name)
    return got


def check_shifted(shift, **how):
    """All LSE larger by a power of two: the same output to the bit, and the LSE to a rounding.

    A budget of merged parts would not tell: they round the LSE at its full size.
    """
    part_o, part_lse = parts(4, 1, 2, 2, 8)
    part_lse = np.rint(8 * part_lse) / 8  # the shift rounds nothing
    out, lse = combined(part_o, part_lse, np.float32, **how)
    far, lse_far = combined(part_o, part_lse + np.float32(shift), np.float32, **how)
    assert far.tobytes() == out.tobytes()
    assert (abs(lse_far - np.float64(shift) - lse) <= np.spacing(abs(lse_far))).all()


def flat(x):
    """All memory from the first element of ``x`` on, as a kernel's pointer sees it."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)) // x.itemsize
    if x.dtype.name == "bfloat16":
        x = x.view(np.uint16)
    return np.lib.stride_tricks.as_strided(x, (span,), (x.itemsize,))


def decoded(q, k, v, lengths, *, modules=None, splits=None, scale=None, **options):
    """``(out, lse)`` of both kernels on poisoned memory.

    ``options`` are block_table, mask, window, score, k_scale and v_scale, and fields of the
    configuration; ``modules`` are what to run, by name, if not the modules as they are.
    """
    host, plan = ((modules[x.__name__] if modules else x) for x in (decode_host, decode_plan))
    named = {name: options.pop(name, None) for name in ("block_table", "k_scale", "v_scale")}
    mask, cache = options.pop("mask", None), Cache(k, v, lengths, **named)
    window, score = options.pop("window", None), options.pop("score", None)

    def partial(device, problem, mask, q, cache):
        config = host.SimtPartial.config_for(problem, mask, q, cache)
        config = replace(config, **{"warps": 1} | options)
        how = {"config": config, "splits": splits}
        return host.SimtPartial(device, problem, mask, q, cache, **how)

    problem = check_decode(q, cache, scale, window, score)
    return plan.CudaDecoder(problem, mask, q, cache, partial)(q, cache)
