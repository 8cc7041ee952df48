"""The keys of a row of `models` that say with which state of another model it begins, and on what its experts train."""

from typing import Annotated, Any, Literal

from pydantic import Field

from demix.config.rows import SCHEDULES
from demix.settings import Integer, Positive, Switch, Text

BRANCHING: dict[str, Any] = {
    "parent": Annotated[
        Text,
        Field(
            description="A row of kind dense. The model begins with the state that this row's model had after "
            "`seed_tokens` tokens (a seed phase): the dense feedforward is copied into every expert, and training "
            "goes on. A branch has all its parent's settings; those of time and memory can differ, and dev_blocks. "
            "Or the folder of a dense model, such as imported/gpt2 that `demix import` wrote: the model begins with "
            "its parameters, and with a training of its own."
        ),
    ],
    "seed_tokens": Annotated[
        Integer,
        Field(
            ge=0,
            description="Tokens of the seed phase, rounded down to whole steps. They are a part of the model's "
            "`tokens`. 0 trains from scratch.",
        ),
    ],
    "schedule": Annotated[
        Literal[SCHEDULES],
        Field(
            description="What follows the seed phase. `continue`, which holds where the key is absent (but for kind "
            "routed, where `restart` does): the parent's schedule and moments of Adam go on; a row of kind routed then "
            "needs match: updates. `restart`: fresh moments, no "
            "warm-up, and the peak rate, which falls to zero over the tokens that remain. Such a row can have tokens, "
            "sequences, a learning rate and a warm-up of its own, and any kind but domain_token."
        ),
    ],
    "data": Annotated[
        Text,
        Field(
            description="The clustering (section `clusterings`) on whose clusters the experts train, one expert per "
            "cluster, with equal tokens. Without it the experts train on the domains."
        ),
    ],
    "experts_per_job": Annotated[
        Positive,
        Field(
            description="Experts of a row of kind branched that one job trains, one after the other: fewer starts, and "
            "fewer jobs at a time. It changes no result. Without the key each expert is a job of its own."
        ),
    ],
    "averages": Annotated[
        Switch,
        Field(
            description="Score averages of the parameters of a row of kind branched, too: one by equal weights, and "
            "for each domain one by its cached prior. Each costs what one model costs."
        ),
    ],
    "merged_routed": Annotated[
        Switch,
        Field(
            description="Score the experts of a row of kind demix as a token-routed model, too, which is made without "
            "training: each token chooses two of them in every layer, by the cosine of its state with the mean state "
            "of each expert's domain (or cluster) over 20 blocks of dev text."
        ),
    ],
}
