"""`ModelSpec` -> files, through the templates.

| file | holds |
|---|---|
| `model_file.py` | `generate_model_file`: translated classes and recognised blocks, put together by `templates/model` |
| `translate/` | partial evaluation of Hugging Face code |
| `tidy/` | what makes translated code read well |
| `measured.py` | `Measured`: what the tests need of the model beside its spec |
| `equivalence_test.py` | `generate_test_file`: the equivalence tests of a model file, what is its family's own |
| `format.py`, `docstrings.py` | ruff, and what generated docstrings say |
"""
