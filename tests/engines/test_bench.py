"""The engine's benchmark does the work it names, on prompts that share nothing."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engines import bench
from engines.api import InvalidRequestError
from engines.bench import FIGURES, Workload, measure, with_room
from engines.config import CacheConfig, EngineConfig, ModelConfig
from engines.core.build import build_core
from engines.core.engine import EngineCore
from engines.models.tiny import TinyLlama, write_tiny_llama

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_tiny_llama(tmp_path_factory.mktemp("bench"), seed=1, sizes=TinyLlama(max_model_len=1024))
    return EngineConfig(model=ModelConfig(name="tiny", path=str(folder), dtype="float32", num_threads=1))


@pytest.fixture
def engine(config: EngineConfig) -> EngineCore:
    core = build_core(with_room(config), clock=time.monotonic)
    assert isinstance(core, EngineCore)
    return core


def test_each_figure_is_its_tokens_over_its_time(engine: EngineCore) -> None:
    """On a clock that ticks once a call: one before, one after."""
    work = Workload(engine)
    ticks = itertools.count()
    figures = {name: figure(engine, work, lambda: float(next(ticks))) for name, figure in FIGURES.items()}
    assert figures == {"prefill_tok_s": 512.0, "decode_tok_s": 128.0, "batch_gen_tok_s": 16.0 * 64}
    counted = engine.stats()
    assert counted.prompt_tokens_total == 512 + 16 + 16 * 256
    assert counted.generation_tokens_total == 1 + 129 + 16 * 64
    assert (counted.cached_tokens_total, counted.preemptions_total) == (0, 0)
    assert engine.has_work() is False


def test_the_prompts_are_the_same_in_every_run(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    monkeypatch.setattr(engine, "add_request", lambda request: seen.append(request.prompt_token_ids))
    for _ in range(2):
        work = Workload(engine)
        work.add(512, 1)
        work.add(256, 1)
    assert seen[:2] == seen[2:]
    assert [len(prompt) for prompt in seen[:2]] == [512, 256]
    assert seen[0][:256] != seen[1]
    assert all(100 <= token < engine.capabilities.vocab_size for token in seen[0])


def test_room_is_twice_what_the_batch_takes(config: EngineConfig) -> None:
    assert with_room(config).cache == CacheConfig(block_size=16, num_blocks=2 * 16 * 20)


def test_the_report_has_medians_and_spread(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([9.0, 1.0, 3.0, 2.0])  # the first does not count
    monkeypatch.setattr(bench, "FIGURES", {"prefill_tok_s": lambda engine, work, clock: next(values)})
    said: list[str] = []
    report = measure(with_room(config), 3, time.monotonic, said.append, began_s=time.monotonic() - 5)
    assert (report["prefill_tok_s"], report["spread"]) == (2.0, {"prefill_tok_s": {"min": 1.0, "max": 3.0}})
    threads = torch.get_num_threads()  # the process's own: `set_threads` is the entry point's business
    assert (report["runs"], report["threads"], report["dtype"], report["model"]) == (3, threads, "float32", "tiny")
    assert 5 < report["start_s"] < 60
    assert len(report["model_digest"]) == 16
    assert report["rss_bytes"] > 50 << 20
    assert said == ["prefill_tok_s (not counted)", "prefill_tok_s 1/3", "prefill_tok_s 2/3", "prefill_tok_s 3/3"]


def test_an_encoder_cannot_be_measured(tiny_bert_path: Path) -> None:
    config = EngineConfig(model=ModelConfig(name="b", path=str(tiny_bert_path)))
    with pytest.raises(InvalidRequestError, match="needs a model that generates"):
        measure(config, 1, time.monotonic, lambda line: None, began_s=0.0)


def test_what_cannot_be_measured_is_one_line(tmp_path: Path) -> None:
    config = json.dumps({"model": {"name": "x", "path": str(tmp_path / "absent.gguf")}})
    done = subprocess.run(
        [sys.executable, "-m", "engines.bench", "--config", config],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("engines.bench: ")
    assert "absent.gguf" in done.stderr
    assert "Traceback" not in done.stderr
