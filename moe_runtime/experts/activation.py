"""The activation functions of gated experts, by transformers' names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moe_runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


def _gelu_pytorch_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": _gelu_pytorch_tanh,
    "relu": functional.relu,
}


def get_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The elementwise function called `name`. Raises ConfigError on a name that is not in ACTIVATIONS."""
    problem = activation_problem(name)
    if problem is not None:
        raise ConfigError(problem)
    return ACTIVATIONS[name]


def activation_problem(name: str) -> str | None:
    """None for a known name, else what is wrong with it, for a kernel's `supports`."""
    if name in ACTIVATIONS:
        return None
    return f"expert activation {name!r} is not supported; allowed are {', '.join(ACTIVATIONS)}"
