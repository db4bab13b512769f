/* Work on one row: norm, quantization, gated activation, rotary positions. */
#include "internal.h"
#include "vector.h"

#include <math.h>

/* Below this a group is zero: 127 / max would overflow. */
static const float SMALLEST_MAGNITUDE = 1e-30f;

/* Sum of the four int32 in each half of v: low half in lane 0, high half in lane 1. */
FACET_INLINE void half_totals(__m256i v, int32_t *low, int32_t *high)
{
    v = _mm256_add_epi32(v, _mm256_shuffle_epi32(v, 0x4e));
    v = _mm256_add_epi32(v, _mm256_shuffle_epi32(v, 0xb1));
    *low = _mm256_extract_epi32(v, 0);
    *high = _mm256_extract_epi32(v, 4);
}

/* The largest magnitude of 32 floats, compared as bits, so that a NaN or an infinity is the largest. */
FACET_INLINE float largest32(__m256 a, __m256 b, __m256 c, __m256 d)
{
    __m256i ab = _mm256_max_epi32(_mm256_castps_si256(abs8(a)), _mm256_castps_si256(abs8(b)));
    __m256i cd = _mm256_max_epi32(_mm256_castps_si256(abs8(c)), _mm256_castps_si256(abs8(d)));
    __m256i all = _mm256_max_epi32(ab, cd);
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(x));
}

void quantize_group(const float *x, quantized *to, int64_t row, int32_t group)
{
    const int64_t tile = row / ROW_TILE, place = row % ROW_TILE, groups = to->width / GROUP;
    __m256 a = _mm256_loadu_ps(x), b = _mm256_loadu_ps(x + 8);
    __m256 c = _mm256_loadu_ps(x + 16), d = _mm256_loadu_ps(x + 24);
    float largest = largest32(a, b, c, d), scale = 0.0f, inverse = 0.0f;
    if (!(largest < SMALLEST_MAGNITUDE)) {
        scale = largest / 127.0f;
        inverse = 127.0f / largest;
    }
    __m256 by = _mm256_set1_ps(inverse);
    __m256i ab = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(a, by)), _mm256_cvtps_epi32(_mm256_mul_ps(b, by)));
    __m256i cd = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(c, by)), _mm256_cvtps_epi32(_mm256_mul_ps(d, by)));
    __m256i codes = _mm256_packs_epi16(ab, cd); /* the packs work within halves: put the fours back in order */
    codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    int32_t fours[GROUP / 4];
    _mm256_storeu_si256((__m256i *)fours, codes);
    int8_t *at = to->codes + tile * ROW_TILE * to->width + (group * (int64_t)GROUP / 4 * ROW_TILE + place) * 4;
    for (int32_t i = 0; i < GROUP / 4; i++)
        memcpy(at + i * ROW_TILE * 4, &fours[i], 4);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
    int32_t low, high;
    half_totals(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), &low, &high);
    const int64_t g = tile * groups + group;
    to->scales[g * ROW_TILE + place] = scale;
    to->sums[g * ROW_TILE + place] = (float)(low + high);
    to->half_sums[2 * g * ROW_TILE + place] = (float)low;
    to->half_sums[(2 * g + 1) * ROW_TILE + place] = (float)high;
}

void quantize_row(const float *x, quantized *to, int64_t row)
{
    for (int32_t group = 0; group < to->width / GROUP; group++)
        quantize_group(x + (int64_t)group * GROUP, to, row, group);
}

void normalize_row(const float *x, const float *weight, float eps, int32_t width, float *y)
{
    __m256 squares[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int32_t k = 0; k < width; k += GROUP)
        for (int32_t i = 0; i < 4; i++) {
            __m256 v = _mm256_loadu_ps(x + k + 8 * i);
            squares[i] = _mm256_fmadd_ps(v, v, squares[i]);
        }
    float total = sum8(_mm256_add_ps(_mm256_add_ps(squares[0], squares[1]), _mm256_add_ps(squares[2], squares[3])));
    __m256 by = _mm256_set1_ps(1.0f / sqrtf(total / (float)width + eps));
    for (int32_t k = 0; k < width; k += 8) {
        __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + k), by);
        _mm256_storeu_ps(y + k, _mm256_mul_ps(v, _mm256_loadu_ps(weight + k)));
    }
}

void silu_mul(const float *gate, const float *up, int32_t width, float *y)
{
    for (int32_t k = 0; k < width; k += 8) {
        __m256 v = _mm256_mul_ps(silu8(_mm256_loadu_ps(gate + k)), _mm256_loadu_ps(up + k));
        _mm256_storeu_ps(y + k, v);
    }
}

/* Hugging Face's form: the halves of a head rotate against each other. Products and sums are not fused. */
void rotate_head(const float *x, const float *cos, const float *sin, int32_t head_dim, float scale, float *y)
{
    const int32_t half = head_dim / 2;
    __m256 by = _mm256_set1_ps(scale);
    for (int32_t k = 0; k < half; k += 8) {
        __m256 a = _mm256_loadu_ps(x + k), b = _mm256_loadu_ps(x + half + k);
        __m256 c = _mm256_loadu_ps(cos + k), s = _mm256_loadu_ps(sin + k);
        __m256 left = _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s));
        __m256 right = _mm256_add_ps(_mm256_mul_ps(b, c), _mm256_mul_ps(a, s));
        _mm256_storeu_ps(y + k, _mm256_mul_ps(left, by));
        _mm256_storeu_ps(y + half + k, _mm256_mul_ps(right, by));
    }
}

void copy_floats(float *to, const float *from, int64_t count)
{
    memcpy(to, from, (size_t)count * sizeof(float));
}
