"""Which floating-point type a model is loaded in when nothing is asked for."""

import torch

from regrow.config import DType


def choose_dtype(asked: DType, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the type, and why it was chosen.

    bfloat16 where the device computes in it; it is half the bytes to read for each token.
    """
    if asked != "auto":
        return getattr(torch, asked), "as asked for"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU computes in bfloat16"
        return torch.float16, "the GPU has no bfloat16 units"
    units = [name for name, there in torch.cpu.get_capabilities().items() if "bf16" in name and there is True]
    if units:
        return torch.bfloat16, f"the CPU computes in bfloat16 ({', '.join(sorted(units))})"
    return torch.float32, "the CPU has no bfloat16 units"
