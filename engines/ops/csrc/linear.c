/* The matrix product over quantized rows: panels of 8 outputs, all rows of a call against each.
 *
 * With many rows a panel pair is expanded once into scratch (a byte a code, float scales: it fits the first-level
 * cache) and read by every tile of 6 rows; with few rows tiles read the packed bytes themselves, which is what memory
 * can bring. Read next: tiles.h.
 */
#include "internal.h"
#include "tiles.h"
#include "vector.h"

/* Up to this many rows codes are unpacked in the tile; beyond, expanding pays. */
enum { DIRECT_ROWS = 6 };

FACET_DEFINE_TILES(direct_4_32, 4, PACKED, 32)
FACET_DEFINE_TILES(direct_4_16, 4, PACKED, 16)
FACET_DEFINE_TILES(direct_8_32, 8, PACKED, 32)
FACET_DEFINE_TILES(direct_8_16, 8, PACKED, 16)
FACET_DEFINE_TILES(expanded_4_32, 4, EXPANDED, 32)
FACET_DEFINE_TILES(expanded_4_16, 4, EXPANDED, 16)
FACET_DEFINE_TILES(expanded_8_32, 8, EXPANDED, 32)
FACET_DEFINE_TILES(expanded_8_16, 8, EXPANDED, 16)

int32_t num_panels(const facet_matrix *matrix)
{
    return (matrix->num_outputs + PANEL - 1) / PANEL;
}

static int64_t code_bytes(const facet_matrix *matrix)
{
    return (int64_t)matrix->num_inputs * matrix->code_bits;
}

/* Inputs of a tile part: a weight group of 16 halves the groups of 32 that activations have. */
static int32_t part_width(const facet_matrix *matrix)
{
    return matrix->group < GROUP ? matrix->group : GROUP;
}

int matrix_is_sound(const facet_matrix *matrix, int32_t num_outputs, int32_t num_inputs)
{
    if (matrix->num_outputs != num_outputs || matrix->num_inputs != num_inputs || num_outputs < 1 || num_inputs < GROUP)
        return 0;
    if (num_inputs % GROUP || num_inputs > 1 << 20 || (matrix->code_bits != 4 && matrix->code_bits != 8))
        return 0;
    if (matrix->group < 16 || (matrix->group != 16 && matrix->group % GROUP) || num_inputs % matrix->group)
        return 0;
    if (matrix->scale_bytes != 2 && matrix->scale_bytes != 4)
        return 0;
    int64_t scales = (int64_t)num_inputs / matrix->group * PANEL * matrix->scale_bytes * (1 + (matrix->has_min != 0));
    return matrix->data && (uintptr_t)matrix->data % 32 == 0 && matrix->panel_bytes % 32 == 0 &&
           matrix->panel_bytes >= code_bytes(matrix) + scales && (matrix->has_min == 0 || matrix->has_min == 1);
}

size_t expanded_bytes(const facet_matrix *matrix)
{
    /* Codes of two streams, then d and m of 8 outputs for two panels of groups, or one panel of half groups. */
    return (size_t)matrix->num_inputs * 16 + (size_t)(matrix->num_inputs / 16) * 2 * 16 * sizeof(float);
}

/* `ahead` bytes further on lies what is expanded next: fetched meanwhile, while a dozen tiles are computed. */
static void expand_codes(const uint8_t *from, int32_t bits, int32_t num_inputs, int64_t ahead, uint8_t *to)
{
    const __m256i nibble = _mm256_set1_epi8(15);
    /* 4 bits: the halves of a byte are steps 2 p and 2 p + 1 of one stream. 8 bits: one step of two streams. */
    const int64_t next_half = bits == 4 ? 64 : 32;
    for (int32_t i = 0; i < num_inputs * bits / 32; i++) {
        __m256i both = _mm256_load_si256((const __m256i *)(from + 32 * (int64_t)i));
        uint8_t *at = to + (bits == 4 ? 128 : 64) * (int64_t)i;
        _mm_prefetch((const char *)from + 32 * (int64_t)i + ahead, _MM_HINT_T1);
        _mm256_store_si256((__m256i *)at, _mm256_and_si256(both, nibble));
        _mm256_store_si256((__m256i *)(at + next_half), _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble));
    }
}

static void expand_scales(const facet_matrix *matrix, const uint8_t *scales, int32_t panels, int64_t ahead, float *to)
{
    const int32_t width = part_width(matrix);
    for (int32_t part = 0; part < matrix->num_inputs / width; part++) {
        __m256 d, m;
        _mm_prefetch((const char *)scales + 32 * (int64_t)part + ahead, _MM_HINT_T1);
        packed_scales(matrix, scales, part * width / matrix->group, &d, &m);
        _mm256_store_ps(to + (int64_t)part * panels * 16, d);
        _mm256_store_ps(to + (int64_t)part * panels * 16 + 8, m);
    }
}

/* Rows first..first+count against the panels at `data[0]` and, for 4-bit codes, `data[1]`: out [count][16]. */
static void run_rows(const facet_matrix *matrix, const uint8_t *const data[2], int64_t ahead, const quantized *x,
                     int64_t first, int32_t count, float *out, uint8_t *scratch)
{
    const int32_t bits = matrix->code_bits, width = part_width(matrix), K = matrix->num_inputs;
    const int direct = count <= DIRECT_ROWS;
    tile_weights w = {{data[0], data[1]}, {data[0] + code_bytes(matrix), data[1] + code_bytes(matrix)}, ahead};
    if (!direct) {
        float *scales = (float *)(scratch + 16 * (int64_t)K);
        const int32_t panels = bits == 4 ? 2 : 1;
        for (int32_t p = 0; p < panels; p++) {
            expand_codes(data[p], bits, K, ahead, scratch + 32 * p);
            expand_scales(matrix, w.scales[p], panels, ahead, scales + 16 * p);
        }
        w = (tile_weights){{scratch, scratch}, {(const uint8_t *)scales, (const uint8_t *)scales}, 0};
    }
    const float *sums = width == GROUP ? x->sums : x->half_sums;
    for (int32_t row = 0; row < count; row += ROW_TILE) {
        int32_t rows = count - row < ROW_TILE ? count - row : ROW_TILE;
        tile_rows at = {x->codes + (first + row) * K, x->scales + (first + row) * (K / GROUP),
                        sums + (first + row) * (K / width)};
        float *to = out + 16 * (int64_t)row;
        if (bits == 4 && width == GROUP)
            (direct ? direct_4_32 : expanded_4_32)(rows, matrix, &w, &at, to);
        else if (bits == 4)
            (direct ? direct_4_16 : expanded_4_16)(rows, matrix, &w, &at, to);
        else if (width == GROUP)
            (direct ? direct_8_32 : expanded_8_32)(rows, matrix, &w, &at, to);
        else
            (direct ? direct_8_16 : expanded_8_16)(rows, matrix, &w, &at, to);
    }
}

/* Columns 0..n of `from` [16] (outputs `output`..), with their biases, into a sink's row. */
static void put_row(const facet_matrix *matrix, float *from, int32_t output, int32_t n, float *to, sink_kind kind)
{
    if (matrix->bias)
        for (int32_t j = 0; j < n; j++)
            from[j] += matrix->bias[output + j];
    if (n == 16) {
        __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + 8);
        _mm256_storeu_ps(to, kind == ADD ? _mm256_add_ps(_mm256_loadu_ps(to), a) : a);
        _mm256_storeu_ps(to + 8, kind == ADD ? _mm256_add_ps(_mm256_loadu_ps(to + 8), b) : b);
    } else {
        for (int32_t j = 0; j < n; j++)
            to[j] = kind == ADD ? to[j] + from[j] : from[j];
    }
}

void linear_panels(const facet_matrix *matrix, const quantized *x, int64_t first, int32_t count, int32_t p0, int32_t p1,
                   const sink *to, uint8_t *scratch)
{
    float out[MOST_ROWS * 16] __attribute__((aligned(32)));
    const int32_t step = matrix->code_bits == 4 ? 2 : 1;
    for (int32_t p = p0; p < p1; p += step) {
        const uint8_t *one = matrix->data + p * matrix->panel_bytes;
        const uint8_t *data[2] = {one, step == 2 && p + 1 < p1 ? one + matrix->panel_bytes : one};
        const int32_t output = p * PANEL, left = matrix->num_outputs - output;
        const int32_t here = (p + step < p1 ? step : p1 - p) * PANEL, n = left < here ? left : here;
        /* The panels after this chunk's are fetched too: some thread takes them next. */
        const int64_t ahead = step * matrix->panel_bytes;
        for (int32_t row = 0; row < count; row += MOST_ROWS) {
            const int32_t rows = count - row < MOST_ROWS ? count - row : MOST_ROWS;
            run_rows(matrix, data, ahead, x, first + row, rows, out, scratch);
            for (int32_t r = 0; r < rows; r++) {
                int64_t target = to->rows ? to->rows[row + r] : row + r;
                put_row(matrix, out + 16 * r, output, n, to->to + target * to->stride + (p - p0) * PANEL, to->kind);
            }
        }
    }
}

static int same_format(const facet_matrix *one, const facet_matrix *two)
{
    return one->code_bits == two->code_bits && one->group == two->group && one->has_min == two->has_min &&
           one->scale_bytes == two->scale_bytes && one->zero == two->zero;
}

void linear_pair(const facet_matrix *one, const facet_matrix *two, const quantized *x, int64_t first, int32_t count,
                 int32_t p, float *to, uint8_t *scratch)
{
    const uint8_t *data[2] = {one->data + p * one->panel_bytes, two->data + p * two->panel_bytes};
    const int64_t ahead = one->panel_bytes;
    if (one->code_bits == 4 && same_format(one, two)) {
        run_rows(one, data, ahead, x, first, count, to, scratch);
    } else { /* each alone; a single 4-bit panel runs beside itself */
        float second[MOST_ROWS * 16] __attribute__((aligned(32)));
        const uint8_t *twice[2][2] = {{data[0], data[0]}, {data[1], data[1]}};
        run_rows(one, twice[0], ahead, x, first, count, to, scratch);
        run_rows(two, twice[1], ahead, x, first, count, second, scratch);
        for (int32_t r = 0; r < count; r++)
            copy_floats(to + 16 * r + 8, second + 16 * r, PANEL);
    }
    for (int32_t i = 0; (one->bias || two->bias) && i < PANEL && PANEL * p + i < one->num_outputs; i++)
        for (int32_t r = 0; r < count; r++) {
            to[16 * r + i] += one->bias ? one->bias[PANEL * p + i] : 0.0f;
            to[16 * r + 8 + i] += two->bias ? two->bias[PANEL * p + i] : 0.0f;
        }
}

/* w = d * q + m of one row of the matrix, fused. */
void read_row(const facet_matrix *matrix, int64_t row, float *to)
{
    const uint8_t *panel = matrix->data + row / PANEL * matrix->panel_bytes;
    const int32_t lane = (int32_t)(row % PANEL), bits = matrix->code_bits;
    float d[8], m[8];
    for (int32_t k = 0; k < matrix->num_inputs; k++) {
        if (k % matrix->group == 0) {
            __m256 vd, vm;
            packed_scales(matrix, panel + code_bytes(matrix), k / matrix->group, &vd, &vm);
            _mm256_storeu_ps(d, vd);
            _mm256_storeu_ps(m, vm);
        }
        int32_t code = bits == 8 ? panel[k / 4 * 32 + 4 * lane + k % 4]
                                 : panel[k / 8 * 32 + 4 * lane + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15;
        to[k] = __builtin_fmaf(d[lane], (float)code, m[lane]);
    }
}
