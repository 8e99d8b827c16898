"""Prometheus metrics, with vLLM's names and buckets under `moe_runtime:`.

What a rank counts is read from its last message at the time of the scrape, under the label `engine` (the rank). What the
front-end times is observed here as deltas pass by; it covers all ranks. Only generation requests count, not health checks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_runtime.core import SamplingParams
from moe_runtime.engine.messages import (
    REQUEST_TIME_BOUNDS,
    STALL_BOUNDS,
    STEP_TOKEN_BOUNDS,
    Distribution,
    EplbStats,
    RankStats,
)
from moe_runtime.engine.outputs import CompletionDelta
from moe_runtime.placement.balancedness import WINDOW_STEPS, BalanceWatch
from moe_runtime.placement.record import PHASES

PREFIX = "moe_runtime:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)

FINISH_REASONS = ("stop", "length", "abort")

_SHARES_OF_BYTES: dict[str, Callable[[RankStats], float]] = {
    "local": lambda s: s.bytes_local,
    "intra": lambda s: s.bytes_within_host,
    "inter": lambda s: s.bytes_between_hosts,
}

Stats = Callable[[], Sequence[RankStats]]


def kv_usage(stats: RankStats) -> float:
    """Share of the KV-cache blocks that running sequences hold, 0 to 1. Blocks that can be evicted count as free."""
    if not stats.num_blocks:
        return 0.0
    return 1.0 - (stats.num_free_blocks + stats.num_cached_blocks) / stats.num_blocks


_GAUGES: dict[str, tuple[str, Callable[[RankStats], float]]] = {
    "num_requests_running": ("Sequences in the running batch", lambda s: s.num_running),
    "num_requests_waiting": ("Sequences waiting to be scheduled", lambda s: s.num_waiting),
    "kv_cache_usage_perc": ("Share of KV-cache blocks in use, 0 to 1", kv_usage),
}
_COUNTERS: dict[str, tuple[str, Callable[[RankStats], float]]] = {
    "prompt_tokens": ("Prompt tokens processed", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens generated", lambda s: s.generation_tokens),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", lambda s: s.prefix_queries),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda s: s.prefix_hits),
    "two_batch_steps": (
        "Steps of which one half was computed while the other's tokens travelled",
        lambda s: s.two_batch_steps,
    ),
    "chunked_steps": ("Steps whose MoE rows travelled in chunks", lambda s: s.chunked_steps),
    "graph_steps": ("Steps that were replayed from a CUDA graph", lambda s: s.graph_steps),
    "moe_dispatch_wait_seconds": ("Waited for other ranks' rows", lambda s: s.wait_us / 1e6),
    "forward_seconds": ("Spent in forward passes, waiting included", lambda s: s.forward_us / 1e6),
    "moe_dispatch_rounds": ("Exchanges between ranks in dispatch and combine", lambda s: s.dispatch_rounds),
    "num_preemptions": ("Sequences pushed out of the running batch to free blocks", lambda s: s.preemptions),
}
_DISTRIBUTIONS: dict[str, tuple[str, Sequence[float], Callable[[RankStats], Distribution]]] = {
    "iteration_tokens_total": ("Tokens of a step", STEP_TOKEN_BOUNDS, lambda s: s.tokens_of_steps),
    "request_queue_time_seconds": (
        "From a sequence's arrival at its rank to its first step",
        REQUEST_TIME_BOUNDS,
        lambda s: s.queue_times_s,
    ),
}


class _RankCollector(Collector):
    """Reads the ranks' own counts when a scrape asks for them."""

    def __init__(self, model_name: str, stats: Stats, balance: BalanceWatch) -> None:
        self._model_name = model_name
        self._stats = stats
        self._balance = balance

    def collect(self) -> Iterator[Metric]:
        per_rank = list(enumerate(self._stats()))
        labels = ["model_name", "engine"]
        families: list[tuple[GaugeMetricFamily | CounterMetricFamily, Callable[[RankStats], float]]] = [
            *(
                (GaugeMetricFamily(PREFIX + name, text, labels=labels), read)
                for name, (text, read) in _GAUGES.items()
            ),
            *(
                (CounterMetricFamily(PREFIX + name, text, labels=labels), read)
                for name, (text, read) in _COUNTERS.items()
            ),
        ]
        for family, read in families:
            for rank, stats in per_rank:
                family.add_metric([self._model_name, str(rank)], read(stats))
            yield family
        for name, (text, bounds, find) in _DISTRIBUTIONS.items():
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=labels)
            for rank, stats in per_rank:
                found = find(stats)
                ends = [*(str(float(bound)) for bound in bounds), "+Inf"]
                buckets = list(zip(ends, itertools.accumulate(found.counts), strict=True))
                histogram.add_metric([self._model_name, str(rank)], buckets, found.total)
            yield histogram
        traffic = CounterMetricFamily(
            PREFIX + "moe_dispatch_bytes",
            "Rows of dispatch and combine: kept, sent within the host, sent to others; not what kernels on GPUs move",
            labels=[*labels, "scope"],
        )
        for rank, stats in per_rank:
            for scope, read in _SHARES_OF_BYTES.items():
                traffic.add_metric([self._model_name, str(rank), scope], read(stats))
        yield traffic
        yield from self._loads()
        if all(stats.eplb is not None for _, stats in per_rank):
            yield from self._eplb([stats.eplb for _, stats in per_rank if stats.eplb is not None])

    def _loads(self) -> Iterator[Metric]:
        rows = CounterMetricFamily(
            PREFIX + "moe_rank_tokens",
            "Expert rows computed; prefill: in steps in which some rank computed tokens of a prompt",
            labels=["model_name", "ep_rank", "phase"],
        )
        even = GaugeMetricFamily(
            PREFIX + "eplb_balancedness",
            f"Mean over ranks of expert rows over those of the fullest rank, of the latest {WINDOW_STEPS} steps; 1 is even",
            labels=["model_name", "phase"],
        )
        for phase, rows_N in zip(PHASES, self._balance.rows, strict=True):
            for rank, count in enumerate(rows_N):
                rows.add_metric([self._model_name, str(rank), phase], count)
            value = self._balance.of(phase)
            if value is not None:
                even.add_metric([self._model_name, phase], value)
        yield rows
        yield even

    def _eplb(self, per_rank: list[EplbStats]) -> Iterator[Metric]:
        """Of moving experts; what is decided for all ranks is rank 0's."""
        first, labels = per_rank[0], ["model_name", "engine"]
        results = CounterMetricFamily(
            PREFIX + "eplb_rebalances",
            "Looks at the experts' load by what came of them",
            labels=["model_name", "result"],
        )
        for result in ("applied", "skipped", "failed", "rolled_back"):
            results.add_metric([self._model_name, result], getattr(first, result))
        yield results
        for name, text, value in (
            ("eplb_rebalancing", "1 while experts move", float(first.state == "moving")),
            (
                "eplb_last_rebalance_timestamp_seconds",
                "Unix time of the last move; 0: none yet",
                first.last_applied_at,
            ),
            (
                "eplb_expected_gain",
                "Share of the MoE layers' time that the last plan is expected to save",
                first.gain,
            ),
        ):
            if value is not None:
                gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
                gauge.add_metric([self._model_name], value)
                yield gauge
        moved = CounterMetricFamily(
            PREFIX + "eplb_moved_bytes", "Experts' weights fetched by a rank", labels=labels
        )
        stalls = HistogramMetricFamily(
            PREFIX + "eplb_stall_seconds",
            "How long a step waited for a change of the placement",
            labels=labels,
        )
        ends = [*(str(bound) for bound in STALL_BOUNDS), "+Inf"]
        for rank, stats in enumerate(per_rank):
            moved.add_metric([self._model_name, str(rank)], stats.moved_bytes)
            buckets = list(zip(ends, itertools.accumulate(stats.stalls_s.counts), strict=True))
            stalls.add_metric([self._model_name, str(rank)], buckets, stats.stalls_s.total)
        yield moved
        yield stalls


def token_buckets(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    buckets: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > largest:
                return buckets
            buckets.append(step * scale)
        scale *= 10


class ServerMetrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, max_model_len: int, stats: Stats, balance: BalanceWatch) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_RankCollector(model_name, stats, balance))
        self._model_name = model_name
        tokens = token_buckets(max_model_len)
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From a prompt's arrival to its first token", TTFT_BUCKETS
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a completion", ITL_BUCKETS
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens of a completion", ITL_BUCKETS
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds",
            "From a prompt's arrival to the end of its completions",
            REQUEST_TIME_BOUNDS,
        )
        self.params_n = self._histogram("request_params_n", "Completions asked for", N_BUCKETS)
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of the requests that give one", tokens
        )
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt", tokens)
        self.generation_length = self._histogram(
            "request_generation_tokens", "Tokens of a completion", tokens
        )
        success = Counter(
            PREFIX + "request_success",
            "Finished completions by reason",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.success = {reason: success.labels(model_name, reason) for reason in FINISH_REASONS}

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._model_name)

    def start(self, params: SamplingParams, arrival: float) -> PromptTimer:
        """Begin to time a prompt that came in at `arrival`, by time.perf_counter()."""
        self.params_n.observe(params.n)
        if params.max_tokens is not None:
            self.params_max_tokens.observe(params.max_tokens)
        return PromptTimer(self, params.n, arrival)

    def render(self) -> bytes:
        """The text that /metrics answers with, of type CONTENT_TYPE."""
        return generate_latest(self.registry)


class PromptTimer:
    """Observes the completions of one prompt. End it by `finish`, by `abort`, or, after an error, by neither."""

    def __init__(self, metrics: ServerMetrics, num_completions: int, arrival: float) -> None:
        self._metrics = metrics
        self._num_unfinished = num_completions
        self._arrival = arrival
        self._first: dict[int, tuple[float, int]] = {}
        """When each completion's first tokens came, and how many."""
        self._last: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}
        self._num_prompt_tokens = 0

    def see(self, delta: CompletionDelta) -> None:
        """Take note of a delta at the moment it arrives."""
        now, index, metrics = time.perf_counter(), delta.index, self._metrics
        self._num_prompt_tokens = delta.num_prompt_tokens
        if delta.token_ids:
            if not self._first:
                metrics.ttft.observe(now - self._arrival)
            if index in self._last:
                # While the reader was busy, tokens came as one delta: the time between them is the mean.
                gap = (now - self._last[index]) / len(delta.token_ids)
                for _ in delta.token_ids:
                    metrics.itl.observe(gap)
            self._first.setdefault(index, (now, len(delta.token_ids)))
            self._last[index] = now
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(delta.token_ids)
        if delta.finish_reason is not None:
            self._finish(index, delta.finish_reason)

    def _finish(self, index: int, reason: str) -> None:
        self._num_unfinished -= 1
        self._metrics.success[reason].inc()
        count = self._num_tokens[index]
        self._metrics.generation_length.observe(count)
        began, num_at_once = self._first.get(index, (0.0, 0))
        if count > num_at_once:
            self._metrics.tpot.observe((self._last[index] - began) / (count - num_at_once))

    def finish(self) -> None:
        """All completions have ended by themselves."""
        self._metrics.prompt_length.observe(self._num_prompt_tokens)
        self._metrics.e2e.observe(time.perf_counter() - self._arrival)

    def abort(self) -> None:
        """The client went away; completions that have not ended count as aborted."""
        self._metrics.success["abort"].inc(self._num_unfinished)
