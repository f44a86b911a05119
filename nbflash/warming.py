"""Kernels compiled before they are called: `warm`, and ``nbflash warm`` on the command line."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence

import masks
from nbflash import scores
from nbflash.cuda import availability
from nbflash.definitions.constants import HALF_PRECISION, ITEMSIZE
from nbflash.definitions.quantised import LIMITS
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.dropout import check_dropout
from nbflash.inputs.problem import MAX_HEAD_DIM
from nbflash.planning.kernels import (
    LENGTHS,
    PATTERNS,
    common_decode_kernels,
    cuda_problem,
    kernels_of,
)
from nbflash.scores import Score

PASSES = "forward", "backward", "deterministic", "decode"
_SCORES = {"none": None, "softcap": scores.softcap(30.0), "alibi": scores.alibi(0.5)}


def warm(
    head_dims: Sequence[int] = (64, 128),
    dtypes: Sequence[str] = HALF_PRECISION,
    patterns: Sequence[str | masks.Mask] = ("dense", "causal"),
    *,
    score: Sequence[Score | None] = (None,),
    dropout: Sequence[float] = (0.0,),
    passes: Sequence[str] = ("forward", "backward"),
    cache_dtypes: Sequence[str | None] = (None,),
    capability: tuple[int, int] | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> int:
    """Compile the CUDA kernels of all combinations ahead, in processes, and keep them on disk.

    Kernels of the wheel and those on disk are not compiled again. With ``capability`` no GPU is
    needed: a container image may be warmed where it is built.

    Parameters
    ----------
    head_dims : sequence of int
    dtypes : sequence of {"bfloat16", "float16", "float32", "float64"}
    patterns : sequence of str or masks.Mask
        {"dense", "causal", "window", "documents", "block", "small-block"}: all kernels that masks
        of that kind may need; for a mask the kernels that it needs. "block" has blocks of a
        multiple of 128 tokens, "small-block" smaller ones.
    score : sequence of nbflash.scores.Score or None
        Scores that differ only in parameters of the same types share their kernels.
    dropout : sequence of float
        All probabilities above 0 share their kernels.
    passes : sequence of {"forward", "backward", "deterministic", "decode"}
        "decode": the kernels of `decode` without a mask and a score, whatever the patterns are;
        where no tensor cores serve it (float32, say) those of 1 and 8 tokens and of 1, 4 and 8
        query heads of a key head.
    cache_dtypes : sequence of {None, "int8", "float8_e4m3fn"}
        Of the caches of "decode"; None: the dtype of the queries.
    capability : (int, int), optional
        Compute capability; by default that of the current CUDA device.
    workers : int, optional
        Processes; by default one a core. 0: compile in this one.
    progress : bool
        A bar on standard error.

    Returns
    -------
    int
        Number of kernels that were compiled.

    Raises
    ------
    ValueError
        If an argument is none of these, or no kernel can run it.
    """
    capability = _capability(capability)
    from nbflash.cuda import launch
    from nbflash.cuda.workers import cores
    from nbflash.planning.ahead import compile_all

    _check_names("dtypes", dtypes, ITEMSIZE)
    _check_names("passes", passes, PASSES)
    _check_names("cache_dtypes", cache_dtypes, (None, *LIMITS))
    if "decode" not in passes and any(cache_dtypes):
        raise ValueError(f"cache_dtypes={cache_dtypes!r} needs 'decode' among passes")
    for head_dim in head_dims:
        if not 1 <= head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dims has {head_dim}: must be 1 to {MAX_HEAD_DIM}")
    found, of_attention = {}, [which for which in passes if which != "decode"]
    patterns = patterns if of_attention else ()
    for head_dim, dtype, pattern in itertools.product(head_dims, dtypes, patterns):
        for mask in _masks(pattern):
            problem = cuda_problem(dtype, head_dim, *mask.shape)
            for each, probability in itertools.product(score, dropout):
                spec = AttentionSpec(problem, mask, each, check_dropout(probability))
                found |= dict.fromkeys(kernels_of(spec, capability, passes=of_attention))
    if "decode" in passes:
        for head_dim, dtype in itertools.product(head_dims, dtypes):
            specs = common_decode_kernels(dtype, head_dim, capability, cache_dtypes)
            found |= dict.fromkeys(specs)
    jobs = [(spec, capability) for spec in found if launch.is_cold(spec, capability)]
    most = cores() if workers is None else workers
    return len(compile_all(jobs, min(most, len(jobs)), bar=progress))


def _check_names(argument, given, known):
    names = ", ".join(map(str, known))
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{argument} must be a sequence of {names}, got {given!r}")
    for name in given:
        if name not in known:
            raise ValueError(f"{argument} has {name!r}: must be of {names}")


def _masks(pattern):
    if isinstance(pattern, masks.Mask):
        return [pattern]
    if pattern not in PATTERNS:
        raise ValueError(
            f"patterns has {pattern!r}: must be a mask or one of {', '.join(PATTERNS)}"
        )
    return [PATTERNS[pattern](n) for n in LENGTHS]


def _capability(given):
    if availability.simulator():
        raise ValueError("the CUDA simulator (NUMBA_ENABLE_CUDASIM=1) compiles no kernels")
    from nbflash.cuda.device import SHARED_MEMORY

    if given is None:
        if reasons := availability.why_not_cuda():
            raise ValueError(f"capability must be given here: {'; '.join(reasons)}")
        import cupy

        given = availability.capability(cupy.cuda.runtime.getDevice())
    if tuple(given) not in SHARED_MEMORY:
        known = ", ".join("{}.{}".format(*each) for each in SHARED_MEMORY)
        raise ValueError(f"capability must be one of {known}, got {given!r}")
    return tuple(given)


def add_command(commands) -> None:
    """Add ``warm`` to argparse's subcommands."""
    parser = commands.add_parser(
        "warm",
        help="compile kernels ahead",
        description="Compile the CUDA kernels of all combinations of these and keep them on disk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--head-dim", type=int, nargs="+", default=[64, 128], metavar="D")
    add(
        "--dtype",
        nargs="+",
        default=list(HALF_PRECISION),
        choices=(*HALF_PRECISION, "float32", "float64"),
    )
    add("--mask", nargs="+", default=["dense", "causal"], choices=list(PATTERNS))
    add("--score", nargs="+", default=["none"], choices=list(_SCORES))
    add("--dropout", action="store_true", help="with dropout, too")
    add("--forward-only", action="store_true", help="no kernels of gradients")
    add("--decode", action="store_true", help="kernels of decode, too")
    add("--decode-only", action="store_true", help="no others")
    caches = {"choices": ("same", *LIMITS), "help": "dtypes of decode's caches"}
    add("--cache", nargs="+", default=["same"], **caches)
    add("--deterministic", action="store_true", help="kernels of deterministic gradients, too")
    of_device = "compute capability, as 9.0; that of the CUDA device if not given"
    add("--capability", type=_pair, metavar="X.Y", help=of_device)
    add("--workers", type=int, help="processes; one a core if not given")
    parser.set_defaults(run=_run)


def _pair(text):
    try:
        major, minor = map(int, text.split("."))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two integers, as 9.0, got {text!r}") from None
    return major, minor


def _run(options) -> None:
    passes = ["forward"] if options.forward_only else ["forward", "backward"]
    passes += ["deterministic"] * options.deterministic + ["decode"] * options.decode
    if options.decode_only:
        passes = ["decode"]
    compiled = warm(
        options.head_dim,
        options.dtype,
        options.mask,
        score=[_SCORES[name] for name in options.score],
        dropout=(0.0, 0.5) if options.dropout else (0.0,),
        passes=passes,
        cache_dtypes=[None if name == "same" else name for name in options.cache],
        capability=options.capability,
        workers=options.workers,
    )
    print(f"{compiled} kernels compiled, kept in {availability.cubin_dir()}")
