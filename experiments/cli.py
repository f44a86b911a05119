"""The command line: ``python -m experiments``.

Commands import what they run when they run, so that ``--help`` needs neither Numba nor a GPU.
"""

import sys
from pathlib import Path

import click

from experiments.cli_distributed import cluster, distributed
from experiments.cli_paper import paper
from experiments.harness.errors import BadInput
from experiments.harness.passes import BACKWARD, BOTH, FORWARD, PASSES
from experiments.options import (
    SIZE,
    Number,
    cases_options,
    device_option,
    head_dims_option,
    impl_option,
    kernels_option,
    masks_option,
    out_option,
    passes_option,
    quick_option,
    results_options,
    seed_option,
    stored_dtype_option,
)
from nbflash.inputs.problem import DTYPES
from nbflash.planning.dispatch import IMPLEMENTATIONS


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
)
@click.pass_context
def cli(context):
    """Experiments with nbflash, exact block-sparse attention.

    The main one is `sparsity`; `python -m experiments sparsity --quick` takes under a minute on
    two CPU cores. Every result is checked against the float64 reference before it is timed.
    Every command prints a table and writes a CSV, most also a figure, to --out.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command()
@click.option("--quick", is_flag=True, help="Small sizes, under a minute.")
@click.option("--full", is_flag=True, help="The default: all masks, sizes that fill the machine.")
@click.option(
    "--input",
    type=click.Path(path_type=Path),
    help="Your own Q, K, V instead of random ones: .npz or .safetensors with arrays q, k "
    "and v of shape (batch, seqlen, heads, head_dim), the batch optional, or .npy with "
    "the three stacked first. Fidelity to dense attention is then reported too.",
)
@device_option
@impl_option(*IMPLEMENTATIONS)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Input dtype; with --impl sm90, float16 unless given.",
)
@click.option("--seqlen", type=SIZE, help="Sequence length of random input.")
@click.option("--head-dim", type=click.IntRange(1, 256), help="Head dimension of random input.")
@click.option("--heads", type=SIZE, help="Heads of random input.")
@click.option("--batch", type=SIZE, help="Batch size of random input.")
@click.option(
    "--block",
    type=click.IntRange(min=8),
    help="Block size of the masks; halved until a sequence holds 16 blocks.",
)
@click.option(
    "--mask",
    multiple=True,
    metavar="FAMILY",
    help="Only this family of masks, for example butterfly; may be repeated.",
)
@click.option("--rounds", type=SIZE, help="Timed rounds.")
@click.option(
    "--seconds",
    type=Number(0),
    help="Begin no further round after this time, in each pass; three rounds are always run.",
)
@click.option(
    "--check-rows",
    type=SIZE,
    help="Query rows of each head to check; more where it takes more to reach every row of tiles.",
)
@results_options
def sparsity(quick, full, device, out, **overrides):
    """Runtime and accuracy against the density of the mask.

    Butterfly masks, local masks and their union with random masks, from about 1 % to 100 % live
    blocks, forward, backward and both, against nbflash's own dense run and against dense masked
    softmax on the same array library. Defaults come from experiments/sweeps/sparsity.toml.

    A CUDA device is timed with events and a cold L2 cache, a CPU by the wall clock. Exit status: 1
    if a result is outside the error budget (nothing is reported then), 2 for bad options or files.
    """
    from experiments.commands.sparsity import measure, read_settings
    from experiments.harness.backends import open_backend
    from experiments.report.sparsity_report import report

    if quick and full:
        raise BadInput("--quick and --full exclude each other")
    if device == "cuda" and overrides["impl"] == "cpu":
        raise BadInput("--device cuda and --impl cpu exclude each other")
    if overrides["input"]:
        for name in ("seqlen", "head_dim", "heads", "batch"):
            if overrides[name] is not None:
                raise BadInput(f"--{name.replace('_', '-')} and --input exclude each other")
    section = "quick" if quick else "full"
    settings = read_settings(section, open_backend(device).device, overrides)
    report(measure(settings), out)


@cli.command()
@click.option("--quick", is_flag=True, help="Fewer calls and processes.")
@device_option
@click.option("--dtype", type=click.Choice(DTYPES), help="float32 on a CPU, else float16.")
@results_options
def calls(quick, device, dtype, out, seed):
    """What a call takes of the host, warm and in a new process.

    Microseconds of forward, backward and decode on arrays of NumPy, CuPy and, where it is
    installed, torch; imports and first calls of new processes with and without cached kernels.
    Sizes: experiments/sweeps/calls.toml.
    """
    from experiments.commands.calls import run

    run(device, dtype, out, seed, quick)


@cli.command()
@click.option("--quick", is_flag=True, help="Fewer and shorter lengths, fewer rounds.")
@click.option(
    "--paper",
    is_flag=True,
    help="The problem of the FlashAttention paper, butterfly up to 65536 tokens, beside its times.",
)
@device_option
@passes_option(*PASSES)
@impl_option(*IMPLEMENTATIONS)
@stored_dtype_option
@cases_options
@results_options
def seqlen(out, quick, paper, mask, head_dim, seqlen, **options):
    """Runtime against sequence length: dense, causal, butterfly and local masks.

    Forward, backward and both; float32 on a CPU, bfloat16 on a CUDA device, the paper's float16.
    Sizes, and the paper's times and the devices' peaks: experiments/sweeps/seqlen.toml.
    """
    from experiments.commands.seqlen import run

    if quick and paper:
        raise BadInput("--quick and --paper exclude each other")
    section = "quick" if quick else "paper" if paper else "full"
    run(out, section, **options, names=mask, head_dims=head_dim, seqlens=seqlen)


@cli.command()
@results_options
def io(seed, out):
    """Counted HBM accesses and extra memory of the papers' algorithms, forward and backward.

    Algorithms 0 to 5 of FlashAttention, with and without dropout, the query-outer order of
    FlashAttention-2, the memory-efficient passes of appendix B.1 and B.2 and Rabe and Staats'
    algorithm run literally on a memory that counts, against the growth that Theorems 2 and 5 and
    Proposition 4 state. Sizes: experiments/sweeps/io.toml.
    """
    from experiments.commands.io import run

    run(out, seed)


@cli.command()
@click.option(
    "--seqlen",
    type=click.IntRange(min=64),
    default=512,
    show_default=True,
    help="Tokens of every mask.",
)
@click.option(
    "--block",
    type=click.IntRange(min=4),
    default=32,
    show_default=True,
    help="Block size of the block patterns, and of the tile statistics.",
)
@click.option(
    "--only", multiple=True, metavar="PATTERN", help="Only this pattern; may be repeated."
)
@out_option
def masks(seqlen, block, only, out):
    """Every mask pattern: its picture, its statistics and its count.

    The cells of each mask are counted and compared with the closed form of its pattern.
    """
    from experiments.commands.gallery import run

    run(seqlen, block, only, out)


@cli.command()
@out_option
@seed_option
@quick_option
def cpu(out, seed, quick):
    """CPU: speed of the CPU kernels, and what the first call of a process costs.

    Forward and backward in float32, beside in-place NumPy, and beside torch's flash kernel where
    torch is installed. Sizes: experiments/sweeps/cpu.toml.
    """
    from experiments.commands.cpu import run

    run(out, seed, quick)


@cli.command()
@out_option
@seed_option
@quick_option
def simt(out, seed, quick):
    """GPU: speed of the SIMT kernels.

    Forward and both forms of the backward pass in float32, beside torch's memory-efficient kernel
    where torch is installed. Sizes: experiments/sweeps/simt.toml. Needs a CUDA device.
    """
    from experiments.commands.simt import run

    run(out, seed, quick)


@cli.command()
@device_option
@click.option("--quick", is_flag=True, help="Small sizes and fewer rounds.")
@click.option(
    "--impl", "impls", multiple=True, metavar="NAME", help="This implementation, too; repeatable."
)
@results_options
def decode(out, **options):
    """Rate at which decode reads cached keys and values, beside that of a copy.

    Contiguous, paged and quantised caches, a window, and a mask of sinks and a window; on a CUDA
    device beside torch's SDPA where it is installed, with the host's time of a call. Sizes:
    experiments/sweeps/decode.toml.
    """
    from experiments.commands.decode import run

    run(out, **options)


@cli.command()
@device_option
@click.option("--quick", is_flag=True, help="A tiny model and fewer rounds.")
@results_options
def train(out, **options):
    """Tokens a second of GPT-2 in training, with nbflash's attention beside torch's.

    transformers' model of random weights on bytes of source files: dense causal attention, and a
    butterfly with local blocks; on a CUDA device also the host's time of an operator. Sizes:
    experiments/sweeps/train.toml. Needs torch and transformers.
    """
    from experiments.commands.train import run

    run(out, **options)


@cli.command()
@click.option("--quick", is_flag=True, help="Smaller sizes and fewer rounds.")
@click.option("--feature", multiple=True, metavar="NAME", help="Only this; may be repeated.")
@device_option
@passes_option(FORWARD, BACKWARD)
@impl_option(*IMPLEMENTATIONS)
@stored_dtype_option
@cases_options
@results_options
def features(out, feature, mask, head_dim, seqlen, **options):
    """Cost of score functions, dropout and attention sinks over plain attention.

    Softcap, ALiBi, relative and dense biases, a function of one's own, two of them composed,
    dropout and sinks, on dense, causal and butterfly masks: float32 on a CPU, bfloat16 on a CUDA
    device. Only kernels of tensor cores have aims. Sizes: experiments/sweeps/features.toml.
    """
    from experiments.commands.features import run

    run(out, features=feature, names=mask, head_dims=head_dim, seqlens=seqlen, **options)


@cli.command()
@device_option
@quick_option
@impl_option(*IMPLEMENTATIONS)
@click.option("--method", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
@results_options
def selection(out, method, **options):
    """Blocks that are chosen at run time: selection, plan, forward and backward, and what is lost.

    Every method of nbflash.selection on random arrays and on q, k and v of a real model, beside
    dense attention: time of each step, share of the softmax mass that is kept, distance of the
    output. Sizes: experiments/sweeps/selection.toml.
    """
    from experiments.commands.selection import run

    run(out, methods=method, **options)


@cli.command()
@click.option("--quick", "section", flag_value="quick", help="The figure's cases, fewer rounds.")
@click.option("--cases", "section", flag_value="cases", help="Sizes and masks of real work.")
@click.option("--rounds", type=SIZE, help="Rounds of a measurement, instead of the sweep's.")
@passes_option(*PASSES)
@impl_option("sm90", "sm80", "simt")
@cases_options
@click.option(
    "--library", multiple=True, metavar="NAME", help="Only this library; may be repeated."
)
@results_options
def peers(out, section, library, mask, head_dim, seqlen, **options):
    """GPU: nbflash beside SDPA, FlexAttention, flash-attn-4, cudnn-frontend, in shuffled rounds.

    Forward, backward and both in bfloat16, on masks that every installed library that can express
    them takes part in: dense, causal and block-sparse; with --cases ragged lengths, grouped heads,
    windows, documents and more. Sizes: experiments/sweeps/peers.toml. Needs a CUDA device.
    """
    from experiments.commands.peers import run

    chosen = {"libraries": library, "names": mask, "head_dims": head_dim, "seqlens": seqlen}
    run(out, section or "full", **options, **chosen)


@cli.command()
@click.option("--quick", is_flag=True, help="Two head dimensions, three masks, fewer rounds.")
@passes_option(
    FORWARD,
    BACKWARD,
    text="forward, backward, or one after the other: each has configurations of its own.",
)
@kernels_option
@head_dims_option
@masks_option
@results_options
def tune(out, seed, quick, passes, impl, mask, head_dim):
    """GPU: the configurations of tensor-core kernels against each other, and against the tables.

    For each head dimension and mask, dense, causal and block-sparse: the rows of the tables in
    nbflash/backends/sm90/forward/config.py and backward/config.py, or sm80/config.py, and the
    candidates of experiments/sweeps/tune.toml, the fastest marked, and whether the table chooses
    it. Needs a Hopper GPU, or for sm80 one of compute capability 8.0 or later.
    """
    from experiments.commands.tune import run

    if BOTH in passes:
        raise BadInput("--passes both: the passes have configurations of their own")
    run(out, seed, quick, passes, impl, names=mask, head_dims=head_dim)


@cli.command("tune-decode")
@click.option("--quick", is_flag=True, help="One head dimension, two sizes, fewer rounds.")
@kernels_option
@results_options
def tune_decode(out, seed, quick, impl):
    """GPU: geometries and numbers of shares of the decode kernels of tensor cores.

    What the table in decode/config.py of nbflash/backends/sm90 or sm80 and the rule in
    nbflash/backends/split_kv/splits.py choose, against other numbers of shares and the candidates
    of experiments/sweeps/tune-decode.toml. Needs a GPU that runs the implementation.
    """
    from experiments.commands.tune_decode import run

    run(out, seed, quick, impl)


for command in (paper, distributed, cluster):
    cli.add_command(command)


def main(args=None):
    """Run the command line; a user's mistake ends it with one line and exit status 2."""
    try:
        cli.main(args, standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit("interrupted")
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
