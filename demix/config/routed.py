"""The keys of a row of `models` whose tokens choose their experts, and what such a row trains for them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from demix.config.architecture import Architecture, architecture_from, training_flops_per_token, vocabulary
from demix.errors import DemixError
from demix.settings import Number, Positive

ROUTED: dict[str, Any] = {
    "experts": Annotated[
        Positive,
        Field(le=4096, description="Experts of each routed feedforward of a row of kind routed; 8 without the key."),
    ],
    "top_k": Annotated[
        Positive,
        Field(
            description="Experts that each token of a row of kind routed chooses: 1 (switch, as without the key), 2 "
            "(GShard's top-2) or more."
        ),
    ],
    "every": Annotated[
        Positive,
        Field(
            description="Every how many blocks one has a routed feedforward: 1 (as without the key) stands for all, 2 "
            "for the second, the fourth and so on."
        ),
    ],
    "capacity": Annotated[
        Number,
        Field(
            gt=0,
            # With as many as there are experts, each takes all tokens.
            le=4096,
            description="Tokens of a sequence that an expert takes in training, as a multiple of T / experts: 1.25 "
            "without the key for top_k 1, else 2. First choices come before second ones. Scoring has no such limit.",
        ),
    ],
    "balance": Annotated[
        Number,
        Field(ge=0, description="Weight of the loss that balances the loads of the experts; 0.01 without the key."),
    ],
    "match": Annotated[
        Literal["flops", "updates"],
        Field(
            description="What a row of kind routed shares with a dense model of its `tokens`: `flops` of training (as "
            "without the key), so that it has fewer updates and tokens, or `updates`."
        ),
    ],
}
_SIZES = ("experts", "top_k", "every", "capacity", "balance")


def routed_row(own: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a row of kind routed with their defaults.

    One that begins with the state of a parent restarts, unless it says otherwise.
    """
    sizes: dict[str, Any] = {"experts": 8, "top_k": 1, "every": 1, "balance": 0.01, "match": "flops", **own}
    begins = {"schedule": "restart"} if own.get("parent") else {}
    return {"capacity": 1.25 if sizes["top_k"] == 1 else 2.0} | begins | sizes


def section_of(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config's section `architecture`, with the options and the routed experts of a row with these `settings`."""
    routed = {"routed": {key: settings[key] for key in _SIZES}} if "match" in settings else {}
    return {**config["architecture"]} | (settings.get("architecture") or {}) | routed


def architecture_of(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Architecture:
    """The architecture of a row with these `settings`."""
    return architecture_from(section_of(config, settings))


def check_routed(name: str, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise DemixError unless the row `name` has sizes that fit one another and the section `architecture`."""
    try:
        architecture_of(config, settings)
    except DemixError as error:
        if not error.subject.startswith("architecture.routed."):
            raise
        key = error.subject.removeprefix("architecture.routed.")
        raise DemixError(f"config key models.{name}.{key}", error.cause, error.cure) from None
    if settings["top_k"] == 1 and (settings.get("parent") or settings.get("initial")):
        cause = "is 1, and a parent's feedforward times a share of 1 of the experts is not the parent's"
        raise DemixError(f"config key models.{name}.top_k", cause, "use 2 or more, or leave out parent")
    if settings.get("parent") and settings["schedule"] == "continue" and settings["match"] == "flops":
        cause = "is continue, and with match flops training ends before the parent's learning rate has fallen"
        raise DemixError(f"config key models.{name}.schedule", cause, "add match: updates, or use restart")


def matched_tokens(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """The tokens of training of a row of kind routed with these `settings`, those of its seed phase included.

    For `match: flops` they are those that take the FLOPs that a dense model takes for `tokens`.
    """
    tokens = int(settings["tokens"])
    if settings["match"] == "updates":
        return tokens
    architecture, types = architecture_of(config, settings), vocabulary(config["tokenizer"])
    dense, routed = (training_flops_per_token(one, types, one.context) for one in (architecture.unrouted, architecture))
    seed = min(tokens, int(settings.get("seed_tokens") or 0))
    return seed + int((tokens - seed) * dense / routed)
