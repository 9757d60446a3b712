"""The names that a generated model file may use, and no others: what modeling code computes with."""

from __future__ import annotations

import re

MODULES = {"torch": "torch", "math": "math", "copy": "copy"}
"""What `import X` may bring; `onboard.ops`, which registers the canonical ops, beside."""
ALIASES = {"nn": "torch.nn", "F": "torch.nn.functional"}
"""Short names of modules."""
PLAIN_IMPORTS = {
    "import torch",
    "import copy",
    "import math",
    "import onboard.ops",
    "import torch.nn.functional as F",
    "from torch import nn",
    "from torch.nn import functional as F",
}
FROM_IMPORTS = {
    "__future__": re.compile(r"annotations"),
    "typing": re.compile(r"Any|Callable|Literal|Optional|Union"),
    "collections.abc": re.compile(r"Callable|Sequence"),
    "onboard.modeling": re.compile(
        r"AlibiSlopes|CausalLMOutput|Codebooks|DividedLinear|FoldedHeads"
        r"|colwise|leave_out|put_in_place|register_causal_lm|register_config|replicated|rowwise|tie_weights"
    ),
    "onboard.plain_config": re.compile(r"OldFields|PlainConfig|ROPE_INIT_FUNCTIONS"),
    "transformers": re.compile(r"\w+Config"),
    "transformers.activations": re.compile(
        r"ACT2FN|ACT2CLS|[A-Z]\w*(Activation|GELU)|gelu(_new|_fast)?|silu|quick_gelu"
    ),
    "transformers.modeling_rope_utils": re.compile(r"ROPE_INIT_FUNCTIONS"),
}
"""Module -> the names that may be imported from it, under these names."""
CONFIG_MODULE = re.compile(r"transformers\.models\.\w+\.configuration_\w+")
"""Modules with nothing but `...Config` to import."""
TABLES = {"ACT2FN", "ACT2CLS", "ROPE_INIT_FUNCTIONS"}
"""Imported dictionaries that others share: a file looks entries up, and does nothing else."""
REGISTRATIONS = {"register_causal_lm", "register_config"}
"""What is called at the end of a file, and nowhere else."""

_BUILTINS = """
    abs all any AttributeError bool classmethod dict divmod enumerate float frozenset int
    isinstance iter KeyError len list max min next NotImplementedError object property range
    reversed round RuntimeError set slice sorted staticmethod str sum super tuple TypeError
    ValueError zip
"""
BUILTINS = set(_BUILTINS.split())
OTHER_BUILTINS = {"input", "hash", "id", "type", "filter", "map", "ascii", "bin"}
"""Harmless ones that parameters and attributes may be called like."""
DECORATORS = {"staticmethod", "classmethod", "property"}

_FUNCTIONS = """
    abs acos add addcmul addmm all amax amin any arange argmax argmin argsort as_tensor asinh atan2
    atanh baddbmm bernoulli bincount bitwise_and bitwise_not bitwise_or bitwise_xor bmm
    broadcast_to bucketize cat ceil chunk clamp clamp_max clamp_min clip clone complex concat
    concatenate conj cos cosh cross cummax cummin cumprod cumsum detach diff div dropout einsum
    empty empty_like eq equal erf exp expm1 eye flatten flip floor floor_divide fmod full
    full_like gather ge get_default_dtype greater gt hstack index_select isfinite isin isinf
    isnan le lerp linalg.norm linalg.vector_norm linspace log log10 log1p log2 log_softmax
    logical_and logical_not logical_or logsumexp lt masked_fill matmul max maximum mean meshgrid
    min minimum mm movedim mul multiply nan_to_num ne neg nonzero norm normal numel ones
    ones_like outer polar pow prod rand rand_like randperm randn randn_like reciprocal relu remainder
    repeat_interleave reshape roll round rsqrt scatter searchsorted sigmoid sign sin sinc sinh
    softmax sort split split_with_sizes sqrt square squeeze stack std sub sum take_along_dim tan
    tanh tensor tensor_split tile topk transpose tril triu unbind unsqueeze var view_as_complex
    view_as_real vstack where xlogy zeros zeros_like
"""
_TYPES = """
    bfloat16 bool complex128 complex64 device dtype finfo float float16 float32 float64 half
    iinfo inf int int16 int32 int64 int8 long pi promote_types Size sym_float sym_int sym_max
    sym_min Tensor uint8
"""
_NN = """
    AdaptiveLogSoftmaxWithLoss AvgPool1d AvgPool2d BatchNorm1d Buffer Conv1d Conv2d Dropout ELU Embedding Flatten GELU
    GLU GroupNorm Hardsigmoid Hardswish Identity init.constant_ init.kaiming_uniform_
    init.normal_ init.ones_ init.trunc_normal_ init.uniform_ init.xavier_uniform_ init.zeros_
    LayerNorm LeakyReLU Linear LogSigmoid LogSoftmax MaxPool1d MaxPool2d Mish Module ModuleDict ModuleList
    MultiheadAttention Parameter ParameterDict ParameterList PReLU ReLU ReLU6 RMSNorm SELU Sequential Sigmoid SiLU
    Softmax Softplus Softsign Tanh Threshold TransformerEncoder TransformerEncoderLayer Unflatten Unfold
    ZeroPad2d
"""
_FUNCTIONAL = """
    avg_pool1d avg_pool2d conv1d conv2d cosine_similarity dropout elu embedding fold gelu glu group_norm
    hardsigmoid hardswish layer_norm leaky_relu linear log_softmax logsigmoid max_pool1d max_pool2d mish
    normalize one_hot pad prelu relu relu6 rms_norm scaled_dot_product_attention selu sigmoid
    silu softmax softplus softsign tanh threshold unfold
"""
FROM_IMPORTS["torch.nn"] = re.compile("|".join(name for name in _NN.split() if "." not in name))
_MATH = "ceil cos e exp floor gcd inf isfinite log log10 log1p log2 nan pi pow prod sin sqrt tanh"
DOTTED = (
    {f"torch.{name}" for name in (_FUNCTIONS + _TYPES).split()}
    | {f"torch.nn.{name}" for name in _NN.split()}
    | {f"torch.nn.functional.{name}" for name in _FUNCTIONAL.split()}
    | {f"math.{name}" for name in _MATH.split()}
    | {"copy.copy", "copy.deepcopy"}
)
"""What may be had of modules, by its full name."""
CANONICAL_OP = re.compile(
    r"torch\.ops\.onboard\.(torch_\w+|all_reduce|split_with_sizes|view)(\.default)?"
)

_ATTRIBUTES = """
    abs abs_ acos add add_ add_module addcmul all amax amin any append architectures argmax argmin argsort asinh
    atanh baddbmm bernoulli bfloat16 bitwise_and bitwise_not bitwise_or bitwise_xor bmm bool
    broadcast_to byte ceil chunk chunk_size_feed_forward clamp clamp_ clamp_max clamp_min clip
    clone complex conj contiguous copy_ cos cosh count cross cummax cummin cumprod cumsum data
    detach device diff dim div div_ dot double dtype einsum endswith eps eq equal erf exp exp_ expand
    expand_as expm1 extend fill_ flatten flip float floor floor_divide fmod forward fromkeys
    gather ge get get_submodule get_text_config greater gt H half imag index index_add
    index_add_ index_copy index_copy_ index_fill index_put index_select indices inner insert int
    is_causal is_complex is_decoder is_floating_point is_integer isdigit isfinite isinf isnan item items keys kron
    le lerp log log10 log1p log2 log_softmax logical_and logical_not logical_or logit logsumexp
    long lower lt masked_fill masked_fill_ masked_scatter masked_scatter_ masked_select matmul max
    maximum mean median min minimum mm mode model_type movedim mT mul mul_ multiply mv
    named_children named_modules nan_to_num narrow ndim ne neg new_empty new_full new_ones new_tensor
    new_zeros nonzero norm normal_ num_labels numel ones outer output_attentions output_hidden_states
    parameters per_layer_config permute pop pow problem_type
    prod real reciprocal register_buffer register_parameter relu remainder removeprefix renorm repeat
    repeat_interleave reshape reshape_as return_dict reverse roll rope_scaling round rsqrt
    scatter scatter_ scatter_add scatter_add_ scatter_reduce select setdefault shape short sigmoid
    sign sin sinc sinh size slice_scatter softmax sort split split_with_sizes sqrt square squeeze
    start std step stop stride sub sub_ subtract sum swapaxes swapdims T t take take_along_dim tan
    tanh tensor_split tie_word_embeddings tile to tolist topk torch_dtype trace train training transpose
    tril triu trunc type type_as unbind unflatten unfold uniform_ unsqueeze values var view
    view_as where xlogy zero_
    casefold find isalpha isnumeric lstrip partition removesuffix rpartition rstrip startswith strip upper
"""
ATTRIBUTES = set(_ATTRIBUTES.split())
"""What may be had of tensors, modules, configs, lists, dictionaries, texts and numbers where these
have it: arithmetic, shapes and lookups. What none of them has is the file's own or its config's."""
