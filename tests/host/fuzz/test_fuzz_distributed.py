"""Attention over one to four ranks, dealt in any way, against the plain definition."""

import numpy as np
from fuzzing import checked_calls, drawn_problems, plain_masks
from fuzzing.drawn_decode import DTYPES, Plain
from fuzzing.drawn_decode import check as check_decoded
from fuzzing.drawn_scores import NONE
from fuzzing.examples import examples
from hypothesis import given
from hypothesis import strategies as st

import masks
import nbflash
from nbflash import distributed
from nbflash.distributed import Sharding, gather, run, scatter


def mask_of(call):
    """The whole mask of a call, of which a sharding is made."""
    (nq, nk), options = call.keep.shape[2:], call.options
    mask = call.mask
    if mask is None or isinstance(mask, nbflash.BlockMap):
        mask = masks.dense(nq, nk) if mask is None else mask.to_mask(call.keep.shape[1])
    if options.get("causal"):
        mask = mask & masks.causal(nq, nk)
    left, right = options.get("window", (None, None))
    return mask & masks.window(nq, nk, left=left, right=right)


@st.composite
def dealt(draw):
    """A call, a sharding, and options of the ranks."""
    call, ranks = draw(drawn_problems.calls()), draw(st.integers(1, 4))
    tile = draw(st.sampled_from([32, 64] if "dropout" in call.options else [1, 5, 16, 64]))
    mask = mask_of(call)
    if draw(st.booleans()):
        sharding = Sharding.of(mask, ranks, tile, key_cost=draw(st.sampled_from([0.0, 0.01, 10])))
    else:
        rng = np.random.default_rng(draw(drawn_problems.SEEDS))
        owners = (rng.integers(0, ranks, -(-n // tile)).astype(np.int32) for n in mask.shape)
        sharding = Sharding(mask, ranks, tile, *owners)
    options = {"stages": draw(st.none() | st.integers(1, 4))}
    plain = mask.batch is None and not call.options.keys() & {"score", "dropout"}
    if plain and mask.is_plain and draw(st.integers(0, 3)) == 3:
        options = {"split": "heads", "stages": draw(st.sampled_from([1, call.k.shape[2]]))}
    return call, sharding, options


def on_rank(comm, call, sharding, options):
    """`checked_calls.run` of the whole sequence, gathered from the ranks."""
    own = {x: y for x, y in call.options.items() if x not in ("causal", "window")} | options
    part = lambda x, of="queries", axis=1: scatter(x, sharding, comm.rank, axis=axis, of=of)
    q, dout, k, v = part(call.q), part(call.dout), part(call.k, "keys"), part(call.v, "keys")
    dlse = None if call.dlse is None else part(call.dlse, axis=2)
    given = q, k, v
    out, lse = distributed.attention(*given, sharding, comm, return_lse=True, **own)
    results = dout, *given, out, lse, sharding, comm
    dq, dk, dv = distributed.attention_backward(*results, dlse=dlse, **own)
    arrays = []
    if any(stage.array is not None for stage in call.drawn.stages):
        arrays = distributed.score_backward(*results, dlse=dlse, **own)
    whole = lambda x, of="queries", axis=1: gather(x, sharding, comm, axis=axis, of=of)
    gradients = whole(dq), whole(dk, "keys"), whole(dv, "keys")
    return [whole(out), whole(lse, axis=2), *gradients], arrays


@examples(8)
@given(dealt())
def test_attention(drawn):
    call, sharding, options = drawn

    def over_ranks(call):
        results, arrays = zip(*run(on_rank, sharding.ranks, call, sharding, options), strict=True)
        for others in results[1:]:
            for x, y in zip(results[0], others, strict=True):
                np.testing.assert_array_equal(x, y)
        return results[0], arrays[0]

    checked_calls.check(call, over_ranks)


@st.composite
def spread(draw):
    """Caches of several ranks; the newest has the keys of the queries behind all others."""
    rng, ranks = np.random.default_rng(draw(drawn_problems.SEEDS)), draw(st.integers(1, 4))
    batch, q_len, heads_kv = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 2)),
    )
    heads, head_dim = heads_kv * draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 16]))
    dtype, newest = draw(st.sampled_from(DTYPES)), draw(st.integers(0, ranks - 1))
    lengths = rng.integers(0, 9, (ranks, batch)).astype(np.int32)
    lengths[newest] += q_len
    q = drawn_problems.normal(rng, (batch, q_len, heads, head_dim), dtype)
    shape = ranks, batch, int(lengths.max()) + draw(st.integers(0, 3)), heads_kv, head_dim
    k, v = (drawn_problems.normal(rng, shape, dtype) for _ in "kv")
    for r, b in np.ndindex(ranks, batch):
        k[r, b, lengths[r, b] :] = v[r, b, lengths[r, b] :] = np.nan
    return q, k, v, lengths, newest, draw(st.sampled_from([None, -0.4, 1.5]))


@examples(8)
@given(spread())
def test_decode(given):
    q, k, v, lengths, newest, scale = given

    def on_rank(comm):
        of_rank = q, k[comm.rank], v[comm.rank], lengths[comm.rank]
        return distributed.decode(*of_rank, comm, newest=newest, scale=scale, return_lse=True)

    results, ranks = run(on_rank, len(lengths)), [r for r in range(len(lengths)) if r != newest]
    for found in results[1:]:
        np.testing.assert_array_equal(found[0], results[0][0])
    held = [
        [np.concatenate([x[r, b, : lengths[r, b]] for r in (*ranks, newest)]) for x in (k, v)]
        for b in range(len(q))
    ]
    causal = [plain_masks.causal(q.shape[1], len(own)) for own, _ in held]
    keep = [np.broadcast_to(x, (q.shape[2], *x.shape)) for x in causal]
    check_decoded(results[0], q, held, Plain(scale, keep, NONE, "ranks"))
