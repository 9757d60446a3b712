"""Passes over generated code that change how it reads, and nothing of what it computes.

| file | holds |
|---|---|
| `op_calls.py` | calls of ops by keyword, without what is the default anyway |
| `conditions.py` | conditions in conditions of the same kind |
| `known_modules.py` | a bias that `__init__` leaves out, a dilation that it does not name |
| `initial_values.py` | parameters that only training begins with values for |
| `none_tests.py` | questions whether an argument is None that is given each time |
| `unread_results.py` | results of a `forward` that no caller reads |
"""
