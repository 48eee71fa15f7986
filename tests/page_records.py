"""Result records with every key that the page can show, made from a formula, not measured."""

from typing import Any

from eval import theory

DRAFT_MS, VERIFY_MS, SAMPLING_MS, BOOKKEEPING_MS, PLAIN_MS = 2.0, 22.0, 0.6, 0.4, 20.0
ALPHAS = {"head": 0.75, "wide": 0.65, "lookup": 0.35}
TOKENS = {"head": 4_000_000, "wide": 900_000, "lookup": 0}


def predict(alpha: float, num_draft: int, draft_ms: float) -> float:
    other = SAMPLING_MS + BOOKKEEPING_MS
    tau = theory.expected_tokens(alpha, num_draft)
    return theory.predicted_speedup(tau, draft_ms * num_draft, VERIFY_MS, other, PLAIN_MS)


def make_task(name: str, alpha: float, num_draft: int, batch_size: int) -> dict[str, Any]:
    draft_ms = 0.0 if name == "lookup" else DRAFT_MS
    tau = theory.expected_tokens(alpha, num_draft)
    speedup = 0.96 * predict(alpha, num_draft, draft_ms) / (1 + 0.03 * (batch_size - 1))
    curve = [
        {
            "num_draft_tokens": k,
            "tau": theory.expected_tokens(alpha, k),
            "speedup": predict(alpha, k, draft_ms) * (1.2 if (batch_size, k) == (8, 3) else 1.0),
        }
        for k in range(1, 9)
    ]
    plain = 50.0 * batch_size**0.8
    rounds = 200
    accepted = round(rounds * (tau - 1))
    return {
        "version": 1,
        "num_prompts": 20,
        "num_missing": 0,
        "num_rounds": rounds,
        "num_proposed": rounds * num_draft,
        "num_accepted": accepted,
        "num_tokens": rounds + accepted,
        "acceptance_rate": accepted / rounds / num_draft,
        "acceptance_rate_tested": alpha,
        "alpha": alpha,
        "mean_accepted": accepted / rounds,
        "tau": 1 + accepted / rounds,
        "tau_ci95": [tau - 0.2, tau + 0.2],
        "tau_mean_of_prompts": tau,
        "survival": [alpha**i for i in range(1, num_draft + 1)],
        "conditional": [alpha] * num_draft,
        "tokens_per_second": plain * speedup,
        "baseline_tokens_per_second": plain,
        "speedup": speedup,
        "speedup_ci95": [speedup - 0.12, speedup + 0.12],
        "ms_per_round": {
            "draft": draft_ms * num_draft,
            "verify": VERIFY_MS,
            "sampling": SAMPLING_MS,
            "bookkeeping": BOOKKEEPING_MS,
            "other": SAMPLING_MS + BOOKKEEPING_MS,
        },
        "baseline_ms_per_token": PLAIN_MS,
        "predicted_speedup": predict(alpha, num_draft, draft_ms),
        "predicted_from_alpha": predict(alpha, num_draft, draft_ms),
        "per_category": {
            "writing": {"num_rounds": 90, "tau": tau - 0.3, "tau_ci95": None, "speedup": None},
            "coding": {
                "num_rounds": 110,
                "tau": tau + 0.2,
                "tau_ci95": [tau, tau + 0.4],
                "speedup": speedup + 0.1,
            },
        },
        "per_turn": [
            {"turn": 1, "tau": tau, "num_rounds": 100},
            {"turn": 2, "tau": tau - 0.1, "num_rounds": 100},
        ],
        "predicted_curve": curve,
        "oracle_share": speedup / 4.0,
        "cost_ratio": draft_ms / PLAIN_MS,
    }


SAMPLE = {
    "prompt": "Say </script><b>hi</b> & explain why the sky is blue.",
    "rounds": [
        {"accepted": [], "rejected": [], "next": "The"},
        {
            "accepted": [" sky", " is"],
            "rejected": [" red", "\n"],
            "next": " blue",
            "p": [0.9, 0.8, 0.05, 0.1],
            "q": [0.7, 0.9, 0.5, 0.3],
            "next_p": 0.85,
        },
        {
            "accepted": [" because", " air", " scatters", " light"],
            "rejected": [],
            "next": ".\n",
            "p": [0.6, 0.5, 0.7, 0.4],
            "q": [0.5, 0.5, 0.6, 0.5],
            "next_p": 0.3,
        },
    ],
}
CERTIFICATE = {
    "verdict": "passed",
    "broken": [
        {"name": "replacement drawn from p", "p_value": 1e-9, "tokens_needed": 2400},
        {"name": "q taken before top-p", "p_value": 0.2, "tokens_needed": 60000},
    ],
}


def make_record(
    name: str, temperature: float, num_draft: int, batch_size: int, verification: str = "token"
) -> dict[str, Any]:
    alpha = ALPHAS[name] - 0.1 * temperature + (0.02 if verification == "block" else 0)
    greedy = temperature == 0
    return {
        "schema": 1,
        "identity": {
            "target": "tiny-target",
            "target_revision": "r1",
            "drafter": name,
            "method": "lookup" if name == "lookup" else "eagle3",
            "drafter_params": 1000,
            "trained_tokens": TOKENS[name],
            "train_minutes": TOKENS[name] / 50_000,
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
            "verification": verification,
            "num_draft_tokens": num_draft,
            "batch_size": batch_size,
            "dtype": "float32",
            "max_new_tokens": 64,
        },
        "tasks": {
            "mt_bench": make_task(name, alpha, num_draft, batch_size),
            "humaneval": make_task(name, alpha + 0.05, num_draft, batch_size),
        },
        "lossless": {
            "greedy_identical": "25/25" if greedy else None,
            "pit_p_value": None if greedy else 0.4375,
            "pit_num_tokens": None if greedy else 10112,
            **({} if greedy else {"certificate": CERTIFICATE}),
        },
        "samples": [SAMPLE],
    }


def make_records() -> dict[str, dict[str, Any]]:
    """By file name: three drafters, T in {0, 1}, K in {2, 4}, batch 1 and 8, block verification."""
    records = {
        f"{name}_T{t:g}_K{k}_B{b}.json": make_record(name, t, k, b)
        for name in ALPHAS
        for t in (0.0, 1.0)
        for k, b in ((2, 1), (4, 1), (4, 8))
    }
    records["head_T1_K4_B1_block.json"] = make_record("head", 1.0, 4, 1, "block")
    return records
