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

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from mix import DEV_BLOCKS, LENGTH, ours, write_table
from tables import show

from demix.config.architecture import Architecture
from demix.data.shards import TokenShard, tokenize
from demix.data.tokenizer import train_tokenizer
from demix.evaluate.score import Scoring, score
from demix.files import read_json, write_json, write_parquet
from demix.model.directory import save_expert, save_shared
from demix.model.gpt import GPT
from demix.run.run import Run

SHAPE, VOCABULARY = Architecture(3, 128, 4, 256), 4096


def names(count: int) -> tuple[str, ...]:
    return tuple(f"expert{number:02}" for number in range(count))


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


def write_model(folder: Path, shard: Path, experts: tuple[str, ...]) -> Path:
    opened = TokenShard.open(shard)
    lineage = {"tokenizer_sha256": opened.tokenizer_sha256}
    model = GPT(SHAPE, opened.vocab_size, experts).initialise(0)
    save_shared(model, folder, lineage)
    for expert in experts:
        save_expert(model, expert, folder, lineage)
    return folder


def side(what: str, folder: Path, experts: int, tokens: int) -> dict[str, float]:
    """CPU seconds and MB of one process that scores or mixes."""
    torch.set_num_threads(1)
    shard = folder / "x" / "test.arrow"
    before, cpu = peak(), time.process_time()
    if what == "score":
        scoring = Scoring(dev_blocks=1, test_tokens=tokens, precision="fp32", threads=1)
        score(folder / f"model{experts}", names(experts), [shard], scoring, folder / f"scores{experts}")
    else:
        ours(folder / f"mixed{experts}", names(experts))
    used = time.process_time() - cpu
    return {"cpu": used, "MB": peak() - before}


def peak() -> float:
    """The peak memory of this process in MB. `getrusage` begins with that of the process that started this one."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


ROOT = Path(__file__).parents[1]
# Runs its arguments, and prints their CPU seconds and the peak of their memory in KB.
MEASURED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
NOVEL = tuple(f"novel{number}" for number in range(4))
TRAINED = ("parliament", "scripture", "licenses")


def write_config(folder: Path, domains: tuple[str, ...]) -> None:
    """A config of these training domains, and the files of its sources."""
    for name in (*domains, *NOVEL):
        (folder / f"{name}.jsonl").write_text('{"text": "a b c"}\n')
    kinds = {
        kind: {name: {"source": {"kind": "files", "path": f"{name}.jsonl"}} for name in some}
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
        parts += [
            others[others["domain"] == "parliament"].assign(domain=name, expert=other)
            for other in domains
            if other != name and len(others)
        ]
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
    """CPU seconds and MB of the process of a command, as its parent sees them."""
    command = command_of(what, folder, count)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # A child's peak begins with the memory of the process that started it.
    command = [sys.executable, "-c", MEASURED, *command]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
    seconds, kilobytes = done.split()[-2:]
    return {"cpu": float(seconds), "MB": int(kilobytes) / 1024}


def grown(text: str, found: dict[int, dict[str, float]], each: dict[int, float], unit: str) -> list[dict]:
    """The rows of `found`, whose CPU seconds are divided among so many things `each`, beside the smallest number."""
    (first, least), rows = next(iter(found.items())), []
    for count, values in found.items():
        ours, peer = (1e6 * found[number]["cpu"] / each[number] for number in (count, first))
        rows += [
            {"name": text.format(count) + f": {unit}", "ours": ours, "peer": peer, "unit": "CPU us",
             "ratio": ours / peer},
            {"name": text.format(count) + ": peak memory", "ours": values["MB"], "peer": least["MB"], "unit": "MB",
             "ratio": values["MB"] / least["MB"]},
        ]  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--what", default="score,mix,plan,report,track")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--mixed", type=int, default=100_000)
    parser.add_argument("--experts", default="4,16,64")
    parser.add_argument("--domains", default="16,64")
    parser.add_argument("--folder", type=Path, help="where the temporary folder goes")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    experts, domains = ([int(count) for count in part.split(",")] for part in (given.experts, given.domains))
    if given.side:
        measured = side if given.side in ("score", "mix") else whole
        more = (given.tokens,) if measured is side else ()
        print(json.dumps(measured(given.side, given.folder, experts[0], *more)))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        wanted = given.what.split(",")
        shard = write_text_shard(folder, given.tokens) if "score" in wanted else folder
        for what in wanted:
            found, tokens = {}, given.tokens if what == "score" else given.mixed
            for count in experts if what in ("score", "mix") else domains:
                if what == "score":
                    write_model(folder / f"model{count}", shard, names(count))
                elif what == "mix":
                    write_table(folder / f"mixed{count}" / "x.test", names(count), tokens, 0)
                    write_table(folder / f"mixed{count}" / "x.dev", names(count), DEV_BLOCKS * LENGTH, 1)
                own = folder if what in ("score", "mix") else folder / f"{what}{count}"
                own.mkdir(exist_ok=True)
                command = [sys.executable, __file__, "--side", what, "--folder", str(own), "--experts", str(count)]
                command += ["--tokens", str(tokens)]
                done = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found[count] = json.loads(done.splitlines()[-1])
                print(f"{what}, {count}: {found[count]}", file=sys.stderr)
                if own != folder:
                    shutil.rmtree(own)
            # Mixing also reads the dev split.
            read = tokens + (DEV_BLOCKS * LENGTH if what == "mix" else 0)
            if what in ("score", "mix"):
                text, each = f"{what}, {{}} experts, {tokens} tokens", {count: count * read for count in found}
                rows += grown(text, found, each, "an expert-token")
            else:
                # The run of the tests has two novel domains.
                novel = len(NOVEL) if what == "plan" else 2
                each = {count: count * (count + novel) for count in found}
                rows += grown(f"{what}, {{}} domains", found, each, "a domain under an expert")
    show(rows, given.json)


if __name__ == "__main__":
    main()
