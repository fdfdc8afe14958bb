/* Products with weights of 4 or 8 bits, multiplied as they are stored.  y[r][o] = sum_i x[r][i] * w[o][i]
 *
 * A weight has groups of 32 inputs (GGUF's blocks): w = q * scale, q * scale + least, or (q - zero) * scale. A panel of PANEL outputs holds
 * its groups one behind the other, each as words of 32 bits, an output's in one lane, then its scales as float16:
 *
 *     group | word 0: o0 o1 .. o31 | word 1: .. | .. | scales: o0 .. o31 | least or zero: o0 .. o31 |
 *     a word of 4 bits  | q1' q1 | its lower half: inputs 0 2 4 6, its upper half: inputs 1 3 5 7, the first lowest
 *     a word of 8 bits  | bytes: inputs 0 2 1 3
 *
 * so that shifts and masks leave pairs of neighbouring inputs in the halves of a lane. x becomes integers of 16 bits
 * with one scale per group: the largest is 32767, so that what is lost of x is 2^-16 of it, less than what sums in
 * float32 differ by; products of pairs are summed as integers, without any rounding. What is computed for one row does
 * not depend on how many there are.
 */
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define GROUP 32
#define ROWS_AT_ONCE 24 /* turned into integers together, by each thread for itself: x of 8192 inputs takes 400 KiB */
#define LEAST_X 1e-30f  /* a group whose largest is below adds nothing */

enum kind { FLOAT32, Q4_0, Q4_1, Q8_0, Q4_ZEROS };

#if defined(__AVX512F__)
#define QUANTISED_ROWS 6 /* rows of a tile: 12 sums of 32 registers */
#else
#define QUANTISED_ROWS 3
#endif

typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halfwords __attribute__((vector_size(4 * WIDTH)));
typedef int16_t pairs __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t narrow __attribute__((vector_size(2 * WIDTH)));
typedef int16_t signed_narrow __attribute__((vector_size(2 * WIDTH)));

typedef struct {
    int16_t *values; /* [ROWS_AT_ONCE, in] */
    float *scales;   /* [ROWS_AT_ONCE, in / GROUP] */
    int32_t *totals; /* [ROWS_AT_ONCE, in / GROUP]: of a group's integers */
    long in;
} Integers;

INLINE long words_of(enum kind kind) { return kind == Q8_0 ? 8 : 4; }

INLINE int has_two_factors(enum kind kind) { return kind == Q4_1 || kind == Q4_ZEROS; }

/* Bytes of a group of a panel. */
INLINE long group_bytes(enum kind kind) {
    return PANEL * (4 * words_of(kind) + (has_two_factors(kind) ? 4 : 2));
}

/* Bytes of a panel of `in` inputs. */
INLINE long panel_bytes(enum kind kind, long in) {
    return kind == FLOAT32 ? 4 * PANEL * in : in / GROUP * group_bytes(kind);
}

/* Floats of one thread's Integers; the scratch memory of a thread begins on a cache line. */
INLINE long integers_size(long in) {
    long size = ROWS_AT_ONCE * (in / 2 + 2 * (in / GROUP));
    return (size + 15) / 16 * 16;
}

INLINE Integers integers_at(float *scratch, long in) {
    long groups = in / GROUP;
    float *scales = scratch + ROWS_AT_ONCE * in / 2;
    return (Integers){(int16_t *)scratch, scales, (int32_t *)(scales + ROWS_AT_ONCE * groups), in};
}

/* a0 * b0 + a1 * b1 in every lane. */
INLINE mask multiply_pairs(pairs a, pairs b) {
#if defined(__AVX512BW__)
    return (mask)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (mask)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (mask)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return ((mask)a << 16 >> 16) * ((mask)b << 16 >> 16) + ((mask)a >> 16) * ((mask)b >> 16);
#endif
}

/* Has a sum made here: the compiler would make all products first, and spill them. */
#if defined(__x86_64__)
#define MADE_HERE(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define MADE_HERE(v) __asm__("" : "+w"(v))
#else
#define MADE_HERE(v)
#endif

/* WIDTH numbers of float16, finite ones. */
INLINE vec load_halves(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    narrow stored;
    memcpy(&stored, p, sizeof stored);
    words bits = __builtin_convertvector(stored, words);
    vec size = (vec)((bits & 0x7fff) << 13) * 0x1p112f; /* the exponent's bias: 15 there, 127 here */
    return (vec)((words)size | (bits & 0x8000) << 16);
#endif
}

INLINE words load_words(const void *p) {
    words w;
    memcpy(&w, p, sizeof w);
    return w;
}

/* One group of a row as integers; returns its scale. NaN where a number is none or infinite. */
INLINE float to_integers(const float *x, int16_t *values, int32_t *total) {
    vec largest = splat(0.0f), nothing = splat(0.0f);
    mask sum = {0};
    for (int i = 0; i < GROUP; i += WIDTH) {
        vec v = load(x + i);
        largest = larger(largest, larger(v, -v));
        nothing += v * 0.0f;
    }
    float most = largest_of(largest), fault = sum_of(nothing);
    float inverse = most > LEAST_X && fault == 0.0f ? 32767.0f / most : 0.0f;
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    for (int i = 0; i < GROUP; i += WIDTH) {
        mask q = (mask)(load(x + i) * inverse + round) - (mask)splat(round);
        if (inverse == 0.0f) q = (mask){0};
        signed_narrow stored = __builtin_convertvector(q, signed_narrow);
        memcpy(values + i, &stored, sizeof stored);
        sum += q;
    }
    *total = 0;
    for (int lane = 0; lane < WIDTH; lane++) *total += sum[lane];
    return inverse == 0.0f ? fault : most / 32767.0f + fault;
}

static void integers_of(const float *x, long ldx, long rows, Integers to) {
    long groups = to.in / GROUP;
    for (long r = 0; r < rows; r++)
        for (long g = 0; g < groups; g++)
            to.scales[r * groups + g] =
                to_integers(x + r * ldx + g * GROUP, to.values + r * to.in + g * GROUP, to.totals + r * groups + g);
}

/* The pair of inputs `k` of a word: two of its eight numbers of 4 bits, or of its four of 8. */
INLINE pairs pair_of(enum kind kind, words word, int k) {
    if (kind == Q8_0) return k ? (pairs)word >> 8 : (pairs)((halfwords)word << 8) >> 8;
    halfwords shifted = (halfwords)word >> (4 * k);
    return (pairs)(k == 3 ? shifted : shifted & 15);
}

/* sums[R][PANEL] += x . panel, for R rows of integers from row `first` on. */
#define QUANTISED_TILE(KIND, R)                                                                                        \
    static void quantised_##KIND##_##R(const Integers *x, long first, const char *panel, float *sums) {                \
        long groups = x->in / GROUP;                                                                                   \
        vec total[R][PANEL_VECTORS];                                                                                   \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                           \
            _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) total[r][v] = splat(0.0f);                 \
        for (long g = 0; g < groups; g++, panel += group_bytes(KIND)) {                                                \
            mask sum[R][PANEL_VECTORS];                                                                                \
            const int16_t *values = x->values + first * x->in + g * GROUP;                                             \
            for (long line = 0; line < group_bytes(KIND); line += 64)                                                  \
                __builtin_prefetch(panel + line + 4096, 0, 3);                                                         \
            _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                       \
                _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++)                                        \
                    sum[r][v] = (mask){0} - (KIND == Q4_0 ? 8 * x->totals[(first + r) * groups + g] : 0);              \
            _Pragma("GCC unroll 8") for (int w = 0; w < words_of(KIND); w++) {                                         \
                words word[PANEL_VECTORS];                                                                             \
                _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++)                                        \
                    word[v] = load_words(panel + 4 * (w * PANEL + v * WIDTH));                                         \
                _Pragma("GCC unroll 4") for (int k = 0; k < 16 / words_of(KIND); k++) {                                \
                    pairs part[PANEL_VECTORS];                                                                         \
                    _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++)                                    \
                        part[v] = pair_of(KIND, word[v], k);                                                           \
                    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                             \
                        int32_t pair;                                                                                  \
                        memcpy(&pair, values + r * x->in + w * (GROUP / words_of(KIND)) + 2 * k, sizeof pair);         \
                        pairs both = (pairs)((mask){0} + pair);                                                        \
                        _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) {                              \
                            sum[r][v] += multiply_pairs(part[v], both);                                                \
                            if (R > 2) MADE_HERE(sum[r][v]);                                                           \
                        }                                                                                              \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
            const uint16_t *scales = (const uint16_t *)(panel + 4 * PANEL * words_of(KIND));                           \
            _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) {                                          \
                vec scale = load_halves(scales + v * WIDTH);                                                           \
                vec second = has_two_factors(KIND) ? load_halves(scales + PANEL + v * WIDTH) : scale;                  \
                _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                                 \
                    long at = (first + r) * groups + g;                                                                \
                    vec part = __builtin_convertvector(sum[r][v], vec);                                                \
                    if (KIND == Q4_ZEROS) part -= second * (float)x->totals[at]; /* below 2^24: exact */               \
                    part *= scale;                                                                                     \
                    if (KIND == Q4_1) part += second * (float)x->totals[at];                                           \
                    total[r][v] += part * x->scales[at];                                                               \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                           \
            _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++)                                            \
                store(sums + r * PANEL + v * WIDTH, total[r][v]);                                                      \
    }

#if QUANTISED_ROWS == 6
#define QUANTISED_TILES(KIND)                                                                                          \
    QUANTISED_TILE(KIND, 1) QUANTISED_TILE(KIND, 2) QUANTISED_TILE(KIND, 3) QUANTISED_TILE(KIND, 4)                    \
    QUANTISED_TILE(KIND, 5) QUANTISED_TILE(KIND, 6)
#define QUANTISED_NAMES(KIND)                                                                                          \
    {quantised_##KIND##_1, quantised_##KIND##_2, quantised_##KIND##_3, quantised_##KIND##_4, quantised_##KIND##_5,     \
     quantised_##KIND##_6}
#else
#define QUANTISED_TILES(KIND) QUANTISED_TILE(KIND, 1) QUANTISED_TILE(KIND, 2) QUANTISED_TILE(KIND, 3)
#define QUANTISED_NAMES(KIND) {quantised_##KIND##_1, quantised_##KIND##_2, quantised_##KIND##_3}
#endif
QUANTISED_TILES(Q4_0) QUANTISED_TILES(Q4_1) QUANTISED_TILES(Q8_0) QUANTISED_TILES(Q4_ZEROS)

typedef void (*quantised_function)(const Integers *, long, const char *, float *);
static const quantised_function quantised_tiles[][QUANTISED_ROWS] = {
    [Q4_0] = QUANTISED_NAMES(Q4_0), [Q4_1] = QUANTISED_NAMES(Q4_1), [Q8_0] = QUANTISED_NAMES(Q8_0),
    [Q4_ZEROS] = QUANTISED_NAMES(Q4_ZEROS)};

/* sums[rows][PANEL] = x . panel */
static void multiply_quantised_panel(enum kind kind, const Integers *x, long rows, const char *panel, float *sums) {
    long tiles = (rows + QUANTISED_ROWS - 1) / QUANTISED_ROWS;
    for (long t = 0; t < tiles; t++) {
        long first = rows * t / tiles, last = rows * (t + 1) / tiles;
        quantised_tiles[kind][last - first - 1](x, first, panel, sums + first * PANEL);
    }
}

/* One group of one output, from GGUF's block of it. There the lower halves of 16 bytes are inputs 0 .. 15, the upper
 * ones 16 .. 31, scale and least come first, and 8 bits are in order. */
INLINE void pack_group(enum kind kind, const uint8_t *block, long output, char *group) {
    const uint8_t *q = block + (has_two_factors(kind) ? 4 : 2);
    for (int w = 0; w < words_of(kind); w++) {
        uint32_t word = 0;
        if (kind == Q8_0)
            word = q[4 * w] | (uint32_t)q[4 * w + 2] << 8 | (uint32_t)q[4 * w + 1] << 16 | (uint32_t)q[4 * w + 3] << 24;
        else
            for (int i = 0; i < 8; i++) {
                int input = 8 * w + i;
                uint32_t value = input < 16 ? q[input] & 15 : q[input - 16] >> 4;
                word |= value << (i % 2 * 16 + i / 2 * 4);
            }
        memcpy(group + 4 * (w * PANEL + output), &word, 4);
    }
    char *scales = group + 4 * PANEL * words_of(kind);
    memcpy(scales + 2 * output, block, 2);
    if (has_two_factors(kind)) memcpy(scales + 2 * (PANEL + output), block + 2, 2);
}
