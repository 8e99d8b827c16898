"""Rotary position embedding (Su et al., 2021) and the ways of stretching it whose angle depends on the position alone.

Variants whose frequencies depend on the length of the whole sequence (`dynamic`, `longrope`) are refused: keys already
in the cache would have to be rotated again as the sequence grows, and the result would depend on the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from moe_runtime.errors import ConfigError
from moe_runtime.layers.ops import TORCH_OPS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moe_runtime.layers.ops import LayerOps

LENGTH_DEPENDENT = "its frequencies depend on the sequence's length, which a KV cache cannot follow"
REFUSED_KINDS = {
    "dynamic": LENGTH_DEPENDENT,
    "longrope": LENGTH_DEPENDENT,
    "proportional": "these model families do not define it",
    "axial": "these model families do not define it",
}
REQUIRED_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
}


@dataclass(frozen=True)
class RopeSpec:
    """Parameters of one rotary embedding, named as in config.json's `rope_parameters`."""

    head_dim: int
    theta: float
    kind: str = "default"
    """`default`, `linear`, `llama3` or `yarn`."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin."""
    partial_rotary_factor: float = 1.0
    """Share of each head that turns: its first dimensions; the others pass unchanged."""
    interleaved: bool = False
    """Pairs are neighbours, (2i, 2i + 1), as in DeepSeek and GPT-J, instead of (i, i + rotary_dim / 2)."""

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that turn."""
        return int(self.head_dim * self.partial_rotary_factor)


class Rotation(NamedTuple):
    """How far each token turns, shared by all layers of a step."""

    cos: torch.Tensor
    """(T, 1, rotary_dim / 2)."""
    sin: torch.Tensor
    interleaved: bool = False
    """See RopeSpec."""


def parse_rope(parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> RopeSpec:
    """Read transformers 5's `rope_parameters` (already standardised from `rope_theta`/`rope_scaling`).

    Raises ConfigError naming the field for a variant or value that cannot be honoured.
    """
    kind = parameters.get("rope_type")
    if kind in REFUSED_KINDS:
        raise ConfigError(f"rope_type={kind!r} is not supported: {REFUSED_KINDS[kind]}")
    if kind not in REQUIRED_KEYS:
        raise ConfigError(f"rope_type={kind!r} is not supported; allowed are {', '.join(REQUIRED_KEYS)}")
    if parameters.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise ConfigError(
            f"partial_rotary_factor={parameters['partial_rotary_factor']!r} is not supported: these model families"
            " rotate whole heads; allowed is 1.0"
        )
    if head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} is odd: rotary embeddings need an even one")
    missing = [key for key in REQUIRED_KEYS[kind] if parameters.get(key) is None]
    if missing:
        raise ConfigError(f"rope_parameters of type {kind!r} lack {', '.join(missing)}")
    values = {
        key: parameters[key]
        for key in ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        if parameters.get(key) is not None
    }
    if kind == "yarn":
        values |= _parse_yarn(parameters, max_position_embeddings)
    spec = RopeSpec(head_dim=head_dim, theta=float(parameters["rope_theta"]), kind=kind, **values)
    for name, value in (("rope_theta", spec.theta), ("factor", spec.factor)):
        if not value > 0:
            raise ConfigError(f"rope_parameters: {name}={value!r}: must be larger than 0")
    if kind == "llama3" and not spec.low_freq_factor < spec.high_freq_factor:
        raise ConfigError(
            f"rope_parameters: low_freq_factor={spec.low_freq_factor!r} must be less than"
            f" high_freq_factor={spec.high_freq_factor!r}"
        )
    return spec


def _parse_yarn(parameters: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """Defaults of YaRN (Peng et al., 2023): attention factor 0.1 ln(s) + 1, betas 32 and 1."""
    factor = parameters.get("factor")
    if factor is None:
        factor = max_position_embeddings / parameters["original_max_position_embeddings"]

    def magnitude(multiplier: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        part, whole = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = magnitude(part) / magnitude(whole) if part and whole else magnitude()
    return {
        "factor": factor,
        "attention_factor": attention_factor,
        "beta_fast": parameters.get("beta_fast") or 32.0,
        "beta_slow": parameters.get("beta_slow") or 1.0,
        "truncate": parameters.get("truncate", True),
    }


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """(rotary_dim / 2,) float32 on the host: radians per position of each pair of dimensions."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(plain, spec)
    if spec.kind == "yarn":
        return _yarn(plain, spec)
    return plain


def _llama3(plain: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    turns = spec.original_max_position_embeddings / (2 * math.pi / plain)
    keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * plain / spec.factor + keep * plain


def _yarn(plain: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """YaRN, "NTK-by-parts": dimensions below `low` are kept, above `high` stretched, a linear ramp between."""

    def dimension(rotations: float) -> float:
        """The dimension that turns so many times within the original context."""
        ratio = spec.original_max_position_embeddings / (rotations * 2 * math.pi)
        return spec.rotary_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(spec.rotary_dim // 2, dtype=torch.float32)
    stretch = ((pairs - low) / (high - low)).clamp(0, 1)
    return plain / spec.factor * stretch + plain * (1 - stretch)


class RotaryEmbedding(nn.Module):
    """cos and sin for the positions of a step; computed once and shared by all layers.

    No table over positions is kept, so the context length costs no memory.
    """

    inv_freq: torch.Tensor

    def __init__(self, spec: RopeSpec, device: torch.device | str, ops: LayerOps = TORCH_OPS) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(spec).to(device), persistent=False)
        self.scale, self.interleaved, self.ops = spec.attention_factor, spec.interleaved, ops

    def forward(self, positions_T: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """positions_T: (T,) int64. cos and sin are computed in float32 and cast to `dtype`."""
        angles = positions_T[:, None].float() * self.inv_freq
        cos, sin = self.ops.elementwise(torch.cos, angles), self.ops.elementwise(torch.sin, angles)
        cos, sin = (cos * self.scale).to(dtype), (sin * self.scale).to(dtype)
        return Rotation(cos[:, None], sin[:, None], self.interleaved)


def rotate(
    x_THd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Turn pairs of each head's first rotary_dim dimensions by the token's angles; same shape and dtype as x_THd.

    The arguments after the first are those of a Rotation.
    """
    size = 2 * cos.shape[-1]
    turning, still = x_THd[..., :size], x_THd[..., size:]
    first, second = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        return torch.cat((torch.stack(turned, dim=-1).flatten(-2), still), dim=-1)
    return torch.cat((*turned, still), dim=-1)
