"""How many tokens to draft when serving: costs and acceptance measured, all numbers predicted.

`plan.json` holds, for each temperature and batch size, what was measured and the prediction for 1
to 16 draft tokens. Acceptance is measured with NUM_DRAFT tokens a round; c_i of later positions is
extrapolated (eval.theory.extend_conditional) and marked so.
"""

from collections.abc import Sequence
from itertools import compress, product
from pathlib import Path
from typing import Any

import torch

from data.files import write_json
from data.target import Target
from drafters.base import DecodingDrafter, TrainedDrafter
from drafters.export_info import export_hash
from drafters.lookup import UNTRAINED
from drafters.methods import METHODS
from eval import metrics, roofline, theory
from eval.arms import BASELINE, run_arms
from eval.costs import measure_passes
from eval.measure import check_prompts, decode_settings, make_answer, render_all
from eval.results import Plan, make_drafters
from eval.sweep import load_target
from eval.task_result import MAX_PREDICTED, loop_costs, make_records
from eval.tasks import Task
from recipes.errors import UserError
from recipes.schema import EvalSection

PLAN = "plan.json"
NUM_DRAFT = 8  # tokens a round while acceptance is measured
NUM_PROMPTS = 8  # of all tasks, in turn; more where the batch is larger
PARALLEL = 2.0  # a draft of 16 tokens that costs less than this many drafts of one: one pass


def make_plan(
    plan: Plan, tasks: Sequence[Task], batch_sizes: Sequence[int], device: str | None = None
) -> tuple[Path, str]:
    """Measure and predict, and write RESULTS/plan.json.

    Args:
        device: of eval.roofline.DEVICES, for the roofline; None = the one measured on.

    Returns:
        The file, and one line that says which number of draft tokens to serve with.

    Raises:
        UserError: there is no prompt, or no draft was made.
    """
    section = plan.recipe.eval
    name = "drafter" if "drafter" in section.drafters else section.drafters[0]
    target = load_target(plan.recipe)
    drafter = make_drafters(plan, target, [name])[name]
    bound = _device(target, device)
    tables = []
    for temperature, size in product(section.temperatures, batch_sizes):
        changed = {"batch_size": size, "num_draft_tokens": NUM_DRAFT}
        at = section.model_copy(update=changed)
        kwargs = plan.recipe.data.template_kwargs
        tables.append(make_table(target, drafter, tasks, at, temperature, kwargs, bound))
    best = tables[0]["num_draft_tokens"]
    found = {
        "schema": 1,
        "target": plan.recipe.target.model,
        "drafter": name.replace("drafter", plan.name),
        "drafter_hash": None if name in UNTRAINED else export_hash(plan.export),
        "num_draft_tokens": best,
        "device": bound._asdict(),
        "tables": tables,
    }
    path = plan.results / PLAN
    write_json(path, found)
    note = ""
    if isinstance(drafter, TrainedDrafter):
        note = METHODS[drafter.method].form.engine_note
    return path, "; ".join(filter(None, [advice(tables[0]), note]))


def can_serve(drafter: DecodingDrafter, num_draft: int) -> bool:
    """Whether engines can be told to draft so many tokens: a block drafts all of its tokens."""
    if not isinstance(drafter, TrainedDrafter):
        return True
    return METHODS[drafter.method].form.num_tokens(drafter.config, num_draft) == num_draft


def make_table(
    target: Target,
    drafter: DecodingDrafter,
    tasks: Sequence[Task],
    section: EvalSection,
    temperature: float,
    template_kwargs: dict[str, object] | None,
    bound: roofline.Device,
) -> dict[str, Any]:
    """What is measured at one temperature and batch size, and what that predicts."""
    size, settings = section.batch_size, decode_settings(section, temperature)
    prompts = check_prompts(tasks, max(NUM_PROMPTS, size))
    if not prompts:
        raise UserError("eval.tasks: there is no prompt to plan with")
    answer = make_answer(target, prompts, section, template_kwargs)
    arms = run_arms(answer, {"drafter": drafter}, len(prompts), settings, size)
    rates = metrics.aggregate(make_records(prompts, arms["drafter"]), section.seed)
    if not rates["num_rounds"]:
        raise UserError("no round was decoded; plan with eval.max_new_tokens above 1")
    ids = render_all(target, prompts, template_kwargs, section.max_new_tokens)
    times = measure_passes(target, {"drafter": drafter}, ids, size, settings.sampling)
    costs = loop_costs(arms[BASELINE], arms["drafter"], times, "drafter")
    points = theory.predict(costs, rates["survival"], MAX_PREDICTED)
    servable = [can_serve(drafter, point.num_draft_tokens) for point in points]
    best = theory.best_point([*compress(points, servable)])
    context = sum(map(len, ids)) // len(ids) + section.max_new_tokens // 2
    least = _least_costs(target, drafter, costs, size, context, bound)
    limits = theory.predict(least, rates["survival"], MAX_PREDICTED)
    return {
        "temperature": temperature,
        "batch_size": size,
        "num_draft_tokens": best.num_draft_tokens if best else 0,
        "speedup": best.speedup if best else 1.0,
        "num_prompts": rates["num_prompts"],
        "num_rounds": rates["num_rounds"],
        "measured_num_draft_tokens": settings.num_draft,
        "tau": rates["tau"],
        "tau_ci95": rates["tau_ci95"],
        "alpha": rates["alpha"],
        "survival": rates["survival"],
        "cost_ratio": costs.cost_ratio,
        "plain_ms": costs.plain_ms,
        "verify_ms": {str(k): v for k, v in costs.verify_ms.items()},
        "draft_ms": {str(k): v for k, v in costs.draft_ms.items()},
        "roofline_plain_ms": least.plain_ms,
        "points": [
            {**point._asdict(), "roofline_speedup": limit.speedup, "servable": can}
            for point, limit, can in zip(points, limits, servable, strict=True)
        ],
    }


def advice(table: dict[str, Any]) -> str:
    """One line: the number to serve with, or not to speculate."""
    where = f"at T={table['temperature']:g}, batch {table['batch_size']}"
    if table["num_draft_tokens"] == 0:
        top = max(point["speedup"] for point in table["points"] if point["servable"])
        return f"serve without this drafter {where}: no number of tokens gains (best {top:.2f}x)"
    return (
        f"serve with {table['num_draft_tokens']} draft tokens {where}: "
        f"predicted {table['speedup']:.2f}x"
    )


def to_text(found: dict[str, Any]) -> str:
    """plan.json as tables for people."""
    parts = []
    for table in found["tables"]:
        parts.append(
            f"T={table['temperature']:g}, batch {table['batch_size']}: tau {table['tau']:.2f} in "
            f"{table['num_rounds']} rounds of {table['measured_num_draft_tokens']} drafted tokens, "
            f"c = {table['cost_ratio']:.3f}, a plain token {table['plain_ms']:.2f} ms "
            f"(roofline of {found['device']['name']}: {table['roofline_plain_ms']:.2f} ms)"
        )
        parts.append("drafted   tau    draft   verify    loop  speedup  perfect  share  roofline")
        for p in table["points"]:
            mark = "~" if p["extrapolated"] else " "
            best = "  <- best" if p["num_draft_tokens"] == table["num_draft_tokens"] else ""
            parts.append(
                f"{p['num_draft_tokens']:6} {p['tau']:6.2f}{mark} {p['draft_ms']:7.2f} "
                f"{p['verify_ms']:8.2f} {p['loop_ms']:7.2f} {p['speedup']:7.2f}x "
                f"{p['oracle_speedup']:7.2f}x {p['oracle_share']:6.0%} "
                f"{p['roofline_speedup']:8.2f}x{best}"
            )
    parts.append(
        "Times are milliseconds a round. perfect: every token accepted at the same cost; share: of "
        "its speedup.\nroofline: the same acceptance in an engine without overhead. "
        "~: acceptance of the last positions extrapolated."
    )
    return "\n".join(parts)


def _device(target: Target, name: str | None) -> roofline.Device:
    if name is not None:
        return next(device for device in roofline.DEVICES if device.name == name)
    known = None
    if target.device.type == "cuda":
        known = roofline.find_device(torch.cuda.get_device_name(target.device))
    return known or roofline.measure_device(target.device, target.dtype)


def _least_costs(
    target: Target,
    drafter: DecodingDrafter,
    costs: theory.Costs,
    batch_size: int,
    context: int,
    bound: roofline.Device,
) -> theory.Costs:
    """The costs on the roofline; whether a draft is one pass is told from its measured times."""
    weights = roofline.drafter_work(drafter, target.dtype.itemsize)
    parallel = costs.draft(MAX_PREDICTED) < PARALLEL * costs.draft(1)
    work = roofline.target_work(target, context)
    return roofline.roofline_costs(bound, work, weights, batch_size, MAX_PREDICTED, parallel)
