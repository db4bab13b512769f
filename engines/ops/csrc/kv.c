/* Keys and values in the cache's number format: one row is what one token and key/value head hold, and what is stored
 * follows from that row alone. The definition in torch, bit for bit: engines/ops/kv_format.py.
 *
 *   float32    as it is
 *   bfloat16   rounded to nearest even
 *   int8       x ~ scale * code, scale = max|x| / 127, code rounded to nearest even
 *   float8     x ~ scale * e4m3, scale = max|x| / 448, rounded to nearest even
 *   int4       the row is rotated first; x ~ scale * (code - 7.5), scale = max|x| / 8, code = floor(x / scale) + 8;
 *              the low half of byte i is column i, the high half column D / 2 + i
 *
 * The rotation is Hadamard's, in blocks of the largest power of two in D: it spreads the few large columns of keys over
 * all. Queries are rotated alike, which leaves every score as it was, and an output is rotated back.
 * Source: QuaRot, Ashkboos et al., 2024, https://arxiv.org/abs/2404.00456.
 */
#include "internal.h"
#include "vector.h"

#include <math.h>

/* Keeps a row of zeros finite. */
static const float SMALLEST_MAGNITUDE = 1e-30f;

int64_t kv_row_bytes(int32_t format, int32_t head_dim)
{
    switch (format) {
    case KV_FLOAT32: return 4 * (int64_t)head_dim;
    case KV_BFLOAT16: return 2 * (int64_t)head_dim;
    case KV_INT4: return head_dim / 2;
    default: return head_dim;
    }
}

int kv_has_scales(int32_t format)
{
    return format == KV_INT8 || format == KV_FLOAT8 || format == KV_INT4;
}

void rotate_hadamard(float *x, int32_t head_dim)
{
    const int32_t size = head_dim & -head_dim;
    for (int32_t half = 1; half < size; half *= 2)
        for (int32_t start = 0; start < head_dim; start += 2 * half)
            for (int32_t i = start; i < start + half; i++) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
    const float by = 1.0f / sqrtf((float)size);
    for (int32_t i = 0; i < head_dim; i++)
        x[i] *= by;
}

/* The largest magnitude, compared as bits, so that a NaN is the largest. */
static float largest_of(const float *x, int32_t head_dim)
{
    __m256i most = _mm256_setzero_si256();
    for (int32_t k = 0; k < head_dim; k += 8)
        most = _mm256_max_epi32(most, _mm256_castps_si256(abs8(_mm256_loadu_ps(x + k))));
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(half));
}

FACET_INLINE __m256 clamp8(__m256 x, float most)
{
    return _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-most)), _mm256_set1_ps(most));
}

/* The low byte of each of eight words. */
FACET_INLINE void store_bytes(uint8_t *to, __m256i words)
{
    const __m256i pick = _mm256_broadcastsi128_si256(_mm_setr_epi32(0x0c080400, -1, -1, -1));
    __m256i fours = _mm256_shuffle_epi8(words, pick);
    _mm_storel_epi64((__m128i *)to, _mm_unpacklo_epi32(_mm256_castsi256_si128(fours),
                                                       _mm256_extracti128_si256(fours, 1)));
}

FACET_INLINE __m256i float8_of(__m256 x)
{
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(128));
    const __m256 size = abs8(x);
    const __m256i size_bits = _mm256_castps_si256(size);
    /* Half of what is cut off, less one where the last kept bit is even; then the exponent counts from 7, not 127. */
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(size_bits, 20), one);
    __m256i kept = _mm256_add_epi32(size_bits, _mm256_add_epi32(_mm256_set1_epi32(0x7ffff), odd));
    kept = _mm256_sub_epi32(_mm256_srli_epi32(kept, 20), _mm256_set1_epi32(120 << 3));
    /* Below 2^-6 the codes count steps of 2^-9. */
    __m256i small = _mm256_cvtps_epi32(_mm256_mul_ps(size, _mm256_set1_ps(512.0f)));
    __m256 is_small = _mm256_cmp_ps(size, _mm256_set1_ps(0.015625f), _CMP_LT_OQ);
    return _mm256_or_si256(sign, _mm256_blendv_epi8(kept, small, _mm256_castps_si256(is_small)));
}

static void store_bfloat16(const float *x, int32_t head_dim, uint8_t *to)
{
    for (int32_t k = 0; k < head_dim; k++) {
        uint32_t bits;
        memcpy(&bits, x + k, 4);
        const int is_nan = (bits & 0x7fffffff) > 0x7f800000;
        const uint16_t kept = is_nan ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        memcpy(to + 2 * k, &kept, 2);
    }
}

void kv_store(int32_t format, const float *x, int32_t head_dim, uint8_t *to, float *scale)
{
    if (format == KV_FLOAT32) {
        memcpy(to, x, (size_t)head_dim * sizeof(float));
        return;
    }
    if (format == KV_BFLOAT16) {
        store_bfloat16(x, head_dim, to);
        return;
    }
    const float levels = format == KV_INT8 ? 127.0f : format == KV_FLOAT8 ? 448.0f : 8.0f;
    float largest = largest_of(x, head_dim);
    if (largest < SMALLEST_MAGNITUDE)
        largest = SMALLEST_MAGNITUDE;
    *scale = largest / levels;
    const __m256 by = _mm256_set1_ps(*scale);
    if (format == KV_INT4) {
        const __m256i zero = _mm256_setzero_si256(), eight = _mm256_set1_epi32(8), most = _mm256_set1_epi32(15);
        for (int32_t k = 0; k < head_dim / 2; k += 8) {
            __m256i codes[2];
            for (int32_t half = 0; half < 2; half++) {
                __m256 y = _mm256_floor_ps(_mm256_div_ps(_mm256_loadu_ps(x + half * (head_dim / 2) + k), by));
                codes[half] = _mm256_add_epi32(_mm256_cvtps_epi32(y), eight);
                codes[half] = _mm256_min_epi32(_mm256_max_epi32(codes[half], zero), most);
            }
            store_bytes(to + k, _mm256_or_si256(codes[0], _mm256_slli_epi32(codes[1], 4)));
        }
        return;
    }
    for (int32_t k = 0; k < head_dim; k += 8) {
        __m256 y = clamp8(_mm256_div_ps(_mm256_loadu_ps(x + k), by), levels);
        store_bytes(to + k, format == KV_INT8 ? _mm256_cvtps_epi32(y) : float8_of(y));
    }
}

FACET_INLINE __m128i load_bytes(const uint8_t *from)
{
    return _mm_loadl_epi64((const __m128i *)from);
}

/* A half-precision number with these bits is an e4m3 number over 256, subnormals too. */
FACET_INLINE __m256 float8_to(__m128i bytes)
{
    __m128i wide = _mm_cvtepu8_epi16(bytes);
    __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(128)), 8);
    __m128i size = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(127)), 7);
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, size)), _mm256_set1_ps(256.0f));
}

void kv_load(int32_t format, const uint8_t *from, float scale, int32_t head_dim, float *to)
{
    const __m256 by = _mm256_set1_ps(scale);
    switch (format) {
    case KV_FLOAT32: memcpy(to, from, (size_t)head_dim * sizeof(float)); break;
    case KV_BFLOAT16:
        for (int32_t k = 0; k < head_dim; k += 8) {
            __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + 2 * k)));
            _mm256_storeu_si256((__m256i *)(to + k), _mm256_slli_epi32(words, 16));
        }
        break;
    case KV_INT8:
        for (int32_t k = 0; k < head_dim; k += 8) {
            __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(from + k)));
            _mm256_storeu_ps(to + k, _mm256_mul_ps(x, by));
        }
        break;
    case KV_FLOAT8:
        for (int32_t k = 0; k < head_dim; k += 8)
            _mm256_storeu_ps(to + k, _mm256_mul_ps(float8_to(load_bytes(from + k)), by));
        break;
    default: {
        const __m256i nibble = _mm256_set1_epi32(15);
        const __m256 middle = _mm256_set1_ps(7.5f);
        for (int32_t k = 0; k < head_dim / 2; k += 8) {
            __m256i both = _mm256_cvtepu8_epi32(load_bytes(from + k));
            __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(both, nibble));
            __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(both, 4));
            _mm256_storeu_ps(to + k, _mm256_mul_ps(_mm256_sub_ps(low, middle), by));
            _mm256_storeu_ps(to + head_dim / 2 + k, _mm256_mul_ps(_mm256_sub_ps(high, middle), by));
        }
    }
    }
}

int32_t facet_kv_store(int32_t format, const float *x, int64_t num_rows, int32_t head_dim, uint8_t *to, float *scales)
{
    if (format < KV_FLOAT32 || format > KV_INT4 || head_dim < GROUP || head_dim % GROUP || head_dim > MAX_HEAD_DIM)
        return FACET_BAD_MODEL;
    for (int64_t row = 0; row < num_rows; row++)
        kv_store(format, x + row * head_dim, head_dim, to + row * kv_row_bytes(format, head_dim),
                 scales ? scales + row : NULL);
    return FACET_OK;
}

int32_t facet_kv_load(int32_t format, const uint8_t *from, const float *scales, int64_t num_rows, int32_t head_dim,
                      float *to)
{
    if (format < KV_FLOAT32 || format > KV_INT4 || head_dim < GROUP || head_dim % GROUP || head_dim > MAX_HEAD_DIM)
        return FACET_BAD_MODEL;
    for (int64_t row = 0; row < num_rows; row++)
        kv_load(format, from + row * kv_row_bytes(format, head_dim), scales ? scales[row] : 1.0f, head_dim,
                to + row * head_dim);
    return FACET_OK;
}
