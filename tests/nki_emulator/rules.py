# SPDX-License-Identifier: Apache-2.0
"""The rules that a kernel must keep, where each is documented, and the error that names the line which breaks one."""

import dataclasses
import sys
from pathlib import Path
from typing import NoReturn

PACKAGE = Path(__file__).resolve().parent
ISA = "nki/api/nki/isa/__init__.py"
LANGUAGE = "nki/api/nki/language/__init__.py"
ARCH = "nki/guides/architecture/trainium_inferentia2_arch.rst"
ARCH2 = "nki/guides/architecture/trainium2_arch.rst"
GUIDE = "nki/get-started/nki-language-guide.rst"
PATTERNS = "nki/deep-dives/nki-aps.rst"
SHARED = "nki/api/nki.api.shared.rst"
MIGRATION = "nki/migration/index.rst"
DGE = "nki/deep-dives/nki-dge.rst"
LNC = "nki/get-started/about/lnc.rst"
LOOPS = f"{MIGRATION}, Rules for migrated loops"
EMULATOR = "the emulator's own limit"


@dataclasses.dataclass(frozen=True)
class Rule:
    """What must hold, and the document of github.com/aws-neuron/aws-neuron-sdk that says so."""

    text: str
    source: str


RULES = {
    # tiles
    "partitions": Rule("a tile on chip has 1 to 128 partitions", f"{ARCH}, Accessing SBUF/PSUM tensors"),
    "two-dimensions": Rule("a tile on chip has at least 2 dimensions, the partitions first", f"{LANGUAGE}, NkiTensor"),
    "start-partition": Rule(
        "an engine starts at partition 0 for more than 64 partitions, at 0 or 64 for 33 to 64, at 0, 32, 64 or 96 for up to 32",
        f"{ARCH}, Accessing SBUF/PSUM tensors",
    ),
    "partition-step": Rule("the partitions of an access are contiguous", f"{PATTERNS}, Restriction on SBUF/PSUM Tensors"),
    "free-dimensions": Rule(
        "an engine's pattern has at most 3 free dimensions (4 where the instruction says so), contiguous ones merged",
        f"{PATTERNS}, Hardware Capability",
    ),
    "stride": Rule(
        "an engine's stride in a free dimension is a 16-bit signed number of elements", f"{ARCH}, Accessing SBUF/PSUM tensors"
    ),
    "bounds": Rule("an access stays inside its tensor; on chip, inside its partition", f"{PATTERNS}, Semantics"),
    "ap-offset": Rule(
        ".ap with an explicit offset is for a tensor that starts at 0: the documents disagree whether a view's offset is added",
        f"{LANGUAGE}, NkiTensor.ap, against {PATTERNS}, Composition",
    ),
    "view": Rule("a view keeps to the constraints of its method", f"{LANGUAGE}, NkiTensor"),
    "index": Rule("an index is a compile-time integer, a slice or nl.ds", f"{LANGUAGE}, NkiTensor.__getitem__"),
    "uninitialised": Rule("every element that is read was written before", f"{GUIDE}, Creating Tensors"),
    "sbuf-capacity": Rule("live SBUF tiles fit the usable bytes of a partition", f"{ARCH2}, and nki-library's budget"),
    "psum-capacity": Rule(
        "live PSUM tiles fit 8 banks of 2 KiB; a tile starts a bank", f"{MIGRATION}, Improved allocation API"
    ),
    # dtypes
    "dtype": Rule("a dtype is one of nki.language's that exists on trn2", f"{SHARED}, Supported Data Types"),
    "dtype-trn2": Rule("engines of trn2 do not compute on float8_e4m3fn and float8_e8m0fnu", f"{ISA}, nc_matmul, Data types"),
    "dtype-operand": Rule("the operand has a dtype that the instruction accepts", ISA),
    "bitvec": Rule("bit operators take integer tiles of one width, without arithmetic ones", f"{SHARED}, Math Operators"),
    # operands
    "tile": Rule("the operand is a tile", ISA),
    "buffer": Rule("the operand is in a memory that the instruction can reach", ISA),
    "gpsimd-psum": Rule("GpSimd does not access PSUM", f"{ISA}, tensor_copy"),
    "both-psum": Rule("two input tiles are not both in PSUM", f"{ISA}, tensor_tensor"),
    "shape": Rule("operands agree in partitions and in elements per partition", ISA),
    "vector-operand": Rule("a vector operand is [partitions, 1]; scalars are compile-time numbers", f"{ISA}, tensor_scalar"),
    "engine": Rule("the engine can run the instruction", ISA),
    "operator": Rule("the operator is one that the instruction accepts on trn2", f"{SHARED}, Math Operators; {ISA}"),
    "argument": Rule("the argument has a value that the instruction accepts", ISA),
    "activation-range": Rule("the inputs of an activation are in its valid range", f"{SHARED}, Activation Functions"),
    "indirect": Rule("only DMA takes vector offsets, and one dynamic index per view", f"{PATTERNS}, Dynamic Access"),
    "indirect-bounds": Rule("dynamic indices are inside their dimension, or the mode is oob_mode.skip", f"{ISA}, dma_copy"),
    "scatter-unique": Rule("the indices of a scatter are unique", f"{ISA}, dma_compute"),
    "reduce-registers": Rule("reduce registers are reset before they are accumulated or read", f"{ISA}, activation"),
    # DMA
    "dma-psum": Rule("DMA moves between HBM and SBUF; PSUM goes through an engine", f"{MIGRATION}, dma_copy reading from PSUM"),
    "dge-mode": Rule(
        "the DGE mode fits the access: vector offsets need unknown or swdge", f"{DGE}, How .ap() affects DGE mode"
    ),
    # tensor engine
    "matmul-tile": Rule("K and M are at most 128, N at most 512", f"{ISA}, nc_matmul, Tile size"),
    "matmul-dtype": Rule("float32 pairs only with float32; dst is float32", f"{ISA}, nc_matmul, Data types"),
    "matmul-rows": Rule("stationary and moving are on the same partitions", f"{ARCH2}, a partition feeds its row of the array"),
    "psum-bank": Rule(
        "a matmul writes inside one PSUM bank of 2 KiB per partition", f"{ARCH}, PSUM; {ISA}, nc_matmul, Tile size"
    ),
    "psum-group": Rule(
        "accumulation starts with a matmul that overwrites; what memset, a copy or a transpose wrote counts as uninitialised",
        f"{ISA}, nc_matmul, Accumulation mode",
    ),
    "double-row": Rule("double_row takes fp8 tiles [K, 2, *] and no tiling", f"{ISA}, nc_matmul, Layout"),
    "transpose-tile": Rule(
        "transposes are up to 128x128 on the tensor engine, 32x32 on the vector engine", f"{ISA}, nc_transpose"
    ),
    # loops, registers, cores
    "register": Rule(
        "Python does not know a register's value: it is a loop bound or a scalar_offset", f"{ISA}, VirtualRegister"
    ),
    "loop-variable": Rule("the loop variable is read-only, the step a positive integer, the body returns nothing", LOOPS),
    "loop-scope": Rule("a tile allocated in a loop body is not used outside the loop", LOOPS),
    "loop-body": Rule("a loop body is compiled once: every iteration allocates and issues the same", LOOPS),
    "loop-accumulate": Rule("in a dynamic loop, accumulate onto an outer PSUM tile is True or False, never inferred", LOOPS),
    "no-reorder": Rule("dynamic loops do not stand inside nl.no_reorder", LOOPS),
    "trip-counts": Rule("both cores run the same control flow", f"{LNC}, Final Notes"),
    "barrier": Rule("both cores meet at the same barriers and exchanges", f"{ISA}, core_barrier"),
    "race": Rule("between the cores' conflicting accesses to a shared tensor there is a barrier on it", f"{ISA}, core_barrier"),
    "shared-allocation": Rule("both cores allocate the same shared tensors in the same order", LNC),
    "output": Rule("outputs are tensors in HBM, in shared HBM for two cores", f"{LNC}, Final Notes"),
    "unsupported": Rule("the emulator has the calls that this repository's kernels use", EMULATOR),
}


class RuleError(Exception):
    """A broken rule. ``rule`` is its key in RULES; the message has the kernel's line, instruction, operand and rule."""

    def __init__(self, rule: str, where: str, instruction: str, operand: str, found: str) -> None:
        text = f"{where}: {instruction}: {operand}: {found}\n  rule {rule}: {RULES[rule].text}\n  source: {RULES[rule].source}"
        super().__init__(text)
        self.rule, self.where, self.instruction, self.operand, self.found = rule, where, instruction, operand, found


def kernel_line() -> str:
    """``file:line`` of the innermost caller that is not the emulator."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_emulator(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_emulator(filename: str, known: dict[str, bool] = {}) -> bool:  # noqa: B006 - a cache by file name
    if filename not in known:
        path = Path(filename)
        known[filename] = PACKAGE in path.parents and not path.name.startswith("test_")
    return known[filename]


def fail(rule: str, operand: str, found: str) -> NoReturn:
    """Raise RuleError for the instruction that runs now."""
    from .machine import instruction_name

    raise RuleError(rule, kernel_line(), instruction_name(), operand, found)
