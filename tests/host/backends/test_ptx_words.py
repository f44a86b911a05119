"""PTX that orders or copies memory, word by word: the simulator runs a double, whatever it says.

A qualifier that is left out means what the PTX ISA says: an arrival on an mbarrier releases, a wait
acquires, both for the block of threads. A sum may be relaxed, for no other memory follows from it.
"""

import ast
from pathlib import Path

import ptx_orders

import nbflash

ORDERS = {
    "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;",
    "mbarrier.init.shared::cta.b64 [$0], $1;",
    "mbarrier.arrive.shared::cta.b64 _, [$0];",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
    "{ .reg .pred done; again_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; "
    "@!done bra again_${:uid}; }",
    "fence.mbarrier_init.release.cluster;",
    "fence.proxy.async.shared::cta;",
    "bar.sync $0, $1;",
    "bar.arrive $0, $1;",
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned {pending};",
    "cp.async.commit_group;",
    "cp.async.wait_group {pending};",
    "cp.async.wait_all;",
    "cp.async.bulk.commit_group;",
    "cp.async.bulk.wait_group.read 0;",
    "cp.async.bulk.wait_group 0;",
}
COPIES = {
    "cp.async.cg.shared.global{hint} [$0], [$1], 16, $2{extra};",
    "cp.async.cg.shared.global [$0], [$1], 16;",
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$0], [$1, {$2, $3, $4, $5}], [$6];",
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[$0], [$1, {$2, $3, $4, $5}], [$6], $7;",
    "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;",
    "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [$0, {$1, $2, $3, $4}], [$5];",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;",
}
SUMS = {
    "red.relaxed.gpu.add.f{8 * memory.itemsize} [$0], $1;",
    "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
    "red.relaxed.cta.or.b32 [$0], $1;",
    "atom.relaxed.gpu.add.s32 $0, [$1], $2;",
}


def texts(path):
    """The strings of a module that are PTX; a variable part is the expression in braces."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (x.value if isinstance(x, ast.Constant) else _braced(x) for x in node.values)
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_ptx(text):
    return text.rstrip().endswith((";", "}")) and ";" in text


def _braced(part):
    return f"{{{ast.unparse(part.value)}}}"


def test_what_orders_and_copies_memory():
    """Each text has one place: of two that are alike, one could say what the other says."""
    paths = Path(nbflash.__file__).parent.rglob("*.py")
    ptx = (x for path in paths for x in texts(path) if is_ptx(x) and ptx_orders.ORDERS.search(x))
    assert sorted(" ".join(x.split()) for x in ptx) == sorted(ORDERS | COPIES | SUMS)
