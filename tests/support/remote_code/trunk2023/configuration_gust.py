"""Gust: a decoder whose layers have a count of their own name, and whose type has another name."""

from transformers import PretrainedConfig


class GustConfig(PretrainedConfig):
    model_type = "gust"
    attribute_map = {
        "hidden_size": "width",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
    }

    def __init__(
        self,
        vocab_size=97,
        n_positions=256,
        width=64,
        num_layers=3,
        n_head=4,
        n_inner=None,
        rotary_dim=8,
        activation_function="gelu_new",
        fused_mlp=False,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        layer_norm_epsilon=1e-5,
        initializer_range=0.02,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.n_positions = n_positions
        self.width = width
        self.num_layers = num_layers
        self.n_head = n_head
        self.n_inner = n_inner
        self.rotary_dim = min(rotary_dim, width // n_head)
        self.activation_function = activation_function
        self.fused_mlp = fused_mlp
        self.embd_pdrop = embd_pdrop
        self.resid_pdrop = resid_pdrop
        self.layer_norm_epsilon = layer_norm_epsilon
        self.initializer_range = initializer_range
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
