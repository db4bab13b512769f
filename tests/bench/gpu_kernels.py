"""Every Triton kernel on the CUDA device at hand: time, bytes a second over measured copy bandwidth, and sameness.

    python tests/bench/gpu_kernels.py [--repeat 50] [--only NAME]

prints one JSON object and exits 0; 1 if a check failed; 2 without a CUDA device. A kernel is captured into a CUDA graph
and replayed, the L2 flushed before each replay; times are medians. `share_of_copy` is its bytes a second (what it must
read and write, once) over those of a device-to-device copy. `checks` compare with the references and, to the bit, a row
alone with the same row in a batch, and attention split over programs with attention that is not.

`TRITON_INTERPRET=1 python tests/bench/gpu_kernels.py --rehearse` runs all of it on tiny shapes in the interpreter: no
number means anything then; it shows that the script runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton

from engines.ops.attention import AttentionInputs
from engines.ops.grammar_mask import words
from engines.ops.kv_write import LEVELS, LayerKV
from engines.ops.linear_w4a16 import W4Weight, reference_linear_w4a16
from engines.ops.lora import lora_plan
from engines.ops.paged_attention import reference_paged_attention
from engines.ops.philox import StreamKeys
from engines.ops.rmsnorm import reference_rms_norm
from engines.ops.triton.draw import triton_draw, triton_probabilities
from engines.ops.triton.grammar_mask import triton_grammar_mask
from engines.ops.triton.kv_write import triton_kv_write, triton_rope_kv_write
from engines.ops.triton.linear import triton_linear
from engines.ops.triton.linear_fp8 import triton_linear_fp8
from engines.ops.triton.linear_w4a16 import triton_linear_w4a16
from engines.ops.triton.linear_w8a8 import triton_linear_w8a8
from engines.ops.triton.log_softmax import triton_log_softmax
from engines.ops.triton.lora import triton_lora_expand, triton_lora_shrink
from engines.ops.triton.paged_attention import Cut, triton_paged_attention
from engines.ops.triton.rejection import triton_verify_sampled
from engines.ops.triton.rmsnorm import triton_add_rms_norm, triton_rms_norm, triton_rms_norm_int8
from engines.ops.triton.rope import triton_rope
from engines.ops.triton.row_quantize import triton_quantize_rows, triton_quantize_rows_fp8
from engines.ops.triton.silu_mul import triton_silu_mul
from engines.ops.triton.tiles import attention_tiles
from engines.ops.triton.truncation import triton_keep
from engines.ops.truncation import Truncation, reference_keep

FLUSH_BYTES = 256 << 20
COPY_BYTES = 2 << 30
GB = 1e9
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """A decoder's step; the defaults are near an 8B model's."""

    sequences: int = 64
    context: int = 4096
    prompt: int = 2048
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    inner: int = 14336
    vocab: int = 128256


TINY = Shape(sequences=2, context=20, prompt=3, heads=4, kv_heads=2, head_dim=32, hidden=64, inner=96, vocab=300)


@dataclass(frozen=True)
class Bench:
    """`run` launches one op on ready tensors; it reads and writes `num_bytes` and does `flops`."""

    name: str
    run: Callable[[], object]
    num_bytes: int
    flops: int = 0


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class Workload:
    """Tensors of one shape on one device, and the benches over them."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16

    def randn(self, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(sizes, device=self.device).to(dtype or self.dtype)

    def integers(self, high: int, *sizes: int) -> torch.Tensor:
        return torch.randint(high, sizes, device=self.device, dtype=torch.int32)

    def layer(self, dtype: torch.dtype, contexts: int) -> LayerKV:
        """Blocks for `contexts` sequences."""
        shape, blocks = self.shape, contexts * -(-self.shape.context // BLOCK_SIZE)
        sizes = (blocks, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
        if dtype not in LEVELS:
            return LayerKV(self.randn(*sizes, dtype=dtype), self.randn(*sizes, dtype=dtype))
        scales = [torch.rand(sizes[:3], device=self.device) / LEVELS[dtype] for _ in range(2)]
        k, v = ((LEVELS[dtype] / 4 * self.randn(*sizes, dtype=torch.float32)).to(dtype) for _ in range(2))
        return LayerKV(k, v, scales[0], scales[1])

    def inputs(self, sequences: int, rows: int) -> AttentionInputs:
        """Each sequence has `context` keys, the last `rows` of them new, in blocks shuffled over the pool."""
        blocks = -(-self.shape.context // BLOCK_SIZE)
        tables = torch.randperm(sequences * blocks, device=self.device).int().view(sequences, blocks)
        position = torch.arange(self.shape.context - rows, self.shape.context, device=self.device)
        slots = tables[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        return AttentionInputs(
            torch.arange(0, (sequences + 1) * rows, rows, device=self.device, dtype=torch.int32),
            torch.full((sequences,), self.shape.context, device=self.device, dtype=torch.int32),
            tables,
            slots.flatten().int(),
        )

    def splits(self) -> int:
        tiles = attention_tiles(self.shape.heads // self.shape.kv_heads, self.shape.head_dim, self.dtype)
        return -(-self.shape.context // tiles.segment_keys)

    def attention(self) -> list[Bench]:
        shape, benches = self.shape, []
        for cache in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            kv, inputs = self.layer(cache, shape.sequences), self.inputs(shape.sequences, 1)
            q = self.randn(shape.sequences, shape.heads, shape.head_dim)
            moved = nbytes(kv.k, kv.v, q, q, *(scale for scale in (kv.k_scale, kv.v_scale) if scale is not None))
            run = partial(triton_paged_attention, q, kv, inputs, cut=Cut(self.splits()))
            benches.append(Bench(f"attention-decode-{str(cache)[6:]}", run, moved))
        prompt, kv = Workload(Shape(**{**vars(shape), "context": shape.prompt}), self.device), self.layer(self.dtype, 1)
        q = self.randn(shape.prompt, shape.heads, shape.head_dim)
        run = partial(triton_paged_attention, q, kv, prompt.inputs(1, shape.prompt))
        flops = 2 * shape.prompt**2 * shape.heads * shape.head_dim  # two products over the lower triangle
        moved = 2 * q.nbytes + 2 * shape.prompt * shape.kv_heads * shape.head_dim * 2
        return [*benches, Bench("attention-prompt-bfloat16", run, moved, flops)]

    def cache_writes(self) -> list[Bench]:
        shape, benches, tokens = self.shape, [], self.shape.prompt
        k, v = (self.randn(tokens, shape.kv_heads, shape.head_dim) for _ in range(2))
        q = self.randn(tokens, shape.heads, shape.head_dim)
        cos, sin = (self.randn(tokens, shape.head_dim, dtype=torch.float32) for _ in range(2))
        slots = torch.arange(tokens, device=self.device, dtype=torch.int32)
        for cache in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            kv = self.layer(cache, -(-tokens // shape.context))
            written = 2 * k.numel() * cache.itemsize
            name = str(cache)[6:]
            benches += [
                Bench(f"kv-write-{name}", partial(triton_kv_write, k, v, kv, slots), nbytes(k, v) + written),
                Bench(
                    f"rope-kv-write-{name}",
                    partial(triton_rope_kv_write, q, k, v, cos, sin, kv, slots),
                    nbytes(q, q, k, v, cos, sin) + written,
                ),
            ]
        return [*benches, Bench("rope", partial(triton_rope, q, cos, sin), nbytes(q, q, cos, sin))]

    def rows(self) -> list[Bench]:
        shape, x = self.shape, self.randn(self.shape.prompt, self.shape.hidden)
        weight, gates = self.randn(shape.hidden), self.randn(shape.prompt, 2 * shape.inner)
        return [
            Bench("rms-norm", partial(triton_rms_norm, x, weight, 1e-5), 2 * x.nbytes),
            Bench("add-rms-norm", partial(triton_add_rms_norm, x, x, weight, 1e-5), 4 * x.nbytes),
            Bench("rms-norm-int8", partial(triton_rms_norm_int8, x, x, weight, 1e-5), 3 * x.nbytes + x.numel()),
            Bench("quantize-rows-int8", partial(triton_quantize_rows, x), x.nbytes + x.numel()),
            Bench("quantize-rows-fp8", partial(triton_quantize_rows_fp8, x), x.nbytes + x.numel()),
            Bench("silu-mul", partial(triton_silu_mul, gates), gates.nbytes * 3 // 2),
        ]

    def sampling(self) -> list[Bench]:
        shape, rows = self.shape, self.shape.sequences
        logits = 3 * self.randn(rows, shape.vocab, dtype=torch.float32)
        ones = torch.ones(rows, device=self.device)
        params = Truncation(ones, torch.full_like(ones, 50, dtype=torch.int32), 0.9 * ones, 0.02 * ones)
        keys = StreamKeys(self.integers(1 << 30, rows).long(), self.integers(1, rows), self.integers(1000, rows))
        kept = triton_keep(logits, params)
        p, mask = triton_probabilities(logits, params, kept), self.integers(1 << 30, rows, words(shape.vocab))
        drafts, starts = self.integers(shape.vocab, rows // 2), torch.arange(rows // 2 + 1, device=self.device).int()
        q = p[: rows // 2].clone()
        half = StreamKeys(keys.seeds[: rows // 2], keys.choices[: rows // 2], keys.positions[: rows // 2])
        verify = partial(triton_verify_sampled, drafts, starts, p[: 2 * (rows // 2)], q, half, 1)
        return [
            Bench("grammar-mask", partial(triton_grammar_mask, logits.clone(), mask), mask.nbytes + logits.nbytes),
            Bench("keep-top-k-p-min-p", partial(triton_keep, logits, params), logits.nbytes),
            Bench("draw", partial(triton_draw, logits, params, kept, keys), logits.nbytes),
            Bench("probabilities", partial(triton_probabilities, logits, params, kept), 2 * logits.nbytes),
            Bench("log-softmax", partial(triton_log_softmax, logits), 2 * logits.nbytes),
            Bench("verify-sampled", verify, nbytes(p, q)),
        ]

    def linears(self) -> list[Bench]:
        shape, benches = self.shape, []
        depth, outputs, group = shape.hidden, shape.inner, 32
        weight = self.randn(outputs, depth)
        bytes8 = self.integers(127, outputs, depth).to(torch.int8)
        fp8 = weight.to(torch.float8_e4m3fn)
        packed = self.integers(255, outputs, depth // 2).to(torch.uint8)
        w4 = W4Weight(packed, *(self.randn(outputs, depth // group, dtype=torch.float16) for _ in range(2)))
        ones = torch.ones(max(outputs, shape.prompt), device=self.device)
        for rows in (1, shape.sequences, shape.prompt):
            x, flops = self.randn(rows, depth), 2 * rows * depth * outputs
            x8, xf = x.to(torch.int8), x.to(torch.float8_e4m3fn)
            out = rows * outputs * 2
            scales, columns = ones[:rows], ones[:outputs]
            benches += [
                Bench(f"linear-bf16-{rows}", partial(triton_linear, x, weight), nbytes(x, weight) + out, flops),
                Bench(
                    f"linear-bf16-native-{rows}",
                    partial(triton_linear, x, weight, native_bf16=True),
                    nbytes(x, weight) + out,
                    flops,
                ),
                Bench(
                    f"linear-w8a8-{rows}",
                    partial(triton_linear_w8a8, x8, scales, bytes8, columns, None, self.dtype),
                    nbytes(x8, bytes8) + out,
                    flops,
                ),
                Bench(
                    f"linear-fp8-{rows}",
                    partial(triton_linear_fp8, xf, scales, fp8, columns, None, self.dtype),
                    nbytes(xf, fp8) + out,
                    flops,
                ),
                Bench(
                    f"linear-w4a16-{rows}",
                    partial(triton_linear_w4a16, x, w4),
                    nbytes(x, packed, w4.d, w4.m) + out,
                    flops,
                ),
            ]
        return benches if self.device == "cuda" else [b for b in benches if "native" not in b.name]

    def adapters(self) -> list[Bench]:
        shape, count, rank = self.shape, 8, 16
        x, plan = self.randn(shape.sequences, shape.hidden), lora_plan(self.integers(count, shape.sequences), count)
        a, b = self.randn(count, rank, shape.hidden), self.randn(count, shape.inner, rank)
        scales, out = torch.ones(count, device=self.device), self.randn(shape.sequences, shape.inner)
        hidden = torch.zeros(shape.sequences, rank, device=self.device)
        return [
            Bench("lora-shrink", partial(triton_lora_shrink, x, a, scales, plan), nbytes(x, a, hidden)),
            Bench("lora-expand", partial(triton_lora_expand, hidden, b, plan, out), nbytes(hidden, b, out, out)),
        ]

    def benches(self) -> list[Bench]:
        return [
            *self.attention(),
            *self.cache_writes(),
            *self.rows(),
            *self.sampling(),
            *self.linears(),
            *self.adapters(),
        ]

    def checks(self) -> list[dict[str, object]]:
        """On the device itself: near the reference, and the same bits alone, in a batch, split and whole."""
        shape, rows = self.shape, min(4, self.shape.sequences)
        kv, inputs = self.layer(self.dtype, rows), self.inputs(rows, 1)
        q = self.randn(rows, shape.heads, shape.head_dim)
        whole = triton_paged_attention(q, kv, inputs)
        split = triton_paged_attention(q, kv, inputs, cut=Cut(self.splits()))
        one = AttentionInputs(
            inputs.query_start[:2], inputs.context_lens[:1], inputs.block_tables[:1], inputs.slot_mapping[:1]
        )
        alone = triton_paged_attention(q[:1], kv, one)
        on_host = AttentionInputs(*(getattr(inputs, name).cpu() for name in AttentionInputs.__slots__))
        expected = reference_paged_attention(q.cpu(), LayerKV(kv.k.cpu(), kv.v.cpu()), on_host)
        x, weight = self.randn(64, shape.hidden), self.randn(shape.inner, shape.hidden)
        dense = triton_linear(x, weight)
        norm = triton_rms_norm(x, weight[0], 1e-5)
        codes = self.integers(255, 256, shape.hidden // 2).to(torch.uint8)
        w4 = W4Weight(codes, *(self.randn(256, shape.hidden // 32, dtype=torch.float16) for _ in range(2)))
        w4_host = W4Weight(w4.packed.cpu(), w4.d.cpu(), w4.m.cpu())
        logits = 3 * self.randn(8, shape.vocab, dtype=torch.float32)
        settings = Truncation(
            *(
                t.to(self.device)
                for t in (torch.ones(8), torch.full((8,), 40).int(), torch.full((8,), 0.9), torch.zeros(8))
            )
        )
        kept = triton_keep(logits, settings)
        settings_host = Truncation(*(getattr(settings, name).cpu() for name in Truncation.__slots__))
        kept_host = reference_keep(logits.cpu(), settings_host)
        return [
            near("attention = reference", whole, expected, 2e-2),
            same("attention split = whole", split, whole),
            same("attention alone = in a batch", alone, whole[:1]),
            near("linear = reference", dense, (x.cpu().double() @ weight.cpu().double().t()).to(self.dtype), 2e-2),
            same("linear of 1 row = of 64", triton_linear(x[:1], weight), dense[:1]),
            same("linear of 33 rows = of 64", triton_linear(x[:33], weight), dense[:33]),
            near(
                "linear, native bf16 = widened",
                triton_linear(x, weight, native_bf16=self.device == "cuda"),
                dense,
                2e-2,
            ),
            near(
                "linear w4a16 = reference", triton_linear_w4a16(x, w4), reference_linear_w4a16(x.cpu(), w4_host), 2e-2
            ),
            near(
                "rms norm = reference", norm, reference_rms_norm(x.cpu().float(), weight[0].cpu().float(), 1e-5), 2e-2
            ),
            same("rms norm alone = in a batch", triton_rms_norm(x[5:6], weight[0], 1e-5), norm[5:6]),
            near("kept mass = reference", kept.mass, kept_host.mass, 1e-4),
        ]


def near(name: str, found: torch.Tensor, wanted: torch.Tensor, allowed: float) -> dict[str, object]:
    found, wanted = found.cpu().double(), wanted.cpu().double()
    error = float((found - wanted).abs().max() / wanted.abs().max())
    return {"check": name, "error": error, "allowed": allowed, "ok": error <= allowed}


def same(name: str, found: torch.Tensor, wanted: torch.Tensor) -> dict[str, object]:
    return {"check": name, "ok": torch.equal(found, wanted)}


class Timer:
    """Median seconds of one replay on a CUDA device; of one call in a rehearsal."""

    def __init__(self, device: str, repeat: int) -> None:
        self._device, self._repeat = device, repeat
        self._flush = torch.empty(FLUSH_BYTES if device == "cuda" else 1, dtype=torch.int8, device=device)

    def median_s(self, run: Callable[[], object]) -> float:
        started = time.perf_counter()
        run()  # compiles
        if self._device != "cuda":
            return time.perf_counter() - started
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(self._repeat):
            self._flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)


def copy_bytes_per_s(timer: Timer, device: str) -> float:
    size = COPY_BYTES if device == "cuda" else 1 << 20
    source = torch.empty(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timer.median_s(lambda: target.copy_(source))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("no CUDA device here: nothing measured", file=sys.stderr)
        return 2
    device, shape = ("cpu", TINY) if arguments.rehearse else ("cuda", Shape())
    torch.manual_seed(0)
    timer, workload = Timer(device, arguments.repeat), Workload(shape, device)
    copied = copy_bytes_per_s(timer, device)
    kernels = []
    for bench in workload.benches():
        if arguments.only in bench.name:
            seconds = timer.median_s(bench.run)
            rate = bench.num_bytes / seconds
            kernels.append(
                {
                    "kernel": bench.name,
                    "median_us": seconds * 1e6,
                    "gb_per_s": rate / GB,
                    "share_of_copy": rate / copied,
                    "tflops": bench.flops / seconds / 1e12,
                }
            )
    checks = workload.checks()
    report = {
        "rehearsal": arguments.rehearse,
        "device": torch.cuda.get_device_name() if device == "cuda" else "interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shape": vars(shape),
        "copy_gb_per_s": copied / GB,
        "kernels": kernels,
        "checks": checks,
    }
    print(json.dumps(report, indent=1))
    return 0 if arguments.rehearse or all(check["ok"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
