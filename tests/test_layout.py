"""The shape of the repository: names that shadow nothing, scripts that find their root."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["recipes", "data", "drafters", "eval", "train"]
SCRIPTS = [
    "data/prepare.py",
    "train/distill.py",
    "train/export.py",
    "eval/bench.py",
    "eval/leaderboard.py",
]
GUARD = "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))"
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).glob("*.py"))
MAX_LINES = 400


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dependencies() -> set[str]:
    """Top-level names of all that constraints.txt pins and this environment holds."""
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    pinned = {re.sub(r"[-_.]+", "-", pin).lower() for pin in pins}
    names = importlib.metadata.packages_distributions().items()
    return {
        name
        for name, owners in names
        if any(re.sub(r"[-_.]+", "-", owner).lower() in pinned for owner in owners)
    }


DEPENDENCIES = dependencies()

# Optional packages that transformers (utils/import_utils.py) and accelerate (utils/imports.py) look
# for when imported, installed or not. A script's folder would answer for them.
# fmt: off
PROBED = {
    "IPython", "Levenshtein", "accelerate", "aim", "amdsmi", "apex", "apollo_torch", "aqlm",
    "auto_round", "av", "awq", "bitsandbytes", "blobfile", "boto3", "bs4", "causal_conv1d",
    "clearml", "coloredlogs", "comet_ml", "compressed_tensors", "cv2", "datasets", "decord",
    "deepspeed", "diffusers", "dvclive", "essentia", "executorch", "faiss",
    "fast_hadamard_transform", "fastapi", "fbgemm_gpu", "fla", "flash_attn",
    "flash_attn_interface", "flute", "fouroversix", "fp_quant", "g2p_en", "galore_torch",
    "gguf", "google", "gptqmodel", "grokadamw", "habana_frameworks", "hqq", "huggingface_hub",
    "import_timer", "intel_transformer_engine", "jinja2", "kenlm", "kernels", "libcst",
    "librosa", "liger_kernel", "lomo_optim", "mamba_ssm", "mambapy", "matplotlib", "megatron",
    "mistral_common", "mlflow", "mlx", "msamp", "multipart", "nagisa", "natten", "nltk", "nncf",
    "num2words", "numba", "numpy", "onnx", "onnxruntime", "onnxscript", "openai", "openvino",
    "optimi", "optimum", "pandas", "peft", "phonemizer", "pretty_midi", "psutil", "py3nvml",
    "pyctcdecode", "pydantic", "pygments", "pynvml", "pytesseract", "pytest", "pytest_order",
    "python_multipart", "pytorch_quantization", "pyximport", "quark", "qutlass", "rhoknp",
    "rich", "rjieba", "sacremoses", "sagemaker", "schedulefree", "scipy", "sentencepiece",
    "seqio", "sinq", "sklearn", "smdistributed", "soundfile", "soxr", "soynlp", "spacy",
    "spqr_quant", "sudachipy", "swanlab", "tensorboard", "tensorboardX", "tiktoken", "timm",
    "tokenizers", "torch", "torch_mlu", "torch_musa", "torch_neuronx", "torch_npu",
    "torch_sdaa", "torch_supa", "torch_tensorrt", "torch_xla", "torchao", "torchaudio",
    "torchcodec", "torchdata", "torchdistx", "torchvision", "tqdm", "trackio",
    "transformer_engine", "transformers", "triton", "uroman", "uvicorn", "vptq", "wandb",
    "xlstm", "yt_dlp",
}
# fmt: on


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_module_bears_the_name_of_another(path):
    # A script's folder stands first on sys.path, so train/logging.py would break torch.
    assert path.stem not in sys.stdlib_module_names
    assert path.stem not in DEPENDENCIES
    assert path.stem not in PROBED


def test_dependencies_are_found():
    assert {"torch", "transformers", "datasets", "accelerate", "yaml"} <= DEPENDENCIES


@pytest.mark.parametrize("package", PACKAGES)
def test_init_holds_a_docstring_only(package):
    body = ast.parse((ROOT / package / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


@pytest.mark.parametrize("script", [name for name in SCRIPTS if (ROOT / name).exists()])
def test_script_puts_the_root_on_the_path_before_its_own_imports(script):
    text = (ROOT / script).read_text()
    own = re.search(rf"^(from|import) ({'|'.join(PACKAGES)})\b", text, flags=re.MULTILINE)
    assert GUARD in text
    assert own is None or text.index(GUARD) < own.start()


def test_scripts_are_imported_by_nobody():
    names = [name.removesuffix(".py").replace("/", ".") for name in SCRIPTS]
    for path in MODULES:
        for name in names:
            package, _, module = name.partition(".")
            pattern = rf"^\s*(import {package}\.{module}|from {package} import .*\b{module}\b"
            pattern += rf"|from {package}\.{module} import)\b"
            assert not re.search(pattern, path.read_text(), flags=re.MULTILINE), (path, name)


@pytest.mark.slow
def test_script_works_where_a_folder_of_the_same_name_lies(tmp_path):
    # accelerate with DeepSpeed puts the working directory on PYTHONPATH.
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('decoy')\n")
    for script in SCRIPTS:
        if not (ROOT / script).exists():
            continue
        done = subprocess.run(
            [sys.executable, str(ROOT / script), "--help"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (script, done.stderr)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_file_stays_short(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_source_is_not_ignored_by_git():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", *map(relative, MODULES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""


def test_generated_files_are_ignored_by_git():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = ["outputs/run/run.json", ".venv/bin/python", "draftsmith.egg-info/PKG-INFO"]
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == names


def test_packages_are_listed_one_by_one():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'packages = ["recipes", "data", "drafters", "eval", "train"]' in text
    assert "Private :: Do Not Upload" in text
