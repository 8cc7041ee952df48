"""Settings of the text: domains, where they come from, how they are divided, and the tokenizer."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from demix.settings import DistinctItems, Integer, Items, Number, Positive, Switch, Text, settings


def _domain_name(name: str) -> str:
    if not re.fullmatch("[a-z0-9][a-z0-9_]*", name) or name in ("tokens", "dense"):
        cure = "use lower-case letters, digits and _, other than the reserved words tokens and dense"
        raise ValueError("is not a usable domain name", cure)
    return name


DomainName = Annotated[Text, AfterValidator(_domain_name)]
Scalar = Text | Switch | Integer | Number
Range = Annotated[dict[Literal["min", "max"], Text | Number], Field(min_length=1)]


@settings()
class SourceSection:
    """Where the raw text of a domain comes from and what of it is taken."""

    kind: Literal["files", "url", "hub"] = Field(
        description="files: local files. url: files fetched over http(s), resumed and retried. hub: a Hugging Face "
        "data set, streamed; none of its code runs."
    )
    path: Text | Annotated[Items[Text], Field(min_length=1)] = Field(
        description="files - a path or glob, or a list of them; url - an address or a list of them; hub - owner/name "
        "or a local folder. Formats: .jsonl .json .csv .txt (a document each), plain, .gz or .zst, .parquet, and .zip "
        ".tar .tgz .tar.gz .tar.zst of the former."
    )
    text: Text = Field(
        default="text",
        description="Field that holds the text (not used for .txt). Nested ones by dots, [] for every item of a list, "
        "whose texts are joined by newlines - full_text[].paragraphs[].",
    )
    id: Text | None = Field(
        default=None, description="Field that names a document in error messages; by default file and row."
    )
    metadata: DistinctItems[Text] = Field(
        default=(),
        description="Further fields to keep beside the text, anonymized as it is: a column `metadata` (JSON) in the "
        "documents and in the splits.",
    )
    where: dict[Text, Scalar | Annotated[Items[Scalar], Field(min_length=1)] | Range] = Field(
        default_factory=dict,
        description="Take only records whose fields match all of these - language - en, a list of values, or min and "
        "max (inclusive; quote dates, which are compared as text).",
    )
    words: Positive | None = Field(
        default=None,
        description="Stop reading after this many words, shared evenly by the parts; null reads everything.",
    )
    piece_words: Positive | None = Field(
        default=None,
        description="Cut longer documents (books) into pieces of this many words. Pieces of one book may fall in "
        "different splits.",
    )
    parts: Positive = Field(
        default=1,
        le=10_000,
        description="Parallel jobs that read and anonymize, one in this many files (or rows, where there are fewer "
        "files) each. At most one per address of a url source.",
    )
    members: Items[Text] = Field(
        default=("*",),
        min_length=1,
        description="Which members of archives to read, by globs in which * matches / too.",
    )
    json: Literal["lines", "values"] = Field(
        default="lines",
        description="What a .json file is - an object a line, or one array or object whose values are the records.",
    )
    revision: Text | None = Field(
        default=None,
        description="hub - branch, tag or commit (refs/convert/parquet where the repository has a loader script). A "
        "commit pins it; the log names that of a branch.",
    )
    data_files: Items[Text] = Field(
        default=(),
        description="hub - globs of files in the data set (.parquet, .jsonl, .json, .csv; the text ones also .gz, "
        ".zst).",
    )
    sha256: dict[Text, Annotated[Text, Field(pattern="^[0-9a-f]{64}$")]] = Field(
        default_factory=dict, description="Digests to check, by file name (files and url)."
    )
    bytes: dict[Text, Annotated[Integer, Field(ge=0)]] = Field(
        default_factory=dict, description="Sizes to check, by file name (files and url)."
    )
    instructions: Text = Field(
        default="", description="How to come by the text; the cure that an error names when the source is missing."
    )


@settings()
class Budget:
    """How many words (parted by white space) a split takes; `train` null takes all that dev and test leave."""

    train: Positive | None = Field(default=None, description="Most words of the train split; null is all.")
    dev: Positive = Field(default=1_000_000, description="Words of the dev split.")
    test: Positive = Field(default=1_000_000, description="Words of the test split.")


@settings()
class SplitRecipe:
    """What the division of a domain takes of it."""

    near_duplicates: Number | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Leave documents out of train that share more than this part of their 13-grams of words with dev "
        "or test; null keeps all.",
    )
    words: Budget = Field(
        default_factory=Budget, description="Word budgets. Dev and test are filled first, train takes the rest."
    )


@settings(kw_only=True)
class DomainSection(SplitRecipe):
    """One text domain."""

    source: SourceSection = Field(description="Where the raw text comes from.")
    anonymize: Switch | Literal["released"] = Field(
        default=True,
        description="Replace personal data by the seven dummy tokens of the paper's Table 8; released does as the code "
        "published with the paper.",
    )
    documents: Positive | None = Field(
        default=None, description="About how many documents the source holds; for `demix plan` alone."
    )
    licence: Text = Field(default="", description="Licence or terms of the text, recorded with the run.")


@settings()
class DomainsSection:
    """The text domains by name, in the order that tables and figures show them."""

    training: dict[DomainName, DomainSection] = Field(
        min_length=1, description="Domains that get an expert when the model is trained."
    )
    novel: dict[DomainName, DomainSection] = Field(
        default_factory=dict,
        description="Domains that the trained models have not seen; each gets an expert by DEMix-DAPT. Append new ones "
        "at the end - then nothing that exists is computed again.",
    )


@settings()
class TokenizerSection:
    """How text becomes tokens."""

    kind: Literal["bpe", "gpt2"] = Field(
        default="gpt2",
        description="gpt2 is GPT-2's own vocabulary (50,257 types); bpe is a byte-level BPE trained on the training "
        "domains.",
    )
    vocab_size: Integer = Field(
        default=50257,
        ge=257,
        le=2**32 - 1,
        description="Types of a bpe tokenizer, <|endoftext|> included. Not used by gpt2.",
    )
    words: Positive = Field(
        default=200_000_000,
        description="Words of text, about, that a bpe tokenizer learns from; of more, documents are chosen by their "
        "hash.",
    )
