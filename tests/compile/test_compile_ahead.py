"""Many kernels in processes: cubins by kernel, what cannot travel, the bar."""

from dataclasses import replace

import pytest

from nbflash.backends.simt.row_statistics import RowConfig, delta_simt_spec, make_delta_simt
from nbflash.cuda import launch
from nbflash.planning.ahead import compile_all

A, B = (delta_simt_spec(RowConfig("float32", d)) for d in (4, 8))
JOBS = [(A, (8, 0)), (B, (8, 0)), (A, (8, 0))]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NBFLASH_CACHE_DIR", str(tmp_path))


def test_every_kernel_once_with_a_bar(capfd):
    local = replace(A, make=lambda config: make_delta_simt(config)), (8, 0)
    found = compile_all([*JOBS, local], 1)
    assert set(found) == {*JOBS, local}
    assert all(cubin.startswith(b"\x7fELF") for cubin in found.values())
    assert not launch.is_cold(A, (8, 0))
    err = capfd.readouterr().err
    assert "] 1 of 3 kernels" in err
    assert "##] 3 of 3 kernels" in err
    assert err.endswith(" s\n")


def test_in_this_process_without_a_bar(monkeypatch, capfd):
    monkeypatch.setattr(launch, "compile_cubin", lambda spec, _: spec.name.encode())
    assert compile_all(JOBS, 0, bar=False) == dict.fromkeys(JOBS, b"nbflash_delta_simt")
    assert capfd.readouterr().err == ""


def test_what_a_process_says_is_raised():
    with pytest.raises(RuntimeError, match="Error: "):
        compile_all([(A, (1, 0))], 1, bar=False)
