"""Keys and values of one model, with a length of its own for every row.

Dimension letters: B rows, T places in the cache, S new tokens, N kv heads, D head width.

Rollback never copies: a row's length says how many of its places hold committed tokens, and
whatever lies behind is overwritten by the next append. That is what speculative decoding needs
(rejected tokens are forgotten by lowering a number), and what continuous batching needs (a place
is handed to a new row by setting its length to zero).
"""

import torch
from torch import Tensor


class KVCache:
    """Static key/value buffers for `num_layers` attention layers.

    Args:
        num_layers: attention layers that write into this cache.
        batch_size: rows (B).
        max_length: places a row has (T); appending past it raises IndexError.
        num_kv_heads, head_dim: shape of one entry (N, D).
        dtype, device: of the buffers.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (batch_size, num_kv_heads, max_length, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.max_length = max_length
        self.rows_B = torch.arange(batch_size, device=device)
        self._window = (0, 0)  # (places that attention has to look at, new tokens) of this pass

    @property
    def batch_size(self) -> int:
        return int(self.lengths_B.shape[0])

    def begin(self, num_new: int) -> None:
        """Announce a forward pass over `num_new` tokens in every row (before the first append)."""
        longest = int(self.lengths_B.max()) + num_new
        if longest > self.max_length:
            raise IndexError(
                f"the cache has {self.max_length} places and this pass needs {longest}"
            )
        self._window = (longest, num_new)
        self._masks: dict[int | None, Tensor] = {}
        offsets_S = torch.arange(num_new, device=self.lengths_B.device)
        self.positions_BS = self.lengths_B[:, None] + offsets_S[None]
        self.aligned = bool((self.lengths_B == self.lengths_B[0]).all())
        self.start = longest - num_new

    def append(self, layer: int, keys_BNSD: Tensor, values_BNSD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new entries behind each row's length; return views of all that may be read."""
        longest = self._window[0]
        keys, values = self.keys[layer], self.values[layer]
        if self.aligned:
            keys[:, :, self.start : longest] = keys_BNSD
            values[:, :, self.start : longest] = values_BNSD
        else:
            rows_B1 = self.rows_B[:, None]
            keys[rows_B1, :, self.positions_BS] = keys_BNSD.transpose(1, 2)
            values[rows_B1, :, self.positions_BS] = values_BNSD.transpose(1, 2)
        return keys[:, :, :longest], values[:, :, :longest]

    def mask_BST(self, sliding_window: int | None = None) -> Tensor:
        """True where new token s of row b may look at place t: places 0 .. length_b + s.

        The same for every layer of a pass, so it is made once.
        """
        if sliding_window in self._masks:
            return self._masks[sliding_window]
        places_T = torch.arange(self._window[0], device=self.lengths_B.device)
        mask_BST = places_T[None, None] <= self.positions_BS[..., None]
        if sliding_window is not None:
            mask_BST &= places_T[None, None] > self.positions_BS[..., None] - sliding_window
        self._masks[sliding_window] = mask_BST
        return mask_BST

    def advance(self, num_tokens_B: Tensor | int) -> None:
        """Commit the first `num_tokens` of the tokens just appended, row by row."""
        self.lengths_B += num_tokens_B

    def rollback(self, lengths_B: Tensor | int) -> None:
        """Forget what lies behind `lengths_B`; a length above the present one is an error."""
        new_B = torch.as_tensor(lengths_B, device=self.lengths_B.device).expand(self.batch_size)
        if bool((new_B > self.lengths_B).any()) or bool((new_B < 0).any()):
            raise ValueError(
                f"rollback to {new_B.tolist()} from lengths {self.lengths_B.tolist()}: "
                "a row can only become shorter, down to 0"
            )
        self.lengths_B = new_B.clone()
