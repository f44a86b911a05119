"""The yardstick itself: budgets that reject planted errors, exact oracles."""

import math

import ml_dtypes
import numpy as np
import pytest

import masks
from nbflash import reference, scores
from nbflash.definitions import philox
from nbflash.testing import (
    assert_blocks_within_reference,
    assert_within_reference,
    block_errors,
    code_word_oracle,
    error_budget,
    low_precision,
    low_precision_backward,
    low_score_gradient,
    make_qkv,
    poisoned,
    small_integers,
)

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
NAMES = [np.dtype(d).name for d in DTYPES]


def _eps(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


class TestInputs:
    @pytest.mark.parametrize("make", [make_qkv, small_integers])
    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
    def test_shapes_dtype_and_seed(self, make, dtype):
        arrays = make(2, 3, 5, 4, 2, 8, dtype, seed=1)
        assert [x.shape for x in arrays] == [
            (2, 3, 4, 8),
            (2, 5, 2, 8),
            (2, 5, 2, 8),
            (2, 3, 4, 8),
        ]
        assert {x.dtype for x in arrays} == {np.dtype(dtype)}
        again, other = make(2, 3, 5, 4, 2, 8, dtype, seed=1), make(2, 3, 5, 4, 2, 8, dtype, seed=2)
        assert all(np.array_equal(x, y) for x, y in zip(arrays, again, strict=True))
        assert not any(np.array_equal(x, y) for x, y in zip(arrays, other, strict=True))

    def test_small_integers_multiply_exactly_in_float16(self):
        q, k, v, dout = small_integers(1, 64, 64, 1, 1, 128, np.float16)
        for a, b in ((q, k), (dout, v)):
            a, b = a[0, :, 0], b[0, :, 0]
            exact = a.astype(np.int64) @ b.astype(np.int64).T
            assert exact.any()
            running = np.zeros(exact.shape, np.float16)
            for c in range(128):
                running += np.outer(a[:, c], b[:, c])
            assert np.array_equal(running, exact)
        assert set(np.unique(q)) == {-2, -1, 0, 1, 2}
        assert 0.7 < np.mean(q == 0) < 0.9

    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
    def test_poisoned_outputs_fail_unless_written(self, dtype):
        out = poisoned((2, 3), dtype)
        assert out.dtype == dtype
        assert np.isnan(out.astype(np.float64)).all()
        want = np.ones((2, 3))
        out[:] = 1
        assert_within_reference(out, want, want.astype(dtype))
        out[1, 2] = np.nan
        with pytest.raises(AssertionError, match=r"1 of 6 elements are NaN .* first at \(1, 2\)"):
            assert_within_reference(out, want, want.astype(dtype))


class TestBudget:
    ref = np.array([[1.0, -2.0, 0.5], [4.0, 0.25, -1.0]])

    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
    def test_value(self, dtype):
        low = self.ref.astype(dtype)
        assert error_budget(self.ref, low) == 2 * _eps(dtype) * 4
        low[0, 1] += dtype(0.25)
        assert error_budget(self.ref, low) == 2 * (0.25 + _eps(dtype) * 4)
        assert error_budget(self.ref, low, factor=3) == 3 * (0.25 + _eps(dtype) * 4)

    def test_value_of_lists(self):
        assert error_budget([[1.0, -4.0]], [[1.0, -4.0]]) == 2 * _eps(np.float64) * 4

    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
    @pytest.mark.parametrize("factor", [2.0, 3.0])
    def test_an_error_just_over_the_budget_fails_and_one_just_under_passes(self, dtype, factor):
        low = self.ref.astype(dtype)
        low[1, 0] -= dtype(0.5)
        budget = error_budget(self.ref, low, factor)
        got = self.ref.copy()
        for at in np.ndindex(got.shape):
            for sign in (-1, 1):
                got[at] = self.ref[at] + sign * budget * 0.999
                error = assert_within_reference(got, self.ref, low, factor=factor)
                assert error == abs(got[at] - self.ref[at])
                got[at] = self.ref[at] + sign * budget * 1.001
                with pytest.raises(AssertionError, match=r"out: error .* exceeds the budget"):
                    assert_within_reference(got, self.ref, low, "out", factor)
            got[at] = self.ref[at]

    def test_message_names_the_worst_element(self):
        got = self.ref.copy()
        got[0, 2], got[1, 1] = 0.75, 0.5
        got[1, 2] = 1.0
        with pytest.raises(
            AssertionError,
            match=r"^dq: error 2\.000e\+00 exceeds .* at \(1, 2\): got 1, reference -1$",
        ):
            assert_within_reference(got, self.ref, self.ref.astype(np.float32), "dq")

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_nan_or_inf_in_the_result_fails(self, bad):
        got = self.ref.copy()
        got[1, 1] = bad
        with pytest.raises(AssertionError, match=r"1 of 6 elements are NaN or infinite.*\(1, 1\)"):
            assert_within_reference(got, self.ref, self.ref.astype(np.float32))

    def test_infinities_must_stand_where_the_reference_has_them(self):
        lse = np.array([0.5, -np.inf, 2.0, -np.inf])
        low = lse.astype(np.float32)
        assert assert_within_reference(low, lse, low, "lse") == 0.0
        for at, wrong in [(1, 0.0), (1, np.inf), (1, np.nan), (3, -1e30), (0, -np.inf)]:
            got = lse.copy()
            got[at] = wrong
            with pytest.raises(AssertionError, match=rf"lse: 1 of 4 .* first at \({at},\)"):
                assert_within_reference(got, lse, low, "lse")

    def test_a_reference_with_nan_decides_nothing(self):
        ref = self.ref.copy()
        ref[0, 0] = np.nan
        with pytest.raises(AssertionError, match="the reference holds NaN"):
            assert_within_reference(ref, ref, self.ref.astype(np.float32))

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_yardstick_that_overflows_decides_nothing(self, bad):
        low = self.ref.astype(np.float16)
        low[0, 0] = bad
        with pytest.raises(AssertionError, match="yardstick is not finite"):
            assert_within_reference(self.ref, self.ref, low)

    def test_shapes_must_agree(self):
        # (2, 3) against (1, 3) would broadcast
        with pytest.raises(AssertionError, match=r"shapes .* differ: .*\(1, 3\)"):
            assert_within_reference(self.ref[:1], self.ref, self.ref.astype(np.float32))
        with pytest.raises(AssertionError, match=r"shapes .* differ"):
            assert_within_reference(self.ref, self.ref, self.ref[0].astype(np.float32))

    def test_empty_arrays_agree(self):
        empty = np.zeros((1, 0, 2, 4))
        assert assert_within_reference(empty, empty, empty.astype(np.float32)) == 0.0
        assert assert_blocks_within_reference(empty, empty, empty.astype(np.float32), 16) == 0.0


class TestBlocks:
    def test_block_errors(self):
        ref = np.zeros((1, 5, 2, 3))
        got = ref.copy()
        got[0, 1, 0, 2], got[0, 4, 1, 0], got[0, 3, 1, 1] = 0.5, -2.0, 1.0
        assert np.array_equal(block_errors(got, ref, 2), [[[0.5, 0], [0, 1], [0, 2]]])
        got[0, 4, 0, 0] = np.nan
        assert np.isnan(block_errors(got, ref, 2)[0, 2, 0])
        lse, got = np.array([[[0.0, -np.inf, 1.0]]]), np.array([[[0.0, -np.inf, 1.25]]])
        assert np.array_equal(block_errors(got, lse, 2, axis=2), [[[0, 0.25]]])
        assert block_errors(np.array([[[0.0, 3.0, 1.0]]]), lse, 2, axis=2)[0, 0, 0] == np.inf

    @pytest.mark.parametrize("tile", [1, 16, 64])
    def test_a_wrong_tile_of_small_numbers_cannot_hide(self, tile):
        """Rows 96 and on are a thousandth of the rest: one of them wrong passes as a whole."""
        rng = np.random.default_rng(0)
        ref = rng.standard_normal((2, 130, 2, 8))
        ref[:, 96:] *= 1e-3
        low = ref.astype(np.float16)
        got = ref.astype(np.float16)
        assert_blocks_within_reference(got, ref, low, tile)
        got[1, 100, 1] = 0
        assert_within_reference(got, ref, low)
        if tile == 64:
            # rows 64 to 127 hold large numbers too: the tile must match the scale of the fault
            assert_blocks_within_reference(got, ref, low, tile)
        else:
            with pytest.raises(AssertionError, match=rf"dk by blocks of {tile}: error"):
                assert_blocks_within_reference(got, ref, low, tile, "dk")

    def test_message_names_the_block_that_is_furthest_over_its_budget(self):
        ref = np.array([100.0, 100.0, 1.0, 1.0]).reshape(1, 4, 1, 1)
        low, got = (ref + np.reshape(x, ref.shape) for x in ([1, 0, 0.25, 0], [2.5, 0, 2, 0]))
        with pytest.raises(
            AssertionError, match=r"error 2\.000e\+00 exceeds the budget 5\.000e-01"
        ):
            assert_blocks_within_reference(got, ref, low, 2)

    def test_lse_blocks(self):
        lse = np.array([[[100.0, 100.0, 0.01, 0.01, -np.inf]]])
        low = lse.astype(np.float32)
        got = lse.copy()
        got[0, 0, 3] += 1e-5
        assert_within_reference(got, lse, low)
        with pytest.raises(AssertionError, match="exceeds the budget"):
            assert_blocks_within_reference(got, lse, low, 2, axis=2)


class TestLowPrecision:
    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
    @pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
    @pytest.mark.parametrize(("nq", "nk"), [(1, 1), (5, 33), (64, 40)])
    def test_error_is_that_of_the_dtype(self, nq, nk, masked, dtype):
        """Nonzero, so that it is a yardstick, and a few roundings, so that it is a tight one."""
        q, k, v, dout = make_qkv(2, nq, nk, 4, 2, 16, dtype)
        keep = masks.window(nq, nk, left=nk // 2, right=1) if masked else None
        out64, lse64 = reference.attention(q, k, v, keep)
        out, lse = low_precision(q, k, v, keep)
        wide = np.float64 if dtype == np.float64 else np.float32
        assert (out.dtype, lse.dtype) == (np.dtype(dtype), np.dtype(wide))
        error = np.abs(out.astype(np.float64) - out64).max()
        assert error <= 4 * _eps(dtype) * np.abs(v.astype(np.float64)).max()
        # S is rounded three times: the product, the scaled product, the sum
        alive = np.isfinite(lse64)
        assert np.array_equal(np.isfinite(lse), alive)
        bound = max(_eps(dtype), _eps(wide)) * (np.abs(lse64[alive]).max() + np.log(nk) + 1)
        assert np.abs(lse[alive] - lse64[alive]).max() <= 4 * bound
        grads = reference.attention_backward(dout, q, k, v, keep)
        lows = low_precision_backward(dout, q, k, v, keep)
        for low, grad, x in zip(lows, grads, (q, k, v), strict=True):
            assert (low.shape, low.dtype) == (x.shape, x.dtype)
            low_error = np.abs(low.astype(np.float64) - grad).max()
            assert low_error <= 32 * _eps(dtype) * max(1, np.abs(grad).max())
            assert low_error > 0 or nk == 1
        assert error > 0 or nk == 1

    def test_a_single_key_leaves_the_rounding_of_delta(self):
        """dP − delta is exactly 0, and in no implementation: the budget must not be 0."""
        q, k, v, dout = make_qkv(1, 4, 1, 1, 1, 64, np.float32)
        dq64, dk64, _ = reference.attention_backward(dout, q, k, v)
        dq, dk, _ = low_precision_backward(dout, q, k, v)
        terms = np.abs(dout * v).sum(axis=-1).max()
        scale = 64**-0.5 * max(np.abs(k).max(), np.abs(q).sum(axis=1).max())
        for low, grad in ((dq, dq64), (dk, dk64)):
            assert 0 < np.abs(low - grad).max() <= 2 * _eps(np.float32) * terms * scale
        # a float32 sum in the plain order is inside it
        delta = np.float32(0)
        dp = np.float32(0)
        for c in range(64):
            delta += dout[0, 0, 0, c] * v[0, 0, 0, c]
            dp += dout[0, 0, 0, 63 - c] * v[0, 0, 0, 63 - c]
        got = np.zeros_like(dq)
        got[0, 0] = (dp - delta) * np.float32(64**-0.5) * k[0, 0]
        assert_within_reference(got, dq64, dq, "dq")

    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
    def test_masks_empty_rows_and_poison(self, dtype):
        q, k, v, dout = make_qkv(1, 9, 7, 2, 1, 8, dtype)
        keep = np.tril(np.ones((9, 7), bool), -1)
        keep[:, 6] = False
        k[:, 6], v[:, 6] = np.nan, np.inf
        out, lse = low_precision(q, k, v, keep)
        out64, lse64 = reference.attention(q, k, v, keep)
        assert not out[:, 0].any()
        assert_within_reference(out64.astype(dtype), out64, out, "out")
        assert_within_reference(lse64.astype(lse.dtype), lse64, lse, "lse")
        grads64 = reference.attention_backward(dout, q, k, v, keep)
        lows = low_precision_backward(dout, q, k, v, keep)
        for grad, low in zip(grads64, lows, strict=True):
            assert_blocks_within_reference(grad.astype(dtype), grad, low, 4, "gradient")

    @pytest.mark.parametrize("how", [{}, {"scale": 0.2, "dropout": 0.5, "seed": (3, 5)}], ids=repr)
    @pytest.mark.parametrize("score", [None, scores.softcap(1.5)], ids=repr)
    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
    def test_scores_and_their_gradients_are_in_the_order_of_the_keys(self, dtype, score, how):
        """Each off by a few roundings of the largest, and the attended pairs exactly."""
        *given, dout = make_qkv(1, 9, 12, 2, 1, 8, dtype)
        mask, dlse = masks.window(9, 12, left=4, right=1), np.linspace(-1, 1, 18).reshape(1, 2, 9)
        names = ("scale", "dlse", "score", "dropout", "seed")
        how = {"scale": None, "dropout": 0.0, "seed": (0, 0)} | how | {"score": score, "dlse": dlse}
        s, ds, keep = low_score_gradient(dout, *given, mask, *(how[name] for name in names))
        s64, ds64, keep64 = reference.score_gradient(dout, *given, mask, **how)
        assert np.array_equal(keep, keep64)
        for low, exact in ((s, s64), (ds, ds64)):
            error = np.abs(low.astype(np.float64) - exact)[keep].max()
            assert 0 < error <= 32 * _eps(dtype) * max(1, np.abs(exact[keep]).max())

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_a_factor_of_dropout_is_of_the_working_precision(self, dtype):
        """Of unit matrices, so that results are elements of P, each rounded once."""
        n, how = 64, {"dropout": 0.3, "seed": (3, 5)}
        q, k, *_ = make_qkv(1, n, n, 1, 1, n, dtype)
        eye = np.eye(n, dtype=dtype)[None, :, None]
        p, dropped = low_precision(q, k, eye)[0], low_precision(q, k, eye, **how)[0]
        expected = np.where(dropped == 0, 0, p * dtype(philox.factor(0.3)))
        np.testing.assert_array_equal(dropped, expected)
        assert 0.6 < np.count_nonzero(dropped) / n**2 < 0.8
        dv = low_precision_backward(eye, q, k, eye, **how)[2]
        np.testing.assert_array_equal(dv[0, :, 0].T, dropped[0, :, 0])

    def test_rounding_is_where_a_framework_rounds(self):
        """float16: S, P and O are float16 numbers; the products between them are not."""
        q, k, v, _ = make_qkv(1, 3, 40, 1, 1, 8, np.float16)
        s = (q[0, :, 0].astype(np.float32) @ k[0, :, 0].astype(np.float32).T).astype(np.float16)
        s = (s.astype(np.float32) * np.float32(8**-0.5)).astype(np.float16).astype(np.float32)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        p = (p / p.sum(axis=1, keepdims=True)).astype(np.float16)
        want = p.astype(np.float64) @ v[0, :, 0].astype(np.float64)
        out, lse = low_precision(q, k, v)
        exact = np.log(np.exp(s.astype(np.float64)).sum(axis=1))
        assert np.abs(lse[0, 0] - exact).max() <= 4 * _eps(np.float32) * np.abs(exact).max()
        # float32 sums over the keys in any order, then one rounding to float16
        assert np.abs(out[0, :, 0] - want).max() <= _eps(np.float16) * np.abs(want).max()


class TestOracles:
    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
    @pytest.mark.parametrize(("nq", "nk", "head_dim"), [(1, 1, 1), (17, 17, 16), (33, 20, 8)])
    def test_code_words(self, nq, nk, head_dim, dtype):
        for mask in (None, np.tril(np.ones((nq, nk), bool), -1), masks.causal(nq, nk)):
            case = code_word_oracle(nq, head_dim, nk, mask, dtype)
            assert {x.dtype for x in (case.q, case.k, case.v, case.dout, case.out)} == {
                np.dtype(dtype)
            }
            assert len(np.unique(case.k[0, :, 0].astype(int), axis=0)) == nk
            out, lse = reference.attention(case.q, case.k, case.v, mask, case.scale)
            assert np.array_equal(out, case.out.astype(np.float64))
            assert np.array_equal(lse, case.lse)
            grads = reference.attention_backward(
                case.dout, case.q, case.k, case.v, mask, case.scale
            )
            for got, want in zip(grads, (0 * case.q, 0 * case.k, case.dv), strict=True):
                assert np.array_equal(got, want.astype(np.float64))

    def test_code_words_have_teeth(self):
        case = code_word_oracle(17, 16)
        out, _ = reference.attention(case.q, case.k, case.v[:, ::-1], scale=case.scale)
        assert not np.array_equal(out, case.out)
        assert np.abs(case.out).min() >= 1  # no zero that a missing row could imitate

    def test_base_two_scores_of_code_words_are_integers(self):
        case = code_word_oracle(9, 16)
        assert case.scale * math.log2(math.e) == 1.0
        assert np.float32(case.scale) * np.float32(math.log2(math.e)) == np.float32(1)

    def test_more_words_than_signs(self):
        with pytest.raises(ValueError, match=r"nk=9 distinct words do not fit in head_dim=3 signs"):
            code_word_oracle(9, 3)

    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
    def test_zero_queries_average_small_integers_exactly(self, dtype):
        q, k, v, _ = small_integers(2, 5, 16, 2, 1, 8, dtype)
        out, lse = reference.attention(0 * q, k, v)
        mean = np.repeat(v.astype(np.float64).mean(axis=1, keepdims=True), 2, axis=2)
        assert np.array_equal(out, np.broadcast_to(mean, out.shape))
        assert np.array_equal(out.astype(dtype).astype(np.float64), out)  # a multiple of 1/16
        assert np.array_equal(lse, np.full(lse.shape, math.log(16)))
