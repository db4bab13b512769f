"""The compiled kernels for this room's tests: the installed library, or one built from the tree's sources."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from engines.ops import native


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Never older than the sources. Skips only where no kernel could run: no compiler, or another processor."""
    newest = max(path.stat().st_mtime for path in native.SOURCES.iterdir())
    built = [path for path in native.HERE.glob(native.LIBRARY_PATTERN) if path.stat().st_mtime >= newest]
    folder: Path = native.HERE
    if not built:
        if shutil.which("cc") is None:
            pytest.skip("no C compiler")
        folder = tmp_path_factory.mktemp("native")
        native.build(folder)
    try:
        return native.open_library(folder)
    except native.NativeUnavailableError as error:
        if "processor" in str(error):
            pytest.skip(str(error))
        raise
