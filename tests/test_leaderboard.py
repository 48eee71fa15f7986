"""The leaderboard: hand-written records in, a golden Markdown file and one offline page out."""

import copy
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.board_page import make_samples, to_html
from eval.report import drafter_text, make_rows, sort_rows, time_split, to_markdown, used_columns
from eval.row_settings import name_settings
from eval.shown_certificate import find_certificate, read_certificate
from recipes.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).with_name("golden") / "leaderboard.md"


def make_task(tau: float, speedup: float | None) -> dict[str, Any]:
    accepted = round(100 * (tau - 1))
    return {
        "version": 1,
        "num_prompts": 4,
        "num_missing": 0,
        "num_rounds": 100,
        "num_proposed": 400,
        "num_accepted": accepted,
        "num_tokens": 100 + accepted,
        "acceptance_rate": accepted / 400,
        "acceptance_rate_tested": 0.5,
        "alpha": 0.6125,
        "mean_accepted": tau - 1,
        "tau": tau,
        "tau_ci95": [tau - 0.25, tau + 0.25],
        "tau_mean_of_prompts": tau,
        "survival": [0.6, 0.4, 0.25, 0.1],
        "conditional": [0.6, 0.667, 0.625, 0.4],
        "tokens_per_second": 40.0 * (speedup or 1),
        "baseline_tokens_per_second": 40.0,
        "speedup": speedup,
        "speedup_ci95": None if speedup is None else [speedup - 0.125, speedup + 0.125],
        "ms_per_round": {"draft": 8.0, "verify": 27.5, "other": 1.5},
        "baseline_ms_per_token": 25.0,
        "predicted_speedup": 1.5,
        "predicted_from_alpha": None,
    }


def make_record(
    drafter: str, temperature: float, mt_bench: dict[str, Any], humaneval: dict[str, Any]
) -> dict[str, Any]:
    greedy = temperature == 0
    return {
        "schema": 1,
        "identity": {
            "target": "tiny-target",
            "target_revision": "r1",
            "drafter": drafter,
            "method": "lookup" if drafter == "lookup" else "eagle3",
            "drafter_params": 1000,
            "trained_tokens": 5000,
            "commit": "abc1234",
            "versions": {},
            "hardware": "2 cores",
        },
        "settings": {
            "engine": "torch",
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "draft_sampling": "greedy",
            "verification": "token",
            "num_draft_tokens": 4,
            "batch_size": 1,
            "dtype": "bfloat16",
            "max_new_tokens": 64,
        },
        "tasks": {"mt_bench": mt_bench, "humaneval": humaneval},
        "lossless": {
            "greedy_identical": "25/25" if greedy else None,
            "pit_p_value": None if greedy else 0.4375,
            "pit_num_tokens": None if greedy else 10112,
        },
    }


RECORDS = {
    "head-t1.json": make_record("demo | head", 1.0, make_task(1.75, 1.25), make_task(2.0, 1.375)),
    "head-t0.json": make_record("demo | head", 0.0, make_task(2.25, 1.5), make_task(2.5, 1.75)),
    "lookup-t1.json": make_record("lookup", 1.0, make_task(1.25, None), make_task(1.5, 1.125)),
    "lookup-t0.json": make_record("lookup", 0.0, make_task(1.5, 1.125), make_task(3.0, 2.5)),
}
SAMPLE = {
    "prompt": "Say </script><b>hi</b>",
    "rounds": [{"accepted": ["Hi", " there"], "rejected": [" you"], "next": "!"}],
}


def make_other(settings: dict[str, Any]) -> dict[str, Any]:
    record = copy.deepcopy(RECORDS["head-t1.json"])
    record["settings"] |= settings
    return record


def make_all(records: dict[str, dict[str, Any]] = RECORDS) -> list[dict[str, Any]]:
    rows = [row for name, record in records.items() for row in make_rows(record, name)]
    return sort_rows(name_settings(rows))


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "eval" / "leaderboard.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)


def write_records(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, record in RECORDS.items():
        (folder / name).write_text(json.dumps(record | {"samples": [SAMPLE]}))
    return folder


def blob_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_markdown_is_the_golden_file():
    assert to_markdown(make_all()) == GOLDEN.read_text(encoding="utf-8")


def test_rows_are_sorted_by_task_temperature_and_falling_speedup():
    order = [(r["task"], r["temperature"], r["drafter"], r["speedup"]) for r in make_all()]
    assert order == [
        ("humaneval", 0.0, "lookup", 2.5),
        ("humaneval", 0.0, "demo | head", 1.75),
        ("humaneval", 1.0, "demo | head", 1.375),
        ("humaneval", 1.0, "lookup", 1.125),
        ("mt_bench", 0.0, "demo | head", 1.5),
        ("mt_bench", 0.0, "lookup", 1.125),
        ("mt_bench", 1.0, "demo | head", 1.25),
        ("mt_bench", 1.0, "lookup", None),
    ]


def test_none_prints_as_na():
    task = make_task(2.0, None) | {"alpha": None, "tau_ci95": None, "acceptance_rate": None}
    task |= {"ms_per_round": {"draft": None, "verify": 27.5, "other": None}, "survival": []}
    record = make_record("lookup", 0.0, task, task)
    del record["lossless"]
    row = make_rows(record, "r.json")[0]
    text = {column.key: column.text(row) for column in used_columns([row])}
    assert text["speedup"] == text["alpha"] == text["acceptance_rate"] == "n/a"
    assert text["tau"] == "2.00"
    assert text["ms_per_round"] == "n/a + 27.5 + n/a"
    assert text["lossless"] == "greedy n/a, PIT p n/a"
    assert blob_of(to_html([row], []))["rows"][0]["alpha"] is None


def test_time_split_counts_no_part_twice():
    task = make_task(2.0, 1.5)
    task["ms_per_round"] |= {"sampling": 1.0, "bookkeeping": 0.5}  # together what other is
    row = make_rows(make_record("lookup", 0.0, task, task), "r.json")[0]
    assert time_split(row) == {"draft": 8.0, "verify": 27.5, "sampling": 1.0, "bookkeeping": 0.5}
    old = make_rows(RECORDS["head-t0.json"], "r.json")[0]
    assert time_split(old) == {"draft": 8.0, "verify": 27.5, "other": 1.5}


@pytest.mark.parametrize(
    ("speedups", "best"),
    [([1.2, 1.5, 1.4, 1.3, 9.0], 2), ([0.9, 0.8, 0.7, 0.6, 9.0], 0), ([], None), (None, None)],
)
def test_best_number_is_the_top_of_the_predicted_curve(speedups: Any, best: int | None):
    task = make_task(2.0, 1.5)
    if speedups is not None:
        points = enumerate(speedups, start=1)
        curve = [{"num_draft_tokens": k, "speedup": s, "tau": 2.0} for k, s in points]
        task["predicted_curve"] = curve
    row = make_rows(make_record("lookup", 0.0, task, task), "r.json")[0]
    assert row["best_num_draft_tokens"] == best  # no round of its four tokens reached a fifth
    assert ("Best K" in to_markdown([row])) == (best is not None)


def test_rows_of_another_verification_say_so():
    record = make_record("head", 1.0, make_task(2.0, 1.5), make_task(2.0, 1.5))
    record["settings"]["verification"] = "block"
    assert "| head (eagle3), block |" in to_markdown(make_rows(record, "r.json"))


@pytest.mark.parametrize(
    ("settings", "drafter"),
    [
        ({"draft_sampling": "sampled"}, "demo | head (eagle3), sampled"),
        (
            {"verification": "tree", "tree": "3,2", "siblings": "top"},
            "demo | head (eagle3), tree 3,2",
        ),
        (
            {
                "draft_sampling": "sampled",
                "verification": "tree",
                "tree": "3,2",
                "siblings": "without_replacement",
            },
            "demo | head (eagle3), tree 3,2 without_replacement",
        ),
        ({"lookup": [1, 9]}, "demo | head (eagle3)"),  # it looks nothing up
    ],
)
def test_ways_of_drafting_are_named_and_compared(settings: dict[str, Any], drafter: str):
    plain, other = make_all({"a": make_other({}), "b": make_other(settings)})[:2]
    assert {drafter_text(plain), drafter_text(other)} == {"demo | head (eagle3)", drafter}
    assert plain["compared_at"] == other["compared_at"]
    assert plain["settings"] is other["settings"] is None


def test_lookup_with_other_n_grams_says_so():
    record = copy.deepcopy(RECORDS["lookup-t0.json"])
    record["settings"] |= {"lookup": [1, 9], "draft_sampling": "sampled"}
    assert drafter_text(make_rows(record, "r.json")[0]) == "lookup, n-grams 1-9"


@pytest.mark.parametrize(
    ("settings", "text", "usual"),
    [
        ({"top_p": 0.5, "seed": 7}, "seed 7, top_p 0.5", None),
        ({"min_p": 0.1, "top_k": 5}, "min_p 0.1, top_k 5", None),
        ({"repetition_penalty": 1.3}, "repetition_penalty 1.3", None),
        ({"template_kwargs": {"think": False}}, 'template_kwargs {"think":false}', None),
        ({"dtype": "float32"}, "dtype float32", "dtype bfloat16"),  # there is no usual one
        ({"max_new_tokens": 9}, "max_new_tokens 9", "max_new_tokens 64"),
        ({"engine": "vllm 0.11"}, "engine vllm 0.11", "engine torch"),
        ({"template_hash": "0123456789"}, "template_hash 01234567", "template_hash n/a"),
    ],
)
def test_rows_decoded_otherwise_say_how_and_are_not_compared(
    settings: dict[str, Any], text: str, usual: str | None
):
    rows = make_all({"a": make_other({}), "b": make_other(settings)})
    found = {row["source"]: row for row in rows if row["task"] == "humaneval"}
    assert (found["a"]["settings"], found["b"]["settings"]) == (usual, text)
    assert found["a"]["compared_at"] != found["b"]["compared_at"]


def test_absent_settings_are_the_usual_ones():
    usual = {"min_p": 0.0, "repetition_penalty": 1.0, "seed": 0, "tree": None, "lookup": [2, 4]}
    old, new = make_all({"a": make_other({}), "b": make_other(usual)})[:2]
    assert old["compared_at"] == new["compared_at"]
    assert old["settings"] is new["settings"] is None


def test_markdown_names_settings_in_rows_and_records():
    text = to_markdown(make_all({"a": make_other({}), "b": make_other({"top_p": 0.5})}))
    assert "| demo \\| head (eagle3) |  | 1 |" in text
    assert "| demo \\| head (eagle3) | top_p 0.5 | 1 |" in text
    assert "| a | torch | bfloat16 | 2 cores | abc1234 | greedy | token | usual |" in text
    assert "| b | torch | bfloat16 | 2 cores | abc1234 | greedy | token | top_p 0.5 |" in text


def test_samples_keep_p_and_q_to_four_digits():
    turn = {"accepted": ["a"], "rejected": ["b"], "next": "c", "p": [1 / 3, 0.0], "next_p": 2 / 3}
    record = RECORDS["head-t0.json"] | {"samples": [{"prompt": "x", "rounds": [turn]}]}
    shown = make_samples(record, "r.json")[0]
    assert shown["rounds"] == [turn | {"p": [0.3333, 0.0], "next_p": 0.6667}]
    assert shown["verification"] == "token"


def test_page_loads_nothing_and_holds_every_row():
    page = to_html(make_all(), [{"label": "head", **SAMPLE}])
    loads = re.findall(r"""(?:src|href|url|import)\s*[=(]?\s*["']?\s*(?:https?:)?//""", page)
    assert loads == []
    assert re.findall(r"https?://[^\s\"']+", page) == ["http://www.w3.org/2000/svg"]  # a namespace
    assert re.search(r"<(link|img|iframe|script[^>]* src)\b", page) is None
    assert "default-src 'none'" in page  # and the browser would refuse
    blob = blob_of(page)
    assert len(blob["rows"]) == 8
    assert blob["samples"][0]["prompt"] == "Say </script><b>hi</b>"
    assert page.count("</script>") == 2  # the data and the code: no text ended an element early
    assert [column["title"] for column in blob["columns"]] == [
        column.title for column in used_columns(make_all())
    ]


def test_script_writes_three_views_and_reads_its_own_folder_again(tmp_path: Path):
    folder = write_records(tmp_path / "results")
    for _ in range(2):  # the second time leaderboard.json lies among the results
        done = run(tmp_path, folder / "head-t0.json", "--out", folder)
        assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("8 rows -> ")
    assert sorted(p.name for p in folder.glob("*leaderboard*")) == [
        "leaderboard.html",
        "leaderboard.json",
        "leaderboard.md",
    ]
    board = json.loads((folder / "leaderboard.json").read_text())
    assert board["rows"][0]["speedup"] == 2.5
    labels = {s["label"] for s in blob_of((folder / "leaderboard.html").read_text())["samples"]}
    assert "demo | head (eagle3), T=0, K=4, batch 1" in labels


CERTIFICATE = {
    "passed": True,
    "power": [
        {
            "verifier": "from_p",
            "what": "replacement drawn from p",
            "setting": "T=1",
            "p_value": 1e-9,
            "caught": True,
            "tokens_needed": 2400,
            "at_least": False,
        }
    ],
}


@pytest.mark.parametrize(("passed", "verdict"), [(True, "passed"), (False, "failed")])
def test_certificate_beside_a_record_goes_with_its_rows(tmp_path: Path, passed: bool, verdict: str):
    text = json.dumps(RECORDS["head-t1.json"])
    for name in ("drafter_T1_K4.json", "lookup_T1_K4.json"):
        (tmp_path / name).write_text(text)
    served = copy.deepcopy(RECORDS["head-t1.json"])
    served["settings"]["engine"] = "vllm"  # this loop's certificate says nothing of another
    (tmp_path / "drafter_T1_vllm.json").write_text(json.dumps(served))
    (tmp_path / "certificate_drafter.json").write_text(json.dumps(CERTIFICATE | {"passed": passed}))
    done = run(tmp_path, "--out", tmp_path / "report")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads((tmp_path / "report/leaderboard.json").read_text())["rows"]
    found = {Path(row["source"]).name: row["certificate"] for row in rows}
    assert found["lookup_T1_K4.json"] is found["drafter_T1_vllm.json"] is None
    broken = {"name": "replacement drawn from p, at T=1", "p_value": 1e-9}
    broken |= {"tokens_needed": 2400, "at_least": False}
    assert found["drafter_T1_K4.json"] == {"verdict": verdict, "broken": [broken]}
    assert f"certificate {verdict}" in (tmp_path / "report/leaderboard.md").read_text()


def test_certificate_of_another_rule_or_tree_is_not_shown(tmp_path: Path):
    record = copy.deepcopy(RECORDS["head-t1.json"])
    drawn = {"tree": "3,2", "siblings": "without_replacement"}
    made = {
        "drafter_T1_token.json": {"verification": "token"},
        "drafter_T1_block.json": {"verification": "block"},
        "drafter_T1_same.json": {"verification": "tree", **drawn},
        "drafter_T1_other.json": {"verification": "tree", "tree": "3,2", "siblings": "top"},
    }
    for name, changes in made.items():
        text = json.dumps(record | {"settings": record["settings"] | changes})
        (tmp_path / name).write_text(text)
    (tmp_path / "certificate_drafter_block.json").write_text(json.dumps(CERTIFICATE))
    (tmp_path / "certificate_drafter_tree.json").write_text(json.dumps(CERTIFICATE | drawn))
    done = run(tmp_path, "--out", tmp_path / "report")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads((tmp_path / "report/leaderboard.json").read_text())["rows"]
    certified = {Path(row["source"]).name for row in rows if row["certificate"]}
    assert certified == {"drafter_T1_block.json", "drafter_T1_same.json"}


@pytest.mark.parametrize(
    ("identity", "shown"),
    [
        ({"target": "tiny-target", "drafter_hash": "w1"}, True),
        ({"target": "other", "drafter_hash": "w1"}, False),
        ({"target": "tiny-target", "drafter_hash": "w2"}, False),
    ],
)
def test_certificate_of_another_target_or_weights_is_not_shown(
    tmp_path: Path, identity: dict[str, Any], shown: bool
):
    record: Any = copy.deepcopy(RECORDS["head-t1.json"])
    record["identity"]["drafter_hash"] = "w1"
    path = tmp_path / "certificate_drafter.json"
    path.write_text(json.dumps(CERTIFICATE | {"identity": identity}))
    assert (find_certificate(tmp_path / "drafter_T1.json", record) is not None) == shown


def test_certificate_of_a_drafter_from_elsewhere_is_found_by_its_weights(tmp_path: Path):
    record: Any = copy.deepcopy(RECORDS["head-t1.json"])
    record["identity"]["drafter_hash"] = "w2"
    for ending, weights in [("", "w1"), ("_0123abcd", "w2")]:
        whose = {"target": "tiny-target", "drafter_hash": weights}
        found = CERTIFICATE | {"identity": whose, "passed": weights == "w2"}
        (tmp_path / f"certificate_drafter{ending}.json").write_text(json.dumps(found))
    shown = find_certificate(tmp_path / "drafter_T1.json", record)
    assert shown is not None and shown["verdict"] == "passed"


def test_two_exports_of_one_name_are_told_apart_by_their_weights(tmp_path: Path):
    hashes = {"a.json": "0123456789abcdef", "b.json": "fedcba9876543210", "served.json": None}
    for name, weights in hashes.items():
        record = copy.deepcopy(RECORDS["head-t1.json"]) | {"samples": [SAMPLE]}
        record["identity"] |= {"drafter_hash": weights}
        (tmp_path / name).write_text(json.dumps(record))
    (tmp_path / "lookup.json").write_text(json.dumps(RECORDS["lookup-t1.json"]))
    done = run(tmp_path, "--out", tmp_path / "report")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads((tmp_path / "report/leaderboard.json").read_text())["rows"]
    shown = {Path(row["source"]).name: row["weights"] for row in rows}
    assert shown == {
        "a.json": "01234567", "b.json": "fedcba98", "served.json": None, "lookup.json": None
    }  # fmt: skip
    for view in ("leaderboard.md", "leaderboard.html"):
        text = (tmp_path / "report" / view).read_text()
        assert "weights 01234567" in text and "weights fedcba98" in text, view
    one = run(tmp_path / "a.json", tmp_path / "lookup.json", "--out", tmp_path / "one")
    assert one.returncode == 0
    assert "weights 0123" not in (tmp_path / "one/leaderboard.md").read_text()


def test_damaged_certificate_is_named(tmp_path: Path):
    (tmp_path / "drafter_T1.json").write_text(json.dumps(RECORDS["head-t1.json"]))
    (tmp_path / "certificate_drafter.json").write_text('{"passed": true}')
    done = run(tmp_path, "--out", tmp_path / "report")
    assert done.returncode == 2
    assert "certificate_drafter.json: no certificate" in done.stderr


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "all of it: Input should be a valid dictionary"),
        (CERTIFICATE | {"passed": "no"}, "passed: Input should be a valid boolean"),
        (CERTIFICATE | {"power": "x"}, "power: Input should be a valid list"),
        (
            CERTIFICATE | {"power": [CERTIFICATE["power"][0] | {"p_value": math.nan}]},
            "power.0.p_value: Input should be a finite number",
        ),
    ],
)
def test_certificate_of_another_shape_is_refused(found: Any, message: str):
    with pytest.raises(UserError, match=f"^c.json: no certificate; .*{message}"):
        read_certificate(found, "c.json")


@pytest.mark.parametrize("certificate", ["passed", {}, {"verdict": "yes", "broken": []}])
def test_certificate_in_a_record_has_a_verdict_and_broken_verifiers(certificate: Any):
    record = copy.deepcopy(RECORDS["head-t1.json"])
    record["lossless"]["certificate"] = certificate
    with pytest.raises(UserError, match=r"^r.json: key lossless\.certificate"):
        make_rows(record, "r.json")


def test_help_shows_examples():
    done = run("--help")
    assert done.returncode == 0
    assert "python eval/leaderboard.py outputs/demo --out outputs/demo/report" in done.stdout


def break_tau(record: dict[str, Any]) -> None:
    record["tasks"]["mt_bench"]["tau"] = "fast"


def drop_tau(record: dict[str, Any]) -> None:
    del record["tasks"]["mt_bench"]["tau"]


def drop_identity(record: dict[str, Any]) -> None:
    del record["identity"]


def drop_next(record: dict[str, Any]) -> None:
    record["samples"] = [{"prompt": "p", "rounds": [{"accepted": [], "rejected": []}]}]


def break_p(record: dict[str, Any]) -> None:
    record["samples"] = [SAMPLE | {"rounds": [SAMPLE["rounds"][0] | {"p": ["high"]}]}]


def infinite_p(record: dict[str, Any]) -> None:
    record["samples"] = [SAMPLE | {"rounds": [SAMPLE["rounds"][0] | {"next_p": math.inf}]}]


@pytest.mark.parametrize(
    ("damage", "key"),
    [
        (break_tau, "tau"),
        (drop_tau, "tau"),
        (drop_identity, "identity"),
        (drop_next, "samples"),
        (break_p, "samples"),
        (infinite_p, "samples.0.rounds.0.next_p is inf"),
    ],
)
def test_bad_record_is_one_line_and_exit_2(tmp_path: Path, damage: Any, key: str):
    record = copy.deepcopy(RECORDS["head-t0.json"])
    damage(record)
    (tmp_path / "bad.json").write_text(json.dumps(record))
    done = run(tmp_path / "bad.json", "--out", tmp_path / "report")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "bad.json" in done.stderr
    assert key in done.stderr
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not valid JSON"), ("[]", "a JSON object"), ('{"schema": 2}', "schema")],
)
def test_file_that_is_no_record_is_named(tmp_path: Path, content: str, message: str):
    (tmp_path / "odd.json").write_text(content)
    done = run(tmp_path, "--out", tmp_path / "report")
    assert done.returncode == 2
    assert "odd.json" in done.stderr
    assert message in done.stderr


def test_empty_folder_and_missing_path_are_errors(tmp_path: Path):
    for path, message in ((tmp_path, "no *.json result here"), (tmp_path / "x", "no such file")):
        done = run(path, "--out", tmp_path / "report")
        assert done.returncode == 2
        assert message in done.stderr


def test_folder_named_as_a_record_is_one_error(tmp_path: Path):
    (tmp_path / "x.json").mkdir()
    done = run(tmp_path, "--out", tmp_path / "report")
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}/x.json: cannot be read: Is a directory\n"


def test_no_view_is_written_where_one_of_them_cannot_be(tmp_path: Path):
    folder = write_records(tmp_path / "results")
    (tmp_path / "report" / "leaderboard.html").mkdir(parents=True)
    done = run(folder, "--out", tmp_path / "report")
    assert done.returncode == 2
    assert "leaderboard.html is a folder; move it" in done.stderr
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["leaderboard.html"]


def test_markdown_takes_no_name_for_markup():
    record = copy.deepcopy(RECORDS["lookup-t0.json"])
    record["identity"] |= {"target": "t\n# Best\n<script>", "hardware": "<b>2</b> [x](http://y)"}
    record["tasks"] = {"a\n\n<i>b": record["tasks"]["mt_bench"]}
    text = to_markdown(make_rows(record, "r.json"))
    assert "\n## a &lt;i&gt;b on t # Best &lt;script&gt;\n" in text
    assert "| &lt;b&gt;2&lt;/b&gt; [x]\\(http://y) |" in text
