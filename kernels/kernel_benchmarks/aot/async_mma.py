"""Rules for Hopper's asynchronous matrix instructions, checked in the machine code of every compiled kernel.

A warp-group instruction (HGMMA, QGMMA) reads its left operand, if that is in registers, and writes its sums after later
instructions have started. Assemblers before CUDA 13.3 may reuse those registers too early (Triton 3.6 assembles with
12.8, 3.9 with 13.4), which makes results wrong intermittently.

The matrix unit adds float8 products with fewer bits than float32 (arXiv:2412.19437, section 3.3), so sums must leave it
after a limited number of columns.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kernel_benchmarks.aot.machine_code import PRODUCT, Instruction, loops_of

MAX_FLOAT8_COLUMNS = 128
"""Columns summed in the matrix unit before float32 takes over: a group of w8a8_block_fp8's scales."""
LEFT_REGISTERS = 4
"""Registers of 64 x 16 values of 16 bits, or 64 x 32 of 8, in each thread of a warp group."""
REGISTER = re.compile(r"R(\d+)(?:\.\w+)?")
PREDICATE = re.compile(r"!?U?P(?:\d|T)")
NO_RESULT = ("ST", "RED", "BRA", "BAR", "LDGSTS", "LDGDEPBAR", "DEPBAR", "WARPGROUP", "R2UR", "U")
"""Instructions whose first register is an input, and those of uniform registers."""


class UnsafeMma(Exception):
    """The kernel compiles, but its matrix instructions may be wrong."""


@dataclass(slots=True)
class _InFlightMma:
    """Registers of instructions in flight, group by group; the last group is open. `columns`: the columns that the sum
    starting at a register has accumulated in the matrix unit.
    """

    groups: list[set[int]] = field(default_factory=lambda: [set()])
    columns: dict[int, int] = field(default_factory=dict)

    def issue(self, instruction: Instruction) -> int:
        """Return the columns of the sum that this instruction continues or starts; 0 unless float8."""
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

    def wait(self, left_in_flight: int) -> None:
        self.groups = self.groups[-left_in_flight - 1 :] if left_in_flight else [set()]

    def write(self, registers: range) -> bool:
        """Return True if an instruction in flight uses one of the registers."""
        for register in registers:
            self.columns.pop(register, None)
        return any(not group.isdisjoint(registers) for group in self.groups)


def check_mma(name: str, code: list[Instruction]) -> None:
    """Check the code, following loops for two passes.

    Raises:
        UnsafeMma: a rule is violated.
    """
    for path in (code, *(body + body for body in loops_of(code))):
        for problem in _problems(path):
            raise UnsafeMma(f"{name}: {problem}")


def _problems(code: Iterable[Instruction]) -> Iterator[str]:
    products = _InFlightMma()
    for instruction in code:
        if PRODUCT.match(instruction.name):
            columns = products.issue(instruction)
            if columns > MAX_FLOAT8_COLUMNS:
                yield (
                    f"{columns} float8 columns are summed in the matrix unit at {instruction.address:#x}; "
                    f"add its results in float32 after {MAX_FLOAT8_COLUMNS} at most"
                )
        elif instruction.root == "WARPGROUP" and ".DEPBAR" in instruction.name:
            products.wait(int(instruction.operands.split(",")[-1].strip(), 16))
        elif products.write(result_registers(instruction)):
            yield (
                f"{instruction.name} at {instruction.address:#x} writes {instruction.operands.split(',')[0]}, which a "
                f"matrix instruction in flight still uses; try another assembler (TRITON_PTXAS_PATH)"
            )


def result_registers(instruction: Instruction) -> range:
    """Return the registers of its result; empty if it has none, or one in predicates or uniform registers."""
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
