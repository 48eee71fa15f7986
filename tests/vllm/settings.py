"""Where the real vLLM is, and the marks of every test that needs it."""

import os
from pathlib import Path

import pytest

VLLM_PYTHON = Path(os.environ.get("VLLM_ENV", "")) / "bin" / "python"
MARKS = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
