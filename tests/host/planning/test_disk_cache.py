"""What is compiled of score functions on the CPU is found again, and never for another function."""

import hashlib
import os
import re
import stat
import subprocess
import sys
import types
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.event import install_recorder

import nbflash
from nbflash import scores
from nbflash.backends.cpu import compiling, score
from nbflash.disk_cache import sealed
from nbflash.disk_cache.content import content_of


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """An empty one for functions; the kernels are where they always are."""
    monkeypatch.setattr(compiling, "directory", lambda: tmp_path / "kept")
    return tmp_path / "kept"


def run(fn, params=()):
    """The scores that kernels make of zeros, of three queries, and whether anything is compiled."""
    q, own = np.zeros((1, 3, 1, 8), np.float32), scores.custom(fn, params=params)
    with install_recorder("numba:compile") as compiled:
        _, lse = nbflash.attention(q, q[:, :1], q[:, :1], score=own, return_lse=True)
    return lse.ravel().tolist(), bool(compiled.buffer)


PROCESS = """
import sys
from pathlib import Path

from numba.core.event import install_recorder

import nbflash
from nbflash import scores
from nbflash.backends.cpu import compiling, score
from nbflash.testing import make_qkv

compiling.directory = lambda: Path(sys.argv[1])
q, k, v, dout = make_qkv(1, 20, 20, 2, 1, 8)
with install_recorder("numba:compile") as compiled:
    for score in (scores.softcap(2), scores.alibi([0.5, 1.0])):
        how = {"score": score, "dropout": 0.5, "seed": 1}
        out, lse = nbflash.attention(q, k, v, return_lse=True, **how)
        nbflash.attention_backward(dout, q, k, v, out, lse, **how)
    nbflash.score_backward(dout, q, k, v, out, lse, **how)
print(*(event.data["dispatcher"].py_func.__name__ for _, event in compiled.buffer))
print(out.tobytes().hex())
"""


def test_a_second_process_compiles_nothing(directory):
    """Kernels, scores of ours, dropout, gradients."""
    command = [sys.executable, "-c", PROCESS, directory]
    (compiled, first), (nothing, second) = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    assert {"tile", "softcap", "alibi", "alibi_part"} <= set(compiled.split())
    assert (nothing, second) == ("", first)
    assert len(list(directory.iterdir())) == 4


OWN = """
    import math
    from numba import njit

    WEIGHT = 0.5

    @njit
    def helper(x):
        return x + WEIGHT

    def make(step):
        def fn(s, b, h, q_idx, kv_idx, more=0.0):
            # a comment
            return helper(s) + step * q_idx + math.sqrt(4.0) + more
        return fn

    fn = make(1)
"""
CHANGES = {
    "a constant": ("math.sqrt(4.0)", "math.sqrt(9.0)"),
    "an operation": ("+ step * q_idx", "- step * q_idx"),
    "a name": ("math.sqrt(4.0)", "math.exp(4.0)"),
    "a default": ("more=0.0", "more=1.0"),
    "a variable around it": ("make(1)", "make(2)"),
    "what it calls": ("x + WEIGHT", "x - WEIGHT"),
    "a global of what it calls": ("WEIGHT = 0.5", "WEIGHT = 0.25"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_compiled_anew(change, load):
    """What has not is found: with another comment, and again after the change."""
    first, compiled = run(load(OWN).fn)
    assert compiled
    assert run(load(OWN.replace("a comment", "another one\n")).fn) == (first, False)
    changed = load(OWN.replace(*CHANGES[change]))
    second, compiled = run(changed.fn)
    assert compiled
    assert second != first
    np.testing.assert_allclose(second, [changed.fn(0.0, 0, 0, q, 0) for q in range(3)], rtol=1e-6)
    assert run(load(OWN).fn) == (first, False)


def test_the_types_of_parameters_count(load):
    source = "def fn(s, b, h, q_idx, kv_idx, x):\n    return s + q_idx / x"
    exact = [0.0, 0.5, 1.0]
    for x in (np.float64(2), np.float32(2), np.int64(2), np.uint8(2)):
        assert run(load(source).fn, (x,)) == (exact, True)
        assert run(load(source).fn, (x + x.dtype.type(1),))[1] is False
    source = source.replace("q_idx / x", "x[q_idx]")
    for x in (np.array(exact), np.array(exact, np.float32)):
        assert run(load(source).fn, (x,)) == (exact, True)
        assert run(load(source).fn, (2 * x,)) == ([0.0, 1.0, 2.0], False)
    assert run(load(source.replace("x[", "x[0, ")).fn, (np.array([exact]),)) == (exact, True)


def test_what_was_compiled_with_other_globals_is_not_kept(load):
    """Of a function that is called: Numba compiles it once."""
    module = load(OWN)
    module.helper(np.float32(0))
    module.WEIGHT = 7.0
    (old, *_), _ = run(module.fn)
    assert old == 2.5
    (new, *_), compiled = run(load(OWN.replace("0.5", "7.0")).fn)
    assert (new, compiled) == (9.0, True)


def test_what_changes_while_it_is_compiled_is_not_kept(load, monkeypatch, directory):
    module, right = load(OWN), score.check_stages

    def check_late(*stages):
        module.WEIGHT = 7.0
        right(*stages)

    monkeypatch.setattr(score, "check_stages", check_late)
    assert run(module.fn)[0][0] == 9.0
    assert not directory.exists()


def function_of(source, **names):
    """The function ``f`` of a source, with globals of a module that is there."""
    module = types.ModuleType("functions")
    vars(module).update(numba=numba, np=np, **names)
    exec(source, vars(module))
    return module


UNKNOWN = {
    "array": "x = np.zeros(3)\ndef f(): return x[0]",
    "object": "x = object()\ndef f(): return x",
    "type": "class X: pass\ndef f(): return X",
    "module": "import numba as x\ndef f(): return x.float32",
    "around": "def make(x):\n    def f(): return x\n    return f\nf = make([object()])",
    "not-yet": "def make():\n    def f(): return x\n    yield f\n    x = 1\nf = next(g := make())",
    "undefined": "def f(): return nowhere",
    "inside": "x = object()\ndef f(): return (lambda: x)()",
    "default": "def f(x=object()): return x",
    "signature": "@numba.njit('f8(f8)')\ndef g(x): return x\ndef f(): return g(1.0)",
    "locals": "@numba.njit(locals={'x': numba.int8})\ndef g(x): return x\ndef f(): return g(1)",
    "vectorized": "@numba.vectorize\ndef g(x): return x\ndef f(): return g(1.0)",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_contents_that_cannot_be_known(name, monkeypatch):
    module = function_of(UNKNOWN[name])
    monkeypatch.setitem(sys.modules, "functions", module)
    assert content_of(1) is not None
    assert content_of(module.f) is None


def test_a_function_without_a_module_is_not_known():
    """Its compiled code would look for it."""
    namespace = {}
    exec("def f(): return 1", namespace)
    assert content_of(namespace["f"]) is None
    assert content_of(namespace["f"].__code__) is not None


@pytest.mark.parametrize("compiled", [True, False])
def test_a_function_that_calls_itself(compiled, monkeypatch):
    source = "def g(n): return g(n - 1) if n else {}\ndef f(): return g(3)"
    source = "@numba.njit\n" + source if compiled else source
    modules = [function_of(source.format(x)) for x in (1, 2, 1)]
    contents = []
    for module in modules:
        monkeypatch.setitem(sys.modules, "functions", module)
        contents.append(content_of(module.f))
        assert contents[-1].jitted == ((module.g,) if compiled else ())
    first, second, third = (content.digest for content in contents)
    assert first == third != second


def test_half_a_pair_of_surrogates():
    """No text that can be encoded, but a string."""
    assert content_of("\ud800").digest != content_of("\ud801").digest


def test_equal_values_of_other_types_differ():
    values = 1, 1.0, True, 1 + 0j, "1", b"1", np.int64(1), np.float32(1), np.True_, (1,), [1], {1}
    values += np.uint64(1), np.float32(0), np.int32(0)  # the same bytes
    values += 0.0, -0.0, None, ..., {1: 2}, {2: 1}, float("nan"), abs, min, np.float64, float
    assert len({content_of(x).digest for x in values}) == len(values)
    assert content_of({3, 1, 2}) == content_of({2, 3, 1})


def test_lines_count_where_something_is_raised(load):
    """A traceback shows them."""
    for body, same in (("return s", True), ("if s > 9: raise ValueError\n    return s", False)):
        source = f"def fn(s, b, h, q_idx, kv_idx):\n    {body}"
        one, other = (content_of(load("\n" * lines + source).fn) for lines in (0, 1))
        assert (one == other) == same


def test_a_broken_file_is_not_read(load, directory):
    first, _ = run(load(OWN).fn)
    (path,) = directory.iterdir()
    whole = path.read_bytes()
    for broken in (whole[:100] + b"?" + whole[101:], b""):
        path.write_bytes(broken)
        assert run(load(OWN).fn) == (first, True)
        assert path.read_bytes() != broken
    assert run(load(OWN).fn) == (first, False)


def test_a_directory_that_cannot_be_written(load, directory, monkeypatch):
    directory.write_text("a file")
    with pytest.warns(UserWarning, match="compiled functions are not cached: .*kept"):
        first, _ = run(load(OWN).fn)
    monkeypatch.setattr(compiling, "directory", lambda: None)
    assert run(load(OWN).fn) == (first, True)


@pytest.mark.parametrize("before", [None, 0o500, 0o755, 0o777, 0o1700], ids=str)
def test_a_private_file(before, tmp_path):
    """Of a folder that is made, in others that are made too, or that others could use."""
    path = tmp_path / "all" / "ours" / "mine" / "a-file"
    if before is not None:
        path.parent.mkdir(parents=True)
        path.parent.chmod(before)
    umask = os.umask(0)
    try:
        sealed.write_private(path, b"content")
    finally:
        os.umask(umask)
    assert sealed.read(path) == b"content"
    assert path.read_bytes() == b"content" + hashlib.sha256(b"content").digest()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    sealed.write_private(path, b"other")
    assert sealed.read(path) == b"other"


def test_a_folder_is_made_for_its_user_alone(tmp_path, monkeypatch):
    """From the start: who opens it before its mode is changed could write to it for good."""
    monkeypatch.setattr(Path, "chmod", lambda *given: pytest.fail("it was another's first"))
    umask = os.umask(0)
    try:
        sealed.write_private(tmp_path / "mine" / "a-file", b"content")
    finally:
        os.umask(umask)


def uid_of(owner, monkeypatch):
    """All that is on disk is that user's; the process is of user 7."""
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    for name in ("fstat", "lstat"):
        right = getattr(os, name)
        monkeypatch.setattr(os, name, lambda x, right=right: owned_by(owner, right(x)))


def owned_by(owner, status):
    return os.stat_result((*status[:4], owner, *status[5:]))


@pytest.mark.parametrize(
    ("owner", "mode", "read"),
    [
        (7, 0o600, True),
        (7, 0o644, True),
        (0, 0o644, True),
        (8, 0o600, False),
        (8, 0o644, False),
        (1, 0o600, False),
        (7, 0o660, False),
        (7, 0o602, False),
        (0, 0o620, False),
    ],
)
def test_whose_files_are_read(owner, mode, read, tmp_path, monkeypatch):
    """The user's and root's, which nobody else may write to."""
    path = tmp_path / "a-file"
    sealed.write(path, b"content")
    path.chmod(mode)
    uid_of(owner, monkeypatch)
    assert sealed.read(path) == (b"content" if read else None)


def test_neither_links_nor_missing_files_are_read(tmp_path):
    path, link = tmp_path / "a-file", tmp_path / "a-link"
    sealed.write(path, b"content")
    link.symlink_to(path)
    assert sealed.read(link) is None
    assert sealed.read(tmp_path / "another") is None


@pytest.mark.parametrize("owner", [0, 6, 8])
def test_a_folder_of_another_is_not_written_to(owner, tmp_path, monkeypatch):
    """Not even root's."""
    uid_of(owner, monkeypatch)
    with pytest.raises(PermissionError, match=f"mine belongs to another user, of uid {owner}"):
        sealed.write_private(tmp_path / "mine" / "a-file", b"content")
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_link_to_a_folder_is_not_written_to(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "theirs")
    with pytest.raises(NotADirectoryError, match="mine is not a directory"):
        sealed.write_private(tmp_path / "mine" / "a-file", b"content")
    assert list((tmp_path / "theirs").iterdir()) == []


def test_what_cannot_be_put_in_place_leaves_nothing(tmp_path):
    (tmp_path / "a-folder").mkdir()
    with pytest.raises(OSError, match="a-folder"):
        sealed.write(tmp_path / "a-folder", b"content")
    assert [x.name for x in tmp_path.iterdir()] == ["a-folder"]


def test_folders_are_made_where_they_are_missing(tmp_path):
    path = tmp_path / "all" / "ours" / "a-file"
    sealed.write(path, b"content")
    assert sealed.read(path) == b"content"


def test_where_users_have_no_numbers_their_files_are_read(tmp_path, monkeypatch):
    """Windows, which has no modes either."""
    monkeypatch.setattr(sealed, "_POSIX", False)
    uid_of(8, monkeypatch)
    (tmp_path / "mine").mkdir(mode=0o755)
    sealed.write_private(tmp_path / "mine" / "a-file", b"content")
    assert sealed.read(tmp_path / "mine" / "a-file") == b"content"
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) != 0o700


def test_the_oldest_files_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed, "FILES", 3)
    for i in range(6):
        path = tmp_path / f"function-{i}.nbc"
        sealed.write(path, b"x" * i)
        assert sealed.read(path) == b"x" * i
        (tmp_path / f"kernel-{i}.nbc").write_bytes(b"")
    assert sorted(int(re.sub(r"\D", "", p.name)) for p in tmp_path.glob("function-*")) == [3, 4, 5]
    assert len(list(tmp_path.iterdir())) == 9
