"""Open weights on disk: a .gguf file, or a folder with config.json and *.safetensors.

Headers are checked against the file's length before anything is mapped, so a lying header is a CheckpointError and
never a crash. No code of a checkpoint is run and nothing is unpickled. Knows nothing of number formats or models.

Read next: `engines/models/gguf_checkpoint.py`, `engines/models/safetensors_checkpoint.py`, then
`engines/models/registry.py`.
"""

from __future__ import annotations

from pathlib import Path

from engines.gguf_header import is_gguf
from engines.models.base import Checkpoint, CheckpointError
from engines.models.gguf_checkpoint import GGUFCheckpoint
from engines.models.safetensors_checkpoint import SafetensorsCheckpoint


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Map the weights at `path`. Raises CheckpointError, saying what is wrong and what would be right."""
    place = Path(path)
    if not place.exists():
        raise CheckpointError(f"{place} does not exist")
    if place.is_dir():
        return SafetensorsCheckpoint(place)
    if is_gguf(place):
        return GGUFCheckpoint(place)
    raise CheckpointError(
        f"{place.name} is neither a GGUF file nor a folder with config.json and *.safetensors"
        " (pickled .bin and .pt files are never opened)"
    )
