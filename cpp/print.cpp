// This file turns values into text for people.
#include <cstdio>
#include <string>
#include <utility>

#include "flashtile/kvcache.h"
#include "flashtile/plan.h"
#include "options.h"

namespace flashtile {
namespace {

template <class... Args>
std::string format(const char* pattern, Args... args) {
  std::string text(static_cast<std::size_t>(std::snprintf(nullptr, 0, pattern, args...)), '\0');
  std::snprintf(text.data(), text.size() + 1, pattern, args...);
  return text;
}

/// Returns the number in `unit`, or from `step` on in `larger`, preceded by a prefix.
std::string scaled(double value, double step, const char* unit, const char* larger) {
  const char* prefix = " KMGTPE";
  while (value >= step && prefix[1] != '\0') value /= step, ++prefix;
  return *prefix == ' ' ? format("%.0f %s", value, unit) : format("%.4g %c%s", value, *prefix, larger);
}

/// Returns "1.5 TFLOP" for 1.5e12.
std::string flops_string(double flops) {
  return scaled(flops, 1000, "FLOP", "FLOP");
}

/// Returns "1.5 KiB" for 1536.
std::string bytes_string(double bytes) {
  return scaled(bytes, 1024, "bytes", "iB");
}

std::string line(const char* label, const std::string& text) {
  return format("  %-10s", label) + text + "\n";
}

/// Returns what a name says of the features that only some rows have, as a word of the tables. It says nothing of a
/// CPU's rows, which all have every one.
std::string features_suffix(const Variant& v) {
  constexpr std::pair<Features, const char*> kWords[] = {{Features::kDropout, "_dropout"},
                                                         {Features::kSinks, "_sinks"},
                                                         {Features::kOrderedDq, "_ordered"},
                                                         {Features::kSoftcap, "_softcap"},
                                                         {Features::kMaxLogits, "_max_logits"}};
  std::string suffix;
  for (const auto& [feature, word] : kWords)
    if (v.arch != Arch::kCpu && v.knows(feature)) suffix += word;
  return suffix;
}

/// Says whether arithmetic or memory bounds a well-made kernel.
std::string bound_string(const Cost& cost, bool on_cpu) {
  // A processor can do this many FLOPs in the time of one byte from memory: about 200 on an A100, 300 on an H100, and
  // in the tens on CPUs.
  const double ridge = on_cpu ? 20 : 250;
  if (cost.bytes == 0) return "nothing to do";
  const double intensity = cost.flops / cost.bytes;
  return format("%s, at %.1f FLOP per byte", intensity < ridge ? "memory" : "arithmetic", intensity);
}

/// `further` holds the lines that only this pass has.
std::string plan_string(const char* pass, const Plan& plan, const Cost& cost, bool built,
                        const std::string& further = "") {
  const Problem& p = plan.problem;
  const Variant& v = plan.variant;
  const bool on_cpu = v.arch == Arch::kCpu;
  std::string text = std::string("flashtile ") + pass + " plan\n";
  text += line("problem", to_string(p));
  text += line("kernel", name_of(v) + (built ? "" : " (not in this build)"));
  text += line("why", plan.why);
  std::string tile =
      format("%d rows × %d keys, D up to %d, D_v up to %d", v.tile_m, v.tile_n, v.head_dim, v.head_dim_v);
  if (plan.packed_heads > 1) tile += format("; a row is one of %d heads of a query", plan.packed_heads);
  text += line("tile", tile);
  text += further;
  text += line("grid", on_cpu ? format("%lld tiles, threads: %d", static_cast<long long>(plan.tiles), plan.grid)
                              : format("%d thread blocks of %d threads", plan.grid, plan.threads()));
  if (!on_cpu) text += line("shared", bytes_string(plan.shared_memory) + format(" per block, stages: %d", v.stages));
  text += line("workspace", bytes_string(static_cast<double>(plan.workspace_bytes)));
  text += line("work", flops_string(cost.flops));
  text += line("traffic", bytes_string(cost.bytes) + " at the least");
  text += line("bound", bound_string(cost, on_cpu));
  return text;
}

std::string cache_string(const KvcacheProblem& cache) {
  std::string text = cache.has_table ? format("for each sequence a table names %d of %d pages of %d rows",
                                              cache.of_sequence, cache.pages, cache.page_size)
                                     : format("contiguous, %d rows for each sequence", cache.page_size);
  if (cache.appends) text += format(", %d new ones %s", cache.seqlen_new, cache.problem.ragged ? "in all" : "each");
  if (cache.rotary_dim > 0) text += format(", %d elements rotated", cache.rotary_dim);
  if (cache.problem.column_masked())
    text += format(", the last %d keys of each have the column mask", cache.masked_keys);
  return text;
}

std::string splits_string(const KvcachePlan& plan) {
  const char* order = plan.splits_apart ? "at the same time" : "one after the other";
  if (plan.num_splits == 1) return "one: a thread block goes through all keys of a tile";
  if (plan.num_splits > 0) return format("%d of a tile's keys, %s", plan.num_splits, order);
  if (plan.keys_of_split > 0) return format("of %d keys each, %s", plan.keys_of_split, order);
  return format("even: the keys of all tiles of a KV head go to %d thread blocks, whatever the lengths", plan.teams);
}

std::string forward_splits(const ForwardPlan& plan) {
  return plan.splits == 1 ? "" : line("splits", format("%d of a tile's keys, joined by a second kernel", plan.splits));
}

}  // namespace

std::string shape_string(const std::int64_t* shape, int rank) {
  std::string text = "(";
  for (int i = 0; i < rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + (rank == 1 ? ",)" : ")");
}

std::string name_of(Device device) {
  switch (device.type) {
    case DeviceType::kCpu: return "cpu";
    case DeviceType::kCuda: return "cuda:" + std::to_string(device.index);
    case DeviceType::kOther: break;
  }
  return "another kind of device";
}

std::string name_of(const Variant& v) {
  const char* dtype = v.dtype == DType::kE4M3      ? "e4m3"
                      : v.dtype == DType::kE5M2    ? "e5m2"
                      : v.dtype == DType::kFloat32 ? "f32"
                      : v.dtype == DType::kFloat16 ? "f16"
                                                   : "bf16";
  return format("%s_%s_d%d_v%d_m%d_n%d_s%d_w%d", name_of(v.arch), dtype, v.head_dim, v.head_dim_v, v.tile_m, v.tile_n,
                v.stages, v.warps) +
         features_suffix(v);
}

std::string to_string(const Problem& p) {
  const char* lengths = p.ragged ? "B=%d ragged T_q=%d T_k=%d" : "B=%d S_q=%d S_k=%d";
  return format(lengths, p.batch, p.seqlen_q, p.seqlen_k) +
         format(" H_q=%d H_k=%d D=%d D_v=%d %s on ", p.heads_q, p.heads_k, p.head_dim, p.head_dim_v, name_of(p.dtype)) +
         name_of(p.device) + ", " + options_string(p);
}

std::string to_string(const ForwardPlan& plan) {
  return plan_string("forward", plan, forward_cost(plan.problem), plan.run != nullptr, forward_splits(plan));
}

std::string to_string(const BackwardPlan& plan) {
  std::string further;
  if (plan.parts > 1)
    further = line("parts", format("%d thread blocks share the queries of a block of keys", plan.parts));
  return plan_string("backward", plan, backward_cost(plan.problem), plan.run != nullptr, further);
}

std::string to_string(const KvcachePlan& plan) {
  std::string further = line("cache", cache_string(plan.cache));
  if (plan.prefill)
    further += forward_splits(*plan.prefill);
  else if (plan.variant.arch != Arch::kCpu)
    further += line("splits", splits_string(plan));
  if (plan.few)
    further += line("few", format("sequences of up to %d queries go through ", plan.few->most_queries) +
                               name_of(plan.few->variant) + " afterwards");
  return plan_string("kvcache", plan, kvcache_cost(plan.cache), plan.run != nullptr, further);
}

}  // namespace flashtile
