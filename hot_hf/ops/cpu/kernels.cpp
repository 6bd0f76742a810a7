// Quantizers and epilogues of the CPU backend: integers equal to reference.py bit for bit.
//
// A plain C interface on raw pointers, loaded with ctypes: no torch header, so it builds in seconds and does not depend
// on torch's ABI. Vectors are the compilers' own (GCC 12, Clang 15): one source for AVX-512, AVX2 and NEON.
// Must be compiled with -ffp-contract=off: a fused multiply-add would round once where the reference rounds twice.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16, LARGEST_BLOCK = 128;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int64_t vl __attribute__((vector_size(64)));
typedef int8_t v16b __attribute__((vector_size(16)));
typedef int8_t v8b __attribute__((vector_size(8)));
typedef uint16_t v16h __attribute__((vector_size(32)));

enum DType { F32, BF16, F16 };
enum Rounding { NEAREST, STOCHASTIC, PSEUDO };

constexpr int32_t INFINITY_BITS = 0x7F800000;
constexpr float SMALLEST_ABSMAX = 0x1p-120f;
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it rounds |v| < 2^22 half to even, the integer in the low bits

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <class To, class From> inline To bits_of(From v) {
    static_assert(sizeof(To) == sizeof(From), "");
    To r;
    std::memcpy(&r, &v, sizeof r);
    return r;
}

inline vf splat(float x) { return x - vf{}; }
inline vi splat(int32_t x) { return x - vi{}; }

// ---- loads and stores, widened to float32 -------------------------------------------------------------------------

inline vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline vf load(const bf16* p) {
    v16h h;
    std::memcpy(&h, p, sizeof h);
    return bits_of<vf>(__builtin_convertvector(h, vu) << 16);
}
inline vf load(const f16* p) {
#ifdef __AVX512F__
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    vf v;
    for (int i = 0; i < LANES; i++) {
        _Float16 h;
        std::memcpy(&h, p + i, sizeof h);
        v[i] = (float)h;
    }
    return v;
#endif
}
// The first n elements and zeros; n may be negative.
template <class T> inline vf load(const T* p, int64_t n) {
    if (n >= LANES) return load(p);
    T part[LANES] = {};
    if (n > 0) std::memcpy(part, p, n * sizeof(T));
    return load(part);
}

inline void store(float* p, vf v, int64_t n) { std::memcpy(p, &v, std::min<int64_t>(n, LANES) * sizeof(float)); }
inline void store(bf16* p, vf v, int64_t n) {
    vu b = bits_of<vu>(v);
    vu rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
    vu nan = (vu)(v != v);
    rounded = (nan & 0x7FC0u) | (~nan & rounded);
    v16h h = __builtin_convertvector(rounded, v16h);
    std::memcpy(p, &h, std::min<int64_t>(n, LANES) * sizeof(bf16));
}
inline void store(f16* p, vf v, int64_t n) {
#ifdef __AVX512F__
    __m256i h = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(p, &h, std::min<int64_t>(n, LANES) * sizeof(f16));
#else
    for (int i = 0; i < std::min<int64_t>(n, LANES); i++) {
        _Float16 h = (_Float16)v[i];
        std::memcpy(p + i, &h, sizeof h);
    }
#endif
}

inline void store_int8(int8_t* p, vi q, int64_t n) {
    v16b b = __builtin_convertvector(q, v16b);
    if (n >= LANES) std::memcpy(p, &b, LANES);
    else std::memcpy(p, &b, n);
}
// 16 integers in 8 bytes, the even one in the low nibble.
inline void store_int4(int8_t* p, vi q, int64_t n) {
    vl pairs = bits_of<vl>(q);
    v8b b = __builtin_convertvector((pairs & 0xF) | ((pairs >> 28) & 0xF0), v8b);
    if (n >= LANES) std::memcpy(p, &b, 8);
    else std::memcpy(p, &b, (n + 1) / 2);
}

// ---- the transform ------------------------------------------------------------------------------------------------

// One stage inside a vector: lane i meets lane i ^ S; the lane with bit S set becomes (even - odd).
template <int S> inline vf stage(vf v) {
#define X(i) ((i) ^ S)
    vf partner = __builtin_shufflevector(v, v, X(0), X(1), X(2), X(3), X(4), X(5), X(6), X(7), X(8), X(9), X(10), X(11),
                                         X(12), X(13), X(14), X(15));
#undef X
#define N(i) ((i) & S ? INT32_MIN : 0)
    const vi flip = {N(0), N(1), N(2), N(3), N(4), N(5), N(6), N(7), N(8), N(9), N(10), N(11), N(12), N(13), N(14), N(15)};
#undef N
    return partner + bits_of<vf>(bits_of<vi>(v) ^ flip);
}

// Blocks of ``block`` (16 or more) along a row of ``padded`` floats, in place, without the final factor.
inline void butterfly_row(float* row, int64_t padded, int block) {
    for (int64_t i = 0; i < padded; i += LANES) store(row + i, stage<8>(stage<4>(stage<2>(stage<1>(load(row + i))))), LANES);
    for (int s = LANES; s < block; s *= 2)
        for (int64_t i = 0; i < padded; i += 2 * s)
            for (int j = 0; j < s; j += LANES) {
                vf even = load(row + i + j), odd = load(row + i + j + s);
                store(row + i + j, even + odd, LANES);
                store(row + i + j + s, even - odd, LANES);
            }
}

// A block of 16 rows, a vector each.
inline void butterfly_vectors(vf* v) {
#pragma GCC unroll 4
    for (int s = 1; s < LANES; s *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i += 2 * s)
#pragma GCC unroll 16
            for (int k = i; k < i + s; k++) {
                vf even = v[k], odd = v[k + s];
                v[k] = even + odd;
                v[k + s] = even - odd;
            }
}

// ---- rounding -----------------------------------------------------------------------------------------------------

// Philox4x32-10, counter = element index; 24 bits of word 0 as a float on [0, 1).
inline vf uniform(uint64_t seed, uint64_t first, uint64_t step) {
    vf u;
    for (int i = 0; i < LANES; i++) {
        uint64_t index = first + step * i;
        uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = 0, c3 = 0;
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int r = 0; r < 10; r++) {
            uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)p1;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1, c3 = (uint32_t)p0;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        u[i] = (float)(int32_t)(c0 >> 8) * 0x1p-24f;
    }
    return u;
}

struct Draw {  // numbers of the 16 elements at hand: first, first + step, ...
    uint64_t seed, first, step;
};

// Not inlined: it would double the code of every kernel, and drawing costs far more than a call.
__attribute__((noinline)) vi round_with_noise(vf v, int rounding, int qmax, Draw d) {
    v = v + (rounding == STOCHASTIC ? uniform(d.seed, d.first, d.step)
                                    : __builtin_convertvector(bits_of<vi>(v) & 0x7FF, vf) * 0x1p-11f);
    vi q = __builtin_convertvector(v, vi);  // towards zero
    q += (vi)(v < __builtin_convertvector(q, vf));
    q = q > splat(qmax) ? splat(qmax) : q;
    return q < splat(-qmax) ? splat(-qmax) : q;
}

inline vi round_values(vf v, vf inverse, vi live, int rounding, int qmax, Draw d) {
    v = bits_of<vf>(bits_of<vi>(v * inverse) & live);
    // No clamp: |v * inverse| <= qmax * (1 + 2^-22), which rounds to qmax.
    if (rounding == NEAREST) return bits_of<vi>(v + ROUNDER) - bits_of<vi>(splat(ROUNDER));
    return round_with_noise(v, rounding, qmax, d);
}

struct Scale {
    float scale, inverse;
    int32_t live;  // all ones or 0
};

inline Scale scale_of(int32_t absmax_bits, int qmax) {
    float absmax = bits_of<float>(absmax_bits);
    if (absmax_bits >= INFINITY_BITS) return {NAN, 0.0f, 0};
    if (absmax < SMALLEST_ABSMAX) return {0.0f, 0.0f, 0};
    return {absmax / (float)qmax, (float)qmax / absmax, -1};
}

inline vi abs_max(vi max, vf v) {
    vi a = bits_of<vi>(v) & 0x7FFFFFFF;  // non-negative floats compare like their bits, and NaN beats infinity
    return a > max ? a : max;
}
inline int32_t highest(vi v) {
    int32_t m = 0;
    for (int i = 0; i < LANES; i++) m = std::max(m, v[i]);
    return m;
}

// Threads worth their start: 16K elements take about as long as waking one (5 us).
inline int threads_for(int64_t elements, int threads) {
    return (int)std::max<int64_t>(1, std::min<int64_t>(threads, elements >> 14));
}

struct Job {
    const void* x;
    int64_t rows, cols, stride;  // of x, row-major with unit column stride
    int block;
    float factor;
    int qmax, per_tensor, packed, rounding;
    uint64_t seed, number_row, number_col;  // an element's number for stochastic rounding
    int8_t* q;
    float* scale;
    int threads;
};

// ---- one scale per row --------------------------------------------------------------------------------------------

template <class T> inline int32_t transform_row(const Job& j, int64_t r, float* row, int64_t padded) {
    const T* x = (const T*)j.x + r * j.stride;
    vi max = {};
    if (j.block <= LANES) {  // one pass
        const bool transform = j.block == LANES;
        for (int64_t c = 0; c < padded; c += LANES) {
            vf v = load(x + c, j.cols - c);
            if (transform) v = stage<8>(stage<4>(stage<2>(stage<1>(v)))) * j.factor;
            max = abs_max(max, v);
            store(row + c, v, LANES);
        }
        return highest(max);
    }
    for (int64_t c = 0; c < padded; c += LANES) store(row + c, load(x + c, j.cols - c), LANES);
    butterfly_row(row, padded, j.block);
    for (int64_t c = 0; c < padded; c += LANES) {
        vf v = load(row + c) * j.factor;
        max = abs_max(max, v);
        store(row + c, v, LANES);
    }
    return highest(max);
}

template <class T> void quantize_rows(const Job& j) {
    const int64_t width = (j.cols + j.block - 1) / j.block * j.block;  // of the result
    const int64_t padded = (width + LANES - 1) / LANES * LANES;
    const int64_t pitch = j.packed ? (width + 1) / 2 : width;
    const int n = threads_for(j.rows * padded, j.threads);
    int32_t all = 0;
#pragma omp parallel num_threads(n) if (n > 1)
    {
        std::vector<float> buffer(padded);
        float* row = buffer.data();
        if (j.per_tensor) {
            int32_t mine = 0;
#pragma omp for schedule(static) nowait
            for (int64_t r = 0; r < j.rows; r++) mine = std::max(mine, transform_row<T>(j, r, row, padded));
#pragma omp critical(hot_hf_absmax)
            all = std::max(all, mine);
#pragma omp barrier
        }
#pragma omp for schedule(static)
        for (int64_t r = 0; r < j.rows; r++) {
            int32_t own = transform_row<T>(j, r, row, padded);
            Scale s = scale_of(j.per_tensor ? all : own, j.qmax);
            if (!j.per_tensor || r == 0) j.scale[j.per_tensor ? 0 : r] = s.scale;
            const vf inverse = splat(s.inverse);
            const vi live = splat(s.live);
            Draw d{j.seed, r * j.number_row, j.number_col};
            int8_t* q = j.q + r * pitch;
            for (int64_t c = 0; c < width; c += LANES, d.first += LANES * j.number_col) {
                vi v = round_values(load(row + c), inverse, live, j.rounding, j.qmax, d);
                if (j.packed) store_int4(q + c / 2, v, width - c);
                else store_int8(q + c, v, width - c);
            }
        }
    }
}

// ---- one scale per column -----------------------------------------------------------------------------------------

// Transforms along the rows: blocks of B rows, of which the ``kept`` rows ``keep`` are used. ``row_scale`` multiplies
// the rows first. Threads share the row blocks, so that memory is read in order whatever the width.
// BLOCK: 1 and 16 are compiled apart, so that a block lives in registers; 0 takes any other from ``j.block``.
template <class T, int BLOCK> void quantize_columns(const Job& j, const float* row_scale, const int32_t* keep, int kept) {
    const int B = BLOCK ? BLOCK : j.block;
    const int64_t blocks = (j.rows + B - 1) / B;
    const int64_t vectors = (j.cols + LANES - 1) / LANES;
    const int64_t pitch = j.packed ? (j.cols + 1) / 2 : j.cols;
    const int n = threads_for(j.rows * j.cols, j.threads);
    std::vector<vi> maxima((size_t)n * vectors);
    std::vector<Scale> scales(vectors * LANES);

    auto transformed = [&](int64_t b, int64_t c, vf* v) {
        const T* x = (const T*)j.x + b * B * j.stride + c;
        const int64_t rows = std::min<int64_t>(B, j.rows - b * B), columns = j.cols - c;
        if (rows == B && columns >= LANES) {
#pragma GCC unroll 16
            for (int r = 0; r < B; r++) v[r] = load(x + r * j.stride);
        } else {
            for (int r = 0; r < B; r++) v[r] = r < rows ? load(x + r * j.stride, columns) : vf{};
        }
        if (row_scale)
            for (int r = 0; r < rows; r++) v[r] = v[r] * row_scale[b * B + r];
        if (BLOCK == LANES) butterfly_vectors(v);
        if (BLOCK == 0) {
            for (int i = 0; i < B; i += LANES) butterfly_vectors(v + i);
            for (int s = LANES; s < B; s *= 2)
                for (int i = 0; i < B; i += 2 * s)
                    for (int k = i; k < i + s; k++) {
                        vf even = v[k], odd = v[k + s];
                        v[k] = even + odd;
                        v[k + s] = even - odd;
                    }
        }
    };

#pragma omp parallel num_threads(n) if (n > 1)
    {
        vi* max = maxima.data() + omp_get_thread_num() * vectors;
        vf v[BLOCK ? BLOCK : LARGEST_BLOCK];
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t c = 0; c < vectors; c++) {
                transformed(b, c * LANES, v);
                vi m = max[c];
                if (BLOCK == 1) m = abs_max(m, v[0]);
                else
                    for (int k = 0; k < kept; k++) m = abs_max(m, v[keep[k]] * j.factor);
                max[c] = m;
            }
#pragma omp single
        {
            vi all = {};
            for (int64_t c = 0; c < vectors; c++) {
                vi m = maxima[c];
                for (int t = 1; t < n; t++) {
                    vi o = maxima[t * vectors + c];
                    m = o > m ? o : m;
                }
                maxima[c] = m;
                all = m > all ? m : all;
            }
            const Scale whole = scale_of(highest(all), j.qmax);
            for (int64_t c = 0; c < vectors * LANES; c++)
                scales[c] = j.per_tensor ? whole : scale_of(maxima[c / LANES][c % LANES], j.qmax);
            if (j.per_tensor) j.scale[0] = whole.scale;
            else
                for (int64_t c = 0; c < j.cols; c++) j.scale[c] = scales[c].scale;
        }
        std::vector<vf> inverses(vectors);
        std::vector<vi> lives(vectors);
        for (int64_t c = 0; c < vectors; c++)
            for (int i = 0; i < LANES; i++) inverses[c][i] = scales[c * LANES + i].inverse, lives[c][i] = scales[c * LANES + i].live;
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t c = 0; c < vectors; c++) {
                transformed(b, c * LANES, v);
                for (int k = 0; k < kept; k++) {
                    const int64_t r = b * kept + k;
                    Draw d{j.seed, r * j.number_row + c * LANES * j.number_col, j.number_col};
                    vf value = BLOCK == 1 ? v[0] : v[keep[k]] * j.factor;
                    vi q = round_values(value, inverses[c], lives[c], j.rounding, j.qmax, d);
                    if (j.packed) store_int4(j.q + r * pitch + c * (LANES / 2), q, j.cols - c * LANES);
                    else store_int8(j.q + r * pitch + c * LANES, q, j.cols - c * LANES);
                }
            }
    }
}

// ---- epilogue: int32 to scaled output, transformed if asked -------------------------------------------------------

template <class T>
void epilogue(const int32_t* acc, int64_t rows, int64_t cols, const float* a, int64_t a_step, const float* b, int64_t b_step,
              int block, float factor, T* out, int64_t out_cols, int threads) {
    const int64_t padded = (cols + LANES - 1) / LANES * LANES;
#pragma omp parallel num_threads(threads_for(rows * cols, threads)) if (threads_for(rows * cols, threads) > 1)
    {
        std::vector<float> buffer(block > LANES ? padded : 0);
        float* row = buffer.data();
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const int32_t* in = acc + r * cols;
            T* o = out + r * out_cols;
            const float s = a[r * a_step];
            for (int64_t c = 0; c < cols; c += LANES) {
                vi q = {};
                std::memcpy(&q, in + c, std::min<int64_t>(LANES, cols - c) * sizeof(int32_t));
                vf v = __builtin_convertvector(q, vf) * s;
                if (b) v = v * (b_step ? load(b + c, cols - c) : splat(b[0]));
                if (block == LANES) v = stage<8>(stage<4>(stage<2>(stage<1>(v)))) * factor;
                if (block > LANES) store(row + c, v, LANES);
                else if (c < out_cols) store(o + c, v, out_cols - c);
            }
            if (block > LANES) {
                butterfly_row(row, cols, block);
                for (int64_t c = 0; c < out_cols; c += LANES) store(o + c, load(row + c) * factor, out_cols - c);
            }
        }
    }
}

template <class T> void quantize(const Job& j, int dim, const float* row_scale, const int32_t* keep, int kept) {
    if (dim == 1) quantize_rows<T>(j);
    else if (j.block == 1) quantize_columns<T, 1>(j, row_scale, keep, kept);
    else if (j.block == LANES) quantize_columns<T, LANES>(j, row_scale, keep, kept);
    else quantize_columns<T, 0>(j, row_scale, keep, kept);
}

}  // namespace

extern "C" {

// Returns 0, or 1 for an argument it does not know.
int hot_hf_quantize(const void* x, int dtype, int64_t rows, int64_t cols, int64_t stride, int dim, int block, float factor,
                    const float* row_scale, const int32_t* keep, int kept, int qmax, int per_tensor, int packed,
                    int rounding, uint64_t seed, int64_t number_row, int64_t number_col, void* q, float* scale, int threads) {
    const Job j{x, rows, cols, stride, block, factor, qmax, per_tensor, packed, rounding, seed, (uint64_t)number_row,
                (uint64_t)number_col, (int8_t*)q, scale, threads};
    if (block != 1 && (block % LANES || block & (block - 1) || block > LARGEST_BLOCK)) return 1;
    switch (dtype) {
        case F32: quantize<float>(j, dim, row_scale, keep, kept); return 0;
        case BF16: quantize<bf16>(j, dim, row_scale, keep, kept); return 0;
        case F16: quantize<f16>(j, dim, row_scale, keep, kept); return 0;
    }
    return 1;
}

// acc (rows, cols) int32, contiguous, to out (rows, out_cols): (a * acc) * b, transformed along cols for block >= 16.
int hot_hf_epilogue(const int32_t* acc, int64_t rows, int64_t cols, const float* a, int64_t a_step, const float* b,
                    int64_t b_step, int block, float factor, void* out, int dtype, int64_t out_cols, int threads) {
    switch (dtype) {
        case F32: epilogue(acc, rows, cols, a, a_step, b, b_step, block, factor, (float*)out, out_cols, threads); return 0;
        case BF16: epilogue(acc, rows, cols, a, a_step, b, b_step, block, factor, (bf16*)out, out_cols, threads); return 0;
        case F16: epilogue(acc, rows, cols, a, a_step, b, b_step, block, factor, (f16*)out, out_cols, threads); return 0;
    }
    return 1;
}

int hot_hf_unpack(const int8_t* packed, int64_t rows, int64_t pitch, int64_t cols, int8_t* q, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * cols, threads)) if (threads_for(rows * cols, threads) > 1)
    for (int64_t r = 0; r < rows; r++) {
        const int8_t* p = packed + r * pitch;
        int8_t* o = q + r * cols;
        for (int64_t c = 0; c < cols / 2; c++) {
            o[2 * c] = (int8_t)((int8_t)(p[c] << 4) >> 4);
            o[2 * c + 1] = (int8_t)(p[c] >> 4);
        }
        if (cols % 2) o[cols - 1] = (int8_t)((int8_t)(p[cols / 2] << 4) >> 4);
    }
    return 0;
}
}
