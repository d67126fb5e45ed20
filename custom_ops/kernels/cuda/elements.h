// Element types, and vectors of them as loads and stores see them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device.h"

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

// V elements of type T in a Raw: 16 bytes, or a single element where addresses are not aligned. `whole`:
// rows consist of whole vectors, so that a vector is loaded in full or not at all.
template <class T, int V, bool whole = true>
struct Vector {
  using Storage = typename T::Storage;
  using Compute = typename T::Compute;
  static constexpr int kWidth = V;
  static constexpr int kSize = sizeof(Storage);
  static constexpr bool kWhole = whole;
  static constexpr uint32_t kAll = (1u << V) - 1;  // the mask of a whole vector
  static_assert(V == 1 || V * kSize == 16, "one element or 16 bytes");
  using Raw = std::conditional_t<V == 1, Storage, Words>;

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
      Words words;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kSize == 4) {
          words.word[i] = T::narrow(values[i]);
        } else {
          words.word[i] = T::narrow_pair(values[2 * i], values[2 * i + 1]);
        }
      }
      return words;
    }
  }

  // The elements of `mask` at `from`; the others are 0 and their memory is not touched.
  template <Reuse reuse>
  static BNEXPORT_DEVICE Raw load(const Storage* from, uint32_t mask) {
    Raw raw{};
    if (mask == 0) return raw;
    if constexpr (V == 1) {
      raw = load_element<reuse>(from);
    } else if (whole || mask == kAll) {
      raw = load_words<reuse>(from);
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        if ((mask >> k & 1) == 0) continue;
        const uint32_t element = load_element<reuse>(from + k);
        raw.word[k * kSize / 4] |= element << (8 * (k * kSize % 4));
      }
    }
    return raw;
  }
  static BNEXPORT_DEVICE void store(Storage* to, const Raw& raw, uint32_t mask) {
    if (mask == 0) return;
    if constexpr (V == 1) {
      store_element(to, raw);
    } else if (whole || mask == kAll) {
      store_words(to, raw);
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        if ((mask >> k & 1) != 0) store_element(to + k, bits(raw, k));
      }
    }
  }
};

}  // namespace bnexport::cuda
