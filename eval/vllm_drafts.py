"""What a vLLM drafts for given prompts; runs in vLLM's interpreter, not in ours.

    python vllm_drafts.py JOBS.json RESULTS.json

A job is a model (of a hub's revision, if it names one), a speculative config or null, prompts as
token ids, a number of tokens and a longest length. Its result holds the greedy tokens, every draft
that was made for every prompt and the counters, in float32; or the error. One request runs at a
time, in this process: drafts are seen where they are made. Engines start one after another.
"""

import functools
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.pop(0)  # the project's folder: its modules are of another environment

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

BLOCK = 16  # tokens of the smallest block of a KV cache
SPARE_BLOCKS = 16
DRAFTS: list[list[int]] = []  # of the prompt that is running: one list a call of the proposer


def record_drafts() -> None:
    """Keep what every proposer returns; the one request that runs is row 0."""
    propose = GPUModelRunner.propose_draft_token_ids

    def recorded(self, *arguments, **named):
        drafted = propose(self, *arguments, **named)
        rows = drafted if isinstance(drafted, list) else drafted.tolist()
        DRAFTS.append([int(token) for token in rows[0]])
        return drafted

    GPUModelRunner.propose_draft_token_ids = recorded


def start_faster() -> None:
    """Leave out what an engine start repeats in a process that has started one before.

    Engines collect garbage ten times a start, over all that is imported: more than half of its
    time. What is here now is left out of that for good. And the CPU's kernels take the place of
    Triton's in all loaded modules: once is enough.
    """
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    if current_platform.is_cpu():
        once = functools.cache(current_platform.register_triton_kernel_overrides)
        type(current_platform).register_triton_kernel_overrides = staticmethod(once)


def counters(llm) -> dict:
    """The counters of speculation, summed over the prompts."""
    found = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name != metric.name:
            found[name] = metric.values if name.endswith("per_pos") else metric.value
    return found


def run(job: dict) -> dict:
    """One engine over all prompts."""
    llm = LLM(
        model=job["model"],
        revision=job.get("revision"),
        speculative_config=job["speculative_config"],
        dtype="float32",
        max_model_len=job["max_model_len"],
        max_num_seqs=1,
        num_gpu_blocks_override=job["max_model_len"] // BLOCK + SPARE_BLOCKS,
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


def main() -> None:
    """Run all jobs; one that fails leaves its error instead of a result."""
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    record_drafts()
    start_faster()
    results = {}
    for name, job in jobs.items():
        started = time.monotonic()
        try:
            results[name] = run(job)
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        results[name]["seconds"] = time.monotonic() - started
        gc.collect()
        cleanup_dist_env_and_memory()
    found = {"device": current_platform.device_type, "jobs": results}
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
