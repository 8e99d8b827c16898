"""The scheduler's policy: every request gets what it gets alone, in a fair order, and nothing leaks."""

from __future__ import annotations

import random

import pytest

from moe_runtime.core import SamplingParams, Sequence, SequenceStatus
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.scheduler import Scheduler
from moe_runtime.errors import ConfigError, RequestError
from tests.helpers.simulation import (
    EOS,
    VOCABULARY,
    Simulation,
    random_prompt,
)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_random_traffic_gives_every_request_its_lone_output(
    seed: int, block_size: int, caching: bool
) -> None:
    rng = random.Random(seed)
    num_preempted = num_copied = 0
    for _ in range(6):
        # From just enough for the largest request (24 + 40 - 1 tokens) to about twice that.
        num_blocks = rng.randrange(-(-63 // block_size), 120 // block_size)
        sim = Simulation(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=rng.choice([3, 12]),
            budget=rng.choice([3, 7, 32]),
            max_model_len=64,
            caching=caching,
            seed=rng.randrange(2**31),
        )
        survivors = random_traffic(sim, rng, num_requests=25)
        for seq in survivors:
            assert sim.finished[seq.request_id] is seq
            sim.assert_as_alone(seq)
        sim.assert_nothing_leaked()
        num_preempted += sim.scheduler.num_preemptions
        num_copied += sim.num_copied
    assert bool(num_copied) == (caching and block_size > 1)
    assert num_preempted


def random_traffic(sim: Simulation, rng: random.Random, num_requests: int) -> list[Sequence]:
    """Requests at random times with prompts much alike, random aborts; returns those that were not aborted."""
    live: list[Sequence] = []
    everyone: list[Sequence] = []
    while sim.num_added < num_requests or sim.scheduler.has_work:
        while sim.num_added < num_requests and rng.random() < 0.5:
            seq = sim.add(
                random_prompt(rng, everyone, longest=rng.choice([6, 24])),
                max_tokens=rng.choice([1, 3, 15, 40, 40]),
                ignore_eos=rng.random() < 0.8,
                stop_token_ids=[rng.randrange(VOCABULARY)] if rng.random() < 0.2 else None,
                min_tokens=rng.randrange(2),
            )
            live.append(seq)
            everyone.append(seq)
        if live and rng.random() < 0.03:
            seq = live.pop(rng.randrange(len(live)))
            finished = seq.status is SequenceStatus.FINISHED
            assert sim.scheduler.abort(seq.request_id) is (None if finished else seq)
            assert seq.block_table == []
            sim.manager.check_integrity()
        if rng.random() < 0.02:
            sim.manager.reset_prefix_cache()
        sim.step()
    return live


def test_a_skipped_copy_is_noticed() -> None:
    """The simulation itself: it must see the error that it is there to find."""
    sim = Simulation(num_blocks=16, block_size=4)
    sim.add([1, 2, 3, 4, 5, 1], max_tokens=1)
    sim.run()
    sim.copy_blocks = lambda _source, _destination: None
    sim.add([1, 2, 3, 4, 5, 2], max_tokens=1)
    with pytest.raises(AssertionError, match="position 4 holds something else"):
        sim.run()


def test_prefix_hits_are_exact_to_the_token_and_skip_computing() -> None:
    sim = Simulation(num_blocks=16, block_size=4)
    sim.add([1, 2, 3, 4, 5, 1, 2, 3, 4], max_tokens=1)
    sim.run()
    seq = sim.add([1, 2, 3, 4, 5, 1, 2, 5], max_tokens=1)
    plan = sim.step()
    assert seq.num_cached_tokens == 7
    assert [(entry.start, entry.num_new_tokens) for entry in plan.scheduled] == [(7, 1)]
    assert len(plan.block_copies) == 1


def test_decodes_come_first_and_prompts_fill_the_budget() -> None:
    sim = Simulation(num_blocks=64, block_size=4, budget=10)
    decoding = sim.add([1, 2, 3], max_tokens=9, ignore_eos=True)
    sim.step()
    long, short = sim.add([2] * 25, ignore_eos=True), sim.add([3] * 4, ignore_eos=True)
    counts = [{entry.sequence: entry.num_new_tokens for entry in sim.step().scheduled} for _ in range(3)]
    assert counts == [{decoding: 1, long: 9}, {decoding: 1, long: 9}, {decoding: 1, long: 7, short: 2}]
    sim.step()
    assert (len(decoding.output_token_ids), len(long.output_token_ids), len(short.output_token_ids)) == (
        5,
        2,
        1,
    )


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing() -> None:
    sim = Simulation(num_blocks=64, block_size=4, budget=10)
    seq = sim.add([2] * 21)
    outputs = []
    for _ in range(3):
        sim.step()
        outputs.append((seq.num_computed_tokens, len(seq.output_token_ids)))
    assert outputs == [(10, 0), (20, 0), (21, 1)]


def test_nobody_overtakes_a_big_request_that_waits_for_blocks() -> None:
    sim = Simulation(num_blocks=8, block_size=4, budget=64, caching=False)
    sim.add([1] * 8, max_tokens=8, ignore_eos=True)
    sim.step()
    big = sim.add([2] * 28, max_tokens=2)
    small = [sim.add([3], max_tokens=1) for _ in range(20)]
    while big.status is SequenceStatus.WAITING:
        sim.step()
        assert all(
            seq.status is SequenceStatus.WAITING for seq in small if big.status is SequenceStatus.WAITING
        )
    sim.run()
    assert len(sim.finished) == 22


def test_a_long_prompt_among_a_stream_of_short_ones_and_they_after_it(seed: int) -> None:
    rng = random.Random(seed)
    sim = Simulation(num_blocks=24, block_size=4, budget=8, max_num_seqs=4, max_model_len=80)
    long = None
    for number in range(150):
        sim.add([rng.randrange(VOCABULARY) for _ in range(3)], max_tokens=3)
        if number == 20:
            long = sim.add([rng.randrange(VOCABULARY) for _ in range(70)], max_tokens=5)
        sim.step()
    sim.run()
    assert long is not None
    order = [int(request_id[1:]) for request_id in sim.finished]
    # Sequences enter in arrival order, four at a time; the long one is slow itself but holds nobody outside up.
    assert order.index(21) < 21 + 60
    assert len(order) == 151


def test_the_latest_arrival_is_preempted_and_resumes_cheaply() -> None:
    sim = Simulation(num_blocks=6, block_size=4, budget=32, max_model_len=24)
    first = sim.add([1] * 8, max_tokens=12, ignore_eos=True)
    second = sim.add([2] * 7, max_tokens=12, ignore_eos=True)
    third = sim.add([3, 3], max_tokens=2)
    plans = sim.run()
    assert sim.scheduler.num_preemptions == sum(plan.num_preempted for plan in plans) > 0
    assert first.num_preemptions == 0
    assert list(sim.finished).index(third.request_id) > 0
    for seq in (first, second, third):
        sim.assert_as_alone(seq)
    sim.assert_nothing_leaked()


def test_a_preempted_sequence_goes_to_the_front_and_keeps_its_cached_count() -> None:
    sim = Simulation(num_blocks=4, block_size=2, budget=32, max_model_len=9)
    first = sim.add([1, 2, 3], max_tokens=6, ignore_eos=True)
    second = sim.add([1, 2], max_tokens=6, ignore_eos=True)
    sim.step()
    behind = sim.add([5], max_tokens=1)
    while second.num_preemptions == 0:
        sim.step()
    assert second.status is SequenceStatus.WAITING
    assert second.block_table == []
    assert behind.status is SequenceStatus.WAITING
    resumed = None
    while second.status is not SequenceStatus.FINISHED:
        plan = sim.step()
        for entry in plan.scheduled:
            if entry.sequence is second and resumed is None:
                resumed = entry
        assert resumed is not None or behind.status is SequenceStatus.WAITING
    assert resumed is not None
    assert resumed.start > 0, "what it had computed was still cached"
    assert second.num_cached_tokens == 0
    sim.run()
    for seq in (first, second, behind):
        sim.assert_as_alone(seq)


@pytest.mark.parametrize("num_computing", [0, 1, 3])
def test_abort_frees_everything(num_computing: int) -> None:
    sim = Simulation(num_blocks=16, block_size=4, budget=5)
    seq = sim.add([1] * 12, max_tokens=3)
    other = sim.add([2] * 3, max_tokens=3)
    for _ in range(num_computing):
        sim.step()
    assert sim.scheduler.abort(seq.request_id) is seq
    assert (seq.status, seq.finish_reason, seq.block_table) == (SequenceStatus.FINISHED, "abort", [])
    assert sim.scheduler.abort(seq.request_id) is None
    assert sim.scheduler.abort("unknown") is None
    sim.run()
    sim.assert_as_alone(other)
    sim.assert_nothing_leaked()


def test_abort_while_preempted() -> None:
    sim = Simulation(num_blocks=4, block_size=2, budget=32, max_model_len=9)
    sim.add([1, 2, 3], max_tokens=6, ignore_eos=True)
    second = sim.add([1, 2], max_tokens=6, ignore_eos=True)
    while second.num_preemptions == 0:
        sim.step()
    assert sim.scheduler.abort(second.request_id) is second
    sim.run()
    sim.assert_nothing_leaked()


def decode(tokens: list[int], **options: object) -> Sequence:
    """A sequence for which the model said `tokens`, as far as it listened."""
    eos = options.pop("eos_token_ids", (EOS,))
    seq = Sequence("r", [1, 2], SamplingParams(**options), eos_token_ids=eos)  # type: ignore[arg-type]
    scheduler = Scheduler(BlockManager(8, 4), 4, 16, max_model_len=8)
    scheduler.add(seq)
    for token in tokens:
        if scheduler.has_work:
            scheduler.commit(scheduler.schedule(), [token])
    assert (seq.finish_reason is None) == scheduler.has_work
    return seq


@pytest.mark.parametrize(
    ("tokens", "options", "output", "reasons"),
    [
        ([3, EOS, 4], {}, [3, EOS], ("stop", None)),
        ([3, EOS, 4], {"ignore_eos": True, "max_tokens": 3}, [3, EOS, 4], ("length", None)),
        ([3, 4, 5], {"stop_token_ids": [4]}, [3, 4], ("stop", 4)),
        ([3, 4, 5], {"max_tokens": 2}, [3, 4], ("length", None)),
        ([3, EOS], {"max_tokens": 2}, [3, EOS], ("stop", None)),
        ([3, 4], {"max_tokens": 2, "stop_token_ids": [4]}, [3, 4], ("stop", 4)),
        ([EOS, 4, EOS], {"min_tokens": 2, "max_tokens": 5}, [EOS, 4, EOS], ("stop", None)),
        ([4, 4, 3], {"min_tokens": 2, "stop_token_ids": [4]}, [4, 4], ("stop", 4)),
        ([EOS], {"stop_token_ids": [EOS]}, [EOS], ("stop", None)),
        ([EOS], {"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], ("stop", EOS)),
        ([3] * 9, {"max_tokens": 99}, [3] * 6, ("length", None)),
        ([3] * 9, {"max_tokens": None}, [3] * 6, ("length", None)),
        ([9, 7], {"eos_token_ids": (5, 7)}, [9, 7], ("stop", None)),
        ([3], {}, [3], (None, None)),
    ],
)
def test_finish(
    tokens: list[int],
    options: dict[str, object],
    output: list[int],
    reasons: tuple[str | None, int | None],
) -> None:
    seq = decode(tokens, **dict(options))
    assert seq.output_token_ids == output
    assert (seq.finish_reason, seq.stop_reason) == reasons


def test_what_can_never_be_served_is_refused_with_numbers() -> None:
    sim = Simulation(num_blocks=4, block_size=4, max_model_len=30)
    with pytest.raises(RequestError, match="empty"):
        sim.add([])
    with pytest.raises(RequestError, match=r"30 tokens.*max_model_len=30.*29"):
        sim.add([1] * 30)
    with pytest.raises(RequestError, match=r"17 tokens.*16 \(4 blocks of 4\)"):
        sim.add([1] * 17, max_tokens=None)
    with pytest.raises(RequestError, match=r"\(10\) and max_tokens \(8\).*17 tokens.*16 .*up to 7") as caught:
        sim.add([1] * 10, max_tokens=8)
    assert caught.value.param == "max_tokens"
    assert not sim.scheduler.has_work


def test_the_largest_request_that_is_accepted_completes() -> None:
    sim = Simulation(num_blocks=4, block_size=4, max_model_len=30)
    for first, max_tokens in ((1, 7), (2, None), (2, 7)):
        seq = sim.add([first] * 10, max_tokens=max_tokens, ignore_eos=True)
        sim.run()
        assert len(seq.output_token_ids) == 7
        assert seq.finish_reason == "length"
    sim.assert_nothing_leaked()


def test_a_lone_request_completes_when_its_prefix_source_leaves_no_room_for_a_copy() -> None:
    sim = Simulation(num_blocks=2, block_size=4, max_model_len=30, budget=64)
    sim.add([1, 2, 3, 4, 5, 1, 2], max_tokens=1)
    sim.run()
    assert sim.manager.num_cached == 2
    seq = sim.add([1, 2, 3, 4, 5, 3], max_tokens=3, ignore_eos=True)
    sim.run()
    sim.assert_as_alone(seq)
    assert seq.num_cached_tokens == 4


def test_an_id_in_use_is_refused() -> None:
    sim = Simulation(num_blocks=4, block_size=4)
    seq = sim.add([1])
    with pytest.raises(RequestError, match="'r0' is in use"):
        sim.scheduler.add(Sequence(seq.request_id, [1], SamplingParams()))


def test_an_idle_step_is_empty_and_may_be_committed() -> None:
    sim = Simulation(num_blocks=4, block_size=4)
    plan = sim.scheduler.schedule()
    assert (plan.scheduled, plan.num_tokens) == ((), 0)
    assert sim.scheduler.commit(plan, []) == []
    assert sim.scheduler.schedule().scheduled == ()


def test_sampled_tokens_must_match_the_plan() -> None:
    sim = Simulation(num_blocks=4, block_size=4)
    sim.add([1])
    plan = sim.scheduler.schedule()
    with pytest.raises(ValueError, match="2 sampled tokens for 1"):
        sim.scheduler.commit(plan, [3, 4])
    sim.scheduler.commit(plan, [3])


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_must_be_positive(name: str) -> None:
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name}=0"):
        Scheduler(BlockManager(1, 1), **limits)
