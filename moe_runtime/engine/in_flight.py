"""The sequences that are on their way, by id and by request, and the load they put on their ranks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from moe_runtime.engine.outputs import CompletionDelta
from moe_runtime.engine.rank_chooser import RankChooser
from moe_runtime.engine.streams import CompletionStream, RequestStream


@dataclass(eq=False)
class InFlightSequence:
    """One completion on a rank."""

    sequence_id: str
    rank: int
    request: RequestStream
    completion: CompletionStream
    load: int
    """Tokens it still accounts for in its rank's load."""


class InFlight:
    """All unfinished sequences of a client."""

    def __init__(self, chooser: RankChooser) -> None:
        self._chooser = chooser
        self._by_id: dict[str, InFlightSequence] = {}
        self._by_request: dict[str, list[InFlightSequence]] = {}
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()

    @property
    def request_ids(self) -> list[str]:
        """Requests with an unfinished sequence."""
        return list(self._by_request)

    def get(self, sequence_id: str) -> InFlightSequence | None:
        """The sequence, or None if it has ended or never was."""
        return self._by_id.get(sequence_id)

    def of_request(self, request_id: str) -> list[InFlightSequence]:
        """A copy: sequences may be removed while it is read."""
        return list(self._by_request.get(request_id, []))

    def all(self) -> list[InFlightSequence]:
        """A copy: sequences may be removed while it is read."""
        return list(self._by_id.values())

    def add(self, sequence: InFlightSequence) -> None:
        """Take a new sequence in, and put its load on its rank's."""
        self._by_id[sequence.sequence_id] = sequence
        self._by_request.setdefault(sequence.request.request_id, []).append(sequence)
        self.idle.clear()
        load = self._chooser.loads[sequence.rank]
        load.num_sequences += 1
        load.num_tokens += sequence.load

    def remove(self, sequence: InFlightSequence) -> None:
        """Forget a sequence, and take what is left of its load off its rank's."""
        del self._by_id[sequence.sequence_id]
        siblings = self._by_request[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request.request_id]
        if not self._by_id:
            self.idle.set()
        load = self._chooser.loads[sequence.rank]
        load.num_sequences -= 1
        load.num_tokens -= sequence.load

    def credit(self, sequence: InFlightSequence, delta: CompletionDelta) -> None:
        """Take what has been computed off the rank's load. A prompt counts until its first token."""
        done = len(delta.token_ids)
        if sequence.completion.index == 0 and sequence.completion.num_tokens == done > 0:
            done += delta.num_prompt_tokens
        done = min(done, sequence.load)
        sequence.load -= done
        self._chooser.loads[sequence.rank].num_tokens -= done
