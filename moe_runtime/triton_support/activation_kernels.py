"""Activation functions inside kernels, on float32. The oracle is layers.activation.ACTIVATIONS."""

import triton.language as tl

from moe_runtime.triton_support import jit

SQRT_HALF = tl.constexpr(0.7071067811865476)
TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@jit
def activate(x, ACTIVATION: tl.constexpr):
    """Elementwise, by transformers' name. Comparisons rather than min and max, which would hide a NaN."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "gelu_pytorch_tanh":
        # (1 + tanh z) / 2 = sigmoid(2 z) with z = sqrt(2 / pi) (x + 0.044715 x^3)
        y = x * tl.sigmoid((x + 0.044715 * x * x * x) * TWICE_SQRT_2_OVER_PI)
    else:
        tl.static_assert(ACTIVATION == "relu")
        y = tl.where(x < 0, 0.0, x)
    return y
