"""NVSHMEM's device functions for use in Triton kernels that are linked with libnvshmem_device.bc (3.4 and later).

Addresses are int64; a remote one is given as the local address of the same place in the symmetric heap. Functions named
`_block` are called by all threads of a program together.
"""

import triton.language as tl
from triton.language import core

SIGNAL_SET = tl.constexpr(9)
"""NVSHMEM_SIGNAL_SET: the signal word becomes the value."""


def _call(symbol, args, types, _semantic):
    signature = {tuple(core.dtype(t) for t in types): (symbol, core.dtype("int32"))}
    return core.extern_elementwise("", "", args, signature, is_pure=False, _semantic=_semantic)


@core.extern
def putmem_nbi_block(destination, source, num_bytes, pe, _semantic=None):
    """Start copying num_bytes (int64) to rank pe (int32)."""
    types = ("int64", "int64", "int64", "int32")
    return _call("nvshmemx_putmem_nbi_block", [destination, source, num_bytes, pe], types, _semantic)


@core.extern
def putmem_signal_nbi_block(destination, source, num_bytes, flag, value, operation, pe, _semantic=None):
    """Start copying, and then store `value` (uint64) at the address `flag` there."""
    args = [destination, source, num_bytes, flag, value, operation, pe]
    types = ("int64", "int64", "int64", "int64", "uint64", "int32", "int32")
    return _call("nvshmemx_putmem_signal_nbi_block", args, types, _semantic)


@core.extern
def quiet(_semantic=None):
    """Wait until all that this rank has started to copy has arrived."""
    return _call("nvshmem_quiet", [], (), _semantic)
