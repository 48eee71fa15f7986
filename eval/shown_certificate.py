"""The certificate that lies beside a record, and what the leaderboard shows of it."""

import glob
from pathlib import Path
from typing import Any

from pydantic import StrictBool, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from data.files import read_json, stable_hash
from eval.record import BrokenVerifier, ResultRecord, Share, ShownCertificate
from eval.record_checks import check_values
from recipes.errors import UserError


class _Fault(TypedDict):
    what: str
    setting: str
    p_value: Share | None
    tokens_needed: int
    at_least: bool


class _Certificate(TypedDict):
    """Of eval.certify.Certificate, the keys that are read here."""

    passed: StrictBool
    power: list[_Fault]
    identity: NotRequired[dict[str, Any] | None]


_CERTIFICATE = TypeAdapter(_Certificate)


def certificate_file(name: str, verification: str, other: str | None = None) -> str:
    """File of a drafter's certificate; where not tokens of a chain are judged, its name says it.

    Args:
        other: folder of the drafter, where that is not the run's own.
    """
    words = [name] if verification == "token" else [name, verification]
    words += [] if other is None else [stable_hash(other)[:8]]
    return f"certificate_{'_'.join(words)}.json"


def find_certificate(file: Path, record: ResultRecord) -> ShownCertificate | None:
    """That of NAME_T*.json lies beside it as certificate_NAME.json, or ..._block.json, _tree.json.

    Those of drafters from elsewhere end in a hash of their folder (..._0123abcd.json). A
    certificate of another target, weights, rule or tree says nothing of the record. Older ones do
    not say whose they are.
    """
    own = file.with_name(certificate_file(file.name.partition("_T")[0], _rule(record)))
    of_others = sorted(file.parent.glob(f"{glob.escape(own.stem)}_{'[0-9a-f]' * 8}.json"))
    for path in [own, *of_others]:
        if path.is_file() and (shown := _shown(path, record)) is not None:
            return shown
    return None


def _rule(record: ResultRecord) -> str:
    return record["settings"]["verification"]


def _shown(path: Path, record: ResultRecord) -> ShownCertificate | None:
    """What a file says, where it is of this record."""
    identity, settings, rule = record["identity"], record["settings"], _rule(record)
    found = read_json(path)
    shown, whose = read_certificate(found, str(path)), found.get("identity") or {}
    of_another = any(
        key in whose and whose[key] != identity.get(key) for key in ("target", "drafter_hash")
    ) or (
        rule == "tree" and any(found.get(key) != settings.get(key) for key in ("tree", "siblings"))
    )
    return None if of_another else shown


def read_certificate(found: Any, source: str) -> ShownCertificate:
    """What the views show of a certificate: its verdict and what became of broken verifiers.

    Raises:
        UserError: it is not a certificate.
    """
    try:
        known = _CERTIFICATE.validate_python(found, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "all of it"
        mend = "write it again with `python eval/bench.py RECIPE --certify`"
        raise UserError(f"{source}: no certificate; {mend} ({key}: {first['msg']})") from error
    check_values(found, source)
    broken: list[BrokenVerifier] = [
        {
            "name": f"{fault['what']}, at {fault['setting']}",
            "p_value": fault["p_value"],
            "tokens_needed": fault["tokens_needed"],
            "at_least": fault["at_least"],
        }
        for fault in known["power"]
    ]
    return {"verdict": "passed" if known["passed"] else "failed", "broken": broken}
