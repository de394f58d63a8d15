"""Rows that compute nothing per element: views, layout changes, factories, gathers, products; and what stays ATen."""

from __future__ import annotations

from keyword import iskeyword
from typing import Iterable

import torch
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace

from fxfuser.ops.row import Kind, Promotion, Row

aten, prims = torch.ops.aten, torch.ops.prims

_VIEWS = """
    view _unsafe_view reshape _reshape_alias permute transpose t expand slice select squeeze unsqueeze alias detach
    lift_fresh split unsafe_split split_with_sizes unsafe_split_with_sizes unbind diagonal as_strided unfold narrow
    view_as_real view_as_complex real imag flatten unflatten ravel movedim moveaxis swapaxes swapdims broadcast_to
    expand_as view_as reshape_as chunk tensor_split hsplit vsplit dsplit numpy_T mT mH adjoint resolve_conj
    resolve_neg linalg_diagonal matrix_H conj _conj _neg_view
"""
_PRIM_VIEWS = "as_strided broadcast_in_dim collapse_view conj split_dim squeeze transpose view_of view_of_dtype"
_LAYOUTS = """
    clone contiguous lift_fresh_copy flip cat stack constant_pad_nd slice_scatter select_scatter diagonal_scatter
    repeat roll rot90 tril triu expand_copy permute_copy transpose_copy t_copy view_copy slice_copy select_copy
    squeeze_copy unsqueeze_copy alias_copy detach_copy diagonal_copy unfold_copy split_with_sizes_copy unbind_copy
    fliplr flipud tile hstack vstack dstack
"""
_PRIM_LAYOUTS = "cat clone collapse reshape rev"
_FACTORIES = """
    full full_like new_full zeros zeros_like new_zeros ones ones_like new_ones arange scalar_tensor eye tril_indices
    triu_indices linspace
"""
_PRIM_FACTORIES = "full full_like iota scalar_tensor"
_GATHERS = (aten.gather.default, aten.index_select.default, aten.embedding.default, aten.take.default,
            aten.index.Tensor, aten._unsafe_index.Tensor, aten.index.Tensor_hacked_twin,
            aten._unsafe_index.Tensor_hacked_twin)
_PRODUCTS = "mm addmm bmm baddbmm mv addmv dot vdot ger addr"

_RANDOM = "draws random numbers"
_SCAN = "a scan along a dimension"
_SORT = "sorts"
_SCATTER = "writes at positions that a tensor holds"
_WINDOW = "left whole where a window has no known length; else the expand pass takes it apart"
_SEVERAL = "returns several tensors"
_NORM = "left whole by the decompositions; the expand pass takes it apart"
MASK_REASON = "the size of its result depends on data"
_MEMORY = "uninitialised memory"

GEMM_REASON = "a matrix product runs as its ATen kernel"

_EXTERNS: dict[str, str] = {
    "rand randn rand_like randn_like randint randint_like randperm bernoulli native_dropout normal normal_functional "
    "multinomial poisson binomial uniform exponential geometric cauchy log_normal random rrelu_with_noise": _RANDOM,
    "cummax cummin _cummax_helper _cummin_helper": _SCAN,
    "sort topk kthvalue median nanmedian mode unique_dim _unique2": _SORT,
    "scatter scatter_add scatter_reduce index_put _unsafe_index_put index_add index_copy index_reduce masked_scatter "
    "put embedding_dense_backward _unsafe_masked_index_put_accumulate as_strided_scatter histc histogram bincount "
    "_histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors grid_sampler_2d_backward "
    "grid_sampler_3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward": _SCATTER,
    "convolution convolution_backward": "a convolution runs as its ATen kernel",
    "avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward max_pool2d_with_indices max_pool3d_with_indices "
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d adaptive_max_pool3d "
    "adaptive_max_pool2d_backward adaptive_max_pool3d_backward fractional_max_pool2d fractional_max_pool3d "
    "_upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa "
    "_upsample_bicubic2d_aa_backward grid_sampler_2d grid_sampler_3d upsample_bilinear2d upsample_nearest2d": _WINDOW,
    "frexp max min var_mean std_mean aminmax log_sigmoid_forward": _SEVERAL,
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm native_group_norm "
    "native_layer_norm_backward native_group_norm_backward _fused_rms_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training var std logsumexp nll_loss_forward nll_loss2d_forward nll_loss_backward "
    "nll_loss2d_backward _cdist_forward _cdist_backward _pdist_forward _pdist_backward searchsorted bucketize": _NORM,
    "nonzero masked_select nonzero_static repeat_interleave": MASK_REASON,
    "empty empty_like empty_strided new_empty new_empty_strided empty_permuted": _MEMORY,
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_cudnn_attention_backward":
        "attention runs as its ATen kernel",
    "_fft_c2c _fft_c2r _fft_r2c": "a Fourier transform",
    "_local_scalar_dense equal item": "reads a value on the host",
    "_int_mm _scaled_mm": GEMM_REASON,
    "_embedding_bag _embedding_bag_forward_only segment_reduce": "the lengths of its segments depend on data",
}


def _functional(namespace: _OpNamespace, names: Iterable[str]) -> list[OpOverload]:
    """Every functional overload of the ops with these names; a name that this torch lacks gives none."""
    found: list[OpOverload] = []
    for name in names:
        try:
            packet: OpOverloadPacket = getattr(namespace, name)
        except AttributeError:
            continue
        for overload in packet.overloads():  # type: ignore[no-untyped-call]
            op: OpOverload = getattr(packet, overload)
            # an overload that is called like a keyword (random.from) is in no graph: its text could not be read
            if not op._schema.is_mutable and "out" not in overload.split("_") and not iskeyword(overload):
                found.append(op)
    return found


def _rows(names: str, row: Row, prim_names: str = "") -> dict[OpOverload, Row]:
    ops = _functional(aten, names.split()) + _functional(prims, prim_names.split())
    return dict.fromkeys(ops, row)


def structure_rows() -> dict[OpOverload, Row]:
    """Every row of this file."""
    rows: dict[OpOverload, Row] = {}
    for names, reason in _EXTERNS.items():
        rows |= _rows(names, Row(Kind.EXTERN, reason=reason))
    rows |= _rows(_VIEWS, Row(Kind.VIEW), _PRIM_VIEWS)
    rows |= _rows(_LAYOUTS, Row(Kind.LAYOUT), _PRIM_LAYOUTS)
    rows |= _rows(_FACTORIES, Row(Kind.FACTORY), _PRIM_FACTORIES)
    rows |= _rows("arange", Row(Kind.FACTORY, "{1} + {2} * {0}", Promotion.RESULT))  # of index, start and step
    rows[aten.fill.Scalar] = Row(Kind.FACTORY)
    rows |= dict.fromkeys(_GATHERS, Row(Kind.GATHER))
    rows |= _rows(_PRODUCTS, Row(Kind.GEMM, reason=GEMM_REASON, cost=64))
    return rows
