// This file says of each option which values are legal, what they set in a problem, and how that is printed.
#include "options.h"

#include <algorithm>
#include <cmath>

#include "flashtile/error.h"
#include "message.h"

namespace flashtile {
namespace {

/// In this band no row sees a key, whatever the lengths.
constexpr Band kNothing{Band::kUnbounded, -Band::kUnbounded};

/// Returns the distance, or the nearest one that Band can add to a diagonal: those beyond ±kUnbounded mean the same.
int window_distance(const std::optional<std::int64_t>& distance) {
  constexpr std::int64_t kMost = Band::kUnbounded;
  return static_cast<int>(std::clamp(distance.value_or(kMost), -kMost, kMost));
}

/// Returns the band of the same elements that kernels can walk: kNothing in the place of one that ends before it
/// begins, or lies beyond all lengths. A walk takes the keys of a tile to go from where its first row's begin to where
/// its last row's end, as is so if bands of neighbouring rows touch. Of others, a tile of queries might visit a block
/// of keys that does not visit it, and sums of dQ in order would wait for ever.
Band walkable(Band band) {
  const bool empty = band.left < -band.right || band.left == -Band::kUnbounded || band.right == -Band::kUnbounded;
  return empty ? kNothing : band;
}

float finite(const char* function, const char* name, double value) {
  const auto narrowed = static_cast<float>(value);
  if (!std::isfinite(narrowed))
    refuse<InvalidArgument>(function, name, "is " + number_string(value), "a finite float32 number");
  return narrowed;
}

/// Where a call lies is told by flashtile itself, not by users, so one message serves for all that may be wrong.
void check_place(const char* function, const Options& options, Problem& problem) {
  const Place& first = options.first;
  if (first.batch < 0 || first.head < 0 || first.row < 0 || first.column < 0 || std::abs(options.ahead) > (1 << 30))
    refuse<InvalidArgument>(function, "place", "has a negative number", "places in a larger call");
  if (options.dropout_p > 0 && (first.row % 16 != 0 || first.column % 16 != 0))
    refuse<InvalidArgument>(function, "place",
                            "is row " + std::to_string(first.row) + ", column " + std::to_string(first.column),
                            "multiples of 16, as there is dropout");
  problem.ahead = options.ahead;
}

std::string mask_string(const Band& band) {
  const auto side = [](int distance) {
    return distance == Band::kUnbounded ? std::string("None") : std::to_string(distance);
  };
  if (band == Band::full()) return "full";
  if (band == Band::causal()) return "causal";
  if (band == kNothing) return "window that shows nothing";
  return "window (" + side(band.left) + ", " + side(band.right) + ")";
}

}  // namespace

void check_options(const char* function, const Options& options, Problem& problem) {
  const Band window{window_distance(options.window_left), window_distance(options.window_right)};
  problem.band = walkable(options.causal ? window.intersect(Band::causal()) : window);
  problem.scale = options.scale ? finite(function, "scale", *options.scale)
                                : 1.0f / std::sqrt(static_cast<float>(problem.head_dim));
  problem.softcap = finite(function, "softcap", options.softcap);
  if (problem.softcap < 0)
    refuse<InvalidArgument>(function, "softcap", "is " + number_string(options.softcap), "a number of at least 0");
  if (!(options.dropout_p >= 0 && options.dropout_p < 1))
    refuse<InvalidArgument>(function, "dropout_p", "is " + number_string(options.dropout_p),
                            "a probability of at least 0 and below 1");
  check_place(function, options, problem);
  problem.dropout = Dropout::of(options.dropout_p, options.seed, options.first);
  problem.deterministic = options.deterministic.value_or(false);
}

std::string options_string(const Problem& p) {
  std::string text = mask_string(p.band);
  if (p.column_masked())
    text += ", column mask (" + std::to_string(p.masked_entries) + ", " + std::to_string(p.masks_of_entry) + ")";
  text += ", scale " + number_string(p.scale);
  if (p.softcap > 0) text += ", softcap " + number_string(p.softcap);
  if (p.alibi) text += p.ahead == 0 ? ", ALiBi" : ", ALiBi " + std::to_string(p.ahead) + " ahead";
  if (p.sinks) text += ", sinks";
  if (p.dropout.active()) text += ", dropout " + number_string(1 - 1 / p.dropout.scale);
  if (p.deterministic) text += ", deterministic";
  return text;
}

}  // namespace flashtile
