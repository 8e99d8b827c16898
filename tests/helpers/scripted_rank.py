"""A rank without a model: a real process on the real wire whose next token is a hash of the tokens so far.

It does on demand what the real worker must not: fail or die at a chosen moment. The `model` folder's `script.json` says
which: {"fail": [rank, kind, message]}, {"die_at_start": rank}, {"die_after_steps": [rank, steps]}, {"step_s": seconds},
{"vocab_size": n, "max_model_len": n, "emit": [ids]}; it logs what it was told to the folder as rank-<r>.jsonl.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import msgspec
import zmq

from moe_runtime.config import EngineConfig
from moe_runtime.core import SamplingParams, TokenLogprobs
from moe_runtime.engine.messages import (
    Abort,
    Failed,
    Progress,
    RankMessage,
    RankStats,
    Ready,
    SequenceUpdate,
    StepOutput,
    Stop,
    Submit,
    Tick,
)


def next_token(token_ids: list[int], seed: int, vocab_size: int) -> int:
    """The toy model: deterministic in the tokens so far and the seed."""
    return random.Random(f"{seed} {token_ids}").randrange(vocab_size)


def expected_tokens(
    prompt: list[int],
    sampling: SamplingParams,
    num: int,
    vocab_size: int,
    stop_ids: frozenset[int] = frozenset(),
) -> list[int]:
    """What a scripted rank generates for a prompt."""
    out: list[int] = []
    while len(out) < num:
        out.append(next_token(prompt + out, sampling.seed or 0, vocab_size))
        if out[-1] in stop_ids and len(out) >= sampling.min_tokens:
            break
    return out


class ScriptedRank:
    def __init__(self, config: EngineConfig, address: str) -> None:
        self.config = config
        self.rank = int(os.environ["RANK"])
        self.folder = Path(config.model)
        self.script = json.loads((self.folder / "script.json").read_text())
        self.vocab_size = self.script.get("vocab_size", 50)
        self.max_model_len = self.script.get("max_model_len", 64)
        self.log = (self.folder / f"rank-{self.rank}.jsonl").open("a")
        self.socket = zmq.Context().socket(zmq.DEALER)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, 2000)
        self.socket.setsockopt(zmq.IDENTITY, f"rank-{self.rank}".encode())
        self.socket.connect(address)
        self.running: dict[str, tuple[Submit, list[int]]] = {}
        self.num_ticks = 0
        self.num_steps = 0

    def send(self, message: RankMessage) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def note(self, what: str, detail: object) -> None:
        self.log.write(json.dumps([what, detail]) + "\n")
        self.log.flush()

    def start(self) -> None:
        for stage, fraction in (("reading", 0.0), ("loading", 0.5)):
            self.send(Progress(self.rank, os.getpid(), stage, fraction))
        if self.script.get("die_at_start") == self.rank:
            os._exit(3)
        fail = self.script.get("fail")
        if fail and fail[0] == self.rank:
            self.send(Failed(self.rank, fail[1], fail[2]))
            self.socket.close()
            zmq.Context.instance().term()
            sys.exit(1)
        self.note("environment", {k: os.environ.get(k) for k in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")})
        self.send(
            Ready(self.rank, os.getpid(), self.max_model_len, self.vocab_size, 100, 16, {"model": "toy"})
        )

    def run(self) -> None:
        while True:
            timeout = 0 if self.running else None
            while self.socket.poll(timeout):
                tick = msgspec.msgpack.decode(self.socket.recv(), type=Tick)
                assert tick.number == self.num_ticks + 1
                self.num_ticks = tick.number
                for command in tick.commands:
                    if self.obey(command):
                        return
                timeout = 0 if self.running else None
            self.step()

    def obey(self, command: object) -> bool:
        self.note("tick", [self.num_ticks, type(command).__name__])
        if isinstance(command, Submit):
            self.note("submit", msgspec.to_builtins(command))
            self.running[command.request_id] = (command, [])
        elif isinstance(command, Abort):
            self.running.pop(command.request_id, None)
        return isinstance(command, Stop)

    def step(self) -> None:
        time.sleep(self.script.get("step_s", 0.001))
        self.num_steps += 1
        die = self.script.get("die_after_steps")
        if die and die[0] == self.rank and self.num_steps > die[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        updates = [self.advance(*entry) for entry in list(self.running.values())]
        stats = RankStats(num_running=len(self.running), steps=self.num_steps)
        self.send(StepOutput(self.rank, updates, stats))

    def advance(self, submit: Submit, out: list[int]) -> SequenceUpdate:
        sampling = submit.sampling
        if len(submit.prompt_token_ids) == self.script.get("refuse_length"):
            del self.running[submit.request_id]
            return SequenceUpdate(
                submit.request_id, finish_reason="error", error="too big", error_param="prompt"
            )
        emit = self.script.get("emit")
        if emit:
            token = emit[len(out) % len(emit)]
        else:
            token = next_token(submit.prompt_token_ids + out, sampling.seed or 0, self.vocab_size)
        out.append(token)
        room = self.max_model_len - len(submit.prompt_token_ids)
        update = SequenceUpdate(submit.request_id, [token], num_cached_tokens=1)
        if sampling.logprobs is not None:
            top = [((token + i) % self.vocab_size, -1.0 - i) for i in range(sampling.logprobs)]
            update.new_logprobs = [TokenLogprobs(-1.0, 1, top)]
        may_stop = len(out) >= sampling.min_tokens
        if may_stop and token in submit.eos_token_ids and not sampling.ignore_eos:
            update.finish_reason = "stop"
        elif may_stop and token in (sampling.stop_token_ids or []):
            update.finish_reason, update.stop_reason = "stop", token
        elif len(out) >= min(room, sampling.max_tokens or room):
            update.finish_reason = "length"
        if update.finish_reason:
            del self.running[submit.request_id]
        return update


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--link", required=True)
    parser.add_argument("--config-json", required=True)
    parser.add_argument("--rendezvous")
    parser.add_argument("--parent")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    rank = ScriptedRank(msgspec.json.decode(args.config_json, type=EngineConfig), args.link)
    rank.start()
    rank.run()


if __name__ == "__main__":
    main()
