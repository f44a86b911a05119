"""transformers' models with nbflash's attention.

    import nbflash.huggingface

    model = AutoModelForCausalLM.from_config(config, attn_implementation="nbflash")
    nbflash.huggingface.sparsify(model, masks.butterfly(n, 128) | masks.local(n, 128))

Importing this registers the name "nbflash". Masks are those of the model: causal, windows, padding,
packed sequences, and functions of one's own.
"""

from nbflash.huggingface.attention import attention_of
from nbflash.huggingface.mask_functions import mask_of
from nbflash.huggingface.registration import register
from nbflash.huggingface.sparsity import sparsify

__all__ = ["attention_of", "mask_of", "sparsify"]

register()
