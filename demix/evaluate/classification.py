"""Classification by a mixture of experts: accuracy per mixing method, from the stored log-probabilities of labels.

Sources: Gururangan et al. 2023, section 5.1 and appendix A.7; Holtzman et al. 2021 for calibration. The log-probability
of a label is the sum over its tokens of log Σ_j g[t, j]·p_j(token), and the likeliest label is chosen. A routing (a
mixing method for tasks) gives the weights g. If they depend only on the text, earlier tokens of the label are part of
the text.

The released code mixes whole labels: it applies a softmax over labels to each expert's log-probabilities, and chooses
by Σ_j g[j]·softmax_j(label). Each routing with the same weights for all tokens also has a row for this method.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.special import log_softmax

from demix.config.evaluation import Temperature, WeightsName
from demix.config.mixing import DEFAULTS, parsed_weights
from demix.config.tasks import Task
from demix.data.cluster import Clusterer
from demix.data.examples import Prompt, prompts, read_examples
from demix.errors import DemixError
from demix.evaluate.choice import mixing_of
from demix.evaluate.columns import TASK_WEIGHTS, TASKS, table_schema
from demix.evaluate.intervals import FEWEST, RESAMPLES, bounds
from demix.files import read_parquet, sha256_file, write_parquet
from demix.mix.mixtures import Mixture, keep_top
from demix.mix.priors import accuracy_log_priors
from demix.mix.rules import History, PriorAlone, Tempered, WeightsRule, weights_rule
from demix.model.clusters import refuse_other_clusters
from demix.run.systems import ClassifiedModel
from demix.settings import DistinctItems, Positive, Settings


class Classification(Settings):
    """The tasks of a classification, the models, and the routings."""

    tasks: dict[str, Task]
    models: tuple[ClassifiedModel, ...]
    weights: DistinctItems[WeightsName]
    temperature: Temperature
    top_k: DistinctItems[Positive] = ()
    seed: int = 1


@dataclass(frozen=True)
class Scored:
    """The log p in nats of a prompt's tokens under E experts: of its context [N, E] and of each label [n, E].

    If the task is calibrated, `cue` has the same log p for the prompt without the text.
    """

    prompt: Prompt
    context: np.ndarray
    labels: tuple[np.ndarray, ...]
    cue: "Scored | None" = None

    @property
    def sums(self) -> np.ndarray:
        """log p [L, E] in nats of each label under each expert; with a cue, minus log p without the text."""
        found = np.stack([label.sum(axis=0) for label in self.labels])
        return found if self.cue is None else found - self.cue.sums


def schema_of(experts: int) -> pa.Schema:
    """The columns of a table of scores. Rows with label -1 are of the context."""
    columns = {"split": pa.dictionary(pa.int8(), pa.string()), "seed": pa.int32(), "example": pa.int32()}
    columns |= {"label": pa.int16(), "token": pa.uint32(), "log_probability": pa.list_(pa.float32(), experts)}
    return pa.schema([pa.field(name, kind, False) for name, kind in columns.items()])


def read_scored(path: Path, examples: Path, asked: Sequence[Prompt]) -> tuple[tuple[str, ...], list[Scored]]:
    """The experts of a table of scores, and its scores of the prompts `asked`.

    Raises DemixError if the table has scores for other examples than those in the file `examples`, or other prompts.
    """
    table = read_parquet(path)
    about = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    if about.get("examples_sha256") != sha256_file(examples):
        raise DemixError(path, f"has scores for other examples than those in {examples}", "score the task again")
    experts = tuple(about["experts"].split(","))
    scores = table.column("log_probability").combine_chunks().flatten().to_numpy()
    scores = scores.reshape(-1, len(experts)).astype(np.float64)
    places = table.select(["split", "seed", "example", "label"]).to_pandas()
    parts = {place: scores[rows] for place, rows in places.groupby(list(places), observed=True).indices.items()}
    found = []
    for prompt in asked:
        place = (prompt.split, prompt.seed, prompt.example)
        try:
            labels = tuple(parts[*place, label] for label in range(len(prompt.choices)))
        except KeyError:
            cause = f"lacks example {prompt.example} of {prompt.split}"
            raise DemixError(path, cause, "score the task again") from None
        # A context without tokens has no row.
        found.append(Scored(prompt, parts.get((*place, -1), scores[:0]), labels))
    return experts, with_cues(found)


def with_cues(scored: Sequence[Scored]) -> list[Scored]:
    """`scored` with each prompt's cue, if there are cues among them."""
    cues = {(one.prompt.seed, one.prompt.example): one for one in scored if one.prompt.split == "cue"}
    return [replace(one, cue=cues.get((one.prompt.seed, one.prompt.cue))) for one in scored]


@dataclass(frozen=True)
class TaskRouting:
    """A way to weight experts: a row of tasks.parquet.

    `log_priors` are the log weights [E] by seed and number of a test example; `rule` adds the evidence of the text.
    `reads` names other data that it uses, such as test labels. `top_k` are the numbers of experts to keep, one row
    each; None keeps all. With `released`, labels are mixed as in the released code.
    """

    name: str
    log_priors: Callable[[Scored], np.ndarray]
    rule: WeightsRule = field(default_factory=PriorAlone)
    reads: str = ""
    temperature: float | None = None
    top_k: tuple[int | None, ...] = (None,)
    expert: str = ""
    released: bool = False

    @property
    def mixes(self) -> bool:
        """Whether the routing weights experts by a method of its own, depending on the test example."""
        return self.name not in ("dense", "average") and not (self.expert or self.released)


def classify(
    run: Path, given: Classification, output: Path, weights: Path | None = None, harness: Sequence[Path] = ()
) -> None:
    """Write the accuracy of every model, task and routing to `output`, and the weights of each routing to `weights`.

    `run` is the run's folder, with examples/<task>.parquet, tasks/<model>/<task>.parquet, clusterers, and the
    parameters chosen on dev. The rows of the files `harness` follow. Raises DemixError for scores of other examples,
    and for experts of other clusters.
    """
    rows: list[dict[str, Any]] = []
    weighted: list[dict[str, Any]] = []
    for name, task in given.tasks.items():
        examples = run / "examples" / f"{name}.parquet"
        asked = list(prompts(task, read_examples(examples)))
        measured: dict[str, tuple[tuple[str, ...], Mapping[str, np.ndarray]]] = {}
        for model in given.models:
            experts, scored = read_scored(run / "tasks" / model.folder / f"{name}.parquet", examples, asked)
            near = None
            if model.routing:
                clusters = run / "clusters" / model.routing
                refuse_other_clusters(run / "models" / model.folder, clusters, experts)
                if model.routing not in measured:
                    measured[model.routing] = distances_of(clusters, asked)
                names, rows_of = measured[model.routing]
                columns = [names.index(expert) for expert in experts]
                near = {context: row[columns] for context, row in rows_of.items()}
            tempered = mixing_of(run / "models" / model.folder)
            about = {
                "task": name, "model": model.model, "n_experts": len(experts), "clustering": model.routing,
                "shots": task.shots, "calibrated": task.calibrated, "seed": model.seed,
            }  # fmt: skip
            for routing in routings(task, experts, scored, given, near, tempered) if model.mixes else (DENSE,):
                how = {"routing": routing.name, "temperature": routing.temperature}
                how |= {"reads": routing.reads, "expert": routing.expert}
                if weights is not None and routing.mixes:
                    means = zip(experts, mean_weights(scored, routing).tolist(), strict=True)
                    weighted += [about | how | {"expert": expert, "weight": weight} for expert, weight in means]
                for top_k, right in zip(routing.top_k, answers(scored, routing, task), strict=True):
                    rows.append(about | how | {"top_k": top_k} | judged(right, chance(asked), given.seed))
    for path in harness:
        rows += read_parquet(path).to_pylist()
    write_parquet(pa.Table.from_pylist(rows, table_schema(TASKS)), output)
    if weights is not None:
        write_parquet(pa.Table.from_pylist(weighted, table_schema(TASK_WEIGHTS)), weights)


# The only column of a model without experts.
DENSE = TaskRouting("dense", lambda one: np.zeros(1))


def distances_of(folder: Path, asked: Iterable[Prompt]) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """The names of the clusters in `folder`, and the squared distances [K] to their centres by context of a test.

    A context consists of demonstrations and text, as in appendix A.7 of c-BTM.
    """
    clusterer = Clusterer.open(folder)
    contexts = list(dict.fromkeys(prompt.context for prompt in asked if prompt.split != "cue"))
    found = clusterer.distances(clusterer.embedding.points(contexts))
    return clusterer.names, dict(zip(contexts, found, strict=True))


def routings(
    task: Task,
    experts: tuple[str, ...],
    scored: Sequence[Scored],
    given: Classification,
    near: Mapping[str, np.ndarray] | None,
    tempered: Tempered,
) -> Iterator[TaskRouting]:
    """All routings of a model with `experts`.

    A routing that mixes experts also occurs with each `top_k` smaller than their number. `near` has the distances [E]
    of each context to the experts' clusters, if they have clusters. If the rule `tempered` is named without parameters,
    it has the parameters of the argument `tempered`; other rules then have their default parameters.
    """
    uniform = np.zeros(len(experts))
    mixtures = [TaskRouting("average", lambda one: uniform)]
    for weights in given.weights:
        parsed = parsed_weights(weights)
        if not parsed.rules.routed:
            if parsed.open:
                parsed = replace(parsed, parameters=DEFAULTS[parsed.family])
            rule = tempered if weights == "tempered" else weights_rule(parsed)
            mixtures.append(TaskRouting(str(weights), lambda one: uniform, rule))
    if near is not None:
        hot, by_context = given.temperature, near
        for name, rule in (("cluster", PriorAlone()), ("cluster+history", History())):
            mixtures.append(TaskRouting(name, lambda one: -by_context[one.prompt.context] / hot, rule, temperature=hot))
    for name, split, reads in (("fixed, 8 + 8", "validation", "8 more labels"), ("fixed, 8", "permutation", "")):
        if any(one.prompt.split == split for one in scored):
            by_seed = performance(scored, split, task, experts)
            mixtures.append(TaskRouting(name, lambda one, by_seed=by_seed: by_seed[one.prompt.seed], reads=reads))  # type: ignore[misc]
    updated = updating(scored, task, experts)
    mixtures.append(
        TaskRouting("updating", lambda one: updated[one.prompt.seed, one.prompt.example], reads="test labels")
    )
    fewer = (None, *(k for k in given.top_k if k < len(experts)))
    for mixture in mixtures:
        # With equal weights there are no likeliest experts.
        whole = mixture if mixture.name == "average" else replace(mixture, top_k=fewer)
        yield whole
        if isinstance(mixture.rule, PriorAlone):
            yield replace(whole, name=f"{mixture.name}, released", released=True)
    for name, row in zip(experts, np.where(np.eye(len(experts)), 0.0, -np.inf), strict=True):
        yield TaskRouting("one expert", lambda one, row=row: row, expert=name)  # type: ignore[misc]


def answers(scored: Sequence[Scored], routing: TaskRouting, task: Task) -> np.ndarray:
    """Whether the choice for each test is right, [K, S, N]: for each of `routing.top_k`, seed and test."""
    tests = [one for one in scored if one.prompt.split == "test"]
    right = [[choice(row, one.prompt) == one.prompt.answer for row in likelihoods(one, routing)] for one in tests]
    return np.array(right).T.reshape(len(routing.top_k), len(task.seeds), -1)


def likelihoods(one: Scored, routing: TaskRouting) -> np.ndarray:
    """log p [K, L] of each label of a prompt under a mixture with each of `routing.top_k`, in nats.

    With a cue, log p of the label without the text is subtracted; it uses the same weights. For a `released` routing,
    log p is normalised over the labels.
    """
    log_g = weights_of(one, routing)
    if routing.released:
        by_expert = log_softmax(one.sums, axis=0)  # [L, E]
        return np.stack([np.logaddexp.reduce(keep_top(log_g[0], k) + by_expert, axis=1) for k in routing.top_k])
    starts = np.cumsum([0, *map(len, one.labels)])[:-1]
    found = np.zeros((len(routing.top_k), len(one.labels)))
    for row, top_k in zip(found, routing.top_k, strict=True):
        kept = keep_top(log_g, top_k)
        for sign, some in ((1, one), (-1, one.cue)):
            if some is not None:
                mixed = np.logaddexp.reduce(kept + np.concatenate(some.labels), axis=1)
                row += sign * np.add.reduceat(mixed, starts)
    return found


def weights_of(one: Scored, routing: TaskRouting) -> np.ndarray:
    """log g [n, E], the weights that predict the tokens of all labels of a prompt, one label after the other."""
    log_prior = log_softmax(routing.log_priors(one), axis=-1)
    if isinstance(routing.rule, PriorAlone):
        return np.broadcast_to(log_prior, (sum(map(len, one.labels)), len(log_prior)))
    found = []
    for label in one.labels:
        tokens = np.concatenate([one.context, label])[None]
        log_g = Mixture(routing.rule, log_prior).weights(tokens, np.ones(tokens.shape[:2], bool))
        found.append(log_g[0, len(one.context) :])
    return np.concatenate(found)


def mean_weights(scored: Sequence[Scored], routing: TaskRouting) -> np.ndarray:
    """The mean, over all tests, of each expert's weight [E] when the first token of a label is predicted.

    This weight depends only on the context (Gururangan et al. 2023, appendix A.7).
    """
    tests = [replace(one, labels=one.labels[:1]) for one in scored if one.prompt.split == "test"]
    means: np.ndarray = np.mean([np.exp(weights_of(one, routing)[0]) for one in tests], axis=0)
    return means


def choice(found: np.ndarray, prompt: Prompt) -> int:
    """The number of the likeliest label; if several are, the one with the smallest hash of context and label."""
    best = np.flatnonzero(found == found.max())
    return int(min(best, key=lambda number: _hash(prompt.context, prompt.choices[number])))


def performance(scored: Sequence[Scored], split: str, task: Task, experts: Sequence[str]) -> dict[int, np.ndarray]:
    """log weights [E] by seed: the softmax of each expert's accuracy on the prompts of `split`."""
    return {seed: log_softmax(_by_expert(scored, split, seed, experts).mean(axis=0), axis=-1) for seed in task.seeds}


def updating(scored: Sequence[Scored], task: Task, experts: Sequence[str]) -> dict[tuple[int, int], np.ndarray]:
    """log weights [E] by seed and test, from the experts' accuracy on earlier tests. This uses test labels."""
    return {
        (seed, number): log_prior
        for seed in task.seeds
        for number, log_prior in enumerate(accuracy_log_priors(_by_expert(scored, "test", seed, experts)))
    }


def chance(asked: Iterable[Prompt]) -> float:
    """The accuracy without the texts: by guessing, or by always choosing one label, whichever is higher.

    If each example has its own labels, it is the accuracy of guessing.
    """
    tests = [prompt for prompt in asked if prompt.split == "test"]
    guessed = float(np.mean([1 / len(prompt.choices) for prompt in tests]))
    if len({prompt.choices for prompt in tests}) > 1:
        return guessed
    return max(guessed, float(np.bincount([prompt.answer for prompt in tests]).max() / len(tests)))


def judged(right: np.ndarray, by_chance: float, seed: int) -> dict[str, Any]:
    """Accuracy, its 95% interval, chance, and whether the interval excludes chance, of answers [S, N].

    For one seed, the interval is the exact one of a binomial proportion (Clopper and Pearson); for several seeds, a
    bootstrap over seeds and examples. With fewer than 20 examples there is no interval.
    """
    seeds, count = right.shape
    low, high = None, None
    if count >= FEWEST and seeds == 1:
        from scipy.stats import binomtest

        low, high = binomtest(int(right.sum()), count).proportion_ci(0.95, "exact")
    elif count >= FEWEST:
        low, high = bounds(resampled_means(right, seed))
    sure = low is not None and high is not None and not low <= by_chance <= high
    return {
        "seeds": seeds, "examples": count, "accuracy": float(right.mean()),
        "accuracy_low": low, "accuracy_high": high, "chance": by_chance, "judged": sure,
    }  # fmt: skip


def resampled_means(right: np.ndarray, seed: int) -> np.ndarray:
    """The means [R] of answers [S, N] whose seeds and examples are both drawn with replacement."""
    generator = np.random.default_rng(seed)
    seeds, count = right.shape
    rows = generator.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES) / seeds
    columns = generator.multinomial(count, np.full(count, 1 / count), RESAMPLES) / count
    means: np.ndarray = np.einsum("rs,rn,sn->r", rows, columns, right.astype(np.float64))
    return means


def _by_expert(scored: Sequence[Scored], split: str, seed: int, experts: Sequence[str]) -> np.ndarray:
    """Whether each single expert is right on each prompt of a split and seed, [N, E]."""
    some = [one for one in scored if (one.prompt.split, one.prompt.seed) == (split, seed)]
    return np.array([[choice(sums, one.prompt) == one.prompt.answer for sums in one.sums.T] for one in some])


def _hash(context: str, label: str) -> str:
    return hashlib.sha256(f"{context}\0{label}".encode()).hexdigest()
