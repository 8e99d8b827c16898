"""A driver for a GPU that is not there: Triton compiles through its real launch path, and launching does nothing.

What Triton asks of a driver is small: the target, the device's limits, a function that loads a binary, and a launcher. With
this one set, `kernel[grid](...)` specialises its arguments, compiles, checks shared memory against the device's limit and
"launches"; every launch is noted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """A GPU to compile for, with what its driver would say."""

    name: str
    backend: str
    """Triton's: `cuda` or `hip`."""
    arch: int | str
    warp_size: int
    num_sms: int
    """Streaming multiprocessors; compute units on AMD."""
    shared_memory_bytes: int
    """Most that one program may take."""


TARGETS = {
    t.name: t
    for t in (
        Target("sm_80", "cuda", 80, 32, 108, 163 << 10),  # A100
        Target("sm_90", "cuda", 90, 32, 132, 227 << 10),  # H100, H200
        Target("sm_100", "cuda", 100, 32, 148, 227 << 10),  # B200
        Target("gfx942", "hip", "gfx942", 64, 304, 64 << 10),  # MI300X
    )
}


@dataclass(frozen=True)
class Launch:
    """One launch of a compiled kernel."""

    kernel: str
    """The Python function's name."""
    hash: str
    """Triton's, of source, constants, options and target."""
    num_warps: int
    shared_bytes: int
    files: dict[str, Path]
    """By suffix: `cubin` and `ptx`, or `hsaco` and `amdgcn`, and the other stages."""


class StandInDriver:
    """Triton's active driver while it is installed; see the module. `launches` grows with every launch."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.launches: list[Launch] = []
        self._files: dict[str, dict[str, Path]] = {}

    def install(self) -> None:
        """Make this the driver of the process, for good: Triton keeps what it has learnt of a device."""
        from triton import knobs
        from triton.runtime import driver

        driver.set_active(self)
        knobs.runtime.kernel_load_end_hook.add(self._loaded)

    # What Triton calls.

    @property
    def utils(self) -> StandInDriver:
        """What loads binaries and knows devices: this object too."""
        return self

    def get_current_target(self) -> Any:
        """What to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.target.backend, self.target.arch, self.target.warp_size)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Nothing to do."""
        assert device == 0

    def get_current_stream(self, device: int) -> int:
        """None; nothing is queued."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors of launchers are."""
        return torch.device("cpu")

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """(major, minor) of an NVIDIA target."""
        assert isinstance(self.target.arch, int)
        return divmod(self.target.arch, 10)

    def get_device_properties(self, device: int) -> dict[str, Any]:
        """What Triton asks before it launches."""
        return {
            "max_shared_mem": self.target.shared_memory_bytes,
            "multiprocessor_count": self.target.num_sms,
            "warpSize": self.target.warp_size,
            "max_num_regs": 65536,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """(module, function, registers, spills, largest number of threads)."""
        return name, name, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What is called for every launch of a kernel."""

        def launch(*args: Any) -> None:
            self.launches.append(
                Launch(
                    kernel=source.fn.__name__,
                    hash=metadata.hash,
                    num_warps=metadata.num_warps,
                    shared_bytes=metadata.shared,
                    files=self._files[metadata.hash],
                )
            )

        return launch

    def _loaded(
        self,
        module: Any,
        function: Any,
        name: str,
        metadata_group: dict[str, str],
        hash: str,  # noqa: A002 - Triton gives it by this name
    ) -> None:
        self._files[hash] = {Path(path).suffix[1:]: Path(path) for path in metadata_group.values()}
