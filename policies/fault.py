"""One fault of a policy: where it is in the document, and a sentence that helps to mend it.

Knows nothing of YAML or of what a policy may hold. Read next: `policies/load.py` (who turns faults into messages).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

import msgspec

# Steps from the root: keys of mappings and indices of lists.
Path = tuple[str | int, ...]
PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
MAX_LISTED = 12


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """`at_key`: the name itself is wrong (or what lies below it lacks something), not the value."""

    path: Path
    message: str
    at_key: bool = False


def show_path(path: Path) -> str:
    """As in JSONPath: `$.models.small.price`, `$.aliases["gpt-4.1"]`, `$.default.members[0]`."""
    steps = []
    for step in path:
        if isinstance(step, int):
            steps.append(f"[{step}]")
        else:
            steps.append(f".{step}" if PLAIN_KEY.fullmatch(step) else f'["{step}"]')
    return "$" + "".join(steps)


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name that is nearly `word`, if there is one."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return near[0] if near else None


def hint(word: str, known: Iterable[str]) -> str:
    """` (did you mean `x`?)` for a word that is nearly right, else what there is."""
    names = sorted(known)
    near = closest(word, names)
    if near is not None:
        return f" (did you mean `{near}`?)"
    if not names:
        return ""
    more = ", ..." if len(names) > MAX_LISTED else ""
    return f" (there is: {', '.join(f'`{name}`' for name in names[:MAX_LISTED])}{more})"
