"""Rotary embedding against transformers' functions, the definition, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from transformers import Glm4MoeConfig, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding, apply_rotary_pos_emb

from moe_runtime.errors import ConfigError
from moe_runtime.layers.rope import RopeSpec, RotaryEmbedding, inverse_frequencies, parse_rope, rotate


def draw_parameters(kind: str, draw: random.Random) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice([100.0, 1e4, 1e6])}
    if kind != "default":
        values["factor"] = draw.uniform(1.0, 16.0)
    if kind in ("yarn", "llama3"):
        values["original_max_position_embeddings"] = draw.choice([32, 512, 8192])
    if kind == "llama3":
        values |= {"low_freq_factor": draw.uniform(0.5, 2), "high_freq_factor": draw.uniform(3, 8)}
    if kind == "yarn":
        optional = {
            "beta_fast": draw.uniform(8, 40),
            "beta_slow": draw.uniform(0.5, 2),
            "truncate": draw.random() < 0.5,
            "mscale": draw.uniform(0.5, 1.5),
            "mscale_all_dim": draw.uniform(0.5, 1.5),
        }
        values |= {k: v for k, v in optional.items() if draw.random() < 0.5}
        if draw.random() < 0.3:
            values["attention_factor"] = draw.uniform(0.5, 2)
    return values


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_frequencies_match_transformers(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        head_dim, parameters = draw.choice([8, 32, 128]), draw_parameters(kind, draw)
        config = Qwen3MoeConfig(
            head_dim=head_dim, max_position_embeddings=65536, rope_parameters=dict(parameters)
        )
        expected, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        spec = parse_rope(config.rope_parameters, head_dim, 65536)
        torch.testing.assert_close(inverse_frequencies(spec), expected, rtol=1e-6, atol=0)
        assert spec.attention_factor == pytest.approx(scale, rel=1e-9)


def test_yarn_factor_from_context_lengths() -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": None,
        "original_max_position_embeddings": 64,
    }
    assert parse_rope(parameters, 16, 512).factor == 8.0


def test_rotation_is_the_definition(seed: int) -> None:
    """Pair (i, i + d/2) turns by position * theta^(-2i/d)."""
    head_dim, theta = 12, 50.0
    positions = torch.tensor([0, 1, 7, 1000])
    x = torch.randn(4, 3, head_dim)
    spec = parse_rope({"rope_type": "default", "rope_theta": theta}, head_dim, 2048)
    turned = rotate(x, *RotaryEmbedding(spec, "cpu")(positions, torch.float32))
    for row, position in enumerate(positions.tolist()):
        for i in range(head_dim // 2):
            angle = position * theta ** (-2 * i / head_dim)
            a, b = x[row, :, i], x[row, :, i + head_dim // 2]
            expected = a * math.cos(angle) - b * math.sin(angle)
            torch.testing.assert_close(turned[row, :, i], expected, rtol=1e-4, atol=2e-4)
            expected = b * math.cos(angle) + a * math.sin(angle)
            torch.testing.assert_close(turned[row, :, i + head_dim // 2], expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3])
def test_interleaved_pairs_turn_as_complex_numbers(share: float, seed: int) -> None:
    positions, x = torch.tensor([0, 1, 7, 1000]), torch.randn(4, 3, 20)
    spec = RopeSpec(20, 50.0, partial_rotary_factor=share, interleaved=True)
    turned = rotate(x, *RotaryEmbedding(spec, "cpu")(positions, torch.float32))
    size = {1.0: 20, 0.5: 10, 0.3: 6}[share]
    angle = positions.double()[:, None, None] * 50.0 ** (-torch.arange(0, size, 2).double() / size)
    pairs = torch.view_as_complex(x[..., :size].double().unflatten(-1, (-1, 2)).contiguous())
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    torch.testing.assert_close(turned[..., :size].double(), expected, rtol=1e-4, atol=2e-4)
    assert torch.equal(turned[..., size:], x[..., size:])


@pytest.mark.parametrize("kind", ["default", "yarn", "llama3"])
def test_partial_rotation_matches_transformers(kind: str, seed: int) -> None:
    parameters = draw_parameters(kind, random.Random(seed)) | {"partial_rotary_factor": 0.5}
    config = Glm4MoeConfig(head_dim=24, max_position_embeddings=65536, rope_parameters=dict(parameters))
    theirs = Glm4MoeRotaryEmbedding(config)
    positions, x = torch.tensor([[0, 3, 900]]), torch.randn(3, 2, 24)
    expected, _ = apply_rotary_pos_emb(*[x.transpose(0, 1)[None]] * 2, *theirs(x, positions))
    whole = {k: v for k, v in parameters.items() if k != "partial_rotary_factor"}
    spec = dataclasses.replace(parse_rope(whole, 24, 65536), partial_rotary_factor=0.5)
    turned = rotate(x, *RotaryEmbedding(spec, "cpu")(positions[0], torch.float32))
    torch.testing.assert_close(turned, expected[0].transpose(0, 1), rtol=1e-4, atol=2e-4)


def test_angle_depends_on_the_position_alone(seed: int) -> None:
    spec = parse_rope({"rope_type": "default", "rope_theta": 1e4}, 8, 64)
    rope = RotaryEmbedding(spec, "cpu")
    together = rope(torch.tensor([5, 3, 900]), torch.float32)
    alone = rope(torch.tensor([3]), torch.float32)
    assert torch.equal(together[0][1], alone[0][0])
    assert torch.equal(together[1][1], alone[1][0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "longrope"),
        ({"rope_type": "proportional"}, "proportional"),
        ({"rope_type": "unheard_of"}, "unheard_of"),
        ({"rope_type": None}, "rope_type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.0}, "factor"),
        ({"rope_theta": -1.0}, "rope_theta"),
        (
            {
                "rope_type": "llama3",
                "factor": 2.0,
                "original_max_position_embeddings": 8,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
            },
            "low_freq_factor",
        ),
    ],
)
def test_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_rope({"rope_type": "default", "rope_theta": 1e4} | change, 8, 64)


def test_odd_head() -> None:
    with pytest.raises(ConfigError, match="head_dim=7"):
        parse_rope({"rope_type": "default", "rope_theta": 1e4}, 7, 64)
