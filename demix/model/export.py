"""Exporting a model to Hugging Face: one expert in the format of its architecture, or the mixture of all experts."""

import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demix.config.architecture import Architecture
from demix.errors import DemixError
from demix.files import check_inside, refuse_used, replacing
from demix.files.json_files import read_unsealed
from demix.model.directory import (
    describe,
    expert_names,
    load_experts,
    load_model,
    refuse_routed,
    save_tensors,
    tokenizer_of,
    whole_models,
)
from demix.model.format import Format
from demix.model.formats import FORMATS
from demix.model.gpt import GPT
from demix.model.import_hf import KEPT, KEPT_IN
from demix.model.manifest import MAX_BYTES, tempered_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CODE = "modeling_demix"
_USE = """
## In transformers

`AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` runs `modeling_demix.py` of this folder, which
needs only transformers. Its logits are the log-probabilities of the mixture of all {experts} experts. At each token
the text so far weights the experts by the rule tempered({beta:g},{gamma:g}), with equal priors. A text begins with
`{start}`. Each token passes through every expert.
"""


def format_of(directory: Path, mixture: bool = False) -> Format:
    """The format in which an expert of the model in `directory` can be exported, by itself or in a `mixture`.

    It is the format from which the model was imported, if that supports it, or else the first of `FORMATS` that does.
    Raises DemixError for a domain-token model (other software has no domain token as first input), and for options of
    `architecture` that no format supports: it names one of them, and the format that lacks the fewest. The code of a
    mixture implements bigram embeddings, and value embeddings if values have their own linear map.
    """
    described = describe(directory)
    if described.domain_tokens:
        raise DemixError(directory, "is a domain-token model, which no other format can hold", "export another model")
    architecture = _with_plain_head(described.architecture)
    first = FORMATS.get((described.content.get("imported") or {}).get("format", ""))
    known = [form for form in (first, *FORMATS.values()) if form and form.routed == bool(architecture.routed)]
    choices = {
        form.name: form.lacking(_without_tables(architecture, form) if mixture else architecture) for form in known
    }
    name = min(choices, key=lambda choice: len(choices[choice]))
    form, lacking = FORMATS[name], choices[name]
    if lacking:
        option = "objective" if "objective" in lacking else lacking[0]
        cause = f"has {option} {attrgetter(option)(architecture)}, which {form.title}'s format cannot hold"
        raise DemixError(directory, cause, "export another model")
    return form


def export_hf(
    directory: Path,
    expert: str,
    tokenizer: Path | None,
    output: Path,
    card: str | None = None,
    dtype: str = "float32",
) -> None:
    """Write one expert of a model, with the tokenizer, as a Hugging Face directory with parameters of type `dtype`.

    README.md holds `card` (`demix.report.card.exported_card`). The class of transformers for this format yields the
    same log-probabilities, in fp32. Raises DemixError if transformers has no class for the model (`format_of`), if the
    tokenizer is not the model's, or if `output` is not empty.
    """
    export = _Export(directory, tokenizer, output, dtype)
    model = load_model(directory, (expert,))
    export.write(export.config(model), export.tensors(model, 0), card)


def export_mixture(
    directory: Path, tokenizer: Path | None, output: Path, card: str | None = None, dtype: str = "float32"
) -> None:
    """Write all experts of a model, with the tokenizer, as a Hugging Face directory whose model is their mixture.

    Its code is `modeling_demix.py`. The logits are log-probabilities of the mixture by `tempered`, with equal priors
    and the model's parameters. Tensors that experts share are written once. README.md holds `card` and the instructions
    for loading. Raises DemixError as `export_hf` does, and for a model without experts to mix.
    """
    refuse_routed(directory, "cannot be exported as a mixture")
    names = expert_names(directory)
    if len(names) == 1:
        raise DemixError(directory, "has only one expert, not a mixture", f"export it with --expert {names[0]}")
    export, trunks = _Export(directory, tokenizer, output, dtype, mixture=True), load_experts(directory)
    rows = export.form.tensors(trunks[0].architecture, dict(trunks[0].named_parameters()))
    feedforwards = {re.sub(r"\.\d+", "", name) for row in rows if ".feedforward." in row.ours for name in row.theirs}
    if trunks[0].architecture.bigrams == "experts":
        feedforwards.add("tables.bigrams")
    own = None if whole_models(directory) else sorted(feedforwards)
    tensors: dict[str, Tensor] = {}
    tables: dict[str, Tensor] = {}
    places = ((trunk, number) for trunk in trunks for number in range(len(trunk.experts)))
    for place, (trunk, number) in enumerate(places):
        tables = {f"tables.{name}": tensor for name, tensor in _tables(trunk, number).items()}
        for name, tensor in (export.tensors(trunk, number) | export.converted(tables)).items():
            if not place or own is None or re.sub(r"\.\d+", "", name) in own:
                tensors[f"experts.{place}.{name}"] = tensor
    of_one = export.config(trunks[0])
    beta, gamma = tempered_of(directory)
    config = {key: of_one[key] for key in ("dtype", *_IDS) if key in of_one} | {
        "architectures": ["DemixForCausalLM"],
        "auto_map": {"AutoConfig": f"{_CODE}.DemixConfig", "AutoModelForCausalLM": f"{_CODE}.DemixForCausalLM"},
        "model_type": "demix",
        "expert": of_one,
        "experts": names,
        "own": own,
        "tables": {name.removeprefix("tables."): [*tensor.shape] for name, tensor in tables.items()},
        "prior": [1 / len(names)] * len(names),
        "beta": beta,
        "gamma": gamma,
    }
    start = export.encoder.decode([export.encoder.end_of_text])
    used = _USE.format(experts=len(names), beta=beta, gamma=gamma, start=start)
    export.write(config, tensors, (card or "") + used, _CODE)


class _Export:
    """The export of the model in `directory` to the unused folder `output`."""

    def __init__(self, directory: Path, tokenizer: Path | None, output: Path, dtype: str, mixture: bool = False):
        self.directory, self.output, self.dtype = directory, output.resolve(), dtype
        refuse_used(self.output)
        self.form, self.encoder = format_of(directory, mixture), tokenizer_of(directory, tokenizer)[1]
        # The files next to the weights of the checkpoint that the model was imported from.
        self.came = {name: path for name in KEPT if (path := directory / KEPT_IN / name).is_file()}
        for path in self.came.values():
            check_inside(path, directory)

    def tensors(self, model: GPT, number: int) -> dict[str, Tensor]:
        """The tensors of one of the stacked experts of `model`, in the format."""
        own = {name: tensor[number] if ".feedforward." in name else tensor for name, tensor in model.named_parameters()}
        if _with_plain_head(model.architecture) != model.architecture:
            own["token_embedding"] = F.normalize(own["token_embedding"], dim=-1)
            own["output_embedding"] = own.pop("logit_scale") * own["token_embedding"]
        return self.converted(self.form.theirs_of(_with_plain_head(model.architecture), own))

    def converted(self, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in the export's type. Raises DemixError for numbers beyond the range of the type."""
        tensors = {name: tensor.to(DTYPES[self.dtype]) for name, tensor in theirs.items()}
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                cause = f"has numbers in {name} beyond the range of {self.dtype}"
                raise DemixError(self.directory, cause, "use bfloat16 or float32")
        return tensors

    def config(self, model: GPT) -> dict[str, Any]:
        """The config.json of one expert of `model`."""
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"), self.encoder.end_of_text + self.form.shift)
        if "config.json" in self.came:
            source_config = read_unsealed(self.came["config.json"], MAX_BYTES)
            ends = {key: source_config[key] for key in _IDS if key in source_config}
        made = self.form.config(_with_plain_head(model.architecture), model.vocab_size)
        return made | ends | {"dtype": self.dtype}

    def write(self, config: dict[str, Any], tensors: dict[str, Tensor], card: str | None, code: str = "") -> None:
        """Write the folder, with the module `code` if the model has its own code."""
        with replacing(self.output, directory=True) as temporary:
            save_tensors(tensors, temporary / "model.safetensors", {"format": "pt"})
            _write_json(temporary / "config.json", config)
            self._write_tokenizer(temporary)
            if card is not None:
                (temporary / "README.md").write_text(card, encoding="utf-8")
            if code:
                (temporary / f"{code}.py").write_bytes(Path(__file__).with_name(f"{code}.py").read_bytes())

    def _write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files and generation settings: imported ones unchanged, otherwise our own."""
        if not any(name.startswith(("tokenizer", "vocab")) for name in self.came):
            definition, keys = self.form.tokenizer(self.encoder)
            context = describe(self.directory).architecture.context
            _write_json(folder / "tokenizer_config.json", keys | {"model_max_length": context})
            (folder / "tokenizer.json").write_text(definition + "\n", encoding="utf-8")
        for name, path in self.came.items():
            if name != "config.json":
                (folder / name).write_bytes(path.read_bytes())


def _with_plain_head(architecture: Architecture) -> Architecture:
    """The architecture in other formats: for CLAP, normalised rows are the embeddings, and the head is untied."""
    plain = architecture.head == "clap" and architecture.objective == "clm"
    return architecture.replace(head="untied") if plain else architecture


def _without_tables(architecture: Architecture, form: Format) -> Architecture:
    """The architecture without the tables that a mixture's own code implements for experts of this format."""
    joint = isinstance(form.block["attention.qkv"], str)
    return architecture.replace(bigrams="none", value_embeddings=architecture.value_embeddings and joint)


def _tables(model: GPT, number: int) -> dict[str, Tensor]:
    """The tensors of `modeling_demix.Tables` of one of the stacked experts of `model`."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    found = {}
    if model.bigrams is not None:
        own = named.get("bigrams.expert_table")
        found = {"bigrams": named["bigrams.table"] if own is None else own[number], "scale": named["bigrams.scale"]}
    if model.value_embedding is not None:
        gates = [named[f"blocks.{layer}.attention.value_gate"] for layer in range(model.architecture.layers)]
        found |= {"values": model.value_embedding.detach(), "gates": torch.stack(gates)}
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    # These files have no seal, because other software reads them.
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
