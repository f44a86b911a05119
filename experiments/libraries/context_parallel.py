"""torch's context parallelism, on the ranks that `nbflash.distributed` runs on.

``torch.distributed.tensor.experimental.context_parallel`` makes SDPA a ring over the ranks: K and V
of all of them are gathered after the first step, dK and dV travel around. It has no mask but
causal, whose sequence its load balancer deals in halves, first and last.
"""

from contextlib import contextmanager

from experiments.harness.grid import CAUSAL, DENSE
from experiments.harness.passes import BACKWARD, FORWARD
from experiments.libraries.torch_base import tensor

#: Rows of a table to the backend that SDPA is held to; on the CPU there is one.
BACKENDS = {
    "torch-context-parallel-flash": "FLASH_ATTENTION",
    "torch-context-parallel-cudnn": "CUDNN_ATTENTION",
}


@contextmanager
def mesh_of(comm, device):
    """A mesh of torch over the ranks of a communicator, which are all of one machine.

    It comes before other uses of NCCL: torch is built for the version that it brings.

    Parameters
    ----------
    comm : nbflash.distributed.Communicator
    device : {"cpu", "cuda"}
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if device == "cuda":
        torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    if comm.rank == 0:
        store = dist.TCPStore("localhost", 0, comm.size, True, wait_for_workers=False)
        comm.agree(str(store.port))
    else:
        port = int(comm.agree("")[0])
        store = dist.TCPStore("localhost", port, comm.size, wait_for_workers=False)
    kind = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(kind, store=store, rank=comm.rank, world_size=comm.size)
    try:
        yield init_device_mesh(device, (comm.size,))
    finally:
        dist.destroy_process_group()


def why_not(kind, tokens, ranks):
    """Why a mask is left out; empty where it can be had."""
    if kind not in (DENSE, CAUSAL):
        return "dense and causal alone"
    return f"multiples of {2 * ranks} tokens alone" if tokens % (2 * ranks) else ""


class ContextParallel:
    """One mask over a mesh; q, k, v and dout are dealt when it is entered as a context.

    Parameters
    ----------
    mesh : torch.distributed.device_mesh.DeviceMesh
    kind : {"dense", "causal"}
    whole : q, k, v, dout
        The arrays of the whole sequence in the public layout.
    only : array
        A dout for `results`.
    """

    def __init__(self, mesh, kind, whole, only):
        import torch

        self._mesh, self._causal = mesh, kind == CAUSAL
        self._gqa = whole[0].shape[2] != whole[1].shape[2]
        self._whole = [tensor(x).transpose(1, 2).contiguous() for x in whole]
        self._shards = [_copy(tensor(x).transpose(1, 2)) for x in (*whole, only)]
        self._alone = torch.nn.functional.scaled_dot_product_attention

    @contextmanager
    def dealt(self):
        """Every rank has its part, and SDPA goes over all of them."""
        from torch.distributed.tensor.experimental import _attention, context_parallel

        options, shards = _attention._cp_options, self._shards
        before, options.enable_load_balance = options.enable_load_balance, self._causal
        try:
            with context_parallel(
                self._mesh,
                buffers=shards,
                buffer_seq_dims=[2] * len(shards),
                no_restore_buffers=set(shards),
            ):
                yield
        finally:
            options.enable_load_balance = before

    def calls(self, backend):
        """By pass: what is timed on all ranks, and on one with the whole sequence."""
        found = {FORWARD: [], BACKWARD: []}
        for inputs, over_ranks in ((self._shards, True), (self._whole, False)):
            q, k, v, dout = inputs[:4]
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            found[FORWARD].append(self._call(backend, over_ranks, q, k, v))
            out = self._call(backend, over_ranks, *leaves)()
            found[BACKWARD].append(_gradients(out, leaves, dout))
        return {which: tuple(pair) for which, pair in found.items()}

    def results(self, backend):
        """Output, and gradients from ``only``, of the whole sequence in the public layout."""
        from torch.distributed.tensor.experimental._attention import context_parallel_unshard

        *inputs, _, only = self._shards
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = self._call(backend, True, *leaves)()
        parts = [out.detach(), *_gradients(out, leaves, only)()]
        found = context_parallel_unshard(self._mesh, parts, [2] * len(parts))
        return {
            name: x.transpose(1, 2)
            for name, x in zip(("out", "dq", "dk", "dv"), found, strict=True)
        }

    def _call(self, backend, over_ranks, q, k, v):
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        held = getattr(SDPBackend, backend)
        options = {"is_causal": self._causal, "enable_gqa": self._gqa}
        functional, alone = torch.nn.functional, self._alone

        def call():
            # The context has put another function in the place of SDPA.
            function = functional.scaled_dot_product_attention if over_ranks else alone
            with sdpa_kernel(held):
                return function(q, k, v, **options)

        return call


def _copy(x):
    """In memory of its own: the context cuts it off in place."""
    import torch

    return x.clone(memory_format=torch.contiguous_format)


def _gradients(out, leaves, dout):
    import torch

    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
