"""Runs of the portable decode kernel and of the one that joins its parts, in the simulator."""

from dataclasses import replace

from nbflash.backends.sm80.decode import host as decode_host
from nbflash.inputs.decode_problem import Cache, check_decode
from nbflash.planning.decode_plan import CudaDecoder


def decoded(
    q,
    k,
    v,
    lengths,
    block_table=None,
    mask=None,
    *,
    host=decode_host,
    splits=2,
    scale=None,
    scales=None,
    window=None,
    score=None,
    warps=2,
    stages=3,
    **options,
):
    """``(out, lse)`` of kernels bound by ``host``; ``options`` are of the configuration.

    ``scales`` are those of K and V where they are quantised.
    """
    cache = Cache(k, v, lengths, block_table, *(scales or ()))
    problem = check_decode(q, cache, scale, window, score)
    assert not host.why_not(problem, q, cache)

    def partial(device, problem, mask, q, cache):
        config = host.Sm80Partial.config_for(device, problem, mask)
        how = {"config": replace(config, warps=warps, stages=stages, **options), "splits": splits}
        return host.Sm80Partial(device, problem, mask, q, cache, **how)

    return CudaDecoder(problem, mask, q, cache, partial)(q, cache)
