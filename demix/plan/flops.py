"""What a model and a run cost: floating-point operations, memory, disk, hours. Arithmetic only, no torch.

B sequences of s tokens, l layers of h units, V types, as in Narayanan et al. 2021, "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM".
"""

from dataclasses import dataclass

from demix.config.architecture import PRESETS, Architecture

# Of the logits of so many tokens at a time: `demix.model.gpt.ROWS_AT_ONCE` on a GPU.
LOGITS_ROWS = 4096


def training_flops_per_token(architecture: Architecture, vocab_size: int, length: int) -> float:
    """96·l·h²·(1 + s/6h + V/16lh) for sequences of `length`: forward, forward again, backward (two forwards).

    Narayanan et al. 2021, section 5.1, with V rounded up to a multiple of 8 as the paper's Table 2 does. An expert is
    all of a token's feedforward, so that DEMix costs what a dense model does. A loop that keeps its activations does
    three quarters of the layers' part.
    """
    layers, width, vocabulary = architecture.layers, architecture.width, -(-vocab_size // 8) * 8
    return 96 * layers * width**2 * (1 + length / (6 * width) + vocabulary / (16 * layers * width))


def update_flops(architecture: Architecture, vocab_size: int, sequences: int, length: int) -> float:
    """Of one optimizer update on `sequences` of `length` tokens, all ranks together."""
    return sequences * length * training_flops_per_token(architecture, vocab_size, length)


def scoring_flops(architecture: Architecture, vocab_size: int, experts: int) -> int:
    """Of the matrix products that score one token of a full block under so many experts at once.

    Embedding and first attention are the experts' in common. Attention counts the half that the causal mask leaves.
    """
    layers, width = architecture.layers, architecture.width
    attention = 8 * width**2 + 2 * architecture.context * width
    feedforward = 16 * width**2
    each = layers * (attention + feedforward) - attention + 2 * width * vocab_size
    return attention + experts * each


def scoring_hours(architecture: Architecture, vocab_size: int, experts: int, tokens: int, tflops: float) -> float:
    """Of one rank that achieves so many TFLOPs a second and scores `tokens` under all experts at once."""
    return scoring_flops(architecture, vocab_size, experts) * tokens / (tflops * 1e12) / 3600


def score_table_bytes(experts: int, tokens: int) -> int:
    """Of score tables before compression: fp32 a token and expert, and once a token its id, block and document.

    The id is 2 bytes for up to 65,536 types, block and document 4 each.
    """
    return (4 * experts + 10) * tokens


def training_state_bytes(trained: int, still: int = 0) -> int:
    """Of a rank that trains `trained` parameters: fp32 weights 4, gradients 4, Adam's two moments 8.

    `still` parameters are held but not trained: frozen ones, and the best so far that early stopping keeps.
    """
    return 16 * trained + 4 * still


def activation_bytes(
    architecture: Architecture, vocab_size: int, sequences: int, value_bytes: int, *, checkpointing: bool
) -> int:
    """About what backward keeps of `sequences` blocks that a rank sees at a time, in values of 2 or 4 bytes.

    A layer keeps 16 values a token and unit: Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
    Transformer Models", section 4.1), 34 bytes in 16 bits, without the two dropout masks of a byte each and, since
    attention is fused, without the scores. With activation `checkpointing` only the inputs of all layers are kept, and
    one layer's 16 at a time. Of the logits a chunk exists at a time, in fp32 and in the type of the values.
    """
    layers, width = architecture.layers, architecture.width
    kept = layers + 16 if checkpointing else 16 * layers
    tokens = sequences * architecture.context
    return tokens * kept * width * value_bytes + min(tokens, LOGITS_ROWS) * vocab_size * (4 + value_bytes)


def checkpoint_bytes(trained: int, best: int = 0) -> int:
    """Of one training state on disk: fp32 weights and Adam's two moments of all experts, and the `best` weights."""
    return 12 * trained + 4 * best


# Table 2 of the paper: TFLOPs a second and GPU on V100s, of its Dense and of DEMix.
PAPER_TFLOPS = {"gpt3-small": (31, 31), "gpt3-medium": (37, 37), "gpt3-large": (45, 48), "gpt3-xl": (51, 55)}


@dataclass(frozen=True)
class Hardware:
    """What one rank runs on. `tflops` a second that it achieves, by the formula above; None: as Table 2 says."""

    tflops: float | None
    assumption: str


HARDWARE = {
    "v100": Hardware(None, "TFLOPs/s a GPU of the paper's Table 2 (V100, fp16), of its size of the nearest width"),
    "a100": Hardware(137, "137 TFLOPs/s a GPU, 44% of peak: a model of 1.7B in Narayanan et al. 2021, table 1 (fp16)"),
    "h100": Hardware(396, "396 TFLOPs/s a GPU, assuming 40% of the 989 at peak (bf16)"),
    "cpu": Hardware(
        0.15, "0.15 TFLOPs/s a rank: two cores with AVX-512 in fp32, of 0.10 (3×128) to 0.18 (12×768) measured"
    ),
}


def achieved_tflops(hardware: Hardware, architecture: Architecture, *, demix: bool) -> float:
    """TFLOPs a second of one rank that trains a model of `architecture`."""
    if hardware.tflops is not None:
        return hardware.tflops
    nearest = min(PAPER_TFLOPS, key=lambda name: abs(PRESETS[name].width - architecture.width))
    return PAPER_TFLOPS[nearest][demix]


def hours(flops_per_update: float, steps: int, ranks: int, tflops: float) -> float:
    """Of a run of so many updates on `ranks` that achieve `tflops` TFLOPs a second each."""
    return flops_per_update / (ranks * tflops * 1e12) * steps / 3600
