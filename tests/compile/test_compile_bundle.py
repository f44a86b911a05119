"""Cubins that come with nbflash: found before anything is compiled, the same as compiled anew."""

import shutil
import struct

import pytest

from nbflash.backends.sm80.row_kernels import RowConfig, statistics_sm80_spec
from nbflash.cuda import bundled, kernel_key, launch, sources
from nbflash.planning import bundle

SPEC = statistics_sm80_spec(RowConfig("float16", 64))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A bundle of one kernel, by the step that builds them all."""
    folder = tmp_path_factory.mktemp("bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBFLASH_CACHE_DIR", str(folder / "cache"))
        patch.setattr(bundled, "FOLDER", folder / "cubins")
        of_one_kernel(patch, (8, 6))
        bundle.build(1)
    return folder / "cubins"


def of_one_kernel(patch, capability):
    name = f"{launch.arch_of(capability)}-float16-64"
    patch.setattr(bundle, "packs", lambda: {name: ([SPEC], capability)})
    patch.setattr(bundle, "CAPABILITIES", (capability,))


@pytest.fixture
def built(first, tmp_path, monkeypatch):
    """A copy of that, with an empty cache."""
    shutil.copytree(first, tmp_path / "cubins")
    monkeypatch.setattr(bundled, "FOLDER", tmp_path / "cubins")
    monkeypatch.setenv("NBFLASH_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cubins"
    forget()


def forget():
    """As a process that begins."""
    caches = bundled.index, bundled._unpacked, kernel_key._digest_of_sources
    for cached in (*caches, sources._statements, sources.file_digest):
        cached.cache_clear()


def compiles_nothing(*_):
    raise AssertionError("a kernel is compiled")


def text_of(cubin):
    """The instructions: sections of an ELF file whose names begin with ``.text``."""
    start, size, count, names = (
        struct.unpack_from("<Q", cubin, 40)[0],
        *struct.unpack_from("<HHH", cubin, 58),
    )
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + size * i) for i in range(count)]
    at = headers[names][4]
    named = {cubin[at + h[0] :].split(b"\0", 1)[0]: cubin[h[4] : h[4] + h[5]] for h in headers}
    return {name: data for name, data in named.items() if name.startswith(b".text")}


def test_a_bundled_cubin_is_what_is_compiled_anew(built, monkeypatch):
    """And is found without compiling, typing or asking for a compiler's version."""
    fresh = launch.compile_cubin(SPEC, (8, 6))
    for module, name in (
        (launch, "compile_cubin"),
        (kernel_key, "_toolchain"),
        (sources, "digest_of"),
    ):
        monkeypatch.setattr(module, name, compiles_nothing)
    found = launch.cached_cubin(SPEC, (8, 6))
    assert text_of(found) == text_of(fresh)
    assert b".text." + SPEC.name.encode() in text_of(fresh)
    assert launch.cached_cubin(SPEC, (8, 9)) == found  # a later architecture of its generation


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (7, 5)])
def test_what_is_not_bundled_is_compiled(capability, built, monkeypatch):
    monkeypatch.setattr(launch, "compile_cubin", compiles_nothing)
    with pytest.raises(AssertionError, match="is compiled"):
        launch.cached_cubin(SPEC, capability)


def test_a_changed_kernel_is_compiled(built, monkeypatch):
    given, module = sources.source_of, SPEC.make.__module__
    monkeypatch.setattr(
        sources,
        "source_of",
        lambda m: given(m).replace("+", "-") if m == module else given(m),
    )
    forget()
    monkeypatch.setattr(launch, "compile_cubin", compiles_nothing)
    with pytest.raises(AssertionError, match="is compiled"):
        launch.cached_cubin(SPEC, (8, 6))


def test_a_damaged_pack_is_said(built):
    (pack,) = built.glob("*.xz")
    pack.write_bytes(bundled.lzma.compress(b"something else"))
    with pytest.raises(RuntimeError, match="is damaged: install nbflash again"):
        launch.cached_cubin(SPEC, (8, 6))


def test_a_bundle_that_is_too_large_is_refused(built, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_BYTES", 100)
    with pytest.raises(RuntimeError, match="a wheel may have 100 bytes, the cubins take"):
        bundle.report({})


def test_a_kernel_that_cannot_be_compiled_is_said(built, monkeypatch):
    """With what the process says that tried."""
    of_one_kernel(monkeypatch, (1, 0))
    with pytest.raises(RuntimeError, match="Error: "):
        bundle.build(1)
