"""The project's source documents: softmax, tiling, decoding, to the digits that they print.

Where a document is wrong the right number is asserted, and a comment says what it printed.
"""

import itertools
import math

import numpy as np
import pytest

import masks
from experiments.libraries import paper_algorithms as alg
from experiments.libraries.hbm import HBM
from nbflash import reference
from nbflash.testing import assert_within_reference, low_precision, make_qkv


def _printed(value, text):
    """Whether ``value`` rounds to the digits of ``text``."""
    return f"{value:.{len(text.partition('.')[2])}f}" == text


def _attend(q, k, v, keep=None, scale=1.0):
    """Reference output and LSE of one head without batch and head axes."""
    q, k, v = (np.asarray(x, float)[None, :, None] for x in (q, k, v))
    out, lse = reference.attention(q, k, v, keep, scale)
    return out[0, :, 0], lse[0, 0]


class TestOnlineSoftmax:
    """The streaming softmax worked out for z = [2, 5, 1, 4]."""

    z = (2.0, 5.0, 1.0, 4.0)

    def _trace(self):
        m, s = -math.inf, 0.0
        for z in self.z:
            m_new = max(m, z)
            s = s * math.exp(m - m_new) + math.exp(z - m_new)
            m = m_new
            yield m, s

    def test_running_maximum_and_sum(self):
        printed = [(2.0, "1.0"), (5.0, "1.0498"), (5.0, "1.0681"), (5.0, "1.4360")]
        for (m, s), (want_m, want_s) in zip(self._trace(), printed, strict=True):
            assert m == want_m
            assert _printed(s, want_s)

    def test_running_sum_is_the_surrogate_denominator(self):
        for i, (m, s) in enumerate(self._trace()):
            assert s == pytest.approx(sum(math.exp(z - m) for z in self.z[: i + 1]), rel=1e-15)

    def test_softmax(self):
        # one query [1], keys z, values the unit vectors: the output is the softmax
        (p,), (lse,) = _attend([[1.0]], np.array(self.z)[:, None], np.eye(4))
        for got, want in zip(p, ("0.0347", "0.6964", "0.0128", "0.2562"), strict=True):
            assert _printed(got, want)
        assert _printed(sum(round(x, 4) for x in p), "1.0001")  # the sum of the rounded values
        m, s = list(self._trace())[-1]
        assert lse == pytest.approx(m + math.log(s), rel=1e-15)


class TestOnlineAttention:
    """One query, three keys: running maximum, sum and output."""

    q = (1.0, 0.0)
    k = ((0.5, 0.3), (0.8, -0.2), (0.1, 0.7))
    v = ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5))

    def test_trace(self):
        m, s, o = -math.inf, 0.0, np.zeros(2)
        printed = [
            (0.5, "1.0", ("1.0", "0.0")),
            (0.8, "1.7408", ("0.7408", "1.0")),
            (0.8, "2.2374", ("0.9891", "1.2483")),
        ]
        for k, v, (want_m, want_s, want_o) in zip(self.k, self.v, printed, strict=True):
            score = np.dot(self.q, k)
            m_new = max(m, score)
            correction, weight = math.exp(m - m_new), math.exp(score - m_new)
            o, s, m = o * correction + weight * np.array(v), s * correction + weight, m_new
            assert m == want_m
            assert _printed(s, want_s)
            assert all(_printed(x, y) for x, y in zip(o, want_o, strict=True))
        for got, want in zip(o / s, ("0.4421", "0.5579"), strict=True):
            assert _printed(got, want)

    def test_standard_method(self):
        (p,), _ = _attend([self.q], self.k, np.eye(3))
        # the document prints 0.4470 for the second weight: 1 / 2.237403 is 0.446947
        for got, want in zip(p, ("0.3311", "0.4469", "0.2219"), strict=True):
            assert _printed(got, want)
        (out,), _ = _attend([self.q], self.k, self.v)
        # and from it 0.5580 where its own online result is 0.5579
        for got, want in zip(out, ("0.4421", "0.5579"), strict=True):
            assert _printed(got, want)

    def test_surrogate_output_equals_the_output_of_the_prefix(self):
        """o'_i = o'_{i-1} l_{i-1} e^{m_{i-1} - m_i} / l_i + e^{x_i - m_i} / l_i V[i]."""
        m, l, o = -math.inf, 0.0, np.zeros(2)
        for i, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            x = np.dot(self.q, k)
            m_new = max(m, x)
            l_new = l * math.exp(m - m_new) + math.exp(x - m_new)
            o = o * l * math.exp(m - m_new) / l_new + math.exp(x - m_new) / l_new * np.array(v)
            m, l = m_new, l_new
            (prefix,), (lse,) = _attend([self.q], self.k[: i + 1], self.v[: i + 1])
            np.testing.assert_allclose(o, prefix, rtol=1e-15)
            assert m + math.log(l) == pytest.approx(lse, rel=1e-14)


class TestTiling:
    """The prefill example: n = 6, d = 2, Bq = 2, Bk = 3, causal."""

    q = np.array([[1.0, 0.5], [0.8, -0.1], [0.2, 0.9], [-0.3, 0.4], [0.7, 0.6], [0.1, -0.5]])
    k = np.array([[0.3, 0.7], [0.6, 0.2], [-0.1, 0.8], [0.4, -0.3], [0.9, 0.1], [0.2, 0.5]])
    v = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    scale = 2**-0.5

    def test_score_tile(self):
        raw = self.q[:2] @ self.k[:3].T
        assert np.allclose(raw, [[0.65, 0.70, 0.30], [0.17, 0.46, -0.16]], rtol=1e-15, atol=0)
        printed = [["0.460", "0.495", "0.212"], ["0.120", "0.325", "-0.113"]]
        for row, want_row in zip(self.scale * raw, printed, strict=True):
            assert all(_printed(x, y) for x, y in zip(row, want_row, strict=True))

    def test_first_query_tile(self):
        live = masks.causal(6).tiles(2, 3).kinds.toarray() != masks.ABSENT
        assert not live[0, 1]  # all of keys 3 to 5 lie in the future of queries 0 and 1
        hbm = HBM(Q=self.q, K=self.k, V=self.v)
        alg.block_sparse_forward(hbm, 24, live, self.scale, masks.causal(6).dense())
        assert _printed(hbm["m"][0], "0.460")
        assert _printed(hbm["m"][1], "0.325")
        assert hbm["l"][0] == 1.0
        assert _printed(hbm["l"][1], "1.8146")
        assert _printed(math.exp(self.scale * (0.17 - 0.46)), "0.8146")
        assert np.array_equal(hbm["O"][0], [1.0, 0.0])
        assert [f"{x:.3f}" for x in hbm["O"][1]] == ["0.449", "0.551"]

    def test_all_query_tiles_equal_standard_attention(self):
        keep = masks.causal(6).dense()
        live = masks.causal(6).tiles(2, 3).kinds.toarray() != masks.ABSENT
        assert np.array_equal(live, [[1, 0], [1, 1], [1, 1]])
        hbm = HBM(Q=self.q, K=self.k, V=self.v)
        assert alg.block_sizes(24, 2) == (3, 2)
        alg.block_sparse_forward(hbm, 24, live, self.scale, keep)
        out, _ = _attend(self.q, self.k, self.v, keep, self.scale)
        low, _ = low_precision(*(x[None, :, None] for x in (self.q, self.k, self.v)), keep)
        assert_within_reference(hbm["O"], out, low[0, :, 0], "O")

    def test_skip_condition_is_the_absent_tile(self):
        """(q_tile + 1) Bq <= kv_tile Bk: skipped; drawn for n = 16, Bq = Bk = 4."""
        kinds = masks.causal(16).tiles(4, 4).kinds.toarray()
        assert np.array_equal(kinds != masks.ABSENT, np.tril(np.ones((4, 4), bool)))
        assert np.array_equal(kinds == masks.FULL, np.tril(np.ones((4, 4), bool), -1))
        for b_q, b_k in itertools.product((1, 2, 3, 4, 7), repeat=2):
            kinds = masks.causal(16).tiles(b_q, b_k).kinds.toarray()
            rows, cols = np.indices(kinds.shape)
            # the last query tile may be ragged: its last query is the last token
            skipped = np.minimum((rows + 1) * b_q, 16) <= cols * b_k
            assert np.array_equal(kinds == masks.ABSENT, skipped)


class TestDecoding:
    """Tiles of the key/value cache, each on its own, merged by maximum and sum."""

    def _merge(self, a, b):
        (m_a, s_a, o_a), (m_b, s_b, o_b) = a, b
        m = max(m_a, m_b)
        w_a, w_b = s_a * math.exp(m_a - m), s_b * math.exp(m_b - m)
        return m, w_a + w_b, (o_a * w_a + o_b * w_b) / (w_a + w_b)

    def test_merging_is_associative(self):
        q, k, v, _ = make_qkv(1, 1, 20, 1, 1, 4, np.float64)
        parts = []
        for start in range(0, 20, 4):
            s = 0.5 * (k[0, start : start + 4, 0] @ q[0, 0, 0])
            p = np.exp(s - s.max())
            parts.append((s.max(), p.sum(), p @ v[0, start : start + 4, 0] / p.sum()))
        out64, lse64 = reference.attention(q, k, v)
        low, lse_low = low_precision(q, k, v)
        left = right = None
        for part in parts:
            left = part if left is None else self._merge(left, part)
        for part in reversed(parts):
            right = part if right is None else self._merge(part, right)
        tree = self._merge(self._merge(*parts[:2]), self._merge(self._merge(*parts[2:4]), parts[4]))
        for m, s, o in (left, right, tree):
            # one rounding per merge on top of the part's own
            assert_within_reference(
                o, out64[0, 0, 0], low[0, 0, 0], "merged", factor=2 * len(parts)
            )
            lse = np.float64(m + math.log(s))
            assert_within_reference(
                lse, lse64[0, 0, 0], lse_low[0, 0, 0], "merged LSE", factor=2 * len(parts)
            )


class TestSpeculativeDecoding:
    """The tree of nine draft tokens A to I."""

    parents = (-1, 0, 1, 1, 2, 2, 3, 3, 4)
    printed = """
        1 0 0 0 0 0 0 0 0
        1 1 0 0 0 0 0 0 0
        1 1 1 0 0 0 0 0 0
        1 1 0 1 0 0 0 0 0
        1 1 1 0 1 0 0 0 0
        1 1 1 0 0 1 0 0 0
        1 1 0 1 0 0 1 0 0
        1 1 0 1 0 0 0 1 0
        1 1 1 0 1 0 0 0 1
    """

    def test_mask(self):
        want = np.array(self.printed.split(), int).reshape(9, 9).astype(bool)
        assert np.array_equal(masks.tree(self.parents).dense(), want)

    def test_bitmask_of_256_tokens_is_8_kb(self):
        # a chain of pairs: no tile is an interval or full, all are bits
        parents = [-1, -1, *range(254)]
        tiles = masks.tree(parents).tiles(256, 256)
        assert tiles.bits.nbytes == 8 << 10


def test_grouped_query_heads():
    """32 query heads over 8: heads 0 to 3 read key/value head 0, ..., 28 to 31 read head 7."""
    q, k, v, _ = make_qkv(1, 1, 3, 32, 8, 4, np.float64)
    v[:] = np.arange(8)[:, None]  # every value of key/value head h is h
    out, _ = reference.attention(q, k, v)
    heads = np.rint(out[0, 0, :, 0]).astype(int)
    assert np.array_equal(heads, np.repeat(np.arange(8), 4))


class TestSoftmaxDecomposition:
    """softmax of [x1, x2] from m, f and l of its halves (section 3.1)."""

    @pytest.mark.parametrize("seed", range(5))
    def test_two_halves(self, seed):
        x1, x2 = np.random.default_rng(seed).normal(0, 5, (2, 6))
        m1, m2 = x1.max(), x2.max()
        m = max(m1, m2)
        f = np.concatenate([np.exp(m1 - m) * np.exp(x1 - m1), np.exp(m2 - m) * np.exp(x2 - m2)])
        l = np.exp(m1 - m) * np.exp(x1 - m1).sum() + np.exp(m2 - m) * np.exp(x2 - m2).sum()
        x = np.concatenate([x1, x2])
        (p,), (lse,) = _attend([[1.0]], x[:, None], np.eye(12))
        np.testing.assert_allclose(f / l, p, rtol=1e-14)
        assert lse == pytest.approx(m + math.log(l), rel=1e-14)
