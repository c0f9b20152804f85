"""Compile the kernels ahead of time, without a GPU, and report what the compilers made of them.

python -m loco_fsdp_kernels.aot [--json] [ARCH]...
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loco_fsdp_kernels import launch
from loco_fsdp_kernels.compress_kernel import compress_kernel
from loco_fsdp_kernels.reduce_kernel import VALUE_TYPES, reduce_kernel

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
VECTOR_BITS = 64  # an access of this width moves several elements

_POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*i16", "int8": "*i8"}
_PTX_ACCESS = re.compile(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[bsuf](\d+)\b")
_AMDGCN_ACCESS = re.compile(
    r"^\s*(?:global|buffer)_(load|store)_(?:(dword)(?:x(\d))?|\w*?(byte|short)\w*)\b", re.MULTILINE
)


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel."""

    kernel: str
    """``compress`` or ``reduce``."""
    dtype: str
    """Of the gradient, or of the output."""
    bits: int = 4
    residual: str = "none"
    """Its storage; only of ``compress``."""
    static: bool = False
    extras: bool = False
    """With a loss scale and error figures; only of ``compress``."""
    aligned: bool = True
    block_size: int = 128
    world_size: int = 8
    """Rows that are summed; only of ``reduce``."""

    def __str__(self) -> str:
        """Short name, for the table."""
        words = [self.dtype, f"{self.bits} bits", f"block {self.block_size}"]
        is_compress = self.kernel == "compress"
        words += [f"residual {self.residual}" if is_compress else f"{self.world_size} rows"]
        flags = {"static": self.static, "scale+errors": self.extras, "unaligned": not self.aligned}
        return ", ".join(words + [name for name, on in flags.items() if on])


@dataclass(frozen=True)
class Row:
    """What came out for one variant on one architecture."""

    kernel: str
    variant: str
    arch: str
    aligned: bool
    registers: int
    """Per thread."""
    spills: int
    """NVIDIA: bytes of stack and local memory; AMD: spilled registers."""
    shared_bytes: int
    load_bits: str
    """Widths of the vector loads, e.g. ``128+64``."""
    narrow_loads: int
    """Loads of less than 64 bits in the text: steps and scalars, and data if not vectorised."""
    store_bits: str
    narrow_stores: int


def _variants() -> Iterator[Variant]:
    for residual in ("int8", "bfloat16", "float32", "none"):
        for dtype in ("float32", "bfloat16"):
            yield Variant("compress", dtype, residual=residual)
    yield Variant("compress", "float16", 8, "int8")
    yield Variant("compress", "float32", 8, "bfloat16", extras=True)
    yield Variant("compress", "bfloat16", 4, "int8", extras=True)
    yield Variant("compress", "bfloat16", 4, "int8", static=True)
    yield Variant("compress", "float32", 8, "float32", static=True, extras=True)
    yield Variant("compress", "float32", 4, "int8", aligned=False)
    yield Variant("compress", "bfloat16", 4, "int8", aligned=False, block_size=130)
    yield Variant("compress", "float32", 4, "int8", block_size=8192)
    yield Variant("compress", "bfloat16", 8, "int8", aligned=False, block_size=8190)
    for dtype in ("float32", "bfloat16", "float16"):
        yield Variant("reduce", dtype)
    yield Variant("reduce", "bfloat16", 8)
    yield Variant("reduce", "float32", world_size=2)
    yield Variant("reduce", "float32", aligned=False)


VARIANTS = tuple(_variants())


def report(archs: Iterable[str] = ARCHS) -> Iterator[Row]:
    """Compile every variant for every architecture; some 0.5 to 2 s each the first time.

    Raises ``RuntimeError`` in a process that interprets kernels.
    """
    if not isinstance(compress_kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set: unset it to compile kernels ahead of time.")
    for arch in archs:
        for variant in VARIANTS:
            yield _row(variant, arch, _compile(variant, arch))


def _compile(variant: Variant, arch: str) -> Any:
    shape = launch.launch_of(arch)
    tile_blocks = launch.tile_blocks(variant.block_size, shape)
    kernel, types, constants = (
        _compress_arguments(variant) if variant.kernel == "compress" else _reduce_arguments(variant)
    )
    constants |= {
        "BITS": variant.bits,
        "BLOCK": variant.block_size,
        "HALF_PADDED": launch.padded(variant.block_size) // 2,
        "TILE_BLOCKS": tile_blocks,
        "ALIGNED": variant.aligned,
    }
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers}
    options = {
        "num_warps": launch.num_warps(variant.block_size, tile_blocks, variant.aligned, shape),
        "enable_fp_fusion": False,
    }
    source = ASTSource(kernel, signature, constants, attributes)
    if arch.startswith("sm_"):
        target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    else:
        target = GPUTarget("hip", arch, 64)
    return triton.compile(source, target=target, options=options)


def _compress_arguments(variant: Variant) -> tuple[Any, dict[str, str], dict[str, Any]]:
    has_residual, is_int8 = variant.residual != "none", variant.residual == "int8"
    types = {
        "x": _POINTERS[variant.dtype],
        "segments": "*i64",
        "tiles": "*i32",
        "payload": "*u8",
        "residual": _POINTERS[variant.residual] if has_residual else None,
        "residual_steps": "*i16" if is_int8 and not variant.static else None,
        "nonfinite": "*i64",
        "errors": "*fp64" if variant.extras else None,
        "loss_scale": "*fp32" if variant.extras else None,
        "row_stride": "i32",
        "row_bytes": "i32",
        "tiles_per_row": "i32",
        "code_step": "fp32" if variant.static else None,
        "residual_step": "fp32" if is_int8 and variant.static else None,
        "gain": "fp32",
        "rest": "fp32",
    }
    constants = {name: None for name, kind in types.items() if kind is None}
    return compress_kernel, {k: v for k, v in types.items() if v is not None}, constants


def _reduce_arguments(variant: Variant) -> tuple[Any, dict[str, str], dict[str, Any]]:
    types = {
        "payload": "*u8",
        "segments": "*i64",
        "tiles": "*i32",
        "output": _POINTERS[variant.dtype],
        "row_bytes": "i32",
        "factor": "fp32",
    }
    (value_type,) = (v for k, v in VALUE_TYPES.items() if str(k) == f"torch.{variant.dtype}")
    return reduce_kernel, types, {"ROWS": variant.world_size, "VALUE_TYPE": value_type}


def _row(variant: Variant, arch: str, compiled: Any) -> Row:
    if arch.startswith("sm_"):
        registers, spills = _nvidia_registers(compiled.asm["cubin"])
        accesses = list(_ptx_accesses(compiled.asm["ptx"]))
    else:
        registers, spills = _amd_registers(compiled.asm["amdgcn"])
        accesses = list(_amdgcn_accesses(compiled.asm["amdgcn"]))
    widths: dict[str, str] = {}
    narrow: dict[str, int] = {}
    for kind in ("load", "store"):
        counts = Counter(bits for what, bits in accesses if what == kind)
        wide = sorted((bits for bits in counts if bits >= VECTOR_BITS), reverse=True)
        widths[kind] = "+".join(map(str, wide)) or "-"
        narrow[kind] = sum(count for bits, count in counts.items() if bits < VECTOR_BITS)
    return Row(
        variant.kernel,
        str(variant),
        arch,
        variant.aligned,
        registers,
        spills,
        compiled.metadata.shared,
        widths["load"],
        narrow["load"],
        widths["store"],
        narrow["store"],
    )


def _nvidia_registers(cubin: bytes) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def _amd_registers(text: str) -> tuple[int, int]:
    used = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s+(\d+)", text)}
    return used["vgpr_count"], used["vgpr_spill_count"] + used["sgpr_spill_count"]


def _ptx_accesses(text: str) -> Iterator[tuple[str, int]]:
    for kind, vector, bits in _PTX_ACCESS.findall(text):
        yield {"ld": "load", "st": "store"}[kind], int(vector or 1) * int(bits)


def _amdgcn_accesses(text: str) -> Iterator[tuple[str, int]]:
    for kind, dword, vector, small in _AMDGCN_ACCESS.findall(text):
        yield kind, 32 * int(vector or 1) if dword else {"byte": 8, "short": 16}[small]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archs", nargs="*", default=ARCHS, metavar="ARCH", help="default: all")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    if not options.json:
        print("\t".join(field.name for field in fields(Row)))
    for row in report(options.archs):
        line = json.dumps(asdict(row)) if options.json else "\t".join(map(str, astuple(row)))
        print(line, flush=True)


if __name__ == "__main__":
    main()
