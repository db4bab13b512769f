"""From a model configuration to a model that runs: the number format is chosen here, the weights are packed or mapped.

A further architecture is one more file beside `engines/models/llama.py` and one more line here. Knows nothing of
kernels or of what a model is used for.

"auto" takes the compiled kernels where they can run (`engines/models/llama_native.py` says why not), else int8 through
torch.

Read next: `engines/models/loader.py`, `engines/models/packing.py`, `engines/models/llama.py`,
`engines/models/llama_native.py`, `engines/models/encoder.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from engines.config import ModelConfig
from engines.models import llama_native
from engines.models.base import Checkpoint, CheckpointError, DecoderModel, EncoderModel
from engines.models.encoder import BertEncoder, read_pooling
from engines.models.llama import LlamaModel
from engines.models.packed_cache import load_or_pack
from engines.models.packing import PACKING_VERSION, pack_llama
from engines.models.positions import running_spec, weights_key
from engines.models.requantize import REQUANTIZED

log = logging.getLogger(__name__)


def load_model(config: ModelConfig) -> DecoderModel | EncoderModel:
    """Open, pack and build. Raises CheckpointError naming the file and what is wrong."""
    if config.dtype in ("auto", "native"):
        recorded = llama_native.load_recorded(config)
        if recorded is not None:
            return recorded
    # Only now: reading checkpoints imports libraries that a start from packed weights does without.
    from engines.models.loader import open_checkpoint

    checkpoint = open_checkpoint(Path(config.path))
    if checkpoint.spec.task == "embed":
        return _load_encoder(config, checkpoint)
    return _load_decoder(config, checkpoint)


def _load_decoder(config: ModelConfig, checkpoint: Checkpoint) -> DecoderModel:
    if config.dtype == "native" or config.dtype in REQUANTIZED:
        return llama_native.load(config, checkpoint)
    if config.dtype == "auto":
        reason = llama_native.why_not(config, checkpoint.spec)
        if not reason:
            return llama_native.load(config, checkpoint)
        log.info("%s runs in int8, for the compiled kernels cannot run: %s", config.name, reason)
    dtype = "float32" if config.dtype == "float32" else "int8"
    spec = running_spec(config, checkpoint.spec, dtype, str(PACKING_VERSION))
    # Exact weights are not cached: they would take several times the file and save two seconds.
    cache_dir = "" if dtype == "float32" else config.cache_dir
    key = weights_key(checkpoint.spec, dtype, str(PACKING_VERSION))
    return LlamaModel(spec, load_or_pack(cache_dir, key, lambda: pack_llama(checkpoint, dtype)))


def _load_encoder(config: ModelConfig, checkpoint: Checkpoint) -> EncoderModel:
    if config.dtype not in ("auto", "float32"):
        raise CheckpointError(f"{config.name}: dtype {config.dtype!r} is not for an encoder (auto and float32 are)")
    spec = running_spec(config, checkpoint.spec, "float32", str(PACKING_VERSION))
    return BertEncoder(spec, checkpoint, read_pooling(Path(config.path)))
