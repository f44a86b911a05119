"""The functions of `nbflash.scores` and their derivatives, of one score, as kernels call them.

Arguments are those of `nbflash.scores`: the score, batch element, query head, query, key, and the
parameters. ``aligned`` is nk − nq; an array's function gives the index of the element that the
score is made with, and the derivative by it.
"""

import math


def is_own(fn):
    """Whether a function is one of this module, whose source is known."""
    return fn.__module__ == __name__


def one(s, b, h, q_idx, kv_idx, *params):
    return 1.0


def softcap(s, b, h, q_idx, kv_idx, cap):
    return cap * math.tanh(s / cap)


def softcap_slope(s, b, h, q_idx, kv_idx, cap):
    t = math.tanh(s / cap)
    return 1 - t * t


def alibi(s, b, h, q_idx, kv_idx, aligned, slopes):
    return s - slopes[h] * abs(q_idx + aligned - kv_idx)


def alibi_of_all(s, b, h, q_idx, kv_idx, aligned, slope):
    return s - slope * abs(q_idx + aligned - kv_idx)


def alibi_part(s, b, h, q_idx, kv_idx, aligned, slopes):
    return h, -abs(q_idx + aligned - kv_idx)


def alibi_of_all_part(s, b, h, q_idx, kv_idx, aligned, slope):
    return 0, -abs(q_idx + aligned - kv_idx)


def relative(s, b, h, q_idx, kv_idx, aligned, table):
    reach = table.shape[1] // 2
    return s + table[h, min(max(kv_idx - q_idx - aligned + reach, 0), 2 * reach)]


def relative_part(s, b, h, q_idx, kv_idx, aligned, table):
    reach = table.shape[1] // 2
    return (h, min(max(kv_idx - q_idx - aligned + reach, 0), 2 * reach)), 1


def bias(s, b, h, q_idx, kv_idx, array):
    n0, n1, n2, n3 = array.shape
    return s + array[min(b, n0 - 1), min(h, n1 - 1), min(q_idx, n2 - 1), min(kv_idx, n3 - 1)]


def bias_part(s, b, h, q_idx, kv_idx, array):
    n0, n1, n2, n3 = array.shape
    return (min(b, n0 - 1), min(h, n1 - 1), min(q_idx, n2 - 1), min(kv_idx, n3 - 1)), 1
