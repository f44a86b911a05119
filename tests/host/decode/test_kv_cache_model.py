"""Any sequence of KVCache's operations against a plain model, exhaustion included."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_cases import HEADS, D, contents, tokens

from nbflash.kv_cache import KVCache


class Model(RuleBasedStateMachine):
    """A sequence is a list of pages, a page an object that may be shared, and the tokens seen."""

    @initialize(pages=st.integers(1, 9), page_size=st.integers(1, 4))
    def make(self, pages, page_size):
        self.cache = KVCache(pages, page_size, HEADS, D, np.float32)
        self.cache.k[:], self.cache.v[:] = np.nan, np.nan
        self.tables, self.written = {}, 0

    def some(self, data, least=1, most=3):
        known = st.sampled_from(sorted(self.tables))
        return data.draw(st.lists(known, min_size=least, max_size=most, unique=True))

    @rule(count=st.integers(1, 3))
    def allocate(self, count):
        found = self.cache.allocate(count)
        assert not set(found) & set(self.tables)
        self.tables |= {s: [] for s in found}

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        (parent,) = self.some(data, most=1)
        self.tables[self.cache.fork(parent)] = list(self.tables[parent])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data):
        chosen = self.some(data, least=0)
        self.cache.free(chosen)
        for s in chosen:
            del self.tables[s]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), n=st.integers(0, 6))
    def append(self, data, n):
        chosen = self.some(data)
        k, v = tokens(len(chosen), n, self.written)
        self.written += k.size
        longer = {s: self.extended(s, row) for s, row in zip(chosen, k, strict=True)}
        if held(self.tables | longer) <= self.cache.pages:
            self.cache.append(chosen, k, v)
            self.tables |= longer
        else:
            with pytest.raises(MemoryError, match=f"append of {n} tokens to {len(chosen)} seq"):
                self.cache.append(chosen, k, v)

    def extended(self, sequence, rows):
        pages = list(self.tables[sequence])
        for row in rows:
            if pages and len(pages[-1][1]) < self.cache.page_size:
                pages[-1] = object(), [*pages[-1][1], row]
            else:
                pages.append((object(), [row]))
        return pages

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data):
        (sequence,) = self.some(data, most=1)
        pages, size = self.tables[sequence], self.cache.page_size
        length = data.draw(st.integers(0, sum(len(rows) for _, rows in pages)))
        self.cache.truncate(sequence, length)
        shorter = [(page, rows[: length - i * size]) for i, (page, rows) in enumerate(pages)]
        self.tables[sequence] = shorter[: -(-length // size)]

    @invariant()
    def agrees(self):
        assert self.cache.free_pages == self.cache.pages - held(self.tables)
        for s, pages in self.tables.items():
            rows = [row for _, seen in pages for row in seen]
            want = np.array(rows, np.float32).reshape(-1, HEADS, D)
            k, v = contents(self.cache, s)
            assert np.array_equal(k, want)
            assert np.array_equal(v, -want)

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.free(list(self.tables))
            assert sorted(self.cache._free) == list(range(self.cache.pages))
            assert not any(self.cache._holders)


def held(tables):
    return len({id(page) for pages in tables.values() for page, _ in pages})


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=25)
