"""GPT-2, GPT-NeoX and BERT of transformers, of random weights, on the bytes of texts."""

from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import masks
from nbflash import huggingface

EAGER, NBFLASH, SPARSE, NONE = "eager", "nbflash", "nbflash-sparse", "none"
SDPA = {
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
#: `NONE` gives the values back: what is left of a step without attention.
ATTENTION = (EAGER, *SDPA, NBFLASH, SPARSE, NONE)
#: Bytes of which the held-out text is a shuffled sequence, or of a piece where that is longer.
STRETCH = 8192
#: In place of a byte that BERT is to find, and their share.
HIDDEN, HIDDEN_SHARE, IGNORED = 256, 0.15, -100


def _give_values(module, query, key, value, attention_mask, **options):
    return value.transpose(1, 2).contiguous(), None


AttentionInterface.register(NONE, _give_values)
AttentionMaskInterface.register(NONE, lambda *args, **options: None)
#: The same implementations without a mask: layers know whether they are causal. In a step that is
#: recorded transformers cannot see that no sequences are packed, and would make a dense mask.
#: To transformers every other name with "flash" in it is the package flash_attn.
UNMASKED = {"sdpa": "unmasked-sdpa", NBFLASH: "unmasked-nb"}
for _name, _unmasked in UNMASKED.items():
    AttentionInterface.register(_unmasked, ALL_ATTENTION_FUNCTIONS[_name])
    AttentionMaskInterface.register(_unmasked, lambda *args, **options: None)


def sparse_mask(tokens, block, is_causal):
    """Butterfly and local blocks, halved until a sequence holds 16 of them."""
    while tokens // block < 16 and block > 8:
        block //= 2
    mask = masks.butterfly(tokens, block) | masks.local(tokens, block, width=1)
    return mask & masks.causal(tokens) if is_causal else mask


def _architecture(spec, tokens):
    """Class and configuration; no dropout, and no cache of keys and values."""
    layers, heads, width = spec["layers"], spec["heads"], spec["width"]
    common = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width}
    common |= {"intermediate_size": 4 * width, "max_position_embeddings": tokens}
    common |= {"vocab_size": spec["vocabulary"]}
    causal = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    if spec["kind"] == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        # The same as gelu_new, in one kernel.
        rest = causal | {"activation_function": "gelu_pytorch_tanh"}
        return transformers.GPT2LMHeadModel, transformers.GPT2Config(**common, **rates, **rest)
    if spec["kind"] == "gpt-neox":
        return transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**common, **causal)
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return transformers.BertForMaskedLM, transformers.BertConfig(**common, **rates)


def make_model(spec, tokens, attention, seed, block=128, device="cpu", recorded=False):
    """A model of transformers without dropout.

    Parameters
    ----------
    spec : dict
        ``kind`` ("gpt2", "gpt-neox" or "bert"), ``layers``, ``heads``, ``width``, ``vocabulary``.
    tokens : int
        The longest sequence.
    attention : str
        One of `ATTENTION`.
    seed : int
        Of the weights, the same whatever the attention.
    block : int
    device : str
        Where the weights are drawn: they differ from one kind of device to another.
    recorded : bool
        Whether steps are recorded as a CUDA graph.
    """
    cls, config = _architecture(spec, tokens)
    name = {SPARSE: NBFLASH}.get(attention, "sdpa" if attention in SDPA else attention)
    name = UNMASKED.get(name, name) if recorded else name
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model = cls._from_config(config, attn_implementation=name)
    model.to(device)
    if attention == SPARSE:
        huggingface.sparsify(model, sparse_mask(tokens, block, spec["kind"] != "bert"))
        model.set_attn_implementation(name)
    return model


@contextmanager
def backend_of(attention):
    """SDPA held to its backend, where ``attention`` is one."""
    with sdpa_kernel(SDPA[attention]) if attention in SDPA else nullcontext():
        yield


def _shuffled(text, size):
    """Stretches of a text in any order: the first of them are a sample of all."""
    whole = len(text) // size
    order = np.random.default_rng(0).permutation(whole)
    stretches = text[: whole * size].reshape(whole, size)[order]
    return np.concatenate((stretches.ravel(), text[whole * size :]))


class Language:
    """What a `Trainer` is given: the next byte, or for BERT hidden bytes, of pieces of a text.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    train, held_out : bytes
        Longer than a piece, and than a batch of pieces.
    tokens, batch : int
    attention : str
        One of `ATTENTION`.
    dtype : str
        Of autocast; float32 is without.
    seed : int
        Of the order of the batches.
    evaluated : int
        Batches of the held-out text that `evaluate` takes.
    """

    def __init__(
        self, model, train, held_out, tokens, batch, *, attention, dtype, seed, evaluated=4
    ):
        self._model, self._tokens, self._batch, self._seed = model, tokens, batch, seed
        self._evaluated = evaluated
        self._attention, self._dtype = attention, getattr(torch, dtype)
        self._device = next(model.parameters()).device.type
        self._is_bert = isinstance(model, transformers.BertForMaskedLM)
        train, held_out = (
            np.frombuffer(text, np.uint8).astype(np.int64) for text in (train, held_out)
        )
        self._train, self._held_out = train, _shuffled(held_out, max(tokens, STRETCH))

    def batch_at(self, step):
        """int64 bytes and labels, each (batch, tokens)."""
        return self._pieces(self._train, np.random.default_rng([self._seed, step]))

    def loss_of(self, pieces, labels):
        cast = torch.autocast(self._device, self._dtype, enabled=self._dtype != torch.float32)
        with cast, backend_of(self._attention):
            return self._model(input_ids=pieces, labels=labels).loss

    def evaluate(self):
        """The mean loss of pieces that no step has seen, the same bytes however they are cut."""
        rng, losses = np.random.default_rng(0), []
        whole = min(self._evaluated, len(self._held_out) // (self._batch * self._tokens))
        pieces = self._held_out[: whole * self._batch * self._tokens]
        for batch in pieces.reshape(whole, self._batch, self._tokens):
            given = (torch.from_numpy(x).to(self._device) for x in self._task_of(batch, rng))
            losses.append(self.loss_of(*given).item())
        return float(np.mean(losses))

    def _pieces(self, text, rng):
        starts = rng.integers(len(text) - self._tokens, size=self._batch)
        pieces = np.stack([text[start : start + self._tokens] for start in starts])
        return self._task_of(pieces, rng)

    def _task_of(self, pieces, rng):
        """Bytes and labels."""
        if not self._is_bert:
            return pieces, pieces
        hidden = rng.random(pieces.shape) < HIDDEN_SHARE
        return np.where(hidden, HIDDEN, pieces), np.where(hidden, pieces, IGNORED)
