"""wgmma in the simulator: descriptors, fragments, waits, and what each must refuse."""

import numpy as np
import pytest
from hopper_runs import (
    BASE,
    SEEDS,
    UPPER,
    bits_of,
    image,
    integers,
    launched,
    memory,
    races,
    rejected,
)
from numba import cuda

from nbflash.cuda import simulator as sim
from nbflash.cuda.simulator.hopper import (
    bar_sync,
    fence_proxy_async,
    settle,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)

# ---- products ----


def descriptor(address, leading=16):
    return np.uint32(leading >> 4 << 16 | address >> 4), UPPER


def fragment_of(matrix, t):
    """What thread ``t`` holds of a matrix of 64 rows, by the formula of the manual."""
    w, lane = divmod(t, 32)
    return [
        matrix[16 * w + lane // 4 + 8 * i, 8 * j + 2 * (lane % 4) + e]
        for j in range(matrix.shape[1] // 8)
        for i in (0, 1)
        for e in (0, 1)
    ]


def fill(words):
    """All threads put ``words`` at ``BASE``, where wgmma then sees them."""
    s, t = memory(), cuda.threadIdx.x
    for i in range(t, words.size, 128):
        s[i] = words[i]
    fence_proxy_async()
    cuda.syncthreads()


def assert_fragments(got, matrix):
    expected = [fragment_of(matrix, t) for t in range(128)]
    np.testing.assert_array_equal(got, np.array(expected, np.float32))


@pytest.mark.parametrize("negate", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("n", "depth"), [(8, 16), (72, 32), (128, 64), (64, 80)])
def test_both_operands_from_shared_memory(n, depth, dtype, negate):
    """S = Q Kᵀ: steps of 32 bytes inside a panel, then the next panel."""
    a, b = integers(64, depth), integers(n, depth, seed=1)
    words = np.concatenate([image(bits_of(x, dtype)) for x in (a, b)])
    b_at, out = BASE + 2 * image(a).size, np.zeros((128, n // 2), np.float32)

    def kernel(words, out):
        fill(words)
        wgmma_fence()
        acc = (np.float32(np.nan),) * (n // 2)
        for i in range(depth // 16):
            panel, inside = divmod(i * 16, 64)
            a_i = descriptor(BASE + panel * 64 * 128 + 2 * inside)
            b_i = descriptor(b_at + panel * n * 128 + 2 * inside)
            acc = wgmma(dtype, acc, a_i, b_i, i > 0, False, negate)
        wgmma_commit()
        wgmma_wait(0)
        out[cuda.threadIdx.x, :] = np.array(settle(acc))

    launched(kernel, words, out)
    assert_fragments(out, -(a @ b.T) if negate else a @ b.T)


@races
@pytest.mark.parametrize("seed", SEEDS[:3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("n", "depth"), [(16, 16), (72, 64), (128, 32)])
def test_first_operand_from_registers_second_transposed(n, depth, dtype, seed, race):
    """O += P V: V is contiguous along n, in panels of 64 columns."""
    p, v, start = integers(64, depth), integers(depth, n, seed=1), integers(64, n, seed=2)
    words, panel = image(bits_of(v, dtype)), depth * 128
    packed, out = bits_of(p, dtype), np.zeros((128, n // 2), np.float32)

    def kernel(words, out):
        t = cuda.threadIdx.x
        fill(words)
        acc = tuple(np.float32(x) for x in fragment_of(start, t))
        mine = np.array(fragment_of(packed, t), np.uint16).view(np.uint32)
        wgmma_fence()
        for i in range(depth // 16):
            b = descriptor(BASE + i * 16 * 128, panel)
            acc = wgmma(dtype, acc, tuple(mine[4 * i : 4 * i + 4]), b, True, True, False)
        wgmma_commit()
        wgmma_wait(0)
        out[t, :] = np.array(settle(acc))

    with sim.options(seed=seed, race=race):
        launched(kernel, words, out)
    assert_fragments(out, start + p @ v)


@pytest.mark.parametrize(
    ("b", "match"),
    [
        ((descriptor(BASE)[0], 1 << 31 | 64), "not the swizzle of 128 bytes"),
        ((descriptor(BASE)[0], UPPER | 1 << 20), "or stray bits"),
        (descriptor(BASE + 128), "starts between the rows of a swizzle atom"),
        (descriptor(BASE * 40), "are not in dynamic shared memory"),
        (descriptor(0), "are not in dynamic shared memory"),
    ],
    ids=["swizzle", "stray", "atom", "above", "below"],
)
def test_descriptors_that_cannot_be(b, match):
    def kernel():
        wgmma_fence()
        wgmma("float16", (np.float32(0),) * 4, (np.uint32(0),) * 4, b, True, False, False)

    rejected(kernel, match, sim.SimError, threads=128)


def attempted(body, match, error=sim.SimError, *, race=False, seed=0):
    """Run ``body(issue)``; ``issue()`` starts one product into accumulators of zeros."""

    def issue(acc=None, at=BASE):
        acc = (np.float32(0),) * 4 if acc is None else acc
        return wgmma("float16", acc, descriptor(at), descriptor(at), True, False, False)

    def kernel():
        fill(np.zeros(64 * 64, np.uint16))
        body(issue)

    with sim.options(race=race, seed=seed):
        rejected(kernel, match, error, threads=128)


def test_fence_before_the_first_product_and_after_settle():
    def again(issue):
        wgmma_fence()
        acc = issue()
        wgmma_commit()
        wgmma_wait(0)
        issue(settle(acc))

    attempted(lambda issue: issue(), "wgmma without wgmma_fence")
    attempted(again, "wgmma without wgmma_fence")


@pytest.mark.parametrize("commits", [0, 1])
@pytest.mark.parametrize("use", [lambda acc: acc[0], list, lambda acc: acc[1:3], sum])
def test_accumulators_cannot_be_read_before_settle(use, commits):
    def body(issue):
        wgmma_fence()
        acc = issue()
        for _ in range(commits):
            wgmma_commit()
            wgmma_wait(0)
        use(acc)

    attempted(body, "accumulators of wgmma at test_engine_wgmma.py:.* are not settled")


@pytest.mark.parametrize(
    ("commit", "pending", "right"),
    [
        ((True, True), 1, (True, False)),
        ((True, True), 0, (True, True)),
        ((True, True), 2, (False, False)),
        ((True, False), 0, (True, False)),
        ((False, True), 0, (True, True)),
    ],
)
def test_wait_covers_all_but_the_last_committed_groups(commit, pending, right):
    for number, settled in enumerate(right):

        def body(issue, number=number):
            wgmma_fence()
            fragments = []
            for committed in commit:
                fragments.append(issue())
                if committed:
                    wgmma_commit()
            wgmma_wait(pending)
            settle(fragments[number])
            raise sim.SimError("settled")

        attempted(body, "settled$" if settled else "settle before the wait for wgmma at")


def test_accumulators_that_were_passed_on():
    def settled(issue):
        wgmma_fence()
        first = issue()
        issue(first)
        wgmma_commit()
        wgmma_wait(0)
        settle(first)

    def twice(issue):
        wgmma_fence()
        first = issue()
        issue(first)
        issue(first)

    attempted(settled, "have been passed on to another wgmma")
    attempted(twice, "have been passed on already")


def test_threads_of_a_warpgroup_issue_the_same():
    def body(issue):
        wgmma_fence()
        issue(at=BASE + 32 * (cuda.threadIdx.x // 64))

    attempted(body, "threads of one warpgroup issue different wgmmas")


def test_product_without_one_warp_never_ends():
    def body(issue):
        if cuda.threadIdx.x >= 32:
            wgmma_fence()
            issue()
            wgmma_commit()
            wgmma_wait(0)
        else:
            bar_sync(1, 64)

    attempted(body, "threads 32-127 wait for wgmma group 0", sim.Deadlock)


def test_wrong_numbers_of_columns():
    def body(columns):
        wgmma_fence()
        acc = (np.float32(0),) * (columns // 2)
        wgmma("float16", acc, descriptor(BASE), descriptor(BASE), True, False, False)

    for columns in (12, 264):
        attempted(lambda _, n=columns: body(n), f"wgmma of {columns} columns")


def overwritten(order):
    """A stage is written again: ``order`` says where the wait stands."""

    def body(issue):
        s, t = memory(), cuda.threadIdx.x
        for step in order:
            if step == "issue":
                wgmma_fence()
                issue()
                wgmma_commit()
            elif step == "wait":
                wgmma_wait(0)
            elif step == "barrier":
                bar_sync(1, 128)
            elif t == 0:
                s[0] = 1
        bar_sync(1, 128)
        raise sim.SimError("done")

    return body


@pytest.mark.parametrize("seed", SEEDS[:5])
def test_operands_must_stay_until_the_wait(seed):
    right = overwritten(["issue", "wait", "barrier", "write"])
    wrong = overwritten(["issue", "barrier", "write", "wait"])
    attempted(right, "done", race=True, seed=seed)
    attempted(wrong, "read by wgmma of warpgroup 0", sim.Race, race=True, seed=seed)


def test_some_schedule_sees_an_operand_change():
    wrong, found = overwritten(["issue", "barrier", "write", "wait"]), set()
    for seed in SEEDS:
        try:
            attempted(wrong, "changed between its issue and its end", seed=seed)
            found.add("seen")
        except AssertionError:
            found.add("unseen")
    assert "seen" in found


@pytest.mark.parametrize("order", ["none", "before", "after", "late"])
def test_stores_need_a_fence_before_wgmma_reads_them(order):
    def body(issue):
        s, t = memory(), cuda.threadIdx.x
        if order == "before":
            fence_proxy_async()
        s[t] = 0
        if order == "after":
            fence_proxy_async()
        cuda.syncthreads()
        if order == "late":  # not before what tells the others
            fence_proxy_async()
        wgmma_fence()
        issue()
        raise sim.SimError("done")

    match = "done" if order == "after" else "with no fence_proxy_async between"
    attempted(body, match, sim.SimError if order == "after" else sim.Race, race=True)
