"""NVSHMEM device calls as Triton sees them: external functions, by the names of nvshmemx.h."""

import triton.language as tl
from triton.language import core

from moe_runtime.triton_support import jit

SIGNAL_SET = tl.constexpr(9)
"""NVSHMEM_SIGNAL_SET of nvshmem_constants.h."""


@core.extern
def _put_signal_block(target, source, num_bytes, signal, value, operation, rank, _semantic=None):
    """nvshmemx_putmem_signal_nbi_block: bytes to another rank's memory, then its signal; the whole block calls."""
    types = ("int64", "int64", "int64", "int64", "uint64", "int32", "int32")
    return core.extern_elementwise(
        "", "", [target, source, num_bytes, signal, value, operation, rank],
        {tuple(core.dtype(t) for t in types): ("nvshmemx_putmem_signal_nbi_block", core.dtype("int32"))},
        is_pure=False, _semantic=_semantic,
    )  # fmt: skip


@core.extern
def _my_rank(_semantic=None):
    return core.extern_elementwise(
        "", "", [], {(): ("nvshmem_my_pe", core.dtype("int32"))}, is_pure=False, _semantic=_semantic
    )


@jit
def put_row_kernel(source_ptr, target_ptr, signal_ptr, num_bytes, rank):
    """The row, then 1 into this rank's word of the other's signals."""
    _put_signal_block(
        target_ptr.to(tl.int64),
        source_ptr.to(tl.int64),
        num_bytes.to(tl.int64),
        (signal_ptr + _my_rank()).to(tl.int64),
        tl.full((), 1, tl.uint64),
        SIGNAL_SET,
        rank + 0 * num_bytes,
    )
