"""What the machine code of Hopper's asynchronous products must keep to, checked in every kernel that is compiled.

A warp-group product (HGMMA, QGMMA) reads its left operand, where that lies in registers, and writes its sums after the
instructions behind it have begun. Assemblers before CUDA 13.3 may give those registers to others too early (Triton 3.6
assembles with 12.8, 3.9 with 13.4): results are wrong then, now and then.

The matrix unit adds float8 products with fewer bits than float32 has (arXiv:2412.19437, section 3.3): after so many
columns the sum must have left it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kernel_benchmarks.aot.machine_code import PRODUCT, Instruction, loops_of

MAX_FLOAT8_COLUMNS = 128
"""Summed in the matrix unit before float32 takes over: a group of w8a8_block_fp8's scales."""
LEFT_REGISTERS = 4
"""Of 64 x 16 values of 16 bits, or 64 x 32 of 8, in each thread of a warp group."""
REGISTER = re.compile(r"R(\d+)(?:\.\w+)?")
PREDICATE = re.compile(r"!?U?P(?:\d|T)")
NO_RESULT = ("ST", "RED", "BRA", "BAR", "LDGSTS", "LDGDEPBAR", "DEPBAR", "WARPGROUP", "R2UR", "U")
"""Instructions whose first register is read, and those of uniform registers."""


class UnsafeProduct(Exception):
    """The kernel compiles, and its products may be wrong."""


@dataclass(slots=True)
class _Products:
    """Registers of products under way, group by group; the last group is open. `columns`: how many columns a sum that
    begins at a register has in the matrix unit by now."""

    groups: list[set[int]] = field(default_factory=lambda: [set()])
    columns: dict[int, int] = field(default_factory=dict)

    def issue(self, instruction: Instruction) -> int:
        """Returns the columns of the sum that this product continues or begins; 0 unless of float8."""
        shape = PRODUCT.match(instruction.name)
        assert shape is not None
        operands = [part.strip() for part in instruction.operands.split(",")]
        n, k = int(shape[3]), int(shape[4])
        total = _number(operands[0])
        left = REGISTER.fullmatch(operands[1])
        self.groups[-1] |= {*range(total, total + n // 2)}
        if left:
            self.groups[-1] |= {*range(int(left[1]), int(left[1]) + LEFT_REGISTERS)}
        if any(part.startswith("gsb") for part in operands):
            self.groups.append(set())
        begins = operands[2] == "RZ"
        self.columns[total] = k if begins else self.columns.get(total, 0) + k
        return self.columns[total] if shape[1] == "QGMMA" else 0

    def wait(self, left_under_way: int) -> None:
        self.groups = self.groups[-left_under_way - 1 :] if left_under_way else [set()]

    def write(self, registers: range) -> bool:
        """Whether a product under way needs one of them."""
        for register in registers:
            self.columns.pop(register, None)
        return any(not group.isdisjoint(registers) for group in self.groups)


def check_products(name: str, code: list[Instruction]) -> None:
    """Raises UnsafeProduct. Loops are followed through two passes."""
    for path in (code, *(body + body for body in loops_of(code))):
        for problem in _problems(path):
            raise UnsafeProduct(f"{name}: {problem}")


def _problems(code: Iterable[Instruction]) -> Iterator[str]:
    products = _Products()
    for instruction in code:
        if PRODUCT.match(instruction.name):
            columns = products.issue(instruction)
            if columns > MAX_FLOAT8_COLUMNS:
                yield (
                    f"{columns} columns of float8 products are summed in the matrix unit at {instruction.address:#x}; "
                    f"add its results in float32 after {MAX_FLOAT8_COLUMNS} at most"
                )
        elif instruction.root == "WARPGROUP" and ".DEPBAR" in instruction.name:
            products.wait(int(instruction.operands.split(",")[-1].strip(), 16))
        elif products.write(written(instruction)):
            yield (
                f"{instruction.name} at {instruction.address:#x} writes {instruction.operands.split(',')[0]}, which a "
                f"product under way still reads or sums in; another assembler (TRITON_PTXAS_PATH) may not"
            )


def written(instruction: Instruction) -> range:
    """The registers of its result; none where it has no result, or one in predicates or uniform registers."""
    if instruction.name.startswith(NO_RESULT):
        return range(0)
    for part in instruction.operands.split(",")[:2]:
        if register := REGISTER.fullmatch(part.strip()):
            return range(int(register[1]), int(register[1]) + _width(instruction))
        if not PREDICATE.fullmatch(part.strip()):
            break
    return range(0)


def _width(instruction: Instruction) -> int:
    name = instruction.name
    if instruction.root == "LDSM":
        return int(name[-1]) if name[-1].isdigit() else 1
    if ".128" in name:
        return 4
    return 2 if ".64" in name or ".WIDE" in name or name == "CS2R" else 1


def _number(operand: str) -> int:
    register = REGISTER.fullmatch(operand)
    assert register is not None, f"{operand} is no register"
    return int(register[1])
