"""Is an exported folder the drafter that was trained, and does an engine read it so?

Three questions, each with its likely cause where the answer is no:

1. The folder: every key and tensor that engines read is there, has the shape, and agrees with the
   others and with draftsmith.json (drafters.vllm_format reads strictly, for what engines take
   without a word).
2. Our reading of it against the weights it was made of: shapes, tensors, greedy drafts.
3. vLLM's own drafts against ours, where there is a vLLM: at the places where it drafted, along its
   own greedy text.
"""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.files import read_json
from data.target import Target
from drafters import vllm_format
from drafters.base import TrainedDrafter
from drafters.export_info import INFO, TargetInfo, load_info, load_origin
from drafters.foreign import import_folder, load_any
from drafters.methods import METHODS
from drafters.mtp_stitch import stitch, target_folder
from eval.ask_vllm import ask_vllm
from eval.decode import DecodeSettings, decode
from eval.reading_faults import (
    Explanation,
    Row,
    agreement,
    as_read,
    drafts_of,
    explain,
    make_row,
)
from recipes.errors import UserError
from recipes.schema import TargetSection

NUM_PROMPTS, PROMPT_LENGTH, NUM_TOKENS, STRIDE = 4, 24, 32, 2
MAX_MODEL_LEN = 128
NUM_DRAFT = 3  # where the folder does not say
# Keys of config.json that no engine decides anything by.
FREE = {"transformers_version"}
CAUSES = {
    "aux_layers": "layer ids",
    "rope_parameters": "RoPE",
    "norm_before_residual": "norm switches",
    "norm_before_fc": "norm switches",
    "fc_norm": "norm switches",
    "norm_output": "norm switches",
    "norm.weight": "final norm",
    "d2t": "d2t",
    "lm_head.weight": "head",
}


@dataclass
class Checked:
    """Findings in words; `faults` where something is wrong, `causes` what it likely is."""

    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.faults

    def fault(self, text: str, causes: list[str]) -> None:
        """Something is wrong."""
        self.faults.append(text)
        self.causes += [cause for cause in causes if cause not in self.causes]


class EngineRun(NamedTuple):
    """Greedy tokens of each prompt, and the drafts in the order in which they were made."""

    outputs: list[list[int]]
    drafts: list[list[list[int]]]


def check(
    folder: Path, against: Path | None, target_name: str | None, vllm_python: Path | str | None
) -> Checked:
    """Answer the three questions.

    Args:
        folder: an exported folder, ours or somebody else's.
        against: folder of the weights it should hold; None = RUN/drafter of RUN/export.
        target_name: hub id or folder; None = what draftsmith.json says, with its revision.
        vllm_python: interpreter of an environment with vLLM; None = no third question.

    Raises:
        UserError: no folder, no target, no such interpreter, or no vLLM that runs in it.
    """
    found = Checked()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if vllm_python is not None and not Path(vllm_python).is_file():
        raise UserError(f"--vllm-python {vllm_python}: no such file")
    is_ours = (folder / INFO).is_file()
    if is_ours and (faults := folder_faults(folder)):
        for fault in faults:
            found.fault(fault, [])
        return found
    target = _target(folder, target_name, is_ours)
    try:
        drafter = _read(folder, target, found)
    except UserError as error:
        found.fault(str(error), [])
        return found
    num_draft = METHODS[drafter.method].form.num_tokens(
        drafter.config, load_origin(folder)[1].num_draft_tokens if is_ours else NUM_DRAFT
    )
    source = against or (folder.parent / "drafter" if is_ours else None)
    prompts = fixed_prompts(drafter)
    if source is not None and (source / vllm_format.CONFIG).is_file():
        _against_source(found, folder, source, target, drafter, prompts, num_draft)
    else:
        found.lines.append(f"weights: not compared, {source or '--against'} is not there")
    if vllm_python is None:
        found.lines.append("vLLM: not asked (--vllm-python or VLLM_ENV name one)")
    else:
        python = Path(vllm_python)
        run = run_vllm(found, folder, target, drafter, prompts, num_draft, python)
        if run is not None:
            against_engine(found, "vLLM", target, drafter, prompts, run, num_draft)
    return found


def to_text(found: Checked) -> str:
    """Findings for people."""
    lines = [*found.lines, *(f"WRONG: {fault}" for fault in found.faults)]
    if found.causes:
        lines.append(f"likely cause: {' or '.join(found.causes)}")
    return "\n".join([*lines, "passed" if found.passed else "failed"])


def folder_faults(folder: Path) -> list[str]:
    """Everything in a folder of ours that is not as an export writes it."""
    try:
        drafter = vllm_format.load(folder)
        info = load_info(folder)
        target, origin = load_origin(folder)
    except UserError as error:
        return [str(error)]
    path = folder / vllm_format.CONFIG
    config = read_json(path)
    names, form = vllm_format.form_of(config, path)
    said = {"method": drafter.method, "form": form, "aux_layers": list(drafter.aux_layers)}
    faults = [
        f"{folder / INFO}: {key} is {info.get(key)!r}, config.json says {value!r}"
        for key, value in said.items()
        if info.get(key) != value
    ]
    if faults := faults + names.target_faults(drafter.config, target):
        return faults
    weight = next(t for t in drafter.state_dict().values() if t.is_floating_point())
    try:
        wanted = names.make_config(drafter, form, weight.dtype, target, origin.num_draft_tokens)
    except UserError as error:
        return [str(error)]
    wanted = json.loads(json.dumps(wanted))  # as it is read back: keys of JSON are strings
    return [f"{path}: {fault}" for fault in _differences(config, wanted, "")]


def _differences(found: dict[str, Any], wanted: dict[str, Any], before: str) -> list[str]:
    """Keys that are missing, unexpected or of another value, sections within."""
    faults = [f"missing key {before}{key}" for key in wanted.keys() - found.keys() - FREE]
    faults += [f"unexpected key {before}{key}" for key in found.keys() - wanted.keys() - FREE]
    for key in sorted(wanted.keys() & found.keys() - FREE):
        ours, theirs = wanted[key], found[key]
        if isinstance(ours, dict) and isinstance(theirs, dict):
            faults += _differences(theirs, ours, f"{before}{key}.")
        elif ours != theirs or type(ours) is not type(theirs):
            faults.append(f"{before}{key} is {theirs!r}, an export of these weights has {ours!r}")
    return sorted(faults)


def _target(folder: Path, name: str | None, is_ours: bool) -> Target:
    """The named one; else the one that draftsmith.json names, of its revision."""
    revision = None
    if name is None:
        if not is_ours:
            raise UserError(f"{folder}: names no target; give --target")
        info = load_origin(folder)[0]
        name, revision = info.name, info.revision
    return Target.load(TargetSection(model=name, revision=revision, dtype="float32"))


def _read(folder: Path, target: Target, found: Checked) -> TrainedDrafter:
    """The drafter in float32, ready to draft; what was assumed goes into the findings."""
    if (folder / INFO).is_file():
        drafter = load_any(folder, target, torch.float32)
        found.lines.append(f"folder: complete, {METHODS[drafter.method].form.title}")
    else:
        drafter, notes = import_folder(folder, target, torch.float32)
        found.lines.append(f"folder: read as {METHODS[drafter.method].form.title}, not ours")
        found.lines += [f"  {note}" for note in notes]
    drafter.to(target.device).eval()
    drafter.use_target(target)
    return drafter


def fixed_prompts(drafter: TrainedDrafter) -> list[list[int]]:
    """The same prompts for the same drafter, of tokens that it knows."""
    generator = torch.Generator().manual_seed(7)
    known = drafter.draft_ids_D.cpu()
    chosen = torch.randint(0, len(known), (NUM_PROMPTS, PROMPT_LENGTH), generator=generator)
    return known[chosen].tolist()


def _against_source(
    found: Checked,
    folder: Path,
    source: Path,
    target: Target,
    drafter: TrainedDrafter,
    prompts: list[list[int]],
    num_draft: int,
) -> None:
    """Shapes, tensors as they are stored, then greedy drafts along the target's own text."""
    reference = load_any(source, target)
    if reference.method != drafter.method:
        found.fault(f"{source} is {reference.method}, {folder} {drafter.method}", [])
        return
    ours, theirs = reference.config.to_dict(), drafter.config.to_dict()
    fields = [key for key in ours if ours[key] != theirs.get(key)]
    stored = load_any(folder, target).state_dict()
    own = reference.state_dict()
    tensors = [
        name
        for name in sorted(own.keys() | stored.keys())
        if name not in own
        or name not in stored
        or own[name].shape != stored[name].shape
        or not torch.equal(own[name].to(stored[name].dtype), stored[name])
    ]
    causes = [CAUSES[key] for key in (*fields, *tensors) if key in CAUSES]
    for key in fields:
        found.fault(f"{key} is {theirs.get(key)!r}, that of {source} is {ours[key]!r}", causes)
    if tensors:
        found.fault(f"tensors that are not those of {source}: {', '.join(tensors)}", causes)
    if fields and drafter.config.to_dict().keys() != ours.keys():
        return
    state = {n: t.to(stored[n].dtype) if n in stored else t for n, t in own.items()}
    reference.load_state_dict(state, assign=True)
    reference.to(target.device, torch.float32).eval()
    reference.use_target(target)
    rows = [_own_row(target, ids) for ids in prompts]
    wanted = drafts_of(as_read(reference), rows, num_draft)
    drafts = drafts_of(as_read(drafter), rows, num_draft)
    _judge(
        found, "drafts", f"those of {source}", reference, target, rows, wanted, drafts, num_draft
    )


def _own_row(target: Target, ids: list[int]) -> Row:
    """A prompt with the target's greedy answer, and every other place of it."""
    settings = DecodeSettings(max_new_tokens=NUM_TOKENS)
    answer = decode(target, None, [ids], settings)[0][0].ids
    anchors = range(len(ids), len(ids) + len(answer), STRIDE)
    return make_row(target, ids + answer, list(anchors))


def _judge(
    found: Checked,
    what: str,
    whose: str,
    reference: TrainedDrafter,
    target: Target,
    rows: list[Row],
    ours: list[list[list[int]]],
    theirs: list[list[list[int]]],
    num_draft: int,
) -> None:
    """Compare drafts; where they differ, name the readings of `reference` that explain `theirs`."""
    num = sum(map(len, ours))
    share = agreement(ours, theirs)
    if share == 1:
        found.lines.append(f"{what}: all {num} are {whose}, {num_draft} tokens each")
        return
    reasons = explain(reference, target, rows, theirs, num_draft)
    text = f"{what}: {round(share * num)} of {num} are {whose}"
    found.fault(f"{text}{_reasons(reasons)}", [e.reading.cause for e in reasons])


def _reasons(reasons: list[Explanation]) -> str:
    if not reasons:
        return "; no single mistake that is known here explains the others"
    shown = "; ".join(f"{e.reading.cause}: {e.reading.what}" for e in reasons)
    return f"; {reasons[0].share:.0%} would be with this mistake: {shown}"


def run_vllm(
    found: Checked,
    folder: Path,
    target: Target,
    drafter: TrainedDrafter,
    prompts: list[list[int]],
    num_draft: int,
    python: Path,
) -> EngineRun | None:
    """What a vLLM says and drafts with the folder; None = it does not serve it, see the findings.

    Raises:
        UserError: as `ask_vllm`.
    """
    info, form = TargetInfo.of(target), METHODS[drafter.method].form
    longest = min(MAX_MODEL_LEN, info.max_position_embeddings)
    speculative = {**form.engine, "num_speculative_tokens": num_draft}
    with tempfile.TemporaryDirectory() as name:
        model, revision = info.path, info.hub_revision
        if drafter.method == "mtp":  # served inside its target
            model, revision = str(Path(name) / "joined"), None
            stitch(target_folder(info.name, info.revision), folder, Path(model))
        else:
            speculative["model"] = str(folder.resolve())
        job = {
            "model": model,
            "revision": revision,
            "speculative_config": speculative,
            "prompts": prompts,
            "max_tokens": min(NUM_TOKENS, longest - PROMPT_LENGTH - num_draft - 1),
            "max_model_len": longest,
        }
        answer = ask_vllm(python, {"check": job})
    result = answer["jobs"]["check"]
    if "error" not in result:
        return EngineRun(result["outputs"], result["drafts"])
    if form.engine_note and answer["device"] == "cpu":
        found.lines.append(f"vLLM: not compared, this one runs on a CPU; {form.engine_note}")
    else:
        found.fault(f"vLLM does not serve {folder}: {result['error']}", [])
    return None


def engine_anchors(prompt: list[int], output: list[int], drafts: list[list[int]]) -> list[int]:
    """Where an engine made its drafts, of a prompt's text [prompt + output].

    The first draft stands behind the first token; each later one behind what was accepted of the
    one before (tokens equal to the greedy text) and one more.
    """
    anchors, place = [], 0
    for draft in drafts:
        if place >= len(output):
            break
        anchors.append(len(prompt) + place)
        behind = output[place + 1 :]
        accepted = 0
        while accepted < min(len(draft), len(behind)) and draft[accepted] == behind[accepted]:
            accepted += 1
        place += accepted + 1
    return anchors


def against_engine(
    found: Checked,
    engine: str,
    target: Target,
    drafter: TrainedDrafter,
    prompts: list[list[int]],
    run: EngineRun,
    num_draft: int,
) -> None:
    """An engine's drafts against ours at the same places of the same text."""
    rows, theirs = [], []
    for ids, output, drafts in zip(prompts, run.outputs, run.drafts, strict=True):
        anchors = engine_anchors(ids, output, drafts)
        row = make_row(target, ids + output, anchors)
        logits_SV = target.logits(row.states[target.num_layers][len(ids) - 1 : -1])
        if logits_SV.argmax(-1).tolist() != output:
            found.fault(
                f"{engine}: the target itself says something else there, so drafts cannot be "
                "compared (another revision, dtype or chat template?)",
                [],
            )
            return
        rows.append(row)
        theirs.append(drafts[: len(anchors)])
    ours = drafts_of(as_read(drafter), rows, num_draft)
    _judge(found, f"{engine}'s drafts", "ours", drafter, target, rows, ours, theirs, num_draft)
