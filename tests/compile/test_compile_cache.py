"""The disk cache of cubins: hits, damage, and processes that write at the same time."""

import importlib
import multiprocessing
import os
import pkgutil

import pytest

import nbflash.backends
from nbflash.backends.simt.row_statistics import RowConfig, delta_simt_spec
from nbflash.cuda import launch
from nbflash.cuda.sources import sources_of

CAPABILITY = (8, 0)


def cubin(head_dim=4):
    return launch.cached_cubin(delta_simt_spec(RowConfig("float32", head_dim)), CAPABILITY)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NBFLASH_CACHE_DIR", str(tmp_path / "deeper" / "cache"))
    return tmp_path / "deeper" / "cache"


@pytest.fixture
def compiled(monkeypatch):
    """The specs that were compiled."""
    specs, compile_cubin = [], launch.compile_cubin

    def count(spec, capability):
        specs.append(spec)
        return compile_cubin(spec, capability)

    monkeypatch.setattr(launch, "compile_cubin", count)
    return specs


def test_a_kernel_is_compiled_once(folder, compiled):
    first = cubin()
    assert first.startswith(b"\x7fELF")
    assert cubin() == first
    assert len(compiled) == len(list(folder.iterdir())) == 1


def test_another_configuration_or_architecture_is_another_file(folder, compiled):
    spec = delta_simt_spec(RowConfig("float32", 4))
    others = cubin(5), launch.cached_cubin(spec, (9, 0)), cubin(4)
    assert len({*others}) == len(compiled) == len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
        lambda data: bytes(len(data)),
    ],
    ids=["empty", "short", "one-byte-short", "one-bit", "zeros"],
)
def test_damaged_files_are_compiled_again(damage, folder, compiled):
    cubin()
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    mended = cubin()
    assert mended.startswith(b"\x7fELF")
    assert cubin() == mended
    assert len(compiled) == 2
    assert len(list(folder.iterdir())) == 1


def _in_another_process(folder, barrier, results):
    os.environ["NBFLASH_CACHE_DIR"] = folder
    barrier.wait()
    results.put(cubin())


def test_processes_that_write_at_once_agree(folder):
    """All compile, since none finds a file; whoever comes last replaces a whole file by another."""
    context, n = multiprocessing.get_context("spawn"), 3
    barrier, results = context.Barrier(n), context.Queue()
    processes = [
        context.Process(target=_in_another_process, args=(str(folder), barrier, results))
        for _ in range(n)
    ]
    for process in processes:
        process.start()
    got = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
    assert len(got) == 1
    assert [file.suffix for file in folder.iterdir()] == [".cubin"]
    assert cubin() in got


def test_a_folder_that_cannot_be_written_costs_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("NBFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    spec = delta_simt_spec(RowConfig("float32", 64))
    with pytest.warns(UserWarning, match="compiled kernels are not cached, set NBFLASH_CACHE_DIR"):
        assert launch.cached_cubin(spec, (9, 0)).startswith(b"\x7fELF")


def test_what_a_kernel_imports_is_among_its_sources():
    """Of every module of the backends: where its functions and classes come from."""
    found = pkgutil.walk_packages(nbflash.backends.__path__, "nbflash.backends.")
    for name in [x.name for x in found if not x.ispkg and ".cpu." not in x.name]:
        values = vars(importlib.import_module(name)).values()
        users = {getattr(value, "__module__", None) or "" for value in values}
        ours = {user for user in users if user.partition(".")[0] in ("nbflash", "masks")}
        assert ours <= set(sources_of(name)), name
