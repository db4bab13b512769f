/* The compiled CPU kernels: everything Python may call, and the structures it fills in.
 *
 * Letters: M rows (tokens), N outputs, K inputs, L layers, G key/value heads, B block size, D head dimension,
 * T tokens of a pass, S sequences, R rows whose logits are wanted, V vocabulary.
 *
 * The law every number obeys: an output depends on its own row alone. Dot products of codes are exact integers, and
 * every float sum has one order, so a row's bits do not change with M, with its neighbours, with how a prompt was cut,
 * or with the number of threads.
 *
 * Weights: w[n, k] = d[n, g] * q[n, k] + m[n, g] with unsigned codes q of 4 or 8 bits and g = k / group. Activations:
 * per row and 32 inputs, x ~ s * a with signed codes a in -127..127. Then
 *     y[n] = sum over g of s * (d * sum(q * a) + m * sum(a))      in order of g, each step fused as written.
 *
 * Nothing here has global state. Read next: linear.c (the matrix product), attention.c, schedule.c.
 */
#ifndef FACET_NATIVE_H
#define FACET_NATIVE_H

#include <stdint.h>

/* Part of every structure's meaning: Python refuses a library with another number. */
#define FACET_ABI 2

/* A weight matrix [N, K]. `data` holds ceil(N / 8) panels of 8 outputs, `panel_bytes` each, 32-byte aligned:
 *   codes   4 bits: [K / 8] x 32 bytes, byte 4 * j + i of step p = code of output j, input 8 p + i, in its low half and
 *                   of input 8 p + 4 + i in its high half; 8 bits: [K / 4] x 32 bytes, byte 4 * j + i of step p = code
 *                   of output j, input 4 p + i
 *   scales  [K / group] x (8 d, then 8 m if has_min), float16 or float32 (scale_bytes 2 or 4)
 * Without stored minima m = -zero * d. Outputs past N have zero scales. `group` is 16 or a multiple of 32. */
typedef struct {
    const uint8_t *data;
    const float *bias; /* [N] or NULL */
    int64_t panel_bytes;
    int32_t num_outputs;
    int32_t num_inputs;
    int32_t code_bits;
    int32_t group;
    int32_t scale_bytes;
    int32_t has_min;
    float zero;
    int32_t reserved;
} facet_matrix;

typedef struct {
    facet_matrix q, k, v, o, gate, up, down;
    const float *attention_norm; /* [hidden] */
    const float *mlp_norm;       /* [hidden] */
} facet_layer;

/* A dense decoder. Constant while a decoder made from it lives; all pointers stay the caller's. */
typedef struct {
    const facet_layer *layers;
    facet_matrix embedding; /* [V, hidden] */
    facet_matrix head;      /* [V, hidden] */
    const float *norm;      /* [hidden] */
    const float *cos;       /* [max_positions, D / 2] */
    const float *sin;       /* [max_positions, D / 2] */
    int32_t num_layers;
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t vocab_size;
    int32_t max_positions;
    float rms_norm_eps;
    float attention_scale;
} facet_model;

/* One pass, as engines/layers/forward_batch.py describes it, and where keys, values and logits lie. */
typedef struct {
    const int64_t *token_ids;    /* [T] */
    const int32_t *positions;    /* [T] */
    const int32_t *slot_mapping; /* [T] */
    const int32_t *query_start;  /* [S + 1] */
    const int32_t *context_lens; /* [S] */
    const int32_t *block_tables; /* [S, table_width] */
    const int64_t *logits_rows;  /* [R] */
    uint8_t *k;                  /* [L, num_blocks, G, B, bytes of a row] in kv_format */
    uint8_t *v;
    float *k_scales;             /* [L, num_blocks, G, B], NULL for a format without */
    float *v_scales;
    float *logits;               /* [R, V] */
    int64_t num_blocks;
    int32_t num_tokens;
    int32_t num_sequences;
    int32_t table_width;
    int32_t num_logits_rows;
    int32_t block_size;
    int32_t kv_format;           /* a facet_kv_format */
} facet_batch;

/* Number formats of keys and values: kv.c. */
typedef enum {
    KV_FLOAT32 = 0,
    KV_BFLOAT16 = 1,
    KV_INT8 = 2,
    KV_FLOAT8 = 3,
    KV_INT4 = 4,
} facet_kv_format;

typedef enum {
    FACET_OK = 0,
    FACET_NO_MEMORY = 1,
    FACET_BAD_MODEL = 2,
    FACET_BAD_BATCH = 3,
} facet_status;

typedef struct facet_pool facet_pool;
typedef struct facet_decoder facet_decoder;

/* FACET_ABI, and sizes of facet_matrix, facet_layer, facet_model, facet_batch in sizes[0..3]. */
int32_t facet_abi(int64_t sizes[4]);

/* 1 if this processor has what the kernels were compiled for (AVX2, FMA, F16C). Ask before anything else. */
int32_t facet_cpu_supported(void);

/* A pool of num_threads - 1 helper threads, started when first needed and asleep when idle. NULL: no memory. */
facet_pool *facet_pool_new(int32_t num_threads);
void facet_pool_free(facet_pool *pool);

/* y [M, N] = x [M, K] through `matrix`; one caller at a time a pool. */
int32_t facet_linear(facet_pool *pool, const facet_matrix *matrix, const float *x, int64_t num_rows, float *y);

/* Rows [num_rows, D] to a KV format and back, as a pass stores and reads them (int4 without the rotation). `scales`
 * [num_rows] or NULL. */
int32_t facet_kv_store(int32_t format, const float *x, int64_t num_rows, int32_t head_dim, uint8_t *to, float *scales);
int32_t facet_kv_load(int32_t format, const uint8_t *from, const float *scales, int64_t num_rows, int32_t head_dim,
                      float *to);

/* A decoder over `model` with a pool and a scratch arena of its own. NULL: no memory, or a model it cannot run. */
facet_decoder *facet_decoder_new(const facet_model *model, int32_t num_threads);
void facet_decoder_free(facet_decoder *decoder);

/* Write keys and values of T tokens, compute logits of R rows. Returns a facet_status; one caller at a time. */
int32_t facet_decoder_forward(facet_decoder *decoder, const facet_batch *batch);

/* Bytes of the scratch arena now. */
int64_t facet_decoder_scratch_bytes(const facet_decoder *decoder);

#endif
