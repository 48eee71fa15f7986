"""Target states on disk: what a drafter is trained on, stored once for several epochs.

Dimension letters: S tokens of a row, F captured width, H hidden width, T tokens of a shard.

A folder of safetensors shards, a manifest that says what the states are, and for every rank a list
of the shards it wrote, with size, checksum and rows. A shard is listed before it gets its name, so
one without an entry is no shard, and the rows of one that is missing are simply not stored: after a
kill, `StateStore.missing` names them.
"""

import json
import logging
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.batch import Row, States
from data.files import make_folder, read_json, sha256, write_json
from data.json_lines import cut_last_line, read_lines
from data.state_codec import LARGEST, bytes_per_token, compute_dtype, decode, encode
from data.target import Target
from recipes.errors import UserError

__all__ = [
    "StateStore",
    "bytes_per_token",
    "capture_pass",
    "manifest_of",
    "stored_states",
    "summaries",
]

log = logging.getLogger("draftsmith")

SHARD_TOKENS = 16384  # 75 MB for SmolLM2-135M in bf16; the most that a kill can lose
PASS_TOKENS = 4096  # tokens (padding included) of one pass over finished rows
MAX_OPEN = 64  # shards whose file is held open


def manifest_of(target: Target, aux_layers: tuple[int, ...], stored_as: str) -> dict[str, Any]:
    """What stored states must agree in to be used again."""
    return {
        "format": 2,
        "target": target.name,
        "target_revision": target.revision,
        "computed_in": str(target.dtype),
        "aux_layers": list(aux_layers),
        "num_layers": target.num_layers,
        "layer_ids": "k = residual stream after k decoder layers",
        "last_state": "residual stream after the last layer, before the final norm",
        "stored_as": stored_as,
    }


class StateStore:
    """The shards of one folder, for reading and for adding rows.

    Args:
        folder: made if it is not there; a folder that cannot be written fails here.
        manifest: see `manifest_of`. Shards stored under another one are deleted, which is said,
            unless it differs in having more layers only; then `get` gives those asked for.
        rank: of this process. Each writes shards of its own and reads those of all; what others
            write while this one runs is seen after `refresh`.

    Raises:
        UserError: a shard is not as long as it was written, or its header cannot be read.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], rank: int = 0) -> None:
        self.folder, self.rank, self.stored_as = folder, rank, str(manifest["stored_as"])
        make_folder(folder)
        path = folder / "manifest.json"
        self._wanted, self._last = manifest["aux_layers"], manifest["num_layers"]
        stored = read_json(path) if path.exists() else None
        if stored is not None and _covers(stored, manifest):
            manifest = stored
        elif stored is not None:
            log.warning("%s: made from another target, layers or dtype; building it again", folder)
            self.clear()
        if stored != manifest:
            write_json(path, manifest)
        self.aux_layers: tuple[int, ...] = tuple(manifest["aux_layers"])  # that `add` takes
        self._pending: list[tuple[str, States]] = []
        self.refresh()

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the states that `add` takes and `get` gives."""
        return compute_dtype(self.stored_as)

    def refresh(self) -> None:
        """Read the lists of all ranks again."""
        self._shards: list[tuple[Path, str]] = []  # with its checksum
        self._index: dict[str, int] = {}  # row id -> its place in the three arrays
        self._shard_of, self._starts, self._lengths = array("l"), array("q"), array("l")
        self._open: OrderedDict[int, Any] = OrderedDict()
        for listing in sorted(self.folder.glob("shards-*.jsonl")):
            if self.rank in (0, int(listing.stem.rpartition("-")[2])):  # others may be writing
                cut_last_line(listing)
            for entry in {entry["id"]: entry for entry in read_lines(listing)}.values():
                self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        shard = self.folder / entry["id"]
        if not shard.exists():
            log.warning("%s is missing; its %d rows are made again", shard, len(entry["rows"]))
            return
        size = shard.stat().st_size
        if size != entry["bytes"]:
            raise _damaged(shard, f"it has {size} bytes instead of {entry['bytes']}")
        try:
            with safe_open(shard, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise _damaged(shard, f"its header cannot be read: {error}") from error
        self._add_places(shard, entry)

    def _add_places(self, shard: Path, entry: dict[str, Any]) -> None:
        self._shards.append((shard, entry["sha256"]))
        start = 0
        for row_id, length in zip(entry["rows"], entry["lengths"], strict=True):
            self._index[row_id] = len(self._starts)
            self._shard_of.append(len(self._shards) - 1)
            self._starts.append(start)
            self._lengths.append(length)
            start += length

    def verify(self) -> int:
        """Compare every shard with its checksum; returns how many there are.

        Raises:
            UserError: one differs.
        """
        for shard, expected in self._shards:
            if sha256(shard) != expected:
                raise _damaged(shard, "its content is not what was written (checksum)")
        return len(self._shards)

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._index

    def clear(self) -> None:
        """Delete all shards."""
        self._pending = []
        for pattern in ("shard-*", "shards-*.jsonl"):
            for path in self.folder.glob(pattern):
                path.unlink()
        self.refresh()

    def missing(self, row_ids: Sequence[str]) -> list[str]:
        """Those of the rows that are not stored."""
        return [row_id for row_id in row_ids if row_id not in self._index]

    def get(self, row_id: str) -> States:
        """The states of a stored row (KeyError otherwise)."""
        place = self._index[row_id]
        file = self._opened(self._shard_of[place])
        rows = slice(self._starts[place], self._starts[place] + self._lengths[place])
        scaled = self.stored_as in LARGEST

        def states(name: str) -> Tensor:
            scale = file.get_slice(f"{name}_scale")[rows] if scaled else None
            return decode(file.get_slice(name)[rows], scale)

        hidden_SH = states("hidden")
        return States(
            aux_SF=self._of_wanted(states("aux"), hidden_SH),
            hidden_SH=hidden_SH,
            lse_S=file.get_slice("lse")[rows],
            argmax_S=file.get_slice("argmax")[rows],
        )

    def _of_wanted(self, aux_SF: Tensor, hidden_SH: Tensor) -> Tensor:
        """The layers that were asked for, of those that are stored."""
        if self._wanted == list(self.aux_layers):
            return aux_SF
        by_layer = {self._last: hidden_SH}
        by_layer |= zip(self.aux_layers, aux_SF.split(hidden_SH.shape[-1], dim=-1), strict=False)
        return torch.cat([aux_SF[:, :0], *(by_layer[k] for k in self._wanted)], dim=-1)

    def _opened(self, number: int) -> Any:
        if number not in self._open:
            self._open[number] = safe_open(self._shards[number][0], framework="pt")
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def add(self, row_id: str, states: States) -> None:
        """Keep a row; it reaches the disk when a shard is full, or with `flush`."""
        self._pending.append((row_id, states))
        if sum(len(s.hidden_SH) for _, s in self._pending) >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard."""
        if not self._pending:
            return
        states = [s for _, s in self._pending]
        H = states[0].hidden_SH.shape[-1]
        tensors = {
            **encode("aux", torch.cat([s.aux_SF for s in states]), H, self.stored_as),
            **encode("hidden", torch.cat([s.hidden_SH for s in states]), H, self.stored_as),
            "lse": torch.cat([s.lse_S for s in states if s.lse_S is not None]),
            "argmax": torch.cat([s.argmax_S for s in states if s.argmax_S is not None]),
        }
        # A shard that is missing gives its name, and with it its entry in the list, to the next.
        names = (self.folder / f"shard-{self.rank:03d}-{n:05d}.safetensors" for n in count())
        shard = next(name for name in names if not name.exists())
        partial = shard.with_suffix(".tmp")
        try:
            save_file(tensors, partial)
            entry = {
                "id": shard.name,
                "bytes": partial.stat().st_size,
                "sha256": sha256(partial),
                "rows": [row_id for row_id, _ in self._pending],
                "lengths": [len(s.hidden_SH) for s in states],
            }
            listing = self.folder / f"shards-{self.rank:03d}.jsonl"
            with listing.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(shard)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise UserError(f"cannot write {shard}: {error}") from error
        self._add_places(shard, entry)
        self._pending = []


def stored_states(data_dir: Path) -> StateStore:
    """The states of RUN/data as they are.

    Raises:
        UserError: there are none, or a shard is damaged.
    """
    folder = data_dir / "states"
    if not (folder / "manifest.json").exists():
        raise UserError(f"{folder}: no states are stored here; data.states: cached stores them")
    return StateStore(folder, read_json(folder / "manifest.json"))


def _covers(stored: Any, manifest: dict[str, Any]) -> bool:
    """Whether what is stored under one manifest holds what another asks for.

    The state after the last layer is always stored, also where no aux layer has its number.
    """
    if not isinstance(stored, dict) or stored | {"aux_layers": 0} != manifest | {"aux_layers": 0}:
        return False
    return set(manifest["aux_layers"]) <= {*stored["aux_layers"], manifest["num_layers"]}


def _damaged(shard: Path, why: str) -> UserError:
    return UserError(f"{shard} is damaged: {why}; delete it, its rows are made again")


@torch.inference_mode()
def capture_pass(
    target: Target,
    rows: Sequence[Row],
    lengths: Sequence[int],
    aux_layers: tuple[int, ...],
    store: StateStore,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Run the target over finished rows (of these lengths) and store their states.

    The logits are summed up where it is needed: at positions whose next token is supervised.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    while order:
        take = max(1, PASS_TOKENS // lengths[order[-1]])
        batch, order = [rows[i] for i in order[-take:]], order[:-take]
        ids_BS = pad_sequence([row.ids_S for row in batch], batch_first=True)
        states = target.forward(ids_BS.to(target.device), None, aux_layers)
        for b, row in enumerate(batch):
            n = len(row.ids_S)
            hidden_SH = states.hidden_BSH[b, :n]
            lse_S, argmax_S = summaries(target, hidden_SH, row.mask_S.roll(-1))
            store.add(
                row.id,
                States(
                    aux_SF=states.aux_BSF[b, :n].to("cpu", store.compute_dtype),
                    hidden_SH=hidden_SH.to("cpu", store.compute_dtype),
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
