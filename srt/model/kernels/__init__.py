"""The native CPU kernels and their builder."""
