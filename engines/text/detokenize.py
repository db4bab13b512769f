"""Token ids back to text, piece by piece: a character is emitted when all its bytes are there, and never taken back.

Works on bytes, so the concatenation of the pieces is the same however the ids are cut. Bytes that are no UTF-8 become
U+FFFD, as in the whole. Knows nothing of stop strings.

Read next: `engines/text/stop.py`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from engines.text.tokenizer import Tokenizer


class Detokenizer:
    """One stream of ids."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, keep: frozenset[int] = frozenset()
    ) -> None:
        self._token_bytes = tokenizer.shown_bytes(skip_special_tokens=skip_special_tokens, keep=keep)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Text completed by these ids; empty while a character is unfinished."""
        token_bytes = self._token_bytes
        data = b"".join([token_bytes[token_id] for token_id in token_ids])
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)
