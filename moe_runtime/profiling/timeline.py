"""What one rank does when, by the host's clock: the time of each kind of work in a step, and spans for a trace.

A step is cut into laps without gaps: each `lap` names what the rank has done since the one before. Rows under way
between ranks are spans of their own, beside the laps, so that a trace shows what their travel was hidden behind.
On a GPU these are the times of issuing work, not of doing it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

WAIT = "wait"
EXPERTS = "experts"


@dataclass(frozen=True)
class Span:
    """Something that took from begin_ns to end_ns of the clock time.perf_counter_ns, which all processes of a host share."""

    name: str
    track: int
    """0: the rank itself; 1 and up: rows under way."""
    begin_ns: int
    end_ns: int
    args: dict[str, int]


class Timeline:
    """One rank's clock. Sums are of the current step; spans are kept while `keep` is set."""

    def __init__(self) -> None:
        self.keep = False
        self.spans: list[Span] = []
        self.totals_ns: defaultdict[str, int] = defaultdict(int)
        """Time of each kind of work since begin_step()."""
        self._step_began = self._last = time.perf_counter_ns()
        self._departures: dict[int, int] = {}
        """When those left that are under way, by track."""

    def begin_step(self) -> None:
        """Start the sums anew."""
        self.totals_ns.clear()
        self._step_began = self._last = time.perf_counter_ns()

    def end_step(self, **args: int) -> int:
        """Returns the step's duration in ns; `args` are shown with its span."""
        now = time.perf_counter_ns()
        if self.keep:
            self.spans.append(Span("step", 0, self._step_began, now, args))
        return now - self._step_began

    def lap(self, name: str, **args: int) -> None:
        """What was done since the lap before is called `name`."""
        now = time.perf_counter_ns()
        self.totals_ns[name] += now - self._last
        if self.keep:
            self.spans.append(Span(name, 0, self._last, now, args))
        self._last = now

    def depart(self) -> int:
        """Rows have just left. Returns their track, for `arrive`."""
        track = next(i for i in range(1, len(self._departures) + 2) if i not in self._departures)
        self._departures[track] = time.perf_counter_ns()
        return track

    def arrive(self, track: int, name: str, **args: int) -> None:
        """The rows of `track` have been received."""
        began = self._departures.pop(track)
        if self.keep:
            self.spans.append(Span(name, track, began, time.perf_counter_ns(), args))
