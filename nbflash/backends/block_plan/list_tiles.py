"""Lists of tiles of a block map: how many of each row, and then which, of which kind.

One warp makes one row of tiles. In shared memory it has a map of its own, with a *slot* of bits for
each tile along the other axis, or for each block where a block holds several tiles. It sets the bit
of every block that is listed for the row, which sorts them and drops what stands twice. A lane then
looks at a stretch of slots, of which it visits those that are not empty:

    for each block (R, C) listed for the row's blocks R:   bit R of slot C
    for each slot of the stretch with bits
        pattern = its bits, and those of blocks past the map
        for each tile c of the slot:   edge = how the intervals cut it
            FULL, INTERVAL or BITS + edge · patterns + pattern, if they meet it
            its place: the tiles of the lanes before it, and of the rounds before

The first pass counts, and says whether any tile is masked; the second, between which the counts
are summed up (:mod:`.running_sum`), counts a stretch and then writes it. A row without tiles gets
bit tile 0, which is empty. By columns the same kernel goes over the transposed lists
(:mod:`.transpose`).
"""

from dataclasses import dataclass, replace

from masks import BITS, FULL, INTERVAL
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import INDEX, KernelSpec
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.tile.atomic_int import set_bits
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import FULL_WARP
from nbflash.cuda.tile.warp_math import lanes_of, sums_of_lanes
from nbflash.definitions.constants import WARP

WARPS = 4
LEAST_WORDS = 8  # sequences of up to 256 blocks share kernels
MOST_SLOTS = 16  # of a stretch: rows of 512 slots occupy all lanes


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
        Shared memory of a warp: a power of two.
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

    @property
    def slot(self):
        """Bits of a slot: no slot lies in two words."""
        return (1, 1, 2, 4, 4)[self.own * self.other]

    @property
    def stretch(self):
        """Slots that a lane looks at in turn."""
        return min(32 // self.slot, MOST_SLOTS)


def list_tiles_config(blocks, splits, columns, transposed, write):
    """Of tiles of ``blocks``, blocks of ``splits`` tiles and rows of ``columns`` blocks."""
    own, other = blocks
    config = ListTilesConfig(own, other, *splits, transposed, write, LEAST_WORDS)
    while 32 * config.words < -(-columns // other) * config.slot:
        config = replace(config, words=2 * config.words)
    return config


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
    SLOT, STRETCH, ALL, TURNS = cfg.slot, cfg.stretch, cfg.patterns - 1, 1 + cfg.write

    @inlined
    def list_of(begins, width, at):
        """Where the list of a row of blocks begins and ends."""
        if TRANSPOSED:
            return types.int32(begins[at]), types.int32(begins[at + 1])
        first = types.int32(at * width)
        return first, types.int32(first + min(types.int32(begins[at]), types.int32(width)))

    @inlined
    def bit_of(i, j):
        """Of a pattern, that of block i along the axis that is walked and j along the other."""
        return types.int32(j * OWN + i if TRANSPOSED else i * OTHER + j)

    @inlined
    def read_lists(smem, words, begins, indices, width, plane_rows, first, n_rows, n_cols, lane):
        """Set the bits of the blocks that are listed for the ``OWN`` rows from ``first`` on."""
        for i in range(OWN):
            if first + i < n_rows:
                begin, end = list_of(begins, width, types.int32(plane_rows + first + i))
                for t in range(begin + lane, end, WARP):
                    col = types.int32(indices[t])
                    if col >= 0 and col < n_cols:
                        bit = types.int32(col // OTHER * SLOT + bit_of(i, col % OTHER))
                        at = types.int32(words + (bit >> 5))
                        set_bits(smem, at, types.int32(types.int32(1) << (bit & 31)))

    @inlined
    def stretch_at(smem, words, slot, n_slots):
        """The bits of ``STRETCH`` slots, that of ``slot`` lowest."""
        if slot >= n_slots:
            return types.int32(0)
        bit = types.int32(slot * SLOT)
        word = types.int32(smem[words + (bit >> 5)])
        if STRETCH * SLOT == 32:
            return word
        return types.int32((word >> (bit & 31)) & ((1 << (STRETCH * SLOT)) - 1))

    @inlined
    def past_map(first, slot, n_rows, n_cols):
        """Bits of those of a slot's blocks that are past the map."""
        bits = types.int32(0)
        for i in range(OWN):
            for j in range(OTHER):
                if (i > 0 and first + i >= n_rows) or (j > 0 and slot * OTHER + j >= n_cols):
                    bits |= types.int32(types.int32(1) << bit_of(i, j))
        return bits

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
        plane, row = divmod_int32(at, n_row)
        first = types.int32(row // OWN_SPLIT * OWN)
        for i in range(lane, WORDS, WARP):
            smem[words + i] = types.int32(0)
        cuda.syncwarp()  # the map is empty
        plane_rows = types.int32(map_plane[plane] * n_rows)
        read_lists(smem, words, begins, indices, width, plane_rows, first, n_rows, n_cols, lane)
        cuda.syncwarp()  # all bits are set
        of_within = types.int32(within_plane[plane] * query_rows)
        place, found, hidden = types.int32(0), types.int32(0), types.int32(0)
        if WRITE:
            place = types.int32(row_ptr[at])
        n_slots = types.int32((n_cols + OTHER - 1) // OTHER)
        for start in range(0, n_slots, WARP * STRETCH):
            slot = types.int32(start + lane * STRETCH)
            stretch = stretch_at(smem, words, slot, n_slots)
            of_lane = types.int32(0)
            for turn in range(TURNS):  # the lane's tiles are counted, and then written
                if turn > 0:
                    up_to = sums_of_lanes(of_lane, lane)
                    first_place = types.int32(place + found + up_to - of_lane)
                    found = types.int32(found + cuda.shfl_sync(FULL_WARP, up_to, WARP - 1))
                    of_lane = types.int32(0)
                left = stretch
                while left != 0:
                    nth = types.int32((cuda.ffs(left) - 1) // SLOT)
                    pattern = types.int32((left >> (nth * SLOT)) & ALL)
                    left = types.int32(left ^ types.int32(pattern << (nth * SLOT)))
                    pattern |= past_map(first, slot + nth, n_rows, n_cols)
                    for s in range(OTHER_SPLIT):
                        column = types.int32((slot + nth) * OTHER_SPLIT + s)
                        if column < n_col:
                            query = of_within + (column if TRANSPOSED else row)
                            key = row if TRANSPOSED else column
                            edge = edge_of(
                                full_lo, full_hi, edge_ptr, edge_col, edge_id, query, key
                            )
                            if edge >= 0:
                                kind = kind_of(pattern, edge)
                                if not WRITE:
                                    hidden |= types.int32(0 if kind == FULL else 1)
                                elif turn > 0:
                                    col_idx[first_place + of_lane] = column
                                    kinds[first_place + of_lane] = kind
                                of_lane = types.int32(of_lane + 1)
            if not WRITE:
                found = types.int32(found + of_lane)
        if WRITE:
            if lane == 0 and found == 0:
                col_idx[place] = 0
                kinds[place] = BITS
        else:
            found, any_hidden = sums_of_lanes(found, lane), lanes_of(hidden != 0)
            if lane == WARP - 1:
                counts[at] = max(found, types.int32(1))
                masked[at] = types.int32(1 if any_hidden != 0 or found == 0 else 0)

    return list_tiles


def list_tiles_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    signature = (*(INDEX,) * 7, *(kinds.int32,) * 7, *(INDEX,) * 7)
    name = "nbflash_list_tiles" if cfg.write else "nbflash_count_tiles"
    return KernelSpec(name, make_list_tiles, cfg, signature)
