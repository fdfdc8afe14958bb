/* Decoder layers of the Llama family in float32 on the CPU: one call computes a step's layers, or halves of them.
 *
 * Compiled once per instruction set (build.py) and called by ctypes with plain addresses (library.py): neither
 * Python's ABI nor torch's. The caller has checked the shapes; the only possible failure is a failed allocation.
 *
 * A step's rows are computed SLICE_ROWS at a time, so that the scratch memory does not grow with the step. All threads
 * process the slices together, in stages (team.h) that end before other threads' results are read:
 *
 *     norm | q, k, v | heads: norm, rotate, write k and v | attention | output, add | norm | gate, up | down, add |
 *
 * Requests of one step may share KV blocks that this step computes, and their rows come in any order. So a layer writes
 * k and v of all slices before the attention of the first; a step of several slices normalises its rows twice for it:
 *
 *     for each slice: norm | k, v | heads: norm, rotate, write |
 *     for each slice: norm | q | heads: norm, rotate | attention | output, add | norm | gate, up | down, add |
 */
#include "vectors.h"

#include <stdlib.h>

#include "team.h"

#include "gemm.h"

#include "pack.h"

#include "rows.h"

#include "attention.h"

typedef struct {
    long hidden_size, num_heads, num_kv_heads, head_size, intermediate_size;
    float eps, scale;
} Shape;

typedef struct {
    const float *input_norm, *query_norm, *key_norm, *post_norm; /* query_norm, key_norm: NULL if the model has none */
    Matrix qkv, output, gate_up, down;
} Layer;

/* Rows [row, row + tokens) of one sequence, after `before` earlier tokens; its block table is at `table`. */
typedef struct {
    int64_t row, tokens, before, table;
} Sequence;

typedef struct {
    float *hidden;         /* [num_tokens, hidden_size] */
    const float *rotation; /* [num_tokens, head_size / 2] (cos, sin) */
    const int64_t *slots;  /* [num_tokens] */
    const Sequence *sequences;
    const int32_t *tables;
    float *const *keys, *const *values; /* per layer */
    long num_tokens, num_sequences, block_size, threads;
    float *scratch;
} Step;

enum layer_half { ATTENTION = 1, MLP = 2 };

typedef struct {
    const Shape *shape;
    const Layer *layers;
    const Step *step;
    float *partial; /* receives the results instead of hidden, for a tensor-parallel sum */
    long first, count;
    int halves;
    AttentionUnit *units;
    long *first_unit; /* of each slice */
    uint32_t *states; /* of units: team.h */
} Work;

typedef struct {
    float *normalised, *qkv, *attended, *wide, *few_normalised, *thread_memory; /* the last two are per thread */
} Scratch;

#define FEW_ROWS 2     /* up to here every thread normalises all rows itself, which is faster than a stage */
#define ROWS_OF_UNIT 4 /* normalised by one thread */
#define HEADS_OF_UNIT 16

void trimtab_use_threads(void *parallel, void *number, void *size) {
    gomp_parallel = (parallel_function)parallel;
    thread_number = (int (*)(void))number;
    team_size = (int (*)(void))size;
}

/* Hash of the sources of this build: build.py's sources_hash(). */
const char *trimtab_sources(void) { return SOURCES_HASH; }

long trimtab_panel(void) { return PANEL; }

INLINE int has_slices(const Step *step) { return step->num_tokens > SLICE_ROWS; }

INLINE long qkv_size(const Shape *s) { return (s->num_heads + 2 * s->num_kv_heads) * s->head_size; }

/* The largest number of inputs of a layer's GEMMs. */
INLINE long widest_input(const Shape *s) {
    long attended = s->num_heads * s->head_size, widest = attended > s->hidden_size ? attended : s->hidden_size;
    return widest > s->intermediate_size ? widest : s->intermediate_size;
}

/* In floats. Attention and the GEMMs' quantised rows share the last part. */
INLINE long thread_scratch_size(const Shape *s) {
    long attention = attention_scratch(s->num_heads / s->num_kv_heads, s->head_size);
    long products = quantised_rows_size(widest_input(s));
    return FEW_ROWS * s->hidden_size + (attention > products ? attention : products);
}

static Scratch thread_scratch(const Shape *s, float *base, long thread) {
    Scratch at;
    at.normalised = base;
    at.qkv = at.normalised + SLICE_ROWS * s->hidden_size;
    at.attended = at.qkv + SLICE_ROWS * qkv_size(s);
    at.wide = at.attended + SLICE_ROWS * s->num_heads * s->head_size;
    at.few_normalised = at.wide + SLICE_ROWS * s->intermediate_size + thread * thread_scratch_size(s);
    at.thread_memory = at.few_normalised + FEW_ROWS * s->hidden_size;
    return at;
}

/* Scratch memory of a step, in floats. */
long trimtab_scratch(const Shape *s, long threads) {
    long of_row = s->hidden_size + qkv_size(s) + s->num_heads * s->head_size + s->intermediate_size;
    return SLICE_ROWS * of_row + threads * thread_scratch_size(s);
}

/* Normalise the slice's rows of hidden, for all threads to read. */
static const float *normalise_slice(Team *team, const Work *work, const float *weight, long slice, long rows,
                                    const Scratch *at) {
    const Shape *s = work->shape;
    long size = s->hidden_size, unit;
    const float *x = work->step->hidden + slice * size;
    if (rows <= FEW_ROWS) {
        for (long r = 0; r < rows; r++) normalise(x + r * size, weight, size, s->eps, at->few_normalised + r * size);
        return at->few_normalised;
    }
    Stage stage = begin_stage(team, units_of(rows, ROWS_OF_UNIT), 0);
    while ((unit = next_unit(&stage)) >= 0) {
        long last = min_of(rows, (unit + 1) * ROWS_OF_UNIT);
        for (long r = unit * ROWS_OF_UNIT; r < last; r++)
            normalise(x + r * size, weight, size, s->eps, at->normalised + r * size);
        finish_unit(team, unit);
    }
    return at->normalised;
}

/* Process heads [first_head, last_head) of q, k and v, in this order, of every row: normalise (if the model does) and
 * rotate q and k in place, and write k and v to their slots. */
static void write_heads(Team *team, const Shape *s, const Layer *layer, const Step *step, long layer_index, long slice,
                        long rows, long first_head, long last_head, float *qkv) {
    long heads = last_head - first_head, size = s->head_size, count = rows * heads, unit;
    Stage stage = begin_stage(team, units_of(count, HEADS_OF_UNIT), 0);
    while ((unit = next_unit(&stage)) >= 0) {
        long last = min_of(count, (unit + 1) * HEADS_OF_UNIT);
        for (long i = unit * HEADS_OF_UNIT; i < last; i++) {
            long row = i / heads, head = first_head + i % heads, kv_head = head - s->num_heads;
            float *x = qkv + row * qkv_size(s) + head * size;
            if (kv_head < s->num_kv_heads) {
                const float *norm = kv_head < 0 ? layer->query_norm : layer->key_norm;
                if (norm) normalise(x, norm, size, s->eps, x);
                rotate(x, step->rotation + (slice + row) * size, size);
            }
            if (kv_head >= 0) {
                int is_value = kv_head >= s->num_kv_heads;
                float *cache = is_value ? step->values[layer_index] : step->keys[layer_index];
                long place = step->slots[slice + row] * s->num_kv_heads + kv_head - (is_value ? s->num_kv_heads : 0);
                memcpy(cache + place * size, x, sizeof(float) * size);
            }
        }
        finish_unit(team, unit);
    }
}

/* Write k and v of all rows of the step. A panel that also contains outputs of q writes those to scratch, where they are
 * not read. */
static void write_keys_and_values(Team *team, const Work *work, long index, const Scratch *at) {
    const Shape *s = work->shape;
    const Step *step = work->step;
    const Layer *layer = work->layers + index;
    long first_panel = s->num_heads * s->head_size / PANEL, heads = s->num_heads + 2 * s->num_kv_heads;
    for (long slice = 0; slice < step->num_tokens; slice += SLICE_ROWS) {
        long rows = min_of(SLICE_ROWS, step->num_tokens - slice);
        const float *x = normalise_slice(team, work, layer->input_norm, slice, rows, at);
        multiply_panels(team, &layer->qkv, first_panel, panels_of(layer->qkv.out), x, s->hidden_size, rows, at->qkv,
                        qkv_size(s), 0, at->thread_memory);
        write_heads(team, s, layer, step, index, slice, rows, s->num_heads, heads, at->qkv);
    }
}

static void attend_units(Team *team, const Work *work, long layer_index, long number, long slice, const Scratch *at) {
    const Shape *s = work->shape;
    const Step *step = work->step;
    Cache cache = {step->keys[layer_index], step->values[layer_index], step->block_size, s->num_kv_heads, s->head_size};
    const AttentionUnit *units = work->units + work->first_unit[number];
    long count = work->first_unit[number + 1] - work->first_unit[number], ldo = s->num_heads * s->head_size, i;
    Stage stage = begin_stage(team, count, 1);
    while ((i = next_unit(&stage)) >= 0) {
        const AttentionUnit *u = units + (count - 1 - i); /* a prompt's last tokens have the most keys: process them first */
        const float *query = at->qkv + (u->row - slice) * qkv_size(s) + u->head * s->head_size;
        float *output = at->attended + (u->row - slice) * ldo + u->head * s->head_size;
        if (u->tokens == 1)
            attend_token(&cache, u, s->scale, query, at->thread_memory);
        else
            attend_tokens(&cache, u, s->scale, query, qkv_size(s), at->thread_memory);
        if (!win_unit(team, i)) continue;
        if (u->tokens == 1)
            store_token(&cache, u, at->thread_memory, output);
        else
            store_tokens(&cache, u, at->thread_memory, output, ldo);
        finish_unit(team, i);
    }
}

/* The destination of a half's result. */
INLINE float *result_at(const Work *work, long slice) {
    return (work->partial ? work->partial : work->step->hidden) + slice * work->shape->hidden_size;
}

static void attention_half(Team *team, const Work *work, long index, long number, long slice, long rows,
                           const Scratch *at) {
    const Shape *s = work->shape;
    const Layer *layer = work->layers + index;
    const float *x = normalise_slice(team, work, layer->input_norm, slice, rows, at);
    /* In a step of several slices, k and v are already in the cache: see write_keys_and_values. */
    long outputs = has_slices(work->step) ? s->num_heads * s->head_size : layer->qkv.out;
    long heads = s->num_heads + (has_slices(work->step) ? 0 : 2 * s->num_kv_heads);
    multiply_panels(team, &layer->qkv, 0, panels_of(outputs), x, s->hidden_size, rows, at->qkv, qkv_size(s), 0,
                    at->thread_memory);
    write_heads(team, s, layer, work->step, index, slice, rows, 0, heads, at->qkv);
    attend_units(team, work, index, number, slice, at);
    multiply(team, &layer->output, at->attended, s->num_heads * s->head_size, rows, result_at(work, slice),
             s->hidden_size, work->partial == NULL, at->thread_memory);
}

static void mlp_half(Team *team, const Work *work, long index, long slice, long rows, const Scratch *at) {
    const Shape *s = work->shape;
    const Layer *layer = work->layers + index;
    const float *x = normalise_slice(team, work, layer->post_norm, slice, rows, at);
    multiply_gated(team, &layer->gate_up, x, s->hidden_size, rows, at->wide, s->intermediate_size,
                   at->thread_memory);
    multiply(team, &layer->down, at->wide, s->intermediate_size, rows, result_at(work, slice), s->hidden_size,
             work->partial == NULL, at->thread_memory);
}

static void run_layers(void *data) {
    const Work *work = data;
    const Step *step = work->step;
    Team team = join_team(step->threads, work->states);
    Scratch at = thread_scratch(work->shape, step->scratch, team.index);
    for (long index = work->first; index < work->first + work->count; index++) {
        if (work->halves & ATTENTION && has_slices(step)) write_keys_and_values(&team, work, index, &at);
        for (long slice = 0, number = 0; slice < step->num_tokens; slice += SLICE_ROWS, number++) {
            long rows = min_of(SLICE_ROWS, step->num_tokens - slice);
            if (work->halves & ATTENTION) attention_half(&team, work, index, number, slice, rows, &at);
            if (work->halves & MLP) mlp_half(&team, work, index, slice, rows, &at);
        }
    }
}

/* Plan the units of the tokens of `q` in [first, last); returns their number. `units` is NULL to count only. */
static long plan_sequence(const Shape *s, const Step *step, const Sequence *q, long first, long last, int splits_heads,
                          AttentionUnit *units) {
    long begin = q->row > first ? q->row : first, end = min_of(q->row + q->tokens, last), count = 0;
    long group = s->num_heads / s->num_kv_heads, at_once = end - begin > FEW_TOKENS ? TOKENS_AT_ONCE : 1;
    long heads = splits_heads ? 1 : group;
    for (long row = begin; row < end; row += at_once)
        for (long head = 0; head < s->num_heads; head += heads, count++)
            if (units)
                units[count] = (AttentionUnit){step->tables + q->table, row, min_of(at_once, end - row),
                                      q->before + row - q->row, head, heads, head / group};
    return count;
}

/* Fill the units of every slice, or count them all. */
static long plan_units(const Work *work) {
    const Step *step = work->step;
    const Shape *s = work->shape;
    int splits_heads = step->num_tokens * s->num_kv_heads < 4 * step->threads;
    long total = 0, number = 0;
    for (long slice = 0; slice < step->num_tokens; slice += SLICE_ROWS, number++) {
        if (work->units) work->first_unit[number] = total;
        for (long i = 0; i < step->num_sequences; i++)
            total += plan_sequence(s, step, step->sequences + i, slice, slice + SLICE_ROWS, splits_heads,
                                   work->units ? work->units + total : NULL);
    }
    if (work->units) work->first_unit[number] = total;
    return total;
}

/* The largest number of units of a stage. */
static long most_units(const Work *work, long slices) {
    const Shape *s = work->shape;
    long most = units_of(SLICE_ROWS * (s->num_heads + 2 * s->num_kv_heads), HEADS_OF_UNIT);
    for (long i = work->first; i < work->first + work->count; i++) {
        const Layer *layer = work->layers + i;
        if (work->halves & ATTENTION) most = max_of(most, max_of(panels_of(layer->qkv.out), panels_of(s->hidden_size)));
        if (work->halves & MLP) most = max_of(most, max_of(panels_of(s->intermediate_size), panels_of(s->hidden_size)));
    }
    for (long number = 0; work->units && number < slices; number++)
        most = max_of(most, work->first_unit[number + 1] - work->first_unit[number]);
    return most;
}

/* Layers [first, first + count) over the step's tokens; halves: ATTENTION, MLP or both. `partial` [num_tokens,
 * hidden_size] receives the half's result; NULL: it is added to hidden. Returns 0, or 1 if an allocation failed. */
int trimtab_layers(const Shape *shape, const Layer *layers, long first, long count, int halves, const Step *step,
                   float *partial) {
    Work work = {shape, layers, step, partial, first, count, halves, NULL, NULL, NULL};
    int failed = 0;
    long slices = (step->num_tokens + SLICE_ROWS - 1) / SLICE_ROWS;
    if (halves & ATTENTION) {
        long units = plan_units(&work);
        work.units = malloc(sizeof(AttentionUnit) * (units + 1));
        work.first_unit = malloc(sizeof(long) * (slices + 1));
        failed = !work.units || !work.first_unit;
        if (!failed) plan_units(&work);
    }
    if (!failed) work.states = calloc(most_units(&work, slices), sizeof(uint32_t));
    failed = !work.states;
    if (!failed) run_team(run_layers, &work, step->threads);
    free(work.units), free(work.first_unit), free(work.states);
    return failed;
}

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *y, *scratch;
    long ldx, rows, ldy, threads;
    int is_gated;
    uint32_t *states; /* of units: team.h */
} Multiplication;

static void run_multiplication(void *data) {
    const Multiplication *m = data;
    Team team = join_team(m->threads, m->states);
    float *scratch = m->scratch + team.index * quantised_rows_size(m->matrix->in);
    for (long slice = 0; slice < m->rows; slice += SLICE_ROWS) {
        long rows = min_of(SLICE_ROWS, m->rows - slice);
        const float *x = m->x + slice * m->ldx;
        float *y = m->y + slice * m->ldy;
        if (m->is_gated)
            multiply_gated(&team, m->matrix, x, m->ldx, rows, y, m->ldy, scratch);
        else
            multiply(&team, m->matrix, x, m->ldx, rows, y, m->ldy, 0, scratch);
    }
}

/* Scratch memory of a GEMM, in floats; 0 for float32 weights. */
long trimtab_gemm_scratch(const Matrix *matrix, long threads) {
    return matrix->is_quantised ? threads * quantised_rows_size(matrix->in) : 0;
}

/* y = x . matrix, or gated (y has half of its columns). */
void trimtab_multiply(const Matrix *matrix, const float *x, long ldx, long rows, float *y, long ldy, int is_gated,
                      long threads, float *scratch) {
    uint32_t states[panels_of(matrix->out)];
    Multiplication work = {matrix, x, y, scratch, ldx, rows, ldy, threads, is_gated, states};
    memset(states, 0, sizeof states);
    run_team(run_multiplication, &work, threads);
}

/* Pack a weight of rows [in] at these addresses. `step` is the distance of its panels: 2 if two weights alternate. */
void trimtab_pack(long stored, const char *const *rows, long out, long in, float *packed, long step) {
    for (long p = 0; p < panels_of(out); p++) {
        const char *const *own = rows + p * PANEL;
        long outputs = min_of(PANEL, out - p * PANEL);
        float *panel = packed + p * step * PANEL * in;
        if (stored == STORED_FLOAT32) pack_stored(STORED_FLOAT32, own, outputs, in, panel);
        if (stored == STORED_BFLOAT16) pack_stored(STORED_BFLOAT16, own, outputs, in, panel);
        if (stored == STORED_FLOAT16) pack_stored(STORED_FLOAT16, own, outputs, in, panel);
    }
}

/* Bytes of a panel of any kind. */
long trimtab_panel_bytes(long kind, long in) { return panel_bytes(kind, in); }

/* Pack GGUF blocks [out, in / inputs of a block, block_bytes]; `step` is the distance of the panels in bytes. */
void trimtab_pack_blocks(long kind, const uint8_t *blocks, long block_bytes, long out, long in, char *packed,
                         long step) {
    long row_bytes = kind == E4M3 ? in : in / (has_head(kind) ? SUPER : GROUP) * block_bytes;
    for (long p = 0; p < panels_of(out); p++)
        pack_panel(kind, blocks + p * PANEL * row_bytes, block_bytes, min_of(PANEL, out - p * PANEL), in,
                   packed + p * step);
}
