"""The written-out algorithms: right results, and exactly the HBM accesses that they claim."""

import numpy as np
import pytest

from experiments.libraries import paper_algorithms as alg
from experiments.libraries.hbm import HBM
from nbflash import reference
from nbflash.testing import assert_within_reference, low_precision, low_precision_backward

# n below one block, n not a multiple of either block, n == block, several blocks of both kinds;
# M below d (blocks of one row), M = 4d·d (square blocks), M above (B_c > B_r = d).
SHAPES = [(1, 4, 64), (7, 4, 64), (16, 4, 256), (33, 8, 96), (40, 8, 512), (64, 16, 640)]
SHAPES += [(50, 3, 2)]
IDS = [f"n{n}-d{d}-M{m}" for n, d, m in SHAPES]
DTYPES = [np.float32, np.float64]


def _inputs(n, head_dim, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, head_dim)).astype(dtype) for _ in range(4)]


def _public(*arrays):
    return [x[None, :, None] for x in arrays]


def _block_mask(n, head_dim, sram, density, query_outer=False, seed=0):
    """A random block mask with an empty row and an empty column of blocks, and its tokens."""
    b_c, b_r = alg.block_sizes(sram, head_dim)
    if query_outer:
        b_c, b_r = b_r, b_c
    rng = np.random.default_rng(seed)
    live = rng.random((-(-n // b_r), -(-n // b_c))) < density
    live[-1], live[:, 0] = False, False
    return live, np.kron(live, np.ones((b_r, b_c), bool))[:n, :n]


def _assert_forward(hbm, q, k, v, keep, lse, passes=1):
    """Algorithms 1, 2 and 5 round O in each pass over it; independent errors add as a root."""
    factor = 2 * passes**0.5
    q, k, v = _public(q, k, v)
    out64, lse64 = reference.attention(q, k, v, keep)
    out_low, lse_low = low_precision(q, k, v, keep)
    assert_within_reference(hbm["O"][None, :, None], out64, out_low, "O", factor)
    assert_within_reference(lse[None, None], lse64, lse_low, "lse", factor)


def _passes(n, head_dim, sram):
    return -(-n // alg.block_sizes(sram, head_dim)[0])


def _lse(hbm):
    with np.errstate(divide="ignore"):
        return hbm["m"] + np.log(hbm["l"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "causal-gap"])
@pytest.mark.parametrize(("n", "head_dim", "sram"), SHAPES, ids=IDS)
def test_forward_orders_agree_with_the_reference(n, head_dim, sram, masked, dtype):
    q, k, v, _ = _inputs(n, head_dim, dtype)
    keep = np.tril(np.ones((n, n), bool), -1) if masked else None  # row 0 attends nothing
    hbm = HBM(Q=q, K=k, V=v)
    alg.flash_forward(hbm, sram, keep=keep)
    assert hbm["O"].dtype == dtype
    _assert_forward(hbm, q, k, v, keep, _lse(hbm), _passes(n, head_dim, sram))

    hbm = HBM(Q=q, K=k, V=v)
    alg.query_outer_forward(hbm, sram, keep=keep)
    _assert_forward(hbm, q, k, v, keep, hbm["L"])

    hbm = HBM(Q=q, K=k, V=v)
    alg.standard_forward(hbm, keep=keep)
    _, lse64 = reference.attention(*_public(q, k, v), keep)
    _assert_forward(hbm, q, k, v, keep, lse64[0, 0])


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("n", "head_dim", "sram"), SHAPES, ids=IDS)
def test_block_sparse_orders_agree_with_the_reference(n, head_dim, sram, density):
    q, k, v, _ = _inputs(n, head_dim, np.float64)
    live, tokens = _block_mask(n, head_dim, sram, density)
    hbm = HBM(Q=q, K=k, V=v)
    alg.block_sparse_forward(hbm, sram, live)
    _assert_forward(hbm, q, k, v, tokens, _lse(hbm), _passes(n, head_dim, sram))

    live, tokens = _block_mask(n, head_dim, sram, density, query_outer=True)
    hbm = HBM(Q=q, K=k, V=v)
    alg.query_outer_forward(hbm, sram, live)
    _assert_forward(hbm, q, k, v, tokens, hbm["L"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [None, 0.3, 1.0], ids=["dense", "sparse", "all-but-edges"])
@pytest.mark.parametrize(("n", "head_dim", "sram"), SHAPES, ids=IDS)
def test_backward_agrees_with_the_reference(n, head_dim, sram, density, dtype):
    q, k, v, do = _inputs(n, head_dim, dtype)
    live, keep = (None, None) if density is None else _block_mask(n, head_dim, sram, density)
    args = (*_public(do, q, k, v), keep)
    grads64, lows = reference.attention_backward(*args), low_precision_backward(*args)
    factor = 2 * _passes(n, head_dim, sram) ** 0.5

    forward = HBM(Q=q, K=k, V=v)
    alg.flash_forward(forward, sram, keep=keep)
    saved = {name: forward[name] for name in ("O", "l", "m")}
    hbm = HBM(Q=q, K=k, V=v, dO=do, **saved)
    alg.flash_backward(hbm, sram, live)
    for name, grad64, low in zip(("dQ", "dK", "dV"), grads64, lows, strict=True):
        assert_within_reference(hbm[name][None, :, None], grad64, low, name, factor)

    forward = HBM(Q=q, K=k, V=v)
    alg.standard_forward(forward, keep=keep)
    hbm = HBM(Q=q, K=k, V=v, dO=do, P=forward["P"])
    alg.standard_backward(hbm)
    for name, grad64, low in zip(("dQ", "dK", "dV"), grads64, lows, strict=True):
        assert_within_reference(hbm[name][None, :, None], grad64, low, name, factor)


@pytest.mark.parametrize("density", [None, 0.0, 0.3, 1.0])
@pytest.mark.parametrize(("n", "head_dim", "sram"), SHAPES, ids=IDS)
def test_counted_accesses_equal_the_closed_form(n, head_dim, sram, density):
    q, k, v, do = _inputs(n, head_dim, np.float64)
    live, tokens = (None, None) if density is None else _block_mask(n, head_dim, sram, density)

    forward = HBM(Q=q, K=k, V=v)
    if live is None:
        alg.flash_forward(forward, sram)
    else:
        alg.block_sparse_forward(forward, sram, live)
    assert forward.accesses == alg.flash_forward_accesses(n, head_dim, sram, live)

    saved = {name: forward[name] for name in ("O", "l", "m")}
    hbm = HBM(Q=q, K=k, V=v, dO=do, **saved)
    alg.flash_backward(hbm, sram, live)
    assert hbm.accesses == alg.flash_backward_accesses(n, head_dim, sram, live)

    standard = HBM(Q=q, K=k, V=v)
    alg.standard_forward(standard, keep=tokens)
    assert standard.accesses == alg.standard_forward_accesses(n, head_dim)
    hbm = HBM(Q=q, K=k, V=v, dO=do, P=standard["P"])
    alg.standard_backward(hbm)
    assert hbm.accesses == alg.standard_backward_accesses(n, head_dim)

    if live is not None:
        live, _ = _block_mask(n, head_dim, sram, density, query_outer=True)
    hbm = HBM(Q=q, K=k, V=v)
    alg.query_outer_forward(hbm, sram, live)
    assert hbm.accesses == alg.query_outer_forward_accesses(n, head_dim, sram, live)


def test_accesses_by_hand():
    # n=6, d=2, M=24: B_c = 3, B_r = 2, so T_c = 2 passes over Q, O, l and m.
    assert alg.block_sizes(24, 2) == (3, 2)
    assert alg.flash_forward_accesses(6, 2, 24) == (2 * 12 + 2 * (24 + 12), 24 + 2 * (12 + 12))
    # The first K/V block alone: every row of Q visits once, K and V are still loaded in full.
    one_column = np.array([[1, 0], [1, 0], [1, 0]])
    assert alg.flash_forward_accesses(6, 2, 24, one_column) == (2 * 12 + 36, 24 + 24)
    # Q outer: 2 blocks of 3 rows, each reading K and V once.
    assert alg.query_outer_forward_accesses(6, 2, 24) == (12 + 2 * 24, 12 + 6)
    assert alg.standard_forward_accesses(6, 2).total == 4 * 12 + 4 * 36


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_ratio_to_theta_is_bounded_by_the_leading_constants(head_dim):
    """Theorems 2 and 5: for d <= M <= N d the exact count is a constant times N² d² / M.

    With B_c = M / 4d there are T_c = 4 N d / M passes of 3 N d + 4 N accesses (5 N d + 2 N
    backward); what is left, initialising and reading K and V, is at most 3 N d + 2 N (7 N d
    backward), and N d <= N² d² / M.
    """
    for n in (1024, 4096, 16384):
        standard = alg.standard_forward_accesses(n, head_dim).total
        assert standard == 4 * alg.theta_standard(n, head_dim)
        backward = alg.standard_backward_accesses(n, head_dim).total
        assert 7 <= backward / alg.theta_standard(n, head_dim) <= 8
        for sram in (4 * head_dim, 16 * head_dim, head_dim**2, 4 * head_dim**2, n * head_dim):
            theta = alg.theta_flash(n, head_dim, sram)
            forward = alg.flash_forward_accesses(n, head_dim, sram).total
            assert 4 * 3 <= forward / theta <= 4 * (3 + 4 / head_dim) + 3 + 2 / head_dim
            backward = alg.flash_backward_accesses(n, head_dim, sram).total
            assert 4 * 5 <= backward / theta <= 4 * (5 + 2 / head_dim) + 7


@pytest.mark.parametrize(("n", "head_dim", "sram"), [(256, 16, 1024), (512, 32, 4096)])
def test_block_sparse_accesses_are_affine_in_the_density(n, head_dim, sram):
    """Proposition 4: N d plus a term proportional to s, the share of live blocks."""
    b_c, b_r = alg.block_sizes(sram, head_dim)
    n_row, n_col = n // b_r, n // b_c
    rng = np.random.default_rng(0)
    order = rng.permutation(n_row * n_col)
    q, k, v, _ = _inputs(n, head_dim, np.float32)
    counts = []
    for n_live in range(0, n_row * n_col + 1, n_col):
        live = (order < n_live).reshape(n_row, n_col)
        hbm = HBM(Q=q, K=k, V=v)
        alg.block_sparse_forward(hbm, sram, live)
        counts.append(hbm.accesses.total)
        s = n_live / live.size
        assert counts[-1] == 3 * n * head_dim + 2 * n + s * n_col * (3 * n * head_dim + 4 * n)
        ratio = counts[-1] / alg.theta_block_sparse(n, head_dim, sram, s)
        assert 3 <= ratio <= 4 * (3 + 4 / head_dim)
    assert len(set(np.diff(counts))) == 1
    assert counts[-1] == alg.flash_forward_accesses(n, head_dim, sram).total


def test_query_outer_order_moves_less_than_kv_outer_order():
    # It reads K and V (2 N d) on each pass where the K/V outer loop reads Q and O and writes O.
    for n, head_dim, sram in [(1024, 64, 4096), (4096, 128, 65536), (512, 32, 4096)]:
        kv_outer = alg.flash_forward_accesses(n, head_dim, sram).total
        q_outer = alg.query_outer_forward_accesses(n, head_dim, sram).total
        assert q_outer < 2 / 3 * kv_outer


def test_extra_memory_is_linear_where_the_paper_says_so():
    """Theorem 1: O(N) beyond inputs and output, against 2 N² for Algorithm 0."""
    n, head_dim = 48, 8
    q, k, v, _ = _inputs(n, head_dim, np.float32)
    extra = {}
    for name, run in {
        "standard": lambda hbm: alg.standard_forward(hbm),
        "flash": lambda hbm: alg.flash_forward(hbm, 256),
        "query outer": lambda hbm: alg.query_outer_forward(hbm, 256),
    }.items():
        hbm = HBM(Q=q, K=k, V=v)
        run(hbm)
        extra[name] = hbm.extra("O")
    assert extra == {"standard": 2 * n * n, "flash": 2 * n, "query outer": n}


def test_induction_of_theorem_1():
    """After pass j, m, l and O are those of the first j blocks of keys."""
    n, head_dim, sram = 30, 4, 100
    b_c, _ = alg.block_sizes(sram, head_dim)
    q, k, v, _ = _inputs(n, head_dim, np.float64)
    for end in range(b_c, n + b_c, b_c):
        keep = np.broadcast_to(np.arange(n) < end, (n, n))
        hbm = HBM(Q=q, K=k, V=v)
        live = np.broadcast_to(np.arange(-(-n // b_c)) * b_c < end, (-(-n // 4), -(-n // b_c)))
        alg.block_sparse_forward(hbm, sram, live)
        s = head_dim**-0.5 * q @ k[:end].T
        assert np.array_equal(hbm["m"], s.max(axis=1))
        _assert_forward(hbm, q, k, v, keep, _lse(hbm), _passes(n, head_dim, sram))


def test_a_wrong_block_mask_is_refused():
    q, k, v, _ = _inputs(8, 2, np.float64)
    with pytest.raises(ValueError, match=r"live has shape \(2, 2\), the blocks are \(4, 2\)"):
        alg.block_sparse_forward(HBM(Q=q, K=k, V=v), 32, np.ones((2, 2)))


@pytest.mark.parametrize("density", [None, 0.3], ids=["dense", "sparse"])
@pytest.mark.parametrize(("n", "head_dim", "sram"), [(33, 8, 96), (40, 8, 512)])
def test_dropout_is_made_again_from_the_saved_state(n, head_dim, sram, density):
    """Algorithms 2, 4 and 5: R is all that the backward pass finds of Z."""
    p_drop, state = 0.3, (2**40 + 1, 7)
    q, k, v, do = _inputs(n, head_dim, np.float64)
    live, keep = (None, None) if density is None else _block_mask(n, head_dim, sram, density)
    forward = HBM(Q=q, K=k, V=v)
    if live is None:
        alg.flash_forward(forward, sram, p_drop=p_drop, state=state)
    else:
        alg.block_sparse_forward(forward, sram, live, p_drop=p_drop, state=state)
    assert forward["R"].tolist() == list(state)
    saved = {name: forward[name] for name in ("O", "l", "m", "R")}
    hbm = HBM(Q=q, K=k, V=v, dO=do, **saved)
    alg.flash_backward(hbm, sram, live, p_drop=p_drop)
    how = {"dropout": p_drop, "seed": state}
    out64, _ = reference.attention(*_public(q, k, v), keep, **how)
    low, _ = low_precision(*_public(q, k, v), keep, **how)
    passes = _passes(n, head_dim, sram) ** 0.5
    assert_within_reference(forward["O"][None, :, None], out64, low, "O", 2 * passes)
    args = (*_public(do, q, k, v), keep)
    grads64 = reference.attention_backward(*args, **how)
    lows = low_precision_backward(*args, **how)
    for name, grad64, low in zip(("dQ", "dK", "dV"), grads64, lows, strict=True):
        assert_within_reference(hbm[name][None, :, None], grad64, low, name, 2 * passes)
