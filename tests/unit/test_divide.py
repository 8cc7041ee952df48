"""A source that domains share, read once, beside one reading of it for each domain by `where`."""

import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from demix.data.divide import Division, divide
from demix.data.sources import Source, download
from demix.files import read_json
from demix.run.check import completed_run
from demix.run.rules import RunRules
from demix.run.run import Run, config_fingerprint, write_run_config
from demix.settings import settings_from
from support.cli import demix, refusal, succeeds
from support.dry_run import TINY, changed
from support.errors import refused

SETS = ["ArXiv", "law", 7, True, 2.5, None, "rest", ["law"], "7"]
ROWS = [{"text": f"Text {n} " * (n % 5 + 1), "meta": {"set": SETS[n % len(SETS)]}, "n": n} for n in range(20)] + [
    {"text": "no field", "n": 3},
    {"text": "null", "meta": None, "n": 4},
]
# A list of one value is compared as text.
DOMAINS = {"arxiv": ["ArXiv"], "law": ["law", "['law']"], "numbers": [7, 2.5], "yes": [True]}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def same_as_by_where(folder: Path, source: dict[str, Any], domains: dict[str, list[Any]], by: str) -> dict[str, Any]:
    """Compare all files of `divide` with those of `download` by `where`; returns the counts of part 0."""
    division = settings_from(Division, {"source": source, "by": by, "domains": domains})
    for part in range(source.get("parts", 1)):
        divide("corpus", division, folder / "raw", folder / "counts" / f"{part:04d}.json", part)
        for domain, values in domains.items():
            one = settings_from(Source, source | {"where": source.get("where", {}) | {by: values}})
            made = folder / "raw" / domain / f"{part:04d}.parquet"
            (left,) = (path for path in made.parent.iterdir() if path.name.startswith("."))
            number = left.stat().st_ino
            whole = folder / "alone" / "raw" / domain / made.name
            assert download(one, domain, made, part) == download(one, domain, whole, part)
            assert made.stat().st_ino == number, "what the pass has left is taken"
            assert made.read_bytes() == whole.read_bytes(), (domain, part)
            assert made.stat().st_mode & 0o777 == 0o600
            assert made.parent.stat().st_mode & 0o777 == 0o700
            assert [*made.parent.glob(".*")] == []
    return read_json(folder / "counts" / "0000.json")


# Records that each domain of the property has: one alone refuses a source without any.
EACH = [{"text": "a", "meta": {"set": value}, "n": 0} for value in ("ArXiv", "law", 7, True)]
VALUE = st.one_of(
    st.booleans(), st.integers(0, 8), st.sampled_from(["1", "True", "7", "law", "rest", ["law"], 2.5, None])
)


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {"text": st.text(" ab", max_size=8), "n": st.integers(0, 9)},
            optional={"meta": st.none() | st.builds(lambda value: {"set": value}, VALUE)},
        )
    ),
    options=st.fixed_dictionaries(
        {}, optional={"parts": st.integers(1, 5), "words": st.integers(1, 9), "where": st.just({"n": {"min": 0}})}
    ),
    files=st.integers(1, 2),
)
@example(rows=[{"text": "a", "n": 0, "meta": {"set": value}} for value in ("1", 1)], options={}, files=1)
@example(rows=ROWS, options={}, files=2)
@hypothesis_settings(deadline=None, max_examples=25)
def test_every_file_is_the_one_that_a_condition_gives(rows, options, files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("divided")
    for number in range(files):
        write_lines(folder / f"{number}.jsonl.gz", [*EACH, *rows[number::files]])
    same_as_by_where(folder, {"path": f"{folder}/*.jsonl.gz"} | options, DOMAINS, "meta.set")


def test_a_pass_counts_what_it_reads_and_ends_when_every_domain_has_its_words(tmp_path):
    write_lines(tmp_path / "a.jsonl.gz", ROWS)
    source = {"path": f"{tmp_path}/a.jsonl.gz", "where": {"n": {"min": 4}}}
    counts = same_as_by_where(tmp_path, source, DOMAINS, "meta.set")
    assert counts["values"] == {"ArXiv": 2, "law": 2, "['law']": 2, "7": 3, "2.5": 2, "True": 1}
    assert (counts["documents"], counts["without"], counts["others"]) == (22, 3, 2)
    assert (counts["filtered"], counts["whole"]) == (5, True)
    write_lines(tmp_path / "b.jsonl.gz", [{"text": "a b c", "set": name} for name in ("x", "y", "x", "x", "y", "x")])
    counts = same_as_by_where(tmp_path, {"path": f"{tmp_path}/b.jsonl.gz", "words": 4}, {"x": ["x"], "y": ["y"]}, "set")
    assert (counts["documents"], counts["whole"]) == (5, False)
    assert counts["values"] == {"x": 3, "y": 2}, "one of x is beyond its words"
    write_lines(tmp_path / "c.jsonl.gz", [{"text": "t"}, {"text": "t", "set": None}])
    with refused("sources.corpus.by"):
        same_as_by_where(tmp_path, {"path": f"{tmp_path}/c.jsonl.gz"}, {"a": ["a"]}, "set")


def test_the_commands_give_the_documents_of_a_domain_that_reads_alone(tmp_path):
    rows = [{"text": f"Write to me{number}@example.org", "set": "ab"[number % 2]} for number in range(8)]
    write_lines(tmp_path / "a.jsonl.gz", rows)
    source = {"path": f"{tmp_path}/a.jsonl.gz"}
    settings = json.dumps({"source": source, "by": "set", "domains": {"a": "a", "b": ["b"]}})
    shared = tmp_path / "shared"
    divided = ("divide", "corpus", "--settings", settings, "--raw", shared / "raw", "--output", shared / "counts.json")

    def read(folder: Path, name: str, value: Any) -> dict[str, bytes]:
        """The files of a domain's documents by `demix read`."""
        one, documents = json.dumps(source | {"where": {"set": value}, "piece_words": 2}), folder / "documents" / name
        outputs = ("--output", documents / "0000.parquet", "--counts", documents / "0000.json")
        raw = folder / "raw" / name / "0000.parquet"
        succeeds("read", name, "--settings", one, "--raw", raw, *outputs)
        assert [*raw.parent.iterdir()] == []
        return {path.name: path.read_bytes() for path in documents.iterdir()}

    succeeds(*divided)
    for name, value in {"a": "a", "b": ["b"]}.items():
        before = read(shared, name, value)
        assert before == read(tmp_path / "alone", name, value)
    demix(*divided)
    write_lines(tmp_path / "a.jsonl.gz", [*rows, *rows, rows[0]])
    after = read(shared, "b", ["b"])
    assert before != after == read(tmp_path / "alone", "b", ["b"]), "what was left is of another file"


@pytest.mark.parametrize(
    ("name", "domains", "subject"),
    [
        ("corpus", {"../a": "a"}, "--settings.domains.../a"),
        ("../corpus", {"a": "a"}, "../corpus"),
        ("corpus", {"a": "x", "b": ["y", "x"]}, "domains.b"),
        ("corpus", {"a": [7, "7"]}, "domains.a"),
    ],
)
def test_names_of_other_folders_and_values_of_two_domains_are_refused(name, domains, subject, tmp_path):
    write_lines(tmp_path / "a.jsonl.gz", ROWS)
    source = {"path": f"{tmp_path}/a.jsonl.gz"}
    settings = json.dumps({"source": source, "by": "set", "domains": domains})
    raw = tmp_path / "one" / "two" / "raw"
    refusal("divide", name, "--settings", settings, "--raw", raw, "--output", tmp_path / "c.json", of=subject)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.gz"]


FANTASY, LICENSES = "domains.novel.fantasy", "domains.training.licenses"
PILE = {"source": {"path": "resources/sample/*.jsonl.zst", "parts": 2}, "by": "meta.set"}
WORDS = TINY["domains"]["training"]["licenses"]["words"]
# The tiny config with two of its domains in one source.
SHARED = changed(
    TINY,
    {
        "sources": {"pile": PILE},
        LICENSES: {"from": "pile", "value": ["Law", 3], "words": WORDS},
        FANTASY: {"from": "pile", "value": "Fantasy", "words": WORDS},
    },
)


def test_a_domain_of_a_shared_source_has_the_source_with_its_condition(tmp_path):
    run = completed_run(SHARED)
    where = {"meta.set": ["Law", 3]}
    alone = changed(SHARED, {LICENSES: {"source": PILE["source"] | {"where": where}, "words": WORDS}})
    assert run.domains["licenses"].source == completed_run(alone).domains["licenses"].source
    assert run.shared == {"pile": ("licenses", "fantasy")}
    assert [key for key in run.config.of_text if "pile" in key] == ["sources.pile.source"]
    # What a run keeps is a config, too.
    write_run_config(tmp_path / "config.json", run.config)
    assert config_fingerprint(Run.read(tmp_path).config) == config_fingerprint(run.config)
    assert completed_run(run.config.values).config.values == run.config.values
    rules = RunRules(run)
    division = settings_from(Division, shlex.split(rules.division_settings("pile"))[0])
    assert (division.by, division.domains) == ("meta.set", {"licenses": ("Law", 3), "fantasy": "Fantasy"})
    assert rules.fetched_by("divide", {"source": "pile", "part": "0001"}) == ("licenses", "fantasy")
    assert rules.fetched_by("read", {"domain": "scripture"}) == ("scripture",)
    assert rules.fetched_by("split", {"domain": "scripture"}) == ()


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({f"{FANTASY}.from": "pil"}, f"{FANTASY}.from"),
        ({f"{FANTASY}.value": None}, f"{FANTASY}.value"),
        ({f"{FANTASY}.from": None}, f"{FANTASY}.value"),
        *(({f"{FANTASY}.value": value}, f"{FANTASY}.value") for value in (3, "3", ["a", "a"], [])),
        ({f"{FANTASY}.source": {"path": "a.txt"}}, f"{FANTASY}.source"),
        ({"sources.pile.source.where": {"meta.set": "x"}}, "sources.pile.source.where"),
        ({"sources.pile.by": None}, "sources.pile.by"),
        ({"sources.pile.source.path": "https://host/a"}, "sources.pile.source.parts"),
        ({"sources.Pile": {"source": {"path": "a"}, "by": "b"}}, "sources.Pile"),
    ],
)
def test_wrong_keys_are_refused(changes, subject):
    with refused(subject):
        completed_run(changed(SHARED, changes))
