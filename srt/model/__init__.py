"""Everything that touches torch: loading, layers, attention, sampling, KV pool, forward worker."""
