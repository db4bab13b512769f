"""One choice of one client request, as the scheduler sees it: its tokens and three counts.

    tokens              0 ........................ num_tokens     prompt, then output
    already in KV       0 ....... num_computed_tokens
    to compute          num_computed_tokens .. num_tokens

There is no prefill and no decode: each step moves `num_computed_tokens` towards `num_tokens`, and a request whose
tokens are all computed draws the next one. Knows nothing of tensors, sockets or text.

Read next: `engines/core/engine.py`, `engines/core/scheduler.py`, `engines/kv/manager.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from engines.api import GenerateRequest, Timings, Usage
from engines.kv.radix import RadixNode
from engines.text.block_hash import child_hash


class Status(Enum):
    """HELD -> WAITING <-> RUNNING -> FINISHED; WAITING -> LOADING -> WAITING."""

    HELD = auto()  # until the first choice of its prompt has computed the prompt
    WAITING = auto()  # in the queue, without KV; preemption comes back to here
    LOADING = auto()  # its prefix comes from a tier; it holds nothing itself
    RUNNING = auto()  # holds KV
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the engine noted when a client request came: a growing number, the time, and its trust group's name."""

    number: int
    time_s: float
    root: bytes


class Request:
    """Mutable; owned by the engine thread. `choice` is its index among the `n` of `source`.

    `order` says who is more urgent: (priority, arrival, choice), smaller first, unique. `block_ids` are its KV blocks;
    `num_published_blocks` of them are in the prefix index, the last at `tail_node`. `followers` are the other choices,
    which wait until this one has computed the prompt and then find it in the index.
    """

    def __init__(self, source: GenerateRequest, choice: int, arrival: Arrival, *, block_size: int) -> None:
        self.source = source
        self.choice = choice
        self.order = (source.priority, arrival.number, choice)
        self.arrival_s = arrival.time_s
        self.root = arrival.root
        self.block_size = block_size
        self.status = Status.HELD
        self.followers: list[Request] = []

        self.num_tokens = len(source.prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens - source.num_emitted_tokens
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.prompt_ids = source.prompt_token_ids[: self.num_prompt_tokens]
        self.output_ids = source.prompt_token_ids[self.num_prompt_tokens :]
        self._tokens = np.empty(self.num_tokens + 64, dtype=np.int64)
        self._tokens[: self.num_tokens] = source.prompt_token_ids

        self.block_ids: list[int] = []
        self.num_published_blocks = 0
        self.tail_node: RadixNode | None = None
        self._blocks: list[tuple[bytes, bytes]] = []

        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.has_loaded = False  # the tiers were asked; what they gave is in the pool
        self.num_preemptions = 0
        self.num_steps = 0

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """[num_tokens] prompt and output so far; a view, valid until the next `append`."""
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

    def full_block(self, number: int) -> tuple[bytes, bytes]:
        """(chained hash, tokens as u32 LE) of full block `number`; each is made once."""
        while len(self._blocks) <= number:
            start = len(self._blocks) * self.block_size
            tokens = self._tokens[start : start + self.block_size].astype("<u4").tobytes()
            parent = self._blocks[-1][0] if self._blocks else self.root
            self._blocks.append((child_hash(parent, tokens), tokens))
        return self._blocks[number]

    def usage(self) -> Usage:
        """Token counts for the last chunk. Work repeated after a preemption is not counted again."""
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
