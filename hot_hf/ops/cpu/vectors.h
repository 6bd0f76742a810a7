// Vectors of 16 floats: loads and stores of every input type, the Hadamard butterfly, the three roundings, scales.
//
// They are the compilers' own (GCC 12, Clang 15): one source for AVX-512, AVX2 and NEON.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
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

}  // namespace
