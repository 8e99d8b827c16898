"""The files of an offline batch: requests in, answers out, and what has been answered already.

A line of the input is `{"custom_id", "method": "POST", "url", "body"}`; one of the output is
`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`, as in OpenAI's batch API.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from moe_runtime.errors import ConfigError
from moe_runtime.server.errors import ApiError, invalid

_SYNC_S = 1.0


@dataclass(frozen=True)
class BatchRequest:
    """A line of the input that says what it wants; whether its body is right is for others to see."""

    number: int
    """Of its line, from 1."""
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A line of the input that is no request. Known by its number: it may have no custom_id, or another line's."""

    number: int
    custom_id: str | None
    error: ApiError


def read_requests(path: str, urls: tuple[str, ...]) -> Iterator[BatchRequest | BadLine]:
    """The lines of the input; empty ones are skipped. Of lines with the same custom_id the first one counts.

    Raises ConfigError if the file cannot be read.
    """
    first_line: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.strip():
                    continue
                line = _parse(number, raw, urls)
                if isinstance(line, BatchRequest):
                    first = first_line.setdefault(line.custom_id, number)
                    if first != number:
                        what = f"custom_id {line.custom_id!r} is also that of line {first}"
                        line = BadLine(
                            number, line.custom_id, invalid(what, "custom_id", "duplicate_custom_id")
                        )
                yield line
    except OSError as exc:
        raise ConfigError(f"--input {path}: {exc.strerror or exc}") from exc


def _parse(number: int, raw: bytes, urls: tuple[str, ...]) -> BatchRequest | BadLine:
    custom_id: str | None = None
    try:
        try:
            data = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise invalid(f"not valid JSON: {exc}", code="invalid_json") from None
        if not isinstance(data, dict):
            raise invalid(f"must be a JSON object, not {type(data).__name__}", code="invalid_json")
        found = data.get("custom_id")
        if not isinstance(found, str) or not found:
            raise _wrong(data, "custom_id", "a non-empty string")
        custom_id = found
        if data.get("method") != "POST":
            raise _wrong(data, "method", "'POST'")
        if data.get("url") not in urls:
            raise _wrong(data, "url", " or ".join(map(repr, urls)))
        if not isinstance(data.get("body"), dict):
            raise _wrong(data, "body", "an object")
        unknown = sorted(data.keys() - {"custom_id", "method", "url", "body"})
        if unknown:
            raise invalid(f"unknown field `{unknown[0]}`", unknown[0], "unknown_parameter")
    except ApiError as error:
        return BadLine(number, custom_id, error)
    return BatchRequest(number, custom_id, data["url"], data["body"])


def _wrong(data: dict[str, Any], name: str, allowed: str) -> ApiError:
    if name not in data:
        return invalid(f"missing field `{name}`: must be {allowed}", name, "missing_required_parameter")
    return invalid(f"`{name}` must be {allowed}, not {str(data[name])[:100]!r}", name)


@dataclass
class AnswerFile:
    """The output. Each line is handed to the system as soon as it is known, so that killing this process loses none,
    and forced to the disk about once a second. The file is locked while it is open.
    """

    path: str
    done_ids: set[str] = field(default_factory=set)
    """custom_ids of requests answered by an earlier run."""
    done_lines: set[int] = field(default_factory=set)
    """Numbers of bad lines reported by an earlier run."""
    num_failed: int = 0
    """Lines with an error, of this run and earlier ones."""
    _descriptor: int = -1
    _synced: float = 0.0

    def __enter__(self) -> Self:
        """Opens the file, cuts off a line that was not finished, and reads what has been done.

        Raises ConfigError if that fails, or if the file holds something else than answers.
        """
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = self._read_done()
            os.ftruncate(self._descriptor, end)
        except BlockingIOError as exc:
            self._close()
            raise ConfigError(f"--output {self.path}: another process is writing it") from exc
        except OSError as exc:
            self._close()
            raise ConfigError(f"--output {self.path}: {exc.strerror or exc}") from exc
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._descriptor)
        self._close()

    def is_done(self, line: BatchRequest | BadLine) -> bool:
        """Whether an earlier run has answered the line."""
        if isinstance(line, BatchRequest):
            return line.custom_id in self.done_ids
        return line.number in self.done_lines

    def answer(self, request: BatchRequest, request_id: str, body: Any) -> None:
        """Write the answer to a request."""
        self._write(request.custom_id, {"status_code": 200, "request_id": request_id, "body": body}, None)

    def refuse(self, line: BatchRequest | BadLine, error: ApiError) -> None:
        """Write what was wrong. `error.line` is there for bad lines only: a later run knows them by it."""
        found: dict[str, Any] = {"code": error.code or str(error.status), "message": error.message}
        if isinstance(line, BadLine):
            found.update(message=f"line {line.number}: {error.message}", line=line.number)
        response = {"status_code": error.status, "request_id": uuid.uuid4().hex, "body": error.body}
        self.num_failed += 1
        self._write(line.custom_id, response, found)

    def _write(self, custom_id: str | None, response: dict[str, Any], error: dict[str, Any] | None) -> None:
        line = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        data = memoryview(msgspec.json.encode(line) + b"\n")
        while data:
            data = data[os.write(self._descriptor, data) :]
        now = time.monotonic()
        if now - self._synced >= _SYNC_S:
            os.fsync(self._descriptor)
            self._synced = now

    def _read_done(self) -> int:
        """Take in the file's whole lines; returns where the last of them ends."""
        end = 0
        with open(os.dup(self._descriptor), "rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    break
                self._take_in(number, raw)
                end += len(raw)
        return end

    def _take_in(self, number: int, raw: bytes) -> None:
        try:
            line = json.loads(raw)
            custom_id, error = line["custom_id"], line["error"]
            bad_line = error.get("line") if error else None
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise ConfigError(
                f"--output {self.path}: line {number} is not an answer of a batch; give a new file"
            ) from exc
        self.num_failed += error is not None
        if bad_line is not None:
            self.done_lines.add(bad_line)
        else:
            self.done_ids.add(custom_id)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def check_paths(input_path: str, output_path: str) -> None:
    """Raises ConfigError if one is missing, or both are the same file."""
    for name, path in (("input", input_path), ("output", output_path)):
        if not path:
            raise ConfigError(f"--{name} FILE is needed")
    if Path(input_path).resolve() == Path(output_path).resolve():
        raise ConfigError(f"--input and --output are both {input_path}; the answers need a file of their own")
