/* The steps of a layer on some rows or some columns. Each writes its own place only, so any schedule that runs a step
 * after those it reads from computes the same bits. Read next: schedule.c.
 */
#include "pass.h"

static const facet_layer *layer_of(const struct pass *pass, int32_t layer)
{
    return pass->model->layers + layer;
}

static float *stream(const struct pass *pass, int32_t row)
{
    return pass->x + (int64_t)row * pass->model->hidden_size;
}

void step_embed(struct pass *pass, int32_t first, int32_t count)
{
    for (int32_t row = first; row < first + count; row++)
        read_row(&pass->model->embedding, pass->batch->token_ids[row], stream(pass, row));
}

void step_norm(struct pass *pass, const row_list *list, int32_t first, int32_t count, const float *weight, workspace *w)
{
    const facet_model *model = pass->model;
    for (int32_t i = first; i < first + count; i++) {
        normalize_row(stream(pass, list->rows[i]), weight, model->rms_norm_eps, model->hidden_size, w->row);
        quantize_row(w->row, &pass->normed, i);
    }
}

/* Where K or V of a batch row lies in its cache: layer, block, head, offset. */
static float *slot(const struct pass *pass, float *cache, int32_t layer, int32_t head, int64_t at)
{
    const facet_model *model = pass->model;
    const int64_t block = at / pass->batch->block_size, offset = at % pass->batch->block_size;
    const int64_t row = (layer * pass->batch->num_blocks + block) * model->num_kv_heads + head;
    return cache + (row * pass->batch->block_size + offset) * model->head_dim;
}

/* `head` counts query heads, then key heads, then value heads. */
void step_qkv_head(struct pass *pass, int32_t layer, int32_t head, int32_t first, int32_t count, workspace *w)
{
    const facet_model *model = pass->model;
    const facet_batch *batch = pass->batch;
    const facet_layer *at = layer_of(pass, layer);
    const int32_t H = model->num_heads, G = model->num_kv_heads, D = model->head_dim, panels = D / PANEL;
    const facet_matrix *matrix = head < H ? &at->q : head < H + G ? &at->k : &at->v;
    const int32_t own = head < H ? head : head < H + G ? head - H : head - H - G;
    const sink to = {w->out, D, NULL, STORE};
    linear_panels(matrix, &pass->normed, first, count, own * panels, (own + 1) * panels, &to, w->expanded);
    for (int32_t i = 0; i < count; i++) {
        const int32_t row = first + i;
        const int64_t angle = (int64_t)batch->positions[row] * (D / 2);
        const float *from = w->out + (int64_t)i * D;
        if (head < H)
            rotate_head(from, model->cos + angle, model->sin + angle, D, model->attention_scale,
                        pass->q + ((int64_t)row * H + own) * D);
        else if (head < H + G)
            rotate_head(from, model->cos + angle, model->sin + angle, D, 1.0f,
                        slot(pass, batch->k, layer, own, batch->slot_mapping[row]));
        else
            copy_floats(slot(pass, batch->v, layer, own, batch->slot_mapping[row]), from, D);
    }
}

/* Keys and values of one tile of a sequence, as far as `context`. */
static void find_tile(const struct pass *pass, int32_t layer, int32_t head, int32_t sequence, int32_t tile,
                      int32_t context, key_rows *to)
{
    const facet_batch *batch = pass->batch;
    const int32_t *table = batch->block_tables + (int64_t)sequence * batch->table_width;
    const int32_t start = tile * KEY_TILE;
    to->count = context - start < KEY_TILE ? context - start : KEY_TILE;
    for (int32_t i = 0; i < to->count; i++) {
        const int64_t at = (int64_t)table[(start + i) / batch->block_size] * batch->block_size +
                           (start + i) % batch->block_size;
        to->keys[i] = slot(pass, batch->k, layer, head, at);
        to->values[i] = slot(pass, batch->v, layer, head, at);
    }
}

/* Rows first..first+count of the list, one sequence, one key/value head: tiles tile0..tile1. With `partials`, each tile's
 * partials are kept in their own place ([tile - tile0, query, D + 2]); without, they are folded into w->states. */
static void attend_tiles(struct pass *pass, int32_t layer, const int32_t *rows, const attention_item *item,
                         float *partials, workspace *w)
{
    const facet_model *model = pass->model;
    const int32_t D = model->head_dim, H = model->num_heads, repeats = H / model->num_kv_heads;
    const int32_t last = pass->batch->positions[rows[item->count - 1]], size = D + 2;
    key_rows tiles[2]; /* this one and the next */
    find_tile(pass, layer, item->head, pass->sequence[rows[0]], item->tile0, last + 1, &tiles[item->tile0 % 2]);
    for (int32_t t = item->tile0; t < item->tile1; t++) {
        int32_t first = 0, queries = 0;
        while (pass->batch->positions[rows[first]] < t * KEY_TILE)
            first++; /* earlier rows see nothing of this tile */
        for (int32_t i = first; i < item->count; i++)
            for (int32_t r = 0; r < repeats; r++, queries++) {
                const int32_t seen = pass->batch->positions[rows[i]] + 1 - t * KEY_TILE;
                w->queries[queries] = pass->q + ((int64_t)rows[i] * H + item->head * repeats + r) * D;
                w->visible[queries] = seen < KEY_TILE ? seen : KEY_TILE;
                w->fresh[queries] = partials != NULL || t == 0;
            }
        key_rows *tile = &tiles[t % 2], *next = t + 1 < item->tile1 ? &tiles[(t + 1) % 2] : NULL;
        if (next)
            find_tile(pass, layer, item->head, pass->sequence[rows[0]], t + 1, last + 1, next);
        load_keys(tile, D, w->attention);
        float *states = partials ? partials + (int64_t)(t - item->tile0) * item->count * repeats * size : w->states;
        attend_tile(w->queries, w->visible, w->fresh, queries, tile, next, D, states + (int64_t)first * repeats * size,
                    w->attention);
    }
}

/* Output of query head `head` of list place i, quantized in its place. */
static void finish_head(struct pass *pass, const float *state, int32_t i, int32_t head)
{
    const int32_t D = pass->model->head_dim;
    float y[MAX_HEAD_DIM];
    finish_state(state, D, y);
    for (int32_t k = 0; k < D; k += GROUP)
        quantize_group(y + k, &pass->attended, i, (head * D + k) / GROUP);
}

/* All tiles of one sequence's rows for one key/value head. */
static void attend_whole(struct pass *pass, int32_t layer, const int32_t *rows, const attention_item *item, workspace *w)
{
    const int32_t repeats = pass->model->num_heads / pass->model->num_kv_heads, size = pass->model->head_dim + 2;
    attend_tiles(pass, layer, rows, item, NULL, w);
    for (int32_t i = 0; i < item->count; i++)
        for (int32_t r = 0; r < repeats; r++)
            finish_head(pass, w->states + (int64_t)(i * repeats + r) * size, item->first + i, item->head * repeats + r);
}

void step_attend(struct pass *pass, int32_t layer, const row_list *list, int32_t first, int32_t count, workspace *w)
{
    for (int32_t start = first, end; start < first + count; start = end) {
        const int32_t *rows = list->rows + start;
        for (end = start + 1; end < first + count && pass->sequence[list->rows[end]] == pass->sequence[rows[0]];)
            end++;
        const int32_t tiles = pass->batch->positions[list->rows[end - 1]] / KEY_TILE + 1;
        for (int32_t head = 0; head < pass->model->num_kv_heads; head++) {
            const attention_item item = {start, end - start, head, 0, tiles, 0};
            attend_whole(pass, layer, rows, &item, w);
        }
    }
}

void step_attend_item(struct pass *pass, int32_t layer, const attention_item *item, workspace *w)
{
    const int32_t repeats = pass->model->num_heads / pass->model->num_kv_heads, size = pass->model->head_dim + 2;
    attention_span *span = pass->spans + item->span;
    const int32_t *rows = pass->all.rows + item->first;
    if (!span->partials) {
        attend_whole(pass, layer, rows, item, w);
        return;
    }
    const int64_t tile_floats = (int64_t)item->count * repeats * size;
    attend_tiles(pass, layer, rows, item, span->partials + item->tile0 * tile_floats, w);
    if (atomic_fetch_add_explicit(&span->ended, 1, memory_order_acq_rel) + 1 < span->num_items)
        return;
    atomic_store_explicit(&span->ended, 0, memory_order_relaxed); /* for the next layer */
    for (int32_t i = 0; i < item->count; i++) {
        const int32_t tiles = pass->batch->positions[rows[i]] / KEY_TILE + 1;
        for (int32_t r = 0; r < repeats; r++) {
            float *state = span->partials + (int64_t)(i * repeats + r) * size;
            for (int32_t t = 1; t < tiles; t++)
                fold_state(state, state + t * tile_floats, size - 2);
            finish_head(pass, state, item->first + i, item->head * repeats + r);
        }
    }
}

void step_add(struct pass *pass, const facet_matrix *matrix, const quantized *from, const row_list *list, int32_t first,
              int32_t count, int32_t p0, int32_t p1, workspace *w)
{
    const sink to = {pass->x + (int64_t)p0 * PANEL, pass->model->hidden_size, list->rows + first, ADD};
    linear_panels(matrix, from, first, count, p0, p1, &to, w->expanded);
}

/* 32 columns of silu(gate) * up: four panels of each, quantized as one group. */
void step_gate_up(struct pass *pass, int32_t layer, int32_t group, int32_t first, int32_t count, workspace *w)
{
    const facet_layer *at = layer_of(pass, layer);
    float pair[MOST_ROWS * 16] __attribute__((aligned(32)));
    for (int32_t i = 0; i < GROUP / PANEL; i++) {
        linear_pair(&at->gate, &at->up, &pass->normed, first, count, group * (GROUP / PANEL) + i, pair, w->expanded);
        for (int32_t r = 0; r < count; r++)
            silu_mul(pair + 16 * r, pair + 16 * r + 8, PANEL, w->out + GROUP * r + PANEL * i);
    }
    for (int32_t r = 0; r < count; r++)
        quantize_group(w->out + GROUP * r, &pass->inner, first + r, group);
}

void step_logits(struct pass *pass, int32_t p0, int32_t p1, workspace *w)
{
    const sink to = {pass->batch->logits + (int64_t)p0 * PANEL, pass->model->vocab_size, NULL, STORE};
    linear_panels(&pass->model->head, &pass->normed, 0, pass->wanted.count, p0, p1, &to, w->expanded);
}
