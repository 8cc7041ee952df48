"""The card of a model, as Hugging Face's hub shows it: data, training, lineage of experts, results and limits."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from demix.config.models import DENSE_EXPERT, KINDS
from demix.config.training import Execution
from demix.errors import DemixError, nearest
from demix.files import read_json
from demix.model.checkpoint import describe, expert_lineage, expert_names, whole_models
from demix.model.description import parent_of, read_description, read_lineage, run_of
from demix.model.export import format_of
from demix.model.formats import FORMATS
from demix.model.merge import learned_of, refuse_weights
from demix.model.merge_routed import BLOCKS, learned_anchored
from demix.model.usual import usual_of
from demix.progress import so_many
from demix.report.card_results import (
    MASKED_TASK,
    TEXT_TASK,
    dense_beside,
    index_entries,
    masked,
    model_index,
    planned,
    results_of,
    shown,
)
from demix.report.formats import as_markdown, markdown_rows
from demix.report.page import render
from demix.run.run import Run
from demix.settings import names_of


def model_card(run: Run, model: str) -> str:
    """The card of `models/<model>` of a finished run, as Markdown with YAML front matter.

    All content comes from the run's files; text of others (names, licences) is escaped. Raises DemixError if the run
    has no such model or if a file of the model is missing.
    """
    directory = run.folder / "models" / model
    if not (directory / "model.json").is_file():
        models = sorted(path.parent.name for path in (run.folder / "models").glob("*/model.json"))
        raise DemixError(directory, "is not a model of the run", nearest(model, models, "train the model first"))
    needed = ("kind", "tokens", "steps", "shared_parameters", "expert_parameters")
    description = read_description(directory / "model.json", *needed)
    experts = [read_lineage(path) | {"name": path.stem} for path in (directory / "experts").glob("*.json")]
    # The config's order; experts that the config does not name come last.
    order = [*run.training, *run.novel]
    experts.sort(key=lambda one: (order.index(one["name"]) if one["name"] in order else len(order), one["name"]))
    results = results_of(run, model)
    return _card(
        model,
        ["mixture-of-experts"] * (len(experts) > 1) + [MASKED_TASK] * masked(results),
        model_index(results),
        _about(model, run, description, experts),
        "## Results",
        *shown(results, dense_beside(results, run, model), run),
        "## Data",
        *_data(run, description, experts),
        "## Training",
        *_training(description, experts),
        "## Lineage of the experts",
        _lineage(experts),
        "## Limits",
        _limits(description),
    )


def card_page(run: Run, model: str, card: str) -> str:
    """The page of the card of `models/<model>`: its Markdown without front matter, below the model's label."""
    from markdown_it import MarkdownIt

    label = next((one.label for one in run.planned if one.name == model), model)
    body = MarkdownIt("js-default").render(card.partition("\n---\n")[2].lstrip().partition("\n")[2])
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    return render("card", title=label, paragraphs=[], notes=[], card=body)


def exported_card(directory: Path, expert: str | None) -> str:
    """The card of one expert of the model in `directory`, exported as a model of its own; None is for their mixture.

    A model of one expert and a mixture keep the model's card; a mixture of a model without one has "". An expert has
    the figures of its own domain alone, if it was scored there, and counts its own tokens. Raises DemixError as
    `model_card` does.
    """
    place, folder = directory.resolve(), run_of(directory)
    in_run = (
        place.parent.name == "models" and (folder / "config.json").is_file() and (folder / "results.parquet").is_file()
    )
    run = Run.read(folder) if in_run else None
    whole = expert in (None, DENSE_EXPERT)
    if whole and run and place.name in {one.name for one in run.planned}:
        return _for_transformers(model_card(run, place.name))
    if whole and (place / "README.md").is_file():
        return _for_transformers((place / "README.md").read_text(encoding="utf-8"))
    if expert is None:
        return ""
    description, lineage = read_description(place / "model.json", "kind"), expert_lineage(directory, expert)
    name, usual = f"{place.name}-{expert}", usual_of(directory).get(expert)
    of_run = f" of run {as_markdown(run.name)}" if run else ""
    shared = ", ".join(map(as_markdown, description.get("data_sha256") or {}))
    return _card(
        name,
        [format_of(directory).name],
        index_entries([(expert, "this expert alone", usual.perplexity)] if usual else []),
        f"The expert {as_markdown(expert)} of the model {as_markdown(place.name)} (kind "
        f"{as_markdown(description['kind'])}){of_run}, exported as a model of its own.",
        "## Data",
        f"The whole model learned from {shared}; the expert alone from:" if shared else "",
        *(_data(run, {}, [lineage]) if run else ()),
        _lineage([lineage | {"name": expert}]),
        "## Results",
        f"On test text of its own domain this expert alone has perplexity {usual.perplexity:.2f} and "
        f"{usual.bits_per_byte:.3f} bits per byte. The mixture with the other experts has others."
        if usual
        else "This expert was not scored alone on a domain of its own.",
        "## Limits",
        _limits(description),
    )


def merged_card(directory: Path, weights: dict[str, float], name: str) -> str:
    """The card of the model `name` that averages the experts of the model in `directory` by `weights`."""
    # A folder that is no model is refused before an expert is missed in it.
    describe(directory)
    refuse_weights(weights)
    parents = {expert: expert_lineage(directory, expert) for expert, weight in weights.items() if weight}
    about = (
        f"A dense model: the weighted average of {so_many(len(parents), 'expert')} of the model "
        f"{as_markdown(directory.resolve().name)}, with the weights that its experts share."
    )
    shares = {"weight": {expert: f"{weights[expert]:.4f}" for expert in parents}}
    return _merged_card(directory, name, ["merge"], about, parents, shares)


def merged_routed_card(directory: Path, name: str) -> str:
    """The card of the model `name` whose tokens choose among the experts of the model in `directory`."""
    parents = {expert: expert_lineage(directory, expert) for expert in expert_names(directory)}
    rest = "the average of all their other weights" if whole_models(directory) else "the weights that these share"
    choice = (
        f"a token's choice is by a ridge regression of the domain on the token's state, over {BLOCKS} blocks of dev "
        "text of each expert's domain"
    )
    anchored = learned_anchored(directory)
    if anchored:
        rest, choice = (
            "their anchor and its weights",
            "the experts learned the routers beside the anchor",
        )
    about = (
        f"A model whose tokens choose two of {len(parents) + anchored} experts in every layer: the feedforwards of the "
        f"experts of the model {as_markdown(directory.resolve().name)}, with {rest}. Nothing was trained for it: "
        f"{choice}."
    )
    return _merged_card(directory, name, ["merge", "mixture-of-experts"], about, parents, {})


def _merged_card(
    directory: Path,
    name: str,
    tags: list[str],
    about: str,
    parents: Mapping[str, dict[str, Any]],
    more: Mapping[str, Mapping[str, str]],
) -> str:
    """The card of the model `name` made of the experts `parents`, whose table has `more` columns by heading."""
    description = describe(directory)
    shared = ", ".join(map(as_markdown, description.get("data_sha256") or {}))
    learned, seeds = learned_of(parents.values())
    rows = [
        (expert, *(column[expert] for column in more.values()), f"{one.get('tokens', 0):,}", one["sha256"][:12])
        for expert, one in parents.items()
    ]
    return _card(
        name,
        tags,
        [],
        about,
        "## Parents",
        markdown_rows(("expert", *more, "tokens of its training", "sha256"), rows),
        f"Together these are {learned['tokens']:,} tokens: those of a seed that several began with count once."
        if any(seeds.values())
        else "",
        f"The weights that they share learned from {shared}." if shared else "",
        "## Results",
        "It was not evaluated. The figures of its parents, and of their mixture, are not its own.",
        "## Limits",
        _limits(description),
    )


def _for_transformers(card: str) -> str:
    """The card of a model with one expert for the same model in transformers."""
    return card.replace("library_name: demix\n", "library_name: transformers\n", 1)


def _card(name: str, tags: list[str], index: list[dict[str, Any]], *parts: str) -> str:
    """A card: the YAML front matter, with `model-index` if there are results for it, then the heading and `parts`."""
    front: dict[str, Any] = {
        "library_name": "transformers" if any(name in tags for name in FORMATS) else "demix",
        "license": "other",
        "tags": ["demix", *tags, *([] if MASKED_TASK in tags else [TEXT_TASK])],
    }
    if index:
        front["model-index"] = [{"name": name, "results": index}]
    head = "---\n" + yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip() + "\n---"
    return "\n\n".join(part for part in (head, f"# {as_markdown(name)}", *parts) if part) + "\n"


def _about(model: str, run: Run, description: dict[str, Any], experts: list[dict[str, Any]]) -> str:
    shared, own, architecture = (description[key] for key in ("shared_parameters", "expert_parameters", "architecture"))
    size = f"{shared + len(experts) * own:,} parameters"
    if len(experts) > 1:
        size += f": {shared:,} that all share, and {so_many(len(experts), 'expert')} of {own:,}"
    if routed := architecture.get("routed"):
        size += f", and a token chooses {routed['top_k']} of the {routed['experts']} experts of a routed feedforward"
    label = next((f"“{as_markdown(one.label)}” in tables. " for one in run.planned if one.name == model), "")
    return (
        f"{label}A language model of kind {as_markdown(description['kind'])}, of run {as_markdown(run.name)}, seed "
        f"{planned(model, run)[1]}. It has {size}; {architecture['layers']} layers of width "
        f"{architecture['width']}; "
        f"it reads blocks of {architecture['context']:,} tokens of {description['vocab_size']:,} types.\n\n"
        "Every number here stands in the run's files: `config.json`, `corpus/<domain>/card.json`, `results.parquet` "
        "and those of the model's folder."
    )


def _data(run: Run, description: dict[str, Any], experts: list[dict[str, Any]]) -> Iterator[str]:
    """The data of the model, of its experts, and of the parent model."""
    domains = run.domains
    read: dict[str, str] = {}
    for source in (description, *experts):
        read |= source.get("data_sha256") or {}
    parent = description.get("parent")
    if isinstance(parent, dict):
        name = as_markdown(parent["model"])
        if parent["step"]:
            yield f"It went on from the model {name} after {parent['tokens']:,} tokens, of all these domains."
        else:
            yield f"It began with the parameters of the model {name}, whose data may be among this or not."
    elif parent:
        yield f"It went on from the model {as_markdown(parent)}, whose data is among this."
        read |= read_description(run.folder / "models" / parent / "model.json").get("data_sha256") or {}
    learned = [name for name in domains if name in read]
    # An expert of another run, or of no run, may have been added.
    if not learned:
        return
    cards = {name: read_json(run.folder / "corpus" / name / "card.json") for name in learned}
    hidden = {name for name in learned if domains[name].anonymize}
    rows = [
        (
            name,
            "training" if name in run.training else "novel",
            domains[name].licence or "not stated",
            *(f"{cards[name]['words'][split]:,}" for split in ("train", "dev", "test")),
            f"{cards[name]['leakage']['ngrams']['test']:.1%}",
            "{test_in_train:,} of {test:,}".format(**cards[name]["origins"]),
            read[name][:12],
        )
        for name in learned
    ]
    lengths = sorted({card["leakage"]["ngrams"]["length"] for card in cards.values()})
    known = f"test {'/'.join(map(str, lengths))}-grams seen in train"
    cut = "test documents with pieces in train"
    yield markdown_rows(
        ("domain", "kind", "licence", "words: train", "dev", "test", known, cut, "tokens' sha256"), rows
    )
    yield "Replaced in all text that was read of a domain, before it was split; – is a domain that was not anonymized:"
    categories = sorted({name for card in cards.values() for name in card["replacements"]})
    yield markdown_rows(
        ("domain", *categories),
        [
            (name, *(f"{card['replacements'].get(key, 0):,}" if name in hidden else "–" for key in categories))
            for name, card in cards.items()
        ],
    )


def _training(description: dict[str, Any], experts: list[dict[str, Any]]) -> Iterator[str]:
    done = f"{description['tokens']:,} tokens in {description['steps']:,} steps"
    adapted = [expert for expert in experts if "adaptation" in expert]
    parent = description.get("parent")
    if isinstance(parent, dict) and parent["step"]:
        done += f", the first {parent['tokens']:,} tokens as the model {as_markdown(parent['model'])}"
    elif isinstance(parent, dict):
        known = "not known" if parent.get("tokens") is None else f"{parent['tokens']:,}"
        done += f", beside the tokens of its parent {as_markdown(parent['model'])} ({known})"
    elif parent:
        yield f"{as_markdown(parent)} was trained with:"
        yield markdown_rows(("setting", "value"), _settings(description.get("training") or {}))
        yield f"and then adapted, with all its parameters, on {done}:"
        yield markdown_rows(("setting", "value"), _settings(description.get("adaptation") or {}))
        return
    yield f"{done}:"
    yield markdown_rows(("setting", "value"), _settings(description.get("training") or {}))
    # One run adapts all its experts with the same settings.
    if adapted:
        begun = "the average of the experts" if adapted[0].get("parents") else "a copy of it"
        yield f"{so_many(len(adapted), 'expert')} joined later, trained alone from {begun}:"
        yield markdown_rows(("setting", "value"), _settings(adapted[0]["adaptation"]))


def _lineage(experts: list[dict[str, Any]]) -> str:
    rows = [
        (
            expert["name"],
            parent_of(expert) or "–",
            f"{expert['parent_prior']:.3f}" if "parent_prior" in expert else "–",
            ", ".join(expert.get("data_sha256") or {}) or "–",
            *(f"{expert[key]:,}" if key in expert else "–" for key in ("tokens", "steps")),
            str(expert.get("sha256", "–"))[:12],
        )
        for expert in experts
    ]
    return markdown_rows(("expert", "parent", "the parent's prior", "data", "tokens", "steps", "sha256"), rows)


def _limits(description: dict[str, Any]) -> str:
    limits = [
        "It continues text. It was not tuned to follow instructions, to be right, or to be harmless.",
        "Anonymizing replaces what patterns find: e-mail addresses, phone, card and social security numbers, user "
        "names. Names of people and places stay, and so does what the patterns miss.",
        "A perplexity is that of a token of this run's own tokenizer: compare other models by bits per byte.",
        "A stated licence is what the config says of the text. Where none is stated, ask the source.",
    ]
    kind = KINDS.get(description["kind"])
    if isinstance(description.get("parent"), dict):
        limits.insert(
            2,
            "Every expert began as a copy of a model that had read all training domains. Removing an expert leaves "
            "what that model had learned of its domain in all the others.",
        )
    if kind and kind.has_experts:
        limits.insert(
            2,
            "Text of a training domain also shaped the shared weights, which removing that domain's expert leaves as "
            "they are.",
        )
    if kind and kind.domain_tokens:
        limits.insert(1, "It must be given the token of a training domain; what it says of any other is an oracle's.")
    return "\n".join(f"- {limit}" for limit in limits)


def _settings(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """The settings that define the model; settings of execution are left out."""
    known = {
        key: value for key, value in settings.items() if key not in (*names_of(Execution), "threads", "architecture")
    }
    return [(key, str(value)) for key, value in sorted(known.items())]
