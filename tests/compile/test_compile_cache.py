"""The disk cache of cubins: hits, damage, other people's files, processes that write at once."""

import multiprocessing
import os
import resource
import signal

import pytest

from nbflash.backends.simt.row_statistics import RowConfig, delta_simt_spec
from nbflash.cuda import launch

CAPABILITY = (8, 0)


def cubin(head_dim=4):
    return launch.cached_cubin(delta_simt_spec(RowConfig("float32", head_dim)), CAPABILITY)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NBFLASH_CACHE_DIR", str(tmp_path / "deeper" / "cache"))
    return tmp_path / "deeper" / "cache" / "cubins"


def files(folder):
    return list(folder.glob("*.cubin"))


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
    assert len(compiled) == len(files(folder)) == 1


def test_another_configuration_or_architecture_is_another_file(folder, compiled):
    spec = delta_simt_spec(RowConfig("float32", 4))
    others = cubin(5), launch.cached_cubin(spec, (9, 0)), cubin(4)
    assert len({*others}) == len(compiled) == len(files(folder)) == 3


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
    (file,) = files(folder)
    file.write_bytes(damage(file.read_bytes()))
    mended = cubin()
    assert mended.startswith(b"\x7fELF")
    assert cubin() == mended
    assert len(compiled) == 2
    assert len(files(folder)) == 1


def _in_another_process(folder, barrier, results):
    os.environ["NBFLASH_CACHE_DIR"] = folder
    barrier.wait()
    results.put(cubin())


def test_processes_that_write_at_once_agree(folder):
    """All compile, since none finds a file; whoever comes last replaces a whole file by another."""
    context, n = multiprocessing.get_context("spawn"), 3
    barrier, results = context.Barrier(n), context.Queue()
    processes = [
        context.Process(target=_in_another_process, args=(str(folder.parent), barrier, results))
        for _ in range(n)
    ]
    for process in processes:
        process.start()
    got = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
    assert len(got) == 1
    assert len(files(folder)) == 1
    assert {file.suffix for file in folder.iterdir()} == {".cubin", ".json"}
    assert cubin() in got


def test_the_folder_is_its_users_alone(folder):
    cubin()
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    cubin(5)
    assert folder.stat().st_mode & 0o777 == 0o700


def another(monkeypatch, file):
    """What is there is another user's."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if not os.getuid():
        os.chown(file, 54321, -1)


def linked(monkeypatch, file):
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


FOREIGN = {
    "another-user": another,
    "group-writes": lambda _, file: file.chmod(0o660),
    "all-write": lambda _, file: file.chmod(0o602),
    "link": linked,
}


@pytest.mark.filterwarnings("ignore:compiled kernels are not cached")
@pytest.mark.parametrize("case", FOREIGN)
def test_what_others_may_have_written_is_not_loaded(case, folder, compiled, monkeypatch):
    cubin()
    (file,) = files(folder)
    FOREIGN[case](monkeypatch, file)
    assert cubin().startswith(b"\x7fELF")
    assert len(compiled) == 2


def test_a_folder_of_another_user_is_not_written_to(folder, monkeypatch):
    cubin()
    before = set(folder.iterdir())
    another(monkeypatch, folder)
    with pytest.warns(UserWarning, match="not cached.*belongs to another user"):
        assert cubin(5).startswith(b"\x7fELF")
    assert set(folder.iterdir()) == before


def test_a_full_disk_costs_a_warning(folder, compiled):
    """As a limit of what a file may hold stands for it: nothing is left behind."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.warns(UserWarning, match="compiled kernels are not cached"):
            assert cubin().startswith(b"\x7fELF")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list(folder.iterdir()) == []
    assert cubin() == cubin()
    assert len(compiled) == 2


def test_a_folder_that_cannot_be_written_costs_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("NBFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    spec = delta_simt_spec(RowConfig("float32", 64))
    with pytest.warns(UserWarning, match="compiled kernels are not cached, set NBFLASH_CACHE_DIR"):
        assert launch.cached_cubin(spec, (9, 0)).startswith(b"\x7fELF")
