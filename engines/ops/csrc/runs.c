/* By columns: which rows attend to which key tiles together.
 *
 * Sequences are sorted by their block tables, so that those with a common beginning are neighbours, and a tile that
 * several share is one run of rows in that order. Runs form a tree: all that share tiles 0..a, within them those that
 * share a..b, and so on down to a sequence's own last tiles. Each run is cut into items of about equal work, by rows
 * where there are many and by tiles where there are few. Read next: attend.c.
 */
#define _GNU_SOURCE
#include "pass.h"

#include <stdlib.h>

enum {
    ITEMS_PER_WORKER = 4, /* so that an item more or less is a small part of a layer */
    LOAD_WORK = 2,        /* reading a tile, in units of one query over it */
    LEAST_ITEM_ROWS = 12, /* rows an item is not cut below: they share the reading */
};

static int32_t full_tiles(const facet_batch *batch, int32_t s)
{
    return batch->context_lens[s] / KEY_TILE;
}

/* Tiles from the first on that two sequences have in the same blocks. */
static int32_t common_tiles(const facet_batch *batch, int32_t one, int32_t two)
{
    const int32_t *a = batch->block_tables + (int64_t)one * batch->table_width;
    const int32_t *b = batch->block_tables + (int64_t)two * batch->table_width;
    const int32_t f1 = full_tiles(batch, one), f2 = full_tiles(batch, two), most = f1 < f2 ? f1 : f2;
    const int32_t blocks = (most * KEY_TILE + batch->block_size - 1) / batch->block_size;
    int32_t same = 0;
    while (same < blocks && a[same] == b[same])
        same++;
    const int64_t tiles = (int64_t)same * batch->block_size / KEY_TILE;
    return tiles < most ? (int32_t)tiles : most;
}

/* By block table as far as tiles are full, a beginning before what continues it, equals in batch order. */
static int compare_tables(const void *x, const void *y, void *context)
{
    const facet_batch *batch = context;
    const int32_t one = *(const int32_t *)x, two = *(const int32_t *)y;
    const int32_t *a = batch->block_tables + (int64_t)one * batch->table_width;
    const int32_t *b = batch->block_tables + (int64_t)two * batch->table_width;
    const int32_t size = batch->block_size;
    const int32_t n1 = (full_tiles(batch, one) * KEY_TILE + size - 1) / size;
    const int32_t n2 = (full_tiles(batch, two) * KEY_TILE + size - 1) / size;
    for (int32_t i = 0; i < n1 && i < n2; i++)
        if (a[i] != b[i])
            return a[i] < b[i] ? -1 : 1;
    return n1 != n2 ? (n1 < n2 ? -1 : 1) : (one > two) - (one < two);
}

typedef struct {
    struct pass *pass;
    int64_t item_work;
    int32_t *order;  /* [S] sequences, sorted */
    int32_t *common; /* [S] tiles that order[i] shares with order[i - 1] */
    int32_t *start;  /* [S + 1] rows of order[i] are sorted[start[i]..start[i + 1]] */
} run_plan;

static int32_t tiles_of(const run_plan *plan, int32_t i)
{
    return (plan->pass->batch->context_lens[plan->order[i]] + KEY_TILE - 1) / KEY_TILE;
}

/* Work of one head: every tile is read once a run at best, and each query meets it. */
static int64_t work_of(const struct pass *pass, int64_t tiles, int32_t rows)
{
    return tiles * (LOAD_WORK + (int64_t)rows * (pass->model->num_heads / pass->model->num_kv_heads));
}

static int32_t cut(int64_t total, int32_t piece, int32_t pieces)
{
    return (int32_t)(total * piece / pieces);
}

/* Items of rows sorted[first..first + count] over tiles t0..t1, for every head. */
static void add_items(run_plan *plan, int32_t first, int32_t count, int32_t t0, int32_t t1)
{
    struct pass *pass = plan->pass;
    const int32_t tiles = t1 - t0, least = (count + MOST_ROWS - 1) / MOST_ROWS;
    const int32_t most = (count + LEAST_ITEM_ROWS - 1) / LEAST_ITEM_ROWS;
    const int64_t wanted = (work_of(pass, tiles, count) + plan->item_work - 1) / plan->item_work;
    const int32_t by_rows = wanted < least ? least : wanted > most ? most : (int32_t)wanted;
    const int64_t rest = (wanted + by_rows - 1) / by_rows;
    const int32_t by_tiles = rest > tiles ? tiles : rest < 1 ? 1 : (int32_t)rest;
    for (int32_t i = first; i < first + count; i++) {
        row_parts *parts = pass->parts + pass->sorted[i];
        parts->num_items += by_tiles;
        if (t0 == 0)
            parts->folded_tiles = cut(tiles, 1, by_tiles);
    }
    for (int32_t head = 0; head < pass->model->num_kv_heads; head++)
        for (int32_t r = 0; r < by_rows; r++)
            for (int32_t t = 0; t < by_tiles; t++) {
                const int32_t r0 = cut(count, r, by_rows), r1 = cut(count, r + 1, by_rows);
                pass->items[pass->num_items++] = (attention_item){
                    first + r0, r1 - r0, head, t0 + cut(tiles, t, by_tiles), t0 + cut(tiles, t + 1, by_tiles)};
            }
}

/* Sequences order[a..b] share their tiles up to t0; plan what comes after. */
static void plan_run(run_plan *plan, int32_t a, int32_t b, int32_t t0)
{
    int32_t t1 = tiles_of(plan, a);
    for (int32_t i = a + 1; i < b; i++)
        t1 = plan->common[i] < t1 ? plan->common[i] : t1;
    if (t1 > t0)
        add_items(plan, plan->start[a], plan->start[b] - plan->start[a], t0, t1);
    if (b - a == 1)
        return;
    for (int32_t first = a, i = a + 1; i <= b; i++)
        if (i == b || plan->common[i] == t1) {
            if (i - first > 1 || tiles_of(plan, first) > t1)
                plan_run(plan, first, i, t1);
            first = i;
        }
}

int64_t most_items(const struct pass *pass, int64_t row_tiles)
{
    const int64_t G = pass->model->num_kv_heads, S = pass->batch->num_sequences;
    /* At most 2 S runs; cutting makes at most twice the wanted items, one more a run, and one more for MOST_ROWS. */
    return G * (6 * S + row_tiles / MOST_ROWS) + 2 * ITEMS_PER_WORKER * pass->num_workers;
}

void plan_runs(struct pass *pass, int32_t *order, int32_t *common, int32_t *start)
{
    const facet_batch *batch = pass->batch;
    const int32_t S = batch->num_sequences;
    run_plan plan = {pass, 1, order, common, start};
    int64_t work = 0, slot = 0;
    for (int32_t s = 0; s < S; s++) {
        order[s] = s;
        work += work_of(pass, batch->context_lens[s] / KEY_TILE + 1, batch->query_start[s + 1] - batch->query_start[s]);
    }
    qsort_r(order, (size_t)S, sizeof *order, compare_tables, (void *)batch);
    start[0] = 0;
    for (int32_t i = 0; i < S; i++) {
        const int32_t s = order[i], first = batch->query_start[s], count = batch->query_start[s + 1] - first;
        start[i + 1] = start[i] + count;
        common[i] = i ? common_tiles(batch, order[i - 1], s) : 0;
        for (int32_t r = 0; r < count; r++)
            pass->sorted[start[i] + r] = first + r;
    }
    if (pass->num_workers > 1)
        plan.item_work = work * pass->model->num_kv_heads / (pass->num_workers * ITEMS_PER_WORKER) + 1;
    else
        plan.item_work = INT32_MAX;
    for (int32_t row = 0; row < batch->num_tokens; row++)
        pass->parts[row] = (row_parts){0, 0, 0};
    for (int32_t i = 0; i < batch->num_tokens * pass->model->num_kv_heads; i++)
        atomic_init(pass->ended + i, 0);
    pass->num_items = 0;
    plan_run(&plan, 0, S, 0);
    for (int32_t row = 0; row < batch->num_tokens; row++) {
        row_parts *parts = pass->parts + row;
        const int32_t own = batch->positions[row] / KEY_TILE + 1 - parts->folded_tiles;
        parts->slot = slot;
        slot += own > 0 ? 1 + own : 1;
    }
}
