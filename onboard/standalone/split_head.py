"""A model file whose model stops at the hidden states, with the head as a method of its own.

An engine computes many tokens' hidden states and few tokens' logits.
"""

from __future__ import annotations

import ast
import builtins

from onboard.errors import OnboardError
from onboard.standalone.statements import Edit, Module

_HEAD = '''

    def logits(self, {states}: torch.Tensor) -> CausalLMOutput:
        """Return the logits [batch, seq, vocab] of final hidden states [batch, seq, hidden]."""
        '''
_DOCSTRING = '"""Return the final hidden states [batch, seq, hidden] of `input_ids` at `position_ids` [batch, seq]."""'


def split_head(module: Module) -> list[Edit]:
    """Return the edits that split `forward` of the registered class; its method `logits` is what
    comes after.

    Raises:
        OnboardError: the head needs more than the hidden states.
    """
    forward = _forward(module)
    body = forward.body
    first = next((index for index, each in enumerate(body) if _reads_ids(each)), None)
    states = _assigned(body[first]) if first is not None else None
    if first is None or states is None or not _needs_only(body[first + 1 :], states, module):
        raise OnboardError(
            "the model's head needs more than its hidden states", hint="Export it --to plain"
        )
    end, start = module.span(body[first])[1], module.span(body[first + 1])[0]
    assert forward.returns is not None
    return [
        (*module.span(forward.returns), "torch.Tensor"),
        (*module.span(body[0]), _DOCSTRING),
        (end, start, f"\n        return {states}" + _HEAD.format(states=states)),
    ]


def _forward(module: Module) -> ast.FunctionDef:
    """Return `forward` of the class that the last statement registers."""
    call = next(
        each.node.value for each in reversed(module.statements) if isinstance(each.node, ast.Expr)
    )
    assert isinstance(call, ast.Call)
    name = ast.unparse(call.args[1])
    found = next(
        each.node
        for each in module.statements
        if isinstance(each.node, ast.ClassDef) and name in each.binds
    )
    return next(
        each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == "forward"
    )


def _reads_ids(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == "input_ids" for node in ast.walk(statement)
    )


def _assigned(statement: ast.stmt) -> str | None:
    """Return the name that a statement `name = ...` assigns; None for another one."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _needs_only(statements: list[ast.stmt], states: str, module: Module) -> bool:
    """Whether statements read nothing but the hidden states, the model and what the module has."""
    names = [node for each in statements for node in ast.walk(each) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    known = (
        own
        | {states, "self"}
        | set(dir(builtins))
        | {name for each in module.statements for name in each.binds}
    )
    return bool(statements) and all(node.id in known for node in names)
