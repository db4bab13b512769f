"""The file of packed arrays: whole or absent, and never believed without proof."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.quant.packed_file import ALIGNMENT, PackedFileError, read_packed, write_packed


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "codes": rng.integers(0, 256, size=1001, dtype=np.uint8),
        "norm": rng.normal(size=(3, 5)).astype(np.float32),
        "empty": np.zeros(0, dtype=np.uint8),
    }


def test_what_is_written_is_read_back_mapped_and_aligned(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "weights.packed"
    write_packed(path, "key", arrays(), {"codes": {"bits": 4}})
    back, facts = read_packed(path, "key")
    assert facts == {"codes": {"bits": 4}}
    assert list(back) == ["codes", "norm", "empty"]
    for name, array in arrays().items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == array.dtype
        assert not back[name].flags.writeable
        assert back[name].ctypes.data % ALIGNMENT == 0
    # The file was renamed into place: nothing else lies beside it.
    assert [entry.name for entry in path.parent.iterdir()] == ["weights.packed"]


def test_arrays_outlive_a_file_that_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "weights.packed"
    write_packed(path, "key", arrays(), {})
    back, _ = read_packed(path, "key")
    write_packed(path, "key", {"codes": np.zeros(1001, dtype=np.uint8)}, {})
    path.unlink()
    np.testing.assert_array_equal(back["codes"], arrays()["codes"])


def test_another_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.packed"
    write_packed(path, "key", arrays(), {})
    with pytest.raises(PackedFileError, match="was written for key, not other"):
        read_packed(path, "other")


def test_every_damaged_byte_of_the_data_is_found(tmp_path: Path) -> None:
    path = tmp_path / "weights.packed"
    write_packed(path, "key", arrays(), {})
    whole = path.read_bytes()
    start = whole.index(arrays()["codes"].tobytes())
    for at in (start, start + 500, start + 1000, whole.index(arrays()["norm"].tobytes())):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(PackedFileError, match="is damaged"):
            read_packed(path, "key")


@pytest.mark.parametrize("keep", [0, 7, 15, 40, 4096, 4100])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "weights.packed"
    write_packed(path, "key", arrays(), {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PackedFileError):
        read_packed(path, "key")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"start":0', b'"start":9'),
        (b'"|u1"', b'"|i1"'),
        (b'"shape":[1001]', b'"shape":[9001]'),
        (b'"arrays"', b'"arrayz"'),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "weights.packed"
    write_packed(path, "key", arrays(), {})
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new, 1))
    with pytest.raises(PackedFileError):
        read_packed(path, "key")
