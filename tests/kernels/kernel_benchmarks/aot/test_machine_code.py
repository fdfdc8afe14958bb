"""Counts of a loop in recorded Hopper machine code (shortened)."""

from kernel_benchmarks.aot.machine_code import hot_loop, instructions_of, loops_of

ATTENTION = """
        /*1490*/                   LDG.E.128 R4, desc[UR16][R2.64] ;                /* 0x0000000c02047981 */
                                                                                     /* 0x000ea2000c1e1d00 */
        /*14a0*/                   DEPBAR.LE SB0, 0x2 ;                              /* 0x000080000000791a */
        /*14b0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;                     /* 0x0000000000007b1d */
        /*1720*/                   WARPGROUP.ARRIVE ;                                /* 0x00000000000079c5 */
        /*1730*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT ;   /* 0x00e0 */
        /*1740*/                   HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24, gsb0 ; /* 0x41e */
        /*1780*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;                   /* 0x00008000000079c5 */
        /*1790*/                   MUFU.EX2 R5, R5 ;                                 /* 0x000000000000 */
        /*17a0*/                   FFMA R5, R5, R6, R7 ;                             /* 0x000000000000 */
        /*17b0*/                   FMNMX R5, R5, R6, !PT ;                           /* 0x000000000000 */
        /*17c0*/               @P2 LDGSTS.E.BYPASS.LTC128B.128 [R3], desc[UR6][R4.64] ; /* 0x000 */
        /*17d0*/                   LDGSTS.E [R3], desc[UR6][R4.64] ;                 /* 0x000000000000 */
        /*17e0*/                   LDGDEPBAR ;                                       /* 0x00000000000079af */
        /*17f0*/                   LDS.64 R4, [R3] ;                                 /* 0x000000000000 */
        /*1800*/                   LDSM.16.MT88.4 R4, [R3] ;                         /* 0x000000000000 */
        /*1810*/              @!P3 BRA 0x14a0 ;                                      /* 0xffffffe40000b947 */
        /*1820*/                   EXIT ;                                            /* 0x000000000000794d */
        /*1830*/                   BRA 0x1830;                                       /* 0xfffffffc00fc7947 */
"""
SERIALISED = """
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT, gsb0 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R88, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/                   BRA 0x10 ;
"""
NESTED = """
        /*0010*/                   LDG.E R2, desc[UR6][R4.64] ;
        /*0020*/                   LDG.E.64 R2, desc[UR6][R4.64] ;
        /*0030*/               @P0 BRA 0x20 ;
        /*0040*/                   LDG.E.128 R2, desc[UR6][R4.64] ;
        /*0050*/               @P1 BRA 0x10 ;
"""
STRAIGHT = """
        /*0010*/                   LDG.E.128 R2, desc[UR6][R4.64] ;
        /*0020*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], RZ, !UPT ;
        /*0030*/                   STG.E.64 desc[UR6][R4.64], R2 ;
        /*0040*/                   EXIT ;
"""


def test_loops_of_returns_body_between_branch_and_target() -> None:
    (loop,) = loops_of(instructions_of(ATTENTION))
    assert (loop[0].address, loop[-1].address) == (0x14A0, 0x1810), "a branch to itself is padding"


def test_loop_counts_instructions_bytes_and_units_per_warp() -> None:
    loop = hot_loop(ATTENTION)
    assert (loop.products, loop.waits, loop.special, loop.full_rate, loop.half_rate) == (2, 1, 1, 1, 1)
    assert loop.flops == 2 * 64 * (64 + 128) * 16 // 4
    assert loop.load_bytes == 32 * 16, "the load in front of the loop is not of it"
    assert loop.products_ahead == 0
    assert hot_loop(ATTENTION.replace("gsb0, 0x0", "gsb0, 0x1")).products_ahead == 1
    assert (loop.narrow_loads, loop.copy_groups, loop.copies_ahead, loop.barriers) == (1, 1, 2, 1)
    products = ((64 + 64) + 128) * 16 * 2 // 4  # the second instruction's left operand is in registers
    assert loop.shared_bytes == products + 32 * 16 + 32 * 4 + 32 * 8 + 4 * 128
    assert not loop.is_serialised


def test_wait_after_every_instruction_means_serialised() -> None:
    assert hot_loop(SERIALISED).is_serialised


def test_only_innermost_loops_are_counted() -> None:
    assert hot_loop(NESTED).load_bytes == 32 * 8


def test_shorter_of_equal_loops_is_hot() -> None:
    longer = SERIALISED.replace("/*00", "/*01").replace("BRA 0x10", "BRA 0x110").replace("EXIT", "NOP")
    unmasked = SERIALISED.replace("        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n", "")
    assert hot_loop(longer + unmasked) == hot_loop(unmasked) == hot_loop(unmasked + longer)


def test_kernel_without_loop_is_counted_as_a_whole() -> None:
    loop = hot_loop(STRAIGHT)
    assert (loop.instructions, loop.load_bytes, loop.store_bytes, loop.float8_products) == (4, 512, 256, 1)
