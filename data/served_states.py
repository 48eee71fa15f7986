"""Target states from a running vLLM: rows go out as token ids, states come back in files.

Dimension letters: S tokens of a row, L layers asked for, F captured width, H hidden width.

vLLM (0.32) keeps the states of chosen layers by its method extract_hidden_states and writes them,
one safetensors file a request, into a folder that this machine sees as well (a shared file system
where the server is elsewhere). So states are those of the engine's own kernels, as served later.

What comes is checked: ids and shapes of every row; for a first row also the token that the server
chose, against our head over its last state, and all layers against the target, if it is whole here.
"""

import asyncio
import fcntl
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data.batch import Row, States
from data.hidden_states import StateStore, summaries
from data.http_calls import NoAnswerError, async_client, describe, first_model, post
from data.target import Target
from recipes.data_section import StatesServerSection
from recipes.errors import UserError

log = logging.getLogger("draftsmith")

FILE_SECONDS = 5.0  # until a file that the server has named is seen here
LOGPROB_GAP = 0.1  # nats between the server's own and ours over its state; bf16 differs by 0.02
STATE_GAP = 0.05  # relative, between the server's states of a layer and ours; bf16: below 0.02


class Served(NamedTuple):
    """States of a row, and the token that the server would write next with its log-probability."""

    states_SLH: Tensor
    next_token: int
    next_logprob: float


def layers_asked(aux_layers: Sequence[int], num_layers: int) -> list[int]:
    """Layer ids that the server has to be started with: those of the drafter, and the last."""
    return sorted({*aux_layers, num_layers})


def serve_command(model: str, layers: Sequence[int], max_length: int, folder: Path | None) -> str:
    """The command that starts such a server, for a person."""
    method = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder or "/shared/states")},
    }
    return (
        f"vllm serve {model} --max-model-len {max_length + 1} "
        f"--speculative-config '{json.dumps(method)}' "
        f"--kv-transfer-config '{json.dumps(connector)}'"
    )


def fetch_states(
    section: StatesServerSection,
    target: Target,
    rows: Sequence[Row],
    lengths: Sequence[int],
    aux_layers: tuple[int, ...],
    store: StateStore,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Ask for the states of finished rows (of these lengths) and store them.

    Raises:
        UserError: no such server, it gives other states than asked for, or it stopped answering;
            what came before is stored.
    """
    if rows:
        asyncio.run(_fetch(section, target, rows, lengths, aux_layers, store, advance))


async def _fetch(
    section: StatesServerSection,
    target: Target,
    rows: Sequence[Row],
    lengths: Sequence[int],
    aux_layers: tuple[int, ...],
    store: StateStore,
    advance: Callable[[int], None],
) -> None:
    async with async_client(section.concurrency, section.timeout) as client:
        server = _Server(section, target, layers_asked(aux_layers, target.num_layers), client)
        await server.find_model()
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        first = rows[order[0]]
        check_states(target, first, await server.ask(first), server.layers)
        todo = iter(order)

        async def worker() -> None:
            for i in todo:  # shared: each takes the next
                row = rows[i]
                served = await server.ask(row)
                store.add(row.id, to_states(served, row, target, aux_layers, store.compute_dtype))
                advance(1)

        tasks = [asyncio.create_task(worker()) for _ in range(section.concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            store.flush()


class _Server:
    """One client, and how it asks."""

    def __init__(
        self,
        section: StatesServerSection,
        target: Target,
        layers: list[int],
        client: httpx.AsyncClient,
    ) -> None:
        self.section, self.target, self.layers, self.client = section, target, layers, client
        self.url = section.url.rstrip("/").removesuffix("/v1")
        self.model = section.model

    async def find_model(self) -> None:
        """The name of the first model served, where the recipe gives none."""
        if self.model is not None:
            return
        try:
            self.model = await first_model(self.client, self.url)
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"data.states_server.url {self.section.url}: no list of models there ({error!r}); "
                "start the server, as `python data/prepare.py RECIPE --estimate` says"
            ) from error

    async def ask(self, row: Row) -> Served:
        """States of one row."""
        ids = row.ids_S.tolist()
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        body |= {"logprobs": 1, "return_token_ids": True}
        url = f"{self.url}/v1/completions"
        try:
            response = await post(self.client, url, body, self.section.retries)
        except NoAnswerError as error:
            raise UserError(
                f"data.states_server {url}: no answer ({error}); what came is kept, the same "
                "command goes on"
            ) from error
        if not response.is_success:
            raise UserError(
                f"data.states_server {url}: row {row.id} of {len(ids)} tokens is answered by "
                f"{describe(response)}"
            )
        path, token, logprob = self._read(response)
        tensors = await asyncio.to_thread(_take_file, self._local(path), row.id)
        shape = list(tensors["hidden_states"].shape)
        wanted = [len(ids), len(self.layers), self.target.hidden_size]
        if tensors["token_ids"].tolist() != ids:
            raise UserError(f"data.states_server {url}: states of other tokens than row {row.id}'s")
        if shape != wanted:
            raise UserError(
                f"data.states_server {url}: row {row.id} has states {shape} where {wanted} are "
                f"needed: start the server of {self.target.name} with layers {self.layers}, as "
                "`python data/prepare.py RECIPE --estimate` says"
            )
        return Served(tensors["hidden_states"], token, logprob)

    def _read(self, response: httpx.Response) -> tuple[str, int, float]:
        try:
            reply = response.json()
            choice = reply["choices"][0]
            token, logprob = choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0]
            path = (reply["kv_transfer_params"] or {})["hidden_states_path"]
            return str(path), int(token), float(logprob)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"data.states_server {self.url}: an answer without states ({error!r}): "
                f"{response.text[:200]}; start vLLM with extract_hidden_states and its connector, "
                "as `python data/prepare.py RECIPE --estimate` says"
            ) from error

    def _local(self, path: str) -> Path:
        """Where this machine sees a file of the server's."""
        folder = self.section.folder
        return Path(path) if folder is None else folder / Path(path).name


def _take_file(path: Path, row_id: str) -> dict[str, Tensor]:
    """Read a file of states once its writer has let go of its lock, and delete both."""
    lock = path.with_name(path.name + ".lock")
    until = time.monotonic() + FILE_SECONDS
    while not path.exists() and not lock.exists() and time.monotonic() < until:
        time.sleep(0.05)
    try:
        if lock.exists():
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"states of row {row_id}, which the server wrote to {path}, cannot be read here: "
            f"{error}; set data.states_server.folder to the folder as this machine sees it, and "
            "run both as one user: vLLM writes files that nobody else may read"
        ) from error
    path.unlink()
    lock.unlink(missing_ok=True)
    return tensors


def to_states(
    served: Served, row: Row, target: Target, aux_layers: tuple[int, ...], dtype: torch.dtype
) -> States:
    """As a training step reads them; the logits are summed up by the target's head here."""
    place = {k: i for i, k in enumerate(layers_asked(aux_layers, target.num_layers))}
    hidden_SH = served.states_SLH[:, place[target.num_layers]]
    aux_SF = served.states_SLH[:, [place[k] for k in aux_layers]].flatten(1)
    hidden = hidden_SH.to(target.device, target.dtype)
    with torch.inference_mode():
        lse_S, argmax_S = summaries(target, hidden, row.mask_S.roll(-1))
    return States(
        aux_SF=aux_SF.to(dtype),
        hidden_SH=hidden_SH.to(dtype),
        lse_S=lse_S.cpu(),
        argmax_S=argmax_S.cpu(),
    )


@torch.inference_mode()
def check_states(target: Target, row: Row, served: Served, layers: Sequence[int]) -> None:
    """Compare a row's states with what the target makes of it.

    Raises:
        UserError: the server has another model, or gives other layers than `layers`.
    """
    last_H = served.states_SLH[-1, -1].to(target.device, target.dtype)
    ours = float(target.logits(last_H).log_softmax(-1)[served.next_token])
    if not abs(ours - served.next_logprob) <= LOGPROB_GAP:
        raise UserError(
            f"data.states_server: the head of {target.name} gives the server's next token "
            f"{served.next_token} a log-probability of {ours:.3f} over the server's last state, "
            f"the server {served.next_logprob:.3f}: it serves another model, or its last layer is "
            f"not {layers[-1]}; start it with layers {list(layers)}"
        )
    if not target.whole:
        log.info("last layer of the states checked by the head; layers before it are not loaded")
        return
    every = tuple(range(target.num_layers + 1))
    found = target.forward(row.ids_S[None].to(target.device), None, every).aux_BSF[0].float().cpu()
    by_layer = found.unflatten(-1, (len(every), -1)).unbind(1)
    for place, k in enumerate(layers):
        states_SH = served.states_SLH[:, place].float()
        gaps = [float((states_SH - x).norm() / x.norm()) for x in by_layer]
        if not gaps[k] <= STATE_GAP:
            nearest = min(every, key=gaps.__getitem__)
            raise UserError(
                f"data.states_server: its states number {place + 1} are not those of layer {k} of "
                f"{target.name} (they differ by {gaps[k]:.2g} of their length; nearest is layer "
                f"{nearest}, by {gaps[nearest]:.2g}): start it with layers {list(layers)} of this "
                "very model"
            )
