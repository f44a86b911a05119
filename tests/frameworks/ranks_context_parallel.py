"""Two ranks of `experiments distributed --peers` on the CPU; prints the rows as JSON.

torch's context parallelism has rings for kernels of GPUs alone. Here it is given one for the kernel
of the CPU, of the function that its own rings are made of.
"""

import json
import sys

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention

from experiments.commands import distributed as command
from experiments.harness import sweeps, timing
from nbflash import distributed

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def ring(op_call, args, kwargs):
    """Either pass, of the arguments that a handler of DTensor is given."""
    given = {argument.name: x for argument, x in zip(op_call._schema.arguments, args, strict=False)}
    given = {"dropout_p": 0.0, "is_causal": False} | given | kwargs
    mesh = given["query"].device_mesh
    given = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in given.items()}
    where = mesh.get_group(), 2, op_call
    if op_call is FORWARD:
        found = _attention._templated_ring_attention(*where, **given)
    else:
        dout = given.pop("grad_out")
        found = _attention._templated_ring_attention_backward(*where, dout, "grad_out", **given)
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in found)


def on_rank(comm, names):
    torch.set_num_threads(1)
    timing.SETTLE_SECONDS = 0
    _attention.custom_ops |= {FORWARD: ring, BACKWARD: ring}
    sweep = sweeps.load("distributed")
    sweep["cpu"] |= {"head_dim": 16, "tile": 32}
    sweep["cpu"]["quick"] = {"rounds": 2, "weak": [96], "strong": [128]}
    command.load = {"distributed": sweep, "cluster": sweeps.load("cluster")}.get
    return command.on_rank(comm, "cpu", "quick", names, (), "ranks", True, 0)


if __name__ == "__main__":
    rows = distributed.run(on_rank, 2, sys.argv[1:], processes=True, timeout=100)[0]
    print(json.dumps(rows))
