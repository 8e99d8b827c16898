"""Measure a running OpenAI-compatible server: time to first token, time between tokens, throughput.

    python benchmarks/bench_serving.py --base-url http://127.0.0.1:8000 --num-prompts 64 --input-len 128 --output-len 64

Flags and result keys are those of vLLM's `bench serve`. Prompts are random token ids, the same for the same seed. Before
measuring, the server's answers are checked; a server that answers wrongly is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import random
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serving_client import (
    Client,
    Outcome,
    Request,
    check_answers,
    describe_server,
    run_all,
    wait_ready,
)

METRICS = ("ttft", "tpot", "itl", "e2el")
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="server to measure (%(default)s)")
    add("--model", help="model name; default: the first the server lists")
    add("--api-key", help="bearer token")
    add("--num-prompts", type=int, default=100, help="requests to send (%(default)s)")
    add("--input-len", "--random-input-len", type=int, default=128, help="tokens per prompt (%(default)s)")
    add("--output-len", "--random-output-len", type=int, default=64, help="tokens per answer (%(default)s)")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="lengths vary by this share, 0 to <1 (%(default)s)",
    )
    add("--random-prefix-len", type=int, default=0, help="tokens that all prompts begin with (%(default)s)")
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        help="requests per second, Poisson (%(default)s: all at once)",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the gamma-distributed gaps; 1 is Poisson (%(default)s)",
    )
    add("--max-concurrency", type=int, help="requests at a time; default: no limit")
    add("--num-warmups", type=int, default=2, help="requests sent before, not measured (%(default)s)")
    add("--vocab-size", type=int, help="ids are drawn below this; default: what /server_info says")
    add("--temperature", type=float, default=0.0, help="sampling temperature (%(default)s)")
    add("--extra-body", default="{}", metavar="JSON", help="more fields for every request")
    add(
        "--ready-check-timeout-sec",
        type=float,
        default=600.0,
        help="wait this long for the server (%(default)s)",
    )
    add("--metric-percentiles", default="50,90,99", help="percentiles to report (%(default)s)")
    add("--seed", type=int, default=0, help="seed of prompts and arrivals (%(default)s)")
    add("--save-result", action="store_true", help="write the results as JSON")
    add("--save-detailed", action="store_true", help="with every request's figures")
    add("--result-dir", type=Path, default=Path(), help="folder of the JSON file")
    add("--result-filename", help="name of the JSON file; default: from the date")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="put into the JSON file")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


def draw_requests(args: argparse.Namespace, vocab_size: int) -> list[Request]:
    """`--num-prompts` requests with random ids and lengths."""
    draw = random.Random(args.seed)

    def length(mean: int) -> int:
        spread = args.random_range_ratio
        return max(1, draw.randint(math.floor(mean * (1 - spread)), math.ceil(mean * (1 + spread))))

    def ids(num: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(num)]

    prefix = ids(args.random_prefix_len)
    return [
        Request(prefix + ids(length(args.input_len)), length(args.output_len))
        for _ in range(args.num_prompts)
    ]


def percentile(values: list[float], percent: float) -> float:
    """Linear between the two nearest; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(outcomes: list[Outcome], duration_s: float, percentiles: list[float]) -> dict[str, Any]:
    """The figures, by vLLM's names."""
    good = [o for o in outcomes if o.error is None]
    seconds: dict[str, list[float]] = {
        "ttft": [o.ttft for o in good],
        "tpot": [(o.latency - o.ttft) / (o.output_len - 1) for o in good if o.output_len > 1],
        "itl": [gap for o in good for gap in o.itls],
        "e2el": [o.latency for o in good],
    }
    num_in, num_out = sum(o.input_len for o in good), sum(o.output_len for o in good)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_out / duration_s,
        "total_token_throughput": (num_in + num_out) / duration_s,
    }
    for name, values in seconds.items():
        mean = sum(values) / len(values) if values else 0.0
        variance = sum((v - mean) ** 2 for v in values) / len(values) if values else 0.0
        result[f"mean_{name}_ms"] = mean * 1e3
        result[f"median_{name}_ms"] = percentile(values, 50) * 1e3
        result[f"std_{name}_ms"] = math.sqrt(variance) * 1e3
        for percent in percentiles:
            result[f"p{percent:g}_{name}_ms"] = percentile(values, percent) * 1e3
    return result


def print_report(result: dict[str, Any], percentiles: list[float]) -> None:
    """The figures of `summarize` as vLLM prints them."""

    def line(title: str, value: float) -> None:
        print(
            f"{title + ':':<42}{value:>10.2f}"
            if isinstance(value, float)
            else f"{title + ':':<42}{value:>10}"
        )

    print(f"{' Serving Benchmark Result ':=^52}")
    line("Successful requests", result["completed"])
    line("Failed requests", result["failed"])
    line("Benchmark duration (s)", result["duration"])
    line("Total input tokens", result["total_input_tokens"])
    line("Total generated tokens", result["total_output_tokens"])
    line("Request throughput (req/s)", result["request_throughput"])
    line("Output token throughput (tok/s)", result["output_throughput"])
    line("Total token throughput (tok/s)", result["total_token_throughput"])
    for name in METRICS:
        print(f"{' ' + TITLES[name] + ' ':-^52}")
        for kind in ("mean", "median", *(f"p{p:g}" for p in percentiles)):
            title = kind.capitalize() if kind in ("mean", "median") else kind.upper()
            line(f"{title} {name.upper()} (ms)", result[f"{kind}_{name}_ms"])
    print("=" * 52)


def save(result: dict[str, Any], outcomes: list[Outcome], args: argparse.Namespace) -> Path:
    """Write the JSON file; returns its path."""
    if args.save_detailed:
        result |= {
            "input_lens": [o.input_len for o in outcomes],
            "output_lens": [o.output_len for o in outcomes],
            "ttfts": [o.ttft for o in outcomes],
            "itls": [o.itls for o in outcomes],
            "generated_texts": [o.text for o in outcomes],
            "errors": [o.error or "" for o in outcomes],
            "start_times": [o.start for o in outcomes],
        }
    name = args.result_filename or f"serving-{datetime.now():%Y%m%d-%H%M%S}.json"
    path: Path = args.result_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    return path


async def benchmark(args: argparse.Namespace) -> int:
    """Check the server, warm up, measure, report. Returns the exit status: 1 if a request failed."""
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=args.base_url, headers=headers, timeout=None, limits=limits
    ) as http:
        await wait_ready(http, args.ready_check_timeout_sec)
        model = args.model or (await http.get("/v1/models")).json()["data"][0]["id"]
        server = await describe_server(http)
        vocab_size = args.vocab_size or server.get("vocab_size")
        if vocab_size is None:
            raise SystemExit("error: the server does not tell its vocabulary; give --vocab-size")
        requests = draw_requests(args, vocab_size)
        # With its ids every token makes a chunk, also one that is only a part of a character.
        fields = {"model": model, "return_token_ids": True} if server else {"model": model}
        await check_answers(Client(http, fields | {"temperature": 0.0}), requests[0])
        client = Client(http, fields | {"temperature": args.temperature} | json.loads(args.extra_body))
        for request in requests[: args.num_warmups]:
            await client.timed(request)
        # Else the warm-up's prompts would be found in the prefix cache.
        await http.post("/reset_prefix_cache")
        outcomes, duration_s = await run_all(client, requests, args)
    percentiles = [float(p) for p in args.metric_percentiles.split(",")]
    result: dict[str, Any] = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "backend": "openai",
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **summarize(outcomes, duration_s, percentiles),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "versions": {
            "python": platform.python_version(),
            "httpx": httpx.__version__,
            "server": server.get("version"),
        },
        "machine": {"platform": platform.platform(), "processor": platform.processor()},
        "server": {key: server.get(key) for key in ("engine", "ranks")},
        **dict(pair.split("=", 1) for pair in args.metadata),
    }
    print_report(result, percentiles)
    for message in sorted({o.error for o in outcomes if o.error}):
        print(f"failed: {message}", file=sys.stderr)
    if args.save_result or args.save_detailed:
        print(f"saved {save(result, outcomes, args)}")
    return 0 if result["failed"] == 0 else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(benchmark(build_parser().parse_args())))
