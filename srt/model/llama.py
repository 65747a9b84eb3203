"""The Llama and Gemma families (Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3) in plain torch, over a paged KV pool.

    x = embedding[token]
    for each layer:   x += O . attention(rotate(QKV . norm(x)))        K and V go to their slots in the pool
                      x += Down . (silu(Gate . norm(x)) * Up . norm(x))
    logits = head . norm(x)                                            only of the tokens that are asked for

What tells the families apart (biases, q/k norm, windows, rotary scaling, Gemma's norms behind the branches, soft caps)
comes from the configuration alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from srt.model.attention import AttentionPlan, TorchAttention
from srt.model.config import ModelConfig
from srt.model.interface import ForwardBatch
from srt.model.kv_pool import TorchKVPool
from srt.model.rope import inverse_frequencies, rotate, rotation
from srt.model.weights import LayerWeights, Weights
from srt.plan import Int32Array


class TorchModel:
    """Implements `srt.model.interface.LanguageModel` with the torch attention backend."""

    def __init__(self, config: ModelConfig, weights: Weights, kv: TorchKVPool) -> None:
        self.config = config
        self.kv = kv
        self._weights = weights
        self._attention = TorchAttention(config, kv)
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._window_frequencies = inverse_frequencies(config.window_rope or config.rope, config.head_dim)
        # Rounded as a weight is, before it is used.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype)

    def forward(self, batch: ForwardBatch, logit_tokens: Int32Array, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `LanguageModel.forward`."""
        logits = self.project(self.forward_hidden(batch, logit_tokens))
        return logits if out is None else out.copy_(logits)

    @torch.inference_mode()
    def forward_hidden(self, batch: ForwardBatch, tokens: Int32Array) -> torch.Tensor:
        """See `LanguageModel.forward_hidden`."""
        plans = self._attention.plan(batch)
        positions = torch.from_numpy(batch.positions)
        turn, window_turn = rotation(self._frequencies, positions), rotation(self._window_frequencies, positions)
        slots = torch.from_numpy(batch.out_slots).long()
        x = self._weights.embedding[torch.from_numpy(batch.token_ids).long()] * self._embedding_scale
        for index, layer in enumerate(self._weights.layers):
            window = self.config.sliding_windows[index]
            turned = turn if window is None else window_turn
            branch = self._attend(layer, index, self._norm(x, layer.input_norm), turned, slots, plans[window])
            x = x + self._normed_branch(branch, layer.attention_post_norm)
            x = x + self._normed_branch(self._mlp(layer, self._norm(x, layer.mlp_norm)), layer.mlp_post_norm)
        return self._norm(x[torch.from_numpy(tokens).long()], self._weights.norm)

    @torch.inference_mode()
    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `LanguageModel.project`.  With bfloat16 weights the logits are rounded to bfloat16 on their way."""
        logits, cap = F.linear(hidden, self._weights.lm_head).float(), self.config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.config.unit_offset_norms:
            # Of these families the product too is in float32: 1 + weight has more digits than a bfloat16 holds.
            normed = F.rms_norm(x.float(), (x.shape[-1],), None, self.config.rms_norm_eps)
            return (normed * (1.0 + weight.float())).to(x.dtype)
        # Statistics are in float32 inside, whatever the dtype.
        return F.rms_norm(x, (x.shape[-1],), None, self.config.rms_norm_eps) * weight

    def _normed_branch(self, branch: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return branch if weight is None else self._norm(branch, weight)

    def _attend(
        self,
        layer: LayerWeights,
        index: int,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        heads = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.config.head_dim)
        qk, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        rotated = rotate(qk, *turn)
        q, k = rotated[:, :num_heads], rotated[:, num_heads:]
        k, v = self.kv.write(index, slots, k, v)
        return F.linear(self._attention.forward(q, k, v, index, plan), layer.o, layer.o_bias)

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        active = F.silu(gate) if self.config.activation == "silu" else F.gelu(gate, approximate="tanh")
        return F.linear(active * up, layer.down, layer.down_bias)
