"""`facet up` and `facet serve`: the same server, with and without the first-run help.

Read next: `gateway/server.py`.
"""

from __future__ import annotations

import ipaddress
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.context import fetch_models, read_policy, settings_with, starter_policy, with_keys
from gateway.cli.output import fail
from gateway.settings import Settings
from gateway.tenants import KeyService
from policies.schema import Policy

Port = Annotated[int | None, typer.Option(help="Port to listen on (8080).")]
Host = Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")]
PolicyFile = Annotated[Path | None, typer.Option("--policy", help="Policy file (the data folder's policy.yaml).")]
Threads = Annotated[int | None, typer.Option(help="Engine threads a worker (all cores but one).")]
DataDir = Annotated[str | None, typer.Option(help="Folder of database, secret, logs and policy.")]
Public = Annotated[bool, typer.Option("--public", help="Allow an address that other machines can reach.")]
KINDS = ("process", "local", "fake")


def up(
    port: Port = None,
    host: Host = None,
    policy: PolicyFile = None,
    threads: Threads = None,
    data_dir: DataDir = None,
    public: Public = False,
) -> None:
    """Start Facet. Without any configuration it fetches two small models, makes keys and prints how to talk to it."""
    settings = prepared(port, host, policy, threads, data_dir, public)
    if policy is None:
        policy_path = starter_policy(settings)
        print(f"policy    {policy_path}")
    rules = read_policy(settings.policy)
    print(f"data      {settings.data_dir}")
    key = first_keys(settings)
    start(settings, rules, "process", key)


def serve(
    policy: PolicyFile = None,
    port: Port = None,
    host: Host = None,
    threads: Threads = None,
    data_dir: DataDir = None,
    public: Public = False,
    engine: Annotated[
        str, typer.Option(help="process | local (a thread) | fake (echoes; for benchmarks).")
    ] = "process",
) -> None:
    """Serve a policy, without the first-run help."""
    if engine not in KINDS:
        raise typer.BadParameter(f"{engine!r}; choose one of {', '.join(KINDS)}", param_hint="--engine")
    settings = prepared(port, host, policy, threads, data_dir, public)
    if not settings.policy.exists():
        raise fail(f"there is no {settings.policy}; give --policy FILE, or run `facet up` once to get a starter.")
    start(settings, read_policy(settings.policy), engine, None)


def prepared(
    port: int | None, host: str | None, policy: Path | None, threads: int | None, data_dir: str | None, public: bool
) -> Settings:
    """Settings with the command line's changes; an address open to others only on purpose."""
    settings = settings_with(
        port=port,
        host=host,
        policy_path=str(policy.resolve()) if policy is not None else None,
        engine_threads=threads,
        data_dir=data_dir,
    )
    if not public and not is_loopback(settings.host):
        raise fail(
            f"{settings.host} can be reached by other machines. Keys protect it, traffic is not encrypted; "
            "put a TLS proxy before it and add --public if that is what you want."
        )
    return settings


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
    print(f"          user   {user}")
    return user


def start(settings: Settings, policy: Policy, kind: str, key: str | None) -> None:
    """Fetch models, serve until told to end; exit code 1 with a mend when it cannot."""
    from engines.api import EngineError
    from engines.text.errors import TextError
    from gateway.server import ServeError, serve
    from gateway.settings import SettingsError
    from gateway.stores.base import StoreError

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    paths = fetch_models(policy, settings)
    work = serve(
        settings,
        policy,
        paths,
        kind="fake" if kind == "fake" else "local" if kind == "local" else "process",
        report=lambda line: print(f"engine    {line}", flush=True),
        on_ready=lambda url: print(welcome(url, policy, key), flush=True),
    )
    try:
        run_loop(work)
    except (ServeError, EngineError, TextError, StoreError, SettingsError, OSError) as error:
        raise fail(str(error)) from error
    print("ended", file=sys.stderr)


def run_loop(work: object) -> None:
    """On uvloop where there is one."""
    import asyncio
    from collections.abc import Coroutine

    assert isinstance(work, Coroutine)
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


def welcome(url: str, policy: Policy, key: str | None) -> str:
    """Lines that work as pasted."""
    model = next(name for name, model in policy.models.items() if model.task == "generate")
    shown = key or "$FACET_API_KEY"
    lines = [
        f"ready     {url}",
        "",
        f"curl {url}/v1/chat/completions -H 'content-type: application/json' -H \"authorization: Bearer {shown}\" \\",
        f'  -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Say hello."}}]}}\'',
        "",
    ]
    secret = f'"{key}"' if key else 'os.environ["FACET_API_KEY"]'
    prefix = "" if key else "import os; "
    lines += [
        f'{prefix}from openai import OpenAI; client = OpenAI(base_url="{url}/v1", api_key={secret}); '
        f'print(client.chat.completions.create(model="{model}", '
        'messages=[{"role": "user", "content": "Say hello."}]).choices[0].message.content)',
        "",
        "Ctrl-C ends it.",
    ]
    return "\n".join(lines)
