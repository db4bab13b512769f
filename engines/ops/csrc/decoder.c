/* The library's entries: what the processor can do, one matrix product, and a decoder with its pool and arena. */
#define _GNU_SOURCE
#include "pass.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct facet_decoder {
    facet_model model;
    facet_pool *pool;
    uint8_t *arena;
    size_t arena_bytes;
};

int32_t facet_abi(int64_t sizes[4])
{
    sizes[0] = sizeof(facet_matrix);
    sizes[1] = sizeof(facet_layer);
    sizes[2] = sizeof(facet_model);
    sizes[3] = sizeof(facet_batch);
    return FACET_ABI;
}

int32_t facet_cpu_supported(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

/* Memory straight from the system, so that what a large prompt needed can be given back. */
static uint8_t *map_bytes(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

typedef struct {
    const facet_matrix *matrix;
    const float *x;
    float *y;
    int64_t num_rows;
    quantized codes;
    uint8_t *scratch;
    size_t scratch_bytes;
} linear_job;

enum { LINEAR_PANELS = 4, LINEAR_ROWS = 4 };

static uint32_t linear_chunks(void *job, uint32_t phase)
{
    const linear_job *linear = job;
    if (phase == 0)
        return (uint32_t)((linear->num_rows + LINEAR_ROWS - 1) / LINEAR_ROWS);
    return phase == 1 ? (uint32_t)((num_panels(linear->matrix) + LINEAR_PANELS - 1) / LINEAR_PANELS) : 0;
}

static void linear_run(void *job, uint32_t phase, uint32_t chunk, uint32_t worker)
{
    linear_job *linear = job;
    const facet_matrix *matrix = linear->matrix;
    if (phase == 0) {
        for (int64_t row = (int64_t)chunk * LINEAR_ROWS; row < linear->num_rows && row < (chunk + 1) * LINEAR_ROWS; row++)
            quantize_row(linear->x + row * matrix->num_inputs, &linear->codes, row);
        return;
    }
    const int32_t p0 = (int32_t)chunk * LINEAR_PANELS, all = num_panels(matrix);
    const sink to = {linear->y + (int64_t)p0 * PANEL, matrix->num_outputs, NULL, STORE};
    linear_panels(matrix, &linear->codes, 0, (int32_t)linear->num_rows, p0,
                  all - p0 < LINEAR_PANELS ? all : p0 + LINEAR_PANELS, &to,
                  linear->scratch + worker * linear->scratch_bytes);
}

int32_t facet_linear(facet_pool *pool, const facet_matrix *matrix, const float *x, int64_t num_rows, float *y)
{
    if (!matrix_is_sound(matrix, matrix->num_outputs, matrix->num_inputs) || num_rows < 0 || num_rows > 1 << 20)
        return FACET_BAD_MODEL;
    if (num_rows == 0)
        return FACET_OK;
    const size_t K = (size_t)matrix->num_inputs, groups = K / GROUP;
    const size_t rows = ((size_t)num_rows + ROW_TILE - 1) / ROW_TILE * ROW_TILE;
    const size_t scratch_bytes = (expanded_bytes(matrix) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const size_t bytes = scratch_bytes * (size_t)pool_size(pool) + rows * (K + 16 * groups);
    uint8_t *memory = map_bytes(bytes);
    if (!memory)
        return FACET_NO_MEMORY;
    float *floats = (float *)(memory + scratch_bytes * (size_t)pool_size(pool));
    quantized codes = {(int8_t *)(floats + 4 * rows * groups), floats, floats + rows * groups,
                       floats + 2 * rows * groups, matrix->num_inputs};
    linear_job job = {matrix, x, y, num_rows, codes, memory, scratch_bytes};
    pool_run(pool, &job, linear_chunks, linear_run);
    munmap(memory, bytes);
    return FACET_OK;
}

static int model_is_sound(const facet_model *m)
{
    const int32_t D = m->head_dim, hidden = m->hidden_size, inner = m->intermediate_size;
    if (m->num_layers < 1 || D < GROUP || D > MAX_HEAD_DIM || D % GROUP || hidden % GROUP || inner % GROUP ||
        m->num_kv_heads < 1 || m->num_heads < 1 || m->num_heads % m->num_kv_heads || m->vocab_size < 1 ||
        !matrix_is_sound(&m->embedding, m->vocab_size, hidden) || !matrix_is_sound(&m->head, m->vocab_size, hidden))
        return 0;
    const int32_t query = m->num_heads * D, kv = m->num_kv_heads * D;
    for (int32_t i = 0; i < m->num_layers; i++) {
        const facet_layer *layer = m->layers + i;
        if (!matrix_is_sound(&layer->q, query, hidden) || !matrix_is_sound(&layer->k, kv, hidden) ||
            !matrix_is_sound(&layer->v, kv, hidden) || !matrix_is_sound(&layer->o, hidden, query) ||
            !matrix_is_sound(&layer->gate, inner, hidden) || !matrix_is_sound(&layer->up, inner, hidden) ||
            !matrix_is_sound(&layer->down, hidden, inner))
            return 0;
    }
    return 1;
}

facet_decoder *facet_decoder_new(const facet_model *model, int32_t num_threads)
{
    if (!model_is_sound(model))
        return NULL;
    facet_decoder *decoder = calloc(1, sizeof *decoder);
    facet_pool *pool = facet_pool_new(num_threads);
    if (!decoder || !pool) {
        free(decoder);
        facet_pool_free(pool);
        return NULL;
    }
    decoder->model = *model;
    decoder->pool = pool;
    return decoder;
}

void facet_decoder_free(facet_decoder *decoder)
{
    if (!decoder)
        return;
    facet_pool_free(decoder->pool);
    if (decoder->arena)
        munmap(decoder->arena, decoder->arena_bytes);
    free(decoder);
}

int64_t facet_decoder_scratch_bytes(const facet_decoder *decoder)
{
    return (int64_t)decoder->arena_bytes;
}

int32_t facet_decoder_forward(facet_decoder *decoder, const facet_batch *batch)
{
    if (!batch_is_sound(&decoder->model, batch))
        return FACET_BAD_BATCH;
    struct pass pass;
    const int32_t workers = pool_size(decoder->pool);
    const size_t bytes = plan_pass(&pass, &decoder->model, batch, workers, NULL);
    if (bytes > decoder->arena_bytes) {
        uint8_t *arena = map_bytes(bytes);
        if (!arena)
            return FACET_NO_MEMORY;
        if (decoder->arena)
            munmap(decoder->arena, decoder->arena_bytes);
        decoder->arena = arena;
        decoder->arena_bytes = bytes;
    }
    plan_pass(&pass, &decoder->model, batch, workers, decoder->arena);
    pool_run(decoder->pool, &pass, pass_chunks, pass_run);
    return FACET_OK;
}
