// Element types, and vectors of them as loads and stores see them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device.h"
#include "rows.h"

namespace bnexport::cuda {

// Storage is the element's bits; Compute is the type of the arithmetic.
struct Float32 {
  using Storage = uint32_t;
  using Compute = float;
  static BNEXPORT_DEVICE float widen(uint32_t bits) { return bits_to_float(bits); }
  static BNEXPORT_DEVICE uint32_t narrow(float value) { return float_to_bits(value); }
};
struct Float64 {
  using Storage = uint64_t;
  using Compute = double;
  static BNEXPORT_DEVICE double widen(uint64_t bits) { return bits_to_double(bits); }
  static BNEXPORT_DEVICE uint64_t narrow(double value) { return double_to_bits(value); }
};
struct Float16 {
  using Storage = uint16_t;
  using Compute = float;
  static BNEXPORT_DEVICE float widen(uint16_t bits) { return half_to_float(bits); }
  static BNEXPORT_DEVICE uint32_t narrow_pair(float low, float high) { return floats_to_halves(low, high); }
};
struct Bfloat16 {
  using Storage = uint16_t;
  using Compute = float;
  static BNEXPORT_DEVICE float widen(uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }
  static BNEXPORT_DEVICE uint32_t narrow_pair(float low, float high) { return floats_to_bfloats(low, high); }
};

// V elements of type T in a Raw: 8 or 16 bytes, or a single element where addresses are not aligned. `whole`:
// rows consist of whole vectors, so that a vector is loaded in full or not at all.
template <class T, int V, bool whole = true>
struct Vector {
  using Storage = typename T::Storage;
  using Compute = typename T::Compute;
  static constexpr int kWidth = V;
  static constexpr int kSize = sizeof(Storage);
  static constexpr bool kWhole = whole;
  static constexpr int kWords = V * kSize / 4;
  using Raw = std::conditional_t<V == 1, Storage, Words<kWords>>;

  // k is a constant once loops are unrolled.
  static BNEXPORT_DEVICE Storage bits(const Raw& raw, int k) {
    if constexpr (V == 1) {
      return raw;
    } else if constexpr (kSize == 4) {
      return raw.word[k];
    } else {
      return static_cast<uint16_t>(raw.word[k / 2] >> (16 * (k % 2)));
    }
  }
  static BNEXPORT_DEVICE Compute get(const Raw& raw, int k) { return T::widen(bits(raw, k)); }

  static BNEXPORT_DEVICE Compute load_one(const Storage* from) { return T::widen(load_element<Reuse::kSoon>(from)); }

  static BNEXPORT_DEVICE Raw pack(const Compute (&values)[V]) {
    if constexpr (kSize == 2 && V == 1) {
      return static_cast<uint16_t>(T::narrow_pair(values[0], 0.0f));
    } else if constexpr (V == 1) {
      return T::narrow(values[0]);
    } else {
      Raw words;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if constexpr (kSize == 4) {
          words.word[i] = T::narrow(values[i]);
        } else {
          words.word[i] = T::narrow_pair(values[2 * i], values[2 * i + 1]);
        }
      }
      return words;
    }
  }

  static BNEXPORT_DEVICE bool has(const Span& span, int k) {
    return whole ? span.end > 0 : k >= span.begin && k < span.end;
  }

  // The elements of `span` at `from`; the others are 0 and their memory is not touched.
  template <Reuse reuse>
  static BNEXPORT_DEVICE Raw load(const Storage* from, const Span& span) {
    Raw raw{};
    if (span.count() == 0) return raw;
    if constexpr (V == 1) {
      raw = load_element<reuse>(from);
    } else if (whole || span.count() == V) {
      raw = load_words<reuse, kWords>(from);
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        if (!has(span, k)) continue;
        const uint32_t element = load_element<reuse>(from + k);
        raw.word[k * kSize / 4] |= element << (8 * (k * kSize % 4));
      }
    }
    return raw;
  }
  static BNEXPORT_DEVICE void store(Storage* to, const Raw& raw, const Span& span) {
    if (span.count() == 0) return;
    if constexpr (V == 1) {
      store_element(to, raw);
    } else if (whole || span.count() == V) {
      store_words(to, raw);
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        if (has(span, k)) store_element(to + k, bits(raw, k));
      }
    }
  }
};

}  // namespace bnexport::cuda
