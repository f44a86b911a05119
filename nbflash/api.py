"""attention and its gradients, plan, why_not: validate → plan → launch."""

from __future__ import annotations

from typing import Literal, overload

import masks
from nbflash.definitions.types import Array, ArrayT, KeysT, Scale, Seed, Window
from nbflash.inputs.arrays import as_given
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.block_map import BlockMap, as_mask
from nbflash.inputs.dropout import check_dropout
from nbflash.inputs.given import backward_inputs, forward_inputs
from nbflash.inputs.problem import check_flag, check_forward, check_mask
from nbflash.inputs.tensors import operators_for
from nbflash.planning import dispatch
from nbflash.planning.plan import AttentionPlan, lookup
from nbflash.scores import Score, check_score


@overload
def attention(
    q: ArrayT,
    k: Array,
    v: Array,
    mask: masks.Mask | BlockMap | None = ...,
    *,
    causal: bool = ...,
    window: Window = ...,
    scale: Scale = ...,
    score: Score | None = ...,
    dropout: float = ...,
    seed: Seed = ...,
    return_lse: Literal[False] = ...,
    out: Array | None = ...,
    impl: str = ...,
) -> ArrayT: ...


@overload
def attention(
    q: ArrayT,
    k: Array,
    v: Array,
    mask: masks.Mask | BlockMap | None = ...,
    *,
    causal: bool = ...,
    window: Window = ...,
    scale: Scale = ...,
    score: Score | None = ...,
    dropout: float = ...,
    seed: Seed = ...,
    return_lse: Literal[True],
    out: Array | None = ...,
    impl: str = ...,
) -> tuple[ArrayT, Array]: ...


def attention(
    q: ArrayT,
    k: Array,
    v: Array,
    mask: masks.Mask | BlockMap | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    scale: Scale = None,
    score: Score | None = None,
    dropout: float = 0.0,
    seed: Seed = None,
    return_lse: bool = False,
    out: Array | None = None,
    impl: str = "auto",
) -> ArrayT | tuple[ArrayT, Array]:
    """Exact block-sparse attention, ``softmax(scale · Q Kᵀ over the attended keys) V``.

    Parameters
    ----------
    q : array (batch, seqlen_q, heads, head_dim)
        NumPy, CuPy, or anything with DLPack or ``__cuda_array_interface__``; float16, bfloat16
        (``ml_dtypes``), float32 or float64; ``head_dim`` 1 to 256. Any strides, also negative or
        zero, with a contiguous last axis.
    k, v : array (batch, seqlen_k, heads_kv, head_dim)
        Same dtype and device as ``q``; ``heads % heads_kv == 0`` and query head ``h`` uses
        key/value head ``h // (heads // heads_kv)``.
    mask : masks.Mask or BlockMap, optional
        Shape (seqlen_q, seqlen_k). Masked-out keys and values never reach the result, NaN included.
        A `BlockMap` is read when the call runs.
    causal : bool
        Bottom-right aligned; joined with ``mask`` and ``window`` by ``&``.
    window : (int or None, int or None), optional
        Keys to the left and right of the diagonal, inclusive; None is unbounded.
    scale : float, optional
        Default ``head_dim**-0.5``. The scores must stay finite in the working precision (float64
        for float64 inputs, else float32): one that overflows makes NaN of its row, downwards it
        has no weight.
    score : nbflash.scores.Score, optional
        ``S = score(scale · Q Kᵀ)``: softcap, ALiBi, biases or a function of one's own.
    dropout : float
        Probability, from 0 to below 1, that an element of the softmax becomes 0, rounded to a
        multiple of 2⁻¹⁵ below 1; the others are divided by 1 minus that multiple. ``lse`` is that
        of all scores. Elements a few rows and columns apart are correlated by at most 1 / 257, all
        others not at all.
    seed : int, (int, int) or array of two int64 or uint64
        Needed with dropout: seed and offset of its random numbers, 64 bits each; an integer alone
        has the offset 0. The same seed drops the same elements, bit for bit, on every
        implementation and under every mask. Nothing is stored or advanced: pass
        `attention_backward` the same, and the next call another, the next offset say. An array in
        CUDA memory is read when the kernels run, negative numbers as they are modulo 2⁶⁴, and may
        be added to within a CUDA graph.
    return_lse : bool
        Also return the log-sum-exp that `attention_backward` needs.
    out : array like q, optional
        Receives the result; shares no memory with ``q``, ``k`` or ``v``.
    impl : {"auto", "sm90", "sm80", "simt", "cpu", "reference"}
        An explicit choice never falls back: it raises with the reasons of `why_not`.

    Returns
    -------
    out : array like q
        CuPy for CUDA inputs; tensors for those of PyTorch. Other arrays of host memory give arrays
        of their library where it has ``from_dlpack``, else NumPy's. A row that attends nothing is
        0.
    lse : array (batch, heads, seqlen_q), only with ``return_lse=True``
        float32, or float64 for float64 inputs.
        Natural logarithm; -inf for a row that attends nothing.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what would be right, before anything is written.
    ImportError
        If CUDA arrays arrive and CuPy is not installed.

    Notes
    -----
    Bitwise reproducible. FlashAttention-2 (arXiv 2307.08691), algorithm 1, over the live tiles of
    the mask (FlashAttention, arXiv 2205.14135, algorithm 5).
    """
    return_lse = check_flag("return_lse", return_lse)
    if operators := operators_for(q):
        if out is not None:
            raise ValueError("out must be None within torch.compile")
        if dropout and seed is None:
            raise ValueError("seed must be given with dropout; nbflash.torch.attention draws one")
        how = {"causal": causal, "window": window, "scale": scale, "score": score, "impl": impl}
        how |= {"dropout": dropout, "seed": seed, "return_lse": return_lse}
        return operators.attention(q, k, v, mask, **how)
    given = q
    q, k, v, target = forward_inputs(q, k, v, out, isinstance(mask, BlockMap))
    plan_ = lookup(q, k, v, mask, causal, window, scale, impl, score, dropout)
    result, lse = plan_.run_forward(q, k, v, target, seed, with_lse=return_lse)
    result = result if out is None else out
    return as_given(given, (result, lse) if return_lse else result)


def attention_backward(
    dout: Array,
    q: ArrayT,
    k: KeysT,
    v: Array,
    out: Array,
    lse: Array,
    mask: masks.Mask | BlockMap | None = None,
    *,
    dlse: Array | None = None,
    causal: bool = False,
    window: Window = None,
    scale: Scale = None,
    score: Score | None = None,
    dropout: float = 0.0,
    seed: Seed = None,
    deterministic: bool = False,
    impl: str = "auto",
) -> tuple[ArrayT, KeysT, KeysT]:
    """Gradients of `attention` with respect to q, k and v.

    Parameters
    ----------
    dout : array like q
        Gradient of the output. In any layout: copied where its last axis is not contiguous.
    q, k, v, mask, causal, window, scale, score, dropout, seed, impl
        As given to `attention`; ``score`` needs its gradient.
    out, lse : array
        What ``attention(..., return_lse=True)`` returned for them.
    dlse : array like lse, optional
        Gradient of the log-sum-exp; None is zero. What it holds for a row that attends nothing is
        ignored.
    deterministic : bool
        True: two passes without atomics, bitwise reproducible.

    Returns
    -------
    dq : array like q
    dk, dv : array like k
        Summed over the query heads that share a key/value head. C-contiguous.

    Notes
    -----
    FlashAttention (arXiv 2205.14135), algorithm 4, over the live tiles of the mask. Its appendix
    B.2 has ``dS = P ∘ (dP − δ)`` with ``δ = rowsum(dO ∘ O)``. The log-sum-exp has the derivative
    ``∂LSE_i / ∂S_ij = P_ij``, so that with its gradient ``dS = P ∘ (dP − (δ − dLSE))``: what
    `merge_backward` and `merge_sink_backward` give for attention over parts of the keys.

    P is computed anew, ``exp(S − LSE)``: a score s is rounded by up to ``|s| 2⁻²³`` (``2⁻⁵²`` for
    float64), and P is off by as much of itself.
    """
    deterministic, given = check_flag("deterministic", deterministic), q
    of_cupy = isinstance(mask, BlockMap)
    q, k, v, dout, out, lse, dlse = backward_inputs(q, k, v, dout, out, lse, dlse, of_cupy)
    plan_ = lookup(q, k, v, mask, causal, window, scale, impl, score, dropout)
    gradients = plan_.run_backward(dout, q, k, v, out, lse, dlse, seed, deterministic)
    return as_given(given, gradients)


def score_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    mask: masks.Mask | BlockMap | None = None,
    *,
    score: Score,
    dlse: Array | None = None,
    causal: bool = False,
    window: Window = None,
    scale: Scale = None,
    dropout: float = 0.0,
    seed: Seed = None,
    impl: str = "auto",
) -> tuple[Array, ...]:
    """Gradients of `attention` with respect to the arrays of its score function.

    Kept separate from `attention_backward`: callers without learnable score arrays pay nothing.

    Parameters
    ----------
    dout, q, k, v, out, lse, mask, dlse, causal, window, scale, dropout, seed
        As given to `attention_backward`.
    score : nbflash.scores.Score
        As given to `attention`, with its gradient.
    impl : {"auto", "sm90", "sm80", "simt", "cpu", "reference"}
        That of `attention`. For sm90 and sm80 the kernel of simt serves here, too.

    Returns
    -------
    tuple of arrays
        For every array of the score, in the order of its functions, a gradient of its shape:
        slopes of `scores.alibi` (unless a number), table of `scores.relative`, array of
        `scores.bias`, and of `scores.custom` those with a function in ``param_grads``. float32, or
        float64 for float64 inputs; C-contiguous. Elements that no attended score is made with
        are 0.

    Raises
    ------
    ValueError
        If the score has no such array, or one whose gradient is unknown.

    Notes
    -----
    With dS' the gradient of the scores that the softmax takes, ``dS' = P ∘ (dP ∘ Z − (δ − dLSE))``
    as in `attention_backward`, an array's element gets Σ dS' ∂S'/∂element over the attended scores
    that it is part of.

    Arrays of host memory are copied into a score: after a step of learning make it anew. Those of
    CUDA memory are read where they are.

    On CUDA arrays tanh is exact here. Where `attention` ran on ``sm90`` or ``sm80`` in bfloat16 it
    was not (`scores.softcap`), and gradients behind large capped scores are off by as much.

    Bitwise reproducible on NumPy arrays, and on CUDA arrays for a `scores.bias` with an element for
    every score, which is written once. Other sums there are by atomics: as `attention_backward`
    without ``deterministic``, they differ from run to run in their last bits.
    """
    given = q
    of_cupy = isinstance(mask, BlockMap)
    q, k, v, dout, out, lse, dlse = backward_inputs(q, k, v, dout, out, lse, dlse, of_cupy)
    plan_ = lookup(q, k, v, mask, causal, window, scale, impl, score, dropout)
    return as_given(given, plan_.run_score_backward(dout, q, k, v, out, lse, dlse, seed))


def plan(
    q: Array,
    k: Array,
    v: Array,
    mask: masks.Mask | BlockMap | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    scale: Scale = None,
    score: Score | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
) -> AttentionPlan:
    """Check the inputs once, tile the mask and make the kernels ready.

    The arrays give shapes, dtype, layout and device; their contents are not read. Plans are cached,
    so that `attention` with the same arguments uses the same plan.

    Parameters
    ----------
    q, k, v, mask, causal, window, scale, score, dropout, impl
        As in `attention`. The seed is given with every call of the plan.

    Returns
    -------
    AttentionPlan
    """
    q, k, v, _ = forward_inputs(q, k, v, None, isinstance(mask, BlockMap))
    return lookup(q, k, v, mask, causal, window, scale, impl, score, dropout)


def why_not(
    impl: str,
    q: Array,
    k: Array,
    v: Array,
    mask: masks.Mask | BlockMap | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    scale: Scale = None,
    score: Score | None = None,
    dropout: float = 0.0,
) -> list[str]:
    """Reasons why ``impl`` cannot run this call of `attention` on this machine.

    Parameters
    ----------
    impl : {"auto", "sm90", "sm80", "simt", "cpu", "reference"}
    q, k, v, mask, causal, window, scale, score, dropout
        As in `attention`; only shapes and layouts are read.

    Returns
    -------
    list of str
        Empty when it can.

    Raises
    ------
    TypeError, ValueError
        If the arguments are not a valid call of any implementation.
    """
    dispatch.check_impl(impl)
    q, k, v, _ = forward_inputs(q, k, v, None, isinstance(mask, BlockMap))
    problem = check_forward(q, k, v, scale)
    check_score(score, problem)
    whole = check_mask(as_mask(mask, problem.heads), problem, causal, window)
    spec = AttentionSpec(problem, whole, score, check_dropout(dropout))
    return dispatch.why_not(impl, spec)
