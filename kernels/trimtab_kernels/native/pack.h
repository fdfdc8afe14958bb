/* Packing of a weight [out, in] into panels of PANEL outputs (gemm.h), from rows of float32, bfloat16 or float16 at any
 * addresses: blocks of WIDTH outputs and WIDTH inputs are transposed in registers, and 16-bit numbers are widened to
 * float32.
 *
 *     rows of the checkpoint        a block in registers             a panel
 *     o0 | i0 i1 .. i15 | ..        r0  | o0 o1 .. o15 |  input 0    | o0 .. o15 | o16 .. o31 |
 *     o1 | i0 i1 .. i15 | ..   ->   r1  | o0 o1 .. o15 |  input 1    | o0 .. o15 | o16 .. o31 |
 */
#pragma once

#include "gemm.h"

enum stored { STORED_FLOAT32, STORED_BFLOAT16, STORED_FLOAT16 };

#define FETCH_BYTES 512 /* prefetch distance within a row: more rows are read at once than a CPU's prefetcher tracks */

INLINE long stored_bytes(enum stored stored) { return stored == STORED_FLOAT32 ? 4 : 2; }

/* Widen WIDTH float16 numbers, including NaN and infinity. */
INLINE vec widen_any_float16(narrow stored) {
    vec value = widen_float16(stored);
#if !defined(__AVX512F__) && !defined(__F16C__)
    words bits = __builtin_convertvector(stored, words);
    value = (vec)((words)value | ((words)((bits & 0x7c00) == 0x7c00) & 0x7f800000)); /* infinity or NaN */
#endif
    return value;
}

INLINE vec widen_stored(enum stored stored, narrow bits) {
    if (stored == STORED_FLOAT16) return widen_any_float16(bits);
    return (vec)(__builtin_convertvector(bits, words) << 16);
}

/* Load up to WIDTH numbers of a row, followed by zeros. */
INLINE vec load_stored(enum stored stored, const char *row, long count) {
    vec value = splat(0.0f);
    narrow bits = {0};
    if (stored == STORED_FLOAT32) {
        if (count == WIDTH) return load((const float *)row);
        memcpy(&value, row, 4 * count);
        return value;
    }
    if (count == WIDTH)
        memcpy(&bits, row, sizeof bits);
    else
        memcpy(&bits, row, 2 * count);
    return widen_stored(stored, bits);
}

/* Lanes of two rows at distance `S`: exchange their off-diagonal S x S blocks. */
#define FIRST_LANE(S, L) ((L) & (S) ? WIDTH + (L) - (S) : (L))
#define LAST_LANE(S, L) ((L) & (S) ? WIDTH + (L) : (L) + (S))
#define FOUR_LANES(F, S, L) F(S, L), F(S, L + 1), F(S, L + 2), F(S, L + 3)
#if WIDTH == 16
#define ALL_LANES(F, S) FOUR_LANES(F, S, 0), FOUR_LANES(F, S, 4), FOUR_LANES(F, S, 8), FOUR_LANES(F, S, 12)
#elif WIDTH == 8
#define ALL_LANES(F, S) FOUR_LANES(F, S, 0), FOUR_LANES(F, S, 4)
#else
#define ALL_LANES(F, S) FOUR_LANES(F, S, 0)
#endif
#define EXCHANGE(S)                                                                                                    \
    _Pragma("GCC unroll 16") for (int r = 0; r < WIDTH; r++) {                                                         \
        if (r & S) continue;                                                                                           \
        vec first = __builtin_shufflevector(rows[r], rows[r + S], ALL_LANES(FIRST_LANE, S));                           \
        rows[r + S] = __builtin_shufflevector(rows[r], rows[r + S], ALL_LANES(LAST_LANE, S));                          \
        rows[r] = first;                                                                                               \
    }

/* Transpose WIDTH rows. */
INLINE void transpose(vec *rows) {
#if WIDTH == 16
    EXCHANGE(8)
#endif
#if WIDTH >= 8
    EXCHANGE(4)
#endif
    EXCHANGE(2)
    EXCHANGE(1)
}

/* Pack WIDTH outputs, from `output` on, and `count` inputs, from `i` on. Outputs after the last one are zeros. */
INLINE void pack_block(enum stored stored, const char *const *rows, long output, long outputs, long i, long count,
                       float *panel) {
    vec block[WIDTH];
    _Pragma("GCC unroll 16") for (int r = 0; r < WIDTH; r++) {
        block[r] = splat(0.0f);
        if (output + r >= outputs) continue;
        const char *from = rows[output + r] + i * stored_bytes(stored);
        __builtin_prefetch(from + FETCH_BYTES, 0, 3);
        block[r] = load_stored(stored, from, count);
    }
    transpose(block);
    _Pragma("GCC unroll 16") for (int r = 0; r < WIDTH; r++)
        if (r < count) store(panel + (i + r) * PANEL + output, block[r]);
}

INLINE void pack_rows(enum stored stored, const char *const *rows, long outputs, long in, float *panel) {
    long whole = in / WIDTH * WIDTH;
    for (long i = 0; i < whole; i += WIDTH)
        for (long v = 0; v < PANEL; v += WIDTH) pack_block(stored, rows, v, outputs, i, WIDTH, panel);
    for (long v = 0; v < PANEL && whole < in; v += WIDTH) pack_block(stored, rows, v, outputs, whole, in - whole, panel);
}

/* Pack a panel of the first `outputs` of these rows. */
INLINE void pack_stored(enum stored stored, const char *const *rows, long outputs, long in, float *panel) {
    if (outputs == PANEL)
        pack_rows(stored, rows, PANEL, in, panel);
    else
        pack_rows(stored, rows, outputs, in, panel);
}
