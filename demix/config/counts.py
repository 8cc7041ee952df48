"""FLOPs and parameters of language models, and the sizes of their tensors. Arithmetic without torch."""

from typing import NamedTuple

from demix.config.architecture import Architecture

# The share of a block's tokens that are its targets in training (Devlin et al. 2019, "BERT", section 3.1).
MASKED_SHARE = 0.15
# Rows of a table of bigram embeddings per entry of the vocabulary.
BIGRAM_ROWS = 5
# The gates of value embeddings read at most this many units of a layer's input.
GATE_UNITS = 24


def training_flops_per_token(architecture: Architecture, vocab_size: int, length: int) -> float:
    """Training FLOPs per token of sequences of `length`: forward, forward again, backward (twice a forward).

    For a GPT-3 decoder this is 96·l·h²·(1 + s/6h + V/16lh) of Narayanan et al. 2021, section 5.1: four times the matrix
    products of attention, attention scores and feedforward, and three times the head's matrix products, which are not
    recomputed. V is rounded up to a multiple of 8, as in the paper's Table 2. A token passes through one expert per
    layer, so DEMix costs as much as a dense model. Without activation checkpointing, the layers cost three quarters of
    the formula's value. Each of the m token-routed layers adds the router and k - 1 more experts per token. A masked
    model computes logits, and the linear map of its head, only for its targets.
    """
    vocabulary = -(-vocab_size // 8) * 8
    # The number of a block's tokens that have logits.
    share = masked_places(length) / length if architecture.objective == "mlm" else 1
    scores = 4 * length * architecture.heads * architecture.unit
    layer = attention_flops(architecture) + scores + feedforward_flops(architecture)
    head = 6 * share * (vocabulary * architecture.width + head_map(architecture))
    return float(4 * (architecture.layers * layer + routing_flops(architecture)) + head)


def attention_flops(architecture: Architecture) -> int:
    """Forward FLOPs per token of attention's linear maps in one layer; 8h² in GPT-3."""
    heads = 2 * (architecture.heads + architecture.key_value_heads)
    return 2 * (architecture.width * heads * architecture.unit + value_gates(architecture))


def value_gates(architecture: Architecture) -> int:
    """The number of parameters in the gates of one layer's value embeddings."""
    gates = architecture.key_value_heads * min(GATE_UNITS, architecture.width)
    return gates if architecture.value_embeddings else 0


def feedforward_flops(architecture: Architecture) -> int:
    """Forward FLOPs per token of one feedforward; 16h² in GPT-3."""
    return 2 * architecture.maps * architecture.width * architecture.inner_width


def head_map(architecture: Architecture) -> int:
    """The number of parameters in the linear map of RoBERTa's head."""
    return architecture.width**2 if architecture.head == "roberta" else 0


def masked_places(length: int) -> int:
    """The number M of targets in a masked block of `length` tokens: 15% of them, and at least one."""
    return max(1, round(MASKED_SHARE * length))


def routing_flops(architecture: Architecture) -> int:
    """Forward FLOPs per token that token-routed layers need in addition to those of a dense model."""
    routed = architecture.routed
    if not routed:
        return 0
    more = feedforward_flops(architecture) * (routed.top_k - 1) + 2 * architecture.width * routed.experts
    return architecture.routed_layers * more


def stacked_maps(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The rows of each linear map in a layer's parameters that stack several maps, by the end of a parameter's name."""
    queries, keys = (number * architecture.unit for number in (architecture.heads, architecture.key_value_heads))
    up = (architecture.inner_width,) * (architecture.maps - 1)
    return {"attention.qkv.weight": (queries, keys, keys), "feedforward.up": up}


class Size(NamedTuple):
    """The number of parameters in a tensor, and whether they are weights of a layer's linear maps."""

    parameters: int
    matrix: bool = False


def _feedforward(architecture: Architecture) -> list[Size]:
    inner, width, maps = architecture.inner_width, architecture.width, architecture.maps
    biases = [Size((maps - 1) * inner), Size(width)] if architecture.biases == "all" else []
    return [Size((maps - 1) * inner * width, True), Size(inner * width, True), *biases]


def _attention(architecture: Architecture) -> list[Size]:
    width, unit = architecture.width, architecture.unit
    queries, keys = architecture.heads * unit, architecture.key_value_heads * unit
    biases = {"all": [queries + 2 * keys, width], "qkv": [queries + 2 * keys], "none": []}[architecture.biases]
    norms = {"none": [], "head": [unit, unit], "all": [queries, keys]}[architecture.query_norm]
    maps = [Size((queries + 2 * keys) * width, True), Size(queries * width, True)]
    gates = [value_gates(architecture)] if architecture.value_embeddings else []
    return maps + [Size(number) for number in biases + norms + gates]


def parameters(
    architecture: Architecture, vocab_size: int, domain_tokens: int = 0, expert_scope: str = "feedforward"
) -> tuple[int, int]:
    """Count the parameters that all experts of a model share, and those that only one expert owns (`sizes`)."""
    shared, own = sizes(architecture, vocab_size, domain_tokens, expert_scope)
    return sum(size.parameters for size in shared), sum(size.parameters for size in own)


def sizes(
    architecture: Architecture, vocab_size: int, domain_tokens: int = 0, expert_scope: str = "feedforward"
) -> tuple[list[Size], list[Size]]:
    """The sizes of the tensors that all experts of a model share, and of the tensors that only one expert owns.

    An expert owns the feedforward of every layer, biases included, and its table of bigrams if each expert has one.
    With `expert_scope` "model" an expert owns everything. The shared parameters are the embeddings (one if the head is
    tied), learned positions, attention, norms, the scale of CLAP, the learned mask, the parts of RoBERTa's head other
    than the token embedding, value embeddings, and the scales and the shared table of bigrams. `domain_tokens` > 0 adds
    the extra position and the input embeddings of the domain-token baseline. A token-routed feedforward counts with all
    its experts and its router.
    """
    layers, width = architecture.layers, architecture.width
    table, keys = BIGRAM_ROWS * vocab_size * width, architecture.key_value_heads * architecture.unit
    norm = [width] * (2 if architecture.norm == "layer" else 1)
    rest = [vocab_size * width] * (2 if architecture.head == "untied" else 1)
    rest += [(architecture.context + bool(domain_tokens)) * width] if architecture.position == "learned" else []
    rest += [domain_tokens * width] if domain_tokens else []
    rest += [width] if architecture.mask == "learned" else []
    rest += [1] if architecture.head == "clap" else []
    rest += norm * (1 + 2 * layers)
    rest += [head_map(architecture), width, vocab_size, *norm] if architecture.head == "roberta" else []
    rest += [layers] if architecture.bigrams != "none" else []
    rest += [layers * vocab_size * keys] if architecture.value_embeddings else []
    rest += [table] if architecture.bigrams == "shared" else []
    shared = [Size(number) for number in rest] + layers * _attention(architecture)
    feedforward, routed = _feedforward(architecture), architecture.routed
    own = (layers - architecture.routed_layers) * feedforward
    own += [Size(table)] if architecture.bigrams == "experts" else []
    if routed:
        stacked = [Size(routed.experts * size, matrix) for size, matrix in [*feedforward, Size(width)]]
        own += architecture.routed_layers * stacked
    return ([], shared + own) if expert_scope == "model" else (shared, own)
