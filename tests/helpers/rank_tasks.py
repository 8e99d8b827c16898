"""Ranks that follow a script instead of a model, on the other end of a real link to a real AsyncLLM.

Completion tokens repeat the prompt: token i is prompt[i % len(prompt)]. The first half of a prompt counts as cached. A prompt
that holds `REFUSED_TOKEN` is refused by the rank. One token per sequence and step; `hold` stops all steps.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from moe_runtime.core import TokenLogprobs
from moe_runtime.engine import messages as m

REFUSED_TOKEN = 7
NUM_BLOCKS = 100


@dataclass
class _Sequence:
    submit: m.Submit
    output: list[int] = field(default_factory=list)

    def step(self, vocab_size: int) -> m.SequenceUpdate:
        prompt, sampling = self.submit.prompt_token_ids, self.submit.sampling
        if REFUSED_TOKEN in prompt:
            return m.SequenceUpdate(
                self.submit.request_id, finish_reason="error", error="never fits", error_param="prompt"
            )
        token = prompt[len(self.output) % len(prompt)]
        self.output.append(token)
        logprobs = None
        if sampling.logprobs is not None:
            # The chosen token is the second most likely one.
            top = [((token + 1 - i) % vocab_size, -0.25 * (i + 1)) for i in range(sampling.logprobs)]
            logprobs = [TokenLogprobs(-0.5, 2, top)]
        finish = None
        if token in self.submit.eos_token_ids or token in (sampling.stop_token_ids or []):
            finish = "stop"
        elif sampling.max_tokens is not None and len(self.output) >= sampling.max_tokens:
            finish = "length"
        return m.SequenceUpdate(
            self.submit.request_id, [token], logprobs, len(prompt) // 2, finish_reason=finish
        )


class RankTask:
    """One rank, run by the event loop it was made on."""

    def __init__(self, address: str, rank: int, vocab_size: int, max_model_len: int, pid: int = 0) -> None:
        """`address` is the front-end's. `pid` is the process whose death the front-end takes for the rank's; 0: none."""
        self.rank = rank
        self.vocab_size = vocab_size
        self.stats = m.RankStats(num_blocks=NUM_BLOCKS, num_free_blocks=NUM_BLOCKS)
        self.submitted: list[tuple[float, m.Submit]] = []
        """With the time of arrival."""
        self.aborted: list[str] = []
        self.num_resets = 0
        self.stopped = False
        self.hold = asyncio.Event()
        """Steps are made while this is set."""
        self.hold.set()
        self.step_s = 0.0
        self._active: dict[str, _Sequence] = {}
        self._work = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, f"rank-{rank}".encode())
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)
        ready = m.Ready(rank, pid, max_model_len, vocab_size, NUM_BLOCKS, 16, {"dispatcher": "scripted"})
        self._send(ready)
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._run())]

    @property
    def num_active(self) -> int:
        return len(self._active)

    def fail(self, message: str) -> None:
        """Report an error as a rank does before it ends."""
        self.hold.clear()
        self._send(m.Failed(self.rank, "CapacityError", message))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()

    def _send(self, message: Any) -> None:
        asyncio.ensure_future(self._socket.send(msgspec.msgpack.encode(message)))  # noqa: RUF006 - sent at once

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(m.Tick)
        while True:
            for command in decoder.decode(await self._socket.recv()).commands:
                if isinstance(command, m.Submit):
                    self.submitted.append((time.monotonic(), command))
                    self._active[command.request_id] = _Sequence(command)
                    self.stats.prompt_tokens += len(command.prompt_token_ids)
                    self._work.set()
                elif isinstance(command, m.Abort):
                    self.aborted.append(command.request_id)
                    self._active.pop(command.request_id, None)
                elif isinstance(command, m.ResetPrefixCache):
                    self.num_resets += 1
                elif isinstance(command, m.Stop):
                    self.stopped = True

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await self.hold.wait()
            updates = [sequence.step(self.vocab_size) for sequence in self._active.values()]
            for update in updates:
                self.stats.generation_tokens += len(update.new_token_ids)
                if update.finish_reason is not None:
                    del self._active[update.request_id]
            self.stats.steps += 1
            self.stats.num_running = len(self._active)
            self._send(m.StepOutput(self.rank, updates, self.stats))
            if not self._active:
                self._work.clear()
            await asyncio.sleep(self.step_s)
