"""Known machines and models, so that a roofline needs no file: `h100-llama-8b` is one of each.

Figures of the makers' data sheets: dense 16-bit arithmetic without sparsity, and memory bandwidth; in decimal units.
Model shapes are those of the published configurations.
"""

from __future__ import annotations

from sapwood.simulate.cost import Hardware, ModelShape, ProfileError, Roofline, Scheduling

# name: (operations a second, bytes a second, bytes)
MACHINES = {
    "l4": (121e12, 300e9, 24e9),
    "a100": (312e12, 2039e9, 80e9),
    "h100": (989e12, 3350e9, 80e9),
    "h200": (989e12, 4800e9, 141e9),
}

MODELS = {
    "llama-1b": ModelShape(
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=128_256,
        context_length=131_072,
    ),
    "llama-8b": ModelShape(
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        context_length=131_072,
    ),
    "qwen3-8b": ModelShape(
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151_936,
        context_length=40_960,
    ),
    "qwen3-32b": ModelShape(
        hidden_size=5120,
        intermediate_size=25_600,
        num_layers=64,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151_936,
        context_length=40_960,
    ),
}

# Typical of this scheduler on a server's core: see benchmarks/scheduler_overhead.py.
SCHEDULING = Scheduling(step=0.0003, row=0.00001, request=0.003)


def profile_by_name(name: str) -> Roofline:
    """A machine and a model with a dash between.  Raises ProfileError with the known names."""
    machine, _, model = name.partition("-")
    if machine not in MACHINES or model not in MODELS:
        raise ProfileError(
            f"--profile {name}: no such file, nor a known machine ({', '.join(MACHINES)}) "
            f"with a known model ({', '.join(MODELS)}), as in h100-llama-8b"
        )
    flops, moved, memory = MACHINES[machine]
    hardware = Hardware(name=machine, flops_per_second=flops, bytes_per_second=moved, memory_bytes=memory)
    return Roofline(hardware=hardware, model=MODELS[model], scheduling=SCHEDULING)
