"""Rows, tokens and bytes of a recipe's data, before anything is made."""

from data.embedded import config_of
from data.files import read_json
from data.hidden_states import bytes_per_token
from data.pipeline import data_dir
from recipes.schema import Recipe


def num_aux_layers(recipe: Recipe) -> int:
    """How many target layers are captured."""
    return len(recipe.drafter.aux_layers or (0, 0, 0))


def estimate_data(recipe: Recipe) -> str:
    """Lines for a person: at most so many rows, tokens and bytes; or what is there already."""
    section = recipe.data
    report = data_dir(recipe) / "report.json"
    if report.exists():
        found = read_json(report)
        rows = found["num_train_rows"] + found["num_heldout_rows"]
        tokens, words = found["num_train_tokens"], "prepared"
    else:
        rows = section.num_prompts
        longest = min(section.max_length, section.max_prompt_tokens + section.max_new_tokens)
        tokens, words = rows * longest, "at most"
    lines = [f"data: {words} {rows:,} rows, {tokens:,} tokens ({data_dir(recipe)})"]
    if section.states == "cached":
        hidden = int(config_of(recipe.target.model, recipe.target.revision)["hidden_size"])
        one = bytes_per_token(num_aux_layers(recipe), hidden, section.states_dtype)
        lines.append(
            f"states on disk: {words} {tokens * one / 1e9:.2f} GB ({one:,} bytes a token, "
            f"{section.states_dtype})"
        )
    if section.max_minutes is not None:
        lines.append(f"generation stops taking prompts after {section.max_minutes:g} minutes")
    return "\n".join(lines)
