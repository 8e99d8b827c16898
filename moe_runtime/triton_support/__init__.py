"""What every Triton kernel here is built on.

Kernels are decorated with this package's `jit`, which is triton's own once its CPU interpreter, if that is in use,
computes as a GPU does. Triton is imported with `jit`, not with the package: `availability` answers also where it is missing,
and costs nothing where no kernel runs.
"""

from typing import Any

__all__ = ["jit"]


def __getattr__(name: str) -> Any:
    if name != "jit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import triton

    from moe_runtime.triton_support.interpreter import correct_interpreter

    if triton.knobs.runtime.interpret:
        correct_interpreter()
    return triton.jit
