// Bits as numbers, and the types of 16 bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace bnexport {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline float half_to_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float value = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                      : exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                       : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return (bits & 0x8000) != 0 ? -value : value;
}

inline uint16_t float_to_half(float value) {
  const auto sign = static_cast<uint16_t>(bits_as<uint32_t>(value) >> 16 & 0x8000);
  if (std::isnan(value)) return sign | 0x7e00;
  const float size = std::fabs(value);
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size == 0) return sign;
  int exponent;
  std::frexp(size, &exponent);
  // A unit of the last place, 2^-24 at the least; nearbyint rounds to nearest even.
  const int unit = exponent - 11 < -24 ? -24 : exponent - 11;
  const auto fraction = static_cast<uint16_t>(std::nearbyint(std::ldexp(size, -unit)));
  return static_cast<uint16_t>(sign | (fraction + static_cast<uint16_t>((unit + 24) << 10)));
}

inline float bfloat_to_float(uint16_t bits) { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }
inline uint16_t float_to_bfloat(float value) {
  const auto bits = bits_as<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace bnexport
