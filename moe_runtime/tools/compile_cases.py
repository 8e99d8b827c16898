"""What the compile gate launches: every kernel in every form in which it is shipped, through its launcher.

A case calls a launcher as a step of a real model would. Tensors are on the CPU and uninitialised; nothing reads them, so large
ones cost no memory. To add a kernel, add its cases here and its budgets with `compile_check --update`.

Legend: T tokens, E experts, K experts per token, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from moe_runtime.attention.base import AttentionSpec
from moe_runtime.attention.kv_cache import KVCache
from moe_runtime.attention.triton_paged import TritonPagedAttention
from moe_runtime.core import DispatchPlan, ForwardBatch
from moe_runtime.dispatch import triton_grouping
from moe_runtime.dispatch.triton_one_sided import TritonOneSidedDispatcher
from moe_runtime.dispatch.triton_one_sided_network import NvshmemNetwork
from moe_runtime.dispatch.triton_one_sided_virtual import VirtualHeap
from moe_runtime.experts import triton_router
from moe_runtime.experts.router import RoutingMethod
from moe_runtime.layers.rope import Rotation
from moe_runtime.layers.triton_ops import TritonOps
from moe_runtime.quantization import FP8
from moe_runtime.tools.compile_expert_cases import expert_launches

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
    cases = [
        *router_cases(),
        *grouping_cases(),
        *[Case(name, launch) for name, launch in expert_launches()],
        *one_sided_cases(nvshmem or ""),
        *attention_cases(),
        *layer_cases(),
        *dense_cases(),
    ]
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


def one_sided_cases(library: str) -> list[Case]:
    """DeepSeek-V3 over eight ranks, with either way to combine; all of their memory is mapped, or half of it."""
    cases = []
    for combine in ("exact", "per_rank"):
        cases += [
            Case(f"one-sided {combine}", partial(_one_sided, combine, None)),
            Case(f"one-sided {combine} over NVSHMEM", partial(_one_sided, combine, library), True),
        ]
    return cases


def _one_sided(combine: str, library: str | None) -> None:
    T, K, D, num_ranks = 128, 8, 7168, 8
    heap = VirtualHeap(0, [torch.empty(64 << 20, dtype=torch.uint8)] * num_ranks)
    if library is not None:
        heap.addresses_N[num_ranks // 2 :] = 0
    dispatcher = TritonOneSidedDispatcher(
        heap,
        hidden_size=D,
        topk=K,
        dtype=BF16,
        step_timeout=300.0,
        is_alive=lambda rank: True,
        combine=combine,
        make_network=lambda part, layout: NvshmemNetwork(part, layout, library or ""),
    )
    plan = DispatchPlan(
        global_slot_TK=torch.empty(T, K, dtype=torch.int64),
        topk_weights_TK=torch.empty(T, K),
        slots_per_rank=32,
        num_ranks=num_ranks,
        rank=0,
        max_num_tokens=T,
    )
    batch = dispatcher.dispatch(torch.empty(T, D, dtype=BF16), plan).wait()
    dispatcher.combine(torch.empty(batch.row_index_S.shape[0], D, dtype=BF16), batch, plan).wait()


def attention_cases() -> list[Case]:
    """A step with a decoding sequence and a prompt: rotation, decode, merging, extend."""
    qwen = AttentionSpec(32, 4, 128, 128**-0.5)
    mixtral = AttentionSpec(32, 8, 128, 128**-0.5, sliding_window=4096)
    gpt_oss = AttentionSpec(64, 8, 64, 64**-0.5, sliding_window=128)
    gemma = AttentionSpec(16, 8, 256, 256**-0.5, logit_soft_cap=50.0)
    glm = AttentionSpec(96, 8, 128, 128**-0.5)
    return [
        Case("attention Qwen3-30B-A3B bf16", partial(_attention, qwen)),
        Case("attention Qwen3-30B-A3B fp16", partial(_attention, qwen, dtype=FP16)),
        Case("attention Qwen3-30B-A3B fp32", partial(_attention, qwen, dtype=FP32)),
        Case("attention Qwen3-30B-A3B fp8 cache", partial(_attention, qwen, cache_dtype=FP8)),
        Case("attention OLMoE bf16", partial(_attention, AttentionSpec(16, 16, 128, 128**-0.5))),
        Case("attention Mixtral-8x7B bf16", partial(_attention, mixtral)),
        Case("attention gpt-oss-120b bf16", partial(_attention, gpt_oss)),
        Case("attention Gemma-2 bf16", partial(_attention, gemma)),
        Case("attention GLM-4.5 bf16", partial(_attention, glm, pairs=32)),
        Case("attention interleaved bf16", partial(_attention, qwen, interleaved=True)),
        Case("attention Qwen3-30B-A3B deterministic", partial(_attention, qwen, deterministic=True)),
    ]


def _attention(
    spec: AttentionSpec,
    *,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    pairs: int | None = None,
    interleaved: bool = False,
    deterministic: bool = False,
) -> None:
    lens, totals = [1, 511], [4096, 2048]
    T, block_size, int32 = sum(lens), 16, torch.int32
    cache = KVCache.allocate([spec], 1024, block_size, cache_dtype or dtype, "cpu")
    backend = TritonPagedAttention(cache, [spec], deterministic)
    batch = ForwardBatch(
        input_ids_T=torch.empty(T, dtype=torch.int64),
        positions_T=torch.empty(T, dtype=torch.int64),
        slot_mapping_T=torch.empty(T, dtype=torch.int64),
        block_tables_BM=torch.empty(len(lens), max(totals) // block_size, dtype=int32),
        query_starts_B1=torch.empty(len(lens) + 1, dtype=int32),
        seq_lens_B=torch.empty(len(lens), dtype=int32),
        query_lens=lens,
        seq_lens=totals,
        logit_rows=torch.empty(len(lens), dtype=torch.int64),
        max_num_tokens=T,
    )
    angles = torch.empty(T, 1, pairs or spec.head_dim // 2, dtype=dtype)
    q, k, v = (
        torch.empty(T, heads, spec.head_dim, dtype=dtype)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    backend.run(q, k, v, Rotation(angles, angles, interleaved), 0, backend.plan(batch))


def layer_cases() -> list[Case]:
    """Norms over hidden states and heads, also with FP8 rows beside them, and the dense activation."""
    shapes = {
        "D=2048 bf16": (2048, BF16),
        "D=7168 bf16": (7168, BF16),
        "D=2048 fp16": (2048, FP16),
        "D=2048 fp32": (2048, FP32),
    }
    return [
        Case(f"layers {name}{what}", partial(launch, *shape))
        for what, launch in (("", _layers), (" with fp8 rows", _packed_norm))
        for name, shape in shapes.items()
    ]


def _layers(hidden: int, dtype: torch.dtype) -> None:
    ops, tokens = TritonOps(), 64
    x, weight = torch.empty(tokens, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    ops.add_rms_norm(x, x, weight, 1e-6)
    ops.rms_norm(x, weight, 1e-6)
    ops.rms_norm(x.view(tokens, hidden // 128, 128), weight[:128], 1e-6)
    ops.gated_activation(x, "silu")


def _packed_norm(hidden: int, dtype: torch.dtype) -> None:
    x = torch.empty(64, hidden, dtype=dtype)
    TritonOps().add_rms_norm_packed(x, x, torch.empty(hidden, dtype=dtype), 1e-6)


def dense_cases() -> list[Case]:
    """Dense products under --deterministic: tiles for many and few outputs, and a gate's one."""
    weights = {
        "qkv 5120 x 2048 bf16": (5120, 2048, BF16),
        "head 151936 x 2048 bf16": (151936, 2048, BF16),
        "gate 1 x 2048 bf16": (1, 2048, BF16),
        "out 2048 x 2880 bf16": (2048, 2880, BF16),
        "qkv 5120 x 2048 fp16": (5120, 2048, FP16),
        "qkv 5120 x 2048 fp32": (5120, 2048, FP32),
    }
    return [Case(f"dense {name}", partial(_dense, *weight)) for name, weight in weights.items()]


def _dense(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    weight, bias = torch.empty(num_out, num_in, dtype=dtype), torch.empty(num_out, dtype=dtype)
    TritonOps(deterministic=True).linear(torch.empty(64, num_in, dtype=dtype), weight, bias)
