"""Attention over many GPUs on paper: balance, limits in closed form, and the command."""

import numpy as np
import pytest
from command_runs import read_csv, run

import masks
from experiments.commands.cluster import mask_of, sharding_of
from experiments.harness import sweeps
from experiments.harness.cluster import Cluster, Layer, simulate
from nbflash.distributed import Sharding

SWEEP = sweeps.load("cluster")
CASES = {case["name"]: case for case in SWEEP["mask"]}
LAYER = Layer(head_dim=64, heads=8, heads_kv=2, itemsize=2)


def cluster(**changed):
    """Every rate so high, every delay so short that only what is changed counts."""
    free = dict.fromkeys(("forward", "backward", "hbm", "nvlink", "infiniband"), 1e30)
    free |= dict.fromkeys(("launch", "latency", "message"), 0.0)
    return Cluster(**free | {"gpus_per_node": 8} | changed)


@pytest.mark.parametrize("name", ["causal", "documents", "window", "butterfly"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_eight_ranks_are_balanced(name, seed):
    """Most loaded rank over the mean, in tiles; documents as long as chance has it."""
    sharding = sharding_of(CASES[name], 8, 65536, 128, seed)
    assert 1 <= sharding.balance <= 1.03
    counts = np.bincount(sharding.query_owner, minlength=8)
    assert counts.max() - counts.min() <= 64 * 0.25  # of 64 rows of tiles each


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_24_documents_are_balanced(ranks):
    cuts = np.random.default_rng(ranks).choice(np.arange(1, 65536), 23, replace=False)
    lengths = np.diff(np.sort(np.r_[0, cuts, 65536]))
    for causal in (False, True):
        assert Sharding.of(masks.documents(lengths, causal=causal), ranks).balance <= 1.03


def test_a_cost_of_keys_gives_up_balance_for_messages():
    """Documents over 64 ranks: never worse by the measure, and faster over slow links."""
    case, cost = CASES["documents"], 0.25
    even, near = (sharding_of(case, 64, 1 << 18, 128, key_cost=c) for c in (0.0, cost))
    assert even.balance <= 1.03 < near.balance
    costs = [(x.work + cost * x.traffic.sum(0)).max() for x in (even, near)]
    assert costs[1] < costs[0]
    slow = cluster(forward=1e15, infiniband=1e9, nvlink=5e9)
    times = [simulate(x, LAYER, slow, "ranks", 4)["forward_s"] for x in (even, near)]
    assert times[1] < times[0]


def test_without_links_the_slowest_rank_is_all_there_is():
    sharding = Sharding.of(masks.documents([3000, 1000, 5000], causal=True), 4, 128)
    found = simulate(sharding, LAYER, cluster(forward=1e12, backward=1e12), "ranks", 4)
    flops = sharding.work.max() * 128**2 * 4 * 64 * 8
    assert found["forward_s"] == pytest.approx(flops / 1e12)
    assert found["backward_s"] == pytest.approx(2.5 * flops / 1e12)
    assert found["forward_of_ideal"] == pytest.approx(1 / sharding.balance)
    assert found["forward_waiting"] == pytest.approx(0)


def test_without_computation_the_busiest_link_is_all_there_is():
    """All keys of seven ranks, and of all but 8 over the slower link; back in float32."""
    size = 2 * 2 * 64 * 2
    within = simulate(Sharding.of(masks.dense(8192), 8), LAYER, cluster(nvlink=1e9), "ranks", 4)
    assert within["forward_s"] == pytest.approx(7 * 1024 * size / 1e9)
    assert within["backward_s"] == pytest.approx(3 * within["forward_s"])
    assert within["received_bytes"] == 7 * 1024 * size
    beyond = simulate(
        Sharding.of(masks.dense(16384), 16), LAYER, cluster(infiniband=1e9), "ranks", 4
    )
    assert beyond["forward_s"] == pytest.approx(8 * 1024 * size / 1e9)


def test_a_cast_is_hidden_behind_the_stage_before():
    """Two ranks, dense: as long to compute the own half as to send it."""
    sharding = Sharding.of(masks.dense(2048), 2)
    half = 1024 * 1024 * 4 * 64 * 8 / 1e12
    link = 1024 * LAYER.kv_bytes / half
    found = simulate(sharding, LAYER, cluster(forward=1e12, nvlink=link), "ranks", 4)
    assert found["forward_s"] == pytest.approx(2 * half)
    slower = simulate(sharding, LAYER, cluster(forward=1e12, nvlink=link / 2), "ranks", 4)
    assert slower["forward_s"] == pytest.approx(3 * half)
    assert slower["forward_waiting"] == pytest.approx(1 / 3)


def test_slices_of_heads_hide_behind_each_other():
    """As the ranks' above, in four slices: the first cast is waited for, and the last return."""
    sharding = Sharding.of(masks.dense(2048), 2)
    half = 1024 * 1024 * 4 * 64 * 8 / 1e12
    size = 1024 * LAYER.kv_bytes
    rates = {"forward": 1e12, "backward": 2.5e12, "nvlink": size / half}
    found = simulate(sharding, LAYER, cluster(**rates), "heads", 4)
    assert found["forward_s"] == pytest.approx(half / 4 + 2 * half)
    wide = (
        4 / LAYER.itemsize
    )  # with a cast a return is on its way: as long as a slice takes, or longer
    behind = [half / 4, *[max(half / 2, half / 4 * (1 + wide))] * 2, max(half / 2, half / 4 * wide)]
    expected = half / 4 + max(half / 2, behind[0]) + sum(behind[1:]) + half / 4 * wide
    assert found["backward_s"] == pytest.approx(expected)
    slower = simulate(sharding, LAYER, cluster(**rates | {"nvlink": size / half / 4}), "heads", 4)
    assert slower["forward_s"] == pytest.approx(4 * half + half / 2)
    later = simulate(sharding, LAYER, cluster(forward=1e12, launch=1.0), "heads", 4)
    assert later["forward_s"] == pytest.approx(2 * half + 3.0)
    copied = simulate(sharding, LAYER, cluster(hbm=size), "heads", 4)
    assert copied["forward_s"] == pytest.approx(4.0)
    assert found["memory_bytes"] < simulate(sharding, LAYER, cluster(), "heads", 1)["memory_bytes"]


def test_one_gpu_is_the_ideal_and_needs_no_link():
    found = simulate(Sharding.of(masks.causal(4096), 1), LAYER, cluster(forward=1e12), "ranks", 4)
    assert found["forward_of_ideal"] == pytest.approx(1)
    assert found["received_bytes"] == 0


def test_delays_are_those_of_stages_and_peers():
    """Eight ranks in four stages, two peers in all but the last; the first cast hides nowhere."""
    slow = cluster(launch=1.0, latency=0.1, message=0.01)
    found = simulate(Sharding.of(masks.dense(8192), 8), LAYER, slow, "ranks", 4)
    assert found["forward_s"] == pytest.approx(4 * 1.0 + 0.1 + 2 * 0.01)
    quick = cluster(latency=0.1, message=0.01)
    found = simulate(Sharding.of(masks.dense(8192), 8), LAYER, quick, "ranks", 4)
    assert found["forward_s"] == pytest.approx(4 * 0.1 + 7 * 0.01)


def test_large_tiles_stand_for_small_ones_where_there_would_be_too_many():
    small, large = (sharding_of(CASES["causal"] | {"most": m}, 8, 1 << 15, 128) for m in (256, 64))
    assert (small.tile, large.tile) == (128, 512)
    cells = [x.work.sum() * x.tile**2 for x in (small, large)]
    assert cells[0] == pytest.approx(cells[1], rel=0.02)
    assert mask_of(CASES["documents"], 1 << 14).shape == (1 << 14, 1 << 14)


def test_command(tmp_path, capsys):
    status, out, _ = run(capsys, "cluster", "--quick", "--mask", "window", "--out", tmp_path)
    assert status == 0
    rows = read_csv(tmp_path / "cluster.csv")
    assert [int(row["ranks"]) for row in rows] == SWEEP["quick"]["ranks"]
    assert float(rows[0]["forward_of_ideal"]) == 1
    for row in rows[1:]:
        assert 1 <= float(row["balance"]) <= 1.03
        assert 1023 * 2048 / 1e6 <= float(row["received_mb"]) <= 2 * 1024 * 2048 / 1e6
    assert "simulated" in out
