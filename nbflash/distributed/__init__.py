"""Attention over several GPUs or processes: any mask, balanced, exact.

::

    from nbflash.distributed import MpiCommunicator, Sharding, attention

    comm = MpiCommunicator()
    sharding = Sharding.of(mask, comm.size)
    own = sharding.positions(comm.rank)
    out = attention(q[:, own], k[:, own], v[:, own], sharding, comm)
"""

from nbflash.distributed.attention import attention, attention_backward, score_backward
from nbflash.distributed.communicator import Communicator, Exchange
from nbflash.distributed.decoding import decode
from nbflash.distributed.layout import gather, scatter
from nbflash.distributed.local import LocalCommunicator, run
from nbflash.distributed.mpi import MpiCommunicator
from nbflash.distributed.nccl import NcclCommunicator
from nbflash.distributed.sharding import Sharding

__all__ = [
    "Communicator",
    "Exchange",
    "LocalCommunicator",
    "MpiCommunicator",
    "NcclCommunicator",
    "Sharding",
    "attention",
    "attention_backward",
    "decode",
    "gather",
    "run",
    "scatter",
    "score_backward",
]
