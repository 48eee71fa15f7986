"""The leaderboard page in a real browser: headless Chromium, a script that uses it, what it saw.

page_driver.js holds the script; every number it reads off the page is compared here.
"""

import copy
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eval import theory
from eval.board_page import make_samples, to_html
from eval.report import COLUMNS, make_rows, sort_rows
from eval.row_settings import name_settings
from tests.page_records import make_records

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)
DRIVER = Path(__file__).with_name("page_driver.js")
WATCH = """<script>window.errors = [];
addEventListener("error", event => errors.push(event.message));
addEventListener("unhandledrejection", event => errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", event => errors.push(event.blockedURI));
console.error = console.warn = (...words) => errors.push(words.join(" "));
</script>"""
FRAMES = {
    "desktop": 1280,
    "print": 1046,
    "phone": 375,
    "phone-old": 375,
    "old": 1280,
    "mixed": 1280,
}
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here; `make browser` installs it with apt"
)


def make_page(records: dict[str, dict[str, Any]]) -> str:
    rows = [row for name, record in records.items() for row in make_rows(record, name)]
    rows = sort_rows(name_settings(rows))
    samples = [s for name, record in records.items() for s in make_samples(record, name)]
    return to_html(rows, samples)


def make_old_records() -> dict[str, dict[str, Any]]:
    """Two records as the first version of schema 1 wrote them."""
    records = {}
    for name in ("head_T0_K4_B1.json", "lookup_T1_K4_B1.json"):
        record = records[name] = copy.deepcopy(make_records()[name])
        del record["identity"]["train_minutes"]
        record["lossless"].pop("certificate", None)
        for task in record["tasks"].values():
            for key in (
                "per_category",
                "per_turn",
                "predicted_curve",
                "oracle_share",
                "cost_ratio",
            ):
                del task[key]
            task["ms_per_round"] = {"draft": 2.0, "verify": 22.0, "other": 1.0}
            task |= {"tau_ci95": None, "speedup_ci95": None}
        for turn in record["samples"][0]["rounds"]:
            for key in ("p", "q", "next_p"):
                turn.pop(key, None)
    return records


def make_mixed_records() -> dict[str, dict[str, Any]]:
    """One drafter decoded in three ways, of which two are drafting choices and can be compared."""
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "narrow": {"top_p": 0.5, "seed": 7},
        "tree": {"verification": "tree", "tree": "3,2", "siblings": "top"},
    }
    records = {}
    for name, settings in changes.items():
        record = records[name] = copy.deepcopy(make_records()["head_T1_K4_B1.json"])
        record["settings"] |= settings
        del record["tasks"]["mt_bench"]
    return records


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    assert CHROMIUM is not None
    folder = tmp_path_factory.mktemp("browser")
    pages = {"full": make_page(make_records()), "old": make_page(make_old_records())}
    pages["mixed"] = make_page(make_mixed_records())
    frames = ""
    for name, width in FRAMES.items():
        kind = next((kind for kind in pages if kind in name), "full")
        page = pages[kind].replace("<head>", "<head>" + WATCH, 1)
        size = f'width="{width}" height="900" style="border:0"'
        frames += f'<iframe id="{name}" {size} srcdoc="{html.escape(page)}"></iframe>\n'
    script = DRIVER.read_text(encoding="utf-8")
    whole = f'<!doctype html><meta charset="utf-8"><body>{frames}<script>{script}</script>'
    (folder / "frames.html").write_text(whole, encoding="utf-8")
    command = [
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000"),
        *("--virtual-time-budget=10000", "--dump-dom", (folder / "frames.html").as_uri()),
    ]
    environment = os.environ | {"HOME": str(folder)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', done.stdout)
    assert found is not None, done.stderr[-2000:]
    seen = json.loads(found.group(1))
    assert "failed" not in seen, seen["failed"]
    return seen


def test_no_script_error_and_nothing_blocked(facts: dict[str, Any]):
    assert facts["errors"] == [[]] * len(FRAMES)


def test_table_sorts_both_ways_and_says_so(facts: dict[str, Any]):
    table = facts["table"]
    assert table["rows"] == len(table["tau_down"]) == 38
    assert table["tau_down"] == sorted(table["tau_down"], reverse=True)
    assert table["tau_up"] == sorted(table["tau_up"])
    assert (table["aria_down"], table["aria_up"]) == ("descending", "ascending")
    assert table["drafters"] == sorted(table["drafters"])


def test_definitions_show_on_focus_and_hover_and_leave_on_escape(facts: dict[str, Any]):
    table = facts["table"]
    definitions = {column.key: column.definition for column in COLUMNS}
    assert table["tip"] == {"text": definitions["alpha"], "hidden": False, "described": "tip"}
    assert table["tip_after_escape"] is True
    assert table["tip_on_hover"] == definitions["speedup"]


def test_detail_columns_wait_behind_a_box(facts: dict[str, Any]):
    # acceptance, mean accepted, from alpha, c, baseline tokens/s, trained on, minutes
    assert facts["table"]["more_columns"] == 7


def test_filters_narrow_table_and_charts(facts: dict[str, Any]):
    seen = facts["filter"]
    assert {"filter-task", "filter-temperature", "filter-batch_size"} <= set(seen["filters"])
    both = {"rows": 38, "cards": 8, "bars": 38, "temperatures": ["0", "1"]}
    assert seen["all"] == seen["again"] == both
    assert seen["hot"] == {"rows": 20, "cards": 4, "bars": 20, "temperatures": ["1"]}
    assert seen["narrow"] == {"rows": 3, "cards": 1, "bars": 3, "temperatures": ["1"]}
    assert seen["narrow_batches_hidden"] is True
    assert seen["nothing"] == ["No result matches these filters."]


def test_rows_decoded_otherwise_have_their_own_card_and_filter(facts: dict[str, Any]):
    seen = facts["mixed"]
    assert seen["rows"] == [
        ["head (eagle3)", ""],
        ["head (eagle3), tree 3,2", ""],
        ["head (eagle3)", "seed 7, top_p 0.5"],
    ]
    assert seen["cards"] == [
        "humaneval, T=1, batch 1",
        "humaneval, T=1, batch 1, seed 7, top_p 0.5",
    ]
    assert seen["choices"] == ["all", "usual", "seed 7, top_p 0.5"]
    assert (seen["filtered"], seen["usual"]) == (["seed 7, top_p 0.5"], ["", ""])
    assert seen["records"] == ["Verification", "Tree", "Siblings", "Max new tokens", "Settings"]


def test_charts_show_measured_points_on_predicted_curves(facts: dict[str, Any]):
    seen = facts["charts"]
    # one task, T=0, batch 1: three drafters, each with its curve and the points K = 2 and 4
    assert (seen["drafted"]["curves"], seen["drafted"]["points"]) == (3, 6)
    assert seen["drafted"]["titles"][0] == "humaneval, T=0, batch 1"
    assert (len(seen["drafted"]["titles"]), seen["drafted_all"]) == (6, 8)
    assert seen["batch_ticks"] == ["1", "8"]
    assert seen["throughput"] == "Tokens/s against batch size, humaneval, T=0"
    assert seen["costs"][0] == "humaneval, T=0"
    assert seen["hours"] == "tau against hours of training, humaneval, T=0"
    assert seen["split"] == ["draft", "verify", "sampling", "bookkeeping"]


def test_categories_turns_and_broken_verifiers_are_listed(facts: dict[str, Any]):
    seen = facts["charts"]
    assert seen["parts"] == ["Drafter", "writing", "coding", "turn 1", "turn 2"]
    tau = theory.expected_tokens(0.8, 4)  # humaneval, T=0, K=4
    assert seen["part"][0] == f"{tau - 0.3:.2f}"
    assert seen["part"][1].startswith(f"{tau + 0.2:.2f}[{tau:.2f}, {tau + 0.4:.2f}]")
    assert seen["certificates"] == [
        "head (eagle3), block1passedreplacement drawn from p1.0e-92,400",
        "head (eagle3), block1passedq taken before top-p0.2060,000",
    ]


def test_what_to_serve_names_the_fastest_and_its_ties(facts: dict[str, Any]):
    cold, hot = facts["charts"]["cards"][0], facts["charts"]["cards"][2]
    assert cold.startswith("humaneval, T=0, batch 1")
    assert "head (eagle3), K=4Faster than the target alone." in cold
    assert "Predicted best" not in cold  # the curve's best, K=6, is more than any round reached
    assert "Predicted best: K=3. Measure that too." in facts["charts"]["cards"][1]  # batch 8
    assert "head (eagle3), block, K=4" in hot
    assert "Within noise of it: head (eagle3), K=4" in hot


def test_sliders_predict_as_theory_does(facts: dict[str, Any]):
    for alpha, cost, verify, num, shown, words in facts["playground"]["predicted"]:
        tau = theory.expected_tokens(alpha, num)
        expected = theory.predicted_speedup(tau, num * cost, verify, 0.0, 1.0)
        assert shown == f"{expected:.2f}x"
        best, speedup = theory.best_num_draft_tokens(alpha, cost, verify, 0.0, 1.0, 16)
        found = f"K={best} with {speedup:.2f}x" if best else "No number of drafted tokens is faster"
        assert found in words
    tau = theory.expected_tokens(0.8, 5)
    expected = theory.predicted_speedup(tau, 0.2, 1.0, 0.0, 1.0)
    assert facts["playground"]["parallel"] == f"{expected:.2f}x"


def test_measured_row_starts_the_sliders(facts: dict[str, Any]):
    name, shown = facts["playground"]["start"]
    assert name == "head (eagle3), humaneval, T=0, batch 1, K=4"
    tau = theory.expected_tokens(0.8, 4)
    assert shown == f"{theory.predicted_speedup(tau, 8.0, 22.0, 1.0, 20.0):.2f}x"


def test_acceptance_panel_shows_the_law_and_the_wrong_redraw(facts: dict[str, Any]):
    seen = facts["acceptance"]
    # p = (0.4, 0.6), q = (0.7, 0.3): a redraw from p gives (0.52, 0.48)
    assert seen["start"] == {
        "alpha": 0.7,
        "p": [0.4, 0.6],
        "residual": [0.0, 1.0],
        "emitted": [0.4, 0.6],
        "naive": [0.52, 0.48],
    }
    assert seen["handles"] == ["p of yes", "q of yes", "p of no", "q of no"]
    assert seen["key"]["p"] == seen["key"]["emitted"] == [0.41, 0.59]
    assert seen["key"]["alpha"] == 0.71
    assert seen["dragged"] == pytest.approx([0.35, 0.65], abs=0.011)  # 0.7, its top halved


def test_round_viewer_marks_each_token_with_and_without_colour(facts: dict[str, Any]):
    seen = facts["rounds"]
    assert seen["accepted"] == [" sky", " is", " because", " air", " scatters", " light"]
    assert seen["rejected"] == [" red", "\u21b5"]
    assert seen["unjudged"] == ["\u21b5"]
    assert seen["next"] == ["The", " blue", ".\n"]
    assert seen["prompt"] == "Say </script><b>hi</b> & explain why the sky is blue."
    assert seen["marks"] == ["underline", "line-through", True]
    assert seen["hidden"] == "none"
    assert seen["counts"].startswith("9 tokens in 3 rounds (3.00 a round): 6 proposals kept, 2 dr")
    assert len(seen["arms"]) == len(make_records())


def test_round_viewer_tells_p_and_q_by_key_and_by_pointer(facts: dict[str, Any]):
    seen = facts["rounds"]
    assert seen["after_arrows"] == (
        'Round 2, proposal 1 of 4: " sky" accepted. p = 0.900, q = 0.700, '
        "accepted with chance min(1, p/q) = 1.000."
    )
    assert seen["on_rejected"] == seen["title"]
    assert (
        "rejected. p = 0.050, q = 0.500, accepted with chance min(1, p/q) = 0.100" in seen["title"]
    )
    assert seen["on_last"] == (
        'Round 3: ".\u21b5" is the target\'s bonus, all proposals accepted. p = 0.300.'
    )


def test_older_records_are_shown_without_what_they_lack(facts: dict[str, Any]):
    old = facts["old"]
    assert old["table"]["rows"] == 4
    missing = {"drafted", "batches", "parts", "certificates"}
    assert not missing & set(old["table"]["sections"])
    assert missing < set(facts["table"]["sections"])
    assert {"serve", "speedups", "splits", "survival", "costs"} < set(old["table"]["sections"])
    assert old["rounds"]["after_arrows"] == 'Round 2, proposal 1 of 4: " sky" accepted.'


@pytest.mark.parametrize("name", ["overflow", "old", "wide"])
def test_phone_does_not_scroll_sideways(facts: dict[str, Any], name: str):
    assert facts["phone"][name] == {"scroll": 0, "nodes": []}


def test_desktop_does_not_scroll_sideways(facts: dict[str, Any]):
    assert facts["desktop"] == {"scroll": 0, "nodes": []}


def test_print_shows_results_without_controls(facts: dict[str, Any]):
    seen = facts["print"]
    assert seen["overflow"] == {"scroll": 0, "nodes": []}
    assert seen["paper"] == "rgb(255, 255, 255)"
    assert seen["shown"] == {
        "#board": True,
        "#survival svg": True,
        "#text": True,
        "#definitions": True,
        "#filters": False,
        "#playground": False,
        "#rule": False,
        ".detail": False,
    }
