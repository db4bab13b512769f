"""Every byte of every answer: requests and responses in `tests/golden/http`, with a scripted engine and a fixed clock.

A transcript is the request (method, path, headers that matter, body), a blank line, the response (status, headers),
a blank line, its body as it was sent. `pytest --update-golden` writes them anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.fake import FakeEngine, Script
from engines.text.model import load_text
from gateway.handlers.common import Surface
from tests.gateway.conftest import BODY_BYTES, client_of

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "http"
HI = [{"role": "user", "content": "Hi"}]
HEADERS = {"x-request-id": "golden-1"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request; `script` is what the engine does, `says` its text in chunks of three tokens (here: bytes), `raw` a
    body that is not JSON of `body`."""

    path: str = "/v1/chat/completions"
    method: str = "POST"
    body: dict[str, Any] | None = None
    raw: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    script: Script = field(default_factory=Script)
    says: str = ""


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "small", "messages": HI, "max_tokens": 4, "seed": 1, **changes}


def text(**changes: Any) -> dict[str, Any]:
    return {"model": "small", "prompt": "abc", "max_tokens": 4, "seed": 1, **changes}


COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
GREETING = "Grüß dich 👋 heute"  # characters of two and four bytes, cut by the engine's chunks
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = (
    "Let me see.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
)
TALK = [
    *HI,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
CASES = {
    "chat-whole": Case(body=chat()),
    "chat-alias": Case(body=chat(model="gpt-4o-mini")),
    "chat-whole-logprobs": Case(body=chat(logprobs=True, top_logprobs=1, return_token_ids=True)),
    "chat-stream": Case(body=chat(stream=True)),
    "chat-stream-usage": Case(body=chat(stream=True, stream_options={"include_usage": True})),
    "chat-stream-choices": Case(body=chat(stream=True, n=2, max_tokens=2)),
    "chat-stream-characters": Case(body=chat(stream=True, max_tokens=32), says=GREETING),
    "chat-stop-string": Case(body=chat(max_tokens=32, stop=["dich"]), says=GREETING),
    "chat-stream-stop-string": Case(body=chat(max_tokens=32, stop=["dich"], stream=True), says=GREETING),
    "chat-stream-dies": Case(body=chat(stream=True), script=Script(fail_after=2)),
    "chat-dies-before-its-first-token": Case(body=chat(stream=True), script=Script(fail_after=0)),
    "chat-tools": Case(body=chat(max_tokens=200, tools=TOOLS), says=CALLS),
    "chat-tools-stream": Case(body=chat(max_tokens=200, tools=TOOLS, stream=True), says=CALLS),
    "chat-tools-one-call": Case(body=chat(max_tokens=200, tools=TOOLS, parallel_tool_calls=False), says=CALLS),
    "chat-tools-none": Case(body=chat(max_tokens=200, tools=TOOLS, tool_choice="none"), says="<tool_call>now"),
    "chat-tools-malformed": Case(body=chat(max_tokens=200, tools=TOOLS), says="<tool_call>{'name': 'now'}</tool_call>"),
    "chat-tools-cut-off": Case(body=chat(max_tokens=60, tools=TOOLS), says=CALLS),
    "chat-tools-result": Case(body=chat(messages=TALK, tools=TOOLS)),
    "completions-whole": Case(path=COMPLETIONS, body=text(prompt=["abc", "de"])),
    "completions-echo": Case(path=COMPLETIONS, body=text(echo=True)),
    "completions-logprobs": Case(path=COMPLETIONS, body=text(logprobs=1)),
    "completions-stream": Case(path=COMPLETIONS, body=text(stream=True, stream_options={"include_usage": True})),
    "completions-token-ids": Case(path=COMPLETIONS, body=text(prompt=[72, 105])),
    "embeddings-float": Case(path=EMBEDDINGS, body={"model": "vectors", "input": ["a", "b"]}),
    "embeddings-base64": Case(
        path=EMBEDDINGS,
        body={"model": "text-embedding-3-small", "input": "a", "encoding_format": "base64", "dimensions": 2},
    ),
    "models": Case(path="/v1/models", method="GET"),
    "model": Case(path="/v1/models/gpt-4o-mini", method="GET"),
    "live": Case(path="/health/live", method="GET"),
    "ready": Case(path="/health/ready", method="GET"),
    "error-no-key": Case(body=chat(), headers={"authorization": ""}),
    "error-bad-key": Case(body=chat(), headers={"authorization": "Bearer sk-facet-golden-guess"}),
    "error-not-json": Case(raw=b'{"model": "small", '),
    "error-wrong-type": Case(body=chat(max_tokens="many")),
    "error-missing-field": Case(body={"model": "small"}),
    "error-no-such-model": Case(path="/v1/models/nothing", method="GET"),
    "error-unknown-model": Case(body=chat(model="gpt-9")),
    "error-no-such-route": Case(path="/v1/nothing", body={}),
    "error-wrong-method": Case(method="GET"),
    "error-too-deep": Case(raw=b"[" * 65 + b"]" * 65),
    "error-too-large": Case(raw=b" " * (BODY_BYTES + 1)),
    "error-headers-too-large": Case(body=chat(), headers={"x-long": "y" * 17000}),
    "error-too-long": Case(body=chat(messages=[{"role": "user", "content": "b" * 9000}])),
    "error-out-of-range": Case(body=chat(temperature=3)),
    "error-not-a-number": Case(raw=b'{"model": "small", "messages": [], "temperature": NaN}'),
    "error-not-served": Case(body=chat(guided_json={"type": "object"})),
    "error-tool-choice": Case(body=chat(tools=TOOLS, tool_choice="required")),
    "error-tool-choice-without-tools": Case(body=chat(tool_choice="auto")),
    "error-tool-twice": Case(body=chat(tools=[TOOLS[1], TOOLS[1]])),
    "error-tool-type": Case(body=chat(tools=[{"type": "web_search"}])),
    "error-tool-name": Case(body=chat(tools=[{"type": "function", "function": {"name": "a b"}}])),
    "error-embedding-of-a-decoder": Case(path=EMBEDDINGS, body={"model": "small", "input": "a"}),
    "error-chat-with-an-encoder": Case(body=chat(model="vectors")),
}


def transcript(case: Case, content: bytes, response: httpx.Response) -> str:
    shown = content if len(content) <= 300 else content[:40] + f"... ({len(content)} bytes)".encode()
    request = [f"{case.method} {case.path}"]
    request += [f"{name}: {value if len(value) < 80 else value[:10] + '...'}" for name, value in case.headers.items()]
    headers = [f"{name}: {value}" for name, value in sorted(response.headers.items())]
    return "\n".join([*request, shown.decode(), "", str(response.status_code), *headers, "", response.content.decode()])


@pytest.mark.parametrize("name", CASES)
async def test_bytes(
    surface: Surface, engine: FakeEngine, name: str, tiny_llama_path: Path, request: pytest.FixtureRequest
) -> None:
    case = CASES[name]
    says = load_text(tiny_llama_path).encode(case.says)
    engine.script = Script(tokens=says, chunk_tokens=3) if says else case.script
    content = case.raw if case.raw is not None else b"" if case.body is None else json.dumps(case.body).encode()
    async with client_of(surface, **HEADERS) as client:
        response = await client.request(case.method, case.path, content=content, headers=case.headers)
    got = transcript(case, content, response)
    file = FOLDER / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(got)
    assert got == file.read_text()


def test_no_transcript_is_left_over() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(CASES)
