"""Merging: averages of experts, token-routed models from experts, and joining separately trained experts."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

import torch

from demix.config.counts import parameters
from demix.config.models import DENSE_EXPERT
from demix.errors import DemixError, nearest
from demix.files import copy_checked, read_json_lines, read_parquet, replacing, seed_for, write_json, write_json_lines
from demix.model.directory import (
    SHARED,
    Tensors,
    assembled,
    copy_expert,
    copy_tokenizer,
    describe,
    expert_files,
    expert_lineage,
    expert_names,
    load_expert,
    load_shared,
    refuse_masked,
    refuse_routed,
    save_model,
    tokenizer_path,
    whole_models,
)
from demix.model.gpt import GPT, STD
from demix.model.manifest import Branched, ExpertManifest

# Metrics that are counted separately for each branch.
OWN = ("tokens", "data_sha256", "experts")


def merge_experts(directory: Path, weights: dict[str, float], output: Path, card: str | None = None) -> None:
    """Write a model to `output` with one expert, `dense`: the average of the experts of `directory` by `weights`.

    Tokens are counted as in `learned_of`. README.md holds `card` (`demix.report.card.merged_card`). Raises DemixError
    as `averaged` does.
    """
    model, parents = averaged(directory, weights), parents_of(directory, weights)
    description, lineage = _records(directory, parents)
    lineage["parents"] = origins_of(weights, parents)
    save_model(model, output, description, lineage, tokenizer_path(directory), card)


def merge_routed(directory: Path, output: Path, experts: Sequence[str] = (), card: str | None = None) -> None:
    """Write a token-routed model to `output`, in which each token uses two of `experts` (default: all) in every layer.

    Experts that were trained next to an anchor are merged with it (`_with_anchor`). Other experts get random routers,
    which must be trained (`_with_random_routers`). The tokenizer is copied. README.md holds `card`. Raises DemixError
    for a single expert and for masked models.
    """
    described, anchored = describe(directory), learned_anchored(directory)
    experts = tuple(experts) or expert_names(directory)
    if not anchored:
        refuse_routed(directory, "cannot be merged again")
    refuse_masked(directory, "cannot become token-routed")
    if len(experts) + anchored < 2 or experts == (DENSE_EXPERT,):
        cure = "merge a model of kind demix, branched or anchored"
        raise DemixError(directory, "has only one expert, but a token-routed model needs several", cure)
    parents = {expert: expert_lineage(directory, expert) for expert in experts}
    model = (_with_anchor if anchored else _with_random_routers)(directory, parents)
    description, lineage = _records(directory, parents)
    if whole_models(directory):
        description["expert_scope"] = "feedforward"
    counts = parameters(model.architecture, model.vocab_size)
    description["shared_parameters"], description["expert_parameters"] = counts
    hashes = {expert: one.sha256 for expert, one in parents.items()}
    if anchored and isinstance(described.parent, Branched):
        hashes = {DENSE_EXPERT: described.parent.state_sha256} | hashes
    lineage["choices"] = [{"expert": expert, "sha256": sha256} for expert, sha256 in hashes.items()]
    save_model(model, output, description, lineage, tokenizer_path(directory), card)


def _records(directory: Path, parents: Mapping[str, ExpertManifest]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The description of a merge of the experts `parents` in `directory`, and its lineage without its origin."""
    described, learned = describe(directory), learned_of(parents.values())
    description = described.content | {"kind": "merged"}
    if whole_models(directory):
        # They share no weights, so only the parents' data and tokens are recorded.
        own = {key: learned[key] for key in ("steps", "tokens", "data_sha256")}
        description |= own | {"tokens_seed": sum(learned["seeds"].values())}
    return description, learned | {"parent": None, "tokenizer_sha256": described.tokenizer_sha256}


def _with_random_routers(directory: Path, parents: Mapping[str, ExpertManifest]) -> GPT:
    """The merge of the experts `parents` from which a joint training starts (BTX).

    Feedforwards are those of the experts. All other weights are the shared ones, or, if experts are whole models, their
    average. Routers are random (Sukhbaatar et al. 2024, section 3.2), drawn from N(0, 0.02²) with a seed from the
    experts' hashes.
    """
    described, whole = describe(directory), whole_models(directory)
    architecture = described.architecture.merged_routed(len(parents))
    shared: Tensors = {} if whole else load_shared(directory)
    if whole:
        average = averaged(directory, dict.fromkeys(parents, 1 / len(parents)))
        shared = {name: one.detach() for name, one in average.named_parameters() if ".feedforward." not in name}
    stacks: dict[str, list[torch.Tensor]] = {}
    for expert in parents:
        for name, tensor in load_expert(directory, expert).items():
            if ".feedforward." in name:
                stacks.setdefault(name, []).append(tensor)
    stacked = {name: torch.stack(stack) for name, stack in stacks.items()}
    hashes = [one.sha256 for one in parents.values()]
    for number in range(architecture.layers):
        name = f"blocks.{number}.feedforward.router"
        generator = torch.Generator().manual_seed(seed_for(0, name, *hashes))
        router = STD * torch.randn(len(parents), architecture.width, generator=generator)
        stacked[name] = router.to(shared["token_embedding"])
    described = described.replace(architecture=architecture, expert_scope="feedforward")
    return assembled(described, shared, {DENSE_EXPERT: stacked})


def _with_anchor(directory: Path, parents: Mapping[str, ExpertManifest]) -> GPT:
    """The merge of the experts `parents` with their anchor: unchanged feedforwards and router rows, the anchor's first.

    There is no joint training (FlexOlmo, Shi et al. 2025, arXiv 2507.07024). Raises DemixError if experts differ in
    their shared weights or their anchor.
    """
    shared: Tensors = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for expert in parents:
        for name, tensor in load_expert(directory, expert).items():
            if ".feedforward." in name:
                anchor, own = torch.split(tensor, 1)
                stacks.setdefault(name, [anchor]).append(own)
                same = torch.equal(anchor, stacks[name][0])
            else:
                same = torch.equal(tensor, shared.setdefault(name, tensor))
            if not same:
                cause = f"has another {name} than earlier experts, although training does not change it"
                raise DemixError(expert_files(directory, expert)[1], cause, "merge experts of one parent")
    described = describe(directory)
    stacked = {name: torch.cat(stack) for name, stack in stacks.items()}
    architecture = described.architecture.merged_routed(len(parents) + 1)
    described = described.replace(architecture=architecture, expert_scope="feedforward")
    return assembled(described, shared, {DENSE_EXPERT: stacked})


def learned_anchored(directory: Path) -> bool:
    """Whether the experts in `directory` are whole models, each with an anchor next to its own feedforwards."""
    return whole_models(directory) and bool(describe(directory).architecture.routed)


def averaged(directory: Path, weights: Mapping[str, float], name: str = DENSE_EXPERT) -> GPT:
    """The model in `directory` with one expert, called `name`: the average of its experts by `weights`.

    Averages are computed in float64 and cast to the type of the experts; one expert is in memory at a time. Raises
    DemixError for weights that are negative or do not sum to 1, and for an unknown or damaged expert.
    """
    refuse_routed(directory, "cannot be averaged")
    refuse_weights(weights)
    parents, described = parents_of(directory, weights), describe(directory)
    own: Tensors = {}
    total: Tensors = {}
    # Neither the order of the experts nor their names change a bit.
    for expert in sorted(parents, key=lambda expert: (parents[expert].sha256, weights[expert])):
        own = load_expert(directory, expert)
        for key, tensor in own.items():
            part = weights[expert] * tensor.double()
            total[key] = total[key].add_(part) if key in total else part
    average = {key: total[key].to(tensor.dtype) for key, tensor in own.items()}
    return assembled(described, load_shared(directory), {name: average})


def join_branches(branches: Sequence[Path], output: Path) -> None:
    """Join the models in `branches`, each with one expert that is a whole model, into one model directory `output`.

    The tokens of a dense warm start are counted once. Raises DemixError if a branch is damaged, differs from the first
    in more than its data, or has an expert with the same name.
    """
    first, *others = descriptions = [describe(branch).content for branch in branches]
    for branch, other in zip(branches[1:], others, strict=True):
        for key in sorted((first.keys() | other.keys()) - {*OWN}):
            if first.get(key) != other.get(key):
                cause = f"has {key} {other.get(key)}, but {branches[0]} has {first.get(key)}"
                raise DemixError(branch / "model.json", cause, "train all experts with the same settings")
    seed = first.get("tokens_seed", 0)
    whole = first | {
        "tokens": seed + sum(one["tokens"] - seed for one in descriptions),
        "data_sha256": {name: sha256 for one in descriptions for name, sha256 in one["data_sha256"].items()},
    }
    digests: dict[str, str] = {}
    with replacing(output, directory=True) as temporary:
        load_shared(branches[0])
        copy_checked(branches[0] / SHARED, temporary / SHARED, first["shared_sha256"])
        copy_tokenizer(tokenizer_path(branches[0]), temporary, first.get("tokenizer_sha256"))
        for branch in branches:
            for name in expert_names(branch):
                if name in digests:
                    raise DemixError(branch, f"has an expert {name}, like an earlier branch", "name each branch once")
                digests[name] = copy_expert(branch, name, temporary)
        write_json(temporary / "model.json", whole | {"experts": digests})


def join_metrics(metrics: Sequence[Path], output: Path) -> None:
    """Write the metrics of several trainings with the same steps to `output`, as the metrics of one training.

    Tokens are summed over the trainings; the tokens of a dense warm start are counted once. A loss is the mean over the
    trainings. Tokens per second are computed as if one process did the trainings one after the other. Gradient norms
    are kept per training. Raises DemixError if the steps differ.
    """
    parts = [read_json_lines(path) for path in metrics]
    for path, rows in zip(metrics, parts, strict=True):
        if [row["step"] for row in rows] != [row["step"] for row in parts[0]]:
            raise DemixError(path, f"has other steps than {metrics[0]}", "train all experts with the same settings")
    begun = next((row["tokens"] for row in parts[0] if "branched_from" in row), 0)
    write_json_lines(output, [_joined(rows, begun) for rows in zip(*parts, strict=True)])


def _joined(rows: Sequence[Mapping[str, Any]], begun: int) -> dict[str, Any]:
    """One row from the rows of several trainings for the same event; `begun` is the number of the seed's tokens."""
    joined = {key: value for row in rows for key, value in row.items() if key not in ("gradient_norm", "loss_scale")}
    joined["tokens"] = begun + sum(row["tokens"] - begun for row in rows)
    joined |= {key: fmean(row[key] for row in rows) for key in ("loss", "dev_loss") if key in joined}
    if "tokens_per_second" in joined:
        joined["tokens_per_second"] = harmonic_mean([row["tokens_per_second"] for row in rows])
    if "synced_bytes" in joined:
        joined["synced_bytes"] = sum(row["synced_bytes"] for row in rows)
    return joined


def parents_of(directory: Path, weights: Mapping[str, float]) -> dict[str, ExpertManifest]:
    """The descriptions of the experts of the model in `directory` that have a weight."""
    # Zero times an infinite parameter would be NaN, so an expert with weight zero is left out.
    return {name: expert_lineage(directory, name) for name, weight in weights.items() if weight}


def learned_of(experts: Collection[ExpertManifest]) -> dict[str, Any]:
    """The steps, tokens and data of several `experts` together, and the tokens of the states from which they started.

    These states, `seeds`, are listed by sha256. A state from which several experts started is counted once.
    """
    seeds = {sha256: tokens for one in experts for sha256, tokens in one.seeds.items()}
    own = sum((one.tokens or 0) - sum(one.seeds.values()) for one in experts)
    return {
        "steps": max(one.steps or 0 for one in experts),
        "tokens": sum(seeds.values()) + own,
        "data_sha256": {domain: sha256 for one in experts for domain, sha256 in one.data_sha256.items()},
        "seeds": seeds,
    }


def origins_of(weights: Mapping[str, float], parents: Mapping[str, ExpertManifest]) -> dict[str, dict[str, Any]]:
    """The record of an average's `parents`: the weight and the sha256 of each."""
    return {name: {"weight": weights[name], "sha256": lineage.sha256} for name, lineage in parents.items()}


def parse_weights(text: str, option: str = "--weights") -> dict[str, float]:
    """The value of `option`, such as `parliament=0.5,novels=0.5`, as weights by expert."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        try:
            if not equals or name in weights:
                raise ValueError
            weights[name] = float(number)
        except ValueError:
            cure = "give each expert once, as in parliament=0.5,novels=0.5"
            raise DemixError(f"{option} {text}", f"{part.strip()!r} is not NAME=NUMBER", cure) from None
    return weights


def prior_weights(path: Path, model: str, domain: str, experts: str, kind: str = "history") -> dict[str, float]:
    """The prior of a domain over the experts of a model, from a table of priors.

    `kind` is the value of the column weights: `history` for the cached prior with this rule, or `fitted`.

    `path` is evaluations/<domain>.priors.parquet or a run's priors.parquet. `experts` is the label of the set of
    experts: training, all or minus-<domain>. Raises DemixError if the table has no such prior.
    """
    rows = read_parquet(path).to_pylist()
    wanted = {"model": model, "domain": domain, "experts": experts, "weights": kind}
    found = {row["expert"]: row["prior"] for row in rows if wanted.items() <= row.items()}
    if not found:
        there = sorted({f"{row['model']}/{row['experts']} on {row['domain']}" for row in rows})
        wanted_name = f"{model}/{experts} on {domain}"
        raise DemixError(
            path, f"holds no prior of {wanted_name} ({kind})", nearest(wanted_name, there, "run the evaluation first")
        )
    return found


def refuse_weights(weights: Mapping[str, float]) -> None:
    """Raise DemixError for weights that are negative or do not sum to 1."""
    for name, weight in weights.items():
        if not weight >= 0:
            raise DemixError(f"weight of {name}", f"is {weight}", "give 0 or more")
    total = sum(weights.values())
    if not abs(total - 1) <= 1e-6:
        raise DemixError("weights", f"sum to {total:.9g}", "give weights that sum to 1")


def join_trained(branches: list[Path], metrics_of: Sequence[str], output: Path, metrics: Path) -> None:
    """Join experts that are whole models, each trained by itself, to one model.

    `metrics_of` are the metrics of their trainings, in the same order.
    """
    join_branches(branches, output)
    join_metrics([Path(path) for path in metrics_of], metrics)
