"""A symmetric heap in GPU memory: NVSHMEM allocates a segment on every rank and says which ones are mapped here.

The only module that imports nvshmem4py (extra `nvshmem`). It has been written against version 0.4.1 with NVSHMEM 3.4.5 and
has not been run on several GPUs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_runtime.dispatch.heap_shm import AllGatherText
from moe_runtime.errors import BackendUnavailable, CapacityError

_NETWORK_KERNELS = ("put_messages", "put_returns", "signal_over_network")


def unsupported(device_type: str) -> str | None:
    """Why NVSHMEM cannot serve ranks of this device type, or None."""
    if device_type != "cuda":
        return f"NVSHMEM joins GPUs, not {device_type}"
    missing = [name for name in ("nvshmem", "cuda.core") if not _installed(name)]
    if missing:
        return f"{' and '.join(missing)} cannot be imported (pip install 'moe-runtime[nvshmem]')"
    return None


def device_library() -> str:
    """Path of NVSHMEM's device functions as bitcode. Raises BackendUnavailable if the package that has it is missing."""
    spec = importlib.util.find_spec("nvidia.nvshmem") if _installed("nvidia") else None
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "lib" / "libnvshmem_device.bc"
        if path.is_file():
            return str(path)
    raise BackendUnavailable(
        "libnvshmem_device.bc is in no installed package (pip install 'moe-runtime[nvshmem]')"
    )


class NvshmemHeap:
    """One segment of GPU memory per rank, zero at first. A SymmetricHeap.

    Starts NVSHMEM in this process, which can have one heap; its memory goes with the process.
    """

    def __init__(
        self, rank: int, all_gather_text: AllGatherText, bytes_per_rank: int, device: torch.device
    ) -> None:
        """All ranks call this together, each with a GPU of its own. bytes_per_rank: a multiple of 64.

        Raises BackendUnavailable if nvshmem4py is missing or does not start, CapacityError if there is no room.
        """
        reason = unsupported(device.type)
        if reason is not None:
            raise BackendUnavailable(reason)
        self.rank = rank
        self.num_ranks = len(all_gather_text(""))
        nvshmem: Any = _start(rank, self.num_ranks, all_gather_text, device)
        from nvshmem import bindings

        self._end_hook = _initialise_modules(bindings.cumodule_init)
        try:
            self.segment: torch.Tensor = nvshmem.interop.torch.bytetensor((bytes_per_rank,))
        except Exception as error:
            self._end_hook()
            raise CapacityError(
                f"NVSHMEM cannot allocate {bytes_per_rank / 2**20:.1f} MiB of dispatch buffer: {error}"
            ) from error
        self.segment.zero_()
        own = self.segment.data_ptr()
        addresses = [own if n == rank else int(bindings.ptr(own, n)) for n in range(self.num_ranks)]
        self.addresses_N = torch.tensor(addresses, dtype=torch.int64, device=device)
        # Nobody may write to a segment before it is zero.
        torch.cuda.synchronize(device)
        all_gather_text("zeroed")

    def close(self) -> None:
        """Forget the memory. Idempotent.

        NVSHMEM's own ways to free it and to end are barriers, in which a rank would hang whose peer is dead.
        """
        self._end_hook()
        self.segment = torch.empty(0, dtype=torch.uint8)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _start(rank: int, num_ranks: int, all_gather_text: AllGatherText, device: torch.device) -> Any:
    import numpy as np

    try:
        import nvshmem.core
        import nvshmem.core.interop.torch
        from cuda.core import Device

        gpu = Device(device.index or 0)
        gpu.set_current()
        # Rank 0's id, as text, for all.
        unique_id = nvshmem.core.get_unique_id(empty=rank != 0)
    except Exception as error:
        raise BackendUnavailable(f"NVSHMEM cannot be used on rank {rank}: {error}") from error
    raw = unique_id._data.view(np.uint8)
    raw[:] = np.frombuffer(bytes.fromhex(all_gather_text(raw.tobytes().hex())[0]), dtype=np.uint8)
    try:
        nvshmem.core.init(device=gpu, uid=unique_id, rank=rank, nranks=num_ranks, initializer_method="uid")
    except Exception as error:
        raise BackendUnavailable(f"NVSHMEM does not start on rank {rank}: {error}") from error
    return nvshmem.core


def _initialise_modules(initialise: Callable[[int], Any]) -> Callable[[], None]:
    """Give every module that uses NVSHMEM's device functions its state when it is loaded. Returns what ends this."""
    from triton import knobs

    def loaded(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:  # noqa: A002
        if name in _NETWORK_KERNELS:
            initialise(int(module))

    knobs.runtime.kernel_load_end_hook.add(loaded)
    return lambda: knobs.runtime.kernel_load_end_hook.remove(loaded)
