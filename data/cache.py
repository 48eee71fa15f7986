"""Keys and values of one model, with a length of its own for every row.

Dimension letters: B rows, T places in the cache, S new tokens, N kv heads, D head width, P nodes of
a draft tree behind the committed places (those of earlier passes and the S new ones), A accepted
nodes.

Rollback never copies: a row's length says how many of its places hold committed tokens, and
whatever lies behind is overwritten by the next append. That is what speculative decoding needs
(rejected tokens are forgotten by lowering a number), and what continuous batching needs (a place
is handed to a new row by setting its length to zero).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_FIXED = 256  # places of a cache of fixed width, at least
MOST_FIXED = 64  # new tokens of a pass that looks at all places


class TreeNodes(NamedTuple):
    """How the tokens of a pass hang together when they are a tree and not a chain.

    The P nodes lie behind the committed places of each row in this order; the last S are new.

    depths_BP: int64; a node stands at position length + depth, so nodes may share one.
    sees_BSP: bool; which nodes each new one attends to: its ancestors and itself (never none).
    """

    depths_BP: Tensor
    sees_BSP: Tensor


class KVCache:
    """Static key/value buffers for `num_layers` attention layers.

    Args:
        num_layers: attention layers that write into this cache.
        batch_size: rows (B).
        max_length: places a row has (T); appending past it raises IndexError.
        num_kv_heads, head_dim: shape of one entry (N, D).
        dtype, device: of the buffers.
        fixed_width: max_length is rounded up to a power of two, and passes of few tokens behind a
            prompt (those with `fixed`) look at all places, so that their shapes do not change: what
            torch.compile and CUDA graphs want.
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
        fixed_width: bool = False,
    ) -> None:
        if fixed_width:
            max_length = max(LEAST_FIXED, 1 << (max_length - 1).bit_length())
        shape = (batch_size, num_kv_heads, max_length, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.max_length = max_length
        self.rows_B = torch.arange(batch_size, device=device)
        self.fixed_width, self.fixed = fixed_width, False
        self.warmed: set[tuple[int, ...]] = set()  # of data.compiled
        self._mark_static()
        self._window = (0, 0)  # (places that attention has to look at, new tokens) of this pass

    @property
    def batch_size(self) -> int:
        return int(self.lengths_B.shape[0])

    def _mark_static(self) -> None:
        """Tell CUDA graphs that the buffers stay where they are, though they are written to."""
        if self.fixed_width:
            for buffer in (*self.keys, *self.values):
                torch._dynamo.mark_static_address(buffer)

    def begin(self, num_new: int, nodes: TreeNodes | None = None) -> None:
        """Announce a forward pass over `num_new` tokens in every row (before the first append).

        Args:
            nodes: the tree that the new tokens belong to; None = each follows the one before it.

        Raises:
            IndexError: the pass needs more places than there are.
        """
        num_nodes = num_new if nodes is None else nodes.depths_BP.shape[1]
        longest = int(self.lengths_B.max()) + num_nodes
        if longest > self.max_length:
            raise IndexError(
                f"the cache has {self.max_length} places and this pass needs {longest}"
            )
        self.fixed = self.fixed_width and num_nodes < longest and num_new <= MOST_FIXED
        self._window = (self.max_length if self.fixed else longest, num_new)
        self._nodes = nodes
        self.masks: dict[int | None, Tensor] = {}
        offsets_S = torch.arange(num_nodes - num_new, num_nodes, device=self.lengths_B.device)
        self.places_BS = self.lengths_B[:, None] + offsets_S[None]
        self.positions_BS = self.places_BS
        if nodes is not None:
            depths_BS = nodes.depths_BP[:, num_nodes - num_new :]
            self.positions_BS = self.lengths_B[:, None] + depths_BS
        self.aligned = not self.fixed and bool((self.lengths_B == self.lengths_B[0]).all())
        self.start = longest - num_new

    def append(self, layer: int, keys_BNSD: Tensor, values_BNSD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new entries behind what each row has; return views of all that may be read."""
        longest = self._window[0]
        keys, values = self.keys[layer], self.values[layer]
        if self.aligned:
            keys[:, :, self.start : longest] = keys_BNSD
            values[:, :, self.start : longest] = values_BNSD
        else:
            rows_B1 = self.rows_B[:, None]
            keys[rows_B1, :, self.places_BS] = keys_BNSD.transpose(1, 2)
            values[rows_B1, :, self.places_BS] = values_BNSD.transpose(1, 2)
        return keys[:, :, :longest], values[:, :, :longest]

    def mask_BST(self, sliding_window: int | None = None) -> Tensor:
        """True where new token s of row b may look at place t.

        In a chain: places 0 .. length_b + s. In a tree: the committed places and the nodes that s
        sees. A window counts positions, of which nodes of one depth share one. The same for every
        layer of a pass, so it is made once.
        """
        if sliding_window in self.masks:
            return self.masks[sliding_window]
        places_T = torch.arange(self._window[0], device=self.lengths_B.device)
        if self._nodes is None:
            mask_BST = places_T[None, None] <= self.positions_BS[..., None]
            place_positions_BT = places_T[None]
        else:
            mask_BST, place_positions_BT = self._tree_mask(places_T, self._nodes)
        if sliding_window is not None:
            oldest_BS1 = self.positions_BS[..., None] - sliding_window
            mask_BST = mask_BST & (place_positions_BT[:, None] > oldest_BS1)
        self.masks[sliding_window] = mask_BST
        return mask_BST

    def _tree_mask(self, places_T: Tensor, nodes: TreeNodes) -> tuple[Tensor, Tensor]:
        """Mask without a window, and the position of what lies at each place (B x T)."""
        num_new, num_nodes = nodes.sees_BSP.shape[1:]
        node_BT = places_T[None] - self.lengths_B[:, None]
        committed_BT, is_node_BT = node_BT < 0, (node_BT >= 0) & (node_BT < num_nodes)
        node_BT = node_BT.clamp(0, num_nodes - 1)
        sees_BST = nodes.sees_BSP.gather(2, node_BT[:, None].expand(-1, num_new, -1))
        mask_BST = committed_BT[:, None] | (sees_BST & is_node_BT[:, None])
        depths_BT = nodes.depths_BP.gather(1, node_BT)
        return mask_BST, torch.where(
            committed_BT, places_T[None], self.lengths_B[:, None] + depths_BT
        )

    def keep_path(self, path_BA: Tensor, num_B: Tensor) -> None:
        """Commit some nodes of the tree just appended: they move up behind each row's length.

        Nothing is computed again: node n of a path has depth n, so its key was rotated to the
        position that it takes now.

        Args:
            path_BA: int64 node indices, ascending within a row; entries from num_B on are padding
                (any valid index).
            num_B: how many nodes of the path each row commits.
        """
        offsets_A = torch.arange(path_BA.shape[1], device=path_BA.device)
        if bool(((path_BA != offsets_A) & (offsets_A < num_B[:, None])).any()):
            rows_B1 = self.rows_B[:, None]
            old_BA = self.lengths_B[:, None] + path_BA
            new_BA = self.lengths_B[:, None] + offsets_A
            for buffer in (*self.keys, *self.values):
                buffer[rows_B1, :, new_BA] = buffer[rows_B1, :, old_BA]
        self.advance(num_B)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with some of the rows; only those that take another's place are copied.

        Args:
            rows: which row each of the rows left is; rows[r] is r itself, or a row that would
                else be cut off (from len(rows) on).
        """
        num = len(rows)
        for r, row in enumerate(rows):
            if r != row:
                end = int(self.lengths_B[row])
                for buffer in (*self.keys, *self.values):
                    buffer[r, :, :end] = buffer[row, :, :end]
        self.keys = [keys[:num] for keys in self.keys]
        self.values = [values[:num] for values in self.values]
        self.lengths_B = self.lengths_B[list(rows)]
        self.rows_B = self.rows_B[:num]
        self._mark_static()

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
