"""The step loop of one rank: schedule, agree, compute, sample, report."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moe_runtime.core import Sequence, SequenceStatus
from moe_runtime.engine.control import Header, MoveVote
from moe_runtime.engine.messages import (
    REQUEST_TIME_BOUNDS,
    STEP_TOKEN_BOUNDS,
    Abort,
    Profile,
    Profiled,
    RankStats,
    Rebalance,
    RecordLoads,
    ResetPrefixCache,
    SequenceUpdate,
    StepOutput,
    Stop,
    Submit,
    Tick,
)
from moe_runtime.engine.overlap import OverlapModel, Way, half
from moe_runtime.errors import RequestError
from moe_runtime.sampling.sampler import SampledToken, SamplingError, sample

if TYPE_CHECKING:
    import torch

    from moe_runtime.core import StepPlan
    from moe_runtime.engine.control import Agreement, Control, StepTimes
    from moe_runtime.engine.load_records import LoadRecords
    from moe_runtime.engine.model_runner import ModelRunner
    from moe_runtime.engine.rank_link import RankLink
    from moe_runtime.engine.rebalancing import Rebalancer
    from moe_runtime.engine.scheduler import Scheduler
    from moe_runtime.profiling.timeline import Span

IDLE_S = 0.002
"""Between two headers while experts move or a record is written, and no rank has tokens."""

logger = logging.getLogger(__name__)


@dataclass
class Engine:
    """One rank. All ranks run the same loop in lockstep; a rank without tokens takes part with none."""

    rank: int
    scheduler: Scheduler
    runner: ModelRunner
    control: Control
    link: RankLink
    overlap: OverlapModel
    records: LoadRecords
    rebalancer: Rebalancer | None = None
    """None: experts stay where they are."""
    stopping: bool = False
    stats: RankStats = field(default_factory=RankStats)
    arrivals: dict[str, float] = field(default_factory=dict)
    """When those came that no step has had yet, by request id and time.perf_counter()."""
    together: deque[tuple[int, RecordLoads | Profile]] = field(default_factory=deque)
    """Commands that all ranks must carry out before the same step, with the number of the message they came in."""
    times: StepTimes | None = None
    """This rank's, of the last step, until they have been told in a header."""

    def run(self) -> None:
        """Step until all ranks were told to stop. Raises LockstepError if a peer is lost."""
        while True:
            self.handle(self.link.drain())
            if (written := self.records.written()) is not None:
                self.link.send(written)
            plan = self.scheduler.schedule()
            agreed = self.control.exchange(self._header(plan))
            if agreed.last_times is not None:
                self.overlap.observe(agreed.last_times)
            if agreed.stop:
                return
            self._carry_out(agreed.min_tick)
            if self.rebalancer is not None:
                self._rebalance(self.rebalancer, agreed)
            if agreed.max_num_tokens > 0:
                self.step(plan, agreed)
            elif not agreed.any_work and agreed.same_tick and not self.records.busy:
                # All ranks begin to write a record together, and tell that they are at it from the next header on.
                # Idle: nothing happens on any rank before the front-end speaks to all of them.
                self.handle(self.link.wait())
            else:
                self.handle(self.link.wait_until(agreed.max_tick))
                if self._busy_beside:
                    time.sleep(IDLE_S)

    def step(self, plan: StepPlan, agreed: Agreement) -> None:
        """Compute the plan with the other ranks, sample, and report."""
        self._count(plan)
        way = Way.OFF if agreed.graph_ok else self.overlap.choose(agreed)
        self.stats.graph_steps += agreed.graph_ok
        self.stats.two_batch_steps += way is Way.TWO_BATCHES
        self.stats.chunked_steps += way is Way.CHUNKS
        logits, self.times = self.runner.execute(plan, agreed, way)
        if self.rebalancer is not None:
            self.rebalancer.step_done(self.times, agreed.prefill)
        self.stats.wait_us += self.times.wait_us
        self.stats.forward_us += self.times.forward_us
        if (news := self.records.news()) is not None:
            self.link.send(news)
        sampling = [item.sequence for item in plan.scheduled if item.samples]
        sampled, failures = sample_each(logits, sampling)
        # Whoever samples has waited for the device; nothing wrong may leave this rank.
        self.runner.check()
        self.scheduler.commit(plan, [token.token_id for token in sampled])
        self.stats.steps += 1
        self.stats.generation_tokens += len(sampled) - len(failures)
        # A prompt is done with its first token; recomputing it after a preemption is no new prompt.
        self.stats.prompt_tokens += sum(
            len(seq.prompt_token_ids) for seq in sampling if len(seq.output_token_ids) == 1
        )
        updates = []
        for seq, token in zip(sampling, sampled, strict=True):
            if seq.request_id in failures:
                self.scheduler.abort(seq.request_id)
                updates.append(
                    SequenceUpdate(seq.request_id, finish_reason="error", error=failures[seq.request_id])
                )
            else:
                updates.append(_update(seq, token))
        if plan.scheduled:
            self._report(updates)

    def handle(self, ticks: list[Tick]) -> None:
        """Carry out the front-end's commands."""
        for tick in ticks:
            for command in tick.commands:
                match command:
                    case Submit():
                        self._submit(command)
                    case Abort():
                        self.scheduler.abort(command.request_id)
                        self.arrivals.pop(command.request_id, None)
                    case Stop():
                        self.stopping = True
                    case ResetPrefixCache():
                        self.scheduler.block_manager.reset_prefix_cache()
                    case Rebalance():
                        # The front-end sends it to ranks that can.
                        assert self.rebalancer is not None
                        self.rebalancer.request(command)
                    case Profile() | RecordLoads():
                        self.together.append((tick.number, command))
            if tick.commands:
                self._report([])

    def close(self) -> None:
        """After run()."""
        if self.rebalancer is not None:
            self.rebalancer.close()
        self.runner.close()

    def _rebalance(self, rebalancer: Rebalancer, agreed: Agreement) -> None:
        rebalancer.settle(agreed)
        if (news := rebalancer.take_placement()) is not None:
            self.link.send(news)
        if rebalancer.take_changed():
            self._report([])

    @property
    def _busy_beside(self) -> bool:
        """Whether something goes on that is looked after between steps, also when there are none."""
        return self.records.busy or (self.rebalancer is not None and self.rebalancer.busy)

    def _carry_out(self, min_tick: int) -> None:
        """Commands that all ranks have seen, so that records and traces have the same steps on all of them."""
        while self.together and self.together[0][0] <= min_tick:
            _, command = self.together.popleft()
            if isinstance(command, Profile):
                self._profile(command)
            elif (answer := self.records.carry_out(command)) is not None:
                self.link.send(answer)

    def _profile(self, command: Profile) -> None:
        if not command.num_steps:
            self.runner.trace.end()
            return

        def deliver(spans: list[Span]) -> None:
            self.link.send(Profiled(self.rank, command.request, spans))

        self.runner.trace.begin(command.num_steps, deliver)

    def _submit(self, command: Submit) -> None:
        sequence = Sequence(
            request_id=command.request_id,
            prompt_token_ids=command.prompt_token_ids,
            sampling=command.sampling,
            eos_token_ids=tuple(command.eos_token_ids),
        )
        try:
            self.scheduler.add(sequence)
        except RequestError as error:
            refused = SequenceUpdate(
                command.request_id, finish_reason="error", error=str(error), error_param=error.param
            )
            self._report([refused])
        else:
            self.arrivals[command.request_id] = time.perf_counter()

    def _count(self, plan: StepPlan) -> None:
        """Take note of a step about to be computed."""
        stats = self.stats
        stats.step_tokens = plan.num_tokens
        if not plan.scheduled:
            return
        stats.tokens_of_steps.add(plan.num_tokens, STEP_TOKEN_BOUNDS)
        now = time.perf_counter()
        for item in plan.scheduled:
            arrived = self.arrivals.pop(item.sequence.request_id, None)
            if arrived is not None:
                stats.queue_times_s.add(now - arrived, REQUEST_TIME_BOUNDS)

    def _header(self, plan: StepPlan) -> Header:
        times, self.times = self.times, None
        rebalancer = self.rebalancer
        vote = MoveVote() if rebalancer is None else rebalancer.vote()
        return Header(
            step=self.stats.steps,
            num_tokens=plan.num_tokens,
            first_tokens=half(plan),
            graph_ok=int(self.runner.graphs is not None and self.runner.graphs.fits(plan)),
            has_work=int(self.scheduler.has_work or self._busy_beside),
            last_tick=self.link.last_tick,
            stop=int(self.stopping),
            prefill=int(any(not item.is_decode for item in plan.scheduled)),
            forward_us=times.forward_us if times else 0,
            wait_us=times.wait_us if times else 0,
            experts_us=times.experts_us if times else 0,
            move=vote.move,
            staged=vote.staged,
            move_failure=vote.failure,
        )

    def _report(self, updates: list[SequenceUpdate]) -> None:
        blocks, stats = self.scheduler.block_manager, self.stats
        stats.num_running = self.scheduler.num_running
        stats.num_waiting = self.scheduler.num_waiting
        stats.preemptions = self.scheduler.num_preemptions
        stats.num_blocks = blocks.num_blocks
        stats.num_free_blocks = blocks.num_free
        stats.num_cached_blocks = blocks.num_cached
        stats.prefix_queries = blocks.prefix_queries
        stats.prefix_hits = blocks.prefix_hits
        if self.rebalancer is not None:
            stats.eplb = self.rebalancer.stats
        traffic = self.runner.moe.dispatcher.traffic
        stats.bytes_local = traffic.bytes_local
        stats.bytes_within_host = traffic.bytes_within_host
        stats.bytes_between_hosts = traffic.bytes_between_hosts
        stats.dispatch_rounds = traffic.rounds
        self.link.send(StepOutput(rank=self.rank, updates=updates, stats=stats))


def sample_each(
    logits_BV: torch.Tensor, sequences: list[Sequence]
) -> tuple[list[SampledToken], dict[str, str]]:
    """A token for each sequence, and what went wrong by request id: NaN logits of one do not harm the others.

    A failed sequence gets token 0, which is never shown.
    """
    failures: dict[str, str] = {}
    rows = list(range(len(sequences)))
    while True:
        try:
            kept = logits_BV if not failures else logits_BV[rows]
            good = sample(kept, [sequences[row] for row in rows])
            break
        except SamplingError as error:
            failures[error.request_id] = str(error)
            rows = [row for row in rows if sequences[row].request_id != error.request_id]
    sampled = [SampledToken(0, None)] * len(sequences)
    for row, token in zip(rows, good, strict=True):
        sampled[row] = token
    return sampled, failures


def _update(sequence: Sequence, token: SampledToken) -> SequenceUpdate:
    finished = sequence.status is SequenceStatus.FINISHED
    return SequenceUpdate(
        request_id=sequence.request_id,
        new_token_ids=[token.token_id],
        new_logprobs=None if token.logprobs is None else [token.logprobs],
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        finish_reason=sequence.finish_reason if finished else None,
        stop_reason=sequence.stop_reason if finished else None,
    )
