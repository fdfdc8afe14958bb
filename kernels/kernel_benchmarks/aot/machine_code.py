"""Counts of the innermost loop of a kernel, from the text of its machine code (`cuobjdump -sass`).

Pure functions over text: nothing is compiled or run. The instruction names are Hopper's (sm_90); an unknown name counts
only as an issued instruction.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;", re.MULTILINE)
TARGET = re.compile(r"0x([0-9a-f]+)$")
PRODUCT = re.compile(r"^(HGMMA|QGMMA)\.(\d+)x(\d+)x(\d+)\.")
WARP_PRODUCT = re.compile(r"^(HMMA|QMMA|IMMA)\.(\d{4,5})\.")
WARP_PRODUCT_FLOPS = {"1688": 2 * 16 * 8 * 8, "16816": 2 * 16 * 8 * 16, "16832": 2 * 16 * 8 * 32}
WARPS_OF_GROUP = 4
"""Warps that issue one warp-group instruction together."""
LANES = 32
WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
"""Bytes per lane by suffix; without a suffix, 4."""
MATRIX_BYTES = 128
"""Bytes of one 8 x 8 matrix of 16-bit values, as moved by LDSM and STSM."""
HALF_RATE = frozenset({
    "IADD3", "VIADD", "LOP3", "SHF", "LEA", "ISETP", "FSETP", "SEL", "FSEL", "FMNMX", "PRMT", "VIMNMX", "IMNMX", "CSEL",
    "P2R", "R2P", "IABS", "BMSK", "SGXT", "POPC", "IMAD", "F2FP", "HADD2", "HFMA2", "HMUL2", "LOP", "PLOP3",
})  # fmt: skip
"""Instructions with a throughput of 64 lanes per cycle (CUDA programming guide, throughput of compute capability 9.0):
integers, comparisons, selections, conversions."""
FULL_RATE = frozenset({"FADD", "FMUL", "FFMA"})


@dataclass(frozen=True, slots=True)
class Instruction:
    """`name` with its suffixes, without the predicate."""

    address: int
    name: str
    operands: str

    @property
    def root(self) -> str:
        return self.name.split(".", 1)[0]


@dataclass(frozen=True, slots=True)
class Loop:
    """One pass of a loop for one warp; predicated instructions count as executed.

    `flops` are the warp's share of the matrix instructions, `products` the warp-group ones, `waits` the waits for them.
    `load_bytes` are loads of 8 bytes per lane or more; narrower ones, often one value for all lanes, are only counted.
    `shared_bytes` include reads by matrix instructions and writes by asynchronous copies. `copies_ahead`: groups of
    asynchronous copies in flight at the end of a pass, of `copy_groups` started in it; `products_ahead`: likewise for
    matrix instructions.
    """

    instructions: int = 0
    products: int = 0
    warp_products: int = 0
    flops: int = 0
    float8_products: int = 0
    waits: int = 0
    products_ahead: int = 0
    special: int = 0
    half_rate: int = 0
    full_rate: int = 0
    shuffles: int = 0
    barriers: int = 0
    load_bytes: int = 0
    narrow_loads: int = 0
    store_bytes: int = 0
    shared_bytes: int = 0
    bulk_copies: int = 0
    copy_groups: int = 0
    copies_ahead: int = 0
    spills: int = 0

    @property
    def is_serialised(self) -> bool:
        """True if the assembler put a wait after every matrix instruction, so that none overlaps another."""
        return self.products > 1 and self.waits >= self.products


def instructions_of(text: str) -> list[Instruction]:
    """Return the instructions in the order of addresses."""
    return [Instruction(int(at, 16), name, operands) for at, name, operands in LINE.findall(text)]


def loops_of(code: list[Instruction]) -> list[list[Instruction]]:
    """Return the bodies of innermost loops: from the target of a backward branch to the branch. A branch to itself is
    padding after the kernel.
    """
    spans = []
    for instruction in code:
        target = TARGET.search(instruction.operands) if instruction.root == "BRA" else None
        if target and int(target[1], 16) < instruction.address:
            spans.append((int(target[1], 16), instruction.address))
    inner = [
        (first, last)
        for first, last in spans
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in spans)
    ]
    return [[i for i in code if first <= i.address <= last] for first, last in inner]


def hot_loop(text: str) -> Loop:
    """Return the loop with the most FLOPs, then with the most loads; of equal ones the shortest, because masked
    variants of a loop are longer and run less often. A kernel without a loop is counted as a whole.
    """
    code = instructions_of(text)
    counted = [count(body) for body in loops_of(code)]
    worthwhile = [loop for loop in counted if loop.flops or loop.load_bytes or loop.bulk_copies]
    if not worthwhile:
        return count(code)
    return max(worthwhile, key=lambda loop: (loop.flops, loop.load_bytes, -loop.instructions))


def count(code: list[Instruction]) -> Loop:
    """Count the effects of these instructions, each once."""
    totals = {field.name: 0 for field in fields(Loop)}
    for instruction in code:
        for name, amount in _effects(instruction):
            totals[name] += amount
    totals["copies_ahead"] = _left_in_flight(code, "DEPBAR.LE", "SB0")
    totals["products_ahead"] = _left_in_flight(code, "WARPGROUP.DEPBAR.LE", "gsb0")
    return Loop(**totals)


def _left_in_flight(code: list[Instruction], name: str, counter: str) -> int:
    """Return the number of groups that the strictest of these waits leaves in flight."""
    waits = [i.operands for i in code if i.name == name and i.operands.startswith(counter)]
    return min((int(operands.split("0x")[-1], 16) for operands in waits), default=0)


def _effects(instruction: Instruction) -> Iterator[tuple[str, int]]:
    """Yield the (field of Loop, amount) pairs of one instruction."""
    root, name, operands = instruction.root, instruction.name, instruction.operands
    yield "instructions", 1
    if PRODUCT.match(name) or WARP_PRODUCT.match(name):
        yield from _mma_effects(name, operands)
    elif root == "WARPGROUP" and ".DEPBAR" in name:
        yield "waits", 1
    elif root == "MUFU":
        yield "special", 1
    elif root in HALF_RATE:
        yield "half_rate", 1
    elif root in FULL_RATE:
        yield "full_rate", 1
    elif root == "SHFL":
        yield "shuffles", 1
    elif root in {"BAR", "SYNCS"}:
        yield "barriers", 1
    elif root in {"LDL", "STL"}:
        yield "spills", 1
    elif root == "LDGDEPBAR":
        yield "copy_groups", 1
    elif root in {"UTMALDG", "UBLKCP"}:
        yield "bulk_copies", 1
    elif root in {"LDG", "LDGSTS", "STG", "LDS", "STS", "LDSM", "STSM"}:
        yield from _access(root, name)


def _mma_effects(name: str, operands: str) -> Iterator[tuple[str, int]]:
    """Yield the effects of a matrix instruction. A warp-group instruction m x n x k reads n x k values of shared
    memory, and m x k more unless its left operand is in registers; each of its four warps is charged a quarter.
    """
    if group := PRODUCT.match(name):
        m, n, k = (int(group[index]) for index in (2, 3, 4))
        itemsize = 1 if group[1] == "QGMMA" else 4 if ".TF32" in name else 2
        left_in_shared = operands.split(",", 1)[1].strip().startswith("gdesc")
        yield "products", 1
        yield "flops", 2 * m * n * k // WARPS_OF_GROUP
        yield "float8_products", int(itemsize == 1)
        yield "shared_bytes", (n + m * left_in_shared) * k * itemsize // WARPS_OF_GROUP
    elif warp := WARP_PRODUCT.match(name):
        yield "warp_products", 1
        yield "float8_products", int(warp[1] == "QMMA")
        yield "flops", WARP_PRODUCT_FLOPS[warp[2]]


def _access(root: str, name: str) -> Iterator[tuple[str, int]]:
    suffixes = name[len(root) :]
    if root in {"LDSM", "STSM"}:
        yield "shared_bytes", MATRIX_BYTES * int(suffixes[-1] if suffixes[-1].isdigit() else 1)
        return
    width = next((size for suffix, size in WIDTHS.items() if suffix in suffixes), 4)
    if root == "STG":
        yield "store_bytes", LANES * width
    elif root.startswith("LDG"):
        yield ("load_bytes", LANES * width) if width >= 8 else ("narrow_loads", 1)
    if root in {"LDS", "STS", "LDGSTS"}:
        yield "shared_bytes", LANES * width
