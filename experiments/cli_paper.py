"""The group ``python -m experiments paper``: the results of the FlashAttention paper."""

import click

from experiments.options import device_option, out_option, seed_option

quick_option = click.option("--quick", is_flag=True, help="Small sizes: two minutes on two cores.")


@click.group()
def paper():
    """The figures and tables of the FlashAttention paper, measured again.

    Each command prints its results beside the paper's. Sizes, and what the paper printed:
    experiments/sweeps/paper-*.toml.
    """


@paper.command()
@quick_option
@device_option
@seed_option
@out_option
def figure2(out, **options):
    """Figure 2: memory traffic, tile size and sparsity against runtime.

    GPT-2 medium's attention by standard attention and by nbflash: bytes counted by the tiles that
    the kernels walk, on a GPU also measured by ncu where it is installed.
    """
    from experiments.commands.paper.figure2 import run

    run(out, **options)
