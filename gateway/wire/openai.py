"""OpenAI's wire form: Structs only, no logic. Requests tolerate unknown fields; constraints and other things that would
change the answer have fields of their own, so that what is not served can be refused by name (`gateway/handlers`).

Read next: `gateway/handlers/chat.py`, docs/http.md.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

Number = int | float


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Only with `stream: true`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that chat and completions share: OpenAI's, then vLLM's extras, then those not served."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    deterministic: bool | None = None
    priority: int | None = None
    # Not served by this version: any value but null is refused by name.
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    prompt_logprobs: Any = None
    logprob_token_ids: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    lora_path: Any = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """`text` parts are served; the type of any other is named in the refusal."""

    type: str
    text: str | None = None


class CallFunctionWire(msgspec.Struct, frozen=True, kw_only=True):
    """Name and arguments; arguments are a string that holds a JSON object."""

    name: str
    arguments: str | dict[str, Any] | None = ""


class ToolCallWire(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an assistant's turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CallFunctionWire


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """Functions are served; any other type is named in the refusal."""

    type: str
    function: FunctionDefinition | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallWire] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class ChatRequest(Generation, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Any = None
    documents: Any = None


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of which, from cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of which, thoughts."""

    reasoning_tokens: int


class AspectUsageWire(msgspec.Struct, frozen=True, kw_only=True):
    """What one candidate of one step took."""

    aspect: str
    model: str
    replica: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsageWire(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    aspects: list[AspectUsageWire]


class TopLogprobWire(msgspec.Struct, frozen=True, kw_only=True):
    """An alternative."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobWire(msgspec.Struct, frozen=True, kw_only=True):
    """An emitted token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobWire]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One entry a token of content."""

    content: list[TokenLogprobWire]
    refusal: None = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. `content` is null if there are only calls. Thoughts go by both names that clients read."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallWire] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


FinishReasonWire = Literal["stop", "length", "tool_calls"]


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of n."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonWire
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Whole answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageWire
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"


class CallFunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """`name` once; fragments of `arguments` join to one JSON object."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A part of call number `index`; `id` and `type` in its first part only."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CallFunctionDelta


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New content of a choice; `role` in its first chunk only."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReasonWire | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One SSE frame of a chat. `usage` is null until the last frame when it was asked for, else left out."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: UsageWire | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The legacy parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of prompts x n, prompt-major; in a stream its part of a frame."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReasonWire | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Whole answer of /v1/completions, and each SSE frame of it (`usage` as in ChatChunk)."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: UsageWire | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class EmbeddingItem(msgspec.Struct, frozen=True, kw_only=True):
    """One vector: floats, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens embedded."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/embeddings, in input order."""

    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of /v1/models. `root` is the model behind an alias."""

    id: str
    created: int
    root: str
    max_model_len: int | None
    parent: None = None
    owned_by: str = "facet"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
