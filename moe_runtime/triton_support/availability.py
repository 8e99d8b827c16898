"""Where Triton kernels can run. Does not import triton until asked."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

INTERPRETER_NUM_SMS = 3
"""Programs of a persistent kernel in the interpreter: few, since they run one after another, but more than one."""


def triton_problem(device_type: str) -> str | None:
    """Why Triton kernels cannot run on tensors of this device type, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    # On a CPU the answer is nearly always no, and importing triton to ask it would cost each rank 70 MiB.
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET", "0").lower() not in (
        "1",
        "true",
        "on",
        "yes",
        "y",
    ):
        return "Triton kernels need a GPU (or TRITON_INTERPRET=1, which runs them slowly on a CPU)"
    if device_type not in ("cpu", "cuda"):
        return f"Triton has no back end for {device_type} here"
    return None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def device_name(device: torch.device) -> str | None:
    """What the maker calls the GPU, such as "NVIDIA H200"; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors (compute units on AMD) of a device."""
    return INTERPRETER_NUM_SMS if interpreting() else int(_properties(device)["multiprocessor_count"])


def shared_memory_bytes(device: torch.device) -> int:
    """Most shared memory that one program may take; what an H100 has when interpreting."""
    return 227 << 10 if interpreting() else int(_properties(device)["max_shared_mem"])


def target_arch(device: torch.device) -> int | str:
    """Triton's name of the device's architecture: 90 for sm_90, "gfx942" for an MI300; 90 when interpreting."""
    if interpreting():
        return 90
    from triton.runtime import driver

    arch: int | str = driver.active.get_current_target().arch
    return arch


def has_fp8(arch: int | str) -> bool:
    """Whether Triton converts to and from e4m3 on an architecture, as of `target_arch`."""
    return arch >= 89 if isinstance(arch, int) else True


def _properties(device: torch.device) -> dict[str, Any]:
    # The driver's own, not torch.cuda's: a stand-in driver compiles kernels for devices that are not there.
    from triton.runtime import driver

    properties: dict[str, Any] = driver.active.utils.get_device_properties(device.index or 0)
    return properties
