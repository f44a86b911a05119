"""Small models of transformers, initialised at random, and inputs with padding.

The implementation "exact" is plain attention: in float64 it is what others are compared with, since
transformers' eager attention takes its softmax in float32.
"""

import copy

import torch
import transformers
from transformers import masking_utils

import nbflash.huggingface  # noqa: F401 - registers its name

TOKENS, LENGTH, PADS = 97, 17, 5
_SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2, "head_dim": 8}
_WINDOW = _GROUPED | {"sliding_window": 6}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

# Name: the classes of configuration and model, and what the first one takes.
MODELS = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        _WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", _WINDOW),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _WINDOW | {"query_pre_attn_scalar": 8}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        _WINDOW
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", _SIZES | _NO_DROPOUT),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"intermediate_size": 48, "image_size": 16, "patch_size": 4}
        | _NO_DROPOUT,
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
        | {"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
}


def exact(module, query, key, value, mask, *, scaling, softcap=None, s_aux=None, **kwargs):
    """Attention by its definition; a row that attends nothing is 0."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    s = scaling * query @ key.transpose(2, 3)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    if kwargs.get("position_bias") is not None:
        s = s + kwargs["position_bias"]
    s = s if mask is None else s.masked_fill(~mask, -torch.inf)
    if s_aux is not None:
        sink = s_aux[:, None, None].expand(len(s), -1, s.shape[2], 1)
        s = torch.cat([s, sink], dim=-1)
    p = torch.softmax(s, dim=-1)[..., : key.shape[2]].nan_to_num(0)
    return (p @ value).transpose(1, 2).contiguous(), None


def exact_mask(**given):
    return masking_utils.sdpa_mask(**given | {"allow_is_causal_skip": False})


transformers.AttentionInterface.register("exact", exact)
transformers.AttentionMaskInterface.register("exact", exact_mask)

DECODERS = "gpt2", "llama", "qwen3", "mistral", "gemma2", "gpt_oss"


def make(name, implementation="nbflash", **changes):
    """A model of random weights, the same for every implementation."""
    config, model, sizes = MODELS[name]
    config = getattr(transformers, config)(**(sizes | changes))
    config._experts_implementation = "eager"  # the only one in float64
    torch.manual_seed(0)
    made = getattr(transformers, model)._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in made.parameters():  # biases, sinks and tables are no zeros
            parameter += 0.1 * torch.randn(parameter.shape)
    return made.eval()


def like(model, implementation, dtype=None):
    """A copy of a model with another implementation, and dtype."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(implementation)
    return other if dtype is None else other.to(dtype)


def inputs(name):
    """Keyword arguments of two samples, the second of them padded, and labels."""
    draw = torch.Generator(torch.get_default_device()).manual_seed(1)
    if name == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=draw)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, TOKENS, (2, LENGTH), generator=draw)
    kept = torch.ones(2, LENGTH, dtype=torch.long)
    kept[1, :PADS] = 0
    labels = ids.masked_fill(kept == 0, -100)
    labels[1, PADS] = -100  # predicted from a token of padding, whose row is nobody's
    if name in ("bert", "t5"):  # pads on the right
        kept, labels = kept.flip(1), labels.flip(1)
    return {"input_ids": ids, "attention_mask": kept, "labels": labels}
