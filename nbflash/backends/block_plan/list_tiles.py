"""Lists of tiles of a block map: how many of each row, and then which, of which kind.

One warp makes one row of tiles. It sets a bit for every block that is listed for the row in a map
of its own in shared memory, which sorts them and drops what stands twice, and then looks at 32
tiles at a time:

    for each block (R, C) listed for the row's blocks R:   bit C of R
    for each tile column c of the row, a lane each
        pattern = the bits of its blocks;  edge = how the intervals cut it
        FULL, INTERVAL or BITS + edge · patterns + pattern, if there are both
        its place: the tiles of the lanes before it, and of the rounds before

The first pass counts, and says whether any tile is masked; the second, between which the counts
are summed up (:mod:`.running_sum`), writes. A row without tiles gets bit tile 0, which is empty.
By columns the same kernel goes over the transposed lists (:mod:`.transpose`).
"""

from dataclasses import dataclass

from masks import BITS, FULL, INTERVAL
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import INDEX, KernelSpec
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.tile.atomic_int import set_bits
from nbflash.cuda.tile.warp_math import lanes_of
from nbflash.definitions.constants import WARP

WARPS = 4


@dataclass(frozen=True)
class ListTilesConfig:
    """Geometry of ``list_tiles``.

    Attributes
    ----------
    own, other : int
        Blocks of a tile along the axis that is walked, and along the other one.
    own_split, other_split : int
        Tiles of a block along both.
    transposed : bool
        Whether keys are walked; lists are then those of :mod:`.transpose`, without a fixed length.
    write : bool
        False: count. True: write.
    words : int
        Shared memory of a warp in words of 32 blocks, for all blocks of a tile.
    """

    own: int
    other: int
    own_split: int
    other_split: int
    transposed: bool
    write: bool
    words: int
    min_blocks: int = 1
    threads: int = WARP * WARPS

    @property
    def smem_bytes(self):
        return WARPS * self.words * 4

    @property
    def patterns(self):
        return 1 << (self.own * self.other)

    def bit(self, i, j):
        """Of a pattern, that of block i along the axis that is walked and j along the other."""
        return j * self.own + i if self.transposed else i * self.other + j


def make_list_tiles(cfg):
    """The kernel.

    Arguments: the lists, ``begins`` and ``indices``; counts, masked; row_ptr, col_idx, kind; the
    lists' fixed length ``width``, rows of all planes, rows and columns of a plane, rows and columns
    of blocks, query tiles of a plane; map_plane, within_plane, full_lo, full_hi, edge_ptr,
    edge_col, edge_id of `nbflash.schedule.block_tiles.BlockTiles`.

    ``begins`` are counts of each row of blocks, or by columns where each begins; counts and masked
    are of each row of tiles, whether any tile is masked. The first pass reads and writes no more.
    """
    OWN, OTHER, OWN_SPLIT, OTHER_SPLIT = cfg.own, cfg.other, cfg.own_split, cfg.other_split
    TRANSPOSED, WRITE, WORDS, PATTERNS = cfg.transposed, cfg.write, cfg.words, cfg.patterns
    WORDS_OF_ROW, ALL = cfg.words // cfg.own, cfg.patterns - 1

    @inlined
    def list_of(begins, width, at):
        """Where the list of a row of blocks begins and ends."""
        if TRANSPOSED:
            return types.int32(begins[at]), types.int32(begins[at + 1])
        first = types.int32(at * width)
        return first, types.int32(first + min(types.int32(begins[at]), types.int32(width)))

    @inlined
    def read_lists(smem, words, begins, indices, width, plane_rows, first, n_rows, n_cols, lane):
        """Set the bits of the blocks that are listed for the ``OWN`` rows from ``first`` on."""
        for i in range(OWN):
            if first + i < n_rows:
                begin, end = list_of(begins, width, types.int32(plane_rows + first + i))
                for t in range(begin + lane, end, WARP):
                    col = types.int32(indices[t])
                    if col >= 0 and col < n_cols:
                        at = types.int32(words + i * WORDS_OF_ROW + (col >> 5))
                        set_bits(smem, at, types.int32(types.int32(1) << (col & 31)))

    @inlined
    def pattern_of(smem, words, first, column, n_rows, n_cols):
        """Bits of a tile's blocks, those past the map among them; 0 if none is there."""
        pattern, present = types.int32(0), False
        for i in range(OWN):
            for j in range(OTHER):
                col = types.int32(column // OTHER_SPLIT * OTHER + j)
                shift = j * OWN + i if TRANSPOSED else i * OTHER + j
                if first + i < n_rows and col < n_cols:
                    word = smem[words + i * WORDS_OF_ROW + (col >> 5)]
                    if (word >> (col & 31)) & 1 != 0:
                        pattern |= types.int32(1 << shift)
                        present = True
                else:
                    pattern |= types.int32(1 << shift)
        return pattern if present else types.int32(0)

    @inlined
    def edge_of(full_lo, full_hi, edge_ptr, edge_col, edge_id, row, column):
        """0 of a tile that the intervals cover whole, −1 of one that they do not meet."""
        if full_lo[row] <= column and column < full_hi[row]:
            return types.int32(0)
        low, high = types.int32(edge_ptr[row]), types.int32(edge_ptr[row + 1])
        end = high
        while low < high:
            middle = types.int32((low + high) >> 1)
            if edge_col[middle] < column:
                low = types.int32(middle + 1)
            else:
                high = middle
        if low < end and edge_col[low] == column:
            return types.int32(edge_id[low])
        return types.int32(-1)

    @inlined
    def kind_of(pattern, edge):
        if pattern != ALL:
            return types.int32(BITS + edge * PATTERNS + pattern)
        return types.int32(FULL if edge == 0 else INTERVAL)

    def list_tiles(
        begins,
        indices,
        counts,
        masked,
        row_ptr,
        col_idx,
        kinds,
        width,
        all_rows,
        n_row,
        n_col,
        n_rows,
        n_cols,
        query_rows,
        map_plane,
        within_plane,
        full_lo,
        full_hi,
        edge_ptr,
        edge_col,
        edge_id,
    ):
        smem = cuda.shared.array(0, types.int32)
        tid = types.int32(cuda.threadIdx.x)
        lane, words = types.int32(tid & 31), types.int32((tid >> 5) * WORDS)
        at = types.int32(cuda.blockIdx.x * WARPS + (tid >> 5))
        if at >= all_rows:
            return
        plane = types.int32(at // n_row)
        row = types.int32(at - plane * n_row)
        first = types.int32(row // OWN_SPLIT * OWN)
        for i in range(lane, WORDS, WARP):
            smem[words + i] = types.int32(0)
        cuda.syncwarp()  # the map is empty
        plane_rows = types.int32(map_plane[plane] * n_rows)
        read_lists(smem, words, begins, indices, width, plane_rows, first, n_rows, n_cols, lane)
        cuda.syncwarp()  # all bits are set
        of_within = types.int32(within_plane[plane] * query_rows)
        place, found, any_masked = types.int32(0), types.int32(0), types.int32(0)
        if WRITE:
            place = types.int32(row_ptr[at])
        for start in range(0, n_col, WARP):
            column = types.int32(start + lane)
            kind = types.int32(-1)
            if column < n_col:
                pattern = pattern_of(smem, words, first, column, n_rows, n_cols)
                if pattern != 0:
                    query = of_within + (column if TRANSPOSED else row)
                    key = row if TRANSPOSED else column
                    edge = edge_of(full_lo, full_hi, edge_ptr, edge_col, edge_id, query, key)
                    if edge >= 0:
                        kind = kind_of(pattern, edge)
            live = lanes_of(kind >= 0)
            before = types.int32(cuda.popc(live & ((types.int32(1) << lane) - 1)))
            if WRITE:
                if kind >= 0:
                    col_idx[place + found + before] = column
                    kinds[place + found + before] = kind
            else:
                any_masked |= lanes_of(kind >= 0 and kind != FULL)
            found = types.int32(found + cuda.popc(live))
        if lane == 0:
            if WRITE:
                if found == 0:
                    col_idx[place] = 0
                    kinds[place] = BITS
            else:
                counts[at] = max(found, types.int32(1))
                masked[at] = types.int32(1 if any_masked != 0 or found == 0 else 0)

    return list_tiles


def list_tiles_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    signature = (*(INDEX,) * 7, *(kinds.int32,) * 7, *(INDEX,) * 7)
    name = "nbflash_list_tiles" if cfg.write else "nbflash_count_tiles"
    return KernelSpec(name, make_list_tiles, cfg, signature)
