"""The benchmark through a served engine: same tasks, prompts and definitions, the engine's counts.

One arm is the engine with the drafter, the other the same engine with the same flags and without
speculation. The arms run one after the other: a server that is started here needs the machine for
itself. Each is warmed up before its clock counts.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data import embedded
from data.conversations import render_prompt
from data.files import read_json, stable_hash, write_json
from data.served_answers import openai_message
from drafters.export_info import INFO, export_hash
from drafters.foreign import describe
from drafters.methods import METHODS
from drafters.vllm_format import CONFIG, form_of
from eval.engine_metrics import sglang_gauges, vllm_counters
from eval.engines import (
    EngineName,
    Prompt,
    Request,
    Server,
    ask_all,
    attach,
    metrics_text,
    start_vllm,
)
from eval.record import ResultRecord
from eval.results import Plan, make_settings
from eval.served_record import ArmRun, TaskRun, make_record
from eval.tasks import Task
from recipes.errors import UserError
from recipes.schema import Recipe

WARM_UP_TOKENS = 16
SERVER_LOG = "server_{arm}.log"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How to reach the engine.

    server, baseline_server: addresses to attach to; without `server` vLLM is started by `command`
        with `flags`, once with the drafter and once without. With `server` alone there is no
        baseline, so no speedup.
    concurrency: requests in flight, one result each.
    api: completions sends token ids rendered here; chat lets the server render the messages.
    """

    engine: EngineName
    server: str | None = None
    baseline_server: str | None = None
    command: str = "vllm serve"
    flags: str = ""
    concurrency: tuple[int, ...] = (1,)
    api: Literal["completions", "chat"] = "completions"


def bench_served(plan: Plan, tasks: Sequence[Task], options: ServeOptions) -> list[Path]:
    """Measure and write one record for each temperature and concurrency.

    Raises:
        UserError: no server, no drafter, or options that do not fit together.
    """
    check_options(options, plan.recipe)
    if options.server is None:  # an attached server has a number of its own
        plan = with_num_tokens(plan)
    prompts = {task.name: render_task(plan.recipe, task, options.api) for task in tasks}
    with arm_server(plan, options, "drafter") as server:
        drafted = run_arm(server, plan, prompts, options)
    baseline = None
    if options.server is None or options.baseline_server is not None:
        with arm_server(plan, options, "baseline") as server:
            baseline = run_arm(server, plan, prompts, options)
    paths = []
    for temperature in plan.recipe.eval.temperatures:
        for concurrency in options.concurrency:
            record = make_record(
                plan, tasks, drafted, baseline, temperature, concurrency, engine_settings(options)
            )
            if options.server is None:  # else it drafts with whatever it was started with
                record["identity"]["drafter_hash"] = export_hash(plan.export)
            path = served_path(plan, record)
            write_json(path, record)
            paths.append(path)
    return paths


def served_path(plan: Plan, record: ResultRecord) -> Path:
    """File of a record; its name ends in a hash of target, drafter, its folder, settings, tasks."""
    settings = record["settings"]
    words = ["drafter", f"T{settings['temperature']:g}", f"K{settings['num_draft_tokens']}"]
    words += [f"B{settings['batch_size']}", settings["engine"].split()[0]]
    target = plan.recipe.target
    whose = [target.model, target.revision, plan.name, str(plan.export.absolute())]
    digest = stable_hash([*whose, settings, sorted(record["tasks"])])[:8]
    return plan.results / ("_".join([*words, digest]) + ".json")


def engine_settings(options: ServeOptions) -> dict[str, Any]:
    """What a record's settings say of the engine beyond its name, where it is not the usual."""
    flags = {"engine_flags": options.flags} if options.flags else {}
    return flags | ({"api": options.api} if options.api != "completions" else {})


def check_options(options: ServeOptions, recipe: Recipe) -> None:
    """Raise UserError where they do not fit together or to the recipe."""
    if recipe.eval.verification != "token":
        raise UserError(
            f"eval.verification={recipe.eval.verification}: the engine has its own rule, set it to "
            "token (or measure with --engine torch)"
        )
    if options.engine == "sglang" and options.server is None:
        raise UserError("--engine sglang attaches to a running server: name it with --server URL")
    if options.engine == "sglang" and options.api == "chat":
        raise UserError("--engine sglang is asked by /generate, which takes no --api chat")
    if options.api == "chat" and recipe.data.chat_template is not None:
        raise UserError(
            f"data.chat_template={recipe.data.chat_template}: with --api chat a server renders by "
            "its own; leave out --api chat, or set data.chat_template=null"
        )
    if options.flags and options.server is not None:
        raise UserError("--engine-flags are for servers started here; with --server leave them out")
    if options.baseline_server is not None and options.server is None:
        raise UserError("--baseline-server goes with --server")
    if not options.concurrency or min(options.concurrency) < 1:
        raise UserError(f"--concurrency {list(options.concurrency)}: each must be at least 1")


def render_task(recipe: Recipe, task: Task, api: str) -> list[Prompt]:
    """What is sent for each prompt of a task (its first turn)."""
    kwargs = recipe.data.template_kwargs
    if api == "chat":
        shared = {"chat_template_kwargs": kwargs} if kwargs else {}
        return [
            {
                "messages": [openai_message(message) for message in prompt["messages"]],
                **({"tools": prompt["tools"]} if "tools" in prompt else {}),
                **shared,
            }
            for prompt in task.prompts
        ]
    tokenizer = load_tokenizer(recipe)
    return [
        render_prompt(tokenizer, prompt["messages"], prompt.get("tools"), kwargs)
        for prompt in task.prompts
    ]


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The target's tokenizer with the recipe's chat template."""
    path = embedded.resolve(recipe.target.model)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path, revision=recipe.target.revision, trust_remote_code=recipe.target.trust_remote_code
    )
    if recipe.data.chat_template is not None:
        tokenizer.chat_template = recipe.data.chat_template.read_text(encoding="utf-8")
    return tokenizer


def with_num_tokens(plan: Plan) -> Plan:
    """The plan with the number of draft tokens that its export can be served with.

    A block drafts all its tokens, a Medusa head one. Somebody else's folder is taken as it is.
    """
    if not (plan.export / INFO).is_file():
        return plan
    section, path = plan.recipe.eval, plan.export / CONFIG
    config = read_json(path)
    form = form_of(config, path)[0]
    drafter = form.read_config(config, path)[0]  # shapes alone
    num = form.num_tokens(drafter.config, section.num_draft_tokens)
    section = section.model_copy(update={"num_draft_tokens": num})
    return plan._replace(recipe=plan.recipe.model_copy(update={"eval": section}))


def speculative_config(plan: Plan) -> dict[str, Any]:
    """vLLM's --speculative-config of the plan's export.

    Raises:
        UserError: the drafter is not served from a folder of its own.
    """
    sampled = plan.recipe.eval.draft_sampling == "sampled"
    method = describe(plan.export).method
    if method == "mtp":
        raise UserError(
            f"{plan.export}: an MTP layer is served inside its target: write it there with "
            "train/export.py RUN --stitch, serve that folder and name the server by --server"
        )
    return {
        "model": str(plan.export),
        **METHODS[method].form.engine,
        "num_speculative_tokens": plan.recipe.eval.num_draft_tokens,
        "draft_sample_method": "probabilistic" if sampled else "greedy",
    }


@contextmanager
def arm_server(
    plan: Plan, options: ServeOptions, arm: Literal["drafter", "baseline"]
) -> Iterator[Server]:
    """The server of an arm: attached to, or started for the length of a `with`."""
    url = options.server if arm == "drafter" else options.baseline_server
    if url is not None:
        yield attach(options.engine, url)
        return
    dtype = make_settings(plan.recipe, 0.0)["dtype"]
    section = plan.recipe.target
    flags = ["--dtype", dtype, "--no-enable-prefix-caching"]
    flags += [] if section.revision is None else ["--revision", section.revision]
    flags += ["--trust-remote-code"] if section.trust_remote_code else []
    flags += shlex.split(options.flags)
    if arm == "drafter":
        flags += ["--speculative-config", json.dumps(speculative_config(plan))]
        flags += ["--per-request-spec-decode-metrics", "detailed"]
    model = embedded.resolve(section.model)
    log = plan.results / SERVER_LOG.format(arm=arm)
    with start_vllm(options.command, model, flags, log) as server:
        yield server


def run_arm(
    server: Server, plan: Plan, prompts: dict[str, list[Prompt]], options: ServeOptions
) -> ArmRun:
    """All tasks at all temperatures and concurrencies on one server."""
    section, arm = plan.recipe.eval, ArmRun(server, {})
    for temperature in section.temperatures:
        request = Request(
            max_tokens=section.max_new_tokens,
            temperature=temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            repetition_penalty=section.repetition_penalty,
            seed=section.seed,
        )
        short = Request(max_tokens=WARM_UP_TOKENS, temperature=temperature)
        for concurrency in options.concurrency:
            for name, task in prompts.items():
                ask_all(server, task[:concurrency], short, concurrency)
                before = vllm_counters(metrics_text(server))
                answers, seconds = ask_all(server, task, request, concurrency)
                after = vllm_counters(metrics_text(server))
                counted = after.since(before) if before and after else None
                arm.runs[temperature, concurrency, name] = TaskRun(answers, seconds, counted)
    if server.engine == "sglang":
        arm.gauges = sglang_gauges(metrics_text(server))
    return arm
