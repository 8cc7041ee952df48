"""Runs side by side: differences and their intervals against plain loops, and what must not be compared."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from demix.evaluate.columns import join
from demix.evaluate.score_tables import write_scores
from demix.files import write_json
from demix.report.compare import (
    BITS,
    FEW,
    NOT_BOTH,
    OTHER_TOKENIZER,
    OTHER_TOKENS,
    PERPLEXITY,
    Comparison,
    compare,
)
from demix.report.compared import tables
from demix.run.run import Run, config_fingerprint
from support.cli import demix, succeeds
from support.configs import with_keys, written_by_hand
from support.errors import refused
from support.frozen import copied, evaluate_again, rewrite, rows_of, with_models

# What a score table says of the tokens and the weights that it was made with.
WEIGHTS = ("tokens_sha256", "shared_sha256", "expert_sha256")


def renamed(run: Run, folder: Path, name: str = "other", **sections: object) -> Run:
    """A copy of a run in `folder` of another name; `sections` replace sections of its config."""
    copied(run, folder)
    return with_keys(folder, Run.read(folder).config.values | {"run": name} | sections)


def relearned(run: Run, folder: Path, effect: int, name: str = "other") -> Run:
    """A copy of a run whose experts predict some documents better and some worse, evaluated by the stage."""
    made = renamed(run, folder, name)
    for path in sorted(folder.glob("scores/*/*/*.parquet")):
        if path.stem != "tokens":
            documents = pd.read_parquet(path.with_name("tokens.parquet"))["document"].to_numpy()
            file = pq.ParquetFile(path)
            own = np.random.default_rng([effect, *path.stem.encode(), *path.parent.name.encode()])
            factors = np.exp(own.normal(0.02 * effect, 0.05, documents.max() + 1))
            scores = file.read()["log_probability"].to_numpy() * factors[documents]
            told = file.metadata.metadata
            about = {name: told[name.encode()].decode() for name in WEIGHTS if name.encode() in told}
            write_scores(path, [scores.astype(np.float32)], about)
    join(evaluate_again(made), folder / "results.parquet")
    return made


TRAINING, NOVEL = ("parliament", "scripture", "licenses"), ("fortunes", "fantasy")
KINDS = {"training": TRAINING, "novel": NOVEL}
# Systems of equal weights, whose losses a plain loop can tell.
PLAIN = {"Dense (Balanced)": ("dense", ("dense",)), "DEMix (average)": ("demix", TRAINING)}
CHANGE = ["change", "change_low", "change_high"]


@pytest.fixture(scope="module")
def base(frozen: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = with_models(frozen, tmp_path_factory.mktemp("base") / "run", "demix", "dense")
    evaluate_again(run)
    return run


@pytest.fixture(scope="module")
def other(base: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return relearned(base, tmp_path_factory.mktemp("other") / "run", effect=1)


@pytest.fixture(scope="module")
def both(base: Run, other: Run) -> Comparison:
    return compare([base.folder, other.folder])


def systems(compared: Comparison, **where: str) -> pd.DataFrame:
    rows = compared.systems
    for name, value in ({"measure": PERPLEXITY, "run": "other"} | where).items():
        rows = rows[rows[name] == value]
    return rows.set_index("system")


def token_losses(run: Run, label: str, domain: str) -> pd.DataFrame:
    """The nats of each test token under the equal mixture of the experts of a system, and the token's document."""
    model, experts = PLAIN[label]
    columns = [rows_of(run, f"scores/{model}/{domain}.test/{name}")["log_probability"] for name in experts]
    nats = -np.log(np.mean(np.exp(np.array(columns, np.float64)), axis=0))
    return rows_of(run, f"scores/{model}/{domain}.test/tokens")[["origin"]].assign(nats=nats)


def drawn(losses: list[pd.DataFrame], generator: np.random.Generator, resamples: int = 2000) -> np.ndarray:
    """Nats per token of two runs in resamples [R, 2] of 20 documents or more, or of blocks of √N tokens."""
    nats = np.stack([one["nats"] for one in losses], axis=1)
    documents = [np.flatnonzero(losses[0]["origin"] == name) for name in losses[0]["origin"].unique()]
    if len(documents) < 20:
        length, endless = 4 * round(len(nats) ** 0.5 / 4), np.concatenate([nats, nats])
        begins = generator.integers(len(nats), size=(resamples, -(-len(nats) // length)))
        return endless[begins[..., None] + np.arange(length)].mean(axis=(1, 2))
    chosen = generator.integers(len(documents), size=(resamples, len(documents)))
    return np.array([nats[np.concatenate([documents[number] for number in some])].mean(axis=0) for some in chosen])


@pytest.mark.parametrize("label", PLAIN)
@pytest.mark.parametrize("kind", KINDS)
def test_change_and_interval_are_those_of_a_plain_loop(
    both: Comparison, base: Run, other: Run, kind: str, label: str
) -> None:
    rows = systems(both)
    assert (rows["why"] == "").all()
    assert both.blocks.keys() == {"scripture", "fantasy"}
    assert ((rows["change_low"] < rows["change"]) & (rows["change"] < rows["change_high"])).all()
    losses = {name: [token_losses(run, label, name) for run in (base, other)] for name in KINDS[kind]}
    nats = {name: [one["nats"].mean() for one in of] for name, of in losses.items()}
    means = np.mean(np.exp([*nats.values()]), axis=0)
    row = systems(both, kind=kind).loc[label]
    assert row["value"] == pytest.approx(means[1], rel=1e-6)
    assert row["change"] == pytest.approx(100 * (means[1] / means[0] - 1), rel=1e-5)
    generator = np.random.default_rng(5)
    resampled = {name: drawn(of, generator) for name, of in losses.items()}
    by_run = np.mean(np.exp([*resampled.values()]), axis=0)
    bounds = np.quantile(100 * (by_run[:, 1] / by_run[:, 0] - 1), [0.025, 0.975])
    assert row[CHANGE[1:]].tolist() == pytest.approx(bounds, abs=0.12 * np.ptp(bounds))
    by_domain = both.by_domain.set_index(["domain", "system"])
    for name, (first, second) in nats.items():
        found = by_domain.loc[(name, label)]
        assert found["nats"] == pytest.approx(second - first, rel=1e-5)
        bounds = np.quantile(resampled[name][:, 1] - resampled[name][:, 0], [0.025, 0.975])
        assert found[["low", "high"]].tolist() == pytest.approx(bounds, abs=0.12 * np.ptp(bounds))


def test_equal_runs_differ_by_exactly_nothing(base: Run, tmp_path: Path) -> None:
    same = compare([base.folder, renamed(base, tmp_path / "same").folder])
    assert len(systems(same)) > 20
    assert (systems(same)[CHANGE] == 0).all(axis=None)
    assert (same.by_domain[["nats", "low", "high"]] == 0).all(axis=None)
    assert same.settings.empty


def test_names_and_orders_change_nothing(both: Comparison, base: Run, other: Run, tmp_path: Path) -> None:
    again = renamed(other, tmp_path / "again", "again")
    sections = base.config.values["domains"]
    turned = sections | {"training": dict(reversed(sections["training"].items()))}
    turned = renamed(base, tmp_path / "turned", "turned", domains=turned)
    expected = systems(both, kind="training")[["value", *CHANGE]]
    for first in (turned, base):
        found = systems(compare([first.folder, again.folder, other.folder]), run="again", kind="training")
        pd.testing.assert_frame_equal(found[["value", *CHANGE]], expected, rtol=1e-9)


def test_other_tokens_have_no_interval(base: Run, other: Run, tmp_path: Path) -> None:
    run = renamed(other, tmp_path / "run")
    rewrite(run, "results", lambda rows: rows.assign(
        tokens_sha256=rows["tokens_sha256"].mask(rows["domain"] == "licenses", "0" * 64)
    ))  # fmt: skip
    found = compare([base.folder, run.folder])
    rows = systems(found, kind="training")
    assert {*rows["why"]} == {OTHER_TOKENS}
    assert rows["change"].notna().all()
    assert rows[CHANGE[1:]].isna().all(axis=None)
    assert systems(found, kind="novel")["change_low"].notna().all()
    assert {*found.by_domain["domain"]} == {*TRAINING, *NOVEL} - {"licenses"}


def test_other_tokenizers_are_compared_in_bits_per_byte(base: Run, other: Run, tmp_path: Path) -> None:
    """The same ids by chance make no pair of documents."""
    third = renamed(other, tmp_path / "third", "third")
    write_json(third.folder / "tokenizer.json", {"made": "of other text"})
    found = compare([base.folder, other.folder, third.folder])
    assert {*systems(found, run="third")["why"]} == {OTHER_TOKENIZER}
    assert systems(found, run="third")["change"].isna().all()
    assert systems(found)["change_low"].notna().all()
    assert {*found.by_domain["run"]} == {"other"}
    dense = [rows_of(run).query("model == 'dense' and seed == 1 and kind == 'novel'") for run in (base, third)]
    first, second = (rows["bits_per_byte"].mean() for rows in dense)
    row = systems(found, run="third", measure=BITS, kind="novel").loc["Dense (Balanced)"]
    assert row["value"] == pytest.approx(second)
    assert row["change"] == pytest.approx(100 * (second / first - 1))
    # Without bytes there is nothing to compare.
    rewrite(third, "results", lambda rows: rows.assign(bits_per_byte=np.nan))
    found = compare([base.folder, third.folder]).systems
    assert found.loc[found["run"] == "third", "change"].isna().all()


def test_why_there_is_no_interval(base: Run, other: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = renamed(other, tmp_path / "cut")
    rewrite(cut, "results", lambda rows: rows.assign(documents=rows["documents"] - 1))
    assert {*systems(compare([base.folder, cut.folder]))["why"]} == {OTHER_TOKENS}
    monkeypatch.setattr("demix.evaluate.intervals.MIN_TOKENS", 10**6)
    assert {*systems(compare([base.folder, other.folder]))["why"]} == {FEW}


def test_settings_that_differ(base: Run, tmp_path: Path) -> None:
    keys = base.config.values
    changes = {"training": keys["training"] | {"learning_rate": 1e-3, "warmup": 0.1}, "seeds": []}
    run = renamed(base, tmp_path / "run", **changes, models=keys["models"] | {"big": {"kind": "dense"}})
    # No config may have a password, but a run of somebody else's may.
    written_by_hand(run.folder, tracking={"uri": "postgresql://me:secret@host/demix"})
    found = compare([base.folder, run.folder]).settings
    assert found.to_dict("index") == {
        "seeds": {"frozen": "[1, 2]", "other": "[]"},
        "training.learning_rate": {"frozen": "0.02", "other": "0.001"},
        "training.warmup": {"frozen": "0.08", "other": "0.1"},
        "models.big": {"frozen": "–", "other": '{"kind": "dense"}'},
        "tracking.uri": {"frozen": '"sqlite:///results/mlflow.db"', "other": '"postgresql://***@host/demix"'},
    }


def test_what_one_run_alone_has(base: Run, tmp_path: Path) -> None:
    """Rules of weights, and a domain of another kind; a mean needs every domain."""
    sections = base.config.values["domains"]
    moved = {"training": sections["training"], "novel": {"fortunes": sections["novel"]["fortunes"]}}
    fewer = renamed(base, tmp_path / "fewer", domains=moved, removal={})
    rewrite(fewer, "results", lambda rows: rows[
        (rows["weights"] != "tempered") & ((rows["method"] != "average") | (rows["domain"] != "licenses"))
    ])  # fmt: skip
    found = compare([base.folder, fewer.folder])
    assert found.domains == {"training": [*TRAINING], "novel": ["fortunes"]}
    assert found.left_out == ("fantasy",)
    rows = found.systems.set_index(["kind", "system", "run"])["value"]
    dense = rows_of(base).query("model == 'dense' and seed == 1")
    for run in ("frozen", "other"):
        novel = dense.loc[dense["domain"] == "fortunes", "perplexity"].item()
        assert rows["novel", "Dense (Balanced)", run] == pytest.approx(novel)
    for system in ("DEMix (tempered)", "DEMix (average)"):
        assert np.isfinite(rows["training", system, "frozen"])
        assert np.isnan(rows["training", system, "other"])
    reasons = found.systems[found.systems["run"] == "other"].set_index(["kind", "system"])["why"]
    assert reasons["training", "DEMix (average)"] == NOT_BOTH
    assert reasons["training", "DEMix (cached prior)"] != NOT_BOTH
    shown = demix("compare", base.folder, fewer.folder).output
    assert "fantasy" in shown


def test_rows_of_another_kind_are_other_systems(base: Run, tmp_path: Path) -> None:
    runs = [
        renamed(base, tmp_path / kind, kind, models={"mine": {"label": "mine", "kind": kind}})
        for kind in ("dense", "domain_token")
    ]
    rows = compare([run.folder for run in runs]).systems
    assert {*rows.loc[rows["system"].str.startswith("mine"), "system"]} == {"mine", "mine (naive)"}
    assert not rows.duplicated(["kind", "system", "run"]).any()


def test_runs_without_a_common_domain(base: Run, tmp_path: Path) -> None:
    sections = base.config.values["domains"]
    others = {kind: {f"{name}_too": given for name, given in some.items()} for kind, some in sections.items()}
    run = renamed(base, tmp_path / "run", domains=others, removal={})
    found = compare([base.folder, run.folder])
    assert found.systems.empty
    assert found.domains == {}
    notes = [note for table in tables(found) for note in table.notes]
    assert any(all(name in note for name in (*base.domains, *run.domains)) for note in notes), "why no mean is there"
    succeeds("compare", base.folder, run.folder, "--html", tmp_path / "page.html")


def test_spread_over_seeds_is_that_of_the_results(base: Run, other: Run, both: Comparison) -> None:
    rows = rows_of(base).query("variant == '' and split == 'test' and method == 'dense' and model == 'dense'")
    spread = rows.query("kind == 'training'").groupby("seed")["perplexity"].mean().std(ddof=1)
    assert systems(both, run="frozen", kind="training").loc["Dense (Balanced)", "spread"] == pytest.approx(spread)
    assert systems(both)["spread"].isna().all()


def test_the_page_stands_alone(base: Run, other: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one name are told apart by their folders, which may have any name."""
    monkeypatch.chdir(tmp_path)
    for run, folder in ((base, "one"), (other, "<b>[red]x")):
        renamed(run, Path(folder), "same")
    done = succeeds("compare", "one", "<b>[red]x", "--html", "new/page.html")
    assert "<b>[red]x" in done.output
    page = Path("new/page.html").read_text()
    assert "<b>" not in page
    assert "&lt;b&gt;[red]x" in page
    scripts = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)=|https?:|//[a-z]|@import|url\((?!#)", scripts)
    row = re.search(r"<th[^>]*>Dense \(Balanced\)</th>(.*?)</tr>", page)[1]
    expected = systems(compare([base.folder, other.folder]), kind="training").loc["Dense (Balanced)"]
    change, low, high = (f"{expected[name]:+.2f}".replace("-", "−") for name in CHANGE)
    assert re.findall(r"<td[^>]*>([^<]+)", row)[2] == change
    assert f"[{low}, {high}]" in row


def test_other_formats(base: Run, other: Run, both: Comparison) -> None:
    told = json.loads(demix("compare", base.folder, other.folder, "--format", "json").stdout)
    assert [run["name"] for run in told["runs"]] == ["frozen", "other"]
    assert told["runs"][1]["settings"] == config_fingerprint(other.config) == config_fingerprint(base.config)
    found = {(row["system"], row["kind"], row["run"]): row["change_low"] for row in told["systems"]}
    expected = systems(both, kind="novel").loc["DEMix (average)", "change_low"]
    assert found["DEMix (average)", "novel", "other"] == expected
    text = demix("compare", base.folder, other.folder, "--format", "markdown").output
    assert "| DEMix (average)" in text.replace("\\", "")


def test_bad_input_is_refused(base: Run, tmp_path: Path) -> None:
    def broken(name: str, file: str) -> Run:
        run = renamed(base, tmp_path / name)
        raw = bytearray((run.folder / file).read_bytes())
        raw[len(raw) // 2] ^= 1
        (run.folder / file).write_bytes(raw)
        return run

    missing = renamed(base, tmp_path / "missing").folder
    (missing / "results.parquet").unlink()
    folders = {
        "compare": [base.folder],
        base.folder.parent / "." / "run": [base.folder, base.folder.parent / "." / "run"],
        tmp_path / "none/config.json": [base.folder, tmp_path / "none"],
        missing / "results.parquet": [base.folder, missing],
        "damaged/results.parquet": [base.folder, broken("damaged", "results.parquet").folder],
        "licenses.systems.parquet": [base.folder, broken("losses", "evaluations/licenses.systems.parquet").folder],
    }
    for subject, runs in folders.items():
        with refused(subject):
            compare(runs)
