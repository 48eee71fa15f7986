"""Small real tokenizers with chat templates in the styles that the loss mask must cope with."""

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from data.conversations import Row

CHATML = """
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""

CHATML_TAGGED = """
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' -%}
{% generation %}{{ m.content }}{% endgeneration %}
{%- else %}{{ m.content }}{% endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""

# Thinking of answers before the last user turn is dropped; later ones always show a think block.
QWEN3 = """
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' -%}
{%- set think = m.reasoning_content or '' -%}
{%- set said = m.content -%}
{%- if '</think>' in said -%}
{%- set think = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last and (loop.last or think) -%}
{{ '<think>\n' + think + '\n</think>\n\n' }}
{%- endif -%}
{{ said }}
{%- for call in m.tool_calls or [] -%}
{%- if said or not loop.first %}{{ '\n' }}{% endif -%}
{{ '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
{%- endfor -%}
{%- else %}{{ m.content }}{% endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}
{{ '<think>\n\n</think>\n\n' }}
{%- endif -%}
{%- endif -%}
"""

LLAMA3 = """
{{- bos_token -}}
{%- for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}
"""

MISTRAL = """
{{- bos_token -}}
{%- set ns = namespace(index=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != (ns.index % 2 == 0) -%}
{{ raise_exception('roles must alternate') }}
{%- endif -%}
{%- set ns.index = ns.index + 1 -%}
{%- endif -%}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'tool' %}{{ '[RESULT] ' + m.content }}
{%- elif m.tool_calls -%}
{{ '[CALLS] [' }}
{%- for call in m.tool_calls %}{{ (call.function | tojson) + ', 9' }}{% endfor -%}
{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif -%}
{%- endfor -%}
"""

GEMMA = """
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate') }}
{%- endif -%}
{%- set role = 'model' if m.role == 'assistant' else m.role -%}
{{ '<start_of_turn>' + role + '\n' + (m.content | trim) + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif -%}
"""

# The last answer shows its analysis and ends with <|return|>; earlier ones show the final channel.
HARMONY = """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' -}}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if loop.last and m.reasoning_content -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
{%- endif -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
{%- elif m.role == 'system' -%}
{{ '<|start|>developer<|message|># Instructions ' + m.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif -%}
"""

# One token a turn mark, so that positions can be counted by eye.
SHORT = """
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ '<u>' + m.content + '<e>' }}
{%- else %}{{ '<a>' }}{% generation %}{{ m.content + '<e>' }}{% endgeneration %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<a>' }}{% endif -%}
"""

SPECIAL = {
    CHATML: ["<|im_start|>", "<|im_end|>"],
    CHATML_TAGGED: ["<|im_start|>", "<|im_end|>"],
    QWEN3: ["<|im_start|>", "<|im_end|>"],
    LLAMA3: ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    MISTRAL: ["<s>", "</s>"],
    GEMMA: ["<bos>", "<end_of_turn>", "<start_of_turn>"],
    HARMONY: ["<|start|>", "<|return|>", "<|end|>", "<|channel|>", "<|message|>"],
    SHORT: ["<u>", "<e>", "<a>"],
}


_BYTES = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def chat_tokenizer(
    template: str | None, *, merges: bool = True, adds_bos: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the template's special tokens: first the BOS, then the EOS, then others.

    Without `merges` every byte is a token. With `adds_bos` the post-processor adds a BOS as well.
    """
    core = Tokenizer(models.BPE())
    pieces = Regex(
        r"\s*\n+| ?\S+|\s+"
    )  # newlines stay together, as in the tokenizers of Llama 3 on
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320 if merges else 256,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "assistant user system alpha beta gamma delta beta beta think SELECT 1 the answer"
    core.train_from_iterator([f"{words} {words}\n\n"] * 4, trainer)
    special = SPECIAL[template or CHATML]
    core.add_special_tokens([AddedToken(name, special=True) for name in special])
    if adds_bos:
        bos = (special[0], core.token_to_id(special[0]))
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]} $A", special_tokens=[bos]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=special[0], eos_token=special[1]
    )
    tokenizer.chat_template = template
    return tokenizer


def family_tokenizer(template: str, bos: str, eos: str, *special: str) -> PreTrainedTokenizerFast:
    """A token a byte, with the special tokens that a real template is written for."""
    core = Tokenizer(models.BPE(vocab=_BYTES, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    names = dict.fromkeys((bos, eos, *special))
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def marked(tokenizer: PreTrainedTokenizerFast, row: Row) -> str:
    """The row's text with each supervised run between >> and <<."""
    text, run, before = "", [], 0
    for token_id, flag in [*zip(row.ids, row.mask, strict=True), (None, 0)]:
        if flag != before or token_id is None:
            text += tokenizer.decode(run, skip_special_tokens=False)
            text += {(0, 1): ">>", (1, 0): "<<"}.get((before, flag), "")
            run, before = [], flag
        run.append(token_id)
    return text


def supervised(tokenizer: PreTrainedTokenizerFast, row: Row) -> list[str]:
    """Text of each run of tokens with mask 1."""
    assert len(row.ids) == len(row.mask)
    runs: list[list[int]] = []
    for position, (token_id, flag) in enumerate(zip(row.ids, row.mask, strict=True)):
        if flag and (position == 0 or not row.mask[position - 1]):
            runs.append([])
        if flag:
            runs[-1].append(token_id)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]
