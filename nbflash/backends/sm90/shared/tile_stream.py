"""How the producers of the Hopper kernels walk the schedule, describe a tile and send it."""

from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.mbarrier import mbarrier_arrive_expect_tx
from nbflash.cuda.ptx.tma import tma_load_4d
from nbflash.cuda.tile.ring import item_of
from nbflash.cuda.tile.wgmma.gemm import PANEL


@inlined
def write_descriptor(smem, at, kind, n0, row, bh):
    """The tile descriptor: what a consumer knows of a tile."""
    smem[at] = kind
    smem[at + 1] = n0
    smem[at + 2] = row
    smem[at + 3] = bh


def make_send(cfg):
    """``send(to, panel_bytes, tensor_map, row, head, batch, bar, nbytes)``: a tile's panels."""
    PANELS = cfg.panels

    @inlined
    def send(to, panel_bytes, tensor_map, row, head, batch, bar, nbytes):
        mbarrier_arrive_expect_tx(bar, nbytes)
        for panel in range(PANELS):
            tma_load_4d(to + panel * panel_bytes, tensor_map, panel * PANEL, row, head, batch, bar)

    return send


@inlined
def tiles_of_round(round_, sizes, schedule):
    """Row tile, batch and head, and the tiles from where to where of a round; none past the end."""
    _, _, n_row, live = sizes
    work, plane_of, row_ptr, _, _ = schedule
    item = types.int32(item_of(round_, types.int32(cuda.gridDim.x), types.int32(cuda.blockIdx.x)))
    row, bh, begin, end = types.int32(0), types.int32(0), types.int32(0), types.int32(0)
    if item < live:
        row, bh = work[2 * item], work[2 * item + 1]
        at = types.int32(plane_of[bh] * n_row + row)
        begin, end = types.int32(row_ptr[at]), types.int32(row_ptr[at + 1])
    return row, bh, begin, end
