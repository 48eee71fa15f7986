"""Recipes: what is shipped loads; what is wrong is named with its key, file and the mend."""

from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml

from recipes.drafter_sections import BlockSection, DrafterSection, DSparkSection
from recipes.errors import UserError
from recipes.keys import fields_by_key
from recipes.schema import Recipe, dump_recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
LAUNCHERS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
MINIMAL = """
name: tiny
target: {model: some/model}
data: {sources: [book], num_prompts: 5}
"""


def write(tmp_path: Path, text: str = MINIMAL) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, list(overrides))
    return str(caught.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipe_loads_and_round_trips(path, tmp_path):
    recipe = load_recipe(path)
    copy = write(tmp_path, dump_recipe(recipe))
    assert load_recipe(copy) == recipe


def test_shipped_recipes_are_all_here():
    assert [path.stem for path in SHIPPED] == [
        "llama3",
        "qwen3",
        "qwen3_dflash",
        "qwen3_dspark",
        "qwen3_medusa",
        "qwen3_mtp",
        "qwen3_peagle",
        "qwen3_small",
        "smoke",
        "smollm2",
        "smollm2_dflash",
        "smollm2_dspark",
        "smollm2_eagle1",
        "smollm2_medusa",
        "smollm2_mtp",
        "smollm2_peagle",
        "smollm2_small",
    ]
    assert [path.stem for path in LAUNCHERS] == [
        "cpu",
        "ddp",
        "fsdp2",
        "multinode",
        "zero1",
        "zero2",
        "zero3",
    ]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_p37_block_drafters_train_and_draft_whole_blocks(path):
    recipe = load_recipe(path)
    if not isinstance(recipe.drafter, BlockSection):
        return
    from_anchor = isinstance(recipe.drafter, DSparkSection) and recipe.drafter.sample_from_anchor
    most = recipe.drafter.block_size - (0 if from_anchor else 1)
    assert recipe.loss.num_steps == recipe.eval.num_draft_tokens == most


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_launcher_leaves_precision_and_accumulation_to_the_recipe(path):
    config = yaml.safe_load(path.read_text())
    assert config["mixed_precision"] == "no"
    assert "gradient_accumulation_steps" not in config.get("deepspeed_config", {})
    assert "run on" in path.read_text().lower()  # says on which hardware, or that it was not


def test_qwen3_follows_eagle3():
    recipe = load_recipe(ROOT / "recipes" / "qwen3.yaml")
    assert recipe.drafter.aux_layers == [2, 36 // 2, 36 - 3]
    assert (recipe.loss.num_steps, recipe.loss.step_decay) == (7, 0.8)
    assert recipe.train.betas == (0.9, 0.95)
    assert recipe.data.template_kwargs == {"enable_thinking": False}


def test_defaults_then_file_then_command_line(tmp_path):
    path = write(tmp_path, MINIMAL + "train: {lr: 2e-4, epochs: 3}\n")
    recipe = load_recipe(path, ["train.lr=3e-4", "eval.num_draft_tokens=2"])
    assert recipe.train.clip == 0.5  # default
    assert recipe.train.epochs == 3.0  # file
    assert recipe.train.lr == 3e-4  # command line
    assert recipe.eval.num_draft_tokens == 2
    assert recipe.run_dir == Path("outputs/tiny")


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "1E-4", "0.0001", "1e-04", ".0001"])
def test_one_ten_thousandth_is_a_number_however_it_is_written(tmp_path, text):
    path = write(tmp_path, MINIMAL + f"train: {{lr: {text}}}\n")
    assert load_recipe(path).train.lr == 1e-4
    assert load_recipe(write(tmp_path), [f"train.lr={text}"]).train.lr == 1e-4


def test_yaml_1_1_surprises_are_gone(tmp_path):
    path = write(tmp_path, MINIMAL + "log: {wandb: off}\ntrain: {save_every: 010}\n")
    recipe = load_recipe(path)
    assert recipe.log.wandb == "off"  # YAML 1.1: False
    assert recipe.train.save_every == 10  # YAML 1.1: 8


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "1", '"true"'])
def test_only_true_and_false_are_booleans(tmp_path, word):
    path = write(tmp_path, MINIMAL + f"drafter: {{train_head: {word}}}\n")
    message = error_of(path)
    assert str(path) in message
    assert "drafter.train_head" in message
    assert "expected true or false" in message


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("train.learning_rte=1", "valid here: seed, epochs"),
        ("train.epoch=1", "did you mean train.epochs?"),
        ("data.temprature=1", "did you mean data.temperature?"),
        ("train.num_steps=1", "did you mean loss.num_steps?"),
        ("trian.lr=1", "did you mean train?"),
        ("naem=x", "did you mean name?"),
    ],
)
def test_unknown_key_gets_the_nearest_name(tmp_path, override, suggestion):
    path = write(tmp_path)
    message = error_of(path, override)
    assert "unknown key" in message
    assert suggestion in message


def test_unknown_key_names_where_it_stands(tmp_path):
    path = write(tmp_path, MINIMAL + "train: {epoch: 1}\n")
    assert error_of(path) == (
        f"recipe {path}: unknown key 'train.epoch'; did you mean train.epochs?"
    )
    assert error_of(write(tmp_path), "train.epoch=1").startswith("command line: unknown key")
    told = error_of(write(tmp_path), "train.num_layers=3")  # a key of many drafters, named once
    assert told.endswith("did you mean drafter.num_layers?")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=fast", "train.lr: 'fast' is not valid; expected a number"),
        ("train.lr=0", "train.lr: 0 is not valid; expected greater than 0"),
        ("train.lr=.nan", "expected a finite number"),
        ("train.lr=1e400", "expected a finite number"),
        ("train.seed=true", "train.seed: True is not valid; expected an integer"),
        ("log.every=1.5", "log.every: 1.5 is not valid; expected an integer"),
        ("data.num_prompts=", "data.num_prompts: None is not valid; expected an integer"),
        ("loss.num_steps=0", "loss.num_steps: 0 is not valid; expected greater than or equal to 1"),
        ("loss.name=kll", "expected 'kl', 'ce', 'rkl', 'jsd', 'tv', 'l1', 'nla', 'lk_hybrid' or"),
        ("train.compile=max", "expected 'default' or 'aot_eager' or null"),
        ("eval.drafters=[head]", "eval.drafters.0: 'head' is not valid; expected 'drafter', "),
        ("target=5", "target: 5 is not valid; expected a section"),
        ("train.betas=[0.9, 1.0]", "each beta is at least 0 and below 1"),
        ("name=../up", "expected match pattern"),
        ("data.sources=[hub:x]", "'hub:x' is no source"),
        ("data.sources=book", "'book' is not valid; expected a list"),
        ("eval.tasks=['mt_bench:0']", "'mt_bench:0' is no task"),
        ("eval.temperatures=[]", "expected"),
        ("eval.temperatures=[-1]", "eval.temperatures.0: -1 is not valid"),
    ],
)
def test_wrong_value_names_key_value_and_what_was_expected(tmp_path, override, message):
    found = error_of(write(tmp_path), override)
    assert found.startswith("command line: ")
    assert message in found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.chat_template=a.jinja", "data.server={api: chat, url: 'http://host:8000'}"],
            "chat_template=a.jinja: with server.api: chat a server renders by its own",
        ),
        (["eval.lookup_min=5"], "lookup_min=5 is above lookup_max=4"),
        (["data.max_prompt_tokens=2048"], "leaves no room for an answer"),
        (["data.magpie_share=0.5"], "magpie_share"),
        (["data.sources=[book, magpie]"], "magpie_share"),
        (["data.sources=[magpie]", "data.magpie_share=0.5"], "magpie_share: 1.0"),
        (["data.states=cached", "data.regenerate=false"], "capture: pass"),
        (["drafter.head_init=random", "drafter.train_head=false"], "never learns"),
        (["drafter.aux_layers=[2, 2]"], "twice"),
        (["drafter={method: dflash}"], "loss.num_steps=7, but a block of drafter.block_size=16"),
        (["drafter={method: dflash, block_size: 4}"], "set loss.num_steps: 3, or another"),
        (["drafter={method: dspark, sample_from_anchor: false}"], "set loss.num_steps: 6, or"),
        (["drafter={method: dspark, block_size: 9}", "loss.num_steps=1"], "drafts 9 tokens"),
        (["drafter={method: medusa}"], "num_steps=7, but drafter.num_heads=3: each head learns"),
        (
            ["drafter={method: medusa, num_heads: 7}", "train.activation_checkpointing=true"],
            "Medusa keeps little; set it to false",
        ),
        *(
            (["drafter={method: small_lm}", "loss.num_steps=1", "train.on_policy_share=0.5", x], m)
            for x, m in (
                ("loss.name=ce", "with loss.name: ce or loss.ce_share: labels would be"),
                ("loss.ce_share=0.1", "with loss.name: ce or loss.ce_share: labels would be"),
                ("loss.position_weights=d_pace", "with loss.position_weights: d_pace"),
            )
        ),
        (["drafter.num_attention_heads=6", "drafter.num_key_value_heads=4"], "multiple"),
    ],
)
def test_values_that_do_not_fit_together(tmp_path, overrides, message):
    found = error_of(write(tmp_path), *overrides)
    assert "r.yaml with the command line" in found
    assert message in found


def test_cached_states_of_answers_that_are_kept_need_a_pass(tmp_path):
    overrides = ["data.states=cached", "data.regenerate=false", "data.capture=pass"]
    assert load_recipe(write(tmp_path), overrides).data.capture == "pass"


def test_what_is_missing_is_named(tmp_path):
    message = error_of(write(tmp_path, "name: x\ntarget: {}\n"))
    assert "target.model is missing; it has no default" in message
    assert "data is missing" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected sections"),
        ("- 1\n", "expected sections"),
        ("name: [1\n", "line 2, column 1: not valid YAML"),
        ("name: a\nname: b\n", "line 2, column 1: not valid YAML: a repeated key: 'name'"),
        ("name: !!python/object:os.system x\n", "not valid YAML"),
    ],
)
def test_file_that_is_no_recipe(tmp_path, text, message):
    path = write(tmp_path, text)
    found = error_of(path)
    assert str(path) in found
    assert message in found


def test_missing_file_lists_what_is_shipped(tmp_path):
    path = tmp_path / "no.yaml"
    assert error_of(path) == (
        f"recipe {path}: no such file; shipped recipes: {', '.join(p.name for p in SHIPPED)}"
    )


@pytest.mark.parametrize("override", ["train.lr", "=1", "train..lr=1", "name.x=1"])
def test_override_that_is_no_assignment(tmp_path, override):
    assert error_of(write(tmp_path), override).startswith(f"override {override!r}: ")


def test_text_on_the_command_line_stays_text(tmp_path):
    path = write(tmp_path)
    assert load_recipe(path, ["target.revision=1234567"]).target.revision == "1234567"
    assert load_recipe(path, ["target.revision=12e45678"]).target.revision == "12e45678"
    assert load_recipe(path, ["target.revision=null"]).target.revision is None
    recipe = load_recipe(path, ["target.revision=12e45678", "name=007"])
    assert load_recipe(write(tmp_path, dump_recipe(recipe))) == recipe


def test_override_reaches_into_free_mappings(tmp_path):
    recipe = load_recipe(write(tmp_path), ["data.template_kwargs.enable_thinking=false"])
    assert recipe.data.template_kwargs == {"enable_thinking": False}


def test_recipe_cannot_be_changed_after_loading(tmp_path):
    recipe = load_recipe(write(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.lr = 1.0


def words_of(annotation: object) -> list[object]:
    """All values of a boolean or Literal annotation; [] for other types."""
    if annotation is bool:
        return [True, False]
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


SWITCHES = [
    (key, value, [])
    for key, field in fields_by_key(Recipe)
    for value in words_of(field.annotation)
    if not key.startswith("drafter.")
]
SWITCHES += [
    (f"drafter.{name}", value, [f"drafter.method={section.model_fields['method'].default}"])
    for section in get_args(DrafterSection)
    for name, field in section.model_fields.items()
    for value in words_of(field.annotation)
]
APIS = ("completions", "generate", "chat")
# What some values need beside them.
NEEDED = {
    ("dflash", "train_head", True): "drafter.draft_vocab_size=100",
    ("dspark", "train_head", True): "drafter.draft_vocab_size=100",
    ("small_lm", "init", "checkpoint"): "drafter.model=org/name",
    ("pard", "init", "checkpoint"): "drafter.model=org/name",
    **{("", "server.api", api): "data.server.url=http://host:8000" for api in APIS},
    ("", "weights", "ends"): "data.states=cached data.regenerate=false data.sources=[a.jsonl] "
    "data.capture=pass train.validate_prompts=0",
    ("", "packing", True): "train.batch_tokens=512",
    **{
        ("", "siblings", kind): "eval.verification=tree eval.tree=3,2 eval.draft_sampling=sampled"
        for kind in ("with_replacement", "without_replacement")
    },
}


def test_switches_are_found():
    assert ("drafter.train_head", False, ["drafter.method=eagle3"]) in SWITCHES
    assert ("loss.name", "lk_hybrid", []) in SWITCHES
    assert len(SWITCHES) > 60


@pytest.mark.parametrize(("key", "value", "overrides"), SWITCHES)
def test_p73_every_switch_takes_each_of_its_values(tmp_path, key, value, overrides):
    section, name = key.split(".", 1)
    text = str(value).lower() if isinstance(value, bool) else value
    method = overrides[0].partition("=")[2] if overrides else ""
    if method == "small_lm":  # it trains one depth alone
        overrides = [*overrides, "loss.num_steps=1"]
    if method == "medusa":
        overrides = [*overrides, "drafter.num_heads=7"]
    if method == "dflash" or (name, value) == ("sample_from_anchor", False):
        overrides = [*overrides, "drafter.block_size=8"]  # whose drafts are of 7
    needed = NEEDED.get((method, name, value), "").split()
    overrides = [*overrides, f"{key}={text}", *needed]
    by_command = load_recipe(write(tmp_path), overrides)
    by_file = load_recipe(write(tmp_path, dump_recipe(by_command)))
    found = by_command.model_dump()[section]
    for part in name.split("."):
        found = found[part]
    assert found == value and by_file == by_command


def test_every_key_says_its_unit_or_reason_also_in_the_documentation():
    page = (ROOT / "docs" / "recipes.md").read_text()
    for key, field in fields_by_key(Recipe):
        assert field.description, key
        assert f"| `{key}` |" in page, key
        assert field.description in page, key
