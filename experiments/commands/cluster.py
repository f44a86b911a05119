"""Simulated attention over 2 to 1,024 GPUs: time, communication, memory, balance of each mask.

Every GPU has as many tokens, so that the sequence grows with the GPUs. The tiles and the messages
are those that `nbflash.distributed` has; rates were measured: experiments/sweeps/cluster.toml.
"""

import numpy as np

import masks
from experiments.harness.cluster import Cluster, Layer, simulate
from experiments.harness.console import progress
from experiments.harness.errors import BadInput
from experiments.harness.provenance import provenance
from experiments.harness.sweeps import load
from experiments.report.tables import show, write_csv, wrote
from nbflash.distributed import Sharding
from nbflash.distributed.stages import part_count

COLUMNS = {
    "mask": ("mask", ""),
    "ranks": ("GPUs", "d"),
    "tokens": ("tokens", ",d"),
    "balance": ("balance", ".3f"),
    "forward_ms": ("forward ms", ".2f"),
    "forward_of_ideal": ("forward / ideal", ".2f"),
    "backward_ms": ("backward ms", ".2f"),
    "backward_of_ideal": ("backward / ideal", ".2f"),
    "received_mb": ("received MB", ".0f"),
    "received_share": ("of all keys", ".1%"),
    "memory_mb": ("memory MB", ",.0f"),
}


def mask_of(case, tokens, seed=0):
    """The mask of a table of the sweep for a number of tokens."""
    name = case["name"]
    if name == "documents":
        count = case.get("count") or max(1, round(tokens / case["mean"]))
        cuts = np.random.default_rng(seed).choice(np.arange(1, tokens), count - 1, replace=False)
        lengths = np.diff(np.sort(np.concatenate([[0, tokens], cuts])))
        return masks.documents(lengths, causal=True)
    if name == "window":
        return masks.window(tokens, left=case["left"], right=0)
    if name == "butterfly":
        return masks.butterfly(tokens, case["block"])
    return getattr(masks, name)(tokens)


def tile_of(case, tokens, tile):
    """Of a sharding: the tile of the kernels, or a larger one where there would be too many."""
    while tokens > tile * case["most"]:
        tile *= 2
    return tile


def sharding_of(case, ranks, tokens, tile, seed=0, key_cost=0.0):
    """The `Sharding` of a table of the sweep for a number of tokens."""
    tile = tile_of(case, tokens, tile)
    return Sharding.of(mask_of(case, tokens, seed), ranks, tile, key_cost=key_cost)


def cluster_of(sweep, name):
    """The `Cluster` of the sweep for a mask."""
    return Cluster.of(sweep["gpu"], sweep["link"], name)


def row_of(case, ranks, sweep, settings, seed=0, key_cost=0.0):
    """The simulation of one mask on some GPUs."""
    tokens = ranks * settings["tokens_per_gpu"]
    sharding = sharding_of(case, ranks, tokens, sweep["gpu"]["tile"], seed, key_cost)
    layer = Layer(*(sweep[x] for x in ("head_dim", "heads", "heads_kv", "itemsize")))
    parts = part_count(sharding, layer.heads_kv, layer.group, "ranks")
    found = simulate(sharding, layer, cluster_of(sweep, case["name"]), "ranks", parts)
    row = {"mask": case["name"], "ranks": ranks, "tokens": tokens, "key_cost": key_cost}
    row["balance"] = sharding.balance
    for name in ("forward", "backward"):
        row[f"{name}_ms"] = found[f"{name}_s"] * 1e3
        row[f"{name}_of_ideal"] = found[f"{name}_of_ideal"]
        row[f"{name}_waiting"] = found[f"{name}_waiting"]
    row["received_mb"] = found["received_bytes"] / 1e6
    row["received_share"] = found["received_bytes"] / (tokens * layer.kv_bytes)
    return row | {"memory_mb": found["memory_bytes"] / 1e6}


def run(out, quick, names, key_cost, seed):
    """Simulate, print the table, write ``cluster.csv`` to the directory ``out``."""
    sweep = load("cluster")
    settings = sweep["quick" if quick else "full"]
    known = [case["name"] for case in sweep["mask"]]
    for name in names:
        if name not in known:
            raise BadInput(f"--mask {name}: expected one of {', '.join(known)}")
    cases = [case for case in sweep["mask"] if not names or case["name"] in names]
    rows, ranks = [], settings["ranks"]
    with progress("Simulating", len(cases) * len(ranks)) as advance:
        for case in cases:
            for count in ranks:
                rows.append(row_of(case, count, sweep, settings, seed, key_cost))
                advance()
    title = f"{sweep['gpu']['name']}, {settings['tokens_per_gpu']} tokens a GPU, simulated"
    show(title, dict(COLUMNS.values()), [[row[key] for key in COLUMNS] for row in rows])
    origin = provenance("cpu")
    write_csv(out / "cluster.csv", [row | origin for row in rows])
    wrote(out / "cluster.csv")
