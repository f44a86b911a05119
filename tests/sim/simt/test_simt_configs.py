"""The configuration tables: arithmetic that a kernel relies on and no compiler checks."""

import functools

import pytest

from nbflash.backends.simt import configs as simt_config
from nbflash.backends.simt.backward import make_bwd_simt
from nbflash.backends.simt.configs import SimtBackwardConfig, SimtConfig
from nbflash.backends.simt.forward import make_fwd_simt

DTYPES = ("float16", "bfloat16", "float32", "float64")
HEAD_DIMS = range(1, 257)
KB = 1024
# The most that a block may have: Hopper, Ampere, consumer GPUs, Turing, and without opting in.
LIMITS = (227 * KB, 163 * KB, 99 * KB, 64 * KB, 48 * KB)
TABLES = {
    "forward": (SimtConfig, simt_config._FORWARD, "float32"),
    "forward-64": (SimtConfig, simt_config._FORWARD_64, "float64"),
    "backward": (SimtBackwardConfig, simt_config._BACKWARD, "float32"),
    "backward-64": (SimtBackwardConfig, simt_config._BACKWARD_64, "float64"),
}


@functools.cache
def chosen(dtype, head_dim, limit, vectors):
    """The forward configuration and those of both forms of the backward pass."""
    vectors = vectors and head_dim % 4 == 0
    forward = simt_config.forward_config(dtype, head_dim, vectors=vectors, smem_limit=limit)
    backward = [
        simt_config.backward_configs(
            dtype,
            head_dim,
            vectors=vectors,
            smem_limit=limit,
            deterministic=deterministic,
            vector_red=True,
        )
        for deterministic in (False, True)
    ]
    return forward, *backward


def configs(limit, vectors=True):
    """Every configuration that is chosen under a limit, once."""
    found = {}
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            forward, *backward = chosen(dtype, head_dim, limit, vectors)
            found |= dict.fromkeys(c for c in (forward, *backward[0], *backward[1]) if c)
    return list(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("limit", "largest"), [(227 * KB, 256), (163 * KB, 256), (48 * KB, 64)], ids=str
)
def test_every_head_dim_has_a_configuration(limit, largest, dtype):
    for head_dim in range(1, largest + 1):
        forward, atomic, deterministic = chosen(dtype, head_dim, limit, True)
        assert forward is not None, head_dim
        assert [c.walk for c in atomic] == ["columns"], head_dim
        assert [c.walk for c in deterministic] == ["rows", "columns"], head_dim


def test_none_where_nothing_fits():
    assert chosen("float32", 64, KB, True) == (None, (), ())


@pytest.mark.parametrize("limit", LIMITS, ids=lambda n: f"{n // KB}KB")
def test_shared_memory_layout(limit):
    """Parts follow one another, vectors in them are aligned, and all fits."""
    for config in configs(limit):
        at = config.smem
        shared = config.p_over_k and not isinstance(config, SimtBackwardConfig)
        parts = at[:-1] if shared else at  # P has no part of its own
        assert list(parts) == sorted(set(parts)), config
        assert all(x % 4 == 0 for x in (*at, config.ld, config.ld_m, config.ld_n)), config
        assert config.smem_bytes <= limit, config
        assert at[-1] * config.itemsize == config.smem_bytes, config


def test_forward_parts_do_not_overlap():
    for config in filter(lambda c: type(c) is SimtConfig, configs(227 * KB)):
        (_, k, v, _, end), p = config.smem, config.p_at
        last = config.tile_n - 1
        p_size = last * config.ld_m + last // 4 * simt_config.SKEW + config.tile_m
        assert k >= max(config.width * config.ld_m, config.tile_m * config.ld), config
        assert v - k >= config.width * config.ld_n, config
        assert v - k >= p_size or not config.p_over_k, config
        assert p >= v + config.tile_n * config.ld or (config.p_over_k and p == k), config
        assert end - p >= p_size, config
        assert p_size >= 2 * config.tile_m, config  # l and m leave through P's place


@pytest.mark.parametrize("limit", LIMITS, ids=lambda n: f"{n // KB}KB")
def test_threads_share_the_work_evenly(limit):
    for config in configs(limit):
        assert config.threads <= 1024, config
        assert config.threads < 32 or config.threads % 32 == 0, config
        assert 32 % config.tx == 0, config
        assert config.rm % 4 == config.rn % 4 == 0, config
        assert config.width % (4 * config.tx) == 0, config
        assert config.width >= config.head_dim, config
        if isinstance(config, SimtBackwardConfig):
            assert config.width // 2 % (4 * config.tx) == 0, config
            assert config.tile_n % (4 * config.ty) == 0, config


@pytest.mark.parametrize("vectors", [True, False], ids=["vectors", "elements"])
@pytest.mark.parametrize("limit", LIMITS, ids=lambda n: f"{n // KB}KB")
def test_kernels_of_every_configuration_can_be_made(limit, vectors):
    """Copies check that the elements of a tile divide among the threads."""
    for config in configs(limit, vectors):
        make = make_bwd_simt if isinstance(config, SimtBackwardConfig) else make_fwd_simt
        assert callable(make(config))


@pytest.mark.parametrize("table", TABLES)
def test_every_row_can_be_chosen(table):
    """With just its own shared memory, at some head_dim, no row before it fits."""
    kind, rows, dtype = TABLES[table]
    for i, row in enumerate(rows):
        head_dims = range(1, row[0] + 1)
        assert any(
            all(
                made(kind, dtype, head_dim, before).smem_bytes
                > made(kind, dtype, head_dim, row).smem_bytes
                for before in rows[:i]
                if head_dim <= before[0]
            )
            for head_dim in head_dims
        ), row


def made(kind, dtype, head_dim, row):
    _, tx, ty, rm, rn, min_blocks, p_over_k, chunks = row
    return kind(dtype, head_dim, tx, ty, rm, rn, min_blocks, p_over_k=p_over_k, chunks=chunks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vector_reductions_need_whole_quads_of_float32(dtype):
    for head_dim in HEAD_DIMS:
        (config,) = chosen(dtype, head_dim, 227 * KB, True)[1]
        assert config.atomic_dq
        assert config.vector_red == (dtype != "float64" and head_dim % 4 == 0), head_dim
