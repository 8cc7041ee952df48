"""Faults in Python code, one change of its syntax tree at a time."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

# The opposites say no more than a condition that is always or never true.
OPPOSITES = (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)
COMPARISONS = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), *OPPOSITES
COMPARED = {one: other for pair in COMPARISONS for one, other in (pair, pair[::-1])}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
PAIRS = (
    ("min", "max"),
    ("argmin", "argmax"),
    ("minimum", "maximum"),
    ("any", "all"),
    ("floor", "ceil"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("sum", "mean"),
    ("startswith", "endswith"),
    ("partition", "rpartition"),
    ("removeprefix", "removesuffix"),
    ("append", "extend"),
    ("glob", "rglob"),
)
OTHER_NAMES = dict(PAIRS) | {two: one for one, two in PAIRS} | {"sorted": "list", "reversed": "list"}
# Their arguments are sentences, or what only a type checker reads.
WORDS = ("warning", "info", "debug", "error", "warn", "print", "cast", "TypeVar")
# A `strict` of zip says what must hold, as an assertion does.
UNSEEN_KEYWORDS = ("repr", "strict")
SYMMETRIC = ("isinstance", "zip", "maximum", "minimum", "max", "min", "logaddexp", "array_equal", "gcd")


@dataclass(frozen=True)
class Mutant:
    """A file's `text` with one fault.

    `where` is the qualified name of the function or class that has the fault, "" for the module, and `change` the
    smallest expression around it, before and after. `lines` are those of the file that run the statement. `function` is
    the outermost function whose code has the fault; None where Python reads it once, when it imports the module.
    """

    path: str
    where: str
    operator: str
    change: str
    text: str
    lines: frozenset[int]
    function: str | None

    @property
    def key(self) -> str:
        """What names the fault as long as the code is the same, wherever it stands in the file."""
        return f"{self.where} | {self.operator} | {self.change}"

    def __str__(self) -> str:
        return f"{self.path} | {self.key}"


def mutants(path: str, text: str) -> list[Mutant]:
    """All faults of the Python file `path` with the text `text`."""
    found = _Finder(path, text).mutants()
    seen: Counter[str] = Counter()
    numbered = []
    for where, operator, change, changed, lines, function in found:
        seen[where + operator + change] += 1
        number = seen[where + operator + change]
        numbered.append(
            Mutant(path, where, operator, f"{change} #{number}" if number > 1 else change, changed, lines, function)
        )
    return numbered


class _Finder:
    """Walks through a syntax tree and puts each other node into it for a moment."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.tree = path, ast.parse(text)

    def mutants(self) -> Iterator[tuple[str, str, str, str, frozenset[int], str | None]]:
        done = {ast.unparse(self.tree)}
        for node, parents in _walk(self.tree, []):
            for operator, other in _others(node, parents):
                changed = _exchanged(self.tree, node, other)
                if changed in done:
                    continue
                done.add(changed)
                names = [parent.name for parent in parents if isinstance(parent, _SCOPES)]
                yield (
                    ".".join(names),
                    operator,
                    self.change(node, other, parents),
                    changed,
                    self.run_by(node, parents),
                    _function(node, parents),
                )

    def change(self, node: ast.AST, other: ast.AST, parents: list[ast.AST]) -> str:
        """The smallest expression or statement around the fault that says something, before and after."""
        around = [node]
        for parent in reversed(parents):
            most = 70 if len(ast.unparse(around[-1])) > 20 else 160
            whole = isinstance(around[-1], ast.stmt) or not isinstance(parent, _SIMPLE)
            if whole or len(ast.unparse(parent)) > most:
                break
            around.append(parent)
        whole = around[-1]
        after = _written(other) if whole is node else _exchanged(whole, node, other)
        return " -> ".join(" ".join(text.split()) for text in (_written(whole), after))

    def run_by(self, node: ast.AST, parents: list[ast.AST]) -> frozenset[int]:
        """The lines of a statement, or of the head of a compound one; of a constant of the module, where it is used."""
        statement = next((one for one in reversed([*parents, node]) if isinstance(one, ast.stmt)), None)
        assert statement is not None
        body = getattr(statement, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) and body else statement.end_lineno
        handler = next((one for one in reversed(parents) if isinstance(one, ast.excepthandler)), None)
        if handler is not None and handler in getattr(statement, "handlers", ()):
            return frozenset(range(handler.lineno, handler.body[0].end_lineno + 1))
        if statement in self.tree.body and isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            uses = (one for one in ast.walk(self.tree) if isinstance(one, ast.Name) and one.id in names)
            return frozenset(one.lineno for one in uses if isinstance(one.ctx, ast.Load))
        if _function(node, parents) is None:
            return frozenset(range(statement.lineno, statement.end_lineno + 1))
        return frozenset(range(statement.lineno, max(statement.lineno, last) + 1))


_SIMPLE = (ast.expr, ast.keyword, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _exchanged(whole: ast.AST, node: ast.AST, other: ast.AST) -> str:
    """The text of a tree with `other` in the place of `node`."""
    _Put(node, other).visit(whole)
    text = ast.unparse(whole)
    _Put(other, node).visit(whole)
    return text


class _Put(ast.NodeTransformer):
    """Puts `new` in the place of the node `old`."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def _walk(node: ast.AST, parents: list[ast.AST]) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """The nodes that may be changed, each with those around it from the outermost on."""
    yield node, parents
    for child in _children(node):
        yield from _walk(child, [*parents, node])


def _children(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Raise() | ast.Assert():
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (default for default in (*node.args.defaults, *node.args.kw_defaults) if default)
            yield from node.body
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            if node.value is not None:
                yield node.value
        case ast.Call() if _called(node) in WORDS or _called(node).endswith("Error"):
            return
        case ast.UnaryOp(ast.USub(), ast.Constant()):
            return
        case ast.keyword(arg) if arg in UNSEEN_KEYWORDS:
            return
        case _:
            yield from ast.iter_child_nodes(node)


def _function(node: ast.AST, parents: list[ast.AST]) -> str | None:
    """The qualified name of the outermost function whose code has `node`."""
    names = []
    for outer, inner in zip(parents, [*parents[1:], node], strict=True):
        if isinstance(outer, ast.ClassDef):
            names.append(outer.name)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            return ".".join([*names, outer.name]) if inner in outer.body else None
    return None


def _others(node: ast.AST, parents: list[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """What to put in the place of `node`, by the name of the operator."""
    parent = parents[-1] if parents else None
    match node:
        case ast.Compare():
            yield from _compared(node, parent)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and, or", ast.BoolOp(other, node.values)
            for number in range(len(node.values)):
                rest = node.values[:number] + node.values[number + 1 :]
                yield "operand", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.BinOp() if type(node.op) in COMPUTED and not _is_text(node.left) and not _is_text(node.right):
            yield "arithmetic", ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right)
        # Any number below 0 stands for the length that is left.
        case ast.UnaryOp() if isinstance(parent, ast.Call) and _called(parent) in ("reshape", "view"):
            pass
        case ast.Constant() | ast.UnaryOp():
            yield from _other_values(node, parent)
        case ast.Slice():
            yield from _sliced(node)
        case ast.Call():
            yield from _called_otherwise(node)
        case ast.Name(name, ast.Load()) if name in OTHER_NAMES and _is_called(node, parent):
            yield "name", ast.Name(OTHER_NAMES[name], ast.Load())
        case ast.Attribute(value, name, ast.Load()) if name in OTHER_NAMES:
            yield "name", ast.Attribute(value, OTHER_NAMES[name], ast.Load())
        case ast.stmt():
            yield from _stated(node, parents)
    yield from _by_place(node, parent)


def _by_place(node: ast.AST, parent: ast.AST | None) -> Iterator[tuple[str, ast.AST]]:
    """What to put in the place of `node` because of what it is to its parent."""
    if _is_test(node, parent) and not isinstance(node, ast.Constant):
        yield "condition", ast.Constant(False)
        if not isinstance(parent, ast.While):
            yield "condition", ast.Constant(True)
    match parent:
        case ast.withitem(optional_vars=None) if node is parent.context_expr:
            yield "with", ast.parse("__import__('contextlib').nullcontext()", mode="eval").body
        case ast.comprehension() if node in parent.ifs:
            yield "filter", ast.Constant(True)
        case ast.ExceptHandler() if parent.body == [node] and not isinstance(node, ast.Raise):
            yield "handler", ast.Raise()


def _other_values(node: ast.expr, parent: ast.AST | None) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            yield from (("number", _number(other)) for other in (-value - 1, -value + 1))
        case ast.UnaryOp(ast.Not()) if _is_test(node, parent):
            return
        case ast.UnaryOp():
            yield "sign", node.operand
        case ast.Constant(bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(int() as value):
            yield from (("number", _number(other)) for other in (value + 1, value - 1))
        case ast.Constant(float() as value):
            yield from (("number", _number(other)) for other in (value + 1, 0.0 if value else -1.0))


def _compared(node: ast.Compare, parent: ast.AST | None) -> Iterator[tuple[str, ast.AST]]:
    for number, op in enumerate(node.ops):
        if isinstance(op, sum(OPPOSITES, ())) and len(node.ops) == 1 and _is_test(node, parent):
            continue
        ops = [*node.ops[:number], COMPARED[type(op)](), *node.ops[number + 1 :]]
        yield "comparison", ast.Compare(node.left, ops, node.comparators)


def _sliced(node: ast.Slice) -> Iterator[tuple[str, ast.AST]]:
    if node.lower is not None:
        yield "bound", ast.Slice(None, node.upper, node.step)
        if not _is_number(node.lower):
            yield "bound", ast.Slice(ast.BinOp(node.lower, ast.Add(), ast.Constant(1)), node.upper, node.step)
    if node.upper is not None:
        yield "bound", ast.Slice(node.lower, None, node.step)
        if not _is_number(node.upper):
            yield "bound", ast.Slice(node.lower, ast.BinOp(node.upper, ast.Sub(), ast.Constant(1)), node.step)
    if node.step is not None:
        yield "bound", ast.Slice(node.lower, node.upper, None)


def _called_otherwise(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    called = _called(node)
    if called in WORDS or called.endswith("Error"):
        return
    args = node.args
    plain = not any(isinstance(arg, ast.Starred) for arg in args)
    if len(args) >= 2 and plain and called not in SYMMETRIC and ast.dump(args[0]) != ast.dump(args[1]):
        yield "arguments", ast.Call(node.func, [args[1], args[0], *args[2:]], node.keywords)
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in UNSEEN_KEYWORDS:
            yield "keyword", ast.Call(node.func, args, [one for one in node.keywords if one is not keyword])


def _stated(node: ast.stmt, parents: list[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Statements that are left out, and other values that functions return."""
    function = next((one for one in reversed(parents) if isinstance(one, ast.FunctionDef)), None)
    match node:
        case ast.Expr(ast.Call()) | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete() | ast.AugAssign():
            yield "deletion", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "deletion", ast.Pass()
        case ast.Assign(targets=[ast.Name() | ast.Tuple() as target]) if function and _bound(target, node, function):
            yield "deletion", ast.Pass()
        case ast.Return(None):
            yield "deletion", ast.Pass()
        case ast.Return(value) if function is not None and function.returns is not None:
            returns = ast.unparse(function.returns)
            if returns == "bool" and not isinstance(value, ast.Constant):
                yield from (("value", ast.Return(ast.Constant(one))) for one in (True, False))
            elif returns != "bool" and "None" not in returns:
                yield "value", ast.Return(ast.Constant(None))
    if isinstance(node, ast.AugAssign) and type(node.op) in COMPUTED and not _is_text(node.value):
        yield "arithmetic", ast.AugAssign(node.target, COMPUTED[type(node.op)](), node.value)


def _bound(target: ast.expr, node: ast.stmt, function: ast.FunctionDef) -> bool:
    """Whether all names of a target have a value before the statement gives them another one."""
    names = {one.id for one in ast.walk(target) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    stored = (one for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
    earlier = {one.id for one in stored if one.lineno < node.lineno}
    earlier |= {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
    return names <= earlier


def _is_test(node: ast.AST, parent: ast.AST | None) -> bool:
    return isinstance(parent, ast.If | ast.While | ast.IfExp) and parent.test is node


def _is_called(node: ast.AST, parent: ast.AST | None) -> bool:
    return isinstance(parent, ast.Call) and parent.func is node


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))


def _number(value: float) -> ast.expr:
    return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))


def _called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    match node.func:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


def _written(node: ast.AST) -> str:
    if isinstance(node, ast.Slice):
        # Only within a subscript.
        return ast.unparse(ast.Subscript(ast.Name("x"), node))[2:-1]
    return ast.unparse(node)
