"""README.md of an exported folder: the model card, with the results that lie beside the run."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data.files import read_json, write_text
from drafters.base import TrainedDrafter
from drafters.export_form import ExportForm, Form
from drafters.export_info import (
    CARD,
    INFO,
    LAYER_IDS,
    Origin,
    TargetInfo,
    export_hash,
    serve_command,
    sglang_command,
)

DEFINITIONS = """\
tau = tokens emitted a round, with the token that the target adds itself; accepted = drafted tokens
kept a round, without it (engines give accepted + 1). alpha = mean of sum_v min(p, q)
over verified positions. speedup = tokens a second over those of the same engine without a drafter.
K = tokens drafted a round; T = temperature. Prompts of a task are pooled."""
CERTIFICATE = r"certificate_drafter(_[0-9a-f]{8})?\.json"  # of chains
HEAD = "| Task | T | K | batch | engine | dtype | tau | accepted | alpha | speedup |"


class CardFacts(NamedTuple):
    """What is written: a drafter, its form, where it comes from and the folder it will lie in."""

    names: ExportForm
    form: Form
    drafter: TrainedDrafter
    target: TargetInfo
    origin: Origin
    folder: Path


@dataclass(frozen=True)
class Findings:
    """What was measured of an export, where it was.

    plan: of this run's drafter: how many tokens to draft with, whatever the export's form.
    prediction: the plan again, where it was made with this very export.
    """

    records: list[dict[str, Any]]
    certificate: dict[str, Any] | None
    plan: dict[str, Any] | None
    prediction: dict[str, Any] | None


def read_findings(results: Path | None, written: Path, facts: CardFacts) -> Findings:
    """What the files of a results folder say of an export (records, certificate and plan).

    Other drafters' results lie there, too, and those of weights that were exported before: what
    names other weights, another target or none is left out.

    Args:
        written: the exported folder as it stands, still under another name or not.
    """
    if results is None or not results.is_dir():
        return Findings([], None, None, None)
    files = {path.name: read_json(path) for path in sorted(results.glob("*.json"))}
    found = {name: value for name, value in files.items() if isinstance(value, dict)}
    ours = {"target": facts.target.name, "drafter_hash": export_hash(written)}
    of_ours = {
        name: value
        for name, value in found.items()
        if ours.items() <= (value.get("identity") or {}).items()
    }
    records = [
        value
        for value in of_ours.values()
        if isinstance(value.get("tasks"), dict)
        and value["identity"].get("method") == facts.drafter.method
    ]
    plan = found.get("plan.json")
    if plan is not None and (
        plan.get("drafter") != facts.origin.recipe["name"] or _is_outdated(results / "plan.json")
    ):
        plan = None
    prediction = plan if plan is not None and ours.items() <= plan.items() else None
    certificates = (v for n, v in of_ours.items() if re.fullmatch(CERTIFICATE, n))
    return Findings(records, next(certificates, None), plan, prediction)


def _is_outdated(file: Path) -> bool:
    """Whether the run was trained anew since."""
    weights = file.parents[1] / "drafter" / "model.safetensors"
    return weights.is_file() and weights.stat().st_mtime > file.stat().st_mtime


def num_draft_tokens(facts: CardFacts, findings: Findings) -> int:
    """How many tokens to serve with: as planned, else as evaluated, if the drafter can."""
    planned = findings.plan["num_draft_tokens"] if findings.plan else 0
    num = int(planned or facts.origin.num_draft_tokens)
    return facts.names.num_tokens(facts.drafter.config, num)


def serve_lines(facts: CardFacts, findings: Findings) -> dict[str, str]:
    """Engine: the shell line that serves with the planned number of tokens; those that can."""
    names, num = facts.names, num_draft_tokens(facts, findings)
    lines = {"vLLM": serve_command(facts.folder, facts.target, names.engine, num)}
    options = names.sglang(facts.drafter.config, facts.form, num)
    if options is not None:
        lines["SGLang"] = sglang_command(facts.folder, facts.target, options)
    return lines


def write_card(folder: Path, facts: CardFacts, findings: Findings) -> None:
    """Write README.md into `folder`."""
    write_text(folder / CARD, "\n".join(_lines(facts, findings)) + "\n")


def _lines(facts: CardFacts, findings: Findings) -> list[str]:
    names, form, drafter, target, origin, _ = facts
    data, train = origin.recipe["data"], origin.recipe["train"]
    limit = f"{train['epochs']:g} epochs"
    if train.get("max_steps"):  # which then decides alone
        limit = f"{train['max_steps']:,} steps"
    num_params = sum(parameter.numel() for parameter in drafter.parameters())
    answers = "by the target itself" if data["regenerate"] else "as in the source"
    is_on_hub = ":" not in target.name and not target.path.startswith("/")
    lines = [
        "---",
        *([f"base_model: {target.name}"] if is_on_hub else []),
        f"tags: [speculative-decoding, draftsmith, {drafter.method}]",
        "---",
        "",
        f"# {names.title} drafter for {target.name}",
        "",
        "A drafter for lossless speculative decoding: it proposes tokens that the target checks,",
        "so text comes faster and its distribution stays that of the target. Made with Draftsmith.",
        "",
        f"- Target: {target.name}, revision {target.revision}",
        f"- Shape: {num_params:,} parameters,"
        f" {drafter.config.draft_vocab_size:,} of {target.vocab_size:,} tokens; {form} form",
        f"- Target layers read: {list(drafter.aux_layers)}; {LAYER_IDS}",
        f"- Training text: prompts from {', '.join(data['sources'])}; answers {answers}",
        f"- Budget: {origin.num_trained_tokens:,} places of answers drafted from (repeats counted),"
        f" at most {limit}",
        "",
        "## Results",
        "",
        *_results(findings),
        "",
        "## Serving",
        "",
    ]
    for engine, line in serve_lines(facts, findings).items():
        lines += [f"{engine}:", "", "```", line, "```", ""]
    if names.engine_note:
        lines += [f"{names.engine_note}.", ""]
    if "SGLang" not in serve_lines(facts, findings) and "sglang" in names.forms:
        lines += ["SGLang reads the form that `python train/export.py --format sglang` writes.", ""]
    lines.append(f"`{INFO}` holds the recipe, the commit and the versions.")
    return lines


def _results(findings: Findings) -> list[str]:
    rows = []
    for record in findings.records:
        settings = record["settings"]
        for name, task in record["tasks"].items():
            cells = [
                name,
                f"{settings['temperature']:g}",
                str(settings["num_draft_tokens"]),
                str(settings["batch_size"]),
                settings["engine"],
                settings["dtype"],
                _with_interval(task["tau"], task["tau_ci95"]),
                _number(task["mean_accepted"]),
                _number(task["alpha"]),
                _with_interval(task["speedup"], task["speedup_ci95"]),
            ]
            rows.append(f"| {' | '.join(cells)} |")
    if rows:
        lines = [HEAD, "|" + " --- |" * (HEAD.count("|") - 1), *rows, "", DEFINITIONS]
    else:
        lines = ["Not measured yet; `python eval/bench.py` does it, a new export adds the table."]
    certificate, plan = findings.certificate, findings.prediction
    lines += ["", f"- Lossless: {certificate['line'] if certificate else 'not certified'}"]
    if plan is not None:
        table = plan["tables"][0]
        lines.append(
            f"- Planned: {plan['num_draft_tokens']} draft tokens, predicted speedup"
            f" {table['speedup']:.2f} (T={table['temperature']:g}, batch {table['batch_size']})"
        )
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _with_interval(value: float | None, interval: list[float] | None) -> str:
    if value is None or interval is None:
        return _number(value)
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
