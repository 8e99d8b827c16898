"""Rows of a tensor as a numpy array, to be moved: what their elements mean does not matter here, only how wide they are.

Moving a few rows costs numpy a third of torch's time; many are left to torch, which shares them out among its threads.

Legend: M rows, D elements of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    from moe_runtime.dispatch.rows import Int64Array

    RowArray = npt.NDArray[Any]

# From here on a second thread saves more than torch's call costs.
_TORCH_BYTES = 256 << 10
_TORCH_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integers(element_bytes: int) -> np.dtype[Any]:
    """The numpy type that stands for elements of 1, 2, 4 or 8 bytes."""
    return np.dtype("u1" if element_bytes == 1 else f"i{element_bytes}")


def row_array(x: torch.Tensor) -> RowArray:
    """The memory of a CPU tensor, of any dtype, as `integers` of its elements' size."""
    return x.view(_TORCH_INTEGERS[x.element_size()]).numpy()


def gather_rows(x: RowArray, index_M: Int64Array, out_MD: RowArray) -> None:
    """out[i] = x[index[i]]. Every index must be in range: numpy would not tell."""
    if out_MD.nbytes < _TORCH_BYTES:
        # Any other mode goes through an array in between.
        x.take(index_M, axis=0, out=out_MD, mode="clip")
    else:
        torch.index_select(torch.from_numpy(x), 0, torch.from_numpy(index_M), out=torch.from_numpy(out_MD))


def copy_rows(x_MD: RowArray, out_MD: RowArray) -> None:
    """out = x."""
    if out_MD.nbytes < _TORCH_BYTES:
        out_MD[:] = x_MD
    else:
        torch.from_numpy(out_MD).copy_(torch.from_numpy(x_MD))
