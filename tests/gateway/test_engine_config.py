"""The policy's words and the settings' reach the engine as it means them."""

from __future__ import annotations

from pathlib import Path

from engines.config import CacheConfig, RopeScaling
from gateway.app import Nursery, engine_config, file_name
from gateway.settings import load_settings
from policies.schema import Model, Price
from policies.schema import RopeScaling as PolicyScaling

SETTINGS = load_settings({"HOME": "/h"})


def model(**options: object) -> Model:
    return Model(source="m.gguf", price=Price(input_usd_per_mtok=0), **options)


def test_tiers_and_long_contexts() -> None:
    asked = model(
        max_model_len=32768,
        rope_scaling=PolicyScaling(kind="yarn", factor=4.0),
        kv_memory_mib=3,
        kv_dram_mib=5,
        kv_disk_mib=7,
    )
    config = engine_config("org/m", asked, Path("/m.gguf"), SETTINGS)
    assert (config.model.max_model_len, config.model.rope_scaling) == (32768, RopeScaling(kind="yarn", factor=4.0))
    path = "/h/.cache/facet/kv/org%2Fm"
    assert config.cache == CacheConfig(memory_bytes=3 << 20, dram_bytes=5 << 20, disk_bytes=7 << 20, disk_path=path)
    moved = load_settings({"HOME": "/h", "FACET_KV_DIR": "/ssd"})
    assert engine_config("m", asked, Path("/m.gguf"), moved).cache.disk_path == "/ssd/m"


def test_no_tier_unless_asked_for() -> None:
    assert engine_config("m", model(), Path("/m.gguf"), SETTINGS).cache == CacheConfig()


def test_names_of_models_become_different_names_of_files() -> None:
    names = ["a", "a/b", "a%2Fb", "../a", "a b"]
    files = [file_name(name) for name in names]
    assert len(set(files)) == len(names)
    assert all("/" not in name for name in files)


def test_one_zygote_a_model_if_wanted() -> None:
    one, other = (engine_config(name, model(), Path("/m.gguf"), SETTINGS) for name in ("one", "other"))
    nursery = Nursery(SETTINGS)
    assert nursery.zygote(one) is nursery.zygote(one)
    assert nursery.zygote(one) is not nursery.zygote(other)
    assert Nursery(load_settings({"HOME": "/h", "FACET_ZYGOTES": "false"})).zygote(one) is None
