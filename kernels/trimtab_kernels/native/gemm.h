/* GEMMs with packed weights.  y[r][o] = sum_i x[r][i] * w[o][i]
 *
 * Weights of 4 to 8 bits keep their format (quantised.h; float8 below). A float32 weight [out, in] is stored as panels
 * of PANEL outputs, so that a tile reads it as one stream:
 *
 *     packed  | in 0: o0 o1 .. o31 | in 1: o0 o1 .. o31 | ... || panel 1: in 0: o32 ..      (zeros after the last o)
 *
 * A tile is up to TILE_ROWS rows of one panel, all sums in registers. While the rows of a panel are computed, the
 * next panel is prefetched. Few rows are bound by reading the weights once, many by the multiplication.
 */
#pragma once

#include "quantised.h"

typedef struct {
    const char *weight; /* packed */
    int64_t kind;       /* enum kind */
} Panel;

typedef struct {
    const Panel *panels;
    const float *bias;    /* [out] or NULL */
    const float *scales;  /* [out] or NULL: factors of the sums, before the bias */
    const int32_t *order; /* [in] or NULL: index into x of each input; quantised weights only */
    long out, in;
    long is_quantised; /* all panels are quantised, possibly with several kinds */
} Matrix;

#define NEAR_FLOATS 1024 /* prefetch distance with one tile per panel: 4 KiB */
#define LINE_FLOATS 16   /* per cache line */
enum fetch { FETCH_NOTHING, FETCH_LINE, FETCH_NEAR };

/* y += x . w for R rows of one panel; ldw is w's row stride. FETCH_LINE: prefetch one line of `ahead` per i. */
#define TILE(R)                                                                                                        \
    static void tile_##R(const float *x, long ldx, const float *w, long ldw, long in, const float *ahead,              \
                         enum fetch fetch, float *y, long ldy) {                                                       \
        vec sum[R][PANEL_VECTORS];                                                                                     \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                           \
            _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) sum[r][v] = load(y + r * ldy + v * WIDTH); \
        for (long i = 0; i < in; i++) {                                                                                \
            vec part[PANEL_VECTORS];                                                                                   \
            if (fetch == FETCH_LINE) __builtin_prefetch(ahead + i * LINE_FLOATS, 0, 2);                                \
            if (fetch == FETCH_NEAR)                                                                                   \
                for (int v = 0; v < PANEL; v += LINE_FLOATS)                                                           \
                    __builtin_prefetch(w + i * PANEL + v + NEAR_FLOATS, 0, 3);                                         \
            _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) part[v] = load(w + i * ldw + v * WIDTH);   \
            _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                                     \
                vec value = splat(x[r * ldx + i]);                                                                     \
                _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) sum[r][v] += value * part[v];          \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                           \
            _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) store(y + r * ldy + v * WIDTH, sum[r][v]); \
    }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if TILE_ROWS > 6
TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif

/* One row of a packed panel: four sums per vector, because a single one would be bound by its latency. */
static void tile_row(const float *x, const float *w, long in, float *y) {
    vec sum[4][PANEL_VECTORS] = {{{0}}};
    long i = 0;
    for (; i + 4 <= in; i += 4)
        _Pragma("GCC unroll 4") for (int u = 0; u < 4; u++) {
            const float *row = w + (i + u) * PANEL;
            for (int v = 0; v < PANEL; v += LINE_FLOATS) __builtin_prefetch(row + v + NEAR_FLOATS, 0, 3);
            _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++)
                sum[u][v] += splat(x[i + u]) * load(row + v * WIDTH);
        }
    for (; i < in; i++)
        for (int v = 0; v < PANEL_VECTORS; v++) sum[0][v] += splat(x[i]) * load(w + i * PANEL + v * WIDTH);
    for (int v = 0; v < PANEL_VECTORS; v++)
        store(y + v * WIDTH, load(y + v * WIDTH) + (sum[0][v] + sum[1][v]) + (sum[2][v] + sum[3][v]));
}

typedef void (*tile_function)(const float *, long, const float *, long, long, const float *, enum fetch, float *, long);
static const tile_function tiles[] = {0, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6,
#if TILE_ROWS > 6
                                      tile_7, tile_8, tile_9, tile_10, tile_11, tile_12,
#endif
};

/* Load WIDTH float8 (e4m3) numbers, 256 times smaller: the bits are those of float16, except for the exponent's bias (7
 * instead of 15). None may be NaN. */
INLINE vec load_e4m3(const char *p) {
    signed_octets stored;
    memcpy(&stored, p, sizeof stored);
    signed_narrow wide = __builtin_convertvector(stored, signed_narrow); /* the sign in the two highest bits */
    return widen_float16(((narrow)wide << 7) & 0xbf80);
}

/* sums += x . panel for R rows, input by input: a row's result does not depend on the number of rows. */
#define E4M3_TILE(R)                                                                                                   \
    static void e4m3_tile_##R(const float *x, long ldx, const char *w, long in, float *sums) {                         \
        vec sum[R][PANEL_VECTORS] = {{{0}}};                                                                           \
        for (long i = 0; i < in; i++, w += PANEL) {                                                                    \
            vec part[PANEL_VECTORS];                                                                                   \
            __builtin_prefetch(w + 4 * NEAR_FLOATS, 0, 3);                                                             \
            _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) part[v] = load_e4m3(w + v * WIDTH);        \
            _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                                     \
                vec value = splat(x[r * ldx + i]);                                                                     \
                _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++) sum[r][v] += value * part[v];          \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                           \
            _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECTORS; v++)                                            \
                store(sums + r * PANEL + v * WIDTH, sum[r][v]);                                                        \
    }
E4M3_TILE(1) E4M3_TILE(2) E4M3_TILE(3) E4M3_TILE(4) E4M3_TILE(5) E4M3_TILE(6)
#if TILE_ROWS > 6
E4M3_TILE(7) E4M3_TILE(8) E4M3_TILE(9) E4M3_TILE(10) E4M3_TILE(11) E4M3_TILE(12)
#endif

typedef void (*e4m3_function)(const float *, long, const char *, long, float *);
static const e4m3_function e4m3_tiles[] = {0, e4m3_tile_1, e4m3_tile_2, e4m3_tile_3, e4m3_tile_4, e4m3_tile_5,
                                           e4m3_tile_6,
#if TILE_ROWS > 6
                                           e4m3_tile_7, e4m3_tile_8, e4m3_tile_9, e4m3_tile_10, e4m3_tile_11,
                                           e4m3_tile_12,
#endif
};

/* sums[rows][PANEL] = x . panel */
static void multiply_e4m3_panel(const float *x, long ldx, long rows, const char *panel, long in, float *sums) {
    long blocks = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (long block = 0; block < blocks; block++) {
        long first = rows * block / blocks, last = rows * (block + 1) / blocks;
        e4m3_tiles[last - first](x + first * ldx, ldx, panel, in, sums + first * PANEL);
    }
}

/* sums[rows][PANEL] = x . panel; `panel` is followed by the next packed panel. */
static void multiply_panel(const float *x, long ldx, long rows, const float *panel, long in, float *sums) {
    long blocks = (rows + TILE_ROWS - 1) / TILE_ROWS;
    memset(sums, 0, sizeof(float) * rows * PANEL);
    if (rows == 1) {
        tile_row(x, panel, in, sums);
        return;
    }
    for (long block = 0; block < blocks; block++) {
        long first = rows * block / blocks, last = rows * (block + 1) / blocks;
        /* The next panel has in * PANEL / LINE_FLOATS lines: the first passes prefetch it, a line per i. */
        enum fetch fetch = blocks == 1 ? FETCH_NEAR : block * LINE_FLOATS < PANEL ? FETCH_LINE : FETCH_NOTHING;
        const float *ahead = panel + PANEL * in + block * LINE_FLOATS * in;
        tiles[last - first](x + first * ldx, ldx, panel, PANEL, in, ahead, fetch, sums + first * PANEL, PANEL);
    }
}

/* rows of y, columns [first, first + count): sums + bias, added or stored. */
INLINE void finish_panel(const float *sums, const float *bias, long count, long rows, float *y, long ldy, int adds) {
    for (long r = 0; r < rows; r++) {
        const float *from = sums + r * PANEL;
        float *to = y + r * ldy;
        if (count == PANEL) {
            for (int v = 0; v < PANEL; v += WIDTH) {
                vec value = load(from + v);
                if (bias) value += load(bias + v);
                store(to + v, adds ? load(to + v) + value : value);
            }
        } else {
            for (long c = 0; c < count; c++) {
                float value = from[c] + (bias ? bias[c] : 0.0f);
                to[c] = adds ? to[c] + value : value;
            }
        }
    }
}

#define SLICE_ROWS 240 /* rows at once, a multiple of TILE_ROWS: a layer's activations stay in the cache */

INLINE long panels_of(long out) { return (out + PANEL - 1) / PANEL; }
INLINE long min_of(long a, long b) { return a < b ? a : b; }
INLINE long max_of(long a, long b) { return a > b ? a : b; }
INLINE long units_of(long count, long size) { return (count + size - 1) / size; }

/* The rows of x in the format that the matrix is multiplied with: quantised into this thread's scratch, or
 * unchanged. */
typedef struct {
    const float *x;
    long ldx, rows;
    QuantisedRows integers;
} PreparedRows;

INLINE PreparedRows prepare_rows(const Matrix *m, const float *x, long ldx, long rows, float *scratch) {
    PreparedRows made = {x, ldx, rows, {0}};
    if (m->is_quantised) {
        made.integers = quantised_rows_at(scratch, m->in);
        quantise_rows(x, ldx, rows, m->order, made.integers);
    }
    return made;
}

INLINE void multiply_one_panel(const Matrix *m, const PreparedRows *rows, long panel, float *sums) {
    const Panel *p = m->panels + panel;
    if (m->is_quantised)
        multiply_quantised_panel(p->kind, &rows->integers, rows->rows, p->weight, sums);
    else if (p->kind == E4M3)
        multiply_e4m3_panel(rows->x, rows->ldx, rows->rows, p->weight, m->in, sums);
    else
        multiply_panel(rows->x, rows->ldx, rows->rows, (const float *)p->weight, m->in, sums);
}

/* Multiply sums[rows][PANEL] by the scales of the outputs from `output` on. */
INLINE void scale_panel(const Matrix *m, long output, long rows, float *sums) {
    long columns = min_of(PANEL, m->out - output);
    if (!m->scales) return;
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < columns; c++) sums[r * PANEL + c] *= m->scales[output + c];
}

/* Number of rows that are multiplied at once. */
INLINE long rows_at_once(const Matrix *m, long rows) { return m->is_quantised ? min_of(ROWS_AT_ONCE, rows) : rows; }

/* Compute columns of y[rows][out] = x . m, or y += x . m: those of the panels [first_panel, last_panel), a stage of
 * units of one panel. At most SLICE_ROWS rows. */
static void multiply_panels(Team *team, const Matrix *m, long first_panel, long last_panel, const float *x, long ldx,
                            long rows, float *y, long ldy, int adds, float *scratch) {
    float sums[SLICE_ROWS * PANEL] __attribute__((aligned(64)));
    long step = rows_at_once(m, rows), unit;
    for (long r = 0; r < rows; r += step) {
        long count = min_of(step, rows - r);
        PreparedRows taken = prepare_rows(m, x + r * ldx, ldx, count, scratch);
        Stage stage = begin_stage(team, last_panel - first_panel, 1);
        while ((unit = next_unit(&stage)) >= 0) {
            long p = first_panel + unit, column = p * PANEL;
            multiply_one_panel(m, &taken, p, sums);
            scale_panel(m, column, count, sums);
            if (!win_unit(team, unit)) continue;
            finish_panel(sums, m->bias ? m->bias + column : NULL, min_of(PANEL, m->out - column), count,
                         y + r * ldy + column, ldy, adds);
            finish_unit(team, unit);
        }
    }
}

/* Compute all columns of y. */
INLINE void multiply(Team *team, const Matrix *m, const float *x, long ldx, long rows, float *y, long ldy, int adds,
                     float *scratch) {
    multiply_panels(team, m, 0, panels_of(m->out), x, ldx, rows, y, ldy, adds, scratch);
}

/* gates = silu(gates) * ups, both [count][PANEL]. `column`: their column in m's halves. */
INLINE void gate_panel(const Matrix *m, long column, float *gates, float *ups, long count) {
    long size = m->out / 2, columns = min_of(PANEL, size - column);
    if (m->bias) {
        for (long r = 0; r < count; r++)
            for (long c = 0; c < columns; c++) {
                gates[r * PANEL + c] += m->bias[column + c];
                ups[r * PANEL + c] += m->bias[size + column + c];
            }
    }
    for (long i = 0; i < count * PANEL; i += WIDTH) {
        vec gate = load(gates + i);
        store(gates + i, gate / (1.0f + exp_of(-gate)) * load(ups + i));
    }
}

/* Scale a panel of gates and one of ups. `column`: their column in m's halves. */
INLINE void scale_halves(const Matrix *m, long column, long rows, float *gates, float *ups) {
    long size = m->out / 2, columns = min_of(PANEL, size - column);
    if (!m->scales) return;
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < columns; c++) {
            gates[r * PANEL + c] *= m->scales[column + c];
            ups[r * PANEL + c] *= m->scales[size + column + c];
        }
}

/* y[rows][out / 2] = silu(gate) * up. The panels of m alternate: gate's first, up's first, gate's second, ... */
static void multiply_gated(Team *team, const Matrix *m, const float *x, long ldx, long rows, float *y, long ldy,
                           float *scratch) {
    float gates[SLICE_ROWS * PANEL] __attribute__((aligned(64)));
    float ups[SLICE_ROWS * PANEL] __attribute__((aligned(64)));
    long step = rows_at_once(m, rows), size = m->out / 2, unit;
    for (long r = 0; r < rows; r += step) {
        long count = min_of(step, rows - r);
        PreparedRows taken = prepare_rows(m, x + r * ldx, ldx, count, scratch);
        Stage stage = begin_stage(team, panels_of(size), 1);
        while ((unit = next_unit(&stage)) >= 0) {
            long column = unit * PANEL;
            multiply_one_panel(m, &taken, 2 * unit, gates);
            multiply_one_panel(m, &taken, 2 * unit + 1, ups);
            scale_halves(m, column, count, gates, ups);
            gate_panel(m, column, gates, ups, count);
            if (!win_unit(team, unit)) continue;
            finish_panel(gates, NULL, min_of(PANEL, size - column), count, y + r * ldy + column, ldy, 0);
            finish_unit(team, unit);
        }
    }
}
