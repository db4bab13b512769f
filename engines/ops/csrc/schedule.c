/* Two schedules of one pass. By rows: a chunk takes a block of rows through a layer, weights are read once a block and
 * threads meet once a layer; for prompts. By columns: every step of a layer is a phase whose chunks are columns of all
 * rows; for the few rows of decoding, where weights must be read once in all. Both run the steps of steps.c.
 */
#include "pass.h"

enum {
    ADD_PANELS = 4,   /* panels a chunk of the output and down projections */
    HEAD_PANELS = 32, /* panels a chunk of the language-model head */
    NORM_ROWS = 4,
    STEPS = 7, /* phases a layer, by columns */
};

typedef enum { QKV, ATTEND, OUTPUT, NORM, GATE_UP, DOWN, NEXT_NORM } column_step;

static uint32_t pieces(int32_t total, int32_t size)
{
    return (uint32_t)((total + size - 1) / size);
}

static uint32_t head_chunks(const struct pass *pass)
{
    return pass->wanted.count ? pieces(num_panels(&pass->model->head), HEAD_PANELS) : 0;
}

static uint32_t row_chunks(const struct pass *pass, uint32_t phase)
{
    const uint32_t layers = (uint32_t)pass->model->num_layers;
    if (phase < layers)
        return pieces(pass->all.count, pass->block_rows);
    if (phase == layers)
        return pieces(pass->wanted.count, pass->block_rows);
    return phase == layers + 1 ? head_chunks(pass) : 0;
}

static uint32_t column_chunks(const struct pass *pass, uint32_t phase)
{
    const facet_model *model = pass->model;
    const uint32_t layers = (uint32_t)model->num_layers;
    if (phase == 0)
        return pieces(pass->all.count, NORM_ROWS);
    const uint32_t layer = (phase - 1) / STEPS;
    if (layer == layers)
        return phase == 1 + layers * STEPS ? head_chunks(pass) : 0;
    const int last_layer = layer + 1 == layers;
    switch ((column_step)((phase - 1) % STEPS)) {
    case QKV: return (uint32_t)(model->num_heads + 2 * model->num_kv_heads);
    case ATTEND: return last_layer && !pass->wanted.count ? 0 : (uint32_t)pass->num_items;
    case OUTPUT: return pieces(num_panels(&model->layers[layer].o), ADD_PANELS);
    case NORM: return pieces(pass->all.count, NORM_ROWS);
    case GATE_UP: return (uint32_t)(model->intermediate_size / GROUP);
    case DOWN: return pieces(num_panels(&model->layers[layer].down), ADD_PANELS);
    default: return pieces(last_layer ? pass->wanted.count : pass->all.count, NORM_ROWS);
    }
}

uint32_t pass_chunks(void *job, uint32_t phase)
{
    const struct pass *pass = job;
    return pass->by_rows ? row_chunks(pass, phase) : column_chunks(pass, phase);
}

static int32_t clip(int32_t start, int32_t size, int32_t end)
{
    return end - start < size ? end - start : size;
}

static void run_head(struct pass *pass, uint32_t chunk, workspace *w)
{
    const int32_t p0 = (int32_t)chunk * HEAD_PANELS;
    step_logits(pass, p0, p0 + clip(p0, HEAD_PANELS, num_panels(&pass->model->head)), w);
}

static void finish_layer(struct pass *pass, int32_t layer, const row_list *list, int32_t first, int32_t count,
                         workspace *w)
{
    const facet_model *model = pass->model;
    const facet_layer *at = model->layers + layer;
    step_attend(pass, layer, list, first, count, w);
    step_add(pass, &at->o, &pass->attended, list, first, count, 0, num_panels(&at->o), w);
    step_norm(pass, list, first, count, at->mlp_norm, w);
    for (int32_t group = 0; group < model->intermediate_size / GROUP; group++)
        step_gate_up(pass, layer, group, first, count, w);
    step_add(pass, &at->down, &pass->inner, list, first, count, 0, num_panels(&at->down), w);
}

static void run_rows_chunk(struct pass *pass, uint32_t phase, uint32_t chunk, workspace *w)
{
    const facet_model *model = pass->model;
    const int32_t layer = (int32_t)phase;
    if (layer == model->num_layers + 1) {
        run_head(pass, chunk, w);
        return;
    }
    const row_list *list = layer < model->num_layers ? &pass->all : &pass->wanted;
    /* Late rows see more keys: the longest chunks go first. */
    const int32_t block = (int32_t)(pieces(list->count, pass->block_rows) - 1 - chunk);
    const int32_t first = block * pass->block_rows, count = clip(first, pass->block_rows, list->count);
    if (layer == 0)
        step_embed(pass, first, count);
    else
        finish_layer(pass, layer - 1, list, first, count, w);
    if (layer == model->num_layers) {
        step_norm(pass, list, first, count, model->norm, w);
        return;
    }
    step_norm(pass, list, first, count, model->layers[layer].attention_norm, w);
    for (int32_t head = 0; head < model->num_heads + 2 * model->num_kv_heads; head++)
        step_qkv_head(pass, layer, head, first, count, w);
}

static void run_norm(struct pass *pass, const row_list *list, uint32_t chunk, const float *weight, workspace *w)
{
    const int32_t first = (int32_t)chunk * NORM_ROWS;
    step_norm(pass, list, first, clip(first, NORM_ROWS, list->count), weight, w);
}

static void run_add(struct pass *pass, const facet_matrix *matrix, const quantized *from, uint32_t chunk, workspace *w)
{
    const int32_t p0 = (int32_t)chunk * ADD_PANELS;
    step_add(pass, matrix, from, &pass->all, 0, pass->all.count, p0, p0 + clip(p0, ADD_PANELS, num_panels(matrix)), w);
}

static void run_columns_chunk(struct pass *pass, uint32_t phase, uint32_t chunk, workspace *w)
{
    const facet_model *model = pass->model;
    const int32_t layer = (int32_t)(phase - 1) / STEPS, rows = pass->all.count;
    if (phase == 0) {
        const int32_t first = (int32_t)chunk * NORM_ROWS;
        step_embed(pass, first, clip(first, NORM_ROWS, rows));
        run_norm(pass, &pass->all, chunk, model->layers[0].attention_norm, w);
        return;
    }
    if (layer == model->num_layers) {
        run_head(pass, chunk, w);
        return;
    }
    const facet_layer *at = model->layers + layer;
    switch ((column_step)((phase - 1) % STEPS)) {
    case QKV: step_qkv_head(pass, layer, (int32_t)chunk, 0, rows, w); break;
    case ATTEND: step_attend_item(pass, layer, pass->items + chunk, w); break;
    case OUTPUT: run_add(pass, &at->o, &pass->attended, chunk, w); break;
    case NORM: run_norm(pass, &pass->all, chunk, at->mlp_norm, w); break;
    case GATE_UP: step_gate_up(pass, layer, (int32_t)chunk, 0, rows, w); break;
    case DOWN: run_add(pass, &at->down, &pass->inner, chunk, w); break;
    case NEXT_NORM:
        if (layer + 1 < model->num_layers)
            run_norm(pass, &pass->all, chunk, at[1].attention_norm, w);
        else
            run_norm(pass, &pass->wanted, chunk, model->norm, w);
        break;
    }
}

void pass_run(void *job, uint32_t phase, uint32_t chunk, uint32_t worker)
{
    struct pass *pass = job;
    workspace *w = pass->workers + worker;
    if (pass->by_rows)
        run_rows_chunk(pass, phase, chunk, w);
    else
        run_columns_chunk(pass, phase, chunk, w);
}
