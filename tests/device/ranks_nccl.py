"""A rank of `test_gpu_ranks`: ``mpiexec -n 2 python ranks_nccl.py CHECK``, a GPU for each."""

import sys
import time

import cupy
import numpy as np
from device_runs import count_from

import masks
import nbflash
from nbflash.distributed import (
    MpiCommunicator,
    NcclCommunicator,
    Sharding,
    attention,
    attention_backward,
    decode,
    gather,
    scatter,
)

CALLS = count_from("NBFLASH_CALLS", 1000)
TOKENS, HEADS, HEADS_KV, HEAD_DIM = 4000, 8, 2, 128
MASKS = {
    "documents": masks.documents([1700, 90, 2210], causal=True),
    "butterfly": masks.butterfly(TOKENS, 125) | masks.local(TOKENS, 125, width=1),
}


class Rank:
    """Its part of a problem of both ranks: forward, gradients, and those of one GPU."""

    def __init__(self, comm, mask, seed=0):
        self.comm, self.mask, self.sharding = comm, mask, Sharding.of(mask, comm.size)
        rng = np.random.default_rng(seed)
        sizes = [HEADS, HEADS_KV, HEADS_KV, HEADS]
        host = [rng.standard_normal((1, TOKENS, n, HEAD_DIM)).astype(np.float16) for n in sizes]
        self.whole = [cupy.asarray(x) for x in host]
        self.own = [cupy.asarray(scatter(x, self.sharding, comm.rank)) for x in host]

    def run(self, **options):
        """out, lse, dq, dk, dv of this rank; deterministic, so that they can be compared by bit."""
        *qkv, dout = self.own
        out, lse = attention(*qkv, self.sharding, self.comm, return_lse=True, **options)
        given = dout, *qkv, out, lse, self.sharding, self.comm
        return out, lse, *attention_backward(*given, deterministic=True, **options)

    def alone(self, **options):
        """The same of all tokens on this GPU."""
        *qkv, dout = self.whole
        out, lse = nbflash.attention(*qkv, self.mask, return_lse=True, **options)
        given = dout, *qkv, out, lse, self.mask
        return out, lse, *nbflash.attention_backward(*given, deterministic=True, **options)

    def refill(self, seed):
        """New values in the same memory."""
        for x, new in zip(self.own, Rank(self.comm, self.mask, seed).own, strict=True):
            x[...] = new


def bits(arrays):
    return [cupy.asnumpy(x.view(f"u{x.dtype.itemsize}")) for x in arrays]


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def one_gpu(comm):
    """Every result is that of one GPU, but for the rounding of parts; with dropout, too."""
    for name, mask in MASKS.items():
        for options in ({}, {"dropout": 0.2, "seed": (3, 5)}):
            rank = Rank(comm, mask)
            results = zip(rank.run(**options), rank.alone(**options), strict=True)
            for i, (part, whole) in enumerate(results):
                got = gather(part, rank.sharding, comm, axis=1 + (i == 1))
                rounding = np.finfo(np.float32 if i == 1 else np.float16).eps
                unit = float(abs(whole).max()) * rounding
                error = float(abs(got.astype("float32") - whole.astype("float32")).max())
                assert error <= 2 * unit, (name, options, i, error / unit)


def a_thousand_calls(comm):
    """Memory does not grow once the pool has its blocks, and the last call has the first's bits."""
    rank, pool = Rank(comm, MASKS["documents"]), cupy.get_default_memory_pool()
    first = bits(rank.run())

    def state_after(calls):
        for _ in range(calls):
            results = rank.run()
        assert_equal(bits(results), first)
        del results
        return pool.used_bytes(), pool.total_bytes(), cupy.cuda.runtime.memGetInfo()[0]

    before = state_after(50)
    after = state_after(CALLS)
    assert after == before, (before, after)


def two_streams(comm):
    """Calls of two streams, in turns, of problems that differ."""
    ranks = [Rank(comm, mask) for mask in MASKS.values()]
    want = [bits(rank.run()) for rank in ranks]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in ranks]
    cupy.cuda.Device().synchronize()
    found = []
    for _ in range(20):
        for rank, stream in zip(ranks, streams, strict=True):
            with stream:
                found.append(rank.run())
    cupy.cuda.Device().synchronize()
    for i, results in enumerate(found):
        assert_equal(bits(results), want[i % 2])


def graph(comm):
    """A CUDA graph of forward and backward: each replay takes what its inputs hold by then.

    What other calls have made stays: a replay writes to no memory but its own.
    """
    rank, other = Rank(comm, MASKS["documents"]), Rank(comm, MASKS["butterfly"])
    lengths = cupy.asarray([TOKENS], dtype=cupy.int32)

    def step():
        q, k, v, _ = rank.whole
        return *rank.run(), decode(q[:, :1], k, v, lengths, comm)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        step()
        other.run()
        stream.begin_capture()
        results = step()
        recorded = stream.end_capture()
    for seed in range(1, 20):
        with stream:
            rank.refill(seed)
            want = bits(step())
            for x in results:
                x.fill(np.nan)
            held = other.run()
            before = bits(held)
            recorded.launch()
            stream.synchronize()
            assert_equal(bits(results), want)
            assert_equal(bits(held), before)


def watched_recording(comm):
    """A graph is recorded in the global mode while the communicator asks for a call."""
    rank, stream = Rank(comm, MASKS["documents"]), cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.zeros(8)
        cupy.add(x, 1, out=x)
        rank.run()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        cupy.add(x, 1, out=x)
        time.sleep(4 * comm._watch.PAUSE)
        recorded = stream.end_capture()
        recorded.launch()
        stream.synchronize()
    assert (x == 2).all()


CHECKS = {
    check.__name__: check
    for check in (one_gpu, a_thousand_calls, two_streams, graph, watched_recording)
}


def main(check):
    host = MpiCommunicator(timeout=60)
    cupy.cuda.Device(host.rank).use()
    comm = NcclCommunicator(host, timeout=60)
    CHECKS[check](comm)
    comm.close()
    print("right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
