"""How scoring, mixing, planning, report and tracking grow with experts and domains: CPU time and peak memory.

    python benchmarks/growth.py [--json rows.json] [--what score,mix,plan,report,track] [--tokens 4096]
                                [--mixed 100000] [--experts 4,16,64] [--domains 16,64] [--folder /tmp]

`demix score` scores a made-up text of so many tokens under a model of 3 layers of width 128 (blocks of 256 tokens, a
BPE of 4,096). Mixing reads a made-up table of `--mixed` tokens, by every mixture of benchmarks/mix.py. `plan` is
`snakemake -n` for a dense model and DEMix on so many training domains and four novel ones, of which no file is there.
`report` and `track` are the commands, on the run of the tests with so many training domains. Each number is a process
of its own with one thread. Time of scoring and mixing is that of the work for an expert-token, without imports, and
memory is the peak above that of the imports; of the others it is that of the whole process, for each pair of a domain
and an expert, as the tables have them. The peer is the smallest number: a ratio of 1 in time is growth with experts,
tokens and pairs. Linux alone says the peak. About five minutes of one core.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from common import ROOT, alone, arguments, peak, row, show
from mix import DEV_BLOCKS, LENGTH, names_of, ours, write_table

from demix.config.architecture import Architecture
from demix.data.shards import TokenShard, tokenize
from demix.data.tokenizer import train_tokenizer
from demix.evaluate.score import Scoring, score_models
from demix.files import read_json, write_json, write_parquet
from demix.model.directory import save_files
from demix.model.gpt import GPT
from demix.run.run import Run
from demix.run.scoring import ScoringPart

SHAPE, VOCABULARY = Architecture(layers=3, width=128, heads=4, context=256), 4096


def write_text_shard(folder: Path, tokens: int) -> Path:
    """A shard of random words, at least so many tokens of them."""
    generator = np.random.default_rng(0)
    letters = generator.integers(97, 123, (20_000, 7), dtype=np.uint8)
    words = [bytes(word[: 3 + number % 5]).decode() for number, word in enumerate(letters)]
    texts = [" ".join(generator.choice(words, 300)) for _ in range(max(200, tokens // 300))]
    write_parquet(pa.table({"text": pa.array(texts, pa.large_string())}), folder / "test.parquet")
    train_tokenizer([folder / "test.parquet"], VOCABULARY, folder / "tokenizer.json")
    tokenize(folder / "tokenizer.json", folder / "test.parquet", folder / "x" / "test.arrow")
    return folder / "x" / "test.arrow"


def write_model(folder: Path, shard: Path, experts: tuple[str, ...]) -> None:
    opened = TokenShard.open(shard)
    lineage = {"tokenizer_sha256": opened.tokenizer_sha256}
    save_files(GPT(SHAPE, opened.vocab_size, experts).initialise(0), folder, lineage, lineage)


def side(what: str, folder: str, count: int, tokens: int) -> dict[str, float]:
    """CPU seconds and MB of this process, that scores or mixes, or of a command that it starts."""
    place = Path(folder)
    if what not in ("score", "mix"):
        return whole(what, place, count)
    torch.set_num_threads(1)
    before, cpu = peak(), time.process_time()
    if what == "score":
        part = ScoringPart("model", names_of(count), ("x",), ("test",))
        scoring = Scoring(models=(part,), dev_blocks=1, test_tokens=tokens, precision="fp32", threads=1)
        score_models(place, [place / "x" / "test.arrow"], scoring, place / "scores", place / "scores.json")
    else:
        ours(place, names_of(count))
    return {"cpu": time.process_time() - cpu, "MB": peak() - before}


NOVEL = tuple(f"novel{number}" for number in range(4))
TRAINED = ("parliament", "scripture", "licenses")


def write_config(folder: Path, domains: tuple[str, ...]) -> None:
    """A config of these training domains, and the files of its sources."""
    for name in (*domains, *NOVEL):
        (folder / f"{name}.jsonl").write_text('{"text": "a b c"}\n')
    kinds = {
        kind: {name: {"source": {"path": f"{name}.jsonl"}} for name in some}
        for kind, some in (("training", domains), ("novel", NOVEL))
    }
    keys = {
        "run": "growth", "seed": 1, "threads": 1, "domains": kinds,
        "tokenizer": {"kind": "bpe", "vocab_size": 4096},
        "architecture": {"layers": 3, "width": 128, "heads": 4, "context": 128},
        "training": {"tokens": 2560 * len(domains), "sequences": 2, "learning_rate": 0.001},
        "models": {"dense_unbalanced": None, "domain_token": None},
        "evaluation": {"dev_blocks": 10, "test_tokens": 1024},
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(keys))


def write_run(folder: Path, domains: tuple[str, ...]) -> None:
    """The run of tests/frozen as a run of these training domains, each with the files and numbers of parliament."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.configs import with_keys
    from support.frozen import rewrite, unpack, with_models

    unpack(folder / "frozen")
    removal = {"removal": {"retrain_without": []}}
    made = with_models(Run.read(folder / "frozen"), folder / "run", "demix", "dense", seeds=[1], **removal)
    keys = made.config.values
    training = dict.fromkeys(domains, keys["domains"]["training"]["parliament"])
    keys |= {"training": keys["training"] | {"tokens": 2560 * len(domains)}}
    with_keys(made.folder, keys | {"domains": {"training": training, "novel": keys["domains"]["novel"]}})
    for table in ("results", "differences", "priors", "posteriors", "corpus/overlap"):
        rewrite(made, table, lambda rows: of_domains(rows, domains))
    for name in domains:
        for file in ("corpus/{}/card.json", "models/demix/experts/{}.json"):
            write_json(made.folder / file.format(name), read_json(made.folder / file.format("parliament")))


def of_domains(rows: pd.DataFrame, domains: tuple[str, ...]) -> pd.DataFrame:
    """The rows of each of `domains` as those of parliament, those of its other experts as those of scripture."""
    rows = rows[~rows["domain"].isin(["scripture", "licenses"])]
    experts = rows["expert"] if "expert" in rows else pd.Series("", rows.index)
    alone, others = rows[~experts.isin(TRAINED)], rows[experts == "scripture"]
    parts = []
    for name in domains:
        own = rows[(rows["domain"] == "parliament") & (experts == "parliament")]
        parts += [one.assign(domain=name, expert=name) for one in [own] if len(own)]
        parts.append(
            alone[alone["domain"] == "parliament"].assign(domain=name).replace("minus-parliament", f"minus-{name}")
        )
        parts += [others[others["domain"] != "parliament"].assign(expert=name)] if len(others) else []
        pair, rest = others[others["domain"] == "parliament"], [other for other in domains if other != name]
        if len(pair):
            repeated = pair.iloc[np.tile(np.arange(len(pair)), len(rest))]
            parts.append(repeated.assign(domain=name, expert=np.repeat(rest, len(pair))))
    return pd.concat([alone[alone["domain"] != "parliament"], *parts], ignore_index=True)


def command_of(what: str, folder: Path, count: int) -> list[str]:
    """The command that plans, reports or tracks a run of `count` training domains, of which all is written first."""
    domains = tuple(f"domain{number:04}" for number in range(count))
    if what == "plan":
        write_config(folder, domains)
        workflow = ["--snakefile", ROOT / "workflow" / "Snakefile", "--workflow-profile", ROOT / "profiles" / "default"]
        return ["snakemake", "-n", "-q", *map(str, workflow), "--configfile", "config.yaml"]
    write_run(folder, domains)
    return ["demix", what, "run", *(["--output", "report"] if what == "report" else [])]


def whole(what: str, folder: Path, count: int) -> dict[str, float]:
    """CPU seconds and MB of the process of a command, as this one sees them, whose own memory is less."""
    command = command_of(what, folder, count)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # A child's peak begins with the memory of the process that started it.
    program = "import json, resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2, stderr=2); "
    program += "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    program += "print(json.dumps({'cpu': used.ru_utime + used.ru_stime, 'MB': used.ru_maxrss / 1024}))"
    done = subprocess.run(
        [sys.executable, "-c", program, *command], cwd=folder, env=environment, check=True, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout)


def grown(what: str, counts: list[int], tokens: int, place: str) -> Iterator[dict]:
    """CPU seconds, divided among expert-tokens or pairs of a domain and an expert, and memory, beside the smallest."""
    first: tuple[float, float] | None = None
    for count in counts:
        with tempfile.TemporaryDirectory(dir=place or None) as name:
            folder = Path(name)
            if what == "score":
                write_model(folder / "model", write_text_shard(folder, tokens), names_of(count))
            elif what == "mix":
                write_table(folder / "x.test", names_of(count), tokens, 0)
                write_table(folder / "x.dev", names_of(count), DEV_BLOCKS * LENGTH, 1)
            found = alone(__file__, what, name, count, tokens)
        # Mixing also reads the dev split; the run of the tests has two novel domains.
        each = {"score": tokens, "mix": tokens + DEV_BLOCKS * LENGTH, "plan": count + len(NOVEL)}.get(what, count + 2)
        each, memory = 1e6 * found["cpu"] / (count * each), found["MB"]
        first = first or (each, memory)
        yield row(f"{what}, {count}: an expert-token or pair", each, first[0], "CPU us")
        yield row(f"{what}, {count}: CPU seconds", found["cpu"], None, "s")
        yield row(f"{what}, {count}: peak memory", memory, first[1], "MB")


def main() -> None:
    given = arguments(
        __doc__, what="score,mix,plan,report,track", tokens=4096, mixed=100_000, experts="4,16,64", domains="16,64",
        folder="",
    )  # fmt: skip
    if given.alone:
        print(json.dumps(side(*given.alone)))
        return
    rows = []
    for what in given.what.split(","):
        counts = given.experts if what in ("score", "mix") else given.domains
        rows += grown(
            what, [*map(int, counts.split(","))], given.mixed if what == "mix" else given.tokens, given.folder
        )
    show(rows, given.json)


if __name__ == "__main__":
    main()
