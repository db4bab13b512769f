"""`facet serve` and `facet up` as processes: what they refuse, how they end, what the first start makes.

Most of it runs a tiny random model; the last test is the new user's first minute with the demo models.
"""

from __future__ import annotations

import http.client
import json
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway.cli.serve import is_loopback, socket_folder

ROOT = Path(__file__).resolve().parents[3]
LONG_TOKENS = 20_000


def open_stream(url: str, key: str, max_tokens: int) -> tuple[http.client.HTTPConnection, Iterator[bytes]]:
    """A stream whose first frames have come; the rest of its lines."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "logit_bias": {"256": -100, "257": -100, "258": -100},  # never an end
        "stream": True,
    }
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    assert response.readline().startswith(b"data:")
    return connection, iter(response)


@pytest.fixture
def long_policy(tmp_path: Path) -> Path:
    """A tiny decoder that can go on for a minute."""
    from engines.models.tiny import TinyLlama, write_tiny_llama

    folder = write_tiny_llama(tmp_path / "long", seed=3, sizes=TinyLlama(max_model_len=LONG_TOKENS + 200))
    path = tmp_path / "policy.yaml"
    path.write_text(
        f"version: facet/v1\nmodels:\n  small: {{source: {folder}, dtype: float32, price: {{input_usd_per_mtok: 1}}}}\n"
    )
    return path


def test_what_cannot_be_started_says_why_and_what_to_do(facet: Any, tiny_policy: Path, tmp_path: Path) -> None:
    public = facet("up", "--host", "0.0.0.0")
    assert public.returncode == 1
    assert "add --public if that is what you want" in public.stderr

    none = facet("serve", "--policy", "absent.yaml", "--port", "0")
    assert none.returncode == 1
    assert f"there is no {tmp_path / 'absent.yaml'}; give --policy FILE, or run `facet up` once" in none.stderr

    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("version: facet/v1\nmodels: {}\n")
    refused = facet("serve", "--policy", "wrong.yaml", "--port", "0")
    assert refused.returncode == 1
    assert f"{wrong}:2:" in refused.stderr

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = facet("up", "--policy", str(tiny_policy), "--port", str(port))
    assert busy.returncode == 1
    assert f"127.0.0.1:{port} cannot be opened: Address already in use" in busy.stderr
    assert "another port with --port" in busy.stderr
    assert not (tmp_path / ".local").exists(), "a start that is refused makes nothing"


def test_a_model_that_cannot_be_read_ends_the_start(facet: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    (tmp_path / "policy.yaml").write_text(
        "version: facet/v1\nmodels:\n  small: {source: bad.gguf, price: {input_usd_per_mtok: 1}}\n"
    )
    done = facet("serve", "--policy", "policy.yaml", "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "bad.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_finishes_what_runs(facet: Any, tiny_policy: Path) -> None:
    with facet.running("up", "--policy", str(tiny_policy), "--port", "0") as gateway:
        connection, rest = open_stream(gateway.url, gateway.keys["user"], 400)
        gateway.process.send_signal(signal.SIGINT)
        frames = [line for line in rest if line.startswith(b"data:")]
        connection.close()
        assert frames[-1] == b"data: [DONE]\n"
        assert len(frames) > 350
        out, err = gateway.process.communicate(timeout=30)
    assert gateway.process.returncode == 0
    assert out.splitlines() == ["ending    1 requests run; again stops at once", "ended"]
    assert err == ""


def test_a_second_ctrl_c_stops_at_once(facet: Any, long_policy: Path) -> None:
    with facet.running("up", "--policy", str(long_policy), "--port", "0") as gateway:
        connection, rest = open_stream(gateway.url, gateway.keys["user"], LONG_TOKENS)
        gateway.process.send_signal(signal.SIGINT)
        assert gateway.process.stdout.readline() == "ending    1 requests run; again stops at once\n"
        for _ in range(50):
            next(rest)
        assert gateway.process.poll() is None, "the first one waits for the stream"
        began_s = time.monotonic()
        gateway.process.send_signal(signal.SIGINT)
        frames = [line for line in rest if line.startswith(b"data:")]
        connection.close()
        out, _ = gateway.process.communicate(timeout=30)
        took_s = time.monotonic() - began_s
    assert b'"error"' in frames[-1], "the client is told"
    assert len(frames) < LONG_TOKENS / 2
    assert out == "ended\n"
    assert gateway.process.returncode == 0
    assert took_s < 10


def test_two_gateways_of_one_user_do_not_take_each_others_workers(facet: Any, tiny_policy: Path) -> None:
    arguments = ("up", "--policy", str(tiny_policy), "--port", "0")
    with facet.running(*arguments) as first, facet.running(*arguments) as second:
        key = first.keys["user"]
        assert second.keys == {}, "the keys of the data folder are there already"
        for gateway in (first, second):
            connection, rest = open_stream(gateway.url, key, 5)
            assert list(rest)[-2] == b"data: [DONE]\n"
            connection.close()
        assert first.end()[0] == 0
        connection, rest = open_stream(second.url, key, 5)
        assert list(rest)[-2] == b"data: [DONE]\n"
        connection.close()
        assert second.end()[0] == 0


def test_addresses_of_this_machine() -> None:
    assert [host for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost") if not is_loopback(host)] == []
    assert [host for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example") if is_loopback(host)] == []


def test_worker_sockets_lie_where_their_paths_are_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setattr("gateway.cli.serve.MAX_SOCKET_FOLDER_CHARS", len(str(run_dir)))
    with socket_folder(run_dir) as one, socket_folder(run_dir) as other:
        assert one.parent == other.parent == run_dir
        assert one != other
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
    assert list(run_dir.iterdir()) == []
    long = tmp_path / "runs"
    with socket_folder(long) as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "a-model-of-forty-characters-or-so-0.sock"))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not long.exists()
    assert not folder.exists()


@pytest.mark.model
def test_the_first_minute_of_a_new_user(facet: Any, facet_cache_dir: Path, demo_model_path: Path) -> None:
    """No configuration; only the model cache is this machine's, so that nothing is fetched twice."""
    cache = {"FACET_CACHE_DIR": str(facet_cache_dir)}
    data = facet.folder / ".local" / "share" / "facet"
    with facet.running("up", "--port", "0", **cache) as gateway:
        assert gateway.lines[:2] == [f"policy    {data / 'policy.yaml'} (a starter; edit it)", f"data      {data}"]
        assert (data / "policy.yaml").read_bytes() == (ROOT / "policies" / "default.yaml").read_bytes()
        keys = gateway.keys
        assert sorted(keys) == ["admin", "user"]
        for path in (path for path in data.rglob("*") if path.is_file()):
            assert keys["user"].encode() not in path.read_bytes()
        assert fetched(gateway.url, "/health/live")[0] == 200
        assert fetched(gateway.url, "/health/ready") == (200, b'{"status":"ready","missing":[]}')
        models = json.loads(fetched(gateway.url, "/v1/models", keys["user"])[1])
        assert {card["id"] for card in models["data"]} == {
            "small",
            "embed",
            "gpt-4o-mini",
            "text-embedding-3-small",
        }
        assert b"vllm:num_requests_running" in fetched(gateway.url, "/metrics")[1]

        curl = next(line for line in gateway.lines if line.startswith("curl "))
        python = next(line for line in gateway.lines if line.startswith("python "))
        answer = pasted_curl(curl, facet.environment)["choices"][0]["message"]["content"]
        said = subprocess.run(
            ["bash", "-c", python], capture_output=True, text=True, check=True, env=facet.environment, timeout=60
        )
        assert said.stdout == f"{answer}\n"
        assert "red" in answer.lower()
        asked = facet(
            "chat", "--url", gateway.url, "--temperature", "0", curl_question(curl), FACET_API_KEY=keys["user"]
        )
        assert asked.stdout == said.stdout
        assert facet("doctor", "--port", str(urlsplit(gateway.url).port), **cache).returncode == 0
        code, out, err = gateway.end()
        assert (code, out.splitlines()[-1], err) == (0, "ended", "")

    with facet.running("up", "--port", "0", "--dtype", "float32", **cache) as again:
        assert again.keys == {}
        assert again.lines[0] == f"data      {data}"
        assert any(line.startswith("engine    small-0: float32, ") for line in again.lines)
        assert fetched(again.url, "/v1/models", keys["user"])[0] == 200
        assert again.end()[0] == 0


def fetched(url: str, path: str, key: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
    response = connection.getresponse()
    answer = (response.status, response.read())
    connection.close()
    return answer


def curl_question(line: str) -> str:
    words = shlex.split(line)
    question: str = json.loads(words[words.index("-d") + 1])["messages"][0]["content"]
    return question


def pasted_curl(line: str, environment: dict[str, str]) -> Any:
    """What the line prints; on a machine without curl, what its words ask for."""
    if shutil.which("curl"):
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, check=True, env=environment, timeout=60
        )
        return json.loads(done.stdout)
    words = shlex.split(line)
    headers = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
    parts = urlsplit(words[2])
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    connection.request("POST", parts.path, words[words.index("-d") + 1], headers)
    response = connection.getresponse()
    document = json.loads(response.read())
    connection.close()
    return document
