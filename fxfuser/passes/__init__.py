"""Graph to graph: the passes in order, with the reason for each position.

JOINT runs on the joint graph before it is cut into forward and backward, and on a graph without gradients; LATE runs
on every graph that is about to be segmented.
"""

from fxfuser.fuel import Fuel
from fxfuser.passes.arange_embedding import rows_in_order
from fxfuser.passes.bitcasts import join_bitcasts
from fxfuser.passes.casts import canonicalise_casts
from fxfuser.passes.clones import drop_clones
from fxfuser.passes.complex_pairs import pair_complex
from fxfuser.passes.cse import merge_equal_expressions
from fxfuser.passes.dce import remove_dead_nodes
from fxfuser.passes.defer_normalisation import defer_normalisation
from fxfuser.passes.dims import canonicalise_dims
from fxfuser.passes.duplicate import duplicate_cheap_producers
from fxfuser.passes.expand import expand
from fxfuser.passes.few_queries import split_few_queries
from fxfuser.passes.flatten_reductions import flatten_reductions
from fxfuser.passes.fold import fold_constants
from fxfuser.passes.funnel import Pass, Scope, run
from fxfuser.passes.grouped_attention import share_keys_in_groups
from fxfuser.passes.k1_matmul import multiply_instead_of_k1_matmul
from fxfuser.passes.linear_cross_entropy import chunk_linear_cross_entropy
from fxfuser.passes.lone_scatter import compare_instead_of_lone_scatter
from fxfuser.passes.mark_boundaries import mark_boundaries
from fxfuser.passes.picks import one_hot_sums
from fxfuser.passes.random import seed_random_ops
from fxfuser.passes.recompute import recompute_from_less
from fxfuser.passes.rows_before_product import rows_before_product
from fxfuser.passes.scatter_in_place import scatter_in_place
from fxfuser.passes.split_pairs import split_pairs
from fxfuser.passes.split_reductions import split_reductions
from fxfuser.passes.updates_last import updates_last
from fxfuser.passes.views import canonicalise_views
from fxfuser.passes.wide_products import products_in_float32

JOINT: tuple[Pass, ...] = (
    remove_dead_nodes,  # first: no work for what nobody reads
    mark_boundaries,  # before all that looks through views
    multiply_instead_of_k1_matmul,  # before expand and the cut: both treat a matmul as something heavy
    compare_instead_of_lone_scatter,  # before the cut: a comparison can be recomputed
    rows_in_order,  # before the cut: the table's rows need not be saved then
    share_keys_in_groups,  # before drop_clones, which knows nothing of what a clone repeats
    seed_random_ops,  # before the cut: a seed is saved instead of a mask
    pair_complex,  # before expand and the cut, which know real tensors
    expand,  # after everything that recognises whole ops, before what tidies its bodies
    canonicalise_dims,  # before views, which compare permutations
    canonicalise_views,  # before cse: equal values then have equal expressions
    join_bitcasts,  # after views, whose readers are then known
    canonicalise_casts,  # after views: casts of casts are adjacent
    drop_clones,  # after views: a copy's strides then equal its source's more often
    fold_constants,  # after casts: constants have lost their casts and views
    merge_equal_expressions,  # after all that makes expressions equal
    remove_dead_nodes,  # what the passes above left behind
    rows_before_product,  # before chunk_linear_cross_entropy, which wants one shape up to the loss
    one_hot_sums,  # after expand, which makes them, and before the cut and what looks for rows
    chunk_linear_cross_entropy,  # before the cut; after expand and all that leaves one form of each expression
    remove_dead_nodes,  # the whole logits
    defer_normalisation,  # after the losses, which look for linear layers; before the cut: who reads what is known here
    remove_dead_nodes,  # the normalised operands
    recompute_from_less,  # last: the cut reads its marks
)
LATE: tuple[Pass, ...] = (
    products_in_float32,  # after the cut, which tells what leaves a graph
    split_few_queries,  # after the cut, which keeps attention whole; before the splits, whose reductions it makes
    flatten_reductions,  # before the splits, which cut one dimension
    split_pairs,  # before split_reductions, which would take them one by one
    split_reductions,  # after the cut, so that no partial result is saved for the backward
    duplicate_cheap_producers,  # after the cut, which merges equal nodes
    remove_dead_nodes,  # also drops what the cut left without readers
    updates_last,  # once all that reads an old value is there
    scatter_in_place,  # last: all that reads a tensor which it overwrites is there, and in its place
)

__all__ = ["Fuel", "JOINT", "LATE", "Pass", "Scope", "run"]
