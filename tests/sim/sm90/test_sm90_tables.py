"""The configurations that ship, as they are: every row of the Hopper tables in the simulator."""

import pytest
import sm90_bwd_runs
import sm90_dq_runs
import sm90_runs

from nbflash.backends.sm90.backward.config import backward_configs, columns_configs
from nbflash.backends.sm90.backward.dq_config import dq_configs
from nbflash.backends.sm90.forward.config import forward_configs
from nbflash.cuda import simulator as sim
from nbflash.testing import mask_gallery

DTYPE = "bfloat16"
HEAD_DIMS = (64, 128, 192, 256)  # the last of every row


def configs_of(head_dim):
    """The runs that a configuration belongs to, and the configuration."""
    for config in dq_configs(DTYPE, head_dim):
        yield sm90_dq_runs, config
    for table in (columns_configs, backward_configs):
        for config in table(DTYPE, head_dim):
            yield sm90_bwd_runs, config


FORWARD = [config for head_dim in HEAD_DIMS for config in forward_configs(DTYPE, head_dim)]
BACKWARD = [found for head_dim in HEAD_DIMS for found in configs_of(head_dim)]


def label(config):
    return f"{type(config).__name__}-d{config.head_dim}-{config.tile_m}x{config.tile_n}"


@pytest.mark.parametrize("name", ["window", "dead-scattered"])
@pytest.mark.parametrize("config", FORWARD, ids=label)
def test_forward(config, name):
    """More than a tile of queries and of keys; intervals with two ends, and bits."""
    nq, nk = config.tile_m + 3, config.tile_n + 5
    q, k, v, _ = sm90_runs.inputs(nq, nk, head_dim=config.head_dim, dtype=DTYPE)
    with sim.options(race=True, seed=config.head_dim):
        sm90_runs.check(config, mask_gallery(nq, nk, batch=1, heads=1)[name], q, k, v)


@pytest.mark.parametrize("config", FORWARD, ids=label)
def test_forward_where_scores_leap(config):
    """So far that the weights are lost, in all columns that a head may have."""
    nq, nk, scale = config.tile_m + 3, 2 * config.tile_n - 5, -0.3
    q, k, v, _ = sm90_runs.inputs(nq, nk, head_dim=config.head_dim, dtype=DTYPE)
    sm90_runs.raise_scores(q, k, ((config.tile_n // 2, 400), (config.tile_n, 900)), scale)
    mask = mask_gallery(nq, nk, batch=1, heads=1)["checkerboard"]
    sm90_runs.check(config, mask, q, k, v, scale=scale, yardstick=sm90_runs.precise)


@pytest.mark.parametrize("name", ["window", "dead-scattered"])
@pytest.mark.parametrize(
    ("runs", "config"), BACKWARD, ids=lambda x: label(x) if hasattr(x, "tile_m") else ""
)
def test_backward(runs, config, name):
    nq, nk = config.tile_m + 3, config.tile_n + 5
    values = sm90_runs.inputs(nq, nk, head_dim=config.head_dim, dtype=DTYPE)
    with sim.options(race=True, seed=config.head_dim):
        runs.check(config, mask_gallery(nq, nk, batch=1, heads=1)[name], values)
