"""The real `openai` client against a live server: fake engines, real keys, real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import openai
import pytest

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def client(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path, embed_model_path: Path
) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("live")
    policy = folder / "policy.yaml"
    policy.write_text(files("policies").joinpath("default.yaml").read_text())
    facet = [sys.executable, "-m", "gateway.cli"]
    made = subprocess.run(
        [*facet, "keys", "create", "t", "--data-dir", str(folder)], capture_output=True, text=True, check=True
    )
    serve = [*facet, "serve", "--engine", "fake", "--port", "0", "--policy", str(policy), "--data-dir", str(folder)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("ready"))
        with openai.OpenAI(base_url=f"{url}/v1", api_key=made.stdout.strip(), max_retries=0) as made_client:
            yield made_client
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0


def ask(client: openai.OpenAI, **changes: object) -> openai.types.chat.ChatCompletion:
    request = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **changes}
    return client.chat.completions.create(**request)


def test_whole_and_streamed_answers_are_equal(client: openai.OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.delta.role for chunk in chunks for c in chunk.choices].count("assistant") == 1
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == 36


def test_embeddings_and_models(client: openai.OpenAI) -> None:
    data = client.embeddings.create(model="embed", input=["a", "b"], dimensions=3).data
    assert [len(item.embedding) for item in data] == [3, 3]
    assert [model.id for model in client.models.list()][:2] == ["small", "embed"]


def test_refusals_have_the_class_clients_expect(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError, match="not valid"):
        ask(client.with_options(api_key="sk-wrong"))
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192") as refused:
        ask(client, messages=[{"role": "user", "content": "word " * 9000}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="n is 99; allowed: 1 to 8"):
        ask(client, n=99)
    with pytest.raises(openai.BadRequestError, match="guided_json is not served"):
        ask(client, extra_body={"guided_json": {"type": "object"}})
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")
