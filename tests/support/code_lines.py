"""Lines of code by folder against the budgets of pyproject.toml; `make lint` runs `python tests/support/code_lines.py`.

A line of code holds a token other than a comment or a docstring once the file is formatted: what `# fmt: skip` keeps
in one line counts as what the formatter makes of it. Budgets only fall.
"""

import ast
import io
import re
import subprocess
import sys
import tempfile
import textwrap
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# The most lines of a file of demix, and lines of code of one of its functions.
MAX_FILE, MAX_FUNCTION = 450, 66


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


def formatted(texts: dict[str, str]) -> dict[str, str]:
    """Python texts as ruff formats them where no comment holds it back."""
    held = {name: text for name, text in texts.items() if re.search("# fmt: (skip|off)", text)}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{number}.py" for number, name in enumerate(held)}
        for name, file in files.items():
            file.write_text(re.sub(" *# fmt: (skip|off)", "", held[name]))
        configuration = REPOSITORY / "pyproject.toml"
        subprocess.run(["ruff", "format", "-q", "--config", configuration, folder], check=True)
        return texts | {name: file.read_text() for name, file in files.items()}


def in_folder(folder: Path) -> dict[str, str]:
    """The formatted texts of all Python and Snakemake files below a folder, by path."""
    files = (path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".smk") or path.name == "Snakefile")
    return formatted({str(path.relative_to(REPOSITORY)): path.read_text() for path in files})


def main() -> int:
    """Print the lines of each folder, and what is over its budget. Returns the exit status."""
    budgets = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["demix"]["lines"]
    faults = []
    for name, budget in budgets.items():
        texts = in_folder(REPOSITORY / name)
        lines = sum(map(code_lines, texts.values()))
        print(f"lines of code in {name}/: {lines:,}, of {budget:,} at most")
        if lines > budget:
            faults.append(f"{name}/ has {lines - budget:,} lines of code more than pyproject.toml allows: delete some")
        for path, text in texts.items() if name == "demix" else ():
            if (REPOSITORY / path).read_text().count("\n") > MAX_FILE:
                faults.append(f"{path} has more than {MAX_FILE} lines: split it")
            for function, size in of_functions(text):
                if size > MAX_FUNCTION:
                    faults.append(f"{path}: {function} has {size} lines of code, {MAX_FUNCTION} at most: split it")
    print("\n".join(faults), file=sys.stderr, end="\n" if faults else "")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
