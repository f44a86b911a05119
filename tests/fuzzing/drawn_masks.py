"""Strategies of masks: each beside its dense definition and the text that makes it."""

import functools
import io
import pickle
from dataclasses import dataclass

import numpy as np
from fuzzing import plain_masks
from fuzzing.examples import Brief
from hypothesis import strategies as st
from scipy import sparse

import masks

SIDES = st.one_of(st.integers(1, 9), st.integers(1, 40), st.integers(60, 70))
SEEDS = st.integers(0, 2**32 - 1)
FORMATS = "csr", "csc", "coo", "lil", "dok"
INTEGERS = int, int, np.int64, np.int32, np.uint8


@dataclass(frozen=True)
class Drawn(Brief):
    """``make()`` returns the mask, anew every time; ``cells`` is what it must be."""

    make: object
    cells: np.ndarray
    text: str

    def __repr__(self):
        return self.text

    @functools.cached_property
    def mask(self):
        return self.make()

    @property
    def shape(self):
        return self.cells.shape[-2:]


def call(name, *args, **options):
    """A generator's mask, and what the function of the same name in `plain_masks` says of it."""
    given = [*map(repr, args), *(f"{key}={x!r}" for key, x in options.items())]
    plain = [_plain(x) for x in args], {key: _plain(x) for key, x in options.items()}
    cells = getattr(plain_masks, name)(*plain[0], **plain[1])
    make = functools.partial(getattr(masks, name), *args, **options)
    return Drawn(make, np.asarray(cells), f"masks.{name}({', '.join(given)})")


def _plain(x):
    """Integers of NumPy as those of Python, whose sums do not wrap."""
    if isinstance(x, (np.integer, np.ndarray)):
        return x.tolist()
    return type(x)(map(_plain, x)) if isinstance(x, (tuple, list)) else x


@st.composite
def integers(draw, least, most):
    """Of any type that counts."""
    kind, most = draw(st.sampled_from(INTEGERS)), max(least, most)
    return kind(draw(st.integers(least, min(most, 255) if kind is np.uint8 else most)))


def lists(values):
    """Integers as a list, a tuple or an array of any type that holds them."""
    small = [np.uint8] * (min(values, default=0) >= 0 and max(values, default=0) < 256)
    arrays = [np.array(values, kind) for kind in (int, np.int32, *small)]
    return st.sampled_from([list(values), tuple(values), *arrays])


@st.composite
def parts(draw, total, count):
    """So many integers, not below 0, with the sum ``total``."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1)))
    return np.diff([0, *cuts, total]).tolist()


def _distinct(n):
    return st.lists(st.integers(0, n - 1), unique=True, max_size=8).flatmap(lists)


BOOLEANS = st.booleans()


# Of any shape. ----------------------------------------------------------------------------------


@st.composite
def _intervals(draw, nq, nk):
    name = draw(st.sampled_from(["dense", "causal", "window", "prefix", "chunked", "sinks"]))
    if name in ("dense", "causal"):
        return call(name, nq, nk)
    if name == "window":
        reach = st.none() | integers(0, nk + nq)
        return call(name, nq, nk, left=draw(reach), right=draw(reach))
    if name == "prefix":
        return call(name, nq, draw(integers(0, nk)), nk=nk)
    if name == "chunked":
        return call(name, nq, draw(integers(1, nk + 3)), nk=nk, causal=draw(BOOLEANS))
    return call(name, nq, draw(integers(0, nk + 3)), draw(integers(1, nk + 3)), nk=nk)


@st.composite
def _documents(draw, nq, nk):
    count, causal = draw(st.integers(1, 5)), draw(BOOLEANS)
    lengths, lengths_k = draw(parts(nq, count)), draw(parts(nk, count))
    if draw(BOOLEANS):
        given = [draw(lists(x)) for x in (lengths, lengths_k)]
        return call("documents", *given, causal=causal)
    sums = [draw(lists([0, *np.cumsum(x).tolist()])) for x in (lengths, lengths_k)]
    return call("documents_from_cu_seqlens", *sums, causal=causal)


@st.composite
def _tree(draw, nq, nk):
    if nk < nq:
        return call("dense", nq, nk)
    parents = [draw(st.integers(max(-1, i - 9), i - 1)) for i in range(nq)]
    return call("tree", draw(lists(parents)), draw(st.integers(0, nk - nq)), nk)


@st.composite
def _bits(draw, nq, nk):
    rng = np.random.default_rng(draw(SEEDS))
    keep = rng.random((nq, nk)) < draw(st.sampled_from([0, 0.05, 0.5, 0.95, 1]))
    keep &= rng.random((nq, 1)) < draw(st.sampled_from([0.5, 1]))
    return call("from_dense", keep)


def _predicates(a, b):
    """Functions made anew by every call, with what they read captured, bound or in a default."""
    table = np.arange(1000) % (a + 1) == 0
    return {
        "modulo": lambda: lambda q, kv: (q * a + kv) % b == 0,
        "default": lambda: lambda q, kv, width=a: abs(q - kv) < width,
        "table": lambda: lambda q, kv: table[kv] | (q < b),
        "partial": lambda: functools.partial(_beyond, reach=a),
    }


def _beyond(q, kv, reach):
    return q + reach <= kv


@st.composite
def functions(draw, nq, nk):
    a, b = draw(st.integers(0, 30)), draw(st.integers(1, 9))
    name = draw(st.sampled_from(sorted(_predicates(a, b))))
    cells = plain_masks.from_function(_predicates(a, b)[name](), nq, nk)
    make = lambda: masks.from_function(_predicates(a, b)[name](), nq, nk)
    return Drawn(make, cells, f"masks.from_function({name} of {a} and {b}, {nq}, {nk})")


@st.composite
def _scipy(draw, nq, nk):
    """Blocks in any format, explicit zeros and unsorted entries among them."""
    rng = np.random.default_rng(draw(SEEDS))
    block = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    shape = -(-nq // block[0]), -(-nk // block[1])
    values = rng.integers(-2, 3, shape) * (rng.random(shape) < draw(st.sampled_from([0.2, 0.7])))
    matrix = sparse.coo_array(values.astype(draw(st.sampled_from(["i1", "f4", "f8", "i8"]))))
    few_diagonals = sum(shape) <= 100  # SciPy warns of more
    form = draw(st.sampled_from((*FORMATS, "bsr") + ("dia",) * few_diagonals))
    if form == "bsr":
        values = np.kron(matrix.toarray(), np.ones(block, matrix.dtype))
        matrix = sparse.bsr_array(values, blocksize=block)
        is_whole = values.shape == (nq, nk)
        given = {} if is_whole and draw(BOOLEANS) else {"shape": (nq, nk)}
        return call("from_scipy", matrix, draw(st.sampled_from([None, block])), **given)
    matrix = matrix.asformat(form)
    if matrix.format in ("csr", "csc") and matrix.nnz and draw(BOOLEANS):
        matrix.data[0] = 0
    return call("from_scipy", matrix, block, shape=(nq, nk))


ANY_SHAPE = _intervals, _intervals, _documents, _tree, _bits, functions, _scipy

# Square. ----------------------------------------------------------------------------------------


@st.composite
def _patterns(draw, n):
    block, causal = draw(integers(1, 12)), draw(BOOLEANS)
    small = integers(0, 4)
    name = draw(st.sampled_from(["butterfly", "local", "strided", "fixed", "global_local"]))
    if name == "butterfly":
        how = {"stages": draw(st.none() | small), "radix": draw(integers(2, 5))}
        return call(name, n, block, **how, causal=causal)
    if name == "local":
        return call(name, n, block, draw(small), causal=causal)
    if name == "strided":
        return call(name, n, block, draw(integers(1, 9)), draw(small), causal=causal)
    if name == "fixed":
        stride = draw(st.integers(1, 6))
        return call(name, n, block, stride, draw(integers(0, stride)), causal=causal)
    return call(name, n, block, draw(small), draw(small), causal=causal)


@st.composite
def _drawn_blocks(draw, n):
    block, causal, seed = draw(st.integers(1, 12)), draw(BOOLEANS), draw(SEEDS)
    if draw(BOOLEANS):
        density = draw(st.floats(0, 1))
        return call("random", n, block, density, seed, causal=causal)
    how = {"n_random": draw(integers(0, 4)), "width": draw(integers(0, 3)), "seed": seed}
    return call("bigbird", n, block, **how, causal=causal)


@st.composite
def _diagonals(draw, n):
    causal = draw(BOOLEANS)
    if draw(BOOLEANS):
        return call("dilated", n, draw(integers(0, 9)), draw(integers(1, 9)), causal=causal)
    block = draw(st.sampled_from([1, 1, 2, 5]))
    offsets = draw(st.lists(st.integers(0, n + 2), unique=True, max_size=6))
    return call("toeplitz", n, draw(lists(offsets)), block, causal=causal)


@st.composite
def _tokens(draw, n):
    if draw(BOOLEANS):
        return call("vertical_slash", n, draw(_distinct(n)), draw(_distinct(n)))
    if draw(BOOLEANS):
        return call("block_diagonal", n, draw(integers(1, n + 2)))
    width = draw(st.sampled_from([w for w in range(1, n + 1) if n % w == 0]))
    return call("axial", n // width, width, causal=draw(BOOLEANS))


@st.composite
def _neighborhoods(draw, n):
    sizes = [draw(st.sampled_from([w for w in range(1, n + 1) if n % w == 0]))]
    sizes = draw(st.permutations([n // sizes[0], *sizes])) if draw(BOOLEANS) else [n]
    kernel, stride, dilation = [], [], []
    for size in sizes:
        dilation.append(draw(st.integers(1, max(1, min(4, size // 2)))))
        kernel.append(draw(st.integers(1, min(size // dilation[-1], 9))))
        stride.append(draw(st.integers(1, kernel[-1])))
    given = [tuple(x) for x in (sizes, kernel, stride, dilation)]
    alone = [len(set(x)) == 1 and i > 0 and draw(BOOLEANS) for i, x in enumerate(given)]
    return call("neighborhood", *(x[0] if y else x for x, y in zip(given, alone, strict=True)))


SQUARE = _patterns, _patterns, _drawn_blocks, _diagonals, _tokens, _neighborhoods

# Of others. -------------------------------------------------------------------------------------

BINARY = {
    "|": lambda a, b: a | b,
    "&": lambda a, b: a & b,
    "-": lambda a, b: a - b,
    "^": lambda a, b: a ^ b,
}
BINARY_CELLS = BINARY | {"-": lambda a, b: a & ~b}


def combined(operation, a, b):
    cells = BINARY_CELLS[operation](a.cells, b.cells)
    make = lambda: BINARY[operation](a.make(), b.make())
    return Drawn(make, cells, f"({a.text} {operation} {b.text})")


def inverted(a):
    return Drawn(lambda: ~a.make(), ~a.cells, f"~{a.text}")


def transposed(a):
    return Drawn(lambda: a.make().T, a.cells.swapaxes(-1, -2), f"{a.text}.T")


def restricted(a, q_idx, kv_idx):
    cells = plain_masks.restrict(a.cells, q_idx, kv_idx)
    make = lambda: masks.restrict(a.make(), q_idx, kv_idx)
    return Drawn(make, cells, f"masks.restrict({a.text}, {q_idx}, {kv_idx})")


def pickled(mask):
    return pickle.loads(pickle.dumps(mask))


def saved(mask):
    file = io.BytesIO()
    masks.save(file, mask)
    file.seek(0)
    return masks.load(file)


@st.composite
def _some_of(draw, n):
    """``n`` increasing indices among up to thrice as many, and how many those are."""
    total = n + draw(st.integers(0, 2 * n))
    if draw(BOOLEANS):  # whole blocks
        first = draw(st.integers(0, total - n))
        return total, list(range(first, first + n))
    rng = np.random.default_rng(draw(SEEDS))
    return total, np.sort(rng.permutation(total)[:n]).tolist()


def kinds(nq, nk):
    """Strategies of generators' masks of this shape, one of them at a time."""
    makers = ANY_SHAPE if nq != nk else ANY_SHAPE + SQUARE
    return st.sampled_from(makers).map(lambda f: f(nq) if f in SQUARE else f(nq, nk))


def leaves(nq, nk):
    return kinds(nq, nk).flatmap(lambda kind: kind)


@st.composite
def plain(draw, nq, nk, depth=2):
    """A mask of one plane: a generator's, or made of others."""
    kind = draw(st.sampled_from(["leaf", "leaf", *BINARY, "~", "T", "restrict"]))
    if kind == "leaf" or depth == 0:
        return draw(leaves(nq, nk))
    if kind in BINARY:
        return combined(kind, draw(plain(nq, nk, depth - 1)), draw(plain(nq, nk, depth - 1)))
    if kind == "~":
        return inverted(draw(plain(nq, nk, depth - 1)))
    if kind == "T":
        return transposed(draw(plain(nk, nq, depth - 1)))
    (all_q, q_idx), (all_k, kv_idx) = draw(_some_of(nq)), draw(_some_of(nk))
    return restricted(draw(plain(all_q, all_k, depth - 1)), q_idx, kv_idx)


def joined(name, entries):
    cells = getattr(plain_masks, name)([x.cells for x in entries])
    make = lambda: getattr(masks, name)([x.make() for x in entries])
    return Drawn(make, cells, f"masks.{name}([{', '.join(x.text for x in entries)}])")


@st.composite
def of_heads(draw, nq, nk, batch, heads):
    """A mask for so many batch entries and heads: plain, per head, per entry or both."""
    kind = draw(st.sampled_from(["plain", "plain", "heads", "batch", "both", "padding"]))
    one = plain(nq, nk, 1)
    few = draw(st.lists(one, min_size=1, max_size=3))
    some = lambda count: [draw(st.sampled_from(few)) for _ in range(count)]
    if kind == "plain":
        return draw(plain(nq, nk))
    if kind == "padding":
        lengths = [draw(st.integers(0, nk)) for _ in range(batch)]
        padding = call("padding", draw(lists(lengths)), nq, nk, causal=draw(BOOLEANS))
        return combined(draw(st.sampled_from(sorted(BINARY))), padding, few[0])
    if kind == "heads":
        return joined("per_head", some(heads))
    if kind == "batch":
        return joined("per_batch", some(batch))
    return joined("per_batch", [joined("per_head", some(heads)) for _ in range(batch)])
