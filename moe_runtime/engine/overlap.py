"""Whether a step's computing is overlapped with its rows' travel, how its tokens are cut in two, and what it gains.

Three ways to compute a step:

    off      a MoE layer waits until rows have travelled, out and back
    on       two half batches take turns: attention of one half while the other half's rows travel
    chunks   one batch; a MoE layer's rows go in two chunks, the second of which travels while the first one's experts run

Overlap hides waiting, and costs: the weights are read once more, small matrix products are less efficient. With
W, C, E the waiting, the computing and its part in experts of a step without overlap of t tokens, all measured:

    on       hides at most min(W, C / 2): while a half travels, only the other half's work is there to be done
             costs 2 C(t / 2) - C(t)
    chunks   hides at most min(W - L, E) / 2, where L is the waiting of the smallest steps, which is latency: the second
             chunk cannot hide behind the first what the first one waits for as well
             costs 2 E(t / 2) - E(t)

C and E at t / 2 are interpolated between the sizes that have been measured. Where no step so small has been measured,
the cost is not known and counts as nothing, so that the way is tried; from three steps on its own times count instead.
Every rank sees the same times (they come with the lockstep header) and so takes the same decision.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING

from moe_runtime.core import ScheduledSequence, StepPlan
from moe_runtime.engine.control import StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_runtime.engine.control import Agreement

BALANCE = 0.45
"""The smaller half has at least this share of the tokens, if need be by cutting inside a sequence."""
MIN_SAMPLES = 3
"""Steps of a size that must have been timed before their median counts."""
NUM_SAMPLES = 9
"""Most recent steps that the median is taken of."""
DECIDE_EVERY = 8
"""Steps of a size for which a decision holds."""
FRESH_STEPS = 512
"""Times count for this many steps of their size; then they are measured anew."""
MARGIN = 0.03
"""Share of a step's time that must be gained before overlap is switched on."""

logger = logging.getLogger(__name__)


class Way(enum.Enum):
    """How a step is computed; the values are those of the setting `overlap`."""

    OFF = "off"
    TWO_BATCHES = "on"
    CHUNKS = "chunks"


def half(plan: StepPlan) -> int:
    """Tokens of the first half: up to the end of a sequence near the middle, else to the middle of the tokens."""
    total = plan.num_tokens
    ends = accumulate(item.num_new_tokens for item in plan.scheduled)
    best = min(ends, key=lambda end: abs(2 * end - total), default=0)
    return best if min(best, total - best) >= BALANCE * total else (total + 1) // 2


def split(plan: StepPlan, first_tokens: int) -> tuple[StepPlan, StepPlan]:
    """The plan's sequences up to that token and those after it; one of them may be in both, in that order.

    Block copies stay with the whole plan, since they come before either.
    """
    before: list[ScheduledSequence] = []
    after: list[ScheduledSequence] = []
    left = first_tokens
    for item in plan.scheduled:
        taken = min(left, item.num_new_tokens)
        left -= taken
        if taken:
            before.append(ScheduledSequence(item.sequence, item.start, taken))
        if taken < item.num_new_tokens:
            rest = item.num_new_tokens - taken
            after.append(ScheduledSequence(item.sequence, item.start + taken, rest))
    return StepPlan(tuple(before)), StepPlan(tuple(after))


@dataclass(frozen=True)
class Expectation:
    """What a way of computing steps of one size is expected to take, and why."""

    way: Way
    forward_us: float
    hidden_us: float
    """Waiting that it saves."""
    extra_us: float | None
    """Computing that it adds; None: not known."""
    measured: bool

    def __str__(self) -> str:
        source = "measured" if self.measured else "estimated"
        extra = "an unknown time" if self.extra_us is None else _ms(self.extra_us)
        return f"{self.way.value} {_ms(self.forward_us)} ({source}: hides {_ms(self.hidden_us)}, adds {extra} of computing)"


@dataclass(frozen=True)
class _Sample:
    visit: int
    tokens: int
    times: StepTimes


@dataclass
class _Size:
    """What is known of steps whose token counts have the same number of bits."""

    visits: int = 0
    samples: dict[Way, deque[_Sample]] = field(
        default_factory=lambda: {way: deque(maxlen=NUM_SAMPLES) for way in Way}
    )
    way: Way = Way.OFF
    """How its steps are computed now."""
    decided: Way | None = None
    """What was decided last from times, and written to the log."""

    def times(self, way: Way) -> StepTimes | None:
        """Medians of recent steps, or None if there are too few."""
        recent = self._recent(way)
        if len(recent) < MIN_SAMPLES:
            return None
        return StepTimes(
            forward_us=int(median(s.times.forward_us for s in recent)),
            wait_us=int(median(s.times.wait_us for s in recent)),
            experts_us=int(median(s.times.experts_us for s in recent)),
        )

    def tokens(self, way: Way) -> float:
        """Median of the recent steps' tokens."""
        return median(s.tokens for s in self._recent(way))

    def _recent(self, way: Way) -> list[_Sample]:
        return [s for s in self.samples[way] if self.visits - s.visit <= FRESH_STEPS]


class OverlapModel:
    """Chooses each step's way. Its calls and their arguments are the same on all ranks."""

    def __init__(self, setting: str, log: bool) -> None:
        """setting: `auto`, or the value of a Way to take it always. `log`: whether this rank writes decisions to the log."""
        self._fixed = None if setting == "auto" else Way(setting)
        self._level = logging.INFO if log else logging.DEBUG
        self._sizes: dict[int, _Size] = {}
        self._last: tuple[_Size, int] | None = None
        """The step whose times are still to come."""

    def choose(self, agreed: Agreement) -> Way:
        """How to compute the step that was agreed on. Called once per step."""
        tokens = agreed.max_num_tokens
        if agreed.max_halves[1] == 0:
            # No rank has two tokens: there is nothing to cut.
            self._last = None
            return Way.OFF
        size = self._sizes.setdefault(tokens.bit_length(), _Size())
        if self._fixed is not None:
            size.way = self._fixed
        elif size.visits % DECIDE_EVERY == 0:
            size.way = self._decide(size, tokens.bit_length())
        size.visits += 1
        self._last = size, tokens
        return size.way

    def observe(self, times: StepTimes) -> None:
        """What the last chosen step took."""
        if self._last is not None:
            size, tokens = self._last
            size.samples[size.way].append(_Sample(size.visits, tokens, times))
            self._last = None

    def _decide(self, size: _Size, bits: int) -> Way:
        off = size.times(Way.OFF)
        if off is None:
            return Way.OFF
        others = [self._expect(size, way, off) for way in (Way.TWO_BATCHES, Way.CHUNKS)]
        best = min(others, key=lambda e: e.forward_us)
        # What is on stays on until it is slower, so that noise does not switch it to and fro.
        limit = off.forward_us * (1.0 if size.decided is best.way else 1 - MARGIN)
        way = best.way if best.forward_us < limit else Way.OFF
        if way is not size.decided:
            size.decided = way
            logger.log(
                self._level,
                "overlap of steps with %d to %d tokens: %s. A step without takes %s, of which %s waiting for rows;"
                " expected of the others: %s; %s",
                1 << (bits - 1), (1 << bits) - 1, way.value, _ms(off.forward_us), _ms(off.wait_us), *others,
            )  # fmt: skip
        return way

    def _expect(self, size: _Size, way: Way, off: StepTimes) -> Expectation:
        seen = size.times(way)
        if seen is not None:
            hidden, extra = off.wait_us - seen.wait_us, seen.compute_us - off.compute_us
            return Expectation(way, seen.forward_us, hidden, extra, measured=True)
        tokens = size.tokens(Way.OFF)
        cost: float | None
        if way is Way.TWO_BATCHES:
            hidden_us = min(off.wait_us, off.compute_us / 2)
            cost = self._cost_of_halves(tokens, lambda times: times.compute_us)
        else:
            latency = min(times.wait_us for _, times in self._without_overlap())
            hidden_us = min(off.wait_us - latency, off.experts_us) / 2
            cost = self._cost_of_halves(tokens, lambda times: times.experts_us)
        return Expectation(way, off.forward_us - hidden_us + (cost or 0), hidden_us, cost, measured=False)

    def _cost_of_halves(self, tokens: float, part: Callable[[StepTimes], int]) -> float | None:
        """2 f(t / 2) - f(t), where f is a part of the step's time; None if nothing is known of t / 2."""
        points = [(at, part(times)) for at, times in self._without_overlap()]
        whole = _interpolate(points, tokens)
        halved = _interpolate(points, tokens / 2)
        return None if whole is None or halved is None else max(0.0, 2 * halved - whole)

    def _without_overlap(self) -> list[tuple[float, StepTimes]]:
        """(tokens, times) of each size that has been measured, smallest first."""
        sizes = [(s, s.times(Way.OFF)) for _, s in sorted(self._sizes.items())]
        return [(s.tokens(Way.OFF), times) for s, times in sizes if times is not None]


def _interpolate(points: list[tuple[float, int]], at: float) -> float | None:
    """Linear between points sorted by x; None outside of them."""
    if points and points[-1][0] == at:
        return points[-1][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= at < x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return None


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f} ms"
