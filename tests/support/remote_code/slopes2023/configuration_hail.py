"""Hail: a decoder whose positions are a bias of attention."""

from transformers import PretrainedConfig


class HailConfig(PretrainedConfig):
    model_type = "hail"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size=101,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_act="silu",
        model_max_length=128,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        use_cache=True,
        rotary=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.hidden_act = hidden_act
        self.model_max_length = model_max_length
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.rotary = rotary
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    @property
    def head_width(self):
        """The size of a head."""
        return self.hidden_size // self.num_attention_heads
