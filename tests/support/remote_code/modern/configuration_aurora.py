"""Aurora: a decoder in the manner of 2026."""

from transformers import PretrainedConfig


class AuroraQuantization:
    def __init__(self, bits: int = 8):
        self.bits = bits


class AuroraConfig(PretrainedConfig):
    model_type = "aurora"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        model_type: str = "aurora_text",
        vocab_size: int = 131,
        hidden_size: int = 64,
        intermediate_size: int = 96,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 256,
        rms_norm_eps: float = 1e-5,
        residual_scale: float = 0.5,
        attention_gate: bool = True,
        rope_parameters: dict | None = None,
        pad_token_id: int | None = None,
        tie_word_embeddings: bool = False,
        quantization: dict | None = None,
        **kwargs,
    ):
        self.model_type = model_type
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = head_dim if head_dim is not None else hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.residual_scale = residual_scale
        self.attention_gate = attention_gate
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
        self.quantization = quantization
        if isinstance(quantization, dict):
            self.quantization = AuroraQuantization(**quantization)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("heads do not divide")
        super().__init__(pad_token_id=pad_token_id, tie_word_embeddings=tie_word_embeddings, **kwargs)


__all__ = ["AuroraConfig"]
