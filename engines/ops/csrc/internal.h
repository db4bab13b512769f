/* What the C files share: quantized rows, expanded panels, the pool's interface, the shape of a pass. */
#ifndef FACET_INTERNAL_H
#define FACET_INTERNAL_H

#include "facet_native.h"

#include <stddef.h>
#include <stdint.h>

enum {
    PANEL = 8,        /* outputs a panel */
    GROUP = 32,       /* inputs that share an activation scale */
    KEY_TILE = 64,    /* keys whose softmax is one partial result; a multiple of 8 */
    MAX_HEAD_DIM = 256,
    ROW_TILE = 6,     /* rows a register tile */
    MOST_ROWS = 48,   /* rows that one pass over a panel takes */
    MAX_WORKERS = 256,
    ALIGNMENT = 64,
};

/* Activations [M, K] as codes: x ~ scale[m, k / 32] * code[m, k], with sums of codes a group of 32 and of 16. Rows lie
 * in tiles of ROW_TILE, those of a tile side by side, so that a tile is read straight on. */
typedef struct {
    int8_t *codes;    /* [M / 6, K / 4, 6, 4] */
    float *scales;    /* [M / 6, K / 32, 6] */
    float *sums;      /* [M / 6, K / 32, 6] */
    float *half_sums; /* [M / 6, K / 16, 6] */
    int32_t width;    /* K */
} quantized;

/* rows.c */
void quantize_group(const float *x, quantized *to, int64_t row, int32_t group);
void quantize_row(const float *x, quantized *to, int64_t row);
void normalize_row(const float *x, const float *weight, float eps, int32_t width, float *y);
void silu_mul(const float *gate, const float *up, int32_t width, float *y);
void rotate_head(const float *x, const float *cos, const float *sin, int32_t head_dim, float scale, float *y);
void copy_floats(float *to, const float *from, int64_t count);

/* kv.c. A row: what one token and key/value head hold. */
int64_t kv_row_bytes(int32_t format, int32_t head_dim);
int kv_has_scales(int32_t format);
void kv_store(int32_t format, const float *x, int32_t head_dim, uint8_t *to, float *scale);
void kv_load(int32_t format, const uint8_t *from, float scale, int32_t head_dim, float *to);
void rotate_hadamard(float *x, int32_t head_dim);

/* linear.c. Rows first..first+count of `x` through panels p0..p1; `target` row i is at to + i * stride, its column 0 is
 * output p0 * 8 (rows count from `first`, a multiple of ROW_TILE). ADD adds to what is there. `scratch` has
 * expanded_bytes(matrix) bytes. linear_pair takes at most MOST_ROWS rows. */
typedef enum { STORE, ADD } sink_kind;
typedef struct {
    float *to;
    int64_t stride;
    const int32_t *rows; /* target row of row i, or NULL for i itself */
    sink_kind kind;
} sink;
size_t expanded_bytes(const facet_matrix *matrix);
int32_t num_panels(const facet_matrix *matrix);
int matrix_is_sound(const facet_matrix *matrix, int32_t num_outputs, int32_t num_inputs);
void linear_panels(const facet_matrix *matrix, const quantized *x, int64_t first, int32_t count, int32_t p0, int32_t p1,
                   const sink *to, uint8_t *scratch);
/* Panel p of two matrices of one shape: columns 0..7 of `to` are the first's outputs, 8..15 the second's. */
void linear_pair(const facet_matrix *one, const facet_matrix *two, const quantized *x, int64_t first, int32_t count,
                 int32_t p, float *to, uint8_t *scratch);
void read_row(const facet_matrix *matrix, int64_t row, float *to);

/* attention.c. A partial result of one query over one tile, or of all tiles so far: m, l, then D sums. */
typedef struct {
    const float *keys[KEY_TILE];   /* row pointers of D floats */
    const float *values[KEY_TILE];
    int32_t count;
} key_rows;
size_t attention_scratch_floats(int32_t head_dim);
void load_keys(const key_rows *tile, int32_t head_dim, float *scratch);
/* `num_queries` queries (q[i]: D floats, scaled) over the tile that `load_keys` put into scratch; query i sees its
 * first visible[i] >= 1 keys. Keys of `next` (or NULL) are fetched meanwhile. The partial of query i is folded into
 * states[i], D + 2 floats; fresh[i] starts it. */
void attend_tile(const float *const *q, const int32_t *visible, const uint8_t *fresh, int32_t num_queries,
                 const key_rows *tile, const key_rows *next, int32_t head_dim, float *const *states, float *scratch);
void fold_state(float *into, const float *partial, int32_t head_dim);
void finish_state(const float *state, int32_t head_dim, float *y);

/* pool.c. A job is phases of chunks. `count(job, phase)` runs once a phase, on whichever thread ended the one before,
 * and returns 1..MAX_CHUNKS, or 0 when the job is over; `run` runs a chunk. */
enum { MAX_CHUNKS = (1 << 20) - MAX_WORKERS - 1 };
typedef uint32_t (*count_chunks)(void *job, uint32_t phase);
typedef void (*run_chunk)(void *job, uint32_t phase, uint32_t chunk, uint32_t worker);
int32_t pool_size(const facet_pool *pool);
void pool_run(facet_pool *pool, void *job, count_chunks count, run_chunk run);


#endif
