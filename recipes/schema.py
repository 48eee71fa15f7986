"""Every knob of a run: typed, strict, with its unit and the reason for its default.

Precedence is defaults < YAML file < dotted command line (`train.lr=1e-4`). A key that is not here,
or a value of another type, is an error. Relative paths are relative to the working directory.
No default is given for the model, the prompts and their number; other defaults are those of the
published method, or the safe choice.
"""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from recipes.data_section import DataSection
from recipes.drafter_sections import DrafterSection, Eagle3Section, check_num_steps
from recipes.errors import UserError
from recipes.keys import apply_override, describe_errors
from recipes.lm_sections import LanguageModelSection
from recipes.section import (
    CompileMode,
    Count,
    CountOrZero,
    Dtype,
    NotNegative,
    Positive,
    Section,
    Share,
    TopP,
)
from recipes.train_section import TrainSection
from recipes.yaml_text import dump_yaml, parse_yaml


class TargetSection(Section):
    """The model whose text is to be generated faster."""

    model: str = Field(
        min_length=1,
        description="hub id, local folder, embedded:smollm2-135m (carried by the demo extra) or "
        "random:qwen3-tiny (random weights, for tests); no default: it decides everything",
    )
    revision: str | None = Field(
        default=None, description="hub commit or tag; null = newest, recorded beside the artefacts"
    )
    dtype: Dtype = Field(
        default="auto",
        description="of the weights; auto = bfloat16 on CUDA and on CPUs that compute it "
        "natively, else float32",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto = CUDA where there is one"
    )
    trust_remote_code: bool = Field(
        default=False, description="run Python code from the model's repository; off: not safe"
    )
    placement: Literal["replicated", "sharded"] = Field(
        default="replicated",
        description="replicated: every process holds all of it; sharded: those of a machine hold "
        "its layers in parts, for a target that does not fit one GPU",
    )
    weights: Literal["whole", "ends"] = Field(
        default="whole",
        description="ends: embedding, last layer, final norm and head alone, to train on cached "
        "states of a target that does not fit; it decodes nothing (train.validate_prompts: 0)",
    )


class LossSection(Section):
    """What is minimised, over supervised positions only."""

    name: Literal["kl", "ce", "rkl", "jsd", "tv", "l1", "nla", "lk_hybrid", "e2e_tv"] = Field(
        default="kl",
        description="kl: forward KL, as EAGLE-3 up to a constant; ce: hard labels; rkl, jsd: "
        "reverse KL, Jensen-Shannon; tv: share rejected, l1: twice that; nla: -log acceptance; "
        "lk_hybrid: KL turning into tv; e2e_tv: expected accepted length of a draft",
    )
    ce_share: Share = Field(
        default=0.0, description="hard labels mixed in: s * ce + (1 - s) * loss; DSpark 0.1"
    )
    position_weights: Literal["decay", "d_pace"] = Field(
        default="decay",
        description="decay: step_decay^k; d_pace: by the effect on the accepted length (D-PACE)",
    )
    num_steps: Count = Field(
        default=7,
        description="drafting steps in training, as EAGLE-3; a block's are all that it drafts",
    )
    step_decay: Positive = Field(
        default=0.8,
        description="weight of step k is step_decay^k; exp(-k/g) is step_decay exp(-1/g)",
    )
    renormalize: bool = Field(
        default=True,
        description="target over the draft vocabulary as EAGLE-3; false keeps the missing mass, so "
        "alpha is the true acceptance",
    )
    lk_scale: Share = Field(default=1.0, description="lk_hybrid: s in KL share s*exp(-d*alpha)")
    lk_decay: NotNegative = Field(default=3.0, description="lk_hybrid: d in the same formula")
    chunk_size: Count = Field(default=512, description="positions a chunk of logits; memory only")

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.name == "e2e_tv" and (self.position_weights != "decay" or self.ce_share):
            raise ValueError(
                "name e2e_tv has weights of its own: leave position_weights and ce_share out"
            )
        return self


def _once(values: list[Any], what: str) -> list[Any]:
    twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
    if twice:
        raise ValueError(f"{what} stands twice: {', '.join(map(str, twice))}; name each once")
    return values


class EvalSection(Section):
    """Speculative decoding of the exported drafter, beside the target alone."""

    tasks: list[str] = Field(
        default=["mt_bench", "humaneval"],
        min_length=1,
        description="mt_bench, humaneval, gsm8k, heldout or a .jsonl file; NAME:N = the first N",
    )
    turns: Literal["first", "all"] = Field(
        default="all", description="user turns answered of each prompt; mt_bench has two"
    )
    temperatures: list[NotNegative] = Field(
        default=[0.0, 1.0], min_length=1, description="one result each; 0 = greedy"
    )
    top_p: TopP = Field(default=1.0, description="nucleus of target and drafter alike; 1 = off")
    top_k: CountOrZero = Field(default=0, description="tokens kept, both alike; 0 = off")
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="tokens below this share of the likeliest go; 0 = off"
    )
    repetition_penalty: Positive = Field(
        default=1.0, description="of tokens in the text so far, both alike; 1 = off"
    )
    draft_sampling: Literal["greedy", "sampled"] = Field(
        default="greedy", description="how drafts are drawn at temperature > 0"
    )
    verification: Literal["token", "block", "tree"] = Field(
        default="token",
        description="rule that accepts, each exact: token by token; block, which accepts no less; "
        "a tree of guesses (eagle1, eagle3, mtp)",
    )
    tree: str = Field(
        default="24/4/4",
        pattern=r"^([0-9]+(,[0-9]+)*|[0-9]+/[0-9]+/[0-9]+)$",
        description="with verification tree: num_nodes/depth/top_k of EAGLE-2's trees, or children "
        "a node on each level, as 3,2,1",
    )
    siblings: Literal["top", "with_replacement", "without_replacement"] = Field(
        default="top",
        description="guesses below a node of a tree: the drafter's likeliest tokens; draws from it "
        "that may repeat (SpecInfer); draws that differ (Sequoia). Drawn ones need children a "
        "level; at temperature 0 all are top",
    )
    num_draft_tokens: Count = Field(default=4, description="tokens proposed a round")
    max_new_tokens: Count = Field(default=128, description="tokens an answer, at most")
    batch_size: Count = Field(default=1, description="prompts side by side; 1 = latency")
    compile: CompileMode | None = Field(
        default=None,
        description="mode of torch.compile for the passes of decoding, as torch names them; "
        "reduce-overhead: CUDA graphs; aot_eager: traced without a compiler; null = off",
    )
    repeats: Count = Field(
        default=1, description="timed runs of each prompt; from 2 on the middle one counts"
    )
    oracle: bool = Field(
        default=False, description="at temperature 0 also time a perfect drafter at this one's cost"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="of the sampling")
    drafters: list[Literal["drafter", "lookup", "lookup+drafter", "suffix", "suffix+drafter"]] = (
        Field(
            default=["drafter", "lookup", "lookup+drafter"],
            min_length=1,
            description="the trained one; n-gram lookup in the text so far (ngram means the same); "
            "suffix decoding; either where it hits, else the trained one",
        )
    )
    lookup_min: Count = Field(default=2, description="tokens of the shortest n-gram")
    lookup_max: Count = Field(default=4, description="tokens of the longest n-gram, tried first")
    suffix_max_tree_depth: int = Field(
        default=24, ge=2, description="suffix: tokens of a match and its continuation; 24 as vLLM"
    )
    suffix_max_spec_factor: Positive = Field(
        default=1.0, description="suffix: tokens drafted for each token matched; 1 as vLLM"
    )
    suffix_min_token_prob: Share = Field(
        default=0.1, description="suffix: a draft ends where it is less likely; 0.1 as vLLM"
    )
    suffix_cached_answers: CountOrZero = Field(
        default=0,
        description="suffix: earlier answers searched too; vLLM 10000; above 0 a result depends "
        "on the order of the prompts",
    )
    greedy_check_prompts: CountOrZero = Field(
        default=8, description="prompts compared in float32 with the target alone; 0 = none"
    )

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: list[str]) -> list[str]:
        for task in tasks:
            if not re.fullmatch(r"[^:]+(:[1-9][0-9]*)?", task):
                raise ValueError(f"{task!r} is no task; write NAME or NAME:N with N >= 1")
        return _once(tasks, "a task")

    @field_validator("temperatures")
    @classmethod
    def _check_temperatures(cls, temperatures: list[float]) -> list[float]:
        return _once(temperatures, "a temperature")

    @field_validator("drafters", mode="before")
    @classmethod
    def _rename_ngram(cls, drafters: Any) -> Any:
        """ngram is vLLM's name of lookup."""
        if not isinstance(drafters, list):
            return drafters
        return [d.replace("ngram", "lookup") if isinstance(d, str) else d for d in drafters]

    @field_validator("drafters")
    @classmethod
    def _check_drafters(cls, drafters: list[str]) -> list[str]:
        return _once(drafters, "a drafter")

    @model_validator(mode="after")
    def _check_fit(self) -> Self:
        if self.lookup_min > self.lookup_max:
            raise ValueError(f"lookup_min={self.lookup_min} is above lookup_max={self.lookup_max}")
        if self.verification == "tree" and "drafter" not in self.drafters:
            raise ValueError("verification: tree needs drafter in drafters; lookup has one guess")
        drawn = self.siblings != "top"
        if drawn and self.verification != "tree":
            raise ValueError(f"siblings: {self.siblings} needs verification: tree")
        if drawn and "/" in self.tree:
            raise ValueError(
                f"siblings: {self.siblings} needs tree as children a level, such as 3,2,1, not "
                f"{self.tree}: which nodes are kept may not depend on what was drawn"
            )
        if self.oracle and (
            0 not in self.temperatures
            or "drafter" not in self.drafters
            or self.verification == "tree"
        ):
            raise ValueError(
                "oracle times a perfect drafter beside drafter, at temperature 0, as a chain; the "
                "recipe measures none such, so set oracle: false or add what is missing"
            )
        if drawn and self.draft_sampling == "greedy":
            raise ValueError(f"siblings: {self.siblings} needs draft_sampling: sampled")
        if self.verification == "tree" and self.draft_sampling == "sampled" and not drawn:
            raise ValueError(
                "verification: tree with draft_sampling: sampled needs siblings: with_replacement "
                "or without_replacement; or draft_sampling: greedy"
            )
        return self


class ExportSection(Section):
    """The folder that a serving engine loads."""

    format: Literal["vllm", "speculators", "sglang"] = Field(
        default="vllm",
        description="vllm = plain HF; speculators = its library's form; sglang = SpecForge's names",
    )
    dtype: Dtype = Field(default="auto", description="of the weights; auto = the target's")


class LogSection(Section):
    """Where numbers go, beside metrics.jsonl, which is always written."""

    every: Count = Field(default=10, description="optimizer steps between two lines")
    wandb: Literal["off", "offline", "online"] = Field(
        default="off", description="off: nothing leaves the machine unasked"
    )
    project: str = Field(default="draftsmith", min_length=1, description="wandb project")
    tensorboard: bool = Field(default=False, description="write event files beside metrics.jsonl")


class Recipe(Section):
    """One run: what `data/prepare.py`, `train/distill.py` and `eval/bench.py` read."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="folder name of the run; no default"
    )
    output_dir: Path = Field(
        default=Path("outputs"), strict=False, description="parent folder of all runs"
    )
    target: TargetSection
    data: DataSection
    drafter: DrafterSection = Field(default=Eagle3Section(), discriminator="method")
    loss: LossSection = LossSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    export: ExportSection = ExportSection()
    log: LogSection = LogSection()

    @model_validator(mode="before")
    @classmethod
    def _name_method(cls, values: Any) -> Any:
        """A drafter without `method` is an EAGLE-3."""
        if isinstance(values, dict) and isinstance(values.get("drafter"), dict):
            return values | {"drafter": {"method": "eagle3"} | values["drafter"]}
        return values

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        check_num_steps(self.drafter, self.loss.num_steps)
        if self.drafter.method == "medusa" and self.train.activation_checkpointing:
            raise ValueError("train.activation_checkpointing: Medusa keeps little; set it to false")
        return self

    @model_validator(mode="after")
    def _check_language_model(self) -> Self:
        section, share = self.drafter, self.train.on_policy_share
        if share and not isinstance(section, LanguageModelSection):
            raise ValueError(
                f"train.on_policy_share={share}: a drafter of method {section.method} cannot write "
                "text without the target; only small_lm and pard can"
            )
        hard = self.loss.name == "ce" or self.loss.ce_share > 0
        if share and (hard or self.loss.position_weights == "d_pace"):
            key = "loss.name: ce or loss.ce_share" if hard else "loss.position_weights: d_pace"
            raise ValueError(
                f"train.on_policy_share={share} with {key}: labels would be the drafter's own "
                "draws, from which nothing is learned; use a loss on the target's distribution"
            )
        if share and self.data.states != "online":
            raise ValueError(
                f"train.on_policy_share={share}: states of new answers cannot be stored before; "
                "set data.states: online"
            )
        return self

    @model_validator(mode="after")
    def _check_ends(self) -> Self:
        """What a target without most of its layers cannot do."""
        if self.target.weights == "whole":
            return self
        data = self.data
        mends = {
            "data.states: cached, filled by a data.states_server or by data/prepare.py on a "
            "machine where the target fits": data.states == "cached",
            "data.server, or data.regenerate: false": data.server or not data.regenerate,
            "sources without magpie": "magpie" not in data.sources,
            "train.validate_prompts: 0": not self.train.validate_prompts,
            "drafter.init other than layers": not isinstance(self.drafter, LanguageModelSection)
            or self.drafter.init != "layers",
            "target.placement: replicated": self.target.placement == "replicated",
        }
        if missing := [mend for mend, there in mends.items() if not there]:
            raise ValueError(
                "target.weights: ends neither writes nor gives states; it needs "
                + "; ".join(missing)
            )
        return self

    @property
    def run_dir(self) -> Path:
        """Folder that holds everything this run writes."""
        return self.output_dir / self.name


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe file and apply dotted overrides.

    Args:
        path: YAML file.
        overrides: texts such as `train.lr=1e-4`; the value is read as YAML, the last one wins.

    Raises:
        UserError: missing file, unknown or ill-typed key, values that do not fit together.
    """
    path = Path(path)
    if not path.is_file():
        shipped = sorted(found.name for found in Path(__file__).parent.glob("*.yaml"))
        raise UserError(f"recipe {path}: no such file; shipped recipes: {', '.join(shipped)}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"recipe {path}: not a UTF-8 text file") from error
    values = parse_yaml(text, where=str(path))
    if not isinstance(values, dict):
        raise UserError(f"recipe {path}: expected sections such as target: and data:")
    overridden = [apply_override(values, override, Recipe) for override in overrides or []]
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise UserError(describe_errors(error, Recipe, str(path), overridden)) from error


def dump_recipe(recipe: Recipe) -> str:
    """Write the resolved recipe as YAML; `load_recipe` of it gives an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))
