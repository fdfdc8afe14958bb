/* Vectors of the widest registers that this file is compiled for, by the compilers' vector extension: one source for
 * every instruction set. A panel is the number of GEMM columns that one tile computes (gemm.h). */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define WIDTH 16         /* floats per register */
#define PANEL_VECTORS 2  /* 12 rows of 2 take 24 of 32 registers, in addition to the panel's 2 and the row's value */
#define TILE_ROWS 12
#elif defined(__AVX2__)
#define WIDTH 8
#define PANEL_VECTORS 2
#define TILE_ROWS 6      /* 12 of 16 registers */
#elif defined(__aarch64__)
#define WIDTH 4
#define PANEL_VECTORS 4
#define TILE_ROWS 6      /* 24 of 32 registers */
#else
#define WIDTH 4
#define PANEL_VECTORS 2
#define TILE_ROWS 6
#endif
#define PANEL (WIDTH * PANEL_VECTORS)

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t mask __attribute__((vector_size(4 * WIDTH)));
typedef float unaligned __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *p) { return *(const unaligned *)p; }
INLINE void store(float *p, vec v) { *(unaligned *)p = v; }
INLINE vec splat(float s) { return s - (vec){0}; }
INLINE vec pick(mask m, vec yes, vec no) { return (vec)((m & (mask)yes) | (~m & (mask)no)); }
INLINE vec larger(vec a, vec b) { return pick(a > b, a, b); }
INLINE vec smaller(vec a, vec b) { return pick(a < b, a, b); }

/* Combine each lane with the lane at distance 1/2, 1/4, ... of the width: all lanes end up with the total. */
#if WIDTH == 16
#define LANES_8(v) __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define LANES_4(v) __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define LANES_2(v) __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define LANES_1(v) __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#elif WIDTH == 8
#define LANES_8(v) splat(0.0f)
#define LANES_4(v) __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3)
#define LANES_2(v) __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5)
#define LANES_1(v) __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6)
#else
#define LANES_8(v) splat(0.0f)
#define LANES_4(v) splat(0.0f)
#define LANES_2(v) __builtin_shufflevector(v, v, 2, 3, 0, 1)
#define LANES_1(v) __builtin_shufflevector(v, v, 1, 0, 3, 2)
#endif

INLINE float sum_of(vec v) {
    if (WIDTH > 8) v += LANES_8(v);
    if (WIDTH > 4) v += LANES_4(v);
    v += LANES_2(v);
    v += LANES_1(v);
    return v[0];
}

INLINE float largest_of(vec v) {
    if (WIDTH > 8) v = larger(v, LANES_8(v));
    if (WIDTH > 4) v = larger(v, LANES_4(v));
    v = larger(v, LANES_2(v));
    v = larger(v, LANES_1(v));
    return v[0];
}

/* e^x to 2 ulp: x = n ln 2 + r, e^r by its series to the 6th power. Below -87 it is e^-87, about 1e-38. */
INLINE vec exp_of(vec x) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = smaller(larger(x, splat(-87.0f)), splat(88.0f));
    vec shifted = x * 1.44269504f + round;
    vec n = shifted - round;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts, the first exact when multiplied */
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    mask power = ((mask)shifted - (mask)splat(round)) << 23;
    return (vec)((mask)p + power);
}
