"""attention and attention_backward of a sequence that is dealt to ranks.

Forward: each rank attends with its own queries, stage by stage, to the keys that its rows need, and
merges the results by their log-sum-exp. Backward: with the whole output and log-sum-exp, every
stage gives its share of dQ, which is added up, and dK and dV of its keys, which go back to where
they came from. Only keys that the mask asks for travel; heads of K and V are not repeated.
"""

from __future__ import annotations

from nbflash.definitions.types import Array, ArrayT, KeysT, Scale, Seed
from nbflash.distributed.call import Call
from nbflash.distributed.communicator import Communicator, check_together
from nbflash.distributed.rank_plan import RankOptions
from nbflash.distributed.sharding import Sharding
from nbflash.inputs.arrays import as_given
from nbflash.inputs.problem import check_flag
from nbflash.scores import Score


def attention(
    q: ArrayT,
    k: Array,
    v: Array,
    sharding: Sharding,
    comm: Communicator,
    *,
    scale: Scale = None,
    score: Score | None = None,
    dropout: float = 0.0,
    seed: Seed = None,
    return_lse: bool = False,
    stages: int | None = None,
    split: str = "ranks",
    impl: str = "auto",
) -> Array:
    """`nbflash.attention` of a sequence of which each rank has a part. All ranks call it together.

    Parameters
    ----------
    q : array (batch, own queries, heads, head_dim)
        The tokens ``sharding.positions(comm.rank)`` of the whole sequence.
    k, v : array (batch, own keys, heads_kv, head_dim)
        The tokens ``sharding.positions(comm.rank, "keys")``.
    sharding : Sharding
        Of the mask of the whole sequence, made alike on all ranks.
    comm : Communicator
    scale, score, dropout, seed, return_lse, impl
        As in `nbflash.attention`, the same on all ranks. A score is that of the whole sequence.
        Dropout drops the same elements as on one process, bit for bit; it needs a sharding whose
        ``tile`` is a multiple of 64, or of 32 for NumPy arrays.
    stages : int, optional
        Number of parts in which the other ranks' keys arrive while the parts before are computed;
        default as many as a model finds fastest, at most 4. With ``split="heads"`` a number that
        divides the heads of K and V.
    split : {"ranks", "heads"}
        What arrives together: all heads of some ranks' keys, or all keys of some heads of K and V.
        With "ranks" a part costs a merge. With "heads" the first part is waited for, and kernels
        have fewer rows: slower on dense and causal masks of 8K tokens a rank, and otherwise not
        measured. It runs without score, dropout, and masks that differ by batch or head only.

    Returns
    -------
    out : array like q
    lse : array (batch, heads, own queries), only with ``return_lse=True``
        Of the rank's own queries over all keys. `nbflash.merge_sink` may follow, as on one process.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what would be right. ValueError if arguments, masks or
        versions of nbflash differ between ranks.
    RuntimeError
        If the arguments of another rank are wrong, with its message.
    TimeoutError
        If a rank does not answer within the communicator's timeout.

    Notes
    -----
    All arguments are checked before anything is sent. Results are within one rounding of those on
    one process: the results of stages are rounded once before they are merged, in float32 where
    there are more than two. They are bitwise reproducible.
    """
    options = RankOptions(scale, score, dropout, stages, split, impl)

    def check():
        check_flag("return_lse", return_lse)
        call = Call(q, k, v, sharding, comm, options, seed)
        return call, call.note(call="attention")

    results = check_together(comm, check).forward()
    return as_given(q, results if return_lse else results[0])


def attention_backward(
    dout: Array,
    q: ArrayT,
    k: KeysT,
    v: Array,
    out: Array,
    lse: Array,
    sharding: Sharding,
    comm: Communicator,
    *,
    dlse: Array | None = None,
    scale: Scale = None,
    score: Score | None = None,
    dropout: float = 0.0,
    seed: Seed = None,
    deterministic: bool = False,
    reduce: str = "wide",
    stages: int | None = None,
    split: str = "ranks",
    impl: str = "auto",
) -> tuple[ArrayT, KeysT, KeysT]:
    """Gradients of `attention` with respect to the rank's own q, k and v.

    Parameters
    ----------
    dout : array like q
        Gradient of the rank's own output.
    q, k, v, sharding, comm, scale, score, dropout, seed, stages, split, impl
        As given to `attention`.
    out, lse : array
        What ``attention(..., return_lse=True)`` returned for them.
    dlse : array like lse, optional
        Gradient of the log-sum-exp.
    deterministic : bool
        As in `nbflash.attention_backward`.
    reduce : {"wide", "input"}
        Dtype in which dK and dV are sent: float32 (float64 for float64 inputs), or the dtype of q,
        which halves the traffic in half precision and rounds once more. Sums are wide.

    Returns
    -------
    dq : array like q
    dk, dv : array like k
        Summed over the queries of all ranks.

    Raises
    ------
    TypeError, ValueError, RuntimeError, TimeoutError
        As `attention`.
    """
    options = RankOptions(scale, score, dropout, stages, split, impl)

    def check():
        if reduce not in ("wide", "input"):
            raise ValueError(f"reduce must be 'wide' or 'input', got {reduce!r}")
        check_flag("deterministic", deterministic)
        call = Call(q, k, v, sharding, comm, options, seed)
        call.take_results(dout, out, lse, dlse)
        return call, call.note(call="attention_backward", reduce=reduce)

    call = check_together(comm, check)
    return as_given(q, call.backward(deterministic, reduce == "wide"))


def score_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    sharding: Sharding,
    comm: Communicator,
    *,
    score: Score,
    dlse: Array | None = None,
    scale: Scale = None,
    dropout: float = 0.0,
    seed: Seed = None,
    stages: int | None = None,
    impl: str = "auto",
) -> tuple[Array, ...]:
    """Gradients of `attention` with respect to the arrays of its score.

    Parameters
    ----------
    dout, q, k, v, out, lse, sharding, comm, dlse, scale, dropout, seed, stages, impl
        As given to `attention_backward`.
    score : nbflash.scores.Score
        As given to `attention`, with its gradient.

    Returns
    -------
    tuple of arrays
        As of `nbflash.score_backward`, summed over all ranks: the same bits on each.

    Raises
    ------
    TypeError, ValueError, RuntimeError, TimeoutError
        As `attention`.
    """
    options = RankOptions(scale, score, dropout, stages, "ranks", impl)

    def check():
        call = Call(q, k, v, sharding, comm, options, seed)
        call.take_results(dout, out, lse, dlse)
        return call, call.note(call="score_backward", arrays=call.score_shapes())

    return as_given(q, check_together(comm, check).score_backward())
