"""Activation functions by the names transformers uses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch.nn import functional as F

from moe_runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The elementwise function of that name. Raises ConfigError listing the names known."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act={name!r} is not supported; allowed are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
