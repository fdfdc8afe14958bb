"""Counts what the innermost loop of a kernel does, from the text of its machine code (`cuobjdump -sass`).

Pure functions over text: nothing here compiles or runs anything. The names of instructions are Hopper's (sm_90); what a
name is not known for counts as an instruction that is issued, and nothing more.
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
"""Warps that issue one warp-group product together."""
LANES = 32
WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
"""Bytes per lane by suffix; without one, 4."""
MATRIX_BYTES = 128
"""Of one 8 x 8 matrix of 16-bit values, as LDSM and STSM move them."""
HALF_RATE = frozenset({
    "IADD3", "VIADD", "LOP3", "SHF", "LEA", "ISETP", "FSETP", "SEL", "FSEL", "FMNMX", "PRMT", "VIMNMX", "IMNMX", "CSEL",
    "P2R", "R2P", "IABS", "BMSK", "SGXT", "POPC", "IMAD", "F2FP", "HADD2", "HFMA2", "HMUL2", "LOP", "PLOP3",
})  # fmt: skip
"""Instructions of which a multiprocessor does 64 lanes a cycle (CUDA programming guide, throughput of compute
capability 9.0): integers, comparisons, selections, conversions."""
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
    """One pass of a loop as one warp sees it; predicated instructions count as executed.

    `flops` are the warp's share of the products, `products` those of warp groups, `waits` the waits for them.
    `load_bytes` are loads of 8 bytes per lane or more; narrower ones, often one value for all lanes, are counted only.
    `shared_bytes` include what products read and asynchronous copies write. `copies_ahead`: groups of asynchronous
    copies still under way when the loop goes on, of `copy_groups` that one pass begins; `products_ahead`: likewise of
    products.
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
        """The assembler put a wait behind every single product: none runs while another is issued."""
        return self.products > 1 and self.waits >= self.products


def instructions_of(text: str) -> list[Instruction]:
    """In the order of addresses."""
    return [Instruction(int(at, 16), name, operands) for at, name, operands in LINE.findall(text)]


def loops_of(code: list[Instruction]) -> list[list[Instruction]]:
    """Bodies of innermost loops: from the target of a branch backwards to the branch. A branch to itself is the
    padding behind a kernel."""
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
    """The loop that does the most products, then the one that loads most; of equals the shortest, because masked
    variants of a loop are longer and run less often. A kernel without a loop counts as a whole."""
    code = instructions_of(text)
    counted = [count(body) for body in loops_of(code)]
    worthwhile = [loop for loop in counted if loop.flops or loop.load_bytes or loop.bulk_copies]
    if not worthwhile:
        return count(code)
    return max(worthwhile, key=lambda loop: (loop.flops, loop.load_bytes, -loop.instructions))


def count(code: list[Instruction]) -> Loop:
    """What these instructions do, each once."""
    totals = {field.name: 0 for field in fields(Loop)}
    for instruction in code:
        for name, amount in _effects(instruction):
            totals[name] += amount
    totals["copies_ahead"] = _left_under_way(code, "DEPBAR.LE", "SB0")
    totals["products_ahead"] = _left_under_way(code, "WARPGROUP.DEPBAR.LE", "gsb0")
    return Loop(**totals)


def _left_under_way(code: list[Instruction], name: str, counter: str) -> int:
    """What the strictest of these waits lets go on."""
    waits = [i.operands for i in code if i.name == name and i.operands.startswith(counter)]
    return min((int(operands.split("0x")[-1], 16) for operands in waits), default=0)


def _effects(instruction: Instruction) -> Iterator[tuple[str, int]]:
    """(field of Loop, amount) pairs of one instruction."""
    root, name, operands = instruction.root, instruction.name, instruction.operands
    yield "instructions", 1
    if PRODUCT.match(name) or WARP_PRODUCT.match(name):
        yield from _product(name, operands)
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


def _product(name: str, operands: str) -> Iterator[tuple[str, int]]:
    """A warp-group product m x n x k reads n x k values of shared memory, and m x k more unless its left operand lies
    in registers; each of its four warps is charged a quarter."""
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
