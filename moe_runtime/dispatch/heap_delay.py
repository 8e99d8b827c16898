"""A slower network to try out: what a rank writes into its peers' shared memory is seen there only after a while.

Only the words of the protocol are held back, the flag among them, in the order in which they were written; the rows
themselves lie in memory that nobody reads before its flag. So a message arrives `delay_s` after it was sent, and
messages sent shortly after one another travel together, as on a network with latency and ample bandwidth.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from moe_runtime.dispatch.heap_shm import SharedHeap

_Store = tuple[float, memoryview, int, int]
"""When it is due (time.monotonic), and words[index] = value."""


def delay_words(heap: SharedHeap, delay_s: float) -> None:
    """From now on this rank's stores through heap.words of its peers happen delay_s seconds later."""
    stores: queue.SimpleQueue[_Store] = queue.SimpleQueue()
    threading.Thread(target=_carry_out, args=(stores,), daemon=True, name="delayed stores").start()
    for peer, words in enumerate(heap.words):
        if peer != heap.rank:
            # All that is done with a peer's words, slicing and storing, as if they were themselves.
            heap.words[peer] = cast("memoryview", _DelayedWords(words, stores, delay_s))


class _DelayedWords:
    """Words written with a delay."""

    def __init__(self, words: memoryview, stores: queue.SimpleQueue[_Store], delay_s: float) -> None:
        self._words, self._stores, self._delay_s = words, stores, delay_s

    def __getitem__(self, part: slice) -> _DelayedWords:
        return _DelayedWords(self._words[part], self._stores, self._delay_s)

    def __setitem__(self, index: int, value: int) -> None:
        self._stores.put((time.monotonic() + self._delay_s, self._words, index, value))


def _carry_out(stores: queue.SimpleQueue[_Store]) -> None:
    while True:
        due, words, index, value = stores.get()
        wait = due - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        words[index] = value
