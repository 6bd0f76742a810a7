"""Parts of benchmarks/gradient_fidelity.py."""
