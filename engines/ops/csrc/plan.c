/* Before a pass: is the batch sound, which schedule, where does each buffer lie in the arena. Read next: runs.c. */
#include "pass.h"

#include <string.h>

enum {
    COLUMN_ROWS = 3 * MOST_ROWS, /* up to this many rows a pass is by columns */
    LEAST_BLOCK_ROWS = 12,
    BLOCKS_PER_WORKER = 6,  /* so that a block more or less is a small part of a layer */
};

int batch_is_sound(const facet_model *model, const facet_batch *batch)
{
    const int32_t T = batch->num_tokens, S = batch->num_sequences;
    if (T < 1 || S < 1 || batch->block_size < 1 || batch->num_blocks < 1 || batch->query_start[0] != 0 ||
        batch->query_start[S] != T || batch->num_logits_rows < 0 || batch->kv_format < KV_FLOAT32 ||
        batch->kv_format > KV_INT4 || (kv_has_scales(batch->kv_format) && !(batch->k_scales && batch->v_scales)))
        return 0;
    for (int32_t s = 0; s < S; s++) {
        const int32_t start = batch->query_start[s], end = batch->query_start[s + 1], context = batch->context_lens[s];
        const int32_t blocks = (context + batch->block_size - 1) / batch->block_size;
        if (end <= start || end > T || context < end - start || context > model->max_positions ||
            blocks > batch->table_width)
            return 0;
        for (int32_t b = 0; b < blocks; b++) {
            const int32_t block = batch->block_tables[(int64_t)s * batch->table_width + b];
            if (block < 0 || block >= batch->num_blocks)
                return 0;
        }
        for (int32_t row = start; row < end; row++) {
            const int64_t token = batch->token_ids[row], at = batch->slot_mapping[row];
            if (token < 0 || token >= model->vocab_size || batch->positions[row] != context - (end - row) || at < 0 ||
                at >= batch->num_blocks * batch->block_size)
                return 0;
        }
    }
    for (int32_t r = 0; r < batch->num_logits_rows; r++)
        if (batch->logits_rows[r] < 0 || batch->logits_rows[r] >= T ||
            (r && batch->logits_rows[r] <= batch->logits_rows[r - 1]))
            return 0;
    return 1;
}

/* Bytes are counted while base is NULL, and handed out when it is not. */
typedef struct {
    uint8_t *base;
    size_t used;
} arena;

static void *take(arena *from, size_t count, size_t size)
{
    void *at = from->base ? from->base + from->used : NULL;
    from->used += (count * size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return at;
}

static float *take_floats(arena *from, int64_t count)
{
    return take(from, (size_t)count, sizeof(float));
}

static quantized take_quantized(arena *from, int64_t rows, int32_t width)
{
    quantized q;
    rows = (rows + ROW_TILE - 1) / ROW_TILE * ROW_TILE;
    q.codes = take(from, (size_t)(rows * width), 1);
    q.scales = take_floats(from, rows * (width / GROUP));
    q.sums = take_floats(from, rows * (width / GROUP));
    q.half_sums = take_floats(from, rows * (width / GROUP) * 2);
    q.width = width;
    return q;
}

static size_t most_expanded(const facet_model *model)
{
    size_t most = expanded_bytes(&model->head);
    for (int32_t i = 0; i < model->num_layers; i++) {
        const facet_matrix *matrices[] = {&model->layers[i].q, &model->layers[i].o, &model->layers[i].down};
        for (size_t j = 0; j < sizeof matrices / sizeof *matrices; j++)
            most = expanded_bytes(matrices[j]) > most ? expanded_bytes(matrices[j]) : most;
    }
    return most;
}

static void take_workspace(arena *from, const facet_model *model, int32_t kv_format, size_t expanded, workspace *w)
{
    const int32_t D = model->head_dim, queries = MOST_ROWS * (model->num_heads / model->num_kv_heads);
    const int32_t width = model->hidden_size > model->intermediate_size ? model->hidden_size : model->intermediate_size;
    workspace own;
    own.expanded = take(from, expanded, 1);
    own.out = take_floats(from, (int64_t)MOST_ROWS * (D > GROUP ? D : GROUP));
    own.row = take_floats(from, width);
    own.own = take_floats(from, (int64_t)queries * (D + 2));
    own.places = take(from, MOST_ROWS, sizeof *own.places);
    own.states = take(from, (size_t)queries, sizeof *own.states);
    own.attention = take_floats(from, (int64_t)attention_scratch_floats(D));
    own.tile = take_floats(from, kv_format == KV_FLOAT32 ? 0 : (int64_t)2 * KEY_TILE * D);
    own.queries = take(from, (size_t)queries, sizeof *own.queries);
    own.visible = take(from, (size_t)queries, sizeof *own.visible);
    own.fresh = take(from, (size_t)queries, 1);
    if (from->base)
        *w = own;
}

static void plan_attention(struct pass *pass, arena *from)
{
    const facet_batch *batch = pass->batch;
    const facet_model *model = pass->model;
    const size_t S = (size_t)batch->num_sequences, T = (size_t)batch->num_tokens;
    int64_t row_tiles = 0;
    for (int32_t row = 0; row < batch->num_tokens; row++)
        row_tiles += batch->positions[row] / KEY_TILE + 1;
    pass->items = take(from, (size_t)most_items(pass, row_tiles), sizeof *pass->items);
    pass->sorted = take(from, T, sizeof *pass->sorted);
    pass->parts = take(from, T, sizeof *pass->parts);
    pass->ended = take(from, T * (size_t)model->num_kv_heads, sizeof *pass->ended);
    /* Untouched slots cost nothing: few tiles have one of their own. */
    pass->partials = take_floats(from, (row_tiles + (int64_t)T) * model->num_heads * (model->head_dim + 2));
    int32_t *order = take(from, S, sizeof *order), *common = take(from, S, sizeof *common);
    int32_t *start = take(from, S + 1, sizeof *start);
    if (from->base)
        plan_runs(pass, order, common, start);
}

static void fill_lists(struct pass *pass, int32_t *all, int32_t *wanted)
{
    const facet_batch *batch = pass->batch;
    for (int32_t s = 0; s < batch->num_sequences; s++)
        for (int32_t row = batch->query_start[s]; row < batch->query_start[s + 1]; row++) {
            all[row] = row;
            pass->sequence[row] = s;
        }
    for (int32_t r = 0; r < batch->num_logits_rows; r++)
        wanted[r] = (int32_t)batch->logits_rows[r];
    pass->all = (row_list){all, batch->num_tokens};
    pass->wanted = (row_list){wanted, batch->num_logits_rows};
}

size_t plan_pass(struct pass *pass, const facet_model *model, const facet_batch *batch, int32_t num_workers,
                 uint8_t *base)
{
    arena from = {base, 0};
    const int32_t T = batch->num_tokens, D = model->head_dim;
    *pass = (struct pass){.model = model, .batch = batch, .num_workers = num_workers};
    int32_t rows = (T + num_workers * BLOCKS_PER_WORKER - 1) / (num_workers * BLOCKS_PER_WORKER);
    rows = (rows + ROW_TILE - 1) / ROW_TILE * ROW_TILE;
    pass->block_rows = rows < LEAST_BLOCK_ROWS ? LEAST_BLOCK_ROWS : rows > MOST_ROWS ? MOST_ROWS : rows;
    pass->by_rows = T > COLUMN_ROWS;
    pass->sequence = take(&from, (size_t)T, sizeof(int32_t));
    int32_t *all = take(&from, (size_t)T, sizeof(int32_t));
    int32_t *wanted = take(&from, (size_t)batch->num_logits_rows, sizeof(int32_t));
    if (base)
        fill_lists(pass, all, wanted);
    pass->x = take_floats(&from, (int64_t)T * model->hidden_size);
    pass->q = take_floats(&from, (int64_t)T * model->num_heads * D);
    pass->normed = take_quantized(&from, T, model->hidden_size);
    pass->attended = take_quantized(&from, T, model->num_heads * D);
    pass->inner = take_quantized(&from, T, model->intermediate_size);
    pass->workers = take(&from, (size_t)num_workers, sizeof(workspace));
    const size_t expanded = most_expanded(model);
    for (int32_t i = 0; i < num_workers; i++)
        take_workspace(&from, model, batch->kv_format, expanded, pass->workers + i);
    if (!pass->by_rows)
        plan_attention(pass, &from);
    return from.used;
}
