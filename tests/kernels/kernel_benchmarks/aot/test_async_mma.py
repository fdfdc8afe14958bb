"""Machine code whose asynchronous matrix instructions may be wrong is rejected; the texts are cut from compiled
kernels.
"""

import pytest
from kernel_benchmarks.aot.async_mma import UnsafeMma, check_mma, result_registers
from kernel_benchmarks.aot.machine_code import Instruction, instructions_of

PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, R216, gdesc[UR12].tnspB, R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
FLOAT8_START = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], RZ, !UPT"
FLOAT8_ON = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24"


def code(*lines: str) -> list[Instruction]:
    """Return instructions of 16 bytes each, from address 0 on."""
    return instructions_of("\n".join(f"        /*{16 * at:04x}*/  {line} ;" for at, line in enumerate(lines)))


@pytest.mark.parametrize(
    ("line", "registers"),
    [
        ("MOV R5, R6", [5]),
        ("@!P0 LDG.E.128 R8, desc[UR4][R2.64]", [8, 9, 10, 11]),
        ("IMAD.WIDE R2, R4, 0x2, R6", [2, 3]),
        ("LDSM.16.M88.4 R12, [R3]", [12, 13, 14, 15]),
        ("SHFL.BFLY PT, R7, R8, 0x1, 0x1f", [7]),
        ("ISETP.GE.AND P0, PT, R5, R6, PT", []),
        ("STS.128 [R4], R8", []),
        ("R2UR UR4, R9", []),
    ],
)
def test_result_registers_are_recognised(line: str, registers: list[int]) -> None:
    assert list(result_registers(code(line)[0])) == registers


@pytest.mark.parametrize("register", ["R216", "R219", "R24", "R87"])
def test_register_of_instruction_in_flight_must_not_be_written(register: str) -> None:
    with pytest.raises(UnsafeMma, match=f"kernel: MOV at 0x10 writes {register}"):
        check_mma("kernel", code(PRODUCT, f"MOV {register}, RZ", WAIT))


@pytest.mark.parametrize("register", ["R215", "R220", "R23", "R88"])
def test_adjacent_registers_may_be_written(register: str) -> None:
    check_mma("kernel", code(PRODUCT, f"MOV {register}, RZ", WAIT))


def test_registers_may_be_written_after_wait() -> None:
    check_mma("kernel", code(PRODUCT, WAIT, "MOV R216, RZ"))


def test_wait_may_leave_newest_instructions_in_flight() -> None:
    other = PRODUCT.replace("R216", "R220")
    lines = [PRODUCT, other, "WARPGROUP.DEPBAR.LE gsb0, 0x1"]
    check_mma("kernel", code(*lines, "MOV R216, RZ"))
    with pytest.raises(UnsafeMma, match="R220"):
        check_mma("kernel", code(*lines, "MOV R220, RZ"))


def test_instruction_stays_in_flight_into_next_pass() -> None:
    with pytest.raises(UnsafeMma, match="MOV at 0x0 writes R216"):
        check_mma("kernel", code("MOV R216, RZ", WAIT, PRODUCT, "BRA 0x0"))


def test_float8_sums_must_leave_matrix_unit_after_128_columns() -> None:
    check_mma("kernel", code(FLOAT8_START, *[FLOAT8_ON] * 3, WAIT, "FFMA R88, R24, R2, R88", "BRA 0x0"))
    with pytest.raises(UnsafeMma, match="160 float8 columns"):
        check_mma("kernel", code(FLOAT8_START, *[FLOAT8_ON] * 4, WAIT))


def test_float8_sums_continuing_through_loop_are_rejected() -> None:
    lines = [*[FLOAT8_ON] * 4, WAIT, "BRA 0x0"]
    with pytest.raises(UnsafeMma, match="160 float8 columns"):
        check_mma("kernel", code(*lines))
    check_mma("kernel", code("MOV R24, RZ", *lines))  # reset explicitly
