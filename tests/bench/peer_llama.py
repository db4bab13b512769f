"""llama.cpp as a peer: `python peer_llama.py GGUF THREADS`, in an environment with llama-cpp-python.

Its C interface directly, so that no Python sampler or chat layer is in the figures: one batch a step for all
sequences, greedy by numpy's argmax. Read next: `tests/bench/peer_protocol.py`.
"""

from __future__ import annotations

import ctypes
import sys
import time

import llama_cpp
import numpy as np
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

MAX_BATCH_TOKENS = 512


class Llama:
    """One model and one context of BATCH_REQUESTS sequences."""

    def __init__(self, path: str, num_threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = BATCH_REQUESTS * (BATCH_PROMPT_TOKENS + BATCH_OUTPUT_TOKENS) * 2
        params.n_batch = params.n_ubatch = MAX_BATCH_TOKENS
        params.n_seq_max = BATCH_REQUESTS
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def clear(self) -> None:
        """Forget every sequence."""
        llama_cpp.llama_memory_clear(self._memory, True)

    def step(self, rows: list[tuple[int, int, int]], wanted: list[int]) -> list[int]:
        """rows: (token, position, sequence); the likeliest next token of each row in `wanted`."""
        batch, asked = self._batch, set(wanted)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i in asked
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise SystemExit(f"llama_decode: {status}")
        return [self._argmax(i) for i in wanted]

    def _argmax(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, shape=(self.vocab_size,)).argmax())

    def prefill(self, prompt: list[int], sequence: int) -> int:
        """The first token after a prompt."""
        token = 0
        for start in range(0, len(prompt), MAX_BATCH_TOKENS):
            part = prompt[start : start + MAX_BATCH_TOKENS]
            rows = [(token_id, start + i, sequence) for i, token_id in enumerate(part)]
            last = start + len(part) == len(prompt)
            drawn = self.step(rows, [len(part) - 1] if last else [])
            token = drawn[0] if drawn else 0
        return token


def prefill_tok_s(llama: Llama, prompts: Prompts) -> float:
    prompt = prompts.one(PREFILL_TOKENS)
    llama.clear()
    began_s = time.perf_counter()
    llama.prefill(prompt, 0)
    return PREFILL_TOKENS / (time.perf_counter() - began_s)


def decode_tok_s(llama: Llama, prompts: Prompts) -> float:
    llama.clear()
    token = llama.prefill(prompts.one(DECODE_PROMPT_TOKENS), 0)
    began_s = time.perf_counter()
    for i in range(DECODE_TOKENS):
        (token,) = llama.step([(token, DECODE_PROMPT_TOKENS + i, 0)], [0])
    return DECODE_TOKENS / (time.perf_counter() - began_s)


def batch_gen_tok_s(llama: Llama, prompts: Prompts) -> float:
    asked = [prompts.one(BATCH_PROMPT_TOKENS) for _ in range(BATCH_REQUESTS)]
    llama.clear()
    began_s = time.perf_counter()
    tokens = [llama.prefill(prompt, sequence) for sequence, prompt in enumerate(asked)]
    everyone = list(range(BATCH_REQUESTS))
    for i in range(BATCH_OUTPUT_TOKENS - 1):
        rows = [(token, BATCH_PROMPT_TOKENS + i, sequence) for sequence, token in enumerate(tokens)]
        tokens = llama.step(rows, everyone)
    return BATCH_REQUESTS * BATCH_OUTPUT_TOKENS / (time.perf_counter() - began_s)


def main() -> None:
    began_s = time.perf_counter()
    path, num_threads = sys.argv[1], int(sys.argv[2])
    answers = own_stdout()
    llama = Llama(path, num_threads)
    prompts = Prompts(llama.vocab_size)
    figures = {
        "prefill_tok_s": lambda: prefill_tok_s(llama, prompts),
        "decode_tok_s": lambda: decode_tok_s(llama, prompts),
        "batch_gen_tok_s": lambda: batch_gen_tok_s(llama, prompts),
    }
    start_s = time.perf_counter() - began_s
    serve(answers, figures, version=llama_cpp.__version__, detail="the same GGUF file", start_s=start_s)


if __name__ == "__main__":
    main()
