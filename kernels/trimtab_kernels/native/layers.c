/* Decoder layers of the Llama family in float32 on the CPU: one call computes a step's layers, or halves of them.
 *
 * Compiled once per instruction set (build.py) and called by ctypes with plain addresses (library.py): neither
 * Python's ABI nor torch's. Whoever calls has checked shapes; nothing here fails but for want of memory.
 *
 * A step's rows are computed SLICE_ROWS at a time, so that the scratch memory does not grow with the step. All threads
 * run through the slices together and wait for each other where one reads what another wrote:
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

#include "product.h"

#include "pack.h"

#include "rows.h"

#include "attention.h"

typedef struct {
    long hidden_size, num_heads, num_kv_heads, head_size, intermediate_size;
    float eps, scale;
} Shape;

typedef struct {
    const float *input_norm, *query_norm, *key_norm, *post_norm; /* query_norm, key_norm: NULL where there are none */
    Matrix qkv, output, gate_up, down;
} Layer;

/* Rows [row, row + tokens) are one sequence's, with `before` tokens before them; its block table is at `table`. */
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

enum part { ATTENTION = 1, MLP = 2 };

typedef struct {
    const Shape *shape;
    const Layer *layers;
    const Step *step;
    float *partial; /* results go here instead of being added to hidden: a group will sum them */
    long first, count;
    int parts;
    Unit *units;
    long *first_unit, *taken; /* of each slice */
} Work;

typedef struct {
    float *normalised, *qkv, *attended, *wide, *few_normalised, *of_thread; /* the last two are this thread's own */
} Scratch;

#define FEW_ROWS 2 /* up to here every thread normalises all rows for itself, sooner than it meets the others */

void trimtab_use_threads(void *parallel, void *number, void *size, void *barrier) {
    gomp_parallel = (parallel_function)parallel;
    thread_number = (int (*)(void))number;
    team_size = (int (*)(void))size;
    gomp_barrier = (void (*)(void))barrier;
}

/* What this was compiled from: build.py's sources_hash(). */
const char *trimtab_sources(void) { return SOURCES_HASH; }

long trimtab_panel(void) { return PANEL; }

INLINE int has_slices(const Step *step) { return step->num_tokens > SLICE_ROWS; }

INLINE long qkv_size(const Shape *s) { return (s->num_heads + 2 * s->num_kv_heads) * s->head_size; }

/* The most inputs of a layer's products. */
INLINE long widest_input(const Shape *s) {
    long attended = s->num_heads * s->head_size, widest = attended > s->hidden_size ? attended : s->hidden_size;
    return widest > s->intermediate_size ? widest : s->intermediate_size;
}

/* Floats; attention and the products' integers take turns in the last part. */
INLINE long scratch_of_thread(const Shape *s) {
    long attention = attention_scratch(s->num_heads / s->num_kv_heads, s->head_size);
    long products = integers_size(widest_input(s));
    return FEW_ROWS * s->hidden_size + (attention > products ? attention : products);
}

static Scratch scratch_at(const Shape *s, float *base, long thread) {
    Scratch at;
    at.normalised = base;
    at.qkv = at.normalised + SLICE_ROWS * s->hidden_size;
    at.attended = at.qkv + SLICE_ROWS * qkv_size(s);
    at.wide = at.attended + SLICE_ROWS * s->num_heads * s->head_size;
    at.few_normalised = at.wide + SLICE_ROWS * s->intermediate_size + thread * scratch_of_thread(s);
    at.of_thread = at.few_normalised + FEW_ROWS * s->hidden_size;
    return at;
}

/* Floats of a step's scratch memory. */
long trimtab_scratch(const Shape *s, long threads) {
    long of_row = s->hidden_size + qkv_size(s) + s->num_heads * s->head_size + s->intermediate_size;
    return SLICE_ROWS * of_row + threads * scratch_of_thread(s);
}

/* The slice's rows of hidden, normalised, for all threads to read. */
static const float *normalise_slice(Team team, const Work *work, const float *weight, long slice, long rows,
                                    const Scratch *at) {
    const Shape *s = work->shape;
    long size = s->hidden_size, first = 0, last = rows, is_own = rows <= FEW_ROWS;
    const float *x = work->step->hidden + slice * size;
    float *y = is_own ? at->few_normalised : at->normalised;
    if (!is_own) share_of(team, rows, &first, &last);
    for (long r = first; r < last; r++) normalise(x + r * size, weight, size, s->eps, y + r * size);
    if (!is_own) wait_for(team);
    return y;
}

/* Heads [first_head, last_head) of q, k and v, in this order, of every row: q and k are normalised (if the model does) and
 * rotated in place; k and v are written to their slots. */
static void place_heads(Team team, const Shape *s, const Layer *layer, const Step *step, long layer_index, long slice,
                        long rows, long first_head, long last_head, float *qkv) {
    long heads = last_head - first_head, size = s->head_size, first, last;
    share_of(team, rows * heads, &first, &last);
    for (long i = first; i < last; i++) {
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
}

/* Write k and v of all rows of the step. A panel that has outputs of q, too, writes those to scratch, where nobody reads
 * them. */
static void write_keys_and_values(Team team, const Work *work, long index, const Scratch *at) {
    const Shape *s = work->shape;
    const Step *step = work->step;
    const Layer *layer = work->layers + index;
    long first_panel = s->num_heads * s->head_size / PANEL, heads = s->num_heads + 2 * s->num_kv_heads;
    for (long slice = 0; slice < step->num_tokens; slice += SLICE_ROWS) {
        long rows = at_most(SLICE_ROWS, step->num_tokens - slice);
        const float *x = normalise_slice(team, work, layer->input_norm, slice, rows, at);
        multiply_panels(team, &layer->qkv, first_panel, panels_of(layer->qkv.out), x, s->hidden_size, rows, at->qkv,
                        qkv_size(s), 0, at->of_thread);
        wait_for(team);
        place_heads(team, s, layer, step, index, slice, rows, s->num_heads, heads, at->qkv);
        wait_for(team);
    }
}

static void attend(const Work *work, long layer_index, long number, long slice, const Scratch *at) {
    const Shape *s = work->shape;
    const Step *step = work->step;
    Cache cache = {step->keys[layer_index], step->values[layer_index], step->block_size, s->num_kv_heads, s->head_size};
    const Unit *units = work->units + work->first_unit[number];
    long count = work->first_unit[number + 1] - work->first_unit[number], ldo = s->num_heads * s->head_size, i;
    while ((i = next_unit(work->taken + number, count)) >= 0) {
        const Unit *u = units + (count - 1 - i); /* a prompt's last tokens have the most keys: they come first */
        const float *query = at->qkv + (u->row - slice) * qkv_size(s) + u->head * s->head_size;
        float *output = at->attended + (u->row - slice) * ldo + u->head * s->head_size;
        if (u->tokens == 1)
            attend_token(&cache, u, s->scale, query, output, at->of_thread);
        else
            attend_tokens(&cache, u, s->scale, query, qkv_size(s), output, ldo, at->of_thread);
    }
}

/* Where a half's result goes, and whether it is added there. */
INLINE float *target_of(const Work *work, long slice) {
    return (work->partial ? work->partial : work->step->hidden) + slice * work->shape->hidden_size;
}

static void attention_half(Team team, const Work *work, long index, long number, long slice, long rows,
                           const Scratch *at) {
    const Shape *s = work->shape;
    const Layer *layer = work->layers + index;
    const float *x = normalise_slice(team, work, layer->input_norm, slice, rows, at);
    /* In a step of several slices k and v are in the cache already: see write_keys_and_values. */
    long outputs = has_slices(work->step) ? s->num_heads * s->head_size : layer->qkv.out;
    long heads = s->num_heads + (has_slices(work->step) ? 0 : 2 * s->num_kv_heads);
    multiply_panels(team, &layer->qkv, 0, panels_of(outputs), x, s->hidden_size, rows, at->qkv, qkv_size(s), 0,
                    at->of_thread);
    if (team.index == 0) work->taken[number] = 0;
    wait_for(team);
    place_heads(team, s, layer, work->step, index, slice, rows, 0, heads, at->qkv);
    wait_for(team);
    attend(work, index, number, slice, at);
    wait_for(team);
    multiply(team, &layer->output, at->attended, s->num_heads * s->head_size, rows, target_of(work, slice),
             s->hidden_size, work->partial == NULL, at->of_thread);
    wait_for(team);
}

static void mlp_half(Team team, const Work *work, long index, long slice, long rows, const Scratch *at) {
    const Shape *s = work->shape;
    const Layer *layer = work->layers + index;
    const float *x = normalise_slice(team, work, layer->post_norm, slice, rows, at);
    multiply_gated(team, &layer->gate_up, x, s->hidden_size, rows, at->wide, s->intermediate_size,
                   at->of_thread);
    wait_for(team);
    multiply(team, &layer->down, at->wide, s->intermediate_size, rows, target_of(work, slice), s->hidden_size,
             work->partial == NULL, at->of_thread);
    wait_for(team);
}

static void run_layers(void *data) {
    const Work *work = data;
    const Step *step = work->step;
    Team team = own_team(step->threads);
    Scratch at = scratch_at(work->shape, step->scratch, team.index);
    for (long index = work->first; index < work->first + work->count; index++) {
        if (work->parts & ATTENTION && has_slices(step)) write_keys_and_values(team, work, index, &at);
        for (long slice = 0, number = 0; slice < step->num_tokens; slice += SLICE_ROWS, number++) {
            long rows = at_most(SLICE_ROWS, step->num_tokens - slice);
            if (work->parts & ATTENTION) attention_half(team, work, index, number, slice, rows, &at);
            if (work->parts & MLP) mlp_half(team, work, index, slice, rows, &at);
        }
    }
}

/* The units of the tokens of `q` that lie in [first, last); returns how many. `units` may be NULL, to count them. */
static long plan_sequence(const Shape *s, const Step *step, const Sequence *q, long first, long last, int splits_heads,
                          Unit *units) {
    long begin = q->row > first ? q->row : first, end = at_most(q->row + q->tokens, last), count = 0;
    long group = s->num_heads / s->num_kv_heads, at_once = end - begin > FEW_TOKENS ? TOKENS_AT_ONCE : 1;
    long heads = splits_heads ? 1 : group;
    for (long row = begin; row < end; row += at_once)
        for (long head = 0; head < s->num_heads; head += heads, count++)
            if (units)
                units[count] = (Unit){step->tables + q->table, row, at_most(at_once, end - row),
                                      q->before + row - q->row, head, heads, head / group};
    return count;
}

/* Fills the units of every slice, or counts them all. */
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

/* Layers [first, first + count) over the step's tokens; parts: ATTENTION, MLP or both. `partial` [num_tokens,
 * hidden_size] gets the half's result; NULL: it is added to hidden. Returns 0, or 1 for want of memory. */
int trimtab_layers(const Shape *shape, const Layer *layers, long first, long count, int parts, const Step *step,
                   float *partial) {
    Work work = {shape, layers, step, partial, first, count, parts, NULL, NULL, NULL};
    long slices = (step->num_tokens + SLICE_ROWS - 1) / SLICE_ROWS;
    if (parts & ATTENTION) {
        long units = plan_units(&work);
        work.units = malloc(sizeof(Unit) * (units + 1));
        work.first_unit = malloc(sizeof(long) * (2 * slices + 1));
        if (!work.units || !work.first_unit) {
            free(work.units), free(work.first_unit);
            return 1;
        }
        work.taken = work.first_unit + slices + 1;
        plan_units(&work);
    }
    run_team(run_layers, &work, step->threads);
    free(work.units), free(work.first_unit);
    return 0;
}

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *y, *scratch;
    long ldx, rows, ldy, threads;
    int is_gated;
} Multiplication;

static void run_multiplication(void *data) {
    const Multiplication *m = data;
    Team team = own_team(m->threads);
    float *scratch = m->scratch + team.index * integers_size(m->matrix->in);
    for (long slice = 0; slice < m->rows; slice += SLICE_ROWS) {
        long rows = at_most(SLICE_ROWS, m->rows - slice);
        const float *x = m->x + slice * m->ldx;
        float *y = m->y + slice * m->ldy;
        if (m->is_gated)
            multiply_gated(team, m->matrix, x, m->ldx, rows, y, m->ldy, scratch);
        else
            multiply(team, m->matrix, x, m->ldx, rows, y, m->ldy, 0, scratch);
    }
}

/* Floats of the scratch memory of a product; 0 for float32 weights. */
long trimtab_product_scratch(const Matrix *matrix, long threads) {
    return matrix->is_quantised ? threads * integers_size(matrix->in) : 0;
}

/* y = x . matrix, or the gated product of it (y has half of its columns). */
void trimtab_multiply(const Matrix *matrix, const float *x, long ldx, long rows, float *y, long ldy, int is_gated,
                      long threads, float *scratch) {
    Multiplication work = {matrix, x, y, scratch, ldx, rows, ldy, threads, is_gated};
    run_team(run_multiplication, &work, threads);
}

/* A weight of rows [in] at these addresses as panels. `step` panels lie between two of its panels: 2 where two weights
 * take turns. */
void trimtab_pack(long stored, const char *const *rows, long out, long in, float *packed, long step) {
    for (long p = 0; p < panels_of(out); p++) {
        const char *const *own = rows + p * PANEL;
        long outputs = at_most(PANEL, out - p * PANEL);
        float *panel = packed + p * step * PANEL * in;
        if (stored == STORED_FLOAT32) pack_stored(STORED_FLOAT32, own, outputs, in, panel);
        if (stored == STORED_BFLOAT16) pack_stored(STORED_BFLOAT16, own, outputs, in, panel);
        if (stored == STORED_FLOAT16) pack_stored(STORED_FLOAT16, own, outputs, in, panel);
    }
}

/* Bytes of a panel, whatever the kind. */
long trimtab_panel_bytes(long kind, long in) { return panel_bytes(kind, in); }

/* The same of GGUF's blocks [out, in / inputs of a block, block_bytes]; `step` bytes lie between two panels. */
void trimtab_pack_blocks(long kind, const uint8_t *blocks, long block_bytes, long out, long in, char *packed,
                         long step) {
    long row_bytes = kind == E4M3 ? in : in / (has_head(kind) ? SUPER : GROUP) * block_bytes;
    for (long p = 0; p < panels_of(out); p++)
        pack_panel(kind, blocks + p * PANEL * row_bytes, block_bytes, at_most(PANEL, out - p * PANEL), in,
                   packed + p * step);
}
