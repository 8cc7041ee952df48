"""Addresses of sources. They hold no credentials, because records and logs show them; revisions are pinned commits."""

import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote_plus, urlsplit

from demix.errors import DemixError

# Query keys whose values are credentials (also in signed addresses), in lower case with words joined by _.
_SECRET = re.compile(
    "(^|_)(tokens?|password|passwd|pwd|secret|signature|sig|credentials?|auth|authorization|jwt|bearer|sas|sessionid|"
    "apikey|accesskey|accesstoken|authtoken|(api|access|private|secret|subscription|account|auth)_key|key_pair)(_|$)|^key$"
)
# Between the words of accessToken and AWSAccessKeyId.
_INSIDE = re.compile("(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# Snakemake treats braces as a wildcard, and a rule cannot escape them.
_WILDCARD = re.compile(r"\{\s*[.\w]+\s*[,}]")
COMMIT = re.compile("[0-9a-f]{40}")
# The object stores that an address can name, each with the package that reads it.
STORES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
# The address of a model on the Hugging Face hub begins with this.
HUB = "hub:"
REPOSITORY = "(?:[A-Za-z0-9_-][A-Za-z0-9_.-]*/)?[A-Za-z0-9_-][A-Za-z0-9_.-]*"
LOG_IN = (
    "leave it out; set user and password of a host in ~/.netrc (or the file in NETRC), the token of the hub in "
    "HF_TOKEN, and the credentials of an object store in the environment"
)
LOG_IN_ELSEWHERE = (
    "leave it out and set PGPASSWORD, MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN in the environment"
)


def secret_in(address: str) -> str | None:
    """A description of the credential in an address, without its value; None if there is none.

    A user name without a password counts as a credential in addresses of http(s) and object stores, where it may be a
    token, but not in addresses of databases. Raises ValueError if `address` is not an address.
    """
    parts = urlsplit(address)
    if parts.password:
        return "a password"
    if parts.username and parts.scheme in ("http", "https", *STORES):
        return "a user name"
    for pair in re.split("[&;]", f"{parts.query}&{parts.fragment}"):
        key, _, value = pair.partition("=")
        words = re.sub("[^a-z0-9]+", "_", _INSIDE.sub("_", unquote_plus(key)).lower())
        if value and _SECRET.search(words):
            return f"the credential {unquote_plus(key)!r}"
    return None


def refuse_secrets(subject: str, address: str, cure: str) -> None:
    """Raise DemixError if an address holds credentials or cannot be parsed.

    The error names `subject`, not the address.
    """
    try:
        found = secret_in(address)
        # The port is not a number if a password contains a slash; reading the port then fails.
        _ = urlsplit(address).port
    except ValueError:
        raise DemixError(subject, "is not an address", "write http(s)://host/…/file.suffix") from None
    if found:
        raise DemixError(subject, f"holds {found}, which logs and records would show", cure)


def refuse_unnamable(path: str) -> str:
    """`path`, an input of a workflow rule.

    Raises DemixError if the path has a wildcard of Snakemake or is not UTF-8.
    """
    if _WILDCARD.search(path):
        raise DemixError(path, "holds braces, which Snakemake treats as a wildcard", "rename the file or folder")
    refuse_not_utf8(path)
    return path


def refuse_not_utf8(path: object) -> None:
    """Raise DemixError if a path is not UTF-8, because records and logs cannot hold such a path."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise DemixError(ascii(str(path)), "has a name that is not UTF-8", "rename the file or folder") from None


def hub_model(address: str) -> tuple[str, str]:
    """Repository and revision (maybe empty) of `hub:owner/name@revision`. Raises DemixError for another address."""
    repository, _, revision = address.removeprefix(HUB).partition("@")
    if not re.fullmatch(REPOSITORY, repository):
        raise DemixError(address, "does not name a model of the hub", f"write {HUB}owner/name@commit")
    return repository, revision


def local(paths: Iterable[str]) -> bool:
    """Whether the data sets of a hub source are folders on this machine."""
    return all(Path(path).is_dir() for path in paths)
