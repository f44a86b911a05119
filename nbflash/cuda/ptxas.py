"""ptxas: from PTX to a cubin as one whole program.

nvJitLink assembles for linking, where ``setmaxnreg`` is ignored, and before compute capability 9.0
some kernels take 50 registers more. ptxas is a program of the CUDA
toolkit and of the wheel ``nvidia-cuda-nvcc``.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


@functools.cache
def find_ptxas():
    """Path of ptxas: ``$NBFLASH_PTXAS``, a wheel's, ``$CUDA_HOME``'s or the first on the path."""
    if chosen := os.environ.get("NBFLASH_PTXAS"):
        return chosen
    candidates = []
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        candidates += [f"{folder}/cu13/bin/ptxas", f"{folder}/cuda_nvcc/bin/ptxas"]
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(f"{home}/bin/ptxas")
    candidates.append("/usr/local/cuda/bin/ptxas")
    return next((c for c in candidates if Path(c).exists()), shutil.which("ptxas"))


@functools.cache
def ptxas_version():
    """What ``ptxas --version`` says, for the key of the cache."""
    program = find_ptxas()
    if program is None:
        return None
    return subprocess.run([program, "--version"], capture_output=True, text=True).stdout


def assemble(ptx, arch):
    """The cubin (bytes) of one PTX module.

    Raises
    ------
    RuntimeError
        If there is no ptxas, or it rejects the module; the message is its log.
    """
    return _run(ptx, arch)[0]


def report(ptx, arch):
    """What ``ptxas -v`` says: registers, spills, stack, warnings."""
    return _run(ptx, arch)[1]


def _run(ptx, arch):
    program = find_ptxas()
    if program is None:
        raise RuntimeError("ptxas is not installed: pip install nvidia-cuda-nvcc")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [program, f"-arch={arch}", "-v", "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas failed:\n{done.stderr}")
        return target.read_bytes(), done.stdout + done.stderr
