/* The steps of a layer on some rows or some columns. Each writes its own place only, so any schedule that runs a step
 * after those it reads from computes the same bits. Read next: attend.c, schedule.c.
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

int64_t kv_row_of(const struct pass *pass, int32_t layer, int32_t head, int64_t block, int32_t offset)
{
    const int64_t of_head = (layer * pass->batch->num_blocks + block) * pass->model->num_kv_heads + head;
    return of_head * pass->batch->block_size + offset;
}

/* K or V [D] of a batch row into its slot, in the cache's format; `x` may be rotated in place. */
static void store_row(const struct pass *pass, float *x, int32_t layer, int32_t head, int64_t slot, int is_key)
{
    const facet_batch *batch = pass->batch;
    const int32_t D = pass->model->head_dim, size = batch->block_size;
    const int64_t row = kv_row_of(pass, layer, head, slot / size, (int32_t)(slot % size));
    float *scales = is_key ? batch->k_scales : batch->v_scales;
    if (batch->kv_format == KV_INT4)
        rotate_hadamard(x, D);
    kv_store(batch->kv_format, x, D, (is_key ? batch->k : batch->v) + row * kv_row_bytes(batch->kv_format, D),
             scales ? scales + row : NULL);
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
    for (int32_t row = first; row < first + count; row++) {
        const int32_t i = (row - first) % MOST_ROWS, left = first + count - row;
        if (i == 0)
            linear_panels(matrix, &pass->normed, row, left < MOST_ROWS ? left : MOST_ROWS, own * panels,
                          (own + 1) * panels, &to, w->expanded);
        const int64_t angle = (int64_t)batch->positions[row] * (D / 2);
        float *from = w->out + (int64_t)i * D, key[MAX_HEAD_DIM];
        if (head < H) {
            float *query = pass->q + ((int64_t)row * H + own) * D;
            rotate_head(from, model->cos + angle, model->sin + angle, D, model->attention_scale, query);
            if (batch->kv_format == KV_INT4)
                rotate_hadamard(query, D);
        } else if (head < H + G) {
            rotate_head(from, model->cos + angle, model->sin + angle, D, 1.0f, key);
            store_row(pass, key, layer, own, batch->slot_mapping[row], 1);
        } else {
            store_row(pass, from, layer, own, batch->slot_mapping[row], 0);
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
    for (int32_t end = first + count, rows; first < end; first += rows) {
        rows = end - first < MOST_ROWS ? end - first : MOST_ROWS;
        for (int32_t i = 0; i < GROUP / PANEL; i++) {
            linear_pair(&at->gate, &at->up, &pass->normed, first, rows, group * (GROUP / PANEL) + i, pair, w->expanded);
            for (int32_t r = 0; r < rows; r++)
                silu_mul(pair + 16 * r, pair + 16 * r + 8, PANEL, w->out + GROUP * r + PANEL * i);
        }
        for (int32_t r = 0; r < rows; r++)
            quantize_group(w->out + GROUP * r, &pass->inner, first + r, group);
    }
}

void step_logits(struct pass *pass, int32_t p0, int32_t p1, workspace *w)
{
    const sink to = {pass->batch->logits + (int64_t)p0 * PANEL, pass->model->vocab_size, NULL, STORE};
    linear_panels(&pass->model->head, &pass->normed, 0, pass->wanted.count, p0, p1, &to, w->expanded);
}
