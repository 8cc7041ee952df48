"""Reading YAML files of settings. It finds keys that occur twice, and the line of each key."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from demix.errors import DemixError


class _Loader(yaml.SafeLoader):
    """Reads YAML, and JSON with its surrogate pairs: two escapes for one character, which YAML does not combine."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        found = super().construct_scalar(node)
        return found.encode("utf-16", "surrogatepass").decode("utf-16") if isinstance(found, str) else found


def read_keys(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in the YAML or JSON file `path`, and the line of each key, by keys such as `training.tokens`.

    Raises DemixError if the file is missing, is not YAML, or has a key twice. (YAML readers, and so Snakemake, would
    silently use the last one.)
    """
    try:
        # YAML can read JSON, except tabs, which occur only between the tokens of JSON.
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text.replace("\t", " ") if text.lstrip().startswith("{") else text)
        node = loader.get_single_node()
        lines = dict(_lines(node, "", path))
        content = loader.construct_document(node) if node else None
    except FileNotFoundError:
        raise DemixError(path, "does not exist", "give the path of a config file, such as config/sample.yaml") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DemixError(path, f"is not YAML ({error})", "correct the line that this message names") from None
    if not isinstance(content, dict):
        raise DemixError(path, "is not a mapping of keys", "start from config/sample.yaml")
    return content, lines


def _lines(node: yaml.Node | None, above: str, path: Path) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield from _lines(item, f"{above}{number}.", path)
        return
    first: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        # Several mappings can be merged into one.
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            place, line = f"{above}{key.value}", key.start_mark.line + 1
            if place in first:
                cause = f"has the key {place}, which is also on line {first[place]}"
                raise DemixError(f"{path}, line {line}", cause, "remove or rename one of the two")
            first[place] = line
            yield place, line
            yield from _lines(value, f"{place}.", path)


def located(error: DemixError, files: Mapping[Path, Mapping[str, int]]) -> DemixError:
    """The error about a config key, with the file and the line of the key if one of `files` has it.

    If several files have the key, the last one is named, because Snakemake uses its value. For a missing key or an item
    of a list, the line of its section or of the list is given.
    """
    key = error.subject.removeprefix("config key ")
    above = key.rpartition(".")[0] if error.cause == "is missing" or key[-1:].isdigit() else key
    for place in (key, above):
        for path, lines in reversed([*files.items()]):
            if place in lines and key != error.subject:
                return error.but(f"{path}, line {lines[place]}, {error.subject}")
    return error
