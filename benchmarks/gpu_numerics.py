"""Stage 1 of gpu_check: attention, layer operations, routing and a whole decoder, against their references.

References run on the same device unless a check says otherwise; each check yields a row per case.
Legend: T tokens, p slots.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_cases import BF16, STEP, Env, close, same

Rows = Iterator[dict[str, Any]]


def attention(env: Env) -> Rows:
    """Decode, prefill and both, cached prefixes; head shapes, windows, soft cap, an FP8 cache."""
    from moe_runtime.attention.base import AttentionSpec
    from moe_runtime.quantization import FP8

    far = 70 if env.small else 1500
    spans = [(far, 1), (0, 21), (far // 2, 9), (0, 1), (15, 1)]
    full = AttentionSpec(8, 2, 16, 0.25) if env.small else AttentionSpec(32, 4, 128, 128**-0.5)
    odd = AttentionSpec(6, 2, 20, 0.2, sliding_window=33, logit_soft_cap=5.0)
    for what, spec, dtype, cache in (
        ("full bf16", full, BF16, BF16),
        ("full float16", full, torch.float16, torch.float16),
        ("full float32", full, torch.float32, torch.float32),
        ("full bf16, fp8 cache", full, BF16, FP8),
        ("window and soft cap, bf16", odd, BF16, BF16),
        ("window, bf16", replace(full, sliding_window=16), BF16, BF16),
        (
            "heads of 256, bf16",
            replace(full, num_heads=4, num_kv_heads=4, head_dim=64 if env.small else 256),
            BF16,
            BF16,
        ),
    ):
        for deterministic in (False, True):
            yield _attention(
                env, what + ", deterministic" * deterministic, spec, dtype, cache, spans, deterministic
            )


def _attention(
    env: Env,
    what: str,
    spec: Any,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    spans: list[tuple[int, int]],
    deterministic: bool,
) -> dict[str, Any]:
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.attention.reference import ReferenceAttention
    from moe_runtime.attention.triton_paged import TritonPagedAttention

    size, device = 16, env.device
    batch, num_blocks = paged_batch(spans, size, device)
    caches = [KVCache.allocate([spec], num_blocks, size, cache_dtype, device) for _ in range(2)]
    keys, values = (
        torch.randn(c.shape, device=device).to(cache_dtype) for c in (caches[0].keys[0], caches[0].values[0])
    )
    for cache in caches:
        cache.keys[0].copy_(keys)
        cache.values[0].copy_(values)
    heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    q, k, v = (torch.randn(batch.num_tokens, h, spec.head_dim, device=device).to(dtype) for h in heads)
    rotation = _rotation(spec.head_dim, batch.positions_T, dtype, device)
    ours, theirs = (
        TritonPagedAttention(caches[0], [spec], deterministic),
        ReferenceAttention(caches[1], [spec]),
    )
    outs = [b.run(q, k, v, rotation, 0, b.plan(batch)) for b in (ours, theirs)]
    tolerance = 3e-5 if dtype == torch.float32 else 2e-2
    for i, name in enumerate(("keys", "values")):
        written = [(c.keys, c.values)[i][0].float() for c in caches]
        # An FP8 step is an eighth: a rotated key next to a tie may round the other way.
        close(f"{what}: {name} written", *written, 0.13 if cache_dtype.itemsize == 1 else tolerance)
    return close(what, *outs, 5e-2 if cache_dtype.itemsize == 1 else tolerance)


def _rotation(head_dim: int, positions_T: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Any:
    from moe_runtime.layers.rope import RopeSpec, RotaryEmbedding

    rope = RopeSpec(head_dim, 10_000.0, partial_rotary_factor=0.5, interleaved=True)
    return RotaryEmbedding(rope, device)(positions_T, dtype)


def paged_batch(spans: list[tuple[int, int]], size: int, device: torch.device) -> tuple[Any, int]:
    """A ForwardBatch for sequences of (tokens cached, new tokens) in scattered blocks, and the number of blocks.

    Token ids are 0, logits are wanted of each sequence's last row.
    """
    from moe_runtime.core import ForwardBatch

    needed = [-(-(old + new) // size) for old, new in spans]
    order = random.Random(0).sample(range(sum(needed) + 3), sum(needed))
    tables = [[order.pop() for _ in range(n)] for n in needed]
    positions = [range(old, old + new) for old, new in spans]
    slots = [
        table[i // size] * size + i % size
        for table, rows in zip(tables, positions, strict=True)
        for i in rows
    ]
    new, total = [n for _, n in spans], [old + n for old, n in spans]
    starts = torch.tensor([0, *new], device=device).cumsum(0)
    batch = ForwardBatch(
        input_ids_T=torch.zeros(sum(new), dtype=torch.int64, device=device),
        positions_T=torch.tensor([i for rows in positions for i in rows], device=device),
        slot_mapping_T=torch.tensor(slots, device=device),
        block_tables_BM=torch.tensor(
            [t + [0] * (max(needed) - len(t)) for t in tables], dtype=torch.int32, device=device
        ),
        query_starts_B1=starts.int(),
        seq_lens_B=torch.tensor(total, dtype=torch.int32, device=device),
        query_lens=new,
        seq_lens=total,
        logit_rows=starts[1:] - 1,
        max_num_tokens=sum(new),
    )
    return batch, sum(needed) + 3


def layer_operations(env: Env) -> Rows:
    """Norms with and without a residual, rows to FP8, deterministic products, gated activations."""
    from moe_runtime.layers.activation import ACTIVATIONS
    from moe_runtime.layers.invariant import row_dependence
    from moe_runtime.layers.ops import TORCH_OPS
    from moe_runtime.layers.triton_ops import TritonOps
    from moe_runtime.quantization import pack_rows

    ops, invariant = TritonOps(), TritonOps(deterministic=True)
    for dtype in STEP:
        for tokens, hidden in (
            ((1, 1), (9, 130), (3, 2100)) if env.small else ((1, 1), (9, 130), (4096, 2048), (300, 7168))
        ):
            x, delta = (torch.randn(tokens, hidden, device=env.device).to(dtype) for _ in range(2))
            weight, what = torch.randn(hidden, device=env.device).to(dtype), f"{dtype} {tokens} x {hidden}"
            total, normed = ops.add_rms_norm(x, delta, weight, 1e-6)
            expected_total, expected = TORCH_OPS.add_rms_norm(x, delta, weight, 1e-6)
            yield same(f"add {what}", total, expected_total)
            yield close(f"add_rms_norm {what}", normed, expected, STEP[dtype])
            yield close(
                f"rms_norm {what}",
                ops.rms_norm(x, weight, 1e-6),
                TORCH_OPS.rms_norm(x, weight, 1e-6),
                STEP[dtype],
            )
            packing = ops.add_rms_norm_packed(x, delta, weight, 1e-6)
            yield same(f"norm with FP8 rows {what}", torch.cat(packing[:2]), torch.cat((total, normed)))
            yield same(f"its FP8 rows {what}", packing[2], pack_rows(packing[1]))
        for num_in, num_out in (
            ((130, 70), (64, 1)) if env.small else ((2048, 5120), (2880, 1), (2048, 151936))
        ):
            x = torch.randn(200, num_in, device=env.device).to(dtype)
            weight = (torch.randn(num_out, num_in, device=env.device) / num_in**0.5).to(dtype)
            what = f"{dtype} {num_in} to {num_out}"
            exact = (x.double() @ weight.double().t()).to(dtype)
            yield close(f"deterministic product {what}", invariant.linear(x, weight), exact, 4 * STEP[dtype])
            problem = row_dependence(invariant.linear, weight)
            assert problem is None, problem
        for activation in ACTIVATIONS:
            gate_up = 4 * torch.randn(7, 140, device=env.device).to(dtype)
            ours, expected = (o.gated_activation(gate_up, activation) for o in (ops, TORCH_OPS))
            yield close(f"{activation} {dtype}", ours, expected, 2 * STEP[dtype])


def router(env: Env) -> Rows:
    """Every routing method; ties go to the lower expert."""
    from moe_runtime.experts.router import RoutingMethod
    from moe_runtime.experts.router import route as reference
    from moe_runtime.experts.triton_router import route

    grouped = {"num_groups": 8, "top_groups": 4}
    methods = {
        "default": (RoutingMethod(8), 64, False),
        "renormalize": (RoutingMethod(4, "softmax_of_chosen"), 128, False),
        "qwen3": (RoutingMethod(8, renormalize=True), 128, False),
        "deepseek v3": (
            RoutingMethod(8, "sigmoid", True, 1e-20, 2.5, **grouped, group_score="top2_sum"),
            256,
            True,
        ),
        "deepseek v2": (RoutingMethod(6, "softmax", scale=16.0, **grouped), 160, False),
        "llama4": (RoutingMethod(1, "sigmoid_of_chosen"), 16, False),
        "minimax": (RoutingMethod(8, "sigmoid", True, 1e-20), 256, True),
        "deepseek v4": (RoutingMethod(6, "sqrt_softplus", True, 1e-20, 1.5), 384, True),
        "zero experts": (RoutingMethod(12, scale=6.0), 768, True),
    }
    for name, (method, experts, biased) in methods.items():
        for tokens in (1, 37) if env.small else (1, 37, 4096):
            logits = 2 * torch.randn(tokens, experts, device=env.device)
            bias = 0.1 * torch.randn(experts, device=env.device) if biased else None
            ours, expected = route(logits, method, bias), reference(logits, method, bias)
            equal_T = (ours.topk_ids_TK == expected.topk_ids_TK).all(1)
            # Scores closer than float32's rounding may change places; that is rare.
            differ = int((~equal_T).sum())
            assert differ <= tokens / 100, f"{name}: {differ} of {tokens} tokens chose other experts"
            pair = ours.topk_weights_TK[equal_T], expected.topk_weights_TK[equal_T]
            yield close(f"{name} T={tokens}", *pair, 1e-5) | {"ties": differ}
        tied = torch.randint(-1, 2, (13, experts), device=env.device).float()
        yield same(
            f"{name}, equal scores", route(tied, method).topk_ids_TK, reference(tied, method).topk_ids_TK
        )


def grouping(env: Env) -> Rows:
    """Pairs ordered by slot, one hot slot, some without a slot."""
    from moe_runtime.dispatch.grouping import group_pairs as reference
    from moe_runtime.dispatch.triton_grouping import group_pairs

    for tokens, slots in (
        ((0, 4), (1, 4), (33, 7)) if env.small else ((0, 4), (1, 4), (33, 7), (700, 128), (16384, 256))
    ):
        slot_TK = torch.randint(-1, slots, (tokens, 8), device=env.device)
        slot_TK[tokens // 2 :, 0] = slots - 1
        ours, expected = group_pairs(slot_TK, slots), reference(slot_TK, slots)
        for field in ("pair_S", "position_TK", "num_rows_p"):
            yield same(f"T={tokens} p={slots} {field}", getattr(ours, field), getattr(expected, field))


def model_parity(env: Env) -> Rows:
    """A small decoder with all kernels, against the same one with the CPU's: logits of a prefill and of a decode step."""
    from benchmarks.gpu_model import small_model

    cpu, lengths = torch.device("cpu"), (23, 5, 9, 1, 14, 3, 7)
    spans = {"prefill": [(0, n) for n in lengths], "decode": [(n, 1) for n in lengths]}
    exact = small_model(cpu, torch.float32, triton=False)
    ours = small_model(env.device, torch.float32, triton=True)
    for what, step in spans.items():
        yield close(f"float32 {what}", ours.step(step).cpu(), exact.step(step), 5e-4)
    exact = small_model(cpu, torch.float32, triton=False, round_to=BF16)
    theirs, ours = small_model(cpu, BF16, triton=False), small_model(env.device, BF16, triton=True)
    for what, step in spans.items():
        expected = exact.step(step)
        errors = [_median_error(model.step(step).cpu(), expected) for model in (ours, theirs)]
        allowed = 0.01 + 2 * errors[1]
        assert errors[0] <= allowed, f"bfloat16 {what}: median error {errors[0]:.3g}, {allowed:.3g} allowed"
        yield {"case": f"bfloat16 {what}", "error": errors[0], "allowed": allowed}


def _median_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Over the sequences, relative to each one's logits. In bf16 a router makes much of rounding in single ones."""
    assert not ours.isnan().any()
    return float(((ours - expected).norm(dim=1) / expected.norm(dim=1)).median())
