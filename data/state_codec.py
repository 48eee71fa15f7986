"""Target states as they lie on disk: as they are, or in 8 bits with a scale.

Dimension letters: S tokens, F width (a whole number of layers of H), N layers side by side.

A token's states of one layer share a scale, its largest absolute value over the largest code: the
states of different layers and tokens differ by orders of magnitude (the first token's most of all).
"""

import torch
from torch import Tensor

STORED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
LARGEST = {"float8_e4m3": 448.0, "int8": 127.0}


def compute_dtype(stored_as: str) -> torch.dtype:
    """What states are handled in before they are stored and after they are read."""
    return torch.bfloat16 if stored_as in LARGEST else STORED[stored_as]


def bytes_per_token(num_aux: int, hidden_size: int, stored_as: str) -> int:
    """Disk a token takes: captured layers and the last state, their scales, 8 bytes of summary."""
    scales = 4 * (num_aux + 1) if stored_as in LARGEST else 0
    return (num_aux + 1) * hidden_size * STORED[stored_as].itemsize + scales + 8


def encode(name: str, states_SF: Tensor, hidden_size: int, stored_as: str) -> dict[str, Tensor]:
    """The tensors of a shard that hold some states: `name`, and `name_scale` [S, N] in 8 bits."""
    if stored_as not in LARGEST:
        return {name: states_SF.to(STORED[stored_as])}
    states_SNH = states_SF.float().unflatten(-1, (-1, hidden_size))
    scale_SN = states_SNH.abs().amax(-1) / LARGEST[stored_as]
    codes_SNH = states_SNH / scale_SN.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    if stored_as == "int8":
        codes_SNH = codes_SNH.round()
    codes_SF = codes_SNH.clamp(-LARGEST[stored_as], LARGEST[stored_as]).flatten(-2)
    return {name: codes_SF.to(STORED[stored_as]), f"{name}_scale": scale_SN}


def decode(codes_SF: Tensor, scale_SN: Tensor | None) -> Tensor:
    """States of what `encode` gave: bf16 where they were in 8 bits."""
    if scale_SN is None:
        return codes_SF
    num_layers = scale_SN.shape[-1]
    if num_layers == 0:
        return codes_SF.bfloat16()
    states_SNH = codes_SF.float().unflatten(-1, (num_layers, -1)) * scale_SN[..., None]
    return states_SNH.flatten(-2).bfloat16()
