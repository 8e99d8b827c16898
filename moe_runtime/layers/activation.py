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


def get_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The elementwise function of that name. Raises ConfigError listing the names known."""
    problem = activation_problem(name)
    if problem is not None:
        raise ConfigError(problem)
    return ACTIVATIONS[name]


def activation_problem(name: str) -> str | None:
    """None for a known name, else what is wrong with it, for a kernel's `supports`."""
    if name in ACTIVATIONS:
        return None
    return f"hidden_act={name!r} is not supported; allowed are {', '.join(ACTIVATIONS)}"
