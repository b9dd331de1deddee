"""One forward and backward on the CPU against PyTorch's, eagerly and traced: what `try_versions.py` runs."""

import platform

import torch


def check(attention) -> None:
    """Raises AssertionError where this `flashtile.attention` is wrong."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 96, heads, 64) for heads in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    heads_first = [x.double().transpose(1, 2) for x in leaves]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    expected = expected.transpose(1, 2).float()
    gradients = torch.autograd.grad(expected, leaves, dout, retain_graph=True)
    for call in (attention, torch.compile(attention, backend="eager", fullgraph=True)):
        out = call(q, k, v, causal=True)
        torch.testing.assert_close(out, expected)
        for found, wanted in zip(torch.autograd.grad(out, leaves, dout), gradients, strict=True):
            torch.testing.assert_close(found, wanted)


if __name__ == "__main__":
    import flashtile

    check(flashtile.attention)
    print(f"flashtile {flashtile.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}: right")
