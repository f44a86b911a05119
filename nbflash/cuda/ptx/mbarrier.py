"""mbarriers, named barriers, proxies' fences and register budgets: one PTX instruction each.

Addresses are those of the shared window (32 bits). Sources: PTX ISA, "Parallel Synchronization
and Communication Instructions".
"""

from nbflash.cuda.kinds import int32, uint32
from nbflash.cuda.ptx._asm import instruction

mbarrier_init = instruction(
    "mbarrier_init", "mbarrier.init.shared::cta.b64 [$0], $1;", (uint32, uint32)
)
mbarrier_arrive = instruction(
    "mbarrier_arrive", "mbarrier.arrive.shared::cta.b64 _, [$0];", (uint32,)
)
mbarrier_arrive_expect_tx = instruction(
    "mbarrier_arrive_expect_tx",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
    (uint32, uint32),
)
# A loop, since try_wait may return before the phase is over.
mbarrier_wait = instruction(
    "mbarrier_wait",
    """{ .reg .pred done;
    again_${:uid}:
    mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
    @!done bra again_${:uid}; }""",
    (uint32, uint32),
)
fence_mbarrier_init = instruction("fence_mbarrier_init", "fence.mbarrier_init.release.cluster;", ())
fence_proxy_async = instruction("fence_proxy_async", "fence.proxy.async.shared::cta;", ())
bar_sync = instruction("bar_sync", "bar.sync $0, $1;", (int32, int32))
bar_arrive = instruction("bar_arrive", "bar.arrive $0, $1;", (int32, int32))


def setmaxnreg(action, count):
    """``setmaxnreg.inc`` or ``.dec``: the registers a thread of this warpgroup may have."""
    return instruction("setmaxnreg", f"setmaxnreg.{action}.sync.aligned.u32 {count};", ())
