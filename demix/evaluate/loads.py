"""Which experts tokens choose on each domain, in models whose tokens choose their experts."""

from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError
from demix.evaluate.score import Scoring
from demix.evaluate.score_tables import count_to_score, row_groups
from demix.files import write_parquet
from demix.model.checkpoint import load_experts, refuse_masked, refuse_other_tokenizer
from demix.model.device import compute_type, own_device, set_threads
from demix.model.gpt import GPT, seeing
from demix.model.layers import RoutedLayer
from demix.model.scoring import EXPERT_TOKENS_AT_ONCE
from demix.progress import progress


def write_loads(directory: Path, shards: list[Path], scoring: Scoring, output: Path) -> None:
    """Count the choices of the routers of the model in `directory` on token shards tokens/<domain>/<split>.arrow.

    Each shard is read in the blocks, and up to the token, at which it is scored, and without capacity as in scoring.
    The Parquet file `output` has one row per domain, layer and expert: columns domain, layer (from 1), expert (from 0),
    choices (of tokens as inputs; a token makes top_k of them). Raises DemixError for a model without routers, and if
    model and shards have different tokenizers.
    """
    set_threads(scoring.threads)
    refuse_masked(directory, "is scored with other inputs in each fold")
    model = load_experts(directory, None, own_device())[0]
    if not _routers(model):
        raise DemixError(directory, "has no layer whose tokens choose experts", "give a model of kind routed")
    rows = []
    for path in shards:
        shard = TokenShard.open(path, verify=True)
        refuse_other_tokenizer(directory, path, shard.tokenizer_sha256, shard.vocab_size)
        for layer, loads in _loads(model, shard, path, scoring).items():
            rows += [
                {"domain": path.parent.name, "layer": layer + 1, "expert": expert, "choices": choices}
                for expert, choices in enumerate(loads.tolist())
            ]
    schema = pa.schema({"domain": pa.string(), "layer": pa.int32(), "expert": pa.int32(), "choices": pa.int64()})
    write_parquet(pa.Table.from_pylist(rows, schema), output)


@torch.no_grad()
def _loads(model: GPT, shard: TokenShard, path: Path, scoring: Scoring) -> dict[int, Tensor]:
    """The choices [E] of the first tokens of `shard` by layer."""
    length, device = model.architecture.context, model.token_embedding.device
    total = count_to_score(shard, scoring, length)
    batch = max(1, EXPERT_TOKENS_AT_ONCE // length)
    routers = _routers(model)
    loads = {layer: torch.zeros(router.routed.experts, dtype=torch.int64) for layer, router in routers.items()}
    # The experts [B, T, k] that tokens chose in the last forward pass.
    chosen: dict[int, Tensor] = {}

    def keep(layer: int, inputs: Tensor) -> None:
        chosen[layer] = routers[layer].choices(inputs[0])[2]

    with seeing(routers, keep), progress(f"{path.parent.name} {path.stem}: tokens", total) as advance:
        for start, stop in row_groups(total, length):
            inputs, _, mask = (torch.from_numpy(array) for array in blocks(shard, length, stop, start))
            for first in range(0, len(inputs), batch):
                here = mask[first : first + batch]
                model(inputs[None, first : first + batch].to(device), dtype=compute_type(scoring.precision))
                for layer, experts in chosen.items():
                    loads[layer] += torch.bincount(experts.cpu()[here].flatten(), minlength=len(loads[layer]))
                advance(int(here.sum()))
    return loads


def _routers(model: GPT) -> dict[int, RoutedLayer]:
    """The feedforwards whose tokens choose experts, by the number of their block."""
    found = ((layer, block.feedforward) for layer, block in enumerate(model.blocks))
    return {layer: feedforward for layer, feedforward in found if isinstance(feedforward, RoutedLayer)}
