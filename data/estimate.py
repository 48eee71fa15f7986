"""Rows, tokens and bytes of a recipe's data, before anything is made."""

from data.embedded import config_of
from data.files import read_json
from data.hidden_states import bytes_per_token
from data.pipeline import data_dir
from data.served_states import layers_asked, serve_command
from recipes.schema import Recipe


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
        fields = config_of(recipe.target.model, recipe.target.revision)
        hidden, n = int(fields["hidden_size"]), int(fields["num_hidden_layers"])
        aux = recipe.drafter.aux_layers or recipe.drafter.default_aux_layers(n)
        one = bytes_per_token(len(aux), hidden, section.states_dtype)
        lines.append(
            f"states on disk: {words} {tokens * one / 1e9:.2f} GB ({one:,} bytes a token, "
            f"{section.states_dtype})"
        )
    if section.states_server is not None:
        layers = layers_asked(aux, n)
        command = serve_command(
            recipe.target.model,
            layers,
            section.max_length,
            section.states_server.folder,
        )
        lines.append(f"states come from a server, started by: {command}")
    if section.max_minutes is not None:
        lines.append(f"generation stops taking prompts after {section.max_minutes:g} minutes")
    return "\n".join(lines)
