"""Errors that users can meet. Each message says what is wrong, where, and which values are allowed."""

from __future__ import annotations


class MoeRuntimeError(Exception):
    """Base of every error raised on purpose by this package."""

    told = False
    """Whether the user has read it already, from the rank where it happened."""


class ConfigError(MoeRuntimeError):
    """A flag, argument or model configuration field has a value that cannot be honoured."""


class CheckpointError(MoeRuntimeError):
    """A checkpoint is missing, damaged, or does not match its configuration."""


class CapacityError(MoeRuntimeError):
    """Not enough memory, shared memory or KV cache for what was asked."""


class RequestError(MoeRuntimeError):
    """One request is invalid; others are not affected. Becomes HTTP 400."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(RequestError):
    """A prompt leaves no room in the context."""


class OverloadedError(MoeRuntimeError):
    """Too many requests are waiting, or the server is shutting down; later may work. Becomes HTTP 503."""


class LockstepError(MoeRuntimeError):
    """A peer rank died, is late, or disagrees about the step. The process must end."""


class BackendUnavailable(MoeRuntimeError):  # noqa: N818 - the design's name
    """A backend asked for by name cannot serve this model or machine; the message says why."""


class EngineDeadError(MoeRuntimeError):
    """The ranks behind this client have gone; no request can be served any more."""
