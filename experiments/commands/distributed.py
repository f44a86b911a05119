"""Attention over several GPUs or processes, beside one of them alone: weak and strong scaling.

Every rank runs this command. Before a mask is timed, the gathered results of all ranks are held to
the budget of the float64 reference. A call takes as long as its slowest rank; the ideal is the time
of one rank with the whole sequence over the number of ranks. Beside it is what the model of
`experiments cluster` predicts of the same stages and messages, at the rate that one rank has here.
Torch's context parallelism may take part: its calls and those of nbflash are made in turns.
"""

import json
from dataclasses import replace
from functools import partial

import nbflash
from experiments.commands.cluster import cluster_of, mask_of, tile_of
from experiments.commands.distributed_peers import open_mesh, peers_of
from experiments.harness.backends import open_backend, parse_dtype
from experiments.harness.cluster import Layer, simulate
from experiments.harness.console import say
from experiments.harness.errors import BadInput
from experiments.harness.inputs import random_inputs
from experiments.harness.oracle import Largest, Oracle, nearest, sample_rows, sampled
from experiments.harness.passes import BACKWARD, FORWARD, NBFLASH, flops
from experiments.harness.provenance import provenance
from experiments.harness.sweeps import load
from experiments.harness.timing import CudaEvents, Timing
from experiments.libraries.torch_base import why_not_torch
from experiments.report.scaling_figure import draw_scaling
from experiments.report.tables import show, write_csv, wrote
from nbflash import distributed
from nbflash.distributed.stages import part_count

COLUMNS = {
    "scaling": ("scaling", ""),
    "mask": ("mask", ""),
    "tokens": ("tokens", ",d"),
    "library": ("library", ""),
    "pass": ("pass", ""),
    "split": ("split", ""),
    "median_ms": ("ms", ".3f"),
    "alone_ms": ("one rank ms", ".3f"),
    "of_ideal": ("of ideal", ".2f"),
    "predicted_of_ideal": ("predicted", ".2f"),
    "tflops": ("TFLOP/s a rank", ".3g"),
    "balance": ("balance", ".3f"),
    "error": ("error", ".1e"),
}


class Measured:
    """One mask on the ranks: its inputs, its checks and what is timed."""

    def __init__(self, comm, backend, settings, case, tokens, seed):
        self.comm, self.backend, self.settings = comm, backend, settings
        self.mask = mask = mask_of(case, tokens, seed)
        tile = tile_of(case, tokens, settings["tile"])
        self.sharding = distributed.Sharding.of(mask, comm.size, tile)
        self.clock = backend.clock
        if backend.device == "cuda":
            self.clock = CudaEvents(settings["fillers"])
        batch, d, n = settings["batch"], settings["head_dim"], mask.shape[0]
        dtype = settings["dtype"]
        q, _, _, dout = random_inputs(backend.xp, (batch, n, settings["heads"], d), dtype, seed)
        k, v, _, _ = random_inputs(backend.xp, (batch, n, settings["heads_kv"], d), dtype, seed + 1)
        self.whole = q, k, v, dout
        self.own = [distributed.scatter(x, self.sharding, comm.rank) for x in self.whole]

    def forward(self):
        q, k, v, _ = self.own
        how = {"split": self.settings["split"], "return_lse": True}
        return distributed.attention(q, k, v, self.sharding, self.comm, **how)

    def backward(self, out, lse, dout=None):
        q, k, v, own = self.own
        dout = own if dout is None else dout
        given = dout, q, k, v, out, lse, self.sharding, self.comm
        return distributed.attention_backward(*given, split=self.settings["split"])

    def oracle(self, seed, measure=Largest):
        """Of one group of heads, and the dout that is to be given for it."""
        q, k, _, dout = self.whole
        rows = sample_rows(self.mask.shape[0], self.settings["check_rows"], seed)
        group = q.shape[2] // k.shape[2]
        planes, dout = [(0, h) for h in range(group)], sampled(self.backend.xp, dout, rows)
        arrays, how = (*self.whole[:3], dout), {"measure": measure}
        return Oracle(self.backend, arrays, self.mask, rows, planes, **how), dout

    def check(self, seed):
        """The verdict that is nearest to its budget."""
        oracle, dout = self.oracle(seed)
        out, lse = self.forward()
        own = distributed.scatter(dout, self.sharding, self.comm.rank)
        results = {"out": out} | dict(
            zip(("dq", "dk", "dv"), self.backward(out, lse, own), strict=True)
        )
        gathered = {
            name: distributed.gather(x, self.sharding, self.comm) for name, x in results.items()
        }
        return nearest(oracle.check(**gathered))

    def calls(self):
        """By pass: what is timed on all ranks, and on one with the whole sequence."""
        q, k, v, dout = self.whole
        out, lse = self.forward()
        alone = partial(nbflash.attention, q, k, v, self.mask, return_lse=True)
        given = dout, q, k, v, *alone(), self.mask
        return {
            FORWARD: (self.forward, alone),
            BACKWARD: (
                partial(self.backward, out, lse),
                partial(nbflash.attention_backward, *given),
            ),
        }

    def time(self, calls):
        """A `Timing` of each of some calls, which all ranks make in turns.

        All begin a call together; it takes as long as its slowest rank. The first ones do not
        count. They are waited for: ranks that are still at work before a call would begin it at
        different times.
        """
        for call in calls.values():
            self.clock.measure(call)
        samples = {name: [] for name in calls}
        while left := [name for name, of in samples.items() if self._wants_more(of)]:
            for name in left:
                self.comm.agree("")
                took, _ = self.clock.measure(calls[name])
                slowest = max(map(json.loads, self.comm.agree(json.dumps(took))))
                samples[name].append(slowest)
        return {name: Timing(tuple(of)) for name, of in samples.items()}

    def _wants_more(self, samples):
        few = len(samples) < self.settings["rounds"]
        return not samples or (few and sum(samples) < 1e3 * self.settings["seconds"])


def predicted(sharding, shape, settings, which, alone_ms, cluster):
    """The share of the ideal by the model, at the rate of one rank that takes ``alone_ms``.

    Parameters
    ----------
    sharding : nbflash.distributed.Sharding
    shape : (batch, seqlen, heads, head_dim)
    settings : dict
        ``heads_kv`` and the NumPy ``dtype``.
    which : {"forward", "backward"}
    alone_ms : float
        Of the whole sequence.
    cluster : Cluster
        Its rates of a GPU do not count.
    """
    _, n, heads, head_dim = shape
    live = float(sharding.work.sum()) * sharding.tile**2 / n**2
    cluster = replace(cluster, **{which: flops(shape, live, which) / alone_ms * 1e3})
    layer = Layer(head_dim, heads, settings["heads_kv"], settings["dtype"].itemsize)
    split = settings["split"]
    parts = part_count(sharding, layer.heads_kv, layer.group, split)
    found = simulate(sharding, layer, cluster, split, parts)
    return found[f"{which}_of_ideal"]


def on_rank(comm, device, section, names, lengths, split, peers, seed, keep=None):
    """Check and time every mask of the sweep; the rows, the same on all ranks.

    ``names`` and ``lengths``, unless empty: the only masks and tokens of the whole sequence.
    ``split``: as of `nbflash.distributed.attention`. ``peers``: whether torch takes part.

    ``keep``, if given, is called on the first rank with the rows up to each mask.
    """
    backend, sweep = open_backend(device), load("distributed")
    settings = sweep | sweep[section]
    if backend.device == "cpu":
        settings |= sweep["cpu"] | sweep["cpu"][section]
    settings |= {"dtype": parse_dtype(settings["dtype"]), "split": split}
    if peers:
        settings["fillers"] = settings["peer_fillers"]
    sizes = _sizes(settings, comm.size, lengths)
    model, rows = load("cluster"), []
    with open_mesh(comm, backend.device, peers) as mesh:
        if backend.device == "cuda":
            comm = _over_gpus(comm, backend.xp)
        for tokens in (n for n in sizes if not lengths or n in lengths):
            for case in (x for x in sweep["mask"] if not names or x["name"] in names):
                measured = Measured(comm, backend, settings, case, tokens, seed)
                common = {"scaling": sizes[tokens], "mask": case["name"], "tokens": tokens}
                found = rows_of(measured, common, cluster_of(model, case["name"]), seed, mesh)
                if comm.rank == 0:
                    say(f"{sizes[tokens]}, {case['name']}, {tokens}: {_summary(found)}")
                rows += found
                if keep and comm.rank == 0:
                    keep(rows)
    return rows


def _sizes(settings, ranks, lengths):
    """Tokens of the whole sequence to the scaling that they belong to."""
    sizes = {ranks * n: "weak" for n in settings["weak"]}
    sizes |= {n: "strong" for n in settings["strong"] if n not in sizes}
    for tokens in lengths:
        if tokens not in sizes:
            raise BadInput(f"--tokens {tokens}: expected {' or '.join(map(str, sizes))}")
    return sizes


def rows_of(measured, common, cluster, seed, mesh=None):
    """A row for either pass of one mask and each library."""
    checked, rows = measured.check(seed), []
    with peers_of(measured, common["mask"], mesh, seed) as peers:
        libraries = {NBFLASH: (checked, measured.calls()), **peers}
        for which in (FORWARD, BACKWARD):
            together = {name: calls[which][0] for name, (_, calls) in libraries.items()}
            for library, timing in measured.time(together).items():
                verdict, calls = libraries[library]
                (one,) = measured.time({library: calls[which][1]}).values()
                row = common | {"library": library, "pass": which}
                row |= _row(measured, which, timing, one)
                if library == NBFLASH:
                    row |= _own_columns(measured, which, one, cluster)
                rows.append(row | {"error": verdict.error, "budget": verdict.budget})
    return rows


def _row(measured, which, timing, one):
    """What is told of any library; its own columns are empty for others than nbflash."""
    ranks, mask = measured.comm.size, measured.mask
    density = mask.count_nonzero() / mask.shape[0] / mask.shape[1]
    row = {"ranks": ranks, "split": None, **timing.columns, "predicted_of_ideal": None}
    row |= {"alone_ms": one.median, "of_ideal": one.median / ranks / timing.median}
    work = flops(measured.whole[0].shape, density, which)
    row |= {"tflops": work / ranks / timing.median / 1e9, "balance": None}
    return row | {"dtype": measured.settings["dtype"].name, "received_mb": None}


def _own_columns(measured, which, one, cluster):
    settings, sharding = measured.settings, measured.sharding
    kv_bytes = 2 * settings["heads_kv"] * settings["head_dim"] * settings["dtype"].itemsize
    row = {"split": settings["split"], "balance": sharding.balance}
    if measured.backend.device == "cuda":
        given = measured.whole[0].shape, settings, which, one.median, cluster
        row["predicted_of_ideal"] = predicted(sharding, *given)
    return row | {"received_mb": float(sharding.traffic.sum(0).max() * kv_bytes / 1e6)}


def _summary(rows):
    return ", ".join(
        ("" if row["library"] == NBFLASH else f"{row['library']} ")
        + f"{row['pass']} {row['median_ms']:.3f} ms, {row['of_ideal']:.2f} of ideal"
        for row in rows
    )


def _over_gpus(comm, cupy):
    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    return distributed.NcclCommunicator(comm)


def _mpi():
    try:
        return distributed.MpiCommunicator()
    except ImportError:
        raise BadInput("mpi4py is not installed (pip install 'nbflash[mpi]')") from None


def run(out, device, quick, names, lengths, split, peers, processes, seed):
    """Measure; the first rank writes table and figure to ``out``, and prints the table."""
    known = [case["name"] for case in load("distributed")["mask"]]
    for name in names:
        if name not in known:
            raise BadInput(f"--mask {name}: expected one of {', '.join(known)}")
    given = device, "quick" if quick else "full", names, lengths, split, peers, seed
    if processes and device == "cuda":
        raise BadInput("--processes is for the CPU: run mpiexec -n 2 with --device cuda")
    found = open_backend("cpu" if processes else device).device
    if peers and (reason := why_not_torch(found)):
        raise BadInput(f"--peers: {reason}")
    origin = provenance(found)

    def keep(rows):
        write_csv(out / "distributed.csv", [row | origin for row in rows])

    if processes:
        given = processes, "cpu", *given[1:]
        rows = distributed.run(on_rank, *given, processes=True, timeout=600)[0]
        keep(rows)
    else:
        comm = _mpi()
        rows = on_rank(comm, *given, keep)
        if comm.rank:
            return
    say(f"[bold]{origin['device']}[/bold], {rows[0]['dtype']}, commit {origin['commit']}")
    title = f"Attention over {rows[0]['ranks']} ranks"
    show(title, dict(COLUMNS.values()), [[row[key] for key in COLUMNS] for row in rows])
    draw_scaling([row | origin for row in rows], out / "distributed.png")
    wrote(out / "distributed.csv", out / "distributed.png")
