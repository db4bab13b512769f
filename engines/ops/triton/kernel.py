"""What every kernel file shares: how a kernel is declared and launched, and the few rules that keep its bits stable.

- `jit` is `triton.jit` with a type. What changes from batch to batch is a parameter of its own with a name in
  BATCH_SIZES. It is never specialised: one binary serves every batch, so a batch's size cannot change a row's bits.
  (Inside a tuple Triton would specialise it: a batch of 1 or of 16 rows would run another binary.)
- The rest comes as NamedTuples: `tensors` (pointers; None where an option is off), and what the model fixes, `strides`
  (may be specialised) and `config` (is compiled in).
- `launch_options` turns floating-point contraction off. Two kernels that share a device function then round alike,
  whatever the compiler makes of the code around it, and the interpreter's arithmetic is the same as the device's but
  for exp, log and the order of sums.

Two facts about Triton's interpreter, on which the kernels are tested without a GPU, shape the code: arithmetic on
bfloat16 is silently wrong there, so kernels widen to float32 at load (`upcast`); float32 -> bfloat16 truncates, so a
bfloat16 result may differ from a reference by one unit in the last place.

Knows nothing of any op. Read next: `engines/ops/triton/numeric.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

BATCH_SIZES = ("num_rows", "num_sequences", "num_splits", "table_stride", "tree_width", "width")
# Without a device (the interpreter) a persistent kernel runs this many programs.
PROGRAMS_WITHOUT_DEVICE = 4


def jit(function: Callable[..., Any]) -> Any:
    """Declare a kernel or a device function."""
    return triton.jit(function, do_not_specialize=BATCH_SIZES)


def launch_options(num_warps: int, num_stages: int = 2) -> dict[str, Any]:
    """Keyword arguments of a launch: warps a program, stages of software pipelining, no contraction to fma."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


def ceil_div(value: int, divisor: int) -> int:
    """The least n with n * divisor >= value."""
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    """The least power of two >= value, at least 1."""
    return 1 << max(0, value - 1).bit_length()


def row_warps(block: int) -> int:
    """Warps of a program that holds `block` elements: about 8 elements a thread, 1 to 16 warps."""
    return min(16, max(1, next_power_of_2(block // 256)))


def num_multiprocessors(device: torch.device) -> int:
    """How many programs a persistent kernel starts on `device`."""
    if device.type != "cuda":
        return PROGRAMS_WITHOUT_DEVICE
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A float8_e4m3fn tensor as its bytes (uint8, no copy); any other tensor as it is.

    Kernels decode e4m3 themselves: sm_80 has no such type, and one path for all chips is one path to test.
    """
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def assert_rows(*tensors: torch.Tensor | None) -> None:
    """Our own mistake if a tensor's last dimension is not contiguous: kernels take strides of the others only."""
    for tensor in tensors:
        assert tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1, tensor.stride()
