"""What would be read on the host while a CUDA graph is recorded is refused, with a remedy."""

from types import SimpleNamespace

import pytest
import torch
from transformers import masking_utils as theirs

from nbflash import torch as nt
from nbflash.huggingface import mask_of
from nbflash.huggingface.attention import attention_of


class OnCuda(torch.Tensor):
    """A tensor that says it is in CUDA memory."""

    is_cuda = True


def on_cuda(*values):
    return torch.tensor(values).as_subclass(OnCuda)


def of_a_layer(mask=None, **given):
    q = torch.zeros(1, 2, 4, 8)
    return attention_of(SimpleNamespace(is_causal=True), q, q, q, mask, **given)


LOWEST = torch.finfo(torch.float32).min
# By what is read, and how the error calls it.
READS = {
    ("padding", "a padding mask"): lambda: mask_of(1, 4, 4, attention_mask=on_cuda([1, 1, 1, 0])),
    ("an offset", "an offset"): lambda: mask_of(1, 1, 4, q_offset=on_cuda(3)),
    ("an offset of keys", "an offset"): lambda: mask_of(1, 1, 4, 3, on_cuda(0)[0]),
    ("packed sequences", "packed sequences"): lambda: mask_of(
        1, 4, 4, mask_function=theirs.packed_sequence_mask_function(on_cuda([0, 0, 1, 1]))
    ),
    ("a mask of four axes", "a mask"): lambda: of_a_layer(
        on_cuda([4 * [[True, False, True, True]]])
    ),
    ("an added mask", "attention_mask"): lambda: of_a_layer(
        on_cuda([4 * [[0.0, LOWEST, 0.0, 0.0]]])
    ),
    ("a layer's sequences", "cu_seq_lens_q"): lambda: of_a_layer(cu_seq_lens_q=on_cuda(0, 2, 4)),
    ("sequences", "cu_seqlens_q"): lambda: nt.varlen_attention(
        *3 * [torch.zeros(4, 2, 8)], on_cuda(0, 2, 4)
    ),
}


@pytest.mark.parametrize(
    ("name", "read"),
    [(name, read) for (_, name), read in READS.items()],
    ids=[case for case, _ in READS],
)
def test_refused(name, read, monkeypatch):
    recording = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording[0])
    read()
    recording[0] = True
    with pytest.raises(RuntimeError, match=f"nbflash reads {name} on the host, .*: (make|give)"):
        read()
