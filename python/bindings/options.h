// This file takes the options of a call from the tuple that Python hands over.
#pragma once

#include <optional>
#include <string>

#include "bindings.h"
#include "flashtile/kvcache.h"

namespace flashtile::bindings {

struct Count {
  std::size_t value = 0;
  constexpr void operator()(const auto&...) { ++value; }
};

/// Returns how many elements of the tuple are fields of `AnyOptions`.
template <class AnyOptions>
constexpr std::size_t count_of() {
  Count count;
  AnyOptions().each(count);
  return count.value;
}

/// These are the options of attention: those of the core, and one that says which of its functions are called.
struct AttentionOptions {
  Options core;
  std::optional<bool> batch_invariant;  // unset: false

  /// Does what Options::each does.
  template <class Visit>
  constexpr void each(Visit&& visit) {
    core.each(visit);
    visit("batch_invariant", batch_invariant);
  }
};

/// These are the options' indices in the tuple. It begins with three tensors. The fields of AttentionOptions or
/// KvcacheOptions follow, and behind them, for attention, a tuple of tables, or None for a dense batch, and one of what
/// only e4m3 numbers have, or None; for a cache, whether lse is wanted; and for both a tensor for the largest logits,
/// which was filled with −inf, or None. A tuple that says where the call lies in a larger one may be last.
inline constexpr std::size_t kAlibiSlopes = 0, kSinks = 1, kMask = 2, kFirstValue = 3;
inline constexpr std::size_t kSequences = kFirstValue + count_of<AttentionOptions>(), kFp8 = kSequences + 1;
inline constexpr std::size_t kMaxLogits = kFp8 + 1;
inline constexpr std::size_t kOptionCount = kMaxLogits + 1, kPlace = kOptionCount;  // the last may be left out
inline constexpr std::size_t kReturnLse = kFirstValue + count_of<KvcacheOptions>();
inline constexpr std::size_t kMaxLogitsOfCache = kReturnLse + 1, kCacheOptionCount = kMaxLogitsOfCache + 1;

inline nb::handle option_of(const nb::tuple& options, std::size_t place) {
  return PyTuple_GetItem(options.ptr(), static_cast<Py_ssize_t>(place));
}

/// Returns what messages say of any Python object, in a few words: as it is written, or the type and shape of an array.
std::string described(nb::handle object);

/// These convert the options that are no tensors. They throw InvalidType, which names the option that has the wrong
/// type.
AttentionOptions to_options(const char* function, const nb::tuple& options);
KvcacheOptions to_cache_options(const char* function, const nb::tuple& options);
bool returns_lse(const char* function, const nb::tuple& cache_options);
/// Reads the tuple of ints (batch, head, row, column, ahead) that says where a call lies, if it is there.
void to_place(const char* function, const nb::tuple& options, Options& read);
/// Returns kOther for None.
DType to_out_dtype(const char* function, nb::handle object);

}  // namespace flashtile::bindings
