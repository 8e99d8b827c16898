"""One small kernel of NVSHMEM's device calls, so that linking with its device library is proven on its own."""

from __future__ import annotations

import torch


def put_and_signal(library: str) -> None:
    """Launches a kernel that puts a row into another rank's memory and signals it. `library`: libnvshmem_device.bc."""
    from moe_runtime.tools.nvshmem_probe_kernels import put_row_kernel

    row = torch.empty(2048, dtype=torch.bfloat16)
    signal = torch.empty(8, dtype=torch.int64)
    put_row_kernel[(1,)](
        row, row, signal, row.nbytes, 1, num_warps=4, extern_libs={"libnvshmem_device": library}
    )
