/* The attention step: rows against the key tiles they see.
 *
 * By rows, a block of a prompt's rows reads the tiles of its sequence. By columns, the items of runs.c: rows that share
 * key blocks, of one sequence or of many, read a shared tile once. Partials belong to a query and a tile alone
 * (attention.c) and are folded in order of tiles, so which rows came together does not show. Read next: runs.c.
 */
#include "pass.h"

/* Keys and values of a tile of a sequence's first `context` tokens: where they lie, or in `room` [2, KEY_TILE, D] if the
 * cache holds another format than float32. */
static void find_tile(const struct pass *pass, int32_t layer, int32_t head, int32_t sequence, int32_t tile,
                      int32_t context, float *room, key_rows *to)
{
    const facet_batch *batch = pass->batch;
    const int32_t *table = batch->block_tables + (int64_t)sequence * batch->table_width;
    const int32_t start = tile * KEY_TILE, size = batch->block_size, D = pass->model->head_dim;
    const int32_t format = batch->kv_format;
    const int64_t row_bytes = kv_row_bytes(format, D);
    to->count = context - start < KEY_TILE ? context - start : KEY_TILE;
    for (int32_t i = 0; i < to->count;) {
        const int32_t block = table[(start + i) / size], offset = (start + i) % size;
        int64_t row = kv_row_of(pass, layer, head, block, offset);
        for (int32_t j = offset; j < size && i < to->count; i++, j++, row++) {
            const uint8_t *key = batch->k + row * row_bytes, *value = batch->v + row * row_bytes;
            if (format == KV_FLOAT32) {
                to->keys[i] = (const float *)key;
                to->values[i] = (const float *)value;
                continue;
            }
            float *rows[2] = {room + (int64_t)i * D, room + (int64_t)(KEY_TILE + i) * D};
            kv_load(format, key, kv_has_scales(format) ? batch->k_scales[row] : 1.0f, D, rows[0]);
            kv_load(format, value, kv_has_scales(format) ? batch->v_scales[row] : 1.0f, D, rows[1]);
            to->keys[i] = rows[0];
            to->values[i] = rows[1];
        }
    }
}

static int32_t slot_floats(const struct pass *pass)
{
    return pass->model->num_heads * (pass->model->head_dim + 2);
}

/* Queries of `count` rows for one key/value head over tiles tile0..tile1 of the first row's sequence. places[i] is where
 * row i keeps its partials, [repeats, D + 2]: from tile 0 on all are folded there; else each tile has its own, a slot
 * further on for each. */
static void attend_tiles(struct pass *pass, int32_t layer, const int32_t *rows, const attention_item *item, workspace *w)
{
    const facet_model *model = pass->model;
    const int32_t D = model->head_dim, H = model->num_heads, repeats = H / model->num_kv_heads;
    const int32_t *positions = pass->batch->positions, sequence = pass->sequence[rows[0]];
    int32_t context = 0;
    for (int32_t i = 0; i < item->count; i++)
        context = positions[rows[i]] + 1 > context ? positions[rows[i]] + 1 : context;
    const int32_t seen_tiles = (context + KEY_TILE - 1) / KEY_TILE;
    const int32_t end = item->tile1 < seen_tiles ? item->tile1 : seen_tiles;
    const int in_place = pass->batch->kv_format == KV_FLOAT32; /* then the next tile is fetched meanwhile */
    key_rows tiles[2]; /* this one and the next */
    if (in_place && item->tile0 < end)
        find_tile(pass, layer, item->head, sequence, item->tile0, context, NULL, &tiles[item->tile0 % 2]);
    for (int32_t t = item->tile0; t < end; t++) {
        int32_t queries = 0;
        for (int32_t i = 0; i < item->count; i++) {
            const int32_t seen = positions[rows[i]] + 1 - t * KEY_TILE;
            float *place = w->places[i] + (item->tile0 ? (int64_t)(t - item->tile0) * slot_floats(pass) : 0);
            for (int32_t r = 0; r < repeats && seen > 0; r++, queries++) {
                w->queries[queries] = pass->q + ((int64_t)rows[i] * H + item->head * repeats + r) * D;
                w->visible[queries] = seen < KEY_TILE ? seen : KEY_TILE;
                w->fresh[queries] = item->tile0 || t == 0;
                w->states[queries] = place + (int64_t)r * (D + 2);
            }
        }
        key_rows *tile = &tiles[t % 2], *next = in_place && t + 1 < end ? &tiles[(t + 1) % 2] : NULL;
        if (next)
            find_tile(pass, layer, item->head, sequence, t + 1, context, NULL, next);
        if (!in_place)
            find_tile(pass, layer, item->head, sequence, t, context, w->tile, tile);
        load_keys(tile, D, w->attention);
        attend_tile(w->queries, w->visible, w->fresh, queries, tile, next, D, w->states, w->attention);
    }
}

/* Output of the query heads of key/value head `head` from their states, quantized at list place i. */
static void finish_heads(struct pass *pass, const float *states, int32_t i, int32_t head)
{
    const int32_t D = pass->model->head_dim, repeats = pass->model->num_heads / pass->model->num_kv_heads;
    float y[MAX_HEAD_DIM];
    for (int32_t r = 0; r < repeats; r++) {
        finish_state(states + (int64_t)r * (D + 2), D, y);
        if (pass->batch->kv_format == KV_INT4)
            rotate_hadamard(y, D);
        for (int32_t k = 0; k < D; k += GROUP)
            quantize_group(y + k, &pass->attended, i, ((head * repeats + r) * D + k) / GROUP);
    }
}

void step_attend(struct pass *pass, int32_t layer, const row_list *list, int32_t first, int32_t count, workspace *w)
{
    const int32_t G = pass->model->num_kv_heads;
    for (int32_t start = first, end; start < first + count; start = end) {
        const int32_t *rows = list->rows + start;
        for (end = start + 1; end < first + count && pass->sequence[list->rows[end]] == pass->sequence[rows[0]];)
            end++;
        const int32_t tiles = pass->batch->positions[list->rows[end - 1]] / KEY_TILE + 1;
        for (int32_t head = 0; head < G; head++) {
            const attention_item item = {start, end - start, head, 0, tiles};
            for (int32_t i = 0; i < item.count; i++)
                w->places[i] = w->own + (int64_t)i * (slot_floats(pass) / G);
            attend_tiles(pass, layer, rows, &item, w);
            for (int32_t i = 0; i < item.count; i++)
                finish_heads(pass, w->places[i], start + i, head);
        }
    }
}

/* The slot of a row's partials that starts its folded tiles, or those from `tile` on. */
static float *place_of(const struct pass *pass, const row_parts *parts, int32_t head, int32_t tile)
{
    const int64_t slot = parts->slot + (tile ? 1 + tile - parts->folded_tiles : 0);
    return pass->partials + slot * slot_floats(pass) +
           (int64_t)head * (slot_floats(pass) / pass->model->num_kv_heads);
}

void step_attend_item(struct pass *pass, int32_t layer, const attention_item *item, workspace *w)
{
    const int32_t G = pass->model->num_kv_heads, D = pass->model->head_dim, repeats = pass->model->num_heads / G;
    const int32_t *rows = pass->sorted + item->first;
    for (int32_t i = 0; i < item->count; i++)
        w->places[i] = place_of(pass, pass->parts + rows[i], item->head, item->tile0);
    attend_tiles(pass, layer, rows, item, w);
    for (int32_t i = 0; i < item->count; i++) {
        row_parts *parts = pass->parts + rows[i];
        atomic_int *ended = pass->ended + (int64_t)rows[i] * G + item->head;
        if (parts->num_items > 1) {
            if (atomic_fetch_add_explicit(ended, 1, memory_order_acq_rel) + 1 < parts->num_items)
                continue;
            atomic_store_explicit(ended, 0, memory_order_relaxed); /* for the next layer */
        }
        float *state = place_of(pass, parts, item->head, 0);
        for (int32_t t = parts->folded_tiles; t <= pass->batch->positions[rows[i]] / KEY_TILE; t++)
            for (int32_t r = 0; r < repeats; r++)
                fold_state(state + r * (D + 2), place_of(pass, parts, item->head, t) + r * (D + 2), D);
        finish_heads(pass, state, rows[i], item->head);
    }
}
