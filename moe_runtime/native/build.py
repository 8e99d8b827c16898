"""Compiles the C++ sources beside it into the user's cache folder, once, and loads the result.

The functions have a C interface and include no header of torch or Python, so a compiler is all that is needed, and a build takes a
second. Threads are those of torch's own OpenMP library, which is linked by name.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_runtime.config import AUTO, user_cache_folder

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
OPTIONS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-fopenmp", "-w",
)  # fmt: skip
FUNCTIONS = {
    "moe_runtime_experts": 2,
    "moe_runtime_attention": 1,
    "moe_runtime_linear": 1,
    "moe_runtime_norm": 1,
    "moe_runtime_stream_rows": 1,
}
"""What the library has: functions of so many pointers that return an int64."""
BUILD_SECONDS = 120
"""Time after which a compiler is stopped."""
AMX_MAX_ROWS = 32
"""With AMX, which torch's products use and the library does not. An estimate: no CPU with AMX was at hand to measure it."""
OFF = "off"

INSTRUCTION_SETS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "avx512_bf16": (
        ("-march=x86-64-v4", "-mavx512bf16"),
        frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16"}),
    ),
    "avx512": (
        ("-march=x86-64-v4",),
        frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ),
    "avx2": (("-march=x86-64-v3",), frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"})),
    "portable": ((), frozenset()),
}
"""Name -> compiler flags, and what Linux must list as the CPU's flags; fastest first."""


@dataclass(frozen=True)
class Native:
    """The library, or why there is none."""

    library: ctypes.CDLL | None
    instructions: str
    """The instruction set it is built for; empty without a library."""
    problem: str | None = None


def load_native(asked: str = AUTO) -> Native:
    """The library for the instruction set `asked`, auto: the best that this CPU has. Builds it if need be; never raises.

    Several processes may call it at once: one builds, the others wait. Answers are kept as long as the process lives.
    """
    if asked == OFF:
        return Native(None, "", "cpu_kernels is off")
    if platform.system() != "Linux":
        return Native(None, "", f"is built on Linux only, not on {platform.system()}")
    usable = usable_instruction_sets(cpu_flags())
    if asked != AUTO and asked not in usable:
        return Native(None, "", f"this CPU has no {asked}; cpu_kernels can be auto, off, {', '.join(usable)}")
    return _load(usable[0] if asked == AUTO else asked, user_cache_folder() / "native")


@functools.cache
def _load(instructions: str, folder: Path) -> Native:
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return Native(None, "", f"no C++ compiler ({', '.join(COMPILERS)})")
    command = [compiler, *OPTIONS, *INSTRUCTION_SETS[instructions][0]]
    try:
        library = build_once(folder / f"{instructions}-{_key(command)}.so", command)
        return Native(_declared(ctypes.CDLL(str(library))), instructions)
    except OSError as error:
        return Native(None, "", f"cannot be built: {error}")


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, num_pointers in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p] * num_pointers, ctypes.c_int64
    return library


def cpu_flags() -> frozenset[str]:
    """What Linux says that the first CPU can do; nothing where it says it in another way (it does on x86 as `flags`)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def most_rows(otherwise: int) -> int:
    """Rows up to which a product here is as fast as torch's: AMX_MAX_ROWS on a CPU with AMX."""
    return AMX_MAX_ROWS if "amx_bf16" in cpu_flags() else otherwise


def usable_instruction_sets(flags: frozenset[str]) -> list[str]:
    """Names from INSTRUCTION_SETS, fastest first."""
    return [name for name, (_, needed) in INSTRUCTION_SETS.items() if needed <= flags]


def build_once(target: Path, command: list[str]) -> Path:
    """Compile the sources into `target` if it is not there. Raises OSError.

    Under a lock that ends with the process. `target` never exists in part: what a build that died left, the next one removes.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in target.parent.glob(".building-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as scratch:
                built = Path(scratch) / target.name
                sources = map(str, sorted(SOURCES.glob("*.cpp")))
                _compile([*command, "-o", str(built), *sources, *_torch_openmp()], Path(scratch) / "log")
                built.replace(target)
    return target


def _compile(command: list[str], log: Path) -> None:
    """Raises ChildProcessError with the first line of what the compiler says, TimeoutError."""
    # Into a file, not a pipe: a stopped compiler's own children would keep a pipe open.
    with log.open("w+b") as output:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=BUILD_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{command[0]} took more than {BUILD_SECONDS} seconds") from None
        if done.returncode:
            output.seek(0)
            said = output.readline().decode(errors="replace").strip()
            raise ChildProcessError(f"{command[0]} failed: {said or f'exit status {done.returncode}'}")


def _torch_openmp() -> list[str]:
    """Torch's own OpenMP library, before the compiler's in the order of linking; wheels may give it a name of their own.

    With the compiler's, where the names differ, there would be two pools of threads.
    """
    lib = Path(torch.__file__).parent / "lib"
    found = sorted([*lib.glob("libgomp*.so*"), *(lib.parents[1] / "torch.libs").glob("libgomp*.so*")])
    return [str(found[0]), "-Wl,--as-needed"] if found else []


def _key(command: list[str]) -> str:
    """Of all that the result depends on."""
    digest = hashlib.sha256(
        "\0".join([*command, torch.__version__, platform.machine(), *_torch_openmp()]).encode()
    )
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]
