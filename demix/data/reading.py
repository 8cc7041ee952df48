"""The stages that read raw text and anonymize it: two, where downloads run elsewhere, or one."""

from functools import partial
from pathlib import Path
from typing import Any

from demix.data.anonymize import anonymize_documents
from demix.data.shared import made_once
from demix.data.sources import Source, discard, download, pinned


def anonymize(
    raw: Path,
    output: Path,
    counts: Path,
    enabled: bool = True,
    document_words: int | None = None,
    piece_words: int | None = None,
) -> None:
    """Normalise one part of a domain's raw text, replace personal data by dummy tokens, cut long documents.

    With `enabled` false nothing is replaced. `document_words` and `piece_words` are those of `anonymize_documents`.
    """
    how: dict[str, Any] = {"enabled": enabled, "document_words": document_words, "piece_words": piece_words}
    make = partial(anonymize_documents, raw, output, counts, **how)
    made_once(output, [output, counts], [raw], how, make, passing=True)


def read(
    domain: str, settings: Source, raw: Path, output: Path, counts: Path, part: int = 0, enabled: bool = True
) -> None:
    """Read one part of a domain's text from its source, and anonymize it: download and anonymize in one.

    The raw text on its way, `raw`, is private and removed at the end.
    """

    how = enabled, settings.document_words, settings.piece_words

    def make() -> None:
        download(settings, domain, raw, part)
        anonymize_documents(raw, output, counts, *how)

    if (inputs := pinned(settings, part)) is None:
        download(settings, domain, raw, part)
        anonymize(raw, output, counts, *how)
    else:
        values = {"source": settings.as_dict(), "part": part, "enabled": enabled}
        made_once(output, [output, counts], inputs, values, make)
    discard(raw)
