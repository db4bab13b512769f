"""One choice on its way from token ids to text: detokenized, cut at stop strings, log-probs named, tokens counted.

Knows nothing of engines or plans. Read next: `routers/execute.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.api import Chunk, Timings, TokenLogprobs, Usage
from engines.text.model import TextModel
from engines.text.stop import StopMatcher
from routers.types import Finished, Params, TextDelta, TokenLogprob, TopLogprob


class Choice:
    """Feed it the chunks of its index in order; it gives what a client may see."""

    def __init__(self, index: int, text: TextModel, params: Params) -> None:
        self.index = index
        self.finished: Finished | None = None
        self.num_tokens = 0
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self._text = text
        self._has_stops = bool(params.stop)
        self._detokenizer = text.detokenizer(skip_special_tokens=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, include=params.include_stop)

    def feed(self, chunk: Chunk) -> tuple[TextDelta | None, Finished | None]:
        """The new text, if there is any to show, and the end, if this was the last chunk that counts."""
        self.usage, self.timings = chunk.usage or self.usage, chunk.timings or self.timings
        text, taken = self._take(chunk.token_ids)
        if self._stops.matched is not None:
            self.finished = Finished(index=self.index, finish_reason="stop", stop_reason=self._stops.matched)
        elif chunk.finish_reason is not None:
            text += self._rest()
            matched = self._stops.matched
            self.finished = Finished(
                index=self.index,
                finish_reason="stop" if matched is not None or chunk.finish_reason == "stop" else "length",
                stop_reason=matched if matched is not None else chunk.stop_token_id,
            )
        self.num_tokens += taken
        logprobs = name_logprobs(self._text, chunk.logprobs[:taken]) if chunk.logprobs is not None else None
        if not text and not logprobs:
            return None, self.finished
        delta = TextDelta(index=self.index, text=text, token_ids=tuple(chunk.token_ids[:taken]), logprobs=logprobs)
        return delta, self.finished

    def _take(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Text of these tokens, and how many count: with stop strings, those up to the one that completes one."""
        if not self._has_stops:
            return self._detokenizer.feed(token_ids), len(token_ids)
        text = ""
        for number, token_id in enumerate(token_ids, 1):
            text += self._stops.feed(self._detokenizer.feed((token_id,)))
            if self._stops.matched is not None:
                return text, number
        return text, len(token_ids)

    def _rest(self) -> str:
        text = self._stops.feed(self._detokenizer.flush())
        return text + ("" if self._stops.matched is not None else self._stops.flush())


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
