"""Mutants of the engine: one small mistake in a transform, an op or the runtime, which the tests of
its area must see.

    python -m tests.support.mutation.engine_mutants --seed 7 --count 60

draws mistakes, loads each in the place of the real module in a process forked from one that has
imported the libraries, and runs the quick tests of its area there. A mutant is drawn again where it
says nothing: it does not load, or it is equivalent by one of these rules, which are settled before
anything is drawn:

- it compiles to the same bytecode;
- it is in what only people read: messages of errors, texts with fields, facts;
- it is in an assertion, which holds anyway, or in a promise that spares a check (`_PROMISES`);
- it is behind a question for a GPU, which the machine of these tests does not have, or in the
  question itself, or in code for GPUs alone (`engine_areas.FOR_GPUS`) or a call of it; or it leaves
  a tensor on the device, the only one;
- it is in a function that chooses between two ways to the same result (`engine_areas.CHOICES` says
  which and why);
- it was looked at and changes no result (`engine_areas.EQUIVALENT` says why).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from tests.support.mutation.engine_areas import AREAS, CHOICES, EQUIVALENT, FOR_GPUS, ROOT, Area
from tests.support.mutation.mutants import OPERATORS as OF_MODELS
from tests.support.mutation.mutants import Edit, Mutation

_PROMISES = {"hint", "is_clean", "has_valid_shapes", "summary"}
_SYMMETRIC = re.compile(
    r"(min|max|minimum|maximum|logical_and|logical_or|promote_types|isinstance|zip|getattr|hasattr|cast|\.transpose)$"
)
_WIDER = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "amin": "amax",
    "amax": "amin",
}
_DROPPED = {
    "masked_fill",
    "clamp",
    "clamp_min",
    "clamp_max",
    "to",
    "float",
    "double",
    "long",
    "transpose",
    "unsqueeze",
}
_NO_LOAD, _PASSED, _FAILED = 90, 0, 1
_SECONDS, _PATIENCE = 120, 900
"""Of a processor, which end a mutant that goes on for ever, and on the clock, which end one that
waits for ever.
"""


def _bound_moved(node: ast.AST) -> ast.AST | None:
    """`length - 1` -> `length`, `x[1:]` -> `x[2:]`."""
    match node:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=ast.Constant(value=int())):
            return left
        case ast.Slice(lower=ast.Constant(value=int() as value), upper=upper, step=step):
            return ast.Slice(ast.Constant(value + 1), upper, step)
        case ast.Subscript(
            value=owner, slice=ast.Constant(value=int() as value), ctx=ast.Load()
        ) if value >= 0:
            return ast.Subscript(owner, ast.Constant(value + 1), ast.Load())
    return None


def _extremes_swapped(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in _WIDER:
            return ast.Call(ast.Name(_WIDER[name], ast.Load()), args, keywords)
        case ast.Attribute(value=owner, attr=name, ctx=context) if name in _WIDER:
            return ast.Attribute(owner, _WIDER[name], context)
    return None


def _and_or(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return ast.BinOp(left, ast.BitOr(), right)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return ast.BinOp(left, ast.BitAnd(), right)
    return None


def _method_dropped(node: ast.AST) -> ast.AST | None:
    """`x.masked_fill(mask, 0)` -> `x`; `torch.where(mask, a, b)` -> `a`."""
    match node:
        case ast.Call(func=ast.Attribute(attr="to"), args=[only]) if ast.unparse(only).endswith(
            "device"
        ):
            return None
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="torch"), attr="where"), args=[_, first, _]
        ):
            return first
        case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if attr in _DROPPED:
            return None if isinstance(owner, ast.Name) and owner.id in ("torch", "F") else owner
    return None


def _inverted(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            return operand
    return None


def _call_dropped(node: ast.AST) -> ast.AST | None:
    """A statement that is there for what it does: nothing does it."""
    match node:
        case ast.Expr(value=ast.Call()):
            return ast.Pass()
    return None


def _condition_negated(node: ast.AST) -> ast.AST | None:
    return None if _asks_for_gpu(node) else OF_MODELS["condition negated"](node)


def _arguments_swapped(node: ast.AST) -> ast.AST | None:
    swapped = isinstance(node, ast.Call) and not _SYMMETRIC.search(ast.unparse(node.func))
    return OF_MODELS["arguments swapped"](node) if swapped else None


_SHARED = (
    "operator changed",
    "comparison changed",
    "sign dropped",
    "dimension changed",
    "slice changed",
    "step dropped",
)
OPERATORS: dict[str, Edit] = {name: OF_MODELS[name] for name in _SHARED} | {
    "bound moved": _bound_moved,
    "minimum and maximum swapped": _extremes_swapped,
    "and, or swapped": _and_or,
    "cast or mask dropped": _method_dropped,
    "condition negated": _condition_negated,
    "negation dropped": _inverted,
    "call dropped": _call_dropped,
    "arguments swapped": _arguments_swapped,
}


@dataclass(frozen=True)
class Mutant:
    """A mistake in a file, and that file's text with it."""

    area: Area
    path: Path
    mutation: Mutation
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}: {self.mutation}"


def _is_read_by_people(node: ast.AST) -> bool:
    """Messages, texts with fields, facts and assertions."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.Assert() | ast.Expr(value=ast.Constant()):
            return True
        case ast.keyword(arg=arg) if arg in _PROMISES:
            return True
        case ast.Expr(value=ast.Call() as call):
            return _is_read_by_people(call)
        case ast.Call(func=function):
            name = ast.unparse(function)
            return name.endswith(("Error", "facts.append", "facts.extend", "print"))
    return False


def _asks_for_gpu(node: ast.AST) -> bool:
    match node:
        case ast.If(test=question) | ast.IfExp(test=question) | (ast.Compare() as question):
            return "cuda" in ast.unparse(question)
    return False


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what lies directly in a node and may be mutated: neither annotations nor what asks for
    a GPU.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        if _asks_for_gpu(node) and name != "orelse":
            continue
        yield from (
            each
            for each in (value if isinstance(value, list) else [value])
            if isinstance(each, ast.AST)
        )


def _inside(node: ast.AST, path: Path) -> Iterator[ast.AST]:
    for child in _children(node):
        if not _is_read_by_people(child) and not _is_for_gpu(child, path):
            yield child
            yield from _inside(child, path)


def _is_for_gpu(node: ast.AST, path: Path) -> bool:
    """Whether a node compares something with a GPU, or calls one of the file's functions for
    GPUs.
    """
    call = node.value if isinstance(node, ast.Expr) else node
    if isinstance(call, ast.Call):
        return f"{path.stem}.{ast.unparse(call.func).split('.')[-1]}" in FOR_GPUS
    return isinstance(node, ast.Compare) and _asks_for_gpu(node)


def places(tree: ast.Module, path: Path) -> Iterator[ast.AST]:
    """Yield the nodes that may be mutated: those in functions, as far as no rule says that nothing
    would come of it.
    """
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef)
            and f"{path.stem}.{node.name}" not in CHOICES.keys() | FOR_GPUS
        ):
            yield from _inside(node, path)


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether two pieces of code do the same, whatever their lines are called."""
    parts = [
        [each for each in code.co_consts if isinstance(each, CodeType)] for code in (one, other)
    ]
    plain = [
        [each for each in code.co_consts if not isinstance(each, CodeType)] for code in (one, other)
    ]
    equal = (one.co_code, one.co_names, one.co_varnames) == (
        other.co_code,
        other.co_names,
        other.co_varnames,
    )
    return (
        equal
        and repr(plain[0]) == repr(plain[1])
        and len(parts[0]) == len(parts[1])
        and all(map(_same, *parts))
    )


class Draw:
    """Mutants of all areas in turn, by a seed."""

    def __init__(self, seed: int, areas: list[Area]) -> None:
        self.random, self.areas, self.number = random.Random(seed), areas, 0
        self._trees = {
            path: ast.parse(path.read_text(encoding="utf-8"))
            for area in areas
            for path in area.sources()
        }
        self._drawn: set[tuple[str, int]] = set()
        self.equivalent = 0

    def next(self) -> Mutant:
        """Return a mutant that was not drawn before."""
        while True:
            area, operator = (
                self.areas[self.number % len(self.areas)],
                self.random.choice(list(OPERATORS)),
            )
            found = [
                (path, node) for path in area.sources() for node in self._fresh(path, operator)
            ]
            if not found:
                continue
            path, node = self.random.choice(found)
            self._drawn.add((operator, id(node)))
            mutant = self._mutant(area, path, operator, node)
            if mutant is not None:
                self.number += 1
                return mutant
            self.equivalent += 1

    def _fresh(self, path: Path, operator: str) -> list[ast.AST]:
        nodes = {id(node): node for node in places(self._trees[path], path)}
        known = self._drawn
        return [
            node
            for key, node in nodes.items()
            if (operator, key) not in known and OPERATORS[operator](node)
        ]

    def _mutant(self, area: Area, path: Path, operator: str, node: ast.AST) -> Mutant | None:
        """Return the mutant, None where it compiles to what the file compiles to, or is known to do
        the same.
        """
        new = OPERATORS[operator](node)
        assert new is not None
        tree = self._trees[path]
        changed = deepcopy(tree, {id(node): ast.copy_location(new, node)})
        before, after = (ast.unparse(ast.fix_missing_locations(each)) for each in (tree, changed))
        if _same(compile(before, "", "exec"), compile(after, "", "exec")):
            return None
        shown = [" ".join(ast.unparse(each).split())[:90] for each in (node, new)]
        if (path.stem, " -> ".join(shown)) in EQUIVALENT:
            return None
        return Mutant(area, path, Mutation(operator, getattr(node, "lineno", 0), *shown), after)


def outcome(area: Area, path: Path, text: str) -> str:
    """Run the tests of an area with `text` in the place of a file: "killed", "survived" or "does
    not load".
    """
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        child = os.fork()
        if not child:
            _run(area, path, text, log.fileno())
        status = _wait(child)
        if status is None or os.WIFSIGNALED(status):
            return "killed"
        code = os.WEXITSTATUS(status)
        if code not in (_PASSED, _FAILED, _NO_LOAD):
            raise RuntimeError(f"pytest ended with {code}: {Path(log.name).read_text()[-3000:]}")
        return {_PASSED: "survived", _FAILED: "killed", _NO_LOAD: "does not load"}[code]


def _wait(child: int) -> int | None:
    """Return a process's status, None for one that had to be ended: a mistake may make it go on for
    ever.
    """
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run(area: Area, path: Path, text: str, log: int) -> None:
    """Never return: this is the forked process."""
    code = 3
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
        for stream in (1, 2):
            os.dup2(log, stream)
        if area.interpreted:
            _begin_anew(area, path, text)
        _put_in_place(path, text)
        code = _tested(area, path)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _begin_anew(area: Area, path: Path, text: str) -> None:
    """Become a process without imports: Triton asks when it is imported whether kernels are
    interpreted, and torch, which may have done so by now, keeps what it has of it."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
        code = f"import sys; from {__spec__.name} import run_anew; run_anew(*sys.argv[1:])"
        environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        os.execve(sys.executable, [sys.executable, "-c", code, area.name, str(path)], environment)


def run_anew(area: str, path: str) -> None:
    """Run the tests of an area with what standard input holds in the place of a file, and exit."""
    _put_in_place(Path(path), sys.stdin.read())
    sys.exit(_tested(AREAS[area], Path(path)))


def _tested(area: Area, path: Path) -> int:
    import pytest

    try:
        importlib.import_module(_module_of(path))
    except BaseException:  # whatever a mistake leads to
        return _NO_LOAD
    for folder, tests in area.tests_by_folder(path):
        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-m",
            "not slow",
            "--tb=line",
        ]
        code = int(
            pytest.main(
                [*options, f"--rootdir={ROOT}", f"--confcutdir={folder}", *area.options, *tests]
            )
        )
        if code:
            return _FAILED if code in (1, 2) else code
    return _PASSED


def _put_in_place(path: Path, text: str) -> None:
    """Have every import of a file get `text`, whoever asks for it."""
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        if Path(self.path).resolve() != path:
            return original(self, fullname)
        code: CodeType = compile(text, self.path, "exec", dont_inherit=True)
        return code

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "onboard" else ("onboard", "content", *parts))


def _import_libraries() -> None:
    """Import what takes long and is not to be mutated."""
    for name in (
        "pytest",
        "pydantic",
        "torch.export",
        "torch.fx.passes.shape_prop",
        "torch.testing",
        "transformers",
    ):
        importlib.import_module(name)
    for family in ("llama", "mistral", "lfm2"):
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def main() -> int:
    """Print what becomes of each mutant; return 1 where one survived, or where the tests fail
    without any.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--area", action="append", choices=list(AREAS))
    args = parser.parse_args()
    os.environ["ONBOARD_CACHE"] = ""
    _import_libraries()
    assert "onboard" not in sys.modules, "what is to be mutated has been imported"
    order = random.Random(args.seed)
    names = args.area or order.sample(list(AREAS), len(AREAS))
    draw, counts, survivors = Draw(args.seed, [AREAS[name] for name in names]), Counter[str](), []
    print(f"seed {args.seed}", flush=True)
    while counts["killed"] + counts["survived"] < args.count:
        mutant = draw.next()
        start = time.monotonic()
        found = outcome(mutant.area, mutant.path, mutant.text)
        counts[found] += 1
        survivors += [mutant] if found == "survived" else []
        print(f"{found} ({time.monotonic() - start:.0f} s) {mutant}", flush=True)
    for area in {mutant.name: mutant for mutant in draw.areas[: args.count]}.values():
        path = area.sources()[0]
        if outcome(area, path, path.read_text(encoding="utf-8")) != "survived":
            print(f"the tests of {area.name} fail without a mutation", flush=True)
            survivors += [area]  # what they said of mutants says nothing
    print(f"{dict(counts)}, equivalent {draw.equivalent}; unnoticed: {len(survivors)}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
