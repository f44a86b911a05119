"""Caches through any history, and decode over them, against plain arrays."""

import ml_dtypes
import numpy as np
from decode_cases import paged, same_bits
from fuzzing import budgets, drawn_masks, drawn_problems, plain_attention
from fuzzing.drawn_decode import DTYPES, check, contiguous, drawn_options
from fuzzing.examples import examples, machine
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import nbflash

STORED = [*DTYPES, np.int8, ml_dtypes.float8_e4m3fn]


class Caches(RuleBasedStateMachine):
    """A sequence is two plain arrays of all its tokens; every step may be followed by a decode."""

    @initialize(
        pages=st.integers(4, 20),
        page_size=st.integers(1, 17),
        dtype=st.sampled_from(STORED),
        heads=st.tuples(st.integers(1, 2), st.integers(1, 3)),
        head_dim=st.sampled_from([1, 3, 8, 16, 33]),
        seed=drawn_masks.SEEDS,
    )
    def make(self, pages, page_size, dtype, heads, head_dim, seed):
        self.heads_kv, self.heads = heads[0], heads[0] * heads[1]
        self.cache = nbflash.KVCache(pages, page_size, self.heads_kv, head_dim, dtype)
        self.quantised = np.dtype(dtype).itemsize == 1
        if not self.quantised:
            self.cache.k[:], self.cache.v[:] = np.nan, np.nan
        self.given = np.dtype(np.float32 if self.quantised else dtype)
        self.rng, self.known, self.head_dim = np.random.default_rng(seed), {}, head_dim
        self.allocate_some(1)

    def some(self, data, least=1):
        known = st.sampled_from(sorted(self.known))
        return data.draw(st.lists(known, min_size=least, max_size=4, unique=True))

    @rule(count=st.integers(1, 3))
    def allocate(self, count):
        self.allocate_some(count)

    def allocate_some(self, count):
        empty = np.zeros((0, self.heads_kv, self.head_dim), self.given)
        self.known |= dict.fromkeys(self.cache.allocate(count), (empty, empty))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), n=st.integers(1, 12))
    def append(self, data, n):
        chosen = self.some(data)
        k, v = (
            drawn_problems.normal(
                self.rng, (len(chosen), n, self.heads_kv, self.head_dim), self.given
            )
            for _ in "kv"
        )
        before = self.cache.free_pages
        try:
            self.cache.append(chosen, k, v)
        except MemoryError:
            assert self.cache.free_pages == before
            return
        for i, s in enumerate(chosen):
            held = zip(self.known[s], (k[i], v[i]), strict=True)
            self.known[s] = tuple(np.concatenate(x) for x in held)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.known)))
        self.known[self.cache.fork(parent)] = self.known[parent]

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def truncate(self, data):
        s = data.draw(st.sampled_from(sorted(self.known)))
        length = data.draw(st.integers(0, len(self.known[s][0])))
        self.cache.truncate(s, length)
        self.known[s] = tuple(x[:length] for x in self.known[s])

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def free(self, data):
        chosen = self.some(data, least=0)
        self.cache.free(chosen)
        for s in chosen:
            del self.known[s]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), q_len=st.integers(1, 5))
    def decode(self, data, q_len):
        chosen, cache = self.some(data), self.cache
        lengths, table = cache.lengths(chosen), cache.block_table(chosen)
        assert lengths.tolist() == [len(self.known[s][0]) for s in chosen]
        shape = len(chosen), q_len, self.heads, self.head_dim
        q = drawn_problems.normal(self.rng, shape, self.given)
        table = cache.block_table(chosen, width=max(1, table.shape[1]))
        capacity = table.shape[1] * cache.page_size
        sizes = len(chosen), q_len, self.heads, lengths, capacity
        options, plain = data.draw(drawn_options(*sizes, self.given))
        scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale} if self.quantised else {}
        got = nbflash.decode(
            *(q, cache.k, cache.v, lengths),
            **(options | scales | {"block_table": table, "return_lse": True}),
        )
        held = [self.read(s) for s in chosen]
        check(got, q, held, plain)

    @invariant()
    def holds_all_tokens(self):
        for s in self.known if hasattr(self, "known") else ():
            for x, known in zip(self.read(s), self.known[s], strict=True):
                assert self.quantised or np.array_equal(x, known)

    def read(self, s):
        """What a sequence has; of a quantised cache near what was appended."""
        pages, both = self.cache.block_table([s])[0], []
        for name, x in zip("kv", self.known[s], strict=True):
            array = getattr(self.cache, name)
            stored = array[pages].reshape(-1, *array.shape[2:])[: len(x)]
            both.append(self.dequantised(x, name, stored, pages) if self.quantised else stored)
        return both

    def dequantised(self, x, name, stored, pages):
        scale = getattr(self.cache, f"{name}_scale")[pages].reshape(-1, self.heads_kv)[: len(x)]
        found = stored.astype(np.float64) * scale.astype(np.float64)[..., None]
        top = abs(x.astype(np.float64)).max(axis=-1, initial=0)[..., None]
        # int8: half of a step of 127; e4m3: half of a step of 1 / 8 of the value, and of 2⁻⁹.
        integer = self.cache.dtype == np.int8
        step = top / 254 if integer else np.maximum(abs(x) / 16, top / 448 * 2.0**-10)
        assert (abs(found - x) <= step + np.spacing(np.float32(1)) * top).all()
        return found


TestCaches = machine(Caches, 10, stateful_step_count=30)


@examples(15)
@given(contiguous(), st.integers(1, 33), st.booleans())
def test_contiguous_and_paged(call, page_size, as_list):
    q, k, v, lengths, options, plain = call
    got = nbflash.decode(q, k, v, lengths, return_lse=True, **options)
    check(got, q, [(k[b, :n], v[b, :n]) for b, n in enumerate(lengths)], plain)
    page_size = next(n for n in range(page_size, 0, -1) if k.shape[1] % n == 0)
    *pages, table = paged(k, v, lengths=lengths, page_size=page_size)
    lengths, table = (x.tolist() if as_list else x for x in (lengths, table))
    again = nbflash.decode(q, *pages, lengths, block_table=table, return_lse=True, **options)
    assert same_bits(got, again)


@st.composite
def parts_to_merge(draw):
    rng, dtype = np.random.default_rng(draw(drawn_masks.SEEDS)), draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.integers(1, n)) for n in (3, 9, 4, 9))
    wide, spread = (
        np.float64 if dtype == np.float64 else np.float32,
        draw(st.sampled_from([1, 1000])),
    )
    found = []
    for _ in range(2):
        out = drawn_problems.normal(rng, shape, dtype)
        lse = (spread * rng.standard_normal((shape[0], shape[2], shape[1]))).astype(wide)
        empty = rng.random(lse.shape) < draw(st.sampled_from([0, 0.3, 1]))
        lse[empty] = -np.inf
        out[empty.swapaxes(1, 2)] = np.nan
        found.append((draw(drawn_problems.LAYOUT)(out), lse) if not empty.any() else (out, lse))
    return found


@examples(40)
@given(parts_to_merge())
def test_merge(parts):
    got = nbflash.merge(*parts[0], *parts[1])
    exact = plain_attention.merged(parts)
    wide = [(out.astype(lse.dtype), lse) for out, lse in parts]
    low = plain_attention.merged(wide, got[1].dtype)
    for name, x, want, plain in zip(("out", "lse"), got, exact, low, strict=True):
        budgets.check(name, x, want, [plain.astype(x.dtype)])
    swapped = nbflash.merge(*parts[1], *parts[0])
    assert same_bits(got, swapped)
