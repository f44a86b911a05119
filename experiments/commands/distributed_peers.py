"""torch's context parallelism beside nbflash on the same ranks, for `experiments distributed`."""

from contextlib import contextmanager, nullcontext

from experiments.harness.console import left_out
from experiments.harness.errors import one_line
from experiments.harness.oracle import Relative, nearest
from experiments.libraries.context_parallel import BACKENDS, ContextParallel, mesh_of, why_not


def open_mesh(comm, device, peers):
    """A context: the mesh of torch over the ranks, or None without ``peers``."""
    return mesh_of(comm, device) if peers else nullcontext()


@contextmanager
def peers_of(measured, name, mesh, seed):
    """The peers whose gathered results are right, while they can be called.

    Parameters
    ----------
    measured : Measured
    name : str
        Of the mask.
    mesh : torch.distributed.device_mesh.DeviceMesh or None
    seed : int

    Yields
    ------
    dict of str to (Verdict, dict)
        By library, the verdict that is nearest to its budget, of relative errors as in `peers`,
        and by pass what is timed on all ranks and on one. Empty without a mesh.
    """
    if mesh is None:
        yield {}
        return
    comm, tokens = measured.comm, measured.mask.shape[0]
    where = f"{name}, {tokens}"
    if reason := why_not(name, tokens, comm.size):
        _left_out(comm, "torch-context-parallel", where, reason)
        yield {}
        return
    oracle, only = measured.oracle(seed, Relative)
    peer = ContextParallel(mesh, name, measured.whole, only)
    with peer.dealt():
        found = {}
        for library, backend in BACKENDS.items():
            made, reason = _tried(comm, peer, backend, oracle)
            if reason:
                _left_out(comm, library, where, reason)
            else:
                found[library] = made
        yield found


def _tried(comm, peer, backend, oracle):
    """Verdict and calls, and why there are none: the same on all ranks."""
    made, reason = None, ""
    try:
        made = nearest(oracle.check(**peer.results(backend))), peer.calls(backend)
    except Exception as error:
        reason = one_line(error) or type(error).__name__
    return made, next(filter(None, comm.agree(reason)), "")


def _left_out(comm, library, where, reason):
    if comm.rank == 0:
        left_out(library, where, reason)
