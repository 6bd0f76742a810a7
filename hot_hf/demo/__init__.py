"""``hot-hf demo``: the same fine-tuning twice, exact and with HOT. Needs the packages of the ``demo`` extra."""
