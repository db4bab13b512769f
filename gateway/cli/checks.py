"""Checks of this machine: address, threads, memory, disk, folders, open files. Each yields findings with a fix.

A check never raises and changes nothing. Read next: `gateway/cli/checks_facet.py`.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gateway.cli.serve import is_loopback
from gateway.settings import Settings

State = Literal["ok", "warning", "failed"]
MIN_FREE_BYTES = 2 << 30
MIN_MEMORY_BYTES = 2 << 30
MIN_OPEN_FILES = 1024
ANSWER_TIMEOUT_S = 2.0
ANSWER_BYTES = 1000
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check. `fix` says what to do unless it is ok."""

    check: str
    state: State
    detail: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        """Plain fields; no `fix` where nothing is to be mended."""
        return {name: value for name, value in asdict(self).items() if value}


Check = Callable[[Settings], Iterator[Finding]]


def check_port(settings: Settings) -> Iterator[Finding]:
    """Can we listen? A Facet that runs there already is no fault."""
    from gateway.server import ServeError, bind

    where = f"{settings.host}:{settings.port}"
    try:
        bind(settings.host, settings.port).close()
    except (ServeError, socket.gaierror) as error:
        if is_facet(settings.host, settings.port):
            yield Finding(check="port", state="ok", detail=f"{where}: a Facet gateway answers there")
        else:
            fix = "stop what listens there, or start with --port NUMBER (FACET_PORT)"
            yield Finding(check="port", state="failed", detail=str(error).split(". ")[0], fix=fix)
    else:
        yield Finding(check="port", state="ok", detail=f"{where} is free")


def is_facet(host: str, port: int) -> bool:
    """Whether our health page is there."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", "/health/live")
        with closing(connection.getresponse()) as response:
            return b'"live"' in response.read(ANSWER_BYTES)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def check_bind(settings: Settings) -> Iterator[Finding]:
    """Who can reach the address?"""
    if is_loopback(settings.host):
        yield Finding(check="exposure", state="ok", detail=f"{settings.host}: this machine only")
    else:
        detail = f"{settings.host} can be reached by other machines, without encryption"
        fix = "unset FACET_HOST, or put a TLS proxy before it and start with --public"
        yield Finding(check="exposure", state="warning", detail=detail, fix=fix)


def check_threads(settings: Settings) -> Iterator[Finding]:
    """Engines and gateway share the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = settings.engine_threads or max(1, cores - 1)
    detail = f"{cores} cores, {threads} engine threads a worker"
    if threads > cores:
        fix = f"set FACET_ENGINE_THREADS to at most {cores}, or unset it"
        yield Finding(check="threads", state="warning", detail=detail, fix=fix)
    else:
        yield Finding(check="threads", state="ok", detail=detail)


def check_memory(settings: Settings) -> Iterator[Finding]:
    """Weights and KV need some. Says nothing where the system does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
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
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            fix = f"make {existing} a folder that you can write, or choose another with FACET_{name.upper()}_DIR"
            yield Finding(check="disk", state="failed", detail=f"{existing} cannot be written", fix=fix)
        elif free < MIN_FREE_BYTES:
            fix = f"free some space, or choose another folder with FACET_{name.upper()}_DIR"
            yield Finding(check="disk", state="warning", detail=detail, fix=fix)
        else:
            yield Finding(check="disk", state="ok", detail=detail)


def check_permissions(settings: Settings) -> Iterator[Finding]:
    """Nobody else may read the server's secret, the key table or the logs, nor change the policy."""
    found = False
    for path, mask in (
        (Path(settings.data_dir), 0o022),
        (settings.policy, 0o022),
        (settings.secret_path, 0o077),
        (settings.database_path, 0o077),
    ):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & mask:
            found = True
            verb = "read" if mask & 0o044 else "changed"
            fix = f"chmod {'go-rwx' if verb == 'read' else 'go-w'} {path}"
            yield Finding(check="permissions", state="failed", detail=f"{path} can be {verb} by others", fix=fix)
    if not found:
        yield Finding(check="permissions", state="ok", detail=f"{settings.data_dir} is this user's only")


def check_files(settings: Settings) -> Iterator[Finding]:
    """Each stream holds a socket."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        fix = f"ulimit -n {4 * MIN_OPEN_FILES}"
        yield Finding(check="open files", state="warning", detail=f"at most {soft}", fix=fix)
    else:
        yield Finding(check="open files", state="ok", detail=f"at most {soft}")


CHECKS: tuple[Check, ...] = (
    check_port,
    check_bind,
    check_threads,
    check_memory,
    check_disk,
    check_permissions,
    check_files,
)
