"""The ``hot-hf`` command: a row per subcommand, with its module in ``hot_hf.commands``."""

from __future__ import annotations

import argparse
import logging
import sys
from importlib import import_module

COMMANDS = {
    "demo": ("run_demo", "fine-tune twice from one seed, exact and with HOT, and compare"),
    "doctor": ("doctor", "show devices and backends, and check every operator on them"),
    "estimate": (
        "estimate_memory",
        "predict training memory from a configuration, and the largest batch",
    ),
    "fit": ("fit_memory", "choose what each block keeps, so that a step fits in so much memory"),
    "plan": ("show_plan", "show a plan that was selected by budget, as a table and a plot"),
}


def _module(name: str):
    return import_module(f"hot_hf.commands.{name}")


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; user errors end with a message and status 2, not a traceback."""
    parser = argparse.ArgumentParser(prog="hot-hf", description="Hadamard-based optimized training for Hugging Face.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    argv = sys.argv[1:] if argv is None else argv
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in argv[:1]:  # import only what runs: `hot-hf --help` needs no transformers
            _module(module).add_arguments(command)
    args = parser.parse_args(argv)
    # PEFT imports bitsandbytes, which complains on CPUs with bfloat16 of a package that its 4-bit products could use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return _module(COMMANDS[args.command][0]).run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"hot-hf {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
