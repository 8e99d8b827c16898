"""Choosing an implementation: the first that can, with the reasons of the others; what is asked for, or an error."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from moe_runtime.backends import choose, choose_dense_weights, invariant_only
from moe_runtime.config import EngineConfig
from moe_runtime.errors import BackendUnavailable
from moe_runtime.layers.deterministic_ops import DeterministicOps
from moe_runtime.layers.invariant import Workers
from moe_runtime.layers.ops import TORCH_OPS
from moe_runtime.layers.triton_ops import TritonOps
from moe_runtime.models.mixtral import MixtralAdapter
from moe_runtime.models.quantized import with_weight_schemes
from tests.helpers.tiny_models import tiny_config

REASONS = {"fast": "needs a GPU", "plain": None, "slow": None}


def test_auto_takes_the_first_that_can_and_says_why_not_the_others(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choice = choose("thing", "auto", REASONS, log=True)
    assert (choice.what, choice.name) == ("thing", "plain")
    assert choice.why == "auto; not fast: needs a GPU; not slow: slower than plain"
    assert caplog.messages == [f"thing: plain ({choice.why})"]


def test_what_is_asked_for_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose("thing", "slow", REASONS, log=False)[1:] == ("slow", "asked for")
    assert not caplog.messages, "one rank speaks for all"


def test_what_cannot_be_is_an_error_with_the_reason() -> None:
    with pytest.raises(BackendUnavailable, match=r"^thing 'fast' cannot be used: needs a GPU$"):
        choose("thing", "fast", REASONS, log=True)
    with pytest.raises(BackendUnavailable, match="no thing can be used: a: x; b: y"):
        choose("thing", "auto", {"a": "x", "b": "y"}, log=True)


def test_deterministic_takes_what_is_invariant_and_refuses_the_rest() -> None:
    """Triton's interpreter, which can serve as well, is thousands of times slower: it comes after."""
    config = EngineConfig(model="demo", deterministic=True)
    reasons = {"cpu": None, "triton": None, "deterministic": None}
    allowed = invariant_only(reasons, config, "deterministic", "triton")
    assert choose("thing", "auto", allowed, log=False).name == "deterministic"
    assert choose("thing", "triton", allowed, log=False).name == "triton"
    with pytest.raises(
        BackendUnavailable, match="with --deterministic allowed are auto, deterministic, triton"
    ):
        choose("thing", "cpu", allowed, log=False)
    on_gpu = invariant_only(reasons | {"deterministic": "runs on cpu"}, config, "deterministic", "triton")
    assert choose("thing", "auto", on_gpu, log=False).name == "triton"
    plain = EngineConfig(model="demo")
    assert choose("thing", "auto", invariant_only(reasons, plain, "deterministic"), log=False).name == "cpu"


def test_dense_layers_are_quantised_where_the_layers_can(caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config("mixtral", 0)
    spec = MixtralAdapter().spec(config)
    assert choose_dense_weights(spec, TORCH_OPS, torch.bfloat16, log=True) == (spec, [])
    asked = with_weight_schemes(spec, "int8")
    kept, (choice,) = choose_dense_weights(asked, TORCH_OPS, torch.bfloat16, log=True)
    assert (kept, choice) == (asked, ("dense_weights", "int8_channel", "asked for"))
    for ops in (DeterministicOps(Workers(1)), TritonOps()):
        kept, (choice,) = choose_dense_weights(asked, ops, torch.bfloat16, log=True)
        assert (kept.expert_scheme, kept.dense_scheme) == (asked.expert_scheme, None)
        assert choice[1:] == ("bfloat16", f"layer_backend {ops.name} has no int8 products")
    tied = dataclasses.replace(asked, tie_word_embeddings=True)
    _, (choice,) = choose_dense_weights(tied, TORCH_OPS, torch.bfloat16, log=False)
    assert choice.why == "asked for but for the head, which is the embedding"
