"""FLOPs and parameters of language models, and the shapes of their matrices. Arithmetic only, no torch."""

from collections import Counter

from demix.config.architecture import Architecture

# The share of a block's tokens that are its targets in training (Devlin et al. 2019, "BERT", section 3.1).
MASKED_SHARE = 0.15


def training_flops_per_token(architecture: Architecture, vocab_size: int, length: int) -> float:
    """FLOPs of training per token of sequences of `length`: forward, forward again, backward (twice a forward).

    For a decoder of GPT-3 they are the 96·l·h²·(1 + s/6h + V/16lh) of Narayanan et al. 2021, section 5.1: four times
    the products of attention, of its scores and of the feedforward, three times those of the head, which is not
    computed again. V is rounded up to a multiple of 8, as in the paper's Table 2. A token passes through one expert per
    layer: DEMix costs as much as a dense model. Without activation checkpointing the layers cost three quarters of the
    formula's value. Each of the m routed layers adds the router and k - 1 more experts of a token. A masked model has
    logits of its targets alone.
    """
    vocabulary = -(-vocab_size // 8) * 8
    # Of a block's tokens, these have logits.
    share = masked_places(length) / length if architecture.objective == "mlm" else 1
    scores = 4 * length * architecture.heads * architecture.unit
    layer = attention_flops(architecture) + scores + feedforward_flops(architecture)
    head = 6 * share * vocabulary * architecture.width
    return float(4 * (architecture.layers * layer + routing_flops(architecture)) + head)


def attention_flops(architecture: Architecture) -> int:
    """FLOPs a token of a forward pass through the linear maps of attention in one layer; 8h² in GPT-3."""
    heads = 2 * (architecture.heads + architecture.key_value_heads)
    return 2 * architecture.width * heads * architecture.unit


def feedforward_flops(architecture: Architecture) -> int:
    """FLOPs a token of a forward pass through one feedforward; 16h² in GPT-3."""
    return 2 * architecture.maps * architecture.width * architecture.inner_width


def masked_places(length: int) -> int:
    """The number M of targets in a masked block of `length` tokens: 15% of them, and one at least."""
    return max(1, round(MASKED_SHARE * length))


def routing_flops(architecture: Architecture) -> int:
    """FLOPs a token of a forward pass that routed layers need beyond those of a dense model."""
    routed = architecture.routed
    if not routed:
        return 0
    more = feedforward_flops(architecture) * (routed.top_k - 1) + 2 * architecture.width * routed.experts
    return architecture.routed_layers * more


def stacked_maps(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The rows of the linear maps that stand one below the other in a parameter of a block, by the end of its name."""
    queries, keys = (number * architecture.unit for number in (architecture.heads, architecture.key_value_heads))
    up = (architecture.inner_width,) * (architecture.maps - 1)
    return {"attention.qkv.weight": (queries, keys, keys), "feedforward.up": up}


def matrices(
    architecture: Architecture, expert_scope: str = "feedforward"
) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """The matrices of blocks that all experts share, and those of each expert, as `parameters` parts them.

    They are the weights of linear maps: how many there are of each shape (rows, columns). A routed expert has its own.
    """
    width, inner = architecture.width, architecture.inner_width
    layers, routed = architecture.layers, architecture.routed
    qkv, up = stacked_maps(architecture).values()
    shared = Counter((rows, width) for rows in qkv * layers)
    shared[width, architecture.heads * architecture.unit] += layers
    stacked = layers + architecture.routed_layers * (routed.experts - 1 if routed else 0)
    own = Counter((rows, width) for rows in up * stacked)
    own[width, inner] += stacked
    return (Counter(), shared + own) if expert_scope == "model" else (shared, own)


def orthogonalising_flops(rows: int, columns: int) -> int:
    """FLOPs of one Newton-Schulz iteration of Muon on a matrix: 4m²n + 2m³ for m the smaller side and n the other."""
    m, n = sorted((rows, columns))
    return 4 * m**2 * n + 2 * m**3


def unchosen_parameters(architecture: Architecture) -> int:
    """The parameters of routed experts that a token does not choose."""
    routed = architecture.routed
    if not routed:
        return 0
    return architecture.routed_layers * (routed.experts - routed.top_k) * _feedforward_parameters(architecture)


def _feedforward_parameters(architecture: Architecture) -> int:
    inner, width, maps = architecture.inner_width, architecture.width, architecture.maps
    biases = (maps - 1) * inner + width if architecture.biases == "all" else 0
    return maps * inner * width + biases


def _attention_parameters(architecture: Architecture) -> int:
    width, unit = architecture.width, architecture.unit
    queries, keys = architecture.heads * unit, architecture.key_value_heads * unit
    biases = {"all": queries + 2 * keys + width, "qkv": queries + 2 * keys, "none": 0}[architecture.biases]
    norms = {"none": 0, "head": 2 * unit, "all": queries + keys}[architecture.query_norm]
    return 2 * (queries + keys) * width + biases + norms


def parameters(
    architecture: Architecture, vocab_size: int, domain_tokens: int = 0, expert_scope: str = "feedforward"
) -> tuple[int, int]:
    """Count the parameters that all experts of a model share, and those that each expert owns alone.

    An expert owns the feedforward of every layer, biases included; with `expert_scope` "model" an expert owns
    everything. The shared parameters are the embeddings (one where the head is tied), learned positions, attention,
    norms and the scale of CLAP. `domain_tokens` > 0 adds the extra position and the input embeddings of the
    domain-token baseline. A routed feedforward counts with all its experts and its router.
    """
    layers, width = architecture.layers, architecture.width
    positions = architecture.context + (1 if domain_tokens else 0) if architecture.position == "learned" else 0
    types = vocab_size * (2 if architecture.head == "untied" else 1)
    norm = width * (2 if architecture.norm == "layer" else 1)
    rest = (types + positions + domain_tokens) * width + norm + (architecture.head == "clap")
    rest += layers * (_attention_parameters(architecture) + 2 * norm)
    feedforward = _feedforward_parameters(architecture)
    feedforwards = layers * feedforward
    if routed := architecture.routed:
        feedforwards += architecture.routed_layers * ((routed.experts - 1) * feedforward + routed.experts * width)
    return (0, rest + feedforwards) if expert_scope == "model" else (rest, feedforwards)
