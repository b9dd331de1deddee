"""Loads what `make hub` packed as Hugging Face's `kernels` does, without a network, and has transformers use it.

    python try_hub.py REPOSITORY    fails where a folder of it does not load, asks for more, or computes otherwise

Where transformers wants another version of `kernels` it is not tried, which is said.
"""

import os
import sys
from pathlib import Path

import kernels
import torch
from attend import check

REPOSITORY = Path(sys.argv[1]).resolve()
NAME = "flashtile/flashtile"


def operators() -> set[str]:
    """The namespaces of all operators."""
    return {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}


def load(folder: Path):
    """The kernel, which must bring no other package and one namespace of operators, not that of the package."""
    before, namespaces = set(sys.modules), operators()
    kernel = kernels.get_local_kernel(folder)
    files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}
    packages = {name.partition(".")[0] for name, file in files.items() if "site-packages" in file}
    assert packages <= {"torch"}, packages
    (namespace,) = operators() - namespaces
    assert namespace != "flashtile" and kernel.__name__ == f"_{namespace}"
    return kernel


def check_choice(cpu, for_cuda: list) -> None:
    """From the repository `kernels` takes the one for the CPU, or one for PyTorch's CUDA, where there are any."""
    assert kernels.get_local_kernel(REPOSITORY, backend="cpu") is cpu
    if torch.version.cuda is None:
        assert kernels.get_local_kernel(REPOSITORY) is cpu
    elif for_cuda:
        assert kernels.get_local_kernel(REPOSITORY) in for_cuda


def check_transformers(kernel) -> None:
    """A small model computes with the kernel what it computes with PyTorch."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        print("transformers wants another version of kernels, and is not tried")
        return
    sizes = dict(hidden_size=128, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(num_hidden_layers=2, vocab_size=99, **sizes)
    calls = 0
    original = kernel.flash_attn_func

    def counted(*args, **options):
        nonlocal calls
        calls += 1
        return original(*args, **options)

    kernel.flash_attn_func = counted
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(99, (2, 30))
    with torch.no_grad():
        expected = model(tokens).logits
        model.set_attn_implementation(NAME, allow_all_kernels=True)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert calls == config.num_hidden_layers, calls


def main() -> None:
    loaded = {folder: load(folder) for folder in sorted((REPOSITORY / "build").iterdir())}
    for kernel in loaded.values():
        check(kernel.attention)
    (cpu,) = (folder for folder in loaded if "-cpu-" in folder.name)
    check_choice(loaded[cpu], [kernel for folder, kernel in loaded.items() if folder != cpu])
    os.environ["LOCAL_KERNELS"] = f"{NAME}={cpu}"  # for transformers
    check_transformers(loaded[cpu])
    print(*(folder.name for folder in loaded), f"are right, by kernels {kernels.__version__}", sep="\n")


if __name__ == "__main__":
    main()
