"""A small blocking client of our own API, for the terminal: the standard library is enough.

Read next: `gateway/cli/chat.py`.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 600.0


class ClientError(Exception):
    """The gateway refused, failed or is not there."""


class ChatClient:
    """`options` (model, temperature, ...) go into every request. Raises ClientError for a URL that is none."""

    def __init__(self, base: str, key: str, options: Mapping[str, Any]) -> None:
        parts = urlsplit(base)
        try:
            self._host, self._port = parts.hostname, parts.port
        except ValueError:
            self._host = None
        if parts.scheme not in ("http", "https") or not self._host:
            raise ClientError(f"{base!r} is not a base URL; write http://HOST:PORT.")
        self._secure = parts.scheme == "https"
        # Both http://host:port and the SDK's http://host:port/v1 are base URLs.
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._base = base
        self._key = key
        self._options = dict(options)

    def stream(self, messages: Sequence[Mapping[str, str]]) -> Generator[str, None, None]:
        """Pieces of the answer's text; closing the generator ends the request. Raises ClientError."""
        assert self._host is not None
        made = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = made(self._host, self._port, timeout=TIMEOUT_S)
        body = json.dumps({**self._options, "messages": list(messages), "stream": True})
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._key}"}
        try:
            connection.request("POST", self._path, body, headers)
            with closing(connection.getresponse()) as response:
                if response.status != http.HTTPStatus.OK:
                    raise ClientError(refusal(response.status, response.read()))
                yield from pieces(response)
        except (OSError, http.client.HTTPException, UnicodeEncodeError) as error:
            raise ClientError(f"no gateway answers at {self._base}: {error}. Start one with `facet up`.") from error
        finally:
            connection.close()


def pieces(response: http.client.HTTPResponse) -> Generator[str, None, None]:
    """Contents of the deltas. Raises ClientError for an error frame, and for a stream that breaks off."""
    for line in response:
        data = line.decode().strip()
        if not data.startswith("data:"):
            continue
        data = data.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        document = json.loads(data)
        if document.get("error"):
            raise ClientError(document["error"]["message"])
        for choice in document["choices"]:
            yield choice["delta"].get("content") or ""
    raise ClientError("the answer broke off: the gateway ended")


def refusal(status: int, body: bytes) -> str:
    """The message of an error answer."""
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:200]!r}"
