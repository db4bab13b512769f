"""Raw-byte limits: depth, size, headers; none of it builds what it refuses."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits import LimitsMiddleware, json_depth
from gateway.settings import Limits


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


JSON = st.recursive(
    st.none() | st.text('[]{}"\\ab', max_size=6),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text("[{", max_size=2), x, max_size=3),
)


@given(JSON)
def test_depth_ignores_strings_and_counts_brackets(value: object) -> None:
    """With a limit of 0 nothing is waved through for having few brackets; depths up to the limit + 1 are exact."""
    true = depth_of(value)
    found = json_depth(json.dumps(value).encode(), 3)
    assert (found > 3) == (true > 3)


@pytest.mark.parametrize("body", [b"[" * 10**6, b'{"a":' * 10**6, b'"' + b"[" * 100, b'["\\', b""])
def test_hostile_bodies_are_scanned_on_a_small_stack(body: bytes) -> None:
    found: list[int] = []
    previous = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=lambda: found.append(json_depth(body, 64)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(previous)
    assert found[0] <= 65


class Call:
    """One ASGI request through the middleware; `reached` is the body that the application saw."""

    def __init__(self, *chunks: bytes, headers: list[tuple[bytes, bytes]] | None = None, **limits: int) -> None:
        self.messages = [
            {"type": "http.request", "body": chunk, "more_body": number + 1 < len(chunks)}
            for number, chunk in enumerate(chunks)
        ]
        self.headers = headers or []
        self.limits = Limits(**limits)
        self.reached: bytes | None = None
        self.sent: list[dict[str, object]] = []

    async def run(self) -> int:
        async def app(scope: object, receive: object, send: object) -> None:
            self.reached = (await receive())["body"]
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def receive() -> object:
            return self.messages.pop(0)

        async def send(message: dict[str, object]) -> None:
            self.sent.append(message)

        scope = {"type": "http", "method": "POST", "headers": self.headers}
        await LimitsMiddleware(app, self.limits, lambda: "made")(scope, receive, send)
        return self.sent[0]["status"]


async def test_a_good_body_is_replayed_whole() -> None:
    call = Call(b'{"a":', b"1}")
    assert await call.run() == 200
    assert call.reached == b'{"a":1}'


@pytest.mark.parametrize(
    ("call", "status", "code"),
    [
        (Call(b"x" * 11, body_bytes=10), 413, "request_too_large"),
        (Call(b"x" * 6, b"x" * 6, body_bytes=10), 413, "request_too_large"),
        (Call(b"", headers=[(b"content-length", b"99")], body_bytes=10), 413, "request_too_large"),
        (Call(b"", headers=[(b"x", b"y" * 100)], header_bytes=50), 431, "headers_too_large"),
        (Call(b"[[[[]]]]", json_depth=3), 400, "json_too_deep"),
    ],
)
async def test_what_is_too_much_never_reaches_the_application(call: Call, status: int, code: str) -> None:
    assert await call.run() == status
    assert call.reached is None
    error = json.loads(call.sent[1]["body"])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert (b"x-request-id", b"made") in call.sent[0]["headers"]


@pytest.mark.parametrize(("given_id", "answered"), [(b"mine-1", b"mine-1"), (b"a b\r\nset-cookie: x", b"made")])
async def test_a_harmless_request_id_is_taken_over(given_id: bytes, answered: bytes) -> None:
    call = Call(b"[[[[]]]]", headers=[(b"x-request-id", given_id)], json_depth=3)
    assert await call.run() == 400
    assert (b"x-request-id", answered) in call.sent[0]["headers"]
