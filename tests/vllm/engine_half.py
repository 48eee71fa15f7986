"""The engine's half of the comparison; runs in vLLM's interpreter, not in ours.

    python engine_half.py JOBS.json RESULTS.json

A job is a model, a speculative config or null, prompts as token ids and a number of tokens. Its
result holds the tokens, every draft that the engine made for every prompt, and its counters. All
engines run in this one process, one after another, so that drafts can be seen where they are made.
"""

import gc
import json
import os
import sys
import time
import traceback

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

DRAFTS = []  # of the prompt that is running: one list a call of the proposer


def record_drafts():
    """Keep what every proposer returns; one request runs at a time, so it is row 0."""
    propose = GPUModelRunner.propose_draft_token_ids

    def recorded(self, *arguments, **named):
        drafted = propose(self, *arguments, **named)
        rows = drafted if isinstance(drafted, list) else drafted.tolist()
        DRAFTS.append([int(token) for token in rows[0]])
        return drafted

    GPUModelRunner.propose_draft_token_ids = recorded


def counters(llm):
    """The counters of speculation, summed over the prompts."""
    found = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name == metric.name:
            continue
        found[name] = metric.values if name.endswith("per_pos") else metric.value
    return found


def run(job):
    """One engine over all prompts."""
    llm = LLM(
        model=job["model"],
        speculative_config=job["speculative_config"],
        dtype="float32",
        max_model_len=job["max_model_len"],
        max_num_seqs=1,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    outputs, drafts = [], []
    for ids in job["prompts"]:
        DRAFTS.clear()
        answer = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
        outputs.append(list(answer.outputs[0].token_ids))
        drafts.append(list(DRAFTS))
    return {"outputs": outputs, "drafts": drafts, "counters": counters(llm)}


def main():
    """Run all jobs; a job that fails leaves its error instead of a result."""
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    record_drafts()
    results = {}
    # n-gram lookup last: it brings numba, and no engine starts in a process that holds numba
    # (triton_utils/dispatcher.py asks every loaded module for its kernels).
    order = sorted(
        jobs, key=lambda name: (jobs[name]["speculative_config"] or {}).get("method") == "ngram"
    )
    for name in order:
        job = jobs[name]
        started = time.monotonic()
        try:
            results[name] = run(job)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        results[name]["seconds"] = time.monotonic() - started
        gc.collect()
        cleanup_dist_env_and_memory()
    with open(sys.argv[2], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
