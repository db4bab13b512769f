"""One choice of one client request, as the scheduler sees it: its tokens and three counts.

    tokens              0 ........................ num_tokens     prompt, then output
    already in KV       0 ....... num_computed_tokens
    to compute          num_computed_tokens .. num_tokens

There is no prefill and no decode: each step moves `num_computed_tokens` towards `num_tokens`, and a request whose
tokens are all computed draws the next one. Knows nothing of tensors, sockets or text.

Read next: `engines/core/scheduler.py`, `engines/kv/manager.py`.
"""

from __future__ import annotations

from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from engines.api import GenerateRequest, Timings, Usage
from engines.kv.radix import RadixNode
from engines.text.block_hash import child_hash


class Status(Enum):
    """HELD (until its prompt's first choice has computed it) -> WAITING (in the queue, no KV) -> RUNNING (holds KV) ->
    FINISHED. Preemption goes back to WAITING."""

    HELD = auto()
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """Mutable; owned by the engine thread. `choice` is its index among the `n` of `source`.

    `token_ids` is a growing buffer; the valid part is `token_ids[:num_tokens]`. `block_ids` are its KV blocks in order,
    `num_published_blocks` of them are in the prefix index, the last at `tail_node`. `followers` are the other choices, which wait until this one has computed it and then find it in the index.
    """

    def __init__(self, source: GenerateRequest, choice: int, *, arrival_s: float, root: bytes, block_size: int) -> None:
        self.source = source
        self.choice = choice
        self.arrival_s = arrival_s
        self.root = root
        self.block_size = block_size
        self.status = Status.HELD
        self.num_tokens = len(source.prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens - source.num_emitted_tokens
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.block_ids: list[int] = []
        self.num_published_blocks = 0
        self.tail_node: RadixNode | None = None
        self.followers: list[Request] = []
        self._hashes: list[bytes] = []
        self._tokens = np.empty(self.num_tokens + 64, dtype=np.int64)
        self._tokens[: self.num_tokens] = source.prompt_token_ids
        self.output_ids = source.prompt_token_ids[self.num_prompt_tokens :]
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.num_preemptions = 0
        self.num_steps = 0

    @property
    def key(self) -> tuple[str, int]:
        """Unique while it lives."""
        return (self.source.request_id, self.choice)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """A view of prompt and output so far."""
        return self._tokens[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        """Tokens emitted, by this replica or one before it."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        """How far the KV is behind."""
        return self.num_tokens - self.num_computed_tokens

    def append(self, token_id: int) -> None:
        """One more output token."""
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self.num_tokens] = token_id
        self.output_ids.append(token_id)
        self.num_tokens += 1

    def block_tokens(self, index: int) -> tuple[int, ...]:
        """Tokens of full block `index`."""
        start = index * self.block_size
        return tuple(self._tokens[start : start + self.block_size].tolist())

    def block_hash(self, index: int) -> bytes:
        """Chained hash of full block `index`; each is computed once."""
        while len(self._hashes) <= index:
            number = len(self._hashes)
            parent = self._hashes[-1] if self._hashes else self.root
            tokens = self._tokens[number * self.block_size : (number + 1) * self.block_size]
            self._hashes.append(child_hash(parent, tokens.astype("<u4").tobytes()))
        return self._hashes[index]

    def usage(self) -> Usage:
        """Token counts for the last chunk. Recomputed work after a preemption is not counted again."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=min(self.num_cached_tokens, self.num_prompt_tokens),
            completion_tokens=self.num_output_tokens,
        )

    def timings(self, now_s: float) -> Timings:
        """Queue, prefill (to the first token) and decode time for the last chunk."""
        scheduled_s = self.first_scheduled_s if self.first_scheduled_s is not None else now_s
        token_s = self.first_token_s if self.first_token_s is not None else now_s
        return Timings(
            queue_s=scheduled_s - self.arrival_s,
            prefill_s=token_s - scheduled_s,
            decode_s=now_s - token_s,
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
        )
