/* GEMMs with weights of 4, 5, 6 or 8 bits, multiplied in their stored format.  y[r][o] = sum_i x[r][i] * w[o][i]
 *
 * A weight has groups of 32 inputs (GGUF's blocks): w = q * scale, q * scale + min, or (q - zero) * scale; q of E2M1
 * is twice a 4-bit number (sign, two exponent bits, one mantissa bit), by table lookup. A panel of PANEL outputs contains
 * its groups in sequence, each as 32-bit words with one output per lane, followed by its factors as float16:
 *
 *     group | word 0: o0 o1 .. o31 | word 1: .. | .. | scales: o0 .. o31 | min or zero: o0 .. o31 |
 *     a word of 4 bits  | lower half: inputs 0 2 4 6, upper half: inputs 1 3 5 7, the first one lowest
 *     a word of 8 bits  | bytes: inputs 0 2 1 3
 *     5 and 6 bits      | 4 words of 4 bits, then one word of fifth bits, or two of fifth and sixth bits in the same order:
 *                       | a half contains pairs 0 .. 15 (0 .. 7, 8 .. 15), the first one lowest
 *
 * The formats of 256 inputs (Q4_K, Q5_K, Q6_K) have two levels of factors: eight groups follow a head of float16, and
 * the factors of a group are 8-bit integers. Q6_K has one scale per 16 inputs.
 *
 *     head  | scales: o0 .. o31 | mins: o0 .. o31, except Q6_K |
 *     group | words .. | scales: o0 .. o31 | mins, Q6_K: scales of the last 16 inputs |
 *
 * so that shifts and masks leave pairs of adjacent inputs in the halves of a lane. x is quantised to 16-bit integers with
 * one scale per group: the largest becomes 32767, so the error is 2^-16 of it, less than the differences of float32
 * sums. Pairs are multiplied and summed as integers, without rounding. A row's result does not depend on the number of
 * rows.
 */
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define GROUP 32
#define SUPER 256 /* inputs per head */
#define ROWS_AT_ONCE 24 /* quantised together, by each thread separately: x of 8192 inputs takes 400 KiB */
#define MIN_GROUP_MAX 1e-30f  /* a group whose largest value is smaller contributes 0 */

enum kind { FLOAT32, Q4_0, Q4_1, Q8_0, Q4_ZEROS, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, E2M1, E4M3 };

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
typedef uint8_t octets __attribute__((vector_size(WIDTH)));
typedef int8_t signed_octets __attribute__((vector_size(WIDTH)));

typedef struct {
    int16_t *values; /* [ROWS_AT_ONCE, in] */
    float *scales;   /* [ROWS_AT_ONCE, in / GROUP] */
    int32_t *totals; /* [ROWS_AT_ONCE, in / GROUP]: sum of a group's integers */
    long in;
} QuantisedRows;

INLINE long words_of(enum kind kind) { return kind == Q8_0 ? 8 : 4; }

/* Words of the bits above the fourth. */
INLINE long high_words_of(enum kind kind) {
    return kind == Q6_K ? 2 : kind == Q5_0 || kind == Q5_1 || kind == Q5_K ? 1 : 0;
}

INLINE int has_min_head(enum kind kind) { return kind == Q4_K || kind == Q5_K; }

INLINE int has_head(enum kind kind) { return has_min_head(kind) || kind == Q6_K; }

INLINE int has_min(enum kind kind) { return kind == Q4_1 || kind == Q5_1; }

INLINE int has_two_factors(enum kind kind) { return has_min(kind) || kind == Q4_ZEROS; }

/* The offset that is subtracted from every stored number. */
INLINE int offset_of(enum kind kind) { return kind == Q4_0 ? 8 : kind == Q5_0 ? 16 : kind == E2M1 ? 12 : 0; }

/* Scales per group. */
INLINE long scales_per_group(enum kind kind) { return kind == Q6_K ? 2 : 1; }

/* Bytes of a group of a panel. */
INLINE long group_bytes(enum kind kind) {
    return PANEL * (4 * (words_of(kind) + high_words_of(kind)) + (has_two_factors(kind) ? 4 : 2));
}

/* Bytes before eight groups of a panel. */
INLINE long head_bytes(enum kind kind) { return has_head(kind) ? PANEL * (has_min_head(kind) ? 4 : 2) : 0; }

/* Bytes of a panel of `in` inputs. */
INLINE long panel_bytes(enum kind kind, long in) {
    if (kind == FLOAT32 || kind == E4M3) return (kind == E4M3 ? 1 : 4) * PANEL * in;
    return in / GROUP * group_bytes(kind) + in / SUPER * head_bytes(kind);
}

/* Floats of one thread's QuantisedRows, rounded up to whole cache lines. */
INLINE long quantised_rows_size(long in) {
    long size = ROWS_AT_ONCE * (in / 2 + 2 * (in / GROUP));
    return (size + 15) / 16 * 16;
}

INLINE QuantisedRows quantised_rows_at(float *scratch, long in) {
    long groups = in / GROUP;
    float *scales = scratch + ROWS_AT_ONCE * in / 2;
    return (QuantisedRows){(int16_t *)scratch, scales, (int32_t *)(scales + ROWS_AT_ONCE * groups), in};
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

/* Force the sum to be computed here: the compiler would otherwise compute all multiplications first, and spill them. */
#if defined(__x86_64__)
#define KEEP_IN_REGISTER(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define KEEP_IN_REGISTER(v) __asm__("" : "+w"(v))
#else
#define KEEP_IN_REGISTER(v)
#endif

/* Widen WIDTH finite float16 numbers. */
INLINE vec widen_float16(narrow stored) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps((__m256i)stored);
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps((__m128i)stored);
#else
    words bits = __builtin_convertvector(stored, words);
    vec size = (vec)((bits & 0x7fff) << 13) * 0x1p112f; /* the exponent's bias: 15 there, 127 here */
    return (vec)((words)size | (bits & 0x8000) << 16);
#endif
}

INLINE vec load_halves(const uint16_t *p) {
    narrow stored;
    memcpy(&stored, p, sizeof stored);
    return widen_float16(stored);
}

INLINE words load_words(const void *p) {
    words w;
    memcpy(&w, p, sizeof w);
    return w;
}

/* Quantise one group of a row; returns its scale, or NaN if a number is NaN or infinite. */
INLINE float quantise_group(const float *x, int16_t *values, int32_t *total) {
    vec largest = splat(0.0f), nothing = splat(0.0f);
    mask sum = {0};
    for (int i = 0; i < GROUP; i += WIDTH) {
        vec v = load(x + i);
        largest = larger(largest, larger(v, -v));
        nothing += v * 0.0f;
    }
    float most = largest_of(largest), fault = sum_of(nothing);
    float inverse = most > MIN_GROUP_MAX && fault == 0.0f ? 32767.0f / most : 0.0f;
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

/* Quantise rows. `order`: index into x of each input, or NULL for x's own order. */
static void quantise_rows(const float *x, long ldx, long rows, const int32_t *order, QuantisedRows to) {
    long groups = to.in / GROUP;
    float gathered[GROUP];
    for (long r = 0; r < rows; r++)
        for (long g = 0; g < groups; g++) {
            const float *group = x + r * ldx + g * GROUP;
            if (order) {
                for (int i = 0; i < GROUP; i++) gathered[i] = x[r * ldx + order[g * GROUP + i]];
                group = gathered;
            }
            to.scales[r * groups + g] =
                quantise_group(group, to.values + r * to.in + g * GROUP, to.totals + r * groups + g);
        }
}

/* Decode the E2M1 codes 0 .. 15 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) to twice their value plus 12, so that
 * none is negative. The codes are in the lower bytes of 16-bit lanes. */
INLINE halfwords decode_e2m1(halfwords numbers) {
#if defined(__SSSE3__)
    static const int8_t table[16] __attribute__((aligned(16))) = {12, 13, 14, 15, 16, 18, 20, 24,
                                                                  12, 11, 10, 9,  8,  6,  4,  0};
    __m128i values = _mm_load_si128((const __m128i *)table);
    halfwords places = numbers | 0x8000; /* the upper bytes become 0 */
#if defined(__AVX512BW__)
    return (halfwords)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)places);
#elif defined(__AVX2__)
    return (halfwords)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)places);
#else
    return (halfwords)_mm_shuffle_epi8(values, (__m128i)places);
#endif
#else
    halfwords half = numbers & 1, power = numbers >> 1 & 3, is_whole = 0 - (halfwords)(power != 0);
    halfwords size = ((2 | half) << power >> 1 & is_whole) | (half & ~is_whole), sign = 0 - (numbers >> 3);
    return ((size ^ sign) - sign) + 12;
#endif
}

/* The pair of inputs `k` of word `w`: two of its eight 4-bit numbers with their higher bits, or of its four 8-bit
 * numbers. Q6_K's numbers are returned minus 32: their two highest bits are those of a signed number. */
INLINE pairs unpack_pair(enum kind kind, words word, words high, int w, int k) {
    if (kind == Q8_0) return k ? (pairs)word >> 8 : (pairs)((halfwords)word << 8) >> 8;
    halfwords shifted = (halfwords)word >> (4 * k);
    int pair = 4 * w + k;
    if (kind == E2M1) return (pairs)decode_e2m1(shifted & 15);
    if (kind == Q6_K)
        return (pairs)(shifted & 15) | ((pairs)((halfwords)high << (14 - pair % 8 * 2)) >> 10 & ~15);
    if (high_words_of(kind)) {
        halfwords fifth = pair < 4 ? (halfwords)high << (4 - pair) : (halfwords)high >> (pair - 4);
        return (pairs)((shifted & 15) | (fifth & 16));
    }
    return (pairs)(k == 3 ? shifted : shifted & 15);
}

/* Load WIDTH unsigned or signed bytes as floats. Uses intrinsics, because GCC scalarises such short vectors. */
INLINE vec load_octets(const void *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)));
#else
    octets stored;
    memcpy(&stored, p, sizeof stored);
    return __builtin_convertvector(__builtin_convertvector(stored, mask), vec);
#endif
}

INLINE vec load_signed_octets(const void *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
#else
    signed_octets stored;
    memcpy(&stored, p, sizeof stored);
    return __builtin_convertvector(__builtin_convertvector(stored, mask), vec);
#endif
}

/* Factors of WIDTH outputs from `output` on. `second`: min or zero. */
typedef struct {
    vec scale, second;
} Factors;

/* `part`: index of the group's scale. */
INLINE Factors load_factors(enum kind kind, const char *head, const char *factors, long part, long output) {
    Factors f = {splat(0.0f), splat(0.0f)};
    if (has_head(kind)) {
        const uint16_t *of_all = (const uint16_t *)head + output;
        const char *own = factors + output;
        if (kind == Q6_K) {
            f.scale = load_halves(of_all) * load_signed_octets(own + part * PANEL);
        } else {
            f.scale = load_halves(of_all) * load_octets(own);
            f.second = load_halves(of_all + PANEL) * -load_octets(own + PANEL);
        }
    } else {
        const uint16_t *own = (const uint16_t *)factors + output;
        f.scale = load_halves(own);
        if (has_two_factors(kind)) f.second = load_halves(own + PANEL);
    }
    return f;
}

/* sums[R][PANEL] += x . panel, for R rows of integers from row `first` on. */
#define QUANTISED_TILE(KIND, R)                                                                                        \
    static void quantised_##KIND##_##R(const QuantisedRows *x, long first, const char *panel, float *sums) {           \
        long groups = x->in / GROUP;                                                                                   \
        const char *head = panel;                                                                                      \
        vec total[R][PANEL_VECTORS];                                                                                   \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                           \
            _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) total[r][v] = splat(0.0f);                 \
        for (long g = 0; g < groups; g++, panel += group_bytes(KIND)) {                                                \
            if (has_head(KIND) && g % (SUPER / GROUP) == 0) {                                                          \
                head = panel;                                                                                          \
                panel += head_bytes(KIND);                                                                             \
            }                                                                                                          \
            const int16_t *values = x->values + first * x->in + g * GROUP;                                             \
            const char *highs = panel + 4 * PANEL * words_of(KIND);                                                    \
            const char *factors = highs + 4 * PANEL * high_words_of(KIND);                                             \
            for (long line = 0; line < group_bytes(KIND); line += 64)                                                  \
                __builtin_prefetch(panel + line + 4096, 0, 3);                                                         \
            _Pragma("GCC unroll 2") for (int p = 0; p < scales_per_group(KIND); p++) {                                 \
                mask sum[R][PANEL_VECTORS];                                                                            \
                _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                   \
                    _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++)                                    \
                        sum[r][v] = (mask){0} -                                                                        \
                                    (offset_of(KIND) ? offset_of(KIND) * x->totals[(first + r) * groups + g] : 0);     \
                _Pragma("GCC unroll 8") for (int i = 0; i < words_of(KIND) / scales_per_group(KIND); i++) {            \
                    int w = p * words_of(KIND) / scales_per_group(KIND) + i;                                           \
                    words word[PANEL_VECTORS], high[PANEL_VECTORS];                                                    \
                    _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) {                                  \
                        word[v] = high[v] = load_words(panel + 4 * (w * PANEL + v * WIDTH));                           \
                        if (high_words_of(KIND)) high[v] = load_words(highs + 4 * (p * PANEL + v * WIDTH));            \
                    }                                                                                                  \
                    _Pragma("GCC unroll 4") for (int k = 0; k < 16 / words_of(KIND); k++) {                            \
                        pairs part[PANEL_VECTORS];                                                                     \
                        _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++)                                \
                            part[v] = unpack_pair(KIND, word[v], high[v], w, k);                                       \
                        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                         \
                            int32_t pair;                                                                              \
                            memcpy(&pair, values + r * x->in + w * (GROUP / words_of(KIND)) + 2 * k, sizeof pair);     \
                            pairs both = (pairs)((mask){0} + pair);                                                    \
                            _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) {                          \
                                sum[r][v] += multiply_pairs(part[v], both);                                            \
                                if (R > 2) KEEP_IN_REGISTER(sum[r][v]);                                                \
                            }                                                                                          \
                        }                                                                                              \
                    }                                                                                                  \
                }                                                                                                      \
                _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) {                                      \
                    Factors f = load_factors(KIND, head, factors, p, v * WIDTH);                                       \
                    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                             \
                        long at = (first + r) * groups + g;                                                            \
                        vec part = __builtin_convertvector(sum[r][v], vec);                                            \
                        if (KIND == Q4_ZEROS) part -= f.second * (float)x->totals[at]; /* below 2^24: exact */         \
                        part *= f.scale;                                                                               \
                        if (has_min(KIND) || has_min_head(KIND)) part += f.second * (float)x->totals[at];              \
                        total[r][v] += part * x->scales[at];                                                           \
                    }                                                                                                  \
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
QUANTISED_TILES(Q4_0) QUANTISED_TILES(Q4_1) QUANTISED_TILES(Q8_0) QUANTISED_TILES(Q4_ZEROS) QUANTISED_TILES(Q5_0)
QUANTISED_TILES(Q5_1) QUANTISED_TILES(Q4_K) QUANTISED_TILES(Q5_K) QUANTISED_TILES(Q6_K) QUANTISED_TILES(E2M1)

typedef void (*quantised_function)(const QuantisedRows *, long, const char *, float *);
static const quantised_function quantised_tiles[][QUANTISED_ROWS] = {
    [Q4_0] = QUANTISED_NAMES(Q4_0), [Q4_1] = QUANTISED_NAMES(Q4_1), [Q8_0] = QUANTISED_NAMES(Q8_0),
    [Q4_ZEROS] = QUANTISED_NAMES(Q4_ZEROS), [Q5_0] = QUANTISED_NAMES(Q5_0), [Q5_1] = QUANTISED_NAMES(Q5_1),
    [Q4_K] = QUANTISED_NAMES(Q4_K), [Q5_K] = QUANTISED_NAMES(Q5_K), [Q6_K] = QUANTISED_NAMES(Q6_K), [E2M1] = QUANTISED_NAMES(E2M1)};

/* sums[rows][PANEL] = x . panel */
static void multiply_quantised_panel(enum kind kind, const QuantisedRows *x, long rows, const char *panel, float *sums) {
    long tiles = (rows + QUANTISED_ROWS - 1) / QUANTISED_ROWS;
    for (long t = 0; t < tiles; t++) {
        long first = rows * t / tiles, last = rows * (t + 1) / tiles;
        quantised_tiles[kind][last - first - 1](x, first, panel, sums + first * PANEL);
    }
}

/* Number `i` of 32 in 16 bytes: the lower nibbles are 0 .. 15, the upper ones 16 .. 31. */
INLINE uint32_t stored_nibble(const uint8_t *q, int i) { return i < GROUP / 2 ? q[i] & 15 : q[i - GROUP / 2] >> 4; }

INLINE uint32_t stored_bit(const uint8_t *bits, int i) { return bits[i / 8] >> i % 8 & 1; }

/* Number `i` of a block's group, as GGUF stores it. */
INLINE uint32_t stored_number(enum kind kind, const uint8_t *block, long group, int i) {
    long half = group / 4, quarter = group % 4;
    switch (kind) {
    case Q8_0: return block[2 + i];
    case Q5_0: return stored_nibble(block + 6, i) | stored_bit(block + 2, i) << 4;
    case Q5_1: return stored_nibble(block + 8, i) | stored_bit(block + 4, i) << 4;
    case Q4_K: return block[16 + group / 2 * GROUP + i] >> group % 2 * 4 & 15;
    case Q5_K: return (block[48 + group / 2 * GROUP + i] >> group % 2 * 4 & 15) | (block[16 + i] >> group & 1) << 4;
    case Q6_K:
        return (block[half * 64 + quarter % 2 * GROUP + i] >> quarter / 2 * 4 & 15) |
               (block[128 + half * GROUP + i] >> quarter * 2 & 3) << 4;
    default: return stored_nibble(block + (has_two_factors(kind) ? 4 : 2), i);
    }
}

/* Pack word `w` of a group: the lower 4 bits of its numbers, or all 8. */
INLINE uint32_t pack_word(enum kind kind, const uint8_t *block, long group, int w) {
    uint32_t word = 0;
    int count = GROUP / words_of(kind), bits = 32 / count;
    for (int i = 0; i < count; i++) {
        uint32_t number = stored_number(kind, block, group, count * w + i) & (kind == Q8_0 ? 255 : 15);
        word |= number << (i % 2 * 16 + i / 2 * bits);
    }
    return word;
}

/* Pack word `w` of the higher bits of a group's numbers. */
INLINE uint32_t pack_high_word(enum kind kind, const uint8_t *block, long group, int w) {
    uint32_t word = 0;
    int count = GROUP / high_words_of(kind), bits = 32 / count;
    for (int i = 0; i < count; i++) {
        uint32_t high = stored_number(kind, block, group, count * w + i) >> 4;
        word |= (kind == Q6_K ? high ^ 2 : high) << (i % 2 * 16 + i / 2 * bits);
    }
    return word;
}

/* Unpack a group's scale and min of Q4_K and Q5_K, 6 bits each: eight of each in 12 bytes. */
INLINE void unpack_factors(const uint8_t *stored, long group, char *scale, char *min) {
    if (group < 4) {
        *scale = stored[group] & 63;
        *min = stored[group + 4] & 63;
    } else {
        *scale = (stored[group + 4] & 15) | stored[group - 4] >> 6 << 4;
        *min = stored[group + 4] >> 4 | stored[group] >> 6 << 4;
    }
}

/* Pack the head of one output's eight groups. */
INLINE void pack_head(enum kind kind, const uint8_t *block, long output, char *head) {
    memcpy(head + 2 * output, block + (kind == Q6_K ? 208 : 0), 2);
    if (has_min_head(kind)) memcpy(head + 2 * (PANEL + output), block + 2, 2);
}

/* Pack one group of one output from its GGUF block. */
INLINE void pack_group(enum kind kind, const uint8_t *block, long group, long output, char *to) {
    for (int w = 0; w < words_of(kind); w++, to += 4 * PANEL) {
        uint32_t word = pack_word(kind, block, group, w);
        memcpy(to + 4 * output, &word, 4);
    }
    for (int w = 0; w < high_words_of(kind); w++, to += 4 * PANEL) {
        uint32_t word = pack_high_word(kind, block, group, w);
        memcpy(to + 4 * output, &word, 4);
    }
    if (has_min_head(kind)) {
        unpack_factors(block + 4, group, to + output, to + PANEL + output);
    } else if (kind == Q6_K) {
        to[output] = block[192 + 2 * group];
        to[PANEL + output] = block[192 + 2 * group + 1];
    } else {
        memcpy(to + 2 * output, block, 2);
        if (has_two_factors(kind)) memcpy(to + 2 * (PANEL + output), block + 2, 2);
    }
}

/* Pack a panel of outputs, whose blocks have a stride of row_bytes. Outputs after the last one are zeros. */
INLINE void pack_panel(enum kind kind, const uint8_t *blocks, long block_bytes, long outputs, long in, char *panel) {
    long together = has_head(kind) ? SUPER / GROUP : 1, row_bytes = in / GROUP / together * block_bytes;
    memset(panel, 0, panel_bytes(kind, in));
    if (kind == E4M3) {
        for (long c = 0; c < outputs; c++)
            for (long i = 0; i < in; i++) panel[i * PANEL + c] = (char)blocks[c * in + i];
        return;
    }
    for (long g = 0; g < in / GROUP; g++, blocks += g % together ? 0 : block_bytes) {
        if (has_head(kind) && g % together == 0) {
            for (long c = 0; c < outputs; c++) pack_head(kind, blocks + c * row_bytes, c, panel);
            panel += head_bytes(kind);
        }
        for (long c = 0; c < outputs; c++) pack_group(kind, blocks + c * row_bytes, g % together, c, panel);
        panel += group_bytes(kind);
    }
}
