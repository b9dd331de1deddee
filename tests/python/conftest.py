"""Which tests run here, and the fixtures that they share."""

import contextlib
import fcntl
import functools
import gc
import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile import _capability


def pytest_addoption(parser):
    parser.addoption(
        "--compute-capability", type=int, metavar="CC", help="use the kernels of GPUs up to this one, such as 80"
    )


def pytest_configure(config):
    if config.getoption("--compute-capability"):
        _capability.limit(config.getoption("--compute-capability"))
    # The cases are small: waking threads costs more than they save, several times more where other work runs beside.
    # test_threads.py covers the rest.
    torch.set_num_threads(1)
    # PyTorch keeps the graphs that it has compiled for other processes, where operators of another version of flashtile
    # are in them too.
    os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
    os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
    # Triton reads this as it is imported, which PyTorch may do at any time.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def _reason_to_skip_gpu():
    if not torch.cuda.is_available():
        return "needs a CUDA device, and PyTorch finds none"
    if not flashtile.info()["built_with_cuda"]:
        return "this build of flashtile holds no CUDA kernels"
    return None


def pytest_collection_modifyitems(items):
    reason = _reason_to_skip_gpu()
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@contextlib.contextmanager
def _nan_in_fresh_memory():
    """torch.empty and its kin return NaN, so that an output element which no kernel writes shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _poisoned(function):
    @functools.wraps(function)
    def poisoned(*args, **kwargs):
        with _nan_in_fresh_memory():
            return function(*args, **kwargs)

    return poisoned


@pytest.fixture
def attention():
    """flashtile.attention with poisoned outputs."""
    return _poisoned(flashtile.attention)


@pytest.fixture
def attention_varlen():
    """flashtile.attention_varlen with poisoned outputs."""
    return _poisoned(flashtile.attention_varlen)


@pytest.fixture
def attention_kvcache():
    """flashtile.attention_kvcache with poisoned outputs."""
    return _poisoned(flashtile.attention_kvcache)


@pytest.fixture
def gradients():
    """Gradients of q, k, v through torch.autograd.grad, with poisoned outputs."""
    return _poisoned(torch.autograd.grad)


@pytest.fixture
def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# Bytes of a GPU that a test takes at the most beside others: then fourteen processes and one test that takes more, at
# most 28 GB, fit in 80 GB, with some 600 MB for what CUDA takes for each process.
MOST = 5 * 2**29


@pytest.fixture
def much_memory():
    """For tests that take more than MOST: one runs at a time, whichever process it is in, and leaves nothing there."""
    with (Path(tempfile.gettempdir()) / f"flashtile-much-memory-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _a_good_neighbour(request):
    """A GPU test leaves no error behind and little memory, and has taken no more than was agreed."""
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated()
    if torch.cuda.memory_reserved() > MOST // 5:  # PyTorch keeps what was freed
        torch.cuda.empty_cache()
    if "much_memory" not in request.fixturenames:
        assert taken <= MOST, f"took {taken / 2**30:.1f} GiB of the GPU: make it smaller, or let it use much_memory"
