"""What a checkpoint format of other software is: the keys of its config.json, and the names of its tensors on disk.

`demix.model.formats` holds one module per family.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from demix.config.architecture import USUAL, Architecture
from demix.data.tokenizer import Tokenizer
from demix.settings import Number, Positive, Switch, settings

# Keys of config.json that change nothing of what a model computes from given tokens in evaluation.
HARMLESS = {
    "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "activation_dropout", "architectures",
    "attention_dropout", "attn_implementation", "attn_pdrop", "bos_token_id", "chunk_size_feed_forward",
    "classifier_dropout", "decoder_start_token_id", "dropout", "dtype", "embd_pdrop", "eos_token_id", "finetuning_task",
    "gradient_checkpointing", "hidden_dropout", "id2label", "init_std", "initializer_range", "is_decoder",
    "is_llama_config", "label2id", "layerdrop", "model_type", "n_ctx", "output_attentions", "output_hidden_states",
    "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "reorder_and_upcast_attn",
    "resid_pdrop", "return_dict", "return_dict_in_generate", "sep_token_id", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tf_legacy_loss", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
    "unk_token_id", "use_bfloat16", "use_cache",
    # How texts are drawn: version 4 of transformers wrote it beside the model.
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "remove_invalid_values", "repetition_penalty", "suppress_tokens", "temperature", "top_k",
    "top_p", "typical_p",
}  # fmt: skip
# Keys of every config of transformers, with the value that changes nothing.
NEUTRAL: dict[str, Any] = {
    "add_cross_attention": False, "cross_attention_hidden_size": None, "is_encoder_decoder": False, "pruned_heads": {},
    "quantization_config": None, "tie_encoder_decoder": False,
}  # fmt: skip
# Names of activations elsewhere: ours, and those of the same function.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_new", "gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "relu": "relu",
    "relu2": "relu2", "silu": "silu", "swish": "silu",
}  # fmt: skip
Activation = Literal["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2", "silu", "swish"]
Vocabulary = Annotated[Positive, Field(le=1 << 24)]
# In `Format.holds`: every value of the option.
ANY = None
# `attention` follows from `objective`, and `alibi` from `position`.
OPTIONS = [name for name in USUAL if name not in ("attention", "alibi")]


@settings(kw_only=True)
class Keys(ABC):
    """The keys of a config.json that say what the model computes. Their names and defaults are those of the family."""

    vocab_size: Vocabulary
    tie_word_embeddings: Switch = True

    @property
    def head(self) -> str:
        """The option `head`."""
        return "tied" if self.tie_word_embeddings else "untied"

    @property
    def window(self) -> int | None:
        """The positions that attention sees, if they are fewer than all earlier ones."""
        return None

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The fields of `Architecture` that these keys give; `context` is the largest number of positions."""


@settings(kw_only=True)
class Rope:
    """How a config.json scales rope: `rope_scaling` as version 4 of transformers wrote it, `rope_parameters` of 5."""

    rope_type: Literal["default", "linear", "llama3"] | None = None
    type: Literal["default", "linear", "llama3"] | None = None
    rope_theta: Number | None = None
    partial_rotary_factor: Number | None = Field(default=None, ge=1, le=1)
    factor: Number = 1.0
    low_freq_factor: Number = 1.0
    high_freq_factor: Number = 4.0
    original_max_position_embeddings: Positive | None = None

    def options(self, theta: float | None, positions: int) -> dict[str, Any]:
        """The options of rope; `theta` and `positions` are those beside it in config.json."""
        options = {"position": "rope", "rope_theta": self.rope_theta or theta or USUAL["rope_theta"]}
        kind = self.rope_type or self.type or "default"
        if kind == "default":
            return options
        scaling = {"kind": kind, "factor": self.factor}
        if kind == "llama3":
            scaling |= {"low": self.low_freq_factor, "high": self.high_freq_factor}
            scaling["context"] = self.original_max_position_embeddings or positions
        return options | {"rope_scaling": scaling}


def first_of(*found: Rope | None) -> Rope:
    """The first that says something, as in transformers."""
    return next((one for one in found if one is not None and one != type(one)()), Rope())


def rope_keys(architecture: Architecture, **more: float) -> dict[str, Any]:
    """The keys of rope in a config.json, with `more` parameters."""
    scaling: dict[str, Any] = {}
    if given := architecture.rope_scaling:
        scaling = {"rope_type": given.kind, "factor": given.factor}
        if given.kind == "llama3":
            scaling |= {"low_freq_factor": given.low, "high_freq_factor": given.high}
            scaling["original_max_position_embeddings"] = given.context
    theta = architecture.rope_theta
    parameters = {"rope_type": "default", **scaling, "rope_theta": theta, **more}
    # Software that knows the older keys alone would take a theta of 10,000, and no scaling, where they are absent.
    return {"rope_parameters": parameters, "rope_theta": theta, "rope_scaling": scaling or None}


Change = Callable[[Tensor, Architecture], Tensor]


def _same(tensor: Tensor, architecture: Architecture) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Row:
    """One of our tensors without its axis of experts, and the tensors on disk that it joins along the first axis.

    `change` makes ours of what is joined, and `back` is its inverse. In names, `{}` is the number of a block.
    Tensors with `{expert}` in their names belong to one of the experts of a routed layer, which ours stacks.
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
        """Our tensor in fp32, of those on disk, of which `read` gives one by its name."""
        joined = [
            torch.cat(tensors) if len(tensors) > 1 else tensors[0]
            for tensors in ([read(name).float() for name in names] for names in self.groups(architecture))
        ]
        return self.change(torch.stack(joined) if self.by_expert else joined[0], architecture).contiguous()

    def theirs_of(self, tensor: Tensor, architecture: Architecture) -> dict[str, Tensor]:
        """The tensors on disk of ours."""
        tensor = self.back(tensor, architecture)
        made: dict[str, Tensor] = {}
        for number, names in enumerate(self.groups(architecture)):
            own = tensor[number] if self.by_expert else tensor
            parts = torch.split(own, self.parts(architecture)) if len(names) > 1 else (own,)
            made |= dict(zip(names, parts, strict=True))
        return made


def rows_of(pairs: Iterable[tuple[str, str]], ours: str = "", theirs: str = "") -> tuple[Row, ...]:
    """A row for the weight and one for the bias of each pair of modules, whose names have these beginnings."""
    return tuple(
        Row(f"{ours}{own}.{kind}", (f"{theirs}{other}.{kind}",)) for own, other in pairs for kind in ("weight", "bias")
    )


@dataclass(frozen=True)
class Format:
    """The checkpoints of one family of decoders, `name` in the key `model_type` and `title` in texts.

    `model_class` is its class in transformers. `holds` has the values of options that the family can have; an option
    that is not named has its usual value. A family without `keys` goes out alone. With `divides`, the heads divide the
    width even where they have a width of their own. `written` gives the keys of config.json for an architecture,
    without those that all families have. Names of tensors in `rows` may lack `prefix` on disk; tensors with an ending
    in `buffers` are no parameters. A row serves the models that have its tensor. Ids of tokens are higher by `shift`
    than ours.
    """

    name: str
    title: str
    model_class: str
    keys: type[Keys] | None
    written: Callable[[Architecture], dict[str, Any]]
    rows: tuple[Row, ...]
    prefix: str
    holds: Mapping[str, tuple[Any, ...] | None]
    buffers: tuple[str, ...] = ()
    divides: bool = False
    routed: bool = False
    shift: int = 0

    def tokenizer(self, encoder: Tokenizer) -> tuple[str, dict[str, Any]]:
        """The text of tokenizer.json, and the keys of tokenizer_config.json, for a model with this tokenizer."""
        end_of_text = encoder.decode([encoder.end_of_text])
        return encoder.definition, {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end_of_text,
            "eos_token": end_of_text,
            # Training takes the literal text of this token in a document for ordinary text.
            "split_special_tokens": True,
        }

    def lacking(self, architecture: Architecture) -> list[str]:
        """The options of `architecture` whose value the family cannot have."""
        usual = {
            "inner": architecture.inner_width == 4 * architecture.width,
            "key_heads": architecture.key_value_heads == architecture.heads,
            "head_width": architecture.unit * architecture.heads == architecture.width,
        }
        lacking = ["heads"] if self.divides and architecture.width % architecture.heads else []
        if architecture.routed and architecture.routed.every > 1:
            lacking.append("routed.every")
        for option in OPTIONS:
            allowed = self.holds.get(option, (USUAL[option],))
            if not (allowed is ANY or getattr(architecture, option) in allowed or usual.get(option)):
                lacking.append(option)
        return lacking

    def config(self, architecture: Architecture, vocab_size: int) -> dict[str, Any]:
        """The content of config.json."""
        return self.written(architecture) | {
            "architectures": [self.model_class],
            "model_type": self.name,
            "tie_word_embeddings": architecture.head == "tied",
            "vocab_size": vocab_size,
        }

    def tensors(self, architecture: Architecture, names: Iterable[str]) -> Iterator[Row]:
        """The rows of a model that has tensors of these `names`, with the numbers of its blocks."""
        own = set(names)
        for row in self.rows:
            for number in range(architecture.layers) if "{}" in row.ours else (0,):
                ours = row.ours.format(number)
                if ours in own:
                    theirs = tuple(name.replace("{}", str(number)) for name in row.theirs)
                    yield replace(row, ours=ours, theirs=theirs)

    def theirs_of(self, architecture: Architecture, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors on disk of a model's, whose feedforwards have no axis of the model's one expert."""
        made: dict[str, Tensor] = {}
        for row in self.tensors(architecture, ours):
            made |= row.theirs_of(ours[row.ours], architecture)
        return made
