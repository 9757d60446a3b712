"""Config, Hugging Face source and module tree -> `ModelSpec`.

| file | holds |
|---|---|
| `analyze.py` | `analyze`: runs the probes and writes down what they found |
| `tiny.py` | a tiny random model with every kind of layer that the checkpoint has; prompts for it |
| `recorder.py` | what attention, helpers and modules get and give, with canonical attention in place of the model's |
| `probe.py` | blocks recognised by what they compute |
| `traits.py`, `spec.py` | the facts a report shows; the spec, a YAML file |
| `source.py` | Hugging Face modeling files, parsed |
"""
