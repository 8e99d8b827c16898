"""SamplingParams as Python users make them: what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest

from moe_runtime.core import SamplingParams
from moe_runtime.errors import RequestError


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": 3}, "stop"), ({"stop": {"a": 1}}, "stop"), ({"stop": [3]}, "stop"), ({"stop": "x", "detokenize": False}, "stop"),
        ({"logit_bias": [1]}, "logit_bias"), ({"logit_bias": {"5": 1.0}}, "logit_bias"), ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"stop_token_ids": 3}, "stop_token_ids"), ({"stop_token_ids": ["3"]}, "stop_token_ids"),
        ({"temperature": "1"}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"n": 1.0}, "n"),
        ({"top_k": True}, "top_k"), ({"logprobs": 21}, "logprobs"), ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
    ],
)  # fmt: skip
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


def test_stop_may_be_text_or_several() -> None:
    assert SamplingParams(stop="ab").stop_strings == ["ab"]
    assert SamplingParams(stop=("a", "b")).stop_strings == ["a", "b"]  # type: ignore[arg-type]
    assert SamplingParams().stop_strings == []
