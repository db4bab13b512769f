"""The engine seam: everything the gateway and the routers may know of an engine.

An engine speaks token ids. It knows nothing of text, chat, tenants' money, HTTP or policies; `tenant` and `cache_salt`
are opaque to it. Four implementations pass one contract suite (`tests/contract/test_engine.py`): `fake`, `local` (a
thread), `remote` (a worker process) and, later, a remote OpenAI-compatible server.

Read next: `engines/core/engine.py` (what computes), `engines/remote.py` (what carries these structs over a socket).

Every struct here is a frozen msgspec Struct and is also the wire form between gateway and worker (msgpack).
Lifetimes: a struct never changes after it is made. Errors: see the tree at `EngineError`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol, runtime_checkable

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
Task = Literal["generate", "embed"]


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every struct that crosses the seam."""


class SamplingParams(Wire, frozen=True, kw_only=True):
    """How to draw tokens. The gateway has checked every range; an engine checks again and raises InvalidRequestError.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. The random stream is keyed by
    (`seed`, choice index, position of the drawn token), so a replica that takes over continues byte for byte.
    `logprobs`: None is off, k >= 0 returns the chosen token's log-prob and the k most likely alternatives.
    Log-probs are of the model's distribution before temperature and penalties (as OpenAI's are).
    `stop_token_ids` includes the end-of-sequence tokens: the caller leaves them out for `ignore_eos`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()


class GenerateRequest(Wire, frozen=True, kw_only=True):
    """One prompt, `n` continuations that share its KV.

    `cache_salt` keys the root of the prefix index: requests with different salts never share a block.
    `priority`: lower is sooner. `num_emitted_tokens`: how many tokens at the end of `prompt_token_ids` another replica
    has already emitted for this request (n must be 1); they count as output for penalties, seeds and `max_tokens`.
    `trace_parent` is a W3C traceparent or empty.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    tenant: str = ""
    cache_salt: bytes = b""
    priority: int = 0
    deterministic: bool = False
    num_emitted_tokens: int = 0
    trace_parent: str = ""


class TokenLogprobs(Wire, frozen=True, kw_only=True, array_like=True):
    """Log-prob of one emitted token, then (token id, log-prob) of alternatives, most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Usage(Wire, frozen=True, kw_only=True):
    """Tokens of one choice: prompt, how many of them came from cached blocks, and generated."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0


class Timings(Wire, frozen=True, kw_only=True):
    """Where a choice's time went, seconds on the engine's monotonic clock."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_preemptions: int = 0
    num_steps: int = 0


class Chunk(Wire, frozen=True, kw_only=True):
    """New tokens of one choice. Exactly one chunk per choice has a `finish_reason`, and it is that choice's last.

    A stop token is not in `token_ids`; it is named by `stop_token_id`. `usage` and `timings` come with the last chunk.
    `logprobs`, when asked for, has one entry a token id.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    usage: Usage | None = None
    timings: Timings | None = None


class EmbedRequest(Wire, frozen=True, kw_only=True):
    """Token ids of each input (special tokens included) -> one vector each."""

    request_id: str
    inputs: list[list[int]]
    normalize: bool = True
    trace_parent: str = ""


class EmbedResult(Wire, frozen=True, kw_only=True):
    """`vectors[i]`: `dimensions` little-endian float32 of input i."""

    request_id: str
    vectors: list[bytes]
    dimensions: int
    prompt_tokens: int


class ScoreRequest(Wire, frozen=True, kw_only=True):
    """Log-prob of each label token as the next token of each prompt (one prefill, nothing is generated)."""

    request_id: str
    prompts: list[list[int]]
    label_token_ids: tuple[int, ...]
    tenant: str = ""
    cache_salt: bytes = b""
    trace_parent: str = ""


class ScoreResult(Wire, frozen=True, kw_only=True):
    """`logprobs[i][j]` of label j after prompt i; natural log of the full distribution."""

    request_id: str
    logprobs: list[list[float]]
    usage: Usage


class Capabilities(Wire, frozen=True, kw_only=True):
    """What a running engine can do; constant while it lives.

    `digest` names weights and their number format: equal digests give equal tokens. `features` is an open set
    ("logprobs", "embed", "score", "prefix_cache", ...).
    """

    model: str
    task: Task
    digest: str
    dtype: str
    vocab_size: int
    max_model_len: int
    block_size: int = 0
    num_blocks: int = 0
    embedding_dimensions: int = 0
    num_threads: int = 1
    features: tuple[str, ...] = ()


class ReplicaStats(Wire, frozen=True, kw_only=True):
    """A snapshot. Counters only grow; `*_s` are seconds; blocks obey free + cached + used = total.

    `step_age_s` is the time since the last finished step (0 while idle): alive means progress.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    steps_total: int = 0
    step_age_s: float = 0.0
    step_p50_s: float = 0.0
    step_p99_s: float = 0.0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    aborts_total: int = 0
    requests_total: int = 0
    rss_bytes: int = 0


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored", omit_defaults=True):
    """Blocks now resident, in chain order (vLLM's KV event form). `token_ids` stays empty: they are a tenant's."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved", omit_defaults=True):
    """Blocks no longer resident."""

    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """The cache is empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Events of one step. `seq` grows by one a batch; a gap means that the reader must ask for a replay."""

    ts: float
    events: list[KVEvent]
    seq: int = 0


class EngineError(Exception):
    """Root of everything an engine raises.

    EngineError
    ├── InvalidRequestError       the caller's mistake; names field, value, limit
    ├── EngineOverloadedError     queue is full; try again after `retry_after_s`
    ├── EngineDeadError           the process or thread is gone; the request may be sent elsewhere
    └── EngineFaultError          this request met a fault inside the engine; others go on
    """

    code: str = "engine_error"


class InvalidRequestError(EngineError):
    """A field is out of range for this engine."""

    code = "invalid_request"

    def __init__(self, message: str, *, field: str = "", value: str = "", limit: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.limit = limit


class EngineOverloadedError(EngineError):
    """The engine's queue is full."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(EngineError):
    """The engine cannot answer: its process ended, its socket closed, or it was drained."""

    code = "engine_dead"


class EngineFaultError(EngineError):
    """A fault while serving one request."""

    code = "engine_fault"


@runtime_checkable
class Engine(Protocol):
    """One replica.

    `generate` is an async iterator; closing it (or cancelling its task) aborts the request and frees its KV within one
    step. All methods may be called concurrently from one event loop. After `close`, everything raises EngineDeadError.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Constant once the engine is ready; raises EngineDeadError before."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Yield chunks of all `n` choices, interleaved, in the order computed. Raises EngineError before or between."""
        ...

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Vectors of all inputs, in order. Raises InvalidRequestError if an input is empty or too long."""
        ...

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Next-token log-probs of the labels. Cached prefixes are used and published as for `generate`."""
        ...

    async def stats(self) -> ReplicaStats:
        """A fresh snapshot; cheap enough to be asked each second."""
        ...

    def kv_events(self, start_seq: int = 0) -> AsyncIterator[KVEventBatch]:
        """Replay what the buffer holds from `start_seq`, then follow. Never ends while the engine lives."""
        ...

    async def drain(self) -> None:
        """Refuse new requests (EngineOverloadedError) and return when running ones have finished."""
        ...

    async def close(self) -> None:
        """Abort what runs and free everything. Idempotent."""
        ...
