"""What the routers speak: the canonical request, its aspects, the plan, what was decided and what came of it.

Every API surface (`gateway/handlers`) turns its wire form into a `CanonicalRequest` and turns `Event`s back. Nothing
here knows HTTP, JSON of any vendor, stores or torch.

Read next: `routers/decompose.py` -> `routers/plan.py` -> `routers/execute.py` -> `routers/assemble.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the routers' values: immutable, compared by content."""


class Message(Value, frozen=True, kw_only=True):
    """One chat turn. `extra` holds the fields a template may read (tool_calls, tool_call_id, ...), already checked."""

    role: str
    content: str
    name: str | None = None
    extra: dict[str, Any] = {}


class Params(Value, frozen=True, kw_only=True):
    """Generation parameters, checked for range, before anything is known of the model.

    `max_tokens` None: what fits in the context. `seed` None: drawn by the pipeline, reported back. `stop`: strings,
    matched on text; `include_stop`: keep the matched string.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    deterministic: bool = False


class Tool(Value, frozen=True, kw_only=True):
    """A function that the model may call. `parameters` is a JSON schema of an object; `strict`: it must be kept."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class CanonicalRequest(Value, frozen=True, kw_only=True):
    """What a client asked for, whatever the surface.

    Exactly one of `messages`, `prompts` and `prompts_ids` is non-empty. A completion with several prompts gives
    `len(prompts) * n` choices, prompt-major. `model` is as the client named it; aliases are the policy's.
    `tenant` and `cache_salt` are set by the pipeline, never by a client.
    """

    request_id: str
    surface: Literal["chat", "completion"]
    model: str
    messages: tuple[Message, ...] = ()
    prompts: tuple[str, ...] = ()
    prompts_ids: tuple[tuple[int, ...], ...] = ()
    params: Params = Params()
    stream: bool = False
    template_kwargs: dict[str, Any] = {}
    tools: tuple[Tool, ...] = ()
    parallel_tool_calls: bool = True
    tenant: str = ""
    cache_salt: bytes = b""
    priority: int = 0
    labels: dict[str, str] = {}
    trace_parent: str = ""


class Aspect(Value, frozen=True, kw_only=True):
    """A part of a request with its own needs. `why`: which detector found it and on what ground."""

    name: str
    why: str


class Candidate(Value, frozen=True, kw_only=True):
    """One model to ask, with what differs from the request's own parameters."""

    model: str
    overrides: dict[str, Any] = {}


class Step(Value, frozen=True, kw_only=True):
    """One node of a plan."""

    id: str
    aspect: Aspect
    candidates: tuple[Candidate, ...]
    reducer: str = "first"
    deadline_ms: int | None = None
    after: tuple[str, ...] = ()


class Plan(Value, frozen=True, kw_only=True):
    """The DAG that serves one request. `digest` names plan and policy revision; `rule` says which rule made it."""

    steps: tuple[Step, ...]
    rule: str
    policy_revision: str
    digest: str


class CostTerm(Value, frozen=True, kw_only=True):
    """One summand (or factor) of a replica's cost, in ms unless the name says otherwise."""

    name: str
    value: float


class ReplicaCost(Value, frozen=True, kw_only=True):
    """A replica's score at the moment of a choice."""

    replica: str
    total_ms: float
    terms: tuple[CostTerm, ...] = ()


class Decision(Value, frozen=True, kw_only=True):
    """Which replica was chosen for a candidate, and every cost term of every replica that could have been."""

    step: str
    model: str
    replica: str
    policy: str
    costs: tuple[ReplicaCost, ...] = ()


class TopLogprob(Value, frozen=True, kw_only=True):
    """A token as text, its UTF-8 bytes (which may be part of a character) and its log-prob."""

    token_id: int
    token: str
    bytes_: bytes
    logprob: float


class TokenLogprob(Value, frozen=True, kw_only=True):
    """An emitted token and its most likely alternatives."""

    chosen: TopLogprob
    top: tuple[TopLogprob, ...] = ()


class Started(Value, frozen=True, kw_only=True):
    """First event of a stream: what serves it. Comes with the first token, so that errors before it have a status."""

    plan: Plan
    decisions: tuple[Decision, ...]
    params: Params


class TextDelta(Value, frozen=True, kw_only=True):
    """New text of a choice. `text` may be empty when log-probs or ids come without a whole character."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ReasoningDelta(Value, frozen=True, kw_only=True):
    """New text of a choice's thoughts."""

    index: int
    text: str


class ToolCallDelta(Value, frozen=True, kw_only=True):
    """Tool call number `call` of a choice: its name once, then fragments of its arguments, which join to one JSON
    object. `call_id` only if the model gave one."""

    index: int
    call: int
    name: str | None = None
    call_id: str | None = None
    arguments: str = ""


class Finished(Value, frozen=True, kw_only=True):
    """Exactly once per choice, after its last delta. `stop_reason`: the stop string or token id that matched."""

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class AspectUsage(Value, frozen=True, kw_only=True):
    """What one candidate of one step cost."""

    aspect: str
    step: str
    model: str
    replica: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class RequestUsage(Value, frozen=True, kw_only=True):
    """Last event. A prompt shared by n choices counts once, as OpenAI counts it."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    aspects: tuple[AspectUsage, ...] = ()


Delta = TextDelta | ReasoningDelta | ToolCallDelta
Event = Started | Delta | Finished | RequestUsage


class RouteError(Exception):
    """Root of what the routers raise on purpose.

    RouteError
    ├── BadRequestError         names `param`, and says value and limit in its message (400, or 404 for a model)
    ├── UnavailableError        no replica can serve it now (503, `retry_after_s`)
    └── DeadlineExceededError   the policy's deadline passed (504)
    """


class BadRequestError(RouteError):
    """The request cannot be served as asked."""

    def __init__(self, message: str, *, param: str | None, code: str, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class UnavailableError(RouteError):
    """Nothing that could serve it is alive, or it died on the way and nothing can take over."""

    def __init__(self, message: str, *, code: str = "engine_unavailable", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class DeadlineExceededError(RouteError):
    """The step took longer than the policy allows."""

    code = "deadline_exceeded"
