"""The cost of a model and of a run: floating-point operations, memory, disk, hours. Arithmetic without torch.

Notation: B sequences of s tokens, l layers of h units, V vocabulary entries, as in Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".
"""

from dataclasses import dataclass

from demix.config.architecture import FOLDS, PRESETS, Architecture
from demix.config.counts import attention_flops, feedforward_flops, head_map, routing_flops, training_flops_per_token

# Logits are computed for this many tokens at a time: `demix.model.heads.ROWS_AT_ONCE` on a GPU.
LOGITS_ROWS = 4096


def update_flops(architecture: Architecture, vocab_size: int, sequences: int, length: int) -> float:
    """FLOPs of one optimizer update on `sequences` of `length` tokens, over all ranks."""
    return sequences * length * training_flops_per_token(architecture, vocab_size, length)


def scoring_flops(architecture: Architecture, vocab_size: int, experts: int, expert_scope: str = "feedforward") -> int:
    """FLOPs of the matrix products that score one token of a full block with `experts` experts at once.

    All experts share the embedding and the attention of the first layer, unless they are whole models (`expert_scope`
    "model") or have their own tables of bigrams. Only the half of attention that the causal mask leaves is counted, but
    all of it with ALiBi, whose kernel skips nothing. A token-routed layer computes only the chosen experts. A masked
    model reads the whole block `FOLDS` times, and predicts each token once.
    """
    layers, width = architecture.layers, architecture.width
    skips = architecture.position != "alibi" and architecture.objective == "clm"
    passes = FOLDS if architecture.objective == "mlm" else 1
    scores = (2 if skips else 4) * architecture.context * architecture.heads * architecture.unit
    attention = attention_flops(architecture) + scores
    layer = attention + feedforward_flops(architecture)
    each = passes * (layers * layer - attention + routing_flops(architecture))
    each += 2 * (width * vocab_size + head_map(architecture))
    first = passes * attention
    apart = expert_scope == "model" or architecture.bigrams == "experts"
    return experts * (first + each) if apart else first + experts * each


def score_table_bytes(experts: int, tokens: int) -> int:
    """Bytes of score tables before compression: 4 per token and expert (fp32), and 18 per token.

    The 18 bytes are the token's id (2, for up to 65,536 ids), block (4), document (4) and source document (8).
    """
    return (4 * experts + 18) * tokens


def training_state_bytes(trained: int, still: int = 0, moments: int | None = None) -> int:
    """Bytes of the state of a rank with `trained` parameters: fp32 weights 4, gradients 4, Adam's two moments 8.

    `still` counts parameters in memory that are not trained: frozen parameters, and the best parameters so far, which
    early stopping keeps. `moments` are a rank's bytes of moments, if they are not Adam's for all its parameters.
    """
    return 8 * trained + 4 * still + (8 * trained if moments is None else moments)


def activation_bytes(
    architecture: Architecture,
    vocab_size: int,
    sequences: int,
    value_bytes: int,
    *,
    checkpointing: bool,
    dropout: bool = False,
) -> int:
    """Approximate bytes of activations that a rank keeps for the backward pass of `sequences` blocks.

    A value has `value_bytes` bytes. A layer of GPT-3 keeps 16 values per token and unit of width: 4 inputs of norms and
    linear maps, 4 of attention (queries, keys, values and output), and 8 inside the feedforward. Korthikanti et al.
    2022 ("Reducing Activation Recomputation in Large Transformer Models", section 4.1) count 34 bytes in 16 bits. Here
    attention is fused, so attention scores are not kept, and the two masks of one byte each exist only with `dropout`.
    With activation `checkpointing` only the inputs of all layers are kept, and the values of one layer at a time. One
    chunk of logits exists at a time, in fp32 and in the type of the values. For each expert of a token after the first,
    a token-routed layer also keeps its input and the inner values of one feedforward. A gated feedforward keeps 4
    values per inner unit: the outputs of two maps, of the activation and of the product. The bias of ALiBi, H·T²
    values, is shared by all layers. Bigram and value embeddings are kept as they are read.
    """
    layers, width, routed = architecture.layers, architecture.width, architecture.routed
    feedforward = (4 if architecture.gated else 2) * architecture.inner_width
    heads = 2 * (architecture.heads + architecture.key_value_heads)
    layer = 4 * width + heads * architecture.unit + feedforward
    read = width if architecture.bigrams != "none" else 0
    read += layers * architecture.key_value_heads * architecture.unit if architecture.value_embeddings else 0
    more = (width + feedforward) * (routed.top_k - 1) if routed else 0
    kept = layers * width + layer + more if checkpointing else layers * layer + more * architecture.routed_layers
    kept += read
    tokens = sequences * architecture.context
    bias = architecture.heads * architecture.context**2 * value_bytes if architecture.position == "alibi" else 0
    masks = 2 * tokens * width * (1 if checkpointing else layers) if dropout else 0
    return tokens * kept * value_bytes + min(tokens, LOGITS_ROWS) * vocab_size * (4 + value_bytes) + bias + masks


def checkpoint_bytes(trained: int, best: int = 0, moments: int | None = None) -> int:
    """Bytes of one checkpoint: fp32 weights and Adam moments of `trained` parameters, and fp32 weights of `best`.

    `moments` are the bytes of moments, if they are not Adam's.
    """
    return 4 * (trained + best) + (8 * trained if moments is None else moments)


# Table 2 of the paper: TFLOP/s per GPU on V100s, for the dense model and for DEMix.
PAPER_TFLOPS = {"gpt3-small": (31, 31), "gpt3-medium": (37, 37), "gpt3-large": (45, 48), "gpt3-xl": (51, 55)}


@dataclass(frozen=True)
class Hardware:
    """The hardware of one rank: `units` devices of the kind `unit`.

    `tflops`: achieved TFLOP/s of a rank by the formula above, or None for the values of Table 2. `memory`: bytes of a
    GPU, the most common size.
    """

    tflops: float | None
    assumption: str
    unit: str = "GPU"
    units: int = 1
    memory: int | None = None


HARDWARE = {
    "v100": Hardware(
        None, "TFLOPs/s per GPU of the paper's Table 2 (V100), at its model of the nearest width", memory=32 * 10**9
    ),
    "a100": Hardware(
        137,
        "137 TFLOPs/s per GPU, 44% of peak: the 1.7B model in Narayanan et al. 2021, table 1 (fp16)",
        memory=80 * 10**9,
    ),
    "h100": Hardware(396, "396 TFLOPs/s per GPU, assuming 40% of the peak of 989 (bf16)", memory=80 * 10**9),
    "cpu": Hardware(
        0.15,
        "0.15 TFLOPs/s per rank of two cores with AVX-512, fp32; measured: 0.10 (3×128) to 0.18 (12×768)",
        unit="core",
        units=2,
    ),
}


def achieved_tflops(hardware: Hardware, architecture: Architecture, *, demix: bool) -> float:
    """TFLOP/s of one rank that trains a model of `architecture`."""
    if hardware.tflops is not None:
        return hardware.tflops
    nearest = min(PAPER_TFLOPS, key=lambda name: abs(PRESETS[name].width - architecture.width))
    return PAPER_TFLOPS[nearest][demix]


def hours(flops_per_update: float, steps: int, ranks: int, tflops: float) -> float:
    """Hours of `steps` updates, or of scoring `steps` tokens, on `ranks` ranks of `tflops` TFLOP/s each."""
    return flops_per_update / (ranks * tflops * 1e12) * steps / 3600
