/* Vector helpers: eight floats at a time, every operation spelled out so that the compiler has nothing to reorder. */
#ifndef FACET_VECTOR_H
#define FACET_VECTOR_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define FACET_INLINE static inline __attribute__((always_inline))

/* Keep v in its register here: the compiler may not fold, reorder or spread the sums that lead to it. Left alone, gcc
 * turns long chains of integer additions into trees and spills the terms. */
#define FACET_KEEP(v) __asm__("" : "+x"(v))

FACET_INLINE __m256i broadcast4(const int8_t *bytes)
{
    int32_t four;
    memcpy(&four, bytes, 4);
    return _mm256_set1_epi32(four);
}

/* Sum of eight lanes: a fixed tree. */
FACET_INLINE float sum8(__m256 v)
{
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    x = _mm_add_ss(x, _mm_movehdup_ps(x));
    return _mm_cvtss_f32(x);
}

/* Largest of eight lanes (no lane is a NaN unless the caller accepts any answer). */
FACET_INLINE float max8(__m256 v)
{
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    x = _mm_max_ss(x, _mm_movehdup_ps(x));
    return _mm_cvtss_f32(x);
}

FACET_INLINE __m256 abs8(__m256 v)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
}

/* e^x within 2 ulp; 0 below -87.3, finite up to 88.3; a NaN stays a NaN. Polynomial: Cephes, expf. */
FACET_INLINE __m256 exp8(__m256 x)
{
    const __m256 low = _mm256_set1_ps(-87.3f);
    __m256 zero = _mm256_cmp_ps(x, low, _CMP_LT_OQ);
    x = _mm256_max_ps(low, x);
    x = _mm256_min_ps(_mm256_set1_ps(88.3f), x);
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    f = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), f);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(f, f), _mm256_add_ps(f, _mm256_set1_ps(1.0f)));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
    return _mm256_andnot_ps(zero, p);
}

/* x / (1 + e^-x). */
FACET_INLINE __m256 silu8(__m256 x)
{
    __m256 e = exp8(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f)));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
}

#endif
