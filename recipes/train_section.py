"""Recipe keys of training: optimisation, batches, checkpoints and validation."""

from typing import Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from recipes.section import Count, CountOrZero, NotNegative, Positive, Section, Share


class TrainSection(Section):
    """Optimisation, checkpoints and validation."""

    seed: int = Field(default=0, description="of weights and order of rows, as EAGLE-3")
    epochs: Positive = Field(default=10.0, description="passes over the rows; fractions allowed")
    max_steps: Count | None = Field(default=None, description="optimizer steps; null = by epochs")
    max_minutes: Positive | None = Field(
        default=None, description="minutes of training, schedule included; null = by epochs"
    )
    clock: Literal["wall", "processor"] = Field(
        default="wall",
        description="what max_minutes counts: time that passes, or processor time of one process "
        "with all its threads, which a busy machine does not shorten (comparisons on CPUs)",
    )
    batch_tokens: Count | None = Field(
        default=None, description="tokens a micro-batch and process; null = micro_batch_size rows"
    )
    micro_batch_size: Count = Field(default=1, description="rows a process, as EAGLE-3")
    packing: bool = Field(
        default=False,
        description="rows of a micro-batch one behind the other, without padding, up to "
        "batch_tokens; none sees another; loss and gradients are those of padded rows",
    )
    gradient_accumulation: Count = Field(default=1, description="micro-batches an optimizer step")
    lr: Positive = Field(default=1e-4, description="peak learning rate, as SpecForge")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), strict=False, description="of AdamW, as EAGLE-3"
    )
    weight_decay: NotNegative = Field(default=0.0, description="of matrices, as EAGLE-3")
    warmup_ratio: Share = Field(default=0.015, description="share of steps, as SpecForge")
    min_lr_ratio: Share = Field(default=0.0, description="last / peak learning rate, cosine")
    clip: Positive = Field(default=0.5, description="largest gradient norm, as EAGLE-3")
    mixed_precision: Literal["no", "bf16", "auto"] = Field(
        default="no",
        description="bf16 = autocast with float32 master weights; auto = bf16 where the hardware "
        "multiplies it (CUDA, CPUs with AVX512-BF16), else no",
    )
    on_policy_share: Share = Field(
        default=0.0,
        description="share of the rows whose answer the drafter writes anew in each step, as "
        "DistillSpec; small_lm and pard, with data.states online",
    )
    optimizer: Literal["adamw", "adamw8bit"] = Field(
        default="adamw",
        description="adamw8bit: moments in 8 bits, 2 bytes a weight in place of 8; needs "
        "bitsandbytes; one process or DDP",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="run parts of the drafter again in the backward pass in place of keeping them: "
        "less memory, a third more time",
    )
    compile: Literal["default", "aot_eager"] | None = Field(
        default=None,
        description="torch.compile for the drafter's parts between attention and gathers, of any "
        "length; modes as eval.compile, without those of CUDA graphs; whole weights only",
    )
    prefetch: CountOrZero = Field(
        default=2, description="optimizer steps read ahead by a thread; 0 = none; same order"
    )
    save_every: CountOrZero = Field(default=500, description="steps; 0 = only at the end")
    max_skipped_steps: CountOrZero = Field(
        default=10,
        description="steps left out because loss, gradient or states are not finite, before the "
        "run stops; their rows are named",
    )
    keep_checkpoints: Count = Field(default=2, description="newest ones kept, older ones deleted")
    validate_every: CountOrZero = Field(default=0, description="steps; 0 = only at the end")
    validate_prompts: CountOrZero = Field(
        default=16, description="held-out prompts decoded speculatively; 0 = none"
    )
    validate_max_new_tokens: Count = Field(default=64, description="tokens a validation answer")

    @model_validator(mode="after")
    def _check_packing(self) -> Self:
        if self.packing and self.batch_tokens is None:
            raise ValueError(
                "packing needs batch_tokens, the tokens that rows are packed up to; set it to the "
                "longest row (data.max_length) or more"
            )
        if self.packing and self.on_policy_share:
            raise ValueError(
                "packing and on_policy_share do not go together: answers written in the step have "
                "no length before it; set packing: false"
            )
        return self

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{betas} is not valid; each beta is at least 0 and below 1")
        return betas
