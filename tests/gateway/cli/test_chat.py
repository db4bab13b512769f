"""The terminal conversation: what is sent, what is shown, what is kept. The gateway here is a few scripted answers."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.chat import Conversation
from gateway.cli.client import ChatClient, ClientError
from gateway.cli.main import app

KEY = "sk-facet-test"
ERROR = {"error": {"message": "The API key is not valid.", "type": "x", "param": None, "code": None}}


def delta(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


def stream(*pieces: str) -> bytes:
    role = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n: ping\n\n'
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n'
    return role + b"".join(delta(piece) for piece in pieces) + usage + b"data: [DONE]\n\n"


@contextmanager
def gateway(*answers: tuple[int, bytes]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(base URL, requests seen); answers in order, the last one again and again."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append({"path": self.path, "authorization": self.headers["authorization"], **body})
            status, answer = answers[min(len(seen), len(answers)) - 1]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def chat(url: str, *arguments: str, lines: str = "") -> Result:
    return CliRunner(env={"FACET_API_KEY": KEY}).invoke(app, ["chat", "--url", url, *arguments], input=lines)


def test_one_question_is_asked_and_its_answer_printed() -> None:
    with gateway((200, stream("Red, ", "blue.\n", "Ä"))) as (url, seen):
        result = chat(url, "Name colours.", "--temperature", "0", "--max-tokens", "9", "--system", "Be short.")
    assert result.stdout == "Red, blue.\nÄ\n"
    assert result.exit_code == 0
    assert seen == [
        {
            "path": "/v1/chat/completions",
            "authorization": f"Bearer {KEY}",
            "model": "small",
            "temperature": 0.0,
            "max_tokens": 9,
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Name colours."},
            ],
            "stream": True,
        }
    ]


def test_a_conversation_is_remembered_cleared_and_survives_a_refusal() -> None:
    answers = [(200, stream("one")), (429, json.dumps(ERROR).encode()), (200, stream("three")), (200, stream("four"))]
    lines = "a\nb\nc\n/clear\n/system S\nd\n/what\n\n/quit\nnever\n"
    with gateway(*answers) as (url, seen):
        result = chat(f"{url}/v1", lines=lines)
    assert result.exit_code == 0
    assert [[(m["role"], m["content"]) for m in request["messages"]] for request in seen] == [
        [("user", "a")],
        [("user", "a"), ("assistant", "one"), ("user", "b")],
        [("user", "a"), ("assistant", "one"), ("user", "c")],
        [("system", "S"), ("user", "d")],
    ]
    assert result.stderr == "error: 429: The API key is not valid.\n"
    assert result.stdout.count("/quit ends") == 2  # at the beginning, and after /what


def test_ctrl_c_keeps_what_has_come_and_ends_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def ask(messages: Sequence[dict[str, str]]) -> Generator[str, None, None]:
        try:
            yield "half"
            raise KeyboardInterrupt
        finally:
            closed.append(len(messages))

    conversation = Conversation(ask, None)
    conversation.ask("q")
    assert closed == [1]
    assert capsys.readouterr().out == "half [stopped]\n"
    assert conversation.turns == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "half"}]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, json.dumps(ERROR).encode()), "401: The API key is not valid."),
        ((502, b"<html>"), "502: b'<html>'"),
        ((200, delta("a") + b"data: " + json.dumps(ERROR).encode() + b"\n\n"), "The API key is not valid."),
        ((200, delta("a")), "the answer broke off: the gateway ended"),
    ],
)
def test_a_failure_is_exit_code_1_and_says_what_the_gateway_said(answer: tuple[int, bytes], message: str) -> None:
    with gateway(answer) as (url, _):
        result = chat(url, "q")
    assert result.exit_code == 1
    assert result.stderr == f"error: {message}\n"


def test_no_gateway_no_key_and_no_url_say_what_to_do() -> None:
    result = chat("http://127.0.0.1:9", "q")
    assert result.exit_code == 1
    assert "no gateway answers at http://127.0.0.1:9" in result.stderr
    assert "Start one with `facet up`." in result.stderr
    without = CliRunner(env={"FACET_API_KEY": ""}).invoke(app, ["chat", "q"])
    assert without.exit_code == 1
    assert "set FACET_API_KEY or give --key" in without.stderr
    for url in ("localhost:8080", "http://", "ftp://x", "http://x:port"):
        with pytest.raises(ClientError, match="is not a base URL; write http://HOST:PORT"):
            ChatClient(url, KEY, {})
