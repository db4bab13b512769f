"""One choice on its way from token ids to what a client sees: detokenized, cut at stop strings, thoughts and tool calls
told from the answer, log-probs named, tokens counted.

Knows nothing of engines or plans. Read next: `engines/text/output.py`, `routers/execute.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engines.api import Chunk, Timings, TokenLogprobs, Usage
from engines.text.model import TextModel
from engines.text.output import OutputReader
from engines.text.scanner import CallArguments, CallStart, Content, Piece, Reasoning, joined
from engines.text.stop import StopMatcher
from engines.text.tools.base import Offered
from routers.types import (
    CanonicalRequest,
    Delta,
    Finished,
    FinishReason,
    Params,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
)


class Choice:
    """Feed it the chunks of its index in order; it gives what a client may see."""

    def __init__(
        self,
        index: int,
        text: TextModel,
        params: Params,
        reader: OutputReader | None = None,
        *,
        with_tools: bool = False,
        one_call: bool = False,
    ) -> None:
        """`reader` tells thoughts and calls from the answer. `one_call`: a second call ends the choice."""
        self.index = index
        self.finished: Finished | None = None
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self._text = text
        self._reader = reader
        self._one_call = one_call
        self._num_calls = 0
        # Stop strings and thoughts end within a chunk; which tokens lie before the end is known by feeding one by one.
        self._is_plain = not params.stop and reader is None
        keep = text.output_marks(with_tools=with_tools) if reader is not None else frozenset()
        self._detokenizer = text.detokenizer(skip_special_tokens=params.skip_special_tokens, keep=keep)
        self._stops = StopMatcher(params.stop, include=params.include_stop)

    def feed(self, chunk: Chunk) -> list[Delta | Finished]:
        """What there is to show now; Finished last, if this was the last chunk that counts."""
        if self._is_plain and chunk.finish_reason is None and chunk.logprobs is None:
            text = self._detokenizer.feed(chunk.token_ids)
            self.num_tokens += len(chunk.token_ids)
            return [TextDelta(index=self.index, text=text, token_ids=tuple(chunk.token_ids))] if text else []
        self.usage, self.timings = chunk.usage or self.usage, chunk.timings or self.timings
        pieces, taken = self._take(chunk.token_ids)
        if self._is_over:
            pieces += self._close()
            self._finish("stop", self._stops.matched)
        elif chunk.finish_reason is not None:
            pieces += self._rest()
            matched = self._stops.matched
            reason: FinishReason = "stop" if matched is not None or chunk.finish_reason == "stop" else "length"
            self._finish(reason, matched if matched is not None else chunk.stop_token_id)
        self.num_tokens += taken
        logprobs = name_logprobs(self._text, chunk.logprobs[:taken]) if chunk.logprobs is not None else None
        events = self._events(pieces, tuple(chunk.token_ids[:taken]), logprobs)
        return events if self.finished is None else [*events, self.finished]

    @property
    def _is_over(self) -> bool:
        return self._stops.matched is not None or (self._one_call and self._num_calls > 1)

    def _take(self, token_ids: Sequence[int]) -> tuple[list[Piece], int]:
        """Pieces of these tokens, and how many count: up to the one that completes a stop string or a second call."""
        if self._is_plain:
            text = self._detokenizer.feed(token_ids)
            return ([Content(text)] if text else []), len(token_ids)
        pieces: list[Piece] = []
        for number, token_id in enumerate(token_ids, 1):
            pieces += self._read(self._stops.feed(self._detokenizer.feed((token_id,))))
            self.num_reasoning_tokens += self._reader is not None and self._reader.thinking
            if self._is_over:
                return pieces, number
        return pieces, len(token_ids)

    def _read(self, text: str) -> list[Piece]:
        if self._reader is None:
            return [Content(text)] if text else []
        return self._counted(self._reader.feed(text))

    def _counted(self, pieces: list[Piece]) -> list[Piece]:
        """Count calls; of a second one that is not wanted, nothing is passed on."""
        self._num_calls += sum(isinstance(piece, CallStart) for piece in pieces)
        if not self._one_call:
            return pieces
        return [p for p in pieces if not (isinstance(p, CallStart | CallArguments) and p.index > 0)]

    def _rest(self) -> list[Piece]:
        text = self._stops.feed(self._detokenizer.flush())
        if self._stops.matched is None:
            text += self._stops.flush()
        return self._read(text) + self._close()

    def _close(self) -> list[Piece]:
        return [] if self._reader is None else self._counted(self._reader.close())

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        if self._num_calls and reason == "stop":
            reason = "tool_calls"
        self.finished = Finished(index=self.index, finish_reason=reason, stop_reason=stop_reason)

    def _events(
        self, pieces: Iterable[Piece], token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None
    ) -> list[Delta | Finished]:
        """Token ids and log-probs go with the first text of the answer, or with an empty one if they were asked for."""
        events: list[Delta | Finished] = []
        told = False
        for piece in joined(pieces):
            if isinstance(piece, Content):
                ids, probs = ((), None) if told else (token_ids, logprobs)
                events.append(TextDelta(index=self.index, text=piece.text, token_ids=ids, logprobs=probs))
                told = True
            elif isinstance(piece, Reasoning):
                events.append(ReasoningDelta(index=self.index, text=piece.text))
            elif isinstance(piece, CallStart):
                events.append(ToolCallDelta(index=self.index, call=piece.index, name=piece.name, call_id=piece.id))
            else:
                events.append(ToolCallDelta(index=self.index, call=piece.index, arguments=piece.text))
        if not told and token_ids and (logprobs or self._reader is not None):
            events.insert(0, TextDelta(index=self.index, text="", token_ids=token_ids, logprobs=logprobs))
        return events


def choices_of(
    request: CanonicalRequest, prompts: Sequence[Sequence[int]], text: TextModel, params: Params
) -> list[Choice]:
    """All choices, prompt-major. Only chats have thoughts and calls; a completion is text."""
    offered = Offered({tool.name: tool.parameters for tool in request.tools}) if request.tools else None
    return [
        Choice(
            number * params.n + choice,
            text,
            params,
            text.output_reader(offered, prompt) if request.surface == "chat" else None,
            with_tools=offered is not None,
            one_call=not request.parallel_tool_calls,
        )
        for number, prompt in enumerate(prompts)
        for choice in range(params.n)
    ]


def name_logprobs(text: TextModel, entries: Sequence[TokenLogprobs]) -> tuple[TokenLogprob, ...]:
    """Token ids to strings and bytes, as OpenAI's log-prob objects want them."""
    return tuple(
        TokenLogprob(
            chosen=name_token(text, entry.token_id, entry.logprob),
            top=tuple(name_token(text, token_id, logprob) for token_id, logprob in entry.top),
        )
        for entry in entries
    )


def name_token(text: TextModel, token_id: int, logprob: float) -> TopLogprob:
    """One token. `token` shows U+FFFD where its bytes are part of a character; `bytes_` are exact."""
    data = text.token_bytes(token_id)
    return TopLogprob(token_id=token_id, token=data.decode("utf-8", "replace"), bytes_=data, logprob=logprob)
