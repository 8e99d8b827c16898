"""The real worker with something going wrong while experts move, for tests of what becomes of it.

The file `fault.json` in the `model` folder says what, where and when: {"what": name, "rank": r, "after": pieces}. It happens once
so many pieces of weights have come in on that rank since the file was written, and takes the file away: once per file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from moe_runtime.engine import looking, worker
from moe_runtime.peer_link import PeerClient

FAULT_FILE = "fault.json"
SLOW_S = 6.0


def flip_a_bit(target: memoryview) -> None:
    target[len(target) // 2] ^= 8


def end_thread(_: memoryview) -> None:
    # Not an Exception: nothing in the thread catches it, as if the thread had been killed.
    raise SystemExit


def end_process(_: memoryview) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(_: memoryview) -> None:
    raise RuntimeError("a defect in the mover")


def sleep(_: memoryview) -> None:
    time.sleep(SLOW_S)


FAULTS = {
    "corrupt": flip_a_bit,
    "mover killed": end_thread,
    "rank killed": end_process,
    "mover fails": fail,
    "slow": sleep,
}


class Injector:
    """Wraps what the worker calls while experts move."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.num_pieces = 0

    def fault(self) -> dict[str, Any]:
        """What is to happen on this rank; nothing if there is no file."""
        try:
            found: dict[str, Any] = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        return found if found["rank"] == self.rank else {}

    def install(self) -> None:
        ask_into, gather = PeerClient.ask_into, looking.gather_loads

        def faulty_ask(
            client: PeerClient, rank: int, question: bytes, target: memoryview, deadline: float
        ) -> None:
            ask_into(client, rank, question, target, deadline)
            fault = self.fault()
            self.num_pieces = self.num_pieces + 1 if fault else 0
            if fault and self.num_pieces == fault["after"]:
                self.path.unlink()
                FAULTS[fault["what"]](target)

        def faulty_gather(*args: Any) -> Any:
            if self.fault().get("what") == "planner killed":
                self.path.unlink()
                raise SystemExit
            return gather(*args)

        PeerClient.ask_into = faulty_ask  # type: ignore[method-assign]
        looking.gather_loads = faulty_gather


def main() -> int:
    arguments = sys.argv[1:]
    config = msgspec.json.decode(arguments[arguments.index("--config-json") + 1])
    Injector(Path(config["model"]) / FAULT_FILE, int(os.environ["RANK"])).install()
    return worker.main()


if __name__ == "__main__":
    worker.leave(main())
