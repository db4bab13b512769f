"""KV slots that hold nothing, over the lengths of a trace: `python tests/bench/paging_waste.py TRACE.jsonl`.

Each line of the trace has `input_length` and `output_length`, as the Mooncake traces do. Every request goes through the
KV manager as the engine would take it: its prompt in chunks, then a token at a time (its last token is never computed).
The waste is 1 - tokens / (blocks x block size), tokens and blocks summed over requests: when the prompt is computed, at
the end, and over all steps between (each step of each request counts once).

Read next: `engines/kv/manager.py`, `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engines.config import CacheConfig, SchedulerConfig
from engines.kv.manager import KVManager
from engines.kv.radix import RadixNode


@dataclass(eq=False)
class Holder:
    """A request as the KV manager sees it; nothing of it is published, as nobody shares."""

    num_tokens: int
    root: bytes = b""
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_published_blocks: int = 0
    tail_node: RadixNode | None = None

    def full_block(self, number: int) -> tuple[bytes, bytes]:
        raise AssertionError(f"block {number} is not to be looked up")


@dataclass
class Count:
    """Tokens stored and slots that their blocks have."""

    tokens: int = 0
    slots: int = 0

    def add(self, tokens: int, blocks: int, block_size: int) -> None:
        self.tokens += tokens
        self.slots += blocks * block_size

    @property
    def waste(self) -> float:
        """Share of the slots that hold nothing."""
        return 1 - self.tokens / self.slots


def replay(lengths: Iterable[tuple[int, int]], block_size: int, chunk_tokens: int) -> dict[str, Count]:
    """(input, output) lengths -> counts after the prompt, at the end, and over all decode steps."""
    after_prompt, at_end, steps = Count(), Count(), Count()
    for prompt, output in lengths:
        stored = prompt + max(output, 1) - 1
        kv = KVManager(CacheConfig(block_size=block_size), stored // block_size + 1)
        holder = Holder(num_tokens=prompt)
        while holder.num_computed_tokens < prompt:
            count = min(chunk_tokens, prompt - holder.num_computed_tokens)
            assert kv.allocate(holder, count)
            holder.num_computed_tokens += count
        after_prompt.add(prompt, len(holder.block_ids), block_size)
        steps.add(prompt, len(holder.block_ids), block_size)
        while holder.num_computed_tokens < stored:
            assert kv.allocate(holder, 1)
            holder.num_computed_tokens += 1
            steps.add(holder.num_computed_tokens, len(holder.block_ids), block_size)
        at_end.add(stored, len(holder.block_ids), block_size)
    return {"after_prompt": after_prompt, "at_end": at_end, "steps": steps}


def read_lengths(path: Path) -> list[tuple[int, int]]:
    rows = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return [(int(row["input_length"]), int(row["output_length"])) for row in rows if row["input_length"] > 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--block-size", type=int, default=CacheConfig().block_size)
    given = parser.parse_args()
    lengths = read_lengths(given.trace)
    counts = replay(lengths, given.block_size, SchedulerConfig().chunk_tokens)
    waste = {f"waste_{name}": round(count.waste, 6) for name, count in counts.items()}
    print(json.dumps({"trace": given.trace.name, "requests": len(lengths), "block_size": given.block_size, **waste}))


if __name__ == "__main__":
    main()
