"""What gpu_check runs, what came of it, and how that is told: a JSON file as it goes, a table at the end."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """A generator `function(env)` of one dictionary per case; it raises where a result is wrong, Skip where it cannot run."""

    name: str
    stage: int
    function: str
    """`module:function`."""
    budget_s: float
    """Seconds after which it is stopped; what it yielded by then is kept."""


@dataclass
class Result:
    """Of one check."""

    name: str
    stage: int
    status: str = "not run"
    """`ok`, `failed`, `timeout`, `skipped` or `not run`."""
    reason: str = ""
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    """One per case."""


class Report:
    """All results, on disk after each."""

    def __init__(self, path: Path | None, head: dict[str, Any], checks: list[Check]) -> None:
        self.path, self.head = path, head
        self.results = {
            check.name: Result(check.name, check.stage, reason="no time was left") for check in checks
        }
        self.lock = threading.Lock()

    def add(self, result: Result) -> None:
        """Take a check's result: print its line and write the file. From any thread."""
        with self.lock:
            self.results[result.name] = result
            line = (result.reason.strip().splitlines() or [""])[-1]
            print(f"{result.status:8} {result.seconds:6.1f} s  {result.name}  {line}", flush=True)
            self.write()

    def write(self) -> None:
        """The whole report as JSON; a reader never sees half of it."""
        if self.path is not None:
            content = {**self.head, "checks": [asdict(r) for r in self.results.values()]}
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            part.replace(self.path)

    def known(self) -> list[dict[str, Any]]:
        """Rows of the roofline, for the checks that compare with it."""
        found = self.results.get("roofline")
        return found.rows if found else []


def print_table(results: list[Result]) -> None:
    """Each check's outcome, and each measured case in a line."""
    for stage in (1, 2):
        of_stage = [r for r in results if r.stage == stage]
        if of_stage:
            print(f"\nStage {stage}")
        for r in of_stage:
            print(f"  {r.status:8} {r.seconds:6.1f} s {len(r.rows):4} cases  {r.name}")
            if r.status not in ("ok", "not run"):
                print("".join(f"      {line}\n" for line in r.reason.strip().splitlines()[-3:]), end="")
            for row in r.rows if stage == 2 else ():
                print("      " + "  ".join(f"{key}={_short(value)}" for key, value in row.items()))
    counts = {
        s: sum(r.status == s for r in results) for s in ("ok", "failed", "timeout", "skipped", "not run")
    }
    missed = sum(not row["met"] for r in results for row in r.rows if row.get("met") is not None)
    print(
        "\n" + ", ".join(f"{n} {status}" for status, n in counts.items() if n) + f"; {missed} targets missed"
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
