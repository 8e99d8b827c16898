"""What a compiled kernel takes of its GPU, read from the binary with the tools that come with Triton."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from moe_runtime.tools.stand_in_driver import Launch

INSTRUCTIONS = {
    "HMMA": r"\bHMMA\b",  # mma.sync: a warp's product, sm_80
    "IMMA": r"\bIMMA\b",
    "HGMMA": r"\bHGMMA\b",  # wgmma: a warp group's product in 16 bits, sm_90
    "QGMMA": r"\bQGMMA\b",  # the same in FP8
    "TCGEN05": r"\bUTC\w*MMA\b",  # tcgen05.mma, sm_100
    "UTMALDG": r"\bUTMALDG\b",  # bulk tensor load (TMA), sm_90 and later
    "GATHER4": r"\bUTMALDG\.\w+\.GATHER4\b",  # the same of rows by index, sm_100
    "UTMASTG": r"\bUTMASTG\b",
    "LDGSTS": r"\bLDGSTS\b",  # cp.async
    "MFMA": r"\bv_mfma_\w+",
}
"""Instructions a budget may require: name -> pattern in the disassembly."""


@dataclass(frozen=True)
class Report:
    """Resources of one compiled kernel."""

    registers: int
    """Per thread; vector registers on AMD."""
    spills: int
    """Instructions that move registers to or from memory; spilt vector registers on AMD."""
    shared_bytes: int
    num_warps: int
    instructions: dict[str, int]
    """Occurrences of `INSTRUCTIONS`, those that do occur; none if the kernel was not disassembled."""
    unresolved: tuple[str, ...] = ()
    """Functions that are called but not linked. Not looked for on AMD."""


def report(launch: Launch, disassemble: bool) -> Report:
    """Reads a launch's binary. Raises RuntimeError if that cannot be done.

    Disassembling takes longer than compiling, so without `disassemble` it is done only for kernels that have local memory, where spills
    would be. (AMD's assembly is there in any case.)
    """
    if "amdgcn" in launch.files:
        text = launch.files["amdgcn"].read_text()
        unresolved = []
        registers, spills = (
            _number(r"\.vgpr_count:\s+(\d+)", text),
            _number(r"\.vgpr_spill_count:\s+(\d+)", text),
        )
    else:
        usage = _cuobjdump("--dump-resource-usage", launch.files["cubin"])
        local = _number(r"\bSTACK:(\d+)", usage) + _number(r"\bLOCAL:(\d+)", usage)
        text = _cuobjdump("-sass", launch.files["cubin"]) if disassemble or local else ""
        registers = _number(r"\bREG:(\d+)", usage)
        spills = len(re.findall(r"\b(?:STL|LDL)\b", text))
        unresolved = re.findall(r"\.extern\s+\.func[^;]*?\b(\w+)\s*\n?\(", launch.files["ptx"].read_text())
    return Report(
        registers=registers,
        spills=spills,
        shared_bytes=launch.shared_bytes,
        num_warps=launch.num_warps,
        instructions={
            name: count for name, pattern in INSTRUCTIONS.items() if (count := len(re.findall(pattern, text)))
        },
        # The driver itself has these.
        unresolved=tuple(name for name in unresolved if name not in ("vprintf", "__assertfail")),
    )


def _cuobjdump(what: str, cubin: Path) -> str:
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, what, str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no match of {pattern!r} in the kernel's description")
    return int(found.group(1))
