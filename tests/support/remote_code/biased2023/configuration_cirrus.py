"""Cirrus: a decoder with learned positions, whose config has names of its own."""

from transformers import PretrainedConfig


class CirrusConfig(PretrainedConfig):
    model_type = "cirrus"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    def __init__(
        self,
        vocab_size=131,
        n_positions=256,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_inner=None,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        initializer_range=0.02,
        use_cache=True,
        bf16=False,
        fp16=False,
        fp32=False,
        use_logn=False,
        bos_token_id=1,
        eos_token_id=2,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.n_positions = n_positions
        self.n_embd = n_embd
        self.n_layer = n_layer
        self.n_head = n_head
        self.n_inner = n_inner if n_inner is not None else 4 * n_embd
        self.activation_function = activation_function
        self.layer_norm_epsilon = layer_norm_epsilon
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.bf16 = bf16
        self.fp16 = fp16
        self.fp32 = fp32
        self.use_logn = use_logn
        super().__init__(bos_token_id=bos_token_id, eos_token_id=eos_token_id, **kwargs)
