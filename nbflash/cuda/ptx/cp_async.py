"""``cp.async``: 16 bytes of global memory to shared memory, by no register and without waiting.

A thread's copies belong to the group that it closes next; a wait is for its groups but the last
few. Others see them behind a barrier that follows the wait. Source: PTX ISA, "Data Movement and
Conversion Instructions: Non-bulk copy".
"""

from nbflash.cuda.ptx._asm import SIM, asynchrony, hopper, instruction, types
from nbflash.cuda.ptx.traced import emit

cp_async_commit = instruction("cp_async_commit", "cp.async.commit_group;", ())


def cp_async_wait(pending):
    """Device code that waits until at most ``pending`` of the thread's groups are under way."""
    if SIM:
        return lambda: hopper().cp_async_wait(pending)
    return instruction("cp_async_wait", f"cp.async.wait_group {pending};", ())


def cp_async16(to, source, at, inside, policy=None):
    """Copy 16 bytes inside an ``@unrolled`` function, or zeros unless ``inside``.

    Parameters
    ----------
    to : uint32
        Address in shared memory.
    source, at : memory, integer
        Its first element; need not be there unless ``inside``.
    inside : boolean
    policy : uint64, optional
        Of the L2 cache: `nbflash.cuda.ptx.tma.evict_first`.
    """
    if SIM:
        asynchrony().cp_async16(to, source, at, inside)
        return
    to = to.converted(types.uint32)
    size = inside.choose(to.constant(16), to.constant(0))
    operands, hint, extra = [to, source.pointer_to(at), size], "", ""
    if policy is not None:
        operands.append(policy)
        hint, extra = ".L2::cache_hint", ", $3"
    emit(f"cp.async.cg.shared.global{hint} [$0], [$1], 16, $2{extra};", operands, memory=True)
