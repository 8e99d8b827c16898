"""What the compile gate launches: every kernel in every form in which it is shipped, through its launcher.

A case calls a launcher as a step of a real model would. Tensors are on the CPU and uninitialised; nothing reads them, so large
ones cost no memory. To add a kernel, add its cases here and its budgets with `compile_check --update`.

Legend: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from moe_runtime.dispatch import triton_grouping
from moe_runtime.experts import triton_router
from moe_runtime.experts.router import RoutingMethod

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """Something to launch."""

    name: str
    """Unique; the key of its budgets."""
    launch: Callable[[], object]
    needs_nvshmem: bool = False


def all_cases(nvshmem: str | None) -> list[Case]:
    """Every case. `nvshmem`: path of NVSHMEM's device library; None if those that need it will not be launched."""
    cases = [*router_cases(), *grouping_cases(), *nvshmem_cases(nvshmem or "")]
    assert len({case.name for case in cases}) == len(cases)
    return cases


def router_cases() -> list[Case]:
    """A model each for what the kernel distinguishes: score, groups, number of experts, type of the logits."""
    renormalized = RoutingMethod(8, renormalize=True)
    deepseek_v3 = RoutingMethod(
        8,
        "sigmoid",
        renormalize=True,
        eps=1e-20,
        scale=2.5,
        num_groups=8,
        top_groups=4,
        group_score="top2_sum",
    )
    models: dict[str, tuple[int, RoutingMethod, torch.dtype, bool]] = {
        "Qwen3-30B-A3B": (128, renormalized, BF16, False),
        "Mixtral-8x7B": (8, RoutingMethod(2, renormalize=True), BF16, False),
        "OLMoE": (64, RoutingMethod(8), BF16, False),
        "gpt-oss-120b": (128, RoutingMethod(4, "softmax_of_chosen"), BF16, False),
        "Llama-4-Maverick": (128, RoutingMethod(1, "sigmoid_of_chosen"), BF16, False),
        "DeepSeek-V2": (160, RoutingMethod(6, scale=16.0, num_groups=8, top_groups=3), FP32, False),
        "DeepSeek-V3": (256, deepseek_v3, FP32, True),
        "Kimi-K2": (384, RoutingMethod(8, "sigmoid", renormalize=True, eps=1e-20, scale=2.8), FP32, True),
        "DeepSeek-V4": (
            256,
            RoutingMethod(6, "sqrt_softplus", renormalize=True, eps=1e-20, scale=1.5),
            FP32,
            True,
        ),
        "LongCat-Flash": (768, RoutingMethod(12, scale=6.0), FP32, True),
    }
    return [Case(f"router {name}", partial(_route, *model)) for name, model in models.items()]


def _route(num_experts: int, method: RoutingMethod, dtype: torch.dtype, biased: bool) -> None:
    bias = torch.empty(num_experts) if biased else None
    triton_router.route(torch.empty(64, num_experts, dtype=dtype), method, bias, dtype)


def grouping_cases() -> list[Case]:
    """Both block sizes."""
    return [
        Case(f"grouping {what}", partial(_group, num_tokens))
        for what, num_tokens in (("decode", 64), ("prefill", 4096))
    ]


def _group(num_tokens: int) -> None:
    triton_grouping.group_pairs(torch.empty(num_tokens, 8, dtype=torch.int64), 32)


def nvshmem_cases(library: str) -> list[Case]:
    """Device calls of NVSHMEM, linked with its device library."""
    from moe_runtime.tools import nvshmem_probe

    return [Case("nvshmem put and signal", partial(nvshmem_probe.put_and_signal, library), True)]
