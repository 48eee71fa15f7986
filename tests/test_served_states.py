"""States from a server: what is asked, stored and refused (with the real vLLM: tests/vllm).

The stub here writes files as vLLM's connector does, from a target of the test's own.
"""

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from data import http_calls, served_states
from data.batch import Row, States
from data.hidden_states import StateStore, capture_pass, manifest_of
from data.served_states import fetch_states, layers_asked, serve_command
from data.target import Target
from recipes.data_section import StatesServerSection
from recipes.errors import UserError
from tests.answer_stub import AnswerStub, Reply, answering
from tests.tiny_targets import tiny_target

LAYERS = (1, 2)
ASKED = [1, 2, 3]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("qwen3")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_calls, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(served_states, "FILE_SECONDS", 0.2)


def some_rows(count: int = 6) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    return [
        Row(
            id=f"r{i}",
            ids_S=torch.randint(0, 250, (5 + 3 * i,), generator=generator),
            mask_S=torch.arange(5 + 3 * i) > 2,
        )
        for i in range(count)
    ]


def values(states: States) -> list[Tensor]:
    found = [states.aux_SF, states.hidden_SH, states.lse_S, states.argmax_S]
    return [x for x in found if x is not None]


@contextmanager
def serving(
    target: Target,
    folder: Path,
    layers: list[int] = ASKED,
    spoil: Callable[[int, dict[str, Any]], Reply | None] = lambda *_: None,
) -> Iterator[AnswerStub]:
    """A server of `target` that gives states of `layers`; `spoil` answers a request otherwise."""
    number = 0

    def answer(body: dict[str, Any]) -> Reply:
        nonlocal number
        number += 1
        if (reply := spoil(number, body)) is not None:
            return reply
        ids = torch.tensor(body["prompt"])
        states = target.forward(ids[None], None, tuple(layers))
        logprobs_V = target.logits(states.hidden_BSH[0, -1]).log_softmax(-1)
        path = folder / f"request-{number}.safetensors"
        stacked = states.aux_BSF[0].unflatten(-1, (len(layers), -1))
        save_file({"hidden_states": stacked.contiguous(), "token_ids": ids}, path)
        token = int(logprobs_V.argmax())
        choice = {"token_ids": [token], "logprobs": {"token_logprobs": [float(logprobs_V[token])]}}
        named = "/on/the/server/" + path.name
        return Reply({"choices": [choice], "kv_transfer_params": {"hidden_states_path": named}})

    folder.mkdir(exist_ok=True)
    with answering(answer) as stub:
        yield stub


def fetch(
    stub_url: str, target: Target, folder: Path, rows: list[Row], **fields: Any
) -> StateStore:
    section = StatesServerSection(url=stub_url, folder=folder / "shared", retries=1, **fields)
    store = StateStore(folder / "states", manifest_of(target, LAYERS, "float32"))
    missing = [row for row in rows if row.id not in store]
    fetch_states(section, target, missing, [len(r.ids_S) for r in missing], LAYERS, store)
    return store


def test_what_is_stored_is_what_the_target_here_gives(target: Target, tmp_path: Path) -> None:
    rows = some_rows()
    with serving(target, tmp_path / "shared") as stub:
        store = fetch(stub.url, target, tmp_path, rows)
    body = stub.seen[0][1]
    assert (body["max_tokens"], body["temperature"], body["logprobs"]) == (1, 0.0, 1)
    assert body["model"] == "first-model" and body["prompt"] == rows[0].ids_S.tolist()
    own = StateStore(tmp_path / "own", manifest_of(target, LAYERS, "float32"))
    capture_pass(target, rows, [len(r.ids_S) for r in rows], LAYERS, own)
    for row in rows:
        for served, ours in zip(values(store.get(row.id)), values(own.get(row.id)), strict=True):
            torch.testing.assert_close(served, ours, rtol=1e-4, atol=1e-4)
    assert not list((tmp_path / "shared").iterdir())  # files are deleted once they are read


def test_many_rows_are_in_flight(target: Target, tmp_path: Path) -> None:
    with serving(target, tmp_path / "shared") as stub:
        fetch(stub.url, target, tmp_path, some_rows(), concurrency=3)
    assert 1 < stub.most_in_flight <= 3


def test_a_second_run_asks_for_what_is_missing_alone(target: Target, tmp_path: Path) -> None:
    rows = some_rows(8)

    def gone(number: int, _body: dict[str, Any]) -> Reply | None:
        return Reply("gone", status=503) if number > 4 else None

    with (
        serving(target, tmp_path / "shared", spoil=gone) as stub,
        pytest.raises(UserError, match=r"no answer \(HTTP 503: .*the same command goes on"),
    ):
        fetch(stub.url, target, tmp_path, rows, concurrency=1)
    with serving(target, tmp_path / "shared") as stub:
        store = fetch(stub.url, target, tmp_path, rows, concurrency=1)
    # The first of four answers was the probe; it is asked again.
    asked = [body["prompt"] for _, body, _ in stub.seen]
    assert asked == [row.ids_S.tolist() for row in [rows[3], *rows[3:]]]
    assert store.missing([row.id for row in rows]) == []


def test_no_server_is_told(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.states_server.url .* no list of models.*--estimate"):
        fetch("http://127.0.0.1:9", target, tmp_path, some_rows())


def test_another_model_is_told_by_its_next_token(target: Target, tmp_path: Path) -> None:
    other = tiny_target("llama")
    with (
        serving(other, tmp_path / "shared") as stub,
        pytest.raises(UserError, match="it serves another model, or its last layer is not 3"),
    ):
        fetch(stub.url, target, tmp_path, some_rows())


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([0, 2, 3], r"number 1 are not those of layer 1 .* nearest is layer 0, by .* \[1, 2, 3\]"),
        ([2, 1, 3], r"number 1 are not those of layer 1 .* nearest is layer 2"),
        ([1, 3], r"states \[5, 2, 32\] where \[5, 3, 32\] are needed: .* layers \[1, 2, 3\]"),
        ([1, 2, 2], "another model, or its last layer is not 3"),
    ],
)
def test_wrong_layers_are_told(
    target: Target, tmp_path: Path, layers: list[int], message: str
) -> None:
    with (
        serving(target, tmp_path / "shared", layers) as stub,
        pytest.raises(UserError, match=message),
    ):
        fetch(stub.url, target, tmp_path, some_rows())


def test_a_server_without_its_connector_is_told(target: Target, tmp_path: Path) -> None:
    choice = {"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}
    plain = Reply({"choices": [choice], "kv_transfer_params": None})
    with (
        serving(target, tmp_path / "shared", spoil=lambda *_: plain) as stub,
        pytest.raises(UserError, match=r"an answer without states .*extract_hidden_states"),
    ):
        fetch(stub.url, target, tmp_path, some_rows())


def test_a_refused_row_and_a_folder_that_is_not_shared(target: Target, tmp_path: Path) -> None:
    refusal = Reply({"error": "longer than max_model_len"}, status=400)
    with (
        serving(target, tmp_path / "shared", spoil=lambda *_: refusal) as stub,
        pytest.raises(UserError, match=r"row r0 of 5 tokens is answered by HTTP 400: .*longer"),
    ):
        fetch(stub.url, target, tmp_path, some_rows())
    with (
        serving(target, tmp_path / "elsewhere") as stub,
        pytest.raises(UserError, match=r"cannot be read here: .*data.states_server.folder"),
    ):
        fetch(stub.url, target, tmp_path, some_rows())


def test_states_of_other_tokens_are_told(target: Target, tmp_path: Path) -> None:
    def shifted(_number: int, body: dict[str, Any]) -> Reply | None:
        body["prompt"][0] += 1  # the stub answers for these
        return None

    with (
        serving(target, tmp_path / "shared", spoil=shifted) as stub,
        pytest.raises(UserError, match="states of other tokens than row r0's"),
    ):
        fetch(stub.url, target, tmp_path, some_rows())


def test_a_file_is_read_once_its_writer_is_done(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    lock = tmp_path / "x.safetensors.lock"
    held = lock.open("w")
    fcntl.flock(held, fcntl.LOCK_EX)

    def write() -> None:
        time.sleep(0.3)
        save_file({"a": torch.ones(2)}, path)
        held.close()

    threading.Thread(target=write).start()
    assert served_states._take_file(path, "r")["a"].tolist() == [1.0, 1.0]
    assert not path.exists() and not lock.exists()


def test_the_command_names_the_layers_and_the_folder() -> None:
    assert layers_asked((2, 5), 8) == [2, 5, 8] and layers_asked((2, 8), 8) == [2, 8]
    command = serve_command("org/model", [2, 5, 8], 2048, Path("/mnt/states"))
    assert command.startswith("vllm serve org/model --max-model-len 2049 ")
    method = json.loads(command.split("'")[1])
    assert method["draft_model_config"]["hf_config"] == {
        "eagle_aux_hidden_state_layer_ids": [2, 5, 8]
    }
    connector = json.loads(command.split("'")[3])
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": "/mnt/states"}


def test_the_last_layer_may_be_a_captured_one_too(target: Target, tmp_path: Path) -> None:
    rows = some_rows(2)
    with serving(target, tmp_path / "shared", [1, 3]) as stub:
        section = StatesServerSection(url=stub.url, folder=tmp_path / "shared")
        store = StateStore(tmp_path / "states", manifest_of(target, (1, 3), "float32"))
        fetch_states(section, target, rows, [5, 8], (1, 3), store)
    got = store.get("r1")
    assert torch.equal(got.aux_SF[:, 32:], got.hidden_SH)
    assert replace(rows[1], states=got).states is got
