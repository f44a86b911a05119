"""The kernel that waits: as many steps as it is told."""

from nbflash.cuda.pause import STEP, pause_of
from nbflash.cuda.ptx._asm import cuda


def test_as_many_steps_as_asked_for(monkeypatch):
    slept = []
    monkeypatch.setattr(cuda, "nanosleep", slept.append)
    pause_of(0, 3)()
    assert slept == [STEP] * 3
