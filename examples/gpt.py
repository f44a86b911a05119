"""Train a small GPT on a novel, byte by byte, with causal or sparse attention.

python examples/gpt.py --steps 200
python examples/gpt.py --mask butterfly --tokens 16384 --dim 768 --layers 12 --device cuda
"""

import argparse
from pathlib import Path

import torch
from model import Transformer, train

import masks

NOVEL = Path(__file__).parents[1] / "experiments" / "data" / "pride_and_prejudice.txt"


def mask_of(name, n):
    """What a token attends to."""
    causal = masks.causal(n)
    if name == "causal":
        return causal
    block = max(16, min(128, n // 8))
    return (masks.butterfly(n, block) | masks.local(n, block, width=1)) & causal


def batches(text, n, size):
    """Endless pieces of the text, and the bytes that follow each of theirs."""
    while True:
        starts = torch.randint(len(text) - n - 1, (size,)).tolist()
        pieces = torch.stack([text[start : start + n + 1] for start in starts])
        yield pieces[:, :-1], pieces[:, 1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mask", choices=["causal", "butterfly"], default="causal")
    parser.add_argument("--device", default="cpu")
    defaults = {"tokens": 256, "batch": 8, "steps": 100, "dim": 64, "heads": 2, "layers": 2}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()

    torch.manual_seed(0)
    text = torch.tensor(list(NOVEL.read_bytes()))
    sizes = {"dim": given.dim, "heads": given.heads, "layers": given.layers}
    mask = mask_of(given.mask, given.tokens)
    model = Transformer(mask, outputs=256, **sizes).to(given.device)
    train(model, batches(text, given.tokens, given.batch), steps=given.steps)


if __name__ == "__main__":
    main()
