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

/* Attention of rows first..first+count (one sequence) for one key/value head over tiles tile0..tile1. Items of one
 * `span` together cover all its tiles; the last to end folds their partials. */
typedef struct {
    int32_t first, count, head, tile0, tile1, span;
} attention_item;

typedef struct {
    int32_t first, count, head, num_tiles, num_items;
    float *partials; /* [num_tiles, count * repeats, D + 2]; NULL if one item covers the span */
    atomic_int ended;
} attention_span;

/* Memory of one worker. */
typedef struct {
    uint8_t *expanded;  /* panels with a byte a code */
    float *out;         /* [MOST_ROWS, max(D, 32)] */
    float *row;         /* [max width] */
    float *states;      /* [MOST_ROWS * repeats, D + 2] */
    float *attention;   /* attention_scratch_floats */
    const float **queries; /* [MOST_ROWS * repeats] */
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
    attention_item *items;
    attention_span *spans;
    int32_t num_items;
};

/* steps.c: all on rows first..first+count of a list; quantized rows are indexed by place in the list. */
void step_embed(struct pass *pass, int32_t first, int32_t count);
void step_norm(struct pass *pass, const row_list *list, int32_t first, int32_t count, const float *weight, workspace *w);
void step_qkv_head(struct pass *pass, int32_t layer, int32_t head, int32_t first, int32_t count, workspace *w);
void step_attend(struct pass *pass, int32_t layer, const row_list *list, int32_t first, int32_t count, workspace *w);
void step_attend_item(struct pass *pass, int32_t layer, const attention_item *item, workspace *w);
void step_add(struct pass *pass, const facet_matrix *matrix, const quantized *from, const row_list *list, int32_t first,
              int32_t count, int32_t p0, int32_t p1, workspace *w);
void step_gate_up(struct pass *pass, int32_t layer, int32_t group, int32_t first, int32_t count, workspace *w);
void step_logits(struct pass *pass, int32_t p0, int32_t p1, workspace *w);

/* plan.c: whether the batch may be run, and the pass in an arena of `base` (NULL: only its size). */
int batch_is_sound(const facet_model *model, const facet_batch *batch);
size_t plan_pass(struct pass *pass, const facet_model *model, const facet_batch *batch, int32_t num_workers,
                 uint8_t *base);

/* schedule.c */
uint32_t pass_chunks(void *pass, uint32_t phase);
void pass_run(void *pass, uint32_t phase, uint32_t chunk, uint32_t worker);

#endif
