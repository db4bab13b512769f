"""`facet bench` and `facet eval` as processes: one JSON document with the promised names, progress elsewhere."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import bench
from gateway.loadgen import Load, Measured

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def long_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder with room for the benchmark's prompts."""
    from engines.models.tiny import TinyLlama, write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("bench") / "tiny", seed=1, sizes=TinyLlama(max_model_len=1024))


def test_the_engine_is_measured(facet: Any, long_tiny: Path) -> None:
    before = git_head()
    done = facet("bench", "engine", "--model", str(long_tiny), "--runs", "1", "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["model"], report["threads"], report["runs"]) == ("tiny", 1, 1)
    for name in ("prefill_tok_s", "decode_tok_s", "batch_gen_tok_s"):
        assert report["spread"][name]["min"] == report[name] == report["spread"][name]["max"] > 10
    assert report["start_s"] > 0.3, "the import of torch is part of a start"
    assert report["rss_bytes"] > 50 << 20
    assert len(report["model_digest"]) == 16
    assert report["machine"]["cores"] >= 1
    assert report["commit"].removesuffix("-dirty") in {before, git_head()}
    assert "decode_tok_s 1/1" in done.stderr


def git_head() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def test_an_engine_that_cannot_be_built_is_exit_code_1(facet: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    done = facet("bench", "engine", "--model", "bad.gguf")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: engines.bench ended with status 1; its error is above."
    assert "bad.gguf" in done.stderr


def test_a_gateway_with_the_fake_engine_is_started_measured_and_ended(facet: Any, tiny_policy: Path) -> None:
    arguments = ["--policy", str(tiny_policy), "--requests", "20", "--concurrency", "1,4", "--runs", "1"]
    done = facet("bench", "gateway", *arguments, "--stream", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["engine"], report["stream"], report["max_tokens"], report["runs"]) == ("fake", True, 16, 1)
    assert [(level["concurrency"], level["requests"]) for level in report["levels"]] == [(1, 20), (4, 20)]
    for level in report["levels"]:
        assert 0 < level["ttft_p50_ms"] <= level["p50_ms"] <= level["p99_ms"]
        assert level["rps"] > 1
    text = facet("bench", "gateway", *arguments)
    assert [line.split()[:2] for line in text.stdout.splitlines()] == [["concurrency", "1"], ["concurrency", "4"]]


def test_a_running_gateway_is_measured_with_a_key(facet: Any, tiny_policy: Path) -> None:
    without = facet("bench", "gateway", "--url", "http://127.0.0.1:9")
    assert without.returncode == 1
    assert without.stderr.startswith("error: no API key for that gateway: set FACET_API_KEY")
    nobody = facet("bench", "gateway", "--url", "http://127.0.0.1:9", FACET_API_KEY="k")
    assert "no gateway answers at http://127.0.0.1:9" in nobody.stderr
    key = facet("keys", "create", "bench").stdout.strip()
    arguments = ("--requests", "5", "--concurrency", "2", "--runs", "1", "--json")
    with facet.running("serve", "--policy", str(tiny_policy), "--engine", "fake", "--port", "0") as gateway:
        done = facet("bench", "gateway", "--url", f"{gateway.url}/v1", *arguments, FACET_API_KEY=key)
        refused = facet("bench", "gateway", "--url", gateway.url, *arguments, FACET_API_KEY="sk-facet-wrong")
    assert json.loads(done.stdout)["engine"] == "the gateway's own"
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: the gateway answered 401: ")


def test_a_number_format_is_judged(facet: Any, long_tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    done = facet(
        "eval",
        "kld",
        "--model",
        str(long_tiny),
        "--text",
        "text.txt",
        "--tokens",
        "256",
        "--dtype",
        "float32",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["mean_kld"] == 0
    missing = facet("eval", "kld", "--model", str(long_tiny), "--text", "absent.txt")
    assert (missing.returncode, missing.stderr) == (
        1,
        "error: there is no file absent.txt; give a text in UTF-8, or leave --text out.\n",
    )


def test_levels_are_medians_with_their_spread() -> None:
    load = Load(url="http://x", key="", model="m", requests=2, concurrency=8, stream=True, max_tokens=1)
    runs = [Measured(elapsed, [elapsed, elapsed], [elapsed / 2]) for elapsed in (0.5, 0.1, 0.2)]
    assert bench.level_figures(load, runs) == {
        "concurrency": 8,
        "requests": 2,
        "rps": 10.0,
        "p50_ms": 200.0,
        "p99_ms": 200.0,
        "ttft_p50_ms": 100.0,
        "spread": {
            "rps": {"min": 4.0, "max": 20.0},
            "p50_ms": {"min": 100.0, "max": 500.0},
            "p99_ms": {"min": 100.0, "max": 500.0},
            "ttft_p50_ms": {"min": 50.0, "max": 250.0},
        },
    }


def test_a_package_inside_somebody_elses_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(bench, "PACKAGES_FOLDER", tmp_path)
    assert bench.commit() == "unknown"
