"""The tables and figures of a report, made of what a test gives for the files of a run."""

from typing import Any

from demix.report.item import FigureItem, Group, Item
from demix.report.items import all_items
from demix.report.material import Material
from demix.report.table import Table


def table_of(name: str, material: Material) -> Table:
    """A table as its module makes it: with rows and columns that have no numbers, and without the paper's."""
    item = all_items()[name]
    made: Table = item.make(material)
    return made.called(name, item.title)


def drawn(name: str, material: Material) -> dict[str, Any]:
    """A figure in Vega-Lite's words."""
    item = all_items()[name]
    assert isinstance(item, FigureItem)
    found: dict[str, Any] = item.drawn(material).to_dict()
    return found


def names_of(*groups: Group, kind: type[Item] = Item) -> list[str]:
    """The names of the items of some groups, or of those that are of one kind: tables first."""
    return [name for name, item in all_items().items() if item.group in groups and isinstance(item, kind)]
