"""Divergence of a number format from the exact model."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engines import evaluate as command
from engines.api import EngineError
from engines.config import ModelConfig
from engines.models.evaluate import all_logits, bootstrap_interval, evaluate_kld
from engines.models.quality_table import markdown, measure_table
from engines.models.registry import load_model
from engines.models.tiny import write_tiny_llama
from engines.ops.kv_cache import allocate_kv_cache


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(path: Path, dtype: str = "int8") -> ModelConfig:
    return ModelConfig(name="tiny", path=str(path), dtype=dtype)


def tokens(count: int) -> list[int]:
    return torch.randint(0, 272, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def test_the_figures_are_those_of_a_plain_computation(tiny_llama_path: Path) -> None:
    ids = tokens(701)  # a whole window and a part
    report = evaluate_kld(config(tiny_llama_path), ids)
    distributions = []
    for dtype in ("float32", "int8"):
        model = load_model(config(tiny_llama_path, dtype))
        rows = []
        for window in (ids[:512], ids[512:700]):
            kv = allocate_kv_cache(model.spec.num_layers, 32, model.spec.num_kv_heads, 16, model.spec.head_dim)
            rows.append(torch.log_softmax(all_logits(model, torch.tensor(window), kv).double(), dim=-1))
        distributions.append(torch.cat(rows).numpy())
    exact, rough = distributions
    klds = (np.exp(exact) * (exact - rough)).sum(axis=1)
    targets = np.array(ids[1:])
    assert report.tokens == 700
    assert report.mean_kld == pytest.approx(klds.mean(), rel=1e-9)
    assert report.median_kld == pytest.approx(np.median(klds), rel=1e-9)
    assert report.p99_kld == pytest.approx(np.quantile(klds, 0.99), rel=1e-9)
    assert report.same_top1 == pytest.approx((exact.argmax(axis=1) == rough.argmax(axis=1)).mean())
    assert report.reference_perplexity == pytest.approx(math.exp(-exact[np.arange(700), targets].mean()), rel=1e-9)
    assert report.perplexity_ratio == pytest.approx(math.exp((exact - rough)[np.arange(700), targets].mean()), rel=1e-9)
    assert 0 < report.mean_kld_low < report.mean_kld < report.mean_kld_high < 0.01
    assert (report.dtype, report.reference_dtype, report.model) == ("int8", "float32", "tiny")


def test_a_format_does_not_differ_from_itself(tiny_llama_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = evaluate_kld(
        config(tiny_llama_path), tokens(1101), reference_dtype="int8", progress=lambda *step: seen.append(step)
    )
    assert (report.mean_kld, report.same_top1, report.perplexity_ratio) == (0.0, 1.0, 1.0)
    assert seen == [(512, 1100), (1024, 1100), (1100, 1100)]


def test_intervals_hold_the_mean_and_shrink_with_data() -> None:
    values = np.random.Generator(np.random.PCG64(3)).exponential(1.0, 20_000)
    few, many = bootstrap_interval(values[:1000]), bootstrap_interval(values)
    assert few[0] < values[:1000].mean() < few[1]
    assert many[1] - many[0] == pytest.approx(2 * 1.96 / math.sqrt(20_000), rel=0.15)
    assert bootstrap_interval(values) == many
    assert bootstrap_interval(np.ones(5)) == (1.0, 1.0)


def test_too_little_text_and_the_wrong_kind_of_model_are_refused(tiny_llama_path: Path, tiny_bert_path: Path) -> None:
    with pytest.raises(EngineError, match="1 tokens are too few"):
        evaluate_kld(config(tiny_llama_path), [5])
    with pytest.raises(EngineError, match="not a generating model"):
        evaluate_kld(config(tiny_bert_path, "auto"), [5, 6, 7])


def test_the_command_prints_one_json_document(tiny_llama_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--path", str(tiny_llama_path), "--dtype", "int8", "--tokens", "300", "--threads", "1"]
    assert command.main(arguments) == 0
    printed = capfd.readouterr()
    report = json.loads(printed.out)
    assert report["tokens"] == 300
    assert report["dtype"] == "int8"
    assert "300 of 300 tokens" in printed.err


def test_the_command_reads_a_text_of_the_callers(
    tmp_path: Path, tiny_llama_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("abc " * 20)
    common = ["--path", str(tiny_llama_path), "--dtype", "int8", "--threads", "1", "--text"]
    assert command.main([*common, str(tmp_path / "text.txt"), "--tokens", "500"]) == 0
    assert json.loads(capfd.readouterr().out)["tokens"] == 81  # 80 bytes, two newlines, less the first
    assert command.main([*common, str(tmp_path / "none.txt")]) == 1
    assert "none.txt" in capfd.readouterr().err


def test_the_standard_librarys_prose_is_long_enough() -> None:
    length = 0
    for text in command.standard_library_prose():
        assert len(text) >= command.SHORTEST_DOCSTRING
        length += len(text)
        if length > 40_000:  # about 9,000 tokens
            return
    pytest.fail(f"only {length} characters")


@pytest.mark.model
def test_int8_of_the_demo_model_keeps_its_quality(demo_model_path: Path, facet_cache_dir: Path) -> None:
    """The bars are 0.02 and 94 % on 8,192 tokens (docs/benchmarks.md); a sample of 512 has an interval around it."""
    ids = command.corpus(demo_model_path, None, 512)
    cached = ModelConfig(
        name="demo", path=str(demo_model_path), dtype="int8", cache_dir=str(facet_cache_dir / "packed")
    )
    report = evaluate_kld(cached, ids)
    assert report.tokens == 512
    assert report.mean_kld < 0.02
    assert report.same_top1_high > 0.94
    assert report.perplexity_ratio < 1.05


def test_the_table_has_every_cell_with_its_bytes(tmp_path: Path) -> None:
    """Two formats of weights with three of keys; a clock that counts gives exact speeds."""
    folder = write_tiny_llama(tmp_path / "model", seed=7)
    ticks = itertools.count()
    said: list[str] = []
    rows = measure_table(
        config(folder, "float32"),
        tokens(600),
        clock=lambda: float(next(ticks)),
        weights=("float32", "int8"),
        keys=("float32", "int8", "int4"),
        runs=2,
        progress=said.append,
    )
    assert [(row.weights, row.kv_dtype) for row in rows] == list(
        itertools.product(("float32", "int8"), ("float32", "int8", "int4"))
    )
    # Two layers, two heads of 16, K and V; int8 and int4 have a float32 scale a head.
    assert [row.kv_token_bytes for row in rows[:3]] == [8 * 64, 8 * 20, 8 * 12]
    assert rows[0].weight_bytes > 2 * rows[3].weight_bytes
    window = 512 - 24
    assert {(row.prefill_tok_s, row.decode_tok_s) for row in rows} == {(window, 24.0)}
    exact, narrow, narrowest = (row.quality for row in rows[:3])
    assert (exact.mean_kld, exact.same_top1, exact.tokens) == (0.0, 1.0, 599)
    assert 0 < narrow.mean_kld < narrowest.mean_kld
    alone = evaluate_kld(ModelConfig(name="tiny", path=str(folder), dtype="int8", kv_dtype="int8"), tokens(600))
    assert (alone.dtype, alone.kv_dtype, alone.tokens) == ("int8", "int8", 599)
    assert alone.perplexity_ratio_low <= alone.perplexity_ratio <= alone.perplexity_ratio_high
    assert len(markdown(rows).splitlines()) == 2 + len(rows)
    assert said[-1] == "speed: run 2 of 2, cell 6 of 6"
