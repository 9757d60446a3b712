"""A look at generated text that a process with a repository's code in it has handed over, before
anything runs it.
"""

from __future__ import annotations

import ast
import re

from onboard.errors import OnboardError

_MODEL_IMPORTS = re.compile(
    r"(__future__|math|typing|torch(\.nn(\.functional)?)?|onboard(\.(modeling|ops|plain_config))?"
    r"|transformers(\.(activations|modeling_rope_utils))?)"
)
_TEST_IMPORTS = re.compile(
    r"(__future__|pathlib|onboard\.(modeling|testing(\.suite)?)|repository_code\..+)"
)
_DYNAMIC = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "open",
    "globals",
    "locals",
    "vars",
    "getattr",
    "setattr",
}
_REACHING = {
    "load",
    "save",
    "hub",
    "system",
    "write_text",
    "unlink",
    "from_file",
    "load_library",
    "load_state_dict",
}
_TOP_LEVEL = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.Expr)


def vet_model_file(text: str) -> None:
    """Raise `OnboardError` unless a model file is made of classes and functions that compute with
    tensors.
    """
    _vet(text, _MODEL_IMPORTS)


def vet_tests(text: str) -> None:
    """Raise `OnboardError` unless a file of tests imports what the template does and calls nothing
    dynamic.
    """
    _vet(text, _TEST_IMPORTS)


def _vet(text: str, imports: re.Pattern[str]) -> None:
    tree = ast.parse(text)
    odd: list[ast.AST] = [node for node in tree.body if not isinstance(node, _TOP_LEVEL)]
    odd += [node for node in ast.walk(tree) if not _is_harmless(node, imports)]
    if odd:
        line = getattr(odd[0], "lineno", 0)
        raise OnboardError(
            f"the text that the model's code led to is not what is ever generated (line {line}: "
            f"{' '.join(ast.unparse(odd[0]).split())[:60]})",
            hint="Do not trust this model",
        )


def _is_harmless(node: ast.AST, imports: re.Pattern[str]) -> bool:
    match node:
        case ast.Import(names=names):
            return all(imports.fullmatch(alias.name) for alias in names)
        case ast.ImportFrom(module=module, level=level):
            return level == 0 and imports.fullmatch(module or "") is not None
        case ast.Name(id=name):
            return name not in _DYNAMIC and (not name.startswith("__") or name == "__file__")
        case ast.Attribute(attr=name):
            return name not in _REACHING and (not name.startswith("__") or name == "__init__")
        case (
            ast.Global()
            | ast.Nonlocal()
            | ast.AsyncFunctionDef()
            | ast.Await()
            | ast.With()
            | ast.Try()
        ):
            return False
    return True
