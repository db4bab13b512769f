"""Measures a number format's quality: `python -m engines.evaluate --path MODEL`, one JSON document on stdout.

The text is the standard library's own prose (its docstrings), so that every machine has it, or a file of the caller's.
`facet eval kld`, `ppl` and `table` start this in a process of its own; the report names text and digest of its tokens.

Knows nothing of gateways. Read next: `engines/models/evaluate.py`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch

from engines.api import EngineError
from engines.config import DType, KVDType, ModelConfig
from engines.core.build import set_threads
from engines.models.evaluate import evaluate_kld
from engines.models.quality_table import KEYS, WEIGHTS, markdown, measure_table
from engines.text.errors import TextError
from engines.text.model import load_text

# A shorter docstring is a label, not prose.
SHORTEST_DOCSTRING = 400


def standard_library_prose() -> Iterator[str]:
    """Long docstrings of the standard library's modules, in order of file name and place."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST_DOCSTRING:
                    yield text


def corpus(path: Path, text: Path | None, num_tokens: int) -> list[int]:
    """The first `num_tokens` + 1 ids of the text. Raises TextError if the model has no usable tokenizer."""
    tokenizer = load_text(path).tokenizer
    pieces = standard_library_prose() if text is None else iter([text.read_text(encoding="utf-8")])
    ids: list[int] = []
    for piece in pieces:
        ids += tokenizer.encode(piece + "\n\n", specials=False)
        if len(ids) > num_tokens:
            break
    return ids[: num_tokens + 1]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 and a report, or 1 and a line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m engines.evaluate", description="Compare a format with float32.")
    parser.add_argument("--path", type=Path, required=True, help="a .gguf file or a folder with config.json")
    parser.add_argument("--dtype", choices=get_args(DType), default="auto")
    parser.add_argument("--kv-dtype", choices=get_args(KVDType), default="float32")
    parser.add_argument("--table", action="store_true", help="all formats of weights and keys instead of one")
    parser.add_argument("--weights", default=",".join(WEIGHTS), help="of the table, separated by commas")
    parser.add_argument("--keys", default=",".join(KEYS), help="of the table, separated by commas")
    parser.add_argument("--runs", type=int, default=3, help="of each speed in the table")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores but one")
    parser.add_argument("--cache-dir", default="", help="where packed weights are kept")
    parser.add_argument("--text", type=Path, default=None, help="a text file; default: the standard library's prose")
    given = parser.parse_args(arguments)
    set_threads(given.threads)
    config = ModelConfig(
        name=given.path.stem,
        path=str(given.path),
        dtype=given.dtype,
        kv_dtype=given.kv_dtype,
        cache_dir=given.cache_dir,
        num_threads=given.threads,
    )
    try:
        ids = corpus(given.path, given.text, given.tokens)
        report = _table(config, ids, given) if given.table else _one(config, ids)
    except (EngineError, TextError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    name = f"Python {platform.python_version()} docstrings" if given.text is None else given.text.name
    digest = hashlib.sha256(b"".join(one.to_bytes(4, "little") for one in ids)).hexdigest()[:16]
    print(msgspec.json.encode({**report, "text": name, "text_tokens_sha256": digest}).decode())
    return 0


def _one(config: ModelConfig, ids: list[int]) -> dict[str, Any]:
    report: dict[str, Any] = msgspec.to_builtins(evaluate_kld(config, ids, progress=_show))
    return report


def _table(config: ModelConfig, ids: list[int], given: argparse.Namespace) -> dict[str, Any]:
    try:
        weights = msgspec.convert(given.weights.split(","), list[DType])
        keys = msgspec.convert(given.keys.split(","), list[KVDType])
    except msgspec.ValidationError as error:
        raise EngineError(f"--weights {given.weights} --keys {given.keys}: {error}") from error
    rows = measure_table(
        config, ids, clock=time.perf_counter, weights=weights, keys=keys, runs=given.runs, progress=_say
    )
    return {"rows": msgspec.to_builtins(rows), "threads": torch.get_num_threads(), "markdown": markdown(rows)}


def _show(done: int, total: int) -> None:
    print(f"\r{done} of {total} tokens", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _say(line: str) -> None:
    print(f"\r{line:<72}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
