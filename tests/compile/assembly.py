"""From PTX to what the assembler says about it: registers, spills, stack, shared memory."""

import re
from dataclasses import dataclass

from compiled import linker_log
from cuda.bindings import nvjitlink

CAPABILITIES = {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_100a": (10, 0)}


class AssemblyError(RuntimeError):
    """The assembler rejects the PTX; the message is its log."""


@dataclass(frozen=True)
class Report:
    """The assembler's figures for one kernel.

    Attributes
    ----------
    registers : int
        Per thread.
    spill_stores, spill_loads : int
        Bytes per thread that registers did not hold.
    stack : int
        Bytes per thread; an array indexed at run time lies here without any spill.
    static_smem : int
        Bytes per block; sm_90 and later report 1,024 more, which the system reserves.
    ptx : str
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_smem: int
    ptx: str


def label(config):
    """The name of a Hopper kernel's test."""
    masks = "-full" * config.full_tiles + "-edge" * getattr(config, "edge", False)
    return f"{config.dtype}-d{config.head_dim}-{config.tile_m}x{config.tile_n}{masks}"


def _buffer(handle, size, read):
    text = bytearray(size(handle))
    if text:
        read(handle, text)
    return bytes(text).decode(errors="replace").strip("\0 \n")


def _assembler_log(ptx, arch):
    handle = nvjitlink.create(3, [f"-arch={arch}", "-O3", "-verbose"])
    code = ptx.encode()
    try:
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, code, len(code), "kernel.ptx")
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError as error:
            log = _buffer(handle, nvjitlink.get_error_log_size, nvjitlink.get_error_log)
            raise AssemblyError(log) from error
        return _buffer(handle, nvjitlink.get_info_log_size, nvjitlink.get_info_log)
    finally:
        nvjitlink.destroy(handle)


def _figure(pattern, log):
    found = re.findall(pattern, log)
    return max(map(int, found), default=0)


def assemble(ptx, arch):
    """Assemble PTX text for ``arch`` (for instance ``"sm_90a"``) and read the log.

    Raises
    ------
    AssemblyError
        If the PTX is not valid for the architecture.
    """
    log = linker_log(ptx, arch, _assembler_log)
    registers = _figure(r"Used (\d+) registers", log)
    if not registers:
        raise AssemblyError(f"no kernel in the log: {log!r}")
    return Report(
        registers=registers,
        spill_stores=_figure(r"(\d+) bytes spill stores", log),
        spill_loads=_figure(r"(\d+) bytes spill loads", log),
        stack=_figure(r"(\d+) bytes stack frame", log),
        static_smem=_figure(r"(\d+) bytes smem", log),
        ptx=ptx,
    )
