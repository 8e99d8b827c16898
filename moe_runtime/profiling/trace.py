"""Spans of a rank's first steps as a file for https://ui.perfetto.dev, in the Trace Event Format of Chrome.

Format: "Trace Event Format", complete events (`ph` = X) with microseconds, and metadata events that name processes
(one per rank) and threads (0: the rank's work, then rows under way).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.errors import ConfigError
from moe_runtime.whole_file import whole_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moe_runtime.profiling.timeline import Span, Timeline

Event = dict[str, Any]
logger = logging.getLogger(__name__)


def trace_events(rank: int, spans: Iterable[Span]) -> list[Event]:
    """One event per span, after those that name the rank and its tracks."""
    events: list[Event] = []
    tracks = {0}
    for span in spans:
        tracks.add(span.track)
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "pid": rank,
                "tid": span.track,
                "ts": span.begin_ns / 1000,
                "dur": (span.end_ns - span.begin_ns) / 1000,
                "args": span.args,
            }
        )
    names = [_name("process_name", rank, 0, f"rank {rank}")]
    names += [
        _name("thread_name", rank, track, f"rows under way {track}" if track else "work")
        for track in sorted(tracks)
    ]
    return names + events


def _name(kind: str, rank: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}


def write_trace(path: Path, events: list[Event]) -> None:
    """A file that Perfetto and chrome://tracing open."""
    with whole_file(path) as draft:
        draft.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


class StepTrace:
    """Keeps the spans of some steps of a rank, then hands them over."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._left = 0
        self._deliver: Callable[[list[Span]], None] | None = None

    def begin(self, num_steps: int, deliver: Callable[[list[Span]], None]) -> None:
        """Keep the spans of the next `num_steps` steps, at least 1; then `deliver` gets them. Ends what was under way."""
        self.end()
        self._left, self._deliver = num_steps, deliver
        self._timeline.keep = True

    def step_done(self) -> None:
        """Count a step; hand over after the last one."""
        if self._left:
            self._left -= 1
            if not self._left:
                self.end()

    def end(self) -> None:
        """Hand over what there is, if any is being kept. Idempotent."""
        deliver, self._deliver = self._deliver, None
        self._timeline.keep, self._left = False, 0
        spans, self._timeline.spans = self._timeline.spans, []
        if deliver is not None:
            deliver(spans)


def trace_file(folder: Path, rank: int) -> Callable[[list[Span]], None]:
    """Writes a rank's spans to FOLDER/rank<r>.json. Raises ConfigError if the folder cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"trace_dir={str(folder)!r}: cannot be made: {error.strerror}") from error
    path = folder / f"rank{rank}.json"

    def write(spans: list[Span]) -> None:
        if not spans:
            return
        try:
            write_trace(path, trace_events(rank, spans))
        except OSError as error:
            # A full disk is no reason to end a server.
            logger.warning("the trace %s cannot be written: %s", path, error)
        else:
            logger.info("trace written: %s (open it at https://ui.perfetto.dev)", path)

    return write
