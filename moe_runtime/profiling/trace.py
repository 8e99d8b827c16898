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

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


class StepTrace:
    """Writes FOLDER/rank<r>.json once `num_steps` steps have been recorded, or at close() what there is."""

    def __init__(self, timeline: Timeline, folder: Path, rank: int, num_steps: int) -> None:
        """num_steps 0 records nothing. Raises ConfigError if the folder cannot be made."""
        self._timeline, self._rank = timeline, rank
        self._path = folder / f"rank{rank}.json"
        self._left = num_steps
        if num_steps:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"trace_dir={str(folder)!r}: cannot be made: {error.strerror}") from error
        timeline.keep = num_steps > 0

    def step_done(self) -> None:
        """Count a step; write after the last one."""
        if self._left:
            self._left -= 1
            if not self._left:
                self.close()

    def close(self) -> None:
        """Write what was recorded and not written yet. Idempotent."""
        self._timeline.keep, self._left = False, 0
        spans, self._timeline.spans = self._timeline.spans, []
        if not spans:
            return
        try:
            write_trace(self._path, trace_events(self._rank, spans))
        except OSError as error:
            # A full disk is no reason to end a server.
            logger.warning("the trace %s cannot be written: %s", self._path, error)
        else:
            logger.info("trace written: %s (open it at https://ui.perfetto.dev)", self._path)
