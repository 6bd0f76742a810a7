"""Parts of scripts/gradient_fidelity.py."""
