"""compute-sanitizer (memcheck, racecheck, synccheck, initcheck) over test_gpu_sanitized.py.

    python tests/device/sanitize.py                       all four tools
    python tests/device/sanitize.py racecheck -k causal   one tool, and what pytest is to run

Each tool first has to find the faults that are planted for it in kernels of this file, on Hopper in
copies by TMA too; a tool that misses one has checked nothing. The exit status is 0 if
every tool found its faults and nothing else. $COMPUTE_SANITIZER names the program where it is
neither on the path nor in $CUDA_HOME/bin.
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
COMMON = ("--error-exitcode", str(REPORTED), "--print-limit", "200", "--launch-timeout", "0")
OURS = ("--kernel-name", "kernel_substring=nbflash")
TOOLS = {
    # cuda-bindings asks the driver for entry points that it may not have: errors to memcheck.
    "memcheck": ("--padding", "512", "--leak-check", "no", "--report-api-errors", "no", *OURS),
    # A line for two instructions, not for every byte: it takes some barriers of Hopper for none.
    "racecheck": ("--racecheck-report", "analysis", "--show-backtrace", "no", *OURS),
    "synccheck": OURS,
    "initcheck": (),  # to know what is initialised, it has to see everyone's kernels
}
# The faults of each tool: the first anywhere, the others where there is TMA (Hopper).
PLANTED = {
    "memcheck": (
        "out[8192 + threadIdx.x] = 1;",
        "init(&bar); load(s, in + 8192, &bar); wait(&bar); out[threadIdx.x] = s[threadIdx.x];",
        "s[threadIdx.x] = 1; store(out + 8192, s);",
    ),
    "racecheck": (
        "s[threadIdx.x] = threadIdx.x; out[threadIdx.x] = s[63 - threadIdx.x];",
        "init(&bar); load(s, in, &bar); out[threadIdx.x] = s[threadIdx.x];",
        "init(&bar); load(s, in, &bar); s[threadIdx.x] = 1; wait(&bar);",
    ),
    "synccheck": (
        "if (threadIdx.x & 1) __syncthreads(); out[threadIdx.x] = 1;",
        "load(s, in, &bar); out[threadIdx.x] = 1;",
        """if (threadIdx.x & 1) asm volatile("bar.sync 1, 64;"); out[threadIdx.x] = 1;""",
    ),
    "initcheck": (
        "out[threadIdx.x] = in[threadIdx.x] + 1;",
        "init(&bar); load(s, in, &bar); wait(&bar); out[threadIdx.x] = s[threadIdx.x];",
    ),
}
COPY_ENGINE = r"""
__device__ unsigned shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init(long long* bar) {
    if (threadIdx.x == 0)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
                     "fence.mbarrier_init.release.cluster;" :: "r"(shared(bar)) : "memory");
    __syncthreads();
}
__device__ void load(int* to, const int* from, long long* bar) {
    if (threadIdx.x) return;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;"
                 :: "r"(shared(bar)) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], 256, [%2];"
                 :: "r"(shared(to)), "l"(from), "r"(shared(bar)) : "memory");
}
__device__ void wait(long long* bar) {
    for (int done = 0; !done;)
        asm volatile("{.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n\t"
                     "selp.s32 %0, 1, 0, p;}" : "=r"(done) : "r"(shared(bar)) : "memory");
}
__device__ void store(int* to, const int* from) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x) return;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;\n\t"
                 "cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group 0;"
                 :: "l"(to), "r"(shared(from)) : "memory");
}
"""


def faults(tool):
    """Numbers of the faults that this machine can commit."""
    from nbflash.planning import dispatch

    return range(1 if dispatch.why_not_here("sm90") else len(PLANTED[tool]))


def control(tool, fault):
    """Launch the kernel whose fault ``tool`` is to report."""
    import cupy

    cupy.cuda.set_allocator(None)
    source = f"""{COPY_ENGINE if fault else ""}
        extern "C" __global__ void nbflash_planted_{tool}(int* out, const int* in) {{
            __shared__ alignas(128) int s[64];
            __shared__ long long bar;
            {PLANTED[tool][fault]}
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
    for fault in faults(tool):
        _, output = execute([*prefix, sys.executable, __file__, "--control", tool, str(fault)])
        if not reports(output):
            print(output[-4000:])
            print(f"{tool}: NOT CHECKED, it did not report: {PLANTED[tool][fault]}")
            return False
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    suite += [str(HERE / "test_gpu_sanitized.py"), *arguments]
    status, output = execute([*prefix, *suite])
    count, seconds = reports(output), time.monotonic() - start
    if status or count != 0:
        print(output)
        print(f"{tool}: FAILED, exit status {status}, {count} reports, {seconds:.0f} s")
        return False
    passed = re.findall(r"(\d+) passed", output)
    print(f"{tool}: 0 reports in {passed[-1]} tests, planted faults found, {seconds:.0f} s")
    return True


def main(arguments):
    if arguments[:1] == ["--control"]:
        control(arguments[1], int(arguments[2]))
        return 0
    tools = arguments[:1] if arguments and arguments[0] in TOOLS else list(TOOLS)
    rest = arguments[1:] if arguments and arguments[0] in TOOLS else arguments
    program = sanitizer()
    results = [check(program, tool, rest) for tool in tools]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
