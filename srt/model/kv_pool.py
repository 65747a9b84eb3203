"""The KV pool as torch tensors: K and V of every page, for all layers.

    k, v:  [layers, pages, page_size, kv_heads, head_dim]

In this order ("NHD") the tokens of neighbouring pages follow one another at one stride, so that attention can
take a run of pages as one view of [tokens, kv_heads, head_dim], whatever the page size, and copies nothing.
"""

from __future__ import annotations

import torch

from srt.model.config import ModelConfig
from srt.plan import Int32Array


class TorchKVPool:
    """Implements `srt.model.interface.KVPool`.  The memory is reserved at once and filled by the system when used."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, num_pages: int, page_size: int) -> None:
        shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.k = torch.empty(shape, dtype=dtype)
        self.v = torch.empty(shape, dtype=dtype)
        self.page_bytes = 2 * self.k[:, 0].nbytes if num_pages else 0
        # Other versions, and other instruction sets, round otherwise.
        self.layout = f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"

    def slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer by token slot (page * page_size + offset): views [slots, kv_heads, head_dim]."""
        return self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1)

    def copy_rows(self, copies: Int32Array) -> None:
        """`copies` int32 [C,3]: (source page, destination page, rows), carried out in order."""
        for source, destination, rows in copies.tolist():
            for pool in (self.k, self.v):
                pool[:, destination, :rows] = pool[:, source, :rows]

    def read_page(self, page: int) -> bytes:
        """The exact bytes of a page: K of all layers, then V of all layers."""
        both = torch.stack([self.k[:, page], self.v[:, page]])
        return both.view(torch.uint8).numpy().tobytes()

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        """The inverse of `read_page`.  Raises ValueError when the length is not a page's."""
        shape = (2, *self.k[:, page].shape)
        expected = 2 * self.k[:, page].numel() * self.k.element_size()
        if len(data) != expected:
            raise ValueError(f"a page holds {expected} bytes, got {len(data)}")
        both = torch.frombuffer(bytearray(data), dtype=self.k.dtype).view(shape)
        self.k[:, page], self.v[:, page] = both[0], both[1]
