"""return_max_logits over caches: the largest score of each head beside the other results of attention_kvcache."""

import dataclasses

import cached
import pytest
import torch
from cached import with_own_caches
from cases import BF16, F32, on_devices
from compare import assert_accurate, assert_bitwise, score_rounding
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st
from test_kvcache import cached_cases, rotation_rounding
from test_kvcache_fp8 import E4M3, E5M2, KINDS, after, in_8_bits, whole
from test_kvcache_fp8 import NAMES as CACHES
from test_kvcache_laws import FIXED, LAWS
from test_kvcache_masks import CASES as MASKED
from test_properties import random_problems
from test_return_max_logits import same_as_without

import flashtile


def over_cache(given):
    """{out, lse, max_logits, and what is written} of a call that leaves the tensors of `given` alone."""
    used = with_own_caches(given) | {name: x.clone() for name, x in given.items() if name.endswith("descale")}
    results = flashtile.attention_kvcache(**used, return_lse=True, return_max_logits=True)
    written = {name: x for name, x in used.items() if name in CACHES or name.endswith("descale")}
    return dict(zip(("out", "lse", "max_logits"), results, strict=True)) | written


def check_over_cache(case, device):
    given = case.arguments(device)
    found = over_cache(given)
    expected = cached.results(given)
    same_as_without(given)(found, expected)
    _, alone = flashtile.attention_kvcache(**with_own_caches(given), return_max_logits=True)
    assert_bitwise(alone, found["max_logits"], "max_logits")
    check_largest(case, given, found["max_logits"])


def check_largest(case, given, found, rounded=None):
    exact, rough = cached.max_logits(given), cached.max_logits(rounded or given, F32)
    slack = case.head_dim / 16 * score_rounding(exact) + rotation_rounding(case, given)
    assert found.dtype is F32 and found.shape == (case.batch, case.heads_q)
    assert_accurate(found, exact, rough, "max_logits", slack)


@pytest.mark.parametrize("case, device", on_devices([*cached.CASES, *MASKED]))
def test_caches(case, device):
    check_over_cache(case, device)


@pytest.mark.parametrize("fixed", FIXED, ids=str)
@pytest.mark.parametrize("case, device", on_devices([*LAWS, *MASKED[::3], *cached.CASES[::4]]))
def test_caches_in_a_fixed_order(case, device, fixed):
    check_over_cache(dataclasses.replace(case, **fixed), device)


@settings(random_problems, max_examples=100)
@hypothesis_given(cached_cases())
def test_random_caches(case):
    check_over_cache(case, "cpu")


@pytest.mark.gpu
@settings(random_problems, max_examples=100)
@hypothesis_given(cached_cases(), st.sampled_from([{}, {}, dict(batch_invariant=True), dict(num_splits=3)]))
def test_random_caches_on_gpus(case, order):
    if case.dtype is F32:
        case = dataclasses.replace(case, dtype=BF16)
    check_over_cache(dataclasses.replace(case, **order), "cuda")


@pytest.mark.parametrize("stored", [E4M3, E5M2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case, device", on_devices([case for case in LAWS if case.head_dim % 16 == 0]))
def test_caches_of_8_bits(case, device, kind, stored):
    if case.dtype is F32:
        case = dataclasses.replace(case, dtype=BF16)
    if (case.head_dim_v or 16) % 16 != 0:
        case = dataclasses.replace(case, head_dim_v=None)
    given = in_8_bits(case.arguments(device), kind, stored)
    found = over_cache(given)
    now = after(given, {name: x for name, x in found.items() if name in CACHES or name.endswith("descale")})
    check_largest(case, whole(now, torch.float64), found["max_logits"], whole(now, case.dtype))
