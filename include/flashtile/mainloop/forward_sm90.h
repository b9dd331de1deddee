// This mainloop takes tiles of query rows against all keys they see, on Hopper's warpgroup matmuls (FlashAttention-3,
// Shah et al. 2024).
//
// One thread hands out tiles, another has TMA load them into ring buffers of shared memory. Each consumer warpgroup
// owns 64 whole rows of Q. Warpgroups take turns at the tensor cores: in its turn one starts the scores of a block and
// P·V of the block before together; then it turns those scores into weights while the others have their turns. At the
// end of a tile P·V comes first, while the next Q arrives, and the rows are finished while the first scores of the next
// tile are computed. So the tensor cores see one stream of blocks, across tiles too.
//
// No row maximum is taken after the first block of a tile: see OnlineSoftmax.
#pragma once

#include "flashtile/mainloop/forward_sm90/consumer.h"
#include "flashtile/mainloop/forward_sm90/largest_logits.h"
#include "flashtile/mainloop/forward_sm90/producer.h"
#include "flashtile/mainloop/forward_sm90/scheduler.h"
#include "flashtile/mainloop/forward_sm90/storage.h"
#include "flashtile/mainloop/forward_sm90/transposer.h"
#include "flashtile/mainloop/forward_sm90/widener.h"
