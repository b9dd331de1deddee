"""Attention in chunks, FlashAttention-3's attention_chunk, as attention of shorter sequences.

Query i of a sequence has the diagonal d = i + S_k - S_q, and sees key j only if ⌊j / chunk⌋ = ⌊d / chunk⌋. So the
queries of one quotient see the keys of the same one: they are a part, a sequence of its own. The last query of a part
meets the last of its keys, as the last ones meet in the whole: causal and windows hold in the part as they are.
"""

import torch
from torch.nn.functional import pad

from ._common import integer


def length_of(function, attention_chunk):
    """That of a chunk; 0 for none. Sequences are shorter than the longest one."""
    return min(integer(function, "attention_chunk", attention_chunk, at_least=0), 2**31)


def in_chunks(chunk, total_q, *, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, **descales):
    """The tables and descales of the parts, of those of the sequences."""
    if cu_seqlens_q.shape[0] == 1:  # there is no sequence
        return dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **descales)
    used_q = cu_seqlens_q.diff() if seqused_q is None else seqused_q
    used_k = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    sequence, queries, keys = parts_of(chunk, total_q, used_q, used_k)
    tables = {name: x[sequence] for name, x in descales.items()}
    for side, cu_seqlens, (begin, end) in (("q", cu_seqlens_q, queries), ("k", cu_seqlens_k, keys)):
        tables[f"cu_seqlens_{side}"] = begins_of(sequence, begin, cu_seqlens)
        tables[f"seqused_{side}"] = (end - begin).int()
    return tables


def begins_of(sequence, begin, cu_seqlens):
    """cu_seqlens of the parts, which begin so many rows behind the first of their sequence."""
    return torch.cat((cu_seqlens[sequence] + begin, cu_seqlens[-1:])).int()


def parts_of(chunk, total_q, used_q, used_k):
    """(sequence, queries, keys) of sequences of these lengths, (B) each: part n belongs to sequence[n], and has those
    of its queries that are numbered from queries[0][n] to queries[1][n], the last one excluded, and such keys.

    A sequence's first part are its queries before the first key, which see nothing. The host knows no lengths, so there
    are as many parts as `total_q` queries may need; those that are left over are empty.
    """
    batch = used_q.shape[0]
    used_q, used_k = used_q.long(), used_k.long()
    shift = used_k - used_q  # the diagonal of the first query
    ends = (2 + (used_q + chunk - 1) // chunk).cumsum(0)
    part = torch.arange(total_q // chunk + 3 * batch, device=used_q.device)
    sequence = torch.searchsorted(ends, part, right=True).clamp(max=batch - 1)
    number = part - pad(ends, (1, 0))[sequence]  # 0: before the first key
    shift, used_q, used_k = shift[sequence], used_q[sequence], used_k[sequence]
    end = (shift.clamp(min=0) // chunk + number) * chunk  # a diagonal
    end = end.where(number > 0, 0)
    begin = (end - chunk).where(number > 0, shift)
    queries = [(x - shift).clamp(min=0).minimum(used_q) for x in (begin, end)]
    keys = [x.clamp(min=0).minimum(used_k) for x in (begin.where(number > 0, 0), end)]
    return sequence, queries, keys
