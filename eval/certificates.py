"""Certificates of all drafters of a run, written to RESULTS/certificate_NAME.json."""

from collections.abc import Sequence
from pathlib import Path

import torch

from data.files import write_json
from data.progress import progress
from eval.certify import NUM_TOKENS, Certificate, certify, num_drawn
from eval.measure import check_prompts, greedy_check, num_batches, render_all
from eval.results import Plan, make_drafters, make_identity, other_export
from eval.shown_certificate import certificate_file
from eval.sweep import load_target
from eval.tasks import Task
from recipes.errors import UserError


def certificate_path(plan: Plan, name: str) -> Path:
    """File of one of eval.drafters."""
    other = other_export(plan, name)
    return plan.results / certificate_file(name, plan.recipe.eval.verification, other)


def run_certificates(
    plan: Plan, tasks: Sequence[Task], num_tokens: int = NUM_TOKENS
) -> list[Certificate]:
    """Certify all of eval.drafters on the first turns of the tasks' prompts and write the files.

    Of trees, which lookup does not grow, the trained drafter alone.
    Greedy tokens are compared in float32 whatever the recipe's dtype, on eval.greedy_check_prompts
    prompts; the law is that of the recipe's dtype.

    Raises:
        UserError: the tasks have no prompts.
    """
    recipe = plan.recipe
    section, kwargs = recipe.eval, recipe.data.template_kwargs
    names = ["drafter"] if section.verification == "tree" else section.drafters
    prompts = check_prompts(tasks, sum(len(task.prompts) for task in tasks))
    if not prompts:
        raise UserError("eval.tasks: no prompts to certify on; name a task that has some")
    target = load_target(recipe)
    exact = target if target.dtype == torch.float32 else load_target(recipe, "float32")
    few = prompts[: section.greedy_check_prompts]
    greedy = {}
    if few:
        total = num_batches(len(few), len(names), section.batch_size)
        with progress(total, "greedy check in float32") as advance:
            drafters = make_drafters(plan, exact, names)
            greedy = greedy_check(exact, drafters, few, section, kwargs, advance)
    del exact
    ids, found = render_all(target, prompts, kwargs, section.max_new_tokens), []
    for name, drafter in make_drafters(plan, target, names).items():
        total = num_drawn(section, name, num_tokens)
        with progress(total, f"{name}: tokens drawn") as advance:
            certificate = certify(
                target, name, drafter, ids, section, greedy.get(name), num_tokens, advance
            )
        certificate["identity"] = make_identity(plan, target, name)
        write_json(certificate_path(plan, name), certificate)
        found.append(certificate)
    return found


def to_text(certificate: Certificate) -> str:
    """What became of each broken verifier, and the setting, a line each; then the verdict."""
    lines = [f"{certificate['drafter']}, {certificate['certified']}:"]
    for law in certificate["laws"]:
        shown = "-" if law["p_value"] is None else f"{law['p_value']:.2g}"
        lines.append(f"  drawn at {law['setting']}: {law['num_tokens']:,} tokens, p={shown}")
    for fault in certificate["power"]:
        about = "at least" if fault["at_least"] else "about"
        takes = f"takes {about} {fault['tokens_needed']:,}"
        if not fault["num_other"]:
            takes = f"emits what the right one does in all of {fault['num_rounds']:,} rounds"
        lines.append(
            f"  broken: {fault['what']} (at {fault['setting']}): {fault['num_tokens']:,} tokens, "
            f"p={fault['p_value']:.2g}, {takes}"
        )
    if (floor := certificate["floor"]) is not None:
        lines.append(
            f"  {floor['dtype']}, greedy: {floor['drafter_diverged']} of {floor['num_prompts']} "
            f"answers differ, {floor['target_diverged']} by rounding alone, "
            f"p={floor['p_value']:.2g}"
        )
    return "\n".join([*lines, certificate["line"]])
