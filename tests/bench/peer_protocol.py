"""What a peer's process and `tests/bench/peers.py` say to each other: one JSON document a line.

A peer announces itself ({"version", "detail", "start_s"}), then answers each line {"figure": NAME} with {"value": N}.
Runs in environments that are not Facet's, so it needs nothing but Python. Whatever a library prints goes to stderr:
the answers have a descriptor of their own.

Read next: `tests/bench/peers.py`.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping

SEED = 20261201
PREFILL_TOKENS = 512
DECODE_PROMPT_TOKENS = 16
DECODE_TOKENS = 128
BATCH_REQUESTS = 16
BATCH_PROMPT_TOKENS = 256
BATCH_OUTPUT_TOKENS = 64
FIRST_ID = 100  # below it vocabularies keep special tokens

Figures = Mapping[str, Callable[[], float]]


class Prompts:
    """Random token ids from a fixed seed; no two prompts share a beginning."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(SEED)
        self._vocab_size = vocab_size

    def one(self, num_tokens: int) -> list[int]:
        """[num_tokens] ids."""
        return [self._random.randrange(FIRST_ID, self._vocab_size) for _ in range(num_tokens)]


def own_stdout() -> int:
    """A descriptor for answers; from here on, file descriptor 1 is stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def serve(answers: int, figures: Figures, *, version: str, detail: str, start_s: float) -> None:
    """Answer lines of stdin until it ends."""

    def say(document: Mapping[str, object]) -> None:
        os.write(answers, (json.dumps(document) + "\n").encode())

    say({"version": version, "detail": detail, "start_s": start_s})
    for line in sys.stdin:
        say({"value": figures[json.loads(line)["figure"]]()})
