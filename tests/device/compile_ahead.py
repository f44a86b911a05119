"""Compile kernels in several processes: a cubin needs no GPU, and the disk cache is shared.

A test module may say itself which kernels its tests need: ``kernels(**parameters)`` of one of them
gives tuples of a function of this module and its arguments. See conftest.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from unittest.mock import patch


def problem_of(dtype, head_dim, vectors=True, scale=None, sizes=(1, 1, 1, 1)):
    """A problem whose kernels are those of every one like it; ``sizes``: batch, nq, nk, heads."""
    from nbflash.inputs.problem import Problem

    batch, nq, nk, heads = sizes
    return Problem(
        batch=batch,
        nq=nq,
        nk=nk,
        heads=heads,
        heads_kv=1,
        head_dim=head_dim,
        dtype=dtype,
        scale=head_dim**-0.5 if scale is None else scale,
        strides=((0, 0, 0, 1),) * 3,
        device="cuda",
        device_id=0,
        alignment=16 if vectors else 2,
    )


class Recorder:
    """A device that notes which kernels it is asked to run."""

    def __init__(self, device):
        self._device, self.specs = device, []

    def __getattr__(self, name):
        return getattr(self._device, name)

    def params(self, given):
        return given

    def bind(self, spec, *_):
        self.specs.append(spec)


def simt_specs(problem, score=None, dropout=0.0, mask=None):
    """Forward and both forms of the backward, the same for all masks."""

    def bind(executor, vectors):
        executor._forward  # noqa: B018
        executor._launches.row_kernels  # noqa: B018
        for deterministic in (False, True):
            executor._passes(deterministic, vectors)

    return _recorded(bind, problem, score, dropout)


def score_specs(problem, score, mask, impl):
    """Forward and the gradients of a score's arrays."""

    def bind(executor, vectors):
        executor._launches.row_kernels  # noqa: B018
        executor._kernel(vectors)

    if impl == "sm80":
        forward = sm80_specs(problem, score, mask=mask)
    elif impl == "sm90":
        forward = sm90_forward_specs(problem, score, mask=mask)
    else:
        forward = _recorded(lambda executor, vectors: executor._forward, problem, score)
    return forward + _recorded(bind, problem, score, learned=True)


def _recorded(bind, problem, score, dropout=0.0, learned=False):
    """What ``bind(executor, vectors)`` asks the device for."""
    import masks
    from nbflash.backends.simt import executor as simt
    from nbflash.backends.simt.score_gradient_host import SimtScoreBackward
    from nbflash.cuda.device import cuda_device
    from nbflash.inputs.attention_spec import AttentionSpec

    recorder, mask = Recorder(cuda_device(0)), masks.dense(problem.nq, problem.nk)
    vectors = simt.vectors_allowed(problem.dtype, problem.head_dim, problem.alignment)
    make = SimtScoreBackward if learned else simt.SimtExecutor
    with patch.object(simt, "cuda_device", return_value=recorder):
        bind(make(AttentionSpec(problem, mask, score, dropout)), vectors)
    return recorder.specs


def sm80_specs(problem, score=None, dropout=0.0, mask=None):
    """Forward and both forms of the backward; without a mask of full tiles and of masked ones."""
    import masks
    from nbflash.backends.sm80.executor import Sm80Executor
    from nbflash.cuda.device import cuda_device
    from nbflash.inputs.attention_spec import AttentionSpec
    from nbflash.planning.dispatch import why_not_here

    if why_not_here("sm80"):
        return []
    recorder = Recorder(cuda_device(0))
    for each in (masks.dense(256), masks.causal(256)) if mask is None else (mask,):
        (nq, nk), batch = each.shape, each.batch or problem.batch
        sized = replace(problem, nq=nq, nk=nk, batch=batch, heads=each.heads or problem.heads)
        executor = Sm80Executor(AttentionSpec(sized, each, score, dropout), device=recorder)
        executor.bind_forward()
        for deterministic in (False, True):
            executor.bind_backward(deterministic)
    return recorder.specs


def sm90_forward_specs(problem, score=None, dropout=0.0, mask=None):
    """What Hopper chooses for a mask, or may choose for any; nothing elsewhere."""
    from nbflash.backends.sm90.forward.choice import choose
    from nbflash.backends.sm90.forward.config import forward_configs
    from nbflash.backends.sm90.forward.kernel import fwd_sm90_spec
    from nbflash.schedule.tile_schedule import TileSchedule

    if _not_hopper():
        return []
    given = {"negate": problem.scale < 0, "score": _code(score, problem), "dropout": bool(dropout)}
    configs = forward_configs(problem.dtype, problem.head_dim, **given)
    if mask is not None:
        configs = [
            choose(configs, mask, lambda c: TileSchedule.from_mask(mask, c.tile_m, c.tile_n))[0]
        ]
        return list(map(fwd_sm90_spec, configs))
    return [
        fwd_sm90_spec(either)
        for config in configs
        for either in (_by_masking(config, None) if config.halves else [config])
    ]


def _by_masking(config, mask):
    """A configuration for the tiles of a mask, or for full and for masked ones."""
    from nbflash.schedule.tile_schedule import TileSchedule

    kinds = False, True
    if mask is not None:
        kinds = (TileSchedule.from_mask(mask, config.tile_m, config.tile_n).full_tiles,)
    return [replace(config, full_tiles=full) for full in kinds]


def _for_tiles(config, mask):
    """The same of the backward's tiles by columns."""
    from nbflash.backends.sm90.backward.choice import for_tiles
    from nbflash.schedule.tile_schedule import TileSchedule

    if mask is None:
        return _by_masking(config, None)
    return [for_tiles(config, TileSchedule.from_mask(mask, config.tile_m, config.tile_n))]


def sm90_specs(problem, score=None, dropout=0.0, mask=None):
    """Forward and both forms of the backward; nothing where there is no Hopper GPU."""
    from nbflash.backends.sm90.backward import config as columns
    from nbflash.backends.sm90.backward.convert_dq import convert_dq_sm90_spec
    from nbflash.backends.sm90.backward.dq_config import completed, dq_configs
    from nbflash.backends.sm90.backward.dq_kernel import bwd_sm90_dq_spec
    from nbflash.backends.sm90.backward.host import rows_config
    from nbflash.backends.sm90.backward.kernel import bwd_sm90_spec
    from nbflash.backends.sm90.backward.row_statistics import statistics_sm90_spec

    if _not_hopper():
        return []
    specs = sm90_forward_specs(problem, score, dropout, mask)
    sizes = problem.dtype, problem.head_dim
    more = {"score": _code(score, problem), "dropout": bool(dropout)}
    for config in columns.columns_configs(*sizes):
        specs += map(bwd_sm90_spec, _for_tiles(replace(config, **more), mask))
    for config in dq_configs(*sizes):
        specs += map(bwd_sm90_dq_spec, _by_masking(completed(config, **more), mask))
    for config in columns.backward_configs(*sizes):
        configs = _for_tiles(replace(config, **more), mask)
        if configs := [cfg for cfg in configs if not cfg.why_not()]:
            specs += map(bwd_sm90_spec, configs)
            around = statistics_sm90_spec, convert_dq_sm90_spec
            specs += [of(rows_config(configs[0])) for of in around]
    return specs


SPECS = {"simt": simt_specs, "sm80": sm80_specs, "sm90": sm90_specs}


def _not_hopper():
    from nbflash.planning.dispatch import why_not_here

    return why_not_here("sm90")


def _code(score, problem):
    from nbflash.cuda.score_params import prepare

    return prepare(score, problem, (9, 0))[0]


def decode_specs(dtype, stored, head_dim, nq, heads, page_size=None, masked=False):
    """First kernels, of queries and caches of two dtypes; ``page_size`` None: contiguous."""
    from nbflash.backends.simt import decode_configs as decode_simt_config
    from nbflash.backends.simt.decode import decode_simt_spec
    from nbflash.backends.sm80.decode import config as decode_sm80_config
    from nbflash.backends.sm80.decode.kernel import decode_sm80_spec
    from nbflash.backends.sm90.decode import config as decode_sm90_config
    from nbflash.backends.sm90.decode.kernel import decode_sm90_spec
    from nbflash.cuda.device import cuda_device

    found = []
    of_one_byte = stored if stored != dtype else ""
    has_float8 = of_one_byte != "float8_e4m3fn" or cuda_device(0).capability >= (8, 9)
    columns = 16 if of_one_byte else 8
    if dtype in ("float16", "bfloat16") and not head_dim % columns and has_float8:
        known = {"smem_limit": cuda_device(0).smem_limit, "masked": masked}
        config = decode_sm80_config.decode_config(dtype, head_dim, of_one_byte, **known)
        found.append(decode_sm80_spec(config))
    if dtype in ("float16", "bfloat16") and not _not_hopper():
        given = dtype, head_dim, page_size, of_one_byte
        config = decode_sm90_config.decode_config(*given, masked=masked)
        if not config.why_not():
            found.append(decode_sm90_spec(config))
    if found:
        return found
    how = {"group": heads[0] // heads[1], "masked": masked, "vectors": head_dim % 4 == 0}
    return [
        decode_simt_spec(decode_simt_config.decode_config(dtype, stored, head_dim, nq=nq, **how))
    ]


def compile_ahead(specs, capability):
    """Fill the disk cache, on all cores."""
    from nbflash.cuda.launch import cached_cubin

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context) as pool:
        for job in [pool.submit(cached_cubin, s, capability) for s in specs if _can_travel(s)]:
            job.result()


def _can_travel(spec):
    """Whether another process finds the functions of a score."""
    score = getattr(spec.config, "score", None)
    return score is None or score.own


def once(run, work):
    """Do ``work`` in one process of a test run; the others wait until it is done.

    Should that process die, its lock goes with it, and the next one does what is left.

    Parameters
    ----------
    run : str
        The same for all processes, and another for every run.
    work : callable
    """
    import fcntl

    from nbflash.cuda.availability import cache_dir

    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "compiled-ahead").open("a+", encoding="utf-8") as last_done:
        fcntl.flock(last_done, fcntl.LOCK_EX)
        last_done.seek(0)
        if last_done.read() != run:
            work()
            last_done.truncate(0)
            last_done.write(run)
