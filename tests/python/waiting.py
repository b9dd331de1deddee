"""Calls for which the host must not wait for the GPU."""

import contextlib

import torch


@contextlib.contextmanager
def host_never_waits():
    """Raises where the host waits for the GPU within, once what came before is done."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
