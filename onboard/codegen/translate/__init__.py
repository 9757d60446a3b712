"""Partial evaluation of Hugging Face modeling code: from its syntax tree to the lean tree of a
generated model file.

| folder | holds |
|---|---|
| `language/` | Python alone: values, expressions, statements, classes and functions; it imports nothing of the others |
| `mechanisms/` | attention, masks, convolutions, ...: what answers to the language where code is more than Python |
| `output/` | translated classes to text |
"""
