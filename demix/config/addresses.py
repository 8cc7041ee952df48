"""Where sources are: in addresses without credentials, which records and logs show, and at commits, which stay."""

import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote_plus, urlsplit

from demix.errors import DemixError

# Keys of queries whose values are credentials (also in signed addresses), in lower case with words joined by _.
_SECRET = re.compile(
    "(^|_)(tokens?|password|passwd|pwd|secret|signature|sig|credentials?|auth|authorization|jwt|bearer|sas|sessionid|"
    "apikey|accesskey|accesstoken|authtoken|(api|access|private|secret|subscription|account|auth)_key|key_pair)(_|$)|^key$"
)
# Between the words of accessToken and AWSAccessKeyId.
_INSIDE = re.compile("(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# What Snakemake treats as a wildcard, and no rule can write in another way.
_WILDCARD = re.compile(r"\{\s*[.\w]+\s*[,}]")
COMMIT = re.compile("[0-9a-f]{40}")
# The object stores that an address may begin with, each with the package that reads it.
STORES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
# What the address of a model of the Hugging Face hub begins with.
HUB = "hub:"
REPOSITORY = "(?:[A-Za-z0-9_-][A-Za-z0-9_.-]*/)?[A-Za-z0-9_-][A-Za-z0-9_.-]*"
LOG_IN = (
    "leave it out: ~/.netrc (or the file in NETRC) gives user and password of a host, HF_TOKEN the token of the hub, "
    "the environment the credentials of an object store"
)
LOG_IN_ELSEWHERE = (
    "leave it out and set PGPASSWORD, MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN in the environment"
)


def secret_in(address: str) -> str | None:
    """What credential an address holds, in words without its value; None if it holds none.

    A user name without a password is a credential of http(s) and of object stores, where it may be a token, but not of
    a database. Raises ValueError for what is not an address.
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
    """Raise DemixError that names `subject`, not the address, if an address holds credentials or cannot be read."""
    try:
        found = secret_in(address)
        # Reading a port that is not a number fails, as what follows a password with a slash in it.
        _ = urlsplit(address).port
    except ValueError:
        raise DemixError(subject, "is not an address", "write http(s)://host/…/file.suffix") from None
    if found:
        raise DemixError(subject, f"holds {found}, which logs and records would show", cure)


def refuse_unnamable(path: str) -> str:
    """`path`, an input of a rule. Raises DemixError for what Snakemake treats as a wildcard, and what is not UTF-8."""
    if _WILDCARD.search(path):
        raise DemixError(path, "holds braces, which Snakemake treats as a wildcard", "rename the file or folder")
    refuse_not_utf8(path)
    return path


def refuse_not_utf8(path: object) -> None:
    """Raise DemixError for a path that is not UTF-8, which records and logs could not hold."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise DemixError(ascii(str(path)), "has a name that is not UTF-8", "rename the file or folder") from None


def hub_model(address: str) -> tuple[str, str]:
    """The repository and the revision, maybe empty, of `hub:owner/name@revision`. Raises DemixError for others."""
    repository, _, revision = address.removeprefix(HUB).partition("@")
    if not re.fullmatch(REPOSITORY, repository):
        raise DemixError(address, "names no model of the hub", f"write {HUB}owner/name@commit")
    return repository, revision


def local(paths: Iterable[str]) -> bool:
    """Whether the data sets of a hub source are folders of this machine."""
    return all(Path(path).is_dir() for path in paths)
