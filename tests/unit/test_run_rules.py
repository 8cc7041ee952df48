"""What the rules of the workflow read, write and ask for, on a config of three domains."""

import copy
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from demix.commands.main import command_line
from demix.config.domains import SourceSection
from demix.errors import DemixError
from demix.run.check import completed_run
from demix.run.models import Model
from demix.run.rules import RunRules
from demix.run.run import Run, kept
from demix.run.stage_settings import LONGEST_ARGUMENT
from demix.settings import settings_from
from support.dry_run import TINY
from support.errors import refused


def rules(**sections: Any) -> RunRules:
    config = copy.deepcopy(TINY)
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section if isinstance(section, dict) else section
    return RunRules(completed_run(config))


def source(path: str | list[str]) -> SourceSection:
    return settings_from(SourceSection, {"path": path}, "source")


def row(one: RunRules, name: str) -> Model:
    return next(model for model in one.run.planned if model.name == name)


def test_the_manifest_of_a_job_stands_for_its_tables() -> None:
    here, cluster = rules(), rules(cluster={"launch": "slurm"})
    asked = ("demix", ["licenses"], ("parliament", "licenses", "fantasy"))
    folder = "results/tiny/scores"
    # fantasy is a novel domain, whose expert is added.
    assert here.scores(*asked) == [f"{folder}/demix/training.json", f"{folder}/adapted-fantasy.json"]
    assert cluster.scores(*asked) == [f"{folder}/demix/licenses.json", f"{folder}/demix/adapted-fantasy.json"]
    folder = "results/tiny/models"
    assert here.model("demix", asked[2]) == [f"{folder}/demix/model.json", f"{folder}/demix/experts/fantasy.json"]
    assert here.model("without-licenses", asked[2]) == [f"{folder}/without-licenses/model.json"]


def test_training_reads_dev_only_where_it_evaluates_on_dev() -> None:
    with_dev, without = rules(training={"dev_blocks": 3}), rules(training={"dev_blocks": 0})
    inputs = with_dev.train_inputs(row(with_dev, "demix"))
    assert [path.endswith("/dev.arrow") for path in inputs] == [*[False] * 3, *[True] * 3]
    assert len(without.train_inputs(row(without, "demix"))) == 3


def test_a_training_that_only_waits_takes_one_core() -> None:
    local, slurm = rules(threads=2), rules(threads=2, cluster={"launch": "slurm"})
    settings = local.run.config.adaptation.replace(ranks=3)
    assert (local.cores(settings), local.run.submitted) == (6, False)
    assert (slurm.cores(settings), slurm.run.submitted) == (1, True)


def test_how_a_training_is_computed_is_no_setting_of_it() -> None:
    one = rules()
    settings = json.loads(one.training_settings(row(one, "demix"), tokens=5))
    assert settings["tokens"] == 5
    assert settings["seed"] == one.run.seed
    assert not {"ranks", "micro_sequences", "checkpoint_every"} & settings.keys()


def test_a_seed_is_kept_by_its_parent_and_begins_its_branches() -> None:
    seeded = {"kind": "demix", "parent": "dense", "seed_tokens": 6000}
    sweep = {"learning_rates": [1e-3, 0.5], "tokens": 7680}
    models = {"dense": {"sweep": sweep}, "half": seeded, "all": seeded | {"seed_tokens": 12288}}
    one = rules(seeds=[1, 5], models=models)
    folder = "results/tiny/seeds/dense-seed5/step-00000015"
    assert one.seed_of(row(one, "half-seed5")) == [f"{folder}/manifest.json"]
    assert one.seed_of(row(one, "demix")) == one.seed_of(row(one, "dense")) == []
    begins = f" --learning-rate-from results/tiny/sweep/dense.json --branch {folder}"
    assert one.beginning(row(one, "half-seed5")) == begins
    assert one.beginning(row(one, "demix")) == ""
    options = shlex.split(one.train_options(row(one, "dense-seed5")))
    assert options[-2:] == ["--keep", "15,32"]
    assert "--keep" not in one.train_options(row(one, "half"))
    # What is kept is no setting of a training, and a branch has those of its parent.
    plain = rules(models={"dense": {"sweep": sweep}})
    assert one.training_settings(row(one, "dense")) == plain.training_settings(row(plain, "dense"))
    assert one.training_settings(row(one, "half")) == one.training_settings(row(one, "dense"))


def test_settings_too_long_for_an_argument_go_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(argument: str) -> None:
        words = ["run-config", "--settings", argument, "--output", "config.json"]
        command_line("run-config")(words, standalone_mode=False)

    monkeypatch.chdir(tmp_path)
    tracking = {"uri": "sqlite:///" + "x" * LONGEST_ARGUMENT}
    one, config = rules(), kept(rules(tracking=tracking).run.config)
    argument = one.argument(json.dumps(config))
    assert argument.startswith("@results/tiny/settings/")
    assert one.argument(json.dumps(config)) == argument != one.argument(json.dumps(config | {"seed": 2}))
    assert not one.argument("x" * LONGEST_ARGUMENT).startswith("@"), "the argument of older runs must not change"
    write(argument)
    assert list(kept(Run.read(Path()).config).items()) == list(config.items())
    Path(argument[1:]).write_text(Path(argument[1:]).read_text().replace('"seed": 1', '"seed": 2'))
    with refused(Path(argument[1:]).name):
        write(argument)
    Path("mine.json").write_text(json.dumps(kept(one.run.config)))
    write("@mine.json")
    assert Run.read(Path()).config == one.run.config


def test_local_files_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt"):
        Path(name).touch()
    assert source("*.txt").names == ["a.txt", "b.txt"]
    assert source(["b.txt", "missing.txt", "*.txt"]).names == ["a.txt", "b.txt"]
    assert source("https://host/a.txt").names == []
    for name in ("{x}.txt", "{x, .+}.txt", os.fsdecode(b"\xff.txt")):
        Path(name).touch()
        with pytest.raises(DemixError):
            _ = source("*.txt").names
        Path(name).unlink()
    Path("{a b}.txt").touch()
    assert source("*b}.txt").names == ["{a b}.txt"]
