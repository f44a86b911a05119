"""A kernel in every thread, over one work list."""

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np

from nbflash.backends.cpu.intrinsics import GIVEN_UP


def run_in_threads(kernel, arguments, counter, items):
    """Run ``kernel(*arguments)`` in as many threads as there are, or ``items``, at least one.

    They take items by ``counter``, one of the arguments. After Ctrl-C, or an error of one thread,
    the others end with the chunk that they are at.
    """
    threads = max(1, min(numba.config.NUMBA_NUM_THREADS, items))
    with ThreadPoolExecutor(threads) as pool:
        try:
            for done in [pool.submit(kernel, *arguments) for _ in range(threads)]:
                done.result()
        except BaseException:
            counter.view(np.int64)[0] = GIVEN_UP
            raise
