"""What a model writes, read as a client wants it: thoughts, answer, tool calls.

Which marks to look for is known from the model's chat template, or said by the policy. Thoughts end before calls begin,
so the two parsers run one after the other; Harmony's channels are read by one.

Knows nothing of wire formats. Read next: `engines/text/tools/registry.py`, `engines/text/reasoning/registry.py`.
"""

from __future__ import annotations

from engines.text.reasoning import registry as thoughts
from engines.text.reasoning.tags import reasoning_parser
from engines.text.scanner import Content, Piece, Reasoning
from engines.text.tools import registry as calls
from engines.text.tools.base import Offered, PieceParser, tool_parser

HARMONY = "harmony"


class OutputReader:
    """One choice's text to pieces. `thinking` until the first text that is no thought."""

    def __init__(self, reasoning: PieceParser | None, tools: PieceParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self.thinking = reasoning is not None

    def feed(self, text: str) -> list[Piece]:
        """Pieces completed by this text."""
        first: list[Piece] = [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._second(first)

    def close(self) -> list[Piece]:
        """What was held back, at the end of the text."""
        first: list[Piece] = [] if self._reasoning is None else self._reasoning.close()
        return self._second(first) + ([] if self._tools is None else self._tools.close())

    def _second(self, first: list[Piece]) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in first:
            if isinstance(piece, Content) and self._tools is not None:
                pieces += self._tools.feed(piece.text)
            else:
                pieces.append(piece)
        if any(not isinstance(piece, Reasoning) for piece in pieces):
            self.thinking = False
        return pieces


class OutputForm:
    """How one model marks its thoughts and calls. Names are those of the registries; None: it does not."""

    def __init__(self, template: str, *, tools: str | None = None, reasoning: str | None = None) -> None:
        """`tools` and `reasoning` overrule what the template tells. Raises KeyError for a name nobody knows."""
        self.tools = tools or (calls.family_of(template) if "tools" in template else "hermes")
        self.reasoning = None if self.tools == HARMONY else reasoning or thoughts.family_of(template)
        self._family = calls.FAMILIES[self.tools]
        self._tags = None if self.reasoning is None else thoughts.FAMILIES[self.reasoning]

    def is_plain(self, *, with_tools: bool) -> bool:
        """True if all that the model writes is its answer."""
        return self._tags is None and not with_tools and self.tools != HARMONY

    def marks(self, *, with_tools: bool) -> tuple[str, ...]:
        """Texts that the readers look for."""
        own = self._family.marks if with_tools or self.tools == HARMONY else ()
        return own if self._tags is None else (*own, *self._tags.opens, *self._tags.closes, *self._tags.after)

    def reader(self, offered: Offered | None, prompt_end: str) -> OutputReader:
        """For one choice of a chat. `offered` None: no tools. `prompt_end`: the last characters of the prompt, which
        may open the thoughts."""
        tools = None
        if offered is not None or self.tools == HARMONY:
            tools = tool_parser(self._family.read, offered)
        reasoning = None
        if self._tags is not None:
            inside = prompt_end.rstrip().endswith(tuple(mark.strip() for mark in self._tags.opens))
            reasoning = reasoning_parser(self._tags, inside=inside)
        return OutputReader(reasoning, tools)
