"""The section `tasks`: texts with labels, and how a model is asked which label belongs to a text."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from demix.config.domains import SourceSection
from demix.errors import DemixError
from demix.settings import DistinctItems, Integer, Items, Positive, Seed, Settings, Switch, Text

# Other examples with labels on which the accuracy of each expert is measured (Gururangan et al. 2023, A.7).
OTHERS = 8
# Each example is asked once for each of its labels.
MAX_LABELS = 1000
# The largest fraction of the examples of a source that may have no text, or text that is not UTF-8.
LEFT_OUT = 0.01


def _template(template: str) -> str:
    if template.count("{text}") != 1 or not template.endswith("{label}") or template.count("{label}") != 1:
        raise ValueError("does not hold {text} once and end with {label}", 'write such as "{text} Topic: {label}"')
    return template


Template = Annotated[Text, AfterValidator(_template)]


class Task(Settings):
    """A task: examples of a text with labels to choose from, and how they are asked."""

    test: SourceSection = Field(description="Source of the examples that are tested.")
    train: SourceSection | None = Field(
        default=None,
        description="Source of the demonstrations. null draws them from the tested source: these are not tested.",
    )
    text: Text | Annotated[Items[Text], Field(min_length=1)] = Field(
        default="text", description="Field of the text, or a list of fields, whose texts are joined by newlines."
    )
    label: Text = Field(default="label", description="Field of the right label.")
    labels: dict[Text, Text] = Field(
        default_factory=dict,
        description='The words for the values of `label`, such as `{"0": World, "1": Sports}`. Empty: '
        "all values of the field.",
    )
    template: Template = Field(
        default="{text} {label}", description="How a text is followed by its label. It ends with {label}."
    )
    shots: Annotated[Integer, Field(ge=0)] = Field(
        default=0, description="Demonstrations (examples with their labels) before each text."
    )
    seeds: DistinctItems[Seed] = Field(
        default=(1,), min_length=1, description="Seeds that draw demonstrations and validation examples."
    )
    examples: Positive | None = Field(
        default=200, description="Examples to test, drawn by the hash of their content; null tests all."
    )
    tokens: Positive | None = Field(
        default=None,
        description="Tokens of a text with its label at most; a longer text is shortened. null: an equal share of the "
        "model's context for each demonstration and the text.",
    )
    calibrated: Switch = Field(
        default=False,
        description="Subtract from the log-probability of a label that of the label without the text (Holtzman et al. "
        "2021), so that frequent labels are not the likeliest of all texts.",
    )

    @property
    def pooled(self) -> int:
        """The examples that all seeds may draw demonstrations and validation examples from, at most."""
        return len(self.seeds) * (self.shots + OTHERS)

    @property
    def sources(self) -> dict[str, SourceSection]:
        """The sources of examples by split."""
        splits = {"test": self.test, "train": self.train}
        return {split: source for split, source in splits.items() if source is not None}

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a text."""
        return (self.text,) if isinstance(self.text, str) else self.text


class ExamplesRecipe(Task):
    """A task, the tokens of a block of the models (`length`) and the run's seed."""

    length: Positive
    seed: Seed


def refuse_count(key: str, labels: int) -> None:
    """Raise DemixError unless there are labels to choose from, and few enough to ask for each of them."""
    if labels < 2:
        raise DemixError(key, "has only one label", "give two or more")
    if labels > MAX_LABELS:
        raise DemixError(key, f"has more than {MAX_LABELS} labels", "give fewer")


def check_tasks(tasks: Mapping[str, Task]) -> None:
    """Raise DemixError for a task with keys that do not go together."""
    for name, task in tasks.items():
        key, words = f"config key tasks.{name}", list(task.labels.values())
        if task.calibrated and task.shots and not task.template.removesuffix("{label}").split("{text}")[1].strip():
            cause = "needs words before the label, to which the demonstrations lead where the text is left out"
            raise DemixError(f"{key}.calibrated", cause, "put words between {text} and {label}, or use 0 shots")
        if not task.shots and len(task.seeds) > 1:
            cause = f"has {len(task.seeds)} seeds, which draw demonstrations, for 0 shots"
            raise DemixError(f"{key}.seeds", cause, "give one seed, or shots")
        if words:
            refuse_count(f"{key}.labels", len(words))
        if len(set(words)) < len(words):
            cause = f"gives two labels the word {max(words, key=words.count)}"
            raise DemixError(f"{key}.labels", cause, "give each its own")
