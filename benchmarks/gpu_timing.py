"""Stage 2 of gpu_check: how fast the kernels are, against torch and against what this GPU reached in the same run.

Times are medians, of replayed graphs where both sides can be captured, so that launching from Python does not count.
`of_roofline` is the time that moving the bytes or computing the products would take at the measured rates, over the time taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_cases import BF16, Env, Skip, expert_weights, routed_batch
from benchmarks.gpu_cases import close as check_close
from moe_runtime.core import ExpertBatch
from moe_runtime.experts.base import ExpertWeights
from moe_runtime.experts.triton_grouped import TritonExperts
from moe_runtime.quantization import FP8, FP8_BLOCK, QuantScheme

Rows = Iterator[dict[str, Any]]
PREFILL_ROWS = 512
"""Rows per expert from which a product should be as fast as a dense one."""
PREFILL_TARGET, DECODE_TARGET = 0.80, 0.75


def time_ms(env: Env, function: Callable[[], Any]) -> tuple[float, str]:
    """Median milliseconds and how they were taken: `graph` or `eager`. `host` without a GPU: a rehearsal, not a measurement."""
    if env.device.type != "cuda":
        import time

        began = time.perf_counter()
        function()
        return (time.perf_counter() - began) * 1e3, "host"
    from triton import testing

    function()
    torch.cuda.synchronize()
    try:
        return testing.do_bench_cudagraph(function, rep=20, return_mode="median"), "graph"
    except RuntimeError:
        torch.cuda.synchronize()
        return testing.do_bench(function, warmup=5, rep=25, return_mode="median"), "eager"


def roofline(env: Env) -> Rows:
    """Dense bf16 and FP8 products, and copying memory."""
    n = 64 if env.small else 8192
    a, b = torch.randn(2, n, n, device=env.device, dtype=BF16)
    ms, how = time_ms(env, lambda: a @ b)
    yield {"what": "bf16 product", "n": n, "ms": ms, "how": how, "tflops": 2e-9 * n**3 / ms}
    if env.device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        a8, b8, one = a.to(FP8), b.to(FP8).t(), torch.ones((), device=env.device)
        ms, how = time_ms(
            env, lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=BF16, use_fast_accum=True)
        )
        yield {"what": "fp8 product", "n": n, "ms": ms, "how": how, "tflops": 2e-9 * n**3 / ms}
    source = torch.zeros(1 << (16 if env.small else 30), dtype=torch.uint8, device=env.device)
    target = torch.empty_like(source)
    ms, how = time_ms(env, lambda: target.copy_(source))
    yield {"what": "copy", "n": source.numel(), "ms": ms, "how": how, "tb_per_s": 2e-9 * source.numel() / ms}


@dataclass(frozen=True)
class Rates:
    """Of this GPU, measured: products per millisecond and bytes per millisecond."""

    flops: float
    bytes: float

    @classmethod
    def of(cls, env: Env, fp8: bool) -> Rates:
        """Raises Skip unless the roofline has been measured in this run."""
        known = {row["what"]: row for row in env.known}
        product = known.get("fp8 product" if fp8 else "bf16 product") or known.get("bf16 product")
        if product is None or "copy" not in known:
            raise Skip("needs the check `roofline` in the same run")
        return cls(product["tflops"] * 1e9, known["copy"]["tb_per_s"] * 1e9)

    def least_ms(self, flops: float, num_bytes: float) -> float:
        """The longer of computing and moving."""
        return max(flops / self.flops, num_bytes / self.bytes)


@dataclass(frozen=True)
class Model:
    """Experts as one rank has them."""

    experts: int
    slots: int
    top_k: int
    hidden: int
    inner: int

    @property
    def ranks(self) -> int:
        """Over which the experts are spread."""
        return self.experts // self.slots


QWEN3 = Model(experts=128, slots=128, top_k=8, hidden=2048, inner=768)
DEEPSEEK_EP8 = Model(experts=256, slots=32, top_k=8, hidden=7168, inner=2048)
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 16384)


def qwen3_bf16(env: Env) -> Rows:
    """Qwen3-30B-A3B with all experts on this GPU."""
    yield from _grouped(env, QWEN3, None)


def qwen3_fp8(env: Env) -> Rows:
    """The same in FP8 with block scales."""
    yield from _grouped(env, QWEN3, FP8_BLOCK)


def deepseek_bf16(env: Env) -> Rows:
    """DeepSeek-V3, the experts and the tokens of one of eight ranks; tokens are counted per rank."""
    yield from _grouped(env, DEEPSEEK_EP8, None)


def deepseek_fp8(env: Env) -> Rows:
    """The same in FP8 with block scales."""
    yield from _grouped(env, DEEPSEEK_EP8, FP8_BLOCK)


def _grouped(env: Env, model: Model, scheme: QuantScheme | None) -> Rows:
    rates = Rates.of(env, scheme is not None)
    if env.small:
        model = Model(model.experts // 16, max(1, model.slots // 16), 2, 128, 64)
    weights = expert_weights(
        env.device, model.slots, model.hidden, model.inner, BF16, scheme, scheme is not None
    )
    peers = None if scheme else _Peers(weights)
    for tokens in (1, 8) if env.small else TOKENS:
        all_tokens = tokens * model.ranks
        batch = routed_batch(env.device, all_tokens, model.top_k, model.experts, model.slots, model.hidden)
        yield _time_experts(env, weights, batch, peers, rates, tokens)


def _time_experts(
    env: Env, weights: ExpertWeights, batch: ExpertBatch, peers: _Peers | None, rates: Rates, tokens: int
) -> dict[str, Any]:
    rows, (_, hidden, inner) = batch.row_index_S.shape[0], weights.down_pDF.shape
    counts = batch.num_rows_p.tolist()
    active = sum(n > 0 for n in counts)
    kernel = TritonExperts(env.device)
    ms, how = time_ms(env, lambda: kernel(batch, weights))
    # Tokens in, weights once, results out; what lies between the two products stays out of it.
    moved = (
        active * 3 * hidden * inner * weights.down_pDF.itemsize
        + (batch.tokens_RD.numel() + rows * hidden) * 2
    )
    flops = 6 * rows * hidden * inner
    least = rates.least_ms(flops, moved)
    row = {
        "tokens": tokens, "rows": rows, "rows_per_expert": rows / max(1, active), "ms": ms, "how": how,
        "tflops": flops / ms / 1e9, "tb_per_s": moved / ms / 1e9, "of_roofline": least / ms,
    }  # fmt: skip
    met = None
    if rows / max(1, active) >= PREFILL_ROWS:
        met = flops / ms >= PREFILL_TARGET * rates.flops if peers is not None else None
    elif flops / rates.flops < moved / rates.bytes and rows:
        met = moved / ms >= DECODE_TARGET * rates.bytes
    if peers is not None and rows:
        ends_p = batch.num_rows_p.cumsum(0).int()
        if not env.small:
            expected = peers.grouped_mm(batch, ends_p)
            check_close("torch._grouped_mm", kernel(batch, weights), expected, 3e-2)
        row["grouped_mm_ms"], row["grouped_mm_how"] = time_ms(env, lambda: peers.grouped_mm(batch, ends_p))
        row["loop_of_mm_ms"], _ = time_ms(env, lambda: peers.loop_of_mm(batch, counts))
        met = met is not False and ms <= row["grouped_mm_ms"]
    return {**row, "met": met}


@dataclass(frozen=True)
class _Peers:
    """The same computation with what torch has."""

    weights: ExpertWeights

    def grouped_mm(self, batch: ExpertBatch, ends_p: torch.Tensor) -> torch.Tensor:
        """Gathered rows through torch._grouped_mm twice. ends_p: int32, where each slot's rows end."""
        x_SD = batch.tokens_RD[batch.row_index_S]
        h_SF = _silu(torch._grouped_mm(x_SD, self.weights.gate_up_pFD.transpose(1, 2), offs=ends_p))
        return torch._grouped_mm(h_SF, self.weights.down_pDF.transpose(1, 2), offs=ends_p)

    def loop_of_mm(self, batch: ExpertBatch, counts: list[int]) -> torch.Tensor:
        """One dense product after another. counts: rows of each slot, known to the host."""
        x_SD = batch.tokens_RD[batch.row_index_S]
        y_SD = torch.empty_like(x_SD)
        first = 0
        for slot, n in enumerate(counts):
            if n:
                rows = slice(first, first + n)
                h = _silu(torch.mm(x_SD[rows], self.weights.gate_up_pFD[slot].t()))
                torch.mm(h, self.weights.down_pDF[slot].t(), out=y_SD[rows])
                first += n
        return y_SD


def _silu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def decode_attention(env: Env) -> Rows:
    """One new token per sequence over a paged bf16 cache, against SDPA over contiguous keys and values of equal length."""
    from benchmarks.gpu_numerics import paged_batch
    from moe_runtime.attention.base import AttentionSpec
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.attention.triton_paged import TritonPagedAttention
    from moe_runtime.layers.rope import Rotation

    rates = Rates.of(env, False)
    heads, groups, dim = (4, 2, 16) if env.small else (32, 4, 128)
    spec = AttentionSpec(heads, groups, dim, dim**-0.5)
    for num_seqs, length in (
        ((2, 40),) if env.small else ((1, 1024), (1, 32768), (32, 4096), (128, 4096), (256, 1024))
    ):
        batch, num_blocks = paged_batch([(length - 1, 1)] * num_seqs, 16, env.device)
        cache = KVCache.allocate([spec], num_blocks, 16, BF16, env.device)
        for stored in (cache.keys[0], cache.values[0]):
            stored.copy_(torch.randn(stored.shape, device=env.device, dtype=BF16))
        q, k, v = (
            torch.randn(num_seqs, h, dim, device=env.device, dtype=BF16) for h in (heads, groups, groups)
        )
        shape = num_seqs, 1, dim // 2
        still = Rotation(torch.ones(shape, device=env.device), torch.zeros(shape, device=env.device))
        still = Rotation(*(angle.to(BF16) for angle in (still.cos, still.sin)))
        backend = TritonPagedAttention(cache, [spec])
        plan = backend.plan(batch)
        ms, how = time_ms(env, lambda: backend.run(q, k, v, still, 0, plan))  # noqa: B023
        # What the pages hold, side by side.
        keys, values = (
            x[0][batch.block_tables_BM.long()].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()
            for x in (cache.keys, cache.values)
        )
        sdpa = torch.nn.functional.scaled_dot_product_attention
        other_ms, other_how = time_ms(env, lambda: sdpa(q[:, :, None], keys, values, enable_gqa=True))  # noqa: B023
        yield check_close(
            f"B={num_seqs} L={length}", backend.run(q, k, v, still, 0, plan),
            sdpa(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0], 2e-2,
        ) | {
            "ms": ms, "how": how, "sdpa_ms": other_ms, "sdpa_how": other_how,
            "tb_per_s": 4 * keys.numel() / ms / 1e9, "of_roofline": rates.least_ms(0, 4 * keys.numel()) / ms,
            "met": ms <= other_ms,
        }  # fmt: skip


def graph_against_eager(env: Env) -> Rows:
    """A decode step of a small decoder with all kernels, launched from Python and replayed from a CUDA graph."""
    from benchmarks.gpu_model import small_model

    if env.device.type != "cuda":
        raise Skip("CUDA graphs need a GPU")
    model = small_model(env.device, BF16, triton=True, hidden=1024, layers=8)
    for num_seqs in (1, 8, 64):
        model.step([(0, 64)] * num_seqs)
        yield _capture(env, model, [(64, 1)] * num_seqs)


@torch.inference_mode()
def _capture(env: Env, model: Any, spans: list[tuple[int, int]]) -> dict[str, Any]:
    from triton import testing

    batch = model.batch(spans)
    plan = model.attention.plan(batch)

    def forward() -> torch.Tensor:
        return model.decoder([(batch, plan)], model.attention, model.moe)

    expected = forward().clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    # Other tokens through the same buffers.
    batch.input_ids_T.copy_((batch.input_ids_T + 1) % model.decoder.spec.vocab_size)
    graph.replay()
    other = captured.clone()
    changed = float((other - expected).abs().max())
    assert changed > 0, "a replay does not read its inputs"
    row = check_close(f"B={len(spans)} other tokens", other, forward(), 1e-2)
    eager, replayed = (
        testing.do_bench(f, warmup=5, rep=50, return_mode="median") for f in (forward, graph.replay)
    )
    return {**row, "eager_ms": eager, "graph_ms": replayed, "met": replayed <= eager}
