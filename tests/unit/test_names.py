"""The names of models and of sets of experts are made and taken apart in demix/run/models.py alone."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MADE_IN = REPOSITORY / "demix" / "run" / "models.py"
FILES = sorted(
    path
    for folder, suffix in (("demix", "*.py"), ("workflow", "*.smk"), ("workflow", "Snakefile"))
    for path in (REPOSITORY / folder).rglob(suffix)
    if path != MADE_IN
)
# An option such as --seed is no part of a name.
PARTS = re.compile("without-|minus-|(?<!-)-seed|-dapt-")


def strings_of_python(text: str) -> Iterator[str]:
    """The string literals of a module, parts of f-strings too, but no docstring and no help text."""
    nodes = list(ast.walk(ast.parse(text)))
    said = [
        node.value
        for node in nodes
        if isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg == "help")
    ]
    prose = {id(node) for value in said for node in ast.walk(value) if not isinstance(value, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def strings_of_rules(text: str) -> Iterator[str]:
    """The string literals of a Snakefile, whose words are Python's, but no text in triple quotes."""
    # Since Python 3.12 an f-string is several tokens.
    kinds = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds and not token.string.startswith('"""'):
            yield token.string


def names_in(path: Path, text: str) -> list[str]:
    strings = strings_of_python(text) if path.suffix == ".py" else strings_of_rules(text)
    return [string for string in strings if PARTS.search(string)]


def test_no_name_is_made_elsewhere() -> None:
    assert len(FILES) > 50
    made = {path.relative_to(REPOSITORY).as_posix(): names_in(path, path.read_text()) for path in FILES}
    assert not {path: names for path, names in made.items() if names}


def test_names_are_seen() -> None:
    assert names_in(MADE_IN, MADE_IN.read_text())
    for line in (
        'a = f"without-{b}"',
        'a = b.removeprefix("minus-")',
        "f(f'{a}-seed{b}')",
        'a = {"x": f"{a}-dapt-{b}"}',
    ):
        assert names_in(Path("a.py"), line)
        assert names_in(Path("a.smk"), f"rule a:\n    params:\n        a=[1],\n{line}\n")
    for line in ('"""Of without-<domain>."""', "a = 1  # as in minus-law", 'a = Option(help="such as minus-law")'):
        assert not names_in(Path("a.py"), line)
    assert not names_in(Path("a.smk"), '# without-law\n"""minus-law"""\n')
