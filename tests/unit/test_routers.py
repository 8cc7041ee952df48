"""Loads of routers by domain: counted by plain loops, told in a table and a figure; token-routed rows in claims."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.metrics import mutual_info_score

from demix.config.architecture import Architecture
from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError
from demix.evaluate import score_tables
from demix.evaluate.loads import write_loads
from demix.evaluate.score import Scoring
from demix.files import read_parquet, write_json_lines, write_parquet
from demix.model.gpt import GPT
from demix.report.claims import claims
from demix.report.results import Results
from demix.report.routers import read_loads, told
from demix.report.verdict import Claim
from support.configs import changed
from support.families_run import MODELS, SEED, build_families
from support.models import model_of, save_model
from support.report import drawn, table_of
from support.synthetic_run import NOVEL, TRAINING, MadeUp, base
from support.tokens import TRAINING as LEARNED

SCORING = Scoring(dev_blocks=3, test_tokens=300, precision="fp32", threads=1)
TOP2 = {"experts": 4, "top_k": 2, "every": 2, "capacity": 0.5, "balance": 0.01}
SWITCH = {"kind": "routed", "label": "switch", "experts": 4}
UPCYCLED = {"kind": "routed", "label": "upcycled", "experts": 3, "top_k": 2, "every": 2, **SEED}


def saved(tokens: Path, path: Path, **architecture: Any) -> GPT:
    """A model with random weights in the folder `path`."""
    shard = TokenShard.open(tokens / "tokens" / LEARNED[0] / "test.arrow")
    sizes = Architecture(4, 16, 2, 32, **architecture)
    model = model_of(dtype=torch.float32, architecture=sizes, vocab_size=shard.vocab_size)
    save_model(model, path, shard.tokenizer_sha256)
    return model


def test_loads_are_those_of_a_loop_over_tokens(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tokens, tmp_path / "models" / "x", routed=TOP2)
    shards = [tokens / "tokens" / LEARNED[0] / "test.arrow", tokens / "tokens" / LEARNED[1] / "dev.arrow"]
    monkeypatch.setattr(score_tables, "ROW_GROUP_TOKENS", 128)
    write_loads(tmp_path / "models" / "x", shards, SCORING, tmp_path / "loads" / "x.parquet")
    found = read_parquet(tmp_path / "loads" / "x.parquet").to_pandas().set_index(["domain", "layer", "expert"])
    assert set(found.index.get_level_values("layer")) == {2, 4}
    for shard, count in zip(shards, (300, 96), strict=True):
        expected = np.zeros((5, 4), int)
        inputs, _, mask = blocks(TokenShard.open(shard), 32, count)
        with torch.no_grad():
            for row, there in zip(inputs, mask, strict=True):
                x = model.token_embedding[torch.from_numpy(row)[None, None]] + model.position_embedding[:32]
                for layer, block in enumerate(model.blocks, start=1):
                    if layer % 2 == 0:
                        state = torch.nn.functional.layer_norm(
                            x + block.attention(block.attention_norm(x), None, None), (16,)
                        )
                        normed = state * block.feedforward_norm.weight + block.feedforward_norm.bias
                        logits = normed[0, 0] @ block.feedforward.router[0].T
                        for position in np.flatnonzero(there):
                            for expert in logits[position].argsort(descending=True)[:2].tolist():
                                expected[layer, expert] += 1
                    x = block(x)
        for layer in (2, 4):
            assert found.loc[(shard.parent.name, layer), "choices"].tolist() == expected[layer].tolist()
            assert expected[layer].sum() == 2 * count
            assert expected[layer].max() > 0.5 * 2 * count / 4, "more than the capacity of training would let in"


def test_a_model_without_routers_has_no_loads(tokens: Path, tmp_path: Path) -> None:
    saved(tokens, tmp_path / "x")
    with pytest.raises(DemixError, match="has no layer whose tokens choose experts"):
        write_loads(tmp_path / "x", [tokens / "tokens" / LEARNED[0] / "test.arrow"], SCORING, tmp_path / "l.parquet")
    assert not (tmp_path / "l.parquet").exists()


def test_what_a_choice_tells_of_the_domain() -> None:
    counts = np.random.default_rng(1).integers(1, 50, (3, 4)) * np.array([[1], [3], [2]])
    equal = counts * np.prod(counts.sum(1)) // counts.sum(1, keepdims=True)
    shares = pd.DataFrame(equal / equal.sum(1, keepdims=True))
    assert told(shares, 1) == pytest.approx(mutual_info_score(None, None, contingency=equal) / np.log(3))
    assert told(pd.DataFrame(np.eye(3)), 1) == pytest.approx(1)
    assert told(pd.DataFrame(np.full((3, 4), 0.25)), 1) == pytest.approx(0)
    assert told(pd.DataFrame(np.repeat(np.eye(4), 2, axis=1) / 2), 2) == pytest.approx(1), "a pair for each domain"
    assert np.isnan(told(pd.DataFrame(np.ones((3, 1))), 1))
    assert np.isnan(told(pd.DataFrame(np.full((3, 2), 0.5)), 2)), "both experts see every token"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    """The made-up run of families with two routed rows, which DEMix from scratch and with a seed beat."""
    run = build_families(tmp_path_factory.mktemp("run"))
    rows = {"switch": SWITCH, "upcycled": UPCYCLED, "longer": SWITCH | {"label": "longer", "match": "updates"}}
    dense = run.results.rows.query("model == 'dense'")
    more = [dense.assign(model=row, perplexity=[base(domain) * 1.2 for domain in dense["domain"]]) for row in rows]
    experts = {name: row["experts"] for name, row in rows.items()} | {"demix_seeded-routed": 3}
    for model, number_of in experts.items():
        layers = (2,) if model == "upcycled" else (1, 2, 3)
        loads = [
            {"domain": domain, "layer": layer, "expert": expert, "choices": 1 + 99 * (expert == number % 3) * layer}
            for number, domain in enumerate((*TRAINING, *NOVEL))
            for layer in layers
            for expert in range(number_of)
        ]
        write_parquet(pa.Table.from_pylist(loads), run.path / "loads" / f"{model}.parquet")
        lines = [{"step": step, "tokens": step, "router_dropped": step / 100} for step in range(1, 21)]
        if model in rows:
            write_json_lines(run.path / "metrics" / f"{model}.jsonl", lines)
    more_rows = changed(run.run, models=MODELS | rows)
    return replace(run, run=more_rows, results=Results(pd.concat([run.results.rows, *more], ignore_index=True)))


def test_the_table_of_routers(made: MadeUp) -> None:
    frame = table_of("routers", made.material(loads=read_loads(made.run))).frame
    assert frame.loc["upcycled", ["A token chooses", "Routed layers"]].tolist() == ["2 of 3", 1]
    # Of layer 2: 199 of 201 choices of each domain fall on an expert of its own.
    own = np.array([199, 1, 1]) / 201
    tells = 100 * (np.log(3) + (own * np.log(own)).sum()) / np.log(3 / 2)
    assert frame.at["upcycled", "Told of the domain, %"] == pytest.approx(tells)
    assert frame.at["upcycled", "Effective experts"] == pytest.approx(3)
    assert frame.at["upcycled", "Busiest expert, times an equal share"] == pytest.approx(1)
    assert frame.at["upcycled", "Dropped in training, %"] == pytest.approx(19.5)
    assert frame.at["demix_seeded, merged-routed", "A token chooses"] == "2 of 3"
    assert np.isnan(frame.at["demix_seeded, merged-routed", "Dropped in training, %"]), "nothing was trained"
    assert frame.at["switch", "in the layer that tells most, %"] > frame.at["switch", "Told of the domain, %"]


def test_the_figure_has_a_map_for_each_model_and_layer(made: MadeUp) -> None:
    figure = drawn("router_loads", made.material())
    headings = [row["hconcat"][0]["title"]["text"] for row in figure["concat"]]
    assert [heading.split(":")[0] for heading in headings] == [
        *(f"switch, layer {layer}" for layer in (1, 2, 3)),
        "upcycled, layer 2",
        *(f"longer, layer {layer}" for layer in (1, 2, 3)),
        *(f"demix_seeded, merged-routed, layer {layer}" for layer in (1, 2, 3)),
    ]
    values = [row for rows in figure["datasets"].values() for row in rows]
    assert {row["expert"] for row in values} == {*TRAINING, "0", "1", "2", "3"}, "merged experts have names"
    shown = [row["value"] for row in values if row["domain"] == TRAINING[1] and row["expert"] == "1"]
    # Of four experts, the first layer's own one gets 100 of 103 choices. Equal maps share their numbers.
    assert sorted(shown) == pytest.approx(sorted([100 / 103, 199 / 202, 298 / 301, 199 / 201]), abs=1e-5)


def judged(run: MadeUp) -> dict[str, Claim]:
    return {claim.name: claim for claim in claims(run.material())}


def test_domain_experts_meet_routed_rows_of_equal_flops_that_begin_alike(made: MadeUp) -> None:
    found = judged(made)
    claim, clusters = (found[name] for name in ("domain_experts_against_token_routed", "clusters_against_upcycling"))
    seeded = [f"{row} (cached prior) against upcycled" for row in ("demix_seeded", "btm")]
    told = [re.sub(r" [\d.]+( |$)", " ", part.sentence.split(" (−")[0]).strip() for part in claim.parts]
    assert told == 2 * ["DEMix (cached prior) against switch", *seeded], "on training domains, then on novel ones"
    assert claim.verdict == clusters.verdict == "shown"
    assert "cbtm_3 (cluster) " in clusters.numbers
    assert "cbtm_2_short" not in clusters.numbers, "it has fewer tokens and no seed"


def test_rows_of_more_flops_or_another_beginning_meet_no_domain_experts(made: MadeUp) -> None:
    rows = {"switch": None, "upcycled": None, "later": UPCYCLED | {"label": "later", "seed_tokens": 409600}}
    found = judged(replace(made, run=changed(made.run, models=rows)))
    assert not {"domain_experts_against_token_routed", "clusters_against_upcycling"} & found.keys()
    assert "btm_against_dense" in found


def test_a_damaged_file_of_loads_is_named(made: MadeUp, tmp_path: Path) -> None:
    with pytest.raises(DemixError, match=r"loads/other\.parquet"):
        read_loads(changed(made.run, models={"other": SWITCH | {"label": "other"}}))
