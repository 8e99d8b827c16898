"""The attention seam: causal attention of new tokens over a paged KV cache.

Legend: T tokens, H query heads, G KV heads, d head size, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moe_runtime.core import ForwardBatch
from moe_runtime.layers.rope import Rotation


@dataclass(frozen=True)
class AttentionSpec:
    """Shape and variant of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    """Each token sees this many tokens, itself included; None: all before it."""
    logit_soft_cap: float | None = None
    """Scores s become cap * tanh(s / cap), as in Gemma 2 and Grok; None: they stay as they are."""


@dataclass(frozen=True)
class AttentionNeed:
    """What a backend is asked to support."""

    device_type: str
    dtype: torch.dtype
    """Of queries, keys and values."""
    layers: tuple[AttentionSpec, ...]
    cache_dtype: torch.dtype
    """Of the KV cache: `dtype`, or float8_e4m3fn."""


def heads_problem(layers: tuple[AttentionSpec, ...]) -> str | None:
    """Why query heads cannot share KV heads evenly, or None; for a backend's `supports`."""
    for spec in layers:
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads are not a multiple of {spec.num_kv_heads} KV heads"
    return None


class AttentionBackend(Protocol):
    """Owns no state but the KV cache it was given; `plan` once per step on the host, `run` once per layer."""

    name: str

    def plan(self, batch: ForwardBatch) -> Any:
        """Host work shared by all layers; the result is passed to each run()."""
        ...

    def run(
        self,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGd: torch.Tensor,
        rotation: Rotation,
        layer: int,
        plan: Any,
    ) -> torch.Tensor:
        """Rotate q and k, write k and v at the batch's slots, attend, and return (T, H, d). T may be 0."""
        ...
