"""The compiled CPU kernels (`engines/ops/csrc`): found, checked, and declared for ctypes. Calls release the GIL.

Facet runs its torch kernels without them, and no model uses them yet. `python -m engines.ops.native build` compiles
in place. A library is used only if its ABI number and the sizes of its structures are the ones declared here, and if
the processor has what it was compiled for. Knows nothing of models.

Read next: `engines/ops/csrc/facet_native.h`, `engines/ops/group_linear.py`, `engines/ops/decoder.py`.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ABI = 2
HERE = Path(__file__).parent
SOURCES = HERE / "csrc"
LIBRARY_PATTERN = "_native*.so"
# What pyproject.toml passes too; `-ffp-contract=off` keeps products and sums as written, so that every bit has one law.
COMPILE_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-pthread",
    "-fno-math-errno",
    "-ffp-contract=off",
)


class NativeUnavailableError(RuntimeError):
    """The kernels cannot run here; the message says why and what would help."""


class Matrix(ctypes.Structure):
    """facet_matrix."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("panel_bytes", ctypes.c_int64),
        ("num_outputs", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("code_bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("scale_bytes", ctypes.c_int32),
        ("has_min", ctypes.c_int32),
        ("zero", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    )


class Layer(ctypes.Structure):
    """facet_layer."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
    )


class Model(ctypes.Structure):
    """facet_model."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("embedding", Matrix),
        ("head", Matrix),
        *((name, ctypes.c_void_p) for name in ("norm", "cos", "sin")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "num_layers",
                "hidden_size",
                "intermediate_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "vocab_size",
                "max_positions",
            )
        ),
        ("rms_norm_eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
    )


class Batch(ctypes.Structure):
    """facet_batch."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "token_ids",
                "positions",
                "slot_mapping",
                "query_start",
                "context_lens",
                "block_tables",
                "logits_rows",
                "k",
                "v",
                "k_scales",
                "v_scales",
                "logits",
            )
        ),
        ("num_blocks", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in (
                "num_tokens",
                "num_sequences",
                "table_width",
                "num_logits_rows",
                "block_size",
                "kv_format",
            )
        ),
    )


STATUS = {1: "no memory", 2: "the model's numbers are ones the kernels do not take", 3: "the batch contradicts itself"}


def open_library(folder: Path = HERE) -> ctypes.CDLL:
    """The library in `folder`, checked and declared. Raises NativeUnavailableError."""
    found = sorted(folder.glob(LIBRARY_PATTERN), key=lambda path: path.stat().st_mtime, reverse=True)
    if not found:
        raise NativeUnavailableError(
            f"no {LIBRARY_PATTERN} in {folder}: it is built at install where there is a C compiler for x86-64"
            " (in a working tree: python -m engines.ops.native build)"
        )
    try:
        library = ctypes.CDLL(str(found[0]))
        library.facet_cpu_supported.restype = ctypes.c_int32
        sizes = (ctypes.c_int64 * 4)()
        supported, abi = bool(library.facet_cpu_supported()), int(library.facet_abi(sizes))
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"{found[0].name} cannot be loaded: {error}") from error
    if not supported:
        raise NativeUnavailableError("this processor lacks AVX2, FMA or F16C")
    ours = [ctypes.sizeof(kind) for kind in (Matrix, Layer, Model, Batch)]
    if abi != ABI or list(sizes) != ours:
        raise NativeUnavailableError(
            f"{found[0].name} has ABI {abi} and structures of {list(sizes)} bytes, not {ABI} and {ours}: build it anew"
        )
    return _declared(library)


def why_not(folder: Path = HERE) -> str:
    """Why the kernels cannot run here; empty if they can."""
    try:
        open_library(folder)
    except NativeUnavailableError as error:
        return str(error)
    return ""


def available(folder: Path = HERE) -> bool:
    """Whether the kernels can run here."""
    return not why_not(folder)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    signatures: dict[str, tuple[type | None, tuple[type, ...]]] = {
        "facet_pool_new": (pointer, (ctypes.c_int32,)),
        "facet_pool_free": (None, (pointer,)),
        "facet_linear": (ctypes.c_int32, (pointer, ctypes.POINTER(Matrix), pointer, ctypes.c_int64, pointer)),
        "facet_kv_store": (ctypes.c_int32, (ctypes.c_int32, pointer, ctypes.c_int64, ctypes.c_int32, pointer, pointer)),
        "facet_kv_load": (ctypes.c_int32, (ctypes.c_int32, pointer, pointer, ctypes.c_int64, ctypes.c_int32, pointer)),
        "facet_decoder_new": (pointer, (ctypes.POINTER(Model), ctypes.c_int32)),
        "facet_decoder_free": (None, (pointer,)),
        "facet_decoder_forward": (ctypes.c_int32, (pointer, ctypes.POINTER(Batch))),
        "facet_decoder_scratch_bytes": (ctypes.c_int64, (pointer,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Pool:
    """A pool of threads in the library: `num_threads` with the caller's. Threads start when first needed."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        """Raises MemoryError."""
        self._library = library
        self.handle = library.facet_pool_new(num_threads)
        if not self.handle:
            raise MemoryError("no memory for a thread pool")

    def __del__(self) -> None:
        """Ends the threads. Nothing else may use the pool then."""
        if getattr(self, "handle", None):
            self._library.facet_pool_free(self.handle)


def build(folder: Path = HERE, compiler: str = "cc", extra_flags: tuple[str, ...] = ()) -> Path:
    """Compile the library into `folder`. Raises NativeUnavailableError with the compiler's words if it cannot."""
    program = shutil.which(compiler)
    if program is None:
        raise NativeUnavailableError(f"there is no C compiler named {compiler}")
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    target = folder / "_native.so"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        command = [program, *COMPILE_FLAGS, "-fPIC", "-shared", *extra_flags, "-o", str(made), *sources, "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NativeUnavailableError(f"{compiler} failed:\n{done.stderr}")
        made.replace(target)
    return target


def main(arguments: list[str]) -> int:
    """`build`: compile in place. `check`: say whether the kernels can run."""
    parser = argparse.ArgumentParser(prog="python -m engines.ops.native", description=main.__doc__)
    parser.add_argument("command", choices=("build", "check"))
    parser.add_argument("--compiler", default="cc")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "build":
            print(build(compiler=chosen.compiler))
        open_library()
    except NativeUnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    print("the compiled kernels can run here")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
