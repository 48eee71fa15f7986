"""One real vLLM writes the answers and gives their states; a drafter is trained without the layers.

The server runs extract_hidden_states with the connector that vLLM brings (repaired for CPUs by
tests/vllm/plugin). It takes about half a minute to start.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data.embedded import byte_tokenizer
from data.json_lines import read_lines
from data.pipeline import aux_layers_of, prepare
from data.served_states import layers_asked, serve_command
from data.target import Target
from eval.engines import start_vllm
from recipes.errors import UserError
from recipes.schema import Recipe
from tests.tiny_targets import tiny_model
from tests.vllm.ours_half import MAX_MODEL_LEN, TARGET_SHAPE
from train.run import run

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

LAYERS = [1, 4, 8]  # the drafter's; the last of them is the target's last as well
EOS = 257
PROMPTS = ["abc", "Why is it so?", "abababab", "1 2 3", "x", "again and again", "One more", "?"]


def recipe_for(folder: Path, url: str, **changes: Any) -> Recipe:
    """Answers and states by the server at `url`; nothing but the target's ends here."""
    data = {
        "sources": [str(folder / "prompts.jsonl")],
        "num_prompts": len(PROMPTS),
        "decontaminate": [],
        "max_length": 96,
        "max_prompt_tokens": 64,
        "max_new_tokens": 24,
        "heldout_fraction": 0.25,
        "server": {"url": url},
        "states": "cached",
        "capture": "pass",
        "states_dtype": "float32",
        "states_server": {"url": url, "folder": str(folder / "states")},
    }
    return Recipe.model_validate(
        {
            "name": "wire",
            "output_dir": folder,
            "target": {
                "model": str(folder / "target"),
                "dtype": "float32",
                "device": "cpu",
                "weights": "ends",
            },
            "data": data | changes.pop("data", {}),
            "drafter": {"aux_layers": LAYERS, "draft_vocab_size": None},
            "loss": {"num_steps": 2},
            "train": {"max_steps": 4, "batch_tokens": 512, "validate_prompts": 0},
        }
        | changes
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("wire")
    model = tiny_model("llama", **TARGET_SHAPE)
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 3  # so that some answers stop and some do not
    model.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    layers = layers_asked(LAYERS, TARGET_SHAPE["num_hidden_layers"])
    words = serve_command("", layers, MAX_MODEL_LEN - 1, folder / "states")
    speculative, connector = words.split("'")[1], words.split("'")[3]
    flags = ["--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "4"]
    flags += ["--dtype", "float32", "--speculative-config", speculative]
    flags += ["--kv-transfer-config", connector]
    python = Path(os.environ["VLLM_ENV"]) / "bin" / "python"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        command = f"{python} -m vllm.entrypoints.openai.api_server"
        with start_vllm(command, str(folder / "target"), flags, folder / "server.log") as server:
            yield folder, server.url


def test_answers_and_states_come_over_the_wire_and_a_drafter_learns_from_them(served):
    folder, url = served
    recipe = recipe_for(folder, url)
    drafter = run(recipe, resume=False)
    assert (drafter / "model.safetensors").exists()

    responses = list(read_lines(recipe.run_dir / "data/responses.jsonl"))
    assert len(responses) == len(PROMPTS)
    finishes = {answer["finish"] for record in responses for answer in record["answers"]}
    assert finishes == {"stop", "length"}
    for record in responses:
        for answer in record["answers"]:
            ended = answer["answer_ids"][-1] == EOS
            assert ended == (answer["finish"] == "stop")

    whole = Target.load(recipe.target.model_copy(update={"weights": "whole"}))
    prepared = prepare(recipe, Target.load(recipe.target))
    assert prepared.store is not None and len(prepared.store.missing(prepared.train.ids)) == 0
    for row in [*prepared.train, *prepared.heldout]:
        ours = whole.forward(row.ids_S[None], None, tuple(LAYERS))
        theirs = prepared.store.get(row.id)
        torch.testing.assert_close(theirs.aux_SF, ours.aux_BSF[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(theirs.hidden_SH, ours.hidden_BSH[0], rtol=1e-4, atol=1e-4)
    lines = (recipe.run_dir / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert any("valid/tau_teacher_forced" in line for line in metrics)
    assert not any("valid/tau" in line for line in metrics)  # nothing was decoded
    # A file is deleted once it is read; what is left are those of the answers, which nobody reads.
    assert len(list((folder / "states").glob("*.safetensors"))) == len(PROMPTS)


def test_greedy_answers_are_the_targets_own(served):
    folder, url = served
    recipe = recipe_for(folder, url, name="greedy", data={"greedy_share": 1.0})
    target = Target.load(recipe.target.model_copy(update={"weights": "whole"}))
    prepare(recipe, target)
    for record in read_lines(recipe.run_dir / "data/responses.jsonl"):
        (answer,) = record["answers"]
        ids = [*answer["prompt_ids"], *answer["answer_ids"]]
        logits_SV = target.logits(target.forward(torch.tensor([ids])).hidden_BSH[0])
        start = len(answer["prompt_ids"])
        assert logits_SV[start - 1 : -1].argmax(-1).tolist() == answer["answer_ids"]


def test_chat_answers_keep_their_finish_and_their_messages(served):
    folder, url = served
    server = {"url": url, "api": "chat"}
    recipe = recipe_for(folder, url, name="chat", data={"server": server})
    prepared = prepare(recipe, Target.load(recipe.target))
    assert len(prepared.train) + len(prepared.heldout) > 0
    for record in read_lines(recipe.run_dir / "data/responses.jsonl"):
        assert [m["role"] for m in record["messages"]] == ["user", "assistant"]
        assert record["messages"][0]["content"] in PROMPTS
        assert record["finish"] in ("stop", "length")


def test_layers_the_server_was_not_started_with_are_refused(served):
    folder, url = served
    changed = {"aux_layers": [1, 5, 8], "draft_vocab_size": None}
    recipe = recipe_for(folder, url, name="other", drafter=changed)
    whole = Target.load(recipe.target.model_copy(update={"weights": "whole"}))
    assert aux_layers_of(recipe, whole) == (1, 5, 8)
    with pytest.raises(UserError, match=r"not those of layer 5 .*nearest is layer 4, by"):
        prepare(recipe, whole)
