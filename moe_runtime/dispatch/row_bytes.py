"""Rows as bytes to be moved, whatever they mean.

Small copies are numpy's and Python's own, which cost a fifth of torch's; large ones go through torch, which shares them
out among its threads.

Legend: M rows, B bytes of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    from moe_runtime.dispatch.rows import Int64Array

    ByteRows = npt.NDArray[np.uint8]

FEW_BYTES = 256 << 10
"""Up to here a second thread saves less than a call of torch costs."""


def byte_rows(x: torch.Tensor) -> ByteRows:
    """The memory of a contiguous CPU tensor (M, D) of any dtype, as (M, B)."""
    return x.view(torch.uint8).numpy()


def copy_many(source: memoryview, out: memoryview) -> None:
    """out = source; of the same length."""
    torch.frombuffer(out, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))


def gather_many(x: ByteRows, index_M: Int64Array, out: memoryview) -> None:
    """out = the rows x[index], one after the other; at least one."""
    out_MB = torch.frombuffer(out, dtype=torch.uint8).view(index_M.size, -1)
    torch.index_select(torch.from_numpy(x), 0, torch.from_numpy(index_M), out=out_MB)
