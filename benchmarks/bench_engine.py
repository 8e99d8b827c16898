"""The engine offline on this machine's CPUs, cell by cell: speed, and the share of what the machine's ceilings allow.

    python benchmarks/bench_engine.py --model DIR --ep 1 --cells decode1 decode16 prefill1024 --result result.json

A decode cell's step time is that of generating --output-len tokens for each of so many prompts less that of generating one,
divided by --output-len - 1; a prefill cell's is that of generating one token. Medians of --repeats; prefixes are not
cached, end tokens ignored, tokens chosen greedily. The ceilings (reading memory, a bfloat16 matrix product, with as many threads as
the machine has cores) are measured before and after the cells, while the engine rests, and the larger figures count.

A cell's bound is the slower of two: its weights read once at the reading ceiling, its products at the product ceiling. Weights are
those that a step touches: a decode step of B rows touches E (1 - (1 - K/E)^B) of a layer's E experts if each takes K evenly.

--profile adds where a step's time goes: milliseconds a step by kind of work on the first rank, and between forward passes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_runtime import LLM, SamplingParams, __version__
from moe_runtime.models.registry import load_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_runtime.models.spec import ModelSpec

BYTES = 2
"""Of a bfloat16 weight."""


@dataclass(frozen=True)
class Cell:
    """One workload: so many prompts of so many tokens; decode cells generate more than one token."""

    name: str
    num_prompts: int
    prompt_len: int
    decode: bool

    @classmethod
    def parse(cls, text: str, prompt_len: int) -> Cell:
        """decode<B>, prefill<length> or prefill<B>x<length>. Raises ValueError on anything else."""
        if text.startswith("decode"):
            return cls(text, int(text.removeprefix("decode")), prompt_len, decode=True)
        if text.startswith("prefill"):
            num, _, length = text.removeprefix("prefill").rpartition("x")
            return cls(text, int(num or 1), int(length), decode=False)
        raise ValueError(f"cell {text!r}: allowed are decode<B>, prefill<length> and prefill<B>x<length>")

    @property
    def rows(self) -> int:
        """Rows of a decode step, or tokens of the prefill: what the speed counts."""
        return self.num_prompts if self.decode else self.num_prompts * self.prompt_len


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument(
        "--cells",
        nargs="+",
        default=["decode1", "decode16", "decode64", "prefill1024", "prefill16x128"],
        help="decode<B>, prefill<length>, prefill<B>x<length>",
    )
    parser.add_argument("--prompt-len", type=int, default=128, help="of decode cells")
    parser.add_argument("--output-len", type=int, default=64, help="tokens that a decode cell generates")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moe-backend", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--layer-backend", default="auto")
    parser.add_argument("--quantization", default="auto", help="of the weights, as LLM takes it")
    parser.add_argument("--profile", action="store_true", help="also tell where the time goes")
    parser.add_argument("--result", type=Path, help="JSON file to write")
    return parser


def best_seconds(what: Callable[[], object], repeats: int = 5) -> float:
    """Least time of a call, after one that is not timed."""
    what()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        what()
        times.append(time.perf_counter() - begin)
    return min(times)


def ceilings() -> dict[str, float]:
    """GB/s of reading 1 GiB by torch.sum, and TFLOP/s of a 2048-cubed bfloat16 product."""
    ones = torch.ones(2**28)
    read = ones.numel() * 4 / best_seconds(ones.sum) / 1e9
    side = 2048
    matrix = torch.randn(side, side).to(torch.bfloat16)
    return {"read_gb_s": read, "product_tflop_s": 2 * side**3 / best_seconds(lambda: matrix @ matrix) / 1e12}


def bound_seconds(spec: ModelSpec, cell: Cell, ceiling: dict[str, float]) -> float:
    """The least time of a decode step, or of the prefill; attention's own reading and products are left out."""
    expert = 3 * spec.hidden_size * spec.moe_intermediate_size
    heads = spec.num_heads + 2 * spec.num_kv_heads
    dense = spec.hidden_size * spec.head_dim * (heads + spec.num_heads) + spec.hidden_size * spec.num_experts
    head = spec.vocab_size * spec.hidden_size
    touched = spec.num_experts * (1 - (1 - spec.top_k / spec.num_experts) ** cell.rows)
    weights = spec.num_layers * dense + spec.num_moe_layers * touched * expert + head
    per_token = spec.num_layers * dense + spec.num_moe_layers * spec.top_k * expert
    flop = 2 * (cell.rows * per_token + cell.num_prompts * head)
    return max(weights * BYTES / (ceiling["read_gb_s"] * 1e9), flop / (ceiling["product_tflop_s"] * 1e12))


def seconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Time of generating `num_tokens` tokens for each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


def draw_prompts(cell: Cell, vocab: int, draw: random.Random) -> list[list[int]]:
    """Random token ids."""
    return [[draw.randrange(vocab) for _ in range(cell.prompt_len)] for _ in range(cell.num_prompts)]


def measure(llm: LLM, cell: Cell, args: argparse.Namespace, vocab: int) -> list[float]:
    """Seconds of a decode step, or of the prefill; one for each repeat."""
    draw = random.Random(args.seed)
    times = []
    for i in range(args.repeats + 1):
        prompts = draw_prompts(cell, vocab, draw)
        first = seconds(llm, prompts, 1)
        whole = seconds(llm, prompts, args.output_len) if cell.decode else 0.0
        # The first is for caches and compiled kernels.
        if i:
            times.append((whole - first) / (args.output_len - 1) if cell.decode else first)
    return times


def profile(llm: LLM, cell: Cell, args: argparse.Namespace, vocab: int) -> dict[str, float]:
    """Milliseconds a step by kind of work, on rank 0; `between` is what lies between two forward passes."""
    prompts = draw_prompts(cell, vocab, random.Random(args.seed))
    num_tokens = args.output_len if cell.decode else 2
    llm.start_profile(num_steps=1000)
    seconds(llm, prompts, num_tokens)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        llm.stop_profile(file)
        events = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    steps = [
        e for e in events if e["name"] == "step" and (e["args"]["tokens"] == cell.rows or not cell.decode)
    ]
    if not cell.decode:
        steps = steps[:1]
    spans = [(s["ts"], s["ts"] + s["dur"]) for s in steps]
    sums: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event["tid"] == 0 and any(a <= event["ts"] < b for a, b in spans):
            sums[event["name"]] += event["dur"] / len(steps) / 1e3
    between = [b[0] - a[1] for a, b in pairwise(spans)]
    sums["between"] = statistics.median(between) / 1e3 if between else 0.0
    return {name: round(ms, 3) for name, ms in sorted(sums.items(), key=lambda item: -item[1])}


def main() -> None:
    """Print the table, write the JSON file."""
    args = build_parser().parse_args()
    cells = [Cell.parse(text, args.prompt_len) for text in args.cells]
    spec, _ = load_spec(args.model)
    longest = max(cell.prompt_len + args.output_len for cell in cells)
    before = ceilings()
    rows = []
    with LLM(
        model=str(args.model), ep=args.ep, enable_prefix_caching=False, max_model_len=longest,
        max_num_batched_tokens=max(4096, longest), max_num_seqs=max(cell.num_prompts for cell in cells),
        skip_tokenizer_init=True, log_level="warning",
        moe_backend=args.moe_backend, attention_backend=args.attention_backend, layer_backend=args.layer_backend,
        quantization=args.quantization,
    ) as llm:  # fmt: skip
        times = {cell: measure(llm, cell, args, spec.vocab_size) for cell in cells}
        profiles = {c: profile(llm, c, args, spec.vocab_size) for c in cells} if args.profile else {}
    after = ceilings()
    ceiling = {name: max(before[name], after[name]) for name in before}
    print(f"reading {ceiling['read_gb_s']:.1f} GB/s, products {ceiling['product_tflop_s']:.2f} TFLOP/s")
    print("| cell | ms | tok/s | bound, tok/s | share |\n|---|---|---|---|---|")
    for cell in cells:
        median, bound = statistics.median(times[cell]), bound_seconds(spec, cell, ceiling)
        speed, limit = cell.rows / median, cell.rows / bound
        print(f"| {cell.name} | {median * 1e3:.2f} | {speed:.1f} | {limit:.0f} | {bound / median:.0%} |")
        rows.append({"cell": cell.name, "seconds": times[cell], "tok_s": speed, "bound_tok_s": limit,
                     "share": bound / median, "profile_ms": profiles.get(cell)})  # fmt: skip
        if cell in profiles:
            print("  ", profiles[cell])
    if args.result:
        about = {
            "command": shlex.join(["python", *sys.argv]), "version": __version__, "torch": torch.__version__,
            "cpus": os.cpu_count(), "load_average": os.getloadavg(), "platform": platform.platform(), **ceiling,
        }  # fmt: skip
        args.result.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
