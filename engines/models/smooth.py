"""SmoothQuant for float weights: large activation columns are divided down, what reads them is multiplied up.

    s[k] = max|X[k]|^a / max|W[:, k]|^(1 - a), a = 0.5, scaled to a geometric mean of 1 over the columns

where X is what a projection reads while the exact model reads the calibration text. Two places of a decoder layer can
be scaled at no cost: what a norm writes (its weight is divided by s; query, key and value, or gate and up, read it) and
what the gated activation writes (rows of up are divided by s; down reads it). The function is the same, up to rounding.
The calibration text is a constant of this file, so that the same checkpoint gives the same weights everywhere.

Source: Xiao et al., 2022, https://arxiv.org/abs/2211.10438. Read next: `engines/models/requantize.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from engines.layers.forward_batch import ForwardBatch
from engines.models.base import Checkpoint, CheckpointError
from engines.models.llama import LlamaModel
from engines.models.packing import pack_llama
from engines.ops.dispatch import CPU
from engines.ops.kv_cache import allocate_kv_cache
from engines.text.errors import TextError
from engines.text.model import load_text

ALPHA = 0.5
BLOCK_SIZE = 16
SMALLEST = 1e-5
MOST_TOKENS = 1024
CALIBRATION_TEXT = """\
The lighthouse keeper wrote one line a day, and on most days the line was about the weather. On the fourth of March 1871
he wrote: "Wind NW, force 7; two barques seen, neither signalled." His daughter kept the books: 14 lamps of oil at 3s,
a new pane for the east window, and flour, which had doubled in price since autumn.

Question: A train leaves at 09:40 and travels 126 km at 84 km/h. When does it arrive? Answer: 126 / 84 = 1.5 hours, so
it arrives at 11:10. Check: 84 * 1.5 = 126.

def merge(left: list[int], right: list[int]) -> list[int]:
    result, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i]); i += 1
        else:
            result.append(right[j]); j += 1
    return result + left[i:] + right[j:]

Photosynthesis turns light into chemical energy: chlorophyll absorbs red and blue light, water is split, oxygen leaves,
and carbon dioxide is fixed into sugars in the Calvin cycle. Leaves look green because green light is mostly reflected.

{"order": 10482, "customer": {"name": "Ana Ruiz", "city": "Sevilla"}, "lines": [{"sku": "B-77", "qty": 3, "price": 4.5},
{"sku": "K-02", "qty": 1, "price": 119.0}], "paid": true, "note": null}

"You never told me," she said. He shrugged. "You never asked." Outside, the rain had stopped, but neither of them moved
to open the window; the room smelled of wet coats, oranges and the varnish of the old piano.

Dear Sir or Madam, please find enclosed the invoice for last month's repairs. Payment is due within thirty days. Should
you have any questions, write to billing@example.com or call us between 9 a.m. and 5 p.m. on working days.

How to make flatbread: 1. Mix 300 g of flour, 180 ml of warm water, a teaspoon of salt and two spoons of oil. 2. Knead
for eight minutes and let it rest for half an hour. 3. Divide into six pieces and roll them thin. 4. Bake in a dry, very
hot pan until brown spots appear, about one minute a side.

SELECT c.name, COUNT(*) AS orders, SUM(o.total) FROM customers c JOIN orders o ON o.customer_id = c.id
WHERE o.created_at >= '2024-01-01' GROUP BY c.name HAVING COUNT(*) > 5 ORDER BY orders DESC LIMIT 20;

The treaty of 1648 ended a war that had outlived most of those who began it. Historians still argue about its causes:
religion, the ambitions of dynasties, grain prices, or simply that armies, once raised, had to be fed from somebody's
fields. What nobody disputes is the cost; whole districts had lost a third of their people.

El tren sale a las ocho. Der Zug kommt um neun an. Le café est fermé le lundi. 今日は雨が降っています。

user: Is it safe to run with a mild cold? assistant: Usually yes, if the symptoms stay above the neck (a runny nose, a
sore throat) and you have no fever. Slow down, drink enough, and stop if you feel dizzy.
"""
CALIBRATION_DIGEST = hashlib.sha256(f"{ALPHA}|{MOST_TOKENS}|{CALIBRATION_TEXT}".encode()).hexdigest()[:8]
NORM_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


class SmoothedWeights:
    """A checkpoint's tensors with the scales folded in."""

    def __init__(self, checkpoint: Checkpoint, path: str) -> None:
        """Runs the exact model over the calibration text once. Raises CheckpointError if there is no tokenizer."""
        self._checkpoint = checkpoint
        self._rows: dict[str, torch.Tensor] = {}  # divides each output of a tensor
        self._columns: dict[str, torch.Tensor] = {}  # multiplies each input of a matrix
        largest = activation_maxima(checkpoint, calibration_ids(path))
        for layer in range(checkpoint.spec.num_layers):
            at = f"model.layers.{layer}"
            for norm, readers in NORM_READERS.items():
                names = [f"{at}.{reader}.weight" for reader in readers]
                scales = self._scales(largest[f"{at}.{norm}"], names)
                self._rows[f"{at}.{norm}.weight"] = scales
                self._columns |= dict.fromkeys(names, scales)
            down = f"{at}.mlp.down_proj.weight"
            scales = self._scales(largest[f"{at}.mlp"], [down])
            self._columns[down] = scales
            for part in ("weight", "bias"):
                self._rows[f"{at}.mlp.up_proj.{part}"] = scales

    def float32(self, name: str) -> torch.Tensor:
        """The tensor as it is packed, in the caller's own memory."""
        tensor = self._checkpoint.float32(name)
        if name in self._columns:
            tensor *= self._columns[name]
        if name in self._rows:
            tensor /= self._rows[name] if tensor.dim() == 1 else self._rows[name][:, None]
        return tensor

    def _scales(self, largest: torch.Tensor, readers: list[str]) -> torch.Tensor:
        weights = torch.stack([self._checkpoint.float32(name).abs().amax(dim=0) for name in readers]).amax(dim=0)
        scales = largest.clamp(min=SMALLEST) ** ALPHA / weights.clamp(min=SMALLEST) ** (1 - ALPHA)
        return scales / scales.log().mean().exp()


def calibration_ids(path: str) -> list[int]:
    """Tokens of the calibration text. Raises CheckpointError."""
    try:
        return load_text(Path(path)).tokenizer.encode(CALIBRATION_TEXT, specials=False)[:MOST_TOKENS]
    except (TextError, OSError) as error:
        raise CheckpointError(f"w8a8 is calibrated on text, which needs the checkpoint's tokenizer: {error}") from error


def activation_maxima(checkpoint: Checkpoint, token_ids: list[int]) -> dict[str, torch.Tensor]:
    """Largest magnitude of each column: by "model.layers.i.<norm>" [hidden] and "model.layers.i.mlp" [intermediate]."""
    spec = checkpoint.spec
    recorder = _Recorder(_names(spec.num_layers))
    ops = replace(CPU, rms_norm=recorder.rms_norm, silu_mul=recorder.silu_mul)
    model = LlamaModel(spec, pack_llama(checkpoint, "float32"), ops)
    ids = token_ids[: spec.max_model_len]
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    kv = allocate_kv_cache(spec.num_layers, num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    places = torch.arange(len(ids), dtype=torch.int32)
    model.forward(
        ForwardBatch(
            token_ids=torch.tensor(ids),
            positions=places,
            slot_mapping=places,
            query_start=torch.tensor([0, len(ids)], dtype=torch.int32),
            context_lens=torch.tensor([len(ids)], dtype=torch.int32),
            block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
            logits_rows=torch.tensor([len(ids) - 1]),
        ),
        kv,
    )
    return recorder.largest


def _names(num_layers: int) -> Iterator[str]:
    """In the order a decoder computes them."""
    for layer in range(num_layers):
        yield from (f"model.layers.{layer}.{part}" for part in (*NORM_READERS, "mlp"))
    yield "model.norm"


class _Recorder:
    """Ops that note what they give."""

    def __init__(self, names: Iterator[str]) -> None:
        self._names = names
        self.largest: dict[str, torch.Tensor] = {}

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._noted(CPU.rms_norm(x, weight, eps))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._noted(CPU.silu_mul(gate_up))

    def _noted(self, y: torch.Tensor) -> torch.Tensor:
        self.largest[next(self._names)] = y.abs().amax(dim=0)
        return y
