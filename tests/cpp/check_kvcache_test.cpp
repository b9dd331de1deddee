// These tests break each rule of a call on a cache, one at a time; those of every attention are in check_test.cpp.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "flashtile/flashtile.h"
#include "views.h"

namespace flashtile {
namespace {

alignas(16) char memory[1 << 20];                        // never read: check looks at addresses only
constexpr int kKCacheAt = 1 << 18, kVCacheAt = 1 << 19;  // in bytes; the other tensors lie before both caches
constexpr Device kGpu{DeviceType::kCuda, 0};

TensorView tensor(std::initializer_list<std::int64_t> shape, DType dtype = DType::kFloat16, void* data = memory) {
  return contiguous(data, dtype, shape);
}

/// This call has B = 2, S_q = S_new = 3, H_q = 8, H_k = 4, D = 64, D_v = 32, R = 32, and room for 12 rows.
struct Call {
  std::vector<int> lengths{9, 0}, pads{4, 0}, pages{6, 0, 5, 1, 2, 3}, entries{4, 1}, begins{0, 3, 5};
  KvcacheTensors tensors;
  KvcacheOptions options{.attention = {.causal = true}};

  Call() {
    KvcacheTensors& t = tensors;
    t.q = tensor({2, 3, 8, 64});
    t.k_cache = tensor({7, 4, 4, 64}, DType::kFloat16, memory + kKCacheAt);
    t.v_cache = tensor({7, 4, 4, 32}, DType::kFloat16, memory + kVCacheAt);
    t.out = tensor({2, 3, 8, 32});
    t.lse = tensor({2, 8, 3}, DType::kFloat32);
    t.k_new = tensor({2, 3, 4, 64});
    t.v_new = tensor({2, 3, 4, 32});
    t.rotary_cos = t.rotary_sin = tensor({20, 16});
    t.cache_seqlens = tensor({2}, DType::kInt32, lengths.data());
    t.leftpad = tensor({2}, DType::kInt32, pads.data());
    t.block_table = tensor({2, 3}, DType::kInt32, pages.data());
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void make_contiguous() {
    tensors.k_cache = tensor({7, 12, 4, 64}, DType::kFloat16, memory + kKCacheAt);
    tensors.v_cache = tensor({7, 12, 4, 32}, DType::kFloat16, memory + kVCacheAt);
    tensors.block_table = {};
  }
  void make_indexed() {
    make_contiguous();
    tensors.cache_batch_idx = tensor({2}, DType::kInt32, entries.data());
  }
  /// Makes the sequences 3 and 2 rows long, with two unused rows after them.
  void make_ragged() {
    for (TensorView* view : {&tensors.q, &tensors.out, &tensors.k_new, &tensors.v_new})
      *view = tensor({7, view->shape[2], view->shape[3]});
    tensors.lse = tensor({8, 7}, DType::kFloat32);
    tensors.cu_seqlens_q = tensor({3}, DType::kInt32, begins.data());
  }
  void move_to_gpu() {
    KvcacheTensors& t = tensors;
    for (TensorView* view :
         {&t.q, &t.k_cache, &t.v_cache, &t.cache_seqlens, &t.out, &t.lse, &t.k_new, &t.v_new, &t.rotary_cos,
          &t.rotary_sin, &t.block_table, &t.cache_batch_idx, &t.leftpad, &t.cu_seqlens_q})
      view->device = kGpu;
  }
};

std::string check(const std::function<void(Call&)>& change, KvcacheProblem* problem = nullptr) {
  Call call;
  change(call);
  try {
    const KvcacheProblem found = check_kvcache("attention_kvcache", call.tensors, call.options);
    if (problem != nullptr) *problem = found;
  } catch (const InvalidType& error) {
    return std::string("InvalidType: ") + error.what();
  } catch (const InvalidArgument& error) {
    return error.what();
  } catch (const Unreadable& error) {
    return std::string("Unreadable: ") + error.what();
  }
  return "accepted";
}

TEST(CheckKvcache, ALegalCallBecomesItsProblem) {
  KvcacheProblem p;
  ASSERT_EQ(check([](Call& c) { c.options.num_splits = 5; }, &p), "accepted");
  const Problem expected{.batch = 2,
                         .seqlen_q = 3,
                         .seqlen_k = 12,
                         .heads_q = 8,
                         .heads_k = 4,
                         .head_dim = 64,
                         .head_dim_v = 32,
                         .dtype = DType::kFloat16,
                         .band = Band::causal(),
                         .scale = 0.125f,
                         .out_dtype = DType::kFloat16};
  EXPECT_EQ(p.problem, expected);
  EXPECT_EQ(p.pages, 7);
  EXPECT_EQ(p.page_size, 4);
  EXPECT_EQ(p.of_sequence, 3);
  EXPECT_TRUE(p.appends);
  EXPECT_EQ(p.seqlen_new, 3);
  EXPECT_EQ(p.rotary_dim, 32);
  EXPECT_EQ(p.rotary_rows, 20);
  EXPECT_TRUE(p.rotary_interleaved);
  EXPECT_EQ(p.num_splits, 5);
  EXPECT_FALSE(p.batch_invariant);
  EXPECT_EQ(p.queries(), 6);
}

TEST(CheckKvcache, KnowsWhereRowsStandInLine) {
  const auto found = [](const std::function<void(Call&)>& change) {
    KvcacheProblem p;
    EXPECT_EQ(check([&](Call& c) { c.make_contiguous(), c.tensors.leftpad = {}, change(c); }, &p), "accepted");
    return std::pair{p.in_line, p.has_table};
  };
  EXPECT_EQ(found([](Call&) {}), std::pair(true, false));
  EXPECT_EQ(found([](Call& c) { c.make_ragged(); }), std::pair(true, false));
  EXPECT_EQ(found([](Call& c) { c.make_indexed(); }), std::pair(true, true));
  KvcacheProblem paged;
  ASSERT_EQ(check([](Call& c) { c.tensors.leftpad = {}; }, &paged), "accepted");
  EXPECT_TRUE(paged.in_line && paged.has_table);
  EXPECT_FALSE(paged.has_leftpad);
  const auto pad = [](Call& c) { c.make_contiguous(), c.tensors.leftpad = tensor({2}, DType::kInt32, c.pads.data()); };
  ASSERT_EQ(check(pad, &paged), "accepted");
  EXPECT_TRUE(paged.in_line && paged.has_leftpad);
  for (TensorView KvcacheTensors::* view : {&KvcacheTensors::k_cache, &KvcacheTensors::v_cache})
    EXPECT_EQ(found([&](Call& c) { (c.tensors.*view).strides[0] += 64; }), std::pair(false, false));
  for (TensorView KvcacheTensors::* view : {&KvcacheTensors::q, &KvcacheTensors::out}) {
    KvcacheProblem apart;
    ASSERT_EQ(check([&](Call& c) { c.tensors.leftpad = {}, (c.tensors.*view).strides[0] += 64; }, &apart), "accepted");
    EXPECT_TRUE(apart.in_line && !apart.q_in_line);
  }
  for (TensorView KvcacheTensors::* view : {&KvcacheTensors::k_cache, &KvcacheTensors::v_cache}) {
    KvcacheProblem apart;
    const auto change = [&](Call& c) {
      c.make_contiguous(), c.tensors.leftpad = {};
      (c.tensors.*view).strides[0] += 2 * (c.tensors.*view).strides[1];
    };
    ASSERT_EQ(check(change, &apart), "accepted");
    EXPECT_TRUE(apart.in_line && apart.has_gaps);
  }
}

TEST(CheckKvcache, EntriesAreWholeRowsApart) {
  const auto rows = [](std::array<std::int64_t, 2> shape, std::array<std::int64_t, 2> strides) {
    TensorView view;
    view.rank = 4;
    view.shape = {shape[0], shape[1], 4, 64};
    view.strides = {strides[0], strides[1], 64, 1};
    return rows_to_next(view);
  };
  EXPECT_EQ(rows({5, 16}, {16 * 256, 256}), 16);
  EXPECT_EQ(rows({5, 16}, {19 * 256, 256}), 19) << "of longer entries";
  EXPECT_EQ(rows({5, 16}, {2 * 16 * 256, 256}), 32) << "beside others";
  EXPECT_EQ(rows({5, 16}, {16 * 256, 64}), 64) << "heads before rows";
  EXPECT_EQ(rows({5, 16}, {256, 5 * 256}), 0) << "rows before entries";
  EXPECT_EQ(rows({5, 16}, {16 * 256 + 64, 256}), 0);
  EXPECT_EQ(rows({5, 16}, {0, 256}), 0) << "one entry for all";
  EXPECT_EQ(rows({5, 16}, {256, 0}), 0) << "one row for all";
  EXPECT_EQ(rows({1, 16}, {7, 256}), 16) << "there is no next";
  EXPECT_EQ(rows({5, 1}, {300, 7}), 1);
  EXPECT_EQ(rows({5, 16}, {(std::int64_t{1} << 28) * 256, 256}), 0) << "too many for an int";
  EXPECT_EQ(rows({1 << 28, 16}, {16 * 256, 256}), 16) << "without gaps, which is refused elsewhere";
}

TEST(CheckKvcache, EveryKindOfCallIsLegal) {
  KvcacheProblem p;
  ASSERT_EQ(check([](Call& c) { c.make_contiguous(); }, &p), "accepted");
  EXPECT_EQ(p.pages, 7);
  EXPECT_EQ(p.page_size, 12);
  EXPECT_EQ(p.of_sequence, 1);
  ASSERT_EQ(check([](Call& c) { c.make_ragged(); }, &p), "accepted");
  EXPECT_TRUE(p.problem.ragged);
  EXPECT_EQ(p.problem.batch, 2);
  EXPECT_EQ(p.seqlen_new, 7);
  EXPECT_EQ(p.queries(), 7);
  EXPECT_EQ(check([](Call& c) { c.make_indexed(); }), "accepted");
  EXPECT_EQ(check([](Call& c) { c.make_indexed(), c.make_ragged(); }), "accepted");
  EXPECT_EQ(check([](Call& c) { c.tensors.k_new = c.tensors.v_new = c.tensors.leftpad = {}; }), "accepted");
  EXPECT_EQ(check([](Call& c) { c.tensors.rotary_cos = c.tensors.rotary_sin = {}; }), "accepted");
  EXPECT_EQ(check([](Call& c) { c.tensors.out = c.tensors.lse = {}; }), "accepted");
  EXPECT_EQ(check([](Call& c) { c.make_contiguous(), c.tensors.k_cache.strides = {64, 64 * 28, 64 * 7, 1}; }),
            "accepted");
  // The contents of tables on a GPU are not checked.
  EXPECT_EQ(check([](Call& c) { c.move_to_gpu(), c.lengths = {-1, 100}, c.pages[0] = 99, c.pads[0] = 12; }),
            "accepted");
}

TEST(CheckKvcache, MaxLogits) {
  EXPECT_EQ(check([](Call& c) { c.tensors.max_logits = tensor({2, 8}, DType::kFloat32); }), "accepted");
  EXPECT_EQ(check([](Call& c) { c.make_ragged(), c.tensors.max_logits = tensor({2, 8}, DType::kFloat32); }),
            "accepted");
  EXPECT_EQ(check([](Call& c) { c.tensors.max_logits = tensor({8, 2}, DType::kFloat32); }),
            "attention_kvcache: max_logits has shape (8, 2), expected (2, 8) = (B, H_q)");
}

TEST(CheckKvcache, ACacheWithoutPagesHasRoomForNothing) {
  KvcacheProblem p;
  ASSERT_EQ(check(
                [](Call& c) {
                  c.move_to_gpu();
                  c.tensors.k_cache.shape[0] = c.tensors.v_cache.shape[0] = 0;
                },
                &p),
            "accepted");
  EXPECT_EQ(p.problem.seqlen_k, 0);
}

TEST(CheckKvcache, Caches) {
  const std::string name = "attention_kvcache: ";
  EXPECT_EQ(check([](Call& c) { c.tensors.k_cache = {}; }),
            "InvalidType: " + name + "k_cache is missing, expected a tensor (pages, page_size, H_k, D)");
  EXPECT_EQ(check([](Call& c) { c.tensors.k_cache.shape[3] = 72; }),
            name + "k_cache has shape (7, 4, 4, 72), expected (7, 4, 4, 64) = (pages, page_size, H_k, D)");
  EXPECT_EQ(check([](Call& c) { c.make_contiguous(), c.tensors.v_cache.shape[1] = 11; }),
            name + "v_cache has shape (7, 11, 4, 32), expected (7, 12, 4, 32) = (B_cache, S_cache, H_k, D_v)");
  EXPECT_EQ(check([](Call& c) { c.tensors.v_cache.dtype = DType::kFloat32; }),
            "InvalidType: " + name + "v_cache has dtype float32, expected float16, as q");
  EXPECT_EQ(check([](Call& c) { c.tensors.q.shape[2] = 7; }),
            name + "q has H_q = 7 heads, expected a multiple of H_k = 4 of k_cache");
  EXPECT_EQ(check([](Call& c) { c.make_contiguous(), c.tensors.k_cache.shape[0] = c.tensors.v_cache.shape[0] = 1; }),
            name + "k_cache has shape (1, 12, 4, 64), expected B_cache of at least B = 2 without cache_batch_idx");
  EXPECT_EQ(check([](Call& c) { c.tensors.k_cache.shape[1] = c.tensors.v_cache.shape[1] = 0; }),
            name + "k_cache has shape (7, 0, 4, 64), expected pages of at least one row");
  EXPECT_EQ(
      check([](Call& c) { c.tensors.block_table.shape[1] = 1 << 28; }),
      name + "block_table has shape (2, 268435456), expected fewer than 2^30 rows in the pages of a sequence, of 4");
}

TEST(CheckKvcache, Tables) {
  const std::string name = "attention_kvcache: ";
  EXPECT_EQ(check([](Call& c) { c.tensors.cache_seqlens = {}; }),
            "InvalidType: " + name + "cache_seqlens is missing, expected a tensor (B)");
  EXPECT_EQ(check([](Call& c) { c.tensors.cache_seqlens.dtype = DType::kFloat32; }),
            "InvalidType: " + name + "cache_seqlens has dtype float32, expected int32");
  EXPECT_EQ(check([](Call& c) { c.tensors.leftpad.shape[0] = 3; }),
            name + "leftpad has shape (3,), expected (2,) = (B)");
  EXPECT_EQ(check([](Call& c) { c.tensors.block_table.device = kGpu; }),
            name + "block_table is on cuda:0, expected cpu, as q");
  EXPECT_EQ(check([](Call& c) { c.tensors.block_table.shape[0] = 1; }),
            name + "block_table has shape (1, 3), expected (2, 3) = (B, pages of a sequence)");
  EXPECT_EQ(check([](Call& c) { c.tensors.block_table.strides = {1, 2}; }),
            name + "block_table has stride 2 in its last dimension, expected 1");
  EXPECT_EQ(check([](Call& c) { c.tensors.cache_batch_idx = c.tensors.leftpad; }),
            name + "cache_batch_idx is given, expected none with a block_table");
}

TEST(CheckKvcache, NewRows) {
  const std::string name = "attention_kvcache: ";
  EXPECT_EQ(check([](Call& c) { c.tensors.v_new = {}; }),
            name + "v_new is missing, expected a tensor, as k_new is given");
  EXPECT_EQ(check([](Call& c) { c.tensors.k_new = {}; }),
            name + "k_new is missing, expected a tensor, as v_new is given");
  EXPECT_EQ(check([](Call& c) { c.tensors.v_new.shape[1] = 2; }),
            name + "v_new has shape (2, 2, 4, 32), expected (2, 3, 4, 32) = (B, S_new, H_k, D_v)");
  EXPECT_EQ(check([](Call& c) { c.make_ragged(), c.tensors.k_new.shape[0] = 6; }),
            name + "k_new has shape (6, 4, 64), expected (7, 4, 64) = (T_q, H_k, D)");
}

TEST(CheckKvcache, Rotary) {
  const std::string name = "attention_kvcache: ";
  EXPECT_EQ(check([](Call& c) { c.tensors.rotary_sin = {}; }),
            name + "rotary_sin is missing, expected a tensor, as rotary_cos is given");
  EXPECT_EQ(check([](Call& c) { c.tensors.rotary_cos = {}; }),
            name + "rotary_cos is missing, expected a tensor, as rotary_sin is given");
  EXPECT_EQ(check([](Call& c) { c.tensors.rotary_cos.shape[1] = 12; }),
            name + "rotary_cos has shape (20, 12), expected R to be a multiple of 16 from 16 to D = 64");
  EXPECT_EQ(check([](Call& c) { c.tensors.rotary_cos.shape[1] = 40; }),
            name + "rotary_cos has shape (20, 40), expected R to be a multiple of 16 from 16 to D = 64");
  EXPECT_EQ(check([](Call& c) { c.tensors.rotary_sin.shape[0] = 19; }),
            name + "rotary_sin has shape (19, 16), expected (20, 16) = (positions, R / 2)");
  EXPECT_EQ(check([](Call& c) { c.tensors.rotary_sin.dtype = DType::kFloat32; }),
            "InvalidType: " + name + "rotary_sin has dtype float32, expected float16, as q");
  EXPECT_EQ(check([](Call& c) { c.tensors.rotary_cos.shape[0] = c.tensors.rotary_sin.shape[0] = 11; }),
            name + "rotary_cos has shape (11, 16), expected at least 12 positions, as the sequence at index 0 has");
  EXPECT_EQ(
      check([](Call& c) {
        c.tensors.k_new = c.tensors.v_new = c.tensors.leftpad = {};
        c.options.attention.causal = false;
      }),
      name + "q has 3 rows for the sequence at index 1, expected at most 0, its keys, to rotate them without causal");
}

TEST(CheckKvcache, Masks) {
  const auto with_mask = [](const TensorView& mask, KvcacheProblem* problem = nullptr) {
    return check([&](Call& c) { c.tensors.mask = mask; }, problem);
  };
  for (const int entries : {1, 2}) {
    for (const int heads : {1, 4, 8}) {
      for (const int columns : {0, 1, 3, 12, 500}) {  // also more than there is room for
        KvcacheProblem p;
        ASSERT_EQ(with_mask(tensor({entries, heads, columns, 4}, DType::kInt32), &p), "accepted");
        EXPECT_EQ(p.masked_keys, columns);
        EXPECT_EQ(p.problem.masks_of_entry, heads);
        EXPECT_EQ(p.problem.masked_entries, entries);
      }
    }
  }
  const auto of_sequences = [](Call& c) { c.make_ragged(), c.tensors.mask = tensor({2, 1, 3, 4}, DType::kInt32); };
  EXPECT_EQ(check(of_sequences), "accepted");
  const std::string sizes = " = (1 or B, 1 or H_k or H_q, N, 4)";
  EXPECT_EQ(with_mask(tensor({1, 3, 4}, DType::kInt32)),
            "attention_kvcache: mask has shape (1, 3, 4), expected 4 dimensions" + sizes);
  EXPECT_EQ(with_mask(tensor({3, 1, 3, 4}, DType::kInt32)),
            "attention_kvcache: mask has shape (3, 1, 3, 4), expected 1 or B = 2 entries in (1 or B, 1 or H_k or H_q, "
            "N, 4)");
  EXPECT_EQ(with_mask(tensor({1, 2, 3, 4}, DType::kInt32)),
            "attention_kvcache: mask has shape (1, 2, 3, 4), expected 1, H_k = 4 or H_q = 8 heads in (1 or B, 1 or H_k "
            "or H_q, N, 4)");
  EXPECT_EQ(with_mask(tensor({1, 1, 3, 2}, DType::kInt32)),
            "attention_kvcache: mask has shape (1, 1, 3, 2), expected (..., 3, 4)" + sizes);
  EXPECT_EQ(with_mask(tensor({1, 1, 1 << 30, 4}, DType::kInt32)),
            "attention_kvcache: mask has shape (1, 1, 1073741824, 4), expected sizes (1 or B, 1 or H_k or H_q, N, 4) "
            "below 2^30");
  EXPECT_EQ(with_mask(tensor({1, 1, 3, 4})), "InvalidType: attention_kvcache: mask has dtype float16, expected int32");
  TensorView elsewhere = tensor({1, 1, 3, 4}, DType::kInt32);
  elsewhere.device = kGpu;
  EXPECT_EQ(with_mask(elsewhere), "attention_kvcache: mask is on cuda:0, expected cpu, as q");
  TensorView strided = tensor({1, 1, 3, 4}, DType::kInt32);
  strided.strides = {12, 12, 1, 3};
  EXPECT_EQ(with_mask(strided),
            "Unreadable: attention_kvcache: mask has strides (12, 12, 1, 3), expected (multiples of "
            "4, multiples of 4, 4, 1)");
}

TEST(CheckKvcache, Values) {
  const std::string name = "attention_kvcache: ";
  EXPECT_EQ(check([](Call& c) { c.lengths[1] = 13; }),
            name + "cache_seqlens has 13 at index 1, expected from 0 to 12, what a sequence has room for");
  EXPECT_EQ(check([](Call& c) { c.lengths[1] = -1; }),
            name + "cache_seqlens has -1 at index 1, expected from 0 to 12, what a sequence has room for");
  EXPECT_EQ(check([](Call& c) { c.lengths[0] = 10; }),
            name +
                "k_new has 3 rows for the sequence at index 0, expected at most 2, what cache_seqlens = 10 leaves of "
                "room for 12");
  EXPECT_EQ(check([](Call& c) { c.pads[1] = 4; }),
            name + "leftpad has 4 at index 1, expected from 0 to the sequence's length 3");
  EXPECT_EQ(check([](Call& c) { c.pages[2] = 7; }),
            name + "block_table has 7 at index (0, 2), expected from 0 to 6, a page of k_cache");
  EXPECT_EQ(check([](Call& c) { c.pages[0] = -1; }), "accepted");  // rows of this page do not count
  EXPECT_EQ(check([](Call& c) { c.pages[4] = 99; }), "accepted");
  EXPECT_EQ(check([](Call& c) { c.make_indexed(), c.entries[0] = 7; }),
            name + "cache_batch_idx has 7 at index 0, expected from 0 to 6, an entry of k_cache");
  const auto share = [](Call& c) { c.make_indexed(), c.entries = {2, 2}; };
  EXPECT_EQ(check(share),
            name + "cache_batch_idx has 2 at index 1, expected another entry for each sequence where k_new is written");
  EXPECT_EQ(check([&](Call& c) { share(c), c.tensors.k_new = c.tensors.v_new = c.tensors.leftpad = {}; }), "accepted");
  EXPECT_EQ(check([](Call& c) { c.make_ragged(), c.begins = {0, 3, 8}; }),
            name + "cu_seqlens_q has 8 at index 2, expected at most 7 = T_q");
}

TEST(CheckKvcache, NewRowsNeedMemoryOfTheirOwn) {
  const std::string expected = ", expected a cache of its own memory, as k_new is given";
  EXPECT_EQ(check([](Call& c) { c.tensors.k_cache.strides[0] = 0; }),
            "attention_kvcache: k_cache has stride 0 in dimension 0" + expected);
  EXPECT_EQ(check([](Call& c) { c.tensors.v_cache.strides[2] = 0; }),
            "attention_kvcache: v_cache has stride 0 in dimension 2" + expected);
  const auto meet = [](Call& c) { c.tensors.k_cache.strides[1] = c.tensors.k_cache.strides[2]; };
  EXPECT_NE(check(meet).find("attention_kvcache: k_cache has strides ("), std::string::npos);
  EXPECT_NE(check(meet).find(expected), std::string::npos);
  EXPECT_EQ(check([](Call& c) {
              c.tensors.k_cache.strides[0] = 0;
              c.tensors.k_new = c.tensors.v_new = {};
            }),
            "accepted");
}

TEST(CheckKvcache, CachesLieApart) {
  const std::string refused =
      "attention_kvcache: v_cache shares memory with k_cache, expected a cache of its own memory, as k_new is given";
  const auto share = [](Call& c) { c.tensors.v_cache.data = c.tensors.k_cache.data; };
  EXPECT_EQ(check(share), refused);
  EXPECT_EQ(check([&](Call& c) { share(c), c.move_to_gpu(); }), refused);
  EXPECT_EQ(check([&](Call& c) { share(c), c.tensors.k_new = c.tensors.v_new = {}; }), "accepted");
  // Keys that are values too are written twice, the same way.
  const auto be_one = [](Call& c) {
    c.tensors.v_cache = c.tensors.k_cache;
    c.tensors.v_new = c.tensors.k_new;
    c.tensors.out = c.tensors.q;
    c.tensors.rotary_cos = c.tensors.rotary_sin = {};
  };
  EXPECT_EQ(check(be_one), "accepted");
  EXPECT_EQ(check([&](Call& c) { be_one(c), c.tensors.v_new.data = memory + 4096; }), refused);
  EXPECT_EQ(check([&](Call& c) { be_one(c), c.tensors.rotary_cos = c.tensors.rotary_sin = tensor({20, 16}); }),
            refused);
}

TEST(CheckKvcache, WhatIsReadLiesOutsideOfWhatIsWritten) {
  const std::string refused = " lies in the memory of a cache, expected memory of its own, as k_new is given";
  const auto move = [](TensorView KvcacheTensors::* operand, int to) {
    return [=](Call& c) { (c.tensors.*operand).data = memory + to; };
  };
  const std::string name = "Unreadable: attention_kvcache: ";
  EXPECT_EQ(check(move(&KvcacheTensors::k_new, kKCacheAt + 64)), name + "k_new" + refused);
  EXPECT_EQ(check(move(&KvcacheTensors::v_new, kKCacheAt - 64)), name + "v_new" + refused);
  EXPECT_EQ(check(move(&KvcacheTensors::q, kVCacheAt)), name + "q" + refused);
  EXPECT_EQ(check(move(&KvcacheTensors::rotary_sin, kVCacheAt)), name + "rotary_sin" + refused);
  EXPECT_EQ(check([&](Call& c) {
              move(&KvcacheTensors::q, kVCacheAt)(c);
              c.tensors.k_new = c.tensors.v_new = {};
            }),
            "accepted");
}

TEST(CheckKvcache, PagesThatAreWritten) {
  const std::string name = "attention_kvcache: block_table has ";
  // Rows 9 to 11 and 0 to 2 are written, in the last page of the first sequence and the first page of the second.
  EXPECT_EQ(check([](Call& c) { c.pages[3] = 5; }),
            name +
                "5 at index (0, 2), expected another page, as k_new is written to its row 0 for the sequence at "
                "index 1");
  EXPECT_EQ(check([](Call& c) { c.pages[3] = 0; }),
            name +
                "0 at index (0, 1), expected another page, as k_new is written to its row 0 for the sequence at "
                "index 1");
  EXPECT_EQ(check([](Call& c) { c.pages[1] = 5, c.pads[0] = 0; }),
            name +
                "5 at index (0, 1), expected another page, as k_new is written to its row 1 for the sequence at "
                "index 0");
  EXPECT_EQ(check([](Call& c) { c.pages[4] = 5; }), "accepted");  // rows of this page do not count
  // A page may be shared below the rows that are written, and everywhere if none is.
  EXPECT_EQ(
      check([](Call& c) { c.lengths = {8, 1}, c.pages[3] = c.pages[2] = 5, c.make_ragged(), c.begins = {0, 1, 2}; }),
      name +
          "5 at index (1, 0), expected another page, as k_new is written to its row 0 for the sequence at "
          "index 0");
  EXPECT_EQ(
      check([](Call& c) { c.lengths = {9, 1}, c.pages[3] = c.pages[2] = 5, c.make_ragged(), c.begins = {0, 1, 1}; }),
      "accepted");
  EXPECT_EQ(check([](Call& c) { c.pages[3] = 5, c.tensors.k_new = c.tensors.v_new = {}; }), "accepted");
  EXPECT_EQ(check([](Call& c) { c.pages[3] = 5, c.move_to_gpu(); }), "accepted");  // tables on a GPU are not read
}

TEST(CheckKvcache, Splits) {
  const std::string name = "attention_kvcache: ";
  EXPECT_EQ(check([](Call& c) { c.options.num_splits = -1; }), name + "num_splits is -1, expected at least 0");
  EXPECT_EQ(check([](Call& c) { c.options = {.num_splits = 2, .batch_invariant = true}; }),
            name + "num_splits is 2, expected 0 with batch_invariant, which has splits of its own");
  KvcacheProblem p;
  ASSERT_EQ(check([](Call& c) { c.options.num_splits = std::int64_t{1} << 40; }, &p), "accepted");
  EXPECT_EQ(p.num_splits, 12);
}

}  // namespace
}  // namespace flashtile
