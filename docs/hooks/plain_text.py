"""Hooks of mkdocs: `<run>` in a page is text and no HTML, and the marks of docs/pages.py are not shown."""

import re
from typing import Any

from markdown import Extension, Markdown


class PlainText(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.deregister("html_block")
        md.inlinePatterns.deregister("html")


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(PlainText())
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"<!--.*?-->", "", markdown)
