/* Products with weights of 4, 5, 6 or 8 bits, multiplied as they are stored.  y[r][o] = sum_i x[r][i] * w[o][i]
 *
 * A weight has groups of 32 inputs (GGUF's blocks): w = q * scale, q * scale + least, or (q - zero) * scale; q of E2M1
 * is twice a number of 4 bits with a sign, two exponent bits and one of mantissa, by a table. A panel of
 * PANEL outputs holds its groups one behind the other, each as words of 32 bits, an output's in one lane, then its
 * factors as float16:
 *
 *     group | word 0: o0 o1 .. o31 | word 1: .. | .. | scales: o0 .. o31 | least or zero: o0 .. o31 |
 *     a word of 4 bits  | its lower half: inputs 0 2 4 6, its upper half: inputs 1 3 5 7, the first lowest
 *     a word of 8 bits  | bytes: inputs 0 2 1 3
 *     5 and 6 bits      | 4 words of 4 bits, then one of fifth bits, or two of fifth and sixth ones in the same order:
 *                       | a half has pairs 0 .. 15 (0 .. 7, 8 .. 15), the first lowest
 *
 * The forms of 256 inputs (Q4_K, Q5_K, Q6_K) have factors of factors: eight groups follow a head of float16, and the
 * factors of a group are integers of 8 bits. Q6_K has a scale per 16 inputs.
 *
 *     head  | scales: o0 .. o31 | leasts: o0 .. o31, but not Q6_K |
 *     group | words .. | scales: o0 .. o31 | leasts, Q6_K: scales of the last 16 inputs |
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
#define SUPER 256 /* inputs below one head */
#define ROWS_AT_ONCE 24 /* turned into integers together, by each thread for itself: x of 8192 inputs takes 400 KiB */
#define LEAST_X 1e-30f  /* a group whose largest is below adds nothing */

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
    int32_t *totals; /* [ROWS_AT_ONCE, in / GROUP]: of a group's integers */
    long in;
} Integers;

INLINE long words_of(enum kind kind) { return kind == Q8_0 ? 8 : 4; }

/* Words of what a number has beyond 4 bits. */
INLINE long high_words_of(enum kind kind) {
    return kind == Q6_K ? 2 : kind == Q5_0 || kind == Q5_1 || kind == Q5_K ? 1 : 0;
}

INLINE int has_leasts_head(enum kind kind) { return kind == Q4_K || kind == Q5_K; }

INLINE int has_head(enum kind kind) { return has_leasts_head(kind) || kind == Q6_K; }

INLINE int has_least(enum kind kind) { return kind == Q4_1 || kind == Q5_1; }

INLINE int has_two_factors(enum kind kind) { return has_least(kind) || kind == Q4_ZEROS; }

/* What is taken from every stored number. */
INLINE int offset_of(enum kind kind) { return kind == Q4_0 ? 8 : kind == Q5_0 ? 16 : kind == E2M1 ? 12 : 0; }

/* Scales of a group. */
INLINE long parts_of(enum kind kind) { return kind == Q6_K ? 2 : 1; }

/* Bytes of a group of a panel. */
INLINE long group_bytes(enum kind kind) {
    return PANEL * (4 * (words_of(kind) + high_words_of(kind)) + (has_two_factors(kind) ? 4 : 2));
}

/* Bytes before eight groups of a panel. */
INLINE long head_bytes(enum kind kind) { return has_head(kind) ? PANEL * (has_leasts_head(kind) ? 4 : 2) : 0; }

/* Bytes of a panel of `in` inputs. */
INLINE long panel_bytes(enum kind kind, long in) {
    if (kind == FLOAT32 || kind == E4M3) return (kind == E4M3 ? 1 : 4) * PANEL * in;
    return in / GROUP * group_bytes(kind) + in / SUPER * head_bytes(kind);
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
INLINE vec halves_of(narrow stored) {
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
    return halves_of(stored);
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

/* `order`: which of x's numbers each input is; NULL: they come in turn. */
static void integers_of(const float *x, long ldx, long rows, const int32_t *order, Integers to) {
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
                to_integers(group, to.values + r * to.in + g * GROUP, to.totals + r * groups + g);
        }
}

/* Twice the numbers 0 .. 15 of E2M1, which are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below 0, and 12 more: in the
 * lower bytes of lanes of 16 bits, so that none is negative. */
INLINE halfwords e2m1_of(halfwords numbers) {
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

/* The pair of inputs `k` of word `w`: two of its eight numbers of 4 bits with their higher ones, or of its four of 8.
 * Numbers of Q6_K come less 32: the two highest bits are those of a signed number. */
INLINE pairs pair_of(enum kind kind, words word, words high, int w, int k) {
    if (kind == Q8_0) return k ? (pairs)word >> 8 : (pairs)((halfwords)word << 8) >> 8;
    halfwords shifted = (halfwords)word >> (4 * k);
    int pair = 4 * w + k;
    if (kind == E2M1) return (pairs)e2m1_of(shifted & 15);
    if (kind == Q6_K)
        return (pairs)(shifted & 15) | ((pairs)((halfwords)high << (14 - pair % 8 * 2)) >> 10 & ~15);
    if (high_words_of(kind)) {
        halfwords fifth = pair < 4 ? (halfwords)high << (4 - pair) : (halfwords)high >> (pair - 4);
        return (pairs)((shifted & 15) | (fifth & 16));
    }
    return (pairs)(k == 3 ? shifted : shifted & 15);
}

/* WIDTH bytes as numbers, without signs or with them. By intrinsics: GCC takes such short vectors apart. */
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

/* Of WIDTH outputs from `output` on. `second`: least or zero. */
typedef struct {
    vec scale, second;
} Factors;

/* `part`: of a group's scales. */
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
    static void quantised_##KIND##_##R(const Integers *x, long first, const char *panel, float *sums) {                \
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
            _Pragma("GCC unroll 2") for (int p = 0; p < parts_of(KIND); p++) {                                         \
                mask sum[R][PANEL_VECTORS];                                                                            \
                _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                   \
                    _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++)                                    \
                        sum[r][v] = (mask){0} -                                                                        \
                                    (offset_of(KIND) ? offset_of(KIND) * x->totals[(first + r) * groups + g] : 0);     \
                _Pragma("GCC unroll 8") for (int i = 0; i < words_of(KIND) / parts_of(KIND); i++) {                    \
                    int w = p * words_of(KIND) / parts_of(KIND) + i;                                                   \
                    words word[PANEL_VECTORS], high[PANEL_VECTORS];                                                    \
                    _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) {                                  \
                        word[v] = high[v] = load_words(panel + 4 * (w * PANEL + v * WIDTH));                           \
                        if (high_words_of(KIND)) high[v] = load_words(highs + 4 * (p * PANEL + v * WIDTH));            \
                    }                                                                                                  \
                    _Pragma("GCC unroll 4") for (int k = 0; k < 16 / words_of(KIND); k++) {                            \
                        pairs part[PANEL_VECTORS];                                                                     \
                        _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++)                                \
                            part[v] = pair_of(KIND, word[v], high[v], w, k);                                           \
                        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                         \
                            int32_t pair;                                                                              \
                            memcpy(&pair, values + r * x->in + w * (GROUP / words_of(KIND)) + 2 * k, sizeof pair);     \
                            pairs both = (pairs)((mask){0} + pair);                                                    \
                            _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) {                          \
                                sum[r][v] += multiply_pairs(part[v], both);                                            \
                                if (R > 2) MADE_HERE(sum[r][v]);                                                       \
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
                        if (has_least(KIND) || has_leasts_head(KIND)) part += f.second * (float)x->totals[at];         \
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

typedef void (*quantised_function)(const Integers *, long, const char *, float *);
static const quantised_function quantised_tiles[][QUANTISED_ROWS] = {
    [Q4_0] = QUANTISED_NAMES(Q4_0), [Q4_1] = QUANTISED_NAMES(Q4_1), [Q8_0] = QUANTISED_NAMES(Q8_0),
    [Q4_ZEROS] = QUANTISED_NAMES(Q4_ZEROS), [Q5_0] = QUANTISED_NAMES(Q5_0), [Q5_1] = QUANTISED_NAMES(Q5_1),
    [Q4_K] = QUANTISED_NAMES(Q4_K), [Q5_K] = QUANTISED_NAMES(Q5_K), [Q6_K] = QUANTISED_NAMES(Q6_K), [E2M1] = QUANTISED_NAMES(E2M1)};

/* sums[rows][PANEL] = x . panel */
static void multiply_quantised_panel(enum kind kind, const Integers *x, long rows, const char *panel, float *sums) {
    long tiles = (rows + QUANTISED_ROWS - 1) / QUANTISED_ROWS;
    for (long t = 0; t < tiles; t++) {
        long first = rows * t / tiles, last = rows * (t + 1) / tiles;
        quantised_tiles[kind][last - first - 1](x, first, panel, sums + first * PANEL);
    }
}

/* Number `i` of 32 in 16 bytes: the lower halves are 0 .. 15, the upper ones 16 .. 31. */
INLINE uint32_t nibble_of(const uint8_t *q, int i) { return i < GROUP / 2 ? q[i] & 15 : q[i - GROUP / 2] >> 4; }

INLINE uint32_t bit_of(const uint8_t *bits, int i) { return bits[i / 8] >> i % 8 & 1; }

/* Number `i` of a block's group, as GGUF stores it. */
INLINE uint32_t number_of(enum kind kind, const uint8_t *block, long group, int i) {
    long half = group / 4, quarter = group % 4;
    switch (kind) {
    case Q8_0: return block[2 + i];
    case Q5_0: return nibble_of(block + 6, i) | bit_of(block + 2, i) << 4;
    case Q5_1: return nibble_of(block + 8, i) | bit_of(block + 4, i) << 4;
    case Q4_K: return block[16 + group / 2 * GROUP + i] >> group % 2 * 4 & 15;
    case Q5_K: return (block[48 + group / 2 * GROUP + i] >> group % 2 * 4 & 15) | (block[16 + i] >> group & 1) << 4;
    case Q6_K:
        return (block[half * 64 + quarter % 2 * GROUP + i] >> quarter / 2 * 4 & 15) |
               (block[128 + half * GROUP + i] >> quarter * 2 & 3) << 4;
    default: return nibble_of(block + (has_two_factors(kind) ? 4 : 2), i);
    }
}

/* Word `w` of a group, its numbers' lower 4 bits or all 8. */
INLINE uint32_t word_of(enum kind kind, const uint8_t *block, long group, int w) {
    uint32_t word = 0;
    int count = GROUP / words_of(kind), bits = 32 / count;
    for (int i = 0; i < count; i++) {
        uint32_t number = number_of(kind, block, group, count * w + i) & (kind == Q8_0 ? 255 : 15);
        word |= number << (i % 2 * 16 + i / 2 * bits);
    }
    return word;
}

/* Word `w` of the higher bits of a group's numbers. */
INLINE uint32_t high_word_of(enum kind kind, const uint8_t *block, long group, int w) {
    uint32_t word = 0;
    int count = GROUP / high_words_of(kind), bits = 32 / count;
    for (int i = 0; i < count; i++) {
        uint32_t high = number_of(kind, block, group, count * w + i) >> 4;
        word |= (kind == Q6_K ? high ^ 2 : high) << (i % 2 * 16 + i / 2 * bits);
    }
    return word;
}

/* A group's scale and least of Q4_K and Q5_K, 6 bits each: eight of either in 12 bytes. */
INLINE void unpack_factors(const uint8_t *stored, long group, char *scale, char *least) {
    if (group < 4) {
        *scale = stored[group] & 63;
        *least = stored[group + 4] & 63;
    } else {
        *scale = (stored[group + 4] & 15) | stored[group - 4] >> 6 << 4;
        *least = stored[group + 4] >> 4 | stored[group] >> 6 << 4;
    }
}

/* The head of one output's eight groups. */
INLINE void pack_head(enum kind kind, const uint8_t *block, long output, char *head) {
    memcpy(head + 2 * output, block + (kind == Q6_K ? 208 : 0), 2);
    if (has_leasts_head(kind)) memcpy(head + 2 * (PANEL + output), block + 2, 2);
}

/* One group of one output, from GGUF's block of it. */
INLINE void pack_group(enum kind kind, const uint8_t *block, long group, long output, char *to) {
    for (int w = 0; w < words_of(kind); w++, to += 4 * PANEL) {
        uint32_t word = word_of(kind, block, group, w);
        memcpy(to + 4 * output, &word, 4);
    }
    for (int w = 0; w < high_words_of(kind); w++, to += 4 * PANEL) {
        uint32_t word = high_word_of(kind, block, group, w);
        memcpy(to + 4 * output, &word, 4);
    }
    if (has_leasts_head(kind)) {
        unpack_factors(block + 4, group, to + output, to + PANEL + output);
    } else if (kind == Q6_K) {
        to[output] = block[192 + 2 * group];
        to[PANEL + output] = block[192 + 2 * group + 1];
    } else {
        memcpy(to + 2 * output, block, 2);
        if (has_two_factors(kind)) memcpy(to + 2 * (PANEL + output), block + 2, 2);
    }
}

/* A panel of the outputs whose blocks lie row_bytes apart. Outputs behind the last are zeros. */
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
