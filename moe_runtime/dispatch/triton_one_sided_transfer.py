"""A call of the one-sided Triton dispatcher that is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

V = TypeVar("V")


class Transfer(Generic[V]):
    """In one round or several, the first of which is sent at once. It holds the rows that it sends."""

    def __init__(
        self,
        num_rounds: int,
        send: Callable[[int], None],
        receive: Callable[[int], None],
        result: Callable[[], V],
        settle: Callable[[Transfer[V]], None],
    ) -> None:
        """settle: finishes what was begun before the given transfer."""
        self.num_rounds = num_rounds
        self._send, self._receive, self._result, self._settle = send, receive, result, settle
        self._done = 0
        self._value: V | None = None
        send(0)

    def advance(self) -> None:
        """Receive the round that was sent last, and send the next one if there is one."""
        self._receive(self._done)
        self._done += 1
        if self._done < self.num_rounds:
            self._send(self._done)

    def finish(self) -> V:
        """All rounds that are left. The value is the same however often this is called."""
        if self._value is None:
            while self._done < self.num_rounds:
                self.advance()
            self._value = self._result()
        return self._value

    def wait(self) -> V:
        """Finish earlier calls, so that all ranks go in the same order, and then this one."""
        self._settle(self)
        return self.finish()
