"""Partial evaluation of Hugging Face modeling code: from its syntax tree to the lean tree of a generated model file.

| file | holds |
|---|---|
| `values.py` | what is known of a value while code is evaluated |
| `evaluate.py` | expressions |
| `execute.py` | statements |
| `calls.py` | calls: of modules, helpers, tensor methods, builtins |
| `objects.py` | what has a canonical form: attention interface, RoPE, masks, outputs |
| `classes.py` | classes: attributes, forward, the facts that all uses share |
| `prune.py` | what is left of `__init__` once `forward` is known |
| `cleanup.py` | dead code and copies |
| `printer.py` | tree to text |
"""
