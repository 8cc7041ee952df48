"""The paper's tables: numbers by hand, what is missing, what is not comparable, and the files written."""

import io
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from rich.console import Console
from scipy import stats

from demix.errors import DemixError
from demix.files import write_json, write_parquet
from demix.report import report_files, write_report
from demix.report.adapting import adaptation_table
from demix.report.item import Group
from demix.report.main_table import main_table
from demix.report.ranking import ranking
from demix.report.read import Parent, Results, read_audit, read_parents, read_results, read_trials
from support.cli import demix
from support.configs import changed
from support.report import names_of, table_of
from support.synthetic_run import DECAYS, DEV_BLOCKS, NOVEL, RELEASED_SCORER, TRAINING, MadeUp, base, build_run


@pytest.fixture(scope="module")
def run(made_up: MadeUp) -> MadeUp:
    return made_up


def write_all(run: MadeUp, output: Path) -> Path:
    write_report(run.run, output)
    return output


def test_table3_is_the_plain_mean_over_training_domains(run: MadeUp) -> None:
    frame = table_of("table3", run.material()).frame
    assert frame["Perplexity"].to_dict() == pytest.approx(
        {
            "Dense": 110 * 1.4,
            "Dense (Balanced)": 110 * 1.3,
            "+ Domain Token": 110 * 1.2,
            "DEMix (naive)": 110.0,
            "DEMix (cached prior)": 110 * 1.01,
            "DEMix (cached prior), released scorer": 110 * 1.01 * 1.03 * RELEASED_SCORER,
            "DEMix (tempered)": 110 * 1.05 * 0.97,
            "DEMix (switching)": 110 * 1.03 * 0.96,
        }
    )
    assert frame.loc["DEMix (naive)", "Against Dense (Balanced), %"] == pytest.approx(100 * (1 / 1.3 - 1))
    better = ["0 of 3", "", *["3 of 3"] * 3, "0 of 3", *["3 of 3"] * 2]
    assert frame["Domains better than Dense (Balanced)"].tolist() == better


def test_table4_shows_every_training_domain_and_its_mean(run: MadeUp) -> None:
    frame = table_of("table4", run.material()).frame
    assert list(frame.columns) == ["Mean", *TRAINING]
    assert frame.loc["Dense"].tolist() == pytest.approx([154.0, 140.0, 154.0, 168.0])
    assert frame.loc["DEMix (cached prior)"].tolist() == pytest.approx([111.1, 101.0, 111.1, 121.2])


def test_table5_has_ten_systems_two_rules_beyond_the_paper_and_the_released_scorer(run: MadeUp) -> None:
    table = table_of("table5", run.material())
    assert len(table.frame) == 10 + 2 + 3
    assert list(table.frame.columns) == ["Mean", *NOVEL]
    expected = {
        "Dense": 1.4,
        "Dense (Balanced)": 1.3,
        "+ Domain Token (oracle)": 1.2,
        "DEMix (naive, oracle)": 1.25,
        "DEMix (average)": 1.5 * 1.15,
        "DEMix (uniform prior)": 1.05 * 1.15,
        "DEMix (updating prior)": 1.02 * 1.15,
        "DEMix (cached prior)": 1.01 * 1.15,
        "DEMix (uniform prior), released scorer": 1.05 * 1.15 * 1.03,
        "DEMix (cached prior), released scorer": 1.01 * 1.15 * 1.03 * RELEASED_SCORER,
        "DEMix (tempered)": 1.05 * 0.97 * 1.15,
        "DEMix (switching)": 1.03 * 0.96 * 1.15,
    }
    for label, factor in expected.items():
        assert table.frame.loc[label].tolist() == pytest.approx([135 * factor, 130 * factor, 140 * factor]), label


def test_table5_never_prints_an_oracle_bold(tmp_path: Path) -> None:
    run = build_run(tmp_path, change=lambda key, value: value / 2 if key.method == "naive" else value)
    table = table_of("table5", run.material())
    assert not table.bold().filter(like="oracle", axis=0).to_numpy().any()
    assert table.bold().loc["+ Domain Token (chosen on dev)"].all()


def test_table6_compares_few_and_many_experts(run: MadeUp) -> None:
    frame = table_of("table6", run.material()).frame
    assert list(frame.index) == [
        *TRAINING,
        "Mean of 3 training",
        "Mean of 3 training, released weights",
        *NOVEL,
        "Mean of 2 novel",
        "Mean of 2 novel, released weights",
    ]
    assert frame.loc["law"].tolist() == pytest.approx([111.1, 111.1, 0.0, 50, 60])
    assert frame.loc["Mean of 2 novel"].tolist()[:3] == pytest.approx(
        [135 * 1.01 * 1.15, 135 * 1.01, 100 * (1 / 1.15 - 1)]
    )


def test_table7_tells_of_a_seed_that_has_seen_the_domain(run: MadeUp) -> None:
    rows = {"seeded": {"kind": "demix", "parent": "dense", "seed_tokens": 500}}
    seeded = changed(run.run, models=rows)
    removing = changed(seeded, removal={"model": "seeded"})
    weakens = "DEMix, seed 500 and −Domain began with what the model dense had learned of every domain in its first 500"
    assert sum(weakens in note for note in table_of("table7", run.material(removing)).notes) == 1
    assert not any("seed that has seen" in note for note in table_of("table7", run.material(seeded)).notes)


def test_table7_averages_only_what_can_be_compared(run: MadeUp) -> None:
    table = table_of("table7", run.material())
    frame = table.frame
    assert frame.loc["law"].tolist() == pytest.approx([110 * 1.01, 110 * 1.8, 110 * 1.9, 50, 60])
    assert frame.loc["Mean of all 3"].tolist()[:2] == pytest.approx([110 * 1.01, 110 * 1.8])
    assert pd.isna(frame.loc["Mean of all 3", "−Domain"])
    assert frame.loc["Mean of the 1 that have all three"].tolist()[:3] == pytest.approx(frame.loc["law"].tolist()[:3])
    assert table.text().loc["code", "−Domain"] == "–"
    assert "1 of the 3 domains" in table.notes[0]
    assert "puts a replacement (songs) in" in table.notes[0]
    alone = changed(run.run, removal={"replacement": None})
    assert "the model 1/3 fewer in all; it is run for 1" in table_of("table7", run.material(alone)).notes[0]


def test_table13_shows_forgetting_and_adaptation(run: MadeUp) -> None:
    found = read_parents(run.path / "models" / "demix" / "experts", list(NOVEL))
    assert found == {"wiki": Parent("code"), "songs": Parent("law")}
    table = table_of("table13", run.material(parents=found))
    frame = table.frame
    for label in NOVEL:
        row = frame.loc[label].tolist()
        assert row[:4] == pytest.approx([20.0, 100 * (1.1 / 1.3 - 1), 0.0, 100 * (1 / 1.25 - 1)])
        # One expert added to the mixture: nothing on the training domains, and what the new expert gains on its own.
        assert row[4:6] == pytest.approx([0.0, 100 * (1 / 1.15 - 1)])
    assert "Dense-DAPT starts from Dense (Balanced)" in table.notes[0]
    assert "adapted to, DEMix-DAPT ends lower for 2 of 2 domains (mean 135.0, Dense-DAPT 148.5); on" in table.caption
    assert "training domains, DEMix-DAPT ends lower for 2 of 2 domains (mean 110.0, Dense-DAPT 171.6)" in table.caption
    beneath = table.second_lines()
    assert beneath.loc["wiki"].tolist()[:4] == [
        "143.00 to 171.60", "169.00 to 143.00", "110.00 to 110.00", "162.50 to 130.00",
    ]  # fmt: skip
    assert beneath.loc["Mean of 2", "Dense-DAPT: own domain"] == "175.50 to 148.50"
    assert frame["Parent expert"].tolist()[:2] == ["code", "law"]
    assert frame.loc["Mean of 2"].tolist()[:4] == pytest.approx(frame.loc["wiki"].tolist()[:4])


def test_top_k_and_dev_rows_are_no_part_of_the_paper_tables(run: MadeUp) -> None:
    extra = run.results.rows.assign(perplexity=1.0)
    others = [extra.assign(top_k=2), extra.assign(split="dev"), extra.assign(variant="decay")]
    rows = Results(pd.concat([run.results.rows, *others], ignore_index=True))
    for name in ("table3", "table4", "table5", "table6", "table7"):
        found, wanted = (table_of(name, run.material(results=results)).frame for results in (rows, run.results))
        pd.testing.assert_frame_equal(found, wanted)


def test_a_run_with_little_names_what_has_no_numbers(tmp_path: Path) -> None:
    only, added = {"dense", "demix"}, ("all", "plus-")
    run = build_run(
        tmp_path,
        retrained=(),
        change=lambda key, v: v if key.model in only and not key.experts.startswith(added) else None,
    )
    tables = write_all(run, tmp_path / "report") / "tables"
    assert not re.search(r"\| Dense +\|", (tables / "table3.md").read_text())
    assert "Without numbers in this run: Dense, + Domain Token." in (tables / "table3.md").read_text()
    assert "Without numbers in this run: −Domain." in (tables / "table7.md").read_text()
    assert "This run has no rows for this table." not in (tables / "table7.md").read_text()
    assert "run for none of the domains" in (tables / "table7.md").read_text()
    assert "This run has no rows for this table." in (tables / "table13.md").read_text()


def test_a_run_without_novel_domains_and_with_none_of_the_rows(tmp_path: Path) -> None:
    run = build_run(tmp_path, novel=(), retrained=(), change=lambda key, v: v if key.domain == "law" else None)
    output = write_all(run, tmp_path / "report")
    files = {path.relative_to(output).as_posix() for path in output.rglob("*.*")}
    assert files == set(report_files(run.run))
    assert not files & {"tables/table5.md", "figures/figure6.svg", "tables/audit.tex"}
    assert "–" in (output / "tables" / "table3.md").read_text()
    empty = build_run(tmp_path / "empty", change=lambda key, v: v if key.domain == "wiki" else None)
    write_all(empty, tmp_path / "empty" / "report")


def test_an_interval_or_a_dash_stands_beneath(run: MadeUp) -> None:
    table = table_of("table4", run.material())
    assert table.second_lines().loc["Dense"].tolist() == ["", "–", "[138.60, 184.80]", "–"]
    assert table.notes[-1] == "Test documents (and their pieces): code 7 (60), law 50 (60), news 7 (60)."
    assert table_of("table5", run.material()).second_lines().loc["Dense"].tolist() == ["", "[163.80, 218.40]", "–"]
    none = Results(run.results.rows.assign(perplexity_low=math.nan, perplexity_high=math.nan))
    assert set(table_of("table4", run.material(results=none)).second_lines().to_numpy().ravel()) == {""}
    assert "No domain has the 20 test documents" in table_of("table4", run.material(results=none)).notes[0]


def test_grids_are_means_of_their_own_rows(run: MadeUp) -> None:
    decay, blocks = table_of("decay", run.material()), table_of("dev_blocks", run.material())
    assert list(decay.frame.index) == ["0.1", "0.3", "0.9"]
    assert decay.frame["cached prior, 3 training"].tolist() == pytest.approx([111.1 * f for f in DECAYS.values()])
    assert decay.frame["updating prior, 2 novel"].tolist() == pytest.approx(
        [135 * 1.02 * 1.15 * f for f in DECAYS.values()]
    )
    assert "cached prior, 3 training: 0.3" in decay.notes[1]
    assert list(blocks.frame.index) == ["1", "10", "100"]
    assert blocks.frame["cached prior, 3 training"].tolist() == pytest.approx([111.1 * f for f in DEV_BLOCKS.values()])


def test_a_domain_with_little_dev_text_has_all_of_it_in_larger_priors(run: MadeUp) -> None:
    rows = run.results.rows
    short = (rows["variant"] == "dev_blocks") & (rows["domain"] == "law")
    rows = Results(rows[~(short & (rows["dev_blocks"] == 100))])
    found = table_of("dev_blocks", run.material(results=rows)).frame["cached prior, 3 training"]
    assert found["100"] == pytest.approx((101 + 111.1 * DEV_BLOCKS[10] + 121.2) / 3)


def test_released_weights_and_scorer_are_held_against_history(run: MadeUp) -> None:
    frame = table_of("weights", run.material()).frame
    change = frame["training: against history, %"]
    assert change["DEMix (cached prior, released weights)"] == pytest.approx(3)
    assert change["DEMix (cached prior, released scorer)"] == pytest.approx(100 * (1.03 * RELEASED_SCORER - 1))
    assert math.isnan(change["DEMix (cached prior, history)"])
    assert "DEMix (uniform prior, released scorer)" not in frame.index
    windows = run.results.rows.query("weights == 'history' and variant == ''").assign(weights="4")
    found = table_of("weights", run.material(results=Results(pd.concat([run.results.rows, windows])))).frame
    assert found.loc["DEMix (cached prior, last 4 tokens)", "Mean of 3 training"] == pytest.approx(111.1)


def test_the_full_table_has_every_system_once(run: MadeUp) -> None:
    frame = table_of("full", run.material()).frame
    assert not frame.duplicated(["Domain", "System"]).any()
    row = frame[(frame["Domain"] == "law") & (frame["System"] == "Dense")].iloc[0]
    assert row[["Perplexity", "Low", "High", "Documents"]].tolist() == pytest.approx([154, 138.6, 184.8, 50])
    assert row["Bits per byte"] == pytest.approx(math.log2(154) / 3)
    assert "DEMix (naive), chosen on dev" in set(frame.loc[frame["Domain"] == "wiki", "System"])


def test_differences_are_named_as_in_the_tables(run: MadeUp) -> None:
    frame = table_of("differences", run.material()).frame
    of_naive = frame[(frame["Domain"] == "law") & (frame["System"] == "DEMix (naive)")].set_index("Less")
    assert list(of_naive.index) == ["Dense", "Dense (Balanced)", "DEMix (cached prior)"]
    on_novel = frame.loc[frame["Domain"] == "wiki", "System"]
    assert {"DEMix (naive), oracle", "+ Domain Token, oracle"} <= set(on_novel)
    assert not on_novel.str.endswith("chosen on dev").any()
    row = of_naive.loc["Dense (Balanced)"]
    assert row["Nats a token"] == pytest.approx(-math.log(1.3))
    assert row["Perplexity low"] == pytest.approx((110 - 143) * 1.05)
    for column in ("model", "domain", "against"):
        strange = pd.concat([run.differences, run.differences.iloc[:2].assign(**{column: "none_such"})])
        with pytest.raises(DemixError, match=r"differences\.parquet: 2 rows are of systems that no table has"):
            table_of("differences", run.material(differences=strange))


def test_sums_of_released_weights_stand_where_the_paper_mixes(run: MadeUp) -> None:
    frame = table_of("table7", run.material()).frame
    label = "Mean of all 3, released weights"
    assert frame.loc[label, "+Expert"] == pytest.approx(110 * 1.01 * 1.03)
    assert pd.isna(frame.loc[label, "−Domain"])
    six = table_of("table6", run.material()).frame
    assert six.loc["Mean of 2 novel, released weights"].tolist()[:2] == pytest.approx(
        [135 * 1.01 * 1.15 * 1.03, 135 * 1.01 * 1.03]
    )


def test_the_audit_sets_train_beside_test(run: MadeUp, tmp_path: Path) -> None:
    found = pd.DataFrame(
        [("law", "minus", "demix", split, document, matched, matched / 50, 100.0 - matched)
         for split, counts in (("train", (10, 20)), ("test", (2, 4))) for document, matched in enumerate(counts)],
        columns=["domain", "system", "model", "split", "document", "matched", "share", "nll"],
    )  # fmt: skip
    row = table_of("audit", run.material(audit=found)).frame.loc["law, without its expert"]
    assert row.tolist() == pytest.approx([15, 3, 30, 6, 85, 97, 2, 2])
    assert not len(table_of("audit", run.material(audit=read_audit(tmp_path / "none.parquet"))).frame)


def test_learning_rates_of_adaptation_stand_side_by_side(run: MadeUp, tmp_path: Path) -> None:
    """Two domains, a factor that was chosen for one of them, and one that diverged."""
    for domain, chosen in (("wiki", 1.0), ("songs", 0.1)):
        start = {f"dev_loss/{name}": math.log(100) for name in (*TRAINING, domain)}
        trials = [
            {"learning_rate_factor": 0.1, "start": start, "best": start | {f"dev_loss/{domain}": math.log(90)}},
            {"learning_rate_factor": 1.0, "start": start, "best": dict.fromkeys(start, math.log(80))},
            {"learning_rate_factor": 9.0, "diverged": "the loss is not finite"},
        ]
        card = {"trials": trials, "adaptation": {"learning_rate_factor": chosen}}
        write_json(tmp_path / f"dense-dapt-{domain}" / "model.json", card)
    table = table_of("rates", run.material(trials=read_trials(tmp_path, run.run)))
    assert table.frame.loc["Dense-DAPT, 0.1 of the rate"].tolist() == pytest.approx([0, -10, 2, 1])
    assert table.frame.loc["Dense-DAPT, 1 of the rate"].tolist() == pytest.approx([-20, -20, 2, 1])
    assert table.text().loc["Dense-DAPT, 9 of the rate"].tolist() == ["–", "–", "2", "0"]


def two_sided(statistic: Callable[[tuple[int, ...]], float], count: int) -> float:
    """The share of all orders that are at least as far out, twice: what an exact permutation test gives."""
    found = np.array([statistic(order) for order in itertools.permutations(range(count))])
    at_least, at_most = (found >= found[0] - 1e-12).mean(), (found <= found[0] + 1e-12).mean()
    return min(1.0, 2 * min(at_least, at_most))


def test_overlap_is_told_with_the_p_value_of_permuted_domains(tmp_path: Path) -> None:
    training = (*TRAINING, "art")
    generator = np.random.default_rng(0)
    factors = {(domain, expert): generator.uniform(1.1, 4) for domain in (*training, *NOVEL) for expert in training}
    run = build_run(
        tmp_path,
        training=training,
        change=lambda key, value: value * factors.get((key.domain, key.expert), 1) if key.method == "expert" else value,
    )
    frame = table_of("overlap", run.material()).frame
    assert list(frame.index) == ["training domains", "novel domains", "training domains, own experts too"]
    assert frame["Pairs"].tolist() == [12, 8, 16]

    rows = run.results.rows.query("model == 'demix' and experts == 'all' and method == 'expert'")
    perplexities = rows[rows.variant == ""].pivot(index="domain", columns="expert", values="perplexity")[list(training)]
    shares = run.overlap.pivot(index="domain", columns="expert", values="overlap")[list(training)]
    for label, domains in (("training domains", training), ("novel domains", NOVEL)):
        table, shared = perplexities.loc[list(domains)].to_numpy(), shares.loc[list(domains)].to_numpy()
        own = np.eye(len(domains), dtype=bool) if domains == training else np.zeros(table.shape, bool)
        ratio = np.log(table / (np.diag(table) if domains == training else table.min(1))[:, None])

        def moved(order: tuple[int, ...], ratio=ratio, shared=shared, own=own) -> float:
            rows = ratio[list(order)]
            return stats.spearmanr(shared[~own], (rows[:, list(order)] if own.any() else rows)[~own]).statistic

        expected = {
            "Spearman": stats.spearmanr(shared[~own], ratio[~own]).statistic,
            "p of Spearman, domains permuted": two_sided(moved, len(domains)),
        }
        assert frame.loc[label, list(expected)].to_dict() == pytest.approx(expected)
        assert len({round(value, 6) for value in expected.values()}) == len(expected)
    table, shared = (one.loc[list(training)].to_numpy() for one in (perplexities, shares))
    pearson = stats.pearsonr(shared.ravel(), np.log(table / np.diag(table)[:, None]).ravel())
    with_own = frame.loc["training domains, own experts too", "Pearson (log ratio)"]
    assert with_own == pytest.approx(pearson.statistic)


def test_dense_dapt_is_compared_with_the_model_that_it_starts_from(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    rows = run.results.rows
    renamed = Results(rows.assign(model=rows["model"].str.replace("dense-dapt", "dense_unbalanced-dapt")))
    table = table_of(
        "table13", run.material(changed(run.run, adaptation={"dense": "dense_unbalanced"}), results=renamed)
    )
    assert table.frame.loc["wiki"].tolist()[:2] == pytest.approx([100 * (1.3 * 1.2 / 1.4 - 1), 100 * (1.1 / 1.4 - 1)])
    assert "Dense-DAPT starts from Dense and" in table.notes[0]


def test_dev_blocks_say_what_the_last_one_weighs(run: MadeUp) -> None:
    for decay, told in ((0.3, "last block alone weighs 0.70"), (1.0, "all blocks weigh alike")):
        other = changed(run.run, evaluation={"decay": decay})
        assert told in table_of("dev_blocks", run.material(other)).notes[-1]


def test_different_tokens_are_never_compared(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    rows = run.results.rows.copy()
    rows.loc[(rows["model"] == "dense") & (rows["domain"] == "law"), "tokens_sha256"] = "other"
    with pytest.raises(DemixError, match=r"law\.test over 2 different token sequences"):
        Results(rows)


def test_doubled_and_lacking_rows_are_named(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    doubled = pa.Table.from_pandas(pd.concat([run.results.rows, run.results.rows[:1]]), preserve_index=False)
    write_parquet(doubled, tmp_path / "doubled.parquet")
    with pytest.raises(DemixError, match=r"doubled\.parquet: holds rows of code twice"):
        read_results(tmp_path / "doubled.parquet")
    with pytest.raises(DemixError, match="missing"):
        read_results(tmp_path / "none.parquet")
    with pytest.raises(DemixError, match="has no column"):
        read_results(tmp_path / "priors.parquet")


def test_files_are_the_same_bytes_again_and_hold_the_numbers(run: MadeUp, tmp_path: Path) -> None:
    first, second = write_all(run, tmp_path / "a"), write_all(run, tmp_path / "b")
    assert {path.relative_to(first).as_posix() for path in first.rglob("*.*")} == set(report_files(run.run))
    for name in report_files(run.run):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    html = (first / "tables" / "table4.html").read_text()
    row = re.search(r'<th scope="row" data-order="0">Dense</th>(.*?)</tr>', html).group(1)
    numbers = re.findall(r"<td[^>]*>([^<]+)", row)
    assert numbers[:6] == ["154.00", "140.00", "154.00", "168.00", "13.8", "11.8"]
    assert '154.00<span class="beneath">[138.60, 184.80]</span>' in row
    assert not re.search(r"(src|href)=|https?://", html)
    assert "**108.77**" in (first / "tables" / "table4.md").read_text()
    assert "Dense (Balanced) & 143.00" in (first / "tables" / "table3.tex").read_text()
    for name in names_of(Group.PAPER, Group.FURTHER):
        text = (first / "tables" / f"{name}.tex").read_text()
        assert text.isascii(), name
        for suffix in ("html", "md", "tex"):
            note = (first / "tables" / f"{name}.{suffix}").read_text()
            assert "Differs from the paper in data, budget and scale" in note
            assert "2,457,600 training tokens" in note


def test_adaptation_has_gains_and_costs_side_by_side(run: MadeUp) -> None:
    frame = adaptation_table(run.material()).frame
    assert list(frame.index) == ["Dense-DAPT", "DEMix-DAPT", "One expert added"]
    columns = [f"{domains}, {when}" for domains in ("2 novel", "3 training") for when in ("before", "after")]
    assert list(frame.columns) == [*columns, "bytes changed"]
    # Three layers of width 128, 256 positions, 4,096 types.
    expert = 3 * (8 * 128**2 + 5 * 128)
    whole = (4096 + 256) * 128 + 3 * (4 * 128**2 + 4 * 128 + 4 * 128) + 2 * 128 + expert
    assert frame.loc["Dense-DAPT"].tolist() == pytest.approx([135 * 1.3, 135 * 1.1, 143, 171.6, 4 * whole])
    assert frame.loc["DEMix-DAPT"].tolist() == pytest.approx([135 * 1.25, 135, 110, 110, 4 * expert])
    before, after = 135 * 1.01 * 1.15, 135 * 1.01
    assert frame.loc["One expert added"].tolist() == pytest.approx([before, after, 111.1, 111.1, 4 * expert])
    shown = demix("summary", run.path).output
    found = ranking(run.material())
    assert shown.split()[: len(found.verdict.split())] == found.verdict.split()
    assert all(remark.split()[-1] in shown for remark in found.remarks)
    assert "Adapting to one novel domain" in shown
    assert f"{4 * whole:,}" in shown


def test_main_table_for_the_terminal(run: MadeUp) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(main_table(run.material()))
    text = console.export_text()
    lines = {tuple(re.split(r"\s*│\s*", line.strip("│ "))[:2]): line for line in text.splitlines() if "│" in line}
    assert "110.00" in lines[("DEMix (naive)", "")]
    assert f"{135 * 1.25:.2f} *" in lines[("DEMix (naive)", "")]
    assert f"{110 * 1.01:.2f}" in lines[("DEMix (cached prior)", "history")]
    assert f"{110 * 1.01 * 1.03:.2f}" in lines[("DEMix (cached prior)", "released")]
    assert base("law") == 110
