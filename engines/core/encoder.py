"""The engine of an embedding model: no KV, no queue; one call computes one request.

Knows nothing of threads: `engines/local.py` runs it off the event loop, one request at a time.

Read next: `engines/models/encoder.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engines.api import Capabilities, EmbedRequest, EmbedResult, ReplicaStats
from engines.core.checks import check_token_ids, refusal
from engines.core.metrics import STEP_TIMES_KEPT, percentile, resident_bytes
from engines.models.base import EncoderModel


class EncoderCore:
    """Embeds token ids. Inputs of one request are computed in the model's own batches; order is kept."""

    def __init__(self, model: EncoderModel, capabilities: Capabilities, *, clock: Callable[[], float]) -> None:
        self.capabilities = capabilities
        self._model = model
        self._clock = clock
        self._step_times_s: deque[float] = deque(maxlen=STEP_TIMES_KEPT)
        self._requests = 0
        self._tokens = 0

    def embed(self, request: EmbedRequest) -> EmbedResult:
        """Raises InvalidRequestError naming the input that is empty, too long or out of vocabulary."""
        limit = self.capabilities.max_model_len
        if not request.inputs:
            raise refusal("inputs", "empty", "at least one input")
        for number, ids in enumerate(request.inputs):
            if not 1 <= len(ids) <= limit:
                raise refusal(f"inputs[{number}]", f"{len(ids)} tokens", f"1..{limit} tokens")
            check_token_ids(f"inputs[{number}]", ids, self.capabilities.vocab_size)
        started_s = self._clock()
        vectors = self._model.encode(request.inputs, request.normalize)  # [n, D]
        self._step_times_s.append(self._clock() - started_s)
        num_tokens = sum(map(len, request.inputs))
        self._requests += 1
        self._tokens += num_tokens
        return EmbedResult(
            request_id=request.request_id,
            vectors=[row.tobytes() for row in vectors.numpy().astype("<f4", copy=False)],
            dimensions=int(vectors.shape[1]),
            prompt_tokens=num_tokens,
        )

    def stats(self) -> ReplicaStats:
        """Counters; blocks are all zero, for there is no KV."""
        return ReplicaStats(
            steps_total=self._requests,
            step_p50_s=percentile(self._step_times_s, 50),
            step_p99_s=percentile(self._step_times_s, 99),
            prompt_tokens_total=self._tokens,
            requests_total=self._requests,
            rss_bytes=resident_bytes(),
        )
