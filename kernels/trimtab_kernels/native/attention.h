/* Attention over a paged KV cache, online softmax (Dao 2023, arXiv:2307.08691).
 *
 * keys, values [num_blocks, block_size, num_kv_heads, head_size]; a sequence's token at position p is in block
 * table[p / block_size]. Single tokens (decodes) read the cache in place; several tokens of one sequence first pack
 * KEYS_AT_ONCE keys and values of one kv head, and all its query heads then multiply with them. */
#pragma once

typedef struct {
    const float *keys, *values;
    long block_size, num_kv_heads, head_size;
} Cache;

/* The unit of work of one thread: heads [head, head + heads) of tokens [row, row + tokens) of the batch, which start
 * at `position` of the sequence with `table`. The heads read one kv head. */
typedef struct {
    const int32_t *table;
    long row, tokens, position, head, heads, kv_head;
} AttentionUnit;

#define KEYS_AT_ONCE 128 /* their keys, values and scores stay in the second-level cache together with the queries */
#define TOKENS_AT_ONCE 64 /* per unit: enough units for all threads, with little time spent on packing */
#define FEW_TOKENS 2      /* up to here packing costs more than it saves */

INLINE long padded_head(long head_size) { return panels_of(head_size) * PANEL; }

INLINE long attention_scratch(long heads_per_kv_head, long head_size) {
    long padded = padded_head(head_size), rows = heads_per_kv_head * TOKENS_AT_ONCE;
    return 2 * KEYS_AT_ONCE * padded + rows * (padded + 2) + (TILE_ROWS + heads_per_kv_head) * KEYS_AT_ONCE;
}

INLINE const float *cache_row(const Cache *c, const float *base, const AttentionUnit *u, long position) {
    long slot = (long)u->table[position / c->block_size] * c->block_size + position % c->block_size;
    return base + (slot * c->num_kv_heads + u->kv_head) * c->head_size;
}

/* Number of consecutive cache rows from `position` on, at most `most`. */
INLINE long contiguous_tokens(const Cache *c, long position, long most) {
    return min_of(most, c->block_size - position % c->block_size);
}

INLINE float dot(const float *a, const float *b, long size) {
    vec sum[2] = {{0}};
    long i = 0;
    for (; i + 2 * WIDTH <= size; i += 2 * WIDTH) {
        sum[0] += load(a + i) * load(b + i);
        sum[1] += load(a + i + WIDTH) * load(b + i + WIDTH);
    }
    float rest = 0.0f;
    for (; i < size; i++) rest += a[i] * b[i];
    return sum_of(sum[0] + sum[1]) + rest;
}

/* One online softmax step: turn a row's next scores [count] into weights in place (zeros up to `width`), update its
 * largest score and sum of weights, and rescale its output so far [size]. *sum is 0 for the first scores. */
INLINE void update_softmax(float *scores, long count, long width, float scale, float *largest, float *sum, float *output,
                        long size) {
    float most = *sum > 0.0f ? *largest : -3e38f;
    for (long j = count; j < width; j++) scores[j] = -3e38f;
    vec top = splat(-3e38f);
    for (long j = 0; j < width; j += WIDTH) top = larger(top, load(scores + j));
    float here = largest_of(top) * scale;
    if (here > most) {
        if (*sum > 0.0f) {
            vec factor = exp_of(splat(most - here));
            *sum *= factor[0];
            for (long j = 0; j < size; j += WIDTH) store(output + j, load(output + j) * factor);
        }
        most = here;
    }
    vec total = {0};
    for (long j = 0; j < width; j += WIDTH) {
        vec weights = exp_of(load(scores + j) * scale - most);
        store(scores + j, weights);
        total += weights;
    }
    for (long j = count; j < width; j++) scores[j] = 0.0f; /* they were e^-87: negligible */
    *sum += sum_of(total);
    *largest = most;
}

/* y += x . w for any number of rows and whole panels of columns. */
INLINE void add_gemm(const float *x, long ldx, long rows, const float *w, long ldw, long in, float *y, long ldy,
                         long panels, long panel_stride) {
    for (long first = 0; first < rows; first += TILE_ROWS)
        for (long p = 0; p < panels; p++)
            tiles[min_of(TILE_ROWS, rows - first)](x + first * ldx, ldx, w + p * panel_stride, ldw, in, NULL,
                                                    FETCH_NOTHING, y + first * ldy + p * PANEL, ldy);
}

/* Compute a unit of one token; query: that of its first head. The result is in the scratch memory. */
static void attend_token(const Cache *c, const AttentionUnit *u, float scale, const float *query, float *scratch) {
    long size = c->head_size, padded = padded_head(size), stride = c->num_kv_heads * size, length = u->position + 1;
    float *sums = scratch, *largest = sums + u->heads, *weighted = largest + u->heads;
    float *scores = weighted + u->heads * padded, *copied = scores + u->heads * KEYS_AT_ONCE;
    memset(scratch, 0, sizeof(float) * u->heads * (2 + padded));
    for (long first = 0; first < length; first += KEYS_AT_ONCE) {
        long count = min_of(KEYS_AT_ONCE, length - first), width = (count + WIDTH - 1) / WIDTH * WIDTH, run;
        for (long j = 0; j < count; j += run) {
            const float *key = cache_row(c, c->keys, u, first + j);
            run = contiguous_tokens(c, first + j, count - j);
            for (long i = 0; i < run; i++, key += stride)
                for (long h = 0; h < u->heads; h++)
                    scores[h * KEYS_AT_ONCE + j + i] = dot(query + h * size, key, size);
        }
        for (long h = 0; h < u->heads; h++)
            update_softmax(scores + h * KEYS_AT_ONCE, count, width, scale, largest + h, sums + h, weighted + h * padded,
                        padded);
        for (long j = 0; j < count; j += run) {
            const float *value = cache_row(c, c->values, u, first + j);
            long apart = stride;
            run = contiguous_tokens(c, first + j, min_of(count - j, KEYS_AT_ONCE));
            if (size != padded) { /* whole panels only: the memory after a head belongs to another one */
                for (long i = 0; i < run; i++) {
                    memcpy(copied + i * padded, value + i * stride, sizeof(float) * size);
                    memset(copied + i * padded + size, 0, sizeof(float) * (padded - size));
                }
                value = copied, apart = padded;
            }
            add_gemm(scores + j, KEYS_AT_ONCE, u->heads, value, apart, run, weighted, padded, padded / PANEL,
                         PANEL);
        }
    }
}

/* Store the result of attend_token(); output: that of the unit's first head. */
INLINE void store_token(const Cache *c, const AttentionUnit *u, const float *scratch, float *output) {
    long size = c->head_size, padded = padded_head(size);
    const float *sums = scratch, *weighted = scratch + 2 * u->heads;
    for (long h = 0; h < u->heads; h++)
        for (long i = 0; i < size; i++) output[h * size + i] = weighted[h * padded + i] / sums[h];
}

/* Pack the keys [first, first + count) as panels [KEYS_AT_ONCE / PANEL][size][PANEL], values as rows of whole panels. */
static void pack_keys_and_values(const Cache *c, const AttentionUnit *u, long first, long count, float *keys, float *values) {
    long size = c->head_size, padded = padded_head(size), filled = panels_of(count) * PANEL;
    for (long j = 0; j < count; j++) {
        const float *key = cache_row(c, c->keys, u, first + j);
        float *to = keys + j / PANEL * PANEL * size + j % PANEL;
        for (long i = 0; i < size; i++) to[i * PANEL] = key[i];
        memcpy(values + j * padded, cache_row(c, c->values, u, first + j), sizeof(float) * size);
        memset(values + j * padded + size, 0, sizeof(float) * (padded - size));
    }
    for (long j = count; j < filled; j++) {
        float *to = keys + j / PANEL * PANEL * size + j % PANEL;
        for (long i = 0; i < size; i++) to[i * PANEL] = 0.0f;
    }
}

/* Compute a unit of several tokens. query: that of the first token's first head; its token stride is ldq. The result is
 * in the scratch memory. Token i sees the keys up to position + i:
 *
 *     keys      |-- seen by all --|\-- causal ... ---|
 */
static void attend_tokens(const Cache *c, const AttentionUnit *u, float scale, const float *query, long ldq,
                          float *scratch) {
    long size = c->head_size, padded = padded_head(size), rows = u->heads * u->tokens;
    float *keys = scratch, *values = keys + KEYS_AT_ONCE * padded, *sums = values + KEYS_AT_ONCE * padded;
    float *largest = sums + rows, *weighted = largest + rows, *scores = weighted + rows * padded;
    long length = u->position + u->tokens, tiles_of_unit = (u->tokens + TILE_ROWS - 1) / TILE_ROWS;
    memset(sums, 0, sizeof(float) * rows * (2 + padded));
    for (long first = 0; first < length; first += KEYS_AT_ONCE) {
        long count = min_of(KEYS_AT_ONCE, length - first), panels = panels_of(count);
        pack_keys_and_values(c, u, first, count, keys, values);
        for (long h = 0; h < u->heads; h++)
            for (long tile = 0; tile < tiles_of_unit; tile++) {
                long t = u->tokens * tile / tiles_of_unit, tokens = u->tokens * (tile + 1) / tiles_of_unit - t;
                long row = h * u->tokens + t;
                if (u->position + t + tokens <= first) continue; /* no token of the tile sees these keys */
                memset(scores, 0, sizeof(float) * tokens * KEYS_AT_ONCE);
                add_gemm(query + t * ldq + h * size, ldq, tokens, keys, PANEL, size, scores, KEYS_AT_ONCE, panels,
                             PANEL * size);
                for (long i = 0; i < tokens; i++) {
                    long seen = min_of(count, u->position + t + i + 1 - first);
                    if (seen > 0)
                        update_softmax(scores + i * KEYS_AT_ONCE, seen, panels * PANEL, scale, largest + row + i,
                                    sums + row + i, weighted + (row + i) * padded, padded);
                    else
                        memset(scores + i * KEYS_AT_ONCE, 0, sizeof(float) * count);
                }
                add_gemm(scores, KEYS_AT_ONCE, tokens, values, padded, count, weighted + row * padded, padded,
                             padded / PANEL, PANEL);
            }
    }
}

/* Store the result of attend_tokens(); output: that of the first token's first head, with token stride ldo. */
INLINE void store_tokens(const Cache *c, const AttentionUnit *u, const float *scratch, float *output, long ldo) {
    long size = c->head_size, padded = padded_head(size), rows = u->heads * u->tokens;
    const float *sums = scratch + 2 * KEYS_AT_ONCE * padded, *weighted = sums + 2 * rows;
    for (long t = 0; t < u->tokens; t++)
        for (long h = 0; h < u->heads; h++) {
            const float *from = weighted + (h * u->tokens + t) * padded;
            float *to = output + t * ldo + h * size, factor = 1.0f / sums[h * u->tokens + t];
            for (long i = 0; i < size; i++) to[i] = from[i] * factor;
        }
}
