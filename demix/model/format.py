"""A checkpoint format of other software: a table of the keys of config.json, and a table of the tensors on disk.

Both tables are used in two directions: import reads them from right to left, export from left to right.
`demix.model.formats` has one module per architecture.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from demix.config.architecture import USUAL, Architecture, Routed
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.settings import Number, Positive, Settings, names_of, settings_from

# Keys of config.json that do not change what a model computes from given tokens in evaluation.
HARMLESS = re.compile(
    r".*(dropout|_pdrop|layerdrop)|.*_token_id|summary_.*"
    "|_attn_implementation_autoset|_commit_hash|_name_or_path|architectures|attn_implementation|dtype|model_type|n_ctx"
    "|chunk_size_feed_forward|finetuning_task|gradient_checkpointing|id2label|init_std|initializer_range|is_decoder"
    "|is_llama_config|label2id|output_attentions|output_hidden_states|prefix|pretraining_tp|problem_type"
    "|reorder_and_upcast_attn|return_dict|task_specific_params|tf_legacy_loss|tokenizer_class|torch_dtype|torchscript"
    "|transformers.js_config|transformers_version|use_bfloat16|use_cache"
    # Settings of generation, which version 4 of transformers wrote next to the model.
    "|bad_words_ids|begin_suppress_tokens|diversity_penalty|do_sample|early_stopping|encoder_no_repeat_ngram_size"
    "|exponential_decay_length_penalty|length_penalty|max_length|min_length|no_repeat_ngram_size|num_beam_groups"
    "|num_beams|num_return_sequences|output_scores|remove_invalid_values|repetition_penalty|return_dict_in_generate"
    "|suppress_tokens|temperature|top_k|top_p|typical_p"
)
# Keys of every config of transformers, with the value that has no effect; they must have this value.
NEUTRAL: dict[str, Any] = {
    "add_cross_attention": False, "cross_attention_hidden_size": None, "is_encoder_decoder": False, "pruned_heads": {},
    "quantization_config": None, "tie_encoder_decoder": False,
}  # fmt: skip
# Our names of activations, and other software's names of the same function.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_new", "gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "relu": "relu",
    "relu2": "relu2", "silu": "silu", "swish": "silu",
}  # fmt: skip
T = TypeVar("T", bound=Settings)
TIED = {True: "tied", False: "untied"}
Vocabulary = Annotated[Positive, Field(le=1 << 24)]
# In `Format.fixed`: any value of the option is allowed.
ANY = object()
OPTIONS = [*USUAL]


@dataclass(frozen=True)
class Key:
    """A key of config.json for an option of demix.

    `ours` names the option: a field of `Architecture`, of `Routed` (written `routed.…`) or of `Others`.

    Import uses `default` if the key is absent, and ignores a null. Sizes have no default: every config of transformers
    has them, and tensors fit no other size. `values` maps the values of the key to values of the option, if they
    differ. By `written`, export writes the key always (`always`), only if the option does not follow from the sizes
    (`unusual`), or never (`never`). A key that is not `read` is only written. If several keys stand for one option,
    they must agree.
    """

    ours: str
    default: Any = None
    values: Mapping[Any, str] | None = None
    written: Literal["always", "unusual", "never"] = "always"
    read: bool = True

    def ours_of(self, value: Any) -> Any:
        """demix's value for a `value` of the format. Raises ValueError if there is none."""
        if self.values is None or value is None:
            return value
        found = [ours for theirs, ours in self.values.items() if theirs == value and type(theirs) is type(value)]
        if not found:
            raise ValueError(f"allowed is one of {', '.join(map(str, self.values))}")
        return found[0]

    def theirs_of(self, value: Any) -> Any:
        """The format's value for a `value` of demix."""
        return value if self.values is None else next(theirs for theirs, ours in self.values.items() if ours == value)


class Rope(Settings):
    """Rope scaling in a config.json: `rope_scaling` of transformers 4, or `rope_parameters` of transformers 5."""

    rope_type: Literal["default", "linear", "llama3"] | None = None
    type: Literal["default", "linear", "llama3"] | None = None
    rope_theta: Number | None = None
    partial_rotary_factor: Number | None = None
    factor: Number = 1.0
    low_freq_factor: Number = 1.0
    high_freq_factor: Number = 4.0
    original_max_position_embeddings: Positive | None = None

    def options(self, theta: float | None, positions: int) -> dict[str, Any]:
        """The options of rope; `theta` and `positions` are the values next to this object in config.json."""
        options = {"rope_theta": self.rope_theta or theta or USUAL["rope_theta"]}
        kind = self.rope_type or self.type or "default"
        if kind == "default":
            return options
        scaling = {"kind": kind, "factor": self.factor}
        if kind == "llama3":
            scaling |= {"low": self.low_freq_factor, "high": self.high_freq_factor}
            scaling["context"] = self.original_max_position_embeddings or positions
        return options | {"rope_scaling": scaling}


class Others(Settings):
    """Values of config.json other than the architecture, and the maximum number of positions.

    `window` is the number of positions that attention spans, if not all.
    """

    vocab_size: Vocabulary
    context: Positive
    window: Positive | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None

    @property
    def rope(self) -> Rope:
        """The first of `rope_scaling` and `rope_parameters` that has a value, as in transformers."""
        given = [one for one in (self.rope_scaling, self.rope_parameters) if one is not None and one != Rope()]
        return given[0] if given else Rope()


ROPES = {name: Key(name, written="never") for name in ("rope_scaling", "rope_parameters")}


def rope_keys(architecture: Architecture, theta: str, **more: float) -> dict[str, Any]:
    """The keys of rope in a config.json, with `more` parameters. Theta is under the key `theta`, too."""
    scaling: dict[str, Any] = {}
    if given := architecture.rope_scaling:
        scaling = {"rope_type": given.kind, "factor": given.factor}
        if given.kind == "llama3":
            scaling |= {"low_freq_factor": given.low, "high_freq_factor": given.high}
            scaling["original_max_position_embeddings"] = given.context
    parameters = {"rope_type": "default", **scaling, "rope_theta": architecture.rope_theta, **more}
    # Without them, software that knows only the older keys would use a theta of 10,000 and no scaling.
    return {"rope_parameters": parameters, theta: architecture.rope_theta, "rope_scaling": scaling or None}


Change = Callable[[Tensor, Architecture], Tensor]
# Our modules, each with the one on disk, or with several that it joins.
Modules = dict[str, str | tuple[str, ...]]


def _same(tensor: Tensor, architecture: Architecture) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Row:
    """A tensor of demix without its axis of experts, and the tensors on disk that it joins along the first axis.

    `change` converts the joined tensors to demix's tensor, and `back` is its inverse. Tensors with `{expert}` in their
    names belong to one expert of a token-routed layer; demix's tensor stacks them.
    """

    ours: str
    theirs: tuple[str, ...]
    change: Change = _same
    back: Change = _same

    @property
    def by_expert(self) -> bool:
        """Whether the experts of a routed layer have tensors of their own on disk."""
        return "{expert}" in self.theirs[0]

    def parts(self, architecture: Architecture) -> list[int]:
        """The rows of each of several tensors on disk that are joined."""
        if len(self.theirs) == 2:
            return [architecture.inner_width] * 2
        keys = architecture.key_value_heads * architecture.unit
        return [architecture.heads * architecture.unit, keys, keys]

    def groups(self, architecture: Architecture) -> list[tuple[str, ...]]:
        """The names of the tensors on disk that are joined: a group for each expert, or one group."""
        if not self.by_expert:
            return [self.theirs]
        count = architecture.routed.experts if architecture.routed else 0
        return [tuple(name.format(expert=number) for name in self.theirs) for number in range(count)]

    def ours_of(self, read: Callable[[str], Tensor], architecture: Architecture) -> Tensor:
        """demix's tensor in fp32, made from tensors on disk; `read` returns one of these by its name."""
        joined = [
            torch.cat(tensors) if len(tensors) > 1 else tensors[0]
            for tensors in ([read(name).float() for name in names] for names in self.groups(architecture))
        ]
        return self.change(torch.stack(joined) if self.by_expert else joined[0], architecture).contiguous()

    def theirs_of(self, tensor: Tensor, architecture: Architecture) -> dict[str, Tensor]:
        """The tensors on disk, by name, for the `tensor` of demix."""
        tensor = self.back(tensor, architecture)
        made: dict[str, Tensor] = {}
        for number, names in enumerate(self.groups(architecture)):
            own = tensor[number] if self.by_expert else tensor
            parts = torch.split(own, self.parts(architecture)) if len(names) > 1 else (own,)
            made |= dict(zip(names, parts, strict=True))
        return made


def _of_module(ours: str, theirs: str | tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A module's weight and bias as tensors of demix, each with its tensors on disk."""
    others = (theirs,) if isinstance(theirs, str) else theirs
    # Embeddings, feedforwards and routers are parameters of ours, and no modules.
    own = ours.endswith("_embedding") or ours.startswith("feedforward.") or ours == "output"
    yield (ours if own else f"{ours}.weight"), tuple(f"{name}.weight" for name in others)
    yield (f"{ours}_bias" if own else f"{ours}.bias"), tuple(f"{name}.bias" for name in others)


@dataclass(frozen=True, kw_only=True)
class Format:
    """The checkpoint format of one architecture, called `name` in the key `model_type` and `title` in texts.

    `model_class` is its class in transformers. `keys` are the keys of config.json for demix's options. `fixed` are
    demix's options that have only one value in the format. An option that is in neither `keys` nor `fixed` has demix's
    default. Keys in `must` must have the given value; if the value in config.json is a list, all its items must equal
    the given value. Keys in `ignored` have no effect. Exports also write the keys `writes`.

    `outside` maps modules of demix outside the layers to modules of the format, `block` those inside a layer. In the
    format, the names of modules in layers begin with `blocks`. Several modules of the format in a tuple are joined
    along the first axis, as gate and up projection to `feedforward.up`. `changes` has, for some modules of demix, the
    function that converts the format's tensors to demix's, and its inverse. Names of tensors on disk may lack `prefix`;
    tensors with an ending in `buffers` are not parameters.

    With `heads_divide_width`, the number of heads must divide the width even if heads have their own width. A format
    that is `export_only` cannot be imported. Token ids are higher than demix's by `shift`.
    """

    name: str
    title: str
    model_class: str
    keys: dict[str, Key]
    blocks: str
    outside: Modules
    block: Modules
    changes: dict[str, tuple[Change, Change]] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    must: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    writes: dict[str, Any] = field(default_factory=dict)
    prefix: str = ""
    buffers: tuple[str, ...] = ()
    heads_divide_width: bool = False
    export_only: bool = False
    shift: int = 0

    @property
    def routed(self) -> bool:
        """Whether the format's models are token-routed."""
        return any(key.ours.startswith("routed.") for key in self.keys.values())

    @property
    def known(self) -> set[str]:
        """The keys of config.json that are read, or known to have no effect."""
        return {*(name for name, key in self.keys.items() if key.read), *NEUTRAL, *self.must, *self.ignored}

    def read(self, config: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], Others]:
        """The fields of `Architecture` except `context`, from the config.json at `path`, and the other keys.

        Raises DemixError that names a key with a value which the format or demix does not support.
        """
        for name, value in (NEUTRAL | self.must).items():
            found = config.get(name, value)
            if not _is_as_it_must(found, value):
                cause = f"is {found!r:.80}, but demix supports {self.title} only with {value!r}"
                raise DemixError(f"{path}: {name}", cause, "import another model")
        options = self._given(config, path)
        rest = {name: options.pop(name) for name in names_of(Others) if name in options}
        others = self.checked(Others, rest, path)
        options |= {name: value for name, value in self.fixed.items() if value is not ANY}
        if self.fixed.get("position") == "rope":
            share = others.rope.partial_rotary_factor
            if share is not None and "rope_share" in options:
                options["rope_share"] = share
            elif share not in (None, 1.0):
                cause = f"is {share}, but {self.title} rotates whole heads"
                raise DemixError(f"{path}: rope_parameters.partial_rotary_factor", cause, "remove it")
            options |= others.rope.options(options.pop("rope_theta", None), others.context)
        if self.routed:
            own = {name: options.pop(f"routed.{name}") for name in names_of(Routed) if f"routed.{name}" in options}
            # With this capacity an expert can process all tokens.
            options["routed"] = {"every": 1, "capacity": own.get("experts")} | own
        return options, others

    def _given(self, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """demix's options from the keys in a config.json, and from the defaults of missing keys."""
        options: dict[str, Any] = {}
        given = {name: key for name, key in self.keys.items() if key.read and name in config}
        for name, key in given.items():
            try:
                value = key.ours_of(config[name])
            except ValueError as error:
                raise DemixError(f"{path}: {name}", f"is {config[name]!r:.80}", str(error)) from None
            if value is not None and options.setdefault(key.ours, value) != value:
                cause = f"is {value!r:.80}, but {self.theirs(key.ours)} is {options[key.ours]!r:.80}"
                raise DemixError(f"{path}: {name}", cause, "import a model in which both are equal")
        for name, key in self.keys.items():
            # A default of null means that the option follows from the sizes.
            if name not in given and key.default is not None:
                options.setdefault(key.ours, key.ours_of(key.default))
        return options

    def checked(self, kind: type[T], values: Mapping[str, Any], path: Path) -> T:
        """A settings object from values of the config.json at `path`. An error names a key of the file."""
        try:
            return settings_from(kind, values, f"{path}: ")
        except DemixError as error:
            option = error.subject.removeprefix(f"{path}: ").removeprefix("architecture.")
            raise DemixError(f"{path}: {self.theirs(option)}", error.cause, error.cure) from None

    def theirs(self, ours: str) -> str:
        """The key of config.json for the option `ours` of demix; the option itself if there is no key."""
        return next((name for name, key in self.keys.items() if key.ours == ours and key.read), ours)

    def lacking(self, architecture: Architecture) -> list[str]:
        """The options of `architecture` whose value the format does not support."""
        held = {key.ours: key for key in self.keys.values()}
        held |= dict.fromkeys(("rope_theta", "rope_scaling"), Key("")) if self.fixed.get("position") == "rope" else {}
        lacking = ["heads"] if self.heads_divide_width and architecture.width % architecture.heads else []
        if architecture.routed and architecture.routed.every > 1:
            lacking.append("routed.every")
        for option in [*OPTIONS, *(["routed.renormalise"] if architecture.routed else [])]:
            value, key = attrgetter(option)(architecture), held.get(option)
            allowed = self.fixed.get(option, USUAL.get(option, True))
            if key is not None:
                holds = key.values is None or value in key.values.values()
            else:
                holds = allowed is ANY or value == allowed or follows(option, architecture)
            if not holds:
                lacking.append(option)
        return lacking

    def config(self, architecture: Architecture, vocab_size: int) -> dict[str, Any]:
        """The content of config.json."""
        made: dict[str, Any] = {}
        for name, key in self.keys.items():
            if key.written == "always" or (key.written == "unusual" and not follows(key.ours, architecture)):
                made[name] = key.theirs_of(attrgetter(BY_SIZES.get(key.ours, key.ours))(architecture))
        if self.fixed.get("position") == "rope":
            share = {"partial_rotary_factor": architecture.rope_share} if "rotary_pct" in self.keys else {}
            made |= rope_keys(architecture, self.theirs("rope_theta"), **share)
        about = {"architectures": [self.model_class], "model_type": self.name, "vocab_size": vocab_size}
        return made | self.writes | about

    def tokenizer(self, encoder: Tokenizer) -> tuple[str, dict[str, Any]]:
        """The text of tokenizer.json, and the keys of tokenizer_config.json, for a model with this tokenizer."""
        end_of_text = encoder.decode([encoder.end_of_text])
        return encoder.definition, {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end_of_text,
            "eos_token": end_of_text,
            # Training treats the literal text of this token in a document as ordinary text.
            "split_special_tokens": True,
        }

    def tensors(self, architecture: Architecture, names: Iterable[str]) -> Iterator[Row]:
        """The tensors of a model with tensors of these `names`, with the numbers of its layers."""
        own = set(names)
        places = [(self.outside, "", "")]
        places += [(self.block, f"blocks.{n}.", self.blocks.format(n)) for n in range(architecture.layers)]
        for modules, ours, theirs in places:
            for module, others in modules.items():
                for name, on_disk in _of_module(module, others):
                    if ours + name in own:
                        changes = self.changes.get(module, (_same, _same))
                        yield Row(ours + name, tuple(theirs + one for one in on_disk), *changes)

    def theirs_of(self, architecture: Architecture, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors on disk for the tensors `ours` of a model, whose feedforwards have no axis of experts."""
        made: dict[str, Tensor] = {}
        for row in self.tensors(architecture, ours):
            made |= row.theirs_of(ours[row.ours], architecture)
        return made


# Options that are null if they follow from the sizes, with the functions for their values.
BY_SIZES = {"inner": "inner_width", "key_heads": "key_value_heads", "head_width": "unit"}


def follows(option: str, architecture: Architecture) -> bool:
    """Whether an option has the value that follows from the sizes if it is not given."""
    follows = {
        "inner": architecture.inner_width == 4 * architecture.width,
        "key_heads": architecture.key_value_heads == architecture.heads,
        "head_width": architecture.unit * architecture.heads == architecture.width,
    }
    return follows.get(option, False)


def _is_as_it_must(value: Any, wanted: Any) -> bool:
    """Whether the value of a key is the wanted one; for a list, whether all items are."""
    if isinstance(wanted, list):
        return value is None or (isinstance(value, list) and all(one in wanted for one in value))
    return bool(value == wanted and isinstance(value, bool) == isinstance(wanted, bool))
