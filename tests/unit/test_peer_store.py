"""Stores past the caches hold the same bytes, and are taken where they are the faster way."""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np
import pytest

from moe_runtime.dispatch import peer_store
from moe_runtime.dispatch.peer_store import CALLS_BETWEEN_TRIALS, LARGE_BYTES, SAMPLES, PeerStore, stream_rows
from moe_runtime.native.build import Native


@pytest.mark.other_sets(row_bytes=[200], threads=[2])
@pytest.mark.parametrize("row_bytes", [1, 63, 64, 200, 4096, 200_001])
@pytest.mark.parametrize("shift", [0, 1, 37])
def test_streamed_rows_are_the_rows(
    native: Native, threads: int, row_bytes: int, shift: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    x = draw.integers(0, 256, (37, row_bytes), dtype=np.uint8)
    index = draw.integers(0, 37, 2 * 53)[::2]  # Not contiguous, as nonzero() gives it.
    memory = np.full(shift + index.size * row_bytes + 64, 0xA5, dtype=np.uint8)
    assert native.library is not None
    stream_rows(native.library, x, index, memory.data[shift : shift + index.size * row_bytes])
    assert np.array_equal(memory[shift : shift + index.size * row_bytes], x[index].ravel())
    assert (memory[:shift] == 0xA5).all()
    assert (memory[shift + index.size * row_bytes :] == 0xA5).all()


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_row_that_is_not_there_is_refused_before_anything_is_stored(native: Native, wrong: int) -> None:
    x, out = np.ones((3, 8), dtype=np.uint8), np.zeros(16, dtype=np.uint8)
    assert native.library is not None
    with pytest.raises(IndexError, match="not in 0 to 2"):
        stream_rows(native.library, x, np.array([0, wrong]), out.data)
    assert not out.any()


def ways(
    store: PeerStore, monkeypatch: pytest.MonkeyPatch, calls: int, ordinary_s: float, streaming_s: float
) -> list[bool]:
    """Whether each of so many large stores streamed, on a clock on which they take so long."""
    taken: list[bool] = []
    now = [0.0]

    def take(streaming: bool, seconds: float) -> None:
        taken.append(streaming)
        now[0] += seconds

    monkeypatch.setattr(peer_store, "gather_many", lambda *_: take(False, ordinary_s))
    monkeypatch.setattr(peer_store, "stream_rows", lambda *_: take(True, streaming_s))
    monkeypatch.setattr(peer_store.time, "perf_counter", lambda: now[0])
    x, index, out = (
        np.zeros((1, LARGE_BYTES), dtype=np.uint8),
        np.zeros(1, dtype=np.int64),
        bytearray(LARGE_BYTES),
    )
    for _ in range(calls):
        store.gather(x, index, memoryview(out))
    return taken


def test_the_way_follows_the_machine(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    store, turn = PeerStore(native, is_here=False), CALLS_BETWEEN_TRIALS + 1
    near = ways(store, monkeypatch, 4 * turn, ordinary_s=1.0, streaming_s=1.5)
    assert near == list(islice(cycle([True] + [False] * (turn - 1)), 4 * turn)), "streams but to try"
    far = ways(store, monkeypatch, 4 * turn, ordinary_s=5.0, streaming_s=1.0)
    assert far.count(False) <= SAMPLES + 3, "goes on with ordinary stores although streaming ones are faster"
    again = ways(store, monkeypatch, 4 * turn, ordinary_s=1.0, streaming_s=1.5)
    assert again.count(True) <= turn + SAMPLES + 3, "does not come back"


def test_streaming_that_is_a_little_faster_is_not_worth_it(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PeerStore(native, is_here=False)
    assert (
        ways(store, monkeypatch, 200, ordinary_s=1.9, streaming_s=1.0).count(True)
        <= 200 // CALLS_BETWEEN_TRIALS + 1
    )


@pytest.mark.parametrize("case", ["no library", "own rank", "few bytes"])
def test_stores_are_ordinary(native: Native, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    store = PeerStore(None if case == "no library" else native, is_here=case == "own rank")
    if case == "few bytes":
        monkeypatch.setattr(peer_store, "LARGE_BYTES", LARGE_BYTES + 1)
    assert not any(ways(store, monkeypatch, 100, ordinary_s=9.0, streaming_s=1.0))
