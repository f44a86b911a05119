"""Attention over the processes of MPI, on the CPU or with a GPU for each.

    mpiexec -n 4 python examples/distributed_mpi.py
    mpiexec -n 2 python examples/distributed_mpi.py --gpus

Needs mpi4py; with ``--gpus`` CuPy and NCCL. Every rank makes the same mask and the same sharding,
has its own part of q, k and v, and prints how far it is from attention on one process.
"""

import argparse

import numpy as np

import masks
import nbflash
from nbflash.distributed import (
    MpiCommunicator,
    NcclCommunicator,
    Sharding,
    attention,
    attention_backward,
    gather,
    scatter,
)


def main(tokens, gpus):
    comm, xp = MpiCommunicator(timeout=60), np
    if gpus:
        import cupy as xp

        xp.cuda.Device(comm.rank % xp.cuda.runtime.getDeviceCount()).use()
        comm = NcclCommunicator(comm, timeout=60)

    mask = masks.documents([tokens // 4, tokens // 8, tokens - 3 * (tokens // 8)], causal=True)
    sharding = Sharding.of(mask, comm.size)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, tokens, 8, 64), np.float32)
    k, v = rng.standard_normal((2, 1, tokens, 2, 64), np.float32)
    dout = rng.standard_normal(q.shape, np.float32)
    own = [xp.asarray(scatter(x, sharding, comm.rank)) for x in (q, k, v)]

    out, lse = attention(*own, sharding, comm, return_lse=True)
    own_dout = xp.asarray(scatter(dout, sharding, comm.rank))
    gradients = attention_backward(own_dout, *own, out, lse, sharding, comm)

    whole = [xp.asarray(x) for x in (q, k, v)]
    expected, lse = nbflash.attention(*whole, mask, return_lse=True)
    dq, dk, dv = nbflash.attention_backward(xp.asarray(dout), *whole, expected, lse, mask)
    for name, part, one in zip(
        ("out", "dq", "dk", "dv"), (out, *gradients), (expected, dq, dk, dv), strict=True
    ):
        error = float(abs(gather(part, sharding, comm) - one).max() / abs(one).max())
        print(f"rank {comm.rank} of {comm.size}: {name} differs by {error:.1e}", flush=True)
        assert error < 1e-5
    print(f"rank {comm.rank}: balance {sharding.balance:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--gpus", action="store_true")
    main(**vars(parser.parse_args()))
