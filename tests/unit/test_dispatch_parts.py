"""Waiting, mailbox sizes, the local dispatcher's corner cases, and the reasons why a dispatcher cannot serve."""

from __future__ import annotations

import platform
import random
import time
from pathlib import Path

import pytest
import torch

from moe_runtime.core import DispatchPlan
from moe_runtime.dispatch import collective, heap_shm, local, one_sided
from moe_runtime.dispatch.local import LocalDispatcher
from moe_runtime.dispatch.mailbox import HEADER_BYTES, segment_bytes, slab_bytes, slab_capacity
from moe_runtime.dispatch.waiting import lockstep_errors, seen_soon, wait_until
from moe_runtime.errors import LockstepError


def test_wait_returns_once_the_message_is_there() -> None:
    end = time.monotonic() + 0.05
    wait_until(lambda: time.monotonic() > end, [1], "message", 30.0, lambda rank: True)
    assert time.monotonic() > end


def test_seen_soon_sees_only_the_expected_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag comes with the third turn that is given away, or is that of another exchange."""
    words = memoryview(bytearray(16)).cast("q")
    turns = iter(range(1, 1000))

    def peer_runs() -> None:
        words[0] = 7 if next(turns) >= 3 else 6

    monkeypatch.setattr("os.sched_yield", peer_runs)
    assert seen_soon(words, 7)
    assert next(turns) == 4, "it went on after the flag had come"
    assert not seen_soon(words, 8)


def test_wait_names_the_late_rank() -> None:
    with pytest.raises(LockstepError, match=r"rank 3 sent no message for 0\.05 s"):
        wait_until(lambda: False, [3, 1], "message", 0.05, lambda rank: True)


def test_wait_ends_when_the_peer_is_dead() -> None:
    asked = []
    with pytest.raises(LockstepError, match="rank 2 died"):
        wait_until(lambda: False, [2], "message", 30.0, lambda rank: bool(asked.append(rank)))
    assert set(asked) == {2}


def test_the_last_message_of_a_dead_peer_counts() -> None:
    """It arrives between the look at the flag and the look at the process."""
    arrived = []

    def is_alive(rank: int) -> bool:
        arrived.append(rank)
        return False

    wait_until(lambda: bool(arrived), [0], "message", 30.0, is_alive)


def test_only_failures_of_the_collective_become_lockstep_errors() -> None:
    with pytest.raises(LockstepError, match=r"combine failed.*reset by peer"), lockstep_errors("combine"):
        raise RuntimeError("reset by peer")
    with pytest.raises(ValueError, match="ours"), lockstep_errors("combine"):
        raise ValueError("ours")


def test_sizes_agree(seed: int) -> None:
    """What segment_bytes asks for n rows holds n rows, and no slab promises more than it has."""
    draw = random.Random(seed)
    for _ in range(300):
        N, rows, row_bytes, topk = (
            draw.randrange(1, 9),
            draw.randrange(1, 50),
            draw.randrange(1, 300),
            draw.randrange(9),
        )
        slab = slab_bytes(N, segment_bytes(N, rows, row_bytes, topk))
        capacity = slab_capacity(slab, row_bytes, topk)
        assert capacity >= rows
        slots = -(-capacity * topk * 4 // 64) * 64
        assert HEADER_BYTES + slots + capacity * row_bytes <= slab


def test_local_with_a_slot_named_twice_and_padding() -> None:
    x = torch.arange(6.0).view(3, 2)
    weights = torch.tensor([[2.0, 3.0], [1.0, 1.0], [0.5, float("nan")]])
    plan = DispatchPlan(torch.tensor([[1, 1], [-1, -1], [0, -1]]), weights, 3, 1, 0, 3)
    dispatcher = LocalDispatcher()
    batch = dispatcher.dispatch(x, plan).wait()
    assert batch.tokens_RD.data_ptr() == x.data_ptr()
    assert batch.row_index_S.tolist() == [2, 0, 0]
    assert batch.num_rows_p.tolist() == [1, 2, 0]
    y = batch.tokens_RD[batch.row_index_S]
    out = dispatcher.combine(y, batch, plan).wait()
    assert torch.equal(out, torch.stack([5 * x[0], 0 * x[1], 0.5 * x[2]]))


def test_reasons() -> None:
    assert local.unsupported(1) is None
    assert "2 ranks" in str(local.unsupported(2))
    assert collective.unsupported("cpu", "cpu:gloo,cuda:nccl") is None
    assert collective.unsupported("cuda", "nccl") is None
    assert "gloo" in str(collective.unsupported("cpu", "nccl"))
    assert "mps" in str(collective.unsupported("mps", "gloo"))


def test_reasons_of_one_sided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reason(**change: object) -> str | None:
        need: dict[str, object] = {
            "num_ranks": 4,
            "same_host": True,
            "device_type": "cpu",
            "buffer_bytes": 1 << 20,
            "free_shm_bytes": 4 << 20,
            "row_bytes": 4096,
            "topk": 2,
        }
        return one_sided.unsupported(**(need | change))  # type: ignore[arg-type]

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert reason() is None
    assert "cuda" in str(reason(device_type="cuda"))
    assert "several hosts" in str(reason(same_host=False))
    assert "4 x 1.0 MiB" in str(reason(free_shm_bytes=(4 << 20) - 1))
    assert str(segment_bytes(4, 1, 1 << 20, 2)) in str(reason(row_bytes=1 << 20))
    monkeypatch.setattr(heap_shm, "SHM_FOLDER", tmp_path / "absent")
    assert "absent" in str(reason())
    assert heap_shm.free_shm_bytes(tmp_path / "absent") == 0
    assert heap_shm.free_shm_bytes(tmp_path) > 0
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "aarch64" in str(reason())
