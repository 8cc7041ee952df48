"""A run: everything that is derived from its config, computed once."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from demix.config.architecture import Architecture, architecture_from
from demix.config.config import Config
from demix.config.domains import DomainSection
from demix.config.models import EntrySettings, cluster_names
from demix.config.training import Execution
from demix.errors import DemixError, nearest, printable
from demix.files import fingerprint, read_json, write_json
from demix.files.json_files import read_unsealed
from demix.run.models import (
    AdaptationJob,
    Merged,
    Model,
    adaptations_of,
    dense_adapted,
    folder_of,
    merged_models,
    row_named,
    trained_models,
)
from demix.run.rows import Row, rows_of
from demix.settings import names_of, settings_from, written


@dataclass(frozen=True, eq=False)
class Run:
    """The run of a config, whose files are in `folder`.

    Derived properties raise DemixError for keys that exclude each other; `demix.run.check` computes all of them at the
    beginning.
    """

    config: Config
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The run that the workflow wrote to `folder`. Raises DemixError for another version, or a damaged file."""
        file = folder / "config.json"
        if not os.path.isfile(file):
            # Snakemake deletes the file shortly before a rerun with other settings writes it.
            if (folder / "logs").is_dir():
                cause = "is missing: a rerun is writing it, or ended before it was written"
                raise DemixError(file, cause, "try again in a moment, or rerun the workflow, which resumes")
            runs = {path.parent for above in (folder.parent, Path("results")) for path in above.glob("*/config.json")}
            raise DemixError(
                file, "is missing, so the folder holds no run", nearest(folder, sorted(runs), "name results/<run>")
            )
        refuse_other_format(folder)
        values = read_json(file)
        del values["format"]
        return cls(settings_from(Config, values, f"{file}, config key "), folder)

    @classmethod
    def of_model(cls, model: Path) -> Self | None:
        """The run of the model results/<run>/models/<model>; None for a folder elsewhere."""
        models = Path(model).resolve().parent
        known = models.name == "models" and (models.parent / "config.json").is_file()
        return cls.read(models.parent) if known else None

    @property
    def name(self) -> str:
        """The name of the run in its config; the folder may have another one."""
        return self.config.run

    @property
    def experiment(self) -> str:
        """The run's MLflow experiment. A copied folder with another name has its own experiment."""
        return f"demix-{self.folder.absolute().name}"

    @property
    def seed(self) -> int:
        """The random seed of the run. All tables are of the models with this seed."""
        return self.config.seed

    @property
    def submitted(self) -> bool:
        """Whether each training runs as a SLURM job of its own, and a local process only waits for it."""
        return self.config.cluster.launch == "slurm"

    @cached_property
    def training(self) -> tuple[str, ...]:
        """The training domains, in the config's order."""
        return tuple(self.config.domains.training)

    @cached_property
    def novel(self) -> tuple[str, ...]:
        """The novel domains, in the config's order."""
        return tuple(self.config.domains.novel)

    @cached_property
    def domains(self) -> dict[str, DomainSection]:
        """The sections of the training domains and then of the novel ones."""
        return self.config.domains.all

    @cached_property
    def suites(self) -> dict[str, DomainSection]:
        """The sections of the domains of `evaluation.suites`, which are scored and are not domains of the run."""
        return self.config.suites

    @cached_property
    def texts(self) -> dict[str, DomainSection]:
        """All domains with text: those of the run and those of the suites."""
        return self.domains | self.suites

    def kind_of(self, domain: str) -> str:
        """The type of a domain in tables: training, novel or suite."""
        return "suite" if domain in self.suites else "training" if domain in self.training else "novel"

    @cached_property
    def shared(self) -> dict[str, tuple[str, ...]]:
        """The sources that domains share, each with its domains."""
        sharing = {name: tuple(self.config.domains.sharing(name)) for name in self.config.sources}
        return {name: domains for name, domains in sharing.items() if domains}

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture of the config. Model entries may change it."""
        return architecture_from(written(self.config.architecture))

    @property
    def context(self) -> int:
        """The context length: tokens of a block."""
        return self.architecture.context

    @property
    def types(self) -> int:
        """The vocabulary size of the tokenizer."""
        return self.config.tokenizer.size

    @cached_property
    def rows(self) -> dict[str, Row]:
        """The entries of the config's `models`, the paper's four first."""
        return rows_of(self.config)

    @cached_property
    def trained(self) -> tuple[Model, ...]:
        """The models that the run trains from scratch, or from a parent's state."""
        return trained_models(self.config, self.rows)

    @cached_property
    def own(self) -> tuple[Model, ...]:
        """The models that are trained with the run's own seed on all domains."""
        return tuple(model for model in self.trained if model.name == model.row and not model.removed)

    @cached_property
    def without(self) -> tuple[Model, ...]:
        """The models that are trained without a domain."""
        return tuple(model for model in self.trained if model.removed)

    @cached_property
    def joined(self) -> tuple[Model, ...]:
        """The models whose experts are trained separately and then joined."""
        return tuple(model for model in self.trained if model.in_parts)

    @cached_property
    def swept(self) -> tuple[Model, ...]:
        """The models with their own sweep of learning rates."""
        return tuple(model for model in self.trained if model.sweeps)

    @cached_property
    def adaptations(self) -> tuple[AdaptationJob, ...]:
        """The adaptations: for each novel domain DEMix-DAPT, then Dense-DAPT."""
        return adaptations_of(self.config, self.trained)

    @cached_property
    def planned(self) -> tuple[Model, ...]:
        """All models of the run: those that it trains, then those made by Dense-DAPT."""
        made = (one for one in self.adaptations if not one.adds_expert)
        return (*self.trained, *(dense_adapted(one, self.training) for one in made))

    @cached_property
    def receiver(self) -> Model:
        """The model to which experts of novel domains are added."""
        return row_named(self.own, self.config.adaptation.model, "adaptation.model")

    @cached_property
    def whole(self) -> Model:
        """The model of removals: its experts are left out, and it is retrained without single domains."""
        return row_named(self.own, self.config.removal.model, "removal.model")

    @cached_property
    def merged(self) -> tuple[Merged, ...]:
        """The merged models, with the run's own seed."""
        return merged_models(self.own)

    @cached_property
    def routed_merges(self) -> tuple[Merged, ...]:
        """The token-routed merged models: those that are scored, and those from which entries start."""
        scored = tuple(one for one in self.merged if one.token_routed)
        models = {model.name: model for model in self.trained}
        begun = [Merged(models[model.parent], "routed") for model in self.trained if model.mixes]
        return tuple({one.place: one for one in (*scored, *begun)}.values())

    @cached_property
    def seeds(self) -> dict[tuple[str, int], Model]:
        """The parents of dense warm starts, by folder and number of updates."""
        models = {model.name: model for model in self.trained}
        begun = {(model.parent, model.seed_step) for model in self.trained}
        return {(parent, step): models[parent] for parent, step in sorted(begun) if step}

    def clusters(self, clustering: str) -> tuple[str, ...]:
        """The clusters of a clustering."""
        return cluster_names(clustering, self.config.clusterings[clustering], self.training)

    @cached_property
    def learned_clusterings(self) -> tuple[str, ...]:
        """The clusterings on which models train."""
        return tuple(dict.fromkeys(model.data for model in self.trained if model.data))

    @cached_property
    def learned_splits(self) -> tuple[tuple[str, str], ...]:
        """The clusterings on which models train, each with the splits that the trainings read."""
        return tuple(dict.fromkeys((one.data, split) for one in self.trained if one.data for split in one.read_splits))

    def folder_of(self, row: str, seed: int) -> str:
        """The folder of an entry's model with random seed `seed`."""
        return folder_of(row, seed, self.seed)

    def row_of(self, folder: str) -> tuple[str, int]:
        """The entry and the random seed of the model in a folder of the run: the inverse of `folder_of`."""
        for seed in self.config.further_seeds:
            if folder.endswith(f"-seed{seed}"):
                return folder.removesuffix(f"-seed{seed}"), seed
        return folder, self.seed

    def adapting(self, parent: Model) -> EntrySettings:
        """The settings for adapting a model, without lengths: those of its training, on one domain."""
        section = self.config.adaptation
        own = {name: getattr(self.config.training, name) for name in names_of(Execution)}
        return parent.settings.replace(**own, sequences=section.sequences, ranks=section.ranks)

    def learning_rate_factor(self, parent: Model) -> float:
        """The learning rate of an adaptation of `parent`, as a fraction of the rate of the parent's training."""
        factor = self.config.adaptation.learning_rate_factor
        if isinstance(factor, float):
            return factor
        return factor.demix if parent.kind.has_experts else factor.dense


# This version increases with every change that makes files of older runs unreadable.
FORMAT = 11


def kept(config: Config) -> dict[str, Any]:
    """The part of the config that a run records, as JSON: every key that defines the run, in the config's order."""
    # The section `cluster` does not change results.
    return {key: value for key, value in config.values.items() if key != "cluster"}


def write_run_config(output: Path, config: Config) -> None:
    """Write the completed `config` of a run, with the format version of its files.

    The keys keep their order, because the report shows the domains in this order.
    """
    write_json(output, {"format": FORMAT, **kept(config)}, sort_keys=False)


def config_fingerprint(config: Config) -> str:
    """A digest of all settings that define a run, except its name. Runs with the same settings have the same digest."""
    return fingerprint({key: value for key, value in kept(config).items() if key != "run"})


def refuse_other_domains(run: Path, config: Config) -> None:
    """Raise DemixError if the folder `run` belongs to a run that shares no domain with `config`."""
    path = run / "config.json"
    there = {} if not path.exists() else read_unsealed(path).get("domains") or {}
    before = [name for kind in there.values() for name in kind]
    if before and not {*before} & {*config.domains.all}:
        cause = f"belongs to a run with other domains ({printable(', '.join(before[:5]))}{', …' * (len(before) > 5)})"
        cure = f"give the config another `run`, or delete or rename {run}"
        raise DemixError(path, cause, cure)


def refuse_other_format(run: Path) -> None:
    """Raise DemixError if the run in the folder `run` has files of another format version."""
    path = run / "config.json"
    if path.exists() and (found := read_unsealed(path).get("format")) != FORMAT:
        version = "none" if found is None else repr(found)
        cause = f"belongs to a run of another version of demix (format {version}, not {FORMAT})"
        raise DemixError(path, cause, f"delete or rename {run}, then run the workflow again")
