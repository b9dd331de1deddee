// This file applies the rotary embedding to one row.
#pragma once

#include "kernels.h"
#include "pack.h"

namespace flashtile::cpu {
namespace {

template <class T>
void rotate(void* target, const void* source, const Rotation& by) {
  static_assert(kMostPairs % kLanes == 0);
  float x[kMostPairs] = {}, y[kMostPairs] = {}, cos[kMostPairs] = {}, sin[kMostPairs] = {};
  const T* const from = static_cast<const T*>(source);
  T* const to = static_cast<T*>(target);
  const int step = by.interleaved ? 2 : 1, other = by.interleaved ? 1 : by.pairs;
  for (int i = 0; i < by.pairs; ++i) {
    x[i] = widen(from[i * step]);
    y[i] = widen(from[i * step + other]);
    cos[i] = widen(static_cast<const T*>(by.cos)[i]);
    sin[i] = widen(static_cast<const T*>(by.sin)[i]);
  }
  for (int i = 0; i < by.pairs; i += kLanes) {
    const Vec a = load(x + i), b = load(y + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(y + i, a * s + b * c);
  }
  for (int i = 0; i < by.pairs; ++i) {
    round_to(to[i * step], x[i]);
    round_to(to[i * step + other], y[i]);
  }
}

}  // namespace
}  // namespace flashtile::cpu
