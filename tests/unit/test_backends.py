"""Choosing an implementation: the first that can, with the reasons of the others; what is asked for, or an error."""

from __future__ import annotations

import logging

import pytest

from moe_runtime.backends import choose
from moe_runtime.errors import BackendUnavailable

REASONS = {"fast": "needs a GPU", "plain": None, "slow": None}


def test_auto_takes_the_first_that_can_and_says_why_not_the_others(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choice = choose("thing", "auto", REASONS, log=True)
    assert (choice.what, choice.name) == ("thing", "plain")
    assert choice.why == "auto; not fast: needs a GPU; not slow: slower than plain"
    assert caplog.messages == [f"thing: plain ({choice.why})"]


def test_what_is_asked_for_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose("thing", "slow", REASONS, log=False)[1:] == ("slow", "asked for")
    assert not caplog.messages, "one rank speaks for all"


def test_what_cannot_be_is_an_error_with_the_reason() -> None:
    with pytest.raises(BackendUnavailable, match=r"^thing 'fast' cannot be used: needs a GPU$"):
        choose("thing", "fast", REASONS, log=True)
    with pytest.raises(BackendUnavailable, match="no thing can be used: a: x; b: y"):
        choose("thing", "auto", {"a": "x", "b": "y"}, log=True)
