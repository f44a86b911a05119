"""Which addresses in global memory come of products of 32 bits, by a kernel's LLVM IR.

Numba's own arithmetic is of 64 bits, but int32(...) cuts it, and intrinsics build what they like:
a product of two sizes or strides that was cut is a wrong address in a large tensor, and in a large
tensor only. Device functions are inlined and variables become values; then every index of a global
pointer is followed backwards.
"""

import contextlib
import functools
import hashlib
import re

import llvmlite.binding as llvm
from numba.cuda.cudadrv import nvvm

# Products by less are of tiles and panels: a row of a tensor, at most.
TILE = 1024
ROW = 64
SMALL_TABLES = True  # tables have fewer elements than int32 can count
_NAME = r'%(?:"[^"]+"|[-\w.$]+)'
_DEFINITION = re.compile(rf"^\s+({_NAME}) = (?:tail |musttail )?(\w+) (.*)$", re.M)
_NAMES, _WIDE = re.compile(_NAME), re.compile(rf"i64 (?:noundef )?({_NAME})")
_ELEMENT = re.compile(r"(?:(?:inbounds|nuw|nusw) )*(.+?), ptr")
_PLACE = re.compile(r", ([\d, ]+)$")  # in a tuple
_NUMBER = re.compile(r"(?: |, )(-?\d+)(?=$|,)")
# What is followed: the others make something else of their operands, or something smaller. Device
# functions take and return tuples.
_COPIES = {"sext", "zext", "trunc", "extractvalue", "phi", "select", "freeze"}
_FOLLOWED = {"add", "sub", "mul", "shl", "or", *_COPIES}
# Arguments that count heads, sequences or parts of the keys. An index that a block's number is
# divided into, times one of them, is another such index: int32 can count these as it can blocks.
_COUNTS = {"%batch", "%group", "%pack", "%splits"}
_INDICES = {"urem", "udiv"}
_DIVISIONS = {"sdiv", "udiv", "ashr", "lshr"}  # by a number: of words of a few elements
_POINTERS = {"getelementptr", "addrspacecast", "bitcast", "phi", "select", "inttoptr"}
_bitcode = {}  # of device functions, by their text


@contextlib.contextmanager
def read_ir():
    """The LLVM IR that Numba compiles in a while, as it hands it to NVVM: a list of modules."""
    modules, compile_ir = [], nvvm.compile_ir

    def keep(ir, **options):
        modules.extend([ir] if isinstance(ir, str) else ir)
        return compile_ir(ir, **options)

    nvvm.compile_ir = keep
    try:
        yield modules
    finally:
        nvvm.compile_ir = compile_ir


@functools.lru_cache(maxsize=4)  # that of a kernel is the same for every architecture
def narrow_products(modules):
    """The lines of products of 32 bits, or cut to 32 bits, that global addresses are made of.

    Tables of the schedule have int32 elements and fewer of them than int32 can count: in their
    indices only products with a stride, which is an argument of 64 bits, are looked for.

    Parameters
    ----------
    modules : tuple of str
        LLVM IR: of a kernel, and of the device functions that it calls.
    """
    text = _inlined(modules)
    lines = {name: (kind, rest) for name, kind, rest in _DEFINITION.findall(text)}
    head = next(line for line in text.splitlines() if line.startswith("define"))
    return _Kernel(lines, head).found()


def _inlined(modules):
    """The text of one module, without calls of device functions and without variables.

    A function's own variables go before it is inlined, which saves half of the time, and once for
    all kernels that call it.
    """
    builder = _pass_builder()
    first, *others = dict.fromkeys(modules)
    first = llvm.parse_assembly(first)
    _without_variables().run(first, builder)
    for text in others:
        first.link_in(llvm.parse_bitcode(_device_function(text)))
    inliner = llvm.create_new_module_pass_manager()
    inliner.add_always_inliner_pass()
    inliner.run(first, builder)
    _without_variables().run(first, builder)
    return str(first)


@functools.cache
def _pass_builder():
    llvm.initialize_native_target()
    machine = llvm.Target.from_triple(llvm.get_default_triple()).create_target_machine()
    return llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(0))


def _device_function(text):
    """The bitcode of a module without variables: most kernels share most device functions."""
    digest = hashlib.sha256(text.encode()).digest()
    if digest not in _bitcode:
        module = llvm.parse_assembly(text)
        _without_variables().run(module, _pass_builder())
        _bitcode[digest] = module.as_bitcode()
    return _bitcode[digest]


def _without_variables():
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_sccp_pass()  # products of constants
    passes.add_dead_code_elimination_pass()
    return passes


class _Kernel:
    """Its values by name: what makes them, and the operands."""

    def __init__(self, lines, head):
        self.lines, self._operands = lines, {}
        self.strides = set(_WIDE.findall(head))

    def operands(self, name):
        """The values that one is made of."""
        if name not in self._operands:
            names = _NAMES.findall(self.lines[name][1])
            if self.lines[name][0] == "extractvalue":
                names = self._elements(name)
            self._operands[name] = [x for x in names if x in self.lines]
        return self._operands[name]

    def _elements(self, name):
        """What has been put into a tuple where ``name`` is taken from, on each way there.

        ``at`` is a place in tuples of tuples, as LLVM writes it: "2, 0"; none is a number's own.
        """
        found, seen, left = [], set(), [(name, "")]  # left: what is to be taken from, and where
        while left:
            of_tuple, at = step = left.pop()
            kind, rest = self.lines.get(of_tuple, ("", ""))
            names, place = _NAMES.findall(rest), _PLACE.search(rest)
            if step in seen:
                continue
            seen.add(step)
            assert place or not kind.endswith("value"), f"{of_tuple} = {kind} {rest}: no place"
            if not at and kind != "extractvalue":
                found.append(of_tuple)
            elif kind == "extractvalue":
                left.append((names[0], f"{place[1]}, {at}" if at else place[1]))
            elif kind == "insertvalue":
                value = names.pop() if names and rest.endswith(f"{names[-1]}, {place[1]}") else ""
                if at == place[1] or at.startswith(f"{place[1]}, "):
                    left.append((value, at[len(place[1]) + 2 :]))
                else:
                    left += [(x, at) for x in names]
            elif kind in ("phi", "select", "freeze"):
                left += [(x, at) for x in names if x in self.lines]
        return found

    def found(self):
        """Lines of the text."""
        tensors, tables = self._indices()
        names = [x for x in self._sources(tensors) if self._is_narrow(x)]
        names += [x for x in self._sources(tables) if self._is_narrow(x, self._of_stride)]
        return sorted({f"{name} = {' '.join(self.lines[name])}" for name in names})

    def _indices(self):
        """The values that global addresses are made of: of tensors, and of tables."""
        tensors, tables = set(), set()
        for name, (kind, rest) in self.lines.items():
            if kind == "getelementptr" and self._is_global(name):
                indices = _NAMES.findall(rest.partition("ptr")[2])[1:]
                is_table = SMALL_TABLES and _ELEMENT.match(rest)[1] == "i32"
                (tables if is_table else tensors).update(indices)
            elif kind == "inttoptr":
                tables.update(self.operands(name))
        return tensors, tables

    def _sources(self, names):
        """The values that a few are made of, with these."""
        found, left = set(), [name for name in names if name in self.lines]
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += self.operands(name) if self._is_followed(name) else []
        return found

    def _is_followed(self, name):
        kind, rest = self.lines[name]
        if kind in _DIVISIONS:
            return _NUMBER.search(rest) is not None
        return kind in _FOLLOWED and not self._is_of_rows(name)

    def _is_of_rows(self, name):
        """Whether a product of 64 bits is by the elements of a row: int32 can count the rows."""
        kind, rest = self.lines[name]
        number = _NUMBER.search(rest)
        return kind == "mul" and "i64 " in rest and number is not None and int(number[1]) >= ROW

    def _is_global(self, pointer):
        """Whether it is neither shared memory nor an array of a thread's own."""
        seen, left = set(), [pointer]
        while left:
            name = left.pop()
            kind, rest = self.lines[name]
            if kind == "alloca" or "addrspace(3)" in rest or "@" in rest:
                return False
            if name not in seen and kind in _POINTERS:
                seen.add(name)
                names = self.operands(name)
                left += names[:1] if kind == "getelementptr" else names
        return True

    def _is_narrow(self, name, which=lambda name: True):
        """Whether it is a product of 32 bits, or one of 64 that is cut; ``which`` products."""
        if self.lines[name][0] != "trunc":
            return self._is_product(name, "i32") and which(name)
        within = self._sources(self.operands(name))
        return any(
            (self._is_product(x, "i64") or self._has_product_rows(x)) and which(x) for x in within
        )

    def _has_product_rows(self, name):
        """Whether it is a product by the elements of a row, and its number of rows is one, too."""
        rows = self._sources(self.operands(name)) if self._is_of_rows(name) else ()
        return any(self._is_product(x, size) for x in rows for size in ("i32", "i64"))

    def _of_stride(self, name):
        """Whether an argument of 64 bits is among its factors."""
        within = self._sources([name])
        taken = {y for x in within if self.lines[x][0] == "extractvalue" for y in self._elements(x)}
        named = {y for x in within for y in _NAMES.findall(self.lines[x][1])}
        return bool(self.strides & (named | taken))

    def _is_product(self, name, size):
        """Whether it is one of two variables, or by a number beyond those of a tile."""
        kind, rest = self.lines[name]
        if kind not in ("mul", "shl") or f"{size} " not in rest:
            return False
        number = _NUMBER.search(rest)
        if number is None:
            return not self._undoes_division(name) and not self._is_counted(name)
        return abs(int(number[1])) > TILE if kind == "mul" else 1 << int(number[1]) > TILE

    def _undoes_division(self, name):
        """``x // n * n`` is no larger than x."""
        names = set(self.operands(name))
        quotients = [x for x in names if self.lines[x][0] in ("sdiv", "udiv")]
        return any(set(self.operands(q)) & (names - {q}) for q in quotients)

    def _is_counted(self, name):
        """Whether it is an index by a count, or the number of a part by the tiles of a part."""
        factors = _NAMES.findall(self.lines[name][1])
        return any(
            self._is_index(x) and (self._origins(y) <= _COUNTS or self._is_share(y, x))
            for x, y in (factors, reversed(factors))
        )

    def _origins(self, name):
        """What a value is a copy of, on each way there."""
        found, seen, left = set(), set(), [name]
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.lines and self.lines[name][0] in _COPIES:
                left += self._copied(name)
            else:
                found.add(name)
        return found

    def _copied(self, name):
        """What is copied: not labels of blocks, nor the condition of a choice."""
        kind, rest = self.lines[name]
        if kind == "extractvalue":
            return self._elements(name)
        names = _NAMES.findall(re.sub(r", %[^,\s]+ \]", "]", rest) if kind == "phi" else rest)
        return names[1:] if kind == "select" and rest.startswith("i1 %") else names

    def _is_index(self, name):
        """Whether it is a quotient or remainder without a sign, as of a block's number."""
        kinds = {self.lines.get(x, ("argument",))[0] for x in self._origins(name)}
        return bool(kinds) and kinds <= _INDICES

    def _is_share(self, name, part):
        """Whether a value is a quotient by the count that ``part`` is the remainder of."""
        found = self._sources([name])
        quotients = [x for x in found if self.lines[x][0] == "sdiv"]
        counts = {y for x in quotients for z in self.operands(x) for y in self._origins(z)}
        of_part = {y for x in self._origins(part) for y in _NAMES.findall(self.lines[x][1])}
        return bool(_COUNTS & counts & of_part)
