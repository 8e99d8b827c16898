"""Who computes how many tokens in the next step of one rank.

The policy, in one place:

* A step has a budget of tokens. Running sequences come first, then waiting ones, each group in arrival order; whoever
  has its turn gets all its uncomputed tokens, cut at the budget. So a long prompt is computed in chunks, nobody enters
  before it is through, and the one sequence amid its prompt is always the latest running: decodes never wait for it.
* A waiting sequence is admitted when the blocks of all its known tokens can be had without touching what the running
  prompts still need, with one spare block per running sequence so that the next decodes do not at once preempt
  somebody. If the first in line does not fit, nobody overtakes it: a stream of short requests cannot starve a long one.
* When a running sequence finds no block, the latest arrival is preempted until there is one; a sequence that is the
  latest itself keeps its blocks and sits out the step. So nobody is ever preempted for a later one, and the earliest
  always advances. A preempted sequence goes back to the front of the line; its KV stays cached until evicted.
* Nobody is admitted without a token in that step. So no more sequences run than a step has tokens, and all of them
  advance in every step, blocks permitting.

Single-threaded: between `schedule` and `commit` of a plan nothing else may be called.
"""

from __future__ import annotations

from collections import OrderedDict

from moe_runtime.core import ScheduledSequence, Sequence, SequenceStatus, StepPlan
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.radix_tree import PrefixMatch
from moe_runtime.errors import ConfigError, RequestError


class Scheduler:
    """Continuous batching over one BlockManager. Both queues are in arrival order at all times."""

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
        }
        for name, value in limits.items():
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        """Since the start."""
        self._running: OrderedDict[str, Sequence] = OrderedDict()
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._plan: StepPlan | None = None

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would plan at least one token."""
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences admitted and not finished."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Never admitted, or preempted and not back yet."""
        return len(self._waiting)

    def add(self, seq: Sequence) -> None:
        """Put a new sequence at the end of the line, and set its `max_total_tokens`.

        Its length is limited by max_tokens, by max_model_len and, if max_tokens is None, by the whole cache.
        Raises RequestError if the prompt is empty or too long, if prompt and max_tokens (cut at max_model_len) could
        outgrow the whole cache, or if the id is in use.
        """
        self._assert_between_steps()
        if seq.request_id in self._running or seq.request_id in self._waiting:
            raise RequestError(f"request id {seq.request_id!r} is in use", "request_id")
        seq.max_total_tokens = self._length_limit(len(seq.prompt_token_ids), seq.sampling.max_tokens)
        self._waiting[seq.request_id] = seq

    def abort(self, request_id: str) -> Sequence | None:
        """Forget a sequence, waiting or running, and free its blocks. Returns it, or None if the id is unknown."""
        self._assert_between_steps()
        seq = self._waiting.pop(request_id, None)
        if seq is None:
            seq = self._running.pop(request_id, None)
            if seq is None:
                return None
            self.block_manager.free(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = "abort"
        return seq

    def schedule(self) -> StepPlan:
        """Plan a step. If it has tokens it must be run and given to `commit` before the next call.

        A plan is empty only if there is no work.
        """
        self._assert_between_steps()
        chosen: dict[Sequence, int] = {}
        preempted_before = self.num_preemptions
        budget = self._schedule_running(chosen)
        if self._waiting:
            self._schedule_waiting(chosen, budget)
        plan = StepPlan(
            tuple([ScheduledSequence(seq, seq.num_computed_tokens, count) for seq, count in chosen.items()]),
            self.block_manager.take_copies(),
            self.num_preemptions - preempted_before,
        )
        assert chosen or not self.has_work
        if chosen:
            self._plan = plan
        return plan

    def commit(self, plan: StepPlan, sampled: list[int]) -> list[Sequence]:
        """Take in what the step computed; returns the sequences that finished, their blocks freed.

        `sampled` holds one token for each scheduled sequence with `.samples`, in the plan's order. (`.samples` is
        about the sequence as scheduled: it means nothing any more after this call.)
        """
        assert plan is self._plan or not plan.scheduled, "commit of a plan that is not the last one scheduled"
        sampling = [entry.samples for entry in plan.scheduled]
        if sum(sampling) != len(sampled):
            raise ValueError(f"{len(sampled)} sampled tokens for {sum(sampling)} sampling sequences")
        self._plan = None
        self.block_manager.end_step()
        tokens = iter(sampled)
        finished = []
        for entry, samples in zip(plan.scheduled, sampling, strict=True):
            seq = entry.sequence
            seq.num_computed_tokens += entry.num_new_tokens
            self.block_manager.commit(seq)
            if samples and self._append(seq, next(tokens)):
                finished.append(seq)
        return finished

    def _schedule_running(self, chosen: dict[Sequence, int]) -> int:
        """Choose tokens of running sequences, preempting where blocks are lacking. Returns the budget left."""
        budget = self.max_num_batched_tokens
        for seq in list(self._running.values()):
            # Those preempted for an earlier one are the last of the list.
            if budget == 0 or seq.status is not SequenceStatus.RUNNING:
                break
            count = self._make_room(seq, min(seq.num_tokens - seq.num_computed_tokens, budget))
            if count > 0:
                self.block_manager.grow(seq, seq.num_computed_tokens + count)
                chosen[seq] = count
                budget -= count
        return budget

    def _make_room(self, seq: Sequence, wanted: int) -> int:
        """How many of the `wanted` tokens can get blocks, after preempting later arrivals if need be.

        None of those has been chosen for this step yet: that goes in arrival order too.
        """
        manager = self.block_manager
        missing = manager.blocks_for(seq.num_computed_tokens + wanted) - len(seq.block_table)
        while missing > manager.num_available:
            latest = next(reversed(self._running.values()))
            if latest is seq:
                room = (len(seq.block_table) + manager.num_available) * manager.block_size
                return room - seq.num_computed_tokens
            self._preempt(latest)
        return wanted

    def _preempt(self, seq: Sequence) -> None:
        self.block_manager.free(seq)
        del self._running[seq.request_id]
        self._waiting[seq.request_id] = seq
        self._waiting.move_to_end(seq.request_id, last=False)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _schedule_waiting(self, chosen: dict[Sequence, int], budget: int) -> None:
        """Admit from the head of the line while budget, seats and blocks last."""
        manager = self.block_manager
        reserved = sum(self._claim(seq) for seq in self._running.values())
        while self._waiting and budget > 0 and len(self._running) < self.max_num_seqs:
            seq = next(iter(self._waiting.values()))
            room = manager.num_available - reserved
            if room < 1:  # the usual case when the cache is full, and a lookup is O(prompt)
                return
            match = manager.match(seq)
            missing = manager.blocks_for(seq.num_tokens) - match.node.depth
            if missing + match.num_idle > room:
                return
            if not self._room_for_copy(seq, match, budget):
                match = manager.shareable_only(match)
            count = min(seq.num_tokens - match.num_tokens, budget)
            self._admit(seq, match, count)
            chosen[seq] = count
            budget -= count
            reserved += self._claim(seq)

    def _claim(self, seq: Sequence) -> int:
        """Blocks to leave for a running sequence: those of its known tokens that it lacks, and a spare one."""
        return self.block_manager.blocks_for(seq.num_tokens) - len(seq.block_table) + 1

    def _room_for_copy(self, seq: Sequence, match: PrefixMatch, budget: int) -> bool:
        """Whether this step's blocks can be had although the source of the copy may not be evicted in it."""
        manager = self.block_manager
        last = min(seq.num_tokens, match.num_tokens + budget)
        idle_source = match.source is not None and match.source.num_users == 0
        return (
            manager.blocks_for(last) - match.node.depth + match.num_idle + idle_source
            <= manager.num_available
        )

    def _admit(self, seq: Sequence, match: PrefixMatch, count: int) -> None:
        """From the head of the line to running, with blocks for its first `count` tokens after the match."""
        del self._waiting[seq.request_id]
        self._running[seq.request_id] = seq
        seq.status = SequenceStatus.RUNNING
        self.block_manager.admit(seq, match)
        self.block_manager.grow(seq, match.num_tokens + count)

    def _append(self, seq: Sequence, token: int) -> bool:
        """Append a sampled token; if it is the last one, finish the sequence and return True."""
        seq.output_token_ids.append(token)
        sampling = seq.sampling
        may_stop = len(seq.output_token_ids) >= sampling.min_tokens
        if may_stop and token in seq.eos_token_ids and not sampling.ignore_eos:
            seq.finish_reason = "stop"
        elif may_stop and sampling.stop_token_ids and token in sampling.stop_token_ids:
            seq.finish_reason, seq.stop_reason = "stop", token
        elif seq.num_tokens >= seq.max_total_tokens:
            seq.finish_reason = "length"
        else:
            return False
        seq.status = SequenceStatus.FINISHED
        del self._running[seq.request_id]
        self.block_manager.free(seq)
        return True

    def _length_limit(self, num_prompt: int, max_tokens: int | None) -> int:
        """Tokens at which a sequence ends by length; RequestError if it cannot be served."""
        manager = self.block_manager
        if num_prompt == 0:
            raise RequestError("the prompt is empty; it must have at least one token", "prompt")
        if num_prompt >= self.max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; with max_model_len={self.max_model_len} at most "
                f"{self.max_model_len - 1} are allowed, so that one can be generated",
                "prompt",
            )
        # The last token is only returned; its KV is never stored.
        most = manager.capacity_tokens + 1
        cache = f"the KV cache holds {manager.capacity_tokens} ({manager.num_blocks} blocks of {manager.block_size})"
        if num_prompt >= most:
            raise RequestError(f"the prompt has {num_prompt} tokens; {cache}", "prompt")
        if max_tokens is None:
            return min(self.max_model_len, most)
        total = min(num_prompt + max_tokens, self.max_model_len)
        if total > most:
            raise RequestError(
                f"prompt ({num_prompt}) and max_tokens ({max_tokens}) may need the KV of {total - 1} tokens; "
                f"{cache}, which allows max_tokens up to {most - num_prompt}",
                "max_tokens",
            )
        return total

    def _assert_between_steps(self) -> None:
        assert self._plan is None, "the last plan has not been committed"
