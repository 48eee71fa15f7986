"""Keys of `data`: prompts, the target's answers to them, and the rows made of both."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from recipes.section import Count, CountOrZero, Positive, Section, Share, TopP

Column = Literal[
    "id",
    "messages",
    "conversations",
    "system",
    "instruction",
    "input",
    "output",
    "prompt",
    "response",
    "tools",
    "ids",
    "mask",
    "role",
    "content",
]
"""Names that a row's fields have here; `role` and `content` are those of a message."""


class ServerSection(Section):
    """A running server that answers the prompts in place of the local target."""

    url: str = Field(
        pattern="^https?://", description="of the server, e.g. http://host:8000; no default"
    )
    model: str | None = Field(
        default=None, description="name the server knows the target by; null = its first one"
    )
    api: Literal["completions", "generate", "chat"] = Field(
        default="completions",
        description="completions: token ids in and out (vLLM), exact; generate: the same with "
        "SGLang's own; chat: any server of OpenAI's API that takes top_k, min_p and "
        "repetition_penalty, answers come as text and tool calls",
    )
    api_key_env: str | None = Field(
        default=None, description="environment variable that holds the key; null = none is sent"
    )
    concurrency: Count = Field(
        default=64, description="conversations in flight; a server batches what it has"
    )
    timeout: Positive = Field(default=600.0, description="seconds an answer may take")
    retries: CountOrZero = Field(
        default=5,
        description="further tries after a failed request, 1, 2, 4, ... seconds apart (60 at most)",
    )


class StatesServerSection(Section):
    """A running vLLM that gives the states to be cached (method extract_hidden_states)."""

    url: str = Field(
        pattern="^https?://", description="of the server, e.g. http://host:8000; no default"
    )
    model: str | None = Field(
        default=None, description="name the server knows the target by; null = its first one"
    )
    folder: Path | None = Field(
        default=None,
        strict=False,
        description="the server's shared_storage_path as this machine sees it; null = by the same "
        "name",
    )
    concurrency: Count = Field(default=32, description="rows in flight; a server batches them")
    timeout: Positive = Field(default=600.0, description="seconds a row may take")
    retries: CountOrZero = Field(
        default=5,
        description="further tries after a failed request, 1, 2, 4, ... seconds apart (60 at most)",
    )


class DataSection(Section):
    """Prompts, the target's answers to them, and the rows made of both."""

    sources: list[str] = Field(
        min_length=1,
        description="each one of: book (prompts composed here), magpie (the target writes them), a "
        ".jsonl, .json, .parquet or .csv file, hub:ORG/NAME[/CONFIG][:SPLIT]; no default",
    )
    columns: dict[Column, str] = Field(
        default={},
        description="where the source names its columns otherwise, e.g. messages: dialog, role: "
        "speaker (role and content are fields of a message); columns not named are not read",
    )
    streaming: bool = Field(
        default=False,
        description="hub sets: read row by row, nothing is stored; shuffled in windows of 10000",
    )
    num_prompts: Count = Field(description="conversations in all sources together; no default")
    magpie_share: Share = Field(
        default=0.0, description="share of num_prompts that the target writes itself (magpie)"
    )
    regenerate: bool = Field(
        default=True,
        description="the target answers again: a drafter learns the target's own text; false "
        "keeps the answers of the source",
    )
    server: ServerSection | None = Field(
        default=None, description="where the answers come from; null = the target, loaded here"
    )
    max_turns: Count = Field(
        default=4, description="user turns of a conversation answered again, one after another"
    )
    max_length: Count = Field(default=2048, description="tokens a row, as EAGLE-3; longer is cut")
    max_prompt_tokens: Count = Field(default=1024, description="tokens; longer prompts are dropped")
    max_new_tokens: Count = Field(default=1024, description="tokens an answer, at most")
    batch_size: Count = Field(default=64, description="answers generated side by side")
    max_minutes: Positive | None = Field(
        default=None, description="minutes after which generation takes no new prompt; null = all"
    )
    greedy_share: Share = Field(
        default=0.5, description="share of answers at temperature 0; both kinds are served later"
    )
    temperature: Positive = Field(default=0.7, description="of the sampled share; 0.7 is common")
    top_p: TopP = Field(default=1.0, description="nucleus of the sampled share; 1 = off")
    top_k: CountOrZero = Field(default=0, description="tokens kept, sampled share; 0 = off")
    heldout_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="share of conversations kept out of training"
    )
    seed: int = Field(
        default=0, description="of prompts and sampling; the held-out split depends on ids only"
    )
    states: Literal["online", "cached"] = Field(
        default="online",
        description="target states: computed in each training step, or stored once on disk",
    )
    capture: Literal["generate", "pass"] = Field(
        default="generate",
        description="cached states: stored while answers are generated (nearly free), or in a "
        "forward pass of their own",
    )
    states_dtype: Literal["bfloat16", "float32", "float8_e4m3", "int8"] = Field(
        default="bfloat16",
        description="of cached states; the last two halve bfloat16's disk, with one scale for "
        "each layer of each token",
    )
    states_server: StatesServerSection | None = Field(
        default=None, description="where cached states come from; null = the target, loaded here"
    )
    num_workers: CountOrZero = Field(
        default=0,
        description="processes that render and tokenise answers of the source; 0 = none of its own",
    )
    keep_truncated: bool = Field(
        default=True, description="keep answers cut at max_new_tokens, without an end of turn"
    )
    min_supervised_share: Share = Field(
        default=0.01,
        description="least share of supervised tokens in all training rows; below: the run stops",
    )
    max_bad_share: Share = Field(
        default=0.2,
        description="largest share of rows that cannot be used, once 50 were read; above: the run "
        "stops (repeated rows and those of an evaluation task do not count)",
    )
    supervise: Literal["all", "last"] = Field(
        default="all",
        description="answers of the source learned from; last fits targets that think, whose "
        "templates drop the thinking of earlier answers",
    )
    train_on_thinking: bool = Field(
        default=True,
        description="answers of the source: learn the thinking too, or read it only",
    )
    decontaminate: list[str] = Field(
        default=["mt_bench", "humaneval"],
        description="tasks whose 8-grams must not occur in a training prompt; [] = off",
    )
    template_kwargs: dict[str, Any] = Field(
        default={}, description="passed to the chat template, e.g. enable_thinking: false"
    )
    chat_template: Path | None = Field(
        default=None, strict=False, description="Jinja file; null = the tokenizer's own template"
    )

    @field_validator("sources")
    @classmethod
    def _check_sources(cls, sources: list[str]) -> list[str]:
        for source in sources:
            is_file = source.endswith((".jsonl", ".json", ".parquet", ".csv"))
            is_hub = re.fullmatch(r"hub:[^:/\s]+/[^:/\s]+(/[^:/\s]+)?(:[^:\s]+)?", source)
            if not (source in ("book", "magpie") or is_file or is_hub):
                raise ValueError(
                    f"{source!r} is no source; use book, magpie, a .jsonl, .json, .parquet or "
                    ".csv file, or hub:ORG/NAME[/CONFIG][:SPLIT]"
                )
        if len(set(sources)) < len(sources):
            raise ValueError("a source stands twice")
        return sources

    @model_validator(mode="after")
    def _check_fit(self) -> Self:
        if self.chat_template and self.server is not None and self.server.api == "chat":
            raise ValueError(
                f"chat_template={self.chat_template}: with server.api: chat a server renders by "
                "its own; use completions or generate, or set chat_template: null"
            )
        if self.max_prompt_tokens >= self.max_length:
            raise ValueError(
                f"max_prompt_tokens={self.max_prompt_tokens} leaves no room for an answer in "
                f"max_length={self.max_length}"
            )
        if ("magpie" in self.sources) != (self.magpie_share > 0):
            raise ValueError("magpie in sources and magpie_share > 0 belong together")
        if self.sources == ["magpie"] and self.magpie_share < 1:
            raise ValueError("magpie is the only source, so set magpie_share: 1.0")
        if self.sources != ["magpie"] and self.magpie_share == 1:
            raise ValueError("magpie_share: 1.0 leaves nothing to the other sources")
        if self.states == "cached" and self.capture == "generate" and not self.regenerate:
            raise ValueError(
                "capture: generate needs regenerate: true; for answers of the source set "
                "capture: pass"
            )
        if self.states == "cached" and self.capture == "generate" and self.server is not None:
            raise ValueError("a data.server keeps no states of its answers: set capture: pass")
        if self.states_server is not None and (self.states, self.capture) != ("cached", "pass"):
            raise ValueError(
                "data.states_server gives states of finished rows: set states: cached and "
                "capture: pass"
            )
        if self.server is not None and not self.regenerate:
            raise ValueError("data.server answers again, so it needs regenerate: true")
        return self
