"""`ModelSpec` -> files, through the templates.

| file | holds |
|---|---|
| `model_file.py` | `generate_model_file`: translated classes and recognised blocks, put together by `templates/model` |
| `translate/` | partial evaluation of Hugging Face code |
| `prove.py` | `prove`: the file against transformers, block by block, with identical random weights |
| `test_file.py` | `generate_test_file`: the equivalence tests of a model file |
| `render.py`, `format.py`, `docstrings.py` | Jinja, ruff, and what generated docstrings say |
"""
