"""The drafter's section: `method` names the architecture, the other keys belong to it."""

from typing import Literal, TypeAlias

from pydantic import Field, model_validator
from typing_extensions import Self

from recipes.errors import UserError
from recipes.section import Count, CountOrZero, Section


class LayeredSection(Section):
    """Keys of every drafter made of decoder layers. Sizes that are null are the target's."""

    num_layers: Count = Field(default=1, description="decoder layers, as EAGLE-3")
    hidden_size: Count | None = Field(default=None, description="width of the layer")
    intermediate_size: Count | None = Field(default=None, description="width of the MLP")
    num_attention_heads: Count | None = Field(default=None, description="query heads")
    num_key_value_heads: Count | None = Field(default=None, description="key and value heads")
    draft_vocab_size: Count | None = Field(
        default=32000,
        description="tokens the head knows, the most frequent ones; 32000 as EAGLE-3; null = all",
    )
    aux_layers: list[CountOrZero] | None = Field(
        default=None,
        min_length=1,
        description="captured states: k = residual stream after k decoder layers; null = the "
        "method's own, for n layers: EAGLE-3 [2, n//2, n-3]",
    )

    def default_aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """(2, n//2, n-3), the layers that vLLM reads when a checkpoint names none."""
        n = num_target_layers
        layers = (2, n // 2, n - 3)
        if sorted(set(layers)) != list(layers):
            raise UserError(
                f"the target has {n} layers, too few for the default aux layers {layers}; "
                f"name ascending distinct ones in drafter.aux_layers, each within 0..{n}"
            )
        return layers

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.aux_layers is not None and len(set(self.aux_layers)) < len(self.aux_layers):
            raise ValueError(f"aux_layers holds a layer twice: {self.aux_layers}")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads and kv_heads and heads % kv_heads:
            raise ValueError(f"num_attention_heads={heads} is no multiple of {kv_heads} kv heads")
        if heads and self.hidden_size and self.hidden_size % heads:
            raise ValueError(f"hidden_size={self.hidden_size} is no multiple of {heads} heads")
        return self


class EagleLayers(LayeredSection):
    """Keys that EAGLE-3 and its parallel form share."""

    init: Literal["random", "target"] = Field(
        default="random", description="layer and fc: random as EAGLE-3, or from target (warm start)"
    )
    head_init: Literal["target", "random"] = Field(
        default="target", description="head rows: the target's, which saves steps, or random"
    )
    train_head: bool = Field(default=True, description="train the head, as EAGLE-3, or freeze it")
    norm_before_residual: bool = Field(
        default=False, description="the residual carries the normed state; EAGLE-3: as it is"
    )
    norm_before_fc: bool = Field(
        default=False, description="one norm over the joined states before fc (EAGLE-3.1 switch)"
    )
    fc_norm: bool = Field(
        default=False, description="one norm a captured state before fc (EAGLE-3.1 switch)"
    )

    @model_validator(mode="after")
    def _check_switches(self) -> Self:
        if self.head_init == "random" and not self.train_head:
            raise ValueError("train_head: false with head_init: random is a head that never learns")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm both norm what enters fc; choose one")
        return self


class Eagle3Section(EagleLayers):
    """EAGLE-3: a layer over captured states, drafting one token after the other."""

    method: Literal["eagle3"] = Field(default="eagle3", description="architecture")
    norm_output: bool = Field(
        default=False, description="the next step reads the normed output (EAGLE-3.1 switch)"
    )


class PEagleSection(EagleLayers):
    """P-EAGLE: EAGLE-3 that drafts all tokens in one pass, on a learned mask state."""

    method: Literal["p_eagle"] = Field(default="p_eagle", description="architecture")


DrafterSection: TypeAlias = Eagle3Section | PEagleSection
