"""From a model configuration to a model that runs: the number format is chosen here, the weights are packed or mapped.

Read next: `engines/models/llama.py`, `engines/models/packing.py`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engines.config import ModelConfig
from engines.models.base import CheckpointError, DecoderModel, EncoderModel
from engines.models.llama import LlamaModel
from engines.models.loader import open_checkpoint
from engines.models.packing import pack_llama


def load_model(config: ModelConfig) -> DecoderModel | EncoderModel:
    """Raises CheckpointError naming the file and what is wrong."""
    checkpoint = open_checkpoint(Path(config.path))
    if checkpoint.spec.task != "generate":
        raise CheckpointError(f"{config.path}: {checkpoint.spec.architecture} is not supported yet")
    dtype = "int8" if config.dtype == "auto" else config.dtype
    spec = msgspec.structs.replace(
        checkpoint.spec,
        name=config.name,
        dtype=dtype,
        digest=f"{checkpoint.spec.digest}-{dtype}",
        max_model_len=min(checkpoint.spec.max_model_len, config.max_model_len or checkpoint.spec.max_model_len),
    )
    return LlamaModel(spec, pack_llama(checkpoint, dtype))
