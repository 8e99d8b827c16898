"""What every Triton kernel here is built on. Imports triton; whoever may run without it asks `availability` first.

Kernels are decorated with this package's `jit`, which is triton's own once its CPU interpreter, if that is in use,
computes as a GPU does.
"""

import triton

from moe_runtime.triton_support.interpreter import correct_interpreter

if triton.knobs.runtime.interpret:
    correct_interpreter()

jit = triton.jit

__all__ = ["jit"]
