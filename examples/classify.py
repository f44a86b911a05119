"""Classify long pieces of text: of a novel, or of which package of Python's library?

Every token attends to the blocks of a butterfly and to its own neighbourhood.

    python examples/classify.py --steps 60
    python examples/classify.py --tokens 16384 --dim 256 --layers 4 --device cuda
"""

import argparse
import asyncio
import email
from pathlib import Path

import torch
from model import Transformer, train

import masks

NOVEL = Path(__file__).parents[1] / "experiments" / "data" / "pride_and_prejudice.txt"


def texts():
    """One for each class, as bytes."""
    packages = [sorted(Path(x.__file__).parent.glob("*.py")) for x in (asyncio, email)]
    every = [[NOVEL], *packages]
    return [torch.tensor(list(b"".join(p.read_bytes() for p in paths))) for paths in every]


def batches(classes, n, size):
    """Endless pieces of the texts, and their classes."""
    while True:
        targets = torch.randint(len(classes), (size,))
        starts = [int(torch.randint(len(classes[i]) - n, ())) for i in targets]
        pairs = zip(targets.tolist(), starts, strict=True)
        yield torch.stack([classes[i][start : start + n] for i, start in pairs]), targets


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    defaults = {"tokens": 1024, "batch": 6, "steps": 60, "dim": 64, "heads": 2, "layers": 2}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()

    torch.manual_seed(0)
    n, block = given.tokens, max(16, min(128, given.tokens // 16))
    mask = masks.butterfly(n, block) | masks.local(n, block, width=1)
    sizes = {"dim": given.dim, "heads": given.heads, "layers": given.layers}
    classes = texts()
    model = Transformer(mask, outputs=len(classes), pooled=True, **sizes).to(given.device)
    train(model, batches(classes, n, given.batch), steps=given.steps)

    model.eval()
    tokens, targets = next(batches(classes, n, 60))
    with torch.no_grad():
        found = model(tokens.to(given.device)).argmax(dim=1).cpu()
    print(
        f"{int((found == targets).sum())} of {len(targets)} right, at density {density(mask):.2f}"
    )


def density(mask):
    """The share of the scores that is computed."""
    return mask.count_nonzero() / (mask.shape[0] * mask.shape[1])


if __name__ == "__main__":
    main()
