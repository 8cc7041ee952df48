"""RoBERTa (Liu et al. 2019): masked language models, which go out and do not come in."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demix.config.architecture import Architecture
from demix.data.tokenizer import Tokenizer
from demix.data.vocabulary import tokens_of
from demix.errors import DemixError
from demix.model.format import ACTIVATIONS, ANY, Format, Row, rows_of

# The token that pads, which stands before the model's own, and the one that masks, which stands after them.
PAD, MASK = "<pad>", "<mask>"
# A logit that gives the tokens that demix's model does not have no probability, in half precision too.
NEVER = -1e4


@dataclass(frozen=True)
class _Roberta(Format):
    """RoBERTa's format: the padding token is the first type, and the token that masks is the last.

    RoBERTa counts positions from 1 if the padding token is number 0, and adds the embedding of a segment.
    """

    def theirs_of(self, architecture: Architecture, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As in `Format`."""
        types, bias = ours["token_embedding"], ours["output_bias"]
        nothing, never = types.new_zeros(1, types.shape[1]), bias.new_full((1,), NEVER)
        mask = ours["mask_embedding"][None] if "mask_embedding" in ours else nothing
        return super().theirs_of(
            architecture,
            {
                **ours,
                "token_embedding": torch.cat([nothing, types, mask]),
                "output_bias": torch.cat([never, bias, never]),
                "position_embedding": torch.cat([nothing, ours["position_embedding"]]),
                "segment_embedding": nothing,
            },
        )

    def config(self, architecture: Architecture, vocab_size: int) -> dict[str, Any]:
        """As in `Format`."""
        return super().config(architecture, vocab_size + 2) | {"tie_word_embeddings": True}

    def tokenizer(self, encoder: Tokenizer) -> tuple[str, dict[str, Any]]:
        """As in `Format`. A text begins with the token that stands before documents, which fine-tuning reads."""
        content = json.loads(encoder.definition)
        tokens, added = tokens_of(content)
        if taken := {PAD, MASK} & {*tokens, *(one["content"] for one in added)}:
            raise DemixError("tokenizer", f"has the token {min(taken)}", "export a model with another tokenizer")
        mask, end = encoder.vocab_size + self.shift, encoder.decode([encoder.end_of_text])
        content["model"]["vocab"] = (
            {PAD: 0} | {token: number + self.shift for token, number in tokens.items()} | {MASK: mask}
        )
        own = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
        content["added_tokens"] = [
            {"id": 0, "content": PAD, "lstrip": False, **own},
            *({**one, "id": one["id"] + self.shift} for one in added),
            # As in fairseq, the white space before a mask belongs to what is filled in.
            {"id": mask, "content": MASK, "lstrip": True, **own},
        ]
        started = [{"SpecialToken": {"id": end, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        paired = [{"SpecialToken": {"id": end, "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": started,
            "pair": started + paired,
            "special_tokens": {end: {"id": end, "ids": [encoder.end_of_text + self.shift], "tokens": [end]}},
        }
        names = {f"{role}_token": end for role in ("bos", "eos", "cls", "sep")}
        return json.dumps(content, ensure_ascii=False), names | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "mask_token": MASK,
            "model_input_names": ["input_ids", "attention_mask"],
        }


def _written(architecture: Architecture) -> dict[str, Any]:
    return {
        "num_hidden_layers": architecture.layers,
        "hidden_size": architecture.width,
        "num_attention_heads": architecture.heads,
        "intermediate_size": architecture.inner_width,
        "hidden_act": architecture.activation,
        "layer_norm_eps": architecture.epsilon,
        "max_position_embeddings": architecture.context + 1,
        "type_vocab_size": 1,
        "pad_token_id": 0,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


_OURS, _THEIRS, _EMBEDDINGS = "blocks.{}.", "roberta.encoder.layer.{}.", "roberta.embeddings."
FORMATS = (
    _Roberta(
        name="roberta",
        title="RoBERTa",
        model_class="RobertaForMaskedLM",
        keys=None,
        written=_written,
        prefix="",
        shift=1,
        holds={
            "activation": tuple(ACTIVATIONS.values()), "inner": ANY, "epsilon": ANY, "objective": ("mlm",),
            "mask": ANY, "head": ("roberta",), "norm_place": ("post",), "embedding_norm": (True,),
        },
        rows=(
            Row("token_embedding", (f"{_EMBEDDINGS}word_embeddings.weight",)),
            Row("position_embedding", (f"{_EMBEDDINGS}position_embeddings.weight",)),
            Row("segment_embedding", (f"{_EMBEDDINGS}token_type_embeddings.weight",)),
            Row("output_bias", ("lm_head.bias",)),
            *rows_of([("embedding_norm", f"{_EMBEDDINGS}LayerNorm")]),
            *rows_of([("head_map", "lm_head.dense"), ("head_norm", "lm_head.layer_norm")]),
            *rows_of(
                [("attention.out", "attention.output.dense"), ("attention_norm", "attention.output.LayerNorm")],
                _OURS, _THEIRS,
            ),
            *rows_of([("feedforward_norm", "output.LayerNorm")], _OURS, _THEIRS),
            *(
                Row(
                    f"{_OURS}attention.qkv.{kind}",
                    tuple(f"{_THEIRS}attention.self.{part}.{kind}" for part in ("query", "key", "value")),
                )
                for kind in ("weight", "bias")
            ),
            Row(f"{_OURS}feedforward.up", (f"{_THEIRS}intermediate.dense.weight",)),
            Row(f"{_OURS}feedforward.up_bias", (f"{_THEIRS}intermediate.dense.bias",)),
            Row(f"{_OURS}feedforward.down", (f"{_THEIRS}output.dense.weight",)),
            Row(f"{_OURS}feedforward.down_bias", (f"{_THEIRS}output.dense.bias",)),
        ),
    ),
)  # fmt: skip
