"""Partial evaluation of Hugging Face modeling code: from its syntax tree to the lean tree of a generated model file.

| file | holds |
|---|---|
| `values.py`, `object_values.py`, `holes.py` | what is known of a value while code is evaluated; objects of the program; what calls give |
| `frame.py` | a function under evaluation: its variables and what is left of it |
| `evaluate.py`, `execute.py`, `assign.py` | expressions, statements, assignments |
| `comprehensions.py`, `lists.py` | comprehensions and loops' variables; lists that loops fill |
| `calls.py`, `args.py` | calls of modules and helpers, with their arguments |
| `tensor_methods.py`, `builtin_calls.py` | calls of tensors' methods and of Python's own functions |
| `inline.py`, `supers.py` | functions that come down to an expression; what a class has from its bases |
| `items.py`, `env.py`, `holes.py` | items and slices; a function's variables; how results are put together |
| `objects.py` | namespaces and attributes; transformers' masks, outputs, attention dispatch |
| `canonical.py`, `blocks.py` | what has a canonical form: attention and RoPE; norms and rotary embeddings |
| `scores.py` | attention that modeling code writes out |
| `classes.py`, `state.py`, `facts.py`, `results.py` | classes and functions, and what all uses of one have in common |
| `prune.py`, `cleanup.py` | what is left of `__init__` once `forward` is known; dead code and copies |
| `unrun.py`, `ties.py` | weights that nothing runs; blocks that several layers share |
| `emit.py`, `printer.py` | classes to text |
"""
