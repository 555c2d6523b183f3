"""Ways to break a line of Python that are likely mistakes; changes that are equal by construction are left out.

Docstrings, texts of messages and logs, annotations and assertions are never changed.
"""

import ast
import copy
import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from itertools import accumulate
from typing import Any

COLLECTIVES = re.compile(
    r"^(all_(reduce|gather)|reduce_scatter|broadcast|barrier|monitored_barrier|all_to_all|scatter)"
)
MESSAGES = re.compile(r"warn|^log$|^(log|logger|logging|warnings)\.|rank_zero_(info|debug)")
LIMITS = re.compile(r"timeout|seconds|niceness", re.IGNORECASE)
"""Names of numbers that change only when something happens."""

KEPT_ARGUMENTS = {"strict", "run_check", "stacklevel", "frozen", "non_blocking", "copy"}
"""Arguments that check or speed up what is right anyway."""

KEPT_DECORATORS = re.compile(
    r"^(property|cached_property|staticmethod|classmethod|override|overload|dataclass|contextmanager|cache|lru_cache"
    r"|abstractmethod|runtime_checkable|\w+\.setter)$"
)
NO_CONTEXT = '__import__("contextlib").nullcontext()'

SWAPS = {"min": "max", "max": "min", "sum": "max", "any": "all", "all": "any"}
METHODS = {"sum": "mean", "mean": "sum", "amax": "amin", "amin": "amax", "max": "min", "min": "max"}
REDUCTIONS = {"SUM": "MAX", "MAX": "MIN", "MIN": "MAX"}
BORDERS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPPOSITES = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
OPPOSITES |= {opposite: operator for operator, opposite in OPPOSITES.items()}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
NO_NUMBERS = (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple, ast.Dict)


@dataclass(frozen=True)
class Mutant:
    """A change of one place in a file."""

    file: str
    operator: str
    line: int
    start: int
    """Position in the bytes of the file, as ``end`` is."""

    end: int
    text: str
    reached_by: tuple[int, int]
    """First and last line of which one has to run for the change to be able to matter."""

    def apply(self, source: bytes) -> bytes:
        """Return the file with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        """Return the lines that change."""
        before, after = (text.decode().splitlines() for text in (source, self.apply(source)))
        lines = list(unified_diff(before, after, n=0, lineterm=""))[3:]
        return "\n".join(line for line in lines if not line.startswith("@@"))

    def get_name(self, source: bytes) -> str:
        """Return a name that stays as it is while the lines that change do."""
        digest = hashlib.sha256(self.diff(source).encode()).hexdigest()[:8]
        return f"{self.file}:{self.operator}:{digest}"


def find_mutants(file: str, source: bytes) -> list[Mutant]:
    """Return all changes of a file, in its order."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    found = {(mutant.start, mutant.end, mutant.text): mutant for mutant in finder.found}
    return sorted(found.values(), key=lambda mutant: (mutant.start, mutant.end, mutant.text))


def sample(mutants: Mapping[str, Sequence[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Choose ``count`` mutants, from each file as many as its size asks for, and at most one of each line.

    A larger count with the same seed adds to what a smaller one chose, give or take one of a file.
    """
    sizes = [len({mutant.line for mutant in found}) for found in mutants.values()]
    ends = [round(count * size / max(1, sum(sizes))) for size in accumulate([0, *sizes])]
    chosen = []
    for (file, found), start, end in zip(mutants.items(), ends, ends[1:], strict=False):
        shuffled = random.Random(f"{seed} {file}").sample(found, len(found))
        once = {mutant.line: mutant for mutant in reversed(shuffled)}
        picked = [mutant for mutant in shuffled if once[mutant.line] is mutant]
        chosen += sorted(picked[: end - start], key=lambda mutant: mutant.start)
    return chosen


@dataclass
class _Finder(ast.NodeVisitor):
    file: str
    source: bytes
    found: list[Mutant] = field(default_factory=list)
    function: Any = None
    statement: tuple[int, int] = (0, 0)
    """First and last line of the statement, or of its head, if other statements are in it."""

    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [0, *accumulate(map(len, self.source.splitlines(keepends=True)))]

    def visit(self, node: ast.AST) -> None:
        """Visit a node, and know in which statement what is found there is."""
        outer = self.statement
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or 0
            self.statement = (node.lineno, max(node.lineno, last))
        super().visit(node)
        self.statement = outer

    # ------------------------------------------------------------------ what is left out

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    visit_Assert = visit_Import = visit_ImportFrom = visit_JoinedStr  # type: ignore[assignment]

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if MESSAGES.search(name):
            return
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in KEPT_ARGUMENTS and not LIMITS.search(keyword.arg or ""):
                self._change_constant("argument", keyword.value)
                self.visit(keyword.value)
        if isinstance(node.func, ast.Name) and node.func.id in SWAPS:
            self._add("swap", node.func, SWAPS[node.func.id])
        elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            self._add("swap", node.func, METHODS[node.func.attr], name_only=True)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._change_constant("default", node.value, name=ast.unparse(node.target), only_outside=True)
            self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for place in places:
            bounds = [place.lower, place.upper] if isinstance(place, ast.Slice) else [place]
            for bound in filter(None, bounds):
                if isinstance(place, ast.Slice) or _get_number(bound) is not None:
                    self._add("index", bound, f"({ast.unparse(bound)}) + 1")
                self.visit(bound)

    # ------------------------------------------------------------------ definitions

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "__str__", "__getattr__"):
            return
        body = (node.body[0].lineno, node.end_lineno or node.lineno)
        for decorator in node.decorator_list:
            if not KEPT_DECORATORS.match(ast.unparse(decorator).partition("(")[0].rpartition("functools.")[2]):
                self._add("decorator", decorator, "", before=1, reached_by=body)
        arguments = node.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        defaults = zip(reversed(names), reversed(arguments.defaults), strict=False)
        keywords = zip([argument.arg for argument in arguments.kwonlyargs], arguments.kw_defaults, strict=True)
        for name, default in (*defaults, *keywords):
            self._change_constant("default", default, name=name, reached_by=body)
        outer, self.function = self.function, node
        for statement in node.body:
            self.visit(statement)
        self.function = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    # ------------------------------------------------------------------ statements

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func)
            is_collective = COLLECTIVES.match(name.rpartition(".")[2])
            if not MESSAGES.search(name) and "super()" not in name:
                self._add("collective" if is_collective else "call", node, "pass")
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [ast.unparse(target) for target in node.targets]
        if "__all__" in names:
            return
        if self.function is None:
            self._change_constant("default", node.value, name=names[0])
        elif not self.function.name.startswith("__") and not any(isinstance(t, ast.Name) for t in node.targets):
            self._add("assignment", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("assignment", node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("raise", node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and ast.unparse(node.value) != "None":
            self._add("return", node, "return None")
            self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("loop", node, "break")

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if item.optional_vars is None:
                self._add("context", item.context_expr, NO_CONTEXT)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._negate(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if any(isinstance(text, ast.JoinedStr) for text in (node.body, node.orelse)):
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    # ------------------------------------------------------------------ expressions

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if ast.unparse(node.value).endswith("ReduceOp") and node.attr in REDUCTIONS:
            self._add("swap", node, REDUCTIONS[node.attr], name_only=True)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._negate(node)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("and/or", node, ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for table in (BORDERS, OPPOSITES):
            for index, operator in enumerate(node.ops):
                if type(operator) in table:
                    changed = copy.copy(node)
                    changed.ops = [*node.ops[:index], table[type(operator)](), *node.ops[index + 1 :]]
                    self._add("comparison", node, changed)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sides = (node.left, node.right)
        is_text = any(isinstance(side, NO_NUMBERS) or isinstance(getattr(side, "value", 0), str) for side in sides)
        if type(node.op) in ARITHMETIC and not is_text:
            self._add("arithmetic", node, ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))
        self.generic_visit(node)

    # ------------------------------------------------------------------ how

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._add("negate", test, test.operand)
        elif not (isinstance(test, ast.Compare) and len(test.ops) == 1):  # whose operator is changed
            self._add("negate", test, ast.UnaryOp(ast.Not(), test))

    def _change_constant(
        self,
        operator: str,
        value: Any,
        *,
        name: str = "",
        only_outside: bool = False,
        reached_by: tuple[int, int] | None = None,
    ) -> None:
        number = _get_number(value)
        if number is None or LIMITS.search(name) or (only_outside and self.function is not None):
            return
        changed = (not number) if isinstance(number, bool) else number + 1 if isinstance(number, int) else number * 2
        self._add(
            operator, value, repr(changed or 1.0 if isinstance(number, float) else changed), reached_by=reached_by
        )

    def _add(
        self,
        operator: str,
        node: Any,
        replacement: str | ast.expr,
        *,
        name_only: bool = False,
        before: int = 0,
        reached_by: tuple[int, int] | None = None,
    ) -> None:
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        start = self.starts[node.lineno - 1] + node.col_offset - before
        if name_only:
            start = end - len(node.attr)
        text = replacement if isinstance(replacement, str) else f"({ast.unparse(replacement)})"
        outside = (1, len(self.starts))
        reached_by = reached_by or (outside if self.function is None else self.statement)
        self.found.append(Mutant(self.file, operator, node.lineno, start, end, text, reached_by))


def _get_number(node: Any) -> Any:
    """Return the value of a literal number or bool, with its sign; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else None
