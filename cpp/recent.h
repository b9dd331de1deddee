// This file defines a small cache for what a call works out on the host from a few numbers, such as its tensors'
// shapes.
#pragma once

#include <array>
#include <cstddef>
#include <utility>

namespace flashtile {

/// This remembers the values of the last kCount new keys. It has no lock: declare it thread_local.
template <class Key, class Value, std::size_t kCount = 16>
class Recent {
 public:
  /// Returns the value of `key`, which `make()` makes if it is not known.
  template <class Make>
  const Value& get(const Key& key, Make&& make) {
    for (std::size_t i = 0; i < size_; ++i)
      if (known_[i].first == key) return known_[i].second;
    Value value = make();  // if this throws, nothing has changed
    auto& place = known_[next_];
    place = {key, std::move(value)};
    next_ = (next_ + 1) % kCount;
    if (size_ < kCount) ++size_;
    return place.second;
  }

 private:
  std::array<std::pair<Key, Value>, kCount> known_{};
  std::size_t size_ = 0;
  std::size_t next_ = 0;
};

}  // namespace flashtile
