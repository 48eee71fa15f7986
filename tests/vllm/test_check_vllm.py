"""train/export.py --check as a command, with a real vLLM."""

import os
import subprocess
import sys

import torch

from data.embedded import byte_tokenizer
from drafters.export_info import TargetInfo
from drafters.vllm_format import save
from recipes.drafter_sections import Eagle3Section
from tests.tiny_exports import ORIGIN, ROOT
from tests.vllm.ours_half import make_prompts, make_target, rows_of, trained
from tests.vllm.settings import MARKS

pytestmark = MARKS


def test_p77_the_command_finds_that_vllm_drafts_as_we_do(tmp_path):
    target = make_target("llama", tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    drafter = trained(Eagle3Section()).make(target, rows_of(target, make_prompts()))
    for name in ("drafter", "export"):
        save(drafter, tmp_path / name, "vllm", torch.float32, TargetInfo.of(target), ORIGIN)
    command = [sys.executable, "train/export.py", str(tmp_path / "export"), "--check"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vLLM's drafts: all " in done.stdout and "are ours" in done.stdout
