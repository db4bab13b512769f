"""Settings: defaults by XDG, overrides by FACET_*, errors that name the variable."""

from __future__ import annotations

import pytest

from gateway.settings import Limits, SettingsError, load_settings


def test_defaults_follow_xdg() -> None:
    settings = load_settings({"HOME": "/home/u"})
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert settings.data_dir == "/home/u/.local/share/facet"
    assert settings.cache_dir == "/home/u/.cache/facet"
    assert settings.run_dir == "/home/u/.local/share/facet/run"
    assert str(settings.policy) == "/home/u/.local/share/facet/policy.yaml"
    assert settings.limits == Limits()
    moved = load_settings({"HOME": "/h", "XDG_DATA_HOME": "/d", "XDG_CACHE_HOME": "/c", "XDG_RUNTIME_DIR": "/r"})
    assert (moved.data_dir, moved.cache_dir, moved.run_dir) == ("/d/facet", "/c/facet", "/r/facet")


def test_the_environment_overrides() -> None:
    settings = load_settings(
        {"HOME": "/h", "FACET_PORT": "9", "FACET_LIMIT_CHOICES": "3", "FACET_TELEMETRY_OTLP_ENDPOINT": "http://x"}
    )
    assert (settings.port, settings.limits.choices, settings.telemetry.otlp_endpoint) == (9, 3, "http://x")


@pytest.mark.parametrize(
    ("name", "value"),
    [("FACET_PORT", "99999"), ("FACET_PORT", "x"), ("FACET_LIMIT_CHOICES", "0"), ("FACET_ENGINE_THREADS", "-1")],
)
def test_a_bad_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        load_settings({"HOME": "/h", name: value})
