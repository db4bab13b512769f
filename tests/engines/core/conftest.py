"""A toy decoder whose output depends on every byte of bookkeeping, an oracle for it, and ways to drive an engine.

The toy writes (token, position) into the KV cache at `slot_mapping`, reads a sequence back through its block table, and
makes logits from a hash of all it read. A wrong slot, table, position, count, or a block freed too early changes the
hash, hence the output; the oracle computes the same hash from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import pytest
import torch

from engines.api import Chunk, GenerateRequest, SamplingParams, Timings, TokenLogprobs, Usage
from engines.config import CacheConfig, SchedulerConfig
from engines.core.build import build_decoder
from engines.core.engine import EngineCore
from engines.layers.forward_batch import ForwardBatch
from engines.models.base import ModelSpec
from engines.ops.kv_cache import KVCache

VOCAB_SIZE = 50
STEP_S = 0.010


class Clock:
    """Stands still but for `advance`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def logits_of(read: np.ndarray) -> np.ndarray:
    """[n, 2] (token, position) as float32 -> [V] logits, from a hash of all bytes."""
    seed = int.from_bytes(blake2b(np.ascontiguousarray(read, dtype="<f4").tobytes(), digest_size=8).digest(), "little")
    return 3.0 * np.random.Generator(np.random.PCG64(seed)).standard_normal(VOCAB_SIZE, dtype=np.float32)


class ToyModel:
    """A `DecoderModel`. `batches` keeps the shape of each forward: (tokens, sequences, logits rows)."""

    def __init__(self, clock: Clock, max_model_len: int = 128) -> None:
        self.spec = ModelSpec(
            name="toy",
            architecture="toy",
            task="generate",
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            hidden_size=2,
            intermediate_size=2,
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            rms_norm_eps=1e-5,
            dtype="float32",
            digest="toy",
        )
        self.batches: list[tuple[int, int, int]] = []
        self.fault: Callable[[ForwardBatch], None] = lambda batch: None
        self._clock = clock

    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        self._clock.advance(STEP_S)
        self.batches.append((len(batch.token_ids), len(batch.context_lens), len(batch.logits_rows)))
        size = kv.block_size
        slots = batch.slot_mapping.numpy()
        assert len(set(slots.tolist())) == len(slots), "two tokens share a slot"
        written = np.stack([batch.token_ids.numpy(), batch.positions.numpy()], axis=1).astype(np.float32)
        kv.k.numpy()[0, slots // size, 0, slots % size] = written
        self.fault(batch)
        starts, rows = batch.query_start.numpy(), []
        for row in batch.logits_rows.tolist():
            sequence = int(np.searchsorted(starts, row, side="right")) - 1
            assert batch.context_lens[sequence] == batch.positions[starts[sequence + 1] - 1] + 1
            rows.append(logits_of(self._read(batch, kv, sequence, int(batch.positions[row]) + 1)))
        return torch.from_numpy(np.array(rows, dtype=np.float32).reshape(len(rows), VOCAB_SIZE))

    def _read(self, batch: ForwardBatch, kv: KVCache, sequence: int, length: int) -> np.ndarray:
        table = batch.block_tables[sequence, : -(-length // kv.block_size)].long()
        return kv.k.numpy()[0, table, 0].reshape(-1, 2)[:length]


def greedy(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The oracle: what a right engine must answer at temperature 0."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        read = np.stack([np.array(tokens), np.arange(len(tokens))], axis=1)
        tokens.append(int(np.argmax(logits_of(read))))
    return tokens[len(prompt) :]


@dataclass
class Answer:
    """All chunks of one choice, joined."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    usage: Usage | None = None
    timings: Timings | None = None


class Driver:
    """An engine over the toy, checked after every step; freed blocks are poisoned with NaN."""

    def __init__(self, cache: CacheConfig, scheduler: SchedulerConfig, max_model_len: int) -> None:
        self.clock = Clock()
        self.model = ToyModel(self.clock, max_model_len)
        self.core: EngineCore = build_decoder(self.model, cache, scheduler, clock=self.clock, on_free_block=self.poison)
        self.kv_cache: KVCache = self.core._runner._kv
        self.kv_cache.k.fill_(float("nan"))
        self.answers: dict[tuple[str, int], Answer] = {}
        self.steps: list[list[tuple[str, int]]] = []

    def poison(self, block_id: int) -> None:
        self.kv_cache.k[:, block_id] = float("nan")

    def step(self) -> list[Chunk]:
        chunks = self.core.step()
        self.core.check_invariants()
        self.steps.append([(chunk.request_id, chunk.index) for chunk in chunks])
        for chunk in chunks:
            answer = self.answers.setdefault((chunk.request_id, chunk.index), Answer())
            assert answer.finish_reason is None, "a chunk after the last"
            answer.token_ids += chunk.token_ids
            answer.logprobs += chunk.logprobs or []
            answer.finish_reason, answer.stop_token_id = chunk.finish_reason, chunk.stop_token_id
            answer.usage, answer.timings = chunk.usage, chunk.timings
        return chunks

    def run(self, requests: Iterable[GenerateRequest] = (), max_steps: int = 5000) -> dict[tuple[str, int], Answer]:
        """Add, then step until nothing is left; the answers so far."""
        for request in requests:
            self.core.add_request(request)
        for _ in range(max_steps):
            if not self.core.has_work():
                pool = self.core.kv.pool
                if self.core.offload is not None:
                    self.core.offload.settle(5.0)
                assert pool.num_used == 0
                assert pool.num_free + pool.num_cached == pool.num_blocks
                return self.answers
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def running(self) -> list[tuple[str, int]]:
        return [(request.source.request_id, request.choice) for request in self.core.scheduler.running]

    def waiting(self) -> list[tuple[str, int]]:
        return [(request.source.request_id, request.choice) for request in self.core.scheduler.waiting]

    def blocks(self, request_id: str, choice: int = 0) -> list[int]:
        return next(
            request.block_ids
            for request in self.core.scheduler.running
            if (request.source.request_id, request.choice) == (request_id, choice)
        )


class Toy:
    """What the tests are handed."""

    VOCAB_SIZE = VOCAB_SIZE
    STEP_S = STEP_S
    greedy = staticmethod(greedy)

    @staticmethod
    def engine(
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        prefix_cache: bool = True,
        max_model_len: int = 128,
        scheduler: SchedulerConfig | None = None,
        **tiers: object,
    ) -> Driver:
        cache = CacheConfig(block_size=block_size, num_blocks=num_blocks, prefix_cache=prefix_cache, **tiers)
        return Driver(cache, scheduler or SchedulerConfig(max_batch_tokens=64, chunk_tokens=64), max_model_len)

    @staticmethod
    def request(request_id: str, prompt: Sequence[int], **options: object) -> GenerateRequest:
        """Greedy by default; options go to SamplingParams or, if they are its fields, to the request."""
        own = {name: options.pop(name) for name in set(GenerateRequest.__struct_fields__) & set(options)}
        sampling = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **options})
        return GenerateRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=sampling, **own)


@pytest.fixture
def toy() -> Toy:
    return Toy()
