"""`facet up` and `facet serve`: the same server, with and without the first-run help.

Read next: `gateway/server.py`, `gateway/cli/welcome.py`.
"""

from __future__ import annotations

import ipaddress
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.context import (
    DataDir,
    Threads,
    checked_dtype,
    fetch_models,
    read_policy,
    run_async,
    settings_with,
    starter_policy,
    with_keys,
)
from gateway.cli.options import from_options
from gateway.cli.output import fail

if TYPE_CHECKING:
    from gateway.app import EngineKind
    from gateway.settings import Settings
    from gateway.tenants import KeyService
    from policies.schema import Policy

# Of a Unix socket's path, which ends in "/<model>-<replica>.sock".
MAX_SOCKET_FOLDER_CHARS = 60


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What both commands take."""

    policy: Annotated[Path | None, typer.Option(help="Policy file. [policy.yaml in the data folder]")] = None
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 is any free one. [8080]")] = None
    public: Annotated[bool, typer.Option("--public", help="Allow an address that other machines can reach.")] = False
    threads: Threads = None
    dtype: Annotated[str | None, typer.Option(help="auto | native | int8 | ..., in place of the policy's.")] = None
    data_dir: DataDir = None

    def settings(self) -> Settings:
        """The environment's settings with these changes; the address is checked before anything is fetched or made."""
        settings = settings_with(
            port=self.port,
            host=self.host,
            policy_path=str(self.policy.absolute()) if self.policy is not None else None,
            engine_threads=self.threads,
            data_dir=self.data_dir,
        )
        check_address(settings, self.public)
        return settings

    def rules(self, settings: Settings) -> Policy:
        """The policy, with these changes."""
        if self.dtype is not None:
            checked_dtype(self.dtype)
        return with_dtype(read_policy(settings.policy), self.dtype)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(UpOptions):
    """What only `serve` takes."""

    engine: Annotated[str, typer.Option(help="process | local (a thread) | fake (echoes; for benchmarks).")] = "process"


@from_options
def up(options: UpOptions) -> None:
    """Start Facet. Without any configuration it fetches two small models, makes keys and prints how to talk to it."""
    settings = options.settings()
    if options.policy is None and starter_policy(settings.policy):
        print(f"policy    {settings.policy} (a starter; edit it)")
    policy = options.rules(settings)
    print(f"data      {settings.data_dir}", flush=True)
    paths = fetch_models(policy, settings)
    start(settings, policy, paths, "process", first_keys(settings))


@from_options
def serve(options: ServeOptions) -> None:
    """Serve a policy, without the first-run help."""
    kinds: dict[str, EngineKind] = {"process": "process", "local": "local", "fake": "fake"}
    if options.engine not in kinds:
        raise typer.BadParameter(f"{options.engine!r}; choose one of {', '.join(kinds)}", param_hint="--engine")
    settings = options.settings()
    if not settings.policy.exists():
        raise fail(f"there is no {settings.policy}; give --policy FILE, or run `facet up` once to get a starter.")
    policy = options.rules(settings)
    start(settings, policy, fetch_models(policy, settings), kinds[options.engine], None)


def check_address(settings: Settings, public: bool) -> None:
    """Before anything is fetched or made: the address is free, and open to others only on purpose."""
    from gateway.server import ServeError, bind

    if not public and not is_loopback(settings.host):
        raise fail(
            f"{settings.host} can be reached by other machines. Keys protect it, traffic is not encrypted; "
            "put a TLS proxy before it and add --public if that is what you want."
        )
    try:
        bind(settings.host, settings.port).close()
    except ServeError as error:
        raise fail(str(error)) from error


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def with_dtype(policy: Policy, dtype: str | None) -> Policy:
    """The same policy whose generating models run in another number format; encoders have only one."""
    import msgspec

    if dtype is None:
        return policy
    models = {
        name: msgspec.structs.replace(model, dtype=dtype) if model.task == "generate" else model
        for name, model in policy.models.items()
    }
    return msgspec.structs.replace(policy, models=models)


def first_keys(settings: Settings) -> str | None:
    """At the first start: an admin key and a virtual key, shown once. Returns the virtual key, or None later on."""

    async def make(keys: KeyService) -> tuple[str, str] | None:
        if await keys.list():
            return None
        _, admin = await keys.create("admin", role="admin")
        _, user = await keys.create("first")
        return admin, user

    made = with_keys(settings, make)
    if made is None:
        return None
    admin, user = made
    print("keys      shown this once; Facet stores only keyed hashes")
    print(f"          admin  {admin}")
    print(f"          user   {user}", flush=True)
    return user


def start(settings: Settings, policy: Policy, paths: dict[str, Path], kind: EngineKind, key: str | None) -> None:
    """Serve until told to end; exit code 1 with a mend when it cannot."""
    import logging

    import msgspec

    from engines.api import EngineError
    from engines.text.errors import TextError
    from gateway.cli.welcome import welcome
    from gateway.server import ServeError
    from gateway.server import serve as serve_until_told
    from gateway.settings import SettingsError
    from gateway.stores.base import StoreError

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        with socket_folder(Path(settings.run_dir)) as folder:
            run_async(
                serve_until_told(
                    msgspec.structs.replace(settings, run_dir=str(folder)),
                    policy,
                    paths,
                    kind=kind,
                    report=lambda line: print(f"engine    {line}", flush=True),
                    on_ready=lambda url: print(welcome(url, policy, key), flush=True),
                    on_ending=lambda running: print(
                        f"ending    {running} requests run; again stops at once", flush=True
                    ),
                )
            )
    except (ServeError, EngineError, TextError, StoreError, SettingsError, OSError) as error:
        raise fail(str(error)) from error
    print("ended")


@contextmanager
def socket_folder(run_dir: Path) -> Iterator[Path]:
    """A folder for this gateway's worker sockets, so that two gateways never take each other's.

    Below `run_dir` when the path of a socket there can be opened (108 bytes at most), else in the system's temporary
    folder. Only this user may enter it; it goes when the gateway does.
    """
    parent: Path | None = None
    if len(str(run_dir).encode()) <= MAX_SOCKET_FOLDER_CHARS:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        parent = run_dir
    with tempfile.TemporaryDirectory(dir=parent, prefix="facet-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
