"""Runs side by side: differences and their intervals against a plain loop, and what must not be compared."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from demix.errors import DemixError
from demix.files import read_parquet, write_json, write_parquet
from demix.report.compare import (
    BITS,
    FEW,
    NO_SCORES,
    OTHER_DOCUMENTS,
    OTHER_SCORES,
    OTHER_TOKENIZER,
    OTHER_TOKENS,
    PERPLEXITY,
    Comparison,
    compare,
)
from demix.report.compared import write_page
from demix.run.kept import config_fingerprint, read_run_config
from support.cli import demix
from support.compared import BYTES, NOVEL, PIECES, TRAINING, make_run
from support.configs import domains, written_by_hand
from support.synthetic_run import with_keys

PLAIN = {"Dense (Balanced)": ("dense", ("dense",)), "DEMix (average)": ("demix", TRAINING)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("other") / "run", "other", effect=1)


@pytest.fixture(scope="module")
def both(base: Path, other: Path) -> Comparison:
    return compare([base, other])


def systems(compared: Comparison, **where: str) -> pd.DataFrame:
    rows = compared.systems
    for name, value in ({"measure": PERPLEXITY} | where).items():
        rows = rows[rows[name] == value]
    return rows.set_index("system")


def copied(run: Path, to: Path, name: str = "other", **changes: object) -> Path:
    shutil.copytree(run, to)
    with_keys(to, read_run_config(run).values | {"run": name} | changes)
    return to


def by_origin(run: Path, model: str, experts: tuple[str, ...], domain: str) -> dict[int, tuple[int, float]]:
    """Tokens and nats of each document under the equal mixture of `experts`, token by token."""
    folder = run / "scores" / model / f"{domain}.test"
    columns = [pq.read_table(folder / f"{name}.parquet").to_pydict()["log_probability"] for name in experts]
    found: dict[int, tuple[int, float]] = {}
    for origin, *logs in zip(pq.read_table(folder / "tokens.parquet").to_pydict()["origin"], *columns, strict=True):
        tokens, nats = found.get(origin, (0, 0.0))
        found[origin] = tokens + 1, nats - np.log(np.mean(np.exp(logs)))
    return found


@pytest.mark.parametrize("label", PLAIN)
@pytest.mark.parametrize(("kind", "domains"), [("training", TRAINING), ("novel", NOVEL)])
def test_change_and_interval_are_those_of_a_plain_loop(
    both: Comparison, base: Path, other: Path, kind: str, domains: tuple[str, ...], label: str
) -> None:
    documents = [[by_origin(run, *PLAIN[label], domain) for domain in domains] for run in (base, other)]

    def mean(run: list[dict[int, tuple[int, float]]], drawn: list[list[int]]) -> float:
        sums = [np.sum([of[origin] for origin in some], axis=0) for of, some in zip(run, drawn, strict=True)]
        return float(np.mean([np.exp(nats / tokens) for tokens, nats in sums]))

    every = [sorted(of) for of in documents[0]]
    row = systems(both, kind=kind, run="other").loc[label]
    values = [mean(run, every) for run in documents]
    assert row["value"] == pytest.approx(values[1])
    assert row["change"] == pytest.approx(100 * (values[1] / values[0] - 1))
    generator = np.random.default_rng(5)
    changes = []
    for _ in range(1500):
        drawn = [generator.choice(names, len(names)).tolist() for names in every]
        changes.append(100 * (mean(documents[1], drawn) / mean(documents[0], drawn) - 1))
    low, high = np.quantile(changes, [0.025, 0.975])
    assert (row["change_low"], row["change_high"]) == pytest.approx((low, high), abs=0.1 * (high - low))

    for domain, first, second in zip(domains, *documents, strict=True):
        found = both.by_domain.set_index(["domain", "system"]).loc[(domain, label)]
        tokens = sum(count for count, _ in first.values())
        nats = [sum(loss for _, loss in of.values()) / tokens for of in (first, second)]
        assert found["nats"] == pytest.approx(nats[1] - nats[0])
        assert found["low"] < found["nats"] < found["high"]


def test_one_domain_has_the_interval_of_scipy(both: Comparison, base: Path, other: Path) -> None:
    from scipy.stats import bootstrap

    documents = [by_origin(run, "dense", ("dense",), "songs") for run in (base, other)]
    tokens = np.array([documents[0][origin][0] for origin in sorted(documents[0])])
    first, second = (np.array([of[origin][1] for origin in sorted(of)]) for of in documents)

    def change(tokens: np.ndarray, first: np.ndarray, second: np.ndarray, axis: int) -> np.ndarray:
        return 100 * np.expm1((second.sum(axis=axis) - first.sum(axis=axis)) / tokens.sum(axis=axis))

    told = bootstrap(
        (tokens, first, second), change, paired=True, vectorized=True, method="percentile", rng=3
    ).confidence_interval  # fmt: skip
    row = systems(both, kind="novel", run="other").loc["Dense (Balanced)"]
    width = told.high - told.low
    assert (row["change_low"], row["change_high"]) == pytest.approx((told.low, told.high), abs=0.1 * width)


def test_equal_runs_differ_by_exactly_nothing(base: Path, tmp_path: Path) -> None:
    same = compare([base, copied(base, tmp_path / "same")])
    rows = systems(same, run="other")
    assert len(rows) == 2 * len(systems(same, run="other", kind="novel")) > 20
    assert (rows[["change", "change_low", "change_high"]] == 0).all(axis=None)
    assert (same.by_domain[["nats", "low", "high"]] == 0).all(axis=None)
    assert same.settings.empty


def test_every_system_has_an_interval_around_its_change(both: Comparison) -> None:
    rows = systems(both, run="other")
    assert (rows["why"] == "").all()
    assert ((rows["change_low"] < rows["change"]) & (rows["change"] < rows["change_high"])).all()
    assert ((rows["low"] < rows["value"]) & (rows["value"] < rows["high"])).all()
    labels = set(rows.index)
    assert {"DEMix (switching)", "DEMix (tempered)", "DEMix, all experts (cached)", "+ Domain Token"} <= labels
    assert systems(both, run="base")["change"].isna().all()


def test_names_and_orders_change_nothing(both: Comparison, base: Path, other: Path, tmp_path: Path) -> None:
    renamed = copied(other, tmp_path / "renamed", "another-name")
    turned = copied(base, tmp_path / "turned", "turned", domains=domains(reversed(TRAINING), NOVEL))
    columns = ["value", "low", "high", "change", "change_low", "change_high"]
    expected = systems(both, run="other", kind="training")[columns]
    found = systems(compare([turned, renamed]), run="another-name", kind="training")[columns]
    pd.testing.assert_frame_equal(found, expected, rtol=1e-9)
    three = compare([base, renamed, turned])
    pd.testing.assert_frame_equal(systems(three, run="another-name", kind="training")[columns], expected)

    backwards = [make_run(tmp_path / f"back{n}", f"b{n}", effect=n, backwards=True) for n in (0, 1)]
    plain = systems(compare(backwards), run="b1", kind="training").loc[list(PLAIN), columns]
    expected = expected.loc[list(PLAIN)]
    assert plain[["value", "change"]].to_numpy() == pytest.approx(expected[["value", "change"]].to_numpy())
    width = (expected["change_high"] - expected["change_low"]).max()
    bounds = ["change_low", "change_high"]
    assert plain[bounds].to_numpy() == pytest.approx(expected[bounds].to_numpy(), abs=0.1 * width)


def test_other_tokens_have_no_interval(base: Path, tmp_path: Path) -> None:
    found = compare([base, make_run(tmp_path / "run", "other", effect=1, texts={"news": 9})])
    rows = systems(found, run="other", kind="training")
    assert set(rows["why"]) == {OTHER_TOKENS}
    assert rows["change"].notna().all()
    assert rows[["change_low", "change_high"]].isna().all(axis=None)
    assert systems(found, run="other", kind="novel")["change_low"].notna().all()
    assert set(found.by_domain["domain"]) == {"law", "songs"}


def test_other_tokenizers_are_compared_in_bits_per_byte(base: Path, other: Path, tmp_path: Path) -> None:
    third = make_run(tmp_path / "run", "third", tokenizer="two", texts=dict.fromkeys(TRAINING + NOVEL, 3))
    found = compare([base, other, third])
    rows = systems(found, run="third")
    assert set(rows["why"]) == {OTHER_TOKENIZER}
    assert rows["change"].isna().all()
    assert systems(found, run="other")["change_low"].notna().all()
    bits = systems(found, run="third", measure=BITS, kind="novel")
    assert set(bits["why"]) == {OTHER_TOKENS}
    label = "Dense (Balanced)"
    nats = [list(by_origin(run, "dense", ("dense",), "songs").values()) for run in (base, third)]
    values = [sum(loss for _, loss in some) / np.log(2) / BYTES / sum(n for n, _ in some) for some in nats]
    assert bits.loc[label, "value"] == pytest.approx(values[1])
    assert bits.loc[label, "change"] == pytest.approx(100 * (values[1] / values[0] - 1))
    write_page(found, tmp_path / "page.html")
    drawn = re.search("<svg.*?</svg>", (tmp_path / "page.html").read_text(), re.DOTALL)[0]
    assert "bits per byte" in drawn
    assert "perplexity" not in drawn
    # The same ids by chance make no pair of documents.
    by_chance = compare([base, copied_with_tokenizer(base, tmp_path / "chance")])
    assert set(systems(by_chance, run="other")["why"]) == {OTHER_TOKENIZER}
    assert by_chance.by_domain.empty


def copied_with_tokenizer(run: Path, to: Path) -> Path:
    write_json(copied(run, to) / "tokenizer.json", {"made": "two"})
    return to


def test_without_bytes_other_tokenizers_are_not_compared(base: Path, tmp_path: Path) -> None:
    run = copied_with_tokenizer(base, tmp_path / "run")
    results = read_parquet(run / "results.parquet").to_pandas().assign(bits_per_byte=np.nan)
    write_parquet(type(read_parquet(run / "results.parquet")).from_pandas(results), run / "results.parquet")
    found = compare([base, run]).systems
    assert found.loc[found["run"] == "other", "change"].isna().all()


def test_why_there_is_no_interval(base: Path, other: Path, tmp_path: Path) -> None:
    removed = copied(other, tmp_path / "removed")
    shutil.rmtree(removed / "scores" / "dense")
    anew = copied(other, tmp_path / "anew")
    shutil.rmtree(anew / "scores")
    shutil.copytree(base / "scores", anew / "scores")
    cut = make_run(tmp_path / "cut", "other", origins=PIECES)
    for run, why in ((removed, NO_SCORES), (anew, OTHER_SCORES), (cut, OTHER_DOCUMENTS)):
        rows = systems(compare([base, run]), run="other")
        assert set(rows["why"]) == {why}
        assert rows["change"].notna().all()
        assert rows["change_low"].isna().all()
    short = make_run(tmp_path / "short", origins=19, pieces=15)
    assert set(systems(compare([short, copied(short, tmp_path / "same")]), run="other")["why"]) == {FEW}


def test_few_documents_have_intervals_of_blocks_within_them(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, name, effect=n, origins=3) for n, name in enumerate(("base", "other"))]
    found = compare(runs)
    assert systems(found, run="other")["change_low"].notna().all()
    row = found.by_domain.set_index(["domain", "system"]).loc[("songs", "Dense (Balanced)")]
    logs = [
        pq.read_table(run / "scores" / "dense" / "songs.test" / "dense.parquet")["log_probability"].to_numpy()
        for run in runs
    ]
    less = (logs[0] - logs[1]).astype(np.float64)
    length = found.blocks["songs"]
    assert length == pytest.approx(len(less) ** 0.5, abs=3)
    generator, endless = np.random.default_rng(4), np.concatenate([less, less])
    begins = generator.integers(len(less), size=(4000, -(-len(less) // length)))
    means = endless[begins[..., None] + np.arange(length)].mean(axis=(1, 2))
    low, high = np.quantile(means, [0.025, 0.975])
    assert row["nats"] == pytest.approx(less.mean())
    assert (row["low"], row["high"]) == pytest.approx((low, high), abs=0.1 * (high - low))
    shown = " ".join(demix("compare", *runs).output.split())
    assert f"Within documents, by resampling blocks of their text: songs ({length} tokens)." in shown
    assert not compare([make_run(tmp_path / name) for name in ("one", "two")]).blocks


def test_settings_that_differ(base: Path, tmp_path: Path) -> None:
    changes = {
        "training": {"tokens": 1000, "sequences": 1, "learning_rate": 2e-3, "warmup": 0.1}, "seeds": [1, 2],
        "models": {"big": {"kind": "dense"}},
    }  # fmt: skip
    run = copied(base, tmp_path / "run", **changes)
    # No config may have one, but a run of somebody else's may.
    written_by_hand(run, tracking={"uri": "postgresql://me:secret@host/demix", "experiment": None})
    found = compare([base, run]).settings
    assert found.to_dict("index") == {
        "seeds": {"base": "[]", "other": "[1, 2]"},
        "training.learning_rate": {"base": "0.001", "other": "0.002"},
        "training.warmup": {"base": "0.08", "other": "0.1"},
        "models.big": {"base": "–", "other": '{"kind": "dense"}'},
        "tracking.uri": {"base": '"sqlite:///results/mlflow.db"', "other": '"postgresql://***@host/demix"'},
    }


def test_what_one_run_alone_has(base: Path, tmp_path: Path) -> None:
    fewer = make_run(
        tmp_path / "run", "fewer", models={"dense_unbalanced": None},
        domains=domains(("law",), ("songs", "news")),
    )  # fmt: skip
    found = compare([base, fewer])
    assert found.domains == {"training": ["law"], "novel": ["songs"]}
    assert found.left_out == ("news",)
    rows = systems(found, kind="training").reset_index().set_index(["system", "run"])
    assert np.isfinite(rows.loc[("Dense", "base"), "value"])
    assert np.isnan(rows.loc[("Dense", "fewer"), "value"])
    dense = rows.loc[("Dense (Balanced)", "base"), "value"]
    of = by_origin(base, "dense", ("dense",), "law").values()
    assert dense == pytest.approx(np.exp(sum(nats for _, nats in of) / sum(tokens for tokens, _ in of)))
    shown = demix("compare", str(base), str(fewer)).output
    assert re.search(r"│ Dense +│ +[\d.]+ │ +– │ +– │", shown), shown
    assert "Left out, since not all runs have them as the same kind: news." in shown


def test_a_row_of_another_kind_is_another_system(base: Path, tmp_path: Path) -> None:
    row = {"label": "mine"}
    runs = [
        copied(base, tmp_path / kind, kind, models={"mine": row | {"kind": kind}}) for kind in ("dense", "domain_token")
    ]  # fmt: skip
    rows = compare(runs).systems
    assert set(rows.loc[rows["system"].str.startswith("mine"), "system"]) == {"mine", "mine (naive)"}
    assert not rows.duplicated(["kind", "system", "run"]).any()


def test_runs_without_a_common_domain(base: Path, tmp_path: Path) -> None:
    found = compare([base, copied(base, tmp_path / "run", domains=domains(("other",), ("another",)))])
    assert found.systems.empty
    assert found.domains == {}
    done = demix("compare", str(base), str(tmp_path / "run"), "--html", str(tmp_path / "page.html"))
    assert done.exit_code == 0, done.output


def test_a_mean_needs_every_domain(base: Path, tmp_path: Path) -> None:
    run = copied(base, tmp_path / "run")
    table = read_parquet(run / "results.parquet")
    rows = table.to_pandas()
    rows = rows[(rows["model"] != "dense_unbalanced") | (rows["domain"] != "news")]
    write_parquet(table.from_pandas(rows, schema=table.schema, preserve_index=False), run / "results.parquet")
    found = systems(compare([base, run]), run="other", kind="training")
    assert found.loc["Dense", ["value", "change", "change_low"]].isna().all()
    assert found.drop("Dense")["change_low"].notna().all()


def test_spread_over_seeds(base: Path, tmp_path: Path) -> None:
    run = copied(base, tmp_path / "run", seeds=[1, 2])
    table = read_parquet(run / "results.parquet")
    rows = table.to_pandas()
    more = pd.concat([rows, rows.assign(seed=2, perplexity=rows["perplexity"] + 2)])
    write_parquet(table.from_pandas(more, schema=table.schema, preserve_index=False), run / "results.parquet")
    found = systems(compare([base, run]), run="other")
    assert found["spread"].to_numpy() == pytest.approx(np.sqrt(2))
    assert systems(compare([base, run]), run="base")["spread"].isna().all()
    assert f"± {np.sqrt(2):.2f}" in demix("compare", str(base), str(run)).output
    assert (found["change"] == 0).all()


def test_last_values_of_curves(both: Comparison) -> None:
    found = both.curves.set_index(["model", "run"]).loc[("demix", "other")]
    assert found.to_dict() == pytest.approx(
        {"loss": 5.7, "dev_loss": 5.5, "step": 3, "tokens": 300, "tokens_per_second": 4000}
    )
    assert list(both.curves["model"]) == ["demix", "demix", "dense", "dense"]


def test_the_page_stands_alone(base: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one name are told apart by their folders, which may have any name."""
    monkeypatch.chdir(tmp_path)
    for run, folder in ((base, "one"), (other, "<b>[red]x")):
        copied(run, tmp_path / folder, "same")
    done = demix("compare", "one", "<b>[red]x", "--html", "new/page.html")
    assert done.exit_code == 0, done.output
    assert "<b>[red]x" in done.output
    page = (tmp_path / "new" / "page.html").read_text()
    assert "<b>" not in page
    assert "&lt;b&gt;[red]x" in page
    assert not re.search(
        r"(src|href)=|https?:|//[a-z]|@import|url\((?!#)", re.sub(r"<script.*?</script>", "", page, flags=re.S)
    )
    assert page.count("<svg") == 2
    row = re.search(r"<th[^>]*>Dense \(Balanced\)</th>(.*?)</tr>", page)[1]
    expected = systems(compare([base, other]), run="other", kind="training").loc["Dense (Balanced)"]
    change = f"{expected['change']:+.2f}".replace("-", "−")
    interval = f"[{expected['change_low']:+.2f}, {expected['change_high']:+.2f}]".replace("-", "−")
    assert re.findall(r"<td[^>]*>([^<]+)", row)[2] == change
    assert f'<span class="beneath">{interval}</span>' in row


@pytest.mark.browser
def test_each_table_of_the_page_sorts_alone(both: Comparison, browser: webdriver.Chrome, tmp_path: Path) -> None:
    write_page(both, tmp_path / "page.html")
    browser.get((tmp_path / "page.html").as_uri())
    WebDriverWait(browser, 30).until(lambda _: len(browser.find_elements("css selector", "div.dt-container")) > 4)
    _, _, training, novel, *_ = browser.find_elements("css selector", "table")
    before = novel.text
    heading = training.find_elements("css selector", "thead th")[1]

    def numbers() -> list[float]:
        cells = training.find_elements("css selector", "tbody tr td:nth-of-type(1)")
        return [float(cell.text.split()[0]) for cell in cells]

    for turned in (False, True):
        heading.click()
        # The page sorts after it has handled the click.
        WebDriverWait(browser, 30).until(
            lambda _, turned=turned: numbers() == sorted(numbers(), reverse=turned), f"turned: {turned}"
        )
    assert novel.text == before
    assert len(browser.find_elements("css selector", "[aria-sort]")) == 1


def test_other_formats(base: Path, other: Path, both: Comparison) -> None:
    told = json.loads(demix("compare", str(base), str(other), "--format", "json").stdout)
    assert [run["name"] for run in told["runs"]] == ["base", "other"]
    assert told["runs"][1]["settings"] == config_fingerprint(read_run_config(other))
    (row,) = (
        row for row in told["systems"]
        if (row["system"], row["kind"], row["run"]) == ("DEMix (average)", "novel", "other")
    )  # fmt: skip
    assert row["change_low"] == systems(both, kind="novel", run="other").loc["DEMix (average)", "change_low"]
    text = demix("compare", str(base), str(other), "--format", "markdown").output
    assert "| DEMix (average)" in text.replace("\\", "")


def test_names_of_runs(base: Path, other: Path, tmp_path: Path) -> None:
    alike = copied(other, tmp_path / "run", "base")
    assert [run.name for run in compare([base, alike]).runs] == [str(base), str(alike)]
    settings = [config_fingerprint(read_run_config(run)) for run in (base, other, alike)]
    assert len(set(settings)) == 1, "these runs differ in what they learned by chance, and in their names"


def test_bad_input_is_one_line(base: Path, other: Path, tmp_path: Path) -> None:
    without = copied(base, tmp_path / "without")
    (without / "results.parquet").unlink()
    damaged = copied(base, tmp_path / "damaged")
    raw = bytearray((damaged / "results.parquet").read_bytes())
    raw[len(raw) // 2] ^= 1
    (damaged / "results.parquet").write_bytes(raw)
    scores = copied(other, tmp_path / "scores")
    file = scores / "scores" / "dense" / "law.test" / "dense.parquet"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    old = copied(base, tmp_path / "old")
    write_json(old / "config.json", {"format": 2})
    cases = {
        "needs two runs": [base],
        "is named twice": [base, base.parent / "." / "run"],
        "none/config.json: is missing": [base, tmp_path / "none"],
        "results.parquet: is missing": [base, without],
        "damaged/results.parquet: is damaged": [base, damaged],
        "dense.parquet: is damaged": [base, scores],
        "another version of demix": [base, old],
    }
    for message, runs in cases.items():
        with pytest.raises(DemixError, match=message) as error:
            compare(runs)
        assert "\n" not in str(error.value)
