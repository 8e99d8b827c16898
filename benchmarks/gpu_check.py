"""Run every kernel on a GPU: first that it is right (stage 1), then how fast it is (stage 2).

    python benchmarks/gpu_check.py                          both stages on the GPU, about 7 minutes at most
    python benchmarks/gpu_check.py --interpret              stage 1 with small shapes in Triton's interpreter, without a GPU
    python benchmarks/gpu_check.py --stage 1 --only router  some checks; --list names them

Needs Python 3.11, torch, triton and numpy, and nothing else; the package need not be installed. Checks run in processes of their
own: one that fails, crashes or outlasts its time does not stop the others. --out is written after each check. The exit
status is 0 if every check was run and right (or cannot be run here, and says why), else 1; 2 without a GPU or for bad
arguments. A speed that misses its target is reported, but is no failure.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import queue
import sys
import threading
import time
import traceback
import types
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_report import Check, Report, Result, print_table

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

START_SECONDS = 60.0
"""For a process to import torch and to reach the GPU."""


CHECKS = (
    Check("experts 16-bit", 1, "benchmarks.gpu_experts:experts_wide", 80),
    Check("experts fp8 block", 1, "benchmarks.gpu_experts:experts_fp8_block", 80),
    Check("experts fp8 channel and tensor", 1, "benchmarks.gpu_experts:experts_fp8_other", 80),
    Check("expert tiles", 1, "benchmarks.gpu_experts:expert_tiles", 80),
    Check("attention", 1, "benchmarks.gpu_numerics:attention", 80),
    Check("layer operations", 1, "benchmarks.gpu_numerics:layer_operations", 60),
    Check("router", 1, "benchmarks.gpu_numerics:router", 60),
    Check("grouping", 1, "benchmarks.gpu_numerics:grouping", 30),
    Check("one-sided, virtual ranks", 1, "benchmarks.gpu_exchange:virtual_ranks", 80),
    Check("one-sided, nvshmem with one rank", 1, "benchmarks.gpu_exchange:nvshmem_one_rank", 60),
    Check("model against cpu", 1, "benchmarks.gpu_numerics:model_parity", 80),
    Check("roofline", 2, "benchmarks.gpu_timing:roofline", 20),
    Check("grouped gemm qwen3-30b-a3b bf16", 2, "benchmarks.gpu_timing:qwen3_bf16", 50),
    Check("grouped gemm deepseek-v3 ep8 bf16", 2, "benchmarks.gpu_timing:deepseek_bf16", 50),
    Check("decode attention", 2, "benchmarks.gpu_timing:decode_attention", 25),
    Check("graph against eager", 2, "benchmarks.gpu_timing:graph_against_eager", 30),
    Check("grouped gemm qwen3-30b-a3b fp8", 2, "benchmarks.gpu_timing:qwen3_fp8", 40),
    Check("grouped gemm deepseek-v3 ep8 fp8", 2, "benchmarks.gpu_timing:deepseek_fp8", 40),
)
STAGE_SECONDS = {1: 180.0, 2: 240.0}
"""What a stage may take on a GPU; a check that would begin later is not run, and one under way is stopped."""


@dataclass(frozen=True)
class Settings:
    """What a process is told."""

    device: str
    small: bool
    """Shapes for the interpreter."""
    poison: bool
    """Fill uninitialised memory with NaN, so that reading it shows."""


def use_what_is_there() -> None:
    """Make the package importable where msgspec is missing. Only requests and messages are made with it, and no check makes any."""
    try:
        import_module("msgspec")
    except ModuleNotFoundError:
        module = types.ModuleType("msgspec")
        module.Struct = _Struct  # type: ignore[attr-defined]
        sys.modules["msgspec"] = module


class _Struct:
    """Can be derived from with msgspec's options; its classes cannot be used."""

    def __init_subclass__(cls, **_: object) -> None:
        pass

    def __init__(self, *_: object, **__: object) -> None:
        raise ModuleNotFoundError("msgspec is not installed")


def serve(connection: Connection, settings: Settings) -> None:
    """A process's life: runs the checks that it is sent, sends ("row", ..) for each case and then (status, reason)."""
    use_what_is_there()
    import torch

    from benchmarks.gpu_cases import Env, Skip

    if settings.poison:
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    device = torch.device(settings.device)
    torch.empty(1, device=device)
    connection.send(("ready", ""))
    while True:
        function, seed, known = connection.recv()
        torch.manual_seed(seed)
        try:
            module, name = function.split(":")
            for row in getattr(import_module(module), name)(Env(device, settings.small, known)):
                connection.send(("row", row))
            if device.type == "cuda":
                torch.cuda.synchronize()
            connection.send(("ok", ""))
        except Skip as why:
            connection.send(("skipped", str(why)))
        except Exception:  # noqa: BLE001
            # Whatever goes wrong is this check's result.
            connection.send(("failed", traceback.format_exc(limit=8)))


class Worker:
    """Runs one check after another, in a process that is replaced after a failure: a fault can leave a GPU context unusable."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.process: multiprocessing.process.BaseProcess | None = None

    def run(self, check: Check, seed: int, known: list[dict[str, Any]], until: float) -> Result:
        """until: when to stop it at the latest (time.monotonic). known: rows of the roofline check."""
        result = Result(check.name, check.stage)
        began = time.monotonic()
        try:
            if self.process is None:
                self._start()
                start = START_SECONDS * (10 if self.settings.small else 1)
                assert self._receive(began + start)[0] == "ready"
            began = time.monotonic()
            self.connection.send((check.function, seed, known))
            stop = min(began + check.budget_s, until)
            while result.status == "not run":
                kind, value = self._receive(stop)
                if kind == "row":
                    result.rows.append(value)
                else:
                    result.status, result.reason = kind, value
        except TimeoutError:
            result.status, result.reason = "timeout", f"stopped after {time.monotonic() - began:.0f} s"
        except (EOFError, OSError):
            assert self.process is not None
            self.process.join(10)
            result.status, result.reason = "failed", f"its process ended (exit code {self.process.exitcode})"
        result.seconds = round(time.monotonic() - began, 2)
        if result.status not in ("ok", "skipped"):
            self.close()
        return result

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.settings), daemon=True)
        self.process.start()
        theirs.close()

    def _receive(self, until: float) -> tuple[str, Any]:
        if not self.connection.poll(max(0.0, until - time.monotonic())):
            raise TimeoutError
        return self.connection.recv()

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join(10)
            self.connection.close()
            self.process = None


def run_stage(
    checks: list[Check], settings: Settings, jobs: int, seconds: float, seed: int, report: Report
) -> None:
    """Checks side by side in `jobs` processes, until `seconds` have passed."""
    todo: queue.SimpleQueue[Check] = queue.SimpleQueue()
    for check in checks:
        todo.put(check)
    until = time.monotonic() + seconds

    def work() -> None:
        worker = Worker(settings)
        while time.monotonic() < until:
            try:
                check = todo.get_nowait()
            except queue.Empty:
                break
            report.add(worker.run(check, seed, report.known(), until))
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(checks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags, with `stages` and `checks` as they choose them. Exits with 2 for bad ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stage", choices=["1", "2", "all"], help="1: results, 2: speed (default: all; with --interpret 1)"
    )
    parser.add_argument("--out", type=Path, help="JSON file, written after each check")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="checks whose name contains it; may be repeated"
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="time for each check, instead of its own"
    )
    parser.add_argument(
        "--jobs", type=int, default=4, help="processes of stage 1 (default 4; 1 with --interpret)"
    )
    parser.add_argument("--seed", type=int, help="of the random inputs; drawn and printed unless given")
    parser.add_argument(
        "--interpret", action="store_true", help="stage 1 in Triton's interpreter, small shapes, no GPU"
    )
    parser.add_argument("--list", action="store_true", help="print the checks' names")
    args = parser.parse_args(argv)
    if args.interpret and args.stage in ("2", "all"):
        parser.error("--interpret runs stage 1 alone: times of the interpreter say nothing of a GPU")
    args.stages = (1,) if args.interpret else {"1": (1,), "2": (2,)}.get(args.stage, (1, 2))
    args.checks = [
        c for c in CHECKS if c.stage in args.stages and (not args.only or any(t in c.name for t in args.only))
    ]  # fmt: skip
    if args.jobs < 1 or (args.budget is not None and args.budget <= 0):
        parser.error("--jobs and --budget must be positive")
    if not args.checks:
        parser.error(f"no check of this stage contains {args.only}; --list names them")
    return args


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    args = parse(argv)
    if args.list:
        print("\n".join(f"stage {check.stage}  {check.name}" for check in args.checks))
        return 0
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton

    if not args.interpret and not torch.cuda.is_available():
        print(
            "gpu_check: no GPU: torch.cuda.is_available() is False; --interpret runs stage 1 without one",
            file=sys.stderr,
        )
        return 2
    device = "cpu" if args.interpret else "cuda"
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(3), "big")
    head = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"), "seed": seed,
        "device": "Triton's interpreter" if args.interpret else torch.cuda.get_device_name(),
        "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip
    print(", ".join(f"{key} {value}" for key, value in head.items()), flush=True)
    checks = [
        Check(c.name, c.stage, c.function, args.budget or c.budget_s * (20 if args.interpret else 1))
        for c in args.checks
    ]
    report = Report(args.out, head, checks)
    report.write()
    for stage in args.stages:
        of_stage = [check for check in checks if check.stage == stage]
        settings = Settings(device, small=args.interpret, poison=stage == 1)
        jobs = args.jobs if stage == 1 and not args.interpret else 1
        run_stage(of_stage, settings, jobs, 1800.0 if args.interpret else STAGE_SECONDS[stage], seed, report)
    print_table(list(report.results.values()))
    return int(any(r.status not in ("ok", "skipped") for r in report.results.values()))


if __name__ == "__main__":
    sys.exit(main())
