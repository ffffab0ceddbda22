"""Faults planted in our own code, one fragment each, and what convicts them. Run this file to write the page."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import pathlib
import pkgutil
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "conformance.md"
BEGIN = "<!-- mutations: begin, written by tests/selftest/mutations.py -->"
END = "<!-- mutations: end -->"
MESH = "mesh"
"""Stands for the route of cases that run over one: those of mesh_faults.py."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        fault: what goes wrong, in words.
        where: the function, as `module:name` in the package.
        old, new: the fragment of its source, which occurs once, and what takes its place.
        killer: a route and a case of the selftest, "vanilla/native plain/small/float32"; MESH and a case of mesh_faults.py; or a
            check of test_mutations.py.
    """

    fault: str
    where: str
    old: str
    new: str
    killer: str

    @property
    def route(self) -> str:
        """The route of a selftest case, or MESH; empty for a check."""
        return self.killer.rpartition(" ")[0]

    @property
    def case(self) -> str:
        return self.killer.rpartition(" ")[2]

    @property
    def function(self) -> types.FunctionType:
        """The innermost function, without its decorators."""
        found: Any = pkgutil.resolve_name(f"attention_ops.{self.where}")
        found = getattr(found, "fget", found)
        return inspect.unwrap(getattr(found, "func", found))

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Run the function with the fault inside there, from wherever it is called."""
        function = self.function
        code = function.__code__
        function.__code__ = self._faulty(textwrap.dedent(inspect.getsource(function)), code)
        forget()
        try:
            yield
        finally:
            function.__code__ = code
            forget()

    def _faulty(self, source: str, code: types.CodeType) -> types.CodeType:
        if source.count(self.old) != 1:
            raise ValueError(f"{self.where} has {source.count(self.old)} times {self.old!r}, expected once")
        tree = ast.parse(source.replace(self.old, self.new))
        tree.body[0].decorator_list = []  # type: ignore[attr-defined]
        flags = annotations.compiler_flag
        compiled = compile(tree, code.co_filename, "exec", flags=flags, dont_inherit=True)
        (found,) = (part for part in compiled.co_consts if isinstance(part, types.CodeType) and part.co_name == code.co_name)
        return found


def forget() -> None:
    """Empty the caches of the package, and of the programs that JAX keeps for it."""
    from attention_ops import api

    api._execute.clear_cache()  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("attention_ops"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper) and value.cache_parameters()["maxsize"] is not None:
                    value.cache_clear()


MUTATIONS = (
    # ---------------------------------------------------------------- kernels/tiles.py
    Mutation(
        "each kind of tile is visited from the start of the list again",
        "kernels.tiles:Work.loop",
        "start = counts[kind]",
        "start = 0",
        "blocksparse/native causal/tiles/float32",
    ),
    Mutation(
        "the second tile of a pair is visited once more by itself",
        "kernels.tiles:work_list",
        "may & ~second",
        "may",
        "blocksparse/native causal/tiles/float32",
    ),
    Mutation(
        "a pair is full when its first tile is",
        "kernels.tiles:work_list",
        "full & after",
        "full",
        "blocksparse/native causal/tiles/float32",
    ),
    Mutation(
        "tiles that stand alone are full when one of them is",
        "kernels.tiles:work_list",
        "np.all(full[kind == 2])",
        "np.any(full[kind == 2])",
        "blocksparse/native causal/tiles/float32",
    ),
    Mutation(
        "the last tile of a run is half of a pair",
        "kernels.tiles:_paired",
        "visible & is_even & has_next",
        "visible & is_even",
        "blocksparse/native plain/tiles/float32",
    ),
    Mutation(
        "pairs begin at the second tile of a run, and the first is forgotten",
        "kernels.tiles:_paired",
        "% 2 == 1",
        "% 2 == 0",
        "blocksparse/native plain/tiles/float32",
    ),
    Mutation(
        "the first column of padding is visible",
        "kernels.tiles:Tiler.visible",
        "at.col < s.S",
        "at.col <= s.S",
        "blocksparse/native plain/tiles/float32",
    ),
    Mutation(
        "rows of padding see keys, which may hold NaN",
        "kernels.tiles:Tiler.visible",
        "if s.padded[0] != s.T:",
        "if s.padded[0] < s.T:",
        "blocksparse/native causal+offset/tiles/float32/nan",
    ),
    Mutation(
        "a bias of -inf is a bias of 0",
        "kernels.tiles:Tiler.visible",
        "parts.append(self._bias_tile(at) != NEG_INF)",
        "pass",
        "blocksparse/native bias_blocks/small/bfloat16",
    ),
    Mutation(
        "the derivative of the soft cap is 1 - tanh",
        "kernels.tiles:Tiler.logits",
        "1.0 - squashed * squashed",
        "1.0 - squashed",
        "blocksparse/native soft_cap/small/float32",
    ),
    Mutation(
        "bfloat16 logits under a soft cap are not scaled",
        "kernels.tiles:Tiler.logits",
        "logits = logits * self.scale",
        "pass",
        "blocksparse/native soft_cap/small/bfloat16",
    ),
    Mutation(
        "two tiles are finite when the first is",
        "kernels.tiles:all_of",
        "flags[first] & flags[first + 1]",
        "flags[first]",
        "blocksparse/native kv_lengths/tiles/float32/nan",
    ),
    Mutation(
        "the tile of a bias begins at query 0",
        "kernels.tiles:_bias_window",
        "(at.batch, at.head, at.row, at.col)",
        "(at.batch, at.head, 0, at.col)",
        "blocksparse/native bias/tiles/float32",
    ),
    Mutation(
        "the gradient of a broadcast bias is that of its first row",
        "kernels.tiles:add_bias_tile",
        "jnp.sum(tile, axis=over, keepdims=True)",
        "tile[tuple(slice(1) if axis in over else slice(None) for axis in range(4))]",
        "blocksparse/native bias_keys/small/bfloat16",
    ),
    Mutation(
        "all heads of a unit are its first",
        "kernels.tiles:_heads_of",
        "unit * heads + n",
        "unit * heads",
        "blocksparse/native gqa/small/float32",
    ),
    # ---------------------------------------------------------------- kernels/blockwise.py
    Mutation(
        "the scale is dropped",
        "kernels.blockwise:_tile_by_tile",
        "q if is_narrow else q * settings.scale",
        "q",
        "blocksparse/native plain/small/float32",
    ),
    Mutation(
        "the scale that waits for the exponential is forgotten there",
        "kernels.blockwise:_tile_by_tile",
        "jnp.exp(logits * factor - anchor[..., None])",
        "jnp.exp(logits - anchor[..., None])",
        "blocksparse/native plain/small/bfloat16",
    ),
    Mutation(
        "the sum of values is not brought to the new highest logit",
        "kernels.blockwise:_tile_by_tile",
        "output * keep[..., None] +",
        "output +",
        "blocksparse/native plain/tiles/float32",
    ),
    Mutation(
        "the guard of rows that have seen nothing yet is gone: -inf - -inf",
        "kernels.blockwise:_tile_by_tile",
        "jnp.where(new == NEG_INF, 0, new) if partial else new",
        "new",
        "blocksparse/native mask/small/float32",
    ),
    Mutation(
        "an empty row is divided by 0",
        "kernels.blockwise:_tile_by_tile",
        "total == 0",
        "total < 0",
        "blocksparse/native mask/small/float32",
    ),
    Mutation(
        "values that nothing sees are multiplied by 0, NaN too",
        "kernels.blockwise:_tile_by_tile",
        "v = tiler.without_unseen_keys(v, t.all_of(finite, j, tiles), at)",
        "pass",
        "blocksparse/native mask/small/float32/nan",
    ),
    Mutation(
        "sinks join the denominator twice",
        "kernels.blockwise:_forward",
        "shares(highest, total, sinks)[0][..., None]",
        "shares(highest, total, sinks)[0][..., None] ** 2",
        "blocksparse/native sinks/small/float32",
    ),
    Mutation(
        "the cotangent of the logsumexp is dropped",
        "kernels.blockwise:_attend_bwd",
        " - jnp.where(empty, 0, d_logsumexp / total)",
        "",
        "blocksparse/native plain/small/float32",
    ),
    Mutation(
        "delta is that of the softmax with the sinks",
        "kernels.blockwise:_attend_bwd",
        "delta = delta * kept",
        "delta = delta / total",
        "blocksparse/native sinks/small/float32",
    ),
    Mutation(
        "delta is that of the output after it was rounded to 16 bits",
        "kernels.blockwise:_attend_bwd",
        "if lost is not None:",
        "if False:",
        "gradients_in_16_bits_are_those_of_the_output_before_rounding",
    ),
    Mutation(
        "the gradient of the sinks has the other sign",
        "kernels.blockwise:_attend_bwd",
        "d_sinks = -jnp.sum",
        "d_sinks = jnp.sum",
        "blocksparse/native sinks/small/float32",
    ),
    Mutation(
        "weights backward are not hidden",
        "kernels.blockwise:_backward_tiles",
        "weights = tiler.hide(seen, weights, 0.0, at)",
        "pass",
        "blocksparse/native causal/small/float32",
    ),
    Mutation(
        "backward the soft cap has no derivative",
        "kernels.blockwise:_backward_tiles",
        "d_logits = d_logits * slope",
        "pass",
        "blocksparse/native soft_cap/small/float32",
    ),
    Mutation(
        "the gradient of a tile of queries is added to the first rows",
        "kernels.blockwise:_backward_tiles",
        "place * shape.block_q)",
        "0)",
        "blocksparse/native plain/tiles/float32",
    ),
    Mutation(
        "the gradient of the query is not scaled",
        "kernels.blockwise:_backward_tiles",
        ".reshape(shape.padded[0], shape.query_heads, -1) * settings.scale",
        ".reshape(shape.padded[0], shape.query_heads, -1)",
        "blocksparse/native plain/small/float32",
    ),
    Mutation(
        "keys of NaN that nothing sees reach the gradient of the query",
        "kernels.blockwise:_backward_tiles",
        "kk = tiler.without_unseen_keys(k, finite_keys[j], at)",
        "pass",
        "blocksparse/native mask/small/float32/nan",
    ),
    Mutation(
        "queries of NaN that see nothing reach the gradient of the key",
        "kernels.blockwise:_backward_tiles",
        "q = tiler.without_blind_queries(q, t.all_of(finite_queries, place, tiles), at)",
        "pass",
        "blocksparse/native mask/small/float32/nan",
    ),
    # ---------------------------------------------------------------- kernels/decode.py
    Mutation(
        "the last step stands where it would without its shift back",
        "kernels.decode:_Step.at",
        "jnp.minimum(j * s.block_kv, s.S - s.block_kv)",
        "j * s.block_kv",
        "blocksparse/native gqa+causal+kv_lengths/decode/float32",
    ),
    Mutation(
        "the last step counts again what the one before has read",
        "kernels.decode:_Step.finish",
        "at.col >= j * s.block_kv",
        "at.col >= 0",
        "blocksparse/native plain/decode/bfloat16",
    ),
    Mutation(
        "in decoding the soft cap is not multiplied back",
        "kernels.decode:_Step.finish",
        "self.soft_cap * jnp.tanh",
        "jnp.tanh",
        "blocksparse/native soft_cap+kv_lengths+bias_heads/decode/bfloat16",
    ),
    Mutation(
        "in decoding a bias of -inf is a bias of 0",
        "kernels.decode:_Step.finish",
        "parts.append(bias != NEG_INF)",
        "pass",
        "blocksparse/native gqa+mask+bias_blocks/decode/float32",
    ),
    Mutation(
        "in decoding the sum of values is not brought to the new highest logit",
        "kernels.decode:decode",
        "output * keep[..., None] + weighted",
        "output + weighted",
        "blocksparse/native gqa+causal+kv_lengths/decode/float32",
    ),
    Mutation(
        "in decoding the guard of what has seen nothing yet is gone",
        "kernels.decode:decode",
        "jnp.where(new == NEG_INF, 0, new)",
        "new",
        "flash/native mask_late/decode/float32",
    ),
    Mutation(
        "in decoding a key of NaN reaches the logits of other heads",
        "kernels.decode:_Product.logits",
        "lambda: logits, by_head)",
        "lambda: logits, lambda: logits)",
        "blocksparse/native gqa+mask+bias_blocks/decode/float32/nan",
    ),
    Mutation(
        "in decoding values that nothing sees are multiplied by 0, NaN too",
        "kernels.decode:_Product.weighted",
        "lambda: found, without_unseen)",
        "lambda: found, lambda: found)",
        "blocksparse/native gqa+causal+kv_lengths/decode/float32/nan",
    ),
    # ---------------------------------------------------------------- kernels/tile_work.py
    Mutation(
        "a mask of run-time data leaves tiles full where it was not asked",
        "kernels.tile_work:tile_kinds",
        "if never_full or len(asked) < len(parts):",
        "if never_full:",
        "flash/native segments/small/float32",
    ),
    Mutation(
        "a tile with columns of padding is full",
        "kernels.tile_work:tile_kinds",
        "if tiling.S % tiling.block_kv:",
        "if tiling.S < tiling.block_kv:",
        "blocksparse/native plain/tiles/float32",
    ),
    Mutation(
        "the run of full tiles ends one tile late",
        "kernels.tile_work:_runs",
        "full_first + full,",
        "full_first + full + 1,",
        "tile_work_visits_what_is_visible",
    ),
    Mutation(
        "hidden tiles are listed before partial ones",
        "kernels.tile_work:_lists",
        "xp.where(may, 1, 2)",
        "xp.where(may, 2, 1)",
        "tile_work_visits_what_is_visible",
    ),
    Mutation(
        "two runs of visible tiles count as one",
        "kernels.tile_work:_contiguous",
        "<= 1",
        "<= 2",
        "tile_work_visits_what_is_visible",
    ),
    Mutation(
        "who is hidden from all is counted with windows one key short",
        "kernels.tile_work:hidden_from_all",
        "query + right + 1",
        "query + right",
        "hidden_from_all_is_what_the_array_says",
    ),
    # ---------------------------------------------------------------- kernels/dense.py, sinks.py, visibility.py
    Mutation(
        "the scale is dropped",
        "kernels.dense:dense_attention",
        "logits = logits * scale",
        "pass",
        "vanilla/native plain/small/float32",
    ),
    Mutation(
        "the bias is added before the soft cap",
        "kernels.dense:dense_attention",
        "logits = soft_cap * jnp.tanh(logits / soft_cap)\n    if bias is not None:\n        logits = logits + bias\n",
        "logits = soft_cap * jnp.tanh((logits if bias is None else logits + bias) / soft_cap)\n",
        "vanilla/native soft_cap+bias/small/bfloat16",
    ),
    Mutation(
        "kept weights are not divided by the share that is kept",
        "kernels.dense:dense_attention",
        "weights / (1.0 - dropout_probability)",
        "weights",
        "vanilla/native dropout/small/float32",
    ),
    Mutation(
        "what nothing sees is not zeroed",
        "kernels.dense:dense_attention",
        "query, key, value = zeroed(query, key, value, *visibility(allowed, K))",
        "pass",
        "vanilla/native mask/small/float32/nan",
    ),
    Mutation(
        "the weights that are returned leave out the sinks",
        "kernels.dense:dense_attention",
        "weights * shares(highest, total, sinks)[0].swapaxes(1, 2)[..., None]",
        "weights",
        "vanilla/native sinks/small/float32",
    ),
    Mutation(
        "the guard of empty rows is gone: -inf - -inf",
        "kernels.dense:_softmax",
        "jnp.where(highest == -jnp.inf, 0, highest)",
        "highest",
        "vanilla/native mask/small/float32",
    ),
    Mutation(
        "sinks join the denominator twice",
        "kernels.sinks:shares",
        "of_keys + jnp.sum(of_sinks, axis=-1)",
        "of_keys + 2 * jnp.sum(of_sinks, axis=-1)",
        "vanilla/native sinks/small/float32",
    ),
    Mutation(
        "exponentials are taken relative to the keys alone, so strong sinks overflow",
        "kernels.sinks:shares",
        "jnp.maximum(anchor, jnp.max(sinks, axis=-1))",
        "anchor",
        "vanilla/native sinks_strong/small/float32",
    ),
    Mutation(
        "the derivative by a sink has the other sign",
        "kernels.sinks:_output_with_sinks_jvp",
        "tangent - rounded",
        "tangent + rounded",
        "vanilla/native sinks/small/float32",
    ),
    Mutation(
        "a key is seen only if the first query head of its group sees it",
        "kernels.visibility:visibility",
        "jnp.any(by_head, (2, 3))",
        "jnp.any(by_head[:, :, :1], (2, 3))",
        "vanilla/native gqa+mask/square/float16",
    ),
    # ---------------------------------------------------------------- kernels/splash_masks.py
    Mutation(
        "a tile with columns of padding is full",
        "kernels.splash_masks:static_tiles",
        "np.minimum(kinds[..., -1], PARTIAL)",
        "np.minimum(kinds[..., -1], FULL)",
        "blocksparse/tpu plain/small/float32",
    ),
    Mutation(
        "the first column of padding is visible",
        "kernels.splash_masks:KernelFunction.__call__",
        "key < self.end",
        "key <= self.end",
        "blocksparse/tpu window/small/float32",
    ),
    Mutation(
        "the offset of a static mask is ignored inside the kernel",
        "kernels.splash_masks:evaluate",
        "mask.allowed(rows + mask.stated_offset, cols)",
        "mask.allowed(rows, cols)",
        "blocksparse/tpu causal+offset/small/float32",
    ),
    Mutation(
        "keys of padding keep their negative id, that of queries of padding",
        "kernels.splash_masks:segment_ids",
        "kv_real & (part.kv >= 0)",
        "kv_real",
        "blocksparse/tpu segments/small/float32",
    ),
    Mutation(
        "columns of padding belong to segment 0",
        "kernels.splash_masks:_by_sample",
        "constant_values=fill",
        "constant_values=0",
        "blocksparse/tpu segments/small/float32",
    ),
    Mutation(
        "an interval of keys is one short",
        "kernels.splash_masks:_numbered",
        "last - first + 1",
        "last - first",
        "splash_intervals_are_the_mask",
    ),
    Mutation(
        "a step beyond the visible tiles repeats the last one",
        "kernels.splash_masks:_ordered",
        "step < count",
        "step <= count",
        "splash_schedule_visits_what_is_visible",
    ),
    # ---------------------------------------------------------------- masks.py
    Mutation(
        "a query does not see itself",
        "masks:Causal.allowed",
        "key <= query",
        "key < query",
        "vanilla/native causal/small/float32",
    ),
    Mutation(
        "a tile that its first row sees to the last row's place is full",
        "masks:Causal.span",
        "k_last <= q_first",
        "k_last <= q_last",
        "blocksparse/native causal/tiles/float32",
    ),
    Mutation(
        "a tile of which only the corner is visible is empty",
        "masks:Causal.span",
        "k_first <= q_last",
        "k_first < q_last",
        "bounds_hold_what_the_array_says",
    ),
    Mutation(
        "a window is one key short on the left",
        "masks:Window.allowed",
        "key >= query - self.left",
        "key > query - self.left",
        "vanilla/native window/small/float32",
    ),
    Mutation(
        "a tile at the left end of a window is empty",
        "masks:Window.span",
        "farthest >= -self.left",
        "farthest > -self.left",
        "bounds_hold_what_the_array_says",
    ),
    Mutation(
        "a tile at the left end of a window is full",
        "masks:Window.span",
        "nearest >= -self.left",
        "farthest >= -self.left",
        "blocksparse/native window/tiles/float32",
    ),
    Mutation(
        "a tile that a prefix ends in is full",
        "masks:PrefixLM.span",
        "(k_last < self.prefix)",
        "(k_first < self.prefix)",
        "bounds_hold_what_the_array_says",
    ),
    Mutation(
        "a tile of keys from two chunks is full",
        "masks:Chunked.span",
        "(q_low == k_high)",
        "(q_low == k_low)",
        "bounds_hold_what_the_array_says",
    ),
    Mutation(
        "padding attends padding",
        "masks:Segments.dense",
        "(q == kv) & (q >= 0)",
        "q == kv",
        "vanilla/native segments/small/float32",
    ),
    Mutation(
        "a tile of keys from two segments is full",
        "masks:Segments.bounds",
        "(q_low == k_high)",
        "(q_low == k_low)",
        "blocksparse/native segments/tiles/float32",
    ),
    Mutation(
        "ids of the queries are those of the first batch row",
        "masks:Segments.tile",
        "slice_within(self.q, (at.batch, at.row)",
        "slice_within(self.q, (0, at.row)",
        "blocksparse/native segments/tiles/float32",
    ),
    Mutation(
        "a tile that a length ends in is full",
        "masks:Lengths.bounds",
        "must & (last < lengths)",
        "must & (first < lengths)",
        "blocksparse/native kv_lengths/tiles/float32",
    ),
    Mutation(
        "lengths of the keys are those of the first batch row",
        "masks:Lengths.tile",
        "_at(self.kv, at.batch)",
        "_at(self.kv, 0)",
        "blocksparse/native kv_lengths/tiles/float32",
    ),
    Mutation(
        "offsets are those of the first batch row",
        "masks:_at",
        "value[0] if value.shape[0] == 1 else",
        "value[0] if value.shape[0] else",
        "blocksparse/native causal+offset_rows/tiles/float32",
    ),
    Mutation(
        "the first row of a tile stands at the offset",
        "masks:Positional.tile",
        "(at.row + _at(self._offset(), at.batch))",
        "_at(self._offset(), at.batch)",
        "blocksparse/native causal/tiles/float32",
    ),
    Mutation(
        "the tile of an array is that of the first batch row",
        "masks:Dense.tile",
        "(at.batch, at.head, at.row, at.col)",
        "(0, at.head, at.row, at.col)",
        "blocksparse/native mask_samples/tiles/float32",
    ),
    Mutation(
        "a tile of an array is full when it is not empty",
        "masks:Dense.bounds",
        "_reduce_blocks(every, axis, block, count, True, xp)",
        "_reduce_blocks(every, axis, block, count, False, xp)",
        "blocksparse/native mask/tiles/float32",
    ),
    Mutation(
        "all masks of an intersection but one suffice",
        "masks:And.dense",
        "operator.and_",
        "operator.or_",
        "vanilla/native scale+causal+window_left+mask_chunked/tiles/bfloat16",
    ),
    Mutation(
        "a tile is visible only where every mask of a union may be",
        "masks:Or.bounds",
        "functools.reduce(operator.or_, may)",
        "functools.reduce(operator.and_, may)",
        "blocksparse/native soft_cap+mask_or+bias_blocks/tiles/float16",
    ),
    Mutation(
        "the bounds of a negation are not exchanged",
        "masks:Not.bounds",
        "~must, ~may",
        "~may, ~must",
        "bounds_hold_what_the_array_says",
    ),
    Mutation(
        "a static mask that shows something is dropped",
        "masks:_sees_everything",
        "_, must =",
        "must, _ =",
        "vanilla/native causal/small/float32",
    ),
    # ---------------------------------------------------------------- request.py
    Mutation(
        "in decoding the query is the first token",
        "request:default_offset",
        "return S - 1",
        "return 0",
        "vanilla/native gqa+causal+kv_lengths/decode/float32",
    ),
    Mutation(
        "a scale that is stated is ignored",
        "request:_spec",
        "D**-0.5 if scale is None else scale",
        "D**-0.5",
        "vanilla/native scale+causal+window_left+mask_chunked/tiles/bfloat16",
    ),
    Mutation(
        "a soft cap is no feature, so that a route without it is given one",
        "request:_spec",
        "Feature.SOFT_CAP: soft_cap is not None",
        "Feature.SOFT_CAP: False",
        "flash/tpu refuse/soft_cap",
    ),
    Mutation(
        "all heads have the sink of the first",
        "request:_sinks",
        "sinks[:, None] if sinks.ndim == 1",
        "sinks[:1, None] if sinks.ndim == 1",
        "vanilla/native sinks/small/float32",
    ),
    Mutation(
        "a window of one number is open to the left alone",
        "request:_window",
        "else (window, window)",
        "else (window, 0)",
        "vanilla/native window_int/small/bfloat16",
    ),
    Mutation(
        "beside a mask of data, causality is dropped",
        "request:_mask",
        '[*_positions(given["causal"], window), *parts]',
        "parts",
        "vanilla/native causal+segments/small/bfloat16",
    ),
    Mutation(
        "dropout is active in deterministic calls",
        "request:_dropout",
        'if given["deterministic"] or probability == 0.0:',
        "if probability == 0.0:",
        "flash/native inactive_dropout",
    ),
    # ---------------------------------------------------------------- operation.py, planner.py, rules.py
    Mutation(
        "features that a route does not declare refuse nothing",
        "operation:Route.refusals",
        "sorted(spec.features - self.declaration.supports)",
        "()",
        "flash/native refuse/dropout",
    ),
    Mutation(
        "the first rule of a route is ignored",
        "operation:Route.refusals",
        "in self.declaration.rules:",
        "in self.declaration.rules[1:]:",
        "blocksparse/tpu refuse/Dtypes",
    ),
    Mutation(
        "rules are asked about float32 whatever the dtype is",
        "operation:Route.refusals",
        "rule.check(spec,",
        "rule.check(dataclasses.replace(spec, dtype=spec.softmax_dtype),",
        "blocksparse/tpu refuse/Dtypes",
    ),
    Mutation(
        "a plan is kept although another operation took the name",
        "planner:make_plan",
        "registry.generation()",
        "0",
        "a_plan_follows_what_is_registered",
    ),
    Mutation(
        "the planner takes the first route, refused or not",
        "planner:_make_plan",
        "if chosen is None and decision.accepted:",
        "if chosen is None:",
        "flash/native refuse/dropout",
    ),
    Mutation(
        "a backend that is asked for is ignored",
        "planner:backends_for",
        "backend = metadata.backend",
        "backend = None",
        "a_backend_that_is_asked_for_is_planned",
    ),
    Mutation(
        "the largest head dim is refused",
        "rules:HeadDim.check",
        "dim > limit",
        "dim >= limit",
        "rules_refuse_beyond_their_limit_and_not_at_it",
    ),
    Mutation(
        "the head dim of the value is not looked at",
        "rules:HeadDim.check",
        '("value head_dim", spec.Dv)',
        '("value head_dim", spec.D)',
        "rules_refuse_beyond_their_limit_and_not_at_it",
    ),
    Mutation(
        "the smallest compute capability is refused",
        "rules:ComputeCapability.check",
        "found < self.minimum",
        "found <= self.minimum",
        "rules_refuse_beyond_their_limit_and_not_at_it",
    ),
    Mutation(
        "the key length is not looked at",
        "rules:LengthMultiple.check",
        '("key length", spec.S)',
        '("key length", spec.T)',
        "rules_refuse_beyond_their_limit_and_not_at_it",
    ),
    Mutation(
        "a bias of another dtype is taken, and rounded",
        "rules:BiasDtype.check",
        "spec.bias_dtype == spec.dtype",
        "spec.bias_dtype != spec.dtype",
        "rules_refuse_beyond_their_limit_and_not_at_it",
    ),
    # ---------------------------------------------------------------- sequence.py
    Mutation(
        "the bias of a hop begins at column 0",
        "sequence:bias_part",
        "row, col)",
        "row, 0)",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "the bias of the second piece is that of the first",
        "sequence:_Pair.attended",
        "self.row_piece * self.T",
        "0",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "keys in parts are masked as if each part came first",
        "sequence:merged",
        "mask.cut(0, T, col, S,",
        "mask.cut(0, T, 0, S,",
        "mesh keys_merged",
    ),
    Mutation(
        "merged outputs are summed without their shares",
        "sequence:merged",
        "found.output.astype(share.dtype) * share[..., None]",
        "found.output.astype(share.dtype)",
        "mesh keys_merged",
    ),
    Mutation(
        "the merged logsumexp is that of the strongest part",
        "sequence:merged",
        "jax.nn.logsumexp(",
        "jnp.max(",
        "mesh keys_merged",
    ),
    Mutation(
        "the second piece of a device is taken to stand one further ahead",
        "sequence:_Ring.starts",
        "last * length",
        "(last - 1) * length",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "keys travel the other way round",
        "sequence:_Ring.passed_on",
        "(device, (device + 1) % self.devices)",
        "((device + 1) % self.devices, device)",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "the two halves of every part change places on the way into zigzag order",
        "sequence:_Ring._moves",
        "2 * device + half",
        "2 * device + 1 - half",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "on even devices the two pieces lie the wrong way round",
        "sequence:_Ring._swapped",
        "% 2 == 1",
        "% 2 == 0",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "the first piece of an output is not moved back",
        "sequence:_Ring.out_of_order",
        "jax.lax.ppermute(half, self.axes, [(b, a) for a, b in self._moves(n)])",
        "jax.lax.ppermute(half, self.axes, [(b, a) for a, b in self._moves(n)]) if n else half",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "the logsumexp stays in zigzag order",
        "sequence:ring",
        "ring.out_of_order(logsumexp)",
        "logsumexp",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "the rows of a bias stay in the order of positions",
        "sequence:ring",
        "ring.rows_into_order(bias)",
        "bias",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "the second keys of a device are the first",
        "sequence:_Pair.cols",
        "self.col_piece * self.S, (self.col_piece + 1) * self.S",
        "0, self.S",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "masks are cut where the queries lie on their device",
        "sequence:_Pair.of_mask",
        "mask.cut(self.row, ",
        "mask.cut(0, ",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "masks are cut where the keys lie on their device",
        "sequence:_Pair.of_mask",
        "self.T, self.col, self.S",
        "self.T, 0, self.S",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "what the mask hides is attended and what it shows is passed on",
        "sequence:_Pair.if_visible",
        "seen, lambda: otherwise",
        "lambda: otherwise, seen",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "a piece is attended only if every batch row sees some of it",
        "sequence:_Pair.if_visible",
        "jnp.any(",
        "jnp.all(",
        "mesh ring_with_sinks_forward",
    ),
    Mutation(
        "pieces that the mask hides are attended too",
        "sequence:_Pair.if_visible",
        "jnp.any(jnp.asarray(may))",
        "True",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "the keys of a hop are taken for those of the device on the other side",
        "sequence:_forward",
        "(here - step)",
        "(here + step)",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "the last keys are taken for the device's own",
        "sequence:_forward",
        "(here + 1) % ring.devices",
        "here",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "the keys go round one hop too few",
        "sequence:_forward",
        "ring.devices - 1, dtype",
        "ring.devices - 2, dtype",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "what was found before a hop is merged without its share",
        "sequence:_forward",
        "output * _share(logsumexp, whole)[..., None] + new",
        "output + new",
        "mesh ring_with_sinks_forward",
    ),
    Mutation(
        "what a hop finds is merged without its share",
        "sequence:_forward",
        "_share(found.logsumexp, whole)[..., None]",
        "1",
        "mesh ring_with_sinks_forward",
    ),
    Mutation(
        "before the first hop the logsumexp is 0, not -inf",
        "sequence:_forward",
        "NEG_INF",
        "0.0",
        "mesh pieces_a_ring_attends",
    ),
    Mutation(
        "backward the keys of a hop are taken for those of the device on the other side",
        "sequence:_ring_bwd",
        "(here - step)",
        "(here + step)",
        "mesh ring_with_sinks",
    ),
    Mutation(
        "gradients are passed on one hop too few",
        "sequence:_ring_bwd",
        "jnp.arange(ring.devices, ",
        "jnp.arange(ring.devices - 1, ",
        "mesh ring_with_sinks",
    ),
    Mutation(
        "gradients of keys stay where they were found",
        "sequence:_ring_bwd",
        "d_key, d_value = ring.passed_on((d_key, d_value))",
        "pass",
        "mesh ring_with_sinks",
    ),
    Mutation(
        "the cotangent of the logsumexp is dropped",
        "sequence:_ring_bwd",
        " - d_logsumexp",
        "",
        "mesh ring_with_sinks",
    ),
    Mutation(
        "every hop gets the whole cotangent of the output",
        "sequence:_ring_bwd",
        "pair.rows(d_output) * share[..., None]",
        "pair.rows(d_output)",
        "mesh ring_with_sinks",
    ),
    Mutation(
        "the cotangent of a hop's logsumexp leaves out what its share depends on",
        "sequence:_ring_bwd",
        "own - share * pair.rows(through_sum)",
        "own",
        "mesh ring_with_sinks",
    ),
    Mutation(
        "the gradients of the last hop alone are kept",
        "sequence:_ring_bwd",
        "old + new.astype(old.dtype)",
        "new.astype(old.dtype)",
        "mesh ring_with_sinks",
    ),
    # ---------------------------------------------------------------- sharding.py
    Mutation(
        "code inside a shard_map over the mesh is taken to be outside",
        "sharding:is_local",
        "bool(set(manual) & set(mesh.axis_names))",
        "False",
        "inside_a_shard_map_arrays_are_local",
    ),
    Mutation(
        "a mesh axis that does not divide is kept if it divides by itself",
        "sharding:layout",
        "if size % parts == 0",
        "if size % sizes[axis] == 0",
        "what_does_not_divide_is_replicated_or_refused",
    ),
    Mutation(
        'on_indivisible="error" is ignored',
        "sharding:_replicate",
        'metadata.on_indivisible == "error"',
        "False",
        "what_does_not_divide_is_replicated_or_refused",
    ),
    Mutation(
        "ulysses leaves the other head axes out of account",
        "sharding:_refuse_ulysses",
        "head_parts * n",
        "n",
        "a_way_that_cannot_be_gone_is_refused",
    ),
    Mutation(
        "decoding is merged whatever it asks for",
        "sharding:_way",
        'return ("", ()) if in_parts else ("merge", ())',
        'return ("merge", ())',
        "a_way_that_cannot_be_gone_is_refused",
    ),
    Mutation(
        "dropout is no obstacle to a merge",
        "sharding:_obstacles",
        "if spec.dropout:",
        "if False:",
        "a_way_that_cannot_be_gone_is_refused",
    ),
    Mutation(
        "weights are no obstacle to a merge",
        "sharding:_obstacles",
        "if spec.want_weights:",
        "if False:",
        "a_way_that_cannot_be_gone_is_refused",
    ),
    Mutation(
        "chunks are cut by the pieces of a ring",
        "sharding:_obstacles",
        "(spec.S // n) % leaf.size",
        "spec.S % leaf.size",
        "a_way_that_cannot_be_gone_is_refused",
    ),
    Mutation(
        "windows are attended in zigzag order",
        "sharding:_is_uneven",
        " and not any(isinstance(leaf, Window) for leaf in leaves)",
        "",
        "a_way_that_cannot_be_gone_is_refused",
    ),
    Mutation(
        "chunks are cut by the pieces of zigzag order",
        "sharding:_is_uneven",
        "(2 * n)) % leaf.size",
        "n) % leaf.size",
        "a_way_that_cannot_be_gone_is_refused",
    ),
    Mutation(
        "a route is not asked about the offset of its part",
        "sharding:_local_spec",
        "features |= {Feature.OFFSET} if",
        "features |= set() if",
        "a_route_is_asked_about_one_devices_part",
    ),
    Mutation(
        "a route whose parts are merged is not asked for the logsumexp",
        "sharding:_local_spec",
        "(features | {Feature.LOGSUMEXP})",
        "features",
        "a_route_is_asked_about_one_devices_part",
    ),
    Mutation(
        "a device that needs one key head is said to get all",
        "sharding:_needed_heads",
        "spec.groups % H == 0",
        "False",
        "a_route_is_asked_about_one_devices_part",
    ),
    Mutation(
        "dropout keys are the same for all batch rows",
        "sharding:run_sharded",
        "in (*split.batch, ",
        "in (",
        "mesh dropout_of_each_part",
    ),
    Mutation(
        "dropout keys are the same for all heads",
        "sharding:run_sharded",
        "*split.heads, *split.query_axes",
        "*split.query_axes",
        "mesh dropout_of_each_part",
    ),
    Mutation(
        "dropout keys are the same for all queries",
        "sharding:run_sharded",
        ", *split.query_axes):",
        "):",
        "mesh dropout_of_each_part",
    ),
    Mutation(
        "rows of biases and masks are on every device, where each takes the first",
        "sharding:_spec_of",
        '"rows": _name(split.query_axes)',
        '"rows": None',
        "mesh ring_with_sinks_forward",
    ),
    Mutation(
        "masks are cut as if the queries were the first",
        "sharding:run_sharded",
        "mask.cut(row, ",
        "mask.cut(0, ",
        "mesh keys_gathered",
    ),
    Mutation(
        "a device's key head is that of the next group",
        "sharding:_heads_read",
        "first // spec.groups, 1",
        "first // spec.groups + 1, 1",
        "mesh heads_of_one_key_head",
    ),
    Mutation(
        "a device's query heads each read a key head of their own",
        "sharding:_heads_read",
        "(first + jnp.arange(local.H)) // spec.groups",
        "first // spec.groups + jnp.arange(local.H)",
        "mesh heads_of_several_key_heads",
    ),
    Mutation(
        "the heads of a device are counted in key heads",
        "sharding:_heads_read",
        "* local.H",
        "* local.K",
        "mesh heads_of_one_key_head",
    ),
    Mutation(
        "sinks join on each device, and at the end",
        "sharding:_in_parts",
        "mask, bias, None, None, local)",
        "mask, bias, sinks, None, local)",
        "mesh ring_with_sinks_forward",
    ),
    Mutation(
        "sinks are left out of the sum",
        "sharding:_in_parts",
        "if sinks is not None:",
        "if False:",
        "mesh ring_with_sinks_forward",
    ),
)


def table() -> str:
    """Return the list of faults for the page."""
    over_mesh, checks = (sum(mutation.route == route for mutation in MUTATIONS) for route in (MESH, ""))
    cases = len(MUTATIONS) - over_mesh - checks
    lines = [
        f"{len(MUTATIONS)} faults: {cases} convicted by a case of the selftest, {over_mesh} by one over a mesh, "
        f"{checks} by a check.",
        "",
        "| function | fault | convicted by |",
        "|---|---|---|",
    ]
    for mutation in MUTATIONS:
        module, _, name = mutation.where.partition(":")
        said = mutation.case.replace("_", " ")
        by = {"": said, MESH: f"over a mesh: {said}"}.get(mutation.route, f"`{mutation.case}` of `{mutation.route}`")
        lines.append(f"| `{module.replace('.', '/')}.py` `{name}` | {mutation.fault} | {by} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the list between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
