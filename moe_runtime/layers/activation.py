"""Activation functions by the names transformers uses, and the gated forms that experts have."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from moe_runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

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


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


UNGATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu2": _relu_squared}
"""Experts without a gate: y = down(act(up x)). relu2 is the squared ReLU of Primer (So et al., 2021), as in Nemotron."""
SWIGLU_OAI = "swiglu_oai"
"""gate * sigmoid(1.702 gate) * (up + 1), both cut to `limit` first, as in gpt-oss."""
SWIGLU_OAI_ALPHA = 1.702


def is_gated(name: str) -> bool:
    """Whether an expert with this activation has a gate beside its up projection."""
    return name not in UNGATED


def expert_activation_problem(name: str) -> str | None:
    """None for a name that `expert_activation` knows, else what is wrong with it."""
    return None if name in UNGATED or name == SWIGLU_OAI else activation_problem(name)


def expert_activation(name: str, limit: float | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """From (..., 2F), gate then up, or (..., F) if ungated, to (..., F): act(gate) * up.

    limit: gate is cut above it and up to [-limit, limit] first (DeepSeek-V4, gpt-oss). Raises ConfigError on an unknown name.
    """
    problem = expert_activation_problem(name)
    if problem is not None:
        raise ConfigError(problem)
    if name in UNGATED:
        return UNGATED[name]

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if name == SWIGLU_OAI:
            return gate * torch.sigmoid(SWIGLU_OAI_ALPHA * gate) * (up + 1)
        return ACTIVATIONS[name](gate) * up

    return gated
