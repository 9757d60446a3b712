from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "tiny_of_its_own"

    def __init__(self, hidden_size=16, num_hidden_layers=2, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
