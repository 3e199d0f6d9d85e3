"""How a checkpoint's linear layers are quantized: `quantization_config` of config.json, read into a `Quantization`.

A setting that would be computed wrongly is refused with its name, before any weight is read. The router imports this
file, so this file never imports torch.

    quant_method         format             what is read
    compressed-tensors   int-quantized      int8 weights with a scale for each channel (W8A8)
    compressed-tensors   pack-quantized     4 or 8 bits, a scale for each channel or group (W4A16, W8A16)
    compressed-tensors   float-quantized    FP8 (e4m3), a scale for the tensor, each channel or each block
    fp8                  (blocks, or none)  FP8 (e4m3), a scale for each block, or for the tensor (AutoFP8)
    awq                  version gemm       4 bits, packed along the outputs, groups with zeros
    gptq                 gptq, gptq_v2      4 or 8 bits, packed along the inputs, groups with zeros
    mxfp4                                   experts in FP4 (e2m1), a power of two for each 32 inputs

Sources: compressed-tensors' `quantization/quant_args.py` and `compressors/`, AutoAWQ's `utils/packing_utils.py`,
GPTQModel's `nn_modules/qlinear`, transformers' `quantizers/quantizer_mxfp4.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from shared.errors import ModelError

GROUP_SIZE_ON_LOAD = 128
"""Of weights that `--quantization` makes: the field's usual one for 4 bits.

A layer whose inputs it does not divide has groups of the largest part of it that does.
"""

T = TypeVar("T")


class Layout(Enum):
    """Where the codes of a layer come from. Its value is what `/server_info` and errors call it."""

    ON_LOAD = "quantized while loading"
    INT_QUANTIZED = "compressed-tensors int-quantized"
    PACK_QUANTIZED = "compressed-tensors pack-quantized"
    FLOAT_QUANTIZED = "compressed-tensors float-quantized"
    FP8_BLOCKS = "blocks"
    FP8_TENSOR = "tensors"
    AWQ = "awq"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    MXFP4 = "mxfp4"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one linear layer is quantized. `group_size` inputs share a scale; None: all inputs of an output do."""

    layout: Layout
    bits: Literal[4, 8]
    group_size: int | None
    is_symmetric: bool
    has_order: bool = False
    """Whether the groups of the inputs are in any order, which a tensor g_idx gives (GPTQ's desc_act)."""
    block: tuple[int, int | None] | None = None
    """Of FP8: outputs and inputs that share a scale; None for all inputs, and for all of both."""
    is_weight_only: bool = False
    """Whether activations stay in 16 bits: by `--weight-only-quantization`, or of FP8, whose file says so."""
    keeps_float: bool = False
    """Whether FP8 stays what it is: on GPUs that have it. Else it is decoded while it is loaded."""

    @property
    def has_codes(self) -> bool:
        """Whether the layer is computed with integers. FP8 is not: CPUs and older GPUs decode it."""
        return self.layout not in (Layout.FLOAT_QUANTIZED, Layout.FP8_BLOCKS, Layout.FP8_TENSOR)

    @property
    def has_float_products(self) -> bool:
        """Whether FP8 is multiplied by FP8."""
        return self.keeps_float and not self.is_weight_only

    @property
    def scale_nbytes(self) -> int:
        """Bytes of a scale that native kernels read."""
        return 1 if self.layout is Layout.MXFP4 else 4

    @property
    def name(self) -> str:
        """Such as W4A8 awq: the bits of weights and activations, and the format. FP8: decoded into 16 bits."""
        has_bits = self.has_codes or self.has_float_products
        bits = f"W{self.bits}A{16 if self.is_weight_only else 8}" if has_bits else "FP8"
        return f"{bits} {self.layout.value}"


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The schemes of a model's linear layers."""

    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    """(targets, scheme). A target is the name of a layer, `re:` and a regex, or Linear for all."""
    ignored: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As `/server_info` shows it, and nodes compare it."""
        return ", ".join(sorted({scheme.name for _, scheme in self.schemes}))

    def weight_only(self) -> Quantization:
        """The same with activations of 16 bits, where the checkpoint does not ask for 8."""

        def of(scheme: Scheme) -> Scheme:
            of_weights = scheme.has_codes and scheme.layout is not Layout.INT_QUANTIZED
            return replace(scheme, is_weight_only=scheme.is_weight_only or of_weights)

        return replace(self, schemes=tuple((targets, of(scheme)) for targets, scheme in self.schemes))

    def kept_float(self) -> Quantization:
        """The same, where FP8 stays what it is."""

        def of(scheme: Scheme) -> Scheme:
            return replace(scheme, keeps_float=not scheme.has_codes)

        return replace(self, schemes=tuple((targets, of(scheme)) for targets, scheme in self.schemes))

    def scheme_of(self, layer: str) -> Scheme | None:
        """The scheme of a linear layer, such as model.layers.0.self_attn.q_proj. None: it is not quantized."""
        if any(_matches(layer, target) for target in self.ignored):
            return None
        found = [
            (_rank(target), scheme)
            for targets, scheme in self.schemes
            for target in targets
            if _matches(layer, target)
        ]
        return min(found, key=lambda each: each[0])[1] if found else None


def of_dummy_weights(quantization: Quantization, *, is_tied: bool) -> Quantization:
    """The same bits and groups, for weights that are not in a file and so are quantized while they are made.

    What a file has in FP8 is dense, as it is when it is loaded, and so is a tied lm_head.
    """

    def on_load(scheme: Scheme) -> Scheme:
        if scheme.layout is Layout.MXFP4:  # random bits are a weight
            return scheme
        return replace(scheme, layout=Layout.ON_LOAD, is_symmetric=True, has_order=False)

    with_codes = [(targets, on_load(scheme)) for targets, scheme in quantization.schemes if scheme.has_codes]
    ignored = (*quantization.ignored, *(("lm_head",) if is_tied else ()))
    return replace(quantization, schemes=tuple(with_codes), ignored=ignored)


def quantize_on_load(name: str) -> Quantization:
    """What `--quantization` makes of a checkpoint that is not quantized: `int8` or `int4`.

    The lm_head gets 8 bits under both, since its errors reach the logits directly.
    """

    def of(bits: Literal[4, 8]) -> Scheme:
        return Scheme(layout=Layout.ON_LOAD, bits=bits, group_size=GROUP_SIZE_ON_LOAD, is_symmetric=True)

    return Quantization(schemes=((("lm_head",), of(8)), (("Linear",), of(8 if name == "int8" else 4))))


def _matches(layer: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], layer) is not None
    return target in ("Linear", layer)


def _rank(target: str) -> int:
    """A name comes before a regex, and a regex before all layers, as in compressed-tensors' match_targets."""
    return 1 if target.startswith("re:") else 2 if target == "Linear" else 0


# ------------------------------------------------------------------------------------- quantization_config
class _Method(msgspec.Struct):
    quant_method: str


class _Args(msgspec.Struct, kw_only=True):
    """compressed-tensors' QuantizationArgs."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    dynamic: bool | str = False
    block_structure: list[int] | str | None = None
    actorder: str | bool | None = None

    @property
    def granularity(self) -> str:
        """The strategy; where a file leaves it out, it follows from the size of groups."""
        size = self.group_size
        return self.strategy or ("tensor" if size is None else "group" if size > 0 else "channel")


class _ConfigGroup(msgspec.Struct, kw_only=True):
    targets: list[str]
    weights: _Args | None = None
    input_activations: _Args | None = None
    output_activations: _Args | None = None
    format: str | None = None


class _CompressedTensors(msgspec.Struct, kw_only=True):
    config_groups: dict[str, _ConfigGroup]
    format: str = "dense"
    ignore: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


_MAX_SIZE = 1 << 16
_Size = Annotated[int, msgspec.Meta(gt=0, le=_MAX_SIZE)]
_GroupSize = Annotated[int, msgspec.Meta(ge=-1, le=2**16)]


class _Fp8(msgspec.Struct, kw_only=True):
    weight_block_size: tuple[_Size, _Size] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    """The same, as AutoFP8 names it."""
    kv_cache_scheme: Any = None


class _Awq(msgspec.Struct, kw_only=True):
    bits: int = 4
    group_size: _GroupSize = 128
    zero_point: bool = True
    version: str = "gemm"
    modules_to_not_convert: list[str] | None = None


class _Mxfp4(msgspec.Struct, kw_only=True):
    modules_to_not_convert: list[str] | None = None


class _Gptq(msgspec.Struct, kw_only=True):
    bits: int
    group_size: _GroupSize = 128
    desc_act: bool = False
    sym: bool = True
    lm_head: bool | None = None
    checkpoint_format: str | None = None
    format: str | None = None
    """The older name of `checkpoint_format`."""
    dynamic: dict[str, Any] | None = None


def read_quantization(raw: dict[str, Any], path: Path) -> Quantization:
    """Read `quantization_config` of the config.json at `path`. Raises ModelError for what is not supported."""
    match _convert(raw, _Method, path).quant_method:
        case "compressed-tensors":
            return _compressed_tensors(_convert(raw, _CompressedTensors, path), path)
        case "fp8":
            return _fp8(_convert(raw, _Fp8, path), path)
        case "awq":
            return _awq(_convert(raw, _Awq, path), path)
        case "gptq":
            return _gptq(_convert(raw, _Gptq, path), path)
        case "mxfp4":
            return _mxfp4(_convert(raw, _Mxfp4, path), path)
        case other:
            raise _unsupported(path, "quant_method", other, "compressed-tensors, fp8, awq, gptq, mxfp4")


def _compressed_tensors(fields: _CompressedTensors, path: Path) -> Quantization:
    targets = (each for group in fields.config_groups.values() for each in group.targets)
    _check_targets([*(fields.ignore or ()), *targets], path)
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        value = getattr(fields, name) or {}
        if value and value.get("format") != "dense":
            raise _unsupported(path, name, value.get("format") or "a setting", "none")
    schemes = tuple(
        (tuple(group.targets), _scheme(group, group.format or fields.format, f"config_groups.{name}", path))
        for name, group in fields.config_groups.items()
    )
    return Quantization(schemes=schemes, ignored=tuple(fields.ignore or ()))


def _check_targets(targets: Iterable[str], path: Path) -> None:
    """Raise ModelError unless all that are to be regular expressions are."""
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except (re.error, OverflowError, RecursionError) as e:
            raise ModelError(f"{path}: quantization_config: {target!r} is no regular expression: {e}") from e


def _scheme(group: _ConfigGroup, file_format: str, key: str, path: Path) -> Scheme:
    weights, inputs = group.weights, group.input_activations
    if (
        weights is not None
        and weights.type == "float"
        and file_format in ("float-quantized", "naive-quantized")
    ):
        return _float_scheme(group, weights, key, path)
    if weights is None or weights.type != "int" or weights.num_bits not in (4, 8) or weights.dynamic:
        what = "none"
        if weights is not None:
            what = f"{weights.type} of {weights.num_bits} bits, dynamic {weights.dynamic}, in {file_format}"
        supported = "int of 8 or 4 bits, float of 8 in float-quantized, not dynamic"
        raise _unsupported(path, f"{key}.weights", what, supported)
    if group.output_activations is not None:
        raise _unsupported(path, f"{key}.output_activations", "a setting", "none")
    if inputs is not None and (
        inputs.num_bits,
        inputs.type,
        inputs.strategy,
        inputs.dynamic,
        inputs.symmetric,
    ) != (
        8,
        "int",
        "token",
        True,
        True,
    ):
        what = (
            f"{inputs.type} of {inputs.num_bits} bits, strategy {inputs.strategy}, dynamic {inputs.dynamic}"
        )
        raise _unsupported(
            path, f"{key}.input_activations", what, "symmetric int of 8 bits, token, dynamic True"
        )
    match file_format:
        case "int-quantized" if weights.num_bits == 8 and inputs is not None:
            layout = Layout.INT_QUANTIZED
        case "pack-quantized" if inputs is None:
            layout = Layout.PACK_QUANTIZED
        case _:
            what = f"{file_format} with{'' if inputs is not None else 'out'} input_activations"
            raise _unsupported(path, f"{key}.format", what, "int-quantized with them, pack-quantized without")
    match weights.granularity:
        case "channel":
            group_size = None
        case "group" if weights.group_size is not None and weights.group_size > 0 and inputs is None:
            group_size = weights.group_size
        case other:
            what = f"{other} of {weights.group_size}"
            raise _unsupported(
                path, f"{key}.weights.strategy", what, "channel, or group without input_activations"
            )
    return Scheme(
        layout=layout,
        bits=4 if weights.num_bits == 4 else 8,
        group_size=group_size,
        is_symmetric=weights.symmetric,
        has_order=_has_order(weights, key, path),
    )


def _has_order(weights: _Args, key: str, path: Path) -> bool:
    """Whether a file has g_idx. `dynamic` and `static` are compressed-tensors' other names."""
    match weights.actorder.lower() if isinstance(weights.actorder, str) else weights.actorder:
        case None | False | "weight" | "static":
            return False
        case True | "group" | "dynamic":
            return True
        case other:
            raise _unsupported(path, f"{key}.weights.actorder", other, "group, weight, null")


def _float_scheme(group: _ConfigGroup, weights: _Args, key: str, path: Path) -> Scheme:
    """FP8. Scales of activations are those of each token, even where a file has fixed ones."""
    for name, args in (("weights", weights), ("input_activations", group.input_activations)):
        if args is not None and (args.type, args.num_bits, args.symmetric) != ("float", 8, True):
            what = f"{args.type} of {args.num_bits} bits"
            raise _unsupported(path, f"{key}.{name}", what, "symmetric float of 8 bits in float-quantized")
    if weights.dynamic or group.output_activations is not None:
        what = "dynamic weights" if weights.dynamic else "output_activations"
        raise _unsupported(path, key, what, "weights that are not dynamic, and input_activations")
    block: tuple[int, int | None] | None
    structure = weights.block_structure
    if isinstance(structure, str):  # "128x128"
        sizes = re.fullmatch(r"(\d{1,9})x(\d{1,9})", structure)
        structure = [] if sizes is None else [int(size) for size in sizes.groups()]
    match weights.granularity, structure:
        case "tensor", _:
            block = None
        case "channel", _:
            block = 1, None
        case "block", [int(rows), int(columns)] if 0 < rows <= _MAX_SIZE and 0 < columns <= _MAX_SIZE:
            block = rows, columns
        case other, _:
            what = other if structure is None else f"{other} of {structure}"
            raise _unsupported(path, f"{key}.weights.strategy", what, "tensor, channel, block of two sizes")
    return Scheme(
        layout=Layout.FLOAT_QUANTIZED,
        bits=8,
        group_size=None,
        is_symmetric=True,
        block=block,
        is_weight_only=group.input_activations is None,
    )


def _fp8(fields: _Fp8, path: Path) -> Quantization:
    """Blocks, or a scale for each tensor, as AutoFP8 writes them."""
    if fields.kv_cache_scheme is not None:
        raise _unsupported(path, "kv_cache_scheme", fields.kv_cache_scheme, "none")
    block = fields.weight_block_size
    layout = Layout.FP8_TENSOR if block is None else Layout.FP8_BLOCKS
    scheme = Scheme(layout=layout, bits=8, group_size=None, is_symmetric=True, block=block)
    ignored = _anywhere(fields.modules_to_not_convert or fields.ignored_layers or ())
    return Quantization(schemes=((("Linear",), scheme),), ignored=(*ignored, "lm_head"))


def _awq(fields: _Awq, path: Path) -> Quantization:
    if fields.bits != 4:
        raise _unsupported(path, "bits", fields.bits, "4")
    if fields.version.lower() != "gemm" or not fields.zero_point:
        raise _unsupported(
            path, "version", f"{fields.version}, zero_point {fields.zero_point}", "gemm with zero_point"
        )
    scheme = Scheme(layout=Layout.AWQ, bits=4, group_size=_group_size(fields.group_size), is_symmetric=False)
    ignored = (*_anywhere(fields.modules_to_not_convert or ()), "lm_head")
    return Quantization(schemes=((("Linear",), scheme),), ignored=ignored)


def _gptq(fields: _Gptq, path: Path) -> Quantization:
    if fields.bits not in (4, 8):
        raise _unsupported(path, "bits", fields.bits, "4, 8")
    version = fields.checkpoint_format or fields.format or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise _unsupported(path, "checkpoint_format", version, "gptq, gptq_v2")
    skipped = tuple(f"re:{name.removeprefix('-:')}" for name in fields.dynamic or {} if name.startswith("-:"))
    if len(skipped) < len(fields.dynamic or {}):
        raise _unsupported(path, "dynamic", "a setting of some layers", "-: with a regular expression")
    _check_targets(skipped, path)
    scheme = Scheme(
        layout=Layout(version),
        bits=4 if fields.bits == 4 else 8,
        group_size=_group_size(fields.group_size),
        is_symmetric=False,  # a file has zeros in any case
        has_order=fields.desc_act,
    )
    ignored = (*skipped, *(() if fields.lm_head else ("lm_head",)))
    return Quantization(schemes=((("Linear",), scheme),), ignored=ignored)


def _mxfp4(fields: _Mxfp4, path: Path) -> Quantization:
    """Experts, but those that a pattern names: from the beginning of a name to a dot, or the end of a name."""
    names = fields.modules_to_not_convert or []
    ignored = [f"re:(?:{name})(?=\\.|$)|.*{re.escape(name)}(?=\\.|$)" for name in names]
    _check_targets(ignored, path)
    scheme = Scheme(layout=Layout.MXFP4, bits=4, group_size=32, is_symmetric=True)
    return Quantization(schemes=((("re:.*\\.experts\\.",), scheme),), ignored=tuple(ignored))


def _group_size(size: int) -> int | None:
    return size if size > 0 else None


def _anywhere(names: tuple[str, ...] | list[str]) -> list[str]:
    """AutoAWQ leaves out each layer whose name contains one of these."""
    return [f"re:.*{re.escape(name)}" for name in names]


def _convert(raw: dict[str, Any], fields: type[T], path: Path) -> T:
    try:
        return msgspec.convert(raw, type=fields)
    except msgspec.ValidationError as e:
        raise ModelError(f"{path}: quantization_config: {e}") from e


def _unsupported(path: Path, key: str, what: object, supported: str) -> ModelError:
    return ModelError(
        f"{path}: quantization_config.{key}: {what} is not supported; supported are: {supported}"
    )
