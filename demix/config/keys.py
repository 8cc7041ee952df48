"""YAML files of settings: no key occurs twice in one, and the line of each key is known."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from demix.errors import DemixError


class _Loader(yaml.SafeLoader):
    """Reads YAML, and JSON, which writes some characters as two escapes that only its own readers read as one."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        found = super().construct_scalar(node)
        return found.encode("utf-16", "surrogatepass").decode("utf-16") if isinstance(found, str) else found


def read_keys(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in the YAML or JSON file `path`, and the line of each key, by keys such as `training.tokens`.

    Raises DemixError where the file is missing, is not YAML, or names a key twice, of which YAML's readers, and
    Snakemake with them, silently use the last.
    """
    try:
        # YAML reads JSON but for tabs, which JSON has only between its words.
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
                cause = f"names the key {place} again, which is on line {first[place]} too"
                raise DemixError(f"{path}, line {line}", cause, "give each key one name, and name it once")
            first[place] = line
            yield place, line
            yield from _lines(value, f"{place}.", path)


def located(error: DemixError, files: Mapping[Path, Mapping[str, int]]) -> DemixError:
    """The error of a config key with the file and the line that name the key, where one of `files` does.

    Of several, the last file names it, as Snakemake merges them. A key that is missing has the line of its section.
    """
    key = error.subject.removeprefix("config key ")
    places = (key, key.rpartition(".")[0]) if error.cause == "is missing" else (key,)
    for place in places:
        for path, lines in reversed([*files.items()]):
            if place in lines and key != error.subject:
                return error.but(f"{path}, line {lines[place]}, {error.subject}")
    return error
