"""Passes over generated code that change how it reads, and nothing of what it computes.

| file | holds |
|---|---|
| `op_calls.py` | calls of ops by keyword, without what is the default anyway |
| `conditions.py` | conditions in conditions of the same kind, sides that differ in an op alone, or not at all |
| `known_modules.py` | a bias that `__init__` leaves out, a dilation that it does not name |
| `initial_values.py` | parameters that only training begins with values for |
| `none_tests.py` | questions whether an argument is None that is given each time |
| `unread_results.py` | results of a `forward` that no caller reads |
| `inlined.py` | short methods that are called in one place |
| `choices.py` | modules of one condition under one `if` |
| `module_calls.py` | calls of PyTorch's modules without what is the default anyway, or what nothing asks |
| `reshapes.py` | new shapes by what changes in them |
| `rotations.py` | queries and keys turned by one op; a head's first channels, which the ops take whole |
| `rotations.py` | queries and keys turned by one op; a head's first channels, which the ops take whole |
| `rows_in_place.py` | rows of a table by their positions; tensors as rows where norms get them |
| `inlined_reshapes.py` | a new shape where the value is made or used next, functions of tensors as methods |
| `named_sizes.py`, `lines.py` | sizes named where that saves lines, and how many lines there are |
"""
