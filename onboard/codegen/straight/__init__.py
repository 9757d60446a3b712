"""Straight forwards: what a forward does on small models, written as plain calls.

| module | what it is |
|---|---|
| `lines.py` | a recorded forward: calls, and what their arguments are |
| `frames.py` | the recording of one call of one module |
| `watch.py` | what catches the calls of torch, of modules and of functions while a model runs |
| `recorded.py` | a whole model run with sizes as symbols, and what its code left behind |
| `functions.py` | the names of torch's functions, and which are recorded |
| `sizes.py` | sizes that follow from those of the inputs |
| `models.py` | small models of other sizes, of another dtype, and the whole one |
| `rolled.py` | loops over lists of modules |
| `merged.py` | recordings of several models as one: what explains numbers that differ |
| `printed.py` | the method's definition |
| `straighten.py` | the definition of a class, or why there is none |
"""
