"""The whole product on tiny random models, in seconds: what a change breaks first.

Real checkpoints on disk, real worker processes, a real server, the real `openai` client; only the knowledge is missing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import openai

POLICY = """
version: facet/v1
models:
  tiny: {{source: {llama}, price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}, kv_memory_mib: 16, threads: 1}}
  embed: {{source: {bert}, task: embed, price: {{input_usd_per_mtok: 1}}, threads: 1}}
aliases: {{"*": tiny}}
"""


def test_serve_ask_measure_end(tmp_path: Path, tiny_llama_path: Path, tiny_bert_path: Path) -> None:
    facet = [sys.executable, "-m", "gateway.cli"]
    data = ["--data-dir", str(tmp_path)]
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.format(llama=tiny_llama_path, bert=tiny_bert_path))
    checked = subprocess.run([*facet, "policy", "check", str(policy)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    key = subprocess.run([*facet, "keys", "create", "me", *data], capture_output=True, text=True, check=True)
    serve = [*facet, "serve", "--policy", str(policy), "--port", "0", *data]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("ready"))
        try:
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key.stdout.strip(), max_retries=0) as client:
                converse(client)
        finally:
            os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0


def converse(client: openai.OpenAI) -> None:
    request = {
        "model": "gpt-whatever",
        "messages": [{"role": "user", "content": "Tell me of rivers, and of the towns they feed."}],
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": 11,
    }
    whole = client.chat.completions.create(**request)
    assert (whole.model, whole.usage.completion_tokens) == ("tiny", 24)
    stream = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    # The second asking finds the prompt's full blocks of 16 tokens cached.
    prompt_tokens = whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == (prompt_tokens - 1) // 16 * 16
    vectors = client.embeddings.create(model="embed", input=["one river", "another river"]).data
    assert [len(vector.embedding) for vector in vectors] == [64, 64]
    assert abs(sum(x * x for x in vectors[0].embedding) - 1) < 1e-5
