"""Importing a checkpoint of Hugging Face as a dense model, the inverse of `demix.model.export`."""

import codecs
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.config.models import DENSE_EXPERT
from demix.errors import DemixError
from demix.files import check_inside, digest, opened, refuse_used, replacing, sha256_file
from demix.files.json_files import read_unsealed
from demix.files.kinds import SAFETENSORS, check_file_kind
from demix.model.checkpoint import FLOATS, check_values, save_expert, save_shared
from demix.model.description import MOST_BYTES
from demix.model.format import HARMLESS, NEUTRAL, Format, Keys
from demix.model.formats import FORMATS
from demix.model.gpt import GPT
from demix.model.imported_tokenizer import imported_tokenizer
from demix.model.verified import Verified, refuse_without_transformers, verify_import
from demix.settings import Text, names_of, settings, settings_from

# Without learned positions a model takes blocks of any length, and a cache of all positions would not fit into memory.
USUAL_CONTEXT = 2048
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
# A folder of peft with the changes to a model that lies elsewhere.
ADAPTER = "adapter_config.json"
# How names begin that torch.compile, DistributedDataParallel, FSDP and peft give to the tensors of the model inside.
WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "base_model.")
# What an export gives back as it came: the files beside the weights that say how the model is used.
KEPT = (
    "added_tokens.json", "chat_template.jinja", "config.json", "generation_config.json", "merges.txt",
    "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
)  # fmt: skip
# The folder of these files in the model directory.
KEPT_IN = "imported"
_MOST_KEPT_BYTES = 64 << 20
FileName = Annotated[Text, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.safetensors$")]
# Where a tensor lies: the file, and the open file.
Places = Mapping[str, tuple[Path, Any]]


@settings(kw_only=True, open=True)
class Index:
    """The content of model.safetensors.index.json: the file of each tensor, in the same folder."""

    weight_map: Annotated[dict[Text, FileName], Field(min_length=1)]


def import_hf(
    folder: Path,
    output: Path,
    context: int | None = None,
    verify: bool = False,
    text: Path | None = None,
    origin: Mapping[str, str] = MappingProxyType({}),
) -> Verified | None:
    """Write the checkpoint in `folder` (config.json, safetensors files) as a dense model with its tokenizer.

    The families are those of `demix.model.formats`, whose classes in transformers give the same logits. `context` is
    the length of blocks. A table of learned positions is cut to it; without learned positions it is by default the
    smaller of USUAL_CONTEXT and that of the checkpoint. With `verify` transformers' logits of the file `text` are
    compared, and how they differ is returned. `imported_tokenizer` says which tokenizers come in. model.json keeps the
    `origin` of the files. Nothing is unpickled or fetched. Raises DemixError, and leaves no `output`, if a file is
    missing or damaged, if the model computes something that demix does not, and if the logits differ.
    """
    refuse_used(output)
    if verify:
        refuse_without_transformers()
    for path in (*(folder / name for name in (*KEPT, INDEX)), *folder.glob("*.safetensors")):
        check_inside(path, folder)
    if (folder / ADAPTER).exists():
        raise an_adapter(folder)
    config = folder / "config.json"
    form, keys = read_config(config)
    architecture, positions = architecture_of(config, keys, context)
    sizes = form, architecture, keys.vocab_size, positions
    weights, sha256 = _weight_files(folder)
    with _opened(folder, weights, form) as places:
        model = _model(config, places, *sizes)
    shared, own = parameters(architecture, keys.vocab_size)
    with replacing(output.resolve(), directory=True) as temporary:
        encoder = imported_tokenizer(folder, temporary / "tokenizer.json", keys.vocab_size, form.name)
        learned = {"tokenizer_sha256": encoder.sha256, "imported": {"format": form.name, "sha256": sha256, **origin}}
        counts = {
            "kind": "routed" if architecture.routed else "dense",
            "shared_parameters": shared,
            "expert_parameters": own,
        }
        save_shared(model, temporary, counts | learned)
        save_expert(model, DENSE_EXPERT, temporary, {"parent": None} | learned)
        _keep_files(folder, temporary / KEPT_IN)
        return verify_import(folder, temporary / KEPT_IN, model, encoder, text) if verify else None


def an_adapter(subject: object) -> DemixError:
    """The error for a checkpoint that changes the parameters of another."""
    cure = "merge the adapter first: AutoPeftModelForCausalLM, merge_and_unload(), save_pretrained(FOLDER)"
    return DemixError(subject, "is an adapter of peft, which changes another model's parameters", cure)


def read_config(path: Path) -> tuple[Format, Keys]:
    """The format that a config.json names, and its keys, each of which is known."""
    content = read_unsealed(path, MOST_BYTES)
    name = content.get("model_type", "missing")
    form = FORMATS.get(name) if isinstance(name, str) else None
    if form is None or form.keys is None:
        known = ", ".join(one.name for one in FORMATS.values() if one.keys)
        raise DemixError(f"{path}: model_type", f"is {name!r:.40}", f"families that come in are {known}")
    own = {*names_of(form.keys)}
    given = {key: value for key, value in content.items() if key in own or not _changes_nothing(key, value)}
    if unknown := sorted(given.keys() - own):
        values = ", ".join(f"{given[key]!r:.80}" for key in unknown)
        cause = f"is {values:.300}, and whether this changes what {form.title} computes is not known"
        raise DemixError(f"{path}: {', '.join(unknown)}", cause, "leave out of the file what changes nothing")
    with _named(path):
        return form, settings_from(form.keys, given, f"{path}: ")


def _changes_nothing(key: str, value: Any) -> bool:
    return key in HARMLESS or (key in NEUTRAL and value == NEUTRAL[key])


def architecture_of(config: Path, keys: Keys, context: int | None) -> tuple[Architecture, int]:
    """The architecture of these keys in blocks of `context`, and the rows of the table of positions on disk."""
    options = keys.options()
    positions, learned = options["context"], "position" not in options
    if context is None:
        context = positions if learned else min(positions, USUAL_CONTEXT)
    elif learned and context > positions:
        cause = f"is more than the {positions:,} learned positions of {config}"
        raise DemixError(f"--context {context}", cause, f"use {positions} or less")
    if keys.window is not None and context > keys.window:
        cause = f"sees {keys.window:,} positions, and blocks have {context:,}"
        raise DemixError(f"{config}: attention", cause, f"import it with --context {keys.window}")
    with _named(config):
        return settings_from(Architecture, options | {"context": context}, f"{config}: "), positions


@contextmanager
def _named(config: Path) -> Iterator[None]:
    """Name the file in an error of its values together."""
    try:
        yield
    except DemixError as error:
        subject = error.subject.removeprefix(f"{config}: ").removeprefix("architecture.")
        raise DemixError(f"{config}: {subject}", error.cause, error.cure) from None


def _weight_files(folder: Path) -> tuple[dict[Path, set[str] | None], str]:
    """The safetensors files of a checkpoint with the tensors that the index gives them, and a digest of them all.

    Without an index there is one file, and None in place of names.
    """
    index, single = folder / INDEX, folder / WEIGHTS
    if single.exists() or not index.exists():
        try:
            check_file_kind(single, SAFETENSORS)
        except FileNotFoundError:
            cure = f"convert the checkpoint to safetensors, in one file or several with {INDEX}"
            raise DemixError(single, "is missing", cure) from None
        return {single: None}, sha256_file(single)
    found: dict[Path, set[str] | None] = {}
    for tensor, name in weight_map(index).items():
        named = found.setdefault(folder / name, set())
        assert named is not None
        named.add(tensor)
    for path in found:
        try:
            check_file_kind(path, SAFETENSORS)
        except FileNotFoundError:
            raise DemixError(path, f"is missing, and {INDEX} names it", "get it again") from None
    return found, digest({path.name: sha256_file(path) for path in found})


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by model.safetensors.index.json at `index`."""
    return settings_from(Index, read_unsealed(index, MOST_BYTES), f"{index}: ").weight_map


@contextmanager
def _opened(folder: Path, weights: Mapping[Path, set[str] | None], form: Format) -> Iterator[Places]:
    """Where each tensor of a checkpoint lies, while the files are open."""
    places: dict[str, tuple[Path, Any]] = {}
    with ExitStack() as stack:
        for path, named in weights.items():
            try:
                file = stack.enter_context(safe_open(path, "pt"))
                names = set(file.keys())
            except SafetensorError as error:
                raise DemixError(path, f"is not a safetensors file ({error})", "get it again") from None
            if wrapped := next((name for name in names for mark in WRAPPERS if name.startswith(mark)), None):
                cause = f"holds {wrapped}, whose name begins with that of a wrapper of the model"
                raise DemixError(path, cause, "save the model inside: unwrap it, or strip the beginnings of the names")
            if any(".lora_" in name for name in names):
                raise an_adapter(path)
            differing = sorted(names ^ (names if named is None else named))
            if wrong := [name for name in differing if not name.endswith(form.buffers)]:
                told = f"holds {wrong[0]}, which" if wrong[0] in names else f"lacks {wrong[0]}, which"
                cause = f"{told} {INDEX} {'gives to no file or another' if wrong[0] in names else 'gives to it'}"
                raise DemixError(path, cause, f"get the file and {folder / INDEX} again")
            places |= dict.fromkeys(names, (path, file))
        if not places:
            raise DemixError(next(iter(weights)), "holds no tensors", "get it again")
        yield places


def _model(
    config: Path, places: Places, form: Format, architecture: Architecture, vocab_size: int, positions: int
) -> GPT:
    """The model whose tensors lie in `places`, which must have them and no others; one is read at a time."""
    with torch.device("meta"):
        model = GPT(architecture, vocab_size, (DENSE_EXPERT,))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if "position_embedding" in shapes:
        shapes["position_embedding"] = (positions, architecture.width)
    names = set(places)
    bare = not any(name.startswith(form.prefix) for name in names)
    tensors: dict[str, Tensor] = {}
    for row in form.tensors(architecture, shapes):
        theirs = [name for joined in row.groups(architecture) for name in joined]
        on_disk = {name: name.removeprefix(form.prefix) if bare else name for name in theirs}
        if absent := [name for name in on_disk.values() if name not in places]:
            cure = f"import a whole checkpoint of {form.model_class}, with its own config.json"
            raise DemixError(next(iter(places.values()))[0].parent, f"has no tensor {absent[0]}", cure)
        read = {name: _read_tensor(place, *places[place]) for name, place in on_disk.items()}
        names.difference_update(on_disk.values())
        on_disk_names, shape = [*on_disk.values()], shapes[row.ours]
        found = [tuple(tensor.shape) for tensor in read.values()]
        rows = row.parts(architecture) if len(row.theirs) > 1 else [found[0][0]]
        parts = [(count, *found[0][1:]) for count in rows] * (len(read) // len(rows))
        odd = next((place for place, part in enumerate(parts) if found[place] != part), None)
        tensor = row.ours_of(read.__getitem__, architecture) if odd is None else next(iter(read.values()))
        if len(shape) > tensor.ndim:
            tensor = tensor.unsqueeze(0)
        if odd is not None or tuple(tensor.shape) != shape:
            first, wanted = on_disk_names[odd or 0], shape if odd is None else parts[odd]
            cause = f"holds {first} as {found[odd or 0]}, of which {config.name} makes {wanted}"
            raise DemixError(places[first][0], cause, "give the checkpoint its own config.json back")
        for name, part in zip(on_disk_names, read.values(), strict=True):
            check_values(places[name][0], [(name, part)])
        tensors[row.ours] = tensor
    if "position_embedding" in tensors:
        tensors["position_embedding"] = tensors["position_embedding"][: architecture.context].contiguous()
    _refuse_others(names, places, form, tensors)
    model.load_state_dict(tensors, assign=True)
    return model


def _read_tensor(name: str, path: Path, file: Any) -> Tensor:
    if (kind := file.get_slice(name).get_dtype()) not in FLOATS:
        raise DemixError(path, f"holds {name} of type {kind}", f"import a checkpoint of {', '.join(FLOATS)}")
    tensor: Tensor = file.get_tensor(name)
    if not tensor.ndim:
        raise DemixError(path, f"holds a single number as {name}", "get it again")
    return tensor


def _refuse_others(names: set[str], places: Places, form: Format, tensors: Mapping[str, Tensor]) -> None:
    """Raise DemixError if one of the `names` that no row reads is that of a parameter."""
    heads = {row.theirs[0] for row in form.rows if row.ours == "output_embedding"}
    for name in sorted(names):
        if name.endswith(form.buffers):
            continue
        path, file = places[name]
        if name not in heads:
            raise DemixError(path, f"holds {name}, which {form.title} lacks", "import another checkpoint")
        # A head that is tied may lie in the file once more.
        if not torch.equal(file.get_tensor(name).float(), tensors["token_embedding"]):
            cause = f"holds {name}, which {form.title} with tied embeddings lacks"
            raise DemixError(path, cause, "import another checkpoint, or set tie_word_embeddings to false")


def _keep_files(folder: Path, output: Path) -> None:
    """Copy the files of `folder` that an export gives back."""
    for name in KEPT:
        if not (folder / name).is_file():
            continue
        with opened(folder / name) as stream:
            content = stream.read(_MOST_KEPT_BYTES + 1).removeprefix(codecs.BOM_UTF8)
        if len(content) > _MOST_KEPT_BYTES:
            raise DemixError(folder / name, f"has more than {_MOST_KEPT_BYTES:,} bytes", "get it again")
        output.mkdir(exist_ok=True)
        (output / name).write_bytes(content)
