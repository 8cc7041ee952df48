"""What a test says of an error: its class and its subject. Its sentence may change."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import pytest

from demix.errors import DemixError


def refused(*subjects: object) -> AbstractContextManager[pytest.ExceptionInfo[DemixError]]:
    """Expects a `DemixError` whose subject is one of `subjects`: a config key, an option, or the end of a path."""
    assert subjects, "name the subject that the error must have"
    return pytest.raises(DemixError, check=lambda error: concerns(error.subject, subjects))


def concerns(subject: str, names: Iterable[object]) -> bool:
    """Whether an error's subject is one of `names`, or ends with one: as `config key <name>`, or as a path."""
    return any(subject == str(name) or subject.endswith((f"/{name}", f" {name}")) for name in names)
