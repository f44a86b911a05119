"""The project's source documents: memory, traffic and the theorems on HBM accesses.

Where a document is wrong the right number is asserted, and a comment says what it printed.
"""

import math

import numpy as np
import pytest

from experiments.libraries import paper_algorithms as alg
from nbflash.testing import make_qkv


class TestMemory:
    """Sizes and traffic of the score matrix, and of the tiles that replace it."""

    @pytest.mark.parametrize(
        ("n", "per_head", "of_32_heads"), [(4096, 2**26, 2**31), (32768, 2**32, 2**37)]
    )
    def test_score_matrix(self, n, per_head, of_32_heads):
        # 64 MB and 2 GB; 4 GB and 128 GB. The opening paragraph's "32 GB" for 32768 tokens is
        # neither one head nor 32 of them.
        scores = np.broadcast_to(np.float32(0), (n, n))
        assert scores.nbytes == per_head
        assert 32 * scores.nbytes == of_32_heads

    def test_traffic_of_the_score_matrix(self):
        """S written and read, P written and read: 16 n² bytes in float32."""
        n, head_dim = 4096, 128
        vectors = 4 * n * head_dim  # Q, K, V read, O written
        scores = alg.standard_forward_accesses(n, head_dim).total - vectors
        assert 4 * scores == 16 * n * n == 256 * 2**20
        assert f"{1e3 * 4 * scores / 200e9:.1f}" == "1.3"  # ms at 200 GB/s

    def test_flash_memory_is_linear(self):
        n, head_dim = 32768, 128
        standard, flash = 4 * n * n, 2 * n * head_dim
        assert (standard, flash) == (4 * 2**30, 8 * 2**20)
        assert standard // flash == 512  # printed as 500x

    def test_prefill_tiles(self):
        """Bq = Bk = 32, d = 128 in float16, the scores in float32: 28 KB on chip, 16 KB of O."""
        head_dim, sram, n = 128, 4 * 32 * 128, 4096
        b_q, b_k = alg.block_sizes(sram, head_dim)
        assert (b_q, b_k) == (32, 32)
        q_tile, k_tile, s_tile = 2 * b_q * head_dim, 2 * b_k * head_dim, 4 * b_q * b_k
        assert (q_tile, k_tile, s_tile) == (8 << 10, 8 << 10, 4 << 10)
        assert q_tile + 2 * k_tile + s_tile == 28 << 10
        assert 4 * b_q * head_dim == 16 << 10
        assert 4 * b_q == 128  # bytes of m, and of s

        steps = (n // b_q) * (n // b_k)
        reads = alg.query_outer_forward_accesses(n, head_dim, sram).reads - n * head_dim
        assert 2 * reads / steps == 16 << 10  # bytes of K and V per step
        flops = 2 * b_q * b_k * head_dim
        assert round(flops / 1e3) == 262
        # printed as 524K / 16K = 32.75, decimal by binary thousands
        assert 2 * flops / (2 * reads / steps) == 32.0

    def test_reading_the_key_value_cache(self):
        q, k, v, _ = make_qkv(1, 1, 4096, 1, 1, 128, np.float16)
        cache = k.nbytes + v.nbytes
        assert cache == 2 << 20
        assert f"{1e3 * cache / 200e9:.2f}" == "0.01"  # ms at 200 GB/s
        # printed 0.32 ms for 32 heads, from the rounded 0.01
        assert f"{32 * 1e3 * cache / 200e9:.2f}" == "0.34"
        flops = 2 * 2 * q.shape[1] * k.size
        assert flops / cache == 1.0  # a decode step is bound by bandwidth


class TestTheorems:
    """Accesses of the algorithms at the sizes that the paper names."""

    def test_block_sizes(self):
        # Algorithm 1's translation prints floor brackets, Algorithms 2, 4 and 5 the ceiling; with
        # the ceiling the four blocks of M / 4d rows take M elements or slightly more.
        assert alg.block_sizes(1000, 64) == (4, 4)
        assert alg.block_sizes(100 * 2**10 // 2, 64) == (200, 64)
        for sram, head_dim in [(1000, 64), (49152, 64), (24, 2), (1, 128)]:
            b_c, b_r = alg.block_sizes(sram, head_dim)
            assert 4 * (b_c - 1) * head_dim < sram <= 4 * b_c * head_dim
            assert b_r == min(b_c, head_dim)

    def test_gpt2_is_many_times_fewer(self):
        """N = 1024, d = 64, M about 100 KB: "up to 9x fewer" for forward and backward together."""
        n, head_dim = 1024, 64
        sram = 100 * 2**10 // 2  # float16 elements
        assert head_dim**2 * 12 < sram  # d² is many times smaller than M
        standard = alg.standard_forward_accesses(n, head_dim).total
        standard += alg.standard_backward_accesses(n, head_dim).total
        flash = alg.flash_forward_accesses(n, head_dim, sram).total
        flash += alg.flash_backward_accesses(n, head_dim, sram).total
        # this count has neither dropout nor masking passes over S, which the figure's 9x includes
        assert 3 < standard / flash < 9

    def test_lower_bound_at_full_sram(self):
        """Proposition 3: at M = Θ(N d) the count is Θ(N d), and no algorithm does better."""
        for n, head_dim in [(256, 16), (1024, 64)]:
            inputs_and_output = 4 * n * head_dim
            whole = alg.query_outer_forward_accesses(n, head_dim, 4 * n * head_dim).total
            assert whole == inputs_and_output + n  # and L
            flash = alg.flash_forward_accesses(n, head_dim, 4 * n * head_dim).total
            assert inputs_and_output < flash < 2 * inputs_and_output

    @pytest.mark.parametrize("loops", ["n^-1/2", "log n / n"])
    def test_sparse_io_grows_as_the_paper_says(self, loops):
        """s = N^(-1/2) gives Θ(N √N), s = N^(-1) log N gives Θ(N log N), for fixed d and M."""
        head_dim, sram = 64, 2**14
        ratios = []
        for n in 2 ** np.arange(14, 24):
            n = int(n)
            s, growth = {
                "n^-1/2": (n**-0.5, n**1.5),
                "log n / n": (math.log2(n) / n, n * math.log2(n)),
            }[loops]
            ratios.append(alg.theta_block_sparse(n, head_dim, sram, s) / growth)
        quarter = head_dim**2 / sram
        assert all(quarter < r <= quarter + head_dim for r in ratios)
        assert ratios == sorted(ratios, reverse=True)

    def test_head_dim_and_sram_for_which_io_drops_below_quadratic(self):
        """O(N² d² / M) against O(N²). One document also prints O(N d), true at M = Θ(N d) only."""
        n, head_dim = 2**17, 64
        small, large = (alg.theta_flash(n, head_dim, m) for m in (2**14, n * head_dim))
        assert small == n * n / 4
        assert large == n * head_dim
        assert small > 100 * large
