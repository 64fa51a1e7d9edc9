# SPDX-License-Identifier: Apache-2.0
"""Stored values that no sound checkpoint holds: NaN and infinity in every stored type."""

import numpy as np
import torch

from ..errors import CheckpointError

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}
"""What a stored type is handed out as: scales and packed fp4 stay bytes."""

_MASKS = {
    "BF16": (torch.int16, 0x7F80, "a value that is not finite"),
    "F32": (torch.int32, 0x7F800000, "a value that is not finite"),
    "F8_E4M3": (torch.uint8, 0x7F, "an e4m3 NaN (byte 0x7f or 0xff)"),
    "F8_E8M0": (torch.uint8, 0xFF, "scale byte 255, which means NaN"),
}
"""A value is bad where all bits of the mask are set; every fp4 code is a number."""

_CHUNK = 1 << 22


def check_values(values: torch.Tensor, dtype: str, where: str, first_row: int = 0) -> None:
    """Raises CheckpointError, naming ``where`` and the first bad index, if ``values`` holds NaN or infinity.

    ``values``: a contiguous tensor of TORCH_DTYPES[dtype]; ``first_row`` is the index of its first row in the whole
    tensor. Needs memory for a few million elements, whatever the tensor's size.
    """
    if dtype not in _MASKS or not values.numel():
        return
    integer, mask, meaning = _MASKS[dtype]
    flat = values.view(-1).view(integer)
    for begin in range(0, flat.numel(), _CHUNK):
        masked = flat[begin : begin + _CHUNK] & mask
        if int(masked.max()) != mask:
            continue
        position = begin + int((masked == mask).nonzero()[0])
        index = [int(i) for i in np.unravel_index(position, tuple(values.shape))]
        if index:
            index[0] += first_row
        raise CheckpointError(f"{where}: {meaning} at index {index}; download this file again")
