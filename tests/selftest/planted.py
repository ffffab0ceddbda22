"""Kernels with one fault each. `Right` is the law in steps; each other class replaces one step by a mistake from the field."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from attention_ops import AttentionOutput, AttentionRequest, Feature, OperationImpl, forward, masks


class Right(OperationImpl):
    """Dense attention as the law has it. `caught_by` names, in the faulty ones, a case and the quantity that must convict it."""

    name = "planted_right"
    caught_by: ClassVar[tuple[tuple[str, str], ...]] = ()

    @forward(supports=Feature.ALL)
    def forward_native(self, request: AttentionRequest) -> Any:
        request = self.before(request)
        allowed = self.allowed(request)
        query, key, value = self.unseen_zeroed(request, allowed)
        logits = self.logits(request, self.grouped(request, query, key), allowed)
        weights, logsumexp = self.softmax(request, logits, allowed)
        output = self.output(request, self.dropped(request, weights), value, allowed)
        return AttentionOutput(output.astype(request.spec.dtype), weights, logsumexp.swapaxes(1, 2))

    def before(self, request: AttentionRequest) -> AttentionRequest:
        return request

    def allowed(self, request: AttentionRequest) -> Any:
        s, mask = request.spec, self.mask(request)
        allowed = jnp.ones((1, 1, s.T, s.S), bool) if mask is None else mask.dense(s.T, s.S)
        allowed = allowed if request.bias is None else allowed & (request.bias != -jnp.inf)
        return jnp.broadcast_to(allowed, (s.B, s.H, s.T, s.S))

    def mask(self, request: AttentionRequest) -> Any:
        return request.mask

    def repeated(self, request: AttentionRequest, x: Any) -> Any:
        return jnp.repeat(x, request.spec.groups, axis=2)

    def unseen_zeroed(self, request: AttentionRequest, allowed: Any) -> Any:
        s = request.spec
        seen = allowed.reshape(s.B, s.K, s.groups, s.T, s.S).any((2, 3)).swapaxes(1, 2)[..., None]
        sees = allowed.any(3).swapaxes(1, 2)[..., None]
        q, k, v = (x.astype(jnp.float32) for x in (request.query, request.key, request.value))
        return jnp.where(sees, q, 0), jnp.where(seen, k, 0), jnp.where(seen, v, 0)

    def grouped(self, request: AttentionRequest, query: Any, key: Any) -> Any:
        return jnp.einsum("bthd,bshd->bhts", query, self.repeated(request, key), precision="highest")

    def scale(self, request: AttentionRequest) -> float:
        return request.scale

    def capped(self, request: AttentionRequest, logits: Any) -> Any:
        cap = request.soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def bias(self, request: AttentionRequest) -> Any:
        if request.bias is None:
            return 0.0
        return jnp.where(request.bias == -jnp.inf, 0, request.bias).astype(jnp.float32)

    def logits(self, request: AttentionRequest, products: Any, allowed: Any) -> Any:
        logits = self.capped(request, products * self.scale(request)) + self.bias(request)
        return jnp.where(allowed, logits, -jnp.inf)

    def sinks(self, request: AttentionRequest) -> Any:
        return None if request.sinks is None else request.sinks.astype(jnp.float32)[None, :, None, :]

    def softmax(self, request: AttentionRequest, logits: Any, allowed: Any) -> Any:
        sinks, highest = self.sinks(request), self.highest(logits)
        logsumexp = self.logsumexp(logits, highest, sinks)
        total = logsumexp
        if sinks is not None:
            total = jnp.logaddexp(logsumexp, jax.nn.logsumexp(sinks, axis=-1))
        weights = jnp.exp(logits - jnp.where(total == -jnp.inf, 0, total)[..., None])
        return weights, logsumexp

    def highest(self, logits: Any) -> Any:
        highest = jax.lax.stop_gradient(logits.max(-1))
        return jnp.where(highest == -jnp.inf, 0, highest)

    def logsumexp(self, logits: Any, highest: Any, sinks: Any) -> Any:
        total = jnp.exp(logits - highest[..., None]).sum(-1)
        return jnp.where(total == 0, -jnp.inf, highest + jnp.log(jnp.where(total == 0, 1, total)))

    def dropped(self, request: AttentionRequest, weights: Any) -> Any:
        if request.dropout is None:
            return weights
        keep = jax.random.bernoulli(request.dropout.key, 1 - request.dropout.probability, weights.shape)
        return jnp.where(keep, weights / (1 - request.dropout.probability), 0)

    def output(self, request: AttentionRequest, weights: Any, value: Any, allowed: Any) -> Any:
        return jnp.einsum("bhts,bshd->bthd", weights, self.repeated(request, value), precision="highest")


def _leaves(mask: Any, kind: type, change: Any) -> Any:
    return None if mask is None else mask.map_leaves(lambda leaf: change(leaf) if isinstance(leaf, kind) else leaf)


def _forward_of(one: Any, gradient_of: Any) -> Any:
    """Return the value of `one` with the derivative of `gradient_of`."""
    return jax.lax.stop_gradient(one - gradient_of) + gradient_of


# ---------------------------------------------------------------- masks


class MaskIgnored(Right):
    name = "planted_mask_ignored"
    caught_by = (("mask/small/float32", "output"), ("mask_2d/small/float32", "output"))

    def mask(self, request):
        everywhere = masks.Dense(jnp.ones((1, 1), bool))
        return _leaves(request.mask, masks.Dense, lambda leaf: dataclasses.replace(everywhere))


class FirstSampleMask(Right):
    """Keras' splash path."""

    name = "planted_first_sample_mask"
    caught_by = (("mask_samples/small/float32", "output"), ("mask_keys/small/float32", "output"))

    def allowed(self, request):
        allowed = super().allowed(request)
        return jnp.broadcast_to(allowed[:1], allowed.shape)


class FirstHeadMask(Right):
    name = "planted_first_head_mask"
    caught_by = (("mask_heads/small/float32", "output"),)

    def allowed(self, request):
        allowed = super().allowed(request)
        return jnp.broadcast_to(allowed[:, :1], allowed.shape)


class FirstRowMask(Right):
    """The mask of a chunk's first row for all its rows."""

    name = "planted_first_row_mask"
    caught_by = (("mask_shared/small/float32", "output"),)

    def allowed(self, request):
        allowed = super().allowed(request)
        return jnp.broadcast_to(allowed[:, :, :1], allowed.shape)


class BroadcastMaskIgnored(Right):
    """A mask is used only if its batch size is that of the query."""

    name = "planted_broadcast_mask_ignored"
    caught_by = (("mask_heads/small/float32", "output"), ("mask_shared/small/float32", "output"))

    def mask(self, request):
        everywhere = masks.Dense(jnp.ones((1, 1), bool))
        return _leaves(request.mask, masks.Dense, lambda leaf: leaf if leaf.array.shape[0] == request.spec.B else everywhere)


class CausalReplacesMask(Right):
    name = "planted_causal_replaces_mask"
    caught_by = (("causal+mask/small/float32", "output"),)

    def mask(self, request):
        parts = () if request.mask is None else request.mask.conjuncts()
        causal = [part for part in parts if isinstance(part, masks.Causal)]
        return causal[0] if causal else request.mask


class WindowTooWide(Right):
    name = "planted_window_too_wide"
    caught_by = (("window/small/float32", "output"), ("window_left/small/float32", "output"))

    def mask(self, request):
        return _leaves(request.mask, masks.Window, lambda leaf: dataclasses.replace(leaf, left=leaf.left + 1))


class WindowSwapped(Right):
    name = "planted_window_swapped"
    caught_by = (("window/small/float32", "output"),)

    def mask(self, request):
        return _leaves(request.mask, masks.Window, lambda leaf: dataclasses.replace(leaf, left=leaf.right, right=leaf.left))


class CausalTopLeft(Right):
    name = "planted_causal_top_left"
    caught_by = (("causal+offset/small/float32", "output"), ("causal+offset_traced/small/float32", "output"))

    def mask(self, request):
        return _leaves(request.mask, masks.Causal, lambda leaf: dataclasses.replace(leaf, offset=0))


class FirstSampleOffset(Right):
    name = "planted_first_sample_offset"
    caught_by = (("causal+offset_rows/small/float32", "output"),)

    def mask(self, request):
        def first(leaf):
            static = isinstance(leaf.offset, int) or leaf.offset.ndim == 0
            return leaf if static else dataclasses.replace(leaf, offset=leaf.offset[0])

        return _leaves(request.mask, masks.Causal, first)


class KeyLengthsIgnored(Right):
    name = "planted_key_lengths_ignored"
    caught_by = (("lengths/small/float32", "output"), ("kv_lengths/small/float32", "output"))

    def mask(self, request):
        return _leaves(request.mask, masks.Lengths, lambda leaf: masks.Lengths(leaf.q, None))


class QueryLengthsIgnored(Right):
    name = "planted_query_lengths_ignored"
    caught_by = (("q_lengths/small/float32", "output"),)

    def mask(self, request):
        return _leaves(request.mask, masks.Lengths, lambda leaf: masks.Lengths(None, leaf.kv))


class PaddingAttendsPadding(Right):
    """A negative segment id equals a negative segment id."""

    name = "planted_padding_attends_padding"
    caught_by = (("segments/small/float32", "output"),)

    def mask(self, request):
        return _leaves(request.mask, masks.Segments, lambda leaf: masks.Segments(leaf.q % 64, leaf.kv % 64))


class UnseenLeak(Right):
    name = "planted_unseen_leak"
    caught_by = (
        ("lengths/small/float32/nan", "output"),
        ("mask/small/float32/nan", "output"),
        ("mask/small/float32/nan", "d_query"),
        ("segments/small/float32/nan", "output"),
        ("causal+offset/small/float32/nan", "output"),
        ("bias_blocks/small/float32/nan", "output"),
    )

    def unseen_zeroed(self, request, allowed):
        return tuple(x.astype(jnp.float32) for x in (request.query, request.key, request.value))


class EmptyRowIsMean(Right):
    """A finite number for -inf, as in jax.nn."""

    name = "planted_empty_row_is_mean"
    caught_by = (("lengths/small/float32", "output"), ("mask/small/float32", "output"))

    def output(self, request, weights, value, allowed):
        weights = jnp.where(allowed.any(3, keepdims=True), weights, 1 / request.spec.S)
        return super().output(request, weights, value, allowed)


# ---------------------------------------------------------------- scale, cap, bias


class ScaleTwice(Right):
    name = "planted_scale_twice"
    caught_by = (("plain/small/float32", "output"), ("scale/small/float32", "output"))

    def scale(self, request):
        return request.scale**2


class ScaleIgnored(Right):
    name = "planted_scale_ignored"
    caught_by = (("scale/small/float32", "output"),)

    def scale(self, request):
        return request.spec.D**-0.5


class ScaleOfPaddedDim(Right):
    name = "planted_scale_of_padded_dim"
    caught_by = (("plain/odd/float32", "output"),)

    def scale(self, request):
        return (-(-request.spec.D // 8) * 8) ** -0.5


class CapIgnored(Right):
    name = "planted_cap_ignored"
    caught_by = (("soft_cap/small/float32", "output"),)

    def capped(self, request, logits):
        return logits


class CapAfterBias(Right):
    """ejkernel's order."""

    name = "planted_cap_after_bias"
    caught_by = (("soft_cap+bias/small/float32", "output"),)

    def logits(self, request, products, allowed):
        logits = self.capped(request, products * request.scale + self.bias(request))
        return jnp.where(allowed, logits, -jnp.inf)


class CapAfterMask(Right):
    name = "planted_cap_after_mask"
    caught_by = (("soft_cap+causal/small/float32", "output"),)

    def logits(self, request, products, allowed):
        scaled = jnp.where(allowed, products * request.scale, -1e30)
        return self.capped(request, scaled) + self.bias(request)


class CapBackwardMissing(Right):
    name = "planted_cap_backward_missing"
    caught_by = (("soft_cap/small/float32", "d_query"), ("soft_cap/small/float32", "d_key"))

    def capped(self, request, logits):
        return _forward_of(super().capped(request, logits), logits)


class BiasDropped(Right):
    name = "planted_bias_dropped"
    caught_by = (("bias/small/float32", "output"), ("bias_keys/small/float32", "output"))

    def bias(self, request):
        return 0.0


class BiasScaled(Right):
    name = "planted_bias_scaled"
    caught_by = (("bias/small/float32", "output"),)

    def bias(self, request):
        return super().bias(request) * request.scale


class BiasRounded(Right):
    """A float32 bias in bfloat16."""

    name = "planted_bias_rounded"
    caught_by = (("bias_float32/small/float32", "output"),)

    def bias(self, request):
        return jnp.asarray(super().bias(request)).astype(jnp.bfloat16).astype(jnp.float32)


class BiasWithoutBlocking(Right):
    """-inf as the lowest finite number: an empty row is a mean again."""

    name = "planted_bias_without_blocking"
    caught_by = (("bias_blocks/small/float32", "output"),)

    def before(self, request):
        lowest = None if request.bias is None else jnp.maximum(request.bias, jnp.finfo(request.bias.dtype).min)
        return dataclasses.replace(request, bias=lowest)


class BiasGradientMissing(Right):
    name = "planted_bias_gradient_missing"
    caught_by = (("bias/small/float32", "d_bias"), ("bias_shared/small/float32", "d_bias"))

    def bias(self, request):
        return jax.lax.stop_gradient(super().bias(request))


class BiasGradientOfFirstSample(Right):
    """A shared bias whose gradient is not summed over the batch."""

    name = "planted_bias_gradient_of_first_sample"
    caught_by = (("bias_shared/small/float32", "d_bias"),)

    def bias(self, request):
        bias = super().bias(request)
        if request.bias is None or bias.shape[0] != 1:
            return bias
        rest = jnp.broadcast_to(jax.lax.stop_gradient(bias), (request.spec.B - 1, *bias.shape[1:]))
        return jnp.concatenate([bias, rest])


# ---------------------------------------------------------------- heads


class GroupsTiled(Right):
    """Head h reads key/value head h % K."""

    name = "planted_groups_tiled"
    caught_by = (("gqa/small/float32", "output"),)

    def repeated(self, request, x):
        return jnp.tile(x, (1, 1, request.spec.groups, 1))


class KeyGradientOfOtherHead(Right):
    name = "planted_key_gradient_of_other_head"
    caught_by = (("plain/small/float32", "d_key"), ("gqa/small/float32", "d_key"))

    def before(self, request):
        return dataclasses.replace(request, key=_forward_of(request.key, jnp.roll(request.key, 1, axis=2)))


class ValueDimTruncated(Right):
    name = "planted_value_dim_truncated"
    caught_by = (("value_dim/small/float32", "output"),)

    def output(self, request, weights, value, allowed):
        return super().output(request, weights, value.at[..., request.spec.D :].set(0), allowed)


# ---------------------------------------------------------------- softmax


class LogitsRounded(Right):
    """Logits in the dtype of the inputs."""

    name = "planted_logits_rounded"
    caught_by = (("plain/deep/bfloat16/large", "output"),)

    def grouped(self, request, query, key):
        return super().grouped(request, query, key).astype(request.spec.dtype).astype(jnp.float32)


class SoftmaxRounded(Right):
    """Softmax in the dtype of the inputs."""

    name = "planted_softmax_rounded"
    caught_by = (("plain/deep/bfloat16/large", "logsumexp"), ("plain/small/bfloat16", "logsumexp"))

    def logits(self, request, products, allowed):
        return super().logits(request, products, allowed).astype(request.spec.dtype)

    def softmax(self, request, logits, allowed):
        weights, logsumexp = super().softmax(request, logits, allowed)
        return weights.astype(jnp.float32), logsumexp.astype(jnp.float32)


class SinksDropped(Right):
    name = "planted_sinks_dropped"
    caught_by = (("sinks/small/float32", "output"), ("sinks_shared/small/float32", "output"))

    def sinks(self, request):
        return None


class SinksInNumerator(Right):
    """The share of the sinks goes to the last key."""

    name = "planted_sinks_in_numerator"
    caught_by = (("sinks/small/float32", "output"),)

    def softmax(self, request, logits, allowed):
        weights, logsumexp = super().softmax(request, logits, allowed)
        rest = 0 if request.sinks is None else 1 - weights.sum(-1)
        return weights.at[..., -1].add(rest), logsumexp


class OneSinkForAllHeads(Right):
    name = "planted_one_sink_for_all_heads"
    caught_by = (("sinks/small/float32", "output"), ("sinks_many/small/float32", "output"))

    def sinks(self, request):
        sinks = super().sinks(request)
        return None if sinks is None else sinks[:, :1]


class SinksGradientMissing(Right):
    name = "planted_sinks_gradient_missing"
    caught_by = (("sinks/small/float32", "d_softmax_aux"),)

    def sinks(self, request):
        return jax.lax.stop_gradient(super().sinks(request))


class SinksGradientRounded(Right):
    """The terms of the sinks' gradient are rounded to bfloat16 before they are summed."""

    name = "planted_sinks_gradient_rounded"
    caught_by = (("sinks/small/bfloat16/cancel", "d_softmax_aux"),)

    def sinks(self, request):
        sinks = super().sinks(request)
        if sinks is None:
            return None
        return _rounded_cotangent(jnp.broadcast_to(sinks, (request.spec.B, sinks.shape[1], request.spec.T, sinks.shape[3])))


@jax.custom_vjp
def _rounded_cotangent(x: Any) -> Any:
    return x


_rounded_cotangent.defvjp(lambda x: (x, None), lambda _, ct: (ct.astype(jnp.bfloat16).astype(ct.dtype),))


class LogsumexpWithSinks(Right):
    name = "planted_logsumexp_with_sinks"
    caught_by = (("sinks/small/float32", "logsumexp"),)

    def softmax(self, request, logits, allowed):
        weights, logsumexp = super().softmax(request, logits, allowed)
        sinks = self.sinks(request)
        return weights, logsumexp if sinks is None else jnp.logaddexp(logsumexp, jax.nn.logsumexp(sinks, axis=-1))


class LogsumexpOfEmptyRows(Right):
    """A finite number where there is nothing to sum."""

    name = "planted_logsumexp_of_empty_rows"
    caught_by = (("mask/small/float32", "logsumexp"),)

    def softmax(self, request, logits, allowed):
        weights, logsumexp = super().softmax(request, logits, allowed)
        return weights, jnp.maximum(logsumexp, -1e30)


class LogsumexpCotangentIgnored(Right):
    name = "planted_logsumexp_cotangent_ignored"
    caught_by = (("plain/small/float32", "d_query"),)

    def softmax(self, request, logits, allowed):
        weights, logsumexp = super().softmax(request, logits, allowed)
        return weights, jax.lax.stop_gradient(logsumexp)


class WeightsUnnormalised(Right):
    name = "planted_weights_unnormalised"
    caught_by = (("sinks/small/float32", "weights"),)

    def forward_native(self, request):
        out = Right.forward_native(self, request)
        weights = out.attention_weights
        return dataclasses.replace(out, attention_weights=weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-9))

    forward_native = forward(supports=Feature.ALL)(forward_native)


# ---------------------------------------------------------------- dropout


class DropoutIgnored(Right):
    name = "planted_dropout_ignored"
    caught_by = (("dropout/small/float32", "share of weights kept"),)

    def dropped(self, request, weights):
        return weights


class DropoutNotRescaled(Right):
    name = "planted_dropout_not_rescaled"
    caught_by = (("dropout/small/float32", "output"), ("dropout/small/float32", "mean over keys"))

    def dropped(self, request, weights):
        if request.dropout is None:
            return weights
        return super().dropped(request, weights) * (1 - request.dropout.probability)


class DropoutSharedByHeads(Right):
    name = "planted_dropout_shared_by_heads"
    caught_by = (("dropout/small/float32", "heads and rows that share a pattern"),)

    def dropped(self, request, weights):
        if request.dropout is None:
            return weights
        keep = jax.random.bernoulli(request.dropout.key, 1 - request.dropout.probability, weights.shape[2:])
        return jnp.where(keep, weights / (1 - request.dropout.probability), 0)


class DropoutBeforeWeights(Right):
    """The weights that are returned have been dropped already."""

    name = "planted_dropout_before_weights"
    caught_by = (("dropout/small/float32", "weights"),)

    def softmax(self, request, logits, allowed):
        weights, logsumexp = super().softmax(request, logits, allowed)
        return super().dropped(request, weights), logsumexp

    def dropped(self, request, weights):
        return weights


# ---------------------------------------------------------------- declarations


class WrongFallback(OperationImpl):
    """Right for all it declares, but what takes its place forgets the soft cap."""

    name = "planted_wrong_fallback"
    fallback = ("planted_cap_ignored",)
    caught_by = (("refuse/soft_cap", "plan"),)

    @forward(supports={Feature.CAUSAL, Feature.GRADIENT})
    def forward_native(self, request: AttentionRequest) -> Any:
        return Right(self.metadata).forward_native(request).attention_outputs


class NothingReturned(Right):
    """Declares the logsumexp and returns the output alone."""

    name = "planted_nothing_returned"
    caught_by = (("plain/small/float32", "raised"),)

    @forward(supports=Feature.ALL)
    def forward_native(self, request: AttentionRequest) -> Any:
        return Right(self.metadata).forward_native(request).attention_outputs


def _subclasses(cls: type) -> list[type]:
    return [found for child in cls.__subclasses__() for found in (child, *_subclasses(child))]


FAULTY: tuple[type[OperationImpl], ...] = (*_subclasses(Right), WrongFallback)
