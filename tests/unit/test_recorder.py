"""The recorder against plain loops: counts by window, phase, layer and expert; bounded memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from moe_runtime.errors import ConfigError
from moe_runtime.placement import recorder as recorder_module
from moe_runtime.placement import windows
from moe_runtime.placement.live_loads import NUM_WINDOWS, LiveLoads
from moe_runtime.placement.placement_log import KEPT_PLACEMENTS
from moe_runtime.placement.record import (
    NO_PLACEMENT,
    RANK_ARRAYS,
)
from moe_runtime.placement.recorder import SCRATCH_IDS, LoadRecorder, PartTokens
from moe_runtime.placement.windows import LoadWindows
from tests.helpers.recorded_steps import PLACEMENT, E, K, L, Step, make


@pytest.mark.parametrize("num_steps", [0, 1, 3, 4, 5, 23, 64])
def test_windows_hold_what_loops_count(num_steps: int, seed: int) -> None:
    draw = random.Random(seed)
    recorder = make(windows=4)
    steps = [Step(draw, draw.choice([1, 2])) for _ in range(num_steps)]
    for step in steps:
        step.play(recorder)
    arrays = recorder.arrays()
    assert sorted(arrays) == sorted(RANK_ARRAYS)
    assert min(num_steps, 4) <= len(arrays["first_step_W"]) <= 5
    assert arrays["num_steps_W"].sum() == num_steps
    # Of two lengths at most, one twice the other, but for the last.
    lengths = sorted(set(arrays["num_steps_W"][:-1].tolist()))
    assert len(lengths) <= 1 or lengths == [lengths[0], 2 * lengths[0]]
    begin = 0
    for window, length in enumerate(arrays["num_steps_W"]):
        inside = steps[begin : begin + length]
        assert arrays["first_step_W"][window] == begin
        assert (arrays["counts_WPLE"][window] == sum(step.counts() for step in inside)).all()
        decode = sum(sum(map(sum, step.decode)) for step in inside)
        assert arrays["tokens_WP"][window].tolist() == [
            sum(len(part) for step in inside for part in step.decode) - decode,
            decode,
        ]
        assert arrays["wait_us_W"][window] == 3 * length
        assert arrays["forward_us_W"][window] == 10 * length
        begin += length


@pytest.mark.slow
def test_a_million_steps_take_no_more_memory() -> None:
    working = SCRATCH_IDS * 12 + 4 * 2 * 2 + KEPT_PLACEMENTS * 2 * 2
    memory = 50 * LoadWindows.bytes_per_window(1, 2) + working
    recorder = LoadRecorder(1, 2, 1, memory, torch.device("cpu"), [[[0, 1]]])
    part, ids = [PartTokens(1)], torch.ones(1, 1).long()
    before = recorder.num_bytes
    for _ in range(1_000_000):
        recorder.begin_step(part)
        recorder.count(ids)
        recorder.computed(1)
        recorder.end_step(1, 1, False, 1)
    assert recorder.num_bytes == before == memory
    arrays = recorder.arrays()
    assert len(arrays["num_steps_W"]) in (50, 51)
    assert arrays["counts_WPLE"].sum(axis=0).tolist() == [[[0, 0]], [[0, 1_000_000]]]
    assert len(recorder.take_rows()) == 128


@pytest.mark.parametrize("num_tokens", [1, 700, SCRATCH_IDS // K + 3, SCRATCH_IDS + 1])
@pytest.mark.parametrize("mixed", [False, True])
def test_large_steps_are_counted_in_pieces(num_tokens: int, mixed: bool, seed: int) -> None:
    """Of some layers, of one, of less than one: as many as fit the memory for it."""
    generator = torch.Generator().manual_seed(seed)
    recorder = make(windows=4)
    decode_T = torch.randint(0, 2, (num_tokens,), generator=generator) if mixed else None
    ids_LTK = torch.randint(0, E, (L, num_tokens, K), generator=generator)
    expected = np.zeros((2, L, E), dtype=np.int64)
    phase_T = np.ones(num_tokens, dtype=np.int64) if decode_T is None else decode_T.numpy()
    for layer in range(L):
        np.add.at(expected, (phase_T[:, None], layer, ids_LTK[layer].numpy()), 1)
    kept = ids_LTK.clone()
    for _ in range(2):
        recorder.begin_step([PartTokens(num_tokens, decode_T)])
        for ids_TK in ids_LTK:
            recorder.count(ids_TK)
        recorder.end_step(1, 1, mixed, num_tokens)
    assert (recorder.arrays()["counts_WPLE"] == expected).all()
    assert torch.equal(ids_LTK, kept), "the router's choices are not the recorder's to change"


def test_rows_are_summed_by_layer(seed: int) -> None:
    draw = random.Random(seed)
    recorder = make(windows=4)
    steps = [Step(draw, 1 + i % 2) for i in range(20)]
    for i, step in enumerate(steps):
        step.play(recorder, prefill=i % 3 == 0)
    taken = recorder.take_rows()
    assert [(t.step, t.phase) for t in taken] == [(i, int(i % 3 != 0)) for i in range(20)]
    assert [t.rows for t in taken] == [[(layer + 1) * (1 + i % 2) for layer in range(L)] for i in range(20)]
    assert recorder.take_rows() == []


def test_counts_never_wrap_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows whose sum int32 could not hold are not merged: the oldest is forgotten instead."""
    monkeypatch.setattr(windows, "MAX_TOKENS", 10)
    monkeypatch.setattr(recorder_module, "MAX_TOKENS", 10)
    recorder = make(windows=4)
    ids = torch.zeros(3, K, dtype=torch.int64)
    ids[:, 1] = 1
    for _ in range(100):
        recorder.begin_step([PartTokens(3)])
        for _ in range(L):
            recorder.count(ids)
        recorder.end_step(1, 1, False, 3)
    arrays = recorder.arrays()
    first, steps = arrays["first_step_W"], arrays["num_steps_W"]
    assert (steps[:-1] * 3 > 10 // 2).all(), "as long as they may be"
    assert (arrays["tokens_WP"][:, 1] == steps * 3).all()
    assert (arrays["tokens_WP"] <= 10).all()
    assert (arrays["counts_WPLE"][:, 1, :, :2] == (steps * 3)[:, None, None]).all()
    assert first[-1] + steps[-1] == 100
    assert (first[1:] == first[:-1] + steps[:-1]).all(), "without gaps"


def test_live_counts_go_their_own_way(seed: int) -> None:
    """What is counted while nothing is recorded is in no record, whatever comes in between."""
    draw = random.Random(seed)
    recorder = make(windows=4)
    recorder.live = LiveLoads(L, E, 5 * NUM_WINDOWS, torch.device("cpu"))
    recorded, late = np.zeros((2, L, E), np.int64), np.zeros((2, L, E), np.int64)
    for number in range(60):
        if number % 7 == 3:
            recorder.stop()
            recorder.stop()
        elif number % 7 == 5:
            recorder.set_placement(PLACEMENT)
        elif number % 14 == 6:
            recorder.start()
            recorded[:] = 0
        step = Step(draw, 1)
        step.play(recorder)
        recorder.live.step_done(prefill=False)
        if number >= 20:
            late += step.counts()
        if recorder.recording:
            recorded += step.counts()
        if number % 4 == 0:
            assert (recorder.arrays()["counts_WPLE"].sum(axis=0) == recorded).all(), number
    live = recorder.live.snapshot()
    assert list(live) == list(range(5, 13))
    assert (sum(window.counts_LPE for window in live.values()) == late.swapaxes(0, 1)).all()


def test_memory_is_what_was_given(seed: int) -> None:
    placement = [[list(range(40 * rank, 40 * rank + 40)) for rank in range(8)]] * 58
    recorder = LoadRecorder(58, 256, 8, 64 << 20, torch.device("cpu"), placement, 0.5)
    assert recorder.num_bytes <= 64 << 20
    with pytest.raises(ConfigError, match="expert_load_memory_mib to 1 at least"):
        LoadRecorder(58, 256, 8, 1000, torch.device("cpu"), [[[0]]] * 58)


def test_start_stop_and_placements(seed: int) -> None:
    draw = random.Random(seed)
    recorder = make(windows=64)
    first, second, third = (Step(draw, 1) for _ in range(3))
    first.play(recorder)
    recorder.start()
    second.play(recorder)
    other = [[[4, 3, 2, 1, 0]]] * L
    recorder.set_placement(other)
    third.play(recorder)
    recorder.stop()
    first.play(recorder)
    arrays = recorder.arrays()
    assert arrays["first_step_W"].tolist() == [1, 2]
    assert arrays["num_steps_W"].tolist() == [1, 1]
    assert arrays["placement_W"].tolist() == [0, 1]
    assert recorder.placements == [PLACEMENT, other]
    assert (arrays["counts_WPLE"][1] == third.counts()).all()
    recorder.start()
    assert recorder.placements == [other]
    assert len(recorder.arrays()["num_steps_W"]) == 0


def test_windows_keep_their_placement_or_say_that_it_is_unknown(seed: int) -> None:
    """After each of many changes: a window's placement is the one that all its steps had, else NO_PLACEMENT; the latest are known."""
    draw = random.Random(seed)
    recorder = make(windows=8)
    of_steps: list[int] = []
    """For each step the number of its placement, -1 while layers change one by one."""
    number = 0
    for _ in range(5 * KEPT_PLACEMENTS):
        if draw.random() < 0.5:
            recorder.unset_placement()
            for _ in range(draw.randrange(3)):
                recorder.unset_placement()
                Step(draw, 1).play(recorder)
                of_steps.append(-1)
        number += 1
        recorder.set_placement(numbered(number))
        for _ in range(draw.randrange(4)):
            Step(draw, 1).play(recorder)
            of_steps.append(number)
        arrays = recorder.arrays()
        kept = recorder.placements
        assert len(kept) <= KEPT_PLACEMENTS
        assert kept[-1] == numbered(number)
        known = set()
        windows_W = zip(
            arrays["first_step_W"].tolist(), arrays["num_steps_W"].tolist(), arrays["placement_W"].tolist(), strict=True
        )  # fmt: skip
        for first, steps, index in windows_W:
            inside = set(of_steps[first : first + steps])
            if index == NO_PLACEMENT:
                # Windows are fewer than placements kept, so none that a window needs is forgotten.
                assert len(inside) > 1 or inside == {-1}
            else:
                assert {kept[index] == numbered(n) for n in inside} == {True}
                known |= inside
        assert (number in known) == (of_steps[-1:] == [number])
    recorder.start()
    assert recorder.placements == [numbered(number)]


def numbered(number: int) -> list[list[list[int]]]:
    """The number in base E, a digit in each layer; a placement like any other to the recorder."""
    return [[[number // E**layer % E] * E] for layer in range(L)]


def test_placements_take_no_more_memory_however_often_they_change(seed: int) -> None:
    """With more windows than placements are kept: those of the oldest windows are forgotten, the counts are not."""
    draw = random.Random(seed)
    recorder = make(windows=4 * KEPT_PLACEMENTS)
    before, total = recorder.num_bytes, np.zeros((2, L, E), dtype=np.int64)
    for number in range(1, 3 * KEPT_PLACEMENTS):
        recorder.set_placement(numbered(number))
        step = Step(draw, 1)
        step.play(recorder)
        total += step.counts()
    assert recorder.num_bytes == before
    arrays = recorder.arrays()
    kept = [numbered(n) for n in range(2 * KEPT_PLACEMENTS, 3 * KEPT_PLACEMENTS)]
    assert recorder.placements == kept
    forgotten = 2 * KEPT_PLACEMENTS - 1
    assert arrays["placement_W"].tolist() == [NO_PLACEMENT] * forgotten + list(range(KEPT_PLACEMENTS))
    assert (arrays["counts_WPLE"].sum(axis=0) == total).all()


def test_a_placement_that_is_put_back_is_the_same(seed: int) -> None:
    """As after a move that was given up."""
    draw = random.Random(seed)
    recorder = make(windows=64)
    for change in (recorder.unset_placement, lambda: recorder.set_placement(PLACEMENT), None):
        Step(draw, 1).play(recorder)
        if change is not None:
            change()
    assert recorder.placements == [PLACEMENT]
    assert recorder.arrays()["placement_W"].tolist() == [0, NO_PLACEMENT, 0]


def test_routes_are_those_of_the_latest_tokens(seed: int) -> None:
    draw = random.Random(seed)
    recorder = make(windows=4, share=1.0, routes=20)
    room = len(recorder.routes._step_t)
    expected = []
    for number in range(30):
        step = Step(draw, 2)
        step.play(recorder)
        for decode, ids, sampled in zip(step.decode, step.ids, step.sampled, strict=True):
            for _ in sampled:
                for token, phase in enumerate(decode):
                    expected.append((number, phase, 7, [ids[layer][token] for layer in range(L)]))
    arrays = recorder.arrays()
    expected = expected[-room:]
    assert arrays["routes_step_t"].tolist() == [e[0] for e in expected]
    assert arrays["routes_phase_t"].tolist() == [e[1] for e in expected]
    assert arrays["routes_request_t"].tolist() == [e[2] for e in expected]
    assert arrays["routes_topk_ids_tLK"].tolist() == [e[3] for e in expected]


def test_a_share_of_requests_is_sampled(seed: int) -> None:
    recorder = make(windows=4, share=0.25, routes=10)
    draw = random.Random(seed)
    ids = [f"{draw.getrandbits(64):x}#0" for _ in range(4000)]
    numbers = [recorder.routes.request_number(i) for i in ids]
    assert numbers == [recorder.routes.request_number(i) for i in ids]
    assert 800 < sum(n is not None for n in numbers) < 1200
    assert all(make(4).routes.request_number(i) is None for i in ids)
