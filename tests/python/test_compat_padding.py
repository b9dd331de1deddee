"""flashtile.compat.bert_padding: between padded batches and ragged ones."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile.compat import bert_padding


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 4), st.integers(0, 9), st.sampled_from([(), (3,), (2, 3)]), st.data())
def test_padding_there_and_back(batch, seqlen, rest, data):
    def mask():
        flags = data.draw(st.lists(st.booleans(), min_size=batch * seqlen, max_size=batch * seqlen))
        return torch.tensor(flags, dtype=torch.bool).reshape(batch, seqlen)

    x = torch.randn(batch, seqlen, *rest, generator=torch.Generator().manual_seed(3)).requires_grad_()
    used, unused = mask(), mask() if data.draw(st.booleans()) else None
    kept = used if unused is None else used | unused
    dtype = data.draw(st.sampled_from([torch.bool, torch.int64, torch.float32]))
    masks = [None if m is None else m.to(dtype) for m in (used, unused)]
    rows, indices, cu_seqlens, max_seqlen, seqused = bert_padding.unpad_input(x, *masks)

    assert torch.equal(rows, x[kept]) and torch.equal(bert_padding.index_first_axis(x.flatten(0, 1), indices), rows)
    found, residual = bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)
    assert torch.equal(found, rows) and torch.equal(residual, x.flatten(0, 1)) and not residual.requires_grad
    counts = kept.sum(1).tolist()
    assert cu_seqlens.dtype is seqused.dtype is torch.int32 and type(max_seqlen) is int
    assert cu_seqlens.tolist() == [sum(counts[:b]) for b in range(batch + 1)] and max_seqlen == max(counts, default=0)
    assert seqused.tolist() == used.sum(1).tolist()

    weight = kept.reshape(batch, seqlen, *[1] * len(rest)) * torch.ones_like(x)
    back = bert_padding.pad_input(rows, indices, batch, seqlen)
    assert torch.equal(back, x * weight)
    (dx,) = torch.autograd.grad(back.square().sum(), x)
    assert torch.equal(dx, 2 * x * weight)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 4), st.integers(0, 9), st.data())
def test_concatenated_sequences(batch, seqlen, data):
    """Lengths stand in any places of an entry, and their rows in front."""
    lengths = torch.zeros(batch, seqlen, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    kept = torch.zeros(batch, seqlen, dtype=torch.bool)
    for b in range(batch):
        places = data.draw(st.lists(st.integers(0, max(seqlen - 1, 0)), unique=True, max_size=seqlen)) if seqlen else []
        for place in sorted(places):
            used = int(lengths[b].sum())
            if used < seqlen:
                lengths[b, place] = data.draw(st.integers(1, seqlen - used))
        kept[b, : int(lengths[b].sum())] = True
    x = torch.randn(batch, seqlen, 3, generator=torch.Generator().manual_seed(3)).requires_grad_()
    rows, indices, cu_seqlens, max_seqlen = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)

    assert torch.equal(rows, x[kept]) and torch.equal(bert_padding.index_first_axis(x.flatten(0, 1), indices), rows)
    found, residual = bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)
    assert torch.equal(found, rows) and torch.equal(residual, x.flatten(0, 1)) and not residual.requires_grad
    given = lengths[lengths != 0].tolist()
    assert cu_seqlens.dtype is torch.int32 and cu_seqlens.tolist() == [sum(given[:n]) for n in range(len(given) + 1)]
    assert type(max_seqlen) is int and max_seqlen == max(given, default=0)
    (dx,) = torch.autograd.grad(rows.square().sum(), x)
    assert torch.equal(dx, 2 * x * kept[..., None])
