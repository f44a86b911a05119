"""The figures and tables of the FlashAttention paper (arXiv 2205.14135), measured again."""
