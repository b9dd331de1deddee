// This mainloop takes blocks of keys, each against all queries that see it, on Hopper's warpgroup matmuls: it forms dK
// and dV of the block, and its contribution to dQ (FlashAttention-3, Shah et al. 2024).
//
// Tiles of scores are transposed, (keys, queries), and each of two consumer warpgroups owns 64 whole keys: weights and
// their gradients stay in registers as the A operand of dV and dK. For dQ, a sum over all keys of the block, dS goes
// through shared memory; each warpgroup forms half of the tile, which a writer thread has TMA add to memory. A producer
// thread has TMA load K and V, and tiles of Q and dO through a ring buffer. One more may hand out blocks of keys.
#pragma once

#include "flashtile/mainloop/backward_one_pass_sm90/consumer.h"
#include "flashtile/mainloop/backward_one_pass_sm90/producer.h"
#include "flashtile/mainloop/backward_one_pass_sm90/scheduler.h"
#include "flashtile/mainloop/backward_one_pass_sm90/storage.h"
#include "flashtile/mainloop/backward_one_pass_sm90/writer.h"
