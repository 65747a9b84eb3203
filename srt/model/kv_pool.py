"""The KV pool as torch tensors: K and V of every page, for all layers.

    k, v:  [layers, pages, page_size, kv_heads, head_dim]

In this order ("NHD") the tokens of neighbouring pages follow one another at one stride, so that attention can
take a run of pages as one view of [tokens, kv_heads, head_dim], whatever the page size, and copies nothing.

In 8 bits each vector of K and of V has a scale, [layers, pages, page_size, kv_heads], and attention takes a copy in the
model's dtype of the slots that it reads.
"""

from __future__ import annotations

import torch

from srt.model.config import ModelConfig
from srt.plan import Int32Array

MOST = 127


class TorchKVPool:
    """Implements `srt.model.interface.KVPool`.  The memory is reserved at once and filled by the system when used."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        num_pages: int,
        page_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype`: that of the model.  `kv_dtype`: that of the pool where it is another: bfloat16 or int8."""
        shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        stored = kv_dtype or dtype
        self.k = torch.empty(shape, dtype=stored)
        self.v = torch.empty(shape, dtype=stored)
        self.scales: tuple[torch.Tensor, ...] = ()
        if stored == torch.int8:
            self.scales = (torch.empty(shape[:-1]), torch.empty(shape[:-1]))
        self.page_bytes = sum(pool[:, 0].nbytes for pool in self._all()) if num_pages else 0
        # Other versions, and other instruction sets, round otherwise.
        kind = "" if stored == dtype else f" {str(stored).removeprefix('torch.')}"
        self.layout = f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}{kind}"

    def _all(self) -> tuple[torch.Tensor, ...]:
        return (self.k, self.v, *self.scales)

    def slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer by slot (page * page_size + offset), as stored: views [slots, kv_heads, head_dim]."""
        return self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1)

    def read(self, layer: int, keys: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some token slots in the model's dtype, [n, kv_heads, head_dim]; views where they are stored so."""
        k, v = (pool[keys] for pool in self.slots(layer))
        if self.scales:
            scale_k, scale_v = (scale[layer].flatten(0, 1)[keys] for scale in self.scales)
            return self._widen(k, scale_k), self._widen(v, scale_v)
        return k.to(self.dtype), v.to(self.dtype)

    def write(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K and V [n, kv_heads, head_dim] of the tokens at `slots`; returns them as `read` would."""
        kept = []
        for place, fresh in enumerate((k, v)):
            pool = self.slots(layer)[place]
            if self.scales:
                scale = fresh.float().abs().amax(dim=-1) / MOST
                stored = (fresh.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round()
                stored = stored.nan_to_num(0.0).to(torch.int8)
                self.scales[place][layer].flatten(0, 1).index_copy_(0, slots, scale)
                kept.append(self._widen(stored, scale))
            else:
                stored = fresh.to(pool.dtype)
                kept.append(stored.to(self.dtype))
            pool.index_copy_(0, slots, stored)
        return kept[0], kept[1]

    def _widen(self, stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (stored.float() * scale[..., None]).to(self.dtype)

    def copy_rows(self, copies: Int32Array) -> None:
        """`copies` int32 [C,3]: (source page, destination page, rows), carried out in order."""
        for source, destination, rows in copies.tolist():
            for pool in self._all():
                pool[:, destination, :rows] = pool[:, source, :rows]

    def read_page(self, page: int) -> bytes:
        """The exact bytes of a page: K of all layers, then V of all layers, then the scales of both where there are."""
        return b"".join(pool[:, page].contiguous().view(torch.uint8).numpy().tobytes() for pool in self._all())

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        """The inverse of `read_page`.  Raises ValueError when the length is not a page's."""
        expected = sum(pool[:, page].numel() * pool.element_size() for pool in self._all())
        if len(data) != expected:
            raise ValueError(f"a page holds {expected} bytes, got {len(data)}")
        whole, begin = bytearray(data), 0
        for pool in self._all():
            part = pool[:, page]
            pool[:, page] = torch.frombuffer(whole, dtype=pool.dtype, count=part.numel(), offset=begin).view(part.shape)
            begin += part.numel() * part.element_size()
