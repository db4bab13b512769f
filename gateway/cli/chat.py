"""`facet chat`: a conversation in the terminal, with a running gateway.

Speaks plain HTTP to the public API, as any client does. Read next: `gateway/cli/client.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import Annotated

import typer

from gateway.cli.context import settings_with
from gateway.cli.output import fail

HELP = "/system TEXT sets the system message, /clear forgets the conversation, /quit ends. Ctrl-C stops an answer."
Message = dict[str, str]
# Pieces of the answer to a conversation.
Ask = Callable[[list[Message]], Generator[str, None, None]]


def chat(
    prompt: Annotated[str | None, typer.Argument(help="Ask this once and end; without it, a conversation.")] = None,
    model: Annotated[str, typer.Option(help="Model or alias.")] = "small",
    url: Annotated[str | None, typer.Option(help="Base URL of the gateway. [http://127.0.0.1:8080]")] = None,
    key: Annotated[str | None, typer.Option(help="API key; FACET_API_KEY keeps it out of process lists.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
) -> None:
    """Talk to a model through a running gateway."""
    from gateway.cli.client import ChatClient, ClientError

    settings = settings_with()
    credential = key or settings.api_key
    if not credential:
        raise fail("no API key: set FACET_API_KEY or give --key; `facet keys create NAME` makes one.")
    try:
        client = ChatClient(
            url or f"http://{settings.host}:{settings.port}",
            credential,
            {"model": model, "temperature": temperature, "max_tokens": max_tokens},
        )
        conversation = Conversation(client.stream, system)
        if prompt is not None:
            conversation.ask(prompt)
        else:
            converse(conversation)
    except ClientError as error:
        raise fail(str(error)) from error


class Conversation:
    """What was said so far. A question that got no answer is not part of it."""

    def __init__(self, ask: Ask, system: str | None) -> None:
        self._ask = ask
        self.system = system
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """As sent."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def ask(self, text: str) -> None:
        """Print the answer as it comes; Ctrl-C keeps what has come. Raises ClientError."""
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        with closing(self._ask([*self.messages, question])) as answer:
            try:
                for piece in answer:
                    print(piece, end="", flush=True)
                    pieces.append(piece)
            except KeyboardInterrupt:
                print(" [stopped]", end="")
        print()
        if pieces:
            self.turns += [question, {"role": "assistant", "content": "".join(pieces)}]


def converse(conversation: Conversation) -> None:
    """Read lines until /quit, Ctrl-D, or Ctrl-C at the prompt. A refused question does not end the conversation."""
    from gateway.cli.client import ClientError

    with suppress(ImportError):
        import readline  # input() edits lines and keeps a history once this is loaded

        readline.set_auto_history(True)
    print(HELP)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        if command == "/clear":
            conversation.turns.clear()
        elif command == "/system":
            conversation.system = rest.strip()
        elif command.startswith("/"):
            print(HELP)
        elif line:
            try:
                conversation.ask(line)
            except ClientError as error:
                print(f"error: {error}", file=sys.stderr)
