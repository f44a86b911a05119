"""Products of 32 bits in addresses, planted in stores, loads and device functions, are found."""

import importlib

import addresses
import pytest
from mutants import Mutant, mutated_modules

from nbflash.backends.block_plan.transpose import TransposeConfig, transpose_spec
from nbflash.backends.block_selection.best_blocks import BestBlocksConfig, best_blocks_spec
from nbflash.backends.simt.row_statistics import RowConfig
from nbflash.backends.sm80 import row_kernels
from nbflash.backends.sm80.decode import config as sm80_decode
from nbflash.backends.sm90.decode.config import decode_config
from nbflash.backends.split_kv.combine import CombineConfig
from nbflash.cuda import launch

CAPABILITY = (9, 0)
ROWS, CONVERT = "nbflash.backends.simt.row_statistics", "nbflash.backends.simt.convert_dq"
DECODE, PRODUCER, CONSUMER = (
    f"nbflash.backends.sm90.decode.{name}" for name in ("kernel", "producer", "consumer")
)
PRODUCTS = "nbflash.backends.block_selection.block_products"
DECODE_SM80, RESULTS = (f"nbflash.backends.sm80.decode.{name}" for name in ("kernel", "results"))
COMBINE, PARTS = "nbflash.backends.split_kv.combine", "nbflash.cuda.tile.split_kv"
IN_BLOCK = "nbflash.backends.split_kv.combine_in_block"
SPECS = {
    ROWS: lambda module: module.delta_simt_spec(RowConfig("float16", 64)),
    CONVERT: lambda module: module.convert_dq_simt_spec(RowConfig("float16", 64)),
    COMBINE: lambda module: module.combine_simt_spec(CombineConfig("float16", 64, 4)),
    PRODUCTS: lambda module: module.block_products_spec(module.BlockProductsConfig()),
    DECODE_SM80: lambda module: module.decode_sm80_spec(
        sm80_decode.decode_config("float16", 64, "", smem_limit=99 * 1024, masked=True)
    ),
    DECODE: lambda module: module.decode_sm90_spec(decode_config("float16", 64, None)),
}
OF_ROW = "delta[(b * heads + h) * nq + i]"
FAULTS = {
    "a store's row": (
        (ROWS, ROWS),
        Mutant("row", OF_ROW, "delta[cuda.types.int32((b * heads + h) * nq + i)]"),
    ),
    "a part of a store's row": (
        (ROWS, ROWS),
        Mutant("part", OF_ROW, "delta[cuda.types.int32((b * heads + h) * nq) + i]"),
    ),
    "a shift by a variable": (
        (ROWS, ROWS),
        Mutant("shift", OF_ROW, "delta[cuda.types.int32(b << h)]"),
    ),
    "a product with a stride": (
        (CONVERT, CONVERT),
        Mutant("stride", "b * t_stride[0] + i", "cuda.types.int32(b * t_stride[0]) + i"),
    ),
    "a load in a loop": (
        (CONVERT, CONVERT),
        Mutant("load", "source[s_base + d]", "source[cuda.types.int32(s_base) + d]"),
    ),
    "a store of one thread": (
        (COMBINE, COMBINE),
        Mutant("store", "lse[at] =", "lse[types.int32(at)] ="),
    ),
    "a stride in a tuple, of words": (
        (PRODUCER, CONSUMER, DECODE),
        Mutant("word", "types.int32(to), q, at)", "types.int32(to), q, types.int32(at))"),
    ),
    "a device function's": (
        (PARTS, COMBINE),
        Mutant("part", "part_lse[s * rows + at])", "part_lse[types.int32(s * rows) + at])"),
    ),
    "a row out of a tuple": (
        (RESULTS, DECODE_SM80),
        Mutant("row", "o_at * HEAD_DIM + column", "types.int32(o_at * HEAD_DIM) + column"),
    ),
    "a quotient by a count, by a size": (
        (PRODUCTS, PRODUCTS),
        Mutant("size", "types.int64(plane // group) * n", "types.int32(plane // group * n)"),
    ),
    "the place of a row": (
        (IN_BLOCK, DECODE),
        Mutant("row", "at = types.int64(row * HEAD_DIM", "at = types.int32(row * HEAD_DIM"),
    ),
}


def found(spec):
    with addresses.read_ir() as modules:
        launch.compile_ptx(spec, CAPABILITY)
    return addresses.narrow_products(tuple(modules))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_narrow_address_is_found(fault):
    (module, *others), mutant = FAULTS[fault]
    kernel, planted = others[-1], mutated_modules(module, mutant, others)
    assert found(SPECS[kernel](planted[kernel]))


@pytest.mark.parametrize("kernel", SPECS)
def test_the_kernels_as_they_are_have_none(kernel):
    assert not found(SPECS[kernel](importlib.import_module(kernel)))


@pytest.mark.parametrize(
    "make", [row_kernels.statistics_sm80_spec, row_kernels.convert_dq_sm80_spec]
)
def test_rows_of_an_accumulator(make, monkeypatch):
    """Products by a row's numbers count here: there are more of these than int32 counts."""
    monkeypatch.setattr(addresses, "TILE", 32)
    with addresses.read_ir() as modules:
        launch.compile_ptx(make(row_kernels.RowConfig("float16", 128, width=128)), CAPABILITY)
    assert not addresses.narrow_products.__wrapped__(tuple(modules))


# The kernels whose lists of blocks are as long as they are asked for, and what in them has fewer
# elements than int32 can count: the columns of all planes.
LISTS = {
    "best": (best_blocks_spec(BestBlocksConfig(64)), 0),
    "counted": (transpose_spec(TransposeConfig(False)), 1),
    "written": (transpose_spec(TransposeConfig(True)), 1),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_blocks_are_no_small_tables(name, monkeypatch):
    spec, short = LISTS[name]
    monkeypatch.setattr(addresses, "SMALL_TABLES", False)
    monkeypatch.setattr(addresses, "TILE", 32)
    with addresses.read_ir() as modules:
        launch.compile_ptx(spec, CAPABILITY)
    assert len(addresses.narrow_products.__wrapped__(tuple(modules))) == short
