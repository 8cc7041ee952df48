"""The tables, figures and pages of a report: one module each, whose name names its files.

A module's docstring is the item's caption on Snakemake's page, `ITEM` says what it is, and `make` is a function from
a `Material` to a table, a figure or a page. The module loads pandas and altair in functions alone. Nothing lists the
modules: a new one is a new item.
"""

import pkgutil
from dataclasses import replace
from functools import cache
from importlib import import_module

from demix.report.item import FigureItem, Group, Item, PageItem, TableItem

_KINDS = (TableItem, FigureItem, PageItem)


@cache
def all_items() -> dict[str, Item]:
    """All items by name: tables, figures, pages, each in the order of groups and of places in a group."""
    modules = {found.name: import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)}
    items = [
        replace(module.ITEM, name=name, caption=module.__doc__, make=module.make) for name, module in modules.items()
    ]
    return {item.name: item for item in sorted(items, key=_order)}


def _order(item: Item) -> tuple[int, int, int, str]:
    return _KINDS.index(type(item)), list(Group).index(item.group), item.place, item.name
