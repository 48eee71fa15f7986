"""In which settings a certificate draws its tokens, and which broken verifiers judge them there."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from eval.broken import RULES, Fault, faults_of
from eval.broken_tree import OF_DRAWN, OF_TOP
from eval.measure import decode_settings, tree_of
from eval.replays import Replays
from eval.rounds import DecodeSettings, Verifier, VerifyInputs
from eval.tree import TreeSpec
from eval.tree_inputs import TreeInputs, TreeVerifier, tree_rule
from recipes.schema import EvalSection

_HOW = {
    "top": "chosen outright",
    "with_replacement": "drawn with replacement",
    "without_replacement": "drawn without replacement",
}


class ChainSetting(NamedTuple):
    """Chains are drafted, judged by settings.verification."""

    settings: DecodeSettings
    faults: Mapping[str, Fault[VerifyInputs]]

    @property
    def rule(self) -> Verifier:
        """The right one."""
        return RULES[self.settings.verification]

    def replays(self, num_replays: int, seed: int) -> Replays[VerifyInputs]:
        """Broken verifiers beside the loop's own."""
        return Replays(self.settings.verify, self.rule, self.faults, num_replays, seed)

    def __str__(self) -> str:
        """In words, such as "T=1, top-p 0.9, 2 drafts drawn"."""
        settings = self.settings
        how = "drawn" if settings.sampling.draft_sampled else "chosen outright"
        block = ", block verification" if settings.verification == "block" else ""
        return f"{_law(settings)}, {settings.num_draft} drafts {how}{block}"


class TreeSetting(NamedTuple):
    """Trees are drafted."""

    settings: DecodeSettings
    spec: TreeSpec
    text: str  # the recipe's, for the shape
    faults: Mapping[str, Fault[TreeInputs]]

    @property
    def rule(self) -> TreeVerifier:
        """The right one."""
        return tree_rule

    def replays(self, num_replays: int, seed: int) -> Replays[TreeInputs]:
        """Broken verifiers beside the loop's own."""
        return Replays(tree_rule, self.rule, self.faults, num_replays, seed)

    def __str__(self) -> str:
        """In words, such as "T=1, tree 3,2,1, siblings chosen outright"."""
        return f"{_law(self.settings)}, tree {self.text}, siblings {_HOW[self.spec.siblings]}"


Setting = ChainSetting | TreeSetting


def certificate_settings(section: EvalSection, draws: bool) -> list[Setting]:
    """How tokens are drawn for a certificate, and which faults are replayed there.

    The first setting is the recipe's, at its highest temperature (1 if it has none above 0). Most
    faults of chains show only with drafts that were drawn, two a round and cut by top-p; where the
    recipe has not all of that, a second setting has. A tree whose siblings are drawn, but not cut,
    gets a second setting, too. `draws`: whether the drafter can draw.
    """
    temperature = max(section.temperatures) or 1.0
    measured = decode_settings(section, temperature)
    measured = replace(measured, sampling=replace(measured.sampling, keep_laws=True))
    sampling = measured.sampling
    cut = replace(sampling, top_p=min(0.9, sampling.top_p))
    spec = tree_of(section)
    if spec is not None:
        if spec.siblings == "top":
            return [TreeSetting(measured, spec, section.tree, OF_TOP)]
        drawn = replace(measured, sampling=cut)
        first = [TreeSetting(measured, spec, section.tree, {})] if drawn != measured else []
        return [*first, TreeSetting(drawn, spec, section.tree, OF_DRAWN)]
    faults = faults_of(RULES[measured.verification])
    if not draws:
        return [ChainSetting(measured, faults)]
    drawn = replace(
        measured,
        num_draft=max(2, measured.num_draft),
        sampling=replace(cut, draft_sampled=True),
    )
    chosen = replace(measured, sampling=replace(sampling, draft_sampled=False))
    of_chosen = {"argmax_as_drawn": faults.pop("argmax_as_drawn")}
    both: list[Setting] = [ChainSetting(drawn, faults), ChainSetting(chosen, of_chosen)]
    if measured == drawn:
        return both
    if measured == chosen:
        return both[::-1]
    return [ChainSetting(measured, {}), *both]


def certified(section: EvalSection) -> str:
    """What a certificate is of, in words."""
    if section.verification == "tree":
        return f"tree {section.tree}, siblings {_HOW[section.siblings]}"
    return f"chain, {section.verification} verification"


def _law(settings: DecodeSettings) -> str:
    s = settings.sampling
    filters = [f"top-p {s.top_p:g}"] if s.top_p < 1 else []
    filters += [f"top-k {s.top_k}"] if s.top_k else []
    filters += [f"min-p {s.min_p:g}"] if s.min_p else []
    penalty = s.repetition_penalty
    filters += [f"repetition penalty {penalty:g}"] if penalty != 1 else []
    return ", ".join([f"T={s.temperature:g}", *filters])
