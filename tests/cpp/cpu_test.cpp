// These tests compare the CPU backend to attention written out in double precision, on every instruction set that this
// machine has, and check the laws that are exact bit for bit.
#include "cpu_attention.h"

namespace flashtile {
namespace {

// These bands lie on one side of the diagonal: all keys before it, some of them, some behind it, and none at all.
constexpr Band kStrict{Band::kUnbounded, -1}, kBehind{40, -10}, kAhead{-10, 40};
constexpr Band kNothing{Band::kUnbounded, -Band::kUnbounded};

TEST(Cpu, MatchesDoublePrecisionForEveryMask) {
  for (const DType dtype : kDTypes) {
    for (const Band band :
         {Band::full(), Band::causal(), Band{7, 3}, Band{0, 0}, Band{Band::kUnbounded, 5}, Band{3, 40}, kStrict,
          kBehind, kAhead, Band{-20, Band::kUnbounded}, Band{-40, 40}, Band{Band::kUnbounded, -60}, kNothing})
      for (const auto& [seqlen_q, seqlen_k] : {std::pair{33, 70}, std::pair{70, 33}, std::pair{65, 65}})
        expect_close(problem_of(dtype, seqlen_q, seqlen_k, 40, 24, band));
  }
}

TEST(Cpu, MatchesDoublePrecisionForEveryScoreMap) {
  for (const DType dtype : kDTypes) {
    for (const float scale : {0.25f, 0.0f, -0.25f})
      for (const float softcap : {0.0f, 2.0f})
        for (const bool alibi : {false, true}) {
          Problem p = problem_of(dtype, 37, 41, 16, 16, Band::causal());
          p.scale = scale;
          p.softcap = softcap;
          p.alibi = alibi;
          expect_close(p);
        }
  }
}

TEST(Cpu, MatchesDoublePrecisionWithSinksAndDropout) {
  for (const DType dtype : kDTypes) {
    for (const bool sinks : {false, true})
      for (const double dropout_p : {0.0, 0.3})
        for (const Band band : {Band::full(), Band::causal(), Band{7, 3}, kBehind, kAhead, kNothing})
          // The first has rows that see nothing, the second two tiles a side that end within a square of 16.
          for (const auto& [seqlen_q, seqlen_k] : {std::pair{37, 9}, std::pair{41, 53}}) {
            Problem p = problem_of(dtype, seqlen_q, seqlen_k, 24, 16, band);
            p.sinks = sinks;
            p.dropout = Dropout::of(dropout_p, 0x123456789abcdef0);
            p.softcap = 4;
            expect_close(p);
          }
  }
}

TEST(Cpu, MatchesDoublePrecisionForEveryWidth) {
  for (const DType dtype : kDTypes) {
    for (const auto& [head_dim, head_dim_v] :
         {std::pair{8, 8}, std::pair{72, 136}, std::pair{104, 8}, std::pair{256, 256}})
      expect_close(problem_of(dtype, 9, 35, head_dim, head_dim_v));
  }
}

TEST(Cpu, MatchesDoublePrecisionForTilesOfEverySize) {
  std::mt19937 random(1);
  const auto up_to = [&](int most) { return 1 + static_cast<int>(random() % most); };
  for (const DType dtype : kDTypes) {
    for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
      // One tile of up to 128 queries and keys, or that and a smaller one.
      const int far = up_to(90), near = up_to(far);
      const Band bands[] = {Band::full(), Band::causal(), Band{up_to(40), up_to(40)}, Band{far, -near},
                            Band{-near, far}};
      Problem p = problem_of(dtype, up_to(160), up_to(160), head_dim, 8 * up_to(32), bands[up_to(5) - 1]);
      p.batch = p.heads_q = p.heads_k = 1;
      p.scale = 0.125f;
      if (up_to(4) == 1) p.dropout = Dropout::of(0.2, 5);
      SCOPED_TRACE(testing::Message() << p.seqlen_q << " queries, " << p.seqlen_k << " keys, head dimensions "
                                      << head_dim << " and " << p.head_dim_v);
      expect_close(p, 128);
    }
  }
}

/// Tiles of which a column mask hides nothing need no mask, also where their queries end within a pair of registers.
TEST(Cpu, MatchesDoublePrecisionForColumnsThatHideNothing) {
  for (const DType dtype : kDTypes) {
    for (const int seqlen_q : {6, 17, 130}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << ", " << seqlen_q << " queries");
      Problem p = problem_of(dtype, seqlen_q, 150, 16, 16);
      p.masks_of_entry = p.masked_entries = 1;
      Attention a(p);
      a.columns.assign(static_cast<std::size_t>(p.seqlen_k) * 4, 0);
      a.tile = 128;
      const Expected e = expect(a);
      on_every_instruction_set([&] {
        a.run(2);
        compare(a, e);
      });
    }
  }
}

TEST(Cpu, EmptyAndSingleSequences) {
  for (const DType dtype : kDTypes) {
    for (const int seqlen_q : {0, 1})
      for (const int seqlen_k : {0, 1, 34}) expect_close(problem_of(dtype, seqlen_q, seqlen_k, 16, 8, Band::causal()));
    expect_close(problem_of(dtype, 34, 0, 16, 8));
  }
}

TEST(Cpu, ThreadsChangeNothing) {
  on_every_kernel([](DType dtype) {
    // One KV head for many threads takes the two-pass backward, one thread the fused one.
    for (const int heads_k : {1, 4}) {
      Problem p = problem_of(dtype, 150, 170, 64, 64, Band::causal());
      p.batch = 1;
      p.heads_k = heads_k;
      p.sinks = true;
      p.dropout = Dropout::of(0.1, 3);
      Attention one(p), many(p);
      one.run(1);
      many.run(5);
      EXPECT_EQ(one.out.bytes(), many.out.bytes());
      EXPECT_EQ(one.lse, many.lse);
      EXPECT_EQ(one.largest, many.largest);
      EXPECT_EQ(one.dq.bytes(), many.dq.bytes());
      EXPECT_EQ(one.dk.bytes(), many.dk.bytes());
      EXPECT_EQ(one.dv.bytes(), many.dv.bytes());
      EXPECT_EQ(one.dsinks, many.dsinks);
    }
  });
}

TEST(Cpu, PackedHeadsChangeNothing) {
  on_every_kernel([](DType dtype) {
    for (const Band band : {Band::full(), Band::causal(), Band{7, 3}})
      for (const int seqlen_q : {1, 3, 16, 37}) {  // all rows in one tile, or tiles that end between heads of a query
        Problem p = problem_of(dtype, seqlen_q, 70, 24, 16, band);
        p.heads_q = 12;
        p.sinks = true;
        p.softcap = 3;
        Attention apart(p);
        apart.most_packed = 1;
        apart.run_forward(2);
        for (const int packed : {2, 3, 6}) {
          Attention a(p);
          a.most_packed = packed;
          a.run_forward(2);
          ASSERT_EQ(a.out.bytes(), apart.out.bytes()) << packed << " heads of " << seqlen_q << " queries";
          ASSERT_EQ(a.lse, apart.lse) << packed << " heads of " << seqlen_q << " queries";
          ASSERT_EQ(a.largest, apart.largest) << packed << " heads of " << seqlen_q << " queries";
        }
      }
  });
}

TEST(Cpu, OnlyWantedGradientsAreWrittenAndNoGaps) {
  on_every_kernel([](DType dtype) {
    Problem p = problem_of(dtype, 40, 50, 24, 16, Band{20, 5});
    p.sinks = true;
    const Attention untouched(p);
    Attention all(p);
    all.run(2);
    for (int wanted = 0; wanted < 16; ++wanted) {
      Attention some(p);
      some.run(2, wanted & 1, wanted & 2, wanted & 4, wanted & 8);
      EXPECT_EQ(some.dq.bytes(), (wanted & 1 ? all : untouched).dq.bytes());
      EXPECT_EQ(some.dk.bytes(), (wanted & 2 ? all : untouched).dk.bytes());
      EXPECT_EQ(some.dv.bytes(), (wanted & 4 ? all : untouched).dv.bytes());
      EXPECT_EQ(some.dsinks, (wanted & 8 ? all : untouched).dsinks);
    }
    // The gap between rows of a head is the last bytes of each row's stride.
    const auto& strides = all.out.layout().strides;
    for (int i = p.head_dim_v * bytes_of(dtype); i < strides[1] * bytes_of(dtype); ++i) {
      EXPECT_EQ(all.out.bytes()[i], untouched.out.bytes()[i]);
    }
  });
}

TEST(Cpu, WhatARowDoesNotSeeChangesNothingForIt) {
  on_every_kernel([](DType dtype) {
    const Problem p = problem_of(dtype, 70, 75, 24, 40, Band::causal());
    constexpr int kPoisoned = 41;  // index of the poisoned key, and of the query on its diagonal
    for (const float poison : {NAN, kInfinity, -kInfinity}) {
      Attention clean(p), keys(p), queries(p);
      clean.run(2);
      keys.k.set_row(kPoisoned, poison);
      keys.v.set_row(kPoisoned, poison);
      keys.run(2);
      const int query = kPoisoned - (p.seqlen_k - p.seqlen_q);
      queries.q.set_row(query, poison);
      queries.dout.set_row(query, poison);
      queries.run(2);
      for (int d = 0; d < p.head_dim; ++d) {
        for (int i = 0; i < query; ++i) {
          ASSERT_EQ(keys.dq.get(0, i, 1, d), clean.dq.get(0, i, 1, d)) << i;
          ASSERT_EQ(keys.out.get(0, i, 1, d), clean.out.get(0, i, 1, d)) << i;
        }
        ASSERT_TRUE(std::isnan(keys.out.get(0, query, 1, d)));
        ASSERT_TRUE(std::isnan(queries.dk.get(0, kPoisoned, 1, d)));
        for (int j = kPoisoned + 1; j < p.seqlen_k; ++j) {
          ASSERT_EQ(queries.dk.get(0, j, 1, d), clean.dk.get(0, j, 1, d)) << j;
          ASSERT_EQ(queries.dv.get(0, j, 1, d), clean.dv.get(0, j, 1, d)) << j;
        }
        for (int i = 0; i < p.seqlen_q; ++i) {
          if (i == query) continue;
          ASSERT_EQ(queries.dq.get(0, i, 1, d), clean.dq.get(0, i, 1, d)) << i;
          ASSERT_EQ(queries.out.get(0, i, 1, d), clean.out.get(0, i, 1, d)) << i;
        }
      }
    }
  });
}

}  // namespace
}  // namespace flashtile
