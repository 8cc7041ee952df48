"""A hook of mkdocs: the notebooks of docs/notebooks are pages, as `make pages` has run them."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from nbconvert import MarkdownExporter
from traitlets.config import Config

# Tables as text, which is readable without a browser's styles; figures as pictures.
SHOWN = ["image/svg+xml", "image/png", "text/markdown", "text/plain"]


def on_files(files: Any, config: Any) -> Any:
    """Add a page and its pictures for each notebook, which itself can be downloaded."""
    exporter = MarkdownExporter(config=Config({"NbConvertBase": {"display_data_priority": SHOWN}}))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page, resources = exporter.from_filename(notebook.abs_src_path, {"output_files_dir": f"{notebook.name}_files"})
        folder = str(Path(notebook.src_uri).parent)
        made = {f"{folder}/{notebook.name}.md": page} | {
            f"{folder}/{name}": data for name, data in resources["outputs"].items()
        }
        for place, content in made.items():
            files.append(File.generated(config, place, content=content))
    return files
