"""The commands of attention over several GPUs or processes: `distributed` and `cluster`."""

import math

import click

from experiments.options import (
    SIZE,
    Number,
    device_option,
    masks_option,
    out_option,
    results_options,
)


@click.command()
@device_option
@click.option("--quick", is_flag=True, help="Two sizes and fewer rounds.")
@masks_option
@click.option(
    "--tokens", type=SIZE, multiple=True, help="Only this length of the whole sequence; repeatable."
)
@click.option(
    "--split",
    type=click.Choice(["ranks", "heads"]),
    default="ranks",
    show_default=True,
    help="What arrives together: keys of some ranks, or of some heads.",
)
@click.option(
    "--peers",
    is_flag=True,
    help="Torch's context parallelism, too, on dense and causal masks; ranks of one machine.",
)
@click.option(
    "--processes",
    type=SIZE,
    help="Processes to start here, on the CPU, instead of running under mpiexec.",
)
@results_options
def distributed(out, device, quick, mask, tokens, split, peers, processes, seed):
    """Scaling of attention over several GPUs or processes, beside one of them alone.

    Weak and strong, forward and backward, by mask: mpiexec -n 2 python -m experiments distributed,
    a GPU for each rank where there are any. Sizes: experiments/sweeps/distributed.toml. Needs
    mpi4py, or --processes.
    """
    from experiments.commands.distributed import run

    run(out, device, quick, mask, tokens, split, peers, processes, seed)


@click.command()
@click.option("--quick", is_flag=True, help="Fewer numbers of GPUs and fewer tokens.")
@masks_option
@click.option(
    "--key-cost",
    type=Number(0, math.inf, max_open=True),
    default=0.0,
    show_default=True,
    help="Tiles that a GPU computes while a key arrives: key_cost of Sharding.of.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of document lengths."
)
@out_option
def cluster(out, quick, mask, key_cost, seed):
    """Simulated attention over 2 to 1,024 GPUs: time, communication, memory and balance.

    Sharding, tiles and messages are those of nbflash.distributed; the rates of a GPU and of the
    links were measured: experiments/sweeps/cluster.toml. Needs no GPU.
    """
    from experiments.commands.cluster import run

    run(out, quick, mask, key_cost, seed)
