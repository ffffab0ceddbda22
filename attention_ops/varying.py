"""Over which axes of an enclosing `jax.shard_map` arrays vary: JAX keeps it in their types, unless given check_vma=False."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


def varying_axes(tree: Any) -> frozenset[str]:
    """Return the axes over which some array of a tree varies: none outside a `jax.shard_map`."""
    return frozenset().union(*(_axes(leaf) for leaf in jax.tree_util.tree_leaves(tree)))


def varying_like(tree: Tree, like: Any) -> Tree:
    """Return the arrays of a tree, varying over all axes over which one of `like` does.

    What a loop carries must vary from the start as it does in the end. The gradient of an array that did not vary is summed over
    the axes.
    """
    axes = varying_axes(like)

    def cast(leaf: Any) -> Any:
        return jax.lax.pcast(leaf, tuple(sorted(axes - _axes(leaf))), to="varying")

    return jax.tree_util.tree_map(cast, tree) if axes else tree


def _axes(array: Any) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying
