/* Attention over blocks: partial results of fixed tiles of 64 keys, folded in order of position.
 *
 * A query's tile partial is m = largest score, l = sum of exp(score - m), and D sums of exp(score - m) * v, every sum in
 * order of keys (or in a fixed tree over eight lanes). It depends on the query and on the keys it sees, on nothing
 * else: whether a tile is computed for one query or for a hundred, by one thread or by many, the partials and the fold
 * are the same, so a decoded token has the bits of the same token inside a prompt.
 *
 * Source of the fold: online softmax, Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867.
 */
#include "internal.h"
#include "vector.h"

#include <math.h>

enum { VECTORS = KEY_TILE / 8 };

/* Keys transposed, [D][KEY_TILE], then scores of a register tile, [ROW_TILE][KEY_TILE]. */
size_t attention_scratch_floats(int32_t head_dim)
{
    return (size_t)head_dim * KEY_TILE + ROW_TILE * KEY_TILE;
}

FACET_INLINE void transpose8(const float *const rows[8], float *to)
{
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++)
        r[i] = _mm256_loadu_ps(rows[i]);
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_store_ps(to + i * KEY_TILE, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_store_ps(to + (i + 4) * KEY_TILE, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

void load_keys(const key_rows *tile, int32_t head_dim, float *scratch)
{
    /* Lanes past the last key repeat it: they are masked before they count. */
    for (int32_t v = 0; v < VECTORS; v++) {
        const float *rows[8];
        for (int32_t i = 0; i < 8; i++)
            rows[i] = tile->keys[8 * v + i < tile->count ? 8 * v + i : tile->count - 1];
        for (int32_t k = 0; k < head_dim; k += 8) {
            const float *here[8];
            for (int32_t i = 0; i < 8; i++)
                here[i] = rows[i] + k;
            transpose8(here, scratch + k * KEY_TILE + 8 * v);
        }
        for (int32_t i = 8 * v; i < 8 * v + 8 && i < tile->count; i++)
            for (int32_t k = 0; k < head_dim; k += 16)
                _mm_prefetch((const char *)(tile->values[i] + k), _MM_HINT_T0);
        if (8 * v + 8 >= tile->count && (v + 1) % 4 == 0)
            break; /* score tiles read up to four vectors at a time */
    }
}

/* Scores of R queries against N vectors of keys, sums over the head dimension in order. */
FACET_INLINE void score(const int R, const int N, const float *const *q, int32_t head_dim, const float *keys, float *to)
{
    __m256 sums[ROW_TILE][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            sums[r][n] = _mm256_setzero_ps();
    for (int32_t k = 0; k < head_dim; k++) {
        __m256 key[4];
        for (int n = 0; n < N; n++)
            key[n] = _mm256_load_ps(keys + k * KEY_TILE + 8 * n);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            __m256 by = _mm256_broadcast_ss(q[r] + k);
            for (int n = 0; n < N; n++)
                sums[r][n] = _mm256_fmadd_ps(by, key[n], sums[r][n]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            _mm256_store_ps(to + r * KEY_TILE + 8 * n, sums[r][n]);
}

/* Scores -> exp(score - m) in place, 0 beyond `visible`; state gets m and l. */
static void soften(float *scores, int32_t visible, int32_t vectors, float *m, float *l)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 largest = _mm256_set1_ps(-INFINITY), total = _mm256_setzero_ps();
    for (int32_t v = 0; v < vectors; v++) {
        __m256 x = _mm256_load_ps(scores + 8 * v);
        if (8 * v + 8 > visible) {
            __m256i seen = _mm256_cmpgt_epi32(_mm256_set1_epi32(visible - 8 * v), lanes);
            x = _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, _mm256_castsi256_ps(seen));
            _mm256_store_ps(scores + 8 * v, x);
        }
        largest = _mm256_max_ps(largest, x);
    }
    *m = max8(largest);
    __m256 base = _mm256_set1_ps(*m);
    for (int32_t v = 0; v < vectors; v++) {
        __m256 e = exp8(_mm256_sub_ps(_mm256_load_ps(scores + 8 * v), base));
        _mm256_store_ps(scores + 8 * v, e);
        total = _mm256_add_ps(total, e);
    }
    *l = sum8(total);
}

/* Sums of weight * value over `count` keys in order, N vectors of the head from column `at` on, for R queries. */
FACET_INLINE void mix(const int R, const int N, const float *weights, const key_rows *tile, const key_rows *next,
                      int32_t count, int32_t at, float *const *to)
{
    __m256 sums[ROW_TILE][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            sums[r][n] = _mm256_setzero_ps();
    for (int32_t key = 0; key < count; key++) {
        const float *row = tile->values[key] + at;
        if (next && key < next->count)
            for (int n = 0; n < 8 * N; n += 16)
                _mm_prefetch((const char *)(next->keys[key] + at + n), _MM_HINT_T0);
        __m256 value[4];
        for (int n = 0; n < N; n++)
            value[n] = _mm256_loadu_ps(row + 8 * n);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            __m256 by = _mm256_broadcast_ss(weights + r * KEY_TILE + key);
            for (int n = 0; n < N; n++)
                sums[r][n] = _mm256_fmadd_ps(by, value[n], sums[r][n]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            _mm256_storeu_ps(to[r] + 2 + at + 8 * n, sums[r][n]);
}

/* R queries against the tile, partials into to[r]. N vectors at a time keep the register file full. */
FACET_INLINE void attend_rows(const int R, const int N, const float *const *q, const int32_t *visible,
                              const key_rows *tile, const key_rows *next, int32_t head_dim, float *scratch,
                              float *const *to)
{
    float *scores = scratch + (int64_t)head_dim * KEY_TILE;
    int32_t most = 1;
    for (int r = 0; r < R; r++)
        most = visible[r] > most ? visible[r] : most;
    const int32_t vectors = (most + 8 * N - 1) / (8 * N) * N;
    for (int32_t v = 0; v < vectors; v += N)
        score(R, N, q, head_dim, scratch + 8 * v, scores + 8 * v);
    for (int r = 0; r < R; r++)
        soften(scores + r * KEY_TILE, visible[r], vectors, &to[r][0], &to[r][1]);
    for (int32_t at = 0; at < head_dim; at += 8 * N)
        mix(R, N, scores, tile, next, most, at, to);
}

static void attend_some(int32_t rows, const float *const *q, const int32_t *visible, const key_rows *tile,
                        const key_rows *next, int32_t head_dim, float *scratch, float *const *to)
{
    switch (rows) {
    case 1: attend_rows(1, 4, q, visible, tile, next, head_dim, scratch, to); break;
    case 2: attend_rows(2, 4, q, visible, tile, next, head_dim, scratch, to); break;
    case 3: attend_rows(3, 4, q, visible, tile, next, head_dim, scratch, to); break;
    case 4: attend_rows(4, 2, q, visible, tile, next, head_dim, scratch, to); break;
    case 5: attend_rows(5, 2, q, visible, tile, next, head_dim, scratch, to); break;
    default: attend_rows(6, 2, q, visible, tile, next, head_dim, scratch, to); break;
    }
}

void attend_tile(const float *const *q, const int32_t *visible, const uint8_t *fresh, int32_t num_queries,
                 const key_rows *tile, const key_rows *next, int32_t head_dim, float *const *states, float *scratch)
{
    float partials[ROW_TILE][MAX_HEAD_DIM + 2];
    for (int32_t i = 0; i < num_queries; i += ROW_TILE) {
        const int32_t rows = num_queries - i < ROW_TILE ? num_queries - i : ROW_TILE;
        float *to[ROW_TILE];
        for (int32_t r = 0; r < rows; r++)
            to[r] = fresh[i + r] ? states[i + r] : partials[r];
        attend_some(rows, q + i, visible + i, tile, i ? NULL : next, head_dim, scratch, to);
        for (int32_t r = 0; r < rows; r++)
            if (!fresh[i + r])
                fold_state(states[i + r], partials[r], head_dim);
    }
}

void fold_state(float *into, const float *partial, int32_t head_dim)
{
    const float m = into[0] < partial[0] ? partial[0] : into[0];
    const __m256 factors = exp8(_mm256_setr_ps(into[0] - m, partial[0] - m, 0, 0, 0, 0, 0, 0));
    const float old = _mm256_cvtss_f32(factors), new = _mm256_cvtss_f32(_mm256_permute_ps(factors, 1));
    const __m256 by_old = _mm256_set1_ps(old), by_new = _mm256_set1_ps(new);
    into[0] = m;
    into[1] = __builtin_fmaf(partial[1], new, into[1] * old);
    for (int32_t k = 2; k < head_dim + 2; k += 8) {
        __m256 kept = _mm256_mul_ps(_mm256_loadu_ps(into + k), by_old);
        _mm256_storeu_ps(into + k, _mm256_fmadd_ps(_mm256_loadu_ps(partial + k), by_new, kept));
    }
}

void finish_state(const float *state, int32_t head_dim, float *y)
{
    const __m256 by = _mm256_set1_ps(1.0f / state[1]);
    for (int32_t k = 0; k < head_dim; k += 8)
        _mm256_storeu_ps(y + k, _mm256_mul_ps(_mm256_loadu_ps(state + 2 + k), by));
}
