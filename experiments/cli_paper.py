"""The group ``python -m experiments paper``: the results of the FlashAttention paper."""

import click

from experiments.harness.errors import BadInput
from experiments.options import Number, device_option, out_option, results_options

resume_option = click.option(
    "--resume", is_flag=True, help="Continue from the results of an earlier run in --out."
)
minutes_option = click.option(
    "--minutes", type=Number(0, min_open=True), help="Start nothing new after this time."
)
task_option = click.option(
    "--task", multiple=True, metavar="NAME", help="Only this; may be repeated."
)
method_option = click.option(
    "--method", multiple=True, metavar="NAME", help="Only this; may be repeated."
)
seeds_option = click.option(
    "--seed", "seeds", multiple=True, type=int, help="Only this; may be repeated."
)
quick_option = click.option("--quick", is_flag=True, help="Small sizes: two minutes on two cores.")


def _section(**flags):
    """The sizes that a flag chooses, those of ``full`` without one; BadInput for several flags."""
    chosen = [name for name, is_set in flags.items() if is_set]
    if len(chosen) > 1:
        raise BadInput(f"{' and '.join(f'--{name}' for name in chosen)} exclude each other")
    return chosen[0] if chosen else "full"


@click.group()
def paper():
    """The figures and tables of the FlashAttention paper, measured again.

    Each command prints its results beside the paper's. Sizes, and what the paper printed:
    experiments/sweeps/paper-*.toml.
    """


@paper.command()
@quick_option
@device_option
@results_options
def figure2(out, **options):
    """Figure 2: memory traffic, tile size and sparsity against runtime.

    GPT-2 medium's attention by standard attention and by nbflash: bytes counted by the tiles that
    the kernels walk, on a GPU also measured by ncu where it is installed.
    """
    from experiments.commands.paper.figure2 import run

    run(out, **options)


@paper.command()
@quick_option
@resume_option
@minutes_option
@method_option
@device_option
@results_options
def figure3(out, **options):
    """Figure 3: runtime and memory of exact, sparse and approximate attention. Needs torch.

    Plain torch, the backends of SDPA, FlexAttention with the masks of Longformer, BigBird and
    OpenAI, Linformer, Performer, linear attention, Reformer, SMYRF, Nyströmformer and nbflash, with
    and without dropout and padding. Running out of memory is a result.
    """
    from experiments.commands.paper.figure3 import run

    run(out, **options)


@paper.command()
@quick_option
@resume_option
@minutes_option
@task_option
@method_option
@seeds_option
@click.option("--speed", is_flag=True, help="A few steps of each: times, alone on the device.")
@device_option
@out_option
def lra(out, quick, speed, **options):
    """Table 3: Long Range Arena by form of attention. Needs torch; images need scikit-learn.

    ListOps, classification and retrieval of source files, images of digits and Pathfinder, all
    generated or taken from packages; a small Transformer with plain attention, nbflash and
    approximate attention, at several seeds. Data and checkpoints are kept in lra of --out.
    """
    from experiments.commands.paper.lra import run

    run(out, section=_section(quick=quick, speed=speed), **options)


@paper.command()
@quick_option
@resume_option
@minutes_option
@task_option
@method_option
@seeds_option
@device_option
@out_option
def long(out, quick, **options):
    """Table 5: classification of long texts by length of context. Needs torch.

    Source files of eight packages, the first 512 to 16384 bytes of a stretch, by dense and by
    block-sparse attention.
    """
    from experiments.commands.paper.lra import run

    run(out, "long", _section(quick=quick), **options)


@paper.command()
@quick_option
@resume_option
@minutes_option
@task_option
@method_option
@seeds_option
@device_option
@out_option
def pathx(out, quick, **options):
    """Table 6: Pathfinder with images that grow, from 64 × 64 to 256 × 256. Needs torch.

    A model is trained on small images; its position embeddings are interpolated for larger images,
    on which it is trained further: Path-X is 128 × 128, of 16384 tokens.
    """
    from experiments.commands.paper.lra import run

    run(out, "pathx", _section(quick=quick), **options)


@paper.command()
@quick_option
@click.option("--context", is_flag=True, help="A small GPT by length of context.")
@click.option("--graphs", is_flag=True, help="Steps replayed as CUDA graphs: the GPU alone.")
@click.option("--curves", is_flag=True, help="Losses of one model, a few steps apart.")
@resume_option
@minutes_option
@device_option
@out_option
def training(out, quick, context, graphs, curves, **options):
    """Tables 1, 2 and 4: BERT and GPT-2 in training. Needs torch and transformers.

    Tokens a second, the share of attention and losses with eager attention, each backend of SDPA,
    nbflash and nbflash with a butterfly and local blocks; random weights, bytes of source files.
    """
    from experiments.commands.paper.training import run

    section = _section(quick=quick, context=context, graphs=graphs, curves=curves)
    run(out, section, **options)
