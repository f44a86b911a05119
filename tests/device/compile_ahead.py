"""Compile kernels in several processes: a cubin needs no GPU, and the disk cache is shared."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor


def problem_of(dtype, head_dim, vectors):
    """A problem whose kernels are those of every problem with this dtype and head_dim."""
    from nbflash.problem import Problem

    return Problem(
        batch=1,
        nq=1,
        nk=1,
        heads=1,
        heads_kv=1,
        head_dim=head_dim,
        dtype=dtype,
        scale=1.0,
        strides=((0, 0, 0, 1),) * 3,
        device="cuda",
        device_id=0,
        alignment=16 if vectors else 2,
    )


def specs_of(problem, device):
    """The kernels that a device with these attributes would be asked to run."""
    import masks
    from nbflash import simt

    specs = []

    class Recorder:
        def __init__(self, device_id):
            vars(self).update(device)

        def params(self, given):
            return given

        def bind(self, spec, *_):
            specs.append(spec)

    simt._Gpu, original = Recorder, simt._Gpu
    try:
        executor = simt.SimtExecutor(problem, masks.dense(1, 1))
        executor._forward  # noqa: B018
        executor._row_kernels  # noqa: B018
        vectors = simt.vectors_allowed(problem.dtype, problem.head_dim, problem.alignment)
        for deterministic in (False, True):
            executor._passes(deterministic, vectors)
    finally:
        simt._Gpu = original
    return specs


def _compile(combination, device, capability):
    from nbflash.launch import cached_cubin

    for spec in specs_of(problem_of(*combination), device):
        cached_cubin(spec, capability)


def sm90_specs(dtype, head_dim):
    """The Hopper kernels of every problem with this dtype and head_dim, whatever its mask."""
    from nbflash.kernels import bwd_sm90_config as columns
    from nbflash.kernels.bwd_sm90 import bwd_sm90_spec
    from nbflash.kernels.bwd_sm90_dq import bwd_sm90_dq_spec
    from nbflash.kernels.bwd_sm90_dq_config import dq_config
    from nbflash.kernels.bwd_sm90_rows import round_sm90_spec, statistics_sm90_spec
    from nbflash.kernels.fwd_sm90 import fwd_sm90_spec
    from nbflash.kernels.sm90_config import forward_configs
    from nbflash.sm90_backward import rows_config

    for negate in (False, True):
        yield from map(fwd_sm90_spec, forward_configs(dtype, head_dim, negate))
    cfg = columns.columns_config(dtype, head_dim)
    yield bwd_sm90_spec(cfg)
    yield bwd_sm90_dq_spec(dq_config(dtype, head_dim, cfg.tile_m))
    if head_dim <= columns.MOST_HEAD_DIM:
        cfg = columns.backward_config(dtype, head_dim)
        yield bwd_sm90_spec(cfg)
        yield from (of(rows_config(cfg)) for of in (statistics_sm90_spec, round_sm90_spec))


def _compile_sm90(dtype, head_dim, which):
    from nbflash.launch import cached_cubin

    cached_cubin(list(sm90_specs(dtype, head_dim))[which], (9, 0))


def compile_ahead(combinations, sm90=()):
    """Fill the disk cache for all ``(dtype, head_dim, vectors)``, and for Hopper's, without."""
    import cupy

    from nbflash import simt
    from nbflash.config import why_not_here

    simple = (bool, int, float, str, tuple)
    device = {name: x for name, x in vars(simt._Gpu(0)).items() if isinstance(x, simple)}
    digits = cupy.cuda.Device(0).compute_capability
    capability = int(digits[:-1]), int(digits[-1])
    sm90 = () if why_not_here("sm90") else sm90
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context) as pool:
        jobs = [pool.submit(_compile, c, device, capability) for c in combinations]
        for of in sm90:
            jobs += [pool.submit(_compile_sm90, *of, i) for i, _ in enumerate(sm90_specs(*of))]
        for job in jobs:
            job.result()
