"""How many lines of code demix and its tests have: `python tests/support/code_lines.py`."""

import ast
import io
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# By folder, the most lines that it should have.
GOALS = {"demix": 20_000, "tests": 21_000}
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> int:
    """The lines of a Python text that are not blank, a comment or a docstring; of Snakemake's, docstrings count too."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(ast.Constant(str())) as docstring, *_]:
                    found.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(found)


def of_functions(text: str) -> Iterator[tuple[str, int]]:
    """The functions of a Python text, each with its lines of code, those of functions in it included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, code_lines(textwrap.dedent(ast.get_source_segment(text, node, padded=True) or ""))


def in_folder(folder: Path) -> int:
    """The lines of code of all Python and Snakemake files below a folder."""
    files = (path for path in folder.rglob("*") if path.suffix in (".py", ".smk") or path.name == "Snakefile")
    return sum(code_lines(path.read_text()) for path in files)


if __name__ == "__main__":
    for name, most in GOALS.items():
        print(f"lines of code in {name}/: {in_folder(REPOSITORY / name):,}, of {most:,} at most")
