"""What users of the frameworks call is annotated."""

from annotations import missing, public

import nbflash.jax
import nbflash.torch
from nbflash.huggingface import sparsify
from nbflash.torch import scores


def test_public_functions_are_annotated():
    found = public(nbflash.torch, nbflash.jax) | {"sparsify": sparsify}
    names = "softcap", "alibi", "relative", "bias", "custom", "compose"
    found |= {f"scores.{name}": getattr(scores, name) for name in names}
    assert len(found) >= 14
    assert {name: gaps for name, f in found.items() if (gaps := missing(f))} == {}
