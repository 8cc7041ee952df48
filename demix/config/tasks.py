"""The section `tasks`: texts with labels, and the prompts by which a model chooses the label of a text."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from demix.config.domains import SourceSection
from demix.errors import DemixError
from demix.settings import DistinctItems, Integer, Items, Positive, Seed, Settings, Switch, Text

# Validation examples, on which the accuracy of each expert is measured (Gururangan et al. 2023, A.7).
OTHERS = 8
# The model scores each example once with each label.
MAX_LABELS = 1000
# The maximum fraction of a source's examples that may have no text, or text that is not UTF-8.
LEFT_OUT = 0.01


def _template(template: str) -> str:
    if template.count("{text}") != 1 or not template.endswith("{label}") or template.count("{label}") != 1:
        raise ValueError("must hold {text} once and end with {label}", 'use a form like "{text} Topic: {label}"')
    return template


Template = Annotated[Text, AfterValidator(_template)]


class Task(Settings):
    """A classification task: texts with labels to choose from, and the form of the prompt."""

    test: SourceSection = Field(description="Source of the test examples.")
    train: SourceSection | None = Field(
        default=None,
        description="Source of the demonstrations. null: they are drawn from `test`, and are then not tested.",
    )
    text: Text | Annotated[Items[Text], Field(min_length=1)] = Field(
        default="text", description="Field of the text, or a list of fields, whose texts are joined by newlines."
    )
    label: Text = Field(default="label", description="Field of the right label.")
    labels: dict[Text, Text] = Field(
        default_factory=dict,
        description='The words for the values of `label`, such as `{"0": World, "1": Sports}`. Empty: '
        "all values of the field, as they are.",
    )
    template: Template = Field(
        default="{text} {label}", description="Form of the prompt: text, then label. It ends with {label}."
    )
    shots: Annotated[Integer, Field(ge=0)] = Field(
        default=0, description="Demonstrations (examples with their labels) before each text."
    )
    seeds: DistinctItems[Seed] = Field(
        default=(1,), min_length=1, description="Random seeds of demonstrations and validation examples."
    )
    examples: Positive | None = Field(
        default=200, description="Examples to test, drawn by the hash of their content; null tests all."
    )
    tokens: Positive | None = Field(
        default=None,
        description="Maximum number of tokens of a text with its label; longer texts are shortened. null: each "
        "demonstration and the text get an equal share of the model's context.",
    )
    calibrated: Switch = Field(
        default=False,
        description="Subtract the log-probability that a label has without the text (Holtzman et al. 2021), so that "
        "frequent labels are not preferred for every text.",
    )

    @property
    def pooled(self) -> int:
        """The maximum number of examples from which all seeds draw demonstrations and validation examples."""
        return len(self.seeds) * (self.shots + OTHERS)

    @property
    def sources(self) -> dict[str, SourceSection]:
        """The sources of the examples, by split."""
        splits = {"test": self.test, "train": self.train}
        return {split: source for split, source in splits.items() if source is not None}

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that make up a text."""
        return (self.text,) if isinstance(self.text, str) else self.text


class ExamplesRecipe(Task):
    """A task, the models' context length (`length`) and the run's random seed."""

    length: Positive
    seed: Seed


def refuse_count(key: str, labels: int) -> None:
    """Raise DemixError if there is only one label, or more labels than a task may have."""
    if labels < 2:
        raise DemixError(key, "has only one label", "give two or more")
    if labels > MAX_LABELS:
        raise DemixError(key, f"has more than {MAX_LABELS} labels", "give fewer")


def check_tasks(tasks: Mapping[str, Task]) -> None:
    """Raise DemixError for a task with keys that exclude each other."""
    for name, task in tasks.items():
        key, words = f"config key tasks.{name}", list(task.labels.values())
        if task.calibrated and task.shots and not task.template.removesuffix("{label}").split("{text}")[1].strip():
            cause = "needs words between text and label, because calibration with demonstrations leaves out the text"
            raise DemixError(f"{key}.calibrated", cause, "put words between {text} and {label}, or use 0 shots")
        if not task.shots and len(task.seeds) > 1:
            cause = f"has {len(task.seeds)} seeds of demonstrations, but shots is 0"
            raise DemixError(f"{key}.seeds", cause, "give one seed, or set shots")
        if words:
            refuse_count(f"{key}.labels", len(words))
        if len(set(words)) < len(words):
            cause = f"gives two labels the word {max(words, key=words.count)}"
            raise DemixError(f"{key}.labels", cause, "give each label a word of its own")
