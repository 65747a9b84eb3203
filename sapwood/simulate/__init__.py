"""The trace-driven simulator: the real loop, core, tree and pool under a virtual clock and a cost model."""
