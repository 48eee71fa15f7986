"""Sections of drafters that are whole language models: small_lm and its parallel form, pard."""

from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from recipes.section import Count, CountOrZero, Section, Share


class LanguageModelSection(Section):
    """Keys of both forms: which language model, and its first weights."""

    init: Literal["layers", "checkpoint", "fresh"] = Field(
        default="layers",
        description="first weights: layers = some of the target's, with its embedding, norm and "
        "head; checkpoint = those of drafter.model; fresh = random, a smaller shape",
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="init checkpoint: hub id or folder, of the target's tokenizer; numbers of "
        "padding rows may differ; or RUN/export of a small LM, from which a PARD goes on",
    )
    revision: str | None = Field(default=None, description="hub commit or tag of drafter.model")
    keep_layers: list[CountOrZero] | None = Field(
        default=None,
        min_length=1,
        description="init layers: which of the target's, counted from 0; null = num_layers of "
        "them, evenly spread from the first to the last",
    )
    num_layers: Count | None = Field(
        default=None,
        description="init layers, fresh: decoder layers; null = a quarter of the target's",
    )
    hidden_size: Count | None = Field(default=None, description="init fresh; null = the target's")
    intermediate_size: Count | None = Field(
        default=None, description="init fresh: width of the MLP; null = the target's"
    )
    num_attention_heads: Count | None = Field(
        default=None, description="init fresh: query heads; null = the target's"
    )
    num_key_value_heads: Count | None = Field(
        default=None, description="init fresh: key and value heads; null = the target's"
    )
    head_dim: Count | None = Field(
        default=None, description="init fresh: width of a head; null = the target's"
    )
    train_vocabulary: bool = Field(
        default=True,
        description="train the embedding and the head; false = both stay as they came, and a step "
        "takes less time and memory",
    )
    draft_vocab_size: None = Field(default=None, description="all: engines know no other")
    aux_layers: None = Field(default=None, description="none: it reads tokens alone")

    @property
    def trains_head(self) -> bool:
        """With it the embedding, often the same weights."""
        return self.train_vocabulary

    def default_aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """None of the target's states are read."""
        return ()

    @model_validator(mode="after")
    def _check_init(self) -> Self:
        sizes = (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        )
        belongs = {"model": "checkpoint", "revision": "checkpoint", "keep_layers": "layers"}
        belongs |= dict.fromkeys(sizes, "fresh")
        fields = self.model_dump()
        for name, init in belongs.items():
            if fields[name] is not None and self.init != init:
                raise ValueError(f"{name} belongs to init: {init}; init is {self.init}")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings turn pairs")
        if self.init == "fresh" and not self.train_vocabulary:
            raise ValueError(
                "train_vocabulary: false with init: fresh is a head of chance that never learns"
            )
        if self.init == "checkpoint" and self.model is None:
            raise ValueError("init: checkpoint needs model: a hub id or a folder")
        if self.init == "checkpoint" and self.num_layers is not None:
            raise ValueError("num_layers is the checkpoint's own; leave it out")
        layers = self.keep_layers
        if layers is not None and layers != sorted(set(layers)):
            raise ValueError(f"keep_layers {layers} are not ascending and distinct")
        if layers is not None and self.num_layers not in (None, len(layers)):
            raise ValueError(f"num_layers={self.num_layers}, but keep_layers names {len(layers)}")
        return self


class SmallLMSection(LanguageModelSection):
    """An independent language model of the target's vocabulary, distilled on its distribution."""

    method: Literal["small_lm"] = Field(default="small_lm", description="architecture")


class PardSection(LanguageModelSection):
    """PARD: a small LM that drafts all tokens in one pass, over mask tokens."""

    method: Literal["pard"] = Field(default="pard", description="architecture")
    mask_token_id: CountOrZero | None = Field(
        default=None,
        description="stands for a token not known yet; null = the padding token, else the end "
        "token; PARD takes one that the tokenizer does not use",
    )
    keep_ratio: Share = Field(
        default=0.7, description="depth d trains on this share^d of the anchors; 0.7 as PARD"
    )
    min_keep_ratio: Share = Field(
        default=0.2, description="and at least on this share of them; 0.2 as PARD"
    )
    num_anchors: Count | None = Field(
        default=None, description="drafts a row that a training step looks at; null = all, as PARD"
    )
