"""`facet chat`: a conversation in the terminal, with a running gateway.

Speaks plain HTTP to the public API, as any client does. Read next: `gateway/cli/client.py`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.context import settings_with
from gateway.cli.output import fail

HELP = "/system TEXT sets the system message, /clear forgets the conversation, /quit ends."


def chat(
    prompt: Annotated[str | None, typer.Argument(help="Ask this once and end; without it, a conversation.")] = None,
    model: Annotated[str, typer.Option(help="Model or alias.")] = "small",
    url: Annotated[str | None, typer.Option(help="Base URL of the gateway.")] = None,
    key: Annotated[str | None, typer.Option(help="API key (FACET_API_KEY).")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
) -> None:
    """Talk to a model through a running gateway."""
    from gateway.cli.client import ClientError, stream_chat

    settings = settings_with()
    base = url or f"http://{settings.host}:{settings.port}"
    credential = key or settings.api_key
    if not credential:
        raise fail("no API key: give --key or set FACET_API_KEY; `facet keys create me` makes one.")
    history: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def ask(text: str) -> None:
        history.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in stream_chat(base, credential, model, history, temperature):
                print(piece, end="", flush=True)
                answer += piece
        except ClientError as error:
            history.pop()
            raise fail(str(error)) from error
        print()
        history.append({"role": "assistant", "content": answer})

    if prompt is not None:
        ask(prompt)
        return
    print(HELP)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/quit":
            return
        if text == "/clear":
            history = history[:1] if history and history[0]["role"] == "system" else []
        elif text.startswith("/system "):
            rest = [message for message in history if message["role"] != "system"]
            history = [{"role": "system", "content": text.removeprefix("/system ").strip()}, *rest]
        elif text:
            ask(text)
