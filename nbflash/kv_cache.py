"""KVCache: keys and values of many sequences in pages of a fixed size, shared between forks.

The pages of a sequence stand anywhere in the cache; its block table lists them in order. A page
counts the sequences that hold it, and one that several hold is copied before it is written.
PagedAttention (Kwon et al., 2023, arXiv 2309.06180), section 4.
"""

from __future__ import annotations

import importlib
import operator
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, SupportsIndex

import numpy as np

from nbflash.definitions.quantised import LIMITS, quantise
from nbflash.definitions.types import Array, DType
from nbflash.inputs.arrays import CPU, CUDA, allocator, device_of, library, native, resident
from nbflash.inputs.problem import DTYPES, MAX_HEAD_DIM, check_writeable

_LARGEST = 2**31 - 1  # what block tables hold
_TOKENS = "(sequences, tokens, heads_kv, head_dim)"


class _Sequence(NamedTuple):
    pages: list[int]  # never changed in place: forks share it
    length: int


class KVCache:
    """Paged storage of keys and values for `decode`, in NumPy or CuPy memory.

    Parameters
    ----------
    pages, page_size : int
        The cache holds ``pages * page_size`` tokens; nothing is allocated later.
    heads_kv, head_dim : int
        ``head_dim`` 1 to 256.
    dtype : dtype
        Or its name: float16, bfloat16, float32 or float64; or int8 or float8_e4m3fn, which
        `append` quantises to, with a scale per token and head.
    device : {"cpu", "cuda"}
    device_id : int
        Of the CUDA device.

    Attributes
    ----------
    k, v : array (pages, page_size, heads_kv, head_dim)
        ``k_cache`` and ``v_cache`` of `decode`. Places without a token are undefined.
    k_scale, v_scale : float32 array (pages, page_size, heads_kv), or None
        Of a quantised cache.
    free_pages : int
        Pages that no sequence holds.

    Raises
    ------
    TypeError, ValueError
        If a size, the dtype or the device is not usable.
    ImportError
        If CUDA memory is asked for and CuPy is not installed.

    Notes
    -----
    To be used by one thread at a time. A method that raises has changed no sequence.
    """

    def __init__(
        self,
        pages: SupportsIndex,
        page_size: SupportsIndex,
        heads_kv: SupportsIndex,
        head_dim: SupportsIndex,
        dtype: DType = np.float16,
        *,
        device: str = CPU,
        device_id: SupportsIndex = 0,
    ) -> None:
        self.pages, self.page_size = _at_least(1, pages=pages), _at_least(1, page_size=page_size)
        self._heads = _at_least(1, heads_kv=heads_kv), _at_least(1, head_dim=head_dim)
        if self._heads[1] > MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be 1 to {MAX_HEAD_DIM}, got {head_dim}")
        if not isinstance(device, str) or device not in (CPU, CUDA):
            raise ValueError(f"device must be {CPU!r} or {CUDA!r}, got {device!r}")
        self.dtype = _dtype(dtype)
        device_id = _at_least(0, device_id=device_id)
        self._where = device, device_id if device == CUDA else 0
        empty, self._device = allocator(*self._where)
        slots = self.pages, self.page_size
        with self._device:
            self._arrays = [empty((*slots, *self._heads), _held(self.dtype)) for _ in "kv"]
            self._view()
            self.k_scale = self.v_scale = None
            if self.dtype.name in LIMITS:
                shape = (*slots, self._heads[0])
                self.k_scale, self.v_scale = (empty(shape, np.dtype(np.float32)) for _ in "kv")
                self._arrays += [self.k_scale, self.v_scale]
        self._free = list(range(self.pages))
        self._holders = [0] * self.pages
        self._sequences: dict[int, _Sequence] = {}
        self._made = 0

    def _view(self):
        self.k, self.v = (
            x if x.dtype == self.dtype else x.view(self.dtype) for x in self._arrays[:2]
        )

    def __setstate__(self, state):
        """Of a copy, or unpickled: the views are of its own memory."""
        self.__dict__ |= state
        self._view()

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, count: SupportsIndex = 1) -> list[int]:
        """Start ``count`` empty sequences, which hold no page yet; their numbers, never reused."""
        count = _at_least(1, count=count)
        first, self._made = self._made, self._made + count
        self._sequences |= {s: _Sequence([], 0) for s in range(first, self._made)}
        return list(range(first, self._made))

    def fork(self, sequence: SupportsIndex) -> int:
        """A new sequence with the tokens of another; pages are shared until one of them grows."""
        (sequence,) = self._known([sequence], "sequence")
        (new,) = self.allocate()
        self._sequences[new] = self._sequences[sequence]
        for page in self._sequences[new].pages:
            self._holders[page] += 1
        return new

    def append(self, sequences: Iterable[SupportsIndex], k: Array, v: Array) -> None:
        """Add tokens to the end of sequences, all or none.

        Parameters
        ----------
        sequences : sequence of int
            Distinct numbers from `allocate` or `fork`.
        k, v : array (sequences, tokens, heads_kv, head_dim)
            On the cache's device; the cache's dtype, or any floating dtype if it is quantised. No
            views of the cache: their pages may be written while they are read.

        Raises
        ------
        MemoryError
            If the free pages do not suffice. Nothing has changed then: `free` and try again.
        TypeError, ValueError
            If a sequence is unknown or named twice, or an array does not fit.
        """
        sequences = self._known(sequences)
        k, v = native(k=k, v=v)
        self._check_tokens(len(sequences), k, v)
        longer, taken, replaced = self._longer(sequences, k.shape[1])
        with self._device:
            self._write([(self._sequences[s], longer[s]) for s in sequences], self._stored(k, v))
        # Only now: what was written until a failure lies in free pages or behind the last token.
        del self._free[: len(taken)]
        for page in taken:
            self._holders[page] = 1
        self._release(replaced)
        self._sequences |= longer

    def truncate(self, sequence: SupportsIndex, length: SupportsIndex) -> None:
        """Drop the tokens of a sequence behind the first ``length``: drafts that were rejected.

        A page that holds none of its tokens any more, nor any of another sequence, is free again.
        """
        (sequence,) = self._known([sequence], "sequence")
        length, (pages, longest) = _at_least(0, length=length), self._sequences[sequence]
        if length > longest:
            raise ValueError(
                f"length must be at most {longest}, the tokens of sequence {sequence}, got {length}"
            )
        count = -(-length // self.page_size)
        self._sequences[sequence] = _Sequence(pages[:count], length)
        self._release(pages[count:])

    def free(self, sequences: Iterable[SupportsIndex]) -> None:
        """End sequences; a page that no other sequence holds is free again."""
        for sequence in self._known(sequences):
            self._release(self._sequences.pop(sequence).pages)

    def lengths(self, sequences: Iterable[SupportsIndex], out: Array | None = None) -> Array:
        """Tokens of each sequence: int32 (sequences,), on the cache's device.

        Parameters
        ----------
        sequences : sequence of int
        out : int32 array (sequences,), optional
            Written and returned; a CUDA graph reads it anew at every replay.
        """
        lengths = [self._sequences[s].length for s in self._known(sequences)]
        return self._ready(np.array(lengths, np.int32), out)

    def block_table(
        self,
        sequences: Iterable[SupportsIndex],
        width: SupportsIndex | None = None,
        out: Array | None = None,
    ) -> Array:
        """Pages of each sequence in order, -1 behind the last one.

        Parameters
        ----------
        sequences : sequence of int
        width : int, optional
            Columns of the table; default those of ``out``, or as many as the longest of the
            sequences has pages.
        out : int32 array (sequences, width), optional
            Written and returned; a CUDA graph reads it anew at every replay.

        Returns
        -------
        int32 (sequences, width), on the cache's device
        """
        tables = [self._sequences[s].pages for s in self._known(sequences)]
        longest = max(map(len, tables), default=0)
        if width is None:
            width = longest if out is None else max((longest, *np.shape(out)[1:2]))
        width = _at_least(0, width=width)
        if width < longest:
            raise ValueError(f"width must be at least {longest}, the pages of one, got {width}")
        table = np.full((len(tables), width), -1, np.int32)
        for row, pages in zip(table, tables, strict=True):
            row[: len(pages)] = pages
        return self._ready(table, out)

    def __repr__(self) -> str:
        return (
            f"KVCache({self.pages} pages of {self.page_size} tokens, {self.free_pages} free, "
            f"{len(self._sequences)} sequences, {self.dtype}, {self._where[0]})"
        )

    def _longer(self, sequences, n):
        """The sequences with room for n more tokens, the free pages taken, the pages replaced.

        A page is replaced where tokens go to one that another sequence holds too. If all that hold
        it grow, it stays with the longest, whose tokens go behind those of the others.
        """
        longer, taken, replaced = {}, 0, Counter()
        for sequence in sorted(sequences, key=lambda s: self._sequences[s].length):
            pages, length = self._sequences[sequence]
            if n and length % self.page_size:
                last = pages[-1]
                if self._holders[last] - replaced[last] > 1:
                    replaced[last] += 1
                    pages = pages[:-1]
            count = -(-(length + n) // self.page_size) - len(pages)
            longer[sequence] = _Sequence(pages + self._free[taken : taken + count], length + n)
            taken += count
        if taken > self.free_pages:
            raise MemoryError(
                f"append of {n} tokens to {len(sequences)} sequences needs {taken} pages of "
                f"{self.page_size} tokens, {self.free_pages} of {self.pages} are free; nothing was "
                f"changed: free sequences first, or make a cache of more pages"
            )
        return longer, self._free[:taken], replaced.elements()

    def _write(self, pairs, values):
        """Tokens behind those of the old sequences into pages of the new ones, all at once.

        A last page that another sequence holds has been replaced: what it holds is copied.
        """
        places = np.empty((2, *values[0].shape[:2]), np.int64)
        for (pages, slots), (old, new) in zip(places.swapaxes(0, 1), pairs, strict=True):
            index, slots[:] = np.divmod(np.arange(old.length, new.length), self.page_size)
            first, used = divmod(old.length, self.page_size)
            pages[:] = np.array(new.pages[first:], np.int64)[index - first]
            if used and index.size and (page := new.pages[len(old.pages) - 1]) != old.pages[-1]:
                for array in self._arrays:
                    array[page, :used] = array[old.pages[-1], :used]
        xp, _ = library(values[0])
        pages, slots = xp.asarray(places)
        for array, x in zip(self._arrays, values, strict=True):
            bits = np.dtype(f"u{array.itemsize}")  # CuPy does not know all dtypes here
            array.view(bits)[pages, slots] = x.view(bits)

    def _stored(self, k, v):
        """What `_arrays` hold of the tokens."""
        if self.k_scale is None:
            return k, v
        (k, k_scale), (v, v_scale) = (quantise(x, self.dtype) for x in (k, v))
        held = _held(self.dtype)
        return k.view(held), v.view(held), k_scale, v_scale

    def _release(self, pages):
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def _ready(self, table, out):
        if out is None and self._where[0] == CPU:
            return table
        with self._device:
            if out is None:
                return resident([table])[0]
            (given,) = native(out=out)
            found = given.dtype, given.shape, device_of(given)
            if found != (want := (table.dtype, table.shape, self._where)):
                want, found = ("{} {} on {}".format(*x) for x in (want, found))
                raise ValueError(f"out must be {want}, got {found}")
            check_writeable(given)
            xp, _ = library(given)
            given[...] = xp.asarray(table)
        return out

    def _known(self, sequences, name="sequences") -> list[int]:
        if isinstance(sequences, str) or not np.iterable(sequences):
            raise TypeError(f"sequences must be a list of numbers, got {sequences!r}")
        sequences = [_at_least(0, **{name: s}) for s in sequences]
        unknown = [s for s in sequences if s not in self._sequences]
        if unknown:
            held = f"{len(self._sequences)} sequence{'s' if len(self._sequences) != 1 else ''}"
            raise ValueError(
                f"{name} must be allocated and not freed, got {unknown[0]}; the cache holds {held}"
            )
        if len(set(sequences)) < len(sequences):
            raise ValueError(f"sequences must be distinct, got {sequences}")
        return sequences

    def _check_tokens(self, count, k, v):
        for name, x in (("k", k), ("v", v)):
            if device_of(x) != self._where:
                raise ValueError(
                    f"{name} must be on the cache's device {self._where}, got {device_of(x)}"
                )
            if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (count, *self._heads):
                want = f"({count}, tokens, {self._heads[0]}, {self._heads[1]})"
                raise ValueError(f"{name} must have shape {_TOKENS} = {want}, got {x.shape}")
            wanted = DTYPES if self.dtype.name in LIMITS else (self.dtype.name,)
            if x.dtype.name not in wanted or not x.dtype.isnative:
                raise TypeError(f"{name} must have dtype {', '.join(wanted)}, got {x.dtype}")
        if v.shape != k.shape:
            raise ValueError(f"v must have the shape of k, {k.shape}, got {v.shape}")


def _held(dtype) -> np.dtype:
    """What numbers are allocated and copied as: CuPy has float8 as a view of other arrays only."""
    return np.dtype(np.uint8) if dtype.name == "float8_e4m3fn" else dtype


def _dtype(dtype) -> np.dtype:
    wanted = (*DTYPES, *LIMITS)
    if dtype is None:  # NumPy's name for float64
        raise TypeError(f"dtype must be one of {', '.join(wanted)}, got None")
    if isinstance(dtype, str) and dtype in ("bfloat16", "float8_e4m3fn"):
        importlib.import_module("ml_dtypes")  # from then on NumPy knows the names
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype must be one of {', '.join(wanted)}, got {dtype!r}") from error
    if found.name not in wanted or not found.isnative:
        raise TypeError(f"dtype must be one of {', '.join(wanted)}, got {found}")
    return found


def _at_least(smallest, **named) -> int:
    ((name, value),) = named.items()
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__") or np.ndim(value):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not smallest <= (value := operator.index(value)) <= _LARGEST:
        bound = f"at least {smallest}" if value < smallest else f"at most {_LARGEST}"
        raise ValueError(f"{name} must be {bound}, got {value}")
    return value
