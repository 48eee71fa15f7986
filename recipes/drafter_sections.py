"""The drafter's section: `method` names the architecture, the other keys belong to it."""

from typing import Literal, TypeAlias

from pydantic import Field, model_validator
from typing_extensions import Self

from recipes.errors import UserError
from recipes.lm_sections import PardSection, SmallLMSection
from recipes.section import Count, CountOrZero, NotNegative, Positive, Section, Share


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
        "method's own, for n layers: EAGLE [2, n//2, n-3]; blocks by num_aux_layers, of 1 to n-1",
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

    @property
    def trains_head(self) -> bool:
        """Whether the drafter's own head learns, where it has one."""
        return True

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

    @property
    def trains_head(self) -> bool:
        return self.train_head

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
    num_layers: Count = Field(default=4, description="decoder layers; 4 as P-EAGLE")
    mask_token_id: CountOrZero | None = Field(
        default=None,
        description="token whose embedding stands for one not known yet; null = the padding token, "
        "else the end token",
    )
    keep_ratio: Share = Field(
        default=0.8, description="depth d trains on this share^d of the anchors; 0.8 as P-EAGLE"
    )
    min_keep_ratio: Share = Field(
        default=0.2, description="and at least on this share of them; 0.2 as P-EAGLE"
    )


class BlockSection(LayeredSection):
    """Keys of the drafters that draft a block of masks in one pass."""

    num_layers: Count = Field(default=5, description="decoder layers; 5 as DFlash")
    block_size: int = Field(
        default=16,
        ge=2,
        description="tokens of a block, the last committed one included, so one fewer are drafted; "
        "16 as DFlash",
    )
    draft_vocab_size: Count | None = Field(
        default=None,
        description="tokens the head knows; null = all, with the target's own head, as DFlash",
    )
    num_aux_layers: Count = Field(
        default=5,
        description="captured states where aux_layers is null: evenly spread over decoder layers "
        "1 to n - 3, counted from 0; 5 as DFlash",
    )
    num_anchors: Count = Field(
        default=512, description="drafts a row that a training step looks at; 512 as DFlash"
    )
    mask_token_id: CountOrZero | None = Field(
        default=None,
        description="token whose embedding stands for one not known yet; null = the padding token, "
        "else the end token",
    )
    causal: bool = Field(
        default=False, description="slots see only those before them in the block; DFlash: all"
    )
    attention_bias: bool = Field(default=False, description="biases in attention; DFlash: none")
    train_head: bool = Field(
        default=False, description="train the head of a reduced draft vocabulary; DFlash: frozen"
    )

    def default_aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """DFlash's rule: round(linspace(1, n - 3, m)), 0-based, so one more as our ids."""
        n, m = num_target_layers, self.num_aux_layers
        if m == 1:
            return (n // 2 + 1,)
        layers = tuple(round(1 + i * (n - 4) / (m - 1)) + 1 for i in range(m))
        if list(layers) != sorted(set(layers)):
            raise UserError(
                f"the target has {n} layers, too few for {m} default aux layers {layers}; lower "
                "drafter.num_aux_layers, or name ascending distinct ones in drafter.aux_layers"
            )
        return layers

    @property
    def num_drafted(self) -> int:
        """Tokens of a draft."""
        return self.block_size - 1

    @property
    def trains_head(self) -> bool:
        return self.train_head

    @model_validator(mode="after")
    def _check_head(self) -> Self:
        if self.train_head and self.draft_vocab_size is None:
            raise ValueError(
                "train_head: true needs a draft_vocab_size: a whole vocabulary uses the target's "
                "own head, which is never trained"
            )
        return self


class DFlashSection(BlockSection):
    """DFlash: layers over the target's states as keys and values, a block of masks in one pass."""

    method: Literal["dflash"] = Field(default="dflash", description="architecture")


class DSparkSection(BlockSection):
    """DSpark: DFlash with a sequential head and a head that predicts acceptance."""

    method: Literal["dspark"] = Field(default="dspark", description="architecture")
    block_size: int = Field(default=7, ge=2, description="tokens of a block; 7 as DSpark")
    sample_from_anchor: bool = Field(
        default=True,
        description="the last committed token's slot drafts too, as DSpark; false: one token fewer",
    )
    markov_rank: Count = Field(default=256, description="of the sequential head; 256 as DSpark")
    markov_head_type: Literal["vanilla", "gated", "rnn"] = Field(
        default="vanilla", description="how the head uses earlier tokens; vLLM serves vanilla"
    )
    confidence_head: bool = Field(
        default=True, description="predict the acceptance of each token, as DSpark"
    )
    confidence_head_with_markov: bool = Field(
        default=True, description="the prediction also reads the token before, as DSpark"
    )
    confidence_weight: NotNegative = Field(
        default=1.0, description="of the prediction's cross-entropy in the loss; 1 as DSpark"
    )
    confidence_decay: Positive = Field(
        default=0.7788, description="its factor a depth; exp(-1/4) as DSpark"
    )
    confidence_threshold: Share = Field(
        default=0.0,
        description="a draft stops where its predicted survival, calibrated on held-out rows, "
        "falls below; exact; 0 = never",
    )

    @property
    def num_drafted(self) -> int:
        """Tokens of a draft."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @model_validator(mode="after")
    def _check_confidence(self) -> Self:
        if self.confidence_threshold > 0 and not self.confidence_head:
            raise ValueError("confidence_threshold needs confidence_head: true")
        return self


class Eagle1Section(LayeredSection):
    """EAGLE-1: a layer over the target's last state, which predicts the next such state."""

    method: Literal["eagle1"] = Field(default="eagle1", description="architecture")
    draft_vocab_size: None = Field(default=None, description="all: the head is the target's")
    aux_layers: None = Field(default=None, description="none: EAGLE-1 reads the last state")
    init: Literal["random", "target"] = Field(
        default="random",
        description="layer and fc: random as EAGLE-1, or from target, whose last layer gives "
        "states before the final norm: slow to learn where their scale is not a feature's",
    )
    feature_weight: NotNegative = Field(
        default=10.0,
        description="of the smooth L1 distance to the target's state, beside the loss; EAGLE-1 "
        "has 1 to 0.1",
    )
    noise: NotNegative = Field(
        default=0.2, description="states are shifted by up to this in training; 0.2 as EAGLE-1"
    )

    def default_aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The last state."""
        return (num_target_layers,)


class MTPSection(LayeredSection):
    """MTP: one decoder layer on the target's last state, in MiMo's form; all sizes the target's."""

    method: Literal["mtp"] = Field(default="mtp", description="architecture")
    num_layers: Literal[1] = Field(default=1, description="decoder layers; one is served")
    draft_vocab_size: None = Field(default=None, description="all: the head is the target's")
    aux_layers: None = Field(default=None, description="none: MTP reads the last state")
    init: Literal["random", "target", "native"] = Field(
        default="random",
        description="random; the target's last layer (warm start); native: the MTP layer in the "
        "target's own files (MiMo's form)",
    )

    def default_aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The last state."""
        return (num_target_layers,)

    @model_validator(mode="after")
    def _check_target_sizes(self) -> Self:
        sizes = self.hidden_size, self.intermediate_size, self.num_attention_heads
        if any(sizes) or self.num_key_value_heads:
            raise ValueError("an MTP layer has the target's sizes; leave them out")
        return self


class MedusaSection(Section):
    """Medusa: independent heads on the target's last state, one a drafted token."""

    method: Literal["medusa"] = Field(default="medusa", description="architecture")
    num_heads: Count = Field(default=3, description="tokens drafted; 3 as Medusa's script")
    num_layers: Count = Field(default=1, description="residual blocks a head; 1 as Medusa")
    bias: bool = Field(default=True, description="of the blocks; as Medusa")
    shared_head: bool = Field(
        default=True,
        description="end every head in the target's own, frozen; Medusa trains a copy a head, "
        "which at a vocabulary of 150,000 is most of its weights",
    )
    draft_vocab_size: None = Field(default=None, description="all: engines know no other")
    aux_layers: None = Field(default=None, description="none: Medusa reads the last state")

    @property
    def trains_head(self) -> bool:
        """Whether the drafter's own head learns."""
        return not self.shared_head

    def default_aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The last state."""
        return (num_target_layers,)


DrafterSection: TypeAlias = (
    Eagle3Section
    | PEagleSection
    | DFlashSection
    | DSparkSection
    | Eagle1Section
    | MedusaSection
    | MTPSection
    | SmallLMSection
    | PardSection
)


def check_num_steps(section: DrafterSection, num_steps: int) -> None:
    """Raises ValueError where loss.num_steps would leave untrained what the drafter drafts with."""
    if section.method == "medusa" and num_steps != section.num_heads:
        raise ValueError(
            f"loss.num_steps={num_steps}, but drafter.num_heads={section.num_heads}: each head "
            f"learns one step; set loss.num_steps: {section.num_heads}, or as many heads"
        )
    if isinstance(section, BlockSection) and num_steps != section.num_drafted:
        raise ValueError(
            f"loss.num_steps={num_steps}, but a block of drafter.block_size={section.block_size} "
            f"drafts {section.num_drafted} tokens, all of which are served; set loss.num_steps: "
            f"{section.num_drafted}, or another block_size"
        )
    if section.method == "small_lm" and num_steps != 1:
        raise ValueError(
            f"loss.num_steps={num_steps}, but drafter.method small_lm learns each token once, "
            "whatever draft it stands in; set loss.num_steps: 1"
        )
