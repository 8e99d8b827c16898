"""Files of records, written and read back, damaged and cut off; and balancedness of known cases."""

from __future__ import annotations

import random
import resource
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from moe_runtime.errors import ConfigError
from moe_runtime.placement.balancedness import BalanceWatch, balancedness
from moe_runtime.placement.record import (
    PHASES,
    RecordMeta,
    load_record,
    rank_file,
    write_meta,
    write_rank,
)
from tests.helpers.recorded_steps import PLACEMENT, E, K, L, Step, make


def meta(num_ranks: int) -> RecordMeta:
    return RecordMeta(
        model="m", checkpoint="0" * 64, architecture="A", num_layers=L, num_experts=E, top_k=K, num_ranks=num_ranks,
        hidden_size=8, intermediate_size=4, expert_bytes=96, row_bytes=32, return_bytes=32, dtype="float32",
        hardware="none", started_at="2026-01-01T00:00:00+00:00", placements=[[layer * num_ranks for layer in PLACEMENT]],
    )  # fmt: skip


def test_records_are_read_back(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    recorders = [make(windows=8), make(windows=8)]
    steps = [[Step(draw, 1) for _ in range(13)] for _ in recorders]
    for recorder, played in zip(recorders, steps, strict=True):
        for step in played:
            step.play(recorder)
    for rank, recorder in enumerate(recorders):
        write_rank(tmp_path, rank, recorder.arrays())
    write_meta(tmp_path, meta(2))
    record = load_record(tmp_path)
    assert record.counts_WPNLE.shape == (len(record.num_steps_W), 2, 2, L, E)
    for rank, played in enumerate(steps):
        assert (record.counts_WPNLE[:, :, rank].sum(axis=0) == sum(s.counts() for s in played)).all()
    assert (record.loads.sum(axis=0) == sum(s.counts().sum(axis=0) for p in steps for s in p)).all()


def test_damaged_records_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record\.json cannot be read"):
        load_record(tmp_path)
    write_meta(tmp_path, meta(1))
    with pytest.raises(ConfigError, match=r"rank0\.npz: cannot be read"):
        load_record(tmp_path)
    rank_file(tmp_path, 0).write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(ConfigError, match=r"rank0\.npz"):
        load_record(tmp_path)
    np.savez(rank_file(tmp_path, 0), evil=np.array([object()], dtype=object))
    with pytest.raises(ConfigError, match="lacks the arrays"):
        load_record(tmp_path)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """Files may have 100 bytes."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_rank(tmp_path, 0, make(windows=4).arrays())
        with pytest.raises(OSError, match="File too large"):
            write_meta(tmp_path, meta(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_was_cut_off_says_so(tmp_path: Path, seed: int) -> None:
    """By whatever killed a rank or a copy: every length of the file."""
    write_meta(tmp_path, meta(1))
    write_rank(tmp_path, 0, make(windows=4).arrays())
    whole = rank_file(tmp_path, 0).read_bytes()
    draw = random.Random(seed)
    for length in [0, 1, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(30))]:
        rank_file(tmp_path, 0).write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"rank0\.npz"):
            load_record(tmp_path)
    for _ in range(100):
        place = draw.randrange(len(whole))
        rank_file(tmp_path, 0).write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        with suppress(ConfigError):
            load_record(tmp_path)


def test_balancedness_of_known_cases() -> None:
    even = np.full((2, 3, 4), 7)
    assert balancedness(even) == 1.0
    one = np.zeros((2, 3, 4), dtype=np.int64)
    one[:, :, 2] = 5
    assert balancedness(one) == pytest.approx(1 / 4)
    # Means 2 and 3, fullest 3 and 6.
    assert balancedness(np.array([[[1, 3], [0, 6]]])) == pytest.approx(5 / 9)
    assert balancedness(np.zeros((0, 3, 4), dtype=np.int64)) is None


def test_the_watch_joins_the_ranks_steps() -> None:
    watch = BalanceWatch(2)
    assert watch.of("decode") is None
    watch.see(0, [(0, 0, [4, 4]), (1, 1, [1, 0]), (2, 1, [9, 9])])
    assert watch.of("prefill") is None
    watch.see(1, [(1, 1, [3, 6])])
    watch.see(1, [(0, 0, [4, 4])])
    assert watch.of("prefill") == 1.0
    assert watch.of("decode") == pytest.approx(5 / 9)
    assert watch.rows == [[8, 8], [19, 9]]
    assert PHASES == ("prefill", "decode")
