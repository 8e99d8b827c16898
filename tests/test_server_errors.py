"""What the HTTP API answers when something is wrong with a request; scripted ranks behind the real front-end."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.server import context, transport
from tests.helpers.live_server import MODEL, LiveServer, make_folder
from tests.helpers.rank_tasks import REFUSED_TOKEN

USER = {"role": "user", "content": "who runs the router?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(make_folder(tmp_path_factory.mktemp("model"))) as live:
        yield live


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/nothing", None, 404, "unknown_url"),
        ("GET", "/v1/chat/completions", None, 405, "method_not_allowed"),
        ("POST", "/health", None, 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", {}, 501, "unsupported_endpoint"),
        ("POST", "/v1/completions", b"{", 400, "invalid_json"),
        ("POST", "/v1/completions", b'{"prompt": NaN}', 400, "invalid_json"),
        ("POST", "/v1/completions", b"\xff\xfe", 400, "invalid_json"),
        ("POST", "/v1/completions", b"", 400, "invalid_json"),
        ("POST", "/v1/completions", b"[" * 100_000, 400, "invalid_json"),
        ("POST", "/v1/completions", {"prompt": "x", "tools": [{}]}, 501, "unsupported_parameter"),
        ("POST", "/v1/completions", {"prompt": "x", "temperature": -1}, 400, None),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, None),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 256}, 400, "context_length_exceeded"),
        ("POST", "/v1/completions", {"prompt": [320]}, 400, None),
        ("POST", "/v1/completions", {"prompt": ""}, 400, None),
        ("POST", "/v1/completions", {"prompt": [REFUSED_TOKEN]}, 400, None),
        ("POST", "/v1/completions", {"prompt": [REFUSED_TOKEN], "stream": True}, 400, None),
        ("POST", "/v1/completions", {"prompt": ["x", "y" * 300]}, 400, "context_length_exceeded"),
    ],
)  # fmt: skip
def test_errors_have_openais_shape(
    http: httpx.Client, method: str, path: str, body: Any, status: int, code: str | None
) -> None:
    content = body if isinstance(body, bytes | None) else json.dumps(body)
    answer = http.request(method, path, content=content, headers={"X-Request-Id": "mine-17"})
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    assert answer.headers["x-request-id"] == "mine-17"


def test_hints_on_wrong_paths(http: httpx.Client) -> None:
    assert "/v1/chat/completions" in http.post("/v1/chat/completion").json()["error"]["message"]
    answer = http.get("/v1/completions")
    assert answer.headers["allow"] == "POST"
    assert "use POST" in answer.json()["error"]["message"]


def test_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[USER], top_p=7)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="expert " * 400)
    assert caught.value.code == "context_length_exceeded"


def test_request_ids(http: httpx.Client) -> None:
    assert len(http.get("/health").headers["x-request-id"]) == 32
    answer = http.get("/health", headers={"X-Request-Id": "a" * 257})
    assert answer.status_code == 400
    assert "x-request-id" not in answer.headers


def test_bodies_have_a_limit(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_BODY_BYTES", 100_000)
    fits = {"prompt": "x", "user": "a" * 90_000}
    assert http.post("/v1/completions", json=fits).status_code == 200
    answer = http.post("/v1/completions", json=fits | {"user": "a" * 300_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_too_large")
    assert "100000" in answer.json()["error"]["message"]


def test_texts_that_never_fit_are_refused_without_encoding_all(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *args: Any, **kwargs: Any) -> list[int]:
        if "at_most" not in kwargs and len(args) < 2:
            lengths.append(len(text))
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    monkeypatch.setattr(context, "_COUNTED_TOKENS", 60_000)
    text = "a " * 2_000_000
    for path, body, param in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": ["x", text]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        error = http.post(path, json=body).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert 0 < max(lengths) < 10_000
    # /tokenize counts what no context holds, within reason.
    assert http.post("/tokenize", json={"prompt": text[:100_001]}).json()["count"] == 50_001
    assert http.post("/tokenize", json={"prompt": text}).status_code == 400


def test_a_client_that_leaves_within_its_request_is_no_error(
    server: LiveServer, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(server.base_url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        time.sleep(0.2)
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_api_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_folder(tmp_path_factory.mktemp("keyed"))
    with (
        LiveServer(folder, num_ranks=1, api_key="s3cret") as live,
        httpx.Client(base_url=live.base_url) as http,
    ):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            answer = http.get("/v1/models", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert http.post("/reset_prefix_cache", headers=headers).status_code == 401
        assert http.get("/health").status_code == http.get("/metrics").status_code == 200
        keyed = openai.OpenAI(base_url=live.base_url + "/v1", api_key="s3cret")
        assert keyed.models.list().data[0].id == MODEL
        info = http.get("/server_info", headers={"Authorization": "Bearer s3cret"})
        assert "s3cret" not in info.text
