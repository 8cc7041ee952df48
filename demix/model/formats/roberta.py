"""RoBERTa (Liu et al. 2019): masked language models, which can be exported but not imported."""

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
from demix.model.format import ACTIVATIONS, ANY, Format, Key

# The padding token, which precedes the model's own tokens, and the mask token, which follows them.
PAD, MASK = "<pad>", "<mask>"
# A logit with probability 0, also in half precision, for the tokens that demix's model does not have.
NEVER = -1e4


@dataclass(frozen=True)
class _Roberta(Format):
    """RoBERTa's format: the padding token is the first id, and the mask token the last.

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
        positions = {"max_position_embeddings": architecture.context + 1}
        return super().config(architecture, vocab_size + 2) | positions

    def tokenizer(self, encoder: Tokenizer) -> tuple[str, dict[str, Any]]:
        """As in `Format`. A text begins with the token that precedes documents, which fine-tuning reads."""
        content = json.loads(encoder.definition)
        tokens, added = tokens_of(content)
        if reserved := {PAD, MASK} & {*tokens, *(one["content"] for one in added)}:
            raise DemixError("tokenizer", f"has the token {min(reserved)}, which RoBERTa adds", "use another model")
        mask, end = encoder.vocab_size + self.shift, encoder.decode([encoder.end_of_text])
        content["model"]["vocab"] = (
            {PAD: 0} | {token: number + self.shift for token, number in tokens.items()} | {MASK: mask}
        )
        own = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
        content["added_tokens"] = [
            {"id": 0, "content": PAD, "lstrip": False, **own},
            *({**one, "id": one["id"] + self.shift} for one in added),
            # As in fairseq, the white space before a mask belongs to the predicted token.
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


FORMATS = (
    _Roberta(
        name="roberta",
        title="RoBERTa",
        model_class="RobertaForMaskedLM",
        keys={
            "num_hidden_layers": Key("layers"),
            "hidden_size": Key("width"),
            "num_attention_heads": Key("heads"),
            "intermediate_size": Key("inner"),
            "hidden_act": Key("activation", None, ACTIVATIONS),
            "layer_norm_eps": Key("epsilon"),
        },
        fixed={
            "objective": "mlm",
            "mask": ANY,
            "head": "roberta",
            "norm_place": "post",
        },
        writes={
            "type_vocab_size": 1,
            "pad_token_id": 0,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "tie_word_embeddings": True,
        },
        blocks="roberta.encoder.layer.{}.",
        outside={
            "token_embedding": "roberta.embeddings.word_embeddings",
            "position_embedding": "roberta.embeddings.position_embeddings",
            "segment_embedding": "roberta.embeddings.token_type_embeddings",
            "embedding_norm": "roberta.embeddings.LayerNorm",
            "head_map": "lm_head.dense",
            "head_norm": "lm_head.layer_norm",
            "output": "lm_head",
        },
        block={
            "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
            "attention.out": "attention.output.dense",
            "attention_norm": "attention.output.LayerNorm",
            "feedforward.up": "intermediate.dense",
            "feedforward.down": "output.dense",
            "feedforward_norm": "output.LayerNorm",
        },
        export_only=True,
        shift=1,
    ),
)
