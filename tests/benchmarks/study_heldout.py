"""More held-out rows than a study's own answers hold: prompts that were left without an answer.

A few percent of a short set of answers say little about spread. The prompts that
`data.max_minutes` cut off come from the same sources, and nothing was trained on them.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from data.batch import Row
from data.files import make_folder, write_json
from data.hidden_states import StateStore, manifest_of
from data.json_lines import read_lines, write_lines
from data.pipeline import Prepared, data_dir, prepare
from data.prompts import PromptReport
from data.row_file import RowFile
from data.target import Target
from recipes.errors import UserError
from recipes.schema import Recipe

Part = tuple[RowFile, Path]  # rows, and the RUN/data that they and their states lie in


def heldout_parts(shared: Recipe, prepared: Prepared, target: Target, num_more: int) -> list[Part]:
    """The held-out rows of the shared answers, and those of `num_more` prompts more.

    The answers to these lie in OUT/<minutes>min/heldout-N/data and are made once.

    Args:
        shared: recipe of the answers that all arms learn from.
        prepared: these answers.
        target: answers these as it did those.
        num_more: prompts; 0 = none.

    Raises:
        UserError: fewer prompts were left over, or one of them was answered there since.
    """
    own = (prepared.heldout, data_dir(shared))
    if num_more == 0:
        return [own]
    section = shared.data.model_copy(update={"num_prompts": num_more, "max_minutes": None})
    recipe = shared.model_copy(update={"name": f"heldout-{num_more}", "data": section})
    folder, path = data_dir(recipe), data_dir(recipe) / "prompts.jsonl"
    answered = {record["id"] for record in read_lines(data_dir(shared) / "responses.jsonl")}
    if not path.exists():
        prompts = read_lines(data_dir(shared) / "prompts.jsonl")
        left = [*islice((p for p in prompts if p["id"] not in answered), num_more)]
        if len(left) < num_more:
            raise UserError(
                f"heldout asks for {num_more} prompts, the shared answers left {len(left)} over: "
                "lower it, raise data.num_prompts or lower data.max_minutes"
            )
        make_folder(folder)
        write_json(folder / "prompts_report.json", PromptReport().as_json() | {"magpie": 0})
        write_lines(path, left)
    more = prepare(recipe, target)
    if any(prompt["id"] in answered for prompt in read_lines(path)):
        raise UserError(f"{folder}: the arms learn from some of its prompts; delete the folder")
    return [own, (more.train, folder), (more.heldout, folder)]


def with_stored_states(
    parts: Sequence[Part], target: Target, aux_layers: tuple[int, ...], stored_as: str
) -> list[Row]:
    """All rows, with the states of these layers where they are stored (else they are computed)."""
    found: list[Row] = []
    for rows, folder in parts:
        if not (folder / "states").is_dir():  # data.states: online
            found += rows
            continue
        store = StateStore(folder / "states", manifest_of(target, aux_layers, stored_as))
        for row in rows:
            known = row.id in store
            found.append(replace(row, states=store.get(row.id)) if known else row)
    return found
