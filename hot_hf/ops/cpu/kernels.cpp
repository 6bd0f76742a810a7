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
#ifdef __linux__
#include <sys/mman.h>
#endif

#define INLINE __attribute__((always_inline)) inline

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

template <class To, class From> INLINE To bits_of(From v) {
    static_assert(sizeof(To) == sizeof(From), "");
    To r;
    std::memcpy(&r, &v, sizeof r);
    return r;
}

INLINE vf splat(float x) { return x - vf{}; }
INLINE vi splat(int32_t x) { return x - vi{}; }

// ---- loads and stores, widened to float32 -------------------------------------------------------------------------

INLINE vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
INLINE vf load(const bf16* p) {
    v16h h;
    std::memcpy(&h, p, sizeof h);
    return bits_of<vf>(__builtin_convertvector(h, vu) << 16);
}
INLINE vf load(const f16* p) {
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
template <class T> INLINE vf load(const T* p, int64_t n) {
    if (n >= LANES) return load(p);
    T part[LANES] = {};
    if (n > 0) std::memcpy(part, p, n * sizeof(T));
    return load(part);
}

INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
INLINE void store(bf16* p, vf v) {
    vu b = bits_of<vu>(v);
    vu rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;  // half to even
    vu nan = (vu)(v != v);
    v16h h = __builtin_convertvector((nan & 0x7FC0u) | (~nan & rounded), v16h);
    std::memcpy(p, &h, sizeof h);
}
INLINE void store(f16* p, vf v) {
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < LANES; i++) {
        _Float16 h = (_Float16)v[i];
        std::memcpy(p + i, &h, sizeof h);
    }
#endif
}
template <class T> INLINE void store(T* p, vf v, int64_t n) {
    if (n >= LANES) return store(p, v);
    T part[LANES];
    store(part, v);
    if (n > 0) std::memcpy(p, part, n * sizeof(T));
}

INLINE void store_int8(int8_t* p, vi q, int64_t n) {
    v16b b = __builtin_convertvector(q, v16b);
    if (n >= LANES) std::memcpy(p, &b, LANES);
    else std::memcpy(p, &b, n);
}
// 16 integers in 8 bytes, the even one in the low nibble.
INLINE void store_int4(int8_t* p, vi q, int64_t n) {
    vl pairs = bits_of<vl>(q);
    v8b b = __builtin_convertvector((pairs & 0xF) | ((pairs >> 28) & 0xF0), v8b);
    if (n >= LANES) std::memcpy(p, &b, 8);
    else std::memcpy(p, &b, (n + 1) / 2);
}

// ---- the transform ------------------------------------------------------------------------------------------------

// One stage inside a vector: lane i meets lane i ^ S; the lane with bit S set becomes (even - odd).
template <int S> INLINE vf stage(vf v) {
#define X(i) ((i) ^ S)
    const vf partner = __builtin_shufflevector(v, v, X(0), X(1), X(2), X(3), X(4), X(5), X(6), X(7), X(8), X(9), X(10),
                                               X(11), X(12), X(13), X(14), X(15));
#undef X
#define SIGN(i) ((i) & S ? -1.0f : 1.0f)
    const vf sign = {SIGN(0), SIGN(1), SIGN(2),  SIGN(3),  SIGN(4),  SIGN(5),  SIGN(6),  SIGN(7),
                     SIGN(8), SIGN(9), SIGN(10), SIGN(11), SIGN(12), SIGN(13), SIGN(14), SIGN(15)};
#undef SIGN
#ifdef __AVX512F__
    return (vf)_mm512_fmadd_ps((__m512)v, (__m512)sign, (__m512)partner);  // the product is exact: one rounding, as a sum
#else
    return v * sign + partner;
#endif
}
INLINE vf transform16(vf v) { return stage<8>(stage<4>(stage<2>(stage<1>(v)))); }

// Blocks of ``block`` (16 or more) along a row of ``padded`` floats, in place, without the final factor.
INLINE void butterfly_row(float* row, int64_t padded, int block) {
    for (int64_t i = 0; i < padded; i += LANES) store(row + i, transform16(load(row + i)));
    for (int s = LANES; s < block; s *= 2)
        for (int64_t i = 0; i < padded; i += 2 * s)
            for (int j = 0; j < s; j += LANES) {
                vf even = load(row + i + j), odd = load(row + i + j + s);
                store(row + i + j, even + odd);
                store(row + i + j + s, even - odd);
            }
}

// A block of 16 rows, a vector each.
INLINE void butterfly_vectors(vf* v) {
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
INLINE vf uniform(uint64_t seed, uint64_t first, uint64_t step) {
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

// Not inlined: drawing costs far more than a call. ``number`` is the first lane's, ``step`` takes it to the next.
__attribute__((noinline)) vi round_with_noise(vf v, int rounding, int qmax, uint64_t seed, uint64_t number, uint64_t step) {
    v = v + (rounding == STOCHASTIC ? uniform(seed, number, step)
                                    : __builtin_convertvector(bits_of<vi>(v) & 0x7FF, vf) * 0x1p-11f);
    vi q = __builtin_convertvector(v, vi);  // towards zero
    q += (vi)(v < __builtin_convertvector(q, vf));
    q = q > splat(qmax) ? splat(qmax) : q;
    return q < splat(-qmax) ? splat(-qmax) : q;
}

// No clamp: |v * inverse| <= qmax * (1 + 2^-22), which rounds to qmax.
INLINE vi round_nearest(vf v) { return bits_of<vi>(v + ROUNDER) - bits_of<vi>(splat(ROUNDER)); }
INLINE vf scaled(vf v, vf inverse, vi live) { return bits_of<vf>(bits_of<vi>(v * inverse) & live); }

struct Scale {
    float scale, inverse;
    int32_t live;  // all ones or 0
};

INLINE Scale scale_of(int32_t absmax_bits, int qmax) {
    float absmax = bits_of<float>(absmax_bits);
    if (absmax_bits >= INFINITY_BITS) return {NAN, 0.0f, 0};
    if (absmax < SMALLEST_ABSMAX) return {0.0f, 0.0f, 0};
    return {absmax / (float)qmax, (float)qmax / absmax, -1};
}

INLINE vi abs_max(vi max, vf v) {
    vi a = bits_of<vi>(v) & 0x7FFFFFFF;  // non-negative floats compare like their bits, and NaN beats infinity
    return a > max ? a : max;
}
INLINE int32_t highest(vi v) {
    int32_t m = 0;
    for (int i = 0; i < LANES; i++) m = std::max(m, v[i]);
    return m;
}

// Threads worth their start: 16K elements take about as long as waking one (5 us).
INLINE int threads_for(int64_t elements, int threads) {
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

// Row to ``row`` (padded floats), transformed; returns the bits of its absolute maximum.
template <class T> int32_t transform_row(const T* x, int64_t cols, int block, float factor, float* row, int64_t padded) {
    const int64_t full = cols / LANES * LANES;
    vi max = {};
    if (block == LANES) {
        for (int64_t c = 0; c < full; c += LANES) {
            vf v = transform16(load(x + c)) * factor;
            max = abs_max(max, v);
            store(row + c, v);
        }
        if (full < cols) {
            vf v = transform16(load(x + full, cols - full)) * factor;
            max = abs_max(max, v);
            store(row + full, v);
        }
        return highest(max);
    }
    for (int64_t c = 0; c < full; c += LANES) {
        vf v = load(x + c);
        max = abs_max(max, v);
        store(row + c, v);
    }
    for (int64_t c = full; c < padded; c += LANES) {
        vf v = load(x + c, cols - c);
        max = abs_max(max, v);
        store(row + c, v);
    }
    if (block == 1) return highest(max);
    butterfly_row(row, padded, block);
    max = vi{};
    for (int64_t c = 0; c < padded; c += LANES) {
        vf v = load(row + c) * factor;
        max = abs_max(max, v);
        store(row + c, v);
    }
    return highest(max);
}

template <bool PACKED> void quantize_row(const Job& j, const float* row, int64_t width, int64_t r, Scale s, int8_t* q) {
    const vf inverse = splat(s.inverse);
    const vi live = splat(s.live);
    const int rounding = j.rounding, qmax = j.qmax;
    const uint64_t seed = j.seed, first = r * j.number_row, step = j.number_col;
    auto put = [&](int64_t c, vi v, int64_t n) __attribute__((always_inline)) {
        if (PACKED) store_int4(q + c / 2, v, n);
        else store_int8(q + c, v, n);
    };
    int64_t c = 0;
    if (rounding == NEAREST) {
        for (; c + LANES <= width; c += LANES) put(c, round_nearest(scaled(load(row + c), inverse, live)), LANES);
        if (c < width) put(c, round_nearest(scaled(load(row + c), inverse, live)), width - c);
        return;
    }
    for (; c < width; c += LANES)
        put(c, round_with_noise(scaled(load(row + c), inverse, live), rounding, qmax, seed, first + c * step, step), width - c);
}

// The rows of a job, one after the other, in a buffer of one thread.
template <class T> struct RowQuantizer {
    const Job& j;
    const int64_t width = (j.cols + j.block - 1) / j.block * j.block;  // of the result
    const int64_t padded = (width + LANES - 1) / LANES * LANES;
    const int64_t pitch = j.packed ? (width + 1) / 2 : width;
    std::vector<float> buffer = std::vector<float>(padded + LANES);
    float* const row = (float*)(((uintptr_t)buffer.data() + 63) & ~(uintptr_t)63);  // a store across lines costs two

    explicit RowQuantizer(const Job& job) : j(job) {}
    int32_t transform(int64_t r) { return transform_row((const T*)j.x + r * j.stride, j.cols, j.block, j.factor, row, padded); }
    void quantize(int64_t r, Scale s) {
        if (j.packed) quantize_row<true>(j, row, width, r, s, j.q + r * pitch);
        else quantize_row<false>(j, row, width, r, s, j.q + r * pitch);
    }
    void per_row(int64_t r) {
        const Scale s = scale_of(transform(r), j.qmax);
        j.scale[r] = s.scale;
        quantize(r, s);
    }
};

template <class T> void quantize_rows(const Job& j) {
    const int n = threads_for(j.rows * j.cols, j.threads);
    int32_t all = 0;
#pragma omp parallel num_threads(n) if (n > 1)
    {
        RowQuantizer<T> rows(j);
        if (j.per_tensor) {
            int32_t mine = 0;
#pragma omp for schedule(static) nowait
            for (int64_t r = 0; r < j.rows; r++) mine = std::max(mine, rows.transform(r));
#pragma omp critical(hot_hf_absmax)
            all = std::max(all, mine);
#pragma omp barrier
            const Scale s = scale_of(all, j.qmax);
#pragma omp for schedule(static)
            for (int64_t r = 0; r < j.rows; r++) {
                rows.transform(r);
                rows.quantize(r, s);
            }
#pragma omp single
            j.scale[0] = s.scale;
        } else {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < j.rows; r++) rows.per_row(r);
        }
    }
}

// ---- one scale per column -----------------------------------------------------------------------------------------

// Transforms along the rows: blocks of B rows, of which the ``kept`` rows ``keep`` are used. ``row_scale`` multiplies
// the rows first. Threads share the row blocks, so that memory is read in order whatever the width.
// ``by_row``: a second job on the same rows, one scale each, done while they are in the cache.
// BLOCK: 1 and 16 are compiled apart, so that a block lives in registers; 0 takes any other from ``j.block``.
template <class T, int BLOCK>
void quantize_columns(const Job& j, const float* row_scale, const int32_t* keep, int kept, const Job* by_row) {
    const int B = BLOCK ? BLOCK : j.block;
    const int64_t blocks = (j.rows + B - 1) / B, cols = j.cols, stride = j.stride;
    const float factor = j.factor;
    const int64_t vectors = (j.cols + LANES - 1) / LANES;
    const int64_t pitch = j.packed ? (j.cols + 1) / 2 : j.cols;
    const int n = threads_for(j.rows * j.cols, j.threads);
    std::vector<vi> maxima((size_t)n * vectors);
    std::vector<Scale> scales(vectors * LANES);

    auto transformed = [&](int64_t b, int64_t c, vf* v) __attribute__((always_inline)) {
        const T* x = (const T*)j.x + b * B * stride + c;
        const int64_t rows = std::min<int64_t>(B, j.rows - b * B), columns = cols - c;
        if (BLOCK && rows == B && columns >= LANES) {
#pragma GCC unroll 16
            for (int r = 0; r < BLOCK; r++) v[r] = load(x + r * stride);
        } else {
            for (int r = 0; r < B; r++) v[r] = r < rows ? load(x + r * stride, columns) : vf{};
        }
        if (BLOCK == 1 && row_scale) v[0] = v[0] * row_scale[b];
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
        RowQuantizer<T> rows(by_row ? *by_row : j);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            if (by_row)
                for (int64_t r = b * B; r < std::min(b * B + B, j.rows); r++) rows.per_row(r);
            for (int64_t c = 0; c < vectors; c++) {
                transformed(b, c * LANES, v);
                vi m = max[c];
                if (BLOCK == 1) m = abs_max(m, v[0]);
                else
                    for (int k = 0; k < kept; k++) m = abs_max(m, v[keep[k]] * factor);
                max[c] = m;
            }
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
        const int rounding = j.rounding, qmax = j.qmax, packed = j.packed;
        int8_t* const out = j.q;
        std::vector<vf> inverses(vectors);
        std::vector<vi> lives(vectors);
        for (int64_t c = 0; c < vectors; c++)
            for (int i = 0; i < LANES; i++) inverses[c][i] = scales[c * LANES + i].inverse, lives[c][i] = scales[c * LANES + i].live;
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t c = 0; c < vectors; c++) {
                transformed(b, c * LANES, v);
                const vf inverse = inverses[c];
                const vi live = lives[c];
                for (int k = 0; k < kept; k++) {
                    const int64_t r = b * kept + k;
                    const vf value = scaled(BLOCK == 1 ? v[0] : v[keep[k]] * factor, inverse, live);
                    const vi q = rounding == NEAREST
                                     ? round_nearest(value)
                                     : round_with_noise(value, rounding, qmax, j.seed,
                                                        r * j.number_row + c * LANES * j.number_col, j.number_col);
                    if (packed) store_int4(out + r * pitch + c * (LANES / 2), q, cols - c * LANES);
                    else store_int8(out + r * pitch + c * LANES, q, cols - c * LANES);
                }
            }
    }
}

// ---- epilogue: int32 to scaled output, transformed if asked -------------------------------------------------------

// Fresh memory about to be written: one call for a range (14 ms of one thread for 50 MB) instead of a fault for each of
// its 4 KB pages (19 ms). Huge pages would take fewer, but a virtual machine may have to fetch each from its host first:
// the same backward took 43 ms or 117. Only whole pages inside the range, so nothing beyond it grows; Linux before 5.14
// does not know the advice and refuses it.
INLINE void populate(const void* first, int64_t bytes) {
#ifdef __linux__
    constexpr uintptr_t PAGE = 4096;
    const uintptr_t from = ((uintptr_t)first + PAGE - 1) & ~(PAGE - 1), to = ((uintptr_t)first + bytes) & ~(PAGE - 1);
    if (to > from) madvise((void*)from, to - from, 23 /* MADV_POPULATE_WRITE */);
#endif
}

template <class T>
void epilogue(const int32_t* acc, int64_t rows, int64_t cols, const float* a, int64_t a_step, const float* b, int64_t b_step,
              int block, float factor, T* out, int64_t out_cols, int threads) {
    const int64_t padded = (cols + LANES - 1) / LANES * LANES;
#pragma omp parallel num_threads(threads_for(rows * cols, threads)) if (threads_for(rows * cols, threads) > 1)
    {
        std::vector<float> buffer(block > LANES ? padded : 0);
        float* row = buffer.data();
        // Half a megabyte at a time: the zeros are still in the thread's cache when they are written over. Of a 4096 x 768
        // x 3072 backward it takes 5%. Smaller results come from memory that the allocator holds.
        const int64_t row_bytes = out_cols * sizeof(T), ahead = std::max<int64_t>(1, (512 << 10) / row_bytes);
        int64_t next = rows * row_bytes >= (4 << 20) ? 0 : rows;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            if (r >= next) {
                populate(out + r * out_cols, std::min(ahead, rows - r) * row_bytes);
                next = r + ahead;
            }
            const int32_t* in = acc + r * cols;
            T* o = out + r * out_cols;
            const float s = a[r * a_step];
            for (int64_t c = 0; c < cols; c += LANES) {
                vi q = {};
                if (cols - c >= LANES) std::memcpy(&q, in + c, sizeof q);
                else std::memcpy(&q, in + c, (cols - c) * sizeof(int32_t));
                vf v = __builtin_convertvector(q, vf) * s;
                if (b) v = v * (b_step ? load(b + c, cols - c) : splat(b[0]));
                if (block == LANES) v = transform16(v) * factor;
                if (block > LANES) store(row + c, v, cols - c);
                else if (c < out_cols) store(o + c, v, out_cols - c);
            }
            if (block > LANES) {
                butterfly_row(row, cols, block);
                for (int64_t c = 0; c < out_cols; c += LANES) store(o + c, load(row + c) * factor, out_cols - c);
            }
        }
    }
}

template <class T>
void quantize(const Job& j, int dim, const float* row_scale, const int32_t* keep, int kept, const Job* by_row) {
    if (dim == 1) quantize_rows<T>(j);
    else if (j.block == 1) quantize_columns<T, 1>(j, row_scale, keep, kept, by_row);
    else if (j.block == LANES) quantize_columns<T, LANES>(j, row_scale, keep, kept, by_row);
    else quantize_columns<T, 0>(j, row_scale, keep, kept, by_row);
}

bool known(int block) { return block == 1 || (block % LANES == 0 && !(block & (block - 1)) && block <= LARGEST_BLOCK); }

}  // namespace

extern "C" {

// A quantizer's second result, one scale per row, never packed: see ``by_row``.
struct HotHfByRow {
    int block;
    float factor;
    int qmax;
    uint64_t seed;
    int64_t number_row;
    void* q;
    float* scale;
};

// Returns 0, or 1 for an argument it does not know.
int hot_hf_quantize(const void* x, int dtype, int64_t rows, int64_t cols, int64_t stride, int dim, int block, float factor,
                    const float* row_scale, const int32_t* keep, int kept, int qmax, int per_tensor, int packed,
                    int rounding, uint64_t seed, int64_t number_row, int64_t number_col, void* q, float* scale, int threads,
                    const HotHfByRow* also) {
    const Job j{x, rows, cols, stride, block, factor, qmax, per_tensor, packed, rounding, seed, (uint64_t)number_row,
                (uint64_t)number_col, (int8_t*)q, scale, threads};
    Job other = j;
    if (also) {
        other.block = also->block, other.factor = also->factor, other.qmax = also->qmax, other.per_tensor = 0;
        other.packed = 0, other.seed = also->seed, other.number_row = also->number_row, other.number_col = 1;
        other.q = (int8_t*)also->q, other.scale = also->scale;
    }
    const Job* by_row = also ? &other : nullptr;
    if (!known(block) || !known(other.block) || (also && dim == 1)) return 1;
    switch (dtype) {
        case F32: quantize<float>(j, dim, row_scale, keep, kept, by_row); return 0;
        case BF16: quantize<bf16>(j, dim, row_scale, keep, kept, by_row); return 0;
        case F16: quantize<f16>(j, dim, row_scale, keep, kept, by_row); return 0;
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
