// Product of int8 matrices on AMX tiles; the sums are scaled and transformed before they leave the cache.
//
// Both operands are packed once into tiles of 1 KB in the order in which the product reads them, from either storage
// order. torch._int_mm writes int32 of which every element is then read again, and packs the right operand each time.

#pragma once

#include "epilogue.h"

#if defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__linux__)
#define HOT_HF_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// int8 elements (i, k) at data + i * outer + k * inner; one of the two steps is 1. Packed: two 4-bit elements a byte, of
// which ``outer``, then 1, counts the elements and ``inner`` the bytes.
struct Operand {
    const int8_t* data;
    int64_t outer, inner;
    bool packed = false;
};

struct Product {
    Operand a, b;  // b's outer axis is the columns of the result
    int64_t rows, cols, depth;
    const float *a_scale, *b_scale;
    int64_t a_step, b_step;
    int block;
    float factor;
    int64_t out_cols;
    int threads;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of scratch memory that ``product`` needs, aligned to 64.
constexpr int64_t SIDE = 256, TILE = 1024, DEPTH = 16;  // of a block of the result; of a tile; tiles in one step of depth
inline int64_t packed_bytes(int64_t length, int64_t depth) { return ceil_div(length, 64) * 4 * ceil_div(depth, 64) * TILE; }

#ifdef HOT_HF_AMX

// 16 vectors of 16 dwords, transposed.
INLINE void transpose16(__m512i* v) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xDD);
    }
    for (int i = 0; i < 8; i++) {
        v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    }
}

// Both of these pack 64 of depth from ``k`` on into tiles of 16 of the outer axis: [outer][depth] or, for ``by_depth``,
// [depth / 4][outer][4]. ``length`` and ``depth`` are what is left of the matrix from ``outer`` and ``k`` on; beyond are zeros.

// Depth is contiguous: one tile.
INLINE void pack_rows(const int8_t* from, int64_t step, int64_t length, int64_t depth, bool by_depth, int8_t* to) {
    const __mmask64 mask = depth >= 64 ? ~0ull : (1ull << depth) - 1;
    __m512i v[16];
    for (int i = 0; i < 16; i++) v[i] = i < length ? _mm512_maskz_loadu_epi8(mask, from + i * step) : _mm512_setzero_si512();
    if (by_depth) transpose16(v);
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + 64 * i, v[i]);
}

// 32 bytes to 64 integers, the low nibble first.
INLINE __m512i widen(__m256i bytes) {
    const __m512i pairs = _mm512_cvtepu8_epi16(bytes), sign = _mm512_set1_epi8(8), nibble = _mm512_set1_epi16(0xF);
    const __m512i high = _mm512_slli_epi16(_mm512_srli_epi16(pairs, 4), 8);
    return _mm512_sub_epi8(_mm512_xor_si512(_mm512_or_si512(_mm512_and_si512(pairs, nibble), high), sign), sign);
}

// The outer axis is contiguous: the four tiles of whole cache lines, at ``to[0]`` to ``to[3]``.
template <bool PACKED>
INLINE void pack_columns(const int8_t* from, int64_t step, int64_t length, int64_t depth, bool by_depth, int8_t* const* to) {
    const int64_t bytes = PACKED ? (length + 1) / 2 : length;
    const __mmask64 mask = bytes >= 64 ? ~0ull : (1ull << bytes) - 1;
    for (int i = 0; i < 16; i++) {
        __m512i r[4];
        for (int j = 0; j < 4; j++) {
            const int8_t* row = from + (4 * i + j) * step;
            if (4 * i + j >= depth) r[j] = _mm512_setzero_si512();
            else if (PACKED) r[j] = widen(_mm256_maskz_loadu_epi8((__mmask32)mask, row));
            else r[j] = _mm512_maskz_loadu_epi8(mask, row);
        }
        const __m512i l01 = _mm512_unpacklo_epi8(r[0], r[1]), h01 = _mm512_unpackhi_epi8(r[0], r[1]);
        const __m512i l23 = _mm512_unpacklo_epi8(r[2], r[3]), h23 = _mm512_unpackhi_epi8(r[2], r[3]);
        // Lane l of these four holds four times four elements of tile l.
        const __m512i q0 = _mm512_unpacklo_epi16(l01, l23), q1 = _mm512_unpackhi_epi16(l01, l23);
        const __m512i q2 = _mm512_unpacklo_epi16(h01, h23), q3 = _mm512_unpackhi_epi16(h01, h23);
        const __m512i a = _mm512_shuffle_i32x4(q0, q1, 0x44), b = _mm512_shuffle_i32x4(q2, q3, 0x44);
        const __m512i c = _mm512_shuffle_i32x4(q0, q1, 0xEE), d = _mm512_shuffle_i32x4(q2, q3, 0xEE);
        _mm512_store_si512(to[0] + 64 * i, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_store_si512(to[1] + 64 * i, _mm512_shuffle_i32x4(a, b, 0xDD));
        _mm512_store_si512(to[2] + 64 * i, _mm512_shuffle_i32x4(c, d, 0x88));
        _mm512_store_si512(to[3] + 64 * i, _mm512_shuffle_i32x4(c, d, 0xDD));
    }
    for (int tile = 0; tile < 4 && !by_depth; tile++) {
        __m512i v[16];
        for (int i = 0; i < 16; i++) v[i] = _mm512_load_si512(to[tile] + 64 * i);
        transpose16(v);
        for (int i = 0; i < 16; i++) _mm512_store_si512(to[tile] + 64 * i, v[i]);
    }
}

// Two panels of 32 of the outer axis, each a row of pairs of tiles: what one step of depth reads is 2 KB in one place.
void pack(const Operand& from, int64_t outer, int64_t length, int64_t depth, bool by_depth, int8_t* to) {
    const int64_t tiles = ceil_div(depth, 64);
    for (int64_t t = 0; t < tiles; t++) {
        const int8_t* source = from.data + outer * from.outer / (from.packed ? 2 : 1) + 64 * t * from.inner;
        int8_t* tile[4];
        for (int i = 0; i < 4; i++) tile[i] = to + ((outer / 32 + i / 2) * tiles + t) * 2 * TILE + i % 2 * TILE;
        if (from.packed) pack_columns<true>(source, from.inner, length - outer, depth - 64 * t, by_depth, tile);
        else if (from.inner != 1) pack_columns<false>(source, from.inner, length - outer, depth - 64 * t, by_depth, tile);
        else
            for (int i = 0; i < 4; i++)
                pack_rows(source + 16 * i * from.outer, from.outer, length - outer - 16 * i, depth - 64 * t, by_depth, tile[i]);
    }
}

// 32 x 32 sums over ``tiles`` tiles of depth, added to acc unless ``first``.
INLINE void tile_product(const int8_t* a, const int8_t* b, int64_t tiles, int32_t* acc, bool first) {
    constexpr int64_t PITCH = SIDE * sizeof(int32_t);
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, acc, PITCH);
        _tile_loadd(1, acc + 16, PITCH);
        _tile_loadd(2, acc + 16 * SIDE, PITCH);
        _tile_loadd(3, acc + 16 * SIDE + 16, PITCH);
    }
    for (int64_t t = 0; t < tiles; t++, a += 2 * TILE, b += 2 * TILE) {
        _tile_loadd(6, b, 64);
        _tile_loadd(4, a, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, b + TILE, 64);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(5, a + TILE, 64);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, acc, PITCH);
    _tile_stored(1, acc + 16, PITCH);
    _tile_stored(2, acc + 16 * SIDE, PITCH);
    _tile_stored(3, acc + 16 * SIDE + 16, PITCH);
}

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The system gives a process tiles only if it asks.
bool amx_granted() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

template <class T> void product(const Product& p, T* out, int8_t* scratch) {
    const int64_t tiles = ceil_div(p.depth, 64);
    int8_t* a = scratch;
    int8_t* b = a + packed_bytes(p.rows, p.depth);
    int32_t* sums = (int32_t*)(b + packed_bytes(p.cols, p.depth));
    const int threads = threads_for(p.rows * p.cols, p.threads);
    // Blocks of the result of about equal size, whole blocks of the transform wide, at least two for each thread.
    const int64_t unit = std::max(32, p.block);
    int64_t side = SIDE;
    while (side > std::max<int64_t>(unit, 64) && ceil_div(p.rows, side) * ceil_div(p.cols, side) < 2 * threads) side /= 2;
    const int64_t row_blocks = ceil_div(p.rows, side), height_of = ceil_div(ceil_div(p.rows, row_blocks), 32) * 32;
    const int64_t col_blocks = ceil_div(p.cols, side), width_of = ceil_div(ceil_div(p.cols, col_blocks), unit) * unit;
    const int64_t row_bytes = p.out_cols * sizeof(T);
    const bool fresh = p.rows * row_bytes >= (4 << 20);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < p.rows; i += 64) pack(p.a, i, p.rows, p.depth, false, a);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p.cols; i += 64) pack(p.b, i, p.cols, p.depth, true, b);
        const TileShapes shapes;
        _tile_loadconfig(&shapes);
        int32_t* acc = sums + omp_get_thread_num() * SIDE * SIDE;
        int64_t populated = -1;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < row_blocks * col_blocks; task++) {
            const int64_t row = task / col_blocks * height_of, col = task % col_blocks * width_of;
            const int64_t height = std::min(height_of, p.rows - row), width = std::min(width_of, p.cols - col);
            if (height <= 0 || width <= 0) continue;
            if (fresh && populated != row) {
                populate((int8_t*)out + row * row_bytes, height * row_bytes);
                populated = row;
            }
            for (int64_t t = 0; t < tiles; t += DEPTH)
                for (int64_t i = 0; i < height; i += 32)
                    for (int64_t j = 0; j < width; j += 32)
                        tile_product(a + ((row + i) / 32 * tiles + t) * 2 * TILE, b + ((col + j) / 32 * tiles + t) * 2 * TILE,
                                     std::min(DEPTH, tiles - t), acc + i * SIDE + j, t == 0);
            const float* b_scale = p.b_scale ? p.b_scale + col * p.b_step : nullptr;
            float row_buffer[SIDE];
            for (int64_t r = 0; r < height; r++)
                epilogue_row(acc + r * SIDE, width, p.a_scale[(row + r) * p.a_step], b_scale, p.b_step, p.block, p.factor,
                             out + (row + r) * p.out_cols + col, std::min(width, p.out_cols - col), row_buffer);
        }
        _tile_release();
    }
}

#else

bool amx_granted() { return false; }
template <class T> void product(const Product&, T*, int8_t*) {}

#endif

}  // namespace
