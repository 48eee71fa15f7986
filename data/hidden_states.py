"""Target states on disk: what a drafter is trained on, stored once for several epochs.

Dimension letters: S tokens of a row, F captured width, H hidden width, T tokens of a shard.

A folder of safetensors shards, each whole or absent, and a manifest that says what the states are.
A row is stored once the shard that holds it is; after a kill the rows of the unfinished shard are
missing, and `StateStore.missing` names them.
"""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.batch import Row, States
from data.files import read_json, write_json
from data.target import DTYPES, Target
from recipes.errors import UserError

log = logging.getLogger("draftsmith")

SHARD_TOKENS = 16384  # 75 MB for SmolLM2-135M in bf16; the most that a kill can lose
PASS_TOKENS = 4096  # tokens (padding included) of one pass over finished rows


def bytes_per_token(num_aux: int, hidden_size: int, dtype: str) -> int:
    """Disk a token takes: captured layers and the last state, and 8 bytes of summary."""
    return (num_aux + 1) * hidden_size * DTYPES[dtype].itemsize + 8


def manifest_of(target: Target, aux_layers: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """What stored states must agree in to be used again."""
    return {
        "target": target.name,
        "target_revision": target.revision,
        "computed_in": str(target.dtype),
        "aux_layers": list(aux_layers),
        "layer_ids": "k = residual stream after k decoder layers",
        "last_state": "residual stream after the last layer, before the final norm",
        "stored_as": dtype,
    }


class StateStore:
    """The shards of one folder, for reading and for adding rows.

    Args:
        folder: made if it is not there; a folder that cannot be written fails here.
        manifest: see `manifest_of`. Shards stored under another one are deleted, which is said.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.dtype = folder, DTYPES[manifest["stored_as"]]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {folder}: {error.strerror}") from error
        path = folder / "manifest.json"
        if path.exists() and read_json(path) != manifest:
            log.warning("%s: made from another target, layers or dtype; building it again", folder)
            self.clear()
        write_json(path, manifest)
        self._places: dict[str, tuple[Path, int, int]] = {}
        self._open: dict[Path, Any] = {}
        self._pending: list[tuple[str, States]] = []
        for shard in sorted(folder.glob("shard-*.safetensors")):
            self._index(shard)

    def _index(self, shard: Path) -> None:
        try:
            with safe_open(shard, framework="pt") as file:
                ids, lengths = (json.loads(file.metadata()[k]) for k in ("ids", "lengths"))
        except Exception as error:
            raise UserError(f"{shard} is damaged ({error}); delete it, it is made again") from error
        start = 0
        for row_id, length in zip(ids, lengths, strict=True):
            self._places[row_id] = (shard, start, length)
            start += length

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._places

    def clear(self) -> None:
        """Delete all shards."""
        self._places, self._open, self._pending = {}, {}, []
        for shard in self.folder.glob("shard-*.safetensors"):
            shard.unlink()

    def missing(self, row_ids: Sequence[str]) -> list[str]:
        """Those of the rows that are not stored."""
        return [row_id for row_id in row_ids if row_id not in self._places]

    def get(self, row_id: str) -> States:
        """The states of a stored row (KeyError otherwise)."""
        shard, start, length = self._places[row_id]
        if shard not in self._open:
            self._open[shard] = safe_open(shard, framework="pt")
        file, rows = self._open[shard], slice(start, start + length)
        return States(
            aux_SF=file.get_slice("aux")[rows],
            hidden_SH=file.get_slice("hidden")[rows],
            lse_S=file.get_slice("lse")[rows],
            argmax_S=file.get_slice("argmax")[rows],
        )

    def add(self, row_id: str, states: States) -> None:
        """Keep a row; it reaches the disk when a shard is full, or with `flush`."""
        self._pending.append((row_id, states))
        if sum(len(s.hidden_SH) for _, s in self._pending) >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard."""
        if not self._pending:
            return
        ids = [row_id for row_id, _ in self._pending]
        states = [s for _, s in self._pending]
        tensors = {
            "aux": torch.cat([s.aux_SF for s in states]).to(self.dtype),
            "hidden": torch.cat([s.hidden_SH for s in states]).to(self.dtype),
            "lse": torch.cat([s.lse_S for s in states if s.lse_S is not None]),
            "argmax": torch.cat([s.argmax_S for s in states if s.argmax_S is not None]),
        }
        numbers = [int(p.stem.split("-")[1]) for p in self.folder.glob("shard-*.safetensors")]
        shard = self.folder / f"shard-{max(numbers, default=-1) + 1:05d}.safetensors"
        metadata = {
            "ids": json.dumps(ids),
            "lengths": json.dumps([len(s.hidden_SH) for s in states]),
        }
        partial = shard.with_suffix(".tmp")
        try:
            save_file(tensors, partial, metadata=metadata)
            partial.replace(shard)
        except Exception as error:
            partial.unlink(missing_ok=True)
            raise UserError(f"cannot write {shard}: {error}") from error
        self._index(shard)
        self._pending = []


@torch.inference_mode()
def capture_pass(
    target: Target,
    rows: Sequence[Row],
    aux_layers: tuple[int, ...],
    store: StateStore,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Run the target over finished rows and store their states.

    The logits are summed up where it is needed: at positions whose next token is supervised.
    """
    order = sorted(rows, key=lambda row: len(row.ids_S))
    while order:
        width = len(order[-1].ids_S)
        take = max(1, PASS_TOKENS // width)
        batch, order = order[-take:], order[:-take]
        ids_BS = pad_sequence([row.ids_S for row in batch], batch_first=True)
        states = target.forward(ids_BS.to(target.device), None, aux_layers)
        for b, row in enumerate(batch):
            n = len(row.ids_S)
            hidden_SH = states.hidden_BSH[b, :n]
            lse_S, argmax_S = summaries(target, hidden_SH, row.mask_S.roll(-1))
            store.add(
                row.id,
                States(
                    aux_SF=states.aux_BSF[b, :n].to("cpu", store.dtype),
                    hidden_SH=hidden_SH.to("cpu", store.dtype),
                    lse_S=lse_S.cpu(),
                    argmax_S=argmax_S.cpu(),
                ),
            )
        advance(len(batch))
    store.flush()


def summaries(
    target: Target, hidden_SH: Tensor, needed_S: Tensor, chunk: int = 256
) -> tuple[Tensor, Tensor]:
    """Logsumexp (fp32) and argmax (int32) of the target's logits at the needed positions.

    0 elsewhere. Taken chunk by chunk, so that the logits of all positions never exist together.
    """
    lse_S = torch.zeros(len(hidden_SH), device=hidden_SH.device)
    argmax_S = torch.zeros(len(hidden_SH), dtype=torch.int32, device=hidden_SH.device)
    for part in needed_S.to(hidden_SH.device).nonzero()[:, 0].split(chunk):
        logits = target.logits(hidden_SH[part])
        lse_S[part] = logits.logsumexp(-1)
        argmax_S[part] = logits.argmax(-1).to(torch.int32)
    return lse_S, argmax_S
