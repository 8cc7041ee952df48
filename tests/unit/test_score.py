"""Score tables: streamed in row groups, resumed after a kill with the same bytes, and added to without a touch."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import demix.evaluate.score as module
from demix.config.architecture import Architecture
from demix.data.shards import TokenShard, blocks, tokenize
from demix.evaluate import score_tables as tables
from demix.evaluate.score import Scoring
from demix.evaluate.score_tables import read_scores
from demix.files import atomic as files
from demix.files import sha256_file, write_parquet
from demix.model.directory import describe, load_model, save_expert, save_manifest
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities, trunk_log_probabilities
from support.cli import succeeds
from support.contents import contents
from support.errors import refused
from support.forks import FORKS
from support.models import count_whole_models, own_tensors, save_model, write_trunks
from support.scored import score
from support.tokens import NOVEL, TRAINING

EXPERTS = ("law", "lore", "news")
# Of 32 tokens: 10 dev blocks and 10 test blocks, the last of them short, in row groups of 4, 4 and 2.
SCORING = Scoring(dev_blocks=10, test_tokens=300, precision="fp32", threads=1)
GROUP = 4 * 32


@pytest.fixture
def model(tokens: Path, tmp_path: Path) -> Path:
    """A model directory with the experts `EXPERTS`, which differ."""
    shard = TokenShard.open(tokens / "tokens" / NOVEL[0] / "dev.arrow")
    gpt = GPT(Architecture(layers=2, width=16, heads=2, context=32), shard.vocab_size, EXPERTS).initialise(1)
    for tensor in own_tensors(gpt).values():
        for number in range(len(EXPERTS)):
            tensor.data[number] += 0.1 * number
    directory = tmp_path / "model"
    save_model(gpt, directory, shard.tokenizer_sha256)
    return directory


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP_TOKENS", GROUP + 31)


def shards_of(tokens: Path, domain: str = NOVEL[0]) -> list[Path]:
    return [tokens / "tokens" / domain / f"{split}.arrow" for split in ("dev", "test")]


def scored_at(place: Any, name: str, at: int, do: Callable[[], None]) -> None:
    """Let `place.name` call `do` before its call number `at`."""
    function, calls = getattr(place, name), iter(range(1, 1 << 20))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            do()
        return function(*args, **kwargs)

    setattr(place, name, call)


def run_until(place: str, name: str, at: int, log: Path, *arguments: Any) -> None:
    """Score as a process that is killed before call number `at` of a function, and logs the blocks of each piece."""
    tables.ROW_GROUP_TOKENS = GROUP + 31
    compute = module.trunk_log_probabilities

    def logged(model: GPT, inputs: np.ndarray, *rest: Any) -> np.ndarray:
        found = compute(model, inputs, *rest)
        with open(log, "a") as stream:
            print(len(inputs), file=stream)
        return found

    module.trunk_log_probabilities = logged
    scored_at(sys.modules[place], name, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    score(*arguments)


def test_a_killed_job_goes_on_from_its_last_piece_and_leaves_the_same_bytes(
    tokens: Path, model: Path, tmp_path: Path, small_groups: None
) -> None:
    arguments = (model, EXPERTS, shards_of(tokens), SCORING)
    score(*arguments, tmp_path / "whole")
    # One server that has imported torch, from which every process is forked.
    log, scored = tmp_path / "log", []
    moments = (
        (module.__name__, "trunk_log_probabilities", 3),
        # The third piece is there under a temporary name.
        (files.__name__, "fsync", 1),
        (module.__name__, "write_scores", 2),
        (module.__name__, "trunk_log_probabilities", 2),
        # Dev is done, test is scored and its columns are not yet in their place.
        (module.__name__, "write_scores", 1),
        # The last: all columns are in their place, and the table of tokens is not.
        (module.__name__, "write_tokens", 1),
    )
    for place, name, at in moments:
        log.write_text("")
        process = FORKS.Process(target=run_until, args=(place, name, at, log, *arguments, tmp_path / "killed"))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, name
        scored.append([int(line) for line in log.read_text().split()])
    # What was not on disk when the process died, one piece of 2 blocks, was scored again and nothing else.
    assert scored == [[4, 4], [2], [2], [4], [4, 2], []]
    score(*arguments, tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    hidden = {path.name for path in (tmp_path / "killed").rglob(".*")}
    assert not hidden, "pieces and temporary files do not stay"


def test_pieces_that_are_damaged_or_of_another_origin_are_scored_again(
    tokens: Path, model: Path, tmp_path: Path, small_groups: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    def run(experts: tuple[str, ...] = EXPERTS, scoring: Scoring = SCORING, *, stop: bool = False) -> list[int]:
        """The blocks of the pieces that were scored on the way to the tables of dev, or until just before."""
        scored = []
        with monkeypatch.context() as patch:

            def logged(model: GPT, inputs: np.ndarray, *rest: Any) -> np.ndarray:
                scored.append(len(inputs))
                return trunk_log_probabilities(model, inputs, *rest)

            patch.setattr(module, "trunk_log_probabilities", logged)
            patch.setattr(module, "write_scores", module.write_scores)
            if stop:
                scored_at(module, "write_scores", 1, stopped)
            try:
                score(model, experts, shards_of(tokens)[:1], scoring, tmp_path / "scores")
            except KeyboardInterrupt:
                assert stop
        return scored

    place = tmp_path / "scores" / f"{NOVEL[0]}.dev"
    folder = place / ".law.pieces"
    assert run(stop=True) == [4, 4, 2]
    assert run(stop=True) == []
    damaged = bytearray((folder / "128.parquet").read_bytes())
    damaged[200] ^= 1
    (folder / "128.parquet").write_bytes(damaged)
    (folder / "256.parquet").write_bytes((folder / "256.parquet").read_bytes()[:-20])
    assert run(stop=True) == [4, 2]
    shutil.copy(folder / "0.parquet", folder / "256.parquet")
    assert run(stop=True) == [2], "a piece of another place"
    assert run(scoring=Scoring(dev_blocks=10, test_tokens=300, precision="bf16", threads=1), stop=True) == [4, 4, 2]
    assert run(stop=True) == [4, 4, 2]
    # The same names, another expert.
    state = load_model(model, EXPERTS)
    own_tensors(state)["blocks.0.feedforward.up"].data[1] += 1
    described = describe(model)
    about = {"tokenizer_sha256": described.tokenizer_sha256, "shared_sha256": described.shared_sha256}
    save_expert(state, "lore", model, about)
    save_manifest(state, model, described.experts, described.content)
    assert run() == [4, 4, 2]
    assert not folder.exists()


def test_row_groups_are_whole_blocks_and_the_same_in_every_file(
    tokens: Path, model: Path, tmp_path: Path, small_groups: None
) -> None:
    score(model, EXPERTS, shards_of(tokens), SCORING, tmp_path)
    gpt = load_model(model, EXPERTS)
    for path, count in zip(shards_of(tokens), (320, 300), strict=True):
        place = tmp_path / f"{NOVEL[0]}.{path.stem}"
        for name in (*EXPERTS, "tokens"):
            found = pq.ParquetFile(place / f"{name}.parquet").metadata
            sizes = [found.row_group(number).num_rows for number in range(found.num_row_groups)]
            assert sizes == [128, 128, count - 256]
            assert name == "tokens" or found.metadata[b"precision"] == b"fp32"
        shard = TokenShard.open(path)
        expected = log_probabilities(gpt, *blocks(shard, 32, count))
        table = read_scores(place, EXPERTS)
        assert table.tokens == count
        np.testing.assert_allclose(table.scores[table.mask].T, expected, rtol=1e-5)
        written = pq.read_table(place / "tokens.parquet")
        np.testing.assert_array_equal(written["token"], shard.read(0, count))
        np.testing.assert_array_equal(written["block"], np.arange(count) // 32)
        numbers = [sum(offset <= place for offset in shard.offsets) - 1 for place in range(count)]
        np.testing.assert_array_equal(written["document"], numbers)
        np.testing.assert_array_equal(written["origin"], shard.origins[numbers])


def test_each_domain_is_scored_under_its_own_token(tokens: Path, model: Path, tmp_path: Path) -> None:
    paths = [path for domain in TRAINING[:2] for path in shards_of(tokens, domain)]
    shard = TokenShard.open(paths[0])
    gpt = GPT(Architecture(layers=2, width=16, heads=2, context=32), shard.vocab_size, ("dense",), TRAINING).initialise(
        1
    )
    gpt.domain_embedding.data *= 50
    save_model(gpt, tmp_path / "token", shard.tokenizer_sha256)
    score(tmp_path / "token", (), paths, SCORING, tmp_path / "own")
    score(tmp_path / "token", TRAINING, paths, SCORING, tmp_path / "all")
    for path in paths:
        place = f"{path.parent.name}.{path.stem}"
        assert {file.stem for file in (tmp_path / "own" / place).glob("[!.]*")} == {path.parent.name, "tokens"}
        every = read_scores(tmp_path / "all" / place, TRAINING)
        own = read_scores(tmp_path / "own" / place, (path.parent.name,)).scores[..., 0]
        distances = [np.abs(own - every.scores[..., number]).max() for number in range(len(TRAINING))]
        assert [distance < 1e-4 for distance in distances] == [name == path.parent.name for name in TRAINING]
    with refused("token"):
        score(tmp_path / "token", (), shards_of(tokens), SCORING, tmp_path / "no")
    with refused("model"):
        score(model, (), paths, SCORING, tmp_path / "no")


def test_an_added_expert_touches_no_other_file(tokens: Path, model: Path, tmp_path: Path, small_groups: None) -> None:
    """Through the command, as the rules run it; it finds the files of before in other row groups."""
    paths = [path for domain in (TRAINING[0], NOVEL[0]) for path in shards_of(tokens, domain)]
    score(model, EXPERTS[:2], paths, SCORING, tmp_path / "scores" / model.name)

    def state() -> dict[Path, tuple[str, int]]:
        return {path: (sha256_file(path), path.stat().st_mtime_ns) for path in (tmp_path / "scores").glob("*/*/[!.]*")}

    before = state()
    assert len(before) == 4 * 3
    one = {"model": model.name, "experts": EXPERTS[2:], "domains": [TRAINING[0], NOVEL[0]], "splits": ["dev", "test"]}
    settings, manifest = json.dumps(SCORING.as_dict() | {"models": [one]}), ("--manifest", tmp_path / "scores.json")
    succeeds("score", model.parent, *paths, "--settings", settings, "--output", tmp_path / "scores", *manifest)
    after = state()
    assert {path.stem for path in after.keys() - before.keys()} == {EXPERTS[2]}
    assert {path: after[path] for path in before} == before
    score(model, EXPERTS, paths, SCORING, tmp_path / "together")
    for path in paths:
        name = f"{path.parent.name}.{path.stem}"
        places = (tmp_path / "scores" / model.name / name, tmp_path / "together" / name)
        added, together = (read_scores(place, EXPERTS) for place in places)
        np.testing.assert_allclose(added.scores, together.scores, rtol=1e-5)
        assert not np.allclose(added.scores[..., 0], added.scores[..., 2], rtol=1e-3)


def test_tokens_of_before_that_differ_or_are_damaged_are_written_anew(tokens: Path, tmp_path: Path) -> None:
    shard = TokenShard.open(shards_of(tokens)[0])
    path = tmp_path / "tokens.parquet"
    tables.write_tokens(tmp_path, shard.read(0, 200), shard.offsets, 32)
    content, written = path.read_bytes(), path.stat().st_mtime_ns
    tables.write_tokens(tmp_path, shard.read(0, 200), shard.offsets, 32)
    assert path.stat().st_mtime_ns == written
    for other in (content[:-10], bytes([*content[:60], content[60] ^ 1, *content[61:]])):
        path.write_bytes(other)
        tables.write_tokens(tmp_path, shard.read(0, 200), shard.offsets, 32)
        assert path.read_bytes() == content
    for ids, length in ((shard.read(0, 199), 32), (shard.read(0, 200), 16), (shard.read(1, 201), 32)):
        tables.write_tokens(tmp_path, shard.read(0, 200), shard.offsets, 32)
        tables.write_tokens(tmp_path, ids, shard.offsets, length)
        assert pq.read_table(path)["token"].to_pylist() == ids.tolist()
        assert path.read_bytes() != content


def test_an_empty_split_is_refused(tokens: Path, model: Path, tmp_path: Path) -> None:
    write_parquet(pa.table({"text": pa.array([], pa.large_string())}), tmp_path / "test.parquet")
    tokenize(tokens / "tokenizer.json", tmp_path / "test.parquet", tmp_path / "law" / "test.arrow")
    with refused("law/test.arrow"):
        score(model, EXPERTS, [tmp_path / "law" / "test.arrow"], SCORING, tmp_path / "scores")


def test_whole_models_are_scored_like_experts_of_one_trunk_one_at_a_time(
    tokens: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunks = write_trunks(model, tmp_path / "trunks")
    live, tables = count_whole_models(monkeypatch), []
    # Another order than that of the files.
    experts = (EXPERTS[1], EXPERTS[2], EXPERTS[0])
    for directory in (model, trunks):
        output = tmp_path / "scores" / directory.name
        score(directory, experts, shards_of(tokens), SCORING, output)
        tables.append(read_scores(output / f"{NOVEL[0]}.test", experts))
    assert max(live) == 1
    np.testing.assert_allclose(tables[1].scores, tables[0].scores, rtol=1e-5)
    assert not np.allclose(tables[0].scores[..., 0], tables[0].scores[..., 1], rtol=1e-3)
