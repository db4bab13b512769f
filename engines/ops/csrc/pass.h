/* One forward pass: what its steps share, and the steps themselves. Private to pass.c, steps.c and decoder.c. */
#ifndef FACET_PASS_H
#define FACET_PASS_H

#include "internal.h"

#include <stdatomic.h>

/* A list of rows of the batch: every row, or those whose logits are wanted. */
typedef struct {
    const int32_t *rows; /* [count], ascending */
    int32_t count;
} row_list;

/* Attention of rows sorted[first..first+count], which have tiles tile0..tile1 in the same blocks, for one key/value
 * head. */
typedef struct {
    int32_t first, count, head, tile0, tile1;
} attention_item;

/* Where a row's partials lie: slot `slot` has its first `folded_tiles` tiles folded, each slot after it one tile more.
 * The last of its `num_items` items (a head) to end folds them all. */
typedef struct {
    int64_t slot;
    int32_t folded_tiles, num_items;
} row_parts;

/* Memory of one worker. */
typedef struct {
    uint8_t *expanded;  /* panels with a byte a code */
    float *out;         /* [MOST_ROWS, max(D, 32)] */
    float *row;         /* [max width] */
    float *own;         /* [MOST_ROWS, repeats, D + 2] states, by rows */
    float **places;     /* [MOST_ROWS] */
    float *attention;   /* attention_scratch_floats */
    float *tile;        /* [2, KEY_TILE, D]: keys and values of a tile whose format is not float32 */
    const float **queries; /* [MOST_ROWS * repeats], as are the next three */
    float **states;
    int32_t *visible;
    uint8_t *fresh;
} workspace;

struct pass {
    const facet_model *model;
    const facet_batch *batch;
    int32_t num_workers;
    int by_rows; /* chunks are blocks of rows; else they are columns of all rows */
    row_list all, wanted;
    int32_t *sequence; /* [T] */
    float *x;          /* [T, hidden]: the residual stream */
    float *q;          /* [T, H * D]: rotated and scaled queries */
    quantized normed, attended, inner;
    workspace *workers;
    int32_t block_rows; /* rows a chunk when by_rows */
    /* By columns: attention's items, and partials in slots of [H, D + 2]. */
    attention_item *items;
    int32_t num_items;
    int32_t *sorted;    /* [T] rows, those that share blocks together */
    row_parts *parts;   /* [T] */
    atomic_int *ended;  /* [T, G] items */
    float *partials;
};

/* steps.c, attend.c: all on rows first..first+count of a list; quantized rows are indexed by place in the list. */
void step_embed(struct pass *pass, int32_t first, int32_t count);
void step_norm(struct pass *pass, const row_list *list, int32_t first, int32_t count, const float *weight, workspace *w);
void step_qkv_head(struct pass *pass, int32_t layer, int32_t head, int32_t first, int32_t count, workspace *w);
void step_attend(struct pass *pass, int32_t layer, const row_list *list, int32_t first, int32_t count, workspace *w);
void step_attend_item(struct pass *pass, int32_t layer, const attention_item *item, workspace *w);
void step_add(struct pass *pass, const facet_matrix *matrix, const quantized *from, const row_list *list, int32_t first,
              int32_t count, int32_t p0, int32_t p1, workspace *w);
void step_gate_up(struct pass *pass, int32_t layer, int32_t group, int32_t first, int32_t count, workspace *w);
void step_logits(struct pass *pass, int32_t p0, int32_t p1, workspace *w);

/* Number of the row in each cache that holds slot `offset` of a block, for one layer and key/value head. */
int64_t kv_row_of(const struct pass *pass, int32_t layer, int32_t head, int64_t block, int32_t offset);

/* runs.c: items of the pass; the arrays are scratch of S, S and S + 1. `row_tiles`: the sum of rows times tiles. */
int64_t most_items(const struct pass *pass, int64_t row_tiles);
void plan_runs(struct pass *pass, int32_t *order, int32_t *common, int32_t *start);

/* plan.c: whether the batch may be run, and the pass in an arena of `base` (NULL: only its size). */
int batch_is_sound(const facet_model *model, const facet_batch *batch);
size_t plan_pass(struct pass *pass, const facet_model *model, const facet_batch *batch, int32_t num_workers,
                 uint8_t *base);

/* schedule.c */
uint32_t pass_chunks(void *pass, uint32_t phase);
void pass_run(void *pass, uint32_t phase, uint32_t chunk, uint32_t worker);

#endif
