"""The project's source documents: overflow, base 2, padding and the backward pass.

Where a document is wrong the right number is asserted, and a comment says what it printed.
"""

import math

import numpy as np
import pytest

from experiments.libraries import paper_algorithms as alg
from experiments.libraries.hbm import HBM
from nbflash import reference
from nbflash.testing import assert_within_reference, low_precision, low_precision_backward, make_qkv

LOG2_E = 1.4426950408889634


def _attend(q, k, v, keep=None, scale=1.0):
    """Reference output and LSE of one head without batch and head axes."""
    q, k, v = (np.asarray(x, float)[None, :, None] for x in (q, k, v))
    out, lse = reference.attention(q, k, v, keep, scale)
    return out[0, :, 0], lse[0, 0]


class TestFloatingPoint:
    """Claims about exp, and about results being the same bit for bit."""

    def test_range_of_exp_in_float32(self):
        info = np.finfo(np.float32)
        largest, smallest = float(info.max), float(info.smallest_subnormal)
        assert f"{largest:.2e}" == "3.40e+38"
        assert f"{math.exp(89):.2e}" == "4.49e+38"
        assert math.exp(89) > largest
        assert math.exp(90) > largest
        # printed "exp(100) = 2.69e43 (fine in FP32)"; it overflows, as everything above 88.72 does
        assert f"{math.exp(100):.2e}" == "2.69e+43"
        assert math.exp(100) > largest
        # printed "exp(85) = overflow"; it is 8.2e36 and fits
        assert math.exp(85) < largest
        assert f"{math.exp(85 - 90):.4f}" == "0.0067"
        assert f"{math.exp(-100):.2e}" == "3.72e-44"
        assert smallest < math.exp(-100) < float(info.tiny)
        assert np.float32(math.exp(-104)) == 0.0

    @pytest.mark.parametrize("top", [90.0, 1000.0])
    def test_subtracting_the_maximum_never_overflows(self, top):
        q = np.array([[1, 0], [1, 0]], np.float32)
        k = np.array([[top - 5, 0], [top, 0]], np.float32)
        hbm = HBM(Q=q, K=k, V=np.eye(2, dtype=np.float32))
        alg.flash_forward(hbm, 4, scale=1.0)  # blocks of one key: the correction is used
        out, _ = _attend(q, k, hbm["V"])
        low, _ = low_precision(*(hbm[x][None, :, None] for x in "QKV"), scale=1.0)
        assert_within_reference(hbm["O"], out, low[0, :, 0], "O", factor=2 * 2**0.5)

    def test_tiles_are_exact_but_not_bit_for_bit(self):
        """Printed "exactly the same result as the standard algorithm, bit for bit"."""
        q, k, v, _ = (x[0, :, 0] for x in make_qkv(1, 64, 64, 1, 1, 8, np.float32))
        tiled, standard = HBM(Q=q, K=k, V=v), HBM(Q=q, K=k, V=v)
        alg.flash_forward(tiled, 256)
        alg.standard_forward(standard)
        assert not np.array_equal(tiled["O"], standard["O"])
        out, _ = _attend(q, k, v, scale=8**-0.5)
        assert_within_reference(tiled["O"], out, standard["O"], "O", factor=2 * 8**0.5)


class TestBase2:
    """Scores scaled by log2(e), exp2 in place of exp."""

    def test_constant(self):
        assert f"{LOG2_E:.6f}" == "1.442695"
        assert math.log2(math.e) == LOG2_E

    def _online_base2(self, s, v, block):
        """The forward kernel's loop on scores already multiplied by log2(e)."""
        m, l, acc = np.full(len(s), -np.inf), np.zeros(len(s)), np.zeros((len(s), v.shape[1]))
        for start in range(0, s.shape[1], block):
            s_j, v_j = s[:, start : start + block], v[start : start + block]
            m_new = np.maximum(m, s_j.max(axis=1))
            p, alpha = np.exp2(s_j - m_new[:, None]), np.exp2(m - m_new)
            l, acc, m = l * alpha + p.sum(axis=1), acc * alpha[:, None] + p @ v_j, m_new
        return acc / l[:, None], m + np.log2(l)

    def test_identities(self):
        q, k, v, dout = make_qkv(1, 7, 12, 1, 1, 4, np.float64)
        out64, lse64 = reference.attention(q, k, v)
        out_low, lse_low = low_precision(q, k, v)
        s2 = 4**-0.5 * LOG2_E * (q[0, :, 0] @ k[0, :, 0].T)
        out, lse2 = self._online_base2(s2, v[0, :, 0], 5)
        assert_within_reference(out, out64[0, :, 0], out_low[0, :, 0], "base-2 output", factor=6)
        # LSE in base 2 is log2 of the sum of e^x: the natural one times log2(e)
        lse = lse2 / LOG2_E
        assert_within_reference(lse, lse64[0, 0], lse_low[0, 0], "base-2 LSE")
        np.testing.assert_allclose(lse2, np.log2(np.exp2(s2).sum(axis=1)), rtol=1e-14)
        # P = 2^(S2 - LSE2) gives the gradients back, with delta = rowsum(dO ∘ O)
        p = np.exp2(s2 - lse2[:, None])
        do = dout[0, :, 0]
        ds = p * (do @ v[0, :, 0].T - (do * out).sum(axis=1, keepdims=True)) * 4**-0.5
        got = ds @ k[0, :, 0], ds.T @ q[0, :, 0], p.T @ do
        grads, lows = (
            f(dout, q, k, v) for f in (reference.attention_backward, low_precision_backward)
        )
        for name, x, grad, low in zip(("dQ", "dK", "dV"), got, grads, lows, strict=True):
            assert_within_reference(x, grad[0, :, 0], low[0, :, 0], name, factor=6)

    def test_unmasked_padding_inflates_the_normaliser(self):
        """Each padded key, scored 0, adds 2^0 = 1 to the sum of exponentials."""
        n, padded = 5, 3
        q, k, v, _ = make_qkv(1, 4, n, 1, 1, 4, np.float64)
        out, lse = reference.attention(q, k, v)
        pad = [(0, 0), (0, padded), (0, 0), (0, 0)]
        k_pad, v_pad = np.pad(k, pad), np.pad(v, pad)
        wrong_out, wrong_lse = reference.attention(q, k_pad, v_pad)
        np.testing.assert_allclose(np.exp(wrong_lse), np.exp(lse) + padded, rtol=1e-14)
        shrink = (np.exp(lse) / (np.exp(lse) + padded)).transpose(0, 2, 1)[..., None]
        np.testing.assert_allclose(wrong_out, out * shrink, rtol=1e-13)
        right_out, right_lse = reference.attention(q, k_pad, v_pad, np.arange(n + padded) < n)
        out_low, lse_low = low_precision(q, k, v)
        assert_within_reference(right_out, out, out_low, "masked padding")
        assert_within_reference(right_lse, lse, lse_low, "masked padding, LSE")

    def test_a_row_without_keys_is_not_a_number_in_the_bare_loop(self):
        """exp2(-inf − (-inf)): the documents' loops need the guard that this project states."""
        with np.errstate(invalid="ignore"):
            out, lse2 = self._online_base2(np.full((1, 4), -np.inf), np.ones((4, 2)), 2)
        assert np.isnan(out).all()
        assert np.isnan(lse2).all()
        out, lse = _attend([[1.0, 0.0]], np.ones((4, 2)), np.ones((4, 2)), np.zeros((1, 4), bool))
        assert np.array_equal(out, [[0.0, 0.0]])
        assert np.array_equal(lse, [-np.inf])


class TestBackwardHazards:
    """What padding does to the recomputation of P in the backward pass."""

    def test_a_very_negative_lse_overflows_unmasked_padding(self):
        lse2 = -20.0
        with np.errstate(over="ignore", invalid="ignore"):
            p = np.float16(2.0 ** (0 - lse2))
            assert 2.0 ** (0 - lse2) == 2**20 > np.finfo(np.float16).max
            assert np.isinf(p)
            assert np.isnan(p * np.float16(0))
        assert np.exp2(-np.inf - lse2) == 0.0

    @pytest.mark.parametrize("shift", [-20.0, -122.0, -1000.0])
    def test_masked_padding_leaves_gradients_alone(self, shift):
        """Zero-filled keys past the end, every LSE near ``shift``, the padding masked."""
        q, k, v, dout = make_qkv(1, 6, 5, 1, 1, 4, np.float64)
        q[..., 0], k[..., 0] = 1.0, 2 * shift  # scale is 1/2
        pad = [(0, 0), (0, 3), (0, 0), (0, 0)]
        _, lse = reference.attention(q, k, v)
        assert abs(lse - shift).max() < 10
        want = reference.attention_backward(dout, q, k, v)
        got = reference.attention_backward(
            dout, q, np.pad(k, pad), np.pad(v, pad), np.arange(8) < 5
        )
        lows = low_precision_backward(dout, q, k, v)
        for x, grad, low in zip(got, want, lows, strict=True):
            assert_within_reference(x[:, : grad.shape[1]], grad, low, "gradient")
        assert not got[1][:, 5:].any()
        assert not got[2][:, 5:].any()

    def test_float32_needs_an_lse_below_minus_128(self):
        # the document's kernels keep P in float32, where -20 is harmless and -128 is not
        with np.errstate(over="ignore"):
            assert np.isfinite(np.exp2(np.float32(20)))
            assert np.isfinite(np.exp2(np.float32(127)))
            assert np.isinf(np.exp2(np.float32(128)))

    @pytest.mark.parametrize("dirt", [0.0, 3.0], ids=["zero-padding", "dirty"])
    def test_padded_queries_with_zero_dout_contribute_nothing(self, dirt):
        """P = 2^0 = 1 on padded rows, yet dO = 0 and delta = 0 leave dK and dV alone."""
        q, k, v, dout = (x[0, :, 0] for x in make_qkv(1, 6, 5, 1, 1, 4, np.float64))
        q[4:], dout[4:] = dirt, 0.0
        lse2, delta = np.zeros(6), np.zeros(6)
        s2 = 4**-0.5 * LOG2_E * (q @ k.T)
        p = np.exp2(s2 - lse2[:, None])[4:]
        ds = p * (dout[4:] @ v.T - delta[4:, None]) * 4**-0.5
        assert np.all(p == 1) if dirt == 0 else p.max() > 1
        assert not (p.T @ dout[4:]).any()
        assert not (ds.T @ q[4:]).any()

    @pytest.mark.parametrize("dirt", [np.nan, np.inf, 1e200])
    def test_the_shield_fails_where_p_is_not_finite(self, dirt):
        # printed: "perfectly shields the dirty data". Only finite P is shielded: Inf · 0 is NaN,
        # so rows past the end must be zero-filled or masked, whatever they hold.
        q = np.full((1, 4), dirt)
        with np.errstate(over="ignore", invalid="ignore"):
            p = np.exp2(q @ np.ones((4, 3)))
            assert np.isnan(p.T @ np.zeros((1, 4))).all()

    def test_delta_is_the_row_sum_of_dout_and_out(self):
        """D_i = Σ_j dP_ij P_ij = Σ_k dO_ik O_ik, and dS is the softmax's Jacobian on dP."""
        q, k, v, dout = (x[0, :, 0] for x in make_qkv(1, 5, 7, 1, 1, 4, np.float64))
        s = 0.5 * (q @ k.T)
        p = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
        dp = dout @ v.T
        delta = (dout * (p @ v)).sum(axis=1)
        np.testing.assert_allclose((dp * p).sum(axis=1), delta, rtol=1e-12)
        ds = p * (dp - delta[:, None])
        for p_i, dp_i, ds_i in zip(p, dp, ds, strict=True):
            jacobian = np.diag(p_i) - np.outer(p_i, p_i)
            np.testing.assert_allclose(jacobian @ dp_i, ds_i, rtol=0, atol=1e-14)
        # equation 6 sums over i, and dK = dSᵀ Q; it is also printed as QᵀdS, of another shape
        args = (x[None, :, None] for x in (dout, q, k, v))
        _, dk, _ = reference.attention_backward(*args, scale=0.5)
        np.testing.assert_allclose(0.5 * ds.T @ q, dk[0, :, 0], rtol=1e-12)

    def test_flops_of_one_kernel_and_of_two(self):
        """Products of the backward pass, each 2 N² d FLOPs."""
        n, d = 16, 4
        q, k, v, do = (x[0, :, 0] for x in make_qkv(1, n, n, 1, 1, d, np.float64))
        flops = 0

        def product(a, b):
            nonlocal flops
            flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
            return a @ b

        out, lse = _attend(q, k, v, scale=d**-0.5)
        delta = (do * out).sum(axis=1, keepdims=True)

        def recompute():
            p = np.exp(d**-0.5 * product(q, k.T) - lse[:, None])
            return p, d**-0.5 * p * (product(do, v.T) - delta)

        p, ds = recompute()
        one = product(ds, k), product(ds.T, q), product(p.T, do)
        assert flops == 10 * n * n * d
        flops = 0
        _, ds = recompute()
        dq = product(ds, k)
        p, ds = recompute()
        two = dq, product(ds.T, q), product(p.T, do)
        # printed 12 N² d: both kernels also recompute dP = dO Vᵀ, as their listings show
        assert flops == 14 * n * n * d
        args = [x[None, :, None] for x in (do, q, k, v)]
        grads, lows = reference.attention_backward(*args), low_precision_backward(*args)
        for got in (one, two):
            for x, grad, low in zip(got, grads, lows, strict=True):
                assert_within_reference(x, grad[0, :, 0], low[0, :, 0], "gradient", factor=4)
