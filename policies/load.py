"""A policy file to a `Policy`: parse, type, check; every fault with file, line, column, path and a hint.

    FILE:LINE:COLUMN: $.models.small.price: what is wrong (did you mean `x`?)

Faults of form and type are reported together; meaning is checked once they are mended. Knows nothing of requests.

Read next: `policies/document.py`, `policies/convert.py`, `policies/check.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from policies.check import check_policy
from policies.convert import type_faults
from policies.document import Document, DocumentError
from policies.fault import Fault, show_path
from policies.schema import Policy

MAX_POLICY_BYTES = 1 << 20
MAX_PROBLEMS = 50


class PolicyError(Exception):
    """The file cannot be used; `problems` are complete sentences with file, line and column, in file order."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load_policy(path: Path) -> Policy:
    """Read, parse, type and check. Raises PolicyError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_POLICY_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError([f"{path}: cannot be read: {error}"]) from error
    if len(data) > MAX_POLICY_BYTES:
        raise PolicyError([f"{path}: larger than {MAX_POLICY_BYTES} bytes, which a policy may have at most"])
    return parse_policy(text, str(path))


def parse_policy(text: str, name: str = "<policy>") -> Policy:
    """As `load_policy`, from a string; `name` stands for the file in messages."""
    try:
        document = Document(text)
    except DocumentError as error:
        raise PolicyError([f"{name}:{error.place.line}:{error.place.column}: {error}"]) from error
    if document.value is None:
        raise PolicyError([f"{name}:1:1: the file is empty; start with `version: facet/v1`"])
    refuse(type_faults(document.value, Policy), document, name)
    policy = msgspec.convert(document.value, Policy, strict=True)
    refuse(check_policy(policy), document, name)
    return policy


def refuse(faults: Iterable[Fault], document: Document, name: str) -> None:
    """Raise PolicyError if there are any."""
    placed = sorted(((document.place_of(fault), fault) for fault in faults), key=lambda pair: pair[0])
    if not placed:
        return
    problems = [
        f"{name}:{place.line}:{place.column}: {show_path(fault.path)}: {fault.message}"
        for place, fault in placed[:MAX_PROBLEMS]
    ]
    if len(placed) > MAX_PROBLEMS:
        problems.append(f"{name}: {len(placed) - MAX_PROBLEMS} more problems")
    raise PolicyError(problems)
