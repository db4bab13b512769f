"""A small blocking client of our own API, for the terminal: the standard library is enough.

Read next: `gateway/cli/chat.py`.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

TIMEOUT_S = 600.0


class ClientError(Exception):
    """The gateway refused, failed or is not there."""


def stream_chat(
    base: str, key: str, model: str, messages: Sequence[dict[str, str]], temperature: float
) -> Iterator[str]:
    """Pieces of the answer's text. Raises ClientError with what the gateway said."""
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ClientError(f"{base!r} is not a base URL; write http://HOST:PORT.")
    made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = made(parts.hostname, parts.port, timeout=TIMEOUT_S)
    body = json.dumps({"model": model, "messages": list(messages), "temperature": temperature, "stream": True})
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    try:
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ClientError(refusal(response.status, response.read()))
        yield from pieces(response)
    except OSError as error:
        raise ClientError(f"no gateway answers at {base}: {error}. Start one with `facet up`.") from error
    finally:
        connection.close()


def pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """Contents of the deltas."""
    for line in response:
        data = line.decode().strip().removeprefix("data:").strip()
        if not data or data.startswith(":"):
            continue
        if data == "[DONE]":
            return
        document = json.loads(data)
        if document.get("error"):
            raise ClientError(document["error"]["message"])
        for choice in document["choices"]:
            yield choice["delta"].get("content") or ""


def refusal(status: int, body: bytes) -> str:
    """The message of an error answer."""
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:200]!r}"
