"""A hook of mkdocs: `<run>` in a page or a docstring is text, as in `results/<run>/`, and no HTML."""

from typing import Any

from markdown import Extension, Markdown


class PlainText(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.deregister("html_block")
        md.inlinePatterns.deregister("html")


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(PlainText())
    return config
