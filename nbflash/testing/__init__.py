"""Inputs with known answers, error budgets derived from data, and a gallery of masks.

The tests and the experiments share these, so that a number is reported under the same budget that
a test holds it to.
"""

from nbflash.testing.inputs_and_budgets import (
    CodeWords,
    assert_blocks_within_reference,
    assert_within_reference,
    block_errors,
    code_word_oracle,
    error_budget,
    make_qkv,
    mask_gallery,
    poisoned,
    small_integers,
)
from nbflash.testing.yardstick import low_precision, low_precision_backward, low_score_gradient

__all__ = [
    "CodeWords",
    "assert_blocks_within_reference",
    "assert_within_reference",
    "block_errors",
    "code_word_oracle",
    "error_budget",
    "low_precision",
    "low_precision_backward",
    "low_score_gradient",
    "make_qkv",
    "mask_gallery",
    "poisoned",
    "small_integers",
]
