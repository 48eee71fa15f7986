"""What a vLLM drafts for given prompts; runs in vLLM's interpreter, not in ours.

    python vllm_drafts.py JOB.json RESULT.json

A job is a model, a speculative config, prompts as token ids, a number of tokens and a longest
length. The result holds the greedy tokens and every draft that was made for every prompt, in
float32. One request runs at a time, in this process: drafts are seen where they are made.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.pop(0)  # the project's folder: its modules are of another environment

from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

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


def main() -> None:
    """Run the job."""
    with open(sys.argv[1]) as file:
        job = json.load(file)
    record_drafts()
    llm = LLM(
        model=job["model"],
        speculative_config=job["speculative_config"],
        dtype="float32",
        max_model_len=job["max_model_len"],
        max_num_seqs=1,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
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
    with open(sys.argv[2], "w") as file:
        json.dump({"outputs": outputs, "drafts": drafts}, file)


if __name__ == "__main__":
    main()
