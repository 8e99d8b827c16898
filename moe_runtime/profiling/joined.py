"""The spans of all ranks as one trace, and what they come to: time by kind of work and rank, and which rank is slow."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from moe_runtime.profiling.timeline import WAIT
from moe_runtime.profiling.trace import Event, trace_events

if TYPE_CHECKING:
    from collections.abc import Collection

    from moe_runtime.profiling.timeline import Span

STEP = "step"


def joined_events(spans: dict[int, list[Span]], distant: Collection[int] = ()) -> list[Event]:
    """Events of all ranks on one clock. `distant`: ranks on other hosts than the first, whose clocks run apart.

    All ranks begin a step when they have exchanged the lockstep header, that is within one message's travel of one another; so a
    distant clock is moved by the median difference of the steps' beginnings.
    """
    first = spans[min(spans)]
    events = []
    for rank, own in sorted(spans.items()):
        shift = _shift(first, own) if rank in distant else 0
        moved = [replace(s, begin_ns=s.begin_ns + shift, end_ns=s.end_ns + shift) for s in own]
        events += trace_events(rank, moved)
    return events


def _shift(first: list[Span], other: list[Span]) -> int:
    begins = [[s.begin_ns for s in spans if s.name == STEP] for spans in (first, other)]
    apart = [a - b for a, b in zip(*begins, strict=False)]
    return int(median(apart)) if apart else 0


def summarize(spans: dict[int, list[Span]]) -> dict[str, Any]:
    """JSON-ready: milliseconds by kind of work for each rank, steps, and in words which rank the others wait for.

    The slow rank is the one that waits least: whoever arrives last at an exchange finds the others' rows there.
    """
    ranks = []
    for rank, own in sorted(spans.items()):
        kinds: defaultdict[str, float] = defaultdict(float)
        for span in own:
            if span.track == 0 and span.name != STEP:
                kinds[span.name] += (span.end_ns - span.begin_ns) / 1e6
        steps = [s for s in own if s.name == STEP]
        ranks.append(
            {
                "rank": rank,
                "steps": len(steps),
                "step_ms": sum(s.end_ns - s.begin_ns for s in steps) / 1e6,
                "ms_by_kind": {name: round(ms, 3) for name, ms in sorted(kinds.items())},
            }
        )
    return {"ranks": ranks, "verdict": _verdict(ranks)}


def _verdict(ranks: list[dict[str, Any]]) -> str:
    if not any(r["steps"] for r in ranks):
        return "No step was computed."
    if len(ranks) == 1:
        return "One rank, which waits for no other."
    waits = {r["rank"]: r["ms_by_kind"].get(WAIT, 0.0) for r in ranks}
    slow, longest = min(waits, key=lambda r: waits[r]), max(waits, key=lambda r: waits[r])
    whole = ranks[0]["step_ms"]
    share = (waits[longest] - waits[slow]) / whole if whole else 0.0
    if share < 0.02:
        return f"No rank is slow: waits differ by {100 * share:.1f} % of the steps' time."
    return (
        f"Rank {slow} is slow: it waited {waits[slow]:.1f} ms, rank {longest} {waits[longest]:.1f} ms"
        f" of {whole:.1f} ms in these steps."
    )
