"""The section `lm_eval`: tasks of EleutherAI's lm-evaluation-harness that a run's models are put to."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from demix.config.evaluation import rule_name
from demix.settings import DistinctItems, Integer, Number, Settings, Switch, Text

# There the mixture by the prior has a name of its own, `average`, as for `demix lm-eval`.
HarnessWeights = Literal["average"] | Annotated[Text, AfterValidator(rule_name)]


class HarnessTasks(Settings):
    """What is asked of the harness, the same of every model."""

    tasks: DistinctItems[Text] = Field(
        min_length=1, description="Tasks, groups or tags of the harness, or patterns of them: [arc_easy, mmlu_*]."
    )
    include_path: Text | None = Field(
        default=None, description="Folder with YAML files of more tasks. If a file in it changes, the tasks run again."
    )
    shots: Annotated[Integer, Field(ge=0)] | None = Field(
        default=None, description="Few-shot examples before each document; null means the task's own number."
    )
    limit: Annotated[Number, Field(gt=0)] | None = Field(
        default=None, description="Documents of each task; below 1, a fraction of its documents; null means all."
    )


class HarnessSection(HarnessTasks):
    """Tasks of EleutherAI's lm-evaluation-harness, which the trained models do."""

    models: DistinctItems[Text] = Field(
        default=(),
        description="Rows of `models` that do the tasks. Empty: all but domain-token and masked models, which cannot.",
    )
    weights: DistinctItems[HarnessWeights] = Field(
        default=("tempered",),
        min_length=1,
        description="Rules that mix the experts, each a row of the table: as in `evaluation.weights`, without numbers "
        "of tokens, or average.",
    )
    offline: Switch = Field(
        default=True,
        description="Read the tasks' data only from local files and the cache of Hugging Face's datasets. With false "
        "one job fetches what the cache lacks, on the machine where downloads run. Changing this key reruns nothing.",
    )
