"""compute-sanitizer (memcheck, racecheck, synccheck, initcheck) over test_gpu_sanitized.py.

    python tests/device/sanitize.py                       all four tools
    python tests/device/sanitize.py racecheck -k causal   one tool, and what pytest is to run

Each tool first has to find a fault that is planted for it in a kernel of this file; a tool that
misses its fault has checked nothing. The exit status is 0 if every tool found its fault and
nothing else. $COMPUTE_SANITIZER names the program where it is neither on the path nor
in $CUDA_HOME/bin.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
REPORTED = 86
COMMON = ("--error-exitcode", str(REPORTED), "--print-limit", "20", "--launch-timeout", "0")
OURS = ("--kernel-name", "kernel_substring=nbflash")
TOOLS = {
    # cuda-bindings asks the driver for entry points that it may not have: errors to memcheck.
    "memcheck": ("--padding", "512", "--leak-check", "no", "--report-api-errors", "no", *OURS),
    "racecheck": ("--racecheck-report", "all", *OURS),
    "synccheck": OURS,
    "initcheck": (),  # to know what is initialised, it has to see everyone's kernels
}
PLANTED = {
    "memcheck": """
        out[8192 + threadIdx.x] = 1;""",
    "racecheck": """
        __shared__ int s[64];
        s[threadIdx.x] = threadIdx.x;
        out[threadIdx.x] = s[63 - threadIdx.x];""",
    "synccheck": """
        if (threadIdx.x & 1) __syncthreads();
        out[threadIdx.x] = 1;""",
    "initcheck": """
        out[threadIdx.x] = in[threadIdx.x] + 1;""",
}


def control(tool):
    """Launch the kernel whose fault ``tool`` is to report."""
    import cupy

    cupy.cuda.set_allocator(None)
    source = f"""
        extern "C" __global__ void nbflash_planted_{tool}(int* out, const int* in) {{
            {PLANTED[tool]}
        }}"""
    out, in_ = (cupy.empty(64, cupy.int32) for _ in range(2))
    cupy.RawKernel(source, f"nbflash_planted_{tool}")((1,), (64,), (out, in_))
    cupy.cuda.Device().synchronize()


def sanitizer():
    """Path of compute-sanitizer."""
    candidates = [os.environ.get("COMPUTE_SANITIZER"), shutil.which("compute-sanitizer")]
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(f"{home}/bin/compute-sanitizer")
    for candidate in candidates:
        if candidate and Path(candidate).exists():
            return candidate
    sys.exit(
        "compute-sanitizer is neither on the path nor in $CUDA_HOME/bin: name it in "
        "$COMPUTE_SANITIZER"
    )


def options_of(program, tool):
    """Command line options of one tool, as far as this version knows them."""
    known = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    more = ()
    if tool == "initcheck" and "--initcheck-address-space" in known:
        more = ("--initcheck-address-space", "all")
    return [program, "--tool", tool, *COMMON, *TOOLS[tool], *more]


def reports(output):
    """Number of errors in the tool's last summary; None if it printed none."""
    found = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", output)
    return int(found[-1]) if found else None


def execute(command):
    """Exit status and output of a command in the environment of a sanitized run."""
    environment = {
        **os.environ,
        "NBFLASH_SANITIZE": "1",
        "NUMBA_CUDA_MAX_PENDING_DEALLOCS_COUNT": "0",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment, timeout=3600, **pipes)
    return done.returncode, done.stdout


def check(program, tool, arguments):
    """Whether ``tool`` finds the planted fault, and nothing in nbflash."""
    prefix, start = options_of(program, tool), time.monotonic()
    _, output = execute([*prefix, sys.executable, __file__, "--control", tool])
    if not reports(output):
        print(output[-4000:])
        print(f"{tool}: NOT CHECKED, the planted fault was not reported")
        return False
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    suite += [str(HERE / "test_gpu_sanitized.py"), *arguments]
    status, output = execute([*prefix, *suite])
    count, seconds = reports(output), time.monotonic() - start
    if status or count != 0:
        print(output[-8000:])
        print(f"{tool}: FAILED, exit status {status}, {count} reports, {seconds:.0f} s")
        return False
    passed = re.findall(r"(\d+) passed", output)
    print(f"{tool}: 0 reports in {passed[-1]} tests, planted fault found, {seconds:.0f} s")
    return True


def main(arguments):
    if arguments[:1] == ["--control"]:
        control(arguments[1])
        return 0
    tools = arguments[:1] if arguments and arguments[0] in TOOLS else list(TOOLS)
    rest = arguments[1:] if arguments and arguments[0] in TOOLS else arguments
    program = sanitizer()
    results = [check(program, tool, rest) for tool in tools]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
