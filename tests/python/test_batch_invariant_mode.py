"""Which calls are batch-invariant, by the flag and by the mode, as plans for a GPU say; and what is refused."""

import re
import threading

import pytest
import torch
from cases import BF16

import flashtile
from flashtile import _C
from flashtile._core import forward_with_state
from flashtile._options import attention_options
from flashtile.compat import flash_attn, vllm_flash_attn


def plan(call, gpu="H100"):
    """What a call of tensors on the CPU would be on a GPU."""
    return _C.explain(call, gpu)


def is_invariant(text):
    """A forward or a call over a cache of any length, by its splits, or its kernel on Hopper."""
    return re.search(r"\n  (splits +of \d+ keys each|why +batch-invariant)", text) is not None


def rows(*shape):
    return torch.zeros(*shape, dtype=BF16)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


Q, KV = rows(2, 40, 4, 64), rows(2, 40, 2, 64)
HELD, BEGINS = ints(40, 7), ints(0, 40, 80)
CALLS = {
    "attention": lambda **x: flashtile.attention(Q, KV, KV, causal=True, **x),
    "attention_varlen": lambda **x: flashtile.attention_varlen(
        *(y.flatten(0, 1) for y in (Q, KV, KV)), cu_seqlens_q=BEGINS, cu_seqlens_k=BEGINS, **x
    ),
    "attention_kvcache": lambda **x: flashtile.attention_kvcache(Q, KV, KV, cache_seqlens=HELD, **x),
}
CALLERS = {
    "scaled_dot_product_attention": lambda: flashtile.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (Q, KV, KV)), enable_gqa=True
    ),
    "padding": lambda: flashtile.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (Q, KV, KV)), torch.ones(2, 1, 1, 40, dtype=torch.bool), enable_gqa=True
    ),
    "flash_attn_func": lambda: flash_attn.flash_attn_func(Q, KV, KV),
    "flash_attn_with_kvcache": lambda: flash_attn.flash_attn_with_kvcache(Q, KV, KV, cache_seqlens=HELD),
    "vLLM's": lambda: vllm_flash_attn.flash_attn_with_kvcache(Q, KV, KV, cache_seqlens=HELD, num_splits=16),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_mode_is_the_flag_where_that_is_left_open(name):
    call = CALLS[name]
    text = plan(lambda: call(batch_invariant=True))
    assert is_invariant(text) and not is_invariant(plan(call))
    with flashtile.batch_invariant_mode():
        assert plan(call) == text
        assert not is_invariant(plan(lambda: call(batch_invariant=False)))
        with flashtile.batch_invariant_mode(False):
            assert not is_invariant(plan(call))
        assert is_invariant(plan(call))
    with pytest.raises(KeyError), flashtile.batch_invariant_mode():
        raise KeyError
    assert not is_invariant(plan(call))
    assert is_invariant(flashtile.batch_invariant_mode()(plan)(call))


@pytest.mark.parametrize("name", CALLERS)
def test_the_mode_reaches_those_that_call(name):
    assert not is_invariant(plan(CALLERS[name]))
    with flashtile.batch_invariant_mode():
        assert is_invariant(plan(CALLERS[name]))


def test_the_mode_may_go_by_pytorchs():
    with flashtile.batch_invariant_mode(None):
        assert not is_invariant(plan(CALLS["attention"]))
        torch.use_deterministic_algorithms(True)
        try:
            assert is_invariant(plan(CALLS["attention"]))
        finally:
            torch.use_deterministic_algorithms(False)


def test_the_mode_is_of_a_thread():
    found = []
    with flashtile.batch_invariant_mode():
        thread = threading.Thread(target=lambda: found.append(is_invariant(plan(CALLS["attention"]))))
        thread.start()
        thread.join()
    assert found == [False]


@pytest.mark.parametrize("enabled", [1, "yes", torch.tensor(True)], ids=str)
def test_the_mode_takes_a_bool_or_none(enabled):
    with pytest.raises(TypeError, match=r"^batch_invariant_mode: enabled is .*, expected True, False or None$"):
        flashtile.batch_invariant_mode(enabled).__enter__()


@pytest.mark.parametrize("gpu", ["A100", "H100", "L40S"])
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(70, 0), softcap=9.0)], ids=str)
def test_no_plan_goes_by_the_batch(gpu, head_dim, options):
    """The kernels are the same, or, in a forward on Hopper, have the same blocks of keys, and how many thread blocks
    share a block of keys goes by the heads of a group alone; the order of sums is the kernel's."""
    kernels = set()
    for batch, seqlen_q, seqlen_k, heads_q, heads_k in (
        (1, 333, 200, 16, 1),
        (1, 20, 2100, 8, 8),
        (60, 20, 2100, 8, 8),
        (1, 64, 64, 1, 1),
        (300, 64, 64, 1, 1),
        (300, 64, 64, 16, 1),
        (4, 4000, 4000, 32, 8),
    ):
        shapes = ((batch, seqlen_q, heads_q), *((batch, seqlen_k, heads_k),) * 2)
        q, k, v = (torch.empty(*shape, head_dim, dtype=BF16, device="meta") for shape in shapes)
        table = torch.empty(batch + 1, dtype=torch.int32, device="meta")
        tables = dict(cu_seqlens_q=table, cu_seqlens_k=table)
        dense = flashtile.explain(q, k, v, device=gpu, batch_invariant=True, **options)
        flat = flashtile.explain(
            *(x.flatten(0, 1) for x in (q, k, v)), device=gpu, batch_invariant=True, **tables, **options
        )
        for text in (dense, flat):
            parts = re.search(r"\n  parts +(\d+) thread blocks", text)
            assert (int(parts[1]) if parts else 1) == max(heads_q // heads_k // 4, 1)
            forward, backward = re.findall(r"\n  kernel +(\S+)", text)
            kernels.add((re.sub(r"(sm90.*)_m\d+(_n\d+)_s\d+_w\d+", r"\1\2", forward), backward))
    assert len(kernels) == 1


def refusal(call, gpu="H100"):
    with pytest.raises(NotImplementedError) as raised:
        plan(call, gpu)
    return str(raised.value)


def test_what_is_refused():
    dropout = "attention: dropout_p is 0.1 with batch_invariant, expected 0"
    assert refusal(lambda: CALLS["attention"](dropout_p=0.1, batch_invariant=True)).startswith(dropout)
    with pytest.raises(NotImplementedError, match=dropout), flashtile.batch_invariant_mode():
        CALLS["attention"](dropout_p=0.1)  # on the CPU too
    given = dict(seqused_q=HELD, sinks=torch.zeros(4), return_lse=True)
    used = refusal(lambda: CALLS["attention_varlen"](**given, batch_invariant=True), "A100")
    assert used.startswith("attention_varlen: seqused_q is given with batch_invariant, expected none with sinks and an")
    mask = flashtile.masks.ColumnMask.concatenate([flashtile.masks.ColumnMask.full(40, 40)] * 2)
    masked = refusal(lambda: CALLS["attention_varlen"](mask=mask, batch_invariant=True))
    assert masked.startswith("attention_varlen: mask is given with batch_invariant, expected none of a ragged batch")
    with pytest.raises(ValueError, match="num_splits is 3, expected 0 with batch_invariant"):
        with flashtile.batch_invariant_mode():
            CALLS["attention_kvcache"](num_splits=3)


def test_partial_results_are_refused():
    q = torch.randn(1, 8, 2, 16)
    with flashtile.batch_invariant_mode():
        flashtile.attention(q, q, q, return_lse=True)
        with pytest.raises(NotImplementedError, match=r"^attention: batch_invariant_mode is on, expected"):
            forward_with_state(q, q, q, attention_options())
    forward_with_state(q, q, q, attention_options())


@pytest.mark.filterwarnings("ignore::flashtile.sdpa.FallbackWarning")
def test_nothing_is_left_to_pytorch():
    query = torch.randn(1, 2, 8, 16)
    bias = torch.zeros(8, 8)
    flashtile.scaled_dot_product_attention(query, query, query, bias)
    with pytest.raises(
        NotImplementedError, match=r"^scaled_dot_product_attention: batch_invariant_mode is on, expected"
    ):
        with flashtile.batch_invariant_mode():
            flashtile.scaled_dot_product_attention(query, query, query, bias)


def test_seqused_q_of_a_gpu():
    q, tables = torch.empty(80, 4, 64, dtype=BF16, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    given = dict(cu_seqlens_q=tables, cu_seqlens_k=tables, seqused_q=tables[1:])
    text = flashtile.explain(q, q, q, **given, batch_invariant=True, device="H100")
    assert is_invariant(text) and "B=4 ragged T_q=80" in text


def test_numbers_of_8_bits_are_computed_in_16():
    q = torch.empty(2, 40, 4, 64, dtype=torch.float8_e4m3fn, device="meta")
    text = flashtile.explain(q, q, q, batch_invariant=True, device="H100")
    assert is_invariant(text) and "bfloat16 on cuda" in text
