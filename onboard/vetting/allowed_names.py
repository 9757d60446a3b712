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
    "collections": re.compile(r"OrderedDict"),
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
    abs absolute acos add addbmm addcdiv addcmul addmm addmv addr all allclose amax amin aminmax any arange
    arctan2 argmax argmin argsort argwhere as_tensor asin asinh atan2 atanh baddbmm bernoulli bincount
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor block_diag bmm
    broadcast_to bucketize can_cast cartesian_prod cat cdist ceil celu cholesky chunk clamp clamp_max
    clamp_min clip clone column_stack combinations complex concat concatenate conj conj_physical copysign
    corrcoef cos cosh cosine_similarity count_nonzero cov cross cummax cummin cumprod cumsum
    cumulative_trapezoid deg2rad det detach diag diag_embed diagflat diagonal diff dist div divide dot dropout
    dsplit dstack einsum empty empty_like eq equal erf erfc erfinv exp exp2 expm1 eye flatten flip float_power
    floor floor_divide fmax fmin fmod frac frexp full full_like gather gcd ge ger get_default_dtype greater
    greater_equal group_norm gt hardshrink heaviside histc hsplit hstack hypot i0 index_add index_copy
    index_fill index_select inner inverse is_complex is_floating_point is_tensor isclose isfinite isin isinf
    isnan isneginf isposinf isreal kron kthvalue layer_norm ldexp le lerp less less_equal lgamma linalg.norm
    linalg.vector_norm linspace log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logdet
    logical_and logical_not logical_or logical_xor logspace logsumexp lt masked_fill masked_scatter
    masked_select matmul matrix_exp matrix_power max maximum mean median meshgrid min minimum mm mode moveaxis
    movedim msort mul multinomial multiply mv mvlgamma nan_to_num nan_to_num_ nanmean nanmedian nanquantile
    nansum narrow ne neg negative nextafter nonzero norm normal not_equal numel ones ones_like outer
    pairwise_distance polar positive pow prelu prod quantile rad2deg rand rand_like randn randn_like randperm
    ravel reciprocal relu relu_ remainder repeat_interleave reshape result_type rms_norm roll rot90 round
    row_stack rrelu rsqrt scatter scatter_add scatter_reduce searchsorted select selu sgn sigmoid sign signbit
    sin sinc sinh softmax sort split split_with_sizes sqrt square squeeze stack std sub subtract sum swapaxes
    swapdims t take take_along_dim tan tanh tensor tensor_split tensordot tile topk trace transpose trapezoid
    tril tril_indices triu triu_indices true_divide trunc unbind unflatten unique unique_consecutive unsqueeze
    vander var vdot view_as_complex view_as_real vsplit vstack where xlogy zeros zeros_like
"""
_TYPES = """
    bfloat16 bool complex128 complex64 device dtype finfo float float16 float32 float64 float8_e4m3fn
    float8_e5m2 half iinfo inf int int16 int32 int64 int8 long pi promote_types Size sym_float sym_int sym_max
    sym_min Tensor uint16 uint32 uint64 uint8
"""
_NN = """
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveLogSoftmaxWithLoss AdaptiveMaxPool1d AlphaDropout AvgPool1d
    AvgPool2d BatchNorm1d Bilinear Buffer CELU ConstantPad1d Conv1d Conv2d Conv3d ConvTranspose1d
    ConvTranspose2d CosineSimilarity Dropout Dropout1d Dropout2d ELU Embedding Flatten GELU GLU GroupNorm
    Hardshrink Hardsigmoid Hardswish Hardtanh Identity init.constant_ init.kaiming_uniform_ init.normal_
    init.ones_ init.trunc_normal_ init.uniform_ init.xavier_uniform_ init.zeros_ InstanceNorm1d InstanceNorm2d
    LayerNorm LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax MaxPool1d MaxPool2d Mish Module
    ModuleDict ModuleList MultiheadAttention Parameter ParameterDict ParameterList PixelShuffle PReLU
    ReflectionPad1d ReLU ReLU6 ReplicationPad1d RMSNorm RReLU SELU Sequential Sigmoid SiLU Softmax Softmin
    Softplus Softshrink Softsign Tanh Tanhshrink Threshold TransformerEncoder TransformerEncoderLayer
    Unflatten Unfold ZeroPad1d ZeroPad2d
"""
_FUNCTIONAL = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d alpha_dropout avg_pool1d avg_pool2d batch_norm
    bilinear celu conv1d conv2d conv3d conv_transpose1d conv_transpose2d cosine_similarity dropout dropout1d
    dropout2d elu embedding fold gelu glu group_norm hardshrink hardsigmoid hardswish hardtanh instance_norm
    interpolate layer_norm leaky_relu linear log_softmax logsigmoid max_pool1d max_pool2d mish normalize
    one_hot pad pairwise_distance pixel_shuffle prelu relu relu6 rms_norm rrelu scaled_dot_product_attention
    selu sigmoid silu softmax softmin softplus softshrink softsign tanh tanhshrink threshold unfold
"""
FROM_IMPORTS["torch.nn"] = re.compile("|".join(name for name in _NN.split() if "." not in name))
_MATH = """
    acos asin atan atan2 ceil cos cosh degrees e erf exp fabs floor fmod fsum gcd hypot inf isclose isfinite
    isinf isnan isqrt log log10 log1p log2 nan pi pow prod radians sin sinh sqrt tanh tau trunc
"""
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
    abs abs_ absolute acos add add_ add_module addbmm addcdiv addcdiv_ addcmul addcmul_ addmm_ addmv addr all
    allclose amax amin aminmax any append architectures arctan2 argmax argmin args argsort argwhere asin asinh
    atanh baddbmm baddbmm_ bernoulli bernoulli_ bfloat16 bits bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor bmm bool broadcast_to byte casefold ceil ceil_ center cholesky
    chunk chunk_size_feed_forward clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clip clip_ clone
    complex conj conj_physical contiguous copy copy_ copysign corrcoef cos cos_ cosh count count_nonzero cov
    cross cummax cummin cumprod cumprod_ cumsum cumsum_ data decode deg2rad det detach device diag diag_embed
    diagflat diagonal diff dim dist div div_ divide divide_ dot double dsplit dtype einsum encode endswith eps
    eq eq_ equal erf erf_ erfc erfinv exp exp2 exp2_ exp_ expand expand_as expm1 expm1_ extend fill_
    fill_diagonal_ find flatten flip float float_power floor floor_ floor_divide fmax fmin fmod fmod_ forward
    frac frac_ frexp fromkeys gather gcd ge ge_ ger get get_submodule get_text_config greater greater_equal gt
    gt_ H half hardshrink heaviside histc hsplit hypot i0 imag index index_add index_add_ index_copy
    index_copy_ index_fill index_fill_ index_put index_select indices inner insert int inverse is_causal
    is_complex is_contiguous is_decoder is_floating_point is_integer isalpha isclose isdigit isfinite isinf
    isnan isneginf isnumeric isposinf isreal item items keys kron kthvalue layout ldexp ldexp_ le le_ lerp
    lerp_ less less_equal lgamma log log10 log1p log1p_ log2 log2_ log_ log_normal_ log_softmax logaddexp
    logaddexp2 logcumsumexp logdet logical_and logical_and_ logical_not logical_not_ logical_or logical_or_
    logical_xor logit logsumexp long lower lstrip lt lt_ masked_fill masked_fill_ masked_scatter
    masked_scatter_ masked_select matmul matrix_exp matrix_power max maximum mean median min minimum mm mode
    model_type moveaxis movedim msort mT mul mul_ multinomial multiply multiply_ mv mvlgamma name
    named_children named_modules nan_to_num nan_to_num_ nanmean nanmedian nanquantile nansum narrow ndim
    ndimension ne ne_ neg neg_ negative nelement new_empty new_full new_ones new_tensor new_zeros nextafter
    nonzero norm normal_ not_equal num_labels numel ones outer output_attentions output_hidden_states
    parameters partition per_layer_config permute pop positive pow pow_ prelu problem_type prod quantile
    rad2deg random_ ravel real reciprocal reciprocal_ register_buffer register_parameter relu relu_ remainder
    remainder_ removeprefix removesuffix renorm repeat repeat_interleave reshape reshape_as resolution
    return_dict reverse roll rope_scaling rot90 round round_ rpartition rsqrt rsqrt_ rstrip scatter scatter_
    scatter_add scatter_add_ scatter_reduce select setdefault sgn shape short sigmoid sigmoid_ sign sign_
    signbit sin sin_ sinc sinh size slice_scatter softmax sort split split_with_sizes sqrt sqrt_ square
    square_ squeeze squeeze_ start startswith std step stop stride strip sub sub_ subtract subtract_ sum
    swapaxes swapaxes_ swapdims T t t_ tags take take_along_dim tan tanh tanh_ tensor_split
    tie_word_embeddings tile title to tolist topk torch_dtype trace train training transpose transpose_ tril
    tril_ triu triu_ true_divide true_divide_ trunc trunc_ type type_as unbind unflatten unfold uniform_
    unique unique_consecutive unsafe_chunk unsafe_split unsqueeze unsqueeze_ upper values var vdot view
    view_as vsplit where xlogy zero_
"""
ATTRIBUTES = set(_ATTRIBUTES.split())
"""What may be had of tensors, modules, configs, lists, dictionaries, texts and numbers where these
have it: arithmetic, shapes and lookups. What none of them has is the file's own or its config's."""
