"""Processes of MPI: messages, notes, and what happens to a rank that nobody answers."""

import time

import numpy as np
from mpi4py import MPI

from nbflash.distributed import MpiCommunicator


def main():
    comm = MpiCommunicator(timeout=2.0)
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    notes = comm.agree("é" * comm.rank)
    assert notes == ["é" * rank for rank in range(comm.size)], notes
    calls = []
    for number in range(3):  # under way together, waited for in another order
        got = np.full((2, 5), np.nan)
        sent = np.full((2, 5), 10.0 * number + comm.rank)
        calls.append((comm.exchange({right: sent}, {left: got}), got))
    for number in (2, 0, 1):
        exchange, got = calls[number]
        exchange.wait()
        assert (got == 10 * number + left).all(), got
    comm.exchange({}, {}).wait()
    if comm.rank == 1:
        time.sleep(5)
    else:
        try:
            comm.agree("")
        except TimeoutError as error:
            print(error, flush=True)
    MPI.COMM_WORLD.Barrier()
    print("done", flush=True)
    MPI.COMM_WORLD.Abort(0)  # a request is left over


if __name__ == "__main__":
    main()
