"""Commands with many options take one frozen dataclass: its fields are the options, so that commands can share them.

    @from_options
    def serve(options: ServeOptions) -> None: ...

Knows nothing of any command. Read next: `gateway/cli/serve.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def from_options(command: Callable[[Options], None]) -> Callable[..., None]:
    """A function that Typer reads as if each field of the dataclass were a parameter; every field has a default."""
    (kind,) = (hint for name, hint in get_type_hints(command).items() if name != "return")
    hints = get_type_hints(kind, include_extras=True)

    def run(**given: Any) -> None:
        command(kind(**given))

    parameters = [
        inspect.Parameter(
            field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(kind)
    ]
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__annotations__ = {**hints, "return": None}
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    return run
