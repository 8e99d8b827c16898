"""Traces of several ranks on one clock, and what is read from them."""

from __future__ import annotations

import pytest

from moe_runtime.profiling.joined import joined_events, summarize
from moe_runtime.profiling.timeline import Span


def rank_spans(clock: int, waits_ms: float) -> list[Span]:
    """Two steps of 10 ms each, the rank's clock `clock` ns ahead."""
    spans = []
    for step in range(2):
        begin = clock + step * 20_000_000
        arrived = begin + int(waits_ms * 1e6)
        spans += [
            Span("wait", 0, begin, arrived, {"moe_layer": 0}),
            Span("experts", 0, arrived, begin + 10_000_000, {"moe_layer": 0}),
            Span("dispatch under way", 1, begin, arrived, {}),
            Span("step", 0, begin, begin + 10_000_000, {"tokens": 3}),
        ]
    return spans


def test_clocks_of_other_hosts_are_aligned() -> None:
    spans = {0: rank_spans(5_000, 1), 1: rank_spans(5_000, 2), 2: rank_spans(77_000_000_123, 3)}
    events = joined_events(spans, distant=[2])
    steps = {(e["pid"], e["ts"]) for e in events if e["name"] == "step"}
    assert steps == {(rank, ts) for rank in range(3) for ts in (5.0, 20_005.0)}
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}


def test_the_slow_rank_is_named() -> None:
    summary = summarize({0: rank_spans(0, 6), 1: rank_spans(0, 0.5)})
    assert summary["verdict"] == "Rank 1 is slow: it waited 1.0 ms, rank 0 12.0 ms of 20.0 ms in these steps."
    first = summary["ranks"][0]
    assert first["steps"] == 2
    assert first["ms_by_kind"] == {"experts": pytest.approx(8), "wait": pytest.approx(12)}
    assert "No rank is slow" in summarize({0: rank_spans(0, 3), 1: rank_spans(0, 3.1)})["verdict"]
    assert summarize({0: [], 1: []})["verdict"] == "No step was computed."
    assert "One rank" in summarize({0: rank_spans(0, 1)})["verdict"]
