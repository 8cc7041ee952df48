"""Hooks of mkdocs: `<run>` in a page is text and no HTML, and the marks of docs/pages.py are not shown.

The environment variable REPOSITORY, such as https://github.com/owner/demix, is the address of the repository: pages
link to it, and the address of the site follows from it.
"""

import os
import re
from typing import Any

from markdown import Extension, Markdown


class PlainText(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.deregister("html_block")
        md.inlinePatterns.deregister("html")


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(PlainText())
    if repository := os.environ.get("REPOSITORY", "").rstrip("/"):
        owner, name = repository.split("/")[-2:]
        config.repo_url, config.site_url = repository, f"https://{owner.lower()}.github.io/{name}/"
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"<!--.*?-->", "", markdown)
