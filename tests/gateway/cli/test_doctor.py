"""What `facet doctor` finds, and that each finding that is not ok says how to mend it."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.cli import checks, checks_facet
from gateway.cli.checks import Finding
from gateway.settings import Settings, load_settings
from gateway.wheels import MANIFEST, sha256_of

POLICY = "version: facet/v1\nmodels:\n  small: {{source: '{source}', price: {{input_usd_per_mtok: 1}}}}\n"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Something else on a port."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held


def settings(tmp_path: Path, **environment: str) -> Settings:
    return load_settings({"HOME": str(tmp_path), **environment})


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_fresh_machine_has_nothing_that_keeps_facet_from_running(facet: Any) -> None:
    done = facet("doctor", "--port", "0", "--json")
    findings = json.loads(done.stdout)
    assert [f for f in findings if f["state"] == "failed"] == []
    assert done.returncode == 0
    assert all(f["state"] == "ok" or f["fix"] for f in findings)
    names = {f["check"] for f in findings}
    assert names >= {"port", "exposure", "threads", "disk", "permissions", "open files", "pip", "policy", "engine"}
    assert not (facet.folder / ".local").exists(), "doctor makes nothing"


def test_a_failed_check_is_exit_code_1_and_has_its_fix_below(facet: Any, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    done = facet("doctor", "--port", str(port))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("failed"))
    assert lines[at] == f"failed   port         127.0.0.1:{port} cannot be opened: Address already in use"
    assert lines[at + 1].strip() == "fix: stop what listens there, or start with --port NUMBER (FACET_PORT)"


def test_a_port_that_facet_itself_holds_is_fine(tmp_path: Path) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status":"live"}' if self.path == "/health/live" else b"")

        def log_message(self, *arguments: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Health)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        found = only(checks.check_port(settings(tmp_path, FACET_PORT=str(server.server_port))))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (found.state, found.detail) == ("ok", f"127.0.0.1:{server.server_port}: a Facet gateway answers there")


def test_an_address_that_others_reach_is_told(tmp_path: Path) -> None:
    assert only(checks.check_bind(settings(tmp_path))).state == "ok"
    for host in ("0.0.0.0", "::", "192.168.1.5", "gateway.example"):
        found = only(checks.check_bind(settings(tmp_path, FACET_HOST=host)))
        assert (found.state, found.fix) == (
            "warning",
            "unset FACET_HOST, or put a TLS proxy before it and start with --public",
        )


def test_more_threads_than_cores_are_told(tmp_path: Path) -> None:
    assert only(checks.check_threads(settings(tmp_path))).state == "ok"
    cores = len(os.sched_getaffinity(0))
    found = only(checks.check_threads(settings(tmp_path, FACET_ENGINE_THREADS=str(cores + 1))))
    assert (found.state, found.fix) == ("warning", f"set FACET_ENGINE_THREADS to at most {cores}, or unset it")


def test_little_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(checks, "MEMINFO", meminfo)
    assert list(checks.check_memory(settings(tmp_path))) == []  # a system that does not tell
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    1048576 kB\n")
    found = only(checks.check_memory(settings(tmp_path)))
    assert (found.state, found.detail) == ("warning", "1.0 GiB available")
    meminfo.write_text("MemAvailable:    4194304 kB\n")
    assert only(checks.check_memory(settings(tmp_path))).state == "ok"


def test_a_full_disk_and_a_folder_that_is_none_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    data, cache = checks.check_disk(settings(tmp_path, FACET_CACHE_DIR=str(tmp_path / "file" / "cache")))
    assert (data.state, cache.state) == ("ok", "failed")
    assert cache.fix == f"make {tmp_path / 'file'} a folder that you can write, or choose another with FACET_CACHE_DIR"
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    data, _ = checks.check_disk(settings(tmp_path))
    assert (data.state, data.fix) == ("warning", "free some space, or choose another folder with FACET_DATA_DIR")


def test_secrets_that_others_read_and_a_folder_that_others_change_are_told(tmp_path: Path) -> None:
    found = settings(tmp_path)
    folder = Path(found.data_dir)
    folder.mkdir(mode=0o700, parents=True)
    for path in (found.secret_path, found.database_path):
        path.touch(mode=0o600)
    assert only(checks.check_permissions(found)).state == "ok"
    found.secret_path.chmod(0o640)
    folder.chmod(0o770)
    fixes = [finding.fix for finding in checks.check_permissions(found) if finding.state == "failed"]
    assert fixes == [f"chmod go-w {folder}", f"chmod go-rwx {found.secret_path}"]
    for fix in fixes:  # and the fix mends it
        subprocess.run(fix.split(), check=True)
    assert only(checks.check_permissions(found)).state == "ok"


def test_few_open_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 4096))
    found = only(checks.check_files(settings(tmp_path)))
    assert (found.state, found.detail, found.fix) == ("warning", "at most 256", "ulimit -n 4096")


def test_a_policy_is_checked_and_its_models_looked_for(tmp_path: Path) -> None:
    found = settings(tmp_path)
    assert only(checks_facet.check_policy(found)).detail == "none yet; `facet up` writes a starter"
    found.policy.parent.mkdir(parents=True)
    found.policy.write_text("version: facet/v2\n")
    wrong = only(checks_facet.check_policy(found))
    assert wrong.state == "failed"
    assert wrong.detail.startswith(f"{found.policy}:1:")
    assert f"facet policy check {found.policy}" in wrong.fix

    found.policy.write_text(POLICY.format(source="pypi:no-such-model==1.0"))
    policy, model = checks_facet.check_policy(found)
    assert policy.state == "ok"
    assert (model.state, model.fix) == ("warning", "facet pull pypi:no-such-model==1.0")
    found.policy.write_text(POLICY.format(source="absent.gguf"))
    _, model = checks_facet.check_policy(found)
    assert model.state == "failed"
    assert f"there is no {found.policy.parent / 'absent.gguf'}" in model.detail
    (found.policy.parent / "absent.gguf").write_bytes(b"GGUF")
    assert only(checks_facet.check_policy(found)).state == "ok"


def test_model_files_are_compared_with_their_hashes(tmp_path: Path) -> None:
    found = settings(tmp_path)
    folder = Path(found.cache_dir) / "models" / "facet-demo-1.0"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"GGUF")
    (folder / MANIFEST).write_text(json.dumps({"m.gguf": sha256_of(folder / "m.gguf")}))
    assert only(checks_facet.check_models(found)).detail == "facet-demo==1.0: files match their hashes"
    (folder / "m.gguf").write_bytes(b"gguf")
    broken = only(checks_facet.check_models(found))
    assert broken.detail == "facet-demo==1.0: m.gguf changed since it was fetched"
    assert broken.fix == f"rm -r {folder} && facet pull pypi:facet-demo==1.0"


def probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str, status: int = 0) -> list[Finding]:
    """Findings when the probe's process answers so."""
    (tmp_path / "engines").mkdir(exist_ok=True)
    (tmp_path / "engines" / "__init__.py").touch()  # a regular package, found before any other
    (tmp_path / "engines" / "probe.py").write_text(f"import sys\nprint({answer!r})\nsys.exit({status})\n")
    monkeypatch.setattr(checks_facet, "PACKAGES_FOLDER", tmp_path)
    return list(checks_facet.check_engine(settings(tmp_path)))


def test_torch_and_kernels_are_asked_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"torch": "2.0", "cpu": "AVX2", "int8": "x86", "threads": 2, "native": None, "why_not": ""}
    (engine,) = probe(monkeypatch, tmp_path, json.dumps(facts))
    assert (engine.state, engine.detail) == ("ok", "torch 2.0 (AVX2), int8 by x86")
    _, kernels = probe(monkeypatch, tmp_path, json.dumps({**facts, "native": True}))
    assert kernels.state == "ok"
    _, kernels = probe(monkeypatch, tmp_path, json.dumps({**facts, "native": False, "why_not": "no C compiler"}))
    assert (kernels.state, kernels.detail) == ("warning", "no C compiler")
    assert "apt-get install gcc" in kernels.fix
    engine, *_ = probe(monkeypatch, tmp_path, json.dumps({**facts, "int8": "none"}))
    assert (engine.state, engine.fix) == ("warning", "start with --dtype float32")
    (engine,) = probe(monkeypatch, tmp_path, "", status=1)
    assert (engine.state, engine.fix) == ("failed", "pip install --force-reinstall facet-gateway")
    (engine,) = probe(monkeypatch, tmp_path, "not json")
    assert engine.state == "failed"
