"""A mixture of experts of demix as a model of transformers 5: logits are log-probabilities of the mixture.

`demix export --mixture` writes this file next to the weights. It needs only transformers.

Names of tensor axes: E experts, B sequences, T positions, P positions in the cache, D width, V vocabulary.
"""

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple


class DemixConfig(PreTrainedConfig):  # type: ignore[misc]
    """The experts and their mixture by the rule `tempered`.

    `experts` are the names of the E experts, each of which is a model with the config `expert`. `own` are the names,
    without layer numbers, of the parameters that each expert has for itself; the experts share all others. None means
    that they share nothing. The experts' weights at position t are proportional to prior·exp(β·S[t]), where
    S[t] = γ·S[t-1] + log p(token t) for each expert; the first token of a text has no log p. A prior of 0 excludes an
    expert. `tables` are the shapes of `Tables` by name.
    """

    model_type = "demix"
    sub_configs = {"expert": AutoConfig}  # noqa: RUF012

    def __init__(
        self,
        expert: dict[str, Any] | PreTrainedConfig | None = None,
        experts: tuple[str, ...] = ("dense",),
        prior: tuple[float, ...] | None = None,
        beta: float = 0.1,
        gamma: float = 0.99,
        own: tuple[str, ...] | None = None,
        tables: dict[str, list[int]] | None = None,
        **more: Any,
    ):
        of_one = AutoConfig.for_model(**expert) if isinstance(expert, dict) else expert or AutoConfig.for_model("gpt2")
        self.expert, self.experts, self.own, self.tables = of_one, list(experts), own, tables or {}
        self.prior, self.beta, self.gamma = list(prior or [1.0] * len(self.experts)), beta, gamma
        self.vocab_size, self.max_position_embeddings = of_one.vocab_size, of_one.max_position_embeddings
        # A cache has the layers of all experts, and one for the mixture.
        self.num_hidden_layers = len(self.experts) * of_one.num_hidden_layers + 1
        super().__init__(**more)


class Tables(nn.Module):
    """Embedding tables of a demix decoder that its class in transformers lacks. Hooks add them.

    `bigrams` [R, D] are embeddings of pairs of tokens, added before each layer times `scale` [layers]. `values`
    [layers, V, K·U] are embeddings that are added to the values of K heads with `gates` [layers, K, G].
    """

    bigrams: Tensor
    scale: Tensor
    values: Tensor
    gates: Tensor

    def __init__(self, shapes: dict[str, list[int]], expert: nn.Module):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        layers = next(module for module in expert.modules() if isinstance(module, nn.ModuleList))
        for number, layer in enumerate(layers):
            if "bigrams" in shapes:
                layer.register_forward_pre_hook(partial(self._add_bigrams, number))
            for name, module in layer.named_modules():
                if "values" in shapes and name.endswith(".v_proj"):
                    module.register_forward_hook(partial(self._add_values, number))

    def read(self, ids: Tensor, previous: Tensor) -> None:
        """Remember `ids` [B, T], and the ids `previous` [B, T] before each, for the next pass."""
        self.ids, self.pairs = ids, ids * 1_000_003 ^ previous * 7_919

    def _add_bigrams(self, layer: int, _: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        states = nn.functional.embedding(self.pairs % len(self.bigrams), self.bigrams)
        return (given[0] + self.scale[layer] * states, *given[1:])

    def _add_values(self, layer: int, _: nn.Module, given: tuple[Any, ...], values: Tensor) -> Tensor:
        heads, units = self.gates.shape[1:]
        gate = 2 * (given[0][..., :units] @ self.gates[layer].T).sigmoid()
        read = nn.functional.embedding(self.ids, self.values[layer])
        added: Tensor = gate[..., None] * read.view(*read.shape[:2], heads, -1)
        return values + added.flatten(-2)


class DemixForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The experts as models of transformers, and the log of their mixed probabilities.

    A text is cut into blocks of `max_position_embeddings` tokens, as in demix: experts do not see earlier blocks, but
    their weights depend on the whole text. Sequences may be padded anywhere, with a corresponding attention mask.
    """

    config_class = DemixConfig
    _supports_sdpa = True
    experts: Any

    def __init__(self, config: DemixConfig):
        super().__init__(config)
        self.experts = nn.ModuleList(AutoModelForCausalLM.from_config(config.expert) for _ in config.experts)
        tied: dict[str, str] = {}
        for number, expert in enumerate(self.experts):
            expert.tables = Tables(config.tables, expert)
            of_one = f"experts.{number}."
            for module in expert.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx += number * config.expert.num_hidden_layers
            for name, _ in expert.named_parameters() if number else ():
                if config.own is not None and re.sub(r"\.\d+", "", name) not in config.own:
                    tied[of_one + name] = f"experts.0.{name}"
            tied |= {of_one + head: of_one + name for head, name in expert.all_tied_weights_keys.items()}
        self._tied_weights_keys = tied
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """The parameters of experts that are tied to other parameters of the model, by name."""
        return dict(self._tied_weights_keys)

    def _adjust_bias(self, *_: Any) -> None:
        """Do nothing: tied heads have no bias to adjust, and transformers would cut the biases of GPT-2."""

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """log p [B, T, V] of the token after each of `input_ids` [B, T] under the mixture, at least fp32.

        `attention_mask` [B, P + T] is 0 at padding. `logits_to_keep` positions at the end have logits, all of them for
        0. `labels` [B, T] add the loss. Positions follow from the mask.
        """
        cache = DynamicCache() if use_cache and past_key_values is None else past_key_values
        past = 0 if cache is None else cache.get_seq_length()
        B, T = input_ids.shape
        real = input_ids.new_ones(B, past + T) if attention_mask is None else attention_mask.long()
        place = (real.cumsum(1) - 1).clamp(min=0)
        # The real token before each.
        index = torch.arange(past + T, device=input_ids.device)
        before = torch.where(real.bool(), index, -1).cummax(1)[0]
        before = nn.functional.pad(before, (1, 0), value=-1)[:, past:-1]
        held = cache.layers[-1].values[:, 0, :, 1].long() if cache is not None and past else input_ids[:, :0]
        previous = torch.cat([held, input_ids], 1).gather(1, before.clamp(min=0))
        starts = (before < 0) | (place[:, past:] % self.config.max_position_embeddings == 0)
        for expert in self.experts:
            expert.tables.read(input_ids, previous.masked_fill(starts, 0))
        bias = self._bias(real.bool(), place // self.config.max_position_embeddings, T)
        given = {
            "attention_mask": bias, "position_ids": place[:, past:] % self.config.max_position_embeddings,
            "past_key_values": cache, "use_cache": cache is not None,
        }  # fmt: skip
        hidden = torch.stack([one.base_model(input_ids, **given)[0] for one in self.experts], 1)
        evidence = self._evidence(input_ids, hidden, real.bool(), before, cache)
        prior = torch.tensor(self.config.prior, device=hidden.device).log()
        log_g = (prior[:, None, None] + self.config.beta * evidence).log_softmax(1)
        kept = slice(-logits_to_keep, None)
        logits = self._log_p(0, hidden[:, 0, kept]) + log_g[:, 0, kept]
        for number in range(1, len(self.experts)):
            logits = torch.logaddexp(logits, self._log_p(number, hidden[:, number, kept]) + log_g[:, number, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def _log_p(self, number: int, hidden: Tensor) -> Tensor:
        """log p [B, T, V] of an expert, of its final states [B, T, D]."""
        logits: Tensor = self.experts[number].get_output_embeddings()(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    def _bias(self, real: Tensor, block: Tensor, T: int) -> Tensor:
        """The bias added to attention [B, 1, T, P + T]: a token attends to earlier ones of its block and to itself."""
        index = torch.arange(real.shape[1], device=real.device)
        seen = real[:, None] & (block[:, None] == block[:, -T:, None]) & (index <= index[-T:, None])
        # Padding attends to itself, because a softmax over nothing is not a number.
        seen = seen | (index == index[-T:, None])
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=real.device)
        return bias.masked_fill(~seen, torch.finfo(self.dtype).min)[:, None]

    def _evidence(
        self, ids: Tensor, hidden: Tensor, real: Tensor, before: Tensor, cache: DynamicCache | None
    ) -> Tensor:
        """S [B, E, T, 1] after each token: the evidence of it and earlier tokens for each expert, up to a constant.

        `before` [B, T] are the places of the tokens before. The last layer of the cache holds the final states `hidden`
        [B, E, T, D] as keys, and as values S and the ids of the tokens.
        """
        (B, T), layer = ids.shape, self.config.num_hidden_layers - 1
        total = hidden.new_zeros(B, len(self.experts), dtype=torch.promote_types(hidden.dtype, torch.float32))
        states = hidden
        if cache is not None and real.shape[1] > T:
            held = cache.layers[layer]
            states, total = torch.cat([held.keys, hidden], 2), held.values[:, :, -1, 0]
        predicting = states.gather(2, before.clamp(min=0)[:, None, :, None].expand_as(hidden))
        scores = torch.stack(
            [self._log_p(n, predicting[:, n]).gather(2, ids[..., None])[..., 0] for n in range(len(self.experts))], 1
        )
        scores, scored = scores - scores.amax(1, keepdim=True), real[:, -T:] & (before >= 0)
        sums = []
        for position in range(T):
            added = self.config.gamma * total + scores[:, :, position]
            total = torch.where(scored[:, position, None], added, total)
            sums.append(total)
        evidence = torch.stack(sums, 2)[..., None]
        if cache is not None:
            of_tokens = ids[:, None, :, None].expand_as(evidence).to(evidence)
            cache.update(hidden, torch.cat([evidence, of_tokens], -1), layer)
        return evidence
