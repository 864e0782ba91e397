"""What a thread has set for its own calls of torch: on CUDA a lane works in the thread that submits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def fresh_modes(*, inference: bool) -> Iterator[None]:
    """Run as in a new thread, without gradients, and in inference mode or not.

    Put aside are autocast of every device type, modes of torch functions (torch.set_default_device, `with
    torch.device(...)`) and of the dispatcher (profilers, fake tensors). A backward pass has those of its caller.
    """
    function_modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    # Asked first: to put dispatch modes aside imports half of torch.
    dispatch_modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
    try:
        # In this order: inference_mode(False) would switch gradients on.
        with dispatch_modes, torch._C._DisableAutocast(), torch.inference_mode(inference), torch.no_grad():
            yield
    finally:
        for mode in reversed(function_modes):
            torch._C._push_on_torch_function_stack(mode)
