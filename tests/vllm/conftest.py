"""What the tests of tests/vllm/parity.py are given, and the table of what passed."""

from typing import Any

import pytest

from tests.vllm.parity import Both, run_both

COLUMNS = {
    "test_engine_loads_it": "loads",
    "test_text_is_that_of_the_target_alone": "lossless",
    "test_drafts_are_ours_token_for_token": "same drafts",
    "test_counters_are_those_of_our_loop": "same acceptance",
}
WORDS = {"passed": "yes", "failed": "NO", "error": "NO"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of a class with cases runs for each of them."""
    if metafunc.cls is not None and "name" in metafunc.fixturenames:
        metafunc.parametrize("name", list(metafunc.cls.CASES))


@pytest.fixture(scope="class")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Both sides of a class, of the cases and faults that were selected (pytest -k)."""
    selected = " ".join(item.nodeid for item in request.session.items)
    faults = {k: fault for k, fault in request.cls.FAULTS.items() if f"[{k}]" in selected}
    needed = {name for name, _ in faults.values()}
    cases = {
        name: case
        for name, case in request.cls.CASES.items()
        if f"[{name}]" in selected or name in needed
    }
    return run_both(tmp_path_factory.mktemp("vllm"), cases, faults)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Methods x (loads, lossless, same drafts, same acceptance), of the cases that were run."""
    rows: dict[str, dict[str, str]] = {}
    for outcome, word in WORDS.items():
        for report in terminalreporter.stats.get(outcome, []):
            test, _, name = report.nodeid.rpartition("::")[2].rstrip("]").partition("[")
            if test in COLUMNS:
                row = rows.setdefault(name, {})
                row[COLUMNS[test]] = word
                row |= {key: str(value) for key, value in report.user_properties}
    if not rows:
        return
    terminalreporter.section("drafters in a real vLLM")
    head = ["drafter", *COLUMNS.values(), "seconds"]
    width = max(map(len, rows))
    lines = [[name, *(rows[name].get(key, "-") for key in head[1:])] for name in sorted(rows)]
    for first, *cells in [head, *lines]:
        shown = (cell.rjust(len(key)) for key, cell in zip(head[1:], cells, strict=True))
        terminalreporter.write_line(f"{first:{width}}  {'  '.join(shown)}")
