// Vectors of VW floats for the instruction set that the compiler was told to use, and the few operations on them.
//
// Everything is written with the compiler's vector extensions, so that one source serves AVX-512, AVX2 and any
// other machine; only fused multiply-add, the bfloat16 dot product and a few conversions name instructions.
// Contraction of a*b+c is off (-ffp-contract=off): what is fused is written as fma(), so a number's bits do not
// depend on how the compiler happened to unroll the loop around it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sapwood {

#if defined(__AVX512F__)
constexpr int VW = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int VW = 8;
#else
constexpr int VW = 4;
#endif

// Rows that the inner loop of a product holds in registers beside two vectors of columns.
constexpr int MR = VW == 16 ? 12 : VW == 8 ? 6 : 4;

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));
typedef uint8_t vb __attribute__((vector_size(VW)));
typedef int8_t vsb __attribute__((vector_size(VW)));

#define SAPWOOD_INLINE inline __attribute__((always_inline))

template <class V>
SAPWOOD_INLINE V load(const void *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
SAPWOOD_INLINE void store(void *to, V v) {
    std::memcpy(to, &v, sizeof v);
}

SAPWOOD_INLINE vf splat(float x) { return x - vf{}; }
SAPWOOD_INLINE vu splat_word(uint32_t x) { return x - vu{}; }

SAPWOOD_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    vf r;
    for (int i = 0; i < VW; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

// The greater of each pair; b where either is not a number.
SAPWOOD_INLINE vf max(vf a, vf b) { return a > b ? a : b; }

template <int LANES>
struct Lanes {
    typedef float type __attribute__((vector_size(LANES * 4)));
};

// Folds the lanes of a vector in halves, always in the same order.
template <int LANES = VW, class F>
SAPWOOD_INLINE float fold_lanes(typename Lanes<LANES>::type v, const F &both) {
    if constexpr (LANES == 4) {
        return both(both(v[0], v[2]), both(v[1], v[3]));
    } else {
        typename Lanes<LANES / 2>::type half[2];
        std::memcpy(half, &v, sizeof v);
        return fold_lanes<LANES / 2>(both(half[0], half[1]), both);
    }
}

SAPWOOD_INLINE float sum_lanes(vf v) {
    return fold_lanes(v, [](auto a, auto b) { return a + b; });
}

SAPWOOD_INLINE float max_lanes(vf v) {
    return fold_lanes(v, [](auto a, auto b) { return a > b ? a : b; });
}

// 2^f for |f| <= 1/2, exactly 1 at 0.
template <bool PRECISE>
SAPWOOD_INLINE vf exp2_fraction(vf f) {
    vf p;
    if constexpr (PRECISE) {
        p = splat(1.5353361959569156e-4f);
        p = fma(p, f, splat(1.3398875016719103e-3f));
        p = fma(p, f, splat(9.61843691766262e-3f));
        p = fma(p, f, splat(5.5503323674201965e-2f));
        p = fma(p, f, splat(2.4022647738456726e-1f));
        p = fma(p, f, splat(6.9314718246459961e-1f));
    } else {
        p = splat(9.5828529447317123e-3f);
        p = fma(p, f, splat(5.5906426161527634e-2f));
        p = fma(p, f, splat(2.4024099111557007e-1f));
        p = fma(p, f, splat(6.9312417507171631e-1f));
    }
    return fma(p, f, splat(1.0f));
}

// 2^x; exactly 0 far below and exactly 1 at 0; not-a-number stays what it is.  The polynomials are those of least
// relative error: 2e-8 where PRECISE, else 9e-5 with AVX-512 and 3e-6 without.
template <bool PRECISE = true>
SAPWOOD_INLINE vf exp2v(vf x) {
#if defined(__AVX512F__)
    if constexpr (!PRECISE) {
        // x less the greatest whole number that is not above it; scaling takes that number's power of two.
        const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        vf p = fma(splat(7.70671974337376e-2f), f, splat(2.2764482191480245e-1f));
        p = fma(p, f, splat(6.951168245278154e-1f));
        return (vf)_mm512_scalef_ps((__m512)fma(p, f, splat(1.0f)), (__m512)x);
    }
    // The second operand comes out where one is not a number.
    const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
    const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (vf)_mm512_scalef_ps((__m512)exp2_fraction<true>((vf)_mm512_sub_ps(bounded, whole)), whole);
#else
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest whole number
    const vf bounded = x > splat(127.0f) ? splat(127.0f) : x;
    const vf shifted = bounded + magic;
    const vu power = ((vu)shifted - (vu)magic + 127u) << 23;
    const vf value = exp2_fraction<PRECISE>(bounded - (shifted - magic)) * (vf)power;
    return x < splat(-126.0f) ? vf{} : value;
#endif
}

constexpr float LOG2E = 1.44269504088896340736f;

// x / (1 + e^-x)
template <bool PRECISE>
SAPWOOD_INLINE vf silu(vf x) {
    return x / (splat(1.0f) + exp2v<PRECISE>(x * splat(-LOG2E)));
}

SAPWOOD_INLINE vf tanhv(vf x) { return splat(1.0f) - splat(2.0f) / (splat(1.0f) + exp2v(x * splat(2 * LOG2E))); }

// x / 2 * (1 + tanh(y)), y = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / (1 + e^-2y) (Hendrycks and Gimpel 2016).
SAPWOOD_INLINE vf gelu(vf x) {
    const vf y = x * fma(x * x, splat(0.7978845608f * 0.044715f), splat(0.7978845608f));
    return x / (splat(1.0f) + exp2v(y * splat(-2 * LOG2E)));
}

// To bfloat16, ties to even.
SAPWOOD_INLINE vh to_bf16(vf x) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    const vu bits = (vu)x;
    const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const vu quiet = (bits >> 16) | 0x40u;
    return __builtin_convertvector(x == x ? rounded : quiet, vh);
#endif
}

SAPWOOD_INLINE float from_bf16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

// VW signed bytes as floats.  The compiler alone would go element by element.
SAPWOOD_INLINE vf from_bytes(const int8_t *from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)load<vsb>(from)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from))));
#else
    return __builtin_convertvector(load<vsb>(from), vf);
#endif
}

// The number formats of KV and of the inputs of products; of weights too, unless they are quantized.
//
// A word is 32 bits: PER_WORD neighbours along the dimension that a product sums over.  dot() adds the products of two
// vectors of words to VW sums.  BLOCK_WORDS, a multiple of GROUP, is the most that is summed in one go: short for
// float32, where long sums lose digits; for the others as much of a panel as should lie in the second-level cache.
// PRECISE: whether chances are stored with more digits than the quick polynomial has.
struct F32 {
    typedef float elem;
    typedef vf sum;
    static constexpr int PER_WORD = 1, BLOCK_WORDS = 128, GROUP = 1;
    static constexpr bool PRECISE = true;
    static SAPWOOD_INLINE vf dot(vf sum, vu a, vu b) { return fma((vf)a, (vf)b, sum); }
    static SAPWOOD_INLINE void put(elem *to, vf x) { store(to, x); }
    static SAPWOOD_INLINE float get(elem x) { return x; }
    static SAPWOOD_INLINE vf take(const elem *from) { return load<vf>(from); }
};

struct BF16 {
    typedef uint16_t elem;
    typedef vf sum;
    static constexpr int PER_WORD = 2, BLOCK_WORDS = 512, GROUP = 1;
    static constexpr bool PRECISE = false;
    static SAPWOOD_INLINE vf dot(vf sum, vu a, vu b) {
#if defined(__AVX512BF16__)
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
        sum = fma((vf)(a << 16), (vf)(b << 16), sum);
        return fma((vf)(a & 0xffff0000u), (vf)(b & 0xffff0000u), sum);
#endif
    }
    static SAPWOOD_INLINE void put(elem *to, vf x) { store(to, to_bf16(x)); }
    static SAPWOOD_INLINE float get(elem x) { return from_bf16(x); }
    static SAPWOOD_INLINE vf take(const elem *from) { return (vf)(__builtin_convertvector(load<vh>(from), vu) << 16); }
};

// Weights in 8 bits: `b` holds four weights as bytes with OFFSET added, `a` four activations as signed bytes.  Sums are
// whole numbers, so they are exact; after each GROUP words they are scaled and added to float32.
struct I8 {
    typedef int8_t elem;
    typedef vi sum;
    static constexpr int PER_WORD = 4, BLOCK_WORDS = 512, GROUP = 32, OFFSET = 128, MOST = 127;
    static SAPWOOD_INLINE vi dot(vi sum, vu b, vu a) {
#if defined(__AVX512VNNI__)
        return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)b, (__m512i)a);
#elif defined(__AVX512BW__)
        const __m512i even = _mm512_madd_epi16(_mm512_and_si512((__m512i)b, _mm512_set1_epi16(0xff)),
                                               _mm512_srai_epi16(_mm512_slli_epi16((__m512i)a, 8), 8));
        const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)b, 8), _mm512_srai_epi16((__m512i)a, 8));
        return sum + (vi)even + (vi)odd;
#elif defined(__AVX2__)
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256((__m256i)b, _mm256_set1_epi16(0xff)),
                                               _mm256_srai_epi16(_mm256_slli_epi16((__m256i)a, 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)b, 8), _mm256_srai_epi16((__m256i)a, 8));
        return sum + (vi)even + (vi)odd;
#elif defined(__SSE2__)
        const __m128i even = _mm_madd_epi16(_mm_and_si128((__m128i)b, _mm_set1_epi16(0xff)),
                                            _mm_srai_epi16(_mm_slli_epi16((__m128i)a, 8), 8));
        const __m128i odd = _mm_madd_epi16(_mm_srli_epi16((__m128i)b, 8), _mm_srai_epi16((__m128i)a, 8));
        return sum + (vi)even + (vi)odd;
#else
        for (int byte = 0; byte < 4; ++byte)
            sum += (vi)((b >> (8 * byte)) & 0xffu) * ((vi)(a << (24 - 8 * byte)) >> 24);
        return sum;
#endif
    }
};

// Weights in 4 bits, in spans of SPAN along the summed dimension that have a scale and a minimum of their own: a weight
// is minimum + scale * q, 0 <= q <= MOST.  Activations are those of I8.
struct I4 {
    typedef vi sum;
    static constexpr int PER_WORD = 4, BLOCK_WORDS = 512, GROUP = I8::GROUP, SPAN = 32, MOST = 15;
    static constexpr int SPAN_WORDS = SPAN / PER_WORD;
    // Bytes of at most MOST times signed bytes: two such products fit in 16 bits.
    static SAPWOOD_INLINE vi dot(vi sum, vu b, vu a) {
#if defined(__AVX512VNNI__)
        return I8::dot(sum, b, a);
#elif defined(__AVX512BW__)
        const __m512i pairs = _mm512_maddubs_epi16((__m512i)b, (__m512i)a);
        return sum + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)b, (__m256i)a);
        return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
        return I8::dot(sum, b, a);
#endif
    }
};

// A group of quantized activations: what its sums are to be multiplied with, what the offset of I8 adds to them, and
// the sums of the activations themselves, scaled, over each stretch of I4::SPAN.
struct GroupScale {
    float scale;
    int32_t excess;
    float sums[4];
};

// A row of n elements (a multiple of VW) to bytes for I8 and I4, each group with a scale of its own; the scale is not a
// number where an element is not finite, so that this is not lost.
template <class T>
void quantize_row(const typename T::elem *from, int n, int8_t *to, GroupScale *groups) {
    const vf magic = splat(12582912.0f);  // as in exp2v()
    for (int begin = 0; begin < n; begin += I8::GROUP * I8::PER_WORD, ++groups) {
        const int end = begin + I8::GROUP * I8::PER_WORD < n ? begin + I8::GROUP * I8::PER_WORD : n;
        vf most{}, poison{};
        for (int i = begin; i < end; i += VW) {
            const vf x = T::take(from + i);
            most = max(x, max(-x, most));
            poison = fma(x, vf{}, poison);
        }
        const float greatest = max_lanes(most);
        const vf scale = splat(greatest > 0.0f ? float(I8::MOST) / greatest : 0.0f);
        groups->scale = greatest / float(I8::MOST) + sum_lanes(poison);
        uint32_t total = 0;
        for (int span = 0, i = begin; span < I8::GROUP * I8::PER_WORD / I4::SPAN; ++span) {
            vu sum{};
            for (const int stop = std::min(end, begin + (span + 1) * I4::SPAN); i < stop; i += VW) {
                const vu near = (vu)fma(T::take(from + i), scale, magic) - (vu)magic;
                store(to + i, __builtin_convertvector(near, vb));
                sum += near;
            }
            uint32_t here = 0;
            for (int lane = 0; lane < VW; ++lane) here += sum[lane];
            groups->sums[span] = float(int32_t(here)) * groups->scale;
            total += here;
        }
        groups->excess = int32_t(total * uint32_t(I8::OFFSET));
    }
}

// n numbers (a multiple of VW) to signed bytes of one scale, which is returned; not a number where one is not finite.
inline float quantize_whole(const float *from, int n, int8_t *to) {
    const vf magic = splat(12582912.0f);  // as in exp2v()
    vf most{}, poison{};
    for (int i = 0; i < n; i += VW) {
        const vf x = load<vf>(from + i);
        most = max(x, max(-x, most));
        poison = fma(x, vf{}, poison);
    }
    const float greatest = max_lanes(most);
    const vf scale = splat(greatest > 0.0f ? float(I8::MOST) / greatest : 0.0f);
    for (int i = 0; i < n; i += VW)
        store(to + i, __builtin_convertvector((vu)fma(load<vf>(from + i), scale, magic) - (vu)magic, vb));
    return greatest / float(I8::MOST) + sum_lanes(poison);
}

// sum[r][c] += the words a[r][0..steps) times the columns at p0 and p1, one word row after another: the order of
// additions into a sum is that of the words, whatever ROWS is.
template <class T, int ROWS>
SAPWOOD_INLINE void accumulate(typename T::sum (&sum)[ROWS][2], const uint32_t *a, ptrdiff_t lda, const uint32_t *p0,
                               const uint32_t *p1, ptrdiff_t stride, int steps) {
    // Two at a time: short chains of sums are slow otherwise.
#pragma GCC unroll 2
    for (int k = 0; k < steps; ++k) {
        const vu b0 = load<vu>(p0), b1 = load<vu>(p1);
        p0 += stride;
        p1 += stride;
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const vu x = splat_word(a[r * lda + k]);
            sum[r][0] = T::dot(sum[r][0], b0, x);
            sum[r][1] = T::dot(sum[r][1], b1, x);
        }
    }
}

}  // namespace sapwood
