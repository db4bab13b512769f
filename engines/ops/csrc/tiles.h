/* Register tiles of the matrix product: up to 6 rows against two streams of 8 outputs x 4 inputs.
 *
 * The two streams are two panels of 4-bit codes, or the low and high halves of one panel of 8-bit codes: a product of a
 * 4-bit code and an activation is at most 15 * 127, two of them fill one int16 lane and eight such pairs still fit
 * (15 * 127 * 2 * 8 = 30,480), so a whole group of 32 inputs is added up in int16 and widened once. Halves of 8-bit codes
 * meet again in int32: low + 16 * high. Every integer is exact and below 2^24, so its float is too.
 *
 * Codes come expanded (a byte each, read many times: many rows) or packed as they lie in memory (few rows). Both give
 * the same integers and run the same float steps. Read next: linear.c.
 */
#ifndef FACET_TILES_H
#define FACET_TILES_H

#include "internal.h"
#include "vector.h"

/* A tile of a `quantized`; `sums` are of 32 or of 16 inputs, whichever the weights need. */
typedef struct {
    const int8_t *codes;
    const float *scales;
    const float *sums;
} tile_rows;

/* One or two panels: code streams and scale streams. `scales` are per weight group, or expanded floats. */
typedef struct {
    const uint8_t *codes[2];
    const uint8_t *scales[2];
    int64_t ahead; /* bytes from here to what will be read next (a prefetch past the end is harmless) */
} tile_weights;

typedef enum { EXPANDED, PACKED } code_source;

/* acc[r][s] = int16 sums of `steps` steps of 4 inputs, from step `at` on; `bits` and `source` are constants. */
FACET_INLINE void dot_steps(const int R, const int bits, const code_source source, const tile_weights *w,
                            const int8_t *a, int32_t at, const int steps, __m256i acc[][2])
{
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i w0, w1, high0 = nibble, high1 = nibble;
#pragma GCC unroll 8
    for (int s = 0; s < steps; s++) {
        if (source == EXPANDED) {
            const __m256i *from = (const __m256i *)(w->codes[0] + (int64_t)(at + s) * 64);
            w0 = _mm256_load_si256(from);
            w1 = _mm256_load_si256(from + 1);
        } else if (bits == 8) {
            __m256i both = _mm256_load_si256((const __m256i *)(w->codes[0] + (int64_t)(at + s) * 32));
            w0 = _mm256_and_si256(both, nibble);
            w1 = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
        } else if (s % 2 == 0) {
            __m256i both0 = _mm256_load_si256((const __m256i *)(w->codes[0] + (int64_t)(at + s) * 16));
            __m256i both1 = _mm256_load_si256((const __m256i *)(w->codes[1] + (int64_t)(at + s) * 16));
            w0 = _mm256_and_si256(both0, nibble);
            w1 = _mm256_and_si256(both1, nibble);
            high0 = _mm256_and_si256(_mm256_srli_epi16(both0, 4), nibble);
            high1 = _mm256_and_si256(_mm256_srli_epi16(both1, 4), nibble);
        } else {
            w0 = high0;
            w1 = high1;
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            __m256i four = broadcast4(a + ((int64_t)(at + s) * ROW_TILE + r) * 4);
            __m256i p0 = _mm256_maddubs_epi16(w0, four), p1 = _mm256_maddubs_epi16(w1, four);
            acc[r][0] = s == 0 ? p0 : _mm256_add_epi16(acc[r][0], p0);
            acc[r][1] = s == 0 ? p1 : _mm256_add_epi16(acc[r][1], p1);
            FACET_KEEP(acc[r][0]);
            FACET_KEEP(acc[r][1]);
        }
    }
}

/* d and m of 8 outputs of weight group `group`, from a packed panel. */
FACET_INLINE void packed_scales(const facet_matrix *matrix, const uint8_t *scales, int32_t group, __m256 *d, __m256 *m)
{
    int64_t vector_bytes = 8 * (int64_t)matrix->scale_bytes;
    const uint8_t *at = scales + group * vector_bytes * (1 + matrix->has_min);
    if (matrix->scale_bytes == 2) {
        *d = _mm256_cvtph_ps(_mm_load_si128((const __m128i *)at));
        if (matrix->has_min)
            *m = _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(at + 16)));
    } else {
        *d = _mm256_load_ps((const float *)at);
        if (matrix->has_min)
            *m = _mm256_load_ps((const float *)(at + 32));
    }
    if (!matrix->has_min)
        *m = _mm256_mul_ps(*d, _mm256_set1_ps(-matrix->zero));
}

/* One group's share: total + scale * (d * dot + m * sum), each fused. */
FACET_INLINE __m256 add_share(__m256 total, __m256i dot, __m256 d, __m256 m, const float *scale, const float *sum)
{
    __m256 share = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(dot), _mm256_mul_ps(m, _mm256_broadcast_ss(sum)));
    return _mm256_fmadd_ps(_mm256_broadcast_ss(scale), share, total);
}

/* R rows x 2 panels of 4-bit codes, or x 1 panel of 8-bit codes. out: [R][16], or the first 8 columns of it.
 * `width` is the inputs a weight group shares within a group of 32: 16 or 32. */
FACET_INLINE void run_tile(const int R, const int bits, const code_source source, const int width,
                           const facet_matrix *matrix, const tile_weights *w, const tile_rows *x, float *out)
{
    const __m256i ones = _mm256_set1_epi16(1);
    const int panels = bits == 4 ? 2 : 1, steps = width / 4;
    const int32_t num_parts = matrix->num_inputs / width;
    const int32_t weight_group = matrix->group < width ? width : matrix->group;
    __m256 total[ROW_TILE][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
        total[r][0] = total[r][1] = _mm256_setzero_ps();
    for (int32_t part = 0; part < num_parts; part++) {
        __m256i acc[ROW_TILE][2];
        if (source == PACKED) {
            for (int p = 0; p < panels; p++) {
                const uint8_t *next = w->codes[p] + (int64_t)part * steps * 4 * bits + w->ahead;
                for (int line = 0; line < width * bits; line += 64)
                    _mm_prefetch((const char *)next + line, _MM_HINT_T0);
                _mm_prefetch((const char *)w->scales[p] + (int64_t)part * 32 + w->ahead, _MM_HINT_T0);
            }
        }
        dot_steps(R, bits, source, w, x->codes, part * steps, steps, acc);
        __m256 d[2], m[2];
        for (int p = 0; p < panels; p++) {
            if (source == EXPANDED) {
                const float *at = (const float *)w->scales[0] + (int64_t)(part * panels + p) * 16;
                d[p] = _mm256_load_ps(at);
                m[p] = _mm256_load_ps(at + 8);
            } else {
                packed_scales(matrix, w->scales[p], part * width / weight_group, &d[p], &m[p]);
            }
        }
        const float *scales = x->scales + (int64_t)(part * width / GROUP) * ROW_TILE;
        const float *sums = x->sums + (int64_t)part * ROW_TILE;
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            __m256i one = _mm256_madd_epi16(acc[r][0], ones), two = _mm256_madd_epi16(acc[r][1], ones);
            if (bits == 4) {
                total[r][0] = add_share(total[r][0], one, d[0], m[0], scales + r, sums + r);
                total[r][1] = add_share(total[r][1], two, d[1], m[1], scales + r, sums + r);
            } else {
                one = _mm256_add_epi32(one, _mm256_slli_epi32(two, 4));
                total[r][0] = add_share(total[r][0], one, d[0], m[0], scales + r, sums + r);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
        for (int p = 0; p < panels; p++)
            _mm256_storeu_ps(out + 16 * r + 8 * p, total[r][p]);
}

/* The tile of constant bits, source and width for a row count known only now. */
#define FACET_DEFINE_TILES(name, bits, source, width)                                                                  \
    static void name(int32_t rows, const facet_matrix *matrix, const tile_weights *w, const tile_rows *x, float *out)   \
    {                                                                                                                  \
        switch (rows) {                                                                                                \
        case 1: run_tile(1, bits, source, width, matrix, w, x, out); break;                                            \
        case 2: run_tile(2, bits, source, width, matrix, w, x, out); break;                                            \
        case 3: run_tile(3, bits, source, width, matrix, w, x, out); break;                                            \
        case 4: run_tile(4, bits, source, width, matrix, w, x, out); break;                                            \
        case 5: run_tile(5, bits, source, width, matrix, w, x, out); break;                                            \
        default: run_tile(6, bits, source, width, matrix, w, x, out); break;                                           \
        }                                                                                                              \
    }

#endif
