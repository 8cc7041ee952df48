"""The prompt of `demix sql`: one question after another, with completion, highlighting and a history."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.lexers import PygmentsLexer
from prompt_toolkit.output import Output
from pygments.lexers.sql import SqlLexer

from demix.errors import DemixError, printable
from demix.query.ask import Answers

END = (".exit", "exit", "quit", ".quit")
HELP = "A query ends with ;  .tables lists tables and columns. Tab completes. Ctrl-D or .exit ends."
KEYWORDS = (
    *("select", "distinct", "from", "where", "group by", "group by all", "having", "order by", "limit", "asc", "desc"),
    *("join", "left join", "using", "on", "with", "as", "and", "or", "not", "in", "like", "between", "is null", "case"),
    *("when", "then", "else", "end", "over", "partition by", "union all", "describe", "summarize", "exp", "sum", "avg"),
    *("count", "min", "max", "round", "left", "ln", "abs", "filter", "true", "false", "null", "quantile_cont"),
)


def prompted(
    answers: Answers,
    answer: Callable[[str], None],
    tables: Callable[[], None],
    *,
    input: Input | None = None,
    output: Output | None = None,
) -> None:
    """Hand each query that is typed to `answer`, until the input ends. An error ends a query, not the prompt."""
    session: PromptSession[str] = PromptSession(
        lexer=PygmentsLexer(SqlLexer),
        completer=completer(answers),
        complete_while_typing=False,
        history=_history(),
        multiline=Condition(lambda: not is_whole(get_app().current_buffer.text)),
        prompt_continuation="   … ",
        input=input,
        output=output,
    )
    print(HELP)
    while True:
        try:
            text = session.prompt("sql> ").strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if text.rstrip(" ;") in END:
            return
        try:
            if text.rstrip(" ;") == ".tables":
                tables()
            elif text.startswith("."):
                print(HELP)
            elif text:
                answer(text)
        except DemixError as error:
            print(printable(str(error)))
        except KeyboardInterrupt:
            print("interrupted")


def is_whole(text: str) -> bool:
    """Whether a line break ends what is typed: after a semicolon, a command or nothing."""
    text = text.strip()
    return not text or text.endswith(";") or text.startswith(".") or text in END


def completer(answers: Answers) -> WordCompleter:
    """Completes the names of tables and columns, and words of SQL, and says which tables have a column."""
    told: dict[str, str] = {}
    for name, schema in answers.tables.items():
        for column in schema.names:
            told[column] = f"{told[column]}, {name}" if column in told else f"column of {name}"
    told |= dict.fromkeys(answers.tables, "table")
    words = [*told, *(word for word in KEYWORDS if word not in told), ".tables", ".exit"]
    return WordCompleter(words, ignore_case=True, meta_dict=told)


def _history() -> History:
    """What was asked before, in the user's folder for states; forgotten at the end where that cannot be written."""
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = home / "demix" / "sql_history"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        return FileHistory(str(path))
    return InMemoryHistory()
