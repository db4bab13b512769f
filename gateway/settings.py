"""Every setting of the gateway, and the only reader of the environment (`FACET_*`, XDG folders).

Values are checked here; components receive their own part, never the whole. Knows nothing of what uses them.

Read next: `gateway/app.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

PREFIX = "FACET_"


class SettingsError(Exception):
    """A setting cannot be used; names the variable, the value and what is allowed."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all settings."""


Positive = Annotated[int, msgspec.Meta(ge=1)]


class Limits(Part, frozen=True, kw_only=True):
    """What a request may be at most, checked on raw bytes (first four) or right after decoding."""

    body_bytes: Positive = 4 << 20
    header_bytes: Positive = 16 << 10
    json_depth: Positive = 64
    body_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    messages: Positive = 2048
    choices: Positive = 8
    prompts: Positive = 64
    embedding_inputs: Positive = 2048
    top_logprobs: Positive = 20
    stops: Positive = 16
    stop_chars: Positive = 256
    stop_token_ids: Positive = 128
    logit_bias: Positive = 1024
    tools: Positive = 128


class TelemetrySettings(Part, frozen=True, kw_only=True):
    """`otlp_endpoint`: where spans go; empty keeps the exporter off."""

    otlp_endpoint: str = ""


class Settings(Part, frozen=True, kw_only=True):
    """`data_dir` holds database, secret, policy and logs; `cache_dir` models; `run_dir` sockets.

    `kv_dir`: KV blocks of models with `kv_disk_mib`; empty is `kv` in the cache folder. `zygotes`: workers are forked
    from a process that has their model loaded (Linux). `engine_threads` 0: cores - 1, at least 1, shared out among the
    workers. `api_key` is what `facet chat` sends.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080
    data_dir: str
    cache_dir: str
    run_dir: str
    policy_path: str = ""
    kv_dir: str = ""
    zygotes: bool = True
    engine_threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    api_key: str = ""
    shutdown_grace_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    limits: Limits = Limits()
    telemetry: TelemetrySettings = TelemetrySettings()

    @property
    def database_path(self) -> Path:
        """The embedded store."""
        return Path(self.data_dir) / "facet.db"

    @property
    def secret_path(self) -> Path:
        """Server secret: keys the hashes of virtual keys and the roots of prefix caches."""
        return Path(self.data_dir) / "secret"

    @property
    def kv_path(self) -> Path:
        """Disk tiers of the KV caches, a folder a model."""
        return Path(self.kv_dir) if self.kv_dir else Path(self.cache_dir) / "kv"

    @property
    def log_dir(self) -> Path:
        """One log a worker."""
        return Path(self.data_dir) / "logs"

    @property
    def policy(self) -> Path:
        """The policy file in force."""
        return Path(self.policy_path) if self.policy_path else Path(self.data_dir) / "policy.yaml"


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Defaults, overridden by FACET_<FIELD>, FACET_LIMIT_<FIELD> and FACET_TELEMETRY_<FIELD>. Raises SettingsError."""
    variables = os.environ if environ is None else environ
    home = Path(variables.get("HOME") or str(Path.home()))
    data_home = Path(variables.get("XDG_DATA_HOME") or home / ".local" / "share")
    cache_home = Path(variables.get("XDG_CACHE_HOME") or home / ".cache")
    values: dict[str, Any] = {"data_dir": str(data_home / "facet"), "cache_dir": str(cache_home / "facet")}
    values |= chosen(variables, PREFIX, Settings)
    runtime = variables.get("XDG_RUNTIME_DIR")
    values.setdefault("run_dir", str(Path(runtime) / "facet") if runtime else str(Path(values["data_dir"]) / "run"))
    values["limits"] = chosen(variables, PREFIX + "LIMIT_", Limits)
    values["telemetry"] = chosen(variables, PREFIX + "TELEMETRY_", TelemetrySettings)
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{variable_of(str(error))}: {error}") from error


def chosen(variables: Mapping[str, str], prefix: str, part: type[Part]) -> dict[str, str]:
    """Fields of `part` that the environment sets."""
    fields = {field.name for field in msgspec.structs.fields(part)} - {"limits", "telemetry"}
    return {name: variables[prefix + name.upper()] for name in fields if variables.get(prefix + name.upper())}


def variable_of(message: str) -> str:
    """The variable behind a path like `$.limits.json_depth`."""
    path = message.rpartition("`$.")[2].rstrip("`") if "`$." in message else ""
    for section, prefix in (("limits.", "LIMIT_"), ("telemetry.", "TELEMETRY_")):
        if path.startswith(section):
            return PREFIX + prefix + path.removeprefix(section).upper()
    return PREFIX + path.upper()
