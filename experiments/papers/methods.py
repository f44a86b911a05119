"""Every form of attention of figure 3: functions of tensors (batch, heads, n, head_dim)."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import masks
from experiments.libraries.base import block_lists
from experiments.papers.approximate import APPROXIMATE, attend, attention_of
from nbflash.torch import attention

EXACT, SPARSE, APPROXIMATION = "exact", "sparse", "approximate"
BLOCK = 128


@dataclass(frozen=True)
class Problem:
    """What a method is made for.

    Attributes
    ----------
    n, head_dim, batch : int
    lengths : tuple of int or None
        Keys of each batch entry that are no padding.
    dropout : float
    device : str
    seed : int
    """

    n: int
    head_dim: int
    batch: int
    lengths: tuple[int, ...] | None = None
    dropout: float = 0.0
    device: str = "cpu"
    seed: int = 0

    @property
    def keep(self):
        """bool (batch, n), False for padding; None without any."""
        if self.lengths is None:
            return None
        lengths = torch.tensor(self.lengths, device=self.device)
        return torch.arange(self.n, device=self.device) < lengths[:, None]


@dataclass(frozen=True)
class Method:
    """One way to compute attention.

    Attributes
    ----------
    kind : {"exact", "sparse", "approximate"}
    make : callable
        ``make(problem)`` gives a function of q, k and v.
    mask : callable or None
        ``mask(n)`` is what it attends without padding: exactly this, unless it is approximate.
    is_quadratic : bool
        Whether all scores are in memory at a time.
    """

    kind: str
    make: Callable
    mask: Callable | None = masks.dense
    is_quadratic: bool = False

    def expected(self, problem, entry=0):
        """The mask of a batch entry that the results are checked by."""
        mask = self.mask(problem.n)
        if problem.lengths is None:
            return mask
        return mask & masks.padding([problem.lengths[entry]], problem.n).planes[0]


def _block(n):
    return min(BLOCK, n)


def butterfly(n):
    """The pattern of block-sparse FlashAttention, blocks on the diagonal beside it."""
    return masks.butterfly(n, _block(n))


def _with_padding(mask, problem):
    """A mask of nbflash for the lengths of a problem."""
    if problem.lengths is None:
        return mask
    return mask & masks.padding(problem.lengths, problem.n)


def _plain(problem):
    keep = problem.keep
    hidden = None if keep is None else ~keep[:, None, None]
    return lambda q, k, v: attend(q, k, v, hidden, problem.dropout)


def _sdpa(backend, problem):
    keep = problem.keep
    given = {"dropout_p": problem.dropout}
    given["attn_mask"] = None if keep is None else keep[:, None, None]

    def call(q, k, v):
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, **given)

    return call


def _nbflash(mask, problem):
    whole = _with_padding(mask(problem.n), problem)
    return partial(attention, mask=whole, dropout=problem.dropout, layout="bhsd")


def _flex(mask, problem):
    """FlexAttention over the live blocks, compiled on a GPU and eager on a CPU."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    if problem.dropout:
        raise NotImplementedError("FlexAttention has no dropout")
    block = _block(problem.n)
    lists = [
        torch.from_numpy(x)[None, None].to(problem.device)
        for pair in block_lists(mask(problem.n), block)
        for x in pair
    ]
    mask_mod = None
    if problem.lengths is not None:
        lengths = torch.tensor(problem.lengths, device=problem.device)
        mask_mod = lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]
        # Copies: on a GPU its kernels read beyond lists whose batch axis has a stride of 0.
        lists = [x.repeat(problem.batch, *[1] * (x.ndim - 1)) for x in (lists[2], lists[3])]
    blocks = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mask_mod)
    call = flex_attention
    if problem.device != "cpu":
        from torch._functorch import config

        config.donated_buffer = False  # the timed backward runs many times
        torch.compiler.reset()  # compiled for every problem, it would reach the limit of dynamo
        call = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def run(q, k, v):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(q, k, v, block_mask=blocks)

    return run


def _approximate(name, problem):
    module = attention_of(name, problem.n, problem.head_dim, problem.seed).to(problem.device)
    return partial(module, keep=problem.keep, dropout=problem.dropout)


#: The masks of the sparse methods, by FlexAttention and, with nbflash- before the name, by nbflash.
PATTERNS = {
    "openai-fixed": lambda n: masks.fixed(n, _block(n), stride=4),
    "openai-strided": lambda n: masks.strided(n, _block(n), stride=4),
    "local": lambda n: masks.local(n, _block(n)),
    "longformer": lambda n: masks.global_local(n, _block(n)),
    "bigbird": lambda n: masks.bigbird(n, _block(n)),
}
_BACKENDS = {
    "sdpa-math": SDPBackend.MATH,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}

#: Name to method, in the order of the paper's tables.
METHODS = {
    "pytorch": Method(EXACT, _plain, is_quadratic=True),
    **{
        name: Method(EXACT, partial(_sdpa, backend), is_quadratic=backend == SDPBackend.MATH)
        for name, backend in _BACKENDS.items()
    },
    **{name: Method(APPROXIMATION, partial(_approximate, name), mask=None) for name in APPROXIMATE},
    **{name: Method(SPARSE, partial(_flex, mask), mask) for name, mask in PATTERNS.items()},
    "nbflash": Method(EXACT, partial(_nbflash, masks.dense)),
    **{
        f"nbflash-{name}": Method(SPARSE, partial(_nbflash, mask), mask)
        for name, mask in {"butterfly": butterfly, **PATTERNS}.items()
    },
}
