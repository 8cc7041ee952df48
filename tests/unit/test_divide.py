"""A source that domains share, read once, beside one reading of it for each domain by `where`."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from demix.data.divide import MOST_VALUES, Division, divide, untaken
from demix.data.sources import Source, download
from demix.errors import DemixError
from demix.files import read_json
from demix.run.check import completed_run
from demix.run.kept import config_fingerprint, read_run_config, write_run_config
from demix.run.rules import RunRules
from demix.settings import settings_from
from support.cli import demix, said

TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
SETS = ["ArXiv", "law", 7, True, 2.5, None, "rest", ["law"], "7"]
ROWS = [
    {
        "id": f"d{number}",
        "text": f"Text {number} " * (number % 5 + 1),
        "meta": {"set": SETS[number % len(SETS)]},
        "n": number,
    }
    for number in range(60)
] + [{"id": "none", "text": "no field", "n": 3}, {"id": "null", "text": "null", "meta": None, "n": 4}]
# A list of one value is compared as text.
DOMAINS = {"arxiv": ["ArXiv"], "law": ["law", "['law']"], "numbers": [7, 2.5], "yes": [True]}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def refused(*arguments: object) -> str:
    line = said([str(argument) for argument in arguments])
    assert line is not None
    assert "\n" not in line
    return line


def same_as_by_where(folder: Path, source: dict[str, Any], domains: dict[str, list[Any]], by: str) -> dict[str, Any]:
    """Compare all files of `divide` with those of `download` by `where`; returns the counts of part 0."""
    source = {"kind": "files"} | source
    division = settings_from(Division, {"source": source, "by": by, "domains": domains})
    for part in range(source.get("parts", 1)):
        divide("corpus", division, folder / "raw", folder / "sources" / "corpus" / f"{part:04d}.json", part)
        for domain, values in domains.items():
            one = settings_from(Source, source | {"where": source.get("where", {}) | {by: values}})
            made = folder / "raw" / domain / f"{part:04d}.parquet"
            (left,) = made.parent.glob(f".{part:04d}.*.divided")
            number = left.stat().st_ino
            whole = folder / "alone" / "raw" / domain / made.name
            assert download(one, domain, made, part) == download(one, domain, whole, part)
            assert made.stat().st_ino == number, "what the pass has left is taken"
            assert made.read_bytes() == whole.read_bytes(), (domain, part)
            assert made.stat().st_mode & 0o777 == 0o600
            assert made.parent.stat().st_mode & 0o777 == 0o700
            assert [*made.parent.glob(".*")] == []
    return read_json(folder / "sources" / "corpus" / "0000.json")


@pytest.mark.parametrize(
    "options",
    [
        {"id": "id", "metadata": ["n", "meta"]},
        {"parts": 2},
        {"parts": 5, "words": 60},
        {"words": 12, "where": {"n": {"min": 4}}},
    ],
    ids=["whole", "parts by file", "parts by row", "stopped early"],
)
def test_every_file_is_the_one_that_a_condition_gives(tmp_path: Path, options: dict[str, Any]) -> None:
    write_lines(tmp_path / "a.jsonl.gz", ROWS[:25])
    write_lines(tmp_path / "b.jsonl.gz", ROWS[25:])
    counts = same_as_by_where(tmp_path, {"path": f"{tmp_path}/*.jsonl.gz"} | options, DOMAINS, "meta.set")
    if options.keys() == {"id", "metadata"}:
        assert counts["taken"] == {
            "arxiv": {"ArXiv": 7},
            "law": {"law": 7, "['law']": 6},
            "numbers": {"7": 13, "2.5": 7},
            "yes": {"True": 7},
        }
        assert (counts["documents"], counts["without"], counts["untaken"]) == (62, 9, {"rest": 6})
        assert (counts["filtered"], counts["whole"]) == (0, True)
        rows = pq.read_table(tmp_path / "raw" / "arxiv" / "0000.parquet").to_pylist()
        assert [row["id"] for row in rows] == [f"d{number}" for number in range(0, 60, 9)]
    if "where" in options:
        assert (counts["filtered"], counts["whole"]) == (4, False)


def test_a_pass_ends_when_every_domain_has_its_words(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl.gz", [{"text": "a b c", "set": name} for name in ("x", "y", "x", "x", "y", "x")])
    source = {"path": f"{tmp_path}/a.jsonl.gz", "words": 4}
    counts = same_as_by_where(tmp_path, source, {"x": ["x"], "y": ["y"]}, "set")
    assert (counts["documents"], counts["whole"]) == (5, False)
    assert counts["taken"] == {"x": {"x": 3}, "y": {"y": 2}}, "one of x is beyond its words"


def test_parquet_and_csv_give_the_field_that_parts_them(tmp_path: Path) -> None:
    rows = [{"text": f"t{number}", "set": "ab"[number % 2], "other": number} for number in range(9)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=4)
    (tmp_path / "b.csv").write_text("other,set,text\n" + "".join(f"1,{'ab'[n % 2]},c{n}\n" for n in range(5)))
    counts = same_as_by_where(tmp_path, {"path": [f"{tmp_path}/a.parquet", f"{tmp_path}/b.csv"]}, {"a": ["a"]}, "set")
    assert counts["untaken"] == {"b": 6}


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {"text": st.text(max_size=8)},
            optional={
                "set": st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from(["1", "True", "x"]))
            },
        ),
        min_size=1,
    ),
    parts=st.integers(1, 3),
)
@hypothesis_settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_records_go_to_the_domains_of_their_values(
    rows: list[dict[str, Any]], parts: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("divided")
    # Records that each domain takes: one alone refuses a source without any.
    write_lines(folder / "a.jsonl.gz", [*rows, {"text": "a", "set": 1}, {"text": "b", "set": "x"}])
    domains: dict[str, list[Any]] = {"one": [1], "x": ["x", "True"]}
    same_as_by_where(folder, {"path": f"{folder}/a.jsonl.gz", "parts": parts}, domains, "set")


def read(folder: Path, name: str, settings: dict[str, Any]) -> dict[str, bytes]:
    """The files of a domain's documents by `demix read`."""
    documents = folder / "documents" / name
    outputs = ("--output", documents / "0000.parquet", "--counts", documents / "0000.json")
    raw = folder / "raw" / name / "0000.parquet"
    assert demix("read", name, "--settings", json.dumps(settings), "--raw", raw, *outputs).exit_code == 0
    assert [*raw.parent.iterdir()] == []
    return {path.name: path.read_bytes() for path in documents.iterdir()}


def test_the_documents_are_those_of_a_domain_that_reads_alone(tmp_path: Path) -> None:
    rows = [{"text": f"Write to me{number}@example.org", "set": "ab"[number % 2]} for number in range(8)]
    write_lines(tmp_path / "a.jsonl.gz", rows)
    source = {"kind": "files", "path": f"{tmp_path}/a.jsonl.gz", "piece_words": 2}
    domains = {"a": "a", "b": ["b"]}
    settings = json.dumps({"source": {**source, "piece_words": None}, "by": "set", "domains": domains})
    shared = tmp_path / "shared"
    raw, counts = shared / "raw", shared / "sources" / "corpus" / "0000.json"

    def read_all() -> set[int]:
        """Read the domains after a pass; returns the bytes of documents."""
        assert demix("divide", "corpus", "--settings", settings, "--raw", raw, "--output", counts).exit_code == 0
        for name, value in domains.items():
            one = source | {"where": {"set": value}}
            assert read(shared, name, one) == read(tmp_path / "alone", name, one)
        return {path.stat().st_size for path in shared.glob("documents/*/*.json")}

    before = read_all()
    demix("divide", "corpus", "--settings", settings, "--raw", raw, "--output", counts)
    write_lines(tmp_path / "a.jsonl.gz", [*rows, *rows, rows[0]])
    one = source | {"where": {"set": "a"}}
    assert read(shared, "a", one) == read(tmp_path / "alone", "a", one), "what was left is of another file"
    assert read_all() != before


def counted(folder: Path, rows: list[dict[str, Any]], domains: dict[str, list[Any]], **options: Any) -> Path:
    """The counts of a source with these records."""
    write_lines(folder / "a.jsonl.gz", rows)
    source = {"kind": "files", "path": f"{folder}/a.jsonl.gz"} | options
    counts = folder / "sources" / "corpus" / "0000.json"
    divide(
        "corpus", settings_from(Division, {"source": source, "by": "set", "domains": domains}), folder / "raw", counts
    )
    return counts


def test_the_card_of_a_source_counts_what_no_domain_took(tmp_path: Path) -> None:
    rows = [{"text": "t", "set": name} for name in ("a", "b", "b", "c", "a", "d", "ann@example.org")] + [{"text": "t"}]
    domains = {"a": ["a"], "gone": ["d"], "bad": ["bb"]}
    counts, card = counted(tmp_path, rows, domains), tmp_path / "sources" / "corpus" / "card.json"
    asked = ("source-card", counts, "--output", card, "--settings")
    assert demix(*asked, json.dumps({"domains": {"a": ["a"], "later": "c"}})).exit_code == 0
    found = read_json(card)
    assert found["domains"] == {"a": 2, "later": 1}, "a domain that was added after the pass"
    assert found["untaken"] == {"b": 2, "<EMAIL>": 1, "d": 1}, "d was a domain's, and a value may be personal data"
    assert untaken([card]) == ["corpus: 5 of 8 documents are of no domain: b 2, <EMAIL> 1, d 1, without set 1"]
    line = refused(*asked, json.dumps({"domains": {"a": ["a"], "bad": "bb"}}))
    assert line == "demix: error: bad.value: is 'bb', and no document of corpus has it in set; " + (
        "did you mean b? known are <EMAIL>, b, c"
    )


def test_a_field_that_no_document_has_is_refused(tmp_path: Path) -> None:
    counts = counted(tmp_path, [{"text": "t"}, {"text": "t", "set": None}], {"a": ["a"]})
    line = refused("source-card", counts, "--output", tmp_path / "card.json", "--settings", '{"domains": {"a": ["a"]}}')
    assert "config key sources.corpus.by: is 'set', a field that no document has" in line
    assert not (tmp_path / "card.json").exists()


def test_a_domain_with_its_words_need_not_have_met_all_of_its_values(tmp_path: Path) -> None:
    rows = [{"text": "one two", "set": name} for name in ("a", "b", "c")]
    counts = counted(tmp_path, rows, {"a": ["a", "c"], "b": ["b"]}, words=1)
    given = json.dumps({"domains": {"a": ["a", "c"], "b": ["b"]}})
    assert demix("source-card", counts, "--output", tmp_path / "card.json", "--settings", given).exit_code == 0


def test_further_values_are_counted_together(tmp_path: Path) -> None:
    rows = [{"text": "t", "set": f"v{number}"} for number in range(MOST_VALUES + 3)] + [{"text": "t", "set": "x" * 101}]
    found = read_json(counted(tmp_path, [*rows, {"text": "t", "set": "a"}], {"a": ["a"]}))["untaken"]
    assert len(found) == MOST_VALUES + 1
    assert found["other values"] == 4


def shared_config(**changes: Any) -> dict[str, Any]:
    """The tiny config with two of its domains in one source."""
    config = copy.deepcopy(TINY)
    source = {"kind": "files", "path": "resources/sample/*.jsonl.zst", "parts": 2}
    config["sources"] = {"pile": {"source": source, "by": "meta.set"}}
    words = config["domains"]["training"]["licenses"]["words"]
    config["domains"]["training"]["licenses"] = {"from": "pile", "value": ["Law", 3], "words": words}
    config["domains"]["novel"]["fantasy"] = {"from": "pile", "value": "Fantasy", "words": words}
    for place, value in changes.items():
        *path, last = place.split("__")
        at = config
        for name in path:
            at = at[name]
        if value is None:
            del at[last]
        else:
            at[last] = value
    return config


def test_a_domain_of_a_shared_source_has_the_source_with_its_condition(tmp_path: Path) -> None:
    run = completed_run(shared_config())
    alone = shared_config(domains__training__licenses__from=None, domains__training__licenses__value=None)
    where = {"meta.set": ["Law", 3]}
    alone["domains"]["training"]["licenses"]["source"] = alone["sources"]["pile"]["source"] | {"where": where}
    source = completed_run(alone).domains["licenses"].source
    assert run.domains["licenses"].source == source
    assert run.shared == {"pile": ("licenses", "fantasy")}
    assert [*run.config.of_text] == [
        "sources.pile.source",
        "domains.training.parliament.source",
        "domains.training.scripture.source",
        "domains.novel.fortunes.source",
    ]
    # What a run keeps is a config, too.
    write_run_config(tmp_path / "config.json", run.config)
    assert config_fingerprint(read_run_config(tmp_path)) == config_fingerprint(run.config)
    assert completed_run(run.config.values).config.values == run.config.values
    rules = RunRules(run)
    assert rules.counted("pile") == [f"results/tiny/sources/pile/{part:04d}.json" for part in range(2)]
    division = settings_from(Division, rules.sharing("pile", **rules.division("pile")))
    assert (division.by, division.domains) == ("meta.set", {"licenses": ("Law", 3), "fantasy": "Fantasy"})
    assert rules.fetched_by("divide", {"source": "pile", "part": "0001"}) == ("licenses", "fantasy")
    assert rules.fetched_by("read", {"domain": "scripture"}) == ("scripture",)
    assert rules.fetched_by("split", {"domain": "scripture"}) == ()


def test_a_config_without_shared_sources_keeps_its_fingerprint() -> None:
    run = completed_run(TINY)
    assert "sources" not in run.config.values
    assert run.config.values["domains"]["training"]["licenses"].keys() == {
        "source",
        "words",
        "near_duplicates",
        "anonymize",
        "documents",
        "licence",
        "access",
    }


# What is changed of the domain fantasy, and the error about it; or of all keys.
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"from": "pil"}, "from: is 'pil', which is no source; did you mean pile?"),
        ({"value": None}, "value: is missing; give a value of the field meta.set"),
        ({"from": None}, "value: is given without from"),
        ({"value": 3}, "value: names 3, which licenses has too"),
        ({"value": "3"}, "value: names '3', which licenses has too"),
        ({"value": ["a", "a"]}, "value: names 'a' twice"),
        ({"value": []}, "value: is []"),
        ({"source": {"kind": "files", "path": "a.txt"}}, "source: is given beside from: pile"),
        ({"sources__pile__source__where": {"meta.set": "x"}}, "sources.pile.source.where: names meta.set"),
        ({"sources__pile__by": None}, "sources.pile.by: is missing"),
        ({"sources__pile__source__kind": "url"}, "sources.pile.source.parts: is 2 for 1 addresses"),
        ({"sources__Pile": {"source": {"kind": "files", "path": "a"}, "by": "b"}}, "sources.Pile: is not a usable"),
    ],
)
def test_wrong_keys_are_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    fantasy = "domains__novel__fantasy__"
    with pytest.raises(DemixError) as caught:
        completed_run(shared_config(**{key if "__" in key else fantasy + key: one for key, one in changes.items()}))
    subject = line if line.startswith("sources") else f"domains.novel.fantasy.{line}"
    assert str(caught.value).startswith(f"config key {subject}")
