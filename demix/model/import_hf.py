"""Importing a Hugging Face checkpoint as a model of demix: the inverse of `demix.model.export`."""

import codecs
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, pre_tokenizers
from torch import Tensor

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.config.models import DENSE_EXPERT
from demix.config.tokenizer import types_and_end
from demix.data.hub import fetch_files, model_files, pinned_model
from demix.data.tokenizer import PROBE, Tokenizer, from_merges, write_definition
from demix.errors import DemixError
from demix.files import check_inside, digest, exclusive, opened, refuse_used, replacing, sha256_file
from demix.files.json_files import read_unsealed
from demix.files.kinds import SAFETENSORS, check_file_kind
from demix.model.directory import check_values, save_files
from demix.model.format import BY_SIZES, HARMLESS, Format, Others, follows
from demix.model.formats import FORMATS
from demix.model.gpt import GPT
from demix.model.manifest import MAX_BYTES
from demix.settings import OpenSettings, Text, settings_from

# Without learned positions a model can read blocks of any length, and a cache of all positions would not fit into
# memory.
USUAL_CONTEXT = 2048
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
# The allowed difference, relative to the largest logit. In fp32 the architectures differ by less than 1e-6 for three
# layers, and rounding grows with depth; a wrong epsilon, theta or tensor changes logits by 1e-2 and more.
MAX_DIFFERENCE = 1e-3
TEXT = """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of
a wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this
truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful property of some
one or other of their daughters."""
# Files that an export copies unchanged: those next to the weights that describe the use of the model.
KEPT = (
    "added_tokens.json", "chat_template.jinja", "config.json", "generation_config.json", "merges.txt",
    "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
)  # fmt: skip
# The folder of these files in the model directory.
KEPT_IN = "imported"
_MAX_KEPT_BYTES = 64 << 20
FileName = Annotated[Text, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.safetensors$")]
# The location of a tensor: the path, and the open file.
Places = Mapping[str, tuple[Path, Any]]


class Index(OpenSettings):
    """The content of model.safetensors.index.json: the file of each tensor, in the same folder."""

    weight_map: Annotated[dict[Text, FileName], Field(min_length=1)]


@dataclass(frozen=True)
class Verified:
    """The largest difference of logits, the largest logit, and the tokens of the text compared."""

    difference: float
    largest: float
    tokens: int


def import_hf(
    folder: Path,
    output: Path,
    context: int | None = None,
    verify: bool = False,
    origin: Mapping[str, str] = MappingProxyType({}),
) -> Verified | None:
    """Write the checkpoint in `folder` (config.json, safetensors files) as a model of demix with its tokenizer.

    Supported architectures are the formats in `demix.model.formats`; their classes in transformers yield the same
    logits. `context` is the context length. A table of learned positions is cut to it; without learned positions the
    default is the smaller of USUAL_CONTEXT and the checkpoint's length. With `verify` the logits are compared with
    those of transformers on a text, and the difference is returned. `imported_tokenizer` describes the supported
    tokenizers. model.json records the `origin` of the files. Nothing is unpickled or downloaded. If a file is missing
    or damaged, the model has an unsupported feature, or the logits differ, raises DemixError without writing `output`.
    """
    _check_output(output, verify)
    for path in (*(folder / name for name in (*KEPT, INDEX)), *folder.glob("*.safetensors")):
        check_inside(path, folder)
    config = folder / "config.json"
    form, options, others = read_config(config)
    architecture = architecture_of(config, form, options, others, context)
    vocab_size = others.vocab_size
    weights, sha256 = _weight_files(folder)
    with _opened(weights) as places:
        model = _model(config, places, form, architecture, vocab_size, others.context)
    shared, own = parameters(architecture, vocab_size)
    with replacing(output.resolve(), directory=True) as temporary:
        encoder = imported_tokenizer(folder, temporary / "tokenizer.json", vocab_size)
        learned = {"tokenizer_sha256": encoder.sha256, "imported": {"format": form.name, "sha256": sha256, **origin}}
        counts = {
            "kind": "routed" if architecture.routed else "dense",
            "shared_parameters": shared,
            "expert_parameters": own,
        }
        save_files(model, temporary, counts | learned, {"parent": None} | learned)
        _keep_files(folder, temporary / KEPT_IN)
        return verify_import(folder, temporary / KEPT_IN, model, encoder) if verify else None


def import_hub(address: str, output: Path, context: int | None = None, verify: bool = False) -> Verified | None:
    """Write the model `hub:owner/name@commit` to `output`, like `import_hf` for a folder.

    Only config.json, the tokenizer's files and safetensors are downloaded. Until the model is written, they are in a
    folder next to `output`, so that a later call can resume. Raises DemixError if `address` has no commit, if files are
    absent, damaged or unreachable, and as `import_hf` does.
    """
    _check_output(output, verify)
    repository, commit = pinned_model(address)
    files, place = model_files(repository, commit), output.resolve()
    folder = place.with_name(f".{place.name}.{commit[:12]}")
    with exclusive(folder / ".lock", "fetches this checkpoint"):
        fetch_files(files, ["config.json"], folder)
        # An unsupported model is an error before its weights are downloaded.
        read_config(folder / "config.json")
        fetch_files(files, [name for name in KEPT if name in files], folder)
        weights = {WEIGHTS}
        if WEIGHTS not in files:
            if INDEX not in files:
                cause = f"has neither {WEIGHTS} nor {INDEX} at this commit"
                raise DemixError(f"model {repository}", cause, "use a commit with safetensors; pickles are not read")
            fetch_files(files, [INDEX], folder)
            weights = set(weight_map(folder / INDEX).values())
        fetch_files(files, sorted(weights), folder)
        origin = {"repository": repository, "revision": commit}
        done = import_hf(folder, output, context, verify, origin)
        shutil.rmtree(folder)
    return done


def read_config(path: Path) -> tuple[Format, dict[str, Any], Others]:
    """The format that a config.json names, and its content (`Format.read`). All its keys must be known."""
    content = read_unsealed(path, MAX_BYTES)
    name = content.get("model_type", "missing")
    form = FORMATS.get(name) if isinstance(name, str) else None
    if form is None or form.export_only:
        known = ", ".join(one.name for one in FORMATS.values() if not one.export_only)
        raise DemixError(f"{path}: model_type", f"is {name!r:.40}, which is not supported", f"supported are {known}")
    if unknown := sorted(key for key in content.keys() - form.known if not HARMLESS.fullmatch(key)):
        values = ", ".join(f"{content[key]!r:.80}" for key in unknown)
        cause = f"is {values:.300}; demix does not know whether this changes the computation of {form.title}"
        raise DemixError(f"{path}: {', '.join(unknown)}", cause, "remove from the file keys without effect")
    return form, *form.read(content, path)


def architecture_of(
    config: Path, form: Format, options: Mapping[str, Any], others: Others, context: int | None
) -> Architecture:
    """The architecture with these options and this `context` length."""
    positions, learned = others.context, "position" not in options
    if context is None:
        context = positions if learned else min(positions, USUAL_CONTEXT)
    elif learned and context > positions:
        cause = f"is more than the {positions:,} learned positions of {config}"
        raise DemixError(f"--context {context}", cause, f"use {positions} or less")
    if others.window is not None and context > others.window:
        cause = f"spans only {others.window:,} positions, but blocks have {context:,}"
        raise DemixError(f"{config}: attention", cause, f"import it with --context {others.window}")
    architecture = form.checked(Architecture, {**options, "context": context}, config)
    usual: dict[str, Any] = {option: None for option in BY_SIZES if follows(option, architecture)}
    return architecture.replace(**usual)


def _weight_files(folder: Path) -> tuple[list[Path], str]:
    """The safetensors files of a checkpoint, and a digest of them all."""
    index, single = folder / INDEX, folder / WEIGHTS
    whole = single.exists() or not index.exists()
    found = [single] if whole else [folder / name for name in dict.fromkeys(weight_map(index).values())]
    for path in found:
        try:
            check_file_kind(path, SAFETENSORS)
        except FileNotFoundError:
            cure = f"download it again, or convert the checkpoint to safetensors: one file, or several with {INDEX}"
            raise DemixError(path, "is missing", cure) from None
    sha256 = {path.name: sha256_file(path) for path in found}
    return found, sha256[WEIGHTS] if whole else digest(sha256)


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by model.safetensors.index.json at `index`."""
    return settings_from(Index, read_unsealed(index, MAX_BYTES), f"{index}: ").weight_map


@contextmanager
def _opened(weights: Sequence[Path]) -> Iterator[Places]:
    """The location of each tensor of a checkpoint, while the files are open. A name may occur in only one file."""
    places: dict[str, tuple[Path, Any]] = {}
    with ExitStack() as stack:
        for path in weights:
            try:
                file = stack.enter_context(safe_open(path, "pt"))
                names = set(file.keys())
            except SafetensorError as error:
                raise DemixError(path, f"is not a safetensors file ({error})", "download it again") from None
            if twice := names & places.keys():
                cause = f"holds {min(twice)}, which is also in {places[min(twice)][0].name}"
                raise DemixError(path, cause, "download the checkpoint again")
            places |= dict.fromkeys(names, (path, file))
        if not places:
            raise DemixError(weights[0], "holds no tensors", "download it again")
        yield places


def _model(
    config: Path, places: Places, form: Format, architecture: Architecture, vocab_size: int, positions: int
) -> GPT:
    """The model whose tensors are at `places`, which must have exactly these; tensors of one row are read at a time.

    The required names and shapes are those that `Format` would write for such a model.
    """
    with torch.device("meta"):
        model = GPT(architecture, vocab_size, (DENSE_EXPERT,))
        ours = {name: p[0] if ".feedforward." in name else p.detach() for name, p in model.named_parameters()}
        if "position_embedding" in ours:
            ours["position_embedding"] = torch.empty(positions, architecture.width)
    bare = not any(name.startswith(form.prefix) for name in places)
    tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    for row in form.tensors(architecture, ours):
        read = {}
        for name, wanted in row.theirs_of(ours[row.ours], architecture).items():
            place = name.removeprefix(form.prefix) if bare else name
            if place not in places:
                cure = f"import a whole checkpoint of {form.model_class}, with its own config.json"
                raise DemixError(next(iter(places.values()))[0].parent, f"has no tensor {place}", cure)
            read[name] = _read_tensor(place, *places[place], wanted, config)
            used.add(place)
        tensor = row.ours_of(read.__getitem__, architecture)
        tensors[row.ours] = tensor[None] if ".feedforward." in row.ours else tensor
    if "position_embedding" in tensors:
        tensors["position_embedding"] = tensors["position_embedding"][: architecture.context].contiguous()
    _refuse_others({*places} - used, places, form, tensors)
    model.load_state_dict(tensors, assign=True)
    return model


def _read_tensor(name: str, path: Path, file: Any, wanted: Tensor, config: Path) -> Tensor:
    """A tensor of an open file, of the shape `wanted`, with usable values."""
    part = file.get_slice(name)
    if (found := tuple(part.get_shape())) != wanted.shape:
        cause = f"holds {name} as {found}, but by {config.name} it is {tuple(wanted.shape)}"
        raise DemixError(path, cause, "restore the checkpoint's own config.json")
    tensor: Tensor = file.get_tensor(name)
    check_values(path, [(name, tensor)])
    return tensor


def _refuse_others(names: set[str], places: Places, form: Format, tensors: Mapping[str, Tensor]) -> None:
    """Raise DemixError if one of the `names` that no row reads is that of a parameter."""
    head = f"{form.outside['output_embedding']}.weight"
    for name in sorted(names):
        if name.endswith(form.buffers):
            continue
        path, file = places[name]
        if name != head:
            raise DemixError(path, f"holds {name}, which {form.title} lacks", "import another checkpoint")
        # The file may contain a tied head again.
        if not torch.equal(file.get_tensor(name).float(), tensors["token_embedding"]):
            cause = f"holds {name}, which {form.title} with tied embeddings lacks"
            raise DemixError(path, cause, "import another checkpoint, or set tie_word_embeddings to false")


def _keep_files(folder: Path, output: Path) -> None:
    """Copy the files of `folder` that an export gives back."""
    for name in KEPT:
        if not (folder / name).is_file():
            continue
        with opened(folder / name) as stream:
            content = stream.read(_MAX_KEPT_BYTES + 1).removeprefix(codecs.BOM_UTF8)
        if len(content) > _MAX_KEPT_BYTES:
            raise DemixError(folder / name, f"has more than {_MAX_KEPT_BYTES:,} bytes", "download it again")
        output.mkdir(exist_ok=True)
        (output / name).write_bytes(content)


def imported_tokenizer(folder: Path, output: Path, types: int) -> Tokenizer:
    """Write the tokenizer of the checkpoint in `folder`, whose embedding has `types` rows, to `output`.

    Its files are `tokenizer.json`, or `vocab.json` and `merges.txt`. Raises DemixError for any other tokenizer.
    """
    source, vocabulary, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    if os.path.lexists(source):
        definition = read_unsealed(source)
    elif vocabulary.is_file() and merges.is_file():
        source, definition = vocabulary, from_merges(read_unsealed(vocabulary), merges)
    else:
        cause = "has neither tokenizer.json nor vocab.json with merges.txt"
        raise DemixError(folder, cause, "put the model's own tokenizer.json there")
    end_of_text = types_and_end(folder / "tokenizer.json", definition)["end_of_text"]
    return write_definition(source, definition, output, end_of_text, types)


def _check_output(output: Path, verify: bool) -> None:
    """Raise DemixError if `output` is in use, or if logits are to be compared and transformers is not installed."""
    refuse_used(output)
    if verify and importlib.util.find_spec("transformers") is None:
        raise DemixError("--verify", "needs transformers, which is not installed", "pip install 'demix[transformers]'")


def verify_import(folder: Path, configs: Path, model: GPT, encoder: Tokenizer) -> Verified:
    """Compare an imported model with the checkpoint in `folder`, in fp32, on TEXT.

    `configs` is a folder with the checkpoint's config.json in plain UTF-8. Raises DemixError if a text gets other ids
    than the library tokenizers gives it, if transformers does not load the checkpoint, and if logits differ by more
    than MAX_DIFFERENCE of the largest.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    _verify_encodings(folder, encoder)
    own = encoder.encode(TEXT)[: model.architecture.context - 1]
    ids = torch.tensor([[encoder.end_of_text, *own.tolist()]])
    here = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(configs, **here)
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, **here
        )
    # It raises nearly anything for a folder that it does not like.
    except Exception as error:
        cause = f"cannot be loaded by transformers ({type(error).__name__}: {error})"
        raise DemixError(folder, cause, "import it without --verify") from error
    theirs.train(False)
    with torch.no_grad():
        wanted = theirs(ids, use_cache=False).logits[0]
        found = model.logits(model(ids[None]))[0, 0]
    verified = Verified(float((found - wanted).abs().max()), float(wanted.abs().max()), ids.shape[1])
    if not verified.difference <= MAX_DIFFERENCE * verified.largest:
        cause = f"has logits that differ by up to {verified.difference:.2g} from those of transformers"
        cause += f", which reach {verified.largest:.2g}"
        raise DemixError(folder, cause, "report it, with its config.json")
    return verified


def _verify_encodings(folder: Path, encoder: Tokenizer) -> None:
    """Compare the ids of two texts with those of the tokenizer's files, as the library tokenizers reads them."""
    file, vocabulary = folder / "tokenizer.json", folder / "vocab.json"
    try:
        if file.is_file():
            theirs = HuggingFaceTokenizer.from_str(file.read_text("utf-8-sig"))
        else:
            theirs = HuggingFaceTokenizer(models.BPE.from_file(str(vocabulary), str(folder / "merges.txt")))
            theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # What the library raises.
    except Exception as error:
        cause = f"has a tokenizer that the library tokenizers cannot read ({error})"
        raise DemixError(folder, cause, "import it without --verify") from None
    theirs.encode_special_tokens = True
    for text in (TEXT, PROBE):
        wanted, found = theirs.encode(text, add_special_tokens=False).ids, encoder.encode(text).tolist()
        if found != wanted:
            cause = f"encodes {text!r:.60} as {found[:8]} in demix, but as {wanted[:8]} in tokenizers"
            raise DemixError(folder, cause, "report it, with its tokenizer.json")
